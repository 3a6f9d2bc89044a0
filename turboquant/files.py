"""Files that are written whole or not at all, and the format of all files of tensors: safetensors.

    8 bytes    uint64: bytes of the header
    header     JSON, padded with spaces: {name: {"dtype", "shape", "data_offsets"}}, and under "__metadata__" "format",
               "turboquant" (a JSON text with all other data) and "crc32" of that text
    tensors    little-endian, in the header's order, each aligned to 64 bytes in the file. Safetensors allows no holes:
               if NAME does not end at a multiple of 64, a tensor "pad.NAME" of fewer than 64 zeros follows it

Before anything is allocated, a header is checked for contradictions and against the size of the file.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tensor", "array_bytes", "cache_folder", "crc32", "existing_file", "file_name", "file_to_write",
           "header_of", "layout", "read_arrays", "read_header", "tensor", "write_arrays",
           "write_tensors", "write_whole"]  # fmt: skip

_ALIGNMENT = 64
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors
_MOST_EXTENTS = 8  # the most dimensions of a tensor
_OLD_CODES = b"TQCODES\0"  # the first bytes of a file of codes of version 1
_READS_VERSION_1 = "commit 14a37f9 of turboquant reads; make the file anew"
_KINDS = dict(U8="u1", F16="<f2", BF16="<u2", F32="<f4", F64="<f8", I32="<i4", U32="<u4", I64="<i8")
_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in _KINDS.items()}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}


def file_name(path: object, argument: str = "path") -> str:
    """Returns `path` as text. TypeError, which names the argument, for what is no path: `open` would take a number as
    an open file and close it."""
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"`{argument}` must be a str or a path, got {path!r:.80}") from None


@contextmanager
def path_called(argument: str) -> Iterator[None]:
    """Replaces `path` in a loader's errors by the caller's argument or option."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(str(error).replace("`path`", argument, 1)) from None


def existing_file(path: object, what: str) -> str:
    """Returns `path` as text. FileNotFoundError, which says that `path` must be `what`, if it is no file."""
    name = file_name(path)
    if not os.path.isfile(name):
        there = os.path.exists(name)
        why = "a folder" if os.path.isdir(name) else "which is no plain file" if there else "which is not there"
        raise FileNotFoundError(f"`path` must be {what}, got {name!r}, {why}")
    return name


def file_to_write(path: object, argument: str = "path") -> str:
    """Returns `path` as text. IsADirectoryError for a folder, FileNotFoundError if the file's folder does not exist;
    both name the argument."""
    name = file_name(path, argument)
    if os.path.isdir(name):
        raise IsADirectoryError(f"`{argument}` must be a file, got {name!r}, a folder")
    if not name or not os.path.isdir(os.path.dirname(name) or "."):
        raise FileNotFoundError(f"`{argument}` must be a file in a folder that is there, got {name!r}")
    return name


def write_whole(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], parts: Iterable[bytes | memoryview]) -> None:
    """Writes `parts`, one after the other, to a file beside `path` and then moves it there: after a crash, a full disk
    or an exception, `path` is as it was. If `path` is a link, the file that it names is written.

    Raises IsADirectoryError for a folder, FileNotFoundError if the file's folder does not exist, and OSError, which
    names `path`, if the file cannot be written."""
    target = file_to_write(path)
    if os.path.islink(target):
        target = os.path.realpath(target)
    temporary = f"{target}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            if os.path.exists(target):  # a replaced file keeps its permissions
                shutil.copymode(target, temporary)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:  # no caller knows the temporary file
            raise OSError(error.errno, error.strerror, target) from error
        raise


