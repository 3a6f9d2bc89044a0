"""Moments as the tensors that operators take, made once for each layer and device and shared by all caches."""

from __future__ import annotations

import weakref

import torch

from ..spec import CacheSpec
from .data import Moments

__all__ = ["transforms"]

_made: weakref.WeakKeyDictionary[Moments, dict[tuple[int, bool, bool, torch.device, int], dict[str, torch.Tensor]]]
_made = weakref.WeakKeyDictionary()


def transforms(
    moments: Moments, spec: CacheSpec, layer: int, device: torch.device, later: int = 0
) -> dict[str, torch.Tensor]:
    """`LayerMoments.transforms` for `spec`, as tensors. Not to be written to.

    later   how many positions later each token is than when it was stored
    """
    held = _made.setdefault(moments, {})
    where = layer, spec.centre == "wave", spec.metric == "query", device, later
    if where not in held:
        made = moments.layers[layer].later(later).transforms(*where[1:3])
        held[where] = {name: torch.from_numpy(array).clone().to(device) for name, array in made.items()}
    return dict(held[where])
