"""Encoding on a GPU: a prompt of 32k tokens into pages, and one token a step, K and V, times in a CUDA graph.

    python benchmarks/encode.py [--out benchmarks/results/h200]

Bytes count what is read (bf16 keys and values) and written (pages); the ceiling is a device-to-device copy in the same
run. Pages are compared with the CPU's before anything is timed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from ceilings import ceilings
from timing import RESULTS, Report, microseconds

from turboquant import ops
from turboquant.plan import Plan

HEADS, DIM, PROMPT, LAYERS = 8, 128, 32768, 32


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def check(plan: Plan) -> None:
    k, v = normal(2, HEADS, 300, DIM), normal(2, HEADS, 300, DIM)
    on_cpu = torch.ops.turboquant.quantize(plan.words, k.cpu(), v.cpu())
    if not torch.equal(torch.ops.turboquant.quantize(plan.words, k, v).cpu(), on_cpu):
        raise AssertionError("the bytes of CUDA and CPU differ")


def prompt(plan: Plan) -> dict[str, Any]:
    sets = []
    for _ in range(3):
        k, v = normal(1, HEADS, PROMPT, DIM), normal(1, HEADS, PROMPT, DIM)
        p = ops.pack(k, v, plan)
        sets.append((plan.words, k, v, p.lengths, p.pages, p.block_table))
    metrics: dict[str, Any] = microseconds([lambda s=s: torch.ops.turboquant.append(*s) for s in sets], "cuda")
    moved = 2 * k.nbytes + p.pages.nbytes
    return metrics | {"bytes": moved, "tbps": round(moved / metrics["us"] / 1e6, 3)}


def step(plan: Plan, batch: int, window: int) -> dict[str, Any]:
    """One new token in each sequence of 32 layers with caches of their own, in one graph; the time is of one layer."""
    layers = []
    for _ in range(LAYERS):
        k, v = normal(batch, HEADS, 1, DIM), normal(batch, HEADS, 1, DIM)
        p = ops.pack(normal(batch, HEADS, 256, DIM), normal(batch, HEADS, 256, DIM), plan, max_tokens=1024)
        lengths = p.lengths + 1 + window
        rings = {f"window_{x}": normal(batch, HEADS, window, DIM) for x in "kv"} if window else {}
        layers.append(((plan.words, k, v, lengths, p.pages, p.block_table), rings))
    return microseconds([lambda a=a, r=r: torch.ops.turboquant.append(*a, **r) for a, r in layers], "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    report = Report("encode", "cuda")
    ceiling = ceilings("cuda")
    report.add("ceilings", {}, ceiling)
    for bits in (4, 3, 2):
        plan = Plan(DIM, bits, bits)
        check(plan)
        metrics = prompt(plan)
        metrics["of_copy_ceiling"] = round(metrics["tbps"] / ceiling["copy_tbps"], 3)
        report.add("prompt", {"batch": 1, "kv_heads": HEADS, "tokens": PROMPT, "head_dim": DIM, "bits": bits}, metrics)
        print("prompt", bits, metrics, flush=True)
        for batch in (1, 8, 64):
            for window in (0, 128):
                params = {"batch": batch, "kv_heads": HEADS, "head_dim": DIM, "bits": bits, "window": window}
                report.add("step", params, metrics := step(plan, batch, window))
                print("step", params, metrics, flush=True)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
