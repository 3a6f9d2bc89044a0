"""What `Index.train` learns. Candidates are judged by the recall of held-out rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .inputs import Floats, Ids
from .storage import Segment
from .transform import TWO_LEAD, Axes, Transform, bound, with_mean

JUDGES = 100_000  # the most rows of a sample that are used, spread evenly
_SAMPLE = 20_000  # the most rows that mean and axes are learnt from
_HELD = 1000  # the most rows that are held out as queries
LEAST = 64  # the fewest rows of a sample that candidates are judged on
_SIGMAS = (3.0, 3.5, 4.0)  # widths of the bound to try with axes
_WIDE_SIGMAS = (*_SIGMAS, 5.0, 6.0)  # with few coordinates a row that passes a wide bound costs little
_DIAL = tuple(0.25 * i for i in range(16))  # widths of the bound to try for `recall`
_MISSED = 0.0005  # share of the best rows that a bound below the widest may miss
_LOST = 0.004  # recall that axes may lose by their bound
_FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # multiples of k to try: how many rows are ranked again
_POWERS = (1.0, 0.5, 0.0)  # powers of variances to try in `transform.allocate`

Recalls = NDArray[np.float64]  # the recall of each query


class _Trial:
    """A sample divided into queries, every tenth row up to `_HELD`, and the rows that they search."""

    def __init__(self, x: Floats, metric: int) -> None:
        self.metric = metric
        which = np.arange(0, len(x), 10)[:_HELD]
        self.queries, self.rest = x[which], np.delete(x, which, axis=0)
        self.k = min(10, len(self.rest))
        queries, rest, lengths = self.queries, self.rest, np.float32(0)
        if metric == 2:  # squared distances lose fewer digits near the origin
            centre = rest.mean(axis=0, dtype=np.float64).astype(np.float32)
            queries, rest = queries - centre, rest - centre
            lengths = np.einsum("ij,ij->i", rest, rest) / 2
        self.truth: Ids = np.argpartition(lengths - queries @ rest.T, self.k - 1, axis=1)[:, : self.k]

    def encoded(self, t: Transform) -> Segment:
        return Segment(*_core.index_encode(t.space(self.metric), self.rest), 0)

    def found(self, t: Transform, rows: Segment, sigmas: float = math.inf) -> Ids:
        ids: Ids = _core.index_search(t.space(self.metric, sigmas), self.queries, (rows.core(None),), self.k)[1]
        return ids

    def recall(self, t: Transform, rows: Segment) -> Recalls:
        return _share(self.found(t, rows), self.truth)

    def width_for(self, t: Transform, share: float) -> float:
        """Returns the least width of a bound with which searches find this share of what a scan of all bits finds, or
        the transform's own width if no narrower one does."""
        rows = self.encoded(t)
        every = self.found(t, rows)
        for sigmas in _DIAL:
            if sigmas < t.sigmas < math.inf and _share(self.found(t, rows, sigmas), every).mean() >= share:
                return sigmas
        return t.sigmas

    def bounded(self, t: Transform, rows: Segment) -> tuple[float, Recalls]:
        """Returns the least width of a bound that misses almost nothing that a scan of all bits finds (`_MISSED`), at
        most 4 standard deviations, or 6 with few coordinates; and the recall with it."""
        every = self.found(t, rows)
        for sigmas in _WIDE_SIGMAS if t.channels <= TWO_LEAD else _SIGMAS:
            ids = self.found(t, rows, sigmas)
            if _share(ids, every).mean() >= 1 - _MISSED:
                break
        return sigmas, _share(ids, self.truth)


def with_factor(t: Transform, x: Floats, metric: int, share: float) -> Transform:
    """Returns `t`, which refines, with the least factor that finds this share of the true neighbours of held-out rows
    of x, or with the factor that finds most."""
    assert t.fine is not None and t.training is not None
    trial = _Trial(_spread(x, JUDGES), metric)
    rows, fine = trial.encoded(t), trial.encoded(t.fine)
    sigmas = bound(t.sigmas, rows.noise)
    best, most = 1, 0.0
    for factor in _FACTORS:
        if (k := factor * trial.k) > len(trial.rest):
            break
        ids = _core.index_search(t.space(metric, sigmas), trial.queries, (rows.core(None),), k)[1]
        scores = _core.index_scores_of(t.fine.space(metric), trial.queries, (fine.core(None),), ids)
        order = np.lexsort((ids, -scores), axis=1)[:, : trial.k]
        recall = float(_share(np.take_along_axis(ids, order, axis=1), trial.truth).mean())
        if recall > most:
            best, most = factor, recall
        if recall >= share:
            break
    return replace(t, factor=best, training={**t.training, "factor": best, "found": round(most, 4)})


