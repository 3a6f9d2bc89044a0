"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable

__all__ = ["write_whole"]


def write_whole(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], parts: Iterable[bytes | memoryview]) -> None:
    """Writes `parts`, one after the other, to a file beside `path` and moves it there: a crash, a full disk or an
    exception leaves what was at `path` as it was. Where `path` is a link, the file that it names is written."""
    target = os.fsdecode(path)
    if os.path.islink(target):
        target = os.path.realpath(target)
    temporary = f"{target}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            if os.path.exists(target):  # one that others may not read stays so
                shutil.copymode(target, temporary)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
