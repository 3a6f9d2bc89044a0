"""Times random calls of `attend` in every way that the choice of a CUDA kernel compares, in CUDA graphs.

    python benchmarks/choice.py [--seconds 120] [--seed 0] [--chunks] [--out benchmarks/results/h200]

The costs in csrc/cuda/attend/choose/cost.h decide which way runs, and TURBOQUANT_CUDA_PATH=hopper-N runs way N. This
wants a GPU of compute capability 9.0. `over_best` is the time of the way that is chosen over that of the fastest.
Shapes have 1 to 256 sequences of about 128 to 80,000 tokens, equally long, uniform or lognormal, with and without a
wave and exact tokens. With --chunks many queries see all tokens. CHUNK has no number; hopper-chunk runs it where it can
run. The file is choice.json, or choice_chunks.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import statistics
import time
from functools import partial
from typing import Any

import attend as shapes
import timing
import torch
from timing import RESULTS, Report, microseconds

from turboquant import ops
from turboquant.plan import Plan

# Ways are compared with each other, so a call may find more in a cache, and the GPU need not rest.
timing.REST_SECONDS, timing.GRAPH_MICROSECONDS, shapes.ROTATE_BYTES = 0.0, 600, 500_000_000
PATH = "TURBOQUANT_CUDA_PATH"
MOST_NUMBERS = 2_000_000_000  # of a cache
WIDTHS = [(4, 4), (3, 3), (2, 2)] * 3 + [(4, 3), (3, 2), (5, 5), (5, 4), (6, 6), (8, 8), (1, 1), ((4, 3, 2, 2), 3)]


def draw(r: random.Random, chunks: bool) -> tuple[shapes.Mix, Plan, tuple[int, int], str]:
    """Returns sequences, a plan, numbers of sinks and of a window, and how lengths were drawn."""
    while True:
        d, heads = r.choice([128] * 6 + [64] * 2 + [96, 80]), r.choice([1, 2, 4, 8, 8, 8, 8, 16, 32])
        group, queries = r.choice([1, 2, 3, 4, 4, 4, 5, 7, 8, 8]), r.choice([1] * 8 + [2, 4, 8])
        batch, tokens = round(2 ** r.uniform(0, 8)), round(2 ** r.uniform(7, 16.3))
        kind = r.choice(["equal"] * 3 + ["lognormal", "uniform"])
        exact = r.choice([(0, 0)] * 4 + [(4, 128)] * 2 + [(1, 32)])
        if chunks:
            batch, queries, kind, exact = round(2 ** r.uniform(0, 5)), round(2 ** r.uniform(2, 7)), "equal", (0, 0)
        kind = kind if batch > 1 else "equal"
        queries = 1 if exact[1] and not chunks else queries  # a window holds the last query's tokens alone
        drawn = [tokens] * batch
        if kind == "lognormal":
            drawn = [int(min(max(r.lognormvariate(math.log(tokens), 1), 64), 8 * tokens)) for _ in drawn]
        elif kind == "uniform":
            drawn = [r.randint(max(1, tokens // 20), tokens) for _ in drawn]
        work = max(sum(drawn), batch * tokens) * heads * d
        if work > MOST_NUMBERS or work * group * queries > 4e11 or heads * group > 64 or tokens < 2 * sum(exact):
            continue
        key, value = r.choice(WIDTHS)
        key = key[: -(-d // 32)] if isinstance(key, tuple) else key
        pairs = r.choice([0, d // 2])
        plan = Plan(d, key, value, wave_pairs=pairs, metric=4 if pairs else None)
        return shapes.Mix(drawn, heads, group, queries, kind == "equal", d), plan, exact, kind


def hold(mix: shapes.Mix, plan: Plan, exact: tuple[int, int]) -> ops.PackedKV:
    """Returns a cache of the mix's lengths in pages, and exact tokens beside them."""
    packed, size = shapes.hold(mix, plan), (len(mix.lengths), mix.kv_heads)
    rows = {
        f"{part}_{x}": torch.randn(*size, n, mix.head_dim, device="cuda", dtype=torch.bfloat16)
        for part, n in zip(("sink", "window"), exact)
        for x in "kv"
        if n
    }
    return dataclasses.replace(packed, lengths=packed.lengths + sum(exact), tokens=packed.tokens + sum(exact), **rows)


def times(mix: shapes.Mix, plan: Plan, exact: tuple[int, int], causal: bool) -> dict[str, tuple[str, float]]:
    """Returns kernels and microseconds: of what is "chosen", of each way by number, and of "chunk" where it runs."""
    packed, q, result = hold(mix, plan, exact), shapes.queries(mix, plan), {}
    pages = [packed.pages, *(packed.pages.clone() for _ in range(shapes.copies(packed.pages.nbytes) - 1))]
    for way in ("chosen", "chunk", *map(str, range(99))):
        os.environ[PATH] = "" if way == "chosen" else f"hopper-{way}"
        try:
            schedule = ops.schedule(q, packed, lengths=mix.lengths if mix.equal else None, causal=causal)
            kernel = ops.attend_kernel(q, packed, schedule=schedule, causal=causal)
        except RuntimeError as error:
            if "has a way N" not in str(error):
                raise
            break  # there are fewer ways
        if way == "chunk" and not kernel.startswith("attend_chunk_"):
            continue
        attend = partial(torch.ops.turboquant.attend, causal=causal, schedule=schedule.table, **packed.arguments())
        calls = [partial(attend, plan.words, q, each, packed.block_table, packed.lengths) for each in pages]
        result[way] = kernel, microseconds(calls, "cuda", repeats=10)["us"]
    del os.environ[PATH]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", action="store_true", help="many queries that see all tokens")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    if torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("choice.py: this GPU is not of compute capability 9.0, and has one way to run each call")
    report, r = Report("choice_chunks" if args.chunks else "choice", "cuda"), random.Random(args.seed)
    over_best: dict[str, list[float]] = {}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        torch.cuda.empty_cache()
        mix, plan, (sinks, window), lengths = draw(r, args.chunks)
        timed = times(mix, plan, (sinks, window), not args.chunks)
        chosen, best = timed["chosen"][1], min(us for _, us in timed.values())
        sizes = {"batch": len(mix.lengths), "lengths": lengths, "tokens": sum(mix.lengths), "longest": max(mix.lengths)}
        sizes |= {
            "kv_heads": mix.kv_heads,
            "group": mix.group,
            "query_tokens": mix.query_tokens,
            "head_dim": mix.head_dim,
        }
        bits = {"key_bits": plan.key_bits, "value_bits": plan.value_bits, "wave_pairs": plan.wave_pairs}
        metrics: dict[str, Any] = {"kernels": {way: kernel for way, (kernel, _) in timed.items()}}
        metrics |= {"us": {way: us for way, (_, us) in timed.items()}, "over_best": round(chosen / best, 3)}
        report.add("choice", sizes | bits | {"sinks": sinks, "window": window}, metrics)
        over_best.setdefault(lengths, []).append(chosen / best)
    for lengths, ratios in over_best.items():
        print(f"{lengths:10} {len(ratios)} shapes, over the best way: mean {statistics.mean(ratios):.3f}, "
              f"most {max(ratios):.2f}")  # fmt: skip
    print(report.save(args.out))


if __name__ == "__main__":
    main()
