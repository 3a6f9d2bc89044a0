"""Measures recall against time of `turboquant.Index` for widths of a search's bound, beside turbovec and FAISS.

    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python benchmarks/index_dial.py --data lsa --out benchmarks/results/local

Data as in benchmarks/index_lists.py; inner product, the 10 best. `sigmas`: the width, an option of search; null: the
index's own. Times are CPU time of the process in milliseconds a query, medians of interleaved rounds with one thread:
256 queries a call (batch) or one (single). `over INDEX`: the times of the smallest width with at least the recall of
that index, over its times, for batch and single; null if there is no such width. `axes` is left out where `train` keeps
the mean alone. File: index_dial.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from index import Built, faiss_index, one_thread, turbovec_index
from index_lists import QUERIES, timed, vectors
from index_recall import F32, TRAINING, K, build, recall, true_neighbours
from timing import RESULTS, Report

import turboquant

WIDTHS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, None)


def points(index: turboquant.Index) -> dict[float | None, Callable[[F32], Any]]:
    """Returns a search for each width below the index's own, and for its own (None)."""
    return {s: lambda q, s=s: index.search(q, K, threads=1, sigmas=s)[1] for s in WIDTHS if (s or 0) < index.sigmas}


def peers(x: F32) -> dict[str, tuple[float, Callable[[F32], Any]]]:
    """Returns (bytes of a vector, search) by name."""
    makers: dict[str, tuple[str, Callable[[F32], Built]]] = {}
    for bits, calibrated in ((2, False), (4, False), (4, True)):
        kind = f"{bits} bits" + ", calibrated" * calibrated
        makers[kind] = "turbovec", lambda rows, b=bits, c=calibrated: turbovec_index(rows, b, c)
    for factory in ("RR,RaBitQfs2", "RR,RaBitQfs4"):  # RR rotates: RaBitQfs does not do that itself
        makers[factory] = "FAISS", lambda rows, factory=factory: faiss_index(rows, factory)
    found = {}
    for kind, (name, make) in makers.items():
        try:
            (search, size), (_, less) = make(x), make(x[: len(x) // 8])
        except ImportError as error:
            print(f"{name}: skipped, {error}")
            continue
        grown = (size() - less()) / (len(x) - len(x) // 8)
        found[f"{name} {version({'FAISS': 'faiss-cpu'}.get(name, name))}, {kind}"] = grown, search
    return found


def over(own: list[dict[str, Any]], peer: dict[str, Any]) -> list[float] | None:
    """Returns the (batch, single) times of an index's narrowest point with a peer's recall, over the peer's."""
    enough = [point for point in own if point["recall"] >= peer["recall"]]
    return (enough and [round(enough[0][kind] / peer[kind], 3) for kind in ("batch_cpu_ms", "single_cpu_ms")]) or None


def measure(report: Report, name: str, data: F32, bits: list[int], rounds: int) -> None:
    queries, x = np.ascontiguousarray(data[:QUERIES]), np.ascontiguousarray(data[QUERIES:])
    truth = true_neighbours(queries, x)
    built = {(b, kind): build(x, b, axes) for b in bits for kind, axes in TRAINING.items()}
    indexes = {
        f"turboquant, {b} bits, {kind}": index
        for (b, kind), index in built.items()
        if kind != "axes" or (index.training or {}).get("chosen") == "axes"
    }
    others = peers(x)
    searches: dict[Any, Callable[[F32], Any]] = {label: search for label, (_, search) in others.items()}
    size = {label: grown for label, (grown, _) in others.items()}
    for label, index in indexes.items():
        size[label] = (index.nbytes - index.fixed_nbytes) / len(x)
        searches |= {(label, s): search for s, search in points(index).items()}
    times = timed(searches, queries, rounds)
    found: dict[str, list[dict[str, Any]]] = {}
    for key, search in searches.items():
        label, s = key if isinstance(key, tuple) else (key, None)
        batch, single = times[key]
        figures = {"bytes": round(size[label], 2), "recall": round(recall(search(queries), truth), 4)}
        figures |= {"batch_cpu_ms": round(batch, 4), "single_cpu_ms": round(single, 4)}
        found.setdefault(label, []).append({"sigmas": s, **figures})
    for label, own in found.items():
        for point in own:
            params = {"data": name, "index": label, "k": K, "rounds": rounds, "sigmas": point.pop("sigmas")}
            if label in indexes and point is own[-1]:
                point |= {"sigmas": indexes[label].sigmas}
                point |= {f"over {peer}": over(own, found[peer][0]) for peer in others}
            report.add("index_dial", params, point)
            print(name, label, params["sigmas"], point, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["lsa"])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    one_thread(parser)
    report = Report("index_dial", "cpu")
    for name in args.data:
        measure(report, Path(name).stem, vectors(name), args.bits, args.rounds)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
