"""The rows of an index in segments, and their file."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..files import write_whole

ROWS = 16_384  # of a segment
FORMAT = "turboquant-index-1"
_TYPES = {"U8": np.uint8, "F32": np.float32, "I64": np.int64}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}


@dataclass
class Segment:
    """Rows that were added together; never changed but for `allowed`, which removal clears."""

    codes: NDArray[np.uint8]  # [n, row bytes]
    scales: NDArray[np.float32]  # [n]
    offsets: NDArray[np.float32] | None  # [n]: <mean, x - mean>, and for l2 less half the squared norm
    ids: NDArray[np.int64] | int  # [n], or the first of consecutive ones
    allowed: NDArray[np.uint8] | None = None  # [n], 0 where removed; None: all are there

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def all_ids(self) -> NDArray[np.int64]:
        if isinstance(self.ids, np.ndarray):
            return self.ids
        return np.arange(self.ids, self.ids + len(self), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        arrays = (self.codes, self.scales, self.offsets, self.ids, self.allowed)
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def write(path: str | os.PathLike[str], meta: dict[str, Any], arrays: dict[str, list[NDArray[Any]]]) -> None:
    """A safetensors file; an array is given in parts along its first dimension, and starts at a multiple of 64."""
    entries: dict[str, Any] = {}
    parts: list[memoryview] = []
    at, checksum = 0, 0
    for name, pieces in arrays.items():
        start = at
        for piece in pieces:
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            checksum = (checksum * 31 + _core.checksum(data)) % 2**64
            parts.append(data)
            at += len(data)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        entries[name] = {"dtype": _NAMES[pieces[0].dtype], "shape": shape, "data_offsets": [start, at]}
        if pad := -at % 64:  # the format allows no holes
            entries[f"pad.{name}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [at, at + pad]}
            parts.append(memoryview(bytes(pad)))
            at += pad
    sizes = {name: [len(piece) for piece in pieces] for name, pieces in arrays.items()}
    meta = {**meta, "format": FORMAT, "checksum": str(checksum), "parts": sizes}
    header = json.dumps({"__metadata__": {"turboquant": json.dumps(meta)}, **entries}).encode()
    header += b" " * (-(len(header) + 8) % 64)
    write_whole(path, [len(header).to_bytes(8, "little") + header, *parts])


def _header(path: str, data: memoryview) -> tuple[dict[str, Any], dict[str, Any], int]:
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if not 2 <= size <= min(len(data) - 8, 100_000_000):
        raise ValueError("the header must lie within the file")
    entries = json.loads(bytes(data[8 : 8 + size]))
    meta = json.loads(entries.pop("__metadata__")["turboquant"])
    if meta["format"] != FORMAT:
        raise ValueError(f"the format must be {FORMAT}, got {meta['format']!r}")
    return meta, entries, 8 + size


def read(path: str | os.PathLike[str], mapped: bool) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """(metadata, arrays) of a file that `write` made. Sizes are checked against the file, bytes are not (`verify`)."""
    name = os.fspath(path)
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if mapped and size:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        else:
            data = memoryview(bytearray(file.read()))
    try:
        meta, entries, start = _header(name, data)
        arrays, at = {}, 0
        for key, entry in entries.items():
            first, last = entry["data_offsets"]
            kind = np.dtype(_TYPES[entry["dtype"]])
            shape = tuple(entry["shape"])
            if any(type(n) is not int or n < 0 for n in (*shape, first, last)) or first != at or last < first:
                raise ValueError(f"the offsets of {key!r} must follow one another")
            count = 1
            for n in shape:
                count *= n
            if count * kind.itemsize != last - first or start + last > size:
                raise ValueError(f"the size of {key!r} must be that of its shape, within the file")
            arrays[key] = np.frombuffer(data, kind, count, start + first).reshape(shape)
            at = last
        if start + at != size:
            raise ValueError(f"the file must have {start + at} bytes, got {size}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} is not a sound index file: {error}") from None
    return meta, arrays


def checksum_of(meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> str:
    checksum = 0
    for name, sizes in meta["parts"].items():
        for piece in _pieces(arrays[name], sizes):
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            checksum = (checksum * 31 + _core.checksum(data)) % 2**64
    return str(checksum)


def _pieces(array: NDArray[Any], sizes: list[int]) -> Iterator[NDArray[Any]]:
    at = 0
    for size in sizes:
        yield array[at : at + size]
        at += size
