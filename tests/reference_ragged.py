"""A slow reference of ragged batches and of exact tokens by index (turboquant.h, "the cache"), one token at a time, on
top of tests/reference.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import reference as ref
import reference_variance as variance
from reference import F64, Array, Cache, Plan, Query, Transform

NO_TRANSFORM = Transform()


@dataclass
class Paged:
    """One layer that packs every token into its pages, and keeps exact copies of some in rows. None: no such copies."""

    cache: Cache  # pages, block table and position_offset; no sinks and no window
    sink_k: Array | None = None  # [rows, kv_heads, sinks, head_dim]
    sink_v: Array | None = None
    window_k: Array | None = None  # [rows, kv_heads, slots, head_dim]
    window_v: Array | None = None
    sink_rows: Array | None = None  # [batch]
    tail_rows: Array | None = None  # [batch, 2]

    def exact(self, side: str) -> tuple[Array | None, Array | None]:
        return (self.sink_k, self.window_k) if side == "key" else (self.sink_v, self.window_v)


@dataclass(frozen=True)
class Request:
    """Queries [tokens, query_heads, head_dim] over a `Paged` layer."""

    q: Array
    query_start_loc: Array
    lengths: Array
    window: int = 0
    starts: Array | None = None
    ends: Array | None = None
    key: Transform = NO_TRANSFORM
    value: Transform = NO_TRANSFORM
    causal: bool = True
    sliding_window: int = 0
    softmax_scale: float | None = None
    softcap: float = 0.0


def places(p: Plan, layer: Paged, b: int, position: int) -> tuple[int, int]:
    """(row of the sinks, row of the tails) that could hold a position; -1: none."""
    sinks = 0 if layer.sink_k is None else layer.sink_k.shape[2]
    sink = -1 if layer.sink_rows is None or position >= sinks else int(layer.sink_rows[b])
    tail = -1 if layer.tail_rows is None else int(layer.tail_rows[b, position // p.page_tokens % 2])
    return sink, tail


def append(
    p: Plan, layer: Paged, k: Array, v: Array | None, loc: Array, lengths: Array, key: Transform, value: Transform
) -> None:
    """In place; k, v [tokens, kv_heads, head_dim]."""
    c = layer.cache
    for b, length in enumerate(int(n) for n in lengths):
        for i in range(loc[b], loc[b + 1]):
            position = length - int(loc[b + 1]) + i
            if position < 0:
                continue
            for side, x, transform in (("key", k, key), ("value", v, value)):
                if x is None:
                    continue
                sinks, tails = layer.exact(side)
                sink, tail = places(p, layer, b, position)
                page, token = divmod(position, p.page_tokens)
                for head in range(x.shape[1]):
                    at = c.phase(b, np.array([position]))
                    codes, scales = ref.encode(p, side, ref.widen(x[i, head][None]), transform.at(head), at)
                    ref.pack(p, side, c.pages[c.block_table[b, page], head], np.array([token]), codes, scales)
                if sinks is not None and sink >= 0:
                    sinks[sink, :, position] = x[i]
                if tails is not None and tail >= 0 and page >= (length - 1) // p.page_tokens - 1:
                    tails[tail, :, position % tails.shape[2]] = x[i]


def is_in_tail(p: Plan, layer: Paged, request: Request, b: int, position: int) -> bool:
    """Whether a position is among the last `window`, and it and all later ones are in pages that have a row."""
    length = int(request.lengths[b])
    return position >= length - request.window and all(places(p, layer, b, j)[1] >= 0 for j in range(position, length))


def token(p: Plan, layer: Paged, request: Request, side: str, b: int, head: int, position: int, packed: F64) -> F64:
    """Returns the key or value that attention uses at a position. Keys have the channel of the variance term too."""
    sinks, tails = layer.exact(side)
    sink, tail = places(p, layer, b, position)
    if sinks is not None and sink >= 0:
        exact = ref.widen(sinks[sink, head, position])[None]
    elif tails is not None and is_in_tail(p, layer, request, b, position):
        exact = ref.widen(tails[tail, head, position % tails.shape[2]])[None]
    else:
        return packed[position]
    exact = exact.astype(np.float64)
    return (variance.of_keys(p, exact, np.zeros(1)) if side == "key" else exact)[0]


def attend(p: Plan, layer: Paged, request: Request) -> tuple[F64, F64]:
    """out [tokens, query_heads, head_dim] and lse [tokens, query_heads]; 0 and -inf for tokens without a sequence."""
    q, loc = ref.widen(request.q).astype(np.float64), request.query_start_loc
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    scale = p.head_dim**-0.5 if request.softmax_scale is None else request.softmax_scale
    kv_heads = layer.cache.pages.shape[1]
    group = q.shape[1] // kv_heads
    for b, length in enumerate(int(n) for n in request.lengths):
        if loc[b] == loc[b + 1]:
            continue
        start = 0 if request.starts is None else int(request.starts[b])
        end = length if request.ends is None else int(request.ends[b])
        for head in range(kv_heads):
            packed_keys, packed_values = (
                ref.decode_packed(p, side, layer.cache, b, head, length, transform)
                for side, transform in (("key", request.key), ("value", request.value))
            )
            scales = ref.key_scales(p, layer.cache, b, head, length)
            keys, values = (
                [token(p, layer, request, side, b, head, j, packed) for j in range(length)]
                for side, packed in (("key", variance.of_keys(p, packed_keys, scales)), ("value", packed_values))
            )
            for i in range(loc[b], loc[b + 1]):
                position = length - int(loc[b + 1]) + i
                first, last = start, min(position + 1 if request.causal else length, end)
                if request.sliding_window:
                    first = max(first, position - request.sliding_window + 1)
                if first >= last:
                    continue
                rows = slice(head * group, (head + 1) * group)
                asked = variance.of_queries(p, q[i, rows], scale, request.key.at(head))
                logits = asked @ np.array(keys[first:last]).T
                out[i, rows], lse[i, rows] = ref.softmax(logits, np.array(values[first:last]), request.softcap)
    return out, lse


def attend_to_cache(p: Plan, c: Cache, query: Query, loc: Array) -> tuple[F64, F64]:
    """The same over a cache with its own sinks and window, one sequence at a time. query.q: [tokens, heads, dim]."""
    out, lse = np.zeros(query.q.shape), np.full(query.q.shape[:2], -np.inf)
    for b in range(len(loc) - 1):
        if loc[b] == loc[b + 1]:
            continue
        rows, one = slice(int(loc[b]), int(loc[b + 1])), slice(b, b + 1)
        alone = Cache(c.pages, c.block_table[one], **{name: x[one] for name, x in c.arrays().items()})
        if c.position_offset is not None:
            alone.position_offset = c.position_offset[one]
        asked = replace(
            query,
            q=query.q[rows].swapaxes(0, 1)[None],
            lengths=query.lengths[one],
            starts=None if query.starts is None else query.starts[one],
        )
        each, each_lse = ref.attend(p, alone, asked)
        out[rows], lse[rows] = each[0].swapaxes(0, 1), each_lse[0].T
    return out, lse
