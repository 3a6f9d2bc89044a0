"""Rotations: bits against the reference, orthogonality, inverses, and the distribution of Haar matrices."""

import numpy as np
import pytest
import reference as ref
import reference_random as draws
from cases import orthogonal
from conftest import ALL_HEAD_DIMS, HEAD_DIMS
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg, stats
from tolerance import TOLERANCE

from turboquant import _core

BIG_DIMS = (264, 384, 1024, 1048, 4096)  # for plans without values only


KNOWN = [
    *(1097334784, 3232759808, 3232759808, 1097334784, 3239575552, 1075838976, 1075838976, 1087373312),
    *(3217031168, 3246391296, 1085276160, 3251634176, 3241148416, 1092091904, 1106247680, 1097334784),
    *(3250323456, 1086324736, 3238526976, 3229614080, 1097859072, 3242721280, 3253731328, 3232759808),
]


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("dim", [*ALL_HEAD_DIMS, *BIG_DIMS])
def test_hadamard_bits(dim: int, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    p, x = ref.plan(dim, 3, seed=seed), rng.standard_normal((7, dim)).astype(np.float32)
    y = _core.rotate(p.words, x)
    np.testing.assert_array_equal(bits_of(y), bits_of(ref.hadamard(seed, x)))
    back = _core.rotate(p.words, y, inverse=True)
    np.testing.assert_array_equal(bits_of(back), bits_of(ref.hadamard(seed, y, inverse=True)))
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)


def test_hadamard_is_the_walsh_matrix_with_signs() -> None:
    p = ref.plan(64, 3, seed=5)
    minus = [word >> bit & 1 for word in draws.random(5, 0, 0)[:2] for bit in range(32)]
    want = linalg.hadamard(64) / 8 * np.where(minus, -1, 1)
    np.testing.assert_array_equal(_core.rotate(p.words, np.eye(64, dtype=np.float32)).T, want)


def test_known_answer() -> None:
    """24 channels take one pass over 0..15, then one over 8..23. The reference made these bits once, and they must not
    change."""
    y = _core.rotate(ref.plan(24, 4, seed=1).words, np.arange(1, 25, dtype=np.float32)[None])
    assert bits_of(y)[0].tolist() == KNOWN


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_hadamard_is_orthogonal(dim: int) -> None:
    matrix = _core.rotate(ref.plan(dim, 3, seed=9).words, np.eye(dim, dtype=np.float32)).T.astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-6)
    np.testing.assert_allclose(matrix, ref.rotation_matrix(ref.plan(dim, 3, seed=9)), atol=1e-6)


@pytest.mark.parametrize("dim", [8, 32, 128])
def test_power_of_two_without_signs_is_an_involution(dim: int, rng: np.random.Generator) -> None:
    """Without its signs, R is the Walsh-Hadamard matrix, which is its own inverse."""
    p, x = ref.plan(dim, 3, seed=3), rng.standard_normal((5, dim)).astype(np.float32)
    sign = np.where(ref.signs(3, 0, dim), -1, 1).astype(np.float32)
    twice = _core.rotate(p.words, sign * _core.rotate(p.words, sign * x))
    np.testing.assert_allclose(twice, x, rtol=0, atol=1e-6)


def test_none_is_the_identity(rng: np.random.Generator) -> None:
    p, x = ref.plan(40, 3, rotation=ref.NONE), rng.standard_normal((5, 40)).astype(np.float32)
    np.testing.assert_array_equal(_core.rotate(p.words, x), x)
    np.testing.assert_array_equal(_core.rotate(p.words, x, inverse=True), x)


@pytest.mark.parametrize("dim", [*HEAD_DIMS, 24, 200, 384])
def test_dense(dim: int, rng: np.random.Generator) -> None:
    p, x = ref.plan(dim, 3, rotation=ref.DENSE), rng.standard_normal((5, dim)).astype(np.float32)
    y = _core.rotate(p.words, x, orthogonal(dim))
    want = x.astype(np.float64) @ orthogonal(dim).astype(np.float64).T
    assert np.abs(y - want).max() <= TOLERANCE * np.sqrt((x**2).mean())
    np.testing.assert_allclose(_core.rotate(p.words, y, orthogonal(dim), inverse=True), x, rtol=0, atol=1e-5)


@given(st.integers(0, 2**63 - 1), st.sampled_from(ALL_HEAD_DIMS))
def test_seed_is_the_rotation(seed: int, dim: int) -> None:
    """The same seed is the same rotation, and norms are kept."""
    x = np.arange(1, dim + 1, dtype=np.float32)[None]
    y = _core.rotate(ref.plan(dim, 2, seed=seed).words, x)
    np.testing.assert_array_equal(y, ref.hadamard(seed, x))
    assert np.linalg.norm(y) == pytest.approx(np.linalg.norm(x), rel=1e-5)


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 80, 128])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_haar_bits(dim: int, seed: int) -> None:
    np.testing.assert_array_equal(bits_of(_core.haar(seed, dim)), bits_of(draws.haar(seed, dim)))


def test_haar_is_orthogonal() -> None:
    for dim in (8, 200, 384):
        matrix = _core.haar(7, dim).astype(np.float64)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-6)


def test_haar_law() -> None:
    """Entries, a corner's product with a fixed matrix, and the sign of the determinant follow the Haar law of O(8)."""
    draws = np.stack([_core.haar(seed, 8) for seed in range(4000)]).astype(np.float64)
    coordinate = stats.beta(3.5, 3.5, loc=-1, scale=2)
    for row, col in ((0, 0), (0, 7), (7, 0), (7, 7), (3, 5)):
        assert stats.kstest(draws[:, row, col], coordinate.cdf).pvalue > 1e-4
    turned = orthogonal(8).astype(np.float64) @ draws  # invariance: any fixed rotation leaves the law alone
    assert stats.kstest(turned[:, 0, 0], coordinate.cdf).pvalue > 1e-4
    assert stats.ks_2samp(np.trace(draws, axis1=1, axis2=2), np.trace(turned, axis1=1, axis2=2)).pvalue > 1e-4
    assert abs(np.sign(np.linalg.det(draws)).mean()) < 0.1


def test_gaussians_of_the_recipe() -> None:
    draw = draws.gaussians(3)
    assert stats.kstest([next(draw) for _ in range(20000)], stats.norm.cdf).pvalue > 1e-3
    for r in (1e-19, 0.3, 0.5, 0.70710678, 0.7071068, 0.999999):
        assert draws.logarithm(r) == pytest.approx(np.log(r), rel=1e-14)


@pytest.mark.parametrize("dim", [0, -8, 12, 4104])
def test_haar_refuses(dim: int) -> None:
    with pytest.raises(ValueError, match=f"haar: `head_dim` must be .*8.*got {dim}"):
        _core.haar(0, dim)
