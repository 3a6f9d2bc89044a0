"""turboquant.Quantizer and Codes: accuracy against theory, damaged files, refusals, imports."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turboquant
from turboquant import Codes, Quantizer, _core, files
from turboquant.plan import Plan

# E (u - level)^2 of N(0, 1): Lloyd-Max at 3 to 5 bits, uniform at 1 and 2 (design: arXiv 2504.19874, Theorem 1)
DISTORTION = {1: 0.3634, 2: 0.1188, 3: 0.0345, 4: 0.0095, 5: 0.0025}
DIMS = (8, 24, 64, 80, 128, 200, 1024)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- accuracy ----


@pytest.mark.parametrize("bits", DISTORTION)
@pytest.mark.parametrize("rotation", ["hadamard", "dense", "none"])
def test_distortion_of_normal_vectors(bits: int, rotation: str, rng: np.random.Generator) -> None:
    x = normal(rng, 2000, 256)
    q = Quantizer(256, bits, rotation, scale="norm")
    error = np.square(x - q.dequantize(q.quantize(x))).sum() / np.square(x).sum()
    assert error == pytest.approx(DISTORTION[bits], rel=0.03)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("rotation", ["hadamard", "dense"])
def test_rotation_makes_distortion_independent_of_the_data(bits: int, rotation: str, rng: np.random.Generator) -> None:
    """Vectors with a few large numbers have a large error without a rotation."""
    x = normal(rng, 500, 128) * 0.01
    x[:, 5] = 3
    x[np.arange(500), rng.integers(0, 128, 500)] += 7
    error = {}
    for name in (rotation, "none"):
        q = Quantizer(128, bits, name, scale="least_squares", seed=3)
        error[name] = np.square(x - q.dequantize(q.quantize(x))).sum() / np.square(x).sum()
    assert error[rotation] < 1.5 * DISTORTION[bits] < error["none"]


@pytest.mark.parametrize("dim, bits, shares", [(128, 4, (0.92, 0.89, 0.875)), (384, 4, (0.97, 0.96, 0.95)),
                                               (384, 8, (0.85, 0.8, 0.75))])  # fmt: skip
def test_noise_falls_with_tries(dim: int, bits: int, shares: tuple[float, ...], rng: np.random.Generator) -> None:
    """1 / cos^2 - 1 between normal vectors and their codes falls below these shares of its value without tries."""
    x, noise, errors = normal(rng, 1000, dim), [], []
    for tries in (0, 3, 5, 7):
        q = Quantizer(dim, bits, tries=tries)
        codes = q.quantize(x)
        y = q.dequantize(codes).astype(np.float64)
        noise.append(((y * y).sum(1) * (x * x).sum(1) / (y * x).sum(1) ** 2 - 1).mean())
        errors.append(np.square(q.dot(x[:50], codes) - x[:50].astype(np.float64) @ x.T.astype(np.float64)).mean())
        assert q.plan == Plan(dim, bits, tries=tries, page_tokens=q.plan.page_tokens)
        assert Quantizer.from_plan(q.plan).quantize(x[:9]).pages.tobytes() == q.quantize(x[:9]).pages.tobytes()
    assert all(tried < share * noise[0] for tried, share in zip(noise[1:], shares, strict=True)), np.divide(
        noise, noise[0]
    )
    assert noise[1] > noise[2] > noise[3] and errors[3] < errors[0]
    assert repr(q).endswith("seed=0, tries=7)")


@pytest.mark.parametrize(
    "given", [dict(tries=4), dict(tries=-3), dict(tries=3, scale="norm"), dict(tries=3, levels="absmax"),
              dict(tries=3, sketch="sign"), dict(tries=True), dict(tries=3.0)]
)  # fmt: skip
def test_tries_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="`tries` must be"):
        Quantizer(64, 4, **given)


def test_scales_do_what_they_say(rng: np.random.Generator) -> None:
    x = normal(rng, 300, 128)
    decoded = {
        name: Quantizer(128, 2, scale=name).quantize(x) for name in ("eden", "norm", "norm_corrected", "least_squares")
    }
    decoded = {name: Quantizer(128, 2, scale=name).dequantize(codes).astype(float) for name, codes in decoded.items()}
    projection = {name: (y * x).sum(1) / np.square(x).sum(1) for name, y in decoded.items()}
    error = {name: np.square(y - x).sum() for name, y in decoded.items()}
    np.testing.assert_allclose(projection["eden"], 1, atol=2e-3)  # scales are binary16
    np.testing.assert_allclose(np.linalg.norm(decoded["norm_corrected"], axis=1), np.linalg.norm(x, axis=1), rtol=2e-3)
    assert error["least_squares"] < min(error[name] for name in ("eden", "norm", "norm_corrected"))
    assert abs(projection["norm"].mean() - 1) > 0.03


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_eden_is_unbiased(bits: int, rng: np.random.Generator) -> None:
    """The mean over seeds of an estimate of <q, x> is <q, x> (arXiv 2108.08842); with the norm scale it is not."""
    x = normal(rng, 1, 64) + np.float32(0.5)
    query = x + normal(rng, 1, 64)  # correlated with x, so that a wrong factor shows
    exact = (query.astype(float) @ x.T).item()
    seeds = 400
    for rotation in ("hadamard", "dense"):
        found = {}
        for scale in ("eden", "norm"):
            quantizers = (Quantizer(64, bits, rotation, scale, seed=seed) for seed in range(seeds))
            found[scale] = np.array([q.dot(query, q.quantize(x)).item() for q in quantizers])
        margin = 4.5 * found["eden"].std() / np.sqrt(seeds)
        assert abs(found["eden"].mean() - exact) < margin + 2e-3 * abs(exact)
        if bits == 1:
            assert abs(found["norm"].mean() - exact) > margin + 2e-3 * abs(exact)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rotation", ["hadamard", "dense", "none"])
def test_dot_is_that_of_the_decoded_vectors(dim: int, rotation: str, rng: np.random.Generator) -> None:
    if rotation == "dense" and dim > 256:
        pytest.skip("the same code as below 256, but cubic time for the matrix")
    bits: Any = 3 if dim < 64 else [4, 0, 1, 5, 2, 3, 0][: -(-dim // 32)] + [2] * max(0, -(-dim // 32) - 7)
    q = Quantizer(dim, bits, rotation, centre=normal(rng, dim))
    x, queries = normal(rng, 70, dim) * 3, normal(rng, 11, dim)
    codes = q.quantize(x)
    got, want = q.dot(queries, codes), queries.astype(float) @ q.dequantize(codes).astype(float).T
    assert got.shape == (11, 70) and got.dtype == np.float32
    assert abs(got - want).max() <= 2e-4 * abs(want).max()
    one = q.dot(queries[3], codes)
    assert one.shape == (70,)
    assert np.array_equal(one, got[3])


def test_dot_of_long_vectors_in_blocks(rng: np.random.Generator) -> None:
    """Vectors so long that the 32 of a tile are decoded in several parts, the last of them smaller."""
    q = Quantizer(800, 3, block=32)
    x, queries = normal(rng, 70, 800), normal(rng, 3, 800)
    codes = q.quantize(x)
    want = queries.astype(float) @ q.dequantize(codes).astype(float).T
    assert abs(q.dot(queries, codes) - want).max() <= 2e-5 * abs(want).max()


def test_dimensions_up_to_4096(rng: np.random.Generator) -> None:
    x = normal(rng, 40, 4096)
    q = Quantizer(4096, 4)
    codes = q.quantize(x)
    assert np.square(x - q.dequantize(codes)).sum() / np.square(x).sum() == pytest.approx(DISTORTION[4], rel=0.03)
    np.testing.assert_allclose(q.dot(x[:2], codes), x[:2] @ q.dequantize(codes).T, rtol=1e-3, atol=1)


def test_centre_is_subtracted_and_added_back(rng: np.random.Generator) -> None:
    centre = 20 * normal(rng, 64)
    x = normal(rng, 200, 64) + centre
    plain, centred = (Quantizer(64, 3, centre=c) for c in (None, centre))
    error = [np.square(x - q.dequantize(q.quantize(x))).mean() for q in (plain, centred)]
    assert error[1] < 0.05 < 10 * error[1] < error[0]
    assert centred.quantize(x).nbytes == plain.quantize(x).nbytes
    centre[:] = 0  # the quantiser has a copy
    assert np.square(x - centred.dequantize(centred.quantize(x))).mean() == error[1]
    with pytest.raises(ValueError, match="read-only"):
        centred.centre[0] = 1  # type: ignore[index]


def test_sphere_levels_are_better_in_few_dimensions(rng: np.random.Generator) -> None:
    x = normal(rng, 4000, 8)
    error = {}
    for law in ("normal", "sphere"):
        q = Quantizer(8, 3, codebook=law, scale="norm")
        error[law] = np.square(x - q.dequantize(q.quantize(x))).sum()
    assert error["sphere"] < 0.97 * error["normal"]


# ---- codes ----


@given(
    vectors=st.integers(0, 300),
    dim=st.integers(1, 40).map(lambda n: 8 * n),
    bits=st.integers(1, 5),
    rotation=st.sampled_from(["hadamard", "none"]),
    scale=st.sampled_from(["eden", "norm", "norm_corrected", "least_squares"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_vectors_do_not_depend_on_their_company(
    vectors: int, dim: int, bits: int, rotation: str, scale: str, seed: int
) -> None:
    """Each vector is quantised as it would be alone, among any number of others. Strides change nothing."""
    x = np.random.default_rng(vectors).standard_normal((vectors, dim)).astype(np.float32)
    q = Quantizer(dim, bits, rotation, scale, seed=seed)
    codes = q.quantize(x)
    assert len(codes) == codes.vectors == vectors
    assert codes.pages.shape == (-(-vectors // 32), 1, q.plan.record_bytes)
    assert codes.nbytes == codes.pages.nbytes
    y = q.dequantize(codes)
    assert y.shape == x.shape and y.dtype == np.float32 and np.isfinite(y).all()
    spread = np.repeat(x, 2, 0)[::2]
    assert q.quantize(spread).pages.tobytes() == codes.pages.tobytes()
    if vectors:
        i = vectors * 2 // 3
        assert np.array_equal(q.dequantize(q.quantize(x[i : i + 1]))[0], y[i])
        full = 32 * (vectors // 32)
        assert codes.pages[: full // 32].tobytes() == q.quantize(x[:full]).pages.tobytes()


def test_effective_bits_count_everything() -> None:
    codes = Quantizer(128, 4).quantize(np.zeros((64, 128), np.float32))
    assert codes.effective_bits == 4 + 16 / 128
    assert codes.nbytes == 64 * (64 + 2)
    assert Quantizer(128, [4, 2, 0, 1]).quantize(np.ones((32, 128), np.float32)).effective_bits == 7 / 4 + 16 / 128
    assert Quantizer(40, 1).quantize(np.ones((1, 40), np.float32)).nbytes == 32 * 2 * 4 + 64
    assert Quantizer(40, 1).quantize(np.ones((0, 40), np.float32)).effective_bits == 0


def test_equal_arguments_make_equal_bytes(rng: np.random.Generator) -> None:
    x = normal(rng, 33, 80)
    for rotation in ("hadamard", "dense"):
        first, again, other = (Quantizer(80, 3, rotation, seed=seed).quantize(x).pages.tobytes() for seed in (1, 1, 2))
        assert first == again != other


def test_zero_and_awkward_vectors() -> None:
    """Zero is exactly zero, and so is the product with it; huge and tiny vectors keep their direction."""
    q = Quantizer(64, 4)
    x = np.zeros((4, 64), np.float32)
    x[1, 3], x[2], x[3] = 16384, 1e-3, -16384
    y = q.dequantize(q.quantize(x))
    assert not y[0].any() and not q.dot(x, q.quantize(x))[:, 0].any()
    for i in (1, 2, 3):
        assert (x[i] * y[i]).sum() / np.linalg.norm(x[i]) / np.linalg.norm(y[i]) > 0.99


def test_copies_keep_their_alignment(rng: np.random.Generator) -> None:
    q = Quantizer(64, 4)
    codes = q.quantize(normal(rng, 50, 64))
    for other in (copy.copy(codes), copy.deepcopy(codes), pickle.loads(pickle.dumps(codes))):
        assert np.array_equal(q.dequantize(other), q.dequantize(codes))
        assert len(other) == 50 and other.plan == codes.plan
    raw = np.zeros(codes.nbytes + 1, np.uint8)
    raw[1:] = codes.pages.ravel()
    moved = Codes(codes.plan, raw[1:].reshape(codes.pages.shape), 50)
    assert np.array_equal(q.dequantize(moved), q.dequantize(codes))
    assert "50 vectors of 64 numbers" in repr(codes)


def test_arrays_of_other_classes_are_read_as_plain_ones(rng: np.random.Generator) -> None:
    x = normal(rng, 300, 64)
    q = Quantizer(64, 4, centre=np.ma.masked_array(x[0]))
    codes = q.quantize(x)
    assert type(q.centre) is np.ndarray
    for other in (x.view(np.matrix), np.ma.masked_array(x), np.ma.masked_array(x, np.zeros(x.shape, bool))):
        assert np.array_equal(q.quantize(other).pages, codes.pages)
        found = q.dot(other[:5], codes)
        assert type(found) is np.ndarray and np.array_equal(found, q.dot(x[:5], codes))
    with pytest.raises(ValueError, match="dot: `queries` must have no masked numbers"):
        q.dot(np.ma.masked_equal(x, x[0, 0]), codes)


def test_repr_and_from_plan(rng: np.random.Generator) -> None:
    q = Quantizer(80, [4, 2, 1], "dense", "norm", "sphere", 9)
    assert repr(q) == "Quantizer(80, [4, 2, 1], rotation='dense', scale='norm', codebook='sphere', seed=9)"
    x = normal(rng, 10, 80)
    codes = q.quantize(x)
    same = Quantizer.from_plan(codes.plan)
    assert repr(same) == repr(q) and same.plan == q.plan and same.bits == q.bits == (4, 2, 1) and same.dim == 80
    assert np.array_equal(same.dequantize(codes), q.dequantize(codes))
    assert repr(Quantizer(8, 4, centre=x[0, :8])).endswith("seed=0, centre=...)")
    assert repr(Quantizer(96, 3, levels="absmax", block=32)).endswith("levels='absmax', sketch='none', block=32)")
    assert repr(Quantizer(96, 3, sketch="gaussian", sketch_rows=24)).endswith("sketch='gaussian', sketch_rows=24)")
    with pytest.raises(ValueError, match="Quantizer: `plan` must have no value bits"):
        Quantizer.from_plan(Plan(64, 4, 4))


# ---- refusals ----

X = np.zeros((3, 64), np.float32)
PAGES = "Codes: `pages` must be uint8 [1, 1, 1088], "
GROUPS = "Quantizer: `bits` must be an integer or one per group, 2 of them, got 1"
CENTRE = "Quantizer: `centre[{}]` must be finite and at most 16384 in magnitude, got {}"
SCALES = "eden, norm, norm_corrected, least_squares"
NO_SPHERE = "Quantizer: `dim` must be at most 256 with the sphere codebook, got 264"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(dim=12), ValueError, "Quantizer: `dim` must be a multiple of 8 in 8..4096, got 12"),
        (dict(dim=0), ValueError, "Quantizer: `dim` must be a multiple of 8 in 8..4096, got 0"),
        (dict(dim=-8), ValueError, "Quantizer: `dim` must be a multiple of 8 in 8..4096, got -8"),
        (dict(dim=4104), ValueError, "Quantizer: `dim` must be a multiple of 8 in 8..4096, got 4104"),
        (dict(dim=64.0), TypeError, "Quantizer: `dim` must be an integer, got 64.0"),
        (dict(bits=0), ValueError, "Quantizer: `bits` must be more than 0 in at least one group, got 0"),
        (dict(bits=9), ValueError, "Quantizer: `bits` must be in 0..6 or 8, got 9"),
        (dict(bits=2.5), TypeError, "Quantizer: `bits` must be an integer, got 2.5"),
        (dict(bits="4"), TypeError, "Quantizer: `bits` must be an integer or a sequence of integers, got '4'"),
        (dict(bits=[4]), ValueError, GROUPS),
        (dict(bits=[4, 7]), ValueError, "Quantizer: `bits[1]` must be in 0..6 or 8, got 7"),
        (dict(bits=[0, 0]), ValueError, "Quantizer: `bits` must be more than 0 in at least one group, got 0"),
        (dict(rotation="pca"), ValueError, "Quantizer: `rotation` must be one of none, hadamard, dense, got 'pca'"),
        (dict(rotation=1), TypeError, "Quantizer: `rotation` must be one of none, hadamard, dense, got 1"),
        (dict(scale="max"), ValueError, f"Quantizer: `scale` must be one of {SCALES}, got 'max'"),
        (dict(scale=None), TypeError, f"Quantizer: `scale` must be one of {SCALES}, got None"),
        (dict(codebook="kmeans"), ValueError,
         "Quantizer: `codebook` must be one of normal, sphere, uniform, got 'kmeans'"),
        (dict(dim=264, codebook="sphere"), ValueError, NO_SPHERE),
        (dict(seed=-1), ValueError, "Quantizer: `seed` must be in 0..2^63 - 1, got -1"),
        (dict(seed=2**63), ValueError, "Quantizer: `seed` must fit in 64 bits, got 9223372036854775808"),
        (dict(seed="x"), TypeError, "Quantizer: `seed` must be an integer, got 'x'"),
        (dict(centre=[0.0] * 64), TypeError, "Quantizer: `centre` must be float32 [64], got list"),
        (dict(centre=X), ValueError, "Quantizer: `centre` must be float32 [64], got float32 [3, 64]"),
        (dict(centre=X[0].astype(float)), TypeError, "Quantizer: `centre` must be float32 [64], got float64 [64]"),
        (dict(centre=X[0] + np.nan), ValueError, CENTRE.format(0, "nan")),
        (dict(centre=np.where(np.arange(64) < 9, 0, -16385).astype(np.float32)), ValueError,
         CENTRE.format(9, "-16385.0")),
        (dict(centre=np.ma.masked_greater(X[0], -1)), ValueError,
         "Quantizer: `centre` must have no masked numbers, got 64 of them"),
        (dict(sketch=np.array(["none"])), ValueError,
         "Quantizer: `sketch` must be one of none, gaussian, sign, got ndarray"),
        (dict(sketch="gaussian", sketch_rows=6.5), TypeError,
         "Quantizer: `sketch_rows` must be an integer, got 6.5"),
        (dict(sketch="gaussian", sketch_rows="6"), TypeError,
         "Quantizer: `sketch_rows` must be an integer, got '6'"),
        (dict(sketch="gaussian", sketch_rows=0), ValueError, "Quantizer: `sketch_rows` must be in 1..64, got 0"),
        (dict(sketch="gaussian", sketch_rows=65), ValueError, "Quantizer: `sketch_rows` must be in 1..64, got 65"),
    ],
)  # fmt: skip
def test_quantizer_refuses(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        Quantizer(**{"dim": 64, "bits": 4, **arguments})
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (X.tolist(), TypeError, "quantize: `x` must be float32 [vectors, 64], got list"),
        (X.astype(float), TypeError, "quantize: `x` must be float32 [vectors, 64], got float64 [3, 64]"),
        (X.astype(">f4"), TypeError, "quantize: `x` must be float32 [vectors, 64], got >f4 [3, 64]"),
        (X[0], ValueError, "quantize: `x` must be float32 [vectors, 64], got float32 [64]"),
        (X[:, :32], ValueError, "quantize: `x` must be float32 [vectors, 64], got float32 [3, 32]"),
        (np.ma.masked_array(X, np.arange(192).reshape(3, 64) == 7), ValueError,
         "quantize: `x` must have no masked numbers, got 1 of them"),
        (X[:, ::-1], ValueError, "quantize: `x` must be an array of dense rows in ascending order, got strides"),
        (X[::-1], ValueError, "quantize: `x` must be an array of dense rows in ascending order, got strides"),
    ],
)  # fmt: skip
def test_quantize_refuses(x: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        Quantizer(64, 4).quantize(x)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 16385])
@pytest.mark.parametrize("row", [0, 255, 256, 290])
def test_quantize_names_the_number_it_refuses(bad: float, row: int) -> None:
    x = np.zeros((300, 64), np.float32)
    x[row, 7] = bad
    with pytest.raises(ValueError, match="quantize") as caught:
        Quantizer(64, 4).quantize(x)
    want = f"quantize: `x[{row}, 7]` must be finite and at most 16384 in magnitude, got {np.float32(bad)}"
    assert str(caught.value) == want


def test_other_calls_refuse(rng: np.random.Generator) -> None:
    q = Quantizer(64, 4)
    codes = q.quantize(X)
    with pytest.raises(TypeError, match=r"^dot: `codes` must be Codes, got ndarray$"):
        q.dot(X, X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^dequantize: `codes` must be Codes, got NoneType$"):
        q.dequantize(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dot: `queries` must be float32 \[queries, 64\], got float32 \[3, 32\]$"):
        q.dot(X[:, :32], codes)
    with pytest.raises(ValueError, match=r"^dot: `queries` must be float32 \[64\], got float32 \[8\]$"):
        q.dot(X[0, :8], codes)
    with pytest.raises(TypeError, match=r"^dot: `queries` must be float32 \[queries, 64\], got float16 \[3, 64\]$"):
        q.dot(X.astype(np.float16), codes)  # type: ignore[arg-type]
    for strided in (np.zeros((3, 128), np.float32)[:, ::2], np.zeros(128, np.float32)[::2]):
        with pytest.raises(ValueError, match=r"^dot: `queries` must be C-contiguous"):
            q.dot(strided, codes)
    for other, says in [
        (Quantizer(64, 3), "of bits 4, got 3"),
        (Quantizer(128, 4), "of head_dim 64, got 128"),
        (Quantizer(64, 4, seed=1), "of seed 0, got 1"),
        (Quantizer(64, 4, "dense"), "of rotation hadamard, got dense"),
        (Quantizer(64, 4, scale="norm"), "of scale eden, got norm"),
        (Quantizer(64, 4, codebook="sphere"), "of codebook normal, got sphere"),
    ]:
        foreign = other.quantize(normal(rng, 3, other.dim))
        for call in (lambda codes: q.dot(X, codes), q.dequantize):
            with pytest.raises(ValueError, match=f"`codes` must be {says}$"):
                call(foreign)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(plan=Plan(64, 4, 4)), ValueError, "Codes: `plan` must have no value bits"),
        (dict(plan=(1, 2)), TypeError, "Codes: `plan` must be a turboquant.Plan, got tuple"),
        (dict(plan=None), TypeError, "Codes: `plan` must be a turboquant.Plan, got NoneType"),
        (dict(vectors=3.0), TypeError, "Codes: `vectors` must be an integer, got 3.0"),
        (dict(vectors=True), TypeError, "Codes: `vectors` must be an integer, got True"),
        (dict(pages=np.ma.masked_less(np.zeros((1, 1, 1088), np.uint8), 1)), ValueError,
         "Codes: `pages` must have no masked numbers, got 1088 of them"),
        (dict(vectors=-1), ValueError, "Codes: `vectors` must be in 0..1099511627776, got -1"),
        (dict(vectors=33), ValueError, "Codes: `pages` must be uint8 [2, 1, 1088], got uint8 [1, 1, 1088]"),
        (dict(vectors=0), ValueError, "Codes: `pages` must be uint8 [0, 1, 1088], got uint8 [1, 1, 1088]"),
        (dict(pages=b""), TypeError, PAGES + "got bytes"),
        (dict(pages=np.zeros((1, 1, 1088), np.int8)), TypeError, PAGES + "got int8 [1, 1, 1088]"),
        (dict(pages=np.zeros((1, 1, 1024), np.uint8)), ValueError, PAGES + "got uint8 [1, 1, 1024]"),
    ],
)  # fmt: skip
def test_codes_refuse(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    good = Quantizer(64, 4).quantize(X)
    with pytest.raises(error) as caught:
        Codes(**{"plan": good.plan, "pages": good.pages, "vectors": 3, **arguments})
    assert str(caught.value).startswith(says)


# ---- files ----


@pytest.fixture
def saved(tmp_path: Path, rng: np.random.Generator) -> tuple[Path, Codes]:
    codes = Quantizer(64, [4, 3], seed=5).quantize(normal(rng, 100, 64))
    codes.save(tmp_path / "codes.tq")
    return tmp_path / "codes.tq", codes


@pytest.mark.parametrize("vectors", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_files_bring_codes_back(vectors: int, kind: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    q = Quantizer(40, 3)
    codes = q.quantize(normal(rng, vectors, 40))
    path = kind(tmp_path / "x")
    codes.save(path)
    back = Codes.load(path)
    assert (back.plan, back.vectors) == (codes.plan, codes.vectors)
    assert back.pages.tobytes() == codes.pages.tobytes()
    assert np.array_equal(q.dequantize(back), q.dequantize(codes))


def test_saving_replaces_at_once_and_leaves_nothing(saved: tuple[Path, Codes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, codes = saved
    before = path.read_bytes()
    other = Quantizer(64, [4, 3], seed=5).quantize(X)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                other.save(path)
        assert os.listdir(path.parent) == [path.name]
        assert path.read_bytes() == before
    other.save(path)
    assert os.listdir(path.parent) == [path.name]
    assert Codes.load(path).vectors == 3
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask  # as any file that open() makes
    with pytest.raises(FileNotFoundError):
        codes.save(path.parent / "absent" / "x")


def refuses(path: Path, data: bytes, says: str = "") -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match="`path` must be a file of codes, got") as caught:
        Codes.load(path)
    assert str(path) in str(caught.value) and says in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_every_truncation_is_refused(saved: tuple[Path, Codes]) -> None:
    path, _ = saved
    data = path.read_bytes()
    for size in [*range(200), *range(200, len(data), 37), len(data) - 1]:
        refuses(path, data[:size])
    refuses(path, data + b"\0", "it must have ")
    refuses(path, b"")


def test_every_altered_byte_is_refused(saved: tuple[Path, Codes]) -> None:
    path, _ = saved
    data = path.read_bytes()
    for i in [*range(150), *range(150, len(data), 61), len(data) - 1]:
        for flip in (1, 0x80, 0xFF):
            altered = bytearray(data)
            altered[i] ^= flip
            refuses(path, bytes(altered))


def forged(path: Path, codes: Codes, **changes: object) -> bytes:
    """The file with these fields of its header, and checksums that fit."""
    pages = changes.pop("pages", codes.pages)
    meta = {"plan": list(codes.plan.words), "vectors": codes.vectors, **changes}
    files.write_arrays(path, "turboquant-codes-2", meta, {"pages": pages})
    return path.read_bytes()


def test_a_file_is_what_the_manual_says(saved: tuple[Path, Codes]) -> None:
    """Read without our code: docs/format.md."""
    path, codes = saved
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    about = header.pop("__metadata__")
    assert about["format"] == "turboquant-codes-2"
    assert about["crc32"] == f"{zlib.crc32(about['turboquant'].encode()):08x}"
    assert json.loads(about["turboquant"]) == {
        "plan": list(codes.plan.words),
        "vectors": 100,
        "crc32": {"pages": zlib.crc32(codes.pages.tobytes())},
    }
    shape, size = list(codes.pages.shape), codes.pages.nbytes
    assert header == {"pages": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}
    assert data[start:] == codes.pages.tobytes()


def test_forged_headers_are_refused(saved: tuple[Path, Codes]) -> None:
    """Files whose checksums are right and whose claims are not."""
    path, codes = saved
    good, words = path.read_bytes(), codes.plan.words
    assert forged(path, codes) == good
    for changes, says in (
        (dict(plan=[1, *words[1:]]), "`plan[0]` must be format version 2, got 1"),
        (dict(plan=words[:-1]), "19 + 2 * "),
        (dict(plan=[]), "19 + 2 * "),
        (dict(plan=[*words[:19], 23, *words[20:]]), "in 0..6 or 8"),
        (dict(plan=[0] * 300), "at most 275"),
        (dict(plan="4"), ""),
        (dict(plan=3), "`words` must be a sequence"),
        (dict(plan=[None] * len(words)), ""),
        (dict(plan=Plan(64, 4, 3, page_tokens=32).words), "`plan` must have no value bits"),
        (dict(vectors=-1), "`vectors` must be in 0..1099511627776, got -1"),
        (dict(vectors=10**30), "`vectors` must be in 0.."),
        (dict(vectors=1.0), "`vectors` must be an integer"),
        *((dict(vectors=n), "its one tensor must be `pages`") for n in (0, 96, 129, 2**32, 2**40)),
        (dict(pages=codes.pages[:-1].copy()), "its one tensor must be `pages`"),
        (dict(pages=codes.pages.astype(np.int32)), "its one tensor must be `pages`"),
    ):
        refuses(path, forged(path, codes, **changes), says)
    refuses(path, good.replace(b"codes-2", b"index-2"), "its format must be turboquant-codes-2, got 'turboquant-index")


def test_files_of_version_1_are_refused(saved: tuple[Path, Codes]) -> None:
    path, _ = saved
    good = path.read_bytes()
    refuses(path, b"TQCODES\0\1\0\0\0" + bytes(500), "format version 1, which commit 14a37f9 of turboquant reads")
    refuses(path, good.replace(b"codes-2", b"codes-1"), "'turboquant-codes-1', which commit 14a37f9 of ")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (b"\x89PNG\r\n\x1a\n" + bytes(5000), b"PK\3\4" * 1000, bytes(10_000), b"TQCODES", os.urandom(4096)):
        refuses(path, data)


def test_loading_asks_for_no_more_memory_than_the_file_is_long(saved: tuple[Path, Codes]) -> None:
    import tracemalloc

    path, codes = saved
    sound = path.read_bytes()
    for data, fails in ((forged(path, codes, vectors=32 * 2**30), True), (sound, False)):
        path.write_bytes(data)
        tracemalloc.start()
        try:
            if fails:
                with pytest.raises(ValueError, match="`path` must be a file of codes, got"):
                    Codes.load(path)
            else:
                Codes.load(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < len(data) + 150_000  # what is on top are file buffers and exceptions


@given(data=st.binary(max_size=400), start=st.sampled_from([b"", b"\x40" + bytes(7), b"\x40" + bytes(7) + b'{"']))
def test_random_bytes_are_refused(data: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    refuses(tmp_path_factory.getbasetemp() / "random.codes", start + data)


# ---- the package ----


def python(code: str, **environment: str) -> str:
    root = Path(turboquant.__file__).resolve().parent.parent
    env = os.environ | {"PYTHONPATH": str(root)} | environment
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
"""


