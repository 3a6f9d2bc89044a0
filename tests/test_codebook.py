"""Codebooks: the table against an independent computation, the C core against the table, the promised distortions."""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import reference as ref
from conftest import ALL_HEAD_DIMS, ROOT
from scipy import integrate, optimize, special, stats

from turboquant import _core

BITS = (1, 2, 3, 4, 5, 6)
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.0006415}  # Max 1960; 6: Lloyd 1982
OURS = LLOYD_MAX | {2: 0.1188}  # uniform levels at 2 bits
LAWS = [(ref.NORMAL, 0), *((ref.SPHERE, d) for d in (8, 16, 24, 40, 64, 128, 200, 256))]


def density(law: int, d: int) -> tuple[Callable[[float], float], Callable[[np.ndarray], np.ndarray]]:
    """(density, distribution function) of N(0, 1), or of sqrt(d) times a coordinate of a unit vector, whose square is
    Beta(1/2, (d - 1) / 2)."""
    if law == ref.NORMAL:
        return lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi), special.ndtr
    scale, power = 1 / (math.sqrt(d) * special.beta(0.5, (d - 1) / 2)), (d - 3) / 2

    def below(x: np.ndarray) -> np.ndarray:
        return 0.5 + 0.5 * np.sign(x) * special.betainc(0.5, (d - 1) / 2, np.minimum(x * x / d, 1))

    return lambda x: scale * max(0.0, 1 - x * x / d) ** power, below


def distortion(levels: np.ndarray, law: int, d: int) -> float:
    """Mean squared error by numerical integration, cell by cell."""
    pdf, end = density(law, d)[0], 12.0 if law == ref.NORMAL else np.sqrt(d)
    edges = np.concatenate([[-end], (levels[1:] + levels[:-1]) / 2, [end]])
    cells = zip(levels, edges[:-1], edges[1:])
    return sum(integrate.quad(lambda x, c=c: (x - c) ** 2 * pdf(x), a, b, epsabs=1e-12)[0] for c, a, b in cells)


@cache
def best_distortion(bits: int, law: int, d: int) -> float:
    """The distortion of the optimal quantiser: levels at Lloyd's fixed point, by a root finder and integration."""
    n, (pdf, below) = 2 ** (bits - 1), density(law, d)
    end = 12.0 if law == ref.NORMAL else np.sqrt(d)

    def gap(levels: np.ndarray) -> np.ndarray:
        edges = np.concatenate([[0], (levels[1:] + levels[:-1]) / 2, [end]])
        mean = [integrate.quad(lambda x: x * pdf(x), a, b)[0] for a, b in pairwise(edges)]
        return mean - levels * np.diff(below(edges))

    start = np.linspace(0.5 / n, 1 - 0.5 / n, n) * min(2.5, 0.9 * np.sqrt(d or 100))
    levels = optimize.root(gap, start, tol=1e-10).x
    return distortion(np.concatenate([-levels[::-1], levels]), law, d)


def ranked_levels(law: int, d: int, bits: int) -> np.ndarray:
    book = _core.codebook(law, d, bits)
    return book["levels"][book["code_of_rank"]].astype(float) * book["step"]


@pytest.mark.parametrize("bits", BITS)
def test_core_copies_the_table(bits: int) -> None:
    for law, d in [(ref.NORMAL, 0), *((ref.SPHERE, d) for d in ALL_HEAD_DIMS)]:
        got, want = _core.codebook(law, d, bits), ref.codebook(law, d or 8, bits)
        assert (got["bits"], got["n_levels"], got["step"]) == (bits, 2**bits, float(want.step))
        np.testing.assert_array_equal(got["levels"], want.levels)
        np.testing.assert_array_equal(got["thresholds"], want.thresholds)
        np.testing.assert_array_equal(got["code_of_rank"], want.code_of_rank)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("law, d", [(ref.NORMAL, 0), *((ref.SPHERE, d) for d in ALL_HEAD_DIMS)])
def test_symmetry_and_order(law: int, d: int, bits: int) -> None:
    book, levels = _core.codebook(law, d, bits), ranked_levels(law, d, bits)
    np.testing.assert_array_equal(levels, -levels[::-1])
    np.testing.assert_array_equal(book["thresholds"], -book["thresholds"][::-1])
    assert (np.diff(levels) > 0).all()
    assert (np.diff(book["thresholds"]) > 0).all()
    assert ((levels[:-1] < book["thresholds"]) & (book["thresholds"] < levels[1:])).all()
    assert sorted(book["code_of_rank"]) == list(range(2**bits))
    assert abs(book["levels"].astype(int)).max() <= (126 if bits == 4 else 127)  # 126: see csrc/cuda/tile/fragments.cuh
    if bits <= 2:
        np.testing.assert_allclose(np.diff(levels), 2 * book["step"], rtol=1e-6)  # uniform


