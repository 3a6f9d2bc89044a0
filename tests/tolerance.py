"""Checks of plans with a matrix, which promise a tolerance instead of equal bytes (docs/rounding.md).

A code may differ from that of exact arithmetic if its number lies within `TOLERANCE` * rms(x - centre) / step of a
threshold. Numbers stored for each token fit the codes stored, to an ulp of binary16.

With tries, each row has such codes at one of the factors tried. Its squared cosine is within `COSINE` of what such
codes are sure to have at the best factor: each number near a threshold may have got the code that suits the row less.

Checks are in float64, token by token, from the bytes alone. Plans with a wave or a metric are checked in the same way,
with tolerances of their own (tests/test_wave_ops.py).
"""

from __future__ import annotations

import numpy as np
import reference as ref
import reference_modes as modes
from reference import F32, F64, TILE, Array

TOLERANCE = 2.0**-17  # TQ_CODE_TOLERANCE
COSINE = 1e-5


def close_to_half(stored: Array, want: F64, slack: F64 | float = 0.0) -> None:
    """Asserts that `stored` is within an ulp of binary16, plus `slack`, of `want`."""
    want = np.clip(want, -65504, 65504)
    wrong = np.abs(stored.astype(np.float64) - want) > 2.0**-10 * np.abs(want) + 2.0**-24 + slack
    assert not wrong.any(), (stored[wrong][:5], want[wrong][:5])


def outside(z: F64, rank: Array, thresholds: F64, tolerance: F64) -> Array:
    """Which z [n, channels] are not between the thresholds [n or 1, ranks - 1] around their rank, to `tolerance`."""
    ends = np.full((len(thresholds), 1), np.inf)
    edges = np.broadcast_to(np.concatenate([-ends, thresholds, ends], 1), (len(z), thresholds.shape[1] + 2))
    low, high = (np.take_along_axis(edges, rank.astype(int) + i, 1) for i in range(2))
    return (z < low - tolerance) | (z > high + tolerance)


def between(z: F64, rank: Array, thresholds: F64, tolerance: F64) -> None:
    """Asserts that no z is `outside`."""
    wrong = outside(z, rank, thresholds, tolerance)
    assert not wrong.any(), (int(wrong.sum()), z[wrong][:5], rank[wrong][:5])


def ranks_and_thresholds(book: ref.Codebook, codes: Array) -> tuple[Array, F64]:
    """Ranks of codes, and the thresholds in units of the row's rms."""
    if book.bits == ref.WIDE:
        assert (codes > 0).all()
        return codes.astype(int) - 1, (np.arange(-127, 127) + 0.5)[None] * float(ref.WIDE_STEP)
    rank_of_code = np.argsort(book.code_of_rank)
    return rank_of_code[codes], book.thresholds.astype(np.float64)[None]


def levels_of(p: ref.Plan, side: str, u: F64) -> F64:
    """Returns the levels of u. In settled rows of up to 5 bits they are those of the middle of its cell."""
    c = np.zeros_like(u)
    for channels, book in p.books(side):
        x = u[:, channels]
        if ref.is_settled(p) and book.bits <= 5:
            x = (np.floor(x * ref.UNITS) + 0.5) / ref.UNITS
        c[:, channels] = book.ranked[book.rank(x)].astype(np.float64) * float(book.step)
    return c


def squared_cosine(a: F64, b: F64) -> F64:
    return (a * b).sum(1) ** 2 / ((a * a).sum(1) * (b * b).sum(1))


def least_cosine(p: ref.Plan, side: str, u: F64, factor: float, near: F64, steps: F64) -> F64:
    """Returns the squared cosine of u and its levels at a factor, minus the most that numbers within `near` of a
    threshold can take from it, to first order."""
    x, c = u * steps, levels_of(p, side, u * factor) * steps
    cu, cc = (c * x).sum(1, keepdims=True), (c * c).sum(1, keepdims=True)
    changes = [np.zeros_like(c)]
    for beside in (-near, near):
        other = levels_of(p, side, (u + beside) * factor) * steps
        changes.append(2 * x * (other - c) / cu - (other * other - c * c) / cc)
    return squared_cosine(x, c) * (1 + np.minimum.reduce(changes).sum(1))


