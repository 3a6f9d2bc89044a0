"""Times decode attention over packed pages against bf16 attention on a GPU, in a CUDA graph, after a check of results.

    python benchmarks/attend.py [--only 1,8,4] [--bits 4 3 2] [--out benchmarks/results/h200]
    python benchmarks/attend.py --section heads [--only 16,8,2] [--bits 4 3 2] [--out benchmarks/results/h200]
    python benchmarks/attend.py --section window [--only 1,8,4] [--bits 4 3 2] [--out benchmarks/results/h200]
    python benchmarks/attend.py --section moments [--only 1,8,4] [--bits 4 3 2] [--out benchmarks/results/h200]
    python benchmarks/attend.py --section widths [--only 1,8,4] [--out benchmarks/results/h200]
    python benchmarks/attend.py --section ragged [--only lognormal] [--bits 4 3 2] [--out benchmarks/results/h200]
    python benchmarks/attend.py --section variance [--only lognormal] [--bits 4 3 2] [--out benchmarks/results/h200]

Shapes are (batch, KV heads, group, tokens, head_dim). Two of them are also timed with several query tokens a sequence,
as in speculative decoding; each query sees all tokens. Codes are those of random normal keys and values. A shape
smaller than `ROTATE_BYTES` is held several times, and calls take turns. The baseline is the fastest of PyTorch's cuDNN
and flash attention over the same tokens in bf16, also with the group's heads as query rows of one KV head (decoding
needs no mask), and of vLLM's FlashAttention 3 where that is installed. FlashAttention 3 is also timed on fp8 queries,
keys and values; that time is no baseline.

Section heads does the same at the head sizes of Llama 3.2 1B, Phi 3 mini and Gemma 2 9B. The file is attend_heads.json.

Section window times a decode step of a layer, `append_attend`, with and without exact sinks and an exact window, over
as many tokens in all, for plans with and without a wave and a metric; without --only also for the batches of section
ragged. `over_plain` is the time over that of the same plan without exact tokens. The file is attend_window.json.

Section moments times attention with and without a wave of all pairs, whose angles are Llama 3's, and a metric of rank
4. `over_plain` is the time with them over the time without. The file is attend_moments.json.

Section widths times a decode step as in calibrated presets, with a wave, a metric, 4 sinks and a window of 128 tokens,
for every pair of widths of keys and values. `over_same` is the time over the mean of two other steps: one with the
keys' width on both sides, one with the values'. The file is attend_widths.json.

Section ragged times attention of a decode step for batches whose sequences differ in length, with a schedule for any
lengths, and for some whose sequences are equally long. Plans are with and without a wave and a metric, as in section
moments, some with different widths of keys and values. `of_read_ceiling` is the bytes of all pages over the time and
the read bandwidth. `over_mean` is the time of two widths over the mean of the times of either width. The file is
attend_ragged.json.

Section variance times the batches of section ragged with a variance term, with and without a wave and a metric.
`over_without` is the time over that of the same plan without the term, which is measured before and after it. The file
is attend_variance.json.

benchmarks/chunks.py times many query tokens over a packed history, as in prompts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ceilings import ceilings
from timing import RESULTS, Report, microseconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from turboquant import ops
from turboquant.kvcache.variance import wide_keys, wide_queries
from turboquant.plan import Plan

ROTATE_BYTES = 2_000_000_000  # 30 times an H200's L2 cache: what one call leaves there helps the next by 3 % at most
SHAPES = [
    (16, 8, 4, 32768, 128),
    (8, 32, 1, 16384, 128),
    (64, 8, 4, 4096, 128),
    (8, 8, 8, 16384, 128),
    (16, 1, 16, 32768, 128),
    (64, 20, 1, 1024, 64),
    (1, 8, 4, 131072, 128),
    (1, 8, 4, 32768, 128),
    (1, 8, 4, 8192, 128),
    (1, 8, 4, 4096, 128),
    (1, 8, 4, 2048, 128),
]
HEAD_SHAPES = [
    (16, 8, 4, 32768, 64),
    (1, 8, 4, 8192, 64),
    (16, 32, 1, 4096, 96),
    (1, 32, 1, 4096, 96),
    (16, 8, 2, 8192, 256),
    (1, 8, 2, 8192, 256),
]
WINDOW_SHAPES = [(1, 8, 4, 8192, 128), (64, 8, 4, 4096, 128), (16, 8, 4, 32768, 128), (32, 8, 4, 32768, 128)]
WINDOWS = [(0, 0), (1, 32), (4, 128)]  # sinks, window
PAIR_SHAPES = [(1, 8, 4, 8192, 128), (64, 8, 4, 4096, 128), (16, 8, 4, 32768, 128)]
PAIR_WIDTHS = (2, 3, 4, 5, 6)
MOMENTS = [(0, None), (64, 4)]  # pairs of the wave of head_dim 128, rank of the metric
MOMENT_SHAPES = [(16, 8, 4, 32768, 128), (64, 8, 4, 4096, 128), (1, 8, 4, 32768, 128), (1, 8, 4, 8192, 128)]
QUERY_TOKENS = (2, 4, 8, 16)
QUERY_SHAPES = [(16, 8, 4, 32768, 128), (1, 8, 4, 8192, 128)]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
Shape = tuple[int, int, int, int, int]
RAGGED_PLANS = [("4", 0), ("3", 0), ("2", 0), ("5", 64), ("4", 64), ("3", 64), ("2", 64), ("5,4", 64), ("4,3", 64),
                ("3,2", 64)]  # bits, or bits of keys and of values; pairs of the wave  # fmt: skip


def tensors(
    shape: Shape, seed: int, dtype: torch.dtype = torch.bfloat16, query_tokens: int = 1, device: str = "cuda"
) -> tuple[torch.Tensor, ...]:
    """Returns random q [batch, heads, query_tokens, d], k and v [batch, kv_heads, tokens, d]."""
    batch, kv_heads, group, tokens, d = shape
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype, generator=generator)

    q = draw(batch, kv_heads * group, query_tokens, d)
    return q, draw(batch, kv_heads, tokens, d), draw(batch, kv_heads, tokens, d)


def copies(nbytes: int) -> int:
    return max(1, min(256, -(-ROTATE_BYTES // nbytes)))


def baseline(shape: Shape, query_tokens: int = 1) -> dict[str, Any]:
    """Returns the times of bf16 SDPA by backend, with query rows or with enable_gqa, whichever is faster."""
    batch, kv_heads, group, tokens, d = shape
    n = copies(4 * batch * kv_heads * tokens * d)
    sets = [tensors(shape, seed, query_tokens=query_tokens) for seed in range(n)]
    rows = group * query_tokens
    out: dict[str, Any] = {}
    for name, backend in BACKENDS.items():
        forms: list[Callable[..., Any]] = [
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1)
        ]
        if group > 1:
            forms.append(lambda q, k, v: F.scaled_dot_product_attention(q.view(batch, kv_heads, rows, d), k, v))
        times = []
        for form in forms:
            try:
                with sdpa_kernel(backend):
                    times.append(microseconds([lambda s=s, form=form: form(*s) for s in sets], "cuda")["us"])
            except RuntimeError:  # a backend that does not take the shape
                continue
        if times:
            out[f"{name}_us"] = min(times)
    return out


def flash_attention_3(mix: Mix) -> dict[str, Any]:
    """Returns the times of vLLM's FlashAttention 3 on bf16 and on fp8 queries, keys and values, with its scheduler
    metadata for the lengths; {} if vLLM is not installed."""
    if find_spec("vllm") is None:
        return {}
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    batch, most, heads, d = len(mix.lengths), max(mix.lengths), mix.kv_heads * mix.group, mix.head_dim
    lengths = torch.tensor(mix.lengths, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * mix.query_tokens
    q = torch.randn(batch * mix.query_tokens, heads, d, device="cuda", dtype=torch.bfloat16)
    out = {}
    for name, dtype in (("flash3_us", torch.bfloat16), ("flash3_fp8_us", torch.float8_e4m3fn)):
        torch.cuda.empty_cache()
        n, size = copies(2 * dtype.itemsize * sum(mix.lengths) * mix.kv_heads * d), (batch, most, mix.kv_heads, d)
        caches = [[torch.randn(size, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in "kv"] for _ in range(n)]
        plan = get_scheduler_metadata(
            batch, mix.query_tokens, most, heads, mix.kv_heads, d, lengths, dtype, cu_seqlens_q=starts, causal=True
        )
        attend = partial(
            flash_attn_varlen_func, cu_seqlens_q=starts, max_seqlen_q=mix.query_tokens, seqused_k=lengths,
            max_seqlen_k=most, causal=True, scheduler_metadata=plan, fa_version=3,
        )  # fmt: skip
        rows = q.to(dtype)
        calls = [lambda kv=kv, rows=rows, attend=attend: attend(rows, *kv) for kv in caches]
        out[name] = microseconds(calls, "cuda")["us"]
    return out


def moments(plan: Plan, kv_heads: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Returns random transforms: a wave with amplitudes of norm 10, a metric with scales of 0.5 to 2. {}: neither."""
    d, pairs, rank = plan.head_dim, plan.wave_pairs, plan.metric
    generator = torch.Generator().manual_seed(1)
    made = {}
    if pairs:
        channels = torch.arange(pairs) % (d // 2)
        turn = 500_000.0 ** (-2 * channels.double() / d) / (2 * torch.pi) * 2**32
        made["key_turns"] = torch.stack([channels, channels + d // 2, turn.round().long()], 1).int()
    numbers = [torch.randn(kv_heads, 2 * pairs, generator=generator) * 10 / max(2 * pairs, 1) ** 0.5]
    if rank is not None:
        directions = torch.linalg.qr(torch.randn(kv_heads, d, max(rank, 1), generator=generator))[0].mT[:, :rank]
        stretch = torch.zeros(kv_heads, 4)
        stretch[:, :rank] = 2 * torch.rand(kv_heads, rank, generator=generator)
        scale = 2 ** (2 * torch.rand(kv_heads, d, generator=generator) - 1)
        numbers += [scale, directions.reshape(kv_heads, -1), stretch]
    if pairs or rank is not None:
        made["key_numbers"] = torch.cat(numbers, 1).contiguous()
    return {name: x.to(device) for name, x in made.items()}


def check(shape: Shape, plan: Plan, query_tokens: int = 1) -> float:
    """Returns the largest error over the largest output, against float64 over the decoded bytes, on a smaller shape."""
    batch, kv_heads, group, tokens, d = shape
    cut = (min(batch, 2), min(kv_heads, 2), group, min(tokens, 4096) - 5, d)
    q, k, v = tensors(cut, 99, query_tokens=query_tokens)
    packed = ops.pack(k, v, plan, transforms=moments(plan, cut[1]))
    schedule = ops.schedule(q, packed, lengths=[len(packed)] * cut[0])
    out = ops.attend(q, packed, causal=False, schedule=schedule).double()
    k, v = (x.double() for x in ops.dequantize(packed))
    exact = F.scaled_dot_product_attention(q.double(), k, v, enable_gqa=True)
    return float((out - exact).abs().max() / exact.abs().max())


def ours(shape: Shape, plan: Plan, query_tokens: int = 1) -> dict[str, Any]:
    """Times attention over packed pages: `us` with the schedule for equally long sequences, as these are, `us_unsaid`
    without a schedule, `us_line` with one for any lengths. Making that one takes `us_schedule`, once a step."""
    error = check(shape, plan, query_tokens)
    if not error < 5e-3:  # bf16 outputs round at 4e-3
        raise AssertionError(f"{shape}: attend is off by {error}")
    q, k, v = tensors(shape, 0, query_tokens=query_tokens)
    transforms = moments(plan, shape[1])
    p = ops.pack(k, v, plan, transforms=transforms)
    nbytes = p.pages.nbytes
    del k, v
    pages = [p.pages, *(p.pages.clone() for _ in range(copies(nbytes) - 1))]
    sets = [(plan.words, q, each, p.block_table, p.lengths) for each in pages]
    attend = partial(torch.ops.turboquant.attend, **transforms)
    causal = query_tokens == 1
    equal = ops.schedule(q, p, lengths=[shape[3]] * shape[0]).table
    metrics: dict[str, Any] = microseconds(
        [lambda s=s: attend(*s, causal=causal, schedule=equal) for s in sets], "cuda"
    )
    if shape[0] > 1:
        metrics["us_unsaid"] = microseconds([lambda s=s: attend(*s, causal=causal) for s in sets], "cuda")["us"]
        line = ops.schedule(q, p, causal=causal)
        calls = [lambda s=s: attend(*s, causal=causal, schedule=line.table) for s in sets]
        metrics["us_line"] = microseconds(calls, "cuda")["us"]
        metrics["us_schedule"] = microseconds([lambda: ops.schedule(q, p, causal=causal, out=line)], "cuda")["us"]
    return metrics | {"bytes": nbytes, "tbps": round(nbytes / metrics["us"] / 1e6, 3), "error": error}


def steps(shape: Shape, plan: Plan, sinks: int, window: int, n: int) -> list[dict[str, Any]]:
    """Returns the arguments of `append_attend` for one more token, for n caches that hold the shape's tokens."""
    batch, kv_heads, _, tokens, d = shape
    q, k, v = tensors(shape, 0)
    held = -(-(tokens + 1 - sinks - window) // plan.page_tokens)
    table = torch.arange(batch * held, dtype=torch.int32, device="cuda").view(batch, held)
    cache = {"pages": torch.zeros(batch * held, kv_heads, plan.record_bytes, dtype=torch.uint8, device="cuda")}
    for part, rows in (("sink", sinks), ("window", window)):
        if rows:
            cache |= {f"{part}_{x}": k.new_zeros(batch, kv_heads, rows, d) for x in "kv"}
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    transforms = moments(plan, kv_heads)
    torch.ops.turboquant.append(plan.words, k, v, lengths, block_table=table, **cache, **transforms)
    new = transforms | {
        "q": q,
        "k": k[:, :, :1].clone(),
        "v": v[:, :, :1].clone(),
        "lengths": lengths + 1,
        "block_table": table,
    }
    new["schedule"] = torch.empty((0, 4), dtype=torch.int32, device="cuda")  # `ops.schedule` of equal lengths
    return [new | cache, *(new | {name: x.clone() for name, x in cache.items()} for _ in range(n - 1))]


def check_step(one: dict[str, Any], plan: Plan, sinks: int, window: int) -> float:
    """Returns a step's largest error over the largest output, against float64 over what the cache holds then."""
    out = torch.ops.turboquant.append_attend(plan.words, **one)
    packed = one["lengths"] - sinks - window
    where = {name: x for name, x in one.items() if name.startswith("key_")}
    held = plan.words, one["pages"], one["block_table"], packed, int(packed.max())
    decoded = torch.ops.turboquant.dequantize(*held, **where, sinks=sinks)
    worst = 0.0
    for b, count in enumerate(packed.tolist()):
        exact = [[one[f"{part}_{x}"][b] for part in ("sink", "window") if f"{part}_{x}" in one] for x in "kv"]
        keys, values = (torch.cat([x[b, :, :count].double(), *(y.double() for y in ys)], 1)
                        for x, ys in zip(decoded, exact))  # fmt: skip
        want = F.scaled_dot_product_attention(one["q"][b].double(), keys, values, enable_gqa=True)
        worst = max(worst, float((out[b] - want).abs().max() / want.abs().max()))
    return worst


def timed_steps(cut: dict[str, Any], held: list[dict[str, Any]], plan: Plan, sinks: int, window: int) -> dict[str, Any]:
    """Times a step, for which the caches `held` take turns. The small case `cut` is checked first."""
    error = check_step(cut, plan, sinks, window)
    if not error < 5e-3:  # bf16 outputs round at 4e-3
        raise AssertionError(f"{plan}, {sinks} sinks, window {window}: a step is off by {error}")
    step = torch.ops.turboquant.append_attend
    calls = [lambda one=one, words=plan.words: step(words, **one) for one in held]
    return microseconds(calls, "cuda") | {"error": error}


def timed_step(shape: Shape, plan: Plan, sinks: int, window: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    batch, kv_heads, group, tokens, d = shape
    n = copies(batch * kv_heads * tokens // plan.page_tokens * plan.record_bytes)
    cut = (min(batch, 2), min(kv_heads, 2), group, min(tokens, 1024) - 5, d)
    (one,), held = (steps(each, plan, sinks, window, m) for each, m in ((cut, 1), (shape, n)))
    return timed_steps(one, held, plan, sinks, window)


def named(shape: Shape) -> dict[str, Any]:
    return dict(zip(("batch", "kv_heads", "group", "tokens", "head_dim"), shape))


def windows(args: argparse.Namespace) -> None:
    report = Report("attend_window", "cuda")
    shapes = [shape for shape in WINDOW_SHAPES if ",".join(map(str, shape)).startswith(args.only)]
    for shape, bits, (pairs, rank) in product(shapes, [bits for bits in args.bits if "," not in bits], MOMENTS):
        plan, plain = Plan(shape[4], int(bits), int(bits), wave_pairs=pairs, metric=rank), float("nan")
        for sinks, window in WINDOWS:
            metrics = timed_step(shape, plan, sinks, window)
            plain = metrics["us"] if not sinks + window else plain
            metrics["over_plain"] = round(metrics["us"] / plain, 3)
            where = named(shape) | {"bits": bits, "wave_pairs": pairs, "metric": rank}
            report.add("window", where | {"sinks": sinks, "window": window}, metrics)
            print(shape, bits, pairs, sinks, window, metrics["us"], "us", metrics["over_plain"], "x", flush=True)
    some = [(name, mix) for name, mix in mixes().items() if not mix.equal and mix.query_tokens == 1]
    for (name, mix), (bits, pairs) in product(some if not args.only else [], RAGGED_PLANS):
        widths, plain = [int(b) for b in bits.split(",")], float("nan")
        plan = Plan(mix.head_dim, widths[0], widths[-1], wave_pairs=pairs, metric=4 if pairs else None)
        for sinks, window in (WINDOWS[0], WINDOWS[-1]):
            metrics = timed_ragged_step(mix, plan, sinks, window)
            plain = metrics["us"] if not sinks + window else plain
            metrics["over_plain"] = round(metrics["us"] / plain, 3)
            where = {"lengths": name, "bits": bits, "wave_pairs": pairs, "metric": plan.metric}
            report.add("window_ragged", where | {"sinks": sinks, "window": window}, metrics)
            print(name, bits, pairs, sinks, window, metrics["us"], "us", metrics["over_plain"], "x", flush=True)
    print(report.save(args.out))


def pairs_of_widths(args: argparse.Namespace) -> None:
    report, (pairs, rank), (sinks, window) = Report("attend_widths", "cuda"), MOMENTS[-1], WINDOWS[-1]
    for shape in (shape for shape in PAIR_SHAPES if ",".join(map(str, shape)).startswith(args.only)):
        found = {two: timed_step(shape, Plan(shape[4], *two, wave_pairs=pairs, metric=rank), sinks, window)
                 for two in product(PAIR_WIDTHS, repeat=2)}  # fmt: skip
        for (key, value), metrics in found.items():
            same = (found[key, key]["us"] + found[value, value]["us"]) / 2
            metrics["over_same"] = round(metrics["us"] / same, 3)
            where = named(shape) | {"key_bits": key, "value_bits": value, "wave_pairs": pairs, "metric": rank}
            report.add("widths", where | {"sinks": sinks, "window": window}, metrics)
            print(shape, key, value, metrics["us"], "us", metrics["over_same"], "x", flush=True)
    print(report.save(args.out))


def with_moments(args: argparse.Namespace) -> None:
    report = Report("attend_moments", "cuda")
    for shape in (shape for shape in MOMENT_SHAPES if ",".join(map(str, shape)).startswith(args.only)):
        for bits in (bits for bits in args.bits if "," not in bits):
            plain = float("nan")
            for pairs, rank in MOMENTS:
                torch.cuda.empty_cache()
                metrics = ours(shape, Plan(shape[4], int(bits), int(bits), wave_pairs=pairs, metric=rank))
                plain = plain if pairs else metrics["us"]
                metrics["over_plain"] = round(metrics["us"] / plain, 3)
                report.add("moments", named(shape) | {"bits": bits, "wave_pairs": pairs, "metric": rank}, metrics)
                print(shape, bits, pairs, metrics["us"], "us", metrics["over_plain"], "x", flush=True)
    print(report.save(args.out))


class Mix(NamedTuple):
    """Sequences of these lengths. The last query_tokens of each attend. equal: the schedule is for equal lengths."""

    lengths: list[int]
    kv_heads: int = 8
    group: int = 4
    query_tokens: int = 1
    equal: bool = False
    head_dim: int = 128


def mixes() -> dict[str, Mix]:
    numbers = random.Random(1)

    def draw(least: int, most: int, batch: int) -> list[int]:
        return [numbers.randint(least, most) for _ in range(batch)]

    lognormal = [int(min(max(numbers.lognormvariate(8, 1), 64), 32768)) for _ in range(64)]
    return {
        "64 lognormal": Mix(lognormal),
        "128 of 200 to 8000": Mix(draw(200, 8000, 128)),
        "256 of 100 to 2000": Mix(draw(100, 2000, 256)),
        "8 of 1k to 16k": Mix(draw(1024, 16384, 8)),
        "1 of 128k, 15 of 1k": Mix([131072] + 15 * [1024]),
        "64 lognormal, 2 query tokens": Mix(lognormal, query_tokens=2),
        "64 lognormal, 8 query tokens": Mix(lognormal, query_tokens=8),
        "16 of 32k, said to be any": Mix(16 * [32768]),
        "64 of 4k, said to be any": Mix(64 * [4096]),
        "16 of 32k": Mix(16 * [32768], equal=True),
        "64 of 4k": Mix(64 * [4096], equal=True),
        "1 of 8k": Mix([8192], equal=True),
        "1 of 32k": Mix([32768], equal=True),
        "16 of 32k, 1 KV head": Mix(16 * [32768], kv_heads=1, group=16, equal=True),
    }


def hold(mix: Mix, plan: Plan) -> ops.PackedKV:
    """Returns a cache of the mix's lengths, whose pages hold random tokens and are in random order."""
    counts = [-(-n // plan.page_tokens) for n in mix.lengths]
    _, k, v = tensors((1, mix.kv_heads, 1, 64 * plan.page_tokens, plan.head_dim), 0)
    transforms = moments(plan, mix.kv_heads)
    some = ops.pack(k, v, plan, transforms=transforms).pages
    generator = torch.Generator("cuda").manual_seed(1)
    pages = some[torch.randint(len(some), (sum(counts),), device="cuda", generator=generator)]
    table = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device="cuda")
    order, at = torch.randperm(sum(counts), device="cuda", generator=generator).int(), 0
    for row, n in zip(table, counts):
        row[:n] = order[at : at + n]
        at += n
    lengths = torch.tensor(mix.lengths, dtype=torch.int32, device="cuda")
    return ops.PackedKV(pages, table, lengths, plan, max(mix.lengths), transforms)


def queries(mix: Mix, plan: Plan) -> torch.Tensor:
    return tensors((len(mix.lengths), mix.kv_heads, mix.group, 1, plan.head_dim), 1, query_tokens=mix.query_tokens)[0]


def check_mix(mix: Mix, plan: Plan) -> float:
    """As `check`, for sequences of 5 to 700 tokens."""
    cut = mix._replace(lengths=[700, 5, 129, 640, 300], kv_heads=min(mix.kv_heads, 2), equal=False)
    packed, q = hold(cut, plan), queries(cut, plan)
    out = ops.attend(q, packed, schedule=ops.schedule(q, packed)).double()
    words, transforms = plan.words, packed.transforms
    held = packed.pages, packed.block_table, packed.lengths
    k, v = torch.ops.turboquant.dequantize(words, *held, 700, **transforms)
    stored: Any = SimpleNamespace(plan=plan, kv_heads=cut.kv_heads, head_dim=plan.head_dim, transforms=transforms)
    scale = plan.head_dim**-0.5
    k, q = wide_keys(k, stored, *held).double(), wide_queries(q.float(), stored, scale).double()
    worst = 0.0
    for b, n in enumerate(cut.lengths):
        seen = torch.ones(cut.query_tokens, n, dtype=torch.bool, device="cuda").tril(n - cut.query_tokens)
        exact = F.scaled_dot_product_attention(
            q[b], k[b, :, :n], v[b, :, :n].double(), attn_mask=seen, enable_gqa=True, scale=scale
        )
        exact = torch.where(seen.any(1)[:, None], exact, 0)
        worst = max(worst, float((out[b] - exact).abs().max() / exact.abs().max()))
    return worst


def timed_mix(mix: Mix, plan: Plan) -> dict[str, Any]:
    torch.cuda.empty_cache()
    error = check_mix(mix, plan)
    if not error < 5e-3:  # bf16 outputs round at 4e-3
        raise AssertionError(f"{mix}, {plan}: attend is off by {error}")
    packed, q = hold(mix, plan), queries(mix, plan)
    nbytes = packed.pages.nbytes
    pages = [packed.pages, *(packed.pages.clone() for _ in range(copies(nbytes) - 1))]
    schedule = ops.schedule(q, packed, lengths=mix.lengths if mix.equal else None)
    attend = partial(torch.ops.turboquant.attend, schedule=schedule.table, **packed.transforms)
    calls = [lambda each=each: attend(plan.words, q, each, packed.block_table, packed.lengths) for each in pages]
    kernel = ops.attend_kernel(q, packed, schedule=schedule)
    return {"kernel": kernel, "bytes": nbytes, "error": error} | microseconds(calls, "cuda")


def ragged_steps(mix: Mix, plan: Plan, sinks: int, window: int, n: int = 0) -> list[dict[str, Any]]:
    """Returns the arguments of `append_attend` for one more token of each sequence, for n caches; 0: for `copies`."""
    packed, q = hold(mix._replace(lengths=[m - sinks - window for m in mix.lengths]), plan), queries(mix, plan)
    k, v = (x.squeeze(2) for x in torch.randn(2, len(q), mix.kv_heads, 1, 1, mix.head_dim, device="cuda").to(q.dtype))
    one = {"q": q, "k": k, "v": v, "lengths": torch.tensor(mix.lengths, dtype=torch.int32, device="cuda")}
    one |= {"pages": packed.pages, "block_table": packed.block_table} | packed.transforms
    for part, rows in (("sink", sinks), ("window", window)):
        if rows:
            one |= {f"{part}_{x}": torch.randn_like(k.expand(-1, -1, rows, -1)) for x in "kv"}
    one["schedule"] = torch.zeros((ops.schedule_rows(len(q), q.device), 4), dtype=torch.int32, device="cuda")
    where = q, packed.pages, packed.block_table, one["lengths"]
    torch.ops.turboquant.schedule(plan.words, one["schedule"], *where, sinks=sinks, window=window)
    n = n or copies(packed.pages.nbytes)
    return [one, *(one | {"pages": packed.pages.clone()} for _ in range(n - 1))]


def timed_ragged_step(mix: Mix, plan: Plan, sinks: int, window: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    mix = mix._replace(lengths=[max(n, sinks + window + 1) for n in mix.lengths])
    cut = mix._replace(lengths=[700, 135, 261, 640, 300], kv_heads=min(mix.kv_heads, 2))
    (one,), held = ragged_steps(cut, plan, sinks, window, 1), ragged_steps(mix, plan, sinks, window)
    return timed_steps(one, held, plan, sinks, window)


def ragged(args: argparse.Namespace) -> None:
    report, read = Report("attend_ragged", "cuda"), ceilings("cuda")["read_tbps"]
    report.add("ceilings", {}, {"read_tbps": read})
    for name, mix in mixes().items():
        if not name.startswith(args.only):
            continue
        times: dict[tuple[str, int], float] = {}
        peers = flash_attention_3(mix)
        print(name, peers, flush=True)
        for bits, pairs in RAGGED_PLANS:
            if not set(bits.split(",")) <= {*args.bits, "5"}:
                continue
            widths = [int(b) for b in bits.split(",")]
            plan = Plan(128, widths[0], widths[-1], wave_pairs=pairs, metric=4 if pairs else None)
            metrics = timed_mix(mix, plan) | peers
            metrics["of_read_ceiling"] = round(metrics["bytes"] / metrics["us"] / 1e6 / float(read), 3)
            times[bits, pairs] = metrics["us"]
            if len(widths) > 1:
                mean = (times[str(widths[0]), pairs] + times[str(widths[1]), pairs]) / 2
                metrics["over_mean"] = round(metrics["us"] / mean, 3)
            sizes = {"batch": len(mix.lengths), "kv_heads": mix.kv_heads, "group": mix.group, "head_dim": 128,
                     "tokens": sum(mix.lengths), "query_tokens": mix.query_tokens}  # fmt: skip
            where = {"lengths": name} | sizes | {"bits": bits, "wave_pairs": pairs, "metric": plan.metric}
            report.add("ragged", where, metrics)
            print(f"{name:28} {bits:4} {pairs:2} {metrics['us']:8.2f} us {metrics['of_read_ceiling']:.3f}",
                  metrics.get("over_mean", ""), metrics["kernel"], flush=True)  # fmt: skip
    print(report.save(args.out))


def variance(args: argparse.Namespace) -> None:
    report = Report("attend_variance", "cuda")
    for (name, mix), bits, (pairs, rank) in product(mixes().items(), args.bits, MOMENTS):
        if not name.startswith(args.only) or "," in bits:
            continue
        plans = [Plan(128, int(bits), int(bits), wave_pairs=pairs, metric=rank, variance_term=term)
                 for term in (False, True, False)]  # fmt: skip
        before, metrics, after = (timed_mix(mix, plan) for plan in plans)
        metrics["us_without"] = (before["us"] + after["us"]) / 2
        metrics["over_without"] = round(metrics["us"] / metrics["us_without"], 3)
        metrics["kernel_without"] = before["kernel"]
        sizes = {"batch": len(mix.lengths), "kv_heads": mix.kv_heads, "group": mix.group, "head_dim": 128,
                 "tokens": sum(mix.lengths), "query_tokens": mix.query_tokens}  # fmt: skip
        report.add("variance", {"lengths": name} | sizes | {"bits": bits, "wave_pairs": pairs, "metric": rank}, metrics)
        print(f"{name:28} {bits} {pairs:2} {metrics['us']:8.2f} us {metrics['over_without']:.3f} x",
              metrics["kernel"], metrics["kernel_without"], flush=True)  # fmt: skip
    print(report.save(args.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bits", nargs="+", default=["4", "3", "2", "5,4,3,0"], help="widths; commas: one per 32-channel group"
    )
    parser.add_argument(
        "--section", choices=("attend", "heads", "window", "moments", "widths", "ragged", "variance"), default="attend"
    )
    parser.add_argument("--only", default="", help="shapes that start so, such as 1,8,4")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    if args.section == "window":
        return windows(args)
    if args.section == "moments":
        return with_moments(args)
    if args.section == "widths":
        return pairs_of_widths(args)
    if args.section == "ragged":
        return ragged(args)
    if args.section == "variance":
        return variance(args)
    report = Report("attend" if args.section == "attend" else "attend_heads", "cuda")
    ceiling = ceilings("cuda")
    report.add("ceilings", {}, ceiling)
    work = [(shape, 1) for shape in HEAD_SHAPES]
    if args.section == "attend":
        work = [(shape, 1) for shape in SHAPES] + [(shape, n) for shape in QUERY_SHAPES for n in QUERY_TOKENS]
    for shape, query_tokens in work:
        if not ",".join(map(str, shape)).startswith(args.only):
            continue
        torch.cuda.empty_cache()
        several = {"query_tokens": query_tokens} if query_tokens > 1 else {}
        batch, kv_heads, group, tokens, d = shape
        base = baseline(shape, query_tokens) | flash_attention_3(
            Mix(batch * [tokens], kv_heads, group, query_tokens, head_dim=d)
        )
        best = min((us for name, us in base.items() if "fp8" not in name), default=float("nan"))
        for bits in args.bits:
            widths = tuple(map(int, bits.split(",")))
            if len(widths) > 1 and len(widths) != -(-shape[4] // 32):
                continue
            plan = Plan(shape[4], *2 * (widths[0] if len(widths) == 1 else widths,))
            metrics = ours(shape, plan, query_tokens) | base
            metrics["speedup"] = round(best / metrics["us"], 3)
            metrics["of_read_ceiling"] = round(metrics["tbps"] / ceiling["read_tbps"], 3)
            report.add(
                "attend_queries" if several else "attend",
                named(shape) | several | {"bits": bits},
                metrics,
            )
            print(
                shape,
                query_tokens,
                bits,
                metrics["us"],
                "us",
                metrics["tbps"],
                "TB/s",
                metrics["speedup"],
                "x",
                flush=True,
            )
    print(report.save(args.out))


if __name__ == "__main__":
    main()