# ---- tensors ----


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. dtype: as safetensors names it. start: its first byte, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of its numbers. NumPy has no bfloat16: such numbers are read as the integers of their bits."""
        return _NUMPY[self.dtype]

    @property
    def nbytes(self) -> int:
        size = self.numpy_dtype.itemsize
        for extent in self.shape:  # Python's integers do not overflow, whatever a file claims
            size *= extent
        return size


def tensor(array: NDArray[Any]) -> Tensor:
    return Tensor(_NAMES[array.dtype], array.shape)


def array_bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def crc32(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """Returns the CRC-32 of all parts, one after the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def layout(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with their places, and padding between them."""
    placed, at = {}, 0
    for name, tensor in tensors.items():
        placed[name] = Tensor(tensor.dtype, tuple(tensor.shape), at)
        at += tensor.nbytes
        if pad := -at % _ALIGNMENT:
            placed[f"pad.{name}"] = Tensor("U8", (pad,), at)
            at += pad
    return placed


def header_of(form: str, meta: Mapping[str, Any], placed: Mapping[str, Tensor]) -> bytes:
    """Returns the bytes in front of the tensors that `layout` placed."""
    text = json.dumps(meta, sort_keys=True, allow_nan=False)
    entries: dict[str, Any] = {"__metadata__": {"format": form, "turboquant": text, "crc32": _sum_of(text)}}
    for name, tensor in placed.items():
        offsets = [tensor.start, tensor.start + tensor.nbytes]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def write_tensors(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    form: str,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Iterable[memoryview]],
) -> None:
    """Writes a file of the format `form`, whole or not at all. parts: bytes of each tensor, in pieces."""
    placed = layout(tensors)

    def pieces() -> Iterable[bytes | memoryview]:
        yield header_of(form, meta, placed)
        for name, tensor in placed.items():
            if name in tensors:
                yield from parts[name]
            else:
                yield bytes(tensor.nbytes)

    write_whole(path, pieces())


def read_header(file: BufferedReader | BytesIO, form: str) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """Returns (metadata, tensors, byte at which the header ends) of a file that `write_tensors` made, and leaves the
    file at that byte. ValueError for any other file, whatever is in it, and if the tensors do not fill the file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    opening = file.read(8)
    length = int.from_bytes(opening, "little")
    if opening == _OLD_CODES:
        raise ValueError(f"it has codes of format version 1, which {_READS_VERSION_1}")
    if len(opening) < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError("it is not one that turboquant wrote, or it is truncated")
    try:
        entries = json.loads(file.read(length))
        about = entries.pop("__metadata__")
        text, file_form = about["turboquant"], about["format"]
        if file_form == form and about["crc32"] != _sum_of(text):
            raise ValueError("its header is damaged")
        meta = json.loads(text) if file_form == form else {}
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeError, json.JSONDecodeError):
        raise ValueError("it is not one that turboquant wrote, or its header is damaged") from None
    if file_form != form:
        old = file_form == f"{form[:-1]}1" != form
        which = f", which {_READS_VERSION_1}" if old else ""
        raise ValueError(f"its format must be {form}, got {file_form!r:.80}{which}")
    if not isinstance(meta, dict):
        raise ValueError("its header is no mapping")
    tensors: dict[str, Tensor] = {}
    at, last = 0, ""
    for name, entry in entries.items():
        tensor = _entry(name, entry, at)
        if name != f"pad.{last}" or tensor != Tensor("U8", (-at % _ALIGNMENT,), at):
            tensors[name] = tensor
        at, last = at + tensor.nbytes, name
    if 8 + length + at != size:
        raise ValueError(f"it must have {8 + length + at} bytes, got {size}")
    return meta, tensors, 8 + length


def _sum_of(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _entry(name: str, entry: Any, at: int) -> Tensor:
    """Returns the tensor of an entry of the header. ValueError unless it begins at byte `at`."""
    try:
        tensor, offsets = Tensor(entry["dtype"], tuple(entry["shape"]), at), entry["data_offsets"]
        right = len(tensor.shape) <= _MOST_EXTENTS and all(type(n) is int and n >= 0 for n in tensor.shape)
        right = right and offsets == [at, at + tensor.nbytes]
    except (KeyError, TypeError):
        right = False
    if not right:
        raise ValueError(f"`{name:.80}` must have a type, a shape and a place that agree")
    return tensor


# ---- a few small arrays, held in memory whole ----


def write_arrays(
    path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    form: str,
    meta: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any] | list[NDArray[Any]]],
) -> None:
    """Writes a file of the format `form`, whole or not at all, with the CRC-32 of each array under "crc32". An array
    may be given in parts along its first dimension."""
    pieces = {name: array if isinstance(array, list) else [array] for name, array in arrays.items()}
    tensors = {name: Tensor(_NAMES[each[0].dtype], (sum(map(len, each)), *each[0].shape[1:]))
               for name, each in pieces.items()}  # fmt: skip
    parts = {name: list(map(array_bytes, each)) for name, each in pieces.items()}
    sums = {name: crc32(each) for name, each in parts.items()}
    write_tensors(path, form, {**meta, "crc32": sums}, tensors, parts)


def read_arrays(path: str | os.PathLike[str], form: str, what: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Returns (metadata, arrays) of a file that `write_arrays` made. FileNotFoundError, which says that `path` must be
    `what`, if there is none; ValueError if it is damaged or another kind of file."""
    name = existing_file(path, what)
    with open(name, "rb") as file:
        meta, tensors, start = read_header(file, form)
        sums = meta.get("crc32")
        arrays: dict[str, NDArray[Any]] = {}
        for name, tensor in tensors.items():
            if not isinstance(sums, dict) or name not in sums:
                raise ValueError(f"the checksum of `{name:.80}` is missing")
            file.seek(start + tensor.start)
            data = bytearray(file.read(tensor.nbytes))
            if crc32([data]) != sums[name]:
                raise ValueError(f"`{name}` is damaged")
            arrays[name] = np.frombuffer(data, tensor.numpy_dtype).reshape(tensor.shape)
    return meta, arrays


def cache_folder() -> Path | None:
    """Returns the folder where profiles of models are kept, or None if they are not kept."""
    if (folder := os.environ.get("TURBOQUANT_CACHE")) is not None:
        return Path(folder).expanduser() if folder else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turboquant"