def check_codes(p: ref.Plan, side: str, u: F64, codes: Array, near: F64, steps: F64, moves: F64 | None = None) -> F64:
    """Asserts that codes [n, channels] are those of u [n, head_dim], of mean square 1, except within `near` of a
    threshold. With tries they must be those of u times one of the factors, and a good one: in that check numbers may be
    off by `moves`, or by `near` if it is None. Returns their levels."""
    factors = ref.TRIES[p.tries] if p.tries else np.ones(1)
    fits, c = np.ones((len(factors), len(u)), bool), np.zeros_like(u)
    for channels, book in p.books(side):
        rank, thresholds = ranks_and_thresholds(book, codes[:, channels])
        for fit, factor in zip(fits, factors.astype(np.float64)):
            fit &= ~outside(u[:, channels] * factor, rank, thresholds, near[:, channels] * factor).any(1)
        c[:, channels] = book.levels[codes[:, channels]].astype(np.float64) * float(book.step)
    assert fits.any(0).all(), (int((~fits.any(0)).sum()), u[~fits.any(0)][:1], c[~fits.any(0)][:1])
    if p.tries:
        by = near if moves is None else moves
        least = np.max([least_cosine(p, side, u, factor, by, steps) for factor in factors.astype(np.float64)], 0)
        lost = least - squared_cosine(u * steps, c * steps)
        assert lost.max(initial=0) <= COSINE, lost.max()
    return c


def quotient(scale: int, u: F64, c: F64) -> F64:
    with np.errstate(invalid="ignore", divide="ignore"):
        return ref.quotient(scale, (u * u).sum(1), (u * c).sum(1), (c * c).sum(1))


def check_plain(p: ref.Plan, side: str, codes: Array, scales: Array, x: F32, t: ref.Transform) -> None:
    """Checks tokens of one KV head: codes [n, padded channels], scales [n], rows x [n, head_dim]. Not for settled
    rows."""
    moved = (x if t.centre is None else x - t.centre).astype(np.float64)
    steps = np.ones(p.head_dim) if t.steps is None else np.repeat(t.steps, p.group)[: p.head_dim].astype(np.float64)
    z = moved @ ref.rotation_matrix(p, t.rotation).T / steps
    coded = p.coded(side)
    tolerance = TOLERANCE * np.sqrt((moved**2).mean(1, keepdims=True)) / steps
    square = (z[:, coded] ** 2).sum(1)
    alive = square > 2 * float(ref.FLT_MIN)
    assert not scales[square < float(ref.FLT_MIN) / 2].any()
    rms = np.sqrt(square / coded.sum())[alive][:, None]
    u = np.where(coded, z, 0.0)[alive] / rms
    c = check_codes(p, side, u, codes[alive], tolerance[alive] / rms, np.broadcast_to(steps, z.shape)[alive])
    close_to_half(scales[alive], rms[:, 0] * quotient(p.scale, u * steps, c * steps))


