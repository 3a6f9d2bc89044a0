"""The slow, obvious reference of the wave and the metric (turboquant.moments), in NumPy, around `reference.encode` and
`reference.decode`. It is written from the definition and shares no code with the package.

    c_p = centre + the amplitudes of each pair, turned by p * increment mod 2^32, in units of 2^-32 turns
    y   = A (k - c_p),   A = S (I + W diag(e) W^T) S
    logit = softcap(scale * (<A^-1 q, y'> + <q, c_p>)),   y' the decoded y

`dtype` is that of the arithmetic: float32 is what a backend does, float64 is the oracle. Phases are integers in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import reference
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Head:
    """Of one KV head: pairs [m, 2] channels, increments [m] uint32, amplitudes [m, 2], centre and scale [head_dim],
    directions [rank, head_dim] with orthonormal rows, stretch [rank]."""

    pairs: Array
    increments: Array
    amplitudes: Array
    centre: Array
    scale: Array
    directions: Array
    stretch: Array


def head_of(layer: Any, head: int) -> Head:
    """Of a `LayerMoments`."""
    of_heads = (getattr(layer, name)[head] for name in ("amplitudes", "centre", "scale", "directions", "stretch"))
    return Head(layer.pairs, layer.increments, *of_heads)


def phase(increment: int, position: int) -> int:
    """In units of 2^-32 turns."""
    return int(increment) * int(position) % 2**32


def centre_at(head: Head, position: int, dtype: Any) -> Array:
    """c_p, [head_dim]. Cosine and sine are those of the exact phase, rounded once."""
    out = head.centre.astype(dtype)
    for (i, j), increment, (a, b) in zip(head.pairs, head.increments, head.amplitudes.astype(dtype)):
        angle = phase(increment, position) * (2 * np.pi / 2**32)
        cos, sin = dtype(np.cos(angle)), dtype(np.sin(angle))
        out[i] += a * cos - b * sin
        out[j] += a * sin + b * cos
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


def prepared(head: Head, keys: Array, positions: Array, dtype: Any) -> Array:
    """y of keys [tokens, head_dim], which the plan then rounds and rotates."""
    centres = np.stack([centre_at(head, p, dtype) for p in positions])
    return stretched(head, keys.astype(dtype) - centres, dtype)


def encode(plan: reference.Plan, head: Head, keys: Array, positions: Array) -> tuple[Array, Array]:
    """Codes and scales as `reference.encode` returns them, in float32."""
    return reference.encode(plan, "key", prepared(head, keys, positions, np.float32), reference.Transform())


def decode(plan: reference.Plan, head: Head, codes: Array, scales: Array, positions: Array) -> F64:
    """Keys [tokens, head_dim]: A^-1 y' + c_p."""
    y = reference.decode(plan, "key", codes, scales, reference.Transform())
    return shrunk(head, y, np.float64) + np.stack([centre_at(head, p, np.float64) for p in positions])


def added(head: Head, q: Array, positions: Array, dtype: Any) -> Array:
    """<q, c_p> of queries [n, head_dim], [n, tokens]: as a backend does, with the amplitudes turned by the phase."""
    q = q.astype(dtype)
    first, second = (q[:, head.pairs[:, side]] for side in range(2))
    a, b = head.amplitudes.astype(dtype).T
    along, across = first * a + second * b, second * a - first * b
    angles = np.array([[phase(i, p) for p in positions] for i in head.increments]) * (2 * np.pi / 2**32)
    angles = angles.reshape(len(head.increments), len(positions))
    return (
        along @ np.cos(angles).astype(dtype)
        + across @ np.sin(angles).astype(dtype)
        + (q @ head.centre.astype(dtype))[:, None]
    )


def scores(
    plan: reference.Plan, head: Head, q: Array, codes: Array, scales: Array, positions: Array, scale: float,
    softcap: float = 0.0,
) -> F64:  # fmt: skip
    """Logits [queries, tokens] of rotated queries q [queries, head_dim]."""
    y = reference.decode(plan, "key", codes, scales, reference.Transform())
    logits = scale * (shrunk(head, q, np.float64) @ y.T + added(head, q, positions, np.float64))
    return softcap * np.tanh(logits / softcap) if softcap else logits
