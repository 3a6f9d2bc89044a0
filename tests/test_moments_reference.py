"""The NumPy reference of wave and metric against float64, at positions up to 2^20 and amplitudes of norm 1,000."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import reference
import reference_moments as ref
from profiles import layer

from turboquant.measured import LayerMoments

FAR = np.array([0, 1, 31, 128, 4095, 2**15 + 7, 2**20 - 1, 2**20])


def of_head(made: LayerMoments, head: int) -> tuple[reference.Plan, reference.Transform]:
    """The plan and the transform of one head, as operators get them."""
    plan = reference.plan(made.centre.shape[1], 3, wave_pairs=len(made.pairs), metric=1 + made.rank)
    given = {name.removeprefix("key_"): array for name, array in made.transforms(True, True).items()}
    return plan, reference.Transform(**given).at(head)


@pytest.fixture(params=[0, 1, 4], ids=lambda rank: f"rank {rank}")
def head(request, rng):
    return ref.head_of(*of_head(layer(rng, rank=request.param, size=1000.0), 1))


def test_phases_lose_nothing():
    for increment, position in [(2**32 - 1, 2**40 + 1), (683565276, 2**20), (1, 2**33), (3, 0)]:
        turns = Fraction(increment, 2**32) * position
        assert Fraction(int(ref.phase(increment, np.array([position]))[0]), 2**32) == turns - int(turns)


def test_metric_leaves_scores_alone(rng, head):
    k, q = rng.standard_normal((2, 7, 64)) * [[[100.0]], [[1.0]]]
    want = q @ k.T
    got = ref.shrunk(head, q, np.float64) @ ref.stretched(head, k, np.float64).T
    assert np.abs(got - want).max() < 1e-7 * np.abs(want).max()  # directions in float32 are orthonormal to 1e-7


def test_what_is_added_is_what_was_subtracted(rng, head):
    """What is subtracted from keys and added to logits in float32 is right to 2e-3 of a logit, at amplitudes of norm
    1,000 and scale * |q| = 1."""
    q = rng.standard_normal((16, 64))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    want = q @ ref.centres(head, FAR, np.float64).T
    assert np.abs(want).max() > 100
    assert np.abs(ref.added(head, q, FAR, np.float32) - want).max() < 2e-3
    taken = ref.centres(head, FAR, np.float32).astype(np.float64)
    assert np.abs(q @ taken.T - want).max() < 2e-3


def test_phases_in_float32_would_not_do(rng, head):
    q = np.eye(64)[:4]
    angle = FAR.astype(np.float32) * (head.increments[:, None] * np.float32(2 * np.pi / 2**32))
    first, second = (q[:, head.pairs[:, side]] for side in range(2))
    a, b = head.amplitudes.T
    rough = (first * a + second * b) @ np.cos(angle) + (second * a - first * b) @ np.sin(angle)
    assert np.abs(rough - ref.added(head, q, FAR, np.float64)).max() > 0.1


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_scores_are_those_of_decoded_keys(rng, bits):
    """<A^-1 q, y'> + <q, c_p>, as kernels compute it, is <q, k'> with the decoded key k'."""
    plan, transform = of_head(layer(rng, size=1000.0), 1)
    plan, head = replace(plan, key_bits=(bits,) * 2), ref.head_of(plan, transform)
    keys = ref.centres(head, FAR, np.float64) + rng.standard_normal((len(FAR), 64))
    q = rng.standard_normal((5, 64))
    codes, scales = reference.encode(plan, "key", keys.astype(np.float32), transform, FAR)
    want = q @ reference.decode(plan, "key", codes, scales, transform, FAR).T
    y = reference.decode(plan, "key", codes, scales, reference.Transform())
    got = ref.shrunk(head, q, np.float64) @ y.T + ref.added(head, q, FAR, np.float64)
    assert np.abs(got - want).max() < 1e-9 * max(1, np.abs(want).max())


@pytest.mark.parametrize("bits,least", [(4, 0.12), (3, 0.22), (2, 0.4)])
def test_error_is_of_the_residual(rng, bits, least):
    """Keys of norm 1,000 around their wave have the error of their residuals of norm 8, measured in the metric."""
    plan, transform = of_head(layer(rng, size=1000.0), 1)
    plan, head = replace(plan, key_bits=(bits,) * 2), ref.head_of(plan, transform)
    positions = rng.integers(0, 2**20, 64)
    keys = ref.centres(head, positions, np.float64) + rng.standard_normal((64, 64))
    codes, scales = reference.encode(plan, "key", keys.astype(np.float32), transform, positions)
    decoded = reference.decode(plan, "key", codes, scales, transform, positions)
    off = ref.stretched(head, decoded - keys, np.float64)
    size = ref.prepared(head, keys, positions, np.float64)
    assert np.linalg.norm(off) / np.linalg.norm(size) < least


def test_arithmetic_in_float32_stays_near_float64(rng, head):
    keys = ref.centres(head, FAR, np.float64) + rng.standard_normal((len(FAR), 64))
    keys = keys.astype(np.float32)
    want = ref.prepared(head, keys, FAR, np.float64)
    got = ref.prepared(head, keys, FAR, np.float32)
    # Allows 16 roundings at the largest key, times the metric's largest stretch (5) and squared scale (9).
    assert np.abs(got - want).max() < 16 * 2.0**-24 * np.abs(keys).max() * 5 * 9


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_package_has_the_same_wave_and_metric(rng, interleaved):
    made = layer(rng, size=1000.0, interleaved=interleaved)
    centres, (there, back) = made.centre_at(FAR), made.metric()
    x = rng.standard_normal((5, 64))
    for index in range(2):
        one = ref.head_of(*of_head(made, index))
        np.testing.assert_allclose(centres[index], ref.centres(one, FAR, np.float64), rtol=0, atol=1e-9)
        np.testing.assert_allclose(x @ there[index], ref.stretched(one, x, np.float64), rtol=0, atol=1e-9)
        np.testing.assert_allclose(x @ back[index], ref.shrunk(one, x, np.float64), rtol=0, atol=1e-5)
