"""Times `ops.recode`, which makes pages of fewer bits from pages, beside a copy of as many bytes on the same device.

    python benchmarks/recode.py --out benchmarks/results/MACHINE [--device cuda] [--layers 8]

Layers of 32,768 tokens, 8 KV heads of 128 channels, keys and values of normal random numbers. Bytes of the first pages
are compared first: on a CPU with those of the scalar code, on CUDA with the CPU's.

share_of_copy  the time of a copy over that of recoding. The copy reads and writes as many bytes in all as recoding
               does, with as many threads.

On a CPU, times are CPU time of all threads together. Both write to memory that the process already has: if the kernel
had to clear pages first, that would take as long as the copy.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import RESULTS, Report, microseconds

from turboquant import _core, ops
from turboquant.plan import Plan

PATHS = ((4, 3), (4, 2), (3, 2), (5, 4), (5, 3), (5, 2))
KV_HEADS, HEAD_DIM = 8, 128
CHECKED = 16  # pages


def check(plan: Plan, pages: torch.Tensor, target: Plan) -> None:
    some = pages[:CHECKED].contiguous()
    found = ops.recode(plan, some, target).cpu()
    _core.set_isa(None if some.is_cuda else "scalar")
    want = ops.recode(plan, some.cpu(), target)
    _core.set_isa(None)
    if not torch.equal(found, want):
        raise SystemExit(f"{plan.key_bits[0]} to {target.key_bits[0]} bits: {int((found != want).sum())} bytes differ")


def pages_of(plan: Plan, layers: int, tokens: int, device: str) -> torch.Tensor:
    made = []
    for _ in range(layers):
        k, v = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
        made.append(ops.quantize(plan, k, v))
    return torch.cat(made)


def keep_memory() -> None:
    """Makes glibc keep freed memory from now on, instead of returning it to the kernel."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and libc.mallopt(M_MMAP_THRESHOLD, 2**30)):
        raise SystemExit("mallopt failed: this needs glibc")


def timed(call: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    if device == "cuda":
        return microseconds([call], device, repeats)
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        call()
        times.append((time.process_time() - start) * 1e6)
    low, *_, high = statistics.quantiles(times[2:], n=10)
    return {"us": round(statistics.median(times[2:]), 1), "us_p10": round(low, 1), "us_p90": round(high, 1)}


def measure(report: Report, device: str, layers: int, tokens: int, repeats: int) -> None:
    for bits, fewer in PATHS:
        plan, target = Plan(HEAD_DIM, bits, bits), Plan(HEAD_DIM, fewer, fewer)
        pages = pages_of(plan, layers, tokens, device)
        check(plan, pages, target)
        moved = pages.nbytes + len(pages) * KV_HEADS * target.record_bytes
        same = torch.randint(0, 256, (moved // 2,), dtype=torch.uint8, device=device)
        threads = (1, torch.get_num_threads()) if device == "cpu" and torch.get_num_threads() > 1 else (None,)
        for count in threads:
            before = torch.get_num_threads()
            torch.set_num_threads(count or before)
            times = timed(lambda p=plan, x=pages, t=target: ops.recode(p, x, t), device, repeats)
            copy = timed(lambda x=same: x.clone(), device, repeats)["us"]
            torch.set_num_threads(before)
            metrics = {
                **times,
                "copy_us": copy,
                "share_of_copy": round(copy / times["us"], 3),
                "gb_per_s": round(moved / times["us"] / 1e3, 1),
            }
            params: dict[str, Any] = {"from": bits, "to": fewer, "layers": layers, "tokens": tokens, "bytes": moved}
            params |= {"threads": count, "isa": _core.isa()} if device == "cpu" else {}
            report.add("recode", params, metrics)
            print("recode", params, metrics, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", default=RESULTS / "local", help="folder for recode.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.device == "cpu":
        keep_memory()
    report = Report("recode", args.device)
    measure(report, args.device, args.layers, args.tokens, args.repeats)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
