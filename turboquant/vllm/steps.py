"""A step on a GPU: first requests with few new tokens, then chunks of prompts.

The requests with few tokens are one call of `attend`, which a CUDA graph may hold. Its queries read packed tokens, also
their own. A chunk attends to itself by the engine's own attention, to exact keys and values. Then each chunk attends to
the packed tokens in front of it, and the two results are merged by their log-sum-exp. If a KV head has many query rows
(`LEAST_ROWS`), packed tokens are decoded, a bounded number at a time, and the engine's own attention reads those too.
Otherwise this is a call of `attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..kvcache.decoded import LEAST_ROWS, SCRATCH_BYTES
from ..plan import GROUP
from .batch import Batch
from .ragged import Attention, append, attend, attend_workspace, share_with_learned_sinks, write_schedule
from .rows import PAGE

__all__ = ["Dense", "Past", "Schedule", "Step", "reserve", "run"]

_dequantize = torch.ops.turboquant.dequantize.default

# (attention, q, k, v, q_loc, k_loc, most_q, most_k, causal, out) -> log-sum-exp, float32 [heads, tokens]. Writes to
# `out` the attention of queries q_loc[r] .. q_loc[r + 1] - 1 of each request r over keys k_loc[r] .. k_loc[r + 1] - 1,
# all [tokens, heads, head_dim]. most_*: tokens of the longest request. causal: only with as many keys as queries.
Dense = Callable[[Attention, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, bool,
                  torch.Tensor], torch.Tensor]  # fmt: skip


@dataclass
class Schedule:
    """How the work of a batch's decoding steps is divided: a table of each plan, by its words, int32 [rows, 4] or more.

    tables   kept from step to step, at addresses that CUDA graphs know
    written  the plans whose tables were written in this step
    """

    tables: dict[tuple[int, ...], torch.Tensor]
    rows: int
    written: set[tuple[int, ...]] = field(default_factory=set)

    def of(self, attention: Attention, query: torch.Tensor, batch: Batch, pages: torch.Tensor) -> torch.Tensor:
        """Returns the table of a layer's plan. The first layer of the plan in a step writes it."""
        words = attention.words
        table = self.tables[words][: self.rows]
        if words not in self.written:
            write_schedule(attention, query, batch, pages, table)
            self.written.add(words)
        return table


@dataclass(frozen=True)
class Past:
    """A chunk with `packed` tokens in front of it, at least one. tokens: where the chunk lies among the tokens of all
    chunks. batch: this request alone. ends: int32 [1], `packed` on the device."""

    packed: int
    tokens: slice
    batch: Batch
    ends: torch.Tensor


@dataclass(frozen=True)
class Step:
    """
    tokens    new tokens of all requests, padding of graphs included
    whole     all requests, to append
    few       the first requests, with few new tokens each, or None
    chunks    the other requests, or None. Their query_start_loc begins with 0
    pasts     the tokens in front of those chunks that are not the first of their prompt
    first     the first token of the chunks
    schedule  for `few`; None: each layer divides its own work
    """

    tokens: int
    whole: Batch
    few: Batch | None
    chunks: Batch | None
    pasts: tuple[Past, ...]
    first: int
    schedule: Schedule | None

    @classmethod
    def of(
        cls, whole: Batch, starts: NDArray[np.integer], lengths: NDArray[np.integer], few: int,
        schedule: Schedule | None = None,
    ) -> Step:  # fmt: skip
        """
        starts   query_start_loc on the host
        lengths  on the host, exact for chunks and not read for other requests
        few      the most tokens of a request that is not a chunk
        """
        counts = np.diff(starts)
        n = int(np.argmax(counts > few)) if (counts > few).any() else len(counts)
        first, tokens = int(starts[n]), int(starts[-1])
        front = _part(whole, slice(0, n), int(counts[:n].max()), whole.query_start_loc[: n + 1]) if n else None
        if n == len(counts):
            return cls(tokens, whole, front, None, (), first, schedule)
        begin = whole.query_start_loc[n:] - whole.query_start_loc[n]
        chunks = _part(whole, slice(n, len(counts)), int(counts[n:].max()), begin)
        pasts = []
        for r in range(n, len(counts)):
            count = int(counts[r])
            if (packed := int(lengths[r]) - count) and count:
                loc = torch.arange(0, count + 1, count, dtype=torch.int32, device=begin.device)
                one = _part(whole, slice(r, r + 1), count, loc)
                at = int(starts[r]) - first
                pasts.append(Past(packed, slice(at, at + count), one, one.lengths - count))
        return cls(tokens, whole, front, chunks, tuple(pasts), first, schedule)


def _part(whole: Batch, of: slice, most: int, query_start_loc: torch.Tensor) -> Batch:
    rows = None if whole.sink_rows is None else whole.sink_rows[of]
    return replace(whole, query_start_loc=query_start_loc, lengths=whole.lengths[of], max_query_len=most,
                   block_table=whole.block_table[of], sink_rows=rows)  # fmt: skip


