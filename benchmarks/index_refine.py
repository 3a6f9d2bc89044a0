"""Measures re-ranking in `turboquant.Index`: recall and time with `refine="int8"` and with the caller's vectors.

    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python benchmarks/index_refine.py --out benchmarks/results/local
    ... --data lsa build/real-models/gemma3 --bits 2 4 --factors 2 3 4

Data as in benchmarks/index_lists.py, of which the first 1,000 are queries; inner product, the 10 best; indexes are
trained with their mean. --bits: one number, or one for each of --data. `without`: recall of the codes alone. Times are
CPU time of the process for 256 queries a call on one thread, medians of interleaved rounds, over the time of a search
for factor x 10 by the codes alone. File: index_refine.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from index import cpu_ms, one_thread
from index_lists import QUERIES, vectors
from index_recall import F32, K, recall, true_neighbours
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant

Search = Callable[[F32], NDArray[np.int64]]


def trained(x: F32, bits: int, refine: str | None) -> turboquant.Index:
    index = turboquant.Index(x.shape[1], bits, refine=refine)
    index.train(x, axes=False)
    index.add(x)
    return index


def measure(report: Report, name: str, data: F32, bits: int, factors: list[int], rounds: int) -> None:
    queries, x = np.ascontiguousarray(data[:QUERIES]), np.ascontiguousarray(data[QUERIES:])
    truth = true_neighbours(queries, x)
    plain, fine = trained(x, bits, None), trained(x, bits, "int8")
    without = recall(plain.search(queries, K)[1], truth)
    for factor in factors:
        searches: dict[str, Search] = {
            "codes": lambda q, f=factor: plain.search(q, f * K, threads=1)[1],
            "int8": lambda q, f=factor: fine.search(q, K, factor=f, threads=1)[1],
            "exact": lambda q, f=factor: plain.search(q, K, refine=x, factor=f, threads=1)[1],
        }
        times: dict[str, list[float]] = {kind: [] for kind in searches}
        for _ in range(rounds):
            for kind, search in searches.items():
                times[kind].append(cpu_ms(search, [queries[:256]]))
        figures = {"without": round(without, 4)}
        figures["bytes"] = round((fine.nbytes - fine.fixed_nbytes) / len(x), 1)
        for kind in ("int8", "exact"):
            figures[kind] = round(recall(searches[kind](queries), truth), 4)
            figures[f"{kind}_time"] = round(float(np.median(times[kind]) / np.median(times["codes"])), 3)
        report.add("index_refine", {"data": name, "bits": bits, "factor": factor, "k": K, "rounds": rounds}, figures)
        print(name, bits, factor, figures, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["lsa"])
    parser.add_argument("--bits", type=int, nargs="+", default=[2])
    parser.add_argument("--factors", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    one_thread(parser)
    bits = args.bits * len(args.data) if len(args.bits) == 1 else args.bits
    if len(bits) != len(args.data):
        parser.error(f"--bits must be one number, or {len(args.data)}, got {len(args.bits)}")
    report = Report("index_refine", "cpu")
    for name, b in zip(args.data, bits, strict=True):
        measure(report, Path(name).stem, vectors(name), b, args.factors, args.rounds)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
