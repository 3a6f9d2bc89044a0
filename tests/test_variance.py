"""The variance term (turboquant.h, "VARIANCE TERM"): its constant, its purpose, and plans that cannot have it. Tests of
`attend` compare it with the reference: PLANS of core_calls.py, test_attend.py, test_ragged.py, test_chunks.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference as ref
import reference_variance as variance

from turboquant import Plan, _core
from turboquant.plan import Side


def packed(p: ref.Plan, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages, table and lengths of vectors [tokens, head_dim]."""
    n_pages = -(-len(k) // p.page_tokens)
    pages, table = _core.new_pages(p.words, n_pages, 1), np.arange(n_pages, dtype=np.int32)[None]
    lengths = np.array([len(k)], np.int32)
    _core.append(p.words, k[None, None], v[None, None], lengths, pages, table)
    return pages, table, lengths


@pytest.mark.parametrize("tries", [0, 3, 5, 7])
@pytest.mark.parametrize("bits", ref.WIDTHS)
@pytest.mark.parametrize("head_dim, group", [(8, 32), (40, 16), (64, 32), (80, 32), (128, 32), (192, 16)])
def test_constant_is_the_mean_error(head_dim: int, group: int, bits: int, tries: int, rng: np.random.Generator) -> None:
    """The constant is the mean of |y' - y|^2 over the squared scale, to 2 %, for Gaussian vectors of all lengths that
    the core packs. It is interpolated between two powers of two."""
    p = ref.plan(head_dim, bits, 1, tries=tries, group=group, variance_term=True)
    assert _core.plan_info(p.words)["variance"] == pytest.approx(variance.constant(p), rel=1e-6)
    k = rng.standard_normal((2**19 // head_dim // 128 * 128, head_dim)).astype(np.float32)
    k *= np.exp2(rng.integers(-6, 6, (len(k), 1))).astype(np.float32)
    pages, table, lengths = packed(p, k, k)
    decoded = _core.dequantize(p.words, pages, table, lengths, len(k))[0][0, 0].astype(np.float64)
    scales = ref.key_scales(p, ref.Cache(pages, table), 0, 0, len(k)).astype(np.float64)
    found = ((decoded - k) ** 2).sum(1) / scales**2
    assert found.mean() == pytest.approx(variance.constant(p), rel=0.02)


def test_exponentials_are_right_on_average(rng: np.random.Generator) -> None:
    """The log-sum-exp over many packed keys is that over the keys themselves; without the term it is half a variance
    larger."""
    off = {False: [], True: []}
    k, v = rng.standard_normal((2, 8192, 64)).astype(np.float32)
    q = (2.5 * rng.standard_normal((1, 8, 1, 64))).astype(np.float32)
    exact = np.logaddexp.reduce(q[0, :, 0].astype(np.float64) @ k.T / 8, axis=-1)
    for seed in range(4):
        for term in off:
            p = ref.plan(64, 2, 2, seed=seed, variance_term=term)
            _, lse = _core.attend(p.words, q, *packed(p, k, v))
            off[term].append(lse[0, :, 0] - exact)
    assert np.mean(off[False]) > 0.25 and abs(np.mean(off[True])) < 0.1 * np.mean(off[False])


def test_bytes_and_decoded_tokens_are_those_without_it(rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 100, 64)).astype(np.float32)
    made = []
    for term in (False, True):
        p = ref.plan(64, 3, 3, tries=3, variance_term=term)
        pages, table, lengths = packed(p, k, v)
        made.append([pages, *_core.dequantize(p.words, pages, table, lengths, 100), _core.dot(p.words, k, pages, 100)])
    for plain, with_term in zip(*made):
        np.testing.assert_array_equal(plain, with_term)
    assert Plan(64, 3, 3).record_bytes == Plan(64, 3, 3, variance_term=True).record_bytes


def test_it_is_a_field_of_plans() -> None:
    plan = Plan(64, 2, 3, variance_term=True)
    assert plan.words[18] == 1 and Plan(64, 2, 3).words[18] == 0 and plan != Plan(64, 2, 3)
    assert Plan.from_words(plan.words) == plan
    assert repr(plan) == "Plan(64, key=Side(2), value=Side(3), variance_term=True)"


OTHERS: dict[str, dict[str, Any]] = {
    "scale": dict(scale="norm"),
    "codebook": dict(codebook="sphere"),
    "levels": dict(key=Side(4, levels="affine")),
    "blocks": dict(key=Side(4, blocks=32)),
    "several widths": dict(key=(4, 3)),
    "a group without bits": dict(key=(4, 0)),
    "vectors": dict(value=None),
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_other_plans_have_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`variance_term` must be 0 unless the plan is plain, its scale EDEN"):
        Plan(64, **{"key": 4, "value": 4, "variance_term": True, **fields})


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_it_is_true_or_false(value: Any) -> None:
    with pytest.raises(TypeError, match="`variance_term` must be True or False"):
        Plan(64, 4, 4, variance_term=value)


def test_its_word_is_0_or_1() -> None:
    words = list(Plan(64, 4, 4).words)
    for word in (2, -1):
        words[18] = word
        with pytest.raises(ValueError, match=f"`variance_term` must be 0 or 1, got {word}"):
            _core.record_bytes(words)


def test_its_keys_have_no_steps(rng: np.random.Generator) -> None:
    k = rng.standard_normal((1, 1, 3, 64)).astype(np.float32)
    p, steps = ref.plan(64, 4, 4, variance_term=True), np.ones((1, 4), np.float32)
    pages, table, lengths = _core.new_pages(p.words, 1, 1), np.zeros((1, 1), np.int32), np.array([3], np.int32)
    _core.append(p.words, k, k, lengths, pages, table, value_numbers=steps)
    for call in (
        lambda: _core.append(p.words, k, k, lengths, pages, table, key_numbers=steps),
        lambda: _core.attend(p.words, k, pages, table, lengths, key_numbers=steps),
    ):
        with pytest.raises(
            ValueError, match="`key_numbers` must be without steps, because the plan has a variance term"
        ):
            call()
