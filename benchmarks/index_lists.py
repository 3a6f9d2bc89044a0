"""Compares an index with lists with the flat one and FAISS's IVF: recall, rows read and time.

    OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python benchmarks/index_lists.py --out benchmarks/results/local
    ... --data clustered lsa build/real-models/gemma3 --lists 1024 512 128

clustered: a million vectors of 384 numbers, made from a seed. 4,000 centres have normal numbers, whose deviation falls
as j^-1/2, and log-normal sizes. A vector is a centre plus 0.7 times such numbers, scaled to unit length. lsa: sentences
of shared/data/sentences.txt.xz, TF-IDF and the 384 largest singular vectors, of unit length. A folder: embeddings of a
model (benchmarks/index_recall.py). A .npy file: its rows. The first 1,000 are queries; inner product, the 10 best.

`flat` is the flat index trained with its mean, which has as many bytes a row as one with lists, but for the ids that
the latter stores. `chosen` is the flat index as `train` chooses it. `recall_all` reads all lists. `probe` is the
smallest number of lists, in steps of an eighth, with 0.95 of the recall of `flat`; `rows` is the share of rows that
they hold. Times are CPU time of the process for `probe` lists, over that of another index in the same rounds, 256
queries a call (batch) or one (single). `rows_held` is the share of rows in as many nearest lists as hold 0.96 of the
true neighbours. FAISS: "RR,IVF{lists},RaBitQfs{bits}" with as many probes, skipped with a message where faiss-cpu is
not installed. File: index_lists.json.
"""

from __future__ import annotations

import argparse
import lzma
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from index import cpu_ms, one_thread, one_thread_of_faiss
from index_recall import F32, SHARED, K, add_plot, build, embeddings, picture, recall, true_neighbours
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant
from turboquant.index.lists import Sorted
from turboquant.plot import check_picture

QUERIES = 1000
SHARE = 0.95
HELD = 0.96


