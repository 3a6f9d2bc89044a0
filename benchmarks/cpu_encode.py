"""Times quantising a long prompt and inner products with packed vectors on a CPU, one thread.

    python benchmarks/cpu_encode.py [--out benchmarks/results/<machine>]

append   keys and values of one layer in bfloat16 (8 KV heads of 128) into pages; against a copy of as many bytes
dot      one query against a million packed vectors of 128; against NumPy's float32 matrix times vector
"""

from __future__ import annotations

import argparse

import numpy as np
from timing import RESULTS, Report, microseconds

from turboquant import _core
from turboquant.plan import Plan

KV_HEADS, HEAD_DIM, TOKENS, VECTORS = 8, 128, 16384, 1_000_000


def time_append(report: Report, rng: np.random.Generator) -> None:
    shape, lengths = (1, KV_HEADS, TOKENS, HEAD_DIM), np.array([TOKENS], np.int32)
    x = rng.standard_normal((2, *shape), np.float32).view(np.uint32) >> 16
    k, v = np.ascontiguousarray(x.astype(np.uint16))
    target = np.empty_like(k)
    copy = 2 * microseconds([lambda: np.copyto(target, k), lambda: np.copyto(target, v)], "cpu", 20)["us"]
    table = np.arange(TOKENS // 128, dtype=np.int32)[None]
    for bits in range(1, 6):
        words = Plan(HEAD_DIM, bits, bits).words
        pages = _core.new_pages(words, TOKENS // 128, KV_HEADS)

        def append(words: tuple[int, ...] = words, pages: np.ndarray = pages) -> None:
            _core.append(words, k, v, lengths, pages, table, dtype="bfloat16", threads=1)

        times = microseconds([append], "cpu", 10)
        ns = 1e3 * times["us"] / (2 * KV_HEADS * TOKENS)
        metrics = {**times, "ns_per_vector": round(ns, 1), "share_of_copy": round(copy / times["us"], 3)}
        report.add("append", {"bits": bits, "tokens": TOKENS, "head_dim": HEAD_DIM, "isa": _core.isa()}, metrics)
        print("append", bits, metrics, flush=True)


def time_dot(report: Report, rng: np.random.Generator) -> None:
    x = rng.standard_normal((VECTORS, HEAD_DIM), np.float32)
    query = rng.standard_normal((1, HEAD_DIM)).astype(np.float32)
    gemv = microseconds([lambda: x @ query[0]], "cpu", 10)["us"]
    n_pages = -(-VECTORS // 128)
    table, lengths = np.arange(n_pages, dtype=np.int32)[None], np.array([VECTORS], np.int32)
    for bits in range(1, 6):
        words = Plan(HEAD_DIM, bits).words
        pages = _core.new_pages(words, n_pages, 1)
        _core.append(words, x[None, None], None, lengths, pages, table)
        decoded = _core.dequantize(words, pages, table, np.array([1000], np.int32), 1000)[0][0, 0]
        want, got = decoded @ query[0], _core.dot(words, query, pages, VECTORS)[0, :1000]
        if not abs(got - want).max() < 1e-4 * abs(want).max():
            raise SystemExit(f"dot at {bits} bits is off by {abs(got - want).max():.1e}")
        times = microseconds([lambda w=words, p=pages: _core.dot(w, query, p, VECTORS, threads=1)], "cpu", 10)
        metrics = {
            **times,
            "gb_per_s": round(pages.nbytes / times["us"] / 1e3, 2),
            "x_numpy": round(gemv / times["us"], 2),
        }
        report.add("dot", {"bits": bits, "vectors": VECTORS, "head_dim": HEAD_DIM, "isa": _core.isa()}, metrics)
        print("dot", bits, metrics, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS / "local", help="folder for cpu_encode.json")
    args = parser.parse_args()
    report, rng = Report("cpu_encode", "cpu"), np.random.default_rng(0)
    time_append(report, rng)
    time_dot(report, rng)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
