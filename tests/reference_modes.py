"""A slow reference in NumPy of plans that are not plain (blocks, tables, sketches), written from turboquant.h. It
shares no code with C.

Encoding is float32, one IEEE operation at a time; decoding for attention is float64. The core must make the bytes that
this makes. What all plans share (Philox, rotations, codebooks, tiles) comes from tests/reference.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import reference as ref
import reference_random as draws
from reference import F32, F64, TILE, Array

CODEBOOK, AFFINE, ABSMAX, TABLE = range(4)  # tq_levels
NO_SKETCH, GAUSSIAN, SIGN = range(3)  # tq_sketch
UNIFORM = 2  # tq_codebook_law
HALF_STEPS = {3: 0.293009721, 4: 0.167600307, 5: 0.0940693967, 6: 0.0520315039}
f32 = np.float32


@dataclass(frozen=True)
class Side:
    """One side of a plan: the bit width of each group, and the groups at which blocks begin."""

    bits: tuple[int, ...]
    begins: tuple[int, ...] = (0,)
    rotation: int = ref.HADAMARD
    levels: int = CODEBOOK
    sketch: int = NO_SKETCH
    sketch_rows: int = 0


@dataclass(frozen=True)
class Plan:
    head_dim: int
    key: Side
    value: Side | None = None
    codebook: int = ref.NORMAL
    scale: int = ref.EDEN
    seed: int = 0
    page_tokens: int = ref.PAGE_TOKENS

    @property
    def groups(self) -> int:
        return -(-self.head_dim // TILE)

    @property
    def words(self) -> tuple[int, ...]:
        common = (ref.PLAN_VERSION, self.head_dim, self.page_tokens, TILE, self.codebook, self.scale, self.seed)
        heads, tails = [], []
        for side in (self.key, self.value):
            if side is None:
                heads += [0] * 4
                tails += [0] * self.groups
            else:
                heads += [side.rotation, side.levels, side.sketch, side.sketch_rows]
                tails += [bits + 16 * (g in side.begins) for g, bits in enumerate(side.bits)]
        return (*common, *heads, 0, 0, 0, 0, *tails)

    def side(self, name: str) -> Side | None:
        return self.key if name == "key" else self.value

    def signs(self, name: str) -> int:
        """How many signs the sketch of a token has."""
        side = self.side(name)
        return self.head_dim if side.sketch == SIGN else side.sketch_rows

    def tile_bits(self, name: str) -> list[int]:
        side = self.side(name)
        return [] if side is None else [*side.bits, *([1] * -(-self.signs(name) // TILE))]

    def numbers(self, name: str) -> int:
        """How many binary16 numbers are stored for a token."""
        side = self.side(name)
        if side is None:
            return 0
        per_block = {CODEBOOK: 1, AFFINE: 2, ABSMAX: 1, TABLE: 0}[side.levels]
        static = side.sketch == SIGN and side.levels == TABLE
        return per_block * len(side.begins) + (side.sketch != NO_SKETCH and not static)

    def start(self, name: str, what: str) -> int:
        """Returns the byte of a record at which the codes or scales of a side begin."""
        sizes = [("codes", "key"), ("codes", "value"), ("scales", "key"), ("scales", "value")]
        at = 0
        for kind, side in sizes:
            if (kind, side) == (what, name):
                return at
            tiles = self.page_tokens // TILE * 128 * sum(self.tile_bits(side))
            at += tiles if kind == "codes" else 2 * self.page_tokens * self.numbers(side)
        raise AssertionError(name)

    @property
    def record_bytes(self) -> int:
        return self.start("value", "scales") + 2 * self.page_tokens * self.numbers("value")


@dataclass(frozen=True)
class Transform:
    """The arrays of one KV head: matrix [rows, head_dim], centre [head_dim], table [columns]."""

    matrix: F32 | None = None
    centre: F32 | None = None
    table: F32 | None = None


def gaussian(seed: int, rows: int, dim: int) -> F32:
    """tq_gaussian: the recipe of tests/reference.py, stream 2^33."""
    numbers: list[float] = []
    block = 0
    while len(numbers) < rows * dim:
        words = draws.random(seed, 1 << 33, block)
        block += 1
        for w0, w1 in (words[:2], words[2:]):
            a, b = ((w + 0.5) / 2.0**32 * 2.0 - 1.0 for w in (w0, w1))
            r = a * a + b * b
            if r < 1.0:
                f = math.sqrt(-2.0 * draws.logarithm(r) / r)
                numbers += [a * f, b * f]
    return np.array(numbers[: rows * dim]).astype(f32).reshape(rows, dim)


@cache
def book(law: int, head_dim: int, bits: int) -> ref.Codebook:
    if law != UNIFORM or bits <= 2 or bits == ref.WIDE:
        return ref.codebook(ref.NORMAL if law == UNIFORM else law, head_dim, bits)
    step, odd = f32(HALF_STEPS[bits]), np.arange(1, 2**bits, 2)
    ranked = np.concatenate([-odd[::-1], odd])
    thresholds = (ranked[:-1] + ranked[1:]).astype(f32) * (f32(0.5) * step)
    code_of_rank = np.array([ref.code_of(k, bits) for k in range(2**bits)], np.uint8)
    levels = np.zeros(2**bits, np.int8)
    levels[code_of_rank] = ranked
    return ref.Codebook(bits, step, ranked, thresholds, code_of_rank, levels)


def matrices(p: Plan, name: str, t: Transform) -> tuple[F32 | None, F32 | None]:
    """The rotation if it is dense, and the matrix of the sketch if it is Gaussian; otherwise None."""
    side = p.side(name)
    dense = p.head_dim if side.rotation == ref.DENSE else 0
    rotation = t.matrix[:dense] if dense else None
    return rotation, t.matrix[dense:] if side.sketch == GAUSSIAN else None


def stored(x: F32) -> Array:
    return np.clip(x, -65504, 65504).astype(np.float16)


def levels_of(p: Plan, side: Side, bits: int, t: Transform) -> F32:
    """The level of each code, before scale and zero point are applied."""
    codes = np.arange(2**bits)
    if side.levels == AFFINE:
        return codes.astype(f32)
    if side.levels == ABSMAX:
        return (codes - 2 ** (bits - 1)).astype(f32)
    if side.levels == TABLE:
        return t.table[: 2**bits]
    b = book(p.codebook, p.head_dim, bits)
    return b.levels.astype(f32) * b.step


def encode_block(p: Plan, side: Side, groups: range, z: F32, t: Transform) -> tuple[Array, list[Array]]:
    """Codes [tokens, channels] of a block, and its scales and zero points, each [tokens]."""
    bits = side.bits[groups.start]
    if side.levels == AFFINE:
        top = f32(2**bits - 1)
        zero, scale = stored(z.min(1)), stored((z.max(1) - z.min(1)) / top)
        o, s = zero.astype(f32)[:, None], scale.astype(f32)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.where(s > 0, np.rint((z - o) / s), f32(0))
        return np.clip(codes, 0, top).astype(np.uint8), [scale, zero]
    if side.levels == ABSMAX:
        half, top = 2 ** (bits - 1), f32(2 ** (bits - 1) - 1)
        s = np.abs(z).max(1) / top
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            ratio = (z * np.where(s > 0, f32(1) / s, f32(0))[:, None]).astype(np.float64)
        ratio = np.nan_to_num(np.clip(ratio, -1e6, 1e6), nan=0.0)
        codes = np.clip(np.sign(ratio) * np.floor(np.abs(ratio) + 0.5), -top, top)
        return (codes + half).astype(np.uint8), [stored(s)]
    if side.levels == TABLE:
        distance = np.abs(z[:, :, None] - t.table[: 2**bits])
        return distance.argmin(-1).astype(np.uint8), []
    ss = ref.tree(z * z)
    alive = ss >= ref.FLT_MIN
    s0 = np.sqrt(np.where(alive, ss, f32(1)) / f32(z.shape[1]))
    u = np.where(alive[:, None], z * (f32(1) / s0)[:, None], f32(0))
    codes, c = np.zeros(z.shape, np.uint8), np.zeros_like(u)
    for g in groups:
        b = book(p.codebook, p.head_dim, side.bits[g])
        where = slice(TILE * (g - groups.start), TILE * (g - groups.start + 1))
        rank = b.rank(u[:, where])
        codes[:, where] = b.code_of_rank[rank]
        c[:, where] = b.ranked[rank].astype(f32) * b.step
    scale = np.where(alive, s0 * ref.correction(p.scale, u, c), f32(0))
    return codes, [stored(scale)]


def encode(p: Plan, name: str, x: F32, t: Transform) -> tuple[Array, Array]:
    """Codes [tokens, 32 * tiles] and numbers [tokens, numbers] of rows x [tokens, head_dim]."""
    side = p.side(name)
    rotation, sketch = matrices(p, name, t)
    turned = ref.plan(p.head_dim, 1, seed=p.seed, rotation=side.rotation)
    z = ref.rotate(turned, x if t.centre is None else x - t.centre, rotation)
    codes = np.zeros((len(x), TILE * len(p.tile_bits(name))), np.uint8)
    numbers, left = [], z.copy()
    ends = [*side.begins[1:], p.groups]
    for begin, end in zip(side.begins, ends):
        where = slice(TILE * begin, min(TILE * end, p.head_dim))
        codes[:, where], found = encode_block(p, side, range(begin, end), z[:, where], t)
        numbers += found
        s = f32(1) if side.levels == TABLE else found[0].astype(f32)[:, None]
        o = found[1].astype(f32)[:, None] if side.levels == AFFINE else f32(0)
        for g in range(begin, end):
            channels = slice(TILE * g, min(TILE * g + TILE, p.head_dim))
            left[:, channels] = z[:, channels] - (s * levels_of(p, side, side.bits[g], t)[codes[:, channels]] + o)
    if side.sketch != NO_SKETCH:
        projected = left
        if sketch is not None:
            projected = sketch[:, 0] * left[:, :1]
            for i in range(1, p.head_dim):
                projected = projected + sketch[:, i] * left[:, i : i + 1]
        codes[:, TILE * p.groups : TILE * p.groups + p.signs(name)] = projected >= 0
        if side.sketch == GAUSSIAN:
            numbers.append(stored(np.sqrt(ref.tree(left * left))))
        elif side.levels != TABLE:
            numbers.append(stored(ref.tree(np.abs(left)) / f32(p.head_dim)))
    assert z.dtype == left.dtype == np.float32
    return codes, np.stack(numbers, 1) if numbers else np.zeros((len(x), 0), np.float16)


def decode(p: Plan, name: str, codes: Array, numbers: Array, t: Transform) -> F64:
    """[tokens, head_dim] in float64."""
    side = p.side(name)
    rotation, sketch = matrices(p, name, t)
    y, numbers = np.zeros((len(codes), p.head_dim)), numbers.astype(np.float64)
    block = -1
    for g, bits in enumerate(side.bits):
        block += g in side.begins
        channels = slice(TILE * g, min(TILE * g + TILE, p.head_dim))
        y[:, channels] = levels_of(p, side, bits, t).astype(np.float64)[codes[:, channels]]
        if side.levels == AFFINE:
            y[:, channels] = numbers[:, 2 * block, None] * y[:, channels] + numbers[:, 2 * block + 1, None]
        elif side.levels != TABLE:
            y[:, channels] *= numbers[:, block, None]
    signs = 2.0 * codes[:, TILE * p.groups :][:, : p.signs(name)] - 1.0
    if side.sketch == GAUSSIAN:
        y += math.sqrt(math.pi / 2) / side.sketch_rows * numbers[:, -1:] * (signs @ sketch.astype(np.float64))
    elif side.sketch == SIGN:
        y += signs * (float(t.table[-1]) if side.levels == TABLE else numbers[:, -1:])
    turned = ref.plan(p.head_dim, 1, seed=p.seed, rotation=side.rotation)
    x = y @ ref.rotation_matrix(turned, rotation)
    return x if t.centre is None else x + t.centre.astype(np.float64)


# ---- bytes ----


def pack(p: Plan, name: str, record: Array, tokens: Array, codes: Array, numbers: Array) -> None:
    """Writes tokens of a page into its record."""
    string = np.unpackbits(record, bitorder="little")
    tile_bytes, at = 128 * sum(p.tile_bits(name)), p.start(name, "codes")
    columns = np.array([ref.column(i) for i in range(TILE)])[tokens % TILE]
    for tile, bits in enumerate(p.tile_bits(name)):
        places = ref.tile_places(bits)
        inside = places[tokens % TILE] if name == "key" else places.transpose(1, 0, 2)[columns]
        where = inside + 8 * (at + tokens // TILE * tile_bytes)[:, None, None]
        string[where] = codes[:, TILE * tile : TILE * tile + TILE, None] >> np.arange(bits) & 1
        at += 128 * bits
    record[:] = np.packbits(string, bitorder="little")
    order = tokens // TILE * TILE + columns
    for i in range(p.numbers(name)):
        start = p.start(name, "scales") + 2 * p.page_tokens * i
        record[start : start + 2 * p.page_tokens].view("<f2")[order] = numbers[:, i]


def unpack(p: Plan, name: str, record: Array) -> tuple[Array, Array]:
    """Codes [page_tokens, 32 * tiles] and numbers [page_tokens, numbers of a token] of a record."""
    string, tokens = np.unpackbits(record, bitorder="little"), np.arange(p.page_tokens)
    columns, at = np.array([ref.column(i) for i in range(TILE)])[tokens % TILE], p.start(name, "codes")
    tile_bytes, codes = 128 * sum(p.tile_bits(name)), []
    for bits in p.tile_bits(name):
        places = ref.tile_places(bits)
        inside = places[tokens % TILE] if name == "key" else places.transpose(1, 0, 2)[columns]
        where = inside + 8 * (at + tokens // TILE * tile_bytes)[:, None, None]
        codes.append((string[where].astype(np.int64) << np.arange(bits)).sum(-1))
        at += 128 * bits
    start, size = p.start(name, "scales"), 2 * p.page_tokens
    order = tokens // TILE * TILE + columns
    numbers = [record[start + size * i : start + size * (i + 1)].view("<f2")[order] for i in range(p.numbers(name))]
    return np.concatenate(codes, 1), np.stack(numbers, 1) if numbers else np.zeros((len(tokens), 0), np.float16)


def decode_pages(p: Plan, name: str, pages: Array, table: Array, tokens: int, by_head: list[Transform]) -> F64:
    """Decoded vectors of packed tokens, [batch, heads, tokens, head_dim]."""
    out = np.zeros((len(table), pages.shape[1], tokens, p.head_dim))
    for b, head in np.ndindex(out.shape[:2]):
        for start in range(0, tokens, p.page_tokens):
            codes, numbers = unpack(p, name, pages[table[b, start // p.page_tokens], head])
            here = out[b, head, start : start + p.page_tokens]
            here[...] = decode(p, name, codes[: len(here)], numbers[: len(here)], by_head[head])
    return out


def pages_of(p: Plan, k: F32, v: F32 | None, key: list[Transform], value: list[Transform]) -> Array:
    """Pages, uint8 [batch * n, heads, record_bytes], of sequences [batch, heads, tokens, head_dim]."""
    batch, heads, tokens, _ = k.shape
    n = -(-tokens // p.page_tokens)
    pages = np.zeros((batch * n, heads, p.record_bytes), np.uint8)
    for name, x, by_head in (("key", k, key), ("value", v, value)):
        for b, h in np.ndindex(batch, heads) if x is not None else ():
            codes, numbers = encode(p, name, x[b, h], by_head[h])
            for page in range(n):
                here = slice(p.page_tokens * page, min(p.page_tokens * (page + 1), tokens))
                inside = np.arange(here.stop - here.start)
                pack(p, name, pages[b * n + page, h], inside, codes[here], numbers[here])
    return pages
