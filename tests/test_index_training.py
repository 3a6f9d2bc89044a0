"""`Index.train` keeps what finds more neighbours of held-out rows, and says what it chose."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from fuzz.index_file_fuzzer import joined, split

import turboquant
from turboquant.index import transform
from turboquant.index.transform import widened

RNG = np.random.default_rng


def spectrum(n, dim=128, seed=0, mean=0.05):
    rng = RNG(seed)
    axes = np.linalg.qr(RNG(99).standard_normal((dim, dim)))[0]
    return (rng.standard_normal((n, dim)) / np.sqrt(1 + np.arange(dim)) @ axes + mean).astype(np.float32)


def recall(index, queries, x, metric):
    exact = queries.astype(float) @ x.T.astype(float)
    if metric == "l2":
        exact -= (x.astype(float) ** 2).sum(axis=1) / 2
    truth = np.argsort(-exact, axis=1)[:, :10]
    return np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(index.search(queries, 10)[1], truth, strict=True)])


def test_what_was_chosen_is_told(tmp_path):
    x = spectrum(3000)
    index = turboquant.Index(128, 3)
    assert index.training is None and not index.is_trained and "trained" not in repr(index)
    index.train(x)
    told = index.training
    assert told["chosen"] == "axes" and index.is_trained
    assert f", trained: axes of {' and '.join(map(str, sorted({*told['widths']})))} bits" in repr(index)
    assert told["queries"] == 300 and told["sigmas"] <= 6 and len(told["widths"]) == 4
    assert {"none", "mean", "axes, power 1"} <= set(told["recall"])
    assert max(told["recall"], key=told["recall"].get).startswith("axes")
    told["chosen"] = "mine"  # a copy
    assert index.training["chosen"] == "axes"
    assert "deviations" not in repr(index)
    index.add(x)
    assert repr(index).endswith(f", searches skip rows by a bound of {index.sigmas:g} deviations>")
    index.save(tmp_path / "index")
    assert turboquant.Index.load(tmp_path / "index").training == index.training == index.copy().training
    few = turboquant.Index(128, 3)
    few.train(x[:40])
    assert few.training == {"chosen": "mean", "queries": 0, "recall": {}}


MEAN = {"chosen": "mean", "queries": 0, "recall": {"mean": 0.5}}
AXES = {**MEAN, "chosen": "axes", "power": 1.0, "together": False, "widths": [3, 3]}
FORGED = {
    "no object": "axes",
    "nothing": {},
    "axes alone": {"chosen": "axes"},
    "an unknown choice": {**MEAN, "chosen": "both"},
    "no recall": {"chosen": "mean", "queries": 0},
    "recall of text": {**MEAN, "recall": {"mean": "1"}},
    "queries of text": {**MEAN, "queries": "9"},
    "a huge power": {**AXES, "power": 10**999},
    "widths that are a number": {**AXES, "widths": 5},
    "widths of others": {**AXES, "widths": [9, 9]},
    "more": {**MEAN, "more": [[[]]]},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_files_that_tell_what_train_cannot_are_refused(forged, tmp_path):
    path = tmp_path / "index"
    turboquant.Index(64, 3).save(path)
    header, payload = split(path.read_bytes())
    for told in (AXES, forged):
        header["__metadata__"]["turboquant"]["training"] = told
        path.write_bytes(joined(copy.deepcopy(header), payload))
        if told is AXES:
            assert turboquant.Index.load(path).training == AXES
    with pytest.raises(ValueError, match="`path` must be a file of an index, got .*: `training` must be null or what"):
        turboquant.Index.load(path)


@pytest.mark.parametrize("forged", [10**999, "3", True, [1.0]], ids=lambda x: type(x).__name__)
def test_files_with_a_bound_that_is_no_number_are_refused(forged, tmp_path):
    path = tmp_path / "index"
    turboquant.Index(64, 3).save(path)
    header, payload = split(path.read_bytes())
    header["__metadata__"]["turboquant"]["sigmas"] = forged
    path.write_bytes(joined(header, payload))
    with pytest.raises(ValueError, match="`path` must be a file of an index, got .*: `sigmas` must be null or a"):
        turboquant.Index.load(path)


def test_a_sample_of_10_000_rows_has_500_queries():
    index = turboquant.Index(8, 2)
    index.train(RNG(0).standard_normal((10_000, 8)))
    assert index.training["queries"] >= 500


@pytest.mark.parametrize("bits", [4, 8])
def test_the_mean_is_judged(bits):
    """`train` does not choose the mean where it hurts: if lengths differ much, short rows are far from the mean."""
    rng = RNG(0)
    x = (rng.lognormal(0, 2, (3000, 1)) * rng.standard_normal((3000, 96))).astype(np.float32)
    queries = rng.standard_normal((100, 96)).astype(np.float32)
    shares = []
    for axes in (None, False, True):
        index = turboquant.Index(96, bits, "l2")
        if axes is not None:
            index.train(x, axes)
            assert index.training["chosen"] != "mean"
        index.add(x)
        shares.append(recall(index, queries, x, "l2"))
    assert min(shares) >= shares[0] - 0.005


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_training_does_not_hurt(metric):
    """Random data has nothing to learn: whatever is chosen finds as much as the mean alone and has a bound."""
    rng = RNG(3)
    kinds = {
        "random": rng.standard_normal((4000, 64)),
        "uniform": rng.random((4000, 64)),
        "clusters": 3 * rng.standard_normal((50, 64))[rng.integers(0, 50, 4000)] + rng.standard_normal((4000, 64)),
        "spectrum": spectrum(4000, 64, mean=0.5),
    }
    for name, x in kinds.items():
        x = x.astype(np.float32)
        if metric == "cosine":
            x /= np.linalg.norm(x, axis=1, keepdims=True)
        shares = []
        for axes in (None, False, True):
            index = turboquant.Index(64, 2, metric)
            if axes is not None:
                index.train(x[200:], axes)
            index.add(x[200:])
            assert index._contents.sigmas <= 6, name
            shares.append(recall(index, x[:200], x[200:], metric))
        assert shares[1] >= shares[0] - 0.01 and shares[2] >= shares[1] - 0.01, (name, shares)


def test_widths_for_powers_of_variances():
    """Power 0 spreads bits over the groups more evenly than power 1, which follows the largest variances."""
    variances = 4.0 ** -np.arange(8)
    widths = [transform.allocate(variances, np.full(8, 4), 3, power) for power in (0, 0.5, 1)]
    assert all(w.sum() == 24 and (np.diff(w.astype(int)) <= 0).all() for w in widths)
    assert widths[0][0] <= widths[1][0] <= widths[2][0] and widths[0][-1] >= widths[2][-1]


def test_widths_count_the_channels_of_a_group():
    """A last group of 8 channels takes a quarter of the bits of the others."""
    sizes = np.array([4, 4, 4, 1])
    for bits in range(1, 6):
        for power in (0, 1):
            widths = transform.allocate(np.array([8.0, 4.0, 2.0, 1.0]), sizes, bits, power)
            assert bits * 13 - 4 < widths @ sizes <= bits * 13
    assert transform.allocate(np.array([1.0, 100.0]), np.array([4, 1]), 1).tolist() == [0, 5]


@pytest.mark.parametrize("dim, channels", [(96, 96), (100, 104), (88, 88), (49, 56)])
@pytest.mark.parametrize("together", [False, True])
def test_axes_are_a_rotation_of_all(together, dim, channels):
    x = spectrum(500, dim)
    base = transform.untrained(dim, 3, 7)
    t = transform.Axes(base, x).transform(3, 1.0, together)
    assert t.matrix.shape == (channels, channels)
    matrix = widened(t.matrix)
    assert np.allclose(matrix.T @ matrix, np.eye(channels), atol=0.01)
    assert 8 * (t.row_bytes + t.planes) <= 3 * channels
    z = (x - t.mean) @ matrix[:dim]
    energy = np.array([(z[:, at : at + 32] ** 2).mean() for at in range(0, channels, 32)])
    for width in np.unique(t.bits) if together else ():
        same = t.bits == width
        energy[same] = np.average(energy[same], weights=transform.eights(channels)[same])
        assert np.ptp(t.steps[same]) == 0
    assert np.allclose(energy / energy[0], (t.steps / t.steps[0]) ** 2, rtol=0.05) and 0.5 <= t.steps[0] <= 1


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("unit", [1.0, 2.0**-60])
def test_rows_may_be_far_larger_than_the_sample(metric, unit):
    """Such rows are found, also along the axes of least variance, which have a width above 0 here."""
    rng = RNG(0)
    sample = unit * rng.standard_normal((4000, 64)) / (1 + np.arange(64)) * np.repeat([1, 2.0**-10], 32)
    index = turboquant.Index(64, 6, metric)
    index.train(sample)
    assert index.training["chosen"] == "axes" and min(index.training["widths"]) > 0
    x = (2.0**54 * rng.standard_normal((50, 64))).astype(np.float32)
    index.add(x)
    assert (index.search(x, 1)[1].ravel() == np.arange(50)).mean() > 0.9
    np.testing.assert_allclose((index.reconstruct(range(50)) * x).sum(1), (x * x).sum(1), rtol=0.01)


@pytest.mark.parametrize("dim", [40, 100, 136])
def test_one_query_is_rotated_as_many_are(dim):
    """One query reads the matrix in another order than many do; the sums are the same."""
    x = spectrum(400, dim)
    index = turboquant.Index(dim, 4)
    index.train(x)
    index._contents = replace(
        index._contents, transform=transform.Axes(transform.untrained(dim, 4, 0), x).transform(4, 1.0, True)
    )
    index.add(x)
    scores, ids = index.search(x[:67], 5)
    for i in range(67):
        one = index.search(x[i], 5)
        assert np.array_equal(one[0], scores[i]) and np.array_equal(one[1], ids[i])


def test_bfloat16_is_rounded_half_to_even():
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 0, -0.0, 2.0**-100], np.float32)
    rounded = transform.widened(transform.as_bfloat16(x))
    assert np.array_equal(rounded, np.array([1, 1, 1 + 4 * 2**-8, 1 + 2 * 2**-8, -1, 0, 0, 2.0**-100], np.float32))
