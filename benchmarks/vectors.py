"""Measures distortion and inner-product error of every scheme on real vectors, with the paper's bounds and FAISS.

    python benchmarks/vectors.py --out benchmarks/results/cpu      vectors.json; needs a minute

Data: SIFT descriptors (128), sentence embeddings (384), and the keys of a trained transformer with loud channels (32,
layer 2, after RoPE, met by its queries). Of x and its decoded x', over all vectors and 5 seeds:

    distortion           mean |x - x'|^2 / |x|^2                      paper: 4^-b at least, sqrt(3) pi / 2 4^-b at most
    inner_product_error  mean (<q, x> - estimate)^2 d / (|q| |x|)^2   paper, prod: at most sqrt(3) pi^2 * 4^-b
    inner_product_slope  of estimates over true ones, by least squares  1: unbiased
    bits                 of all bytes kept, per number; FAISS is given unit vectors and keeps no norm, ours counts one

The bounds are those of TurboQuant (arXiv 2504.19874, Theorems 1 to 3), for unit vectors, b bits. FAISS is a second
opinion, by others: its scalar quantisers QT_*bit_tqmse and QT_*bit_tq (TurboQuant mse, prod) and QT_*bit_eden, after
its own random rotation, where an installed faiss-cpu has them; without it the file has no such rows, and the script
says so. They are as a flat index reports them: there tq adds no unbiased correction, and eden no scale per vector.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from timing import RESULTS, Report

import turboquant

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("TURBOQUANT_SHARED", ROOT.parent / "shared"))
SEEDS = 5
F32 = NDArray[np.float32]
Measured = tuple[F32, F32, float]  # decoded vectors, estimates [queries, vectors], bits per number


def datasets() -> Iterator[tuple[str, F32, F32]]:
    """Yields (name, vectors, queries)."""
    data = SHARED / "data"
    sift = np.loadtxt(
        data / "sift5k.tsv", dtype=np.float32, usecols=range(128)
    )  # the last column of a line is no number of the vector
    yield "sift5k", sift[100:], sift[:100]
    minilm = np.fromfile(data / "minilm_1000x384.f32", "<f4").reshape(-1, 384)
    yield "minilm", minilm[100:], minilm[:100]
    kv = np.load(data / "kv_outlier_channels.npz")
    keys, queries = (kv[name][:, 2].astype(np.float32).reshape(-1, 32) for name in ("k_post", "q_post"))
    yield "kv_outlier_channels", keys[::4], np.ascontiguousarray(queries[:: len(queries) // 100][:100])


def ours() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields (scheme, bits, arguments of Quantizer)."""
    for bits in (1, 2, 3, 4, 5):
        yield "mse", bits, dict(bits=bits, scale="norm")
        yield "eden", bits, dict(bits=bits, scale="eden")
        yield "least squares", bits, dict(bits=bits, scale="least_squares")
        if bits > 1:
            yield "prod", bits, dict(bits=bits - 1, scale="norm", sketch="gaussian")
            yield "uniform", bits, dict(bits=bits, scale="norm", codebook="uniform")
    for bits in (3, 4):
        yield "affine, blocks of 64", bits, dict(bits=bits, levels="affine", block=64, rotation="none")
        yield "affine, blocks of 64, rotated", bits, dict(bits=bits, levels="affine", block=64)
        yield "absmax, blocks of 32, rotated", bits, dict(bits=bits, levels="absmax", block=32)
    yield "q8_0", 8, dict(bits=8, levels="absmax", block=32, rotation="none")


def run_ours(fields: dict[str, Any], seed: int, x: F32, queries: F32) -> Measured:
    quantizer = turboquant.Quantizer(x.shape[1], seed=seed, **fields)
    codes = quantizer.quantize(x)
    full = len(x) // 32 * 32  # the last page may be part empty
    bits = quantizer.quantize(x[:full]).effective_bits
    return quantizer.dequantize(codes), quantizer.dot(queries, codes), bits


