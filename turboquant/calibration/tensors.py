"""A calibration as the tensors that operators take, made once for each layer and device and shared by all caches."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ..spec import CacheSpec
from .data import SIDES, Calibration

__all__ = ["transforms"]

_made: weakref.WeakKeyDictionary[Calibration, dict[tuple[int, torch.device], dict[str, torch.Tensor]]]
_made = weakref.WeakKeyDictionary()


def transforms(calibration: Calibration, spec: CacheSpec, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Of what `spec` takes from a calibration, keyword arguments of the operators: float32, each with its own storage.

    *_rotation [kv_heads, head_dim, head_dim] and *_steps [kv_heads, groups] for rotation="calibrated";
    *_centre [kv_heads, head_dim] for centre="calibrated".  Not to be written to.
    """
    held = _made.setdefault(calibration, {})
    if (layer, device) not in held:
        rotation, steps, centre = calibration.rotation(layer), calibration.steps()[layer], calibration.centre[layer]
        made = {f"{side}_{name}": np.ascontiguousarray(whole[i]) for i, side in enumerate(SIDES)
                for name, whole in (("rotation", rotation), ("steps", steps), ("centre", centre))}  # fmt: skip
        held[layer, device] = {name: torch.from_numpy(array).clone().to(device) for name, array in made.items()}
    taken = {"rotation": spec.rotation == "calibrated", "steps": spec.rotation == "calibrated"}
    taken["centre"] = spec.centre == "calibrated"
    return {name: tensor for name, tensor in held[layer, device].items() if taken[name.partition("_")[2]]}
