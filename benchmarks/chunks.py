"""Times attention of many query tokens over a packed history that all of them see, on a GPU, as in the second turn of a
chat or a later chunk of a prompt. Results are checked first; times are those of a CUDA graph.

    python benchmarks/chunks.py [--only 1,8,4] [--bits 4 3 2] [--variance-term] [--out benchmarks/results/h200]

For `decoded_us`, at most 128 MiB of keys and values are decoded at a time and PyTorch attends to them, as in caches.
`packed_us` is `attend`, from the packed bytes. The baseline is the fastest of PyTorch's cuDNN and flash attention over
the same tokens in bf16, also with the group's heads as query rows of one KV head. `speedup` is the baseline's time over
the faster of ours. `dequantize_us` is the time to decode all keys and values to bf16. `of_copy` is its bytes read and
written a second over those of a copy. 8,192 query tokens are timed for batch 1 only, which bounds the memory of
queries, outputs and what `attend` merges. Plans are with and without a wave of all pairs, whose angles are Llama 3's,
and a metric of rank 4. An error is that of a row of the output over the row's norm, against float64 over the tokens
decoded to float32; `packed_error` is that of `attend`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from attend import Shape, baseline, moments, named, tensors
from ceilings import ceilings
from timing import RESULTS, Report, microseconds

from turboquant import ops
from turboquant.kvcache import decoded
from turboquant.kvcache.variance import wide_keys, wide_queries
from turboquant.plan import Plan

SHAPES = [
    (1, 8, 4, 32768, 128),
    (1, 8, 4, 8192, 128),
    (8, 8, 4, 8192, 128),
    (1, 32, 1, 16384, 128),
    (1, 8, 4, 32768, 64),
]
QUERY_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
LONGEST_OF_BATCHES = 2048  # query tokens if there are several sequences
MOST_ERROR = 1e-2  # of a row; the benchmark ends with status 1 if there is more


def stored_as(packed: ops.PackedKV) -> Any:
    """Returns an object with what `decoded` reads of a cache's layer."""
    pool = SimpleNamespace(lock=nullcontext())
    held = dict(plan=packed.plan, pages=packed.pages, block_table=packed.block_table, transforms=packed.transforms)
    where = dict(device=packed.pages.device, kv_heads=packed.pages.shape[1], table=SimpleNamespace(pool=pool),
                 head_dim=packed.plan.head_dim, turned=lambda sequences: packed.transforms)  # fmt: skip
    return SimpleNamespace(**held, **where, spec=SimpleNamespace(sinks=0))


def errors(shape: Shape, plan: Plan, query_tokens: int, device: str = "cuda") -> dict[str, float]:
    """Returns the median and the worst error of a row of the output, over its norm, on a part of the shape."""
    cut = (1, min(shape[1], 2), shape[2], min(shape[3], 4096) - 5, shape[4])
    q, k, v = tensors(cut, 99, query_tokens=min(query_tokens, 256), device=device)
    packed = ops.pack(k, v, plan, transforms=moments(plan, cut[1], device))
    stored, scale = stored_as(packed), shape[4] ** -0.5
    outs = {"error": decoded.attend_to_decoded(stored, q, [cut[3]], scale)[0],
            "packed_error": ops.attend(q, packed, causal=False)}  # fmt: skip
    k, v = ops.dequantize(packed)  # float32, like the variance term's channels, which float64 multiplies exactly
    k = wide_keys(k, stored, packed.pages, packed.block_table, packed.lengths).double()
    wide = wide_queries(q.float(), stored, scale).double()
    exact = F.scaled_dot_product_attention(wide, k, v.double(), scale=scale, enable_gqa=True)
    found = {}
    for name, out in outs.items():
        error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        found |= {f"{name}_median": float(error.median()), f"{name}_worst": float(error.max())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    parser.add_argument("--only", default="", help="shapes that start so, such as 1,8,4")
    parser.add_argument("--variance-term", action="store_true", help="of all plans")
    parser.add_argument("--queries", nargs="+", type=int, default=QUERY_TOKENS)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    report = Report("chunks", "cuda")
    wrong: list[str] = []
    ceiling = ceilings("cuda")
    report.add("ceilings", {}, ceiling)
    for shape in (shape for shape in SHAPES if ",".join(map(str, shape)).startswith(args.only)):
        batch, kv_heads, _, tokens, d = shape
        counts_of_queries = [n for n in args.queries if batch == 1 or n <= LONGEST_OF_BATCHES]
        bases = {n: baseline(shape, n) for n in counts_of_queries}
        for bits in args.bits:
            for pairs, rank in ((0, None), (d // 2, 4)):
                torch.cuda.empty_cache()
                plan = Plan(d, bits, bits, wave_pairs=pairs, metric=rank, variance_term=args.variance_term)
                _, k, v = tensors(shape, 0)
                packed = ops.pack(k, v, plan, transforms=moments(plan, kv_heads))
                del k, v
                moved = packed.pages.nbytes + 4 * batch * kv_heads * tokens * d
                us = microseconds([partial(ops.dequantize, packed, torch.bfloat16)], "cuda")["us"]
                decode = {"dequantize_us": us, "of_copy": round(moved / us / 1e6 / ceiling["copy_tbps"], 3)}
                report.add("dequantize", named(shape) | {"bits": bits, "wave_pairs": pairs, "metric": rank}, decode)
                print(shape, bits, pairs, decode, flush=True)
                for n in counts_of_queries:
                    q, *_ = tensors((batch, kv_heads, shape[2], 1, d), 1, query_tokens=n)
                    metrics: dict[str, Any] = errors(shape, plan, n)
                    if not max(metrics["error_worst"], metrics["packed_error_worst"]) < MOST_ERROR:
                        wrong.append(f"{shape}, {n} query tokens, {plan}: {metrics}")
                    stored, counts = stored_as(packed), [tokens] * batch
                    far = [partial(decoded.attend_to_decoded, stored, q, counts, d**-0.5)]
                    near = [partial(ops.attend, q, packed, causal=False)]
                    metrics["decoded_us"] = microseconds(far, "cuda")["us"]
                    metrics["packed_us"] = microseconds(near, "cuda")["us"]
                    metrics |= bases[n]
                    best = min(bases[n].values())
                    metrics["speedup"] = round(best / min(metrics["decoded_us"], metrics["packed_us"]), 3)
                    where = {"query_tokens": n, "bits": bits, "wave_pairs": pairs, "metric": rank,
                             "variance_term": args.variance_term}  # fmt: skip
                    report.add("chunks", named(shape) | where, metrics)
                    print(shape, n, bits, pairs, metrics, flush=True)
    print(report.save(args.out))
    if wrong:
        raise SystemExit("\n".join([f"rows with errors above {MOST_ERROR}:", *wrong]))


if __name__ == "__main__":
    main()
