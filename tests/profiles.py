"""Profiles that hold what tests measure or make up."""

from __future__ import annotations

from typing import Any

import numpy as np

import turboquant
from turboquant import Profile
from turboquant.measured import Calibration, LayerMoments, Moments


def calibrate(*args: Any, **options: Any) -> Calibration:
    """Runs `turboquant.calibrate` and returns the calibration alone."""
    found = turboquant.calibrate(*args, **options).calibration
    assert found is not None
    return found


def made_calibration(
    rng: np.random.Generator, layers: int = 2, kv_heads: int = 2, head_dim: int = 64, **fields: Any
) -> Calibration:
    """A calibration of random numbers, with orthonormal axes."""
    shape = (layers, 2, kv_heads, head_dim)
    axes = np.linalg.qr(rng.standard_normal((*shape, head_dim)))[0].astype(np.float32)
    variance = -np.sort(-rng.gamma(0.3, size=shape).astype(np.float32))
    covariance = axes.swapaxes(-1, -2) * variance[..., None, :] @ axes
    centre = rng.standard_normal(shape).astype(np.float32)
    sensitivity = rng.uniform(0.5, 2, shape).astype(np.float32)
    mark = fields.pop("fingerprint", {"layers": layers})
    return Calibration(centre, covariance, axes, variance, sensitivity, mark, 1000, **fields)


def profile_of(given: Any) -> Any:
    """A profile with these moments or this calibration (with neutral moments if it has none); all else as it is."""
    if isinstance(given, Moments):
        return Profile(given)
    if not isinstance(given, Calibration):
        return given
    if given.moments:
        return Profile(given.moments["model"], given)
    plain = []
    for heads, channels in given.sizes:
        none = np.zeros((heads, 0), np.float32)
        plain.append(
            LayerMoments(
                "constant",
                np.zeros((0, 2), np.int32),
                np.zeros(0, np.uint32),
                none.reshape(heads, 0, 2),
                np.zeros((heads, channels), np.float32),
                np.ones((heads, channels), np.float32),
                none.reshape(heads, 0, channels),
                none,
            )
        )
    return Profile(Moments(tuple(plain), given.fingerprint, 1), given)


def load(path: Any) -> Calibration:
    """The calibration of a file."""
    found = Profile.load(path).calibration
    assert found is not None
    return found


def layer(rng, head_dim=64, heads=2, rank=4, size=1.0, theta=10000.0, interleaved=False) -> LayerMoments:
    """A layer of random moments; `size` is the norm of a head's amplitudes."""
    half = head_dim // 2
    steps = np.arange(half)
    pairs = np.stack([2 * steps, 2 * steps + 1] if interleaved else [steps, steps + half], 1).astype(np.int32)
    turns = theta ** -(steps / half) / (2 * np.pi)
    amplitudes = rng.standard_normal((heads, half, 2))
    amplitudes *= size / np.linalg.norm(amplitudes, axis=(1, 2), keepdims=True)
    directions = np.linalg.qr(rng.standard_normal((heads, head_dim, max(rank, 1))))[0].swapaxes(-1, -2)[:, :rank]
    return LayerMoments(
        "wave",
        pairs,
        (turns * 2**32).round().astype(np.uint32),
        amplitudes.astype(np.float32),
        np.zeros((heads, head_dim), np.float32),
        rng.uniform(0.3, 3, (heads, head_dim)).astype(np.float32),
        directions.astype(np.float32),
        rng.uniform(-0.7, 4, (heads, rank)).astype(np.float32),
    )
