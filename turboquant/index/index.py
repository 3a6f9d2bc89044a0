"""`Index`: add vectors, search them by inner product, cosine or distance, straight from their codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from threading import RLock
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from .. import _core
from . import storage, transform
from .storage import ROWS, Segment
from .transform import Transform

METRICS = ("ip", "cosine", "l2")
_BITS = (1, 2, 3, 4, 5, 6, 8)
_QUERIES = 64  # of one pass over the rows
_COMPACT = 0.5  # share of removed rows from which the rest is copied together

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def _integer(op: str, name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: `{name}` must be an integer, got {value!r}")
    number = value.__index__()
    if not low <= number <= high:
        raise ValueError(f"{op}: `{name}` must be in {low}..{high}, got {number}")
    return int(number)


def _vectors(op: str, name: str, x: Any, dim: int) -> NDArray[Any]:
    """x as float32 or float16 [n, dim] or [dim]; torch tensors on the CPU are viewed."""
    device = getattr(x, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise TypeError(f"{op}: `{name}` must be on the CPU, got one on {device}; write {name}.cpu()")
    if type(x).__module__.partition(".")[0] == "torch":
        x = (x.detach() if "16" not in str(x.dtype) else x.detach().float()).numpy()
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{op}: `{name}` must be an array of float32 or float16, got {type(x).__name__}")
    if x.dtype not in (np.float32, np.float16):
        raise TypeError(f"{op}: `{name}` must be an array of float32 or float16, got {x.dtype}")
    if x.ndim not in (1, 2) or x.shape[-1] != dim:
        raise ValueError(f"{op}: `{name}` must be of shape [n, {dim}] or [{dim}], got {list(x.shape)}")
    return x


def _id_array(op: str, ids: Any) -> Ids:
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{op}: `ids` must be integers, got {array.dtype}")
    if array.ndim > 1:
        raise ValueError(f"{op}: `ids` must have one dimension, got {array.ndim}")
    array = array.reshape(-1)
    wrong = array < 0 if array.dtype.kind == "i" else array >= 2**63
    if wrong.any():
        raise ValueError(f"{op}: `ids` must be in 0..2^63 - 1, got {array[wrong.argmax()]}")
    return array.astype(np.int64)


_ALL: WeakSet[Index] = WeakSet()


def _unlock_in_child() -> None:
    """Threads do not survive a fork, so what they held is free in the child."""
    for index in list(_ALL):
        index._lock = RLock()


os.register_at_fork(after_in_child=_unlock_in_child)


class Index:
    """A flat index of vectors in `bits` bits a number.

    dim: numbers of a vector, 1..4096. bits: 1..6 or 8. seed: of the random rotation, 0..2**63 - 1.
    metric: "ip" and "cosine": scores are inner products (of unit vectors), larger first; "l2": squared distances,
        smaller first.

    The leading bit of each number bounds a row's score; rows that may be among the best are scored from all their bits.
    Equal scores go to the smaller id. Results depend on neither threads, nor how rows were added, nor the instruction
    set. Calls of one index from several threads wait for one another while
    they change or read what is stored; the scan itself runs without the GIL.

    Raises TypeError or ValueError; the message names the argument, and the index is as it was.
    """

    def __init__(self, dim: int, bits: int = 3, metric: str = "ip", seed: int = 0) -> None:
        self._dim = _integer("Index", "dim", dim, 1, 4096)
        self._bits = _integer("Index", "bits", bits, 1, 8)
        if self._bits not in _BITS:
            raise ValueError(f"Index: `bits` must be one of {', '.join(map(str, _BITS))}, got {bits}")
        if metric not in METRICS:
            raise ValueError(f"Index: `metric` must be one of {', '.join(METRICS)}, got {metric!r}")
        self._metric = metric
        self._seed = _integer("Index", "seed", seed, 0, 2**63 - 1)
        self._transform = transform.untrained(self._dim, self._bits, self._seed)
        self._segments: list[Segment] = []
        self._next_id = 0
        self._read_only: str | None = None
        self._loaded: tuple[dict[str, Any], dict[str, NDArray[Any]]] | None = None
        self._lookup: tuple[Ids, Ids] | None = None  # ids ascending, and the row of each
        self._lock = RLock()
        _ALL.add(self)

    # ---- what there is ----

    @property
    def d(self) -> int:
        return self._dim

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def metric(self) -> str:
        return self._metric

    @property
    def is_trained(self) -> bool:
        """Whether `train` was called. An index that was not is complete too."""
        return self._transform.mean is not None

    @property
    def ids(self) -> Ids:
        """The ids of all vectors, in the order in which they were added."""
        kept = [s.all_ids if s.allowed is None else s.all_ids[s.allowed != 0] for s in self._segments]
        return np.concatenate(kept) if kept else np.empty(0, np.int64)

    @property
    def ntotal(self) -> int:
        return sum(len(s) if s.allowed is None else int(np.count_nonzero(s.allowed)) for s in self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored: rows, ids of one's own, and what `train` learnt."""
        return self._transform.nbytes + sum(s.nbytes for s in self._segments)

    def __len__(self) -> int:
        return self.ntotal

    def __contains__(self, value: object) -> bool:
        if not hasattr(value, "__index__"):
            return False
        number = value.__index__()
        return 0 <= number < 2**63 and bool(self._find(np.array([number]))[0] >= 0)

    def __repr__(self) -> str:
        learnt = ", trained" if self.is_trained else ""
        return f"<Index: {self.ntotal} vectors of {self._dim} numbers, {self._bits} bits, {self._metric}{learnt}>"

    # ---- changes ----

    def _writable(self, op: str) -> None:
        if self._read_only:
            raise ValueError(
                f"{op}: the index is mapped from {self._read_only}; Index.load(path, mmap=False) can change"
            )

    def train(self, sample: Any, axes: bool = True) -> None:
        """Learn the mean of `sample`, float32 or float16 [n, dim], and with `axes` its principal axes and
        a width of 0..6 or 8 bits for each 32 of them. Axes are kept only if recall on held-out rows of the sample
        rises. The index must be empty."""
        self._writable("train")
        x = _vectors("train", "sample", sample, self._dim)
        if x.ndim != 2 or len(x) < 2:
            raise ValueError(f"train: `sample` must have at least 2 rows, got shape {list(x.shape)}")
        x = self._checked("train", "sample", x[:: -(-len(x) // transform.SAMPLE)])
        with self._lock:
            if self._segments:
                raise ValueError(f"train: the index must be empty, it has {self.ntotal} vectors")
            base = transform.untrained(self._dim, self._bits, self._seed)
            chosen = transform.with_mean(base, x)
            if axes and len(x) >= 64:
                chosen = self._better(base, x) or chosen
            self._transform = chosen

    def _better(self, base: Transform, x: Floats) -> Transform | None:
        """Axes from the sample, if axes from nine tenths of it find more of the true ten of the last tenth."""
        held = x[::10][:200]
        rest = np.delete(x, np.s_[::10], axis=0)
        trial = transform.with_axes(base, rest, self._bits)
        if trial is None:
            return None
        exact = held.astype(np.float64) @ rest.T.astype(np.float64)
        if self._metric == "l2":
            exact = 2 * exact - (rest.astype(np.float64) ** 2).sum(1)
        k = min(10, len(rest))
        truth = np.argpartition(-exact, k - 1, axis=1)[:, :k]
        found = []
        for one in (transform.with_mean(base, rest), trial):
            index = Index(self._dim, self._bits, self._metric, self._seed)
            index._transform = one
            index.add(rest)
            ids = index.search(held, k)[1]
            found.append(sum(len(np.intersect1d(a, b)) for a, b in zip(ids, truth, strict=True)))
        return transform.with_axes(base, x, self._bits) if found[1] > found[0] else None

    def _checked(self, op: str, name: str, x: NDArray[Any]) -> Floats:
        """Rows as finite float32, of unit length for cosine."""
        rows = np.ascontiguousarray(x, np.float32).reshape(-1, self._dim)
        good = np.isfinite(rows) & (np.abs(rows) <= _core.MAX_INPUT)
        if not good.all():
            i, j = divmod(int(np.argmin(good)), self._dim)
            limit = f"finite and at most {_core.MAX_INPUT:.0f} in magnitude"
            raise ValueError(f"{op}: `{name}[{i}, {j}]` must be {limit}, got {rows[i, j]}")
        if self._metric == "cosine":
            norms = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
            if not norms.all():
                raise ValueError(f"{op}: `{name}[{int(np.argmin(norms))}]` must not be zero with cosine")
            rows = (rows / norms[:, None]).astype(np.float32)
        return rows

    def _encode(self, rows: Floats, ids: Ids | int) -> Segment:
        t = self._transform
        codes, signs, scales = _core.index_encode(t.bits, t.steps, t.apply(rows))
        offsets = None
        if t.mean is not None or self._metric == "l2":
            wide = rows.astype(np.float64)
            sums = np.zeros(len(rows))
            if t.mean is not None:
                sums += ((wide - t.mean) * t.mean).sum(axis=1)
            if self._metric == "l2":
                sums -= (wide * wide).sum(axis=1) / 2
            offsets = sums.astype(np.float32)
        return Segment(codes, signs, scales, offsets, ids)

    def add(self, x: Any, ids: Any = None) -> None:
        """Add vectors, float32 or float16 [n, dim] or [dim]. ids: n integers in 0..2^63 - 1 that are not in the
        index; by default those that follow the largest there ever was."""
        self._writable("add")
        x = _vectors("add", "x", x, self._dim)
        x = x.reshape(-1, self._dim)
        given = None if ids is None else _id_array("add", ids)
        with self._lock:
            if given is not None:
                if len(given) != len(x):
                    raise ValueError(f"add: `ids` must be {len(x)} ids, one a vector, got {len(given)}")
                unique, counts = np.unique(given, return_counts=True)
                if (counts > 1).any():
                    raise ValueError(f"add: `ids` must differ, got {unique[counts.argmax()]} more than once")
                if (there := self._find(given) >= 0).any():
                    raise ValueError(f"add: `ids` must be new, got {given[there.argmax()]}, which is in the index")
            elif self._next_id + len(x) > 2**63:
                raise ValueError("add: `ids` must be given, because the largest id was used")
            new = []
            for at in range(0, len(x), ROWS):
                rows = self._checked("add", "x", x[at : at + ROWS])
                own = self._next_id + at if given is None else given[at : at + ROWS]
                new.append(self._encode(rows, own))
            for segment in new:
                joined = self._segments[-1].followed_by(segment) if self._segments else None
                if joined is None:
                    self._segments.append(storage.with_room(segment))
                else:
                    self._segments[-1] = joined
            self._lookup = None
            if len(x):
                self._next_id = self._next_id + len(x) if given is None else max(self._next_id, int(given.max()) + 1)

    def remove(self, ids: Any) -> None:
        """Remove vectors by id. ValueError if one is not there; then none is removed."""
        self._writable("remove")
        wanted = np.unique(_id_array("remove", np.atleast_1d(ids)))
        with self._lock:
            rows = self._find(wanted)
            if (rows < 0).any():
                raise ValueError(f"remove: `ids` must be in the index, got {wanted[int((rows < 0).argmax())]}")
            for start, segment in self._starts():
                inside = rows[(rows >= start) & (rows < start + len(segment))] - start
                if len(inside):
                    allowed = np.ones(len(segment), np.uint8) if segment.allowed is None else segment.allowed.copy()
                    allowed[inside] = 0
                    segment.allowed = allowed
            self._lookup = None
            stored = sum(map(len, self._segments))
            if stored and self.ntotal < (1 - _COMPACT) * stored:
                self.compact()

    def compact(self) -> None:
        """Give back the memory of removed vectors. `remove` does it when half of the rows are gone."""
        self._writable("compact")
        with self._lock:
            kept = []
            for s in self._segments:
                if s.allowed is None:
                    kept.append(s)
                elif s.allowed.any():
                    at = np.flatnonzero(s.allowed)
                    kept.append(s.take(at))
            self._segments = kept
            self._lookup = None

    # ---- looking up ----

    def _starts(self) -> Iterator[tuple[int, Segment]]:
        start = 0
        for segment in self._segments:
            yield start, segment
            start += len(segment)

    def _find(self, ids: Ids) -> Ids:
        """The row of each id, -1 where it is not there."""
        with self._lock:
            if self._lookup is None:
                alive = [
                    start + (np.arange(len(s)) if s.allowed is None else np.flatnonzero(s.allowed))
                    for start, s in self._starts()
                ]
                rows = np.concatenate(alive).astype(np.int64) if alive else np.empty(0, np.int64)
                every = self.ids
                order = np.argsort(every, kind="stable")
                self._lookup = every[order], rows[order]
            known, rows = self._lookup
        if not len(known):
            return np.full(len(ids), -1, np.int64)
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[at] == ids, rows[at], -1)

    def _rows(self, filter: Any) -> tuple[Any, ...]:
        """Segments as the core takes them, with what the filter and removals leave."""
        allowed: list[NDArray[np.uint8] | None] = [s.allowed for s in self._segments]
        if filter is not None:
            mask = np.asarray(filter)
            total = sum(map(len, self._segments))
            chosen = np.zeros(total, np.uint8)
            if mask.dtype == np.bool_:
                if mask.shape != (self.ntotal,):
                    raise ValueError(
                        f"search: `filter` must be a mask of {self.ntotal}, one a vector, got {list(mask.shape)}"
                    )
                alive = [np.ones(len(s), bool) if s.allowed is None else s.allowed != 0 for s in self._segments]
                if alive:
                    chosen[np.flatnonzero(np.concatenate(alive))[mask]] = 1
            else:
                rows = self._find(_id_array("search", mask))
                chosen[rows[rows >= 0]] = 1
            allowed = [chosen[start : start + len(s)] for start, s in self._starts()]
        return tuple(
            (s.codes, s.signs, s.scales, s.offsets, s.ids, keep)
            for s, keep in zip(self._segments, allowed, strict=True)
        )

    def _queries(self, op: str, queries: Any) -> tuple[bool, Floats]:
        x = _vectors(op, "queries", queries, self._dim)
        return x.ndim == 1, self._checked(op, "queries", x)

    def _fixed(self, x: Floats) -> tuple[Any, ...]:
        """Queries as 16-bit integers (tq_index_queries)."""
        t = self._transform
        factors = [_core.index_step(b) for b in t.bits.tolist()]
        z = t.apply(x).astype(np.float64) * np.repeat(t.steps.astype(np.float64) * factors, transform.GROUP)
        largest = np.abs(z).max(axis=1)
        units = np.maximum(largest / 32767, np.abs(z).sum(axis=1) / (2**24 - t.padded))
        q = np.rint(z / np.where(units > 0, units, 1)[:, None]).astype(np.int16)
        wide = x.astype(np.float64)
        constants = np.zeros(len(x)) if t.mean is None else (wide * t.mean).sum(axis=1)
        squared = (wide * wide).sum(axis=1) if self._metric == "l2" else None
        return q, units, constants, squared

    def search(self, queries: Any, k: int, filter: Any = None, threads: int = 0) -> tuple[Floats, Ids]:
        """The k best vectors of each query: (scores, ids), float32 and int64 [queries, k], or [k] for a query
        [dim]; ids -1 with scores -inf (l2: inf) where fewer are left.

        filter: ids to look among (those that are not there are ignored), or a bool mask in the order of `ids`.
        threads: at most so many; 0: turboquant's own number.
        """
        k = _integer("search", "k", k, 1, 2**31)
        threads = _integer("search", "threads", threads, 0, 256)
        single, x = self._queries("search", queries)
        with self._lock:
            rows, total = self._rows(filter), self.ntotal
        few = max(1, min(k, total))
        scores = np.full((len(x), k), -np.inf, np.float32)
        ids = np.full((len(x), k), -1, np.int64)
        t = self._transform
        for at in range(0, len(x), _QUERIES):
            part = self._fixed(x[at : at + _QUERIES])
            found = _core.index_search(t.bits, t.steps, part, rows, few, threads)
            scores[at : at + _QUERIES, :few], ids[at : at + _QUERIES, :few] = found
        if self._metric == "l2":
            scores = np.where(np.isinf(scores), np.float32(np.inf), 0 - scores)
        return (scores[0], ids[0]) if single else (scores, ids)

    def range_search(
        self, queries: Any, threshold: float, filter: Any = None, threads: int = 0
    ) -> tuple[Ids, Floats, Ids]:
        """All vectors with scores of at least `threshold` (l2: at most): (lims, scores, ids), where query i has entries
        lims[i] .. lims[i + 1] - 1, best first."""
        limit = np.float32(threshold)
        if np.isnan(limit):
            raise ValueError("range_search: `threshold` must be a number, got nan")
        threads = _integer("range_search", "threads", threads, 0, 256)
        _, x = self._queries("range_search", queries)
        with self._lock:
            rows = self._rows(filter)
        sign = np.float32(-1 if self._metric == "l2" else 1)
        t = self._transform
        lims, all_scores, all_ids = [0], [np.empty(0, np.float32)], [np.empty(0, np.int64)]
        for at in range(len(x)):
            part = self._fixed(x[at : at + 1])
            found: list[tuple[Floats, Ids]] = []
            for row in rows:
                got = _core.index_scores(t.bits, t.steps, part, row, threads)[0]
                hit = np.flatnonzero((got >= sign * limit) & (True if row[5] is None else row[5] != 0))
                own = row[4][hit] if isinstance(row[4], np.ndarray) else row[4] + hit
                found.append((got[hit], own.astype(np.int64)))
            scores = np.concatenate([s for s, _ in found]) if found else np.empty(0, np.float32)
            ids = np.concatenate([i for _, i in found]) if found else np.empty(0, np.int64)
            order = np.lexsort((ids, -scores))
            all_scores.append(sign * scores[order] + np.float32(0))
            all_ids.append(ids[order])
            lims.append(lims[-1] + len(ids))
        return np.asarray(lims, np.int64), np.concatenate(all_scores), np.concatenate(all_ids)

    def reconstruct(self, ids: Any) -> Floats:
        """The vectors that codes stand for, float32 [n, dim], or [dim] for one id. ValueError if one is not there."""
        wanted = _id_array("reconstruct", np.atleast_1d(ids))
        with self._lock:
            rows = self._find(wanted)
            if (rows < 0).any():
                raise ValueError(f"reconstruct: `ids` must be in the index, got {wanted[int((rows < 0).argmax())]}")
            t = self._transform
            x = np.empty((len(wanted), self._dim), np.float32)
            for start, s in self._starts():
                inside = (rows >= start) & (rows < start + len(s))
                if inside.any():
                    at = rows[inside] - start
                    x[inside] = t.invert(
                        _core.index_decode(t.bits, t.steps, s.codes[at], s.sign_rows(at), s.scales[at])
                    )
        return x[0] if np.ndim(ids) == 0 else x

    # ---- copies and files ----

    def copy(self) -> Index:
        """An index of its own that shares what neither will change. A copy of a mapped index can be changed."""
        with self._lock:
            state = self.__getstate__()
        other = Index.__new__(Index)
        other.__setstate__(state)
        return other

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {key: value for key, value in self.__dict__.items() if key != "_lock"}
            segments = [segment.apart() for segment in self._segments]
        return {**state, "_segments": segments, "_read_only": None, "_loaded": None, "_lookup": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = RLock()
        _ALL.add(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a safetensors file, whole or not at all. Removed vectors are left out."""
        with self._lock:
            other = self.copy()
        other.compact()
        t, segments = other._transform, other._segments
        arrays: dict[str, list[NDArray[Any]]] = {"bits": [t.bits], "steps": [t.steps]}
        for name, array in (("mean", t.mean), ("matrix", t.matrix)):
            if array is not None:
                arrays[name] = [array]
        own = [s.all_ids for s in segments]
        first = int(own[0][0]) if own else 0
        consecutive = True
        for ids in own:
            consecutive = consecutive and bool((ids == np.arange(first, first + len(ids))).all())
            first += len(ids)
        if segments:
            arrays["codes"] = [s.codes for s in segments]
            arrays["signs"] = [s.signs for s in segments]
            if any(len(s) % storage.BLOCK for s in segments[:-1]):
                arrays["signs"] = [storage.blocks_of(np.concatenate([s.sign_rows() for s in segments]))]
            arrays["scales"] = [s.scales for s in segments]
            if segments[0].offsets is not None:
                arrays["offsets"] = [s.offsets for s in segments if s.offsets is not None]
            if not consecutive:
                arrays["ids"] = own
        meta = {
            "dim": self._dim,
            "bits": self._bits,
            "metric": self._metric,
            "seed": self._seed,
            "next_id": self._next_id,
            "first_id": int(own[0][0]) if own else 0,
        }
        storage.write(path, meta, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = True) -> Index:
        """Read an index. With `mmap` the file is mapped and the index cannot be changed. Header and sizes are checked;
        `verify` checks every byte. ValueError for a file that is not sound."""
        meta, arrays = storage.read(path, mmap)
        try:
            index = cls(meta["dim"], meta["bits"], meta["metric"], meta["seed"])
            index._next_id = _integer("load", "next_id", meta["next_id"], 0, 2**63)
            index._fill(meta, arrays)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a sound index file: {error}") from None
        index._loaded = meta, arrays
        index._read_only = os.fspath(path) if mmap else None
        return index

    def _fill(self, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        base = self._transform

        def get(name: str, kind: Any, *shape: int) -> NDArray[Any] | None:
            array = arrays.get(name)
            if array is not None and (array.dtype != kind or array.shape != shape):
                raise ValueError(
                    f"`{name}` must be {np.dtype(kind)} {list(shape)}, got {array.dtype} {list(array.shape)}"
                )
            return array

        bits, steps = get("bits", np.uint8, len(base.bits)), get("steps", np.float32, len(base.bits))
        if bits is None or steps is None:
            raise ValueError("`bits` and `steps` must be there")
        mean = get("mean", np.float32, self._dim)
        matrix = get("matrix", np.float32, base.padded, base.padded)
        for array in (mean, matrix):
            if array is not None and not np.isfinite(array).all():
                raise ValueError("`mean` and `matrix` must be finite")
        _core.index_encode(bits, steps, np.zeros((0, base.padded), np.float32))  # checks widths and steps
        self._transform = Transform(self._dim, self._seed, bits, steps, mean, matrix)
        codes = arrays.get("codes")
        if codes is None:
            return
        n = len(codes)
        coded = int(np.count_nonzero(bits))
        get("codes", np.uint8, n, 4 * (int(bits.astype(int).sum()) - coded))
        signs = get("signs", np.uint8, -(-n // storage.BLOCK), 4 * coded, storage.BLOCK)
        scales, offsets = get("scales", np.float32, n), get("offsets", np.float32, n)
        if signs is None or scales is None or (offsets is None) != (mean is None and self._metric != "l2"):
            raise ValueError("`signs` and `scales` must be there, and `offsets` with a mean or l2")
        ids = get("ids", np.int64, n)
        first = _integer("load", "first_id", meta["first_id"], 0, 2**63 - 1 - n)
        self._segments = [Segment(codes, signs, scales, offsets, first if ids is None else ids)]

    def verify(self) -> None:
        """Check every byte of a loaded index against the checksum of its file. ValueError if they differ."""
        if self._loaded is None:
            return
        meta, arrays = self._loaded
        try:
            damaged = storage.damaged(meta, arrays)
        except (KeyError, TypeError) as error:
            raise ValueError(f"verify: the file must be sound: {error!r}") from None
        if damaged:
            raise ValueError(f"verify: the bytes must be those that were saved, the checksum of {damaged} differs")
