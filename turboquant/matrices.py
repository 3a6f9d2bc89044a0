"""The matrices of a spec, as operators take them: rotations of both sides, and the rows of a sketch below those of
keys. NumPy only. Random numbers come from the spec's seed.

    rotation    R [heads or 1, head_dim, head_dim], y = R x
    sketch      S [sketch_rows, head_dim] of N(0, 1), applied to the quantisation error of y (turboquant.h, tq_sketch)
    split       outlier channels first: R = diag(R_first, R_rest) P, where P is the permutation that puts them first
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from . import _core
from .plan import GROUP, Plan, Side
from .spec import CacheSpec, first_part

__all__ = ["is_split", "side_matrix", "split_rotation"]

F32 = NDArray[np.float32]


def is_split(spec: CacheSpec, side: str) -> bool:
    """Whether the channels of "key" or "value" are split by magnitude into two parts."""
    return spec.outliers != "none" and isinstance(getattr(spec, f"{side}_bits"), float)


def side_matrix(spec: CacheSpec, side: str, head_dim: int, rotation: F32 | None = None) -> F32 | None:
    """Returns ``<side>_rotation`` as operators take it, [heads or 1, rows, head_dim], or None if the plan needs none.

    rotation: [heads, head_dim, head_dim] if it comes from data (split, calibrated, svd); otherwise it is made here.
    """
    if rotation is None and spec.rotation_of(side) == "dense":
        rotation = _core.haar(spec.seed, head_dim)[None]
    rows = spec.sketch_rows(head_dim) if side == "key" else 0
    if not rows:
        return rotation
    sketch = _core.gaussian(spec.seed, rows, head_dim)[None]
    if rotation is None:
        return sketch
    return np.concatenate([rotation, np.broadcast_to(sketch, (len(rotation), *sketch.shape[1:]))], axis=1)


def split_rotation(spec: CacheSpec, side: str, magnitude: NDArray[np.floating]) -> F32:
    """Returns the rotation of a split, [kv_heads, head_dim, head_dim], from magnitudes [kv_heads, head_dim]. Only their
    order matters; channels of equal magnitude stay in order. Each part has the spec's rotation for its number of
    channels, like two independent quantisers (TurboQuant, arXiv 2504.19874, section 4.3)."""
    heads, head_dim = magnitude.shape
    first = GROUP * first_part(getattr(spec, f"{side}_bits"), head_dim)
    out = np.zeros((heads, head_dim, head_dim), np.float32)
    for matrix, order in zip(out, np.argsort(-magnitude, axis=-1, kind="stable")):
        chosen, rest = np.sort(order[:first]), np.sort(order[first:])
        matrix[:first, chosen] = _plain_rotation(spec.rotation_of(side), first, spec.seed)
        matrix[first:, rest] = _plain_rotation(spec.rotation_of(side), head_dim - first, spec.seed)
    return out


@cache
def _plain_rotation(kind: str, dim: int, seed: int) -> F32:
    """Returns a rotation, [dim, dim]."""
    if kind == "dense":
        return _core.haar(seed, dim)
    plan = Plan(dim, Side(1, kind), seed=seed)
    return np.ascontiguousarray(_core.rotate(plan.words, np.eye(dim, dtype=np.float32)).T)
