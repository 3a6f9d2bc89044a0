"""Times decode attention on a CPU: one query token over a packed cache, against torch's SDPA in bfloat16.

    python benchmarks/cpu_attend.py [--quick] [--groups 16 32] [--ggml FOLDER] [--out benchmarks/results/<machine>]

One sequence, 8 KV heads, no sinks and no window: every token is packed. Some cases have a wave and a metric as well.
Three formulations of torch's side:

    grouped     the query heads of a KV head as rows of one query: the best that torch can be asked for
    enable_gqa  scaled_dot_product_attention(..., enable_gqa=True)
    repeated    keys and values repeated for every query head first: what Hugging Face runs

With --ggml, ggml's attention with q4_0 and with float16 caches is timed too, by benchmarks/ggml_attend.c. FOLDER has
ggml's sources, and in `build` a static build of them (cmake -B build -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF && make
-C build ggml).

Codes are those of random vectors. Copies of a cache take turns, so that it never comes from the last-level cache. Each
case is checked against float32 SDPA over the decoded tokens before it is timed. `read_share` is the share of the bytes
a second of a plain read by as many threads in this run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import RESULTS, Report, microseconds
from torch.nn.functional import scaled_dot_product_attention as sdpa

from turboquant import _core
from turboquant.plan import Plan

KV_HEADS = 8
ROTATE_BYTES = 150e6  # of caches that take turns: well beyond a last-level cache
FORMULATIONS = ("grouped", "enable_gqa", "repeated")
GGML_TYPES = ("q4_0", "f16")


@dataclass(frozen=True)
class Case:
    tokens: int = 32768
    bits: int = 4
    group: int = 4
    head_dim: int = 128
    threads: int = 1
    wave: bool = False  # and a metric: all pairs of a rotary embedding of base 500,000; the metric has rank 4


def cases(quick: bool, threads: list[int]) -> list[Case]:
    headline = [Case(bits=b, group=g, threads=t) for t, b, g in itertools.product(threads, (4, 3, 2), (1, 4))]
    waves = [Case(bits=b, wave=True) for b in (4, 3, 2)]
    if quick:
        return headline[:6] + waves
    contexts = [Case(tokens=t, bits=b) for t, b in itertools.product((512, 2048, 8192, 131072), (4, 3, 2))]
    others = [Case(group=8), Case(head_dim=64), Case(head_dim=64, group=1), Case(bits=5), Case(bits=1)]
    many = [Case(group=g, threads=t) for t, g in itertools.product(threads, (16, 32))]
    return headline + waves + contexts + others + many


def moments(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Returns turns and moments of keys as the core takes them. Amplitudes are as large as the keys."""
    half = case.head_dim // 2
    increments = (500_000.0 ** -(np.arange(half) / half) / (2 * np.pi) * 2**32).round()
    directions = np.linalg.qr(rng.standard_normal((KV_HEADS, case.head_dim, 4)))[0].swapaxes(1, 2)
    parts = (rng.standard_normal((KV_HEADS, 2 * half)), rng.uniform(0.6, 1.6, (KV_HEADS, case.head_dim)),
             directions.reshape(KV_HEADS, -1), rng.uniform(-0.5, 2, (KV_HEADS, 4)))  # fmt: skip
    turns = np.stack([np.arange(half), np.arange(half) + half, increments.astype(np.int64).astype(np.int32)], 1)
    return {
        "key_turns": np.ascontiguousarray(turns, np.int32),
        "key_numbers": np.ascontiguousarray(np.concatenate(parts, 1), np.float32),
    }


