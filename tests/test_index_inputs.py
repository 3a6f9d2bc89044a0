"""An index takes numbers of any kind and size. Adding rows with given ids sorts no more than it must."""

from __future__ import annotations

import numpy as np
import pytest

import turboquant
from turboquant.index import storage

RNG = np.random.default_rng


def rows(n, dim=48, seed=0):
    return RNG(seed).standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int16, np.int64, np.uint8, bool, np.longdouble, list])
def test_kinds_of_numbers(metric, kind):
    x = (40 * rows(300)).round()
    if kind in (np.uint8, bool):
        x = np.abs(x) % (2 if kind is bool else 256)
        x[:, 0] += ~x.any(axis=1)
    results = []
    for given in (x, x.tolist() if kind is list else x.astype(kind)):
        index = turboquant.Index(48, 4, metric)
        index.train(given, axes=False)
        index.add(given)
        index.add(given[7])
        results.append((*index.search(given[:20], 9), *index.range_search(given[:1], 0.5)))
    assert all((a == b).all() for a, b in zip(*results, strict=True))


def test_integers_of_16_bits():
    x = RNG(0).integers(-32768, 32767, (400, 48))
    for metric in ("ip", "cosine", "l2"):
        index = turboquant.Index(48, 8, metric)
        index.add(x)
        assert (index.search(x[:50], 1)[1][:, 0] == np.arange(50)).all()


@pytest.mark.parametrize("trained", [None, False, True])
@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_sizes_are_undone_exactly(metric, trained, tmp_path):
    """Results for numbers of about 2^60 are those for numbers of about 1, and scores are 2^120 times as large."""
    x = rows(600) + 1
    queries, results = rows(20, seed=1) + 1, []
    for power in (0, 60):
        index = turboquant.Index(48, 4, metric)
        if trained is not None:
            index.train(np.ldexp(x, power), axes=trained)
        index.add(np.ldexp(x, power))
        index.save(tmp_path / "index")
        for one in (index, turboquant.Index.load(tmp_path / "index")):
            scores, ids = one.search(np.ldexp(queries, power), 9)
            threshold = float(scores[0, 4])
            lims, found, _ = one.range_search(np.ldexp(queries[:1], power), threshold)
            assert lims[1] >= 5 and (found[:5] == scores[0, :5]).all()
            scale = 1 if metric == "cosine" else 4.0**-power
            vectors = one.reconstruct([3, 4]) / (1 if metric == "cosine" else 2.0**power)
            results.append((scores * np.float64(scale), ids, vectors))
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


def test_sizes_beyond_what_scores_can_be():
    """Scores are at most the largest float32, and the order of results does not change."""
    x = rows(500)
    largest = x * np.float32(6e37)
    for metric in ("ip", "l2"):
        index, plain = turboquant.Index(48, 4, metric), turboquant.Index(48, 4, metric)
        index.add(largest)
        plain.add(x)
        scores, ids = index.search(largest[:20], 9)
        assert (ids == plain.search(x[:20], 9)[1]).all() and np.isfinite(scores).all()
        scores, ids = index.search(largest[:20], 9, refine=largest)
        assert (ids == plain.search(x[:20], 9, refine=x)[1]).all() and np.isfinite(scores).all()
    index = turboquant.Index(48, 4)
    index.add(largest)
    assert (index.search(x[:20], 9)[1] == plain_ids(x)).all()  # queries of another size


def plain_ids(x):
    plain = turboquant.Index(48, 4)
    plain.add(x)
    return plain.search(x[:20], 9)[1]


def test_larger_rows_come_later():
    """Larger new rows make the index rescale stored ones. Results among these, and of earlier copies, do not change."""
    x = rows(400)
    index = turboquant.Index(48, 4)
    index.add(x)
    copy, before = index.copy(), index.search(x[:9], 5)
    index.add(np.ldexp(x[:100], 70))
    scores, ids = index.search(x[:9], 105)
    assert (ids[:, :30] >= 400).all()  # about half of the large rows have large products
    small = index.search(x[:9], 5, filter=np.arange(400))
    assert all((a == b).all() for a, b in zip(small, before, strict=True))
    assert all((a == b).all() for a, b in zip(copy.search(x[:9], 5), before, strict=True))
    other = turboquant.Index(48, 4)
    other.add(np.concatenate([x, np.ldexp(x[:100], 70)]))
    assert all((a == b).all() for a, b in zip(other.search(x[:9], 105), (scores, ids), strict=True))


def test_l2_far_from_the_origin():
    """With the mean, squared distances do not depend on where the origin is."""
    x, queries = RNG(0).standard_normal((2000, 64)), RNG(1).standard_normal((50, 64))
    found = []
    for offset in (0, 10_000):
        index = turboquant.Index(64, 8, "l2")
        index.train(x + offset, axes=False)
        index.add(x + offset)
        found.append(index.search(queries + offset, 10))
    truth = np.argsort(((queries[:, None] - x) ** 2).sum(axis=2), axis=1)[:, :10]
    for _, ids in found:
        assert np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(ids, truth, strict=True)]) > 0.96
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0.03)


def test_single_adds_with_own_ids_sort_little(monkeypatch):
    monkeypatch.setattr(storage, "ROWS", 2048)
    x, ids = rows(13_000, 8), RNG(0).permutation(10**6)[:13_000]
    index = turboquant.Index(8, 4)
    index.add(x[:10_000], ids=ids[:10_000])
    sizes = []
    for name in ("sort", "argsort"):
        call = getattr(np, name)
        monkeypatch.setattr(
            np, name, lambda a, *rest, call=call, **more: sizes.append(len(a)) or call(a, *rest, **more)
        )
    for i in range(10_000, 13_000):
        index.add(x[i], ids=[ids[i]])
    assert sum(sizes) < 3000 * 30
    for taken in (3, 9_999, 11_000, 12_999):
        with pytest.raises(ValueError, match=f"got {ids[taken]}, which is in the index"):
            index.add(x[0], ids=[ids[taken]])
    index.remove(ids[[3, 11_000, 12_999]])
    for free in (3, 11_000, 12_999):
        index.add(x[free], ids=[ids[free]])
        with pytest.raises(ValueError, match="is in the index"):
            index.add(x[free], ids=[ids[free]])
    assert set(index.ids) == set(ids)
