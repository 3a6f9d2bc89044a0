"""An index that also keeps its vectors in 8 bits, `Index(refine="int8")`, and ranks what a search finds by these."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from slow_index import METRICS, SlowIndex, exact, levels_of, recall, rotated, rows

import turboquant
from turboquant import _core
from turboquant.index import training, transform
from turboquant.index.lists import Lists

NEAR = dict(rtol=2e-4, atol=2e-3)


def filled(metric="ip", bits=2, dim=64, train=True, n=2000):
    index = turboquant.Index(dim, bits, metric, refine="int8")
    if train:
        index.train(rows(n, dim))
    index.add(rows(n, dim))
    return index


def plain(index):
    """The same codes without the 8 bits: what the first pass finds."""
    other = index.copy()
    now = other._contents
    segments = tuple(replace(s, fine=None) for s in now.segments)
    other._contents = replace(now, transform=replace(now.transform, fine=None, factor=1), segments=segments)
    other._refine = None
    return other


def slow(index, x):
    """A slow index of the 8 bits alone."""
    other = SlowIndex(turboquant.Index(index.d, index.bits, index.metric))
    other.transform = index._contents.transform.fine
    other.add(x)
    return other


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dim", [64, 100])
def test_scores_are_those_of_the_slow_index(metric, train, dim):
    x, queries = rows(2000, dim), rows(20, dim, seed=1)
    index = filled(metric, dim=dim, train=train)
    reference = slow(index, x)
    scores, ids = index.search(queries, 10, factor=4)
    near = plain(index).search(queries, 40)[1]
    sign = -1 if metric == "l2" else 1
    for q, query in enumerate(queries):
        every = reference.scores(query)
        np.testing.assert_allclose(scores[q], [every[i] for i in ids[q]], **NEAR)
        best = sorted((sign * every[i] for i in near[q].tolist()), reverse=True)[:10]
        np.testing.assert_allclose(sign * scores[q], best, **NEAR)
        assert set(ids[q].tolist()) <= set(near[q].tolist())
        one = index.search(query, 10, factor=4)
        assert np.array_equal(one[0], scores[q]) and np.array_equal(one[1], ids[q])


def test_more_neighbours_are_found():
    x, queries = rows(2000), rows(100, seed=1)
    index = filled("ip")
    truth = exact(queries, x, "ip")
    before, default = (recall(i.search(queries, 10)[1], truth) for i in (plain(index), index))
    assert before + 0.2 < default and recall(index.search(queries, 10, factor=8)[1], truth) > 0.98
    own = index.search(queries, 10, refine=x, factor=8)  # the caller's rows take precedence
    assert np.allclose(own[0], np.take_along_axis(truth, own[1], 1), rtol=1e-4, atol=1e-4)
    assert (
        np.abs(index.reconstruct(np.arange(50)) - x[:50]).max() < 0.1 < np.abs(plain(index).reconstruct(0) - x[0]).max()
    )


@pytest.mark.parametrize("dim", [64, 100, 384])
def test_the_largest_number_of_a_row_is_the_largest_level(dim):
    """No scan reads the 8 bits, so each row has the finest step that clamps nothing. The error is less than 0.7 of that
    of levels of one size, and less than that of `Index(bits=8)`, whose rows have one of six sizes."""
    rng = np.random.default_rng(0)
    for x in (rng.standard_normal((500, dim)), rng.standard_t(2, (500, dim))):
        index, same = turboquant.Index(dim, 2, refine="int8"), turboquant.Index(dim, 8)
        for one in (index, same):
            one.add(x)
        codes = index._contents.segments[0].fine.codes
        assert (np.abs(codes.astype(int) - 128).max(axis=1) == 127).all()
        losses = [
            np.square((one.reconstruct(np.arange(500)) - x) / np.linalg.norm(x, axis=1)[:, None]).sum()
            for one in (index, same)
        ]
        z = rotated(same._contents.transform, x.astype(np.float32)).astype(float)
        u = z / np.sqrt((z * z).mean(axis=1, keepdims=True))
        levels = levels_of(u, 8)
        one_size = levels * ((u * u).sum(axis=1) / (u * levels).sum(axis=1))[:, None] - u
        one_size = (np.square(one_size).sum(axis=1) / np.square(u).sum(axis=1)).sum()
        assert losses[0] < 0.7 * one_size and losses[0] < losses[1] < one_size, (losses, one_size)


def test_every_instruction_set_and_threads():
    index, queries = filled("l2", dim=100), rows(70, 100, seed=1)
    found = index.search(queries, 10)
    try:
        for isa in _core.isa_available():
            _core.set_isa(isa)
            for threads in (1, 3):
                own = index.search(queries, 10, threads=threads)
                assert all(np.array_equal(a, b) for a, b in zip(own, found, strict=True)), isa
            other = filled("l2", dim=100, train=False)
            for a, b in zip(other._contents.segments, index._contents.segments, strict=True):
                assert a.fine.codes.shape == b.fine.codes.shape == (2000, 104)
    finally:
        _core.set_isa(None)


@pytest.mark.parametrize("metric", METRICS)
def test_changes_files_and_copies(metric, tmp_path):
    """However rows were added, removed and stored, results are those of the rows that are left."""
    x, queries = rows(1000), rows(9, seed=1)
    index = turboquant.Index(64, 2, metric, refine="int8")
    index.train(x)
    for at in range(0, 900, 300):
        index.add(x[at : at + 300])
    for i in range(900, 1000):
        index.add(x[i], ids=[5000 + i])
    index.remove(np.arange(0, 900, 3))
    kept = np.r_[np.setdiff1d(np.arange(900), np.arange(0, 900, 3)), np.arange(900, 1000)]
    other = turboquant.Index(64, 2, metric, refine="int8")
    other.train(x)
    other.add(x[kept], ids=np.where(kept < 900, kept, kept + 5000))
    wanted = other.search(queries, 10)
    index.save(tmp_path / "index")
    for again in (
        index,
        index.copy(),
        pickle.loads(pickle.dumps(index)),
        turboquant.Index.load(tmp_path / "index"),
        turboquant.Index.load(tmp_path / "index", mmap=False),
    ):
        again.verify()
        assert again.refine == "int8"
        own = again.search(queries, 10)
        assert all(np.array_equal(a, b) for a, b in zip(own, wanted, strict=True))
    index.compact()
    assert np.array_equal(index.search(queries, 10)[1], wanted[1])
    scores, ids = index.search(queries, 800)
    assert (ids[:, len(kept) :] == -1).all() and np.isinf(scores[:, len(kept) :]).all()
    assert (np.sort(ids[:, : len(kept)]) == np.sort(index.ids)).all()
    few = index.search(queries, 3, [4, 7, 8, 5950, 77_777])[1]
    assert np.isin(few, [4, 7, 8, 5950]).all()
    assert index.nbytes < 1.3 * other.nbytes
    empty = turboquant.Index(64, 2, metric, refine="int8")
    assert (empty.search(queries, 3)[1] == -1).all()


def test_bytes():
    index, other = filled("ip"), turboquant.Index(64, 2)
    other.train(rows(2000))
    other.add(rows(2000))
    assert index.nbytes - index.fixed_nbytes == other.nbytes - other.fixed_nbytes + 2000 * (64 + 8)


def test_large_numbers():
    x, queries = np.ldexp(rows(500), 58), np.ldexp(rows(9, seed=1), 58)
    index = turboquant.Index(64, 2, "l2", refine="int8")
    index.add(x)
    scores, ids = index.search(queries, 5, factor=20)
    wanted = -exact(queries, x, "l2")
    np.testing.assert_allclose(scores, np.take_along_axis(wanted, ids, 1), rtol=0.02)
    assert recall(ids, -wanted) > 0.9


@pytest.mark.parametrize("metric", METRICS)
def test_lists(metric, tmp_path, monkeypatch):
    def learnt(x, n, distances, seed, space):
        directions = np.linalg.qr(np.random.default_rng(3).standard_normal((64, n)))[0].T.astype(np.float32)
        return Lists(np.ascontiguousarray(directions), None if distances else np.full(n, 0.5, np.float32))

    monkeypatch.setattr(turboquant.index.index, "learn", learnt)
    x, queries = rows(1500), rows(30, seed=1)
    index = turboquant.Index(64, 1, metric, lists=7, refine="int8")
    index.train(x)
    index.add(x[:1000])
    index.compact()
    index.add(x[1000:])
    before = index.search(queries, 10, factor=30)
    assert recall(before[1], exact(queries, x, metric)) > 0.95
    index.save(tmp_path / "index")
    after = turboquant.Index.load(tmp_path / "index")
    found = after.search(queries, 10, factor=30)
    assert np.array_equal(found[1], before[1]) and np.array_equal(found[0], before[0])
    assert (after.search(queries, 10, probe=2)[1] >= 0).all()


def test_train_chooses_the_factor(tmp_path):
    x = rows(3000)
    factors = []
    for share in (0.8, 0.97, 1.0):
        index = turboquant.Index(64, 1, refine="int8")
        index.train(x, recall=share)
        index.add(x)
        told = index.training
        factors.append(told["factor"])
        assert told["found"] >= share or share == 1
        own = index.search(rows(9, seed=1), 5)
        assert np.array_equal(own[1], index.search(rows(9, seed=1), 5, factor=told["factor"])[1])
        index.save(tmp_path / "index")
        assert np.array_equal(turboquant.Index.load(tmp_path / "index").search(rows(9, seed=1), 5)[1], own[1])
    assert factors[0] < factors[1] <= factors[2] and factors[1] in training._FACTORS


def test_refusals(tmp_path):
    for wrong in ("float16", 8, True):
        with pytest.raises(ValueError, match="`refine` must be None or 'int8'"):
            turboquant.Index(64, refine=wrong)
    index = filled(n=200)
    with pytest.raises(ValueError, match="`factor` must be in 1"):
        index.search(rows(3), 5, factor=0)
    now = index._contents
    space, segments = now.transform.fine.space(0), now.fine_rows()
    queries = rows(2)
    found = _core.index_scores_of(space, queries, segments, np.array([[0, -1], [199, 3]]))
    every = _core.index_scores_of(space, queries, segments[:1], None)
    assert np.array_equal(found, np.array([[every[0, 0], -np.inf], [every[1, 199], every[1, 3]]], np.float32))
    for wrong in ([[200, 0], [0, 0]], [[-2, 0], [0, 0]], [[0, 0]], [0, 0]):
        with pytest.raises(ValueError, match="`rows` must be"):
            _core.index_scores_of(space, queries, segments, np.array(wrong))
    with pytest.raises(ValueError, match="`lead` must be above 0 in a group, for a search"):
        _core.index_search(space, queries, segments, 3)
    assert transform.with_fine(now.transform, 1, None).fine.planes == 0
