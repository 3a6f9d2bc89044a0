"""The transforms of a layer's vectors, as operators take them (`turboquant.operators`, "transforms"). They are made
once for each layer and device, and shared by all caches of a calibration and moments. `prompt_rotations` finds the
outlier channels of a cache with `outliers="prompt"` in the first forward of its sequences."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from ..matrices import is_split, side_matrix, split_rotation
from ..measured import Calibration, Moments
from ..measured.kmeans import LEVELS
from ..spec import CacheSpec, group_widths
from ..transforms import transforms
from .pages import outside_autograd

__all__ = ["layer_transforms", "prompt_rotations", "random_rotation"]

_SIDES = ("key", "value")
# The fields of a spec that its transforms depend on.
_FIELDS = ("key_bits", "value_bits", "group", "rotation", "value_rotation", "outliers", "centre", "metric",
           "key_levels", "value_levels", "sketch", "seed")  # fmt: skip


class _Absent:
    """Stands for no calibration, or no moments, as a key of `_computed`."""


_ABSENT = _Absent()
_Of = tuple[Any, ...]
_computed: weakref.WeakKeyDictionary[object, weakref.WeakKeyDictionary[object, dict[_Of, dict[str, torch.Tensor]]]]
_computed = weakref.WeakKeyDictionary()


@outside_autograd
def layer_transforms(
    spec: CacheSpec,
    layer: int,
    head_dim: int,
    device: torch.device,
    calibration: Calibration | None = None,
    moments: Moments | None = None,
    *,
    later: int = 0,
    prompt: Mapping[str, torch.Tensor] | None = None,
    keep: bool = True,
) -> dict[str, torch.Tensor]:
    """Returns a layer's transforms as arguments of operators, without the `rotation` of a spec whose matrices are all
    random (`random_rotation`). They must not be written to.

    later   tokens at position p + later get the centre that the moments have at position p
    prompt  the rotations of outliers="prompt", by side, once they are known: the transforms are then made anew
    keep    False: made anew, and not kept
    """
    if prompt or not keep:
        return _tensors(_parts(spec, layer, head_dim, calibration, moments, later, prompt or {}), device)
    of_moments = _computed.setdefault(_ABSENT if moments is None else moments, weakref.WeakKeyDictionary())
    tensors = of_moments.setdefault(_ABSENT if calibration is None else calibration, {})
    where = (layer, head_dim, device, later, *(getattr(spec, name) for name in _FIELDS))
    if where not in tensors:
        tensors[where] = _tensors(_parts(spec, layer, head_dim, calibration, moments, later, {}), device)
    return tensors[where]


@outside_autograd
def random_rotation(spec: CacheSpec, head_dim: int, device: torch.device) -> torch.Tensor | None:
    """The argument `rotation` of a spec whose matrices are all random, float32 [1, rows, head_dim], one for all layers:
    of keys, then of values, a Haar matrix, a sketch, or the first above the second. None for other specs."""
    if any(_is_of_data(spec, side) for side in _SIDES):
        return None
    matrices = {f"{side}_rotation": side_matrix(spec, side, head_dim) for side in _SIDES}
    rotation = transforms(**matrices)
    return torch.from_numpy(rotation["rotation"]).to(device) if "rotation" in rotation else None


def _is_of_data(spec: CacheSpec, side: str) -> bool:
    return is_split(spec, side) or spec.rotation_of(side) in ("svd", "calibrated")


def _tensors(parts: dict[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x).to(device) for name, x in transforms(**parts).items()}


def _parts(
    spec: CacheSpec,
    layer: int,
    head_dim: int,
    calibration: Calibration | None,
    moments: Moments | None,
    later: int,
    prompt: Mapping[str, torch.Tensor],
) -> dict[str, NDArray[Any]]:
    """The arguments of `turboquant.transforms.transforms`."""
    parts: dict[str, NDArray[Any]] = {}
    of_data = {side: _is_of_data(spec, side) for side in _SIDES}
    for i, side in enumerate(_SIDES):
        if calibration is not None:
            parts |= _of_calibration(calibration, spec, layer, i, side)
        if side in prompt:
            parts[f"{side}_rotation"] = prompt[side].cpu().numpy()
        if not of_data[side] and any(of_data.values()):
            matrix = side_matrix(spec, side, head_dim)
            parts |= {} if matrix is None else {f"{side}_rotation": matrix}
    if any(of_data[side] and f"{side}_rotation" not in parts for side in _SIDES):  # its prompt is still to come
        parts = {name: x for name, x in parts.items() if not name.endswith("_rotation")}
    if moments is not None:
        parts |= moments.layers[layer].later(later).transforms(spec.centre == "wave", spec.metric == "query")
    return parts


def _of_calibration(
    calibration: Calibration, spec: CacheSpec, layer: int, i: int, side: str
) -> dict[str, NDArray[Any]]:
    """Returns what a side takes from a calibration: rotation and steps of rotation="calibrated"; rotations by singular
    vectors or outliers, with the rows of a sketch; the centre; a table of levels."""
    arrays: dict[str, NDArray[Any]] = {}
    _, channels = calibration.sizes[layer]
    if spec.rotation == "calibrated":
        widths = group_widths(getattr(spec, f"{side}_bits"), channels, spec.group)
        arrays[f"{side}_rotation"], arrays[f"{side}_steps"] = calibration.merged(layer, i, widths, spec.group)
    if spec.centre == "calibrated":
        arrays[f"{side}_centre"] = calibration.centre[layer][i]
    rotation = None
    if spec.rotation_of(side) == "svd":
        rotation = calibration.singular_axes(layer)[i]
    elif is_split(spec, side) and spec.outliers == "calibrated":
        rotation = split_rotation(spec, side, calibration.second_moment(layer)[i])
    if rotation is not None:
        matrix = side_matrix(spec, side, channels, rotation)
        assert matrix is not None
        arrays[f"{side}_rotation"] = matrix
    if getattr(spec, f"{side}_levels") == "table":
        if calibration.tables is None:
            raise ValueError(
                "`profile` must have tables of levels for this spec, got one made without: calibrate again"
            )
        columns = LEVELS + (side == "key" and spec.sketch == "sign")
        arrays[f"{side}_steps"] = calibration.tables[layer][i, :, :columns]
    return arrays


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
