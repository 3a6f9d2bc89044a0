"""Appends a ragged batch to packed pages, and attends for one: the only place where this plug-in calls operators.

Every query reads what was packed, but for the tokens that exact rows have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import operators as _operators  # noqa: F401  # registers them
from .batch import Batch

__all__ = ["Attention", "Exact", "append", "attend"]

_append, _attend = torch.ops.turboquant.append.default, torch.ops.turboquant.attend.out


@dataclass(frozen=True)
class Exact:
    """Rows of exact keys and values of one layer, [rows, kv_heads, tokens, head_dim] in the model's dtype."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """What a layer's attention computes with.

    words       of its plan
    transforms  the operators' arguments
    """

    words: tuple[int, ...]
    transforms: dict[str, torch.Tensor]
    scale: float
    softcap: float = 0.0
    sliding_window: int = 0
    sinks: Exact | None = None
    tails: Exact | None = None


def append(attention: Attention, key: torch.Tensor, value: torch.Tensor, batch: Batch, pages: torch.Tensor) -> None:
    """Packs new keys and values, [tokens, kv_heads, head_dim], into `pages` uint8 [pages, kv_heads, record_bytes], and
    copies those that have exact rows."""
    _append(attention.words, key, value, batch.lengths, pages, batch.block_table,
            **_shared(attention, batch, batch.tail_rows))  # fmt: skip


def attend(attention: Attention, query: torch.Tensor, batch: Batch, pages: torch.Tensor, out: torch.Tensor) -> None:
    """Writes to out [tokens, heads, head_dim] what the queries of the same shape see: all tokens up to their own."""
    how = _shared(attention, batch, batch.tail_reads)
    if attention.tails is not None and batch.tail_reads is not None:
        how["window"] = batch.window
    _attend(attention.words, query, pages, batch.block_table, batch.lengths, softmax_scale=attention.scale,
            softcap=attention.softcap, sliding_window=attention.sliding_window, out=out, **how)  # fmt: skip


def _shared(attention: Attention, batch: Batch, tail_rows: torch.Tensor | None) -> dict[str, object]:
    """Arguments of both operators: how the batch is cut, the layer's transforms, and rows of exact tokens."""
    found: dict[str, object] = dict(attention.transforms)
    found |= {"query_start_loc": batch.query_start_loc, "max_query_len": batch.max_query_len}
    for name, exact, rows, of in (("sink", attention.sinks, batch.sink_rows, "sink_rows"),
                                  ("window", attention.tails, tail_rows, "tail_rows")):  # fmt: skip
        if exact is not None and rows is not None:
            found |= {f"{name}_k": exact.k, f"{name}_v": exact.v, of: rows}
    return found
