"""The bound of a search's first pass is measured on the rows. So `search` finds what a ranking by all scores of the
same codes finds, also where errors of rotated coordinates are not independent noise."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from slow_index import levels_of, sizes_of

import turboquant
from turboquant import _core
from turboquant.index.transform import bound

SENTENCES = Path(__file__).parent / "data" / "sentences.npy"
EVERY = "searches read all bits of all rows"


def cut(x, queries=100):
    return x[queries:], x[:queries]


def one_hot(rng):
    x, queries = np.zeros((3000, 128)), np.zeros((100, 128))
    x[np.arange(3000), rng.integers(0, 128, 3000)] = rng.random(3000) + 0.5
    queries[np.arange(100), rng.integers(0, 128, 100)] = 1
    return x, queries


def large_dims(rng, dim, factors):
    x = rng.standard_normal((3000, dim))
    x[:, : len(factors)] *= factors
    return x, x[:100] + 0.5 * rng.standard_normal((100, dim))


def sparse(rng, share):
    x = rng.standard_normal((3100, 256)) * (rng.random((3100, 256)) < share)
    x[~x.any(axis=1), 0] = 1
    return cut(x)


def clusters(rng):
    centres = 3 * rng.standard_normal((50, 64))
    return cut(centres[rng.integers(0, 50, 3100)] + rng.standard_normal((3100, 64)))


DATA = {  # name: rows and queries of a random generator
    **{
        f"{d} numbers": lambda rng, d=d: cut(rng.standard_normal((3100, d)))
        for d in (1, 2, 3, 4, 6, 8, 12, 16, 32, 128)
    },
    "one-hot": one_hot,
    "two large": lambda rng: large_dims(rng, 96, [60, 60]),
    "one large": lambda rng: large_dims(rng, 128, [30]),
    "five large": lambda rng: large_dims(rng, 384, [20] * 5),
    "five somewhat large": lambda rng: large_dims(rng, 384, [8] * 5),
    "2 of 256": lambda rng: sparse(rng, 2 / 256),
    "8 of 256": lambda rng: sparse(rng, 8 / 256),
    "32 of 256": lambda rng: sparse(rng, 32 / 256),
    "on a plane": lambda rng: cut(rng.standard_normal((3100, 2)) @ rng.standard_normal((2, 200))),
    "far away": lambda rng: cut(rng.standard_normal((3100, 128)) + 10),
    "192 numbers far away": lambda rng: cut(rng.standard_normal((3100, 192)) + 10),
    "512 numbers far away": lambda rng: cut(rng.standard_normal((3100, 512)) + 3),
    "colours": lambda rng: cut(rng.integers(0, 256, (3100, 3)).astype(float)),
    "bits": lambda rng: cut(rng.integers(0, 2, (3100, 128)).astype(float)),
    "histograms": lambda rng: cut(rng.dirichlet(np.full(64, 0.05), 3100)),
    "heavy tails": lambda rng: cut(rng.standard_t(2, (3100, 100))),
    "clusters": clusters,
    "sentences": lambda rng: cut(np.load(SENTENCES).astype(float)),
}  # fmt: skip


def all_scores(index, queries):
    contents = index._contents
    return _core.index_scores_of(index._space(contents), queries, contents.rows(None), None)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_search_finds_what_all_scores_find(metric, bits):
    """The share of the ten best by exact scores is at most 0.005 below that of a ranking by all scores of the codes."""
    for name, make in DATA.items():
        x, queries = (part.astype(np.float32) for part in make(np.random.default_rng(0)))
        if metric == "cosine":
            x, queries = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (x, queries))
        exact = queries.astype(float) @ x.T.astype(float)
        if metric == "l2":
            exact -= (x.astype(float) ** 2).sum(axis=1) / 2
        enough = -np.sort(-exact, axis=1)[:, 9:10]
        enough = enough - 1e-6 * np.abs(enough)
        index = turboquant.Index(x.shape[1], bits, metric)
        index.add(x)
        best = np.argsort(-all_scores(index, queries), axis=1, kind="stable")[:, :10]
        shares = [(np.take_along_axis(exact, ids, 1) >= enough).mean() for ids in (index.search(queries, 10)[1], best)]
        assert shares[0] >= shares[1] - 0.005, (name, shares)
        few = ["1 numbers", "2 numbers", "4 numbers", "2 of 256"] + ["one-hot"] * (metric != "cosine")
        if bits == 4 and name in few:
            assert EVERY in repr(index), name
        if name in ("32 numbers", "128 numbers", "on a plane", "far away", "sentences", "clusters"):
            assert EVERY not in repr(index), name


@cache
def leading_fit(bits, lead):
    """Returns (values, error): the estimate of a level of N(0, 1) from its first `lead` bits, and its squared error."""
    usual = np.random.default_rng(1).standard_normal(400_000).astype(np.float32)
    its = levels_of(usual, bits)
    field = ranks_of(its, bits) >> bits - lead
    values = np.array([its[field == k].mean() for k in range(1 << lead)])
    values *= (its * usual).mean() / (values[field] * usual).mean()
    return values, ((its - values[field]) ** 2).mean()


def coded(z, bits):
    """The levels of rotated rows, in units of u times the row's size."""
    u = z * (1 / np.sqrt((z.astype(float) ** 2).mean(axis=1, keepdims=True))).astype(np.float32)
    if bits < 3:
        return levels_of(u, bits)
    return levels_of(u * sizes_of(u, bits)[:, None], bits)


