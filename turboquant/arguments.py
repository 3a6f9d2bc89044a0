"""Checks of arguments that several modules share. Imports neither NumPy nor torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from operator import index
from pathlib import Path
from typing import Any, TextIO

__all__ = ["BOUNDS", "STANDARD_OUTPUT", "bounded", "check_options", "check_output", "integer", "integer_in", "listed",
           "quoted", "standard_output"]  # fmt: skip

_MOST = 2**31 - 1

#: The least and the greatest value of each integer that a request or a file can set, by its name in errors. `bounded`
#: checks them before anything is allocated. docs/security.md has the same table.
BOUNDS = {
    "crop: `tokens`": (-_MOST, _MOST),
    "batch_repeat_interleave: `repeats`": (1, 2**16),
    "pack: `max_tokens`": (0, 2**30 - 1),
    "pack: `sinks`": (0, 2**30 - 1),
    "pack: `window`": (0, 2**30 - 1),
    "attend: `sliding_window`": (0, _MOST),
    "append_attend: `sliding_window`": (0, _MOST),
    "schedule: `sliding_window`": (0, _MOST),
    "Index: `dim`": (1, 4096),
    "Index: `bits`": (1, 8),
    "Index: `seed`": (0, 2**63 - 1),
    "Index: `lists`": (0, 2**20),
    "search: `k`": (1, 2**20),
    "search: `factor`": (1, 1000),
    "search: `threads`": (0, 256),
    "range_search: `threads`": (0, 256),
    "codec: `start`": (0, _MOST),
    "codec: `page`": (0, 2**24),
    "codec: `tokens`": (1, _MOST),
    "Codes: `vectors`": (0, 2**40),
    "load: `exponent`": (0, 128),
    "load: `factor`": (1, 1000),
    "load: `next_id`": (0, 2**63),
    "load: `first_id`": (0, 2**63 - 1),
    "cache file: `positions`": (0, _MOST),
    "cache file: `kv_heads`": (1, 2**16),
    "cache file: `head_dim`": (1, 512),
    "cache file: `padding`": (0, _MOST),
    "cache file: `released`": (0, _MOST),
    "cache file: `sliding_windows`": (0, _MOST),
    "cache file: `moments`": (0, 2**16),
    "Moments: `tokens`": (1, 2**63 - 1),
    "Calibration: `tokens`": (0, 2**63 - 1),
    "Calibration: `seed`": (0, 2**63 - 1),
    "Calibration: `windows`": (0, _MOST),
    "Trial: `window`": (0, _MOST),
    "config.json: `num_hidden_layers`": (1, 4096),
    "config.json: `hidden_size`": (1, 2**20),
    "config.json: `num_attention_heads`": (1, 2**16),
    "config.json: `num_key_value_heads`": (0, 2**16),
    "config.json: `head_dim`": (0, 2**16),
    "config.json: `sliding_window`": (-1, _MOST),
    "config.json: `attention_chunk_size`": (0, _MOST),
    "config.json: `num_kv_shared_layers`": (0, 4096),
    "config.json: `kv_lora_rank`": (0, 2**16),
    "config.json: `qk_rope_head_dim`": (0, 2**16),
    "evaluate: `chunk`": (1, _MOST),
    "evaluate: `batch`": (1, 2**16),
    "evaluate: `generate`": (0, 2**20),
    "text_windows: `windows`": (1, 2**20),
    "text_windows: `length`": (2, 2**20),
    "calibrate: `sensitivity_batches`": (1, 2**20),
    "`batch_size`": (1, 2**16),
    "embed: `memory`": (2**20, 2**50),
    "`seed`": (0, 2**63 - 1),
    "patch: `tokens`": (1, _MOST),
    "calc: --batch": (1, _MOST),
    "calc: --tokens": (1, _MOST),
    "calibrate: --tokens": (1, _MOST),
    "calibrate: --seed": (0, 2**63 - 1),
    "chat: --seed": (0, 2**63 - 1),
    "demo: --prompt-tokens": (2, _MOST),
    "demo: --tokens": (3, 400),
    "demo: --seed": (0, 2**63 - 1),
    "doctor: --tokens": (1, _MOST),
    "chat: --tokens": (1, 2**20),
    "eval: --batch": (1, 2**16),
    "eval: --generate": (0, 2**20),
    "eval: --proteins": (1, _MOST),
    "eval: --windows": (1, 2**20),
    "eval: --length": (2, 2**20),
    "esm-scan: --batch": (1, 2**16),
    "esm-embed: --memory": (1, 2**30),
    "esm-embed: --window": (2, 2**20),
    "esm-embed: --overlap": (0, 2**20),
    "index build: --bits": (1, 8),
    "index build: --lists": (0, 2**20),
    "index build: --seed": (0, 2**63 - 1),
    "index search: -k": (1, 2**20),
    "index search: --factor": (1, 1000),
    "index search: --probe": (1, 2**20),
    "index search: --threads": (0, 256),
}


def quoted(value: Any) -> str:
    """Returns a value as error messages show it: its repr, or only the name of its type if it is or holds arrays or
    tensors, whose numbers would fill the screen."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return type(value).__name__ if any(getattr(x, "ndim", 0) for x in (value, *parts)) else repr(value)


