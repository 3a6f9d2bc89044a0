"""Random transforms and caches for tests. What must not be read holds NaN, 0xFF or an index out of range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import reference as ref
from reference import Array, Cache, Plan, Query, Transform

from turboquant.transforms import transforms

FAR = 2**30  # unused entries of block tables: out of range, so that following one fails


def aligned_pages(n_pages: int, kv_heads: int, record_bytes: int, fill: int = 0) -> Array:
    """uint8 [n_pages, kv_heads, record_bytes], 64-byte aligned."""
    size = n_pages * kv_heads * record_bytes
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    pages = raw[start : start + size].reshape(n_pages, kv_heads, record_bytes)
    pages[...] = fill
    return pages


def realigned(pages: Array) -> Array:
    """An aligned copy."""
    result = aligned_pages(*pages.shape)
    result[...] = pages
    return result


@cache
def orthogonal(dim: int, seed: int = 0) -> Array:
    """A fixed random orthogonal matrix, float32."""
    q, _ = np.linalg.qr(np.random.default_rng([seed, dim]).standard_normal((dim, dim)))
    return np.ascontiguousarray(q, np.float32)


def random_transform(rng: np.random.Generator, p: Plan, kv_heads: int, plain: bool = False) -> Transform:
    """Returns matrices if the plan is dense and, unless `plain`, a centre per head and a step per group. A plan with a
    variance term has no steps. The transform has no wave and no metric."""
    matrices = np.stack([orthogonal(p.head_dim, h) for h in range(kv_heads)]) if p.rotation == ref.DENSE else None
    if plain:
        return Transform(matrices)
    centre = rng.standard_normal((kv_heads, p.head_dim)).astype(np.float32)
    steps = np.exp(0.5 * rng.standard_normal((kv_heads, p.groups))).astype(np.float32)
    return Transform(matrices, centre, None if p.variance_term else steps)


def random_moments(
    rng: np.random.Generator, p: Plan, kv_heads: int, size: float = 1.0, interleaved: bool = False
) -> tuple[Array | None, Array | None]:
    """(turns, moments) of tq_transform for a plan; `size` is the norm of a head's amplitudes. Pairs are in
    random order and turn in both directions. Pairs beyond head_dim / 2 are zeros."""
    half = p.head_dim // 2
    steps = rng.permutation(half)[: p.wave_pairs]
    pairs = np.stack([2 * steps, 2 * steps + 1] if interleaved else [steps, steps + half], 1)
    increments = (10000.0 ** -(steps / half) / (2 * np.pi) * 2**32).round() * np.where(steps % 3, 1, -1)
    turns = np.zeros((p.wave_pairs, 3), np.int32)
    turns[: len(steps)] = np.column_stack([pairs, increments.astype(np.int64).astype(np.int32)])
    amplitudes = np.zeros((kv_heads, p.wave_pairs, 2))
    amplitudes[:, : len(steps)] = rng.standard_normal((kv_heads, len(steps), 2))
    amplitudes *= size / np.maximum(np.linalg.norm(amplitudes, axis=(1, 2), keepdims=True), 1e-9)
    parts = [amplitudes.reshape(kv_heads, -1)]
    if p.metric:
        rank = p.metric - 1
        directions = np.linalg.qr(rng.standard_normal((kv_heads, p.head_dim, max(rank, 1))))[0].swapaxes(-1, -2)
        stretch = np.zeros((kv_heads, 4))
        stretch[:, :rank] = rng.uniform(-0.6, 2, (kv_heads, rank))
        parts += [rng.uniform(0.6, 1.6, (kv_heads, p.head_dim)), directions[:, :rank].reshape(kv_heads, -1), stretch]
    moments = np.ascontiguousarray(np.concatenate(parts, 1), np.float32)
    return turns if p.wave_pairs else None, moments if moments.size else None


def keywords(key: Transform, value: Transform | None = None) -> dict[str, Array]:
    """The transforms as `turboquant._core` takes them."""
    return dict(transforms(**parts(key, value)))


def parts(key: Transform, value: Transform | None = None) -> dict[str, Array]:
    """The transforms as `turboquant.transforms.transforms` takes them, before it joins them."""
    result = {}
    for side, transform in (("key", key), ("value", value)):
        for name in ("rotation", "centre", "steps", "turns", "moments"):
            array = getattr(transform, name, None)
            if array is not None:
                result[f"{side}_{name}"] = array
    return result


def awkward_rows(rng: np.random.Generator, tokens: int, head_dim: int) -> Array:
    """Float32 rows of all sizes: ordinary, zero, one-hot, constant, subnormal, tiny, and the largest there may be."""
    x = rng.standard_normal((tokens, head_dim)).astype(np.float32)
    kinds = [
        np.zeros(head_dim),
        np.eye(head_dim)[rng.integers(head_dim)],
        np.full(head_dim, -3.0),
        x[0] * 1e-42,
        x[1] * 1e-19,
        x[2] * 1e-8,
        np.full(head_dim, 16384.0),
        np.sign(x[3]) * 16384.0,
        -np.zeros(head_dim),
        np.where(np.arange(head_dim) % 2, 1e-30, 1e4),
    ]
    for row, kind in zip(rng.permutation(tokens), kinds):
        x[row] = kind
    return x


@dataclass
class Case:
    """A filled cache and a query over it."""

    plan: Plan
    cache: Cache
    query: Query
    dtype: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `turboquant._core.attend`."""
        q, rest = self.query, {}
        for name in ("starts", "fresh_k", "fresh_v"):
            if getattr(q, name) is not None:
                rest[name] = getattr(q, name)
        return dict(
            plan=self.plan.words,
            q=q.q,
            pages=self.cache.pages,
            block_table=self.cache.block_table,
            lengths=q.lengths,
            causal=q.causal,
            sliding_window=q.sliding_window,
            softmax_scale=q.softmax_scale,
            softcap=q.softcap,
            dtype=self.dtype,
            **rest,
            **self.cache.arrays(),
            **keywords(q.key, q.value),
        )


