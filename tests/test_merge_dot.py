"""tq_merge and tq_dot against float64."""

import numpy as np
import pytest
import reference as ref
from cases import aligned_pages, awkward_rows, keywords, random_transform
from conftest import HEAD_DIMS, ODD_HEAD_DIMS
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core


@given(st.integers(1, 6), st.integers(0, 9), st.sampled_from((1, 8, 40, 128)), st.integers(0, 2**32))
def test_merge(parts: int, rows: int, head_dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((parts, rows, head_dim)).astype(np.float32)
    lses = (20 * rng.standard_normal((parts, rows))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    outs[np.isneginf(lses)] = 0
    out, lse = _core.merge(outs, lses)
    want, want_lse = ref.merge(outs, lses)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6 * abs(outs).max(initial=0))
    assert not np.isnan(out).any()


def test_merge_of_one_part_is_that_part(rng: np.random.Generator) -> None:
    outs, lses = rng.standard_normal((1, 5, 64)).astype(np.float32), rng.standard_normal((1, 5)).astype(np.float32)
    out, lse = _core.merge(outs, lses)
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_allclose(lse, lses[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("other", [-np.inf, 0.0, np.nan])
def test_a_nan_of_one_part_is_not_lost(other: float) -> None:
    outs, lses = np.ones((2, 2, 8), np.float32), np.zeros((2, 2), np.float32)
    lses[:, 1] = np.nan, other
    out, lse = _core.merge(outs, lses)
    assert np.isnan(lse[1]) and np.isnan(out[1]).all() and np.isfinite(out[0]).all()


def test_merge_of_far_apart_parts(rng: np.random.Generator) -> None:
    """exp(1000) overflows, but exp of the difference between two log-sum-exps does not."""
    outs = rng.standard_normal((2, 3, 8)).astype(np.float32)
    lses = np.array([[1000, -1000, 0], [1001, -1001, -200]], np.float32)
    np.testing.assert_allclose(_core.merge(outs, lses)[0], ref.merge(outs, lses)[0], rtol=0, atol=1e-5)


def packed(p: ref.Plan, x: np.ndarray, key: ref.Transform) -> np.ndarray:
    n_pages = -(-len(x) // p.page_tokens)
    pages, table = _core.new_pages(p.words, n_pages, 1), np.arange(n_pages, dtype=np.int32)[None]
    _core.append(p.words, x[None, None], None, np.array([len(x)], np.int32), pages, table, **keywords(key))
    return pages


def check_dot(rng: np.random.Generator, p: ref.Plan, n: int, n_queries: int, plain: bool = False, **rest) -> None:
    key = random_transform(rng, p, 1, plain=plain)
    pages = packed(p, rng.standard_normal((n, p.head_dim)).astype(np.float32), key)
    queries = rng.standard_normal((n_queries, p.head_dim)).astype(np.float32)
    got, want = _core.dot(p.words, queries, pages, n, **keywords(key), **rest), ref.dot(p, queries, pages, n, key)
    assert got.shape == (n_queries, n)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * abs(want).max(initial=0))


@pytest.mark.parametrize("bits", ref.WIDTHS)
@pytest.mark.parametrize("head_dim", sorted({*HEAD_DIMS, *ODD_HEAD_DIMS, 384, 1024}))
def test_dot(bits: int, head_dim: int, rng: np.random.Generator) -> None:
    check_dot(rng, ref.plan(head_dim, bits), 150, 11)


@pytest.mark.parametrize("n, n_queries", [(0, 3), (3, 0), (1, 1), (31, 8), (33, 9), (128, 7), (129, 17)])
def test_dot_sizes(n: int, n_queries: int, rng: np.random.Generator) -> None:
    check_dot(rng, ref.plan(40, 3), n, n_queries)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rotation", [ref.NONE, ref.HADAMARD, ref.DENSE])
def test_dot_plans(rotation: int, threads: int, rng: np.random.Generator) -> None:
    check_dot(rng, ref.plan(104, (5, 0, 2, 1), rotation=rotation), 300, 3, threads=threads)
    check_dot(rng, ref.plan(104, (0, 6, 3, 8), rotation=rotation, page_tokens=64), 300, 3, plain=True)
    check_dot(rng, ref.plan(104, (5, 0, 2, 6, 4, 8, 0), rotation=rotation, group=16), 300, 9, threads=threads)


@pytest.mark.parametrize("bits", ref.WIDTHS)
@pytest.mark.parametrize("head_dim", [40, 256, 4096])
def test_dot_sums_at_their_largest(bits: int, head_dim: int) -> None:
    """No sum overflows if every code is the outermost level and all numbers of a query are equal."""
    p = ref.plan(head_dim, bits, rotation=ref.NONE, page_tokens=32)
    pages = aligned_pages(1, 1, p.record_bytes, 0xFF)
    ref.scale_view(p, "key", pages[0, 0])[:] = 2
    q = np.ones((2, head_dim), np.float32) * np.array([[1e4], [-1e4]], np.float32)
    np.testing.assert_allclose(_core.dot(p.words, q, pages, 32), ref.dot(p, q, pages, 32, ref.Transform()), rtol=2e-5)


def test_dot_is_the_inner_product_roughly(rng: np.random.Generator) -> None:
    """At 5 bits, the nearest of 500 vectors is found by its packed inner product."""
    p, x = ref.plan(64, 5), rng.standard_normal((500, 64)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    scores = _core.dot(p.words, x, packed(p, x, ref.Transform()), 500)
    assert (scores.argmax(axis=1) == np.arange(500)).all()
    np.testing.assert_allclose(scores, x @ x.T, atol=0.04)


def test_dot_with_awkward_vectors(rng: np.random.Generator) -> None:
    p, x = ref.plan(48, 4), awkward_rows(rng, 40, 48)
    pages, q = packed(p, x, ref.Transform()), rng.standard_normal((2, 48)).astype(np.float32)
    want = ref.dot(p, q, pages, 40, ref.Transform())
    np.testing.assert_allclose(_core.dot(p.words, q, pages, 40), want, rtol=0, atol=2e-5 * abs(want).max())
