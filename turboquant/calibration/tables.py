"""Tables of 8 levels per head, made by K-means of a calibration's numbers, and the axes they belong to: TurboESM (arXiv
2603.26110), which takes the right singular vectors of post-RoPE keys as their rotation, quantises rotated keys and
plain values to the nearest of 8 K-means centres each, and adds sign(residual) times its mean magnitude to the keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "LEVELS", "kmeans_table", "singular_axes"]

LEVELS = 8
COLUMNS = LEVELS + 1  # and the mean magnitude of what is left over
_MOST_ITERATIONS = 200


def singular_axes(
    centre: NDArray[np.floating], axes: NDArray[np.floating], eigenvalues: NDArray[np.floating]
) -> NDArray[np.float32]:
    """Right singular vectors of the vectors that these moments describe, rows by falling singular value.

    centre, eigenvalues [.., head_dim], axes [.., head_dim, head_dim] as in `Calibration`: the second moment is
    axes^T diag(eigenvalues) axes + centre centre^T. float32 of the shape of axes; the largest entry of a row is
    positive.
    """
    wide = axes.astype(np.float64)
    moment = (wide.swapaxes(-1, -2) * eigenvalues[..., None, :]) @ wide
    moment = moment + centre.astype(np.float64)[..., :, None] * centre.astype(np.float64)[..., None, :]
    vectors = np.linalg.eigh(moment)[1].swapaxes(-1, -2)[..., ::-1, :]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(-1)[..., None], -1)
    result: NDArray[np.float32] = (vectors * np.sign(largest)).astype(np.float32)
    return result


def kmeans_table(numbers: NDArray[np.floating]) -> NDArray[np.float32]:
    """float32 [9]: 8 ascending centres by Lloyd's iteration, from evenly spaced quantiles until it stands still, and
    the mean distance of a number to its centre. The same for the same numbers in any order."""
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
