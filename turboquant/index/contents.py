"""The contents of an index at one moment. They are immutable: a change makes new contents, and a running search keeps
those that it began with, so it needs no lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import storage, transform
from .inputs import Ids, id_array, unmasked
from .lists import sorted_rows
from .storage import Segment
from .transform import Transform

_FEW = 64  # up to this many new ids are looked up in `_seen` instead of in every segment


@dataclass(frozen=True)
class Contents:
    transform: Transform
    segments: tuple[Segment, ...] = ()
    next_id: int = 0
    # The sorted ids of the first segments, and the number of these segments. Some ids may have been removed since.
    # They spare `check_new` a look at each segment.
    _seen: tuple[Ids, int] | None = None

    @property
    def stored(self) -> int:
        """The number of rows, with removed ones."""
        return sum(map(len, self.segments))

    @property
    def ntotal(self) -> int:
        return sum(segment.n_there for segment in self.segments)

    @property
    def ids(self) -> Ids:
        kept = [s.all_ids if s.allowed is None else s.all_ids[s.allowed != 0] for s in self.segments]
        return np.concatenate(kept) if kept else np.empty(0, np.int64)

    def starts(self) -> Iterator[tuple[int, Segment]]:
        """Yields the first row of each segment, and the segment."""
        start = 0
        for segment in self.segments:
            yield start, segment
            start += len(segment)

    @cached_property
    def sigmas(self) -> float:
        """The width of a search's bound in standard deviations, from the noise of the rows that are not removed."""
        return transform.bound(self.transform.sigmas, sum(segment.noise for segment in self.segments))

    @cached_property
    def _first_id(self) -> int | None:
        """The first id if no row is removed and all ids are consecutive, otherwise None."""
        first = self.segments[0].ids if self.segments else None
        if first is None or isinstance(first, np.ndarray):
            return None
        for start, s in self.starts():
            if s.allowed is not None or isinstance(s.ids, np.ndarray) or s.ids != first + start:
                return None
        return int(first)

    def find(self, ids: Ids) -> Ids:
        """Returns the row of each id, or -1 where the id is not in the index."""
        if self._first_id is not None:
            inside = ids - self._first_id
            return np.where((inside >= 0) & (inside < self.stored), inside, -1)
        rows = np.full(len(ids), -1, np.int64)
        for start, segment in self.starts():
            inside = segment.find(ids)
            np.copyto(rows, start + inside, where=inside >= 0)
        return rows

    def check_new(self, ids: Ids) -> None:
        """Raises ValueError unless ids differ from one another and from those in the index. Works in parts, so that it
        needs little more memory than a sorted copy."""
        ordered = np.sort(ids)
        if (twice := ordered[1:] == ordered[:-1]).any():
            raise ValueError(f"add: `ids` must differ, got {ordered[twice.argmax()]} more than once")
        if len(ids) <= _FEW and not self._seen_before(ids).any():
            ids = ids[self.segments[-1].find(ids) >= 0] if self.segments else ids[:0]
        for at in range(0, len(ids), storage.ROWS):
            part = ids[at : at + storage.ROWS]
            if (there := self.find(part) >= 0).any():
                raise ValueError(f"add: `ids` must be new, got {part[there.argmax()]}, which is in the index")

    def _seen_before(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns for each id whether it is, or was, in a segment before the last one."""
        known, n = self._seen or (np.empty(0, np.int64), 0)
        if n < len(self.segments) - 1:
            known = np.sort(np.concatenate([known, *(s.all_ids for s in self.segments[n:-1])]))
            object.__setattr__(self, "_seen", (known, len(self.segments) - 1))  # a cache: all threads find the same
        if not len(known):
            return np.zeros(len(ids), bool)
        there: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, ids), len(known) - 1)] == ids
        return there

    def chosen(self, filter: Any) -> list[NDArray[np.uint8] | None]:
        """Returns a mask for each segment, 0 at rows that a search may not find, or None if it may find all."""
        if filter is None:
            return [segment.allowed for segment in self.segments]
        mask = unmasked("search", "filter", filter)
        chosen: NDArray[np.uint8] = np.zeros(self.stored, np.uint8)
        if mask.dtype == np.bool_:
            if mask.shape != (self.ntotal,):
                got = list(mask.shape)
                raise ValueError(f"search: `filter` must be a mask of {self.ntotal}, one a vector, got {got}")
            if all(segment.allowed is None for segment in self.segments):
                chosen = np.ascontiguousarray(mask).view(np.uint8)
            else:
                there = [np.ones(len(s), bool) if s.allowed is None else s.allowed != 0 for s in self.segments]
                chosen[np.flatnonzero(np.concatenate(there))[mask]] = 1
        else:
            named = filter if mask.dtype == object else mask  # so that errors name the caller's type
            rows = self.find(id_array("search", named, "filter"))
            chosen[rows[rows >= 0]] = 1
        return [chosen[start : start + len(segment)] for start, segment in self.starts()]

    def rows(self, filter: Any) -> tuple[tuple[Any, ...], ...]:
        """Returns the segments as the core takes them."""
        return tuple(s.core(allowed) for s, allowed in zip(self.segments, self.chosen(filter), strict=True))

    def fine_rows(self) -> tuple[tuple[Any, ...], ...]:
        """Returns the 8-bit copies of the rows as the core takes them."""
        return tuple(s.fine.core(None) for s in self.segments if s.fine is not None)

    # ---- other contents ----

    def with_rows(self, new: list[Segment], next_id: int) -> Contents:
        segments = list(self.segments)
        for segment in new:
            joined = segments[-1].followed_by(segment) if segments else None
            if joined is None:
                segments.append(storage.with_room(segment))
            else:
                segments[-1] = joined
        return replace(self, segments=tuple(segments), next_id=next_id)

    def without_rows(self, rows: Ids) -> Contents:
        segments = []
        for start, segment in self.starts():
            inside = rows[(rows >= start) & (rows < start + len(segment))] - start
            segments.append(segment.without(inside) if len(inside) else segment)
        return replace(self, segments=tuple(segments))

    def compact(self) -> Contents:
        """Copies segments that have removed rows without these. With lists, makes one segment, sorted by list."""
        if self.transform.lists is not None:
            return replace(self, segments=sorted_rows(self.segments, len(self.transform.lists)), _seen=None)
        kept = [s if s.allowed is None else s.take(np.flatnonzero(s.allowed)) for s in self.segments if s.n_there]
        return replace(self, segments=tuple(kept), _seen=None)

    def divided(self, exponent: int) -> Contents:
        """Returns the same rows with a transform that divides vectors by 2^exponent."""
        less = exponent - self.transform.exponent
        if not less:
            return self
        segments = tuple(segment.divided(less) for segment in self.segments)
        return replace(self, transform=self.transform.divided(less), segments=segments)

    def apart(self) -> Contents:
        """Returns the same rows in segments that share no room with these; later additions do not touch them."""
        return replace(self, segments=tuple(segment.apart() for segment in self.segments))

    @property
    def nbytes(self) -> int:
        return self.transform.nbytes + sum(segment.nbytes for segment in self.segments)
