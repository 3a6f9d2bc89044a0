"""Compares `turboquant.Index` with other indexes: recall, bytes and time, in interleaved rounds of one process.

    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python benchmarks/index.py --minilm minilm.npy --out benchmarks/results/local

minilm.npy is described in benchmarks/index_recall.py. Peers, skipped with a message where they are not installed:
faiss-cpu, hnswlib, rabitqlib, scann, turbovec, usearch. Times are CPU time of the process in milliseconds a query, the
median of interleaved rounds with one thread each; where others use the machine too, CPU time varies less than wall
time. Ratios hold within one run only. `single`: one query a call; `batch`: 256, or 32 where a query takes more than
2 ms. `bytes`: what the saved index grows by for a vector. File: index.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from index_recall import F32, K, add_plot, build, picture, recall, true_neighbours
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant
from turboquant.plot import check_picture

Search = Callable[[F32], NDArray[np.int64]]
Built = tuple[Search, Callable[[], int]]  # search, size of the saved index


def ours(x: F32, bits: int, axes: bool | None) -> Built:
    index = build(x, bits, axes)
    return lambda q: index.search(q, K, threads=1)[1], lambda: index.nbytes


def one_thread_of_faiss() -> Any:
    """Returns the module, set to one thread. From 20 queries on it multiplies matrices, which takes a sixth of what
    1.15.1's own choice takes for exact search in batches."""
    import faiss

    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = 20
    return faiss


def faiss_index(x: F32, factory: str) -> Built:
    faiss = one_thread_of_faiss()
    index = faiss.index_factory(x.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x)
    return lambda q: index.search(q, K)[1], lambda: len(faiss.serialize_index(index))


