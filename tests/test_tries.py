"""Encoding that tries several scales: the reference's bytes on every instruction set, and less noise."""

import numpy as np
import pytest
import reference as ref
from cases import keywords, random_transform

from turboquant import Plan, _core

CASES = [
    (128, 4, 4, {}),
    (64, 3, 4, {}),
    (128, (5, 3, 4, 2), (6, 8, 0, 4), {}),
    (40, 4, 3, {}),
    (104, (5, 0, 3, 1), (2, 4, 6, 5), {}),
    (40, (5, 8, 3), (8, 0, 1), dict(group=16, page_tokens=64)),
    (80, 4, 4, dict(rotation=ref.NONE)),
    (256, 4, 3, {}),
]


@pytest.fixture(params=_core.isa_available())
def isa(request: pytest.FixtureRequest) -> object:
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(None)


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("tries", [3, 5, 7])
@pytest.mark.parametrize("head_dim, key_bits, value_bits, rest", CASES)
def test_bytes_are_those_of_the_reference(
    isa: str, head_dim: int, key_bits: object, value_bits: object, rest: dict[str, int], tries: int, transformed: bool,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    p = ref.plan(head_dim, key_bits, value_bits, tries=tries, seed=5, **{"page_tokens": 32, **rest})
    n = 40
    k, v = (rng.standard_normal((1, 1, n, head_dim)).astype(np.float32) for _ in range(2))
    k *= np.exp2(rng.integers(-6, 6, (1, 1, n, 1))).astype(np.float32)
    k[0, 0, 3], k[0, 0, 7], v[0, 0, 5] = 0, 1e-42, np.eye(head_dim)[2]
    key, value = (random_transform(rng, p, 1) if transformed else ref.Transform() for _ in range(2))
    n_pages, lengths = -(-n // p.page_tokens), np.array([n], np.int32)
    table = np.arange(n_pages, dtype=np.int32)[None]
    pages, one_by_one = (_core.new_pages(p.words, n_pages, 1) for _ in range(2))
    _core.append(p.words, k, v, lengths, pages, table, **keywords(key, value))
    for i in range(n):
        part, length = np.s_[:, :, i : i + 1], np.array([i + 1], np.int32)
        _core.append(p.words, k[part], v[part], length, one_by_one, table, **keywords(key, value))
    np.testing.assert_array_equal(pages, one_by_one)
    c = ref.Cache(np.zeros(pages.shape, np.uint8), table)
    ref.append(p, c, k, v, lengths, key, value)
    np.testing.assert_array_equal(pages, c.pages)


@pytest.mark.parametrize("bits, most", [(3, (0.965, 0.955, 0.95)), (4, (0.92, 0.89, 0.875))])
def test_noise_falls(bits: int, most: tuple[float, ...], rng: np.random.Generator) -> None:
    """1 / cos^2 - 1 of Gaussian vectors of 128 numbers falls below these shares of its value without tries."""
    x = rng.standard_normal((1, 1, 4096, 128)).astype(np.float32)
    noise = []
    for tries in (0, 3, 5, 7):
        words = Plan(128, bits, tries=tries).words
        pages, table = _core.new_pages(words, 32, 1), np.arange(32, dtype=np.int32)[None]
        lengths = np.array([4096], np.int32)
        _core.append(words, x, None, lengths, pages, table)
        y, z = _core.dequantize(words, pages, table, lengths, 4096)[0][0, 0].astype(np.float64), x[0, 0]
        noise.append(((y * y).sum(1) * (z * z).sum(1) / (y * z).sum(1) ** 2 - 1).mean())
    assert all(tried < share * noise[0] for tried, share in zip(noise[1:], most))
    assert noise[1] > noise[2] > noise[3]


def test_tries_are_a_field_of_plans() -> None:
    plan = Plan(64, 4, 4, tries=5)
    assert (
        plan.words[17] == 5
        and Plan.from_words(plan.words) == plan
        and repr(plan) == "Plan(64, key=Side(4), value=Side(4), tries=5)"
    )


@pytest.mark.parametrize("given", [dict(scale="norm"), dict(key_levels=True), dict(tries=4), dict(tries=-3)])
def test_other_plans_have_none(given: dict[str, object]) -> None:
    from turboquant.plan import Side

    key = Side(4, levels="affine") if given.pop("key_levels", False) else 4
    with pytest.raises(ValueError, match="`tries` must be 0"):
        Plan(64, key, **{"tries": 3, **given})
