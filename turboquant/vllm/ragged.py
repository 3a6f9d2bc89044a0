"""Appends a ragged batch to packed pages, and attends for one. These are the plug-in's calls of operators, except for
`dequantize`, which steps.py calls.

Every query reads packed tokens, except those that exact rows have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .. import operators as _operators  # noqa: F401  # registers them
from ..plan import Plan
from .batch import Batch
from .rows import PAGE

__all__ = ["Attention", "Exact", "append", "attend", "attend_workspace", "pages_of", "share_with_learned_sinks",
           "write_schedule"]  # fmt: skip

_append, _attend = torch.ops.turboquant.append.default, torch.ops.turboquant.attend.out
_schedule, _workspace = torch.ops.turboquant.schedule.default, torch.ops.turboquant.attend_workspace.default


@dataclass(frozen=True)
class Exact:
    """Rows of exact keys and values of one layer, [rows, kv_heads, tokens, head_dim] in the model's dtype."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """What a layer's attention computes with.

    transforms     the arguments of operators for the plan's transforms
    sinks          rows of the first tokens of sequences
    tails          rows of the last tokens of pages
    learned_sinks  float32 [heads]: a logit in each head's softmax beside those of its tokens, with a value of zero
    """

    plan: Plan
    transforms: dict[str, torch.Tensor]
    scale: float
    softcap: float = 0.0
    sliding_window: int = 0
    sinks: Exact | None = None
    tails: Exact | None = None
    learned_sinks: torch.Tensor | None = None

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The plan's words, as operators take them."""
        return tuple(self.plan.words)


def pages_of(cache: torch.Tensor) -> torch.Tensor:
    """Views a layer's cache, [pages, kv_heads, tokens, bytes of a token], as pages. RuntimeError if the engine lays it
    out in another order, because what is written to a copy would be lost."""
    return cache.view(*cache.shape[:2], -1)


def append(attention: Attention, key: torch.Tensor, value: torch.Tensor, batch: Batch, pages: torch.Tensor) -> None:
    """Packs new keys and values, [tokens, kv_heads, head_dim], into `pages` uint8 [pages, kv_heads, record_bytes], and
    copies those that have exact rows to these."""
    _append(attention.words, key, value, batch.lengths, pages, batch.block_table,
            **_shared(attention, batch, batch.tail_rows))  # fmt: skip


def attend(
    attention: Attention, query: torch.Tensor, batch: Batch, pages: torch.Tensor, out: torch.Tensor, *,
    lse: torch.Tensor | None = None, ends: torch.Tensor | None = None, schedule: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes to out [tokens, heads, head_dim] the attention of `query`, of the same shape. Queries see all tokens up to
    their own, or with `ends` int32 [requests] those before. lse: float32 [tokens, heads], written too. schedule: from
    `write_schedule`. Learned sinks are left out (`share_with_learned_sinks`)."""
    how = _shared(attention, batch, batch.tail_reads)
    if attention.tails is not None and batch.tail_reads is not None:
        how["window"] = batch.window
    _attend(attention.words, query, pages, batch.block_table, batch.lengths, softmax_scale=attention.scale,
            softcap=attention.softcap, sliding_window=attention.sliding_window, ends=ends, schedule=schedule, out=out,
            lse=lse, **how)  # fmt: skip


def share_with_learned_sinks(attention: Attention, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Applies the layer's learned sinks to `out` [tokens, heads, head_dim], in place. lse: float32 [tokens, heads], the
    log-sum-exp of the softmax without them."""
    assert attention.learned_sinks is not None
    out.mul_(torch.sigmoid(lse - attention.learned_sinks).unsqueeze(-1).to(out.dtype))


def attend_workspace(
    attention: Attention, query: torch.Tensor, kv_heads: int, requests: int, length: int, most: int
) -> int:
    """Returns the most bytes of workspace that `attend` needs for up to as many new tokens as `query` has, of up to
    this many requests, each with up to `length` tokens, of which up to `most` are new."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=query.device)

    batch = Batch(numbers(requests + 1), numbers(requests), numbers(requests, -(-length // PAGE)), None, None, None, 0,
                  most)  # fmt: skip
    pages = torch.empty(1, kv_heads, attention.plan.record_bytes, dtype=torch.uint8, device=query.device)
    size: int = _workspace(attention.words, query, pages, batch.block_table, batch.lengths, softcap=attention.softcap,
                           sliding_window=attention.sliding_window, ends=batch.lengths,
                           **_shared(attention, batch, None))  # fmt: skip
    return size


def write_schedule(
    attention: Attention, query: torch.Tensor, batch: Batch, pages: torch.Tensor, table: torch.Tensor
) -> None:
    """Writes to `table` (`ops.schedule_rows`) how a GPU's thread blocks share the work of `attend` with these
    arguments. It serves all layers with pages of this size."""
    sinks = 0 if attention.sinks is None or batch.sink_rows is None else attention.sinks.k.shape[2]
    _schedule(attention.words, table, query, pages, batch.block_table, batch.lengths, sinks=sinks,
              sliding_window=attention.sliding_window, query_start_loc=batch.query_start_loc,
              max_query_len=batch.max_query_len, sink_rows=batch.sink_rows if sinks else None)  # fmt: skip


def _shared(attention: Attention, batch: Batch, tail_rows: torch.Tensor | None) -> dict[str, object]:
    """Returns arguments of both operators: the ragged batch, the layer's transforms, and rows of exact tokens."""
    arguments: dict[str, object] = dict(attention.transforms)
    arguments |= {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
    for name, exact, rows, of in (("sink", attention.sinks, batch.sink_rows, "sink_rows"),
                                  ("window", attention.tails, tail_rows, "tail_rows")):  # fmt: skip
        if exact is not None and rows is not None:
            arguments |= {f"{name}_k": exact.k, f"{name}_v": exact.v, of: rows}
    return arguments
