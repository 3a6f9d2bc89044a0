"""Measures recall and bytes of `turboquant.Index` on real vectors. They do not depend on the machine's speed.

    python benchmarks/index_recall.py --minilm minilm.npy --out benchmarks/results/zen3-2core
    python benchmarks/index_recall.py --model build/real-models/gemma3 --words --digits --bits 1 2 3 4

minilm.npy: float32 [n, 384], the lines of shared/data/sentences.txt.xz embedded by all-MiniLM-L6-v2; the first 1,000
rows are the queries. SIFT is shared/data/sift5k.tsv, normalised; its first 200 rows are the queries. Training sees the
stored vectors. A model's data are its input embeddings, of unit length and in random order, at most 100,000 of them;
the first 1,000 are the queries. Words are the 20,000 most frequent of sentences.txt.xz, each with 100 numbers: the
truncated SVD of positive pointwise mutual information within 5 words; the first 1,000 in random order are the queries.
Digits are scikit-learn's, 1,797 pictures of 8 x 8, of unit length; the first 150 in random order are the queries.
`recall`: the share of the true ten by inner product that are among the ten found. `bytes`: what the index grows by for
a vector. `batch_ms`: CPU milliseconds a query, one thread, up to 256 queries a call, the median of 5.
`chosen`: by `train`. File: index_recall.json.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant
from turboquant.plot import check_picture, points

SHARED = Path(os.environ.get("TURBOQUANT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
K = 10
TRAINING: dict[str, bool | None] = {"untrained": None, "mean": False, "axes": True}
F32 = NDArray[np.float32]


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="a picture of recall against bytes, .png, .svg or .pdf")


def picture(report: Report, path: str) -> None:
    """Draws what --plot asks for: the share that is not found, at least 0.0001, against the bytes of a vector."""
    places = {}
    for row in report.rows:
        name = " ".join(str(value) for key, value in row["params"].items() if key not in ("k", "rounds"))
        places[name] = row["metrics"]["bytes"], max(1 - row["metrics"]["recall"], 1e-4)
    points(path, places, "bytes of a vector", f"share of the true {K} that is not found")


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


def batch_ms(index: turboquant.Index, queries: F32) -> float:
    times = []
    for _ in range(5):
        began = time.process_time()
        index.search(queries[:256], K, threads=1)
        times.append(time.process_time() - began)
    return float(np.median(times)) / len(queries[:256]) * 1e3


def embeddings(folder: Path) -> F32:
    """Returns the input embeddings of a model, of unit length and in random order."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith("embed_tokens.weight"):
                    x = file.get_tensor(name).float().numpy()
                    x = x[np.random.default_rng(0).permutation(len(x))[:101_000]]
                    length = np.linalg.norm(x, axis=1, keepdims=True)
                    rows: F32 = (x / np.where(length > 0, length, 1))[length[:, 0] > 0]
                    return rows
    raise SystemExit(f"{folder} has no file with embed_tokens.weight")


def word_vectors(path: Path, words: int = 20_000, dim: int = 100, window: int = 5) -> F32:
    """Returns the positive pointwise mutual information of words within a window, by its largest singular vectors."""
    from scipy.sparse import coo_matrix  # type: ignore[import-untyped]
    from scipy.sparse.linalg import svds  # type: ignore[import-untyped]

    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = [re.findall(r"[a-z]+", line.lower()) for line in file]
    counted = Counter(word for line in text for word in line).most_common(words)
    number = {word: i for i, (word, _) in enumerate(counted)}
    lines = [np.array([number[w] for w in line if w in number], np.int64) for line in text]
    pairs = [(line[:-s], line[s:]) for line in lines for s in range(1, window + 1) if len(line) > s]
    a, b = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    near = coo_matrix((np.ones(2 * len(a)), (np.r_[a, b], np.r_[b, a])), shape=(len(number),) * 2).tocsr().tocoo()
    every = np.asarray(near.sum(axis=1)).ravel()
    mutual = np.log(near.data * every.sum() / (every[near.row] * every[near.col]))
    positive = coo_matrix((np.maximum(mutual, 0), (near.row, near.col)), shape=near.shape).tocsr()
    left, values, _ = svds(positive, k=dim, random_state=0)
    x = (left * np.sqrt(values)).astype(np.float32)[np.random.default_rng(0).permutation(len(number))]
    rows: F32 = x / np.linalg.norm(x, axis=1, keepdims=True)
    return rows


def digits() -> F32:
    from sklearn.datasets import load_digits  # type: ignore[import-not-found]

    x = load_digits().data.astype(np.float32)
    rows: F32 = (x / np.linalg.norm(x, axis=1, keepdims=True))[np.random.default_rng(0).permutation(len(x))]
    return rows


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
            figures["batch_ms"] = round(batch_ms(index, queries), 4)
            if index.training is not None:
                figures["chosen"] = index.training["chosen"]
            report.add("index_recall", params, figures)
            print(
                f"{training:10} {b} bits  " + "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a folder with safetensors")
    parser.add_argument("--words", action="store_true", help="word vectors of shared/data/sentences.txt.xz")
    parser.add_argument("--digits", action="store_true", help="of scikit-learn, which must be installed")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--out", default=RESULTS / "local")
    add_plot(parser)
    args = parser.parse_args()
    if args.plot:
        check_picture(args.plot, "--plot")
    report = Report("index_recall", "cpu")
    sift = np.loadtxt(SHARED / "data" / "sift5k.tsv", dtype=np.float32, usecols=range(128))
    sift /= np.linalg.norm(sift, axis=1, keepdims=True)
    measure(report, "sift5k", sift[:200], sift[200:], args.bits)
    if args.minilm:
        data = np.load(args.minilm)
        measure(report, "minilm", data[:1000], data[1000:], args.bits)
    for folder in args.model:
        data = embeddings(folder)
        measure(report, folder.name, data[:1000], data[1000:], args.bits)
    if args.words:
        data = word_vectors(SHARED / "data" / "sentences.txt.xz")
        measure(report, "words", data[:1000], data[1000:], args.bits)
    if args.digits:
        data = digits()
        measure(report, "digits", data[:150], data[150:], args.bits)
    print(report.save(args.out))
    if args.plot:
        picture(report, args.plot)


if __name__ == "__main__":
    main()
