"""What an index does to a vector before it is encoded, and how that is learnt from a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..plan import Plan, Rotation, Side

GROUP = 32
SAMPLE = 20_000  # rows of a sample that are used, spread evenly
_DISTORTION = {
    0: 1.0,
    1: 0.3634,
    2: 0.1188,
    3: 0.03455,
    4: 0.009506,
    5: 0.002519,
    6: 0.0006625,
    8: 0.0000814,
}  # N(0, 1)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Transform:
    """z = R (x - mean), zero-padded to a multiple of 32.

    bits: uint8 [groups], of each group of 32 coordinates of z; steps: float32 [groups], their magnitude.
    mean: float32 [dim] or None. matrix: float32 [padded, padded], R; None: a random Hadamard rotation by `seed`.
    """

    dim: int
    seed: int
    bits: NDArray[np.uint8]
    steps: Floats
    mean: Floats | None = None
    matrix: Floats | None = None

    @property
    def padded(self) -> int:
        return GROUP * len(self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes that do not grow with the vectors."""
        arrays = (self.bits, self.steps, self.mean, self.matrix)
        return sum(array.nbytes for array in arrays if array is not None)

    def _plan(self) -> Plan:
        rotation = Rotation.HADAMARD if self.matrix is None else Rotation.DENSE
        return Plan(self.padded, Side(1, rotation), seed=self.seed)  # a rotation does not depend on the rest

    def apply(self, x: Floats) -> Floats:
        z = np.zeros((len(x), self.padded), np.float32)
        z[:, : self.dim] = x if self.mean is None else x - self.mean
        return _core.rotate(self._plan().words, z, self.matrix)

    def invert(self, z: Floats) -> Floats:
        x = _core.rotate(self._plan().words, z, self.matrix, inverse=True)[:, : self.dim]
        return np.ascontiguousarray(x if self.mean is None else x + self.mean)


def untrained(dim: int, bits: int, seed: int) -> Transform:
    groups = -(-dim // GROUP)
    return Transform(dim, seed, np.full(groups, bits, np.uint8), np.ones(groups, np.float32))


def with_mean(base: Transform, sample: Floats) -> Transform:
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    return Transform(base.dim, base.seed, base.bits, base.steps, mean)


def allocate(variances: NDArray[np.float64], bits: int) -> NDArray[np.uint8]:
    """Widths of groups that sum to at most bits * groups and have the least expected squared error of a score. Queries
    are taken to vary as the vectors do, so a group's error counts by its variance once more:
    sum of variance^2 * distortion(width)."""
    budget = bits * len(variances)
    cost = np.zeros(budget + 1)  # of the groups so far, by the bits that they may take
    chosen = np.empty((len(variances), budget + 1), np.uint8)
    for g, variance in enumerate(variances):
        best = np.full(budget + 1, np.inf)
        for width, distortion in _DISTORTION.items():
            if width <= budget:
                trial = np.full(budget + 1, np.inf)
                trial[width:] = cost[: budget + 1 - width] + variance**2 * distortion
                chosen[g, trial < best] = width
                best = np.minimum(best, trial)
        cost = best
    widths, left = np.empty(len(variances), np.uint8), budget
    for g in reversed(range(len(variances))):
        widths[g] = chosen[g, left]
        left -= int(widths[g])
    return widths


def with_axes(base: Transform, sample: Floats, bits: int) -> Transform | None:
    """Principal axes of the sample in groups of 32, a random rotation inside each, and widths after their variances.
    None if the sample has no variance."""
    centred = with_mean(base, sample)
    assert centred.mean is not None
    x = np.zeros((len(sample), base.padded))
    x[:, : base.dim] = sample.astype(np.float64) - centred.mean
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    axes = vectors[:, ::-1].T
    variances = np.maximum(values[::-1], 0).reshape(-1, GROUP).mean(axis=1)
    if not variances[0] > 0:
        return None
    mix = _core.haar(base.seed, GROUP).astype(np.float64)
    matrix = np.concatenate([mix @ axes[g : g + GROUP] for g in range(0, base.padded, GROUP)]).astype(np.float32)
    steps = np.sqrt(np.maximum(variances, variances[0] * 1e-8)).astype(np.float32)
    return Transform(base.dim, base.seed, allocate(variances, bits), steps, centred.mean, matrix)
