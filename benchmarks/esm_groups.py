"""Would groups of 16 or 8 channels be better for ESM-2 than the byte format's 32? A simulation: nothing is packed.

    python benchmarks/esm_groups.py [--proteins 60] [--calibration FILE] [--out benchmarks/results/cpu]

Keys and values of every layer are coded and decoded in floating point as a calibrated plan codes them (centred, on the
plan's axes, neighbours with equal bits mixed by one Hadamard, one EDEN scale a vector, NORMAL codebooks), for groups of
`--groups` channels that have bits of their own. Groups of 32 are the format's: their figures agree with those of
`esm.py quality`, which are of packed bytes. Bits are shared by descent on the predicted cost, from
`Calibration.bits` for 32 channels and from the coarser plan for fewer; every group of keys has at least one.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from esm import calibrated, proteins, reference, rounded, spread
from timing import RESULTS, Report

from turboquant import _core
from turboquant.calibration import Calibration
from turboquant.calibration.data import _signed_hadamard, errors
from turboquant.esm import quality
from turboquant.esm.attention import plain_attention
from turboquant.esm.model import attentions, checked_model
from turboquant.plan import MAX_BITS, Codebook

Runs = list[tuple[int, int, int]]  # first channel, behind the last, bits


def runs(bits: np.ndarray, size: int) -> Runs:
    """Neighbouring groups with equal bits, together."""
    edges = [0, *(g for g in range(1, len(bits)) if bits[g] != bits[g - 1]), len(bits)]
    return [(a * size, b * size, int(bits[a])) for a, b in pairwise(edges)]


class Costs:
    """Predicted cost of one side of a layer: the error of a run lies evenly on its axes."""

    def __init__(self, calibration: Calibration, size: int) -> None:
        self.size, self.error = size, errors()
        self.variance = calibration.variance.astype(np.float64)
        self.sensitivity = calibration.sensitivity.astype(np.float64)

    def __call__(self, layer: int, side: int, bits: np.ndarray) -> float:
        variance, sensitivity = self.variance[layer, side], self.sensitivity[layer, side]
        return sum(
            float((variance[:, a:b].mean(-1) * sensitivity[:, a:b].sum(-1)).sum()) * self.error[side][n]
            for a, b, n in runs(bits, self.size)
        )


def descend(costs: Costs, bits: np.ndarray) -> np.ndarray:
    """Moves one group's bit at a time to another group, the best move of all, until none helps. [layers, 2, groups]."""
    bits = bits.copy()
    sides = [(layer, side) for layer in range(len(bits)) for side in range(2)]
    cost = {at: costs(*at, bits[at]) for at in sides}

    def moved(at: tuple[int, int], *changes: tuple[int, int]) -> float:
        new = bits[at].copy()
        for group, by in changes:
            new[group] += by
        least = 1 if at[1] == 0 else 0
        fits = new.min() >= least and new.max() <= MAX_BITS and new.sum() > 0
        return costs(*at, new) - cost[at] if fits else np.inf

    groups = range(bits.shape[2])
    while True:
        inside = [(moved(at, (g, 1), (h, -1)), at, g, at, h) for at in sides for g in groups for h in groups if g != h]
        up = sorted((moved(at, (g, 1)), at, g) for at in sides for g in groups)[:8]
        down = sorted((moved(at, (g, -1)), at, g) for at in sides for g in groups)[:8]
        across = [(x[0] + y[0], x[1], x[2], y[1], y[2]) for x in up for y in down if x[1] != y[1]]
        gain, at, g, other, h = min(inside + across)
        if gain > -1e-9 * sum(cost.values()):
            return bits
        bits[at][g] += 1
        bits[other][h] -= 1
        for side in (at, other):
            cost[side] = costs(*side, bits[side])


