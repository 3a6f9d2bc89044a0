"""A calibration as the tensors that operators take, made once for each layer and device and shared by all caches."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ..plan import Plan, group_bits
from ..spec import CacheSpec
from .data import SIDES, Calibration

__all__ = ["transforms"]

_Of = tuple[int, Plan, Plan, torch.device]
_made: weakref.WeakKeyDictionary[Calibration, dict[_Of, dict[str, torch.Tensor]]]
_made = weakref.WeakKeyDictionary()


def transforms(calibration: Calibration, spec: CacheSpec, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Of what `spec` takes from a calibration, keyword arguments of the operators: float32, each with its own storage.

    *_rotation [kv_heads, head_dim, head_dim] and *_steps [kv_heads, groups] for rotation="calibrated";
    *_centre [kv_heads, head_dim] for centre="calibrated".  Not to be written to.
    """
    held = _made.setdefault(calibration, {})
    bits = [group_bits(getattr(spec, f"{side}_bits"), calibration.head_dim, f"{side}_bits") for side in SIDES]
    where = layer, bits[0], bits[1], device
    if where not in held:
        made = {}
        for i, side in enumerate(SIDES):
            made[f"{side}_rotation"], made[f"{side}_steps"] = calibration.merged(layer, i, bits[i])
            made[f"{side}_centre"] = calibration.centre[layer, i]
        held[where] = {name: torch.from_numpy(np.ascontiguousarray(x)).clone().to(device) for name, x in made.items()}
    taken = {"rotation": spec.rotation == "calibrated", "steps": spec.rotation == "calibrated"}
    taken["centre"] = spec.centre == "calibrated"
    return {name: tensor for name, tensor in held[where].items() if taken[name.partition("_")[2]]}