def packed(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Returns a cache as the core takes it, with shuffled pages."""
    waved: dict[str, Any] = {"wave_pairs": case.head_dim // 2, "metric": 4} if case.wave else {}
    words, keys = Plan(case.head_dim, case.bits, case.bits, **waved).words, moments(case, rng) if case.wave else {}
    n_pages = -(-case.tokens // 128)
    pages, table = _core.new_pages(words, n_pages, KV_HEADS), rng.permutation(n_pages).astype(np.int32)[None]
    length, step = 0, 8192
    while length < case.tokens:
        n = min(step, case.tokens - length)
        length += n
        k, v = (rng.standard_normal((1, KV_HEADS, n, case.head_dim), np.float32) for _ in range(2))
        _core.append(words, k, v, np.array([length], np.int32), pages, table, **keys)
    lengths = np.array([case.tokens], np.int32)
    return {"plan": words, "pages": pages, "block_table": table, "lengths": lengths, **keys}


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


def check(case: Case, cache: dict[str, Any], q: torch.Tensor) -> float:
    """Returns the largest error, relative to the largest output, against float32 over the decoded tokens."""
    keys = {name: cache[name] for name in ("key_turns", "key_numbers") if case.wave}
    k, v = _core.dequantize(cache["plan"], cache["pages"], cache["block_table"], cache["lengths"], case.tokens, **keys)
    rows = q.float().view(1, KV_HEADS, case.group, case.head_dim)
    want = sdpa(rows, torch.from_numpy(k), torch.from_numpy(v)).view(q.shape)
    out, _ = _core.attend(q=bits_of(q), dtype="bfloat16", **cache)
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).float()
    error = float((got - want).abs().max() / want.abs().max())
    if not error < 6e-3:  # bfloat16 rounds the output by up to 2^-8 of it
        raise SystemExit(f"{case}: the output is off by {error:.1e}")
    return error


def time_ours(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    q = torch.randn(1, KV_HEADS * case.group, 1, case.head_dim).bfloat16()
    cache = packed(case, rng)
    error, n_bytes = check(case, cache, q), cache["pages"].nbytes
    copies = [cache]
    while len(copies) * n_bytes < ROTATE_BYTES:
        pages = _core.new_pages(cache["plan"], cache["pages"].shape[0], KV_HEADS)
        pages[...] = cache["pages"]
        copies.append({**cache, "pages": pages})
    bits, out = bits_of(q), np.empty(q.shape, np.uint16)

    def attend(c: dict[str, Any]) -> Any:
        return lambda: _core.attend(q=bits, dtype="bfloat16", out=out, threads=case.threads, **c)

    times = microseconds([attend(c) for c in copies], "cpu", repeats=40)
    return {
        **times,
        "bytes": n_bytes,
        "gb_per_s": round(n_bytes / times["us"] / 1e3, 2),
        "error": float(f"{error:.1e}"),
    }


def time_torch(case: Case, formulation: str) -> dict[str, Any]:
    heads, d = KV_HEADS * case.group, case.head_dim
    n_bytes = 4 * KV_HEADS * case.tokens * d
    copies = [torch.randn(2, 1, KV_HEADS, case.tokens, d).bfloat16() for _ in range(1 + int(ROTATE_BYTES / n_bytes))]
    q = torch.randn(1, heads, 1, d).bfloat16()

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if formulation == "grouped":
            return sdpa(q.view(1, KV_HEADS, case.group, d), k, v)
        if formulation == "enable_gqa":
            return sdpa(q, k, v, enable_gqa=True)
        return sdpa(q, k.repeat_interleave(case.group, 1), v.repeat_interleave(case.group, 1))

    times = microseconds([lambda kv=kv: attend(kv[0], kv[1]) for kv in copies], "cpu", repeats=10)
    return {**times, "bytes": n_bytes, "gb_per_s": round(n_bytes / times["us"] / 1e3, 2)}


def compile_ggml(folder: Path, program: Path) -> None:
    archives = sorted(map(str, folder.glob("build/src/**/*.a")))
    if not archives:
        raise SystemExit(f"--ggml: there is no static build in {folder / 'build'}")
    source, compiler = Path(__file__).with_name("ggml_attend.c"), os.environ.get("CC", "cc")
    libraries = ["-Wl,--start-group", *archives, "-Wl,--end-group", "-lstdc++", "-lm", "-lpthread"]
    subprocess.run([compiler, "-O2", f"-I{folder / 'include'}", source, "-o", program, *libraries], check=True)


def time_ggml(program: Path, case: Case, kind: str) -> dict[str, Any]:
    numbers = (KV_HEADS, case.group, case.tokens, case.head_dim, case.threads)
    done = subprocess.run([program, kind, *map(str, numbers)], check=True, capture_output=True, text=True)
    metrics: dict[str, Any] = json.loads(done.stdout)
    return {**metrics, "gb_per_s": round(metrics["bytes"] / metrics["us"] / 1e3, 2)}


def read_gb_per_s() -> float:
    """Returns the bandwidth of a plain read by torch's threads: the 10th percentile of 20 times, near the best."""
    x = torch.ones(2**27, dtype=torch.int8).view(torch.int64)
    return round(x.nbytes / microseconds([lambda: x.max()], "cpu", 20)["us_p10"] / 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the headline on one thread only")
    parser.add_argument("--groups", type=int, nargs="+", help="cases of these groups only")
    parser.add_argument("--ggml", type=Path, help="a folder with ggml's sources and a build of them")
    parser.add_argument("--out", default=RESULTS / "local", help="folder for cpu_attend.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ggml_attend" if args.ggml else None
        if program:
            compile_ggml(args.ggml, program)
        print(run(args.quick, args.groups, program).save(args.out))


def run(quick: bool, groups: list[int] | None, ggml: Path | None) -> Report:
    report, rng = Report("cpu_attend", "cpu"), np.random.default_rng(0)
    torch.manual_seed(0)
    baselines: dict[tuple[Any, ...], float] = {}
    reads: dict[int, float] = {}
    for case in cases(quick, sorted({1, _core.num_threads()})):
        if groups and case.group not in groups:
            continue
        torch.set_num_threads(case.threads)
        params = {**asdict(case), "kv_heads": KV_HEADS, "isa": _core.isa()}
        if case.threads not in reads:
            reads[case.threads] = read_gb_per_s()
            report.add("plain read", {"threads": case.threads}, {"gb_per_s": reads[case.threads]})
        slow = case.tokens * case.group > 2**18
        for formulation in FORMULATIONS[: 1 if slow or case.group == 1 else 3]:
            key = (formulation, case.tokens, case.group, case.head_dim, case.threads)
            if key not in baselines:
                metrics = time_torch(case, formulation)
                baselines[key] = metrics["us"]
                report.add(
                    "torch " + formulation, {k: v for k, v in params.items() if k not in ("bits", "isa")}, metrics
                )
        for kind in GGML_TYPES:
            key = (kind, case.tokens, case.group, case.head_dim, case.threads)
            if ggml and key not in baselines:
                metrics = time_ggml(ggml, case, kind)
                baselines[key] = metrics["us"]
                report.add("ggml " + kind, {k: v for k, v in params.items() if k not in ("bits", "isa")}, metrics)
        metrics = time_ours(case, rng)
        shape = (case.tokens, case.group, case.head_dim, case.threads)
        keys = {f: (f, *shape) for f in (*FORMULATIONS, *GGML_TYPES)}
        ratios = {f"x_{f}": round(baselines[k] / metrics["us"], 2) for f, k in keys.items() if k in baselines}
        metrics |= {"read_share": round(metrics["gb_per_s"] / reads[case.threads], 3), **ratios}
        report.add("attend", params, metrics)
        print(*(f"{k}={v}" for k, v in {**asdict(case), **metrics}.items()), flush=True)
    return report


if __name__ == "__main__":
    main()
