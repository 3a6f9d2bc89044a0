"""Exact scores of the rows that a search found (`refine`), and the width of its bound (`sigmas`, `train(recall=)`)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from slow_index import METRICS, exact, recall, rows

import turboquant

RNG = np.random.default_rng


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "mapped", "list", "large", "fortran", "backwards"])
def test_refined_scores_are_exact(metric, kind, tmp_path):
    x, queries = rows(2000), rows(50, seed=1)
    if kind == "large":
        x, queries = np.ldexp(x, 58), np.ldexp(queries, 58)
    index = turboquant.Index(64, 2, metric)
    index.add(x)
    np.save(tmp_path / "x.npy", x)
    given = {
        "float16": x.astype(np.float16) if kind == "float16" else None,
        "bfloat16": torch.from_numpy(x).bfloat16(),
        "mapped": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "list": x.tolist(),
        "fortran": np.asfortranarray(x),
        "backwards": x[::-1].copy()[::-1],
    }.get(kind, x)
    held = given.float().numpy() if kind == "bfloat16" else np.asarray(given, np.float32)
    scores, ids = index.search(queries, 10, refine=given, factor=8)
    every = exact(queries, held, metric)
    sign = -1 if metric == "l2" else 1
    np.testing.assert_allclose(
        scores, sign * np.take_along_axis(every, ids, 1), rtol=1e-4, atol=1e-4 * abs(every).max()
    )
    assert (np.diff(sign * scores, axis=1) <= 0).all()
    plain = index.search(queries, 10)[1]
    assert recall(ids, exact(queries, x, metric)) > 0.97 > recall(plain, exact(queries, x, metric)) + 0.1
    one, its = index.search(queries[3], 10, refine=given, factor=8)
    assert (its == ids[3]).all() and np.allclose(one, scores[3], rtol=1e-5) and one.shape == (10,)


def test_refined_are_the_best_of_those_found():
    """Results are the ids that a search for factor * k finds, sorted by exact scores, then by id."""
    x, queries = rows(500).round(1), rows(20, seed=1).round(1)
    index = turboquant.Index(64, 3, "ip")
    index.add(np.concatenate([x, x[:100]]))
    refine = np.concatenate([x, x[:100]])
    near = index.search(queries, 24)[1]
    scores, ids = index.search(queries, 8, refine=refine, factor=3)
    every = np.float32(np.einsum("qj,ij->qi", queries, refine))
    for q in range(20):
        wanted = sorted(near[q], key=lambda i: (-every[q, i], i))[:8]
        assert np.allclose(every[q, ids[q]], every[q, wanted], rtol=1e-5)
        same = np.flatnonzero(np.diff(scores[q]) == 0)
        assert (ids[q][same] < ids[q][same + 1]).all()
    for bits, factor in ((1, 10), (2, 3), (3, 2), (8, 2)):
        index = turboquant.Index(64, bits)
        index.add(x)
        default, told = (index.search(queries, 5, refine=x, factor=f) for f in (None, factor))
        assert all((a == b).all() for a, b in zip(default, told, strict=True))


@pytest.mark.parametrize("metric", METRICS)
def test_removed_and_compacted_rows_filters_and_large_k(metric):
    x, queries = rows(400), rows(9, seed=1)
    index = turboquant.Index(64, 4, metric)
    index.add(x)
    index.remove(np.arange(0, 400, 3))
    left = np.setdiff1d(np.arange(400), np.arange(0, 400, 3))
    every, last = exact(queries, x, metric), np.inf if metric == "l2" else -np.inf
    for _ in range(2):
        scores, ids = index.search(queries, 300, refine=x)
        assert (ids[:, len(left) :] == -1).all() and (scores[:, len(left) :] == last).all()
        assert (ids[:, : len(left)] == left[np.argsort(-every[:, left], axis=1)]).all()
        ids = index.search(queries, 3, [5, 7, 8, 11, 77_777], refine=x)[1]
        few = np.array([5, 7, 8, 11])
        assert (ids == few[np.argsort(-every[:, few], axis=1)[:, :3]]).all()
        index.compact()
    index.add(x[:2], ids=[1000, 1001])
    with pytest.raises(ValueError, match="`refine` must have a row for every id, got 400 rows, but the id 1001"):
        index.search(x[1], 5, refine=x)
    empty = turboquant.Index(64, 4, metric)
    for none in (x, x[:0]):
        scores, ids = empty.search(queries, 3, refine=none)
        assert (ids == -1).all() and (scores == last).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("of_no_row", [0, np.nan])
def test_the_first_of_the_vectors_is_not_read_for_rows_that_are_not_there(of_no_row):
    x = rows(4)
    x[0] = of_no_row
    index = turboquant.Index(64, 4, "cosine")
    index.add(x[1:], ids=[1, 2, 3])
    assert sorted(index.search(x[1], 5, refine=x)[1].tolist()) == [-1, -1, 1, 2, 3]


@pytest.mark.parametrize(
    "given, error, words",
    [
        (dict(refine=np.ones((400, 63))), ValueError, r"`refine` must be of shape \[n, 64\]"),
        (dict(refine=np.ones(64)), ValueError, r"`refine` must be of shape \[n, 64\], got \[64\]"),
        (dict(refine="x"), TypeError, "`refine` must be an array or lists of numbers"),
        (dict(refine=np.full((400, 64), np.nan)), ValueError, r"`refine\[[0-9]+, 0\]` must be finite"),
        (dict(refine=np.zeros((400, 64))), ValueError, r"`refine\[[0-9]+\]` must not be zero with cosine"),
        (dict(refine=np.ones((400, 64)), factor=0), ValueError, "`factor` must be in 1"),
        (dict(refine=np.ones((400, 64)), factor=1.5), TypeError, "`factor`"),
        (dict(factor=2), ValueError, "`factor` needs `refine`"),
        (dict(sigmas=-1), ValueError, "`sigmas` must be at least 0, got -1"),
        (dict(sigmas=math.nan), ValueError, "`sigmas` must be at least 0, got nan"),
        (dict(sigmas="2"), TypeError, "`sigmas` must be a number, got '2'"),
    ],
)
def test_refusals(given, error, words):
    x = rows(400)
    index = turboquant.Index(64, 4, "cosine")
    index.add(x)
    with pytest.raises(error, match=words):
        index.search(x[:3], 5, **given)


def test_refusals_of_a_wanted_recall():
    index = turboquant.Index(64, 4)
    for value, error in ((0, ValueError), (1.5, ValueError), (math.nan, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="train: `recall` must be"):
            index.train(rows(400), recall=value)
    with pytest.raises(ValueError, match="`recall` needs a sample of at least 64 rows, got 30"):
        index.train(rows(30), recall=0.9)
    assert not index.is_trained


def test_a_narrow_bound_finds_less():
    x, queries = RNG(0).standard_normal((6000, 96)), RNG(1).standard_normal((100, 96))
    index = turboquant.Index(96, 4)
    index.add(x)
    every = index.search(queries, 10, sigmas=math.inf)[1]
    found = [np.mean(np.sort(index.search(queries, 10, sigmas=s)[1]) == np.sort(every)) for s in (0, 1, 8)]
    assert found[0] < found[1] < found[2] == 1
    assert (index.search(queries, 10, sigmas=3)[1] == index.search(queries, 10)[1]).all()


@pytest.mark.parametrize("axes", [False, True])
def test_the_bound_for_a_wanted_recall(axes, tmp_path):
    x, queries = rows(6200, 96)[200:], rows(6200, 96)[:200]
    widths = []
    for share in (0.8, 0.99, None):
        index = turboquant.Index(96, 3)
        index.train(x, axes, recall=share)
        index.add(x)
        width = index._contents.transform.sigmas
        every = index.search(queries, 10, sigmas=math.inf)[1]
        found = index.search(queries, 10)[1]
        kept = np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(found, every, strict=True)])
        assert kept >= (share or 0.99) - 0.02
        if share:
            assert index.training["sigmas"] == width
        index.save(tmp_path / "index")
        assert (turboquant.Index.load(tmp_path / "index").search(queries, 10)[1] == found).all()
        widths.append(width)
    assert widths[0] < widths[1] <= widths[2]
