"""Tables of 8 levels per head, made by K-means of a calibration's numbers, as in TurboESM (arXiv 2603.26110). TurboESM
rotates post-RoPE keys by their right singular vectors, quantises rotated keys and plain values to the nearest of 8
K-means centres each, and adds sign(residual) times its mean magnitude to the keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "LEVELS", "kmeans_table"]

LEVELS = 8
COLUMNS = LEVELS + 1  # and the mean magnitude of the quantisation error
_MOST_ITERATIONS = 200


def kmeans_table(numbers: NDArray[np.floating]) -> NDArray[np.float32]:
    """float32 [9]: 8 ascending centres by Lloyd's iteration, from evenly spaced quantiles until it converges, and the
    mean distance of a number to its centre. The order of the numbers does not matter."""
    x = np.sort(np.asarray(numbers, np.float64).reshape(-1))
    sums = np.concatenate([[0.0], np.cumsum(x)])
    levels = np.quantile(x, (np.arange(LEVELS) + 0.5) / LEVELS)
    for _ in range(_MOST_ITERATIONS):
        edges = np.concatenate([[0], np.searchsorted(x, (levels[1:] + levels[:-1]) / 2), [len(x)]])
        count = np.diff(edges)
        new = np.where(count > 0, (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(count, 1), levels)
        if np.array_equal(new, levels):
            break
        levels = new
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    return np.concatenate([levels, [np.abs(x - nearest).mean()]]).astype(np.float32)
