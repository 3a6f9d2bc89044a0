"""Times how long the host's thread takes to queue one layer of a decoding step, without CUDA graphs.

    python benchmarks/host.py [--device cuda] [--only append_attend attend] [--out benchmarks/results/local]

Times are CPU time of the calling thread, so a GPU that is behind, or another process on the CPU, does not count. On a
CPU the call does the work itself, so there the cache has one head and one token, and nearly all time is overhead.
Calls are those of the operators and of `turboquant.ops`, which checks a `PackedKV` first. `schedule` is once a step,
the others once a layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import RESULTS, Report

from turboquant import _core, ops
from turboquant.plan import Plan

CALLS = 200  # a queue of a CUDA stream holds 1024 kernels
DIM, GROUP = 128, 4


def microseconds(call: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    """Returns the median, the 10th and the 90th percentile of the CPU time of a call, each a mean of CALLS calls."""
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time_ns() - start) / CALLS / 1000)
    low, *_, high = statistics.quantiles(times[2:], n=10)
    return {"us": round(statistics.median(times[2:]), 2), "us_p10": round(low, 2), "us_p90": round(high, 2)}


def calls(device: str, batch: int, plan: Plan) -> dict[str, Callable[[], Any]]:
    heads, tokens = (8, 1000) if device == "cuda" else (1, 1)
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, torch.bfloat16)

    k, v = draw(batch, heads, tokens, DIM), draw(batch, heads, tokens, DIM)
    packed = ops.pack(k, v, plan, max_tokens=tokens + 128)
    q, new_k, new_v = draw(batch, heads * GROUP, 1, DIM), draw(batch, heads, 1, DIM), draw(batch, heads, 1, DIM)
    after = packed.lengths + 1
    at = (plan.words, q, new_k, new_v, after, packed.pages, packed.block_table)
    read = (plan.words, q, packed.pages, packed.block_table, after)
    operators = torch.ops.turboquant
    out: dict[str, Callable[[], Any]] = {
        "append_attend": lambda: operators.append_attend(*at),
        "attend": lambda: operators.attend(*read),
        "ops.attend": lambda: ops.attend(q, packed),
    }
    if batch > 1:
        lengths = [tokens] * (batch - 1) + [1]
        out["schedule"] = lambda: ops.schedule(q, packed, lengths=lengths)
        schedule = torch.zeros((4096, 4), dtype=torch.int32, device=device)  # of no call: only the device reads it
        out["attend with schedule"] = lambda: operators.attend(*read, schedule=schedule)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", metavar="CALL")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    _core.set_num_threads(1)
    report = Report("host", args.device)
    plans = {"3 bits": Plan(DIM, 3, 3), "mixed": Plan(DIM, [5, 4, 3, 3], [4, 3, 3, 0])}
    with torch.inference_mode():
        for name, batch in (("3 bits", 1), ("mixed", 1), ("3 bits", 8)):
            for call, run in calls(args.device, batch, plans[name]).items():
                if args.only and call not in args.only:
                    continue
                metrics = microseconds(run, args.device, args.repeats)
                report.add(call, {"plan": name, "batch": batch}, metrics)
                print(call, name, batch, metrics, flush=True)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
