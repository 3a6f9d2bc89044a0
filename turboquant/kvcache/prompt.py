"""Finds the outlier channels of a cache with `outliers="prompt"` in the first forward of its sequences."""

from __future__ import annotations

import numpy as np
import torch

from .. import _core
from ..matrices import is_split, side_matrix, split_rotation
from ..spec import CacheSpec
from .pages import outside_autograd

__all__ = ["prompt_rotations"]


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Converts x to float32. Numbers that are not finite or too large are replaced as `append` does on CUDA, so that
    they do not spoil sums. On a CPU `append` refuses them."""
    return x.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).clamp_(-_core.MAX_INPUT, _core.MAX_INPUT)


@outside_autograd
def prompt_rotations(
    spec: CacheSpec, key: torch.Tensor, value: torch.Tensor, padding: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Rotations that split off outlier channels, by side: float32 [kv_heads, rows, head_dim], on the device of `key`.
    Outliers have the largest mean squares over the first `outlier_tokens` real tokens of each sequence, taken together.

    key, value   [batch, kv_heads, tokens, head_dim]; padding in front of each sequence is not counted
    """
    rotations = {}
    for side, x in (("key", key), ("value", value)):
        if not is_split(spec, side):
            continue
        squares = [_numbers(x[b, :, pad : pad + spec.outlier_tokens]).square().sum(1) for b, pad in enumerate(padding)]
        rotation = split_rotation(spec, side, torch.stack(squares).sum(0).cpu().numpy())
        matrix = side_matrix(spec, side, key.shape[-1], rotation)
        rotations[side] = torch.from_numpy(np.ascontiguousarray(matrix)).to(key.device)
    return rotations