def integer(value: Any, what: str) -> int:
    """Returns an integer of any type, such as NumPy's or a tensor of one number, as an int. TypeError, which calls it
    `what`, for any other object, also for True and False."""
    try:
        return index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {quoted(value)}") from None


def integer_in(value: Any, what: str, low: int, high: int) -> int:
    """As `integer`, and raises ValueError for a number that is not in low..high."""
    number = integer(value, what)
    if not low <= number <= high:
        raise ValueError(f"{what} must be in {low}..{high}, got {number}")
    return number


def bounded(what: str, value: Any) -> int:
    """As `integer_in`, with the BOUNDS of `what`. Errors name an option of a command without the command."""
    return integer_in(value, what.rpartition(": ")[2] if ": -" in what else what, *BOUNDS[what])


def listed(values: Any, wants: str) -> list[Any]:
    """Returns the entries of a list, an array or another iterable. TypeError, which begins with `wants`, for anything
    else."""
    try:
        entries = iter(values)
    except TypeError:
        raise TypeError(f"{wants}, got {quoted(values)}") from None
    return list(entries)


def check_options(command: str, chosen: object) -> None:
    """Checks the integer options of a command that were given. chosen: has the options as attributes."""
    for what in BOUNDS:
        name, _, option = what.rpartition(": -")
        value = getattr(chosen, option.strip("-").replace("-", "_"), None) if name == command else None
        if value is not None:
            bounded(what, value)


# ---- files that commands write ----

STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
# Names of open files, which must not be replaced: all programs would lose /dev/stdout, for example.
STREAMS = ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def standard_output() -> TextIO:
    """Returns standard output for what else would go to a file: in UTF-8, as files are, whatever the locale."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    return sys.stdout


def check_output(path: str | None, option: str, others: Mapping[str, str | None], moved: bool = False) -> None:
    """Checks that an output file can be written and is none of `others`, whose keys are their names in errors.

    moved: it is written as FILE.part, which then replaces FILE. Both are checked, and neither may be a device.
    """
    if path is None:
        return
    if moved and (path == "-" or os.path.abspath(path).startswith(STREAMS)):
        raise ValueError(f"{option} must be a file that can be replaced, got {path!r}")
    wants = f"{option} must be a file in a folder that can be written to, got {path!r}"
    for written in (path, f"{path}.part") if moved else (path,):
        if not path or not os.access(Path(written).absolute().parent, os.W_OK):
            raise ValueError(wants)
        if path.endswith(os.sep) or os.path.isdir(written):
            raise ValueError(f"{wants}: {written!r} is a folder")
        if os.path.exists(written) and not (os.path.isfile(written) if moved else os.access(written, os.W_OK)):
            raise ValueError(f"{option} must be a file that can be written, got {path!r}: {written!r} is none")
        for name, other in others.items():
            if other is not None and _same_file(written, other):
                raise ValueError(f"{option} must be another file than {name}, got {path!r}")


def _same_file(one: str, other: str) -> bool:
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)
