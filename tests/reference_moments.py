"""A slow reference of the wave and the metric (turboquant.h, "Keys of a plan with a wave or a metric"), in NumPy.
tests/reference.py calls it before encoding and after decoding. It is written from the definition and shares no code
with the package.

    c_p = centre + the amplitudes of each pair, turned by p * increment mod 2^32, in units of 2^-32 turns
    y   = A (k - c_p),   A = S (I + W diag(e) W^T) S
    logit = softcap(scale * (<A^-1 q, y'> + <q, c_p>)),   y' the decoded y

`dtype` is that of the arithmetic: float32 as in the backends, or float64 for the oracle. Phases are integers in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Head:
    """Moments of one KV head: pairs [m, 2] channels, increments [m] uint32, amplitudes [m, 2], centre and scale
    [head_dim], directions [rank, head_dim] with orthonormal rows, stretch [rank]."""

    pairs: Array
    increments: Array
    amplitudes: Array
    centre: Array
    scale: Array
    directions: Array
    stretch: Array


def head_of(plan: Any, transform: Any) -> Head | None:
    """The moments in the `reference.Transform` of one head; None if it has neither a wave nor a metric."""
    row, turns, centre, dim = transform.moments, transform.turns, transform.centre, plan.head_dim
    if row is None:
        return None
    amplitudes, rest = row[: 2 * plan.wave_pairs].reshape(-1, 2), row[2 * plan.wave_pairs :]
    rank = max(0, plan.metric - 1)
    scale, directions, stretch = np.split(rest, [dim, dim * (1 + rank)]) if plan.metric else (np.ones(dim),) * 3
    return Head(
        np.zeros((0, 2), np.int32) if turns is None else turns[:, :2],
        np.zeros(0, np.uint32) if turns is None else turns[:, 2].view(np.uint32),
        amplitudes,
        np.zeros(dim, np.float32) if centre is None else centre,
        scale.astype(np.float32),
        directions.reshape(-1, dim)[:rank].astype(np.float32),
        stretch[:rank].astype(np.float32),
    )


def phase(increment: int, positions: Array) -> NDArray[np.uint64]:
    """The phase at each position, in units of 2^-32 turns: position * increment mod 2^32."""
    return np.asarray(positions, np.int64).astype(np.uint64) * np.uint64(increment) % 2**32


def centres(head: Head, positions: Array, dtype: Any) -> Array:
    """c_p of each position, [n, head_dim]. Cosine and sine are those of the exact phase, rounded once."""
    out = np.tile(head.centre.astype(dtype), (len(positions), 1))
    for (i, j), increment, (a, b) in zip(head.pairs, head.increments, head.amplitudes.astype(dtype)):
        angle = phase(increment, positions) * (2 * np.pi / 2**32)
        cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
        out[:, i] += a * cos - b * sin
        out[:, j] += a * sin + b * cos
    return out


def stretched(head: Head, x: Array, dtype: Any) -> Array:
    """A x of rows x [.., head_dim]."""
    s, w, e = (y.astype(dtype) for y in (head.scale, head.directions, head.stretch))
    u = x.astype(dtype) * s
    return (u + (u @ w.T * e) @ w) * s


def shrunk(head: Head, q: Array, dtype: Any) -> Array:
    """A^-1 q of rows q [.., head_dim]."""
    s, w, e = (y.astype(dtype) for y in (head.scale, head.directions, head.stretch))
    u = q.astype(dtype) / s
    return (u + (u @ w.T * (1 / (1 + e) - 1)) @ w) / s


def prepared(head: Head, keys: Array, positions: Array | None, dtype: Any) -> Array:
    """y of keys [tokens, head_dim], which are then rounded and rotated. Without `positions`, all are 0."""
    positions = np.zeros(len(keys), int) if positions is None else positions
    return stretched(head, keys.astype(dtype) - centres(head, positions, dtype), dtype)


def restored(head: Head, y: Array, positions: Array | None) -> F64:
    """Keys [tokens, head_dim] of decoded y."""
    positions = np.zeros(len(y), int) if positions is None else positions
    return shrunk(head, y, np.float64) + centres(head, positions, np.float64)


def added(head: Head, q: Array, positions: Array, dtype: Any) -> Array:
    """<q, c_p> [n, tokens] of queries [n, head_dim], as the backends compute it: the products of each query with the
    amplitudes do not depend on the position, and are then turned by the phase of each position."""
    q = q.astype(dtype)
    first, second = (q[:, head.pairs[:, side]] for side in range(2))
    a, b = head.amplitudes.astype(dtype).T
    along, across = first * a + second * b, second * a - first * b
    angles = np.array([phase(i, positions) for i in head.increments]) * (2 * np.pi / 2**32)
    angles = angles.reshape(len(head.increments), len(positions))
    return (
        along @ np.cos(angles).astype(dtype)
        + across @ np.sin(angles).astype(dtype)
        + (q @ head.centre.astype(dtype))[:, None]
    )