class Coder:
    """Codes and decodes one side of a layer: [batch, heads, tokens, head_dim]."""

    def __init__(self, calibration: Calibration, layer: int, side: int, bits: np.ndarray, size: int) -> None:
        dim = calibration.head_dim
        mix, steps = np.zeros((dim, dim)), np.zeros((calibration.kv_heads, dim))
        self.levels: list[tuple[slice, torch.Tensor | None]] = []
        for a, b, n in runs(bits, size):
            mix[a:b, a:b] = _signed_hadamard(b - a, calibration.seed + a)
            steps[:, a:b] = np.sqrt(
                np.maximum(calibration.variance[layer, side, :, a:b].mean(-1, keepdims=True), 1e-12)
            )
            book = _core.codebook(Codebook.NORMAL, dim, n) if n else None
            levels = None if book is None else torch.tensor(np.sort(book["levels"] * float(book["step"])))
            self.levels.append((slice(a, b), None if levels is None else levels.float()))
        self.rotation = torch.tensor(mix @ calibration.axes[layer, side]).float()
        self.steps = torch.tensor(steps).float()[:, None]
        self.centre = torch.tensor(calibration.centre[layer, side]).float()[:, None]
        self.alive = torch.tensor(np.repeat(bits > 0, size))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.einsum("hij,bhtj->bhti", self.rotation, x - self.centre) / self.steps
        rms = z[..., self.alive].square().mean(-1, keepdim=True).sqrt().clamp_min(1e-20)
        u, c = z / rms, torch.zeros_like(z)
        for at, levels in self.levels:
            if levels is not None:
                c[..., at] = levels[torch.searchsorted((levels[1:] + levels[:-1]) / 2, u[..., at].contiguous())]
        weight = self.steps.square() * self.alive
        scale = rms * (weight * u * u).sum(-1, keepdim=True) / (weight * c * u).sum(-1, keepdim=True)
        return self.centre + torch.einsum("hij,bhti->bhtj", self.rotation, scale * c * self.steps)


class Simulated:
    """Stands for a `PackedAttention` in `esm.quality`."""

    def __init__(self, module: Any, key: Coder, value: Coder) -> None:
        self.module, self.key, self.value = module, key, value

    def attend(self, query: Any, key: Any, value: Any, mask: Any, scaling: Any, shared: Any) -> torch.Tensor:
        return plain_attention(self.module, query, self.key(key), self.value(value), mask, scaling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proteins", type=int, default=60, help="of proteins_val.fasta")
    parser.add_argument("--averages", type=float, nargs="+", default=[4, 3, 2.5, 2])
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 16, 8], help="channels, falling, 32 first")
    parser.add_argument("--calibration", help="a file, instead of calibrating")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    model = reference()
    calibration = calibrated(model, args)
    base, report = checked_model(model), Report("esm_groups", "cpu")
    batches = quality._masked_batches(
        model, [p.sequence for p in spread(proteins("proteins_val.fasta"), args.proteins)], 0.15, 0, 8
    )
    with quality._inference(model):
        references = [quality._outputs(model, base, batch, None) for batch in batches]
        for average in args.averages:
            bits, size = calibration.bits(average), 32
            for finer in args.groups:
                bits, size = np.repeat(bits, size // finer, -1), finer
                costs = Costs(calibration, size)
                bits = descend(costs, bits)
                layers: Any = [
                    Simulated(m, *(Coder(calibration, i, side, bits[i, side], size) for side in range(2)))
                    for i, m in enumerate(attentions(model))
                ]
                tally = quality._Tally()
                for batch, outputs in zip(batches, references):
                    tally.add(batch, outputs, quality._outputs(model, base, batch, layers))
                metrics = {
                    "predicted_cost": sum(costs(i, s, bits[i, s]) for i in range(len(bits)) for s in range(2)),
                    "final_cosine_mean": tally.cosines / tally.residues,
                    "final_cosine_min": tally.worst[0],
                    "masked_kl_divergence": tally.divergence / tally.masked,
                }
                report.add(
                    "groups",
                    {"bits": average, "channels": size, "proteins": args.proteins, "calibrated_on": calibration.source},
                    rounded(metrics),
                )
                print(average, size, rounded(metrics), flush=True)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