def leading_classes(scales):
    """Returns k of each row, which its scale holds (turboquant_index.h)."""
    return ((scales.view(np.uint32) >> 3 & 63).astype(int) + 32) % 64 - 32


def next_factors(k, bits):
    """Returns what the second bound multiplies scales by."""
    return 1 + np.maximum(k, 0) / 192 if bits < 8 else np.ones(len(k))


@pytest.mark.parametrize("dim, lead", [(64, 2), (100, 2), (224, 1), (384, 1)])
@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
def test_leading_classes_by_definition(bits, dim, lead):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((300, dim)).astype(np.float32)
    index = turboquant.Index(dim, bits)
    index.add(x)
    transform, scales = index._contents.transform, index._contents.segments[0].scales
    assert transform.lead[0] == lead
    padded = np.zeros((300, transform.channels), np.float32)
    padded[:, :dim] = x
    z = _core.rotate(transform.space(0)[0], padded, None)
    levels = coded(z, bits)
    values, _ = leading_fit(bits, lead)
    estimate = (z * values[ranks_of(levels, bits) >> bits - lead]).sum(axis=1, dtype=float)
    k = 64 * ((z * levels).sum(axis=1, dtype=float) / estimate - 1)
    own = leading_classes(scales)
    assert (np.abs(own - k) < 0.5 + 0.3).all() and (own == np.rint(k)).mean() > 0.8  # `values` are estimates
    assert len(set(own)) > 3


def ranks_of(levels, bits):
    """The codes of levels in units of u."""
    if bits == 8:
        return (np.rint(levels * 32) + 128).astype(int)
    every = np.unique(levels_of(np.linspace(-9, 9, 100_000, dtype=np.float32), bits))
    return np.searchsorted((every[1:] + every[:-1]) / 2, levels)


