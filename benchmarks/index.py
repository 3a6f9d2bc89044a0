"""`turboquant.Index` beside other flat indexes: recall, bytes and time, in interleaved rounds of one process.

    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python benchmarks/index.py --minilm minilm.npy --out benchmarks/results/local

minilm.npy as in benchmarks/index_recall.py. Peers, skipped with a word where they are not installed: faiss-cpu 1.15.1,
turbovec 1.1.2. Times are of the process's CPU in milliseconds a query, the median of interleaved rounds with one
thread each: where others use the machine too they vary less than the wall clock. Ratios hold within one run only.
`single`: one query a call; `batch`: 256. Bytes of a vector: what the saved index grows by. File: index.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from index_recall import K, build, recall, true_neighbours
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant

Search = Callable[[NDArray[np.float32]], NDArray[np.int64]]
Built = tuple[Search, float]  # and bytes a vector


def ours(x: NDArray[np.float32], bits: int, axes: bool | None) -> Built:
    index = build(x, bits, axes)
    return lambda q: index.search(q, K, threads=1)[1], (index.nbytes - index.fixed_nbytes) / len(x)


def faiss_index(x: NDArray[np.float32], factory: str) -> Built:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.index_factory(x.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x[: len(x) // 2])
    half = len(faiss.serialize_index(index))
    index.add(x[len(x) // 2 :])
    grown = (len(faiss.serialize_index(index)) - half) / (len(x) - len(x) // 2)
    return lambda q: index.search(q, K)[1], grown


def turbovec_index(x: NDArray[np.float32], bits: int) -> Built:
    from turbovec import TurboQuantIndex

    index = TurboQuantIndex(dim=x.shape[1], bit_width=bits)
    index.add(x[: len(x) // 2])
    half = len(index.to_bytes())
    index.add(x[len(x) // 2 :])
    grown = (len(index.to_bytes()) - half) / (len(x) - len(x) // 2)
    return lambda q: np.asarray(index.search(q, K)[1]).astype(np.int64), grown


def makers(x: NDArray[np.float32], bits: list[int]) -> Iterator[tuple[str, Callable[[], Built]]]:
    for b in bits:
        for name, axes in (("untrained", None), ("mean", False), ("axes", True)):
            yield f"turboquant {turboquant.__version__}, {b} bits, {name}", lambda b=b, axes=axes: ours(x, b, axes)
        if b in (2, 4):
            yield f"turbovec 1.1.2, {b} bits", lambda b=b: turbovec_index(x, b)
    for factory in ("Flat", f"PQ{x.shape[1] // 2}x4fs", "RaBitQfs4"):
        yield f"FAISS 1.15.1, {factory}", lambda factory=factory: faiss_index(x, factory)


def cpu_ms(search: Search, parts: list[NDArray[np.float32]]) -> float:
    start = time.process_time()
    for part in parts:
        search(part)
    return (time.process_time() - start) * 1e3 / sum(map(len, parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    if os.environ.get("RAYON_NUM_THREADS") != "1" or os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("OMP_NUM_THREADS and RAYON_NUM_THREADS must be 1, so that every index has one thread")
    data = np.ascontiguousarray(np.load(args.minilm), np.float32)
    queries, x = data[:1000], np.ascontiguousarray(data[1000:])
    truth = true_neighbours(queries, x)
    searches: dict[str, Search] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, make in makers(x, args.bits):
        start = time.process_time()
        try:
            searches[name], size = make()
        except ImportError as error:
            print(f"{name}: skipped, {error}")
            continue
        built = time.process_time() - start
        share = recall(searches[name](queries), truth)
        figures[name] = {"bytes": round(size, 2), "recall": round(share, 4), "build_cpu_s": round(built, 2)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
    for _ in range(args.rounds):
        for name, search in searches.items():
            batch = cpu_ms(search, [queries[:256]])
            times[name].append((cpu_ms(search, [queries[i : i + 1] for i in range(64)]), batch))
    report = Report("index", "cpu")
    for name, rows in times.items():
        single, batch = np.median(np.asarray(rows), axis=0)
        figures[name] |= {"single_cpu_ms": round(float(single), 4), "batch_cpu_ms": round(float(batch), 4)}
        report.add("index", {"data": "minilm", "index": name, "k": K, "rounds": args.rounds}, figures[name])
        print(f"{name:36} " + "  ".join(f"{key} {value}" for key, value in figures[name].items()))
    print(report.save(args.out))


if __name__ == "__main__":
    main()
