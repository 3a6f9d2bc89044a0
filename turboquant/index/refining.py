"""Scores again the rows that a search found: from their 8-bit copies, or exactly from the caller's vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _core
from . import inputs
from .contents import Contents
from .inputs import Floats, Ids

_TOGETHER = 2**22  # how many numbers are gathered at a time
_FACTORS = {1: 10, 2: 3}  # by bits of the index: how many times k rows are scored again


def factor_for(bits: int) -> int:
    return _FACTORS.get(bits, 2)


def by_codes(now: Contents, metric: int, queries: Floats, candidates: Ids, k: int, threads: int) -> tuple[Floats, Ids]:
    """Returns (scores, ids), float32 and int64 [queries, k]: the k best candidates by their 8-bit copies, -inf and -1
    where there are fewer. Scores are the core's: larger is better, also with l2."""
    assert now.transform.fine is not None
    rows = now.find(candidates.ravel()).reshape(candidates.shape)
    scores = _core.index_scores_of(now.transform.fine.space(metric), queries, now.fine_rows(), rows, threads)
    order = np.lexsort((candidates, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(candidates, order, axis=1)


def rows_of(refine: Any, dim: int) -> Any:
    """Checks type and shape of the caller's vectors, not their numbers."""
    x = inputs.vectors("search", "refine", refine, dim)
    if x.ndim != 2:
        raise ValueError(f"search: `refine` must be of shape [n, {dim}], got {list(x.shape)}")
    return x


def best(queries: Floats, candidates: Ids, refine: Any, metric: str, k: int) -> tuple[Floats, Ids]:
    """Returns (scores, ids), float32 and int64 [queries, k]: the k best candidates by their exact scores, -inf and -1
    where there are fewer. Larger scores are better, also with l2."""
    if (most := int(candidates.max(initial=-1))) >= len(refine):
        raise ValueError(f"search: `refine` must have a row for every id, got {len(refine)} rows, but the id {most}")
    scores = np.empty((len(queries), k), np.float32)
    ids = np.empty((len(queries), k), np.int64)
    if metric == "cosine":
        queries = inputs.normalised(queries)
    step = max(1, _TOGETHER // max(1, candidates.shape[1] * queries.shape[1]))
    for at in range(0, len(queries), step):
        own, near = queries[at : at + step], candidates[at : at + step]
        exact, exponent = _scores(own, near, refine, metric)
        exact[near < 0] = -np.inf
        order = np.lexsort((near, -exact), axis=1)[:, :k]
        part = np.s_[at : at + step, : order.shape[1]]
        scores[part] = inputs.undivided(np.take_along_axis(exact, order, axis=1), exponent)
        ids[part] = np.take_along_axis(near, order, axis=1)
    return scores, ids


def _scores(queries: Floats, candidates: Ids, refine: Any, metric: str) -> tuple[Floats, int]:
    """Returns scores [queries, m] of vectors that are divided by 2^exponent, and the exponent."""
    ids = candidates.ravel()
    there = ids >= 0
    own = inputs.as_float32(refine[ids[there]])
    inputs.check("search", "refine", own, metric, ids[there])
    if metric == "cosine":
        own, exponent = inputs.normalised(own), 0
    elif exponent := max(inputs.exponent(own), inputs.exponent(queries)):
        own, queries = np.ldexp(own, -exponent), np.ldexp(queries, -exponent)
    rows = np.zeros((len(ids), queries.shape[1]), np.float32)
    rows[there] = own
    rows = rows.reshape(*candidates.shape, -1)
    if metric != "l2":
        return np.matmul(rows, queries[:, :, None])[:, :, 0], exponent
    rows -= queries[:, None]
    return -np.einsum("qij,qij->qi", rows, rows), exponent
