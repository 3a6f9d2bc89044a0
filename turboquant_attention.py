"""The command `turboquant`, also as ``python -m turboquant_attention``.

Other distributions on PyPI install a package `turboquant` too. pip lets a later one replace files of an earlier one,
and removes them with it, without a word. So the command starts here, in a module that is ours by name, and compares
the package with the list of files that was installed (RECORD) before it imports any of it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from importlib.metadata import Distribution, PackagePath, distributions, packages_distributions
from pathlib import Path

__all__ = ["damage", "main"]

DISTRIBUTION, PACKAGE = "turboquant-attention", "turboquant"


def damage(folder: Path | None = None) -> tuple[str, bool]:
    """(What is wrong with the files of the package and what to do about it, whether it cannot be used).

    folder: where this module and the package lie. An installation without a RECORD, such as a clone's, is not looked
    at: ("", False).
    """
    folder = folder or Path(__file__).parent
    ours = next((found for found in distributions(path=[str(folder)]) if _name(found) == DISTRIBUTION), None)
    if ours is None or not ours.read_text("RECORD"):
        return "", False
    listed = [file for file in ours.files or [] if file.parts[0] == PACKAGE and file.suffix != ".pyc"]
    missing = [file for file in listed if not folder.joinpath(file).is_file()]
    changed = [file for file in listed if file not in missing and not _is_as_installed(folder, file)]
    if not missing and not changed:
        return "", False
    others = sorted({name for name in packages_distributions().get(PACKAGE, []) if _normal(name) != DISTRIBUTION})
    first = (missing or changed)[0]
    count = f"{len(missing) + len(changed)} of the {len(listed)} files of {folder / PACKAGE}"
    text = f"{count} are missing or are not those of {DISTRIBUTION} {ours.version} ({first} is the first)"
    if others:
        text += f", because {' and '.join(others)} installs a package `{PACKAGE}` too"
    remove = f"pip uninstall {' '.join([*others, DISTRIBUTION])}, then pip install {DISTRIBUTION}"
    how = remove if others else f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
    return f"{text}: {how}", bool(missing or others)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(found: Distribution) -> str:
    return _normal(found.metadata["Name"] or "")


def _is_as_installed(folder: Path, file: PackagePath) -> bool:
    """Of Python files alone: packagers may strip libraries."""
    if file.suffix != ".py" or file.hash is None or file.hash.mode != "sha256":
        return True
    digest = hashlib.sha256(folder.joinpath(file).read_bytes()).digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    text, fails = damage()
    if text:
        print(f"turboquant: {text}", file=sys.stderr)
    if fails:
        return 1
    from turboquant.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