def faiss_schemes() -> Iterator[tuple[str, int, Callable[[int, F32, F32], Measured]]]:
    try:
        import faiss
    except ImportError:
        print("faiss is not installed: no second opinion")
        return
    for family, scheme, scale in (("tqmse", "mse", 1.0), ("tq", "prod", 1.0), ("eden", "eden", None)):
        for bits in (1, 2, 3, 4, 5):
            kind = getattr(faiss.ScalarQuantizer, f"QT_{bits}bit_{family}", None)
            if kind is None:
                continue

            def run(seed: int, x: F32, queries: F32, kind: int = kind, scale: float | None = scale) -> Measured:
                dim = x.shape[1]
                rotation = faiss.RandomRotationMatrix(dim, dim)
                rotation.init(seed + 1)
                factor = scale or math.sqrt(dim)  # its eden levels are for N(0, 1), its tq levels for unit vectors
                norms = np.linalg.norm(x, axis=1, keepdims=True)
                index = faiss.IndexScalarQuantizer(dim, kind, faiss.METRIC_INNER_PRODUCT)
                turned = np.ascontiguousarray(rotation.apply(x / norms) * factor)
                index.train(turned)
                index.add(turned)
                decoded = rotation.reverse_transform(index.reconstruct_n(0, len(x))) / factor * norms
                scores, order = index.search(rotation.apply(queries), len(x))
                estimates = np.empty_like(scores)
                np.put_along_axis(estimates, order, scores, 1)
                return decoded, estimates / factor * norms.T, 8 * index.code_size / dim

            yield f"faiss {faiss.__version__} {family} ({scheme})", bits, run


def metrics(x: F32, queries: F32, runs: list[Measured]) -> dict[str, float]:
    wide = x.astype(np.float64)
    squares = np.square(wide).sum(1)
    exact = queries.astype(np.float64) @ wide.T
    size = np.square(queries.astype(np.float64)).sum(1)[:, None] * squares / x.shape[1]
    distortion = [np.mean(np.square(decoded - wide).sum(1) / squares) for decoded, _, _ in runs]
    error = [np.mean(np.square(estimates - exact) / size) for _, estimates, _ in runs]
    slope = [np.vdot(estimates, exact) / np.vdot(exact, exact) for _, estimates, _ in runs]
    return {
        "distortion": float(f"{np.mean(distortion):.4g}"),
        "inner_product_error": float(f"{np.mean(error):.4g}"),
        "inner_product_slope": float(f"{np.mean(slope):.5g}"),
        "bits": round(runs[0][2], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    report = Report("vectors", "cpu")
    for bits in (1, 2, 3, 4, 5):
        bounds = {"distortion_lower": 4.0**-bits, "distortion_upper": math.sqrt(3) * math.pi / 2 * 4.0**-bits,
                  "inner_product_error_upper": math.sqrt(3) * math.pi**2 * 4.0**-bits}  # fmt: skip
        report.add("bounds", {"scheme": "paper", "bits": bits}, {n: float(f"{b:.4g}") for n, b in bounds.items()})
    schemes: list[tuple[str, int, Callable[[int, F32, F32], Measured]]] = [
        (name, bits, lambda seed, x, q, fields=fields: run_ours(fields, seed, x, q)) for name, bits, fields in ours()
    ]
    schemes += faiss_schemes()
    for data, x, queries in datasets():
        kept = np.square(x).sum(1) > 0
        x = np.ascontiguousarray(x[kept])
        print(f"\n{data}: {len(x)} vectors of {x.shape[1]}, {len(queries)} queries")
        for name, bits, run in schemes:
            found = metrics(x, queries, [run(seed, x, queries) for seed in range(SEEDS)])
            report.add("vectors", {"data": data, "scheme": name, "bits": bits, "seeds": SEEDS}, found)
            print(f"{name:36} {bits} bits  " + "  ".join(f"{key} {value:<9}" for key, value in found.items()))
    print(report.save(args.out))


if __name__ == "__main__":
    main()