@pytest.mark.parametrize("lead, bits", [(1, 4), (2, 4), (2, 8), (1, 3), (1, 8)])
def test_noise_classes_by_definition(lead, bits):
    """The lowest 3 bits of scales are the noise class that NumPy computes from decoded levels and the rotation. Where
    one bit leads, it is the larger class of the first bound and of the second, which knows the next bit too."""
    rng = np.random.default_rng(1)
    dim = 64 if lead == 2 else 224
    x = rng.standard_normal((400, dim)).astype(np.float32) * (rng.random((400, 1)) < rng.random((400, dim)) ** 4)
    x[:, 0] += 1
    index = turboquant.Index(dim, bits)
    index.add(x)
    assert index._contents.transform.lead[0] == lead
    segment = index._contents.segments[0]
    plan = index._contents.transform.space(0)[0]
    z = _core.rotate(plan, x, None)
    levels, k = coded(z, bits), leading_classes(segment.scales)
    factors = {lead: 1 + k / 64, lead + 1: next_factors(k, bits)}
    ends, sure = np.array([1, 1.2, 1.5, 1.9, 2.4, 3.2, 4.5]), np.ones(400, bool)
    expected, largest = [], np.zeros(400, int)
    for known in (1, 2) if lead == 1 else (2,):
        values, error = leading_fit(bits, known)
        residuals = levels / factors[known][:, None] - values[ranks_of(levels, bits) >> bits - known]
        back = _core.rotate(plan, residuals.astype(np.float32), None, inverse=True).astype(float)
        noise = np.sqrt((x.astype(float) ** 2 * back**2).sum(1) / (x.astype(float) ** 2).sum(1) / error)
        sure &= np.abs(noise[:, None] / ends - 1).min(axis=1) > 0.02  # `error` is estimated from 400,000 numbers
        expected.append(np.searchsorted(ends, noise))
        largest = np.maximum(largest, expected[-1])
    classes = segment.scales.view(np.uint32) & 7
    assert sure.mean() > 0.6 and (classes == largest)[sure].all() and len(set(classes)) > 4
    assert lead == 2 or all((own != largest)[sure].any() for own in expected)
    assert (segment.noise.sum(axis=0) == np.bincount(classes, minlength=8)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dim", [200, 240, 256])
def test_rows_are_found_by_both_bounds(bits, dim):
    """With a narrow bound, a search finds the best of the rows whose upper bound reaches the k-th largest of min(score,
    upper bound). The first bound alone would find others. Tables of a query are rounded, so some rows differ."""
    rng, k = np.random.default_rng(0), 10
    x, queries = (rng.standard_normal((n, dim)).astype(np.float32) for n in (1500, 60))
    index = turboquant.Index(dim, bits)
    index.add(x)
    plan, scales = index._contents.transform.space(0)[0], index._contents.segments[0].scales.astype(float)
    z, q = (_core.rotate(plan, part, None) for part in (x, queries))
    levels, scores = coded(z, bits), all_scores(index, queries).astype(float)
    k_of_rows = leading_classes(index._contents.segments[0].scales)
    factors = {1: 1 + k_of_rows / 64, 2: next_factors(k_of_rows, bits)}
    codes, squares = ranks_of(levels, bits), (q.astype(float) ** 2).sum(axis=1)
    for sigmas, least, less in ((0.0, 0.95, 0.04), (1.0, 0.98, 0.005)):
        first, second = (
            scales * factors[known] * (q @ values[codes >> bits - known].T + width * np.sqrt(error * squares)[:, None])
            for known, width in ((1, sigmas), (2, 1.2 * sigmas))
            for values, error in [leading_fit(bits, known)]
        )
        found = index.search(queries, k, sigmas=sigmas)[1]
        shares = []
        for upper in (np.minimum(first, second), first):
            limit = -np.sort(-np.minimum(scores, upper), axis=1)[:, k - 1 : k]
            best = np.argsort(np.where(upper >= limit, -scores, np.inf), axis=1, kind="stable")[:, :k]
            shares.append(np.mean([np.isin(a, b).mean() for a, b in zip(found, best, strict=True)]))
        assert shares[0] > least and shares[1] <= shares[0] - less * (bits > 2), (sigmas, shares)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dim", [200, 208, 216, 256])
def test_a_second_bound_is_the_same_on_every_isa(bits, dim):
    rng = np.random.default_rng(0)
    x, queries = rng.standard_normal((5000, dim)).astype(np.float32), rng.standard_normal((9, dim)).astype(np.float32)
    index = turboquant.Index(dim, bits)
    index.add(x)
    found = []
    for isa in _core.isa_available():
        _core.set_isa(isa)
        try:
            for threads, sigmas in ((1, 0.5), (2, 0.5), (1, 2.5)):
                scores, ids = (a.copy() for a in index.search(queries, 10, threads=threads, sigmas=sigmas))
                found.append((sigmas, scores.tobytes(), ids.tobytes()))
                each = np.array([index.search(query, 10, sigmas=sigmas)[1] for query in queries])
                assert (each == ids).all()
        finally:
            _core.set_isa(None)
    assert len(set(found)) == 2


def test_least_width_of_a_bound():
    quiet, some, loud = (np.zeros((256, 8), int) for _ in range(3))
    quiet[120, :2], some[100, :4], loud[90, 7] = (900, 100), (50, 0, 40, 10), 9
    assert bound(2.5, quiet) == 2.5 and bound(3.0, quiet) == 3.0 and bound(1.0, quiet) == 1.0
    assert 2.5 < bound(2.5, some) <= 4
    assert bound(2.5, loud) == math.inf == bound(math.inf, quiet)
    assert bound(2.5, 0 * quiet) == bound(2.5, 0) == 2.5  # no rows
    few = quiet.copy()
    few[110, 7] = 8  # under 1.25 %
    assert bound(2.5, few) == 2.5
    few[110, 7], few[130, 7] = 0, 8  # these rows have larger scales than all others
    assert bound(2.5, few) == 2.5
    few[130, 0] = 60  # too many of the 5 % with the largest scales
    assert bound(2.5, few) > 2.5


def test_the_bound_follows_the_rows_that_are_there():
    rng = np.random.default_rng(0)
    index = turboquant.Index(128, 4)
    index.add(rng.standard_normal((500, 128)))
    assert EVERY not in repr(index)
    index.add(one_hot(rng)[0])
    assert EVERY in repr(index)
    index.remove(np.arange(500, 3500))
    assert EVERY not in repr(index)


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_a_scan_without_a_bound_is_the_same_on_every_isa(bits):
    x = np.random.default_rng(0).standard_normal((1500, 3)).astype(np.float32)
    index = turboquant.Index(3, bits, "l2")
    index.add(x)
    index.remove(np.arange(0, 1500, 7))
    allowed = np.arange(1500) % 3 > 0
    every = -all_scores(index, x[:40])
    every[:, ::7] = np.inf
    for isa in _core.isa_available():
        _core.set_isa(isa)
        try:
            for threads in (1, 2):
                scores, ids = (a.copy() for a in index.search(x[:40], 9, threads=threads))
                best = np.argsort(every, axis=1, kind="stable")[:, :9]
                assert (ids == best).all() and (scores == np.take_along_axis(every, best, 1)).all()
                ids = index.search(x[:40], 9, filter=allowed[index.ids], threads=threads)[1]
                assert (ids == np.argsort(np.where(allowed, every, np.inf), axis=1, kind="stable")[:, :9]).all()
        finally:
            _core.set_isa(None)