def empty_cache(
    rng: np.random.Generator,
    p: Plan,
    lengths: Array,
    *,
    kv_heads: int,
    sinks: int = 0,
    window: int = 0,
    dtype: str = "float32",
    fill: int = 0xFF,
) -> Cache:
    """Just enough pages and two spare ones, in random order, all bytes `fill`. Unused block table entries are FAR."""
    needed = [-(-max(0, int(n) - sinks - window) // p.page_tokens) for n in lengths]
    table = np.full((len(lengths), max(needed) + 2), FAR, np.int32)
    free = list(rng.permutation(sum(needed) + 2))
    for b, n in enumerate(needed):
        table[b, :n] = [free.pop() for _ in range(n)]
    exact = {}
    for name, size in (("sink", sinks), ("window", window)):
        for side in "kv":
            if size:
                shape = (len(lengths), kv_heads, size, p.head_dim)
                exact[f"{name}_{side}"] = ref.narrow(np.full(shape, np.nan, np.float32), dtype)
    return Cache(aligned_pages(sum(needed) + 2, kv_heads, p.record_bytes, fill), table, **exact)


def right_aligned(rng: np.random.Generator, lengths: Array, tokens: int, kv_heads: int, head_dim: int) -> Array:
    """[batch, kv_heads, tokens, head_dim] with NaN where a sequence has no token."""
    x = rng.standard_normal((len(lengths), kv_heads, tokens, head_dim)).astype(np.float32)
    for b, n in enumerate(lengths):
        x[b, :, : tokens - int(n)] = np.nan
    return x


def make_case(
    rng: np.random.Generator,
    p: Plan,
    lengths: list[int],
    *,
    starts: list[int] | None = None,
    kv_heads: int = 2,
    group: int = 2,
    query_tokens: int = 1,
    sinks: int = 0,
    window: int = 0,
    fresh: bool = False,
    dtype: str = "float32",
    plain: bool = False,
    spread: float = 3.0,
    wave_size: float = 3.0,
    **query: Any,
) -> Case:
    """A cache filled by the reference. Logits have a standard deviation of about `spread`: a few tokens dominate."""
    size = np.array(lengths, np.int32)
    key, value = (random_transform(rng, p, kv_heads, plain) for _ in range(2))
    turns, moments = random_moments(rng, p, kv_heads, wave_size)
    key = replace(key, turns=turns, moments=moments)
    c = empty_cache(rng, p, size, kv_heads=kv_heads, sinks=sinks, window=window, dtype=dtype)
    total = max(int(size.max(initial=0)), query_tokens)
    k, v = (ref.narrow(right_aligned(rng, size, total, kv_heads, p.head_dim), dtype) for _ in range(2))
    cut = total - query_tokens if fresh else total
    ref.append(p, c, k[:, :, :cut], v[:, :, :cut], np.maximum(size - (total - cut), 0), key, value)
    before = c.copy()
    if fresh:
        ref.append(p, c, k[:, :, cut:], v[:, :, cut:], size, key, value)
        c = replace(c, window_k=before.window_k, window_v=before.window_v)
        query |= dict(fresh_k=k[:, :, cut:].copy(), fresh_v=v[:, :, cut:].copy())
    q = spread * rng.standard_normal((len(size), kv_heads * group, query_tokens, p.head_dim))
    if starts is not None:
        query["starts"] = np.array(starts, np.int32)
    asked = Query(ref.narrow(q.astype(np.float32), dtype), size, key=key, value=value, **query)
    return Case(p, c, asked, dtype)
