"""The variance term (turboquant.h, "VARIANCE TERM") where PyTorch's attention reads decoded keys. The term is a product
of one number of the query and one of the key. So both get more channels, and the scores include the term. Values get as
many zeros, because PyTorch's fast kernels want them as wide as keys.

Tensors are [batch, heads, tokens, channels]; query head h reads KV head h // (query_heads / kv_heads).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from .. import _core

if TYPE_CHECKING:
    from .tensors import LayerTensors

__all__ = ["more_channels", "wide_keys", "wide_queries", "widened"]

CHANNELS = 8  # that the term adds: PyTorch's kernels want a multiple of 8
_UNIT = 256.0  # divides the key's number, so that float16 holds it for scales up to some hundreds


def more_channels(stored: LayerTensors) -> int:
    """Channels that the variance term adds to a head; 0 without a term."""
    return CHANNELS if stored.plan.variance_term else 0


def widened(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Appends zeros to values or exact keys, up to this many channels."""
    more = channels - x.shape[-1]
    return torch.nn.functional.pad(x, (0, more)) if more > 0 else x


def wide_keys(
    key: torch.Tensor, stored: LayerTensors, pages: torch.Tensor, table: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Appends the channels of the variance term to decoded keys, if the plan has a term. counts: int32 [batch], tokens
    of each sequence in the pages of `table`; keys behind them are zeros."""
    if not stored.plan.variance_term:
        return key
    constant, first = _facts(stored.plan.words)
    tokens, page = key.shape[2], stored.plan.page_tokens
    table = table[:, : -(-tokens // page)].clamp(min=0)  # pages that no query sees may be freed
    scales = pages[:, :, first : first + 2 * page][table].view(torch.float16).float()
    scales = scales.view(*scales.shape[:3], -1, 8, 4).transpose(-1, -2).flatten(3)  # tq_token: columns to tokens
    scales = scales.transpose(1, 2).flatten(2)[:, :, :tokens]  # [batch, kv_heads, tokens]
    number = scales.square() * (constant / _UNIT)
    at = torch.arange(tokens, device=key.device)
    number = torch.where((at < counts.view(-1, 1))[:, None], number, 0.0)
    high, low = _halves(number, key.dtype)
    return torch.cat([key, torch.stack([high, low, high, *[torch.zeros_like(high)] * (CHANNELS - 3)], -1)], -1)


def wide_queries(query: torch.Tensor, stored: LayerTensors, scale: float) -> torch.Tensor:
    """Appends the channels of the variance term to queries, if the plan has a term. scale: that of the softmax."""
    if not stored.plan.variance_term:
        return query
    batch, heads, *rest = query.shape
    rows = _shrunk(query.float().reshape(batch, stored.kv_heads, heads // stored.kv_heads, *rest), stored)
    number = rows.square().sum(-1).flatten(1, 2) * (-_UNIT * scale / (2 * stored.head_dim))
    high, low = _halves(number, query.dtype)
    return torch.cat([query, torch.stack([high, high, low, *[torch.zeros_like(high)] * (CHANNELS - 3)], -1)], -1)


@cache
def _facts(words: tuple[int, ...]) -> tuple[float, int]:
    """K, and where the scales of keys begin in a record, in bytes."""
    info = _core.plan_info(words)
    return info["variance"], info["key_scales_offset"]


def _halves(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x to dtype; returns the result and the remainder."""
    most = torch.finfo(dtype).max
    high = x.clamp(-most, most).to(dtype)
    return high, (x - high.float()).clamp(-most, most).to(dtype)


def _shrunk(rows: torch.Tensor, stored: LayerTensors) -> torch.Tensor:
    """Computes A^-1 q for queries [batch, kv_heads, .., head_dim], with the metric A of their head."""
    rank, channels = stored.plan.metric, stored.head_dim
    if rank is None:
        return rows
    numbers = stored.transforms["key_numbers"][:, -(channels * (1 + rank) + 4) :]
    shape = (1, stored.kv_heads, 1, -1, channels)
    s, w = numbers[:, :channels].reshape(shape), numbers[:, channels:-4].reshape(shape)
    e = numbers[:, -4:][:, :rank].reshape(1, stored.kv_heads, 1, 1, rank)
    rows = rows / s
    shrunk: torch.Tensor = (rows + (rows @ w.transpose(-1, -2) * (1 / (1 + e) - 1)) @ w) / s
    return shrunk