def check_modes(p: modes.Plan, name: str, codes: Array, numbers: Array, x: F32, t: modes.Transform) -> None:
    """The same for a plan that is not plain: codes [n, 32 * tiles], numbers [n, numbers of a token]."""
    side, at = p.side(name), 0
    rotation, sketch = modes.matrices(p, name, t)
    turned = ref.plan(p.head_dim, 1, seed=p.seed, rotation=side.rotation)
    moved = (x if t.centre is None else x - t.centre).astype(np.float64)
    z = moved @ ref.rotation_matrix(turned, rotation).T
    tolerance, left = TOLERANCE * np.sqrt((moved**2).mean(1, keepdims=True)), z.copy()
    for begin, end in zip(side.begins, [*side.begins[1:], p.groups]):
        where = slice(TILE * begin, min(TILE * end, p.head_dim))
        block, bits = z[:, where], side.bits[begin]
        s, o = np.ones(len(z)), np.zeros(len(z))
        if side.levels == modes.AFFINE:
            low, high = block.min(1), block.max(1)
            s, o = (numbers[:, at + i].astype(np.float64) for i in range(2))
            close_to_half(numbers[:, at + 1], low, tolerance[:, 0])
            close_to_half(numbers[:, at], (high - low) / (2**bits - 1), tolerance[:, 0])
            middles = o[:, None] + s[:, None] * (np.arange(2**bits - 1) + 0.5)
            between(block, codes[:, where], middles, tolerance)
            at += 2
        elif side.levels == modes.ABSMAX:
            unit = np.abs(block).max(1) / (2 ** (bits - 1) - 1)
            close_to_half(numbers[:, at], unit, tolerance[:, 0])
            middles, large = unit[:, None] * (np.arange(2**bits - 1) + 0.5 - 2 ** (bits - 1)), unit > 1e-30
            between(block[large], codes[large, where], middles[large], tolerance[large])
            assert (codes[:, where] > 0).all()
            s = numbers[:, at].astype(np.float64)
            at += 1
        elif side.levels == modes.TABLE:
            levels = t.table[: 2**bits].astype(np.float64)
            between(block, codes[:, where], (levels[1:] + levels[:-1])[None] / 2, tolerance)
        else:
            check_block(p, range(begin, end), side, codes, numbers[:, at], z, tolerance)
            s = numbers[:, at].astype(np.float64)
            at += 1
        for g in range(begin, end):
            channels = slice(TILE * g, min(TILE * g + TILE, p.head_dim))
            levels = modes.levels_of(p, side, side.bits[g], t).astype(np.float64)[codes[:, channels]]
            left[:, channels] = z[:, channels] - (s[:, None] * levels + o[:, None])
    if side.sketch == modes.NO_SKETCH:
        return
    rows = np.eye(p.head_dim) if sketch is None else sketch.astype(np.float64)
    signs = codes[:, TILE * p.groups :][:, : len(rows)]
    projected, slack = left @ rows.T, tolerance * np.sqrt((rows**2).sum(1)) * (1 if sketch is None else p.head_dim**0.5)
    wrong = (signs == (projected < 0)) & (np.abs(projected) > slack)
    assert not wrong.any(), (int(wrong.sum()), projected[wrong][:5])
    if side.sketch == modes.GAUSSIAN:
        close_to_half(numbers[:, at], np.sqrt((left**2).sum(1)), tolerance[:, 0] * p.head_dim**0.5)
    elif side.levels != modes.TABLE:
        close_to_half(numbers[:, at], np.abs(left).mean(1), tolerance[:, 0])


def check_block(
    p: modes.Plan, groups: range, side: modes.Side, codes: Array, scales: Array, z: F64, tolerance: F64
) -> None:
    """Checks a block with the levels of a codebook."""
    where = slice(TILE * groups.start, min(TILE * groups.stop, p.head_dim))
    block = z[:, where]
    square = (block**2).sum(1)
    alive, rms = square > 2 * float(ref.FLT_MIN), np.sqrt(square / block.shape[1])[:, None]
    c = np.zeros_like(z)
    for g in groups:
        channels = slice(TILE * g, min(TILE * (g + 1), p.head_dim))
        book = modes.book(p.codebook, p.head_dim, side.bits[g])
        rank, thresholds = ranks_and_thresholds(book, codes[:, channels])
        between(z[alive, channels], rank[alive], thresholds * rms[alive], tolerance[alive])
        c[:, channels] = book.levels[codes[:, channels]].astype(np.float64) * float(book.step)
    with np.errstate(invalid="ignore", divide="ignore"):
        want = rms[:, 0] * quotient(p.scale, block / rms, c[:, where])
    close_to_half(scales[alive], want[alive])


def check_pages(
    p: ref.Plan | modes.Plan,
    pages: Array,
    block_table: Array,
    x: dict[str, F32],
    transforms: dict[str, ref.Transform | list[modes.Transform]],
) -> None:
    """Checks tokens x[side][b, head, token], all of them packed, in pages [n_pages, kv_heads, record_bytes]."""
    for side, rows in x.items():
        for b, head in np.ndindex(rows.shape[:2]):
            for start in range(0, rows.shape[2], p.page_tokens):
                here = rows[b, head, start : start + p.page_tokens]
                record, given = pages[block_table[b, start // p.page_tokens], head], transforms[side]
                if isinstance(p, ref.Plan):
                    codes, scales = ref.unpack(p, side, record)
                    check_plain(p, side, codes[: len(here)], scales[: len(here)], here, given.at(head))
                else:
                    codes, numbers = modes.unpack(p, side, record)
                    check_modes(p, side, codes[: len(here)], numbers[: len(here)], here, given[head])


def has_matrix(p: ref.Plan | modes.Plan) -> bool:
    """Whether the plan has a matrix, and so promises a tolerance and not equal bytes."""
    if isinstance(p, ref.Plan):
        return p.rotation == ref.DENSE
    return any(s is not None and (s.rotation == ref.DENSE or s.sketch == modes.GAUSSIAN) for s in (p.key, p.value))
