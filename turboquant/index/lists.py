"""The lists of an index (an inverted file, IVF): their centres, learnt from a sample, and rows sorted by list."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from . import inputs, storage
from .inputs import Floats, Ids
from .storage import BLOCK, Segment

_TOGETHER = 16  # centres whose numbers are interleaved (TQ_INDEX_CENTRES in turboquant_index.h)
PER_LIST = 256  # the most rows of a sample for each list that centres are learnt from
_ROUNDS = 10  # iterations of k-means


@dataclass(frozen=True)
class Lists:
    """directions: float32 [n, dim], of unit length; for squared distances the centres themselves.
    lengths: float32 [n]; a list's centre is its direction times its length. None for squared distances: all are 1."""

    directions: Floats
    lengths: Floats | None

    def __len__(self) -> int:
        return len(self.directions)

    def __getstate__(self) -> dict[str, Any]:
        return {"directions": self.directions, "lengths": self.lengths}  # without `core`, which is computed again

    @property
    def nbytes(self) -> int:
        return self.directions.nbytes + (0 if self.lengths is None else self.lengths.nbytes)

    @cached_property
    def core(self) -> tuple[Floats, Floats]:
        """Directions and lengths as the core takes them."""
        n, dim = self.directions.shape
        padded = np.zeros((-(-n // _TOGETHER) * _TOGETHER, dim), np.float32)
        padded[:n] = self.directions
        packed = np.ascontiguousarray(padded.reshape(-1, _TOGETHER, dim).transpose(0, 2, 1))
        return packed, np.ones(n, np.float32) if self.lengths is None else self.lengths

    def centres(self, lists: NDArray[np.int32]) -> Floats:
        """Returns the centres of some lists, [n, dim]."""
        directions = self.directions[lists]
        return directions if self.lengths is None else directions * self.lengths[lists, None]

    def divided(self, exponent: int) -> Lists:
        """Returns the lists for vectors that are divided by 2^exponent."""
        if self.lengths is None:
            return Lists(np.ldexp(self.directions, -exponent), None)
        return Lists(self.directions, np.ldexp(self.lengths, -exponent))


def learn(x: Floats, n: int, distances: bool, seed: int, space: Any) -> Lists:
    """Learns the centres of n lists from a sample by k-means: of directions, or with `distances` of the vectors. space:
    a function that takes the tuple of `Lists.core` and returns the core's tuple of a space."""
    x = np.ascontiguousarray(x[:: -(-len(x) // (PER_LIST * n))])
    if distances:
        return Lists(_clustered(x, n, False, seed), None)
    there = x.any(axis=1)
    centres = _clustered(inputs.normalised(x[there]) if there.sum() >= n else x, n, True, seed)
    size = np.linalg.norm(centres.astype(np.float64), axis=1, keepdims=True)
    directions = (centres / np.where(size > 0, size, 1)).astype(np.float32)
    lists = _core.index_assign(space(Lists(directions, np.ones(n, np.float32)).core), x)
    along = np.einsum("ij,ij->i", x, directions[lists], dtype=np.float64)
    counts = np.bincount(lists, minlength=n)
    return Lists(directions, (np.bincount(lists, along, n) / np.maximum(counts, 1)).astype(np.float32))


def _clustered(x: Floats, n: int, by_direction: bool, seed: int) -> Floats:
    """Runs k-means with FAISS, or without it with scikit-learn."""
    seed %= 2**31
    try:
        import faiss
    except ImportError:
        pass
    else:
        means = faiss.Kmeans(x.shape[1], n, niter=_ROUNDS, seed=seed, spherical=by_direction, min_points_per_centroid=1)
        means.train(x)
        return np.ascontiguousarray(means.centroids, np.float32)
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError:
        raise ImportError(
            "train: lists need faiss-cpu (pip install 'turboquant-attention[lists]') or scikit-learn"
        ) from None
    means = MiniBatchKMeans(n, batch_size=max(4096, 4 * n), max_iter=_ROUNDS, n_init=1, random_state=seed).fit(x)
    return np.ascontiguousarray(means.cluster_centers_, np.float32)


@dataclass
class Sorted(Segment):
    """Rows sorted by list. The leading bits of each list begin a new block."""

    starts: Ids = field(default_factory=lambda: np.zeros(1, np.int64))  # [lists + 1]: first row of each, then n

    @cached_property
    def _first_blocks(self) -> Ids:
        blocks = -(-np.diff(self.starts) // BLOCK)
        return np.append(0, np.cumsum(blocks))

    def lists_of(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        return np.searchsorted(self.starts, rows, side="right").astype(np.int32) - 1

    def places(self, rows: NDArray[Any]) -> tuple[Ids, Ids]:
        lists = self.lists_of(rows)
        inside = rows - self.starts[lists]
        return self._first_blocks[lists] + inside // BLOCK, inside % BLOCK

    def list_starts(self) -> Ids:
        return self.starts

    def apart(self) -> Segment:
        return self  # it has no room: nothing is ever added to it

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.starts.nbytes


def sorted_rows(segments: tuple[Segment, ...], n: int) -> tuple[Segment, ...]:
    """Copies the rows that are not removed into one segment that is sorted by list. Rows of a list keep their order."""
    if len(segments) == 1 and isinstance(segments[0], Sorted) and segments[0].allowed is None:
        return segments
    kept = [np.arange(len(s)) if s.allowed is None else np.flatnonzero(s.allowed) for s in segments]
    lists = np.concatenate([np.empty(0, np.int32), *(s.lists_of(rows) for s, rows in zip(segments, kept, strict=True))])
    if not len(lists):
        return ()
    starts = np.append(0, np.cumsum(np.bincount(lists, minlength=n)))
    to = np.empty(len(lists), np.int64)
    to[np.argsort(lists, kind="stable")] = np.arange(len(lists))
    first, total = segments[0], len(lists)
    signs = np.zeros((int((-(-np.diff(starts) // BLOCK)).sum()), *first.signs.shape[1:]), np.uint8)
    arrays = {**first.each(lambda array: storage.rows_like(array, total)), "lists": None}
    out = Sorted(**arrays, signs=signs, ids=np.empty(total, np.int64), starts=starts)
    if first.fine is not None:
        signs = storage.blocks_of(np.empty((total, 0), np.uint8))
        out.fine = Segment(**first.fine.each(lambda array: storage.rows_like(array, total)), signs=signs, ids=0)
    at = 0
    for segment, rows in zip(segments, kept, strict=True):
        for part in storage.parts(rows):  # in parts, to need little memory beside the new segment
            _put(out, to[at : at + len(part)], segment, part)
            at += len(part)
    return (out,)


def _put(out: Sorted, to: Ids, segment: Segment, rows: Ids) -> None:
    assert isinstance(out.ids, np.ndarray)
    out.put(to, segment, rows)
    blocks, lanes = out.places(to)
    out.signs[blocks, :, lanes] = segment.sign_rows(rows)
    out.ids[to] = segment.all_ids[rows]
    if out.fine is not None and segment.fine is not None:
        out.fine.put(to, segment.fine, rows)
