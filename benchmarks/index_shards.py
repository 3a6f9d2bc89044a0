"""Times `search_shards` in two processes and in two threads, beside one index of all rows with two threads.

    python benchmarks/index_shards.py --out benchmarks/results/local

200,000 random vectors of 384 numbers around 1,000 centres, 4 bits, in 4 files. Times are wall time, because CPU time
is counted by process: milliseconds of a call with 256 queries. The least of interleaved rounds varies least where
others use the machine too. Files are mapped before the first round. File: index_shards.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from index_recall import F32, K
from timing import RESULTS, Report

import turboquant

ROWS, SHARDS, DIM, QUERIES = 200_000, 4, 384, 256


def vectors(seed: int, n: int) -> F32:
    centres = np.random.default_rng(0).standard_normal((1000, DIM), np.float32)
    rng = np.random.default_rng(seed)
    return centres[rng.integers(1000, size=n)] + 0.5 * rng.standard_normal((n, DIM), np.float32)


def filled(x: F32, ids: range) -> turboquant.Index:
    index = turboquant.Index(DIM, 4, "ip")  # untrained: all have the transform of the seed
    index.add(x[ids.start : ids.stop], ids=np.arange(ids.start, ids.stop))
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    x, queries = vectors(1, ROWS), vectors(2, QUERIES)
    whole = filled(x, range(ROWS))
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{i}.safetensors") for i in range(SHARDS)]
        for i, path in enumerate(paths):
            filled(x, range(i * ROWS // SHARDS, (i + 1) * ROWS // SHARDS)).save(path)
        with ProcessPoolExecutor(2, get_context("spawn")) as processes, ThreadPoolExecutor(2) as threads:

            def sharded(executor: Any, n: int) -> Any:
                return turboquant.search_shards(paths, queries, K, executor, threads=n)

            calls: dict[str, Callable[[], Any]] = {
                "2 processes": lambda: sharded(processes, 1),
                "2 threads": lambda: sharded(threads, 1),
                "one file after the other, 2 threads": lambda: sharded(None, 2),
                "one index, 2 threads": lambda: whole.search(queries, K, threads=2),
            }
            _, truth = calls["one index, 2 threads"]()
            found = {name: call()[1] for name, call in calls.items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(args.rounds):
                for name, call in calls.items():
                    began = time.perf_counter()
                    call()
                    times[name].append(1e3 * (time.perf_counter() - began))
    report = Report("index_shards", "cpu")
    for name, own in times.items():
        same = np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found[name], truth, strict=True)])
        metrics = {
            "ms_least": round(min(own), 2),
            "ms_median": round(float(np.median(own)), 2),
            "equal_ids": round(float(same), 4),
        }
        params = {"search": name, "data": f"{ROWS} x {DIM}", "shards": SHARDS, "bits": 4, "queries": QUERIES, "k": K,
                  "rounds": args.rounds}  # fmt: skip
        report.add("index_shards", params, metrics)
        print(f"{name:38}", metrics)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