def clustered(n: int = 1_000_000, dim: int = 384, clusters: int = 4000, seed: int = 0) -> F32:
    rng = np.random.default_rng(seed)
    deviation = (1 + np.arange(dim, dtype=np.float32)) ** -0.5
    centres = rng.standard_normal((clusters, dim), np.float32) * deviation
    sizes = rng.lognormal(0, 1, clusters)
    which = rng.choice(clusters, n + QUERIES, p=sizes / sizes.sum())
    x = centres[which]
    for at in range(0, len(x), 65_536):
        part = x[at : at + 65_536]
        part += 0.7 * deviation * rng.standard_normal(part.shape, np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return x


def lsa(dim: int = 384, seed: int = 0) -> F32:
    """Returns sentences as TF-IDF, by the largest singular vectors (randomised, two power iterations)."""
    from scipy.sparse import csr_matrix, diags  # type: ignore[import-untyped]

    with lzma.open(SHARED / "data" / "sentences.txt.xz", "rt", encoding="utf-8") as file:
        lines = [Counter(re.findall(r"[a-z]+", line.lower())) for line in file]
    there = Counter(word for line in lines for word in line)
    number = {word: i for i, word in enumerate(w for w, n in there.items() if n > 1)}
    found = [(i, number[w], n) for i, line in enumerate(lines) for w, n in line.items() if w in number]
    row, column, count = np.array(found).T
    words = csr_matrix((1 + np.log(count), (row, column)), (len(lines), len(number)))
    weights = np.log(len(lines) / np.array([there[word] for word in number]))
    words = (words @ diags(weights)).astype(np.float32)
    rng = np.random.default_rng(seed)
    basis = words @ rng.standard_normal((len(number), dim + 32)).astype(np.float32)
    for _ in range(2):
        basis = words @ (words.T @ np.linalg.qr(basis)[0])
    basis = np.linalg.qr(basis)[0]
    left, values, _ = np.linalg.svd((words.T @ basis).T, full_matrices=False)
    x = ((basis @ left) * values)[:, :dim].astype(np.float32)
    length = np.linalg.norm(x, axis=1)
    x = np.unique(x[length > 0] / length[length > 0, None], axis=0)
    return x[rng.permutation(len(x))]


def vectors(name: str) -> F32:
    """Returns the vectors that --data names."""
    if name.endswith(".npy"):
        return np.ascontiguousarray(np.load(name), np.float32)
    return clustered() if name == "clustered" else lsa() if name == "lsa" else embeddings(Path(name))


def with_lists(x: F32, bits: int, lists: int) -> turboquant.Index:
    index = turboquant.Index(x.shape[1], bits, lists=lists)
    index.train(x)
    index.add(x)
    index.compact()
    return index


def rows_read(index: turboquant.Index, queries: F32, truth: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
    """Returns the mean share of rows in the n + 1 nearest lists, [lists], and the share in as many lists as hold HELD
    of the true neighbours."""
    now = index._contents
    segment = now.segments[0]
    assert now.transform.lists is not None and isinstance(segment, Sorted)
    sizes = np.diff(segment.starts)
    values = np.where(sizes > 0, queries @ now.transform.lists.directions.T, -np.inf)
    order = np.argsort(-values, axis=1)
    shares: NDArray[np.float64] = np.cumsum(sizes[order], axis=1).mean(axis=0) / sizes.sum()
    of = segment.lists_of(now.find(truth.ravel())).reshape(truth.shape)
    places = np.sort(np.take_along_axis(np.argsort(order, axis=1), of, axis=1), axis=None)
    return shares, float(shares[places[int(HELD * places.size)]])


def faiss_lists(x: F32, bits: int, lists: int) -> Any:
    faiss = one_thread_of_faiss()
    index = faiss.index_factory(x.shape[1], f"RR,IVF{lists},RaBitQfs{bits}", faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x)
    return faiss, index


def timed(searches: dict[str, Callable[[F32], Any]], queries: F32, rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the median (batch, single) in milliseconds a query."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in searches}
    for _ in range(rounds):
        for name, search in searches.items():
            batch = cpu_ms(search, [queries[:256]])
            times[name].append((batch, cpu_ms(search, [queries[i : i + 1] for i in range(64)])))
    return {name: tuple(np.median(rows, axis=0).tolist()) for name, rows in times.items()}


def measure(report: Report, name: str, data: F32, bits: int, lists: int, rounds: int, peers: bool) -> None:
    queries, x = np.ascontiguousarray(data[:QUERIES]), np.ascontiguousarray(data[QUERIES:])
    truth = true_neighbours(queries, x)
    flat, chosen = build(x, bits, False), build(x, bits, True)
    began = time.process_time()
    index = with_lists(x, bits, lists)
    built = time.process_time() - began

    def found(n: int, **more: Any) -> float:
        return recall(index.search(queries, K, probe=n, **more)[1], truth)

    flat_recall = recall(flat.search(queries, K)[1], truth)
    figures: dict[str, Any] = {"rows_all": len(x), "flat_recall": flat_recall, "recall_all": found(lists)}
    assert chosen.training is not None
    figures |= {"chosen": chosen.training["chosen"], "chosen_recall": recall(chosen.search(queries, K)[1], truth)}
    figures |= {"flat_bytes": (flat.nbytes - flat.fixed_nbytes) / len(x), "build_cpu_s": built}
    figures["bytes"] = (index.nbytes - index.fixed_nbytes) / len(x)
    (shares, figures["rows_held"]), probe = rows_read(index, queries, truth), 1
    while probe < lists and found(probe) < SHARE * flat_recall:
        probe += max(1, probe // 8)
    figures |= {"probe": probe, "rows": float(shares[probe - 1]), "recall": found(probe)}
    searches: dict[str, Callable[[F32], Any]] = {
        "flat": lambda q: flat.search(q, K, threads=1),
        "lists": lambda q: index.search(q, K, threads=1, probe=probe),
        "all": lambda q: index.search(q, K, threads=1),
    }
    peer = None
    if peers:
        try:
            began = time.process_time()
            faiss, peer = faiss_lists(x, bits, lists)
            figures["faiss_build_cpu_s"] = time.process_time() - began
            faiss.extract_index_ivf(peer).nprobe = probe
            figures["faiss_recall"] = recall(peer.search(queries, K)[1], truth)
            figures["faiss_bytes"] = len(faiss.serialize_index(peer)) / len(x)
            searches["faiss"] = lambda q: peer.search(q, K)
        except ImportError as error:
            print(f"FAISS: skipped, {error}")
    times = timed(searches, queries, rounds)
    for search, (batch, single) in times.items():
        figures |= {f"{search}_batch_cpu_ms": batch, f"{search}_single_cpu_ms": single}
    for other in times:
        if other != "lists":
            for i, kind in enumerate(("batch", "single")):
                figures[f"{kind}_over_{other}"] = times["lists"][i] / times[other][i]
    figures = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    report.add("index_lists", {"data": name, "bits": bits, "lists": lists, "k": K, "rounds": rounds}, figures)
    print(name, bits, lists, figures, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["clustered"])
    parser.add_argument("--bits", type=int, nargs="+", default=[2])
    parser.add_argument("--lists", type=int, nargs="+", default=[1024], help="one number, or one for each of --data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", default=RESULTS / "local")
    add_plot(parser)
    args = parser.parse_args()
    if args.plot:
        check_picture(args.plot, "--plot")
    one_thread(parser)
    lists = args.lists * len(args.data) if len(args.lists) == 1 else args.lists
    if len(lists) != len(args.data):
        parser.error(f"--lists must be one number, or {len(args.data)}, got {len(args.lists)}")
    report = Report("index_lists", "cpu")
    for name, n in zip(args.data, lists, strict=True):
        data = vectors(name)
        for bits in args.bits:
            measure(report, Path(name).stem, data, bits, n, args.rounds, not args.no_peers)
            report.save(args.out)  # what there is so far, because a run is long
        del data
    print(report.save(args.out))
    if args.plot:
        picture(report, args.plot)


if __name__ == "__main__":
    main()
