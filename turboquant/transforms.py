"""The arrays of a layer's transforms as operators and `_core` take them (`turboquant.operators`, "transforms"). NumPy
only; `turboquant.ops.transforms` makes tensors."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

__all__ = ["Transforms", "transforms"]

F32 = NDArray[np.float32]


class Transforms(TypedDict, total=False):
    """The transforms that a plan takes."""

    key_numbers: F32
    value_numbers: F32
    key_turns: NDArray[np.int32]
    rotation: F32


def transforms(
    *,
    key_rotation: NDArray[Any] | None = None,
    key_centre: NDArray[Any] | None = None,
    key_steps: NDArray[Any] | None = None,
    key_turns: NDArray[Any] | None = None,
    key_moments: NDArray[Any] | None = None,
    value_rotation: NDArray[Any] | None = None,
    value_centre: NDArray[Any] | None = None,
    value_steps: NDArray[Any] | None = None,
) -> Transforms:
    """Joins the parts of both sides. None: the part is left out.

    *_rotation  [rows, head_dim] or [kv_heads or 1, rows, head_dim]: R of a dense rotation, then the rows of a sketch.
                One copy serves all heads unless a side has one for each head.
    *_centre    [kv_heads, head_dim], subtracted before the rotation.
    *_steps     [kv_heads, groups], or the table of levels [kv_heads, step_columns].
    key_turns   [wave_pairs, 3] int32;  key_moments  [kv_heads, n]: the wave and the metric (turboquant.h,
                tq_transform).
    """
    joined_arrays = Transforms()
    if (numbers := _numbers(key_centre, key_steps, key_moments)) is not None:
        joined_arrays["key_numbers"] = numbers
    if (numbers := _numbers(value_centre, value_steps)) is not None:
        joined_arrays["value_numbers"] = numbers
    if key_turns is not None:
        joined_arrays["key_turns"] = np.ascontiguousarray(key_turns)
    matrices = [x if x.ndim == 3 else x[None] for x in (key_rotation, value_rotation) if x is not None]
    if matrices:
        heads = max(len(x) for x in matrices)
        of_heads = [np.broadcast_to(x, (heads, *x.shape[1:])) for x in matrices]
        joined_arrays["rotation"] = np.ascontiguousarray(np.concatenate(of_heads, 1))
    return joined_arrays


def _numbers(
    centre: NDArray[Any] | None, steps: NDArray[Any] | None, moments: NDArray[Any] | None = None
) -> NDArray[Any] | None:
    """| centre | steps, padded to a multiple of 4 columns | moments |"""
    if steps is not None:
        steps = np.pad(steps, ((0, 0), (0, -steps.shape[1] % 4)), constant_values=1)
    parts = [x for x in (centre, steps, moments) if x is not None]
    return np.ascontiguousarray(np.concatenate(parts, 1)) if parts else None
