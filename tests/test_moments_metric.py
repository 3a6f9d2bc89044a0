"""Wave and metric from sums over keys and queries, against their definition by 256 single rotations and by dense
matrices."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from turboquant.measuring.metric import POSITIONS, averaged_over_positions, chosen_pairs, metric_of, turn_back  # noqa: E402
from turboquant.measuring.rotary import Rotary  # noqa: E402

DIM = 24


def rotary(interleaved: bool = False, turning: int = 16) -> Rotary:
    """A rotation of the first `turning` of DIM channels."""
    half = turning // 2
    steps = np.arange(half)
    pairs = np.stack([2 * steps, 2 * steps + 1] if interleaved else [steps, steps + half], 1)
    return Rotary(pairs, (1000.0 ** -(steps / half) / (2 * np.pi) * 2**32).round().astype(np.uint32))


def matrix(turn: Rotary, position: int) -> np.ndarray:
    """The rotation at a position, as a matrix."""
    out = np.eye(DIM)
    for (i, j), increment in zip(turn.pairs, turn.increments):
        angle = int(increment) * int(position) % 2**32 * (2 * np.pi / 2**32)
        out[[i, j], [i, j]] = np.cos(angle)
        out[i, j], out[j, i] = -np.sin(angle), np.sin(angle)
    return out


def moment(rng, heads=2, tilt=3.0) -> np.ndarray:
    rows = rng.standard_normal((heads, 400, DIM)) * np.exp(rng.standard_normal((heads, 1, DIM)))
    return np.einsum("hti,htj->hij", rows, rows) / 400 + tilt


@pytest.mark.parametrize("turn", [rotary(), rotary(True), rotary(turning=DIM), Rotary.none()])
def test_average_is_the_mean_of_all_turns(rng, turn):
    given = moment(rng)
    want = np.mean([matrix(turn, p) @ given @ matrix(turn, p).T for p in POSITIONS], 0)
    got = averaged_over_positions(torch.from_numpy(given), turn).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 * np.abs(want).max())
    assert len(turn.pairs) == 0 or np.abs(want - given).max() > 0.1


def test_positions_are_even_in_their_logarithm():
    assert POSITIONS[0] == 16 and POSITIONS[-1] == 32768 and len(POSITIONS) > 200
    assert np.abs(np.diff(np.log(POSITIONS.astype(float)[100:])) - np.log(2048) / 255).max() < 0.01


@pytest.mark.parametrize("turn", [rotary(), rotary(True), Rotary.none()])
def test_turning_back(rng, turn):
    x = rng.standard_normal((3, 5, DIM))
    at = np.array([0, 1, 77, 4000, 2**20])
    turned = np.stack([x[:, i] @ matrix(turn, p).T for i, p in enumerate(at)], 1)
    got = turn_back(torch.from_numpy(turned), turn, torch.from_numpy(at)).numpy()
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(turn.turned(x[:, 0], 77), x[:, 0] @ matrix(turn, 77).T, rtol=0, atol=1e-12)


def written_out(second: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The metric A of one head and F, the matrix that it approximates, by dense matrices."""
    values, vectors = np.linalg.eigh(second)
    values = np.maximum(values, 1e-4 * values.max())
    powers = values**0.2
    full = (vectors * (powers / np.sqrt(np.mean(powers**2)))) @ vectors.T
    d = np.diag(np.diag(full) ** -0.5)
    values, vectors = np.linalg.eigh(d @ full @ d)
    far = np.argsort(-np.abs(np.log(values) - np.median(np.log(values))))
    g = np.exp(np.mean(np.log(values[far[rank:]])))
    w, e = vectors[:, far[:rank]], values[far[:rank]] / g - 1
    s = np.diag(np.sqrt(g * np.diag(full)))
    return s @ (np.eye(len(s)) + w @ np.diag(e) @ w.T) @ s, full


def dense(metric, head: int) -> np.ndarray:
    s, w, e = (x[head].numpy() for x in metric)
    return s[:, None] * (np.eye(len(s)) + (w.T * e) @ w) * s


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_metric_is_the_one_written_out(rng, rank):
    second = moment(rng)
    metric = metric_of(torch.from_numpy(second), rank)
    assert metric.directions.shape == (2, rank, DIM) and (metric.stretch > -1).all() and (metric.scale > 0).all()
    np.testing.assert_allclose(metric.directions @ metric.directions.mT, np.eye(rank)[None].repeat(2, 0), atol=1e-12)
    for head in range(2):
        want, full = written_out(second[head], rank)
        np.testing.assert_allclose(dense(metric, head), want, rtol=0, atol=1e-10)
        apart = np.linalg.norm(want - full) / np.linalg.norm(full)
        assert apart < {0: 0.6, 1: 0.3, 4: 0.25}[rank]


def test_metric_of_queries_that_look_one_way(rng):
    """If queries favour one direction and treat all others alike, a metric of rank 1 equals F."""
    u = np.ones(DIM) / np.sqrt(DIM)
    second = np.eye(DIM)[None] + 80 * np.outer(u, u)
    metric = metric_of(torch.from_numpy(second), 1)
    _, full = written_out(second[0], 0)
    np.testing.assert_allclose(dense(metric, 0), full, atol=1e-9)


def test_queries_of_nothing_have_no_metric():
    metric = metric_of(torch.zeros(1, DIM, DIM, dtype=torch.float64))
    np.testing.assert_allclose(dense(metric, 0), np.eye(DIM), atol=1e-12)


def test_small_heads_have_a_lower_rank(rng):
    assert metric_of(torch.eye(4, dtype=torch.float64)[None]).directions.shape == (1, 3, 4)


def test_pairs_of_most_energy_are_kept_up_to_a_multiple_of_eight(rng):
    half = 32
    turn = Rotary(np.stack([np.arange(half), np.arange(half) + half], 1), np.arange(1, half + 1).astype(np.uint32))
    mean = np.zeros((2, 72))
    strong = rng.permutation(half)[:9]
    mean[0, strong], mean[1, strong + half] = 3.0, 4.0
    mean[:, :half] += 1e-3
    mean[:, 64:] = 5.0  # channels that do not turn
    pairs, increments, amplitudes, centre = chosen_pairs(mean, turn)
    assert len(pairs) == 16 and {*strong} <= {*pairs[:, 0]} and len({*pairs[:, 0]}) == 16
    np.testing.assert_array_equal(increments, pairs[:, 0] + 1)
    np.testing.assert_allclose(amplitudes, mean[:, pairs].astype(np.float32))
    assert (centre[:, 64:] == 5).all() and (centre[:, :64] == 0).all()


def test_missing_pairs_are_padded_with_zeros():
    pairs, increments, amplitudes, _ = chosen_pairs(np.ones((1, DIM)), rotary(turning=12))
    assert pairs.shape == (8, 2) and (amplitudes[0, :6] != 0).all() and not amplitudes[0, 6:].any()
    assert not increments[6:].any()
