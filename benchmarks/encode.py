"""Times encoding of K and V on a GPU, in a CUDA graph: a prompt of 32k tokens into pages, and one token a step.

    python benchmarks/encode.py [--out benchmarks/results/h200]

Bytes count what is read (bf16 keys and values) and written (pages); the ceiling is a device-to-device copy in the same
run. Pages are compared with the CPU's before anything is timed. "moments": with a random wave of all pairs and a
random metric of rank 4. For those, the CPU decodes the pages of both, and the errors of the keys are compared.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import torch
from ceilings import ceilings
from timing import RESULTS, Report, microseconds

from turboquant import ops
from turboquant.plan import Plan

HEADS, DIM, PROMPT, LAYERS = 8, 128, 32768, 32


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


Transforms = dict[str, torch.Tensor]


def random_moments() -> Transforms:
    half = torch.arange(DIM // 2)
    increments = (10000.0 ** (-half / (DIM // 2)) / (2 * torch.pi) * 2**32).to(torch.int32)
    directions = torch.linalg.qr(torch.randn(HEADS, DIM, 4))[0].mT.reshape(HEADS, -1)
    stretch = torch.empty(HEADS, 4).uniform_(-0.5, 2.0)
    parts = [torch.randn(HEADS, DIM), torch.empty(HEADS, DIM).uniform_(0.5, 2.0), directions, stretch]
    turns = torch.stack([half.to(torch.int32), half.to(torch.int32) + DIM // 2, increments], 1)
    return {"key_turns": turns.cuda(), "key_numbers": torch.cat(parts, 1).cuda()}


def check(plan: Plan, transforms: Transforms) -> None:
    k, v = normal(2, HEADS, 300, DIM), normal(2, HEADS, 300, DIM)
    on_cpu = {name: x.cpu() for name, x in transforms.items()}
    want = torch.ops.turboquant.quantize(plan.words, k.cpu(), v.cpu(), **on_cpu)
    got = torch.ops.turboquant.quantize(plan.words, k, v, **transforms).cpu()
    if not transforms and not torch.equal(got, want):
        raise AssertionError("the bytes of CUDA and CPU differ")
    table, lengths = torch.arange(6, dtype=torch.int32).view(2, 3), torch.full((2,), 300, dtype=torch.int32)
    keys = [torch.ops.turboquant.dequantize(plan.words, x, table, lengths, 300, **on_cpu)[0] for x in (got, want)]
    on_cuda, exact = ((x - k.cpu()).norm() for x in keys)
    if abs(on_cuda - exact) > 0.005 * exact:  # codes may differ where a number lies at a threshold
        raise AssertionError(f"keys that CUDA stores are off by {on_cuda:.4g}, those of the CPU by {exact:.4g}")


def prompt(plan: Plan, transforms: Transforms) -> dict[str, Any]:
    sets = []
    for _ in range(3):
        k, v = normal(1, HEADS, PROMPT, DIM), normal(1, HEADS, PROMPT, DIM)
        p = ops.pack(k, v, plan, transforms=transforms)
        sets.append((plan.words, k, v, p.lengths, p.pages, p.block_table))
    metrics: dict[str, Any] = microseconds(
        [lambda s=s: torch.ops.turboquant.append(*s, **transforms) for s in sets], "cuda"
    )
    moved = 2 * k.nbytes + p.pages.nbytes
    return metrics | {"bytes": moved, "tbps": round(moved / metrics["us"] / 1e6, 3)}


def step(plan: Plan, transforms: Transforms, batch: int, window: int) -> dict[str, Any]:
    """Times one new token in each sequence, in one graph of 32 layers with a cache each; the time is of one layer."""
    layers = []
    for _ in range(LAYERS):
        k, v = normal(batch, HEADS, 1, DIM), normal(batch, HEADS, 1, DIM)
        p = ops.pack(
            normal(batch, HEADS, 256, DIM), normal(batch, HEADS, 256, DIM), plan, max_tokens=1024, transforms=transforms
        )
        lengths = p.lengths + 1 + window
        rings = {f"window_{x}": normal(batch, HEADS, window, DIM) for x in "kv"} if window else {}
        layers.append(((plan.words, k, v, lengths, p.pages, p.block_table), rings | transforms))
    return microseconds([lambda a=a, r=r: torch.ops.turboquant.append(*a, **r) for a, r in layers], "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    report = Report("encode", "cuda")
    ceiling = ceilings("cuda")
    report.add("ceilings", {}, ceiling)
    for bits, moments in product((4, 3, 2), (False, True)):
        plan = Plan(DIM, bits, bits, wave_pairs=DIM // 2, metric=4) if moments else Plan(DIM, bits, bits)
        transforms = random_moments() if moments else {}
        check(plan, transforms)
        metrics = prompt(plan, transforms)
        metrics["of_copy_ceiling"] = round(metrics["tbps"] / ceiling["copy_tbps"], 3)
        shape = {"kv_heads": HEADS, "head_dim": DIM, "bits": bits, "moments": moments}
        report.add("prompt", {"batch": 1, "tokens": PROMPT} | shape, metrics)
        print("prompt", shape, metrics, flush=True)
        for batch, window in product((1, 8, 64), (0, 128)):
            params = {"batch": batch, "window": window} | shape
            report.add("step", params, metrics := step(plan, transforms, batch, window))
            print("step", params, metrics, flush=True)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
