"""Axes of a head's vectors: those of calibrated plans, and TurboESM's. NumPy, float64 inside. The sign of an axis is
arbitrary, so its largest entry is made positive, on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["plan_axes", "singular_axes", "variance_along"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
PULL = 0.25  # weight of the cost beside the covariance; quality is flat from 0.15 to 0.5
_LEAST = 1e-6  # smaller eigenvalues count as this fraction of the largest


def plan_axes(covariance: NDArray[np.floating], cost: NDArray[np.floating]) -> F32:
    """Axes [.., head_dim, head_dim], one per row, of a calibrated plan: eigenvectors of
    log(covariance) + PULL * log(cost), by falling eigenvalue.

    covariance  [.., head_dim, head_dim] of the vectors.  cost  of the same shape: the metric of what errors cost.

    Principal axes alone (PULL of 0) are best if all errors cost the same. They do not: queries, and the output
    projection behind values, weigh some directions more than others. If one set of axes makes both matrices diagonal,
    it is found; otherwise the result is a compromise, because the transform has to be orthogonal.
    """
    return _rows(np.linalg.eigh(_log(covariance) + PULL * _log(cost))[1])


def singular_axes(centre: NDArray[np.floating], covariance: NDArray[np.floating]) -> F32:
    """Right singular vectors [.., head_dim, head_dim], one per row, by falling singular value, of vectors of this
    centre [.., head_dim] and covariance [.., head_dim, head_dim], which are not centred (TurboESM)."""
    mean = centre.astype(np.float64)
    moment = covariance.astype(np.float64) + mean[..., :, None] * mean[..., None, :]
    return _rows(np.linalg.eigh(moment)[1])


def variance_along(axes: NDArray[np.floating], matrix: NDArray[np.floating]) -> F64:
    """[.., head_dim]: a^T matrix a of each axis a, at least 0."""
    wide = axes.astype(np.float64)
    along: F64 = ((wide @ matrix.astype(np.float64)) * wide).sum(-1)
    return np.maximum(along, 0)


def _log(matrix: NDArray[np.floating]) -> F64:
    values, vectors = np.linalg.eigh(matrix.astype(np.float64))
    floor = np.maximum(_LEAST * values[..., -1:], np.finfo(np.float64).tiny)
    logarithm: F64 = (vectors * np.log(np.maximum(values, floor))[..., None, :]) @ vectors.swapaxes(-1, -2)
    return logarithm


def _rows(vectors: F64) -> F32:
    """The columns of `eigh`, by rising eigenvalue, as rows by falling eigenvalue."""
    rows = vectors.swapaxes(-1, -2)[..., ::-1, :]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[..., None], -1)
    signed: F32 = (rows * np.sign(largest)).astype(np.float32)
    return signed
