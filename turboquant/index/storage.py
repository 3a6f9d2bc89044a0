"""The rows of an index, in segments, and the file format."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..files import array_bytes, crc32, read_header

ROWS = 16_384  # how many rows `add` encodes at a time, and the room of a segment that grows
BLOCK = 64  # rows whose leading bits are interleaved (TQ_INDEX_BLOCK in turboquant_index.h)
UNSORTED = 256  # up to this many new rows of a segment are compared with up to this many ids one by one
FORMAT = "turboquant-index-6"


@dataclass
class Segment:
    """Rows of an index, which never change. Adding rows makes a new segment that shares the memory of `room`."""

    codes: NDArray[np.uint8]  # [n, row bytes]
    signs: NDArray[np.uint8]  # [blocks, planes, 64], leading bits
    scales: NDArray[np.float32]  # [n]
    offsets: NDArray[np.float32] | None  # [n]: <mean, x - mean>; l2: -|x - mean|^2 / 2
    ids: NDArray[np.int64] | int  # [n], or the first of consecutive ones
    allowed: NDArray[np.uint8] | None = None  # [n], 0 where removed; None: all are there
    room: Segment | None = None  # a larger segment that begins with these rows and has memory for more
    # Ids that are not removed, ascending; their rows; and how many of the first rows both cover. `find` compares the
    # other rows one by one, so that adding a row does not need a new sort.
    _order: tuple[NDArray[np.int64], NDArray[np.int64], int] | None = None
    lists: NDArray[np.int32] | None = None  # [n], the list of each row; None without lists
    fine: Segment | None = None  # the same rows by `Transform.fine`; its `allowed` and `ids` are not used

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def n_there(self) -> int:
        return len(self) if self.allowed is None else int(np.count_nonzero(self.allowed))

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each id, or -1 where the id is not in the segment."""
        if not isinstance(self.ids, np.ndarray):
            inside = (ids >= self.ids) & (ids - self.ids < len(self))
            rows = np.where(inside, ids - self.ids, 0)
            if self.allowed is not None:
                inside &= self.allowed[rows] != 0
            return np.where(inside, rows, -1)
        covered = self._order[2] if self._order else 0
        few = len(self) - covered <= UNSORTED and len(ids) <= UNSORTED
        if self._order is None or (covered < len(self) and not few):  # two threads may both do it, with equal results
            rows = np.arange(len(self)) if self.allowed is None else np.flatnonzero(self.allowed)
            order = np.argsort(self.ids[rows], kind="stable")
            self._order = self.ids[rows][order], rows[order], len(self)
        known, rows, covered = self._order
        at_rows = np.full(len(ids), -1, np.int64)
        if len(known):
            at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            at_rows = np.where(known[at] == ids, rows[at], -1)
        if covered < len(self):
            same = ids[:, None] == self.ids[covered:]
            if self.allowed is not None:
                same &= self.allowed[covered:] != 0
            at_rows = np.where(same.any(axis=1), covered + same.argmax(axis=1), at_rows)
        return at_rows

    @cached_property
    def noise(self) -> NDArray[np.int64]:
        """The number of rows by binary exponent of the scale and noise class (turboquant_index.h), [256, 8]."""
        scales = self.scales if self.allowed is None else self.scales[self.allowed != 0]
        words = np.ascontiguousarray(scales).view(np.uint32)
        return np.bincount((words >> 23 & 255) << 3 | words & 7, minlength=2048).reshape(256, 8)

    @cached_property
    def factors(self) -> NDArray[np.float32]:
        """The factors that a search needs of each block (tq_index_factors in turboquant_index.h), [blocks, 2]."""
        return _core.index_factors(self.scales, self.offsets, self.list_starts())

    def list_starts(self) -> NDArray[np.int64] | None:
        """The first row of each list, then n, if rows are sorted by list, otherwise None."""
        return None

    def core(self, allowed: NDArray[np.uint8] | None) -> tuple[Any, ...]:
        """The segment as the core takes it. allowed: [n], 0 at rows that a search may not find, or None."""
        starts = self.list_starts()
        lists = self.lists if starts is None else starts
        rows = (self.codes, self.signs, self.scales, self.offsets, self.ids, allowed, self.factors)
        return rows if lists is None else (*rows, lists)

    def without(self, rows: NDArray[np.int64]) -> Segment:
        """Returns the same segment with some more rows removed."""
        allowed = np.ones(len(self), np.uint8) if self.allowed is None else self.allowed.copy()
        allowed[rows] = 0
        return replace(self, allowed=allowed, _order=None)

    def sign_rows(self, rows: NDArray[Any] | None = None) -> NDArray[np.uint8]:
        """Returns leading bits row after row, [n, planes]."""
        blocks, lanes = self.places(np.arange(len(self)) if rows is None else rows)
        return self.signs[blocks, :, lanes]

    def places(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns for each row the block of its leading bits, and the place in the block."""
        return rows // BLOCK, rows % BLOCK

    def lists_of(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        """Returns the list of each row."""
        assert self.lists is not None
        lists: NDArray[np.int32] = self.lists[rows]
        return lists

    def each(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> dict[str, Any]:
        """Returns `codes`, `scales`, `offsets` and `lists`, by name, each after `change`. None stays None."""
        arrays = {name: getattr(self, name) for name in _BY_ROW}
        return {name: None if array is None else change(array) for name, array in arrays.items()}

    def put(self, where: Any, other: Segment, rows: Any = slice(None)) -> None:
        """Copies the codes, scales, offsets and lists of `rows` of another segment to the rows `where` of this one."""
        for name in _BY_ROW:
            if (array := getattr(self, name)) is not None:
                array[where] = getattr(other, name)[rows]

    def take(self, rows: NDArray[Any]) -> Segment:
        """A copy of some rows."""
        fine = None if self.fine is None else self.fine.take(rows)
        taken = self.each(lambda array: array[rows])
        return Segment(**taken, signs=blocks_of(self.sign_rows(rows)), ids=self.all_ids[rows], fine=fine)

    def divided(self, exponent: int) -> Segment:
        """Returns the rows that the vectors would have, divided by 2^exponent."""
        offsets = None if self.offsets is None else np.ldexp(self.offsets, -2 * exponent)
        scales = np.ldexp(self.scales, -exponent)
        fine = None if self.fine is None else self.fine.divided(exponent)
        return replace(self, scales=scales, offsets=offsets, fine=fine, room=None, _order=None)

    def apart(self) -> Segment:
        """Returns the same rows without room, so that later additions to this segment do not touch them."""
        if self.room is None:
            return replace(self, _order=None)
        copy = self.take(np.arange(len(self)))
        return replace(copy, ids=copy.ids if isinstance(self.ids, np.ndarray) else self.ids, allowed=self.allowed)

    def followed_by(self, new: Segment) -> Segment | None:
        """Copies new rows into the room behind these, and returns a segment of both; None if they do not fit."""
        room, n, m = self.room, len(self), len(new)
        if room is None or n + m > len(room):
            return None
        room.put(slice(n, n + m), new)
        block, lane = divmod(n, BLOCK)  # rows of a new block end one block here and begin the next
        first = room.signs[block : block + len(new.signs), :, lane:]
        first[:] = new.signs[:, :, : BLOCK - lane]
        rest = room.signs[block + 1 : block + 1 + len(new.signs), :, :lane]
        rest[:] = new.signs[: len(rest), :, BLOCK - lane :]
        ids = self.ids
        if isinstance(ids, np.ndarray) or isinstance(new.ids, np.ndarray) or (n and ids + n != new.ids):
            assert isinstance(room.ids, np.ndarray)
            if not isinstance(ids, np.ndarray):
                room.ids[:n] = self.all_ids
            room.ids[n : n + m] = new.all_ids
            ids = room.ids[: n + m]
        elif not n:
            ids = new.ids
        allowed = None if self.allowed is None else np.concatenate([self.allowed, np.ones(m, np.uint8)])
        blocks = room.signs[: -(-(n + m) // BLOCK)]
        order = self._order if isinstance(self.ids, np.ndarray) else None
        fine = None if self.fine is None or new.fine is None else self.fine.followed_by(new.fine)
        rows = room.each(lambda array: array[: n + m])
        return Segment(**rows, signs=blocks, ids=ids, allowed=allowed, room=room, _order=order, fine=fine)

    @property
    def all_ids(self) -> NDArray[np.int64]:
        if isinstance(self.ids, np.ndarray):
            return self.ids
        return np.arange(self.ids, self.ids + len(self), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        fine = () if self.fine is None else (self.fine.codes, self.fine.scales, self.fine.offsets)
        arrays = (self.codes, self.signs, self.scales, self.offsets, self.ids, self.allowed, self.lists, *fine)
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


_BY_ROW = ("codes", "scales", "offsets", "lists")  # arrays with an entry for each row, except ids and allowed


def rows_like(array: NDArray[Any], n: int) -> NDArray[Any]:
    """Returns memory for n rows of such an array."""
    return np.empty((n, *array.shape[1:]), array.dtype)


def blocks_of(sign_rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Interleaves leading bits: [n, planes] -> [blocks, planes, 64], 0 behind the last row."""
    n, planes = sign_rows.shape
    blocks = -(-n // BLOCK)
    padded = np.zeros((blocks * BLOCK, planes), np.uint8)
    padded[:n] = sign_rows
    return np.ascontiguousarray(padded.reshape(blocks, BLOCK, planes).transpose(0, 2, 1))


def with_room(new: Segment) -> Segment:
    """Copies the rows of a segment into one with room for more, unless it is more than half full already."""
    if len(new) > ROWS // 2:
        return new
    joined = _before(new).followed_by(new)
    assert joined is not None
    return joined


def _before(new: Segment) -> Segment:
    """Returns an empty segment with room for the rows of `new` and others."""
    signs = np.zeros((ROWS // BLOCK, *new.signs.shape[1:]), np.uint8)
    room = Segment(**new.each(lambda array: rows_like(array, ROWS)), signs=signs, ids=np.empty(ROWS, np.int64))
    fine = None if new.fine is None else _before(new.fine)
    return Segment(**room.each(lambda array: array[:0]), signs=signs[:0], ids=0, room=room, fine=fine)


def parts(x: Any) -> Iterator[Any]:
    """Yields the rows of x, a segment's worth at a time."""
    return (x[at : at + ROWS] for at in range(0, len(x), ROWS))


def read(path: str, mapped: bool) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Returns (metadata, arrays) of an index's file. Checks sizes against the file, not bytes (`damaged`)."""
    with open(path, "rb") as file:
        meta, tensors, start = read_header(file, FORMAT)
        if mapped:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[start:]
        else:
            data = memoryview(bytearray(file.read()))
    flat = {name: np.frombuffer(data[one.start : one.start + one.nbytes], one.numpy_dtype)
            for name, one in tensors.items()}  # fmt: skip
    return meta, {name: array.reshape(tensors[name].shape) for name, array in flat.items()}


def damaged(meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> list[str]:
    """Returns the names of the arrays whose checksums differ from those in the file."""
    return [name for name, array in arrays.items() if crc32([array_bytes(array)]) != meta["crc32"][name]]
