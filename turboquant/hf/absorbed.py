"""Attention to latents (MLA) without expanding them.

A model with latent attention expands the latents c of all tokens by one matrix, `kv_b_proj`: in a head, the key of a
token is [K c, r], with its rotary part r, and its value is V c. So the logit of a query [q, s] is <K^T q, c> + <s, r>,
and the result is V times the weighted mean of the latents. With few queries that takes less work, and no keys and
values as long as the text are made. `is_cheaper` counts.

A patched model's `expand_kv` passes latents on (`pass_on`); `attention` either absorbs the matrix in this way or has
the model expand them as it would.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..models.attention import Call, MaskRequest, own_attention
from .carried import Carried

__all__ = ["Latents", "attention", "is_cheaper", "pass_on"]

_PIECE = 2**26  # logits in memory at once, unless one query has more
_OTHERS = ("softcap", "output_attentions", "position_bias", "head_mask")  # options that only the model's own code knows

_expands: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()  # results of `_is_as_told`


class Latents(Carried):
    """The latents of all tokens, [batch, 1, tokens, rank], from `LatentLayer.update` on its way to attention."""

    joined: torch.Tensor  # [batch, 1, tokens, rank + rotary], the rotary part behind the latent of each token

    @classmethod
    def of(cls, joined: torch.Tensor, rank: int) -> Latents:
        latents: Latents = joined[..., :rank].as_subclass(cls)
        latents.joined = joined
        return latents


@torch.compiler.disable  # type: ignore[untyped-decorator]
def pass_on(module: Any, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `module.expand_kv`. Latents of another cache, or of none, are expanded."""
    if type(latents) is Latents:
        return latents, rotary
    return type(module).expand_kv(module, latents, rotary)  # type: ignore[no-any-return]


def is_cheaper(new: int, tokens: int, rank: int, rotary: int, key: int, value: int) -> bool:
    """Whether absorbing takes fewer multiplications than expanding, both counted for one head and without masks.

    new     queries;  tokens  all tokens, those of the queries included
    rank, rotary, key, value   channels of a latent and a rotary part, and of the key and value that a latent expands to
    """
    matrix = rank * (key + value)
    expanding = tokens * matrix + new * tokens * (key + rotary + value)
    absorbing = new * matrix + new * tokens * (rank + rotary + rank)
    return absorbing < expanding


def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends for a call whose keys are `Latents` and values the rotary parts. Returns what `own_attention` does."""
    module: Any = call.module
    latents, new = call.key, call.query.shape[2]
    assert isinstance(latents, Latents)
    joined, rank = latents.joined, latents.shape[3]
    mask = call.mask.of_kind("sdpa") if isinstance(call.mask, MaskRequest) else call.mask
    known = all(call.options.get(name) in (None, False) for name in _OTHERS) and call.dropout == 0
    known = known and call.options.get("s_aux") is None
    known = known and (new == 1 if mask is None else mask.ndim == 4 and mask.shape[1] == 1)
    matrix = _matrix(module, call.query.shape[1], rank) if known else None
    if matrix is not None and not matrix.dtype == joined.dtype == call.query.dtype:  # under torch.autocast
        matrix = None
    if matrix is None or not is_cheaper(new, joined.shape[2], rank, joined.shape[3] - rank, *_sizes(module)):
        key, value = type(module).expand_kv(module, joined[..., :rank], joined[..., rank:])
        return own_attention(replace(call, key=key, value=value))
    scale = call.query.shape[3] ** -0.5 if call.scaling is None else call.scaling
    return _absorbed(call.query, joined, matrix, mask, scale, module.qk_nope_head_dim), None


def _absorbed(
    query: torch.Tensor, joined: torch.Tensor, matrix: torch.Tensor, mask: torch.Tensor | None, scale: float, key: int
) -> torch.Tensor:
    """Attends to latents by the absorbed matrix. query [batch, heads, new, key + rotary];  joined [batch, 1, tokens,
    rank + rotary];  matrix [heads, key + value, rank];  mask [batch or 1, 1, new, tokens], None: all tokens are seen.
    Returns [batch, new, heads, value]."""
    batch, heads, new, _ = query.shape
    rank, rows = matrix.shape[2], (heads, batch * new, -1)
    folded = torch.bmm(query[..., :key].transpose(0, 1).reshape(rows), matrix[:, :key])
    queries = torch.cat((folded.view(heads, batch, new, rank).transpose(0, 1), query[..., key:]), -1)
    parts, step = [], max(_PIECE // (batch * heads * joined.shape[2]), 1)
    for begin in range(0, new, step):
        some = queries[:, :, begin : begin + step].transpose(1, 2)  # [batch, some, heads, channels]
        seen = None
        if mask is not None:  # the heads of a query stand below one another
            seen = mask[:, :, begin : begin + step].to(query.device)
            seen = seen if some.shape[1] == 1 else seen.repeat_interleave(heads, 2)
        flat = some.reshape(batch, 1, -1, queries.shape[3])
        # Values that are as wide as keys let a fused kernel run; what it makes of the rotary parts is cut off.
        out = scaled_dot_product_attention(flat, joined, joined, seen, scale=scale)
        parts.append(out[..., :rank].view(batch, -1, heads, rank))
    means = torch.cat(parts, 1).permute(2, 0, 1, 3).reshape(heads, batch * new, rank)
    values = torch.bmm(means, matrix[:, key:].transpose(1, 2))
    return values.view(heads, batch, new, -1).permute(1, 2, 0, 3).contiguous()


def _sizes(module: Any) -> tuple[int, int]:
    """Channels of a head's keys, without the rotary part, and of its values."""
    return module.qk_nope_head_dim, module.v_head_dim


def _matrix(module: Any, heads: int, rank: int) -> torch.Tensor | None:
    """The weight of `kv_b_proj`, [heads, key + value, rank]; None for one that is not a plain matrix: quantised, with
    an adapter, sharded or offloaded."""
    projection, sizes = getattr(module, "kv_b_proj", None), (heads, getattr(module, "qk_nope_head_dim", 0))
    if type(projection) is not torch.nn.Linear or projection.bias is not None or "forward" in vars(projection):
        return None
    weight, hooks = projection.weight, (projection._forward_hooks, projection._forward_pre_hooks)
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or weight.is_meta or any(hooks) or not all(sizes):
        return None
    width = sum(_sizes(module))
    if weight.shape != (heads * width, rank):
        return None
    matrix = weight.view(heads, width, rank)
    if module not in _expands:
        _expands[module] = _is_as_told(module, matrix)
    return matrix if _expands[module] else None


@torch.no_grad()
def _is_as_told(module: Any, matrix: torch.Tensor) -> bool:
    """Whether a module's `expand_kv` expands a token as the docstring of this file says."""
    heads, _, rank = matrix.shape
    key, _ = _sizes(module)
    generator = torch.Generator().manual_seed(0)
    latent, rotary = (
        torch.randn(1, 1, 1, size, generator=generator).to(matrix.device, matrix.dtype)
        for size in (rank, module.qk_rope_head_dim)
    )
    keys, values = type(module).expand_kv(module, latent, rotary)
    expanded = torch.matmul(matrix, latent.view(rank))  # [heads, key + value]
    wanted = torch.cat((expanded[:, :key], rotary.view(1, -1).expand(heads, -1)), 1), expanded[:, key:]
    for got, want in zip((keys, values), wanted):
        if got.numel() != want.numel():
            return False
        if (got.reshape(heads, -1) - want).abs().max() > 0.02 * want.abs().max():
            return False
    return True
