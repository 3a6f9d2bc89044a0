"""Recall and bytes of `turboquant.Index` on real vectors, which do not depend on the machine's speed.

    python benchmarks/index_recall.py --minilm minilm.npy --out benchmarks/results/zen4-2core

minilm.npy: float32 [n, 384], the lines of shared/data/sentences.txt.xz embedded by all-MiniLM-L6-v2; the first 1,000
rows are the queries. SIFT is shared/data/sift5k.tsv, normalised; its first 200 rows are the queries. Training sees the
stored vectors. `recall`: the share of the true ten by inner product that are among the ten found. `bytes`: of a vector,
all that grows with their number. File: index_recall.json.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant

SHARED = Path(os.environ.get("TURBOQUANT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
K = 10
TRAINING: dict[str, bool | None] = {"untrained": None, "mean": False, "axes": True}
F32 = NDArray[np.float32]


def true_neighbours(queries: F32, x: F32) -> NDArray[np.int64]:
    parts = np.array_split(queries, -(-len(queries) // 64))
    return np.concatenate([np.argpartition(-(part @ x.T), K - 1, axis=1)[:, :K] for part in parts])


def recall(found: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return float(np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, truth, strict=True)]))


def build(x: F32, bits: int, axes: bool | None) -> turboquant.Index:
    index = turboquant.Index(x.shape[1], bits)
    if axes is not None:
        index.train(x, axes=axes)
    index.add(x)
    return index


def measure(report: Report, name: str, queries: F32, x: F32, bits: list[int]) -> None:
    print(f"\n{name}: {len(x)} vectors of {x.shape[1]}, {len(queries)} queries")
    truth = true_neighbours(queries, x)
    for training, axes in TRAINING.items():
        for b in bits:
            index = build(x, b, axes)
            share = recall(index.search(queries, K)[1], truth)
            grows = (index.nbytes - index.fixed_nbytes) / len(x)
            params = {"data": name, "bits": b, "training": training, "k": K}
            figures = {"recall": round(share, 4), "bytes": round(grows, 2), "fixed_bytes": index.fixed_nbytes}
            report.add("index_recall", params, figures)
            print(
                f"{training:10} {b} bits  " + "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    report = Report("index_recall", "cpu")
    sift = np.loadtxt(SHARED / "data" / "sift5k.tsv", dtype=np.float32, usecols=range(128))
    sift /= np.linalg.norm(sift, axis=1, keepdims=True)
    measure(report, "sift5k", sift[:200], sift[200:], args.bits)
    if args.minilm:
        data = np.load(args.minilm)
        measure(report, "minilm", data[:1000], data[1000:], args.bits)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
