"""Computes a layer's wave from its mean key, and its metric from its queries' second moment, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..plan import MAX_RANK, PAIR_MULTIPLE
from .rotary import TURN, Rotary

__all__ = ["Metric", "averaged_over_positions", "chosen_pairs", "metric_of", "turn_back"]

EXPONENT = 0.4  # applied to the queries' energy along each direction: 0 is no metric, 1 all of it
FLOOR = 1e-4  # smaller eigenvalues count as this fraction of the largest
ENERGY = 0.995  # share of the mean keys' energy in the pairs that are kept
POSITIONS = np.unique(np.geomspace(16, 32768, 256).round().astype(np.int64))


class Metric(NamedTuple):
    """See `LayerMoments`: scale [.., head_dim], directions [.., rank, head_dim], stretch [.., rank]."""

    scale: torch.Tensor
    directions: torch.Tensor
    stretch: torch.Tensor


def turn_back(x: torch.Tensor, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    """Undoes RoPE in x [heads, tokens, head_dim] at `positions` [tokens], in float64."""
    out = x.to(torch.float64)
    if not len(rotary.pairs):
        return out
    a, b = (torch.from_numpy(np.ascontiguousarray(rotary.pairs[:, i])).long().to(x.device) for i in range(2))
    increments = torch.from_numpy(rotary.increments.astype(np.int64)).to(x.device)
    angle = (positions.to(x.device)[:, None] * increments % 2**32).to(torch.float64) * (TURN / 2**32)
    first, second, cos, sin = out[..., a], out[..., b], angle.cos(), angle.sin()
    out = out.clone()
    out[..., a], out[..., b] = first * cos + second * sin, second * cos - first * sin
    return out


def averaged_over_positions(moment: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """The mean over `POSITIONS` p of R_p moment R_p^T, for moment [.., head_dim, head_dim] float64.

    In complex numbers z = x_a + i x_b for each pair (a, b), and z = x_c for a channel c that does not turn, R_p
    multiplies z_j by exp(i t_j p). So E[z_j conj(z_k)] is multiplied by the mean of exp(i (t_j - t_k) p) and E[z_j z_k]
    by that of exp(i (t_j + t_k) p).
    """
    if not len(rotary.pairs):
        return moment
    channels = moment.shape[-1]
    still = np.setdiff1d(np.arange(channels), rotary.pairs)
    units = len(rotary.pairs) + len(still)
    to_complex = np.zeros((units, channels), np.complex128)
    rows = np.arange(len(rotary.pairs))
    to_complex[rows, rotary.pairs[:, 0]], to_complex[rows, rotary.pairs[:, 1]] = 1, 1j
    to_complex[np.arange(len(rotary.pairs), units), still] = 1
    phase = POSITIONS[:, None] * np.pad(rotary.increments.astype(np.int64), (0, len(still))) % 2**32
    wave = torch.from_numpy(np.exp(1j * phase * (TURN / 2**32))).to(moment.device)
    z = torch.from_numpy(to_complex).to(moment.device)
    wide = moment.to(torch.complex128)
    apart = (z @ wide @ z.mH) * (wave.mT @ wave.conj() / len(POSITIONS))
    along = (z @ wide @ z.mT) * (wave.mT @ wave / len(POSITIONS))
    # x = Re(z) and Im(z): back = [1, -i] of each pair, and x = Re(conj(to_complex)^T z).
    back = z.mH
    mean: torch.Tensor = (back @ apart @ back.mH + back @ along @ back.mT).real / 2
    return mean


def metric_of(moment: torch.Tensor, rank: int = MAX_RANK) -> Metric:
    """The metric for queries of this second moment [.., head_dim, head_dim] float64, averaged over positions."""
    values, vectors = torch.linalg.eigh(moment)
    largest = values[..., -1:]
    values = torch.where(largest > 0, values / largest.clamp(min=1e-300), 1).clamp(min=FLOOR)
    powers = values ** (EXPONENT / 2)
    powers = powers / powers.square().mean(-1, keepdim=True).sqrt()
    full = (vectors * powers[..., None, :]) @ vectors.mT
    diagonal = full.diagonal(dim1=-2, dim2=-1)
    root = diagonal.sqrt()
    values, vectors = torch.linalg.eigh(full / (root[..., :, None] * root[..., None, :]))
    logs = values.log()
    middle = logs.quantile(0.5, dim=-1, keepdim=True)
    rank = min(rank, moment.shape[-1] - 1)
    order = (logs - middle).abs().argsort(dim=-1, descending=True)
    logs = logs.gather(-1, order)
    rest = logs[..., rank:].mean(-1, keepdim=True)
    directions = vectors.mT.gather(-2, order[..., :rank, None].expand(*order.shape[:-1], rank, vectors.shape[-1]))
    return Metric((rest + diagonal.log()).div(2).exp(), directions, (logs[..., :rank] - rest).expm1())


def chosen_pairs(mean: np.ndarray, rotary: Rotary) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(pairs, increments, amplitudes, centre) of `LayerMoments` for the mean [kv_heads, head_dim] of keys before RoPE.

    The pairs of most energy, as many as hold 99.5 % of it over all heads together, and more up to a multiple of 8.
    """
    amplitudes = mean[:, rotary.pairs]  # [kv_heads, pairs, 2]
    energy = np.square(amplitudes).sum((0, 2))
    order = np.argsort(-energy, kind="stable")
    energies = np.cumsum(energy[order])
    needed = 1 + int(np.searchsorted(energies, ENERGY * energies[-1])) if len(energies) else 0
    padded = -(-needed // PAIR_MULTIPLE) * PAIR_MULTIPLE
    # In the model's order, which is by angle: csrc/cuda/attend/rows/wave.cuh is faster if neighbours turn little.
    chosen = np.sort(order[:padded])
    missing = padded - len(chosen)
    centre = mean.copy()
    centre[:, rotary.pairs.ravel()] = 0
    return (
        np.concatenate([rotary.pairs[chosen], np.tile(rotary.pairs[:1], (missing, 1))]).astype(np.int32),
        np.pad(rotary.increments[chosen], (0, missing)).astype(np.uint32),
        np.pad(amplitudes[:, chosen], ((0, 0), (0, missing), (0, 0))).astype(np.float32),
        centre.astype(np.float32),
    )
