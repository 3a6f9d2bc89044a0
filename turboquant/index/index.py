"""`Index`: adds vectors, and searches them by inner product, cosine or distance straight from their codes."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from threading import RLock
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..arguments import bounded, integer_in, quoted
from ..files import existing_file, write_arrays
from . import file, inputs, refining, storage, training, transform
from .contents import Contents
from .inputs import Floats, Ids, id_array
from .lists import PER_LIST, learn
from .storage import Segment
from .transform import Transform

METRICS = ("ip", "cosine", "l2")
_BITS = (1, 2, 3, 4, 5, 6, 8)
_QUERIES = 256  # queries of one pass over the rows
_COMPACT = 0.5  # share of removed rows above which `remove` calls `compact`

_ALL: WeakSet[Index] = WeakSet()


def _unlock_in_child() -> None:
    """Makes new locks in a forked child: threads that held the old ones do not survive a fork."""
    for index in list(_ALL):
        index._lock = RLock()


os.register_at_fork(after_in_child=_unlock_in_child)


def _best(
    space: Any, x: Floats, rows: tuple[Any, ...], k: int, ntotal: int, threads: int, probe: int
) -> tuple[Floats, Ids]:
    """Returns (scores, ids) [queries, k]. rows: segments as the core takes them."""
    few = max(1, min(k, ntotal))
    parts = [
        _core.index_search(space, x[at : at + _QUERIES], rows, few, threads, probe) for at in range(0, len(x), _QUERIES)
    ]
    if len(parts) == 1 and few == k:
        return parts[0]
    scores = np.full((len(x), k), -np.inf, np.float32)
    ids = np.full((len(x), k), -1, np.int64)
    for i, part in enumerate(parts):
        where = np.s_[_QUERIES * i : _QUERIES * (i + 1), :few]
        scores[where], ids[where] = part
    return scores, ids


class Index:
    """An index of vectors in `bits` bits a number.

    dim: numbers of a vector, 1..4096. bits: 1..6 or 8. seed: 0..2**63 - 1, for the random rotation.
    metric: "ip" and "cosine": scores are inner products (of unit vectors), larger first; "l2": squared distances,
        smaller first.
    lists: 0, or how many lists (an inverted file) `train` divides vectors into, up to 2**20; `search(probe=p)` then
        reads only the p lists nearest to the query.
    refine: "int8" also keeps each vector in 8 bits a number, and `search` ranks again by them what it finds; or None.

    A search bounds each row's score from the leading bits of its numbers. It uses all bits to score the rows that may
    be among the best. Of equal scores the smaller id is better. Results do not depend on threads, on how rows were
    added, or on the instruction set.

    Threads: a search works on the contents at the time of its call, waits for nothing and releases the GIL while it
    scans. `train`, `add`, `remove` and `compact` wait only for one another. A forked child can use the index.

    Raises TypeError or ValueError; the message names the argument, and the index stays as it was.
    """

    def __init__(
        self, dim: int, bits: int = 3, metric: str = "ip", seed: int = 0, lists: int = 0, refine: str | None = None
    ) -> None:
        self._dim = bounded("Index: `dim`", dim)
        self._bits = bounded("Index: `bits`", bits)
        if self._bits not in _BITS:
            raise ValueError(f"Index: `bits` must be one of {', '.join(map(str, _BITS))}, got {bits}")
        if metric not in METRICS:
            raise ValueError(f"Index: `metric` must be one of {', '.join(METRICS)}, got {metric!r}")
        self._metric = metric
        self._seed = bounded("Index: `seed`", seed)
        self._lists = bounded("Index: `lists`", lists)
        if refine not in (None, "int8"):
            raise ValueError(f"Index: `refine` must be None or 'int8', got {refine!r}")
        self._refine = refine
        base = transform.untrained(self._dim, self._bits, self._seed)
        self._contents = Contents(self._with_fine(base, None))
        self._read_only: str | None = None
        self._loaded: tuple[dict[str, Any], dict[str, NDArray[Any]]] | None = None
        self._lock = RLock()  # for changes of `_contents`
        _ALL.add(self)

    # ---- properties ----

    @property
    def d(self) -> int:
        """Numbers of a vector."""
        return self._dim

    @property
    def bits(self) -> int:
        """Bits of a number; after `train` with axes, the largest average."""
        return self._bits

    @property
    def metric(self) -> str:
        """ "ip", "cosine" or "l2"."""
        return self._metric

    @property
    def lists(self) -> int:
        """The number of lists; 0: none."""
        return self._lists

    @property
    def refine(self) -> str | None:
        """ "int8", or None."""
        return self._refine

    @property
    def is_trained(self) -> bool:
        """Whether `train` was called. An untrained index works too."""
        return self._contents.transform.training is not None

    @property
    def training(self) -> dict[str, Any] | None:
        """What `train` chose, and why: None before it, or a dict of

        chosen: "none", "mean", "axes" or "lists". With axes also widths, the bits of each 32 of them; power and
            together, how widths were chosen; sigmas, the width of a search's bound in standard deviations. With
            `recall` and `refine` also factor, and found, the recall with that factor.
        queries: the number of held-out rows of the sample. recall: by name of each candidate, the share of their 10
            nearest neighbours that it found.
        """
        return copy.deepcopy(self._contents.transform.training)

    @property
    def sigmas(self) -> float:
        """The width of a search's bound, in standard deviations of the estimate from the leading bits. It is wide
        enough for the rows in the index. Infinite: searches read all bits of all rows."""
        return self._contents.sigmas

    @property
    def ids(self) -> Ids:
        """The ids of all vectors in the order in which they were added. With lists, those that `compact` or a file has
        sorted are in the order of the lists."""
        return self._contents.ids

    @property
    def ntotal(self) -> int:
        """Vectors in the index."""
        return self._contents.ntotal

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored: rows, ids that were given, and what `train` learnt."""
        return self._contents.nbytes

    @property
    def fixed_nbytes(self) -> int:
        """The part of `nbytes` that does not grow with the vectors: what `train` learnt, and widths."""
        return self._contents.transform.nbytes

    def __len__(self) -> int:
        return self.ntotal

    def __contains__(self, value: object) -> bool:
        if not hasattr(value, "__index__"):
            return False
        number = value.__index__()
        return 0 <= number < 2**63 and bool(self._contents.find(np.array([number]))[0] >= 0)

    def __repr__(self) -> str:
        about = f"{self.ntotal} vectors of {self._dim} numbers, {self._bits} bits, {self._metric}"
        training = self._contents.transform.training
        if training is not None:
            about += f", trained: {training['chosen']}"
            if "widths" in training:
                about += f" of {' and '.join(map(str, sorted({*training['widths']})))} bits"
        if self._lists:
            about += f", {self._lists} lists"
        if self._refine:
            about += f", refined by {self._refine}"
        if math.isinf(self._contents.sigmas):
            about += ", searches read all bits of all rows"
        elif self.ntotal:
            about += f", searches skip rows by a bound of {self._contents.sigmas:g} deviations"
        return f"<Index: {about}>"

    # ---- changes ----

    def _writable(self, op: str) -> None:
        if self._read_only:
            raise ValueError(
                f"{op}: the index is mapped from {self._read_only}; Index.load(path, mmap=False) can change"
            )

    def train(self, sample: Any, axes: bool = True, recall: float | None = None) -> None:
        """Learn the mean of `sample`, [n, dim] as in `add`, and with `axes` its principal axes and a width of 0..6 or
        8 bits for each 32 of them. Each is kept only if more neighbours of held-out rows of the sample are found with
        it; axes must find more by two standard errors. `training` says what was chosen. The index must be empty.

        recall: the least share, above 0 and at most 1, that a search shall find of what a scan of all bits finds. The
            bound of searches becomes the narrowest that finds this share for held-out rows, so that searches read less.
            Needs 64 rows. In an index that refines it is a share of the true neighbours, and it sets the least `factor`
            of `search` that finds this share, or the factor that finds most.

        An index with lists learns their centres instead, by k-means over up to 256 rows of the sample for each list. It
        needs faiss-cpu or scikit-learn, and raises ImportError without them.
        """
        self._writable("train")
        share = None if recall is None else inputs.number("train", "recall", recall, 0, 1)
        if share == 0:
            raise ValueError("train: `recall` must be above 0 and at most 1, got 0")
        x = inputs.vectors("train", "sample", sample, self._dim)
        if x.ndim != 2 or len(x) < 2:
            raise ValueError(f"train: `sample` must have at least 2 rows, got shape {list(x.shape)}")
        if share is not None and len(x) < training.LEAST:
            raise ValueError(f"train: `recall` needs a sample of at least {training.LEAST} rows, got {len(x)}")
        if self._lists and share is not None:
            raise ValueError("train: `recall` must be None with lists; choose `probe` and `sigmas` of `search`")
        if len(x) < self._lists:
            raise ValueError(f"train: `sample` must have a row for each of {self._lists} lists, got {len(x)} rows")
        step = -(-len(x) // max(training.JUDGES, PER_LIST * self._lists))
        sample, x = x[::step], inputs.as_float32(x[::step])
        inputs.check("train", "sample", x, self._metric, step * np.arange(len(x)), sample)
        exponent = 0
        if self._metric == "cosine":
            x = inputs.normalised(x)
        elif exponent := inputs.exponent(x):
            x = np.ldexp(x, -exponent)
        with self._lock:
            if self._contents.segments:
                raise ValueError(f"train: the index must be empty, it has {self.ntotal} vectors")
            base = replace(transform.untrained(self._dim, self._bits, self._seed), exponent=exponent)
            if self._lists:
                chosen = self._with_lists(base, x)
            else:
                own = share if self._refine is None else None
                chosen = training.choose(base, x, self._bits, METRICS.index(self._metric), axes, own)
                chosen = self._with_fine(chosen, chosen.mean)
                if self._refine and share is not None:
                    chosen = training.with_factor(chosen, x, METRICS.index(self._metric), share)
            self._contents = replace(self._contents, transform=chosen)

    def _with_lists(self, base: Transform, x: Floats) -> Transform:
        metric = METRICS.index(self._metric)
        learnt = learn(x, self._lists, self._metric == "l2", self._seed, lambda core: (*base.space(metric), core))
        trained = replace(base, lists=learnt, training={"chosen": "lists", "queries": 0, "recall": {}})
        return self._with_fine(trained, transform.with_mean(base, x).mean)

    def _with_fine(self, base: Transform, mean: Floats | None) -> Transform:
        return base if self._refine is None else transform.with_fine(base, refining.factor_for(self._bits), mean)

    def _space(self, contents: Contents, sigmas: float | None = None) -> Any:
        return contents.transform.space(METRICS.index(self._metric), sigmas)

    def add(self, x: Any, ids: Any = None) -> Ids:
        """Add vectors [n, dim] or [dim]: an array of numbers, a torch tensor or lists. float32 is read in place; other
        types are converted to float32, 16,384 rows at a time. ids: n integers in 0..2^63 - 1 that are not in the index;
        by default those that follow the largest id ever used. Returns the ids, int64 [n].

        An index with lists must be trained first. New rows form a tail that every search reads, until `compact` sorts
        them into the lists; `save` sorts them in the file.
        """
        self._writable("add")
        x = inputs.vectors("add", "x", x, self._dim)
        x = x.reshape(-1, self._dim)
        n = len(x)
        own_ids = None if ids is None else id_array("add", ids)
        with self._lock:
            now = self._contents
            if self._lists and now.transform.lists is None:
                raise ValueError("add: the index has lists, whose centres `train` must learn first")
            if own_ids is not None:
                if len(own_ids) != n:
                    raise ValueError(f"add: `ids` must be {n} ids, one a vector, got {len(own_ids)}")
                now.check_new(own_ids)
            elif now.next_id + n > 2**63:
                raise ValueError("add: `ids` must be given, because the largest id was used")
            try:
                new = self._encoded(now, x, own_ids)
            except inputs.TooLarge:
                now = now.divided(max(inputs.exponent(inputs.as_float32(part)) for part in storage.parts(x)))
                new = self._encoded(now, x, own_ids)
            if n:
                after = now.next_id + n if own_ids is None else max(now.next_id, int(own_ids.max()) + 1)
                self._contents = now.with_rows(new, after)
            if own_ids is not None:
                return own_ids.copy()
            new_ids = np.arange(n)
            new_ids += now.next_id if n else 0  # in place: there may be many
            return new_ids

    def _encoded(self, now: Contents, x: Any, own_ids: Ids | None) -> list[Segment]:
        new, at, fine = [], 0, now.transform.fine
        for part in storage.parts(x):
            rows = inputs.as_float32(part)
            rows = np.ldexp(rows, -now.transform.exponent) if now.transform.exponent else rows
            own = now.next_id + at if own_ids is None else own_ids[at : at + len(rows)]
            with inputs.explained("add", "x", rows, self._metric, at, part):
                of = None if now.transform.lists is None else _core.index_assign(self._space(now), rows)
                coded = Segment(*_core.index_encode(self._space(now), rows, lists=of), own, lists=of)
                if fine is not None:
                    coded.fine = Segment(*_core.index_encode(fine.space(METRICS.index(self._metric)), rows), own)
                new.append(coded)
            at += len(rows)
            del rows  # before the next are converted
        return new

    def remove(self, ids: Any) -> None:
        """Remove vectors by id. Raises ValueError and removes none if an id is not in the index."""
        self._writable("remove")
        wanted = np.unique(id_array("remove", np.atleast_1d(ids)))
        with self._lock:
            left = self._contents.without_rows(self._known("remove", wanted))
            self._contents = left.compact() if left.ntotal < (1 - _COMPACT) * left.stored else left

    def compact(self) -> None:
        """Free the memory of removed vectors. `remove` does so once more than half of the rows are removed. With lists,
        also sort new rows into them."""
        self._writable("compact")
        with self._lock:
            self._contents = self._contents.compact()

    # ---- looking up ----

    def _known(self, op: str, ids: Ids, contents: Contents | None = None) -> Ids:
        """Returns the rows of ids. Raises ValueError if one is not in the index."""
        rows = (contents or self._contents).find(ids)
        if (rows < 0).any():
            raise ValueError(f"{op}: `ids` must be in the index, got {ids[int((rows < 0).argmax())]}")
        return rows

    def _queries(self, op: str, queries: Any, now: Contents) -> tuple[bool, Floats, Contents]:
        """Returns whether there is one query [dim], the queries for the core, and contents of an exponent for both."""
        vectors = inputs.vectors(op, "queries", queries, self._dim)
        x = inputs.as_float32(vectors).reshape(-1, self._dim)
        inputs.check(op, "queries", x, self._metric, given=vectors)
        if self._metric != "cosine":
            now = now.divided(max(now.transform.exponent, inputs.exponent(x)))
            x = np.ldexp(x, -now.transform.exponent) if now.transform.exponent else x
        return vectors.ndim == 1, x, now

    def search(
        self,
        queries: Any,
        k: int,
        filter: Any = None,
        threads: int = 0,
        *,
        sigmas: float | None = None,
        refine: Any = None,
        factor: int | None = None,
        probe: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best vectors for each query: (scores, ids), float32 and int64 [queries, k], or [k] for a query
        [dim]; ids -1 with scores -inf (l2: inf) where there are fewer than k.

        queries: [queries, dim] or [dim], as in `add`.
        filter: ids to search among (unknown ones are ignored), or a bool mask in the order of `ids`.
        threads: how many to use at most; 0: as many as `turboquant._core.num_threads()`.
        sigmas: the width of the bound in standard deviations, at least 0, instead of the index's own. With a narrow
            bound a search reads less and finds less; with `math.inf` it reads all bits of all rows.
        refine: the vectors themselves, [n, dim], such as a mapped array of float32 or float16 or a tensor of bfloat16.
            Row i must be the vector with the id i. factor * k rows are found by their codes. The k best of them by
            exact scores are returned, with these scores.
        factor: at least 1, for `refine` here and for an index that refines. None: in an index that refines, what
            `train` chose with `recall`; otherwise 10 at 1 bit, 3 at 2 bits, 2 from 3 bits on. With `refine` here, an
            index that refines first ranks by its 8 bits, with its own factor.
        probe: for an index with lists, how many of them each query reads: the nearest to it that have rows which
            `filter` allows. None: all. If at most 1 row in 50 is allowed, all allowed rows are scored.
        """
        k = bounded("search: `k`", k)
        threads = bounded("search: `threads`", threads)
        width = None if sigmas is None else inputs.number("search", "sigmas", sigmas, 0, math.inf)
        if refine is not None:
            return self._refined(queries, k, filter, threads, width, refine, factor, probe)
        if factor is not None and self._refine is None:
            raise ValueError("search: `factor` needs `refine`, the vectors themselves, or an index that refines")
        most = self._probed(probe)
        single, x, now = self._queries("search", queries, self._contents)
        space, rows = self._space(now, now.sigmas if width is None else width), now.rows(filter)
        if self._refine is None:
            scores, ids = _best(space, x, rows, k, now.ntotal, threads, most)
        else:
            times = now.transform.factor if factor is None else bounded("search: `factor`", factor)
            more = min(k * times, max(k, now.ntotal), 2**20)
            candidates = _best(space, x, rows, more, now.ntotal, threads, most)[1]
            scores, ids = refining.by_codes(now, METRICS.index(self._metric), x, candidates, k, threads)
        if self._metric == "l2":
            scores = np.where(np.isinf(scores), np.float32(np.inf), 0 - scores)
        scores = inputs.undivided(scores, now.transform.exponent)
        return (scores[0], ids[0]) if single else (scores, ids)

    def _probed(self, probe: int | None) -> int:
        """Returns how many lists a query reads, or 1 without lists."""
        if probe is None:
            return max(1, self._lists)
        if not self._lists:
            raise ValueError("search: `probe` needs lists: Index(.., lists=n)")
        return integer_in(probe, "search: `probe`", 1, self._lists)

    def _refined(
        self,
        queries: Any,
        k: int,
        filter: Any,
        threads: int,
        sigmas: float | None,
        refine: Any,
        factor: int | None,
        probe: int | None,
    ) -> tuple[Floats, Ids]:
        rows = refining.rows_of(refine, self._dim)
        times = refining.factor_for(self._bits) if factor is None else bounded("search: `factor`", factor)
        x = inputs.as_float32(inputs.vectors("search", "queries", queries, self._dim))
        candidates = self.search(
            x, min(k * times, max(k, len(self)), 2**20), filter, threads, sigmas=sigmas, probe=probe
        )[1]
        single = candidates.ndim == 1
        scores, ids = refining.best(x.reshape(-1, self._dim), np.atleast_2d(candidates), rows, self._metric, k)
        if self._metric == "l2":
            scores = np.where(ids < 0, np.float32(np.inf), 0 - scores)
        return (scores[0], ids[0]) if single else (scores, ids)

    def range_search(
        self, queries: Any, threshold: float, filter: Any = None, threads: int = 0
    ) -> tuple[Ids, Floats, Ids]:
        """All vectors with scores of at least `threshold` (l2: at most): (lims, scores, ids), int64 [queries + 1],
        float32 and int64. Query i has entries lims[i] .. lims[i + 1] - 1, best first. Arguments as in `search`."""
        try:
            limit = np.float32(threshold.__float__())
        except (AttributeError, TypeError):  # text too
            raise TypeError(f"range_search: `threshold` must be a number, got {quoted(threshold)}") from None
        if np.isnan(limit):
            raise ValueError("range_search: `threshold` must be a number, got nan")
        threads = bounded("range_search: `threads`", threads)
        _, x, now = self._queries("range_search", queries, self._contents)
        space, rows = self._space(now), now.rows(filter)
        sign = np.float32(-1 if self._metric == "l2" else 1)
        lims, all_scores, all_ids = [0], [np.empty(0, np.float32)], [np.empty(0, np.int64)]
        for at in range(len(x)):
            parts: list[tuple[Floats, Ids]] = []
            for row in rows:
                got = _core.index_scores_of(space, x[at : at + 1], (row,), None, threads)[0]
                got = inputs.undivided(got, now.transform.exponent)
                hit = np.flatnonzero((got >= sign * limit) & (True if row[5] is None else row[5] != 0))
                own = row[4][hit] if isinstance(row[4], np.ndarray) else row[4] + hit
                parts.append((got[hit], own.astype(np.int64)))
            scores = np.concatenate([s for s, _ in parts]) if parts else np.empty(0, np.float32)
            ids = np.concatenate([i for _, i in parts]) if parts else np.empty(0, np.int64)
            order = np.lexsort((ids, -scores))
            all_scores.append(sign * scores[order] + np.float32(0))
            all_ids.append(ids[order])
            lims.append(lims[-1] + len(ids))
        return np.asarray(lims, np.int64), np.concatenate(all_scores), np.concatenate(all_ids)

    def reconstruct(self, ids: Any) -> Floats:
        """The vectors decoded from their codes, float32 [n, dim], or [dim] for one id. ValueError for an unknown id."""
        wanted = id_array("reconstruct", np.atleast_1d(ids))
        now = self._contents
        rows, t = self._known("reconstruct", wanted, now), now.transform
        x = np.empty((len(wanted), self._dim), np.float32)
        for start, s in now.starts():
            inside = (rows >= start) & (rows < start + len(s))
            if inside.any():
                at = rows[inside] - start
                x[inside] = t.decoded(s, at)
        return x[0] if np.ndim(ids) == 0 else x

    # ---- copies and files ----

    def copy(self) -> Index:
        """An independent index, which shares immutable rows. A copy of a mapped index can be changed."""
        other = Index.__new__(Index)
        other.__setstate__(self.__getstate__())
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key != "_lock"}
        return {**state, "_contents": self._contents.apart(), "_read_only": None, "_loaded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = RLock()
        _ALL.add(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a safetensors file, whole or not at all. Removed vectors are left out."""
        self._save(path, {})

    def _save(self, path: str | os.PathLike[str], more: dict[str, list[NDArray[Any]]]) -> None:
        """Saves the index with other arrays in the same file, which `load` ignores."""
        now = self._contents.apart().compact()  # apart: rows may be added to a segment meanwhile
        meta = {
            "dim": self._dim,
            "bits": self._bits,
            "metric": self._metric,
            "seed": self._seed,
            "lists": self._lists,
            "refine": self._refine,
        }
        write_arrays(path, storage.FORMAT, {**meta, **file.meta_of(now)}, {**more, **file.arrays_of(now)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = True) -> Index:
        """Read an index. With `mmap` the file is mapped and the index cannot be changed; header, sizes and ids are
        checked now, and every byte by `verify`. Without `mmap` every byte is checked now. FileNotFoundError if there is
        no file, ValueError if it is damaged."""
        name = existing_file(path, "a file of an index")
        try:
            meta, arrays = storage.read(name, mmap)
            index = cls(*(meta[name] for name in ("dim", "bits", "metric", "seed", "lists", "refine")))
            base = index._contents.transform
            index._contents = file.contents(base, METRICS.index(index._metric), index._lists, meta, arrays)
            index._loaded = meta, arrays
            if not mmap:
                index.verify()
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"`path` must be a file of an index, got {name!r}: {error}") from None
        index._read_only = name if mmap else None
        return index

    def verify(self) -> None:
        """Check every byte of a loaded index against the checksum of its file. ValueError if they differ."""
        if self._loaded is None:
            return
        meta, arrays = self._loaded
        try:
            damaged = storage.damaged(meta, arrays)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the file must be sound: {error!r}") from None
        if damaged:
            raise ValueError(f"its bytes must be those that were saved, got others in {', '.join(damaged)}")