def test_works_without_torch() -> None:
    code = """
import turboquant
assert "numpy" not in sys.modules
assert {"Quantizer", "CacheSpec", "patch", "ops", "__version__"} <= set(dir(turboquant))
import numpy as np
q = turboquant.Quantizer(64, 4)
codes = q.quantize(np.eye(64, dtype=np.float32))
assert q.dot(np.eye(64, dtype=np.float32), codes).trace() > 60
turboquant.CacheSpec(), turboquant.preset("default"), turboquant.presets()
assert not {"torch", "transformers"} & set(sys.modules)
for name in ("ops", "TurboQuantCache"):
    try:
        getattr(turboquant, name)
    except ImportError as error:
        assert "torch" in str(error) or "transformers" in str(error), error
    else:
        raise AssertionError(name)
try:
    turboquant.nonsense
except AttributeError as error:
    assert str(error) == "module 'turboquant' has no attribute 'nonsense'"
"""
    python(NO_TORCH + code)


def test_the_command_line_says_what_there_is() -> None:
    code = "import runpy; sys.argv = ['turboquant', 'info']; runpy.run_module('turboquant', run_name='__main__')"
    for before in ("import sys; ", NO_TORCH):
        out = python(before + f"\ntry:\n    {code}\nexcept SystemExit as end:\n    assert end.code == 0")
        for says in (turboquant.__version__, np.__version__, _core.isa_available()[0], "threads", "CUDA"):
            assert says in out


def test_the_command_line_refuses() -> None:
    from turboquant.cli import main

    for arguments in ([], ["divide"], ["info", "--loud"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_errors_name_the_arguments_of_the_quantizer() -> None:
    for arguments, said in (
        (dict(bits=7), "`bits` must be in 0..6 or 8, got 7"),
        (dict(bits=[4] * 11 + [7]), r"`bits\[11\]` must be in 0..6 or 8, got 7"),
        (dict(bits=4, codebook="sphere"), "`dim` must be at most 256 with the sphere codebook, got 384"),
        (dict(bits=4, block=33), "`block` must be 0 or a multiple of 32 channels, got 33"),
        (dict(bits=4, levels=np.zeros(3)), "`levels` must be one of .*, got ndarray"),
    ):
        with pytest.raises(ValueError, match=f"^Quantizer: {said}$"):
            Quantizer(384, **arguments)
