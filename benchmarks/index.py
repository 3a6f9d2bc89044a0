"""`turboquant.Index` beside other flat indexes: recall, bytes and time, in interleaved rounds of one process.

    python benchmarks/index.py --data rows.npy --queries 1000 --bits 2 3 4 --rounds 5 --out index.json

rows.npy: float32 or float16 [n, dim]; the first `queries` rows are the queries. Peers that are not installed are named,
and skipped. Times are medians, one thread, milliseconds a query; ratios hold within one run only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import turboquant
from turboquant import _core

K = 10


def ours(x: np.ndarray, bits: int, train: bool | None) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    index = turboquant.Index(x.shape[1], bits)
    if train is not None:
        index.train(x, axes=train)
    index.add(x)
    per_vector = sum(segment.nbytes for segment in index._segments) / len(x)
    return lambda q: index.search(q, K, threads=1)[1], per_vector


def faiss_index(x: np.ndarray, factory: str) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.index_factory(x.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x)
    return lambda q: index.search(q, K)[1], index.sa_code_size() if hasattr(index, "sa_code_size") else float("nan")


def turbovec_index(x: np.ndarray, bits: int) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    from turbovec import TurboQuantIndex

    index = TurboQuantIndex(dim=x.shape[1], bit_width=bits)
    index.add(x)
    return lambda q: np.asarray(index.search(q, K)[1]).astype(np.int64), x.shape[1] * bits / 8 + 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = np.ascontiguousarray(np.load(args.data), np.float32)
    q, x = data[: args.queries], np.ascontiguousarray(data[args.queries :])
    truth = np.concatenate([np.argpartition(-(part @ x.T), K - 1, axis=1)[:, :K] for part in np.array_split(q, 20)])

    makers: dict[str, Callable[[], Any]] = {}
    for bits in args.bits:
        for name, train in (("", None), (", mean", False), (", axes", True)):
            makers[f"Index {bits} bits{name}"] = lambda bits=bits, train=train: ours(x, bits, train)
        makers[f"turbovec {bits} bits"] = lambda bits=bits: turbovec_index(x, bits)
    for factory in ("Flat", f"PQ{x.shape[1] // 2}x4fs", "RaBitQfs4"):
        makers[f"FAISS {factory}"] = lambda factory=factory: faiss_index(x, factory)
    searches, result = {}, {}
    for name, make in makers.items():
        start = time.perf_counter()
        try:
            searches[name], size = make()
        except ImportError as error:
            print(f"{name}: skipped, {error}")
            continue
        except Exception as error:  # a peer's own exceptions; one that fails must not end the run
            print(f"{name}: failed, {error!r}")
            continue
        result[name] = {"bytes": size, "build_s": time.perf_counter() - start, "single": [], "batch": []}
        found = searches[name](q)
        result[name]["recall"] = float(
            np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, truth, strict=True)])
        )
    for _ in range(args.rounds):
        for name, search in searches.items():
            start = time.perf_counter()
            search(q[:256])
            middle = time.perf_counter()
            for i in range(32):
                search(q[i : i + 1])
            result[name]["batch"].append((middle - start) * 1e3 / len(q[:256]))
            result[name]["single"].append((time.perf_counter() - middle) * 1e3 / 32)
    print(f"{len(x)} x {x.shape[1]}, {_core.isa()}")
    for name, row in result.items():
        row["single_ms"], row["batch_ms"] = float(np.median(row.pop("single"))), float(np.median(row.pop("batch")))
        print(
            f"{name:24} {row['bytes']:7.1f} B  10@10 {row['recall']:.3f}  single {row['single_ms']:.3f} ms  "
            f"batch {row['batch_ms']:.3f} ms  build {row['build_s']:.2f} s"
        )
    if args.out:
        args.out.write_text(
            json.dumps({"n": len(x), "dim": x.shape[1], "isa": _core.isa(), "methods": result}, indent=1)
        )


if __name__ == "__main__":
    main()
