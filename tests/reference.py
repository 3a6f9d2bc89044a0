"""A slow reference of csrc/include/turboquant.h in NumPy, written from the header's text. It shares no code with C.
Every backend must make the bytes that this makes. Encoding is float32 throughout, one IEEE operation at a time (NumPy
does not fuse a product and a sum); attention is float64. Operations are vectorised over tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import reference_moments as moments
import reference_variance as variance
from numpy.typing import NDArray
from reference_random import random

F32, F64 = NDArray[np.float32], NDArray[np.float64]
Array = NDArray[Any]

TILE = 32
PAGE_TOKENS = 128
PLAN_VERSION = 2
NONE, HADAMARD, DENSE = 0, 1, 2  # tq_rotation
NORMAL, SPHERE = 0, 1  # tq_codebook_law
EDEN, NORM, NORM_CORRECTED, LEAST_SQUARES = 0, 1, 2, 3  # tq_scale
FLT_MIN = np.float32(1.17549435e-38)
TABLES = Path(__file__).parent.parent / "csrc" / "core" / "codebook_tables.h"


# ---- codebooks ----


@dataclass(frozen=True)
class Codebook:
    """tq_codebook; `ranked` are the integer levels in ascending order."""

    bits: int
    step: np.float32
    ranked: Array
    thresholds: F32
    code_of_rank: NDArray[np.uint8]
    levels: NDArray[np.int8]  # by code

    def rank(self, u: F32) -> Array:
        if self.bits == WIDE:
            return np.rint(np.clip(u / WIDE_STEP, np.float32(-127), np.float32(127))).astype(int) + 128
        return (u[..., None] >= self.thresholds).sum(axis=-1)


@cache
def table_rows() -> list[tuple[str, list[int]]]:
    """Every row of codebook_tables.h in order: 6 of N(0, 1), then 6 for each d = 8, 16, .., 256."""
    found = re.findall(r"\{([0-9][0-9.e+-]*)f, \{([0-9,\s]+)\}\}", TABLES.read_text())
    assert len(found) == 6 + 32 * 6
    return [(step, [int(m) for m in magnitudes.split(",")]) for step, magnitudes in found]


def code_of(rank: int, bits: int) -> int:
    """The code of a rank: the rank itself, or magnitude and sign from 4 bits on."""
    if bits <= 3:
        return rank
    half = 2 ** (bits - 1)
    magnitude, sign = (rank - half, 0) if rank >= half else (half - 1 - rank, 1)
    return magnitude | sign << (bits - 1)


WIDE, WIDE_STEP = 8, np.float32(0.03125)
WIDTHS = (1, 2, 3, 4, 5, 6, WIDE)  # bits of codes


@cache
def codebook(law: int, head_dim: int, bits: int) -> Codebook:
    """tq_get_codebook, and the levels of 8 bits."""
    if bits == WIDE:
        ranked = np.arange(-128, 128)
        return Codebook(8, WIDE_STEP, ranked, np.zeros(0, np.float32), np.arange(256, dtype=np.uint8), ranked)
    text, magnitudes = table_rows()[bits - 1 if law == NORMAL else 6 * (head_dim // 8) + bits - 1]
    assert len(magnitudes) == 2 ** (bits - 1)
    step, ranked = np.float32(text), np.array([-m for m in magnitudes[::-1]] + magnitudes)
    thresholds = (ranked[:-1] + ranked[1:]).astype(np.float32) * (np.float32(0.5) * step)
    code_of_rank = np.array([code_of(k, bits) for k in range(2**bits)], np.uint8)
    levels = np.zeros(2**bits, np.int8)
    levels[code_of_rank] = ranked
    return Codebook(bits, step, ranked, thresholds, code_of_rank, levels)


# ---- plans ----


def block(bits: tuple[int, ...]) -> tuple[int, ...]:
    """The words of a side's groups in a plan, all in one block; zeros if the side has no bits."""
    return (16 + bits[0], *bits[1:]) if any(bits) else bits