def _share(ids: Ids, wanted: Ids) -> Recalls:
    shares: Recalls = (ids[:, :, None] == wanted[:, None, :]).any(axis=2).mean(axis=1)
    return shares


def _rises(before: Recalls, after: Recalls) -> bool:
    """Whether recall rises by more than two standard errors of the difference over the same queries."""
    gain = after - before
    return bool(gain.mean() > 2 * gain.std() / math.sqrt(len(gain)))


def _spread(x: Floats, most: int) -> Floats:
    """Returns at most this many rows of x, spread evenly."""
    return x[:: max(1, -(-len(x) // most))]


def choose(base: Transform, x: Floats, bits: int, metric: int, axes: bool, share: float | None = None) -> Transform:
    """Returns `base` as it is, with a mean, or with mean, axes and widths: what finds the most neighbours of held-out
    rows of x. Axes must find more by two standard errors, also with their bound (`_Trial.bounded`) and among more rows
    than they were learnt from. share: how much of what a scan of all bits finds the bound must keep, or None."""
    if len(x) < LEAST:
        return replace(with_mean(base, x), training={"chosen": "mean", "queries": 0, "recall": {}})
    judges, x = _spread(x, JUDGES), _spread(x, _SAMPLE)
    trial = _Trial(x, metric)
    recalls: dict[str, Recalls] = {}
    for name, t in (("none", base), ("mean", with_mean(base, trial.rest))):
        recalls[name] = trial.recall(t, trial.encoded(t))
    plain = "mean" if recalls["mean"].sum() > recalls["none"].sum() else "none"
    chosen = with_mean(base, x) if plain == "mean" else base
    what: dict[str, Any] = {"chosen": plain}
    if axes and (best := _best_axes(trial, base, bits, recalls, recalls[plain])):
        power, together, sigmas = best
        learnt = Axes(base, x).transform(bits, power, together)
        if learnt is not None and (len(judges) == len(x) or _holds(_Trial(judges, metric), chosen, learnt, sigmas)):
            chosen = replace(learnt, sigmas=sigmas)
            what = {"chosen": "axes", "power": power, "together": together, "sigmas": sigmas}
            what["widths"] = chosen.bits.tolist()
    if share is not None:
        chosen = replace(chosen, sigmas=trial.width_for(chosen, share))
        what["sigmas"] = chosen.sigmas if math.isfinite(chosen.sigmas) else None
    means = {name: round(float(recall.mean()), 4) for name, recall in recalls.items()}
    return replace(chosen, training={**what, "queries": len(trial.queries), "recall": means})


def _holds(trial: _Trial, plain: Transform, axes: Transform, sigmas: float) -> bool:
    """Whether axes find more than `plain` by two standard errors among the rows of a trial."""
    before = trial.recall(plain, trial.encoded(plain))
    return _rises(before, _share(trial.found(axes, trial.encoded(axes), sigmas), trial.truth))


def _best_axes(
    trial: _Trial, base: Transform, bits: int, recalls: dict[str, Recalls], plain: Recalls
) -> tuple[float, bool, float] | None:
    """Returns (power, together, sigmas) of the axes that find most, or None if none find more than `plain`. Adds the
    recall of each candidate to `recalls`."""
    learnt = Axes(base, trial.rest)
    tried: dict[str, tuple[float, bool, Transform]] = {}
    for power in _POWERS:
        for together in (False, True):
            t = learnt.transform(bits, power, together)
            if t is None:
                return None
            name = f"axes, power {power:g}" + (", together" if together else "")
            recalls[name] = trial.recall(t, trial.encoded(t))
            tried[name] = power, together, t
    for name in sorted(tried, key=lambda name: -recalls[name].mean()):
        power, together, t = tried[name]
        if not _rises(plain, recalls[name]):
            return None
        sigmas, recall = trial.bounded(t, trial.encoded(t))
        if _rises(plain, recall) and recalls[name].mean() - recall.mean() <= _LOST:
            return power, together, sigmas
    return None
