"""Measures `turboquant.Index` on vectors made from a seed: recall and time, filters, and building.

    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python benchmarks/index_synthetic.py --out benchmarks/results/local

random: unit vectors of independent normal numbers, whose neighbours are hard to tell apart, beside turbovec: recall,
also of a full scan of the same codes, without the bound on leading bits, and milliseconds a query in batches of 64 and
one by one. filter: the time of a search among every hundredth vector over that of one among all. build: training and
adding, against FAISS's PQ768x8np. build-slow: against its PQ768x8, which also orders codes for Hamming distances and
takes a quarter of an hour. Times are CPU time of the process with one thread, medians of interleaved rounds except for
building. 4 bits, untrained. File: index_synthetic.json.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version

import numpy as np
from index import cpu_ms, one_thread, one_thread_of_faiss, turbovec_index
from index_recall import F32, K, build, recall, true_neighbours
from timing import RESULTS, Report

import turboquant
from turboquant import _core

SHAPES = {"1M x 128": (1_000_000, 128), "100k x 1536": (100_000, 1536)}
QUERIES = 200
SECTIONS = ["filter", "random", "build", "build-slow"]


def unit_vectors(n: int, dim: int) -> tuple[F32, F32]:
    """Returns (queries, vectors)."""
    x = np.random.default_rng(0).standard_normal((n + QUERIES, dim), np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:QUERIES], x[QUERIES:]


def full_scan(index: turboquant.Index, queries: F32) -> np.ndarray:
    """Returns the best rows by the scores of all rows."""
    now = index._contents
    space, found = index._space(now), []
    for at in range(0, len(queries), 10):
        scores = _core.index_scores_of(space, queries[at : at + 10], now.rows(None), None)
        found.append(np.argpartition(-scores, K - 1, axis=1)[:, :K])
    return np.concatenate(found)


def random(report: Report, shape: str, rounds: int) -> None:
    queries, x = unit_vectors(*SHAPES[shape])
    index = build(x, 4, None)
    searches = {f"turboquant {turboquant.__version__}": lambda q: index.search(q, K, threads=1)[1]}
    try:
        searches[f"turbovec {version('turbovec')}"] = turbovec_index(x, 4)[0]
    except ImportError as error:
        print(f"turbovec: skipped, {error}")
    truth = true_neighbours(queries, x)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
    for _ in range(rounds):
        for name, search in searches.items():
            search(queries[:4])
            batch = cpu_ms(search, [queries[:64]])
            times[name].append((batch, cpu_ms(search, [queries[i : i + 1] for i in range(16)])))
    for name, search in searches.items():
        batch, single = np.median(times[name], axis=0)
        figures = {"recall": round(recall(search(queries), truth), 4)}
        if name.startswith("turboquant"):
            figures["recall_full_scan"] = round(recall(full_scan(index, queries), truth), 4)
        figures |= {"single_cpu_ms": round(float(single), 4), "batch_cpu_ms": round(float(batch), 4)}
        report.add("random", {"data": shape, "index": name, "bits": 4, "k": K, "rounds": rounds}, figures)
        print(shape, name, figures, flush=True)


def filtered(report: Report, rounds: int) -> None:
    queries, x = unit_vectors(134_168, 384)
    index = build(x, 4, None)
    kept = np.zeros(len(x), bool)
    kept[::100] = True
    one_by_one = [queries[i : i + 1] for i in range(64)]

    def timed(filter: np.ndarray | None) -> float:
        return cpu_ms(lambda q: index.search(q, K, filter, threads=1)[1], one_by_one)

    for kind, filter in (("ids", np.flatnonzero(kept)), ("mask", kept)):
        rows = []
        for _ in range(rounds):
            every, some = timed(None), timed(filter)
            rows.append((every, some, some / every))
        every, some, ratio = (round(float(v), 4) for v in np.median(rows, axis=0))
        figures = {"every_cpu_ms": every, "filtered_cpu_ms": some, "ratio": ratio}
        report.add("filter", {"data": "134,168 x 384", "filter": kind, "kept": 0.01, "bits": 4, "k": K}, figures)
        print("filter", kind, figures, flush=True)


def building(report: Report, factory: str) -> None:
    _, x = unit_vectors(*SHAPES["100k x 1536"])
    start = time.process_time()
    build(x, 4, None)
    ours = time.process_time() - start
    try:
        faiss = one_thread_of_faiss()
    except ImportError as error:
        print(f"FAISS: skipped, {error}")
        return
    index = faiss.index_factory(x.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    start = time.process_time()
    index.train(x)
    trained = time.process_time() - start
    index.add(x)
    whole = time.process_time() - start
    peer = f"FAISS {version('faiss-cpu')}, {factory}"
    figures = {"turboquant_cpu_s": round(ours, 3), "train_cpu_s": round(trained, 1), "cpu_s": round(whole, 1)}
    figures["ratio"] = round(whole / ours, 1)
    report.add("build", {"data": "100k x 1536", "bits": 4, "peer": peer}, figures)
    print("build", peer, figures, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    one_thread(parser)
    report = Report("index_synthetic", "cpu")
    if "filter" in args.sections:
        filtered(report, args.rounds)
    for shape in SHAPES if "random" in args.sections else ():
        random(report, shape, args.rounds)
    if "build" in args.sections:
        building(report, "PQ768x8np")
    if "build-slow" in args.sections:
        building(report, "PQ768x8")
    print(report.save(args.out))


if __name__ == "__main__":
    main()
