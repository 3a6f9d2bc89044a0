"""Attention of a chunk over a packed history, part of which a sliding window or the model's own mask hides. The tokens
that the chunk may see are decoded for the time of the call, and PyTorch's own attention reads them.

Positions are those of the forward: they count the padding in front of a sequence, so that they are the same in all
sequences of a batch. Tensors are [batch, heads, tokens, head_dim]; query head h reads KV head
h // (query_heads / kv_heads). Queries and the keys of `visible_past` have the channels of a variance term (`variance`),
if the plan has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..plan import PAGE_TOKENS
from .variance import more_channels, wide_keys, widened

if TYPE_CHECKING:
    from .tensors import LayerTensors

__all__ = ["attention_behind_window", "attention_under_mask", "chunk_starts", "visible_past"]

_dequantize = torch.ops.turboquant.dequantize.default

_QUERIES = 1024  # queries of a block; with fewer, its keys and mask are smaller
_NOWHERE = -(1 << 30)  # the position of a row that holds no token

_Past = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values, positions [batch, tokens]


def visible_past(
    stored: LayerTensors,
    lengths: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padding: tuple[int, ...],
    sliding_window: int,
) -> _Past:
    """Returns keys, values and positions of the stored tokens that a chunk behind them may see, and of some more. Keys
    and values have the dtype of the storage.

    lengths      int32 [batch], lengths of the sequences with the tokens of the chunk
    key, value   those of the chunk, which are not stored yet; values have no channels where the storage has none
    """
    sinks, window, before = stored.spec.sinks, stored.spec.window, stored.tokens
    device, new = stored.device, key.shape[2]
    length = lengths.view(-1, 1) - new  # of each sequence; does not wait for the device
    pad = before - length
    parts: list[_Past] = [(key[:, :, :0], value[:, :, :0], length[:, :0])]
    if stored.sink_k is not None:
        row = torch.arange(stored.sinks, device=device)
        sink_v = stored.sink_k[..., :0] if stored.sink_v is None else stored.sink_v
        parts.append((stored.sink_k, sink_v, torch.where(row < length, row + pad, _NOWHERE)))
    packed = max(stored.packed(before, padding))
    first = max(0, before - max(padding) - sliding_window + 1 - sinks) // PAGE_TOKENS * PAGE_TOKENS
    if packed > first:
        assert stored.table is not None
        with stored.table.pool.lock:  # forks may add pages
            pages, table = stored.pages, stored.block_table[:, first // PAGE_TOKENS :].contiguous()
        count = stored.shared.earlier(lengths, new + sinks + window + first)
        k, v = _dequantize(
            stored.plan.words,
            pages,
            table,
            count,
            packed - first,
            sinks=sinks + first,
            dtype=stored.dtype,
            **stored.turned(),
        )
        v = v if stored.has_values else k[..., :0]
        k = wide_keys(k, stored, pages, table, count)
        row = sinks + first + torch.arange(packed - first, device=device)
        positions = torch.where(row < length - window, row + pad, _NOWHERE)
        parts.append((k, v, positions))
    if (ring := stored.ring()) is not None:
        row = torch.arange(stored.window, device=device)
        latest = length - 1 - (length - 1 - row) % stored.window  # position of each row of the ring
        parts.append((*ring, torch.where(latest >= sinks, latest + pad, _NOWHERE)))
    channels = stored.head_dim + more_channels(stored)
    return (
        torch.cat([widened(k, channels) for k, _, _ in parts], 2),
        torch.cat([v for _, v, _ in parts], 2),
        torch.cat([at for *_, at in parts], 1),
    )


def chunk_starts(lengths: torch.Tensor, chunk: int) -> torch.Tensor:
    """int32 [batch]: where the chunk of each sequence's last token begins. Does not wait for the device."""
    return lengths.sub(1).clamp_(min=0).div(chunk, rounding_mode="floor").mul_(chunk).to(torch.int32)