@dataclass(frozen=True)
class Plan:
    """A plan, and the layout of its records."""

    head_dim: int
    key_bits: tuple[int, ...]
    value_bits: tuple[int, ...]
    rotation: int = HADAMARD
    codebook: int = NORMAL
    scale: int = EDEN
    seed: int = 0
    page_tokens: int = PAGE_TOKENS
    group: int = TILE  # channels, 32 or 16
    wave_pairs: int = 0
    metric: int = 0  # the plan's word: 0 without a metric, else 1 + its rank
    tries: int = 0
    variance_term: bool = False

    @property
    def words(self) -> tuple[int, ...]:
        common = (self.head_dim, self.page_tokens, self.group, self.codebook, self.scale, self.seed)
        value = self.rotation if any(self.value_bits) else 0
        sides = (self.rotation, 0, 0, 0, value, 0, 0, 0)
        rest = self.wave_pairs, self.metric, self.tries, int(self.variance_term)
        return (PLAN_VERSION, *common, *sides, *rest, *block(self.key_bits), *block(self.value_bits))

    @property
    def groups(self) -> int:
        return -(-self.head_dim // self.group)

    @property
    def tile_tokens(self) -> int:
        return TILE * TILE // self.group

    def bits(self, side: str) -> tuple[int, ...]:
        return self.key_bits if side == "key" else self.value_bits

    def tile_bytes(self, side: str) -> int:
        return 128 * sum(self.bits(side))

    def code_bytes(self, side: str) -> int:
        return self.page_tokens // self.tile_tokens * self.tile_bytes(side)

    def scale_bytes(self, side: str) -> int:
        return 2 * self.page_tokens if any(self.bits(side)) else 0

    def codes_offset(self, side: str) -> int:
        return 0 if side == "key" else self.code_bytes("key")

    def scales_offset(self, side: str) -> int:
        codes = self.code_bytes("key") + self.code_bytes("value")
        return codes if side == "key" else codes + self.scale_bytes("key")

    @property
    def record_bytes(self) -> int:
        return self.scales_offset("value") + self.scale_bytes("value")

    def coded(self, side: str) -> NDArray[np.bool_]:
        """[head_dim]: whether a channel is in a group that has bits."""
        return np.repeat(np.array(self.bits(side)) > 0, self.group)[: self.head_dim]

    def books(self, side: str) -> Iterator[tuple[slice, Codebook]]:
        """The real channels of each group that has bits, and its codebook."""
        for group, bits in enumerate(self.bits(side)):
            if bits:
                channels = slice(self.group * group, min(self.group * (group + 1), self.head_dim))
                yield channels, codebook(self.codebook, self.head_dim, bits)


def plan(head_dim: int, key_bits: int | tuple[int, ...], value_bits: int | tuple[int, ...] = 0, **rest: int) -> Plan:
    """A plan from bit widths: one for a whole side, or one for each group."""
    groups = -(-head_dim // rest.get("group", TILE))
    wide = [(bits,) * groups if isinstance(bits, int) else tuple(bits) for bits in (key_bits, value_bits)]
    return Plan(head_dim, *wide, **rest)


@dataclass(frozen=True)
class Transform:
    """tq_transform: arrays with all their leading dimensions, or None."""

    rotation: F32 | None = None  # [kv_heads or 1, head_dim, head_dim]
    centre: F32 | None = None  # [kv_heads, head_dim]
    steps: F32 | None = None  # [kv_heads, groups]
    turns: NDArray[np.int32] | None = None  # [wave_pairs, 3]
    moments: F32 | None = None  # [kv_heads, numbers of a head]

    def at(self, head: int) -> Transform:
        """Returns the arrays of one KV head: [head_dim, head_dim], [head_dim], [groups]."""
        rotation, centre, steps = self.rotation, self.centre, self.steps
        return Transform(
            None if rotation is None else rotation[head % len(rotation)],
            None if centre is None else centre[head],
            None if steps is None else steps[head],
            self.turns,
            None if self.moments is None else self.moments[head],
        )


# ---- rotation ----


def signs(seed: int, stream: int, count: int) -> NDArray[np.bool_]:
    """True where channel i < count of a Hadamard pass is multiplied by -1."""
    words = [random(seed, stream, i // 128)[i % 128 // 32] for i in range(0, count, 32)]
    return np.array([words[i // 32] >> (i % 32) & 1 for i in range(count)], bool)


def butterflies(x: Array) -> Array:
    """(a, b) -> (a + b, a - b) at distances 1, 2, 4 .. over the last axis."""
    p, distance = x.shape[-1], 1
    while distance < p:
        pairs = x.reshape(*x.shape[:-1], p // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return x


def hadamard(seed: int, x: Array, inverse: bool = False) -> Array:
    """The random-sign Hadamard rotation of the last axis, in the dtype of x."""
    x, dim = x.copy(), x.shape[-1]
    p = 1 << (dim.bit_length() - 1)
    passes = [(0, slice(0, p))] if p == dim else [(0, slice(0, p)), (1, slice(dim - p, dim))]
    factor = x.dtype.type(1 / math.sqrt(p))
    for stream, channels in reversed(passes) if inverse else passes:
        minus, part = signs(seed, stream, p), x[..., channels]
        if inverse:
            part = butterflies(part) * factor
            x[..., channels] = np.where(minus, -part, part)
        else:
            x[..., channels] = butterflies(np.where(minus, -part, part)) * factor
    return x


def rotate(p: Plan, x: F32, matrix: F32 | None = None) -> F32:
    """y = R x for float32 rows, every operation rounded."""
    if matrix is not None:
        y = matrix[:, 0] * x[..., :1]
        for j in range(1, p.head_dim):
            y = y + matrix[:, j] * x[..., j : j + 1]
        return y
    return hadamard(p.seed, x) if p.rotation == HADAMARD else x.copy()


def rotation_matrix(p: Plan, matrix: F32 | None = None) -> F64:
    """R in float64, such that y = R x."""
    if matrix is not None:
        return matrix.astype(np.float64)
    identity = np.eye(p.head_dim)
    return hadamard(p.seed, identity).T if p.rotation == HADAMARD else identity


# ---- encoding ----


UNITS = np.float32(64)  # TQ_SETTLED_UNITS
TRIES: dict[int, Array] = {
    n: np.array(factors, np.float32)
    for n, factors in {
        0: (),
        3: (1, 0.9, 1.125),
        5: (1, 0.84375, 0.9375, 1.0625, 1.1875),
        7: (1, 0.84375, 0.90625, 0.953125, 1.0625, 1.125, 1.21875),
    }.items()
}


def is_settled(p: Plan) -> bool:
    """Whether rows are settled (docs/rounding.md): tensor cores, which add in another order, then get the same bits."""
    return p.rotation == HADAMARD and p.head_dim >= 64 and p.head_dim & (p.head_dim - 1) == 0


def settle(x: F32) -> F32:
    """Rounds rows so that sums of 32 numbers are exact: to multiples of 2^(E - 18), and to 0 below 2^(E - 11), where E
    is the exponent of the row's largest number."""
    _, exponent = np.frexp(abs(x).max(axis=-1, keepdims=True, initial=0))  # E + 1
    unit, least = np.ldexp(1.0, exponent - 19), np.ldexp(1.0, exponent - 12)
    settled = np.rint(x.astype(np.float64) / unit) * unit
    return np.where(abs(x) < least, 0.0, settled).astype(np.float32)


def fused(a: F32, b: F32, c: F32) -> F32:
    """a b + c, rounded once. The float64 sum is rounded to odd, so that rounding it again to float32 is correct."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = (lost != 0) & (bits & 1 == 0)
    bits[inexact] += np.where((lost > 0) == (total > 0), 1, -1)[inexact]
    return total.astype(np.float32)


def middle_of_cell(z: F32, r: F32) -> F32:
    """The middle of the cell, of width 1 / UNITS, that the exact product u = z r lies in."""
    exact = z.astype(np.float64) * (r * UNITS).astype(np.float64)[:, None]
    return ((np.floor(exact) + 0.5) / UNITS).astype(np.float32)


def settled_sum(a: F32, b: F32) -> F32:
    """The sum of a b over the last axis, in the order defined for settled rows."""
    v = a[..., :32] * b[..., :32]
    for k in range(32, a.shape[-1], 32):
        v = fused(a[..., k : k + 32], b[..., k : k + 32], v)
    for h in (16, 8, 2, 1, 4):
        v = v + v[..., np.arange(32) ^ h]
    return v[..., 0]


def tree(v: F32) -> F32:
    """The sum over the last axis, zero-padded to a power of two: adds its halves until one number is left."""
    size = 1 << (v.shape[-1] - 1).bit_length()
    v = np.concatenate([v, np.zeros((*v.shape[:-1], size - v.shape[-1]), np.float32)], axis=-1)
    while size > 1:
        size //= 2
        v = v[..., :size] + v[..., size:]
    return v[..., 0]


def encode(p: Plan, side: str, x: F32, transform: Transform, at: Array | None = None) -> tuple[Array, Array]:
    """Codes uint8 [tokens, groups * channels per group] and scales float16 [tokens] of rows x [tokens, head_dim].
    `transform` is that of one head; `at` are positions [tokens], for a wave."""
    if (head := moments.head_of(p, transform)) is not None:
        x = moments.prepared(head, x, at, np.float32)
        transform = Transform(transform.rotation, None, transform.steps)
    settled = is_settled(p)
    z = settled_rotation(p, x, transform.centre) if settled else centred_rotation(p, x, transform)
    if transform.steps is not None:
        z = z * np.repeat(np.float32(1) / transform.steps, p.group)[: p.head_dim]
    coded = p.coded(side)
    z, dot = np.where(coded, z, np.float32(0)), settled_sum if settled else tree_dot
    ss = dot(z, z)
    alive = ss >= FLT_MIN
    s0 = np.sqrt(np.where(alive, ss, np.float32(1)) / np.float32(coded.sum()))
    r = np.where(alive, np.float32(1) / s0, np.float32(0))
    u = z * r[:, None]
    steps = None if transform.steps is None else np.repeat(transform.steps, p.group)[: p.head_dim]
    numbers = z
    if steps is not None:  # the scale is found in the units of x
        z, u = z * steps, u * steps

    def rounded(t: F32) -> tuple[Array, F32]:
        codes, c = np.zeros((len(x), p.group * p.groups), np.uint8), np.zeros_like(u)
        for channels, book in p.books(side):
            part = numbers[:, channels]
            rank = book.rank(middle_of_cell(part, t) if settled and book.bits <= 5 else part * t[:, None])
            codes[:, channels] = book.code_of_rank[rank]
            c[:, channels] = book.ranked[rank].astype(np.float32) * book.step
        return codes, c if steps is None else c * steps

    codes, c = rounded(r)
    best = None
    for factor in TRIES[p.tries]:
        tried, levels = rounded(r * factor)
        with np.errstate(divide="ignore", invalid="ignore"):
            cu = dot(levels, z) * r if settled else dot(levels, u)
            gain = cu * (cu / dot(levels, levels))
        better = gain > (0 if best is None else best)
        best = np.where(better, gain, 0 if best is None else best).astype(np.float32)
        codes, c = np.where(better[:, None], tried, codes), np.where(better[:, None], levels, c)
    if settled:
        uu = dot(z, z) * r * r if transform.steps is not None else np.full_like(r, coded.sum())
        s = s0 * (quotient(p.scale, uu, dot(c, z) * r, dot(c, c)) * np.float32(1 / math.sqrt(p.head_dim)))
    else:
        s = s0 * correction(p.scale, u, c)
    s = np.where(alive, s, np.float32(0))
    assert z.dtype == s0.dtype == u.dtype == c.dtype == s.dtype == np.float32
    return codes, np.minimum(s, np.float32(65504)).astype(np.float16)


def centred_rotation(p: Plan, x: F32, transform: Transform) -> F32:
    """R (x - mu)."""
    return rotate(p, x if transform.centre is None else x - transform.centre, transform.rotation)


def settled_rotation(p: Plan, x: F32, centre: F32 | None) -> F32:
    """B x' - B mu, where x' is x settled, and B flips the signs of channels and applies the butterflies."""
    minus = signs(p.seed, 0, p.head_dim)
    z, mu = (None if y is None else butterflies(np.where(minus, -y, y)) for y in (settle(x), centre))
    return z if mu is None else z - mu


def tree_dot(a: F32, b: F32) -> F32:
    """The sum of a b over the last axis, in the order of `tree`."""
    return tree(a * b)


def correction(scale: int, u: F32, c: F32) -> F32:
    """The factor from root mean square to scale. The result is not used for tokens whose scale is 0."""
    return quotient(scale, tree_dot(u, u), tree_dot(c, u), tree_dot(c, c))


def quotient(scale: int, uu: F32, cu: F32, cc: F32) -> F32:
    """turboquant.h, tq_scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if scale == EDEN:
            return uu / cu
        if scale == NORM_CORRECTED:
            return np.sqrt(uu / cc)
        return cu / cc if scale == LEAST_SQUARES else np.ones_like(cu)


def decode(p: Plan, side: str, codes: Array, scales: Array, transform: Transform, at: Array | None = None) -> F64:
    """mu + R^T (s step level) of codes as `encode` makes them, float64; with a wave or a metric A^-1 R^T(..) + c_p."""
    z = np.zeros((len(codes), p.head_dim))
    for channels, book in p.books(side):
        z[:, channels] = book.levels[codes[:, channels]].astype(np.float32) * book.step
    z = z * scales.astype(np.float64)[:, None]
    if transform.steps is not None:
        z = z * np.repeat(transform.steps.astype(np.float64), p.group)[: p.head_dim]
    x = z @ rotation_matrix(p, transform.rotation)
    if (head := moments.head_of(p, transform)) is not None:
        return moments.restored(head, x, at)
    return x if transform.centre is None else x + transform.centre.astype(np.float64)


# ---- the bytes of a record: a record is a string of bits, bit i of it is bit i % 8 of byte i / 8 ----


def column(token: int) -> int:
    """tq_column."""
    return 4 * (token % 8) + token // 8


def place(bits: int, r: int, n: int) -> list[tuple[int, int]]:
    """(word of the lane, bit of the word) for each bit of code c(r, n), lowest first."""
    four = [(r, 4 * n + k) for k in range(4)]
    h, i = divmod(n, 4)
    one = 8 * i + r + 4 * h
    if bits == WIDE:
        return [*four, *((r + 4, bit) for _, bit in four)]
    two = [(h, 8 * i + 2 * r), (h, 8 * i + 2 * r + 1)]
    if bits == 6:
        return [*four, *((4 + word, bit) for word, bit in two)]
    if bits == 5:
        return [*four, (4, one)]
    if bits == 4:
        return four
    if bits == 3:
        return four[:3] if r < 3 else [(k, 4 * n + 3) for k in range(3)]
    if bits == 2:
        return two
    return [(0, one)]


@cache
def tile_places(bits: int) -> Array:
    """[row, column, bit of the code]: which bit of the tile it is."""
    where = np.full((TILE, TILE, bits), -1)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(4):
            for n in range(8):
                col = 4 * t + n if n < 4 else 16 + 4 * t + n - 4
                where[g + 8 * r, col] = [32 * (32 * word + lane) + bit for word, bit in place(bits, r, n)]
    return where


@cache
def code_places(p: Plan, side: str) -> list[Array | None]:
    """For each group [token of the page, channel of the group, bit of the code]: which bit of the record it is."""
    result: list[Array | None] = []
    start = p.codes_offset(side)
    tokens, channels = np.arange(p.page_tokens)[:, None], np.arange(p.group)[None]
    for bits in p.bits(side):
        if bits == 0:
            result.append(None)
            continue
        inside = tile_places(bits)[cell(p, side, tokens % p.tile_tokens, channels)]
        result.append(inside + 8 * (start + tokens // p.tile_tokens * p.tile_bytes(side))[:, :, None])
        start += 128 * bits
    return result


def cell(p: Plan, side: str, token: Array, channel: Array) -> tuple[Array, Array]:
    """Row and column of a token of a tile and a channel of its group."""
    half, i = token // TILE, token % TILE  # half: 1 only with groups of 16
    in_order = np.array([column(k) for k in range(TILE)])[i]
    if p.group == TILE:
        return (i, channel) if side == "key" else (channel, in_order)
    if side == "key":
        return i, (channel & 7) | half << 3 | (channel & 8) << 1
    return channel | half << 4, in_order


def scale_view(p: Plan, side: str, record: NDArray[np.uint8]) -> Array:
    """The scales of a record as binary16, in stored order."""
    start = p.scales_offset(side)
    return record[start : start + p.scale_bytes(side)].view("<f2")


@cache
def scale_order(p: Plan) -> Array:
    """For each token of a page, the index of its scale in `scale_view`."""
    return np.array([i // TILE * TILE + column(i % TILE) for i in range(p.page_tokens)])


def pack(p: Plan, side: str, record: NDArray[np.uint8], tokens: Array, codes: Array, scales: Array) -> None:
    """Writes codes [n, groups * channels per group] and scales [n] of the given tokens of a page into its record."""
    if not any(p.bits(side)):
        return
    string = np.unpackbits(record, bitorder="little")
    for group, where in enumerate(code_places(p, side)):
        if where is not None:
            part = codes[:, p.group * group : p.group * (group + 1), None]
            string[where[tokens]] = np.unpackbits(part, axis=2, count=where.shape[2], bitorder="little")
    record[:] = np.packbits(string, bitorder="little")
    scale_view(p, side, record)[scale_order(p)[tokens]] = scales


def unpack(p: Plan, side: str, record: NDArray[np.uint8]) -> tuple[Array, Array]:
    """Codes [page_tokens, groups * channels per group] and scales [page_tokens] of a record."""
    codes = np.zeros((p.page_tokens, p.group * p.groups), np.uint8)
    if not any(p.bits(side)):
        return codes, np.zeros(p.page_tokens, np.float16)
    string = np.unpackbits(record, bitorder="little")
    for group, where in enumerate(code_places(p, side)):
        if where is not None:
            part = np.packbits(string[where], axis=2, bitorder="little")
            codes[:, p.group * group : p.group * (group + 1)] = part[:, :, 0]
    return codes, scale_view(p, side, record)[scale_order(p)]


def decode_packed(p: Plan, side: str, cache_: Cache, b: int, head: int, count: int, transform: Transform) -> F64:
    """Packed tokens 0 .. count - 1 of one sequence and KV head: [count, head_dim]."""
    parts = [np.zeros((0, p.head_dim))]
    for i, page in enumerate(cache_.block_table[b, : -(-count // p.page_tokens)]):
        codes, scales = unpack(p, side, cache_.pages[page, head])
        at = cache_.phase(b, cache_.sinks + p.page_tokens * i + np.arange(p.page_tokens))
        parts.append(decode(p, side, codes, scales, transform.at(head), at))
    return np.concatenate(parts)[:count]


def key_scales(p: Plan, cache_: Cache, b: int, head: int, count: int) -> Array:
    """The key scales of packed tokens 0 .. count - 1 of one sequence and KV head."""
    pages = cache_.pages[cache_.block_table[b, : -(-count // p.page_tokens)], head]
    return np.array([scale_view(p, "key", page)[scale_order(p)] for page in pages]).reshape(-1)[:count]


# ---- the cache ----


def widen(x: Array) -> F32:
    """float32 of float32, float16 or the bits of bfloat16 (uint16)."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def narrow(x: F32, dtype: str) -> Array:
    """x as "float32", "float16" or, rounded to nearest even, the bits of "bfloat16"."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass
class Cache:
    """One layer, stored as turboquant.h defines. Sinks and window are None if there are none."""

    pages: NDArray[np.uint8]  # [n_pages, kv_heads, record_bytes]
    block_table: NDArray[np.int32]  # [batch, max_pages]
    sink_k: Array | None = None  # [batch, kv_heads, sinks, head_dim]
    sink_v: Array | None = None
    window_k: Array | None = None  # [batch, kv_heads, window, head_dim]
    window_v: Array | None = None
    position_offset: Array | None = None  # [batch]; `phase` adds it to a token's position in the cache, for the wave

    def phase(self, b: int, positions: Array) -> Array:
        return positions if self.position_offset is None else positions + int(self.position_offset[b])

    @property
    def sinks(self) -> int:
        return 0 if self.sink_k is None else self.sink_k.shape[2]

    @property
    def window(self) -> int:
        return 0 if self.window_k is None else self.window_k.shape[2]

    def arrays(self) -> dict[str, Array]:
        """Sinks and window, by the keywords of `turboquant._core`."""
        names = ("sink_k", "sink_v", "window_k", "window_v")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def copy(self) -> Cache:
        exact = {name: array.copy() for name, array in self.arrays().items()}
        return Cache(self.pages.copy(), self.block_table.copy(), **exact, position_offset=self.position_offset)


def append(p: Plan, c: Cache, k: Array, v: Array | None, lengths: Array, key: Transform, value: Transform) -> None:
    """tq_append, in place: k, v [batch, kv_heads, tokens, head_dim]; lengths are those after the append."""
    for b, length in enumerate(int(n) for n in lengths):
        for head in range(k.shape[1]):
            append_side(p, "key", c, c.sink_k, c.window_k, k[b, head], b, head, length, key)
            if v is not None:
                append_side(p, "value", c, c.sink_v, c.window_v, v[b, head], b, head, length, value)


def append_side(
    p: Plan, side: str, c: Cache, sink: Array | None, ring: Array | None, new: Array, b: int, head: int, length: int,
    transform: Transform,
) -> None:  # fmt: skip
    """One sequence, one KV head, keys or values; new [tokens, head_dim]."""
    first_new = length - len(new)  # position of new[0]; negative: padding
    old = max(first_new, 0)
    first_kept = max(c.sinks, length - c.window)  # the window starts here after the append
    leaving = range(max(c.sinks, old - c.window), min(first_kept, length))
    rows = [ring[b, head, j % c.window] if j < old else new[j - first_new] for j in leaving]
    if rows:
        codes, scales = encode(p, side, widen(np.stack(rows)), transform.at(head), c.phase(b, np.array(leaving)))
        packed = np.arange(leaving.start, leaving.start + len(rows)) - c.sinks
        for page in np.unique(packed // p.page_tokens):
            here = packed // p.page_tokens == page
            record = c.pages[c.block_table[b, page], head]
            pack(p, side, record, packed[here] % p.page_tokens, codes[here], scales[here])
    for j in range(old, length):
        if j < c.sinks:
            sink[b, head, j] = new[j - first_new]
        elif j >= first_kept:
            ring[b, head, j % c.window] = new[j - first_new]


# ---- attention ----


@dataclass(frozen=True)
class Query:
    """The fields of tq_attend_params that are not in a cache."""

    q: Array  # [batch, query_heads, query_tokens, head_dim]
    lengths: Array
    starts: Array | None = None
    fresh_k: Array | None = None  # [batch, kv_heads, query_tokens, head_dim]
    fresh_v: Array | None = None
    key: Transform = Transform()
    value: Transform = Transform()
    causal: bool = True
    sliding_window: int = 0
    softmax_scale: float | None = None
    softcap: float = 0.0


def visible(request: Query, b: int, i: int) -> tuple[int, int]:
    """First and last position that query i of sequence b sees; nothing if first > last."""
    length, start = int(request.lengths[b]), 0 if request.starts is None else int(request.starts[b])
    if not request.causal:
        return start, length - 1
    last = length - request.q.shape[2] + i
    return max(start, last - request.sliding_window + 1) if request.sliding_window else start, last


def history(p: Plan, side: str, c: Cache, request: Query, b: int, head: int) -> tuple[F64, F64]:
    """Returns packed vectors by packed index, and exact ones by position, NaN where none is stored. Both are
    [.., head_dim]; keys have one channel more, for the variance term."""
    sink, ring = (c.sink_k, c.window_k) if side == "key" else (c.sink_v, c.window_v)
    fresh = request.fresh_k if side == "key" else request.fresh_v
    length, transform = int(request.lengths[b]), request.key if side == "key" else request.value
    packed = decode_packed(p, side, c, b, head, max(0, length - c.window - c.sinks), transform)
    exact = np.full((length, p.head_dim), np.nan)
    old = length if fresh is None else max(0, length - request.q.shape[2])
    for j in range(length):
        if j < c.sinks:
            exact[j] = widen(sink[b, head, j])
        elif j >= old:
            exact[j] = widen(fresh[b, head, j - (length - request.q.shape[2])])
        elif j >= old - c.window:
            exact[j] = widen(ring[b, head, j % c.window])
    if side == "key":
        packed = variance.of_keys(p, packed, key_scales(p, c, b, head, len(packed)))
        exact = variance.of_keys(p, exact, np.zeros(length))
    return packed, exact


def seen(c: Cache, request: Query, b: int, i: int, packed: F64, exact: F64) -> F64:
    """The keys (or values) that query i of sequence b sees, oldest first."""
    first, last = visible(request, b, i)
    newest = last if request.causal else int(request.lengths[b]) - 1
    rows = [exact[j] if j < c.sinks or j > newest - c.window else packed[j - c.sinks] for j in range(first, last + 1)]
    return np.array(rows).reshape(-1, exact.shape[-1])


def attend(p: Plan, c: Cache, request: Query) -> tuple[F64, F64]:
    """tq_attend in float64: out [batch, query_heads, query_tokens, head_dim] and lse without its last axis."""
    q = widen(request.q).astype(np.float64)
    batch, heads, tokens, _ = q.shape
    kv_heads = c.pages.shape[1]
    scale = p.head_dim**-0.5 if request.softmax_scale is None else request.softmax_scale
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(batch):
        for head in range(kv_heads):
            keys, values = (history(p, side, c, request, b, head) for side in ("key", "value"))
            group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            for i in range(tokens):
                k, v = seen(c, request, b, i, *keys), seen(c, request, b, i, *values)
                rows = variance.of_queries(p, q[b, group, i], scale, request.key.at(head))
                if len(k):
                    out[b, group, i], lse[b, group, i] = softmax(rows @ k.T, v, request.softcap)
    return out, lse


def softmax(logits: F64, v: F64, softcap: float) -> tuple[F64, F64]:
    """Weighted means of v [tokens, head_dim] and log-sum-exp for rows of logits [rows, tokens]."""
    if softcap > 0:
        logits = softcap * np.tanh(logits / softcap)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total @ v, (top + np.log(total))[:, 0]


def merge(outs: Array, lses: Array) -> tuple[F64, F64]:
    """tq_merge in float64: outs [parts, rows, head_dim], lses [parts, rows]."""
    top = np.where(np.isneginf(lses.max(axis=0)), 0.0, lses.max(axis=0)).astype(np.float64)
    weights = np.exp(lses.astype(np.float64) - top)
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    mixed = (weights[:, :, None] * outs.astype(np.float64)).sum(axis=0)
    return mixed / np.where(total == 0, 1.0, total)[:, None], lse


def dot(p: Plan, queries: F32, pages: NDArray[np.uint8], n: int, transform: Transform) -> F64:
    """tq_dot in float64."""
    c = Cache(pages, np.arange(len(pages), dtype=np.int32)[None])
    return queries.astype(np.float64) @ decode_packed(p, "key", c, 0, 0, n, transform).T
