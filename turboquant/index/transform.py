"""The transform of an index's vectors before they are encoded, and how it is learnt from a sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..plan import Plan, Rotation, Side
from .storage import Segment

GROUP = 32
SAMPLE = 20_000  # the most rows of a sample that are used, spread evenly
TWO_LEAD = 192  # up to this many coordinates, the scan of an untrained index reads two bits of each
# E[(u - its level)^2] of N(0, 1), by bits
_DISTORTION = {0: 1.0, 1: 0.3634, 2: 0.1188, 3: 0.03455, 4: 0.009506, 5: 0.002519, 6: 0.0006625, 8: 0.0000814}

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Transform:
    """z = R (x - mean), zero-padded to a multiple of 32.

    bits: uint8 [groups], of each group of 32 coordinates of z; steps: float32 [groups], their magnitude.
    lead: uint8 [groups], how many of the bits the scan reads.
    mean: float32 [dim] or None. matrix: float32 [padded, padded], R transposed, so that z = (x - mean) @ matrix; None:
        a random Hadamard rotation by `seed`.
    sigmas: the scan bounds what unread bits add to a score by this many standard deviations.
    """

    dim: int
    seed: int
    bits: NDArray[np.uint8]
    lead: NDArray[np.uint8]
    steps: Floats
    mean: Floats | None = None
    matrix: Floats | None = None
    sigmas: float = 2.5

    @property
    def padded(self) -> int:
        return GROUP * len(self.bits)

    @property
    def planes(self) -> int:
        """Bytes of a row that the scan reads."""
        return 4 * int(self.lead.sum())

    @property
    def row_bytes(self) -> int:
        """The other bytes of its codes."""
        return 4 * int(self.bits.sum()) - self.planes

    @property
    def nbytes(self) -> int:
        """Bytes that do not grow with the vectors."""
        arrays = (self.bits, self.lead, self.steps, self.mean, self.matrix)
        return sum(array.nbytes for array in arrays if array is not None)

    def space(self, metric: int) -> tuple[Any, ...]:
        """The transform as the core takes it."""
        plan = _plan(self.padded, self.matrix is not None, self.seed)
        return plan, self.dim, metric, self.bits, self.lead, self.steps, self.mean, self.matrix, self.sigmas

    def decoded(self, segment: Segment, rows: NDArray[np.int64]) -> Floats:
        """The vectors that some rows of a segment stand for."""
        codes, leading, scales = segment.codes[rows], segment.sign_rows(rows), segment.scales[rows]
        z = _core.index_decode(self.bits, self.lead, self.steps, codes, leading, scales)
        plan = _plan(self.padded, self.matrix is not None, self.seed)
        x = _core.rotate(plan, z, self.matrix, inverse=self.matrix is None)[:, : self.dim]  # the matrix is the inverse
        return np.ascontiguousarray(x if self.mean is None else x + self.mean)


@lru_cache(maxsize=64)
def _plan(padded: int, dense: bool, seed: int) -> Any:
    """The words of a plan that has this rotation."""
    rotation = Rotation.DENSE if dense else Rotation.HADAMARD
    return Plan(padded, Side(1, rotation), seed=seed).words  # a rotation does not depend on the rest


def untrained(dim: int, bits: int, seed: int) -> Transform:
    groups = -(-dim // GROUP)
    # With few coordinates, bounds from one bit are so loose that scoring the rows that pass takes longer than reading
    # two bits.
    lead = min(bits, 2) if GROUP * groups <= TWO_LEAD else 1
    widths, leads = np.full(groups, bits, np.uint8), np.full(groups, lead, np.uint8)
    return Transform(dim, seed, widths, leads, np.ones(groups, np.float32), sigmas=3.0 if lead == 2 else 2.5)


def with_mean(base: Transform, sample: Floats) -> Transform:
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    return replace(base, mean=mean)


def _cheapest(costs: list[dict[int, float]], budget: int) -> NDArray[np.uint8]:
    """Bits of each group, which sum to at most `budget`, with the least sum of costs."""
    cost = np.zeros(budget + 1)  # least cost of the groups so far, by the bits that they may take
    chosen = np.empty((len(costs), budget + 1), np.uint8)
    for g, choices in enumerate(costs):
        best = np.full(budget + 1, np.inf)
        for width, own in choices.items():
            if width <= budget:
                trial = np.full(budget + 1, np.inf)
                trial[width:] = cost[: budget + 1 - width] + own
                chosen[g, trial < best] = width
                best = np.minimum(best, trial)
        cost = best
    widths, left = np.empty(len(costs), np.uint8), budget
    for g in reversed(range(len(costs))):
        widths[g] = chosen[g, left]
        left -= int(widths[g])
    return widths


def allocate(variances: NDArray[np.float64], bits: int) -> NDArray[np.uint8]:
    """Widths of groups that sum to at most bits * groups and have the least expected squared error of a score. Queries
    are assumed to vary as the vectors do, so a group's error is weighted by its variance again:
    sum of variance^2 * distortion(width)."""
    costs = [{width: v**2 * error for width, error in _DISTORTION.items()} for v in variances.tolist()]
    return _cheapest(costs, bits * len(variances))


def leading(variances: NDArray[np.float64], bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """How many bits of each group the scan reads, one on average, for the best estimate of scores. A group without any
    is estimated as 0, also for neighbours, whose coordinates resemble the query's. That is a bias and no noise, so its
    error counts five times (of 1, 5, 20 and 60 the best on MiniLM)."""
    costs = [
        {lead: v**2 * _core.index_lead_error(b, lead) * (1 if lead else 5) for lead in range(min(b, 6) + 1)}
        for v, b in zip(variances.tolist(), bits.tolist(), strict=True)
    ]
    lead = _cheapest(costs, len(bits))
    if not lead.any():  # the core needs at least one
        lead[int(np.argmax(bits))] = 1
    return lead


def with_axes(base: Transform, sample: Floats, bits: int) -> Transform | None:
    """Principal axes of the sample in groups of 32, a random rotation inside each, and widths after their variances.
    None if the sample has no variance, or less than float32 holds."""
    centred = with_mean(base, sample)
    assert centred.mean is not None
    x = np.zeros((len(sample), base.padded))
    x[:, : base.dim] = sample.astype(np.float64) - centred.mean
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    axes = vectors[:, ::-1].T
    variances = np.maximum(values[::-1], 0).reshape(-1, GROUP).mean(axis=1)
    steps = np.sqrt(np.maximum(variances, variances[0] * 1e-8)).astype(np.float32)
    if not steps.min() >= np.finfo(np.float32).tiny:
        return None
    mix = _core.haar(base.seed, GROUP).astype(np.float64)
    matrix = np.concatenate([mix @ axes[g : g + GROUP] for g in range(0, base.padded, GROUP)]).T.astype(np.float32)
    widths = allocate(variances, bits)
    matrix = np.ascontiguousarray(matrix)
    return replace(centred, bits=widths, lead=leading(variances, widths), steps=steps, matrix=matrix)