def turbovec_index(x: F32, bits: int, calibrate: bool = False) -> Built:
    from turbovec import TurboQuantIndex

    index = TurboQuantIndex(dim=x.shape[1], bit_width=bits)
    if calibrate:
        index.calibrate(np.ascontiguousarray(x[:: -(-len(x) // 1024)]))
    index.add(x)
    return lambda q: np.asarray(index.search(q, K)[1]).astype(np.int64), lambda: len(index.to_bytes())


def rabitq_index(x: F32, bits: int) -> Built:
    """Builds one list, centred by the mean, so that all vectors are scanned."""
    from rabitqlib import IvfIndex

    index = IvfIndex(dim=x.shape[1], max_elements=len(x), num_clusters=1, nbits=bits, metric="ip")
    index.build(x, x.mean(axis=0, keepdims=True), np.zeros(len(x), np.uint32))

    def size() -> int:
        with tempfile.TemporaryDirectory() as folder:
            index.save(f"{folder}/index")
            return os.path.getsize(f"{folder}/index")

    return lambda q: index.search(q, K, 1)[0].astype(np.int64), size


def scann_index(x: F32, dimensions: int, reorder: int = 0) -> Built:
    """Builds asymmetric hashing over all vectors. The best `reorder` are scored again in bfloat16."""
    from scann.scann_ops.py import scann_ops_pybind

    builder = scann_ops_pybind.builder(x, K, "dot_product").score_ah(dimensions, anisotropic_quantization_threshold=0.2)
    index = (builder.reorder(reorder, quantize=2) if reorder else builder).build()

    def size() -> int:
        with tempfile.TemporaryDirectory() as folder:
            index.serialize(folder)
            return sum(file.stat().st_size for file in Path(folder).iterdir())

    return lambda q: index.search_batched(q)[0].astype(np.int64), size


def usearch_index(x: F32, dtype: str) -> Built:
    from usearch.index import Index

    index = Index(ndim=x.shape[1], metric="ip", dtype=dtype)
    index.add(np.arange(len(x)), x, threads=1)
    return (
        lambda q: np.asarray(index.search(q, K, threads=1).keys).reshape(len(q), K).astype(np.int64),
        lambda: index.serialized_length,
    )


def hnsw_index(x: F32, ef: int) -> Built:
    import hnswlib

    index = hnswlib.Index(space="ip", dim=x.shape[1])
    index.init_index(max_elements=len(x), ef_construction=200, M=16)
    index.set_num_threads(1)
    index.add_items(x)
    index.set_ef(ef)
    return lambda q: index.knn_query(q, K, num_threads=1)[0].astype(np.int64), lambda: index.index_file_size()


Make = Callable[[F32], Built]


def makers(dim: int, bits: list[int]) -> Iterator[tuple[str, str, str, Make]]:
    """Yields (name, the distribution whose version counts, description, function that builds it)."""
    for b in bits:
        for kind, axes in (("untrained", None), ("mean", False), ("axes", True)):
            yield "turboquant", "", f"{b} bits, {kind}", lambda x, b=b, axes=axes: ours(x, b, axes)
        if b in (2, 4):
            yield "turbovec", "turbovec", f"{b} bits", lambda x, b=b: turbovec_index(x, b)
            yield "turbovec", "turbovec", f"{b} bits, calibrated", lambda x, b=b: turbovec_index(x, b, True)
            yield "rabitqlib", "rabitqlib", f"{b} bits", lambda x, b=b: rabitq_index(x, b)
    pq = [f"PQ{dim // 2}x4fs", f"PQ{dim}x4fs", f"PQ{dim // 4}x8np"]
    for factory in ("Flat", *pq, "RaBitQfs4", "EDEN4", "SQtqmse4"):
        yield "FAISS", "faiss-cpu", factory, lambda x, factory=factory: faiss_index(x, factory)
    yield "ScaNN", "scann", "AH, 1 dimension a block", lambda x: scann_index(x, 1)
    yield "ScaNN", "scann", "AH, 2 dimensions, re-ranked in bf16", lambda x: scann_index(x, 2, 100)
    for dtype in ("f32", "i8"):
        yield "usearch", "usearch", f"HNSW, {dtype}", lambda x, dtype=dtype: usearch_index(x, dtype)
    yield "hnswlib", "hnswlib", "M 16, ef 64", lambda x: hnsw_index(x, 64)


def one_thread(parser: argparse.ArgumentParser) -> None:
    if os.environ.get("RAYON_NUM_THREADS") != "1" or os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("OMP_NUM_THREADS and RAYON_NUM_THREADS must be 1, so that every index has one thread")


def cpu_ms(search: Search, parts: list[F32]) -> float:
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
    add_plot(parser)
    args = parser.parse_args()
    if args.plot:
        check_picture(args.plot, "--plot")
    one_thread(parser)
    data = np.ascontiguousarray(np.load(args.minilm), np.float32)
    queries, x = data[:1000], np.ascontiguousarray(data[1000:])
    truth = true_neighbours(queries, x)
    searches: dict[str, Search] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, distribution, kind, make in makers(x.shape[1], args.bits):
        start = time.process_time()
        try:
            search, size = make(x)
            built = time.process_time() - start
            own = version(distribution) if distribution else turboquant.__version__
        except ImportError as error:
            print(f"{name}, {kind}: skipped, {error}")
            continue
        fixed = make(x[: len(x) // 8])[1]()
        grown = (size() - fixed) / (len(x) - len(x) // 8)
        share = recall(search(queries), truth)
        label = f"{name} {own}, {kind}"
        searches[label] = search
        figures[label] = {"bytes": round(grown, 2), "recall": round(share, 4), "build_cpu_s": round(built, 2)}
        print(label, figures[label], flush=True)
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in searches}
    slow = {label for label, search in searches.items() if cpu_ms(search, [queries[:8]]) > 2}
    for _ in range(args.rounds):
        for label, search in searches.items():
            n, m = (32, 8) if label in slow else (256, 64)
            batch = cpu_ms(search, [queries[:n]])
            times[label].append((cpu_ms(search, [queries[i : i + 1] for i in range(m)]), batch))
    report = Report("index", "cpu")
    for label, rows in times.items():
        single, batch = np.median(np.asarray(rows), axis=0)
        figures[label] |= {"single_cpu_ms": round(float(single), 4), "batch_cpu_ms": round(float(batch), 4)}
        report.add("index", {"data": "minilm", "index": label, "k": K, "rounds": args.rounds}, figures[label])
        print(f"{label:44} " + "  ".join(f"{key} {value}" for key, value in figures[label].items()))
    print(report.save(args.out))
    if args.plot:
        picture(report, args.plot)


if __name__ == "__main__":
    main()