@pytest.mark.parametrize("bits", BITS)
def test_distortion_of_normal_samples(bits: int, rng: np.random.Generator) -> None:
    book, x = _core.codebook(ref.NORMAL, 0, bits), rng.standard_normal(10**6).astype(np.float32)
    rank = np.searchsorted(book["thresholds"], x, side="right")  # how many thresholds are <= x
    error = np.mean((ranked_levels(ref.NORMAL, 0, bits)[rank] - x) ** 2)
    assert error == pytest.approx(OURS[bits], rel=0.01 if bits <= 3 else 0.02 if bits <= 5 else 0.04)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("law, d", LAWS)
def test_near_the_optimum(law: int, d: int, bits: int) -> None:
    """Exact distortions, integrated: int8 levels cost at most 1 % (4 % at 6 bits), uniform ones at 2 bits 1.2 %."""
    ours, best = distortion(ranked_levels(law, d, bits), law, d), best_distortion(bits, law, d)
    assert best <= ours * (1 + 1e-6)
    assert ours <= best * {1: 1.0001, 2: 1.012, 3: 1.001, 4: 1.004, 5: 1.01, 6: 1.04}[bits]
    if law == ref.NORMAL:
        assert best == pytest.approx(LLOYD_MAX[bits], rel=0.005)
        assert ours == pytest.approx(LLOYD_MAX[bits], rel=0.012 if bits <= 5 else 0.04)


@pytest.mark.parametrize("law, d", LAWS)
def test_two_bit_step_is_the_best(law: int, d: int) -> None:
    step = _core.codebook(law, d, 2)["step"]
    found = optimize.minimize_scalar(lambda s: distortion(s * np.array([-3, -1, 1, 3]), law, d), bounds=(0.3, 0.7))
    assert step == pytest.approx(found.x, rel=1e-3)


@pytest.mark.parametrize("bits", BITS)
def test_the_uniform_law_is_the_best_uniform_quantiser(bits: int) -> None:
    """Distortions for 1 to 5 bits are those of Max 1960, Table II; that for 6 bits is found in the same way."""
    book = _core.codebook(2, 0, bits)
    odd = np.arange(1 - 2**bits, 2**bits, 2)
    levels = np.sort(book["levels"].astype(np.float64)) * book["step"]
    np.testing.assert_allclose(levels, odd * levels[-1] / odd[-1], rtol=1e-6)
    found = optimize.minimize_scalar(
        lambda s: distortion(s * odd, ref.NORMAL, 0), bounds=(0.02, 1.2), options=dict(xatol=1e-9)
    )
    assert levels[-1] / odd[-1] == pytest.approx(found.x, rel=1e-3)
    want = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.003495, 6: 0.0010400}[bits]
    assert distortion(levels, ref.NORMAL, 0) == pytest.approx(want, rel=2e-3)
    if bits <= 2:
        plain = _core.codebook(ref.NORMAL, 0, bits)
        assert book["step"] == plain["step"] and np.array_equal(book["levels"], plain["levels"])


def test_the_step_of_8_bits_is_nearly_the_best() -> None:
    """255 levels, 1/32 apart, have an error under N(0, 1) that is at most 0.3 % above that with the best step."""

    def error(step: float) -> float:
        levels = np.arange(-127, 128) * step
        x = np.linspace(-9, 9, 180001)
        square = (x - levels[np.clip(np.rint(x / step), -127, 127).astype(int) + 127]) ** 2
        return float(np.trapezoid(square * stats.norm.pdf(x), x))

    best = optimize.minimize_scalar(error, bounds=(0.02, 0.04), method="bounded", options=dict(xatol=1e-6))
    assert error(2.0**-5) == pytest.approx(8.851e-5, rel=2e-3) and error(2.0**-5) < 1.003 * best.fun


@pytest.mark.parametrize("d", [8, 64, 256])
def test_sphere_law_is_the_law_of_a_unit_vector(d: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((20000, d))
    x *= np.sqrt(d) / np.linalg.norm(x, axis=1, keepdims=True)
    assert stats.kstest(x[:, 0], density(ref.SPHERE, d)[1]).pvalue > 1e-3


@pytest.mark.slow
def test_table_is_what_its_generator_makes() -> None:
    subprocess.run([sys.executable, ROOT / "csrc" / "core" / "make_codebooks.py", "--check"], check=True)


@pytest.mark.parametrize(
    "law, d, bits, name",
    [(3, 8, 3, "law"), (-1, 8, 3, "law"), (0, 8, 0, "bits"), (0, 8, 7, "bits"), (0, 8, 8, "bits"), (0, 8, 9, "bits")]
    + [(1, d, 3, "head_dim") for d in (0, -8, 4, 12, 264)],
)
def test_bad_arguments(law: int, d: int, bits: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"codebook: `{name}` must be .*got"):
        _core.codebook(law, d, bits)
