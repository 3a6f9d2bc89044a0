"""A calibration as the tensors that operators take, made once for each layer and device and shared by all caches."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ..modes import is_split, side_matrix, split_rotation
from ..spec import CacheSpec, group_widths
from .data import SIDES, Calibration
from .tables import LEVELS

__all__ = ["transforms"]

_Of = tuple[int, tuple[int, ...], tuple[int, ...], int, torch.device]
_made: weakref.WeakKeyDictionary[Calibration, dict[_Of, dict[str, torch.Tensor]]]
_made = weakref.WeakKeyDictionary()


def transforms(calibration: Calibration, spec: CacheSpec, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Keyword arguments of the operators that `spec` takes from a calibration: float32, each with its own storage.

    *_rotation [kv_heads, head_dim, head_dim] and *_steps [kv_heads, groups] for rotation="calibrated";
    *_centre [kv_heads, head_dim] for centre="calibrated"; *_rotation for rotation="svd" and outliers="calibrated", with
    the rows of a sketch; *_steps [kv_heads, 8 or 9] for a table.  Not to be written to.
    """
    if not spec.calibrated:
        return {}
    held = _made.setdefault(calibration, {})
    bits = [group_widths(getattr(spec, f"{side}_bits"), calibration.head_dim, spec.group) for side in SIDES]
    where = layer, bits[0], bits[1], spec.group, device
    if where not in held:
        made = {}
        for i, side in enumerate(SIDES):
            made[f"{side}_rotation"], made[f"{side}_steps"] = calibration.merged(layer, i, bits[i], spec.group)
            made[f"{side}_centre"] = calibration.centre[layer, i]
        held[where] = {name: torch.from_numpy(np.ascontiguousarray(x)).clone().to(device) for name, x in made.items()}
    taken = {"rotation": spec.rotation == "calibrated", "steps": spec.rotation == "calibrated"}
    taken["centre"] = spec.centre == "calibrated"
    plain = {name: tensor for name, tensor in held[where].items() if taken[name.partition("_")[2]]}
    return {**plain, **{name: torch.from_numpy(a).to(device) for name, a in _modes(calibration, spec, layer).items()}}


def _modes(calibration: Calibration, spec: CacheSpec, layer: int) -> dict[str, np.ndarray]:
    """Rotations by singular vectors or outliers, and tables, of a calibration; made anew for each cache."""
    made: dict[str, np.ndarray] = {}
    for i, side in enumerate(SIDES):
        rotation = None
        if spec.rotation_of(side) == "svd":
            rotation = calibration.singular_axes(layer)[i]
        elif is_split(spec, side) and spec.outliers == "calibrated":
            rotation = split_rotation(spec, side, calibration.second_moment(layer)[i])
        if rotation is not None:
            made[f"{side}_rotation"] = np.ascontiguousarray(side_matrix(spec, side, calibration.head_dim, rotation))
        if getattr(spec, f"{side}_levels") == "table":
            if calibration.tables is None:
                raise ValueError(
                    "`calibration` must have tables of levels for this spec, got one made without: calibrate again"
                )
            columns = LEVELS + (side == "key" and spec.sketch == "sign")
            made[f"{side}_steps"] = calibration.tables[layer, i, :, :columns].copy()
    return made
