"""What a cache takes from the first forward of its sequences: the centre of their keys, and which channels are loud.

key, value   [batch, kv_heads, tokens, head_dim], padding in front of each sequence not counted.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import _core
from ..modes import is_split, side_matrix, split_rotation
from ..spec import CacheSpec
from .pages import outside_autograd

__all__ = ["prompt_mean", "prompt_rotations"]


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """x in float32 as `append` stores it on CUDA, which reports bad numbers but goes on: one of them must not spoil the
    mean of all others. On a CPU `append` refuses them."""
    return x.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).clamp_(-_core.MAX_INPUT, _core.MAX_INPUT)


@outside_autograd
def prompt_mean(key: torch.Tensor, padding: tuple[int, ...], count: int) -> torch.Tensor:
    """float32 [batch, kv_heads, head_dim]: the mean of the first `count` real tokens of each sequence, 0 where there is
    none."""
    if not any(padding):
        return _numbers(key[:, :, :count]).mean(2)
    each = [_numbers(key[b, :, pad : pad + count]).mean(1) for b, pad in enumerate(padding)]
    return torch.stack(each).nan_to_num_() if max(padding) == key.shape[2] else torch.stack(each)


@outside_autograd
def prompt_rotations(
    spec: CacheSpec, key: torch.Tensor, value: torch.Tensor, padding: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Rotations of the sides whose channels are split, by their mean squares over the first `centre_tokens` real tokens
    of all sequences: arguments of the operators, float32 [kv_heads, rows, head_dim], on the device of `key`."""
    made = {}
    for side, x in (("key", key), ("value", value)):
        if not is_split(spec, side):
            continue
        squares = [_numbers(x[b, :, pad : pad + spec.centre_tokens]).square().sum(1) for b, pad in enumerate(padding)]
        rotation = split_rotation(spec, side, torch.stack(squares).sum(0).cpu().numpy())
        matrix = side_matrix(spec, side, key.shape[-1], rotation)
        made[f"{side}_rotation"] = torch.from_numpy(np.ascontiguousarray(matrix)).to(key.device)
    return made
