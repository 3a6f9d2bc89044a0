"""Attention of a chunk's queries over the chunk's own tokens, which are not packed yet, by PyTorch's own kernels. They
also return the log-sum-exp, so that `merged` can join the result with that of `attend` over the pages.

Tensors are [batch, heads, tokens, head_dim], as in SDPA; query head h reads KV head h // (query_heads / kv_heads).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["attention_in_chunk", "merged"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_BLOCK = 1 << 25  # logits that `_plain` makes at once

_Pair = tuple[torch.Tensor, torch.Tensor]  # (out, lse)


def merged(a: _Pair, b: _Pair) -> torch.Tensor:
    """Merges two attention results (out, lse) over disjoint tokens, and returns out, laid out in memory as [batch,
    tokens, heads, head_dim]. lse: float32 [batch, heads, tokens], natural logarithms; those of b must be finite."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    weight = torch.sigmoid(lse_b - lse_a).to(out_a.dtype)
    batch, heads, tokens, channels = out_a.shape
    out = torch.empty((batch, tokens, heads, channels), dtype=out_a.dtype, device=out_a.device).transpose(1, 2)
    return torch.lerp(out_a, out_b, weight.unsqueeze(-1), out=out)


def attention_in_chunk(
    query: torch.Tensor,
    earlier: Sequence[_Pair],
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    padding: tuple[int, ...] = (),
) -> _Pair:
    """Returns (out, lse) of a chunk's queries. Each sees the chunk's tokens up to its own, and all `earlier` ones.

    earlier   keys and values of tokens before the chunk
    softcap   logits become softcap * tanh(logit / softcap); 0: as they are
    padding   how many tokens in front of each sequence of the chunk no query sees; (): none
    lse is finite: about -3e38 for a query that sees nothing, whose out is 0.
    """
    if softcap or any(padding) or not _has_flash(query):
        with torch.autocast(query.device.type, enabled=False):  # it would round float32 operands
            return _plain(query, *_joined([*earlier, (key, value)]), scale, softcap, padding)
    if query.device.type != "cpu":  # a GPU's causal mask ends at the last key
        out, lse, *_ = _flash(query, *_joined([*earlier, (key, value)]), 0.0, True, scale=scale)
        return out, lse
    own: _Pair = _flash_on_cpu(query, key, value, 0.0, True, scale=scale)
    if not earlier:
        return own
    other = _flash_on_cpu(query, *_joined(earlier), 0.0, False, scale=scale)  # a CPU's starts at the first key
    return merged(other, own), torch.logaddexp(other[1], own[1])


def _has_flash(query: torch.Tensor) -> bool:
    """Whether PyTorch has a kernel for this query that returns the log-sum-exp, for any head_dim that can be packed."""
    return query.device.type == "cpu" or query.dtype != torch.float32


def _joined(parts: Sequence[_Pair]) -> _Pair:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([key for key, _ in parts], 2), torch.cat([value for _, value in parts], 2)


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float, padding: tuple[int, ...]
) -> _Pair:
    """Computes attention by definition in float32, some queries at a time. Padding lies before the chunk's tokens."""
    batch, heads, tokens, channels = query.shape
    kv_heads, seen = key.shape[1], key.shape[2]
    earlier, k, v = seen - tokens, key.float().transpose(2, 3), value.float()
    column = torch.arange(seen, device=query.device)
    masked = None
    if any(padding):
        first = earlier + torch.tensor(padding, device=query.device).view(-1, 1, 1, 1, 1)
        masked = (column >= earlier) & (column < first)
    out, lse = torch.empty_like(query), query.new_empty((batch, heads, tokens), dtype=torch.float32)
    step = max(1, _BLOCK // max(1, batch * heads * seen))
    for start in range(0, tokens, step):
        some = slice(start, min(start + step, tokens))
        rows = query[:, :, some].float().reshape(batch, kv_heads, -1, channels)
        logits = (rows @ k).mul_(scale).view(batch, kv_heads, heads // kv_heads, -1, seen)
        if softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        hidden = column > earlier + torch.arange(some.start, some.stop, device=query.device).view(-1, 1)
        logits.masked_fill_(hidden if masked is None else hidden | masked, -torch.inf)
        total = logits.logsumexp(-1).clamp_(min=torch.finfo(torch.float32).min)
        weights = logits.sub_(total.unsqueeze(-1)).exp_()
        product = weights.view(batch, kv_heads, -1, seen) @ v
        out[:, :, some] = product.view(batch, heads, -1, channels).to(out.dtype)
        lse[:, :, some] = total.view(batch, heads, -1)
    return out, lse
