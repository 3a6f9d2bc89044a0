"""The transform of an index's vectors before they are encoded, and learning it from a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..plan import Plan, Rotation, Side
from .inputs import Floats
from .lists import Lists
from .storage import Segment

FINE_BITS = 8
GROUP, EIGHT = 32, 8  # channels of a group; the last group has a multiple of 8
FEW = 16  # up to this many numbers, rotated coordinates are not like independent noise, and the scan has no bound
TWO_LEAD = 192  # up to this many coordinates, the scan of an untrained index reads two bits of each
# E[(u - level(u))^2] for u from N(0, 1), by bits
_DISTORTION = {0: 1.0, 1: 0.3634, 2: 0.1188, 3: 0.03455, 4: 0.009506, 5: 0.002519, 6: 0.0006625, 8: 0.0000814}


@dataclass(frozen=True)
class Transform:
    """z = R (x - mean), zero-padded to a multiple of 8.

    bits: uint8 [groups], bits of a coordinate of z in each group of 32; the last group may be smaller.
    steps: float32 [groups], the magnitude of a group's coordinates times a power of 2: that of the first is in 0.5..1.
    lead: uint8 [groups], how many of the bits the scan reads.
    mean: float32 [dim] or None. matrix: bfloat16 as uint16 [channels, channels], R transposed, so that
        z = (x - mean) @ matrix; None: a random Hadamard rotation by `seed`.
    sigmas: the scan bounds what unread bits add to a score by this many standard deviations.
    exponent: x is divided by 2^exponent first; above 0 where numbers are larger than the core takes.
    training: what `train` chose, and why (`Index.training`).
    lists: None, or the lists of the vectors: then z = R (x - the centre of x's list), without a mean.
    fine: None, or the transform of a second, 8-bit copy of each vector, by which what a search finds is ranked again.
    factor: with `fine`, a search finds this many times k rows and ranks them again.
    """

    dim: int
    seed: int
    bits: NDArray[np.uint8]
    lead: NDArray[np.uint8]
    steps: Floats
    mean: Floats | None = None
    matrix: NDArray[np.uint16] | None = None
    sigmas: float = 2.5
    exponent: int = 0
    training: dict[str, Any] | None = None
    lists: Lists | None = None
    fine: Transform | None = None
    factor: int = 1

    @property
    def channels(self) -> int:
        """How many numbers z has."""
        return -(-self.dim // EIGHT) * EIGHT

    @property
    def planes(self) -> int:
        """Bytes of a row that the scan reads."""
        return int(self.lead @ eights(self.channels))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes that the scan does not read."""
        return int(self.bits @ eights(self.channels)) - self.planes

    @property
    def nbytes(self) -> int:
        """Bytes of the transform, which do not grow with the number of vectors."""
        arrays = (self.bits, self.lead, self.steps, self.mean, self.matrix)
        parts = sum(part.nbytes for part in (self.lists, self.fine) if part is not None)
        return parts + sum(array.nbytes for array in arrays if array is not None)

    def space(self, metric: int, sigmas: float | None = None) -> tuple[Any, ...]:
        """The transform as the core takes it."""
        plan = _plan(self.channels, self.matrix is not None, self.seed)
        width = self.sigmas if sigmas is None else sigmas
        lists = () if self.lists is None else (self.lists.core,)
        return plan, self.dim, metric, self.bits, self.lead, self.steps, self.mean, self.matrix, width, *lists

    def divided(self, exponent: int) -> Transform:
        """Returns the transform that divides vectors by another 2^exponent first."""
        mean = None if self.mean is None else np.ldexp(self.mean, -exponent)
        lists = None if self.lists is None else self.lists.divided(exponent)
        fine = None if self.fine is None else self.fine.divided(exponent)
        return replace(self, mean=mean, lists=lists, fine=fine, exponent=self.exponent + exponent)

    def decoded(self, segment: Segment, rows: NDArray[np.int64]) -> Floats:
        """Decodes some rows of a segment to vectors."""
        if self.fine is not None and segment.fine is not None:
            return self.fine.decoded(segment.fine, rows)
        codes, leading, scales = segment.codes[rows], segment.sign_rows(rows), segment.scales[rows]
        z = _core.index_decode(self.dim, self.bits, self.lead, self.steps, codes, leading, scales)
        plan = _plan(self.channels, self.matrix is not None, self.seed)
        inverse = None if self.matrix is None else widened(self.matrix)
        x = _core.rotate(plan, z, inverse, inverse=inverse is None)[:, : self.dim]
        if self.lists is not None:
            x = x + self.lists.centres(segment.lists_of(rows))
        return np.ascontiguousarray(np.ldexp(x if self.mean is None else x + self.mean, self.exponent))


def widened(bfloats: NDArray[np.uint16]) -> Floats:
    """Converts bfloat16 to float32."""
    return (bfloats.astype(np.uint32) << 16).view(np.float32)


def as_bfloat16(x: Floats) -> NDArray[np.uint16]:
    """Rounds finite float32 to bfloat16, half to even."""
    words = np.ascontiguousarray(x).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def eights(channels: int) -> NDArray[np.int64]:
    """Returns [groups]: a group's channels / 8, which is 4 except for the last group."""
    return np.diff(np.append(np.arange(0, channels, GROUP), channels)) // EIGHT


@lru_cache(maxsize=64)
def _plan(channels: int, dense: bool, seed: int) -> Any:
    """Returns the words of a plan that has this rotation."""
    rotation = Rotation.DENSE if dense else Rotation.HADAMARD
    return Plan(channels, Side(1, rotation), seed=seed).words  # a rotation does not depend on the rest


# The noise that `bound` assumes for the rows of each noise class. turboquant_index.h has the ends of the classes.
_NOISE = np.array([0.95, 1.1, 1.35, 1.7, 2.15, 2.8, 3.8, 6.0])
_WIDEST = 4.0  # the widest finite bound, in standard deviations
_BEYOND = 0.0125  # share of rows that may lie above their bounds
_LARGEST = 0.05  # `bound` also checks the rows with the largest scales, at least this share of all: they may score best


def _share_beyond(sigmas: float) -> float:
    """Returns the share of a normal distribution above this many standard deviations."""
    return math.erfc(sigmas / math.sqrt(2)) / 2


def bound(sigmas: float, counts: Any) -> float:
    """Returns the least width of a bound, `sigmas` or wider in steps of 0.5, that few rows lie above, both of all rows
    and of those with the largest scales. counts: the number of rows by binary exponent of the scale and noise class,
    [256, 8], or 0. Infinite if no width up to 4 standard deviations is enough."""
    rows = np.cumsum(np.atleast_2d(counts)[::-1], axis=0)
    rows = rows[rows.sum(axis=1) >= max(1, _LARGEST * rows[-1].sum())]
    most = max(_BEYOND, 2 * _share_beyond(sigmas))
    for width in [sigmas, *np.arange(math.floor(2 * min(sigmas, _WIDEST) + 1) / 2, _WIDEST + 0.1, 0.5).tolist()]:
        beyond = np.array([_share_beyond(width / noise) for noise in _NOISE.tolist()])
        if not len(rows) or (rows @ beyond <= most * rows.sum(axis=1)).all():
            return float(width)
    return math.inf


def untrained(dim: int, bits: int, seed: int) -> Transform:
    groups = -(-dim // GROUP)
    # With few coordinates a bound from one bit is loose: scoring all rows that pass it takes longer than reading a
    # second bit.
    lead = min(bits, 2) if dim <= TWO_LEAD else 1
    widths, leads = np.full(groups, bits, np.uint8), np.full(groups, lead, np.uint8)
    sigmas = math.inf if dim <= FEW else 3.0 if lead == 2 else 2.5
    return Transform(dim, seed, widths, leads, np.ones(groups, np.float32), sigmas=sigmas)


def with_fine(base: Transform, factor: int, mean: Floats | None) -> Transform:
    """Returns `base` with a second, 8-bit copy of each vector (`Transform.fine`), of vectors less the mean."""
    bits, lead = np.full_like(base.bits, FINE_BITS), np.zeros_like(base.lead)
    steps = np.ones_like(base.steps)
    fine = Transform(base.dim, base.seed, bits, lead, steps, mean, sigmas=math.inf, exponent=base.exponent)
    return replace(base, fine=fine, factor=factor)


def with_mean(base: Transform, sample: Floats) -> Transform:
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
    return replace(base, mean=mean)


def _cheapest(costs: list[dict[int, float]], sizes: list[int], average: int) -> NDArray[np.uint8]:
    """Returns the bits of each group with the least sum of costs, on average at most `average` bits a channel.

    costs: of each group, the cost of a channel by bits. sizes: channels / 8 of each group.
    """
    budget = average * sum(sizes)
    cost = np.zeros(budget + 1)  # least cost of the groups so far, by bits / 8 that they may take
    chosen = np.empty((len(costs), budget + 1), np.uint8)
    for g, (choices, size) in enumerate(zip(costs, sizes, strict=True)):
        best = np.full(budget + 1, np.inf)
        for width, own in choices.items():
            if (taken := size * width) <= budget:
                trial = np.full(budget + 1, np.inf)
                trial[taken:] = cost[: budget + 1 - taken] + size * own
                chosen[g, trial < best] = width
                best = np.minimum(best, trial)
        cost = best
    widths, left = np.empty(len(costs), np.uint8), budget
    for g in reversed(range(len(costs))):
        widths[g] = chosen[g, left]
        left -= sizes[g] * int(widths[g])
    return widths


def allocate(
    variances: NDArray[np.float64], sizes: NDArray[np.int64], bits: int, power: float = 1.0
) -> NDArray[np.uint8]:
    """Returns the widths of groups, at most `bits` on average, with the least sum of variance^(1 + power) *
    distortion(width) over channels. sizes: channels / 8 of each group. With power 0 the sum is the mean squared error
    of vectors; with power 1 that of scores, if queries vary as the vectors do."""
    costs = [{width: v ** (1 + power) * error for width, error in _DISTORTION.items()} for v in variances.tolist()]
    return _cheapest(costs, sizes.tolist(), bits)


def leading(variances: NDArray[np.float64], sizes: NDArray[np.int64], bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns how many bits of each group the scan reads for the best estimate of scores, one on average. A group of
    which it reads none is estimated as 0, also for neighbours, whose coordinates resemble the query's. That is a bias,
    not noise, so its error counts five times (the best of 1, 5, 20 and 60 on MiniLM)."""
    costs = [
        {lead: v**2 * _core.index_lead_error(b, lead) * (1 if lead else 5) for lead in range(min(b, 6) + 1)}
        for v, b in zip(variances.tolist(), bits.tolist(), strict=True)
    ]
    lead = _cheapest(costs, sizes.tolist(), 1)
    if not lead.any():  # the core needs at least one
        lead[int(np.argmax(bits))] = 1
    return lead


class Axes:
    """The principal axes of a sample, by descending variance."""

    def __init__(self, base: Transform, sample: Floats) -> None:
        self.centred = with_mean(base, sample)
        assert self.centred.mean is not None
        x = np.zeros((len(sample), base.channels))
        x[:, : base.dim] = sample.astype(np.float64) - self.centred.mean
        values, vectors = np.linalg.eigh(x.T @ x / len(x))
        self.axes = vectors[:, ::-1].T
        self.sizes = eights(base.channels)
        self.starts = np.arange(0, base.channels, GROUP)
        self.variances = np.add.reduceat(np.maximum(values[::-1], 0), self.starts) / (EIGHT * self.sizes)

    def transform(self, bits: int, power: float, together: bool) -> Transform | None:
        """Returns a transform with groups of 32 axes whose widths follow their variances (`allocate`). A random
        rotation mixes the axes of each group, or with `together` those of all groups of the same width. None if the
        sample has no variance."""
        seed, variances = self.centred.seed, self.variances
        if not variances[0]:
            return None
        widths = allocate(variances, self.sizes, bits, power)
        blocks = [np.flatnonzero(widths == width) for width in np.unique(widths)] if together else []
        matrix = np.empty_like(self.axes)
        if together:
            variances = variances.copy()
            for groups in blocks:
                variances[groups] = np.average(variances[groups], weights=self.sizes[groups])
                rows = np.concatenate(
                    [np.arange(self.starts[g], self.starts[g] + EIGHT * self.sizes[g]) for g in groups]
                )
                normal = np.random.default_rng(seed).standard_normal((len(rows), len(rows)))
                matrix[rows] = np.linalg.qr(normal)[0] @ self.axes[rows]
        else:
            for g in range(0, len(matrix), GROUP):
                own = self.axes[g : g + GROUP]
                matrix[g : g + GROUP] = _core.haar(seed, len(own)).astype(np.float64) @ own
        steps = np.sqrt(np.maximum(variances, variances[0] * 1e-8))
        steps = np.ldexp(steps, -np.frexp(steps[0])[1]).astype(np.float32)  # a row of any magnitude / step is finite
        turned = as_bfloat16(matrix.T.astype(np.float32))
        lead = leading(variances, self.sizes, widths)
        return replace(self.centred, bits=widths, lead=lead, steps=steps, matrix=turned)