def attention_behind_window(
    query: torch.Tensor,
    past: _Past,
    key: torch.Tensor,
    value: torch.Tensor,
    before: int,
    lengths: torch.Tensor,
    sliding_window: int,
    scale: float,
    softcap: float = 0.0,
    return_lse: bool = False,
    chunked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends from a chunk's queries to `past` and to the chunk's own tokens: each sees the last `sliding_window`
    positions up to its own. Returns out, laid out in memory as [batch, tokens, query_heads, head_dim], 0 for a query of
    padding; and lse, float32 [batch, query_heads, tokens], -inf for padding, or None without return_lse.

    key, value   those of the chunk; none where `past` has them already
    before    positions in front of the chunk
    lengths   int32 [batch], lengths of the sequences with the chunk
    softcap   logits become softcap * tanh(logit / softcap); 0: as they are
    chunked   each text is cut into parts of `sliding_window` tokens, from its first one on, and a query sees its part
    """
    batch, heads, tokens, _ = query.shape
    kv_heads, device, channels = key.shape[1], query.device, value.shape[-1]
    heads_per_kv, inside = heads // kv_heads, key.shape[2] == 0
    key = widened(key, query.shape[-1])
    pad = before + tokens - lengths.view(-1, 1)
    own = torch.arange(before, before + tokens, device=device).expand(batch, -1)
    own = torch.where(own >= pad, own, _NOWHERE)[:, : key.shape[2]]
    if tokens == 1:  # query heads of a KV head become its queries, so no key is repeated
        query, heads_per_kv = query.reshape(batch, kv_heads, heads_per_kv, -1), 1
    out = query.new_empty((batch, tokens, heads, channels)).transpose(1, 2)
    lse = query.new_empty((batch, heads, tokens), dtype=torch.float32) if return_lse else None
    for start in range(0, tokens, _QUERIES):
        stop, first = min(start + _QUERIES, tokens), max(0, start - sliding_window + 1)
        k, v, at = key[:, :, first:stop], value[:, :, first:stop], own[:, first:stop]
        if inside or start < sliding_window - 1:
            k, v, at = (torch.cat([a, b], 2 if a.dim() == 4 else 1) for a, b in zip(past, (k, v, at), strict=True))
        here = torch.arange(before + start, before + stop, device=device).view(-1, 1)
        seen = ((at[:, None] <= here) & (at[:, None] > here - sliding_window))[:, None]
        if chunked:
            part_of_query = (here - pad[:, :, None]).div(sliding_window, rounding_mode="floor")
            part_of_key = (at - pad)[:, None].div(sliding_window, rounding_mode="floor")
            seen = seen & (part_of_key == part_of_query)[:, None]
        rows, total = query[:, :, start:stop], None if lse is None else lse[:, :, start:stop]
        if heads_per_kv > 1:
            k, v = k.repeat_interleave(heads_per_kv, 1), v.repeat_interleave(heads_per_kv, 1)
        if tokens == 1:
            rows, total = query, None if lse is None else lse.view(batch, kv_heads, -1)
        attended = _attention(rows, k, v, seen, scale, softcap, total).masked_fill_(~seen.any(-1, keepdim=True), 0)
        out[:, :, start:stop] = attended.reshape(batch, heads, -1, channels)
    return out, lse


def attention_under_mask(
    query: torch.Tensor,
    past: _Past,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attends from a chunk's queries to those of `past` and of the chunk's own tokens that mask, bool [batch or 1, 1,
    tokens, positions], shows. The last positions of mask are the chunk. Returns [batch, tokens, query_heads, head_dim];
    0 for a query that sees nothing."""
    batch, heads, tokens, _ = query.shape
    heads_per_kv, after, channels = heads // key.shape[1], mask.shape[3], value.shape[-1]
    key = widened(key, query.shape[-1])
    own = torch.arange(after - key.shape[2], after, device=query.device).expand(batch, -1)
    k, v, at = (torch.cat(pair, 2 if pair[0].dim() == 4 else 1) for pair in zip(past, (key, value, own), strict=True))
    k, v = k.repeat_interleave(heads_per_kv, 1), v.repeat_interleave(heads_per_kv, 1)
    column, mask = at.clamp(min=0)[:, None, None], mask.to(query.device)
    out = query.new_empty((batch, tokens, heads, channels))
    for start in range(0, tokens, _QUERIES):
        some = slice(start, min(start + _QUERIES, tokens))
        rows = mask[:, :, some].expand(batch, -1, -1, -1)
        seen = rows.gather(3, column.expand(-1, -1, rows.shape[2], -1)) & (at >= 0)[:, None, None]
        attended = _attention(query[:, :, some], k, v, seen, scale, softcap, None)
        out[:, some] = attended.masked_fill_(~seen.any(-1, keepdim=True), 0).transpose(1, 2)
    return out


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attends where seen, bool [batch, 1, queries, keys], is True: by SDPA, or with a soft-cap or lse by the definition
    in float32. Keys have as many heads as queries. lse, if given, is written."""
    with torch.autocast(query.device.type, enabled=False):  # it would round float32 operands
        if not softcap and lse is None:
            values = widened(value, query.shape[-1])
            out = scaled_dot_product_attention(query, key, values, attn_mask=seen, scale=scale)
            return out[..., : value.shape[-1]]
        logits = (query.float() @ key.float().transpose(2, 3)).mul_(scale)
        if softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        logits.masked_fill_(~seen, -torch.inf)
        if lse is not None:
            lse.copy_(logits.logsumexp(-1))
        return (logits.softmax(-1) @ value.float()).to(query.dtype)