def run(
    attention: Attention, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor,
    out: torch.Tensor, dense: Dense,
) -> None:  # fmt: skip
    """Packs the new keys and values of a step, [tokens, kv_heads, head_dim], and writes the attention of its queries to
    `out`, both [tokens, heads, head_dim]. All of these tensors may have more tokens than the step."""
    query, key, value, out = (x[: step.tokens] for x in (query, key, value, out))
    append(attention, key, value, step.whole, pages)
    if step.few is not None:
        some, how = slice(0, step.first), dict[str, Any]()
        if step.schedule is not None:
            how["schedule"] = step.schedule.of(attention, query[some], step.few, pages)
        if attention.learned_sinks is not None:
            how["lse"] = torch.empty(query[some].shape[:2], dtype=torch.float32, device=query.device)
        attend(attention, query[some], step.few, pages, out[some], **how)
        if attention.learned_sinks is not None:
            share_with_learned_sinks(attention, out[some], how["lse"])
    if step.chunks is not None:
        rest = slice(step.first, None)
        query, out, loc, most = query[rest], out[rest], step.chunks.query_start_loc, step.chunks.max_query_len
        sums = dense(attention, query, key[rest], value[rest], loc, loc, most, most, True, out)
        for past in step.pasts:
            _add_past(attention, past, query[past.tokens], pages, out[past.tokens], sums[:, past.tokens], dense)
        if attention.learned_sinks is not None:
            share_with_learned_sinks(attention, out, sums.T)


def _add_past(
    attention: Attention, past: Past, query: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, sums: torch.Tensor,
    dense: Dense,
) -> None:  # fmt: skip
    """Merges into `out` the attention of a chunk's queries to the tokens in front of the chunk. sums: log-sum-exp of
    `out`, [heads, tokens], updated too."""
    more = torch.empty_like(query)
    if not _decodes(attention, len(query), query.shape[1] // pages.shape[1]):
        others = torch.empty_like(sums)
        attend(attention, query, past.batch, pages, more, lse=others.T, ends=past.ends)
        _merge(out, sums, more, others)
        return
    tokens = max(1, SCRATCH_BYTES // (2 * query.itemsize * pages.shape[1] * query.shape[2]) // PAGE) * PAGE
    for first in range(0, past.packed, tokens):
        k, v = _decoded(attention, past, pages, first, min(tokens, past.packed - first), query.dtype)
        loc = torch.arange(0, len(k) + 1, len(k), dtype=torch.int32, device=k.device)
        of = past.batch
        others = dense(attention, query, k, v, of.query_start_loc, loc, of.max_query_len, len(k), False, more)
        _merge(out, sums, more, others)


def _decodes(attention: Attention, tokens: int, group: int) -> bool:
    """Whether this many queries attend to decoded tokens. The kernel that decodes takes plain plans only
    (csrc/cuda/dequantize_16bit.cu). Through a sliding window queries see only a few tokens, and not the same ones. Keys
    of a plan with a variance term would need more channels than `dense` takes."""
    plan = attention.plan
    fast = plan.is_plain and plan.group == GROUP and plan.head_dim % 16 == 0
    fast = fast and not plan.variance_term and not attention.sliding_window
    return fast and tokens * group >= LEAST_ROWS[not plan.wave_pairs]


def _decoded(
    attention: Attention, past: Past, pages: torch.Tensor, first: int, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes keys and values, [tokens, kv_heads, head_dim], of `count` tokens from `first` on, where a page begins."""
    batch = past.batch
    table = batch.block_table[:, first // PAGE :].contiguous()
    lengths = torch.full((1,), count, dtype=torch.int32, device=table.device)
    k, v = (x[0].transpose(0, 1) for x in _dequantize(attention.words, pages, table, lengths, count, sinks=first,
                                                      dtype=dtype, **attention.transforms))  # fmt: skip
    if not first and attention.sinks is not None and batch.sink_rows is not None:
        row = batch.sink_rows
        for exact, decoded in ((attention.sinks.k, k), (attention.sinks.v, v)):
            begin = decoded[: exact.shape[2]]
            exact_rows = exact[row.clamp(min=0)][0].transpose(0, 1)[: len(begin)]
            begin.copy_(torch.where(row >= 0, exact_rows, begin))
    return k, v


def _merge(out: torch.Tensor, sums: torch.Tensor, more: torch.Tensor, others: torch.Tensor) -> None:
    """Merges attention over disjoint tokens into `out` and `sums`. out, more: [tokens, heads, head_dim]; sums, others:
    their log-sum-exp, [heads, tokens]."""
    weight = torch.sigmoid(others - sums).T.unsqueeze(-1).to(out.dtype)
    torch.lerp(out, more, weight, out=out)
    torch.logaddexp(sums, others, out=sums)


def reserve(attention: Attention, query: torch.Tensor, kv_heads: int, requests: int, length: int, few: int) -> None:
    """Allocates for a moment the most that a step with these tokens allocates, for an engine that measures its memory.

    requests  the most of a step
    length    the most tokens of a request
    few       the most new tokens of a request that is not a chunk
    """
    group = query.shape[1] // kv_heads
    decodes = _decodes(attention, len(query), group)
    rest = query[: LEAST_ROWS[-1] // group] if decodes else query
    size = max(attend_workspace(attention, query[: requests * few], kv_heads, requests, length, few),
               attend_workspace(attention, rest, kv_heads, 1, length, len(rest)))  # fmt: skip
    buffers = [query.new_empty(2, *query.shape), query.new_empty(size, dtype=torch.uint8)]
    if decodes:
        buffers.append(query.new_empty(2 * SCRATCH_BYTES, dtype=torch.uint8))  # decoded, and what decoding takes
    del buffers
