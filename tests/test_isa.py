"""Every instruction set against the scalar kernels, at every bit width and at sizes that do not fill vectors."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import reference as ref
from cases import Case, make_case
from conftest import random_numbers

from turboquant import _core

# `make test` tries one size of each kind: less than a tile of 32 channels, then 8, 16 or all of the channels in the
# last tile.
SIZES = (24, 40, 80, 128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (8, 64, 96, 200, 256)))


def adversarial(rng: np.random.Generator, tokens: int, dim: int) -> np.ndarray:
    """[1, 1, tokens, dim]: normal numbers, ties, zeros of both signs, lone spikes, tiny and huge rows."""
    x = rng.standard_normal((tokens, dim)).astype(np.float32)
    x[1::9] = rng.integers(-2, 3, x[1::9].shape)
    x[2::9] = 0.0
    x[3::9] = -0.0
    x[4::9] = 0.0
    x[4::9, 0] = 1.0
    x[5::9] *= np.float32(1e-18)
    x[6::9] = np.where(x[6::9] > 0, 1.0, -1.0)
    x[7::9] *= np.float32(2000)
    return x[None, None]


TERM = "2 bits and a variance term"


def mixed(dim: int, channels: int) -> tuple[int, ...]:
    """All bit widths in turn, one for each group of `channels` channels."""
    widths = (3, 8, 4, 6, 5, 0, 1, 2)
    return tuple(widths[g % len(widths)] for g in range(-(-dim // channels)))


@cache
def answered(
    dim: int, bits: Any, channels: int, lengths: tuple[int, ...], group: int, tokens: int, dtype: str, exact: bool
) -> tuple[Case, np.ndarray, np.ndarray]:
    """A case and its result in float64, computed once for all instruction sets. If `exact`, with sinks and a window."""
    rng = random_numbers(f"answered {dim} {bits} {channels} {lengths} {group} {tokens} {dtype} {exact}")
    bits, term = (2, True) if bits == TERM else (bits, False)
    p = ref.plan(dim, bits, bits, seed=1, group=channels, variance_term=term)
    rows = dict(sinks=2, window=5) if exact else {}
    case = make_case(rng, p, list(lengths), group=group, query_tokens=tokens, dtype=dtype, **rows)
    return case, *ref.attend(case.plan, case.cache, case.query)


@pytest.mark.parametrize("rotation", [ref.HADAMARD, ref.NONE], ids=["hadamard", "none"])
@pytest.mark.parametrize("dim", SIZES)
def test_bytes_are_scalars(level: str, dim: int, rotation: int, rng: np.random.Generator) -> None:
    """Pages and decoded numbers equal those of the scalar kernels, bit for bit, after appending 133, 1 and 6 tokens."""
    table = np.arange(2, dtype=np.int32)[None]
    k, v = adversarial(rng, 140, dim), adversarial(rng, 140, dim)
    for bits, channels in [*((n, 32) for n in ref.WIDTHS), (mixed(dim, 32), 32), (mixed(dim, 16), 16)]:
        for scale in (ref.EDEN, ref.NORM, ref.NORM_CORRECTED, ref.LEAST_SQUARES):
            p = ref.plan(dim, bits, bits, rotation=rotation, scale=scale, seed=dim, group=channels)
            results = []
            for isa in ("scalar", level):
                _core.set_isa(isa)
                pages = _core.new_pages(p.words, 2, 1)
                for first, last in ((0, 133), (133, 134), (134, 140)):
                    new = [np.ascontiguousarray(x[:, :, first:last]) for x in (k, v)]
                    _core.append(p.words, *new, np.array([last], np.int32), pages, table)
                decoded = _core.dequantize(p.words, pages, table, np.array([140], np.int32), 140)
                results.append([pages, *decoded])
            for got, want in zip(results[1], results[0], strict=True):
                np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("isa", _core.isa_available())
def test_eight_bits_of_nan_are_level_0(isa: str, group: int) -> None:
    """A NaN in the rotation makes all numbers of a token NaN. Their codes are 128, level 0. Converting a NaN to an
    integer is undefined behaviour, which sanitizers report."""
    p = ref.plan(64, 8, 8, rotation=ref.DENSE, group=group)
    matrix = np.eye(64, dtype=np.float32)[None]
    matrix[0, 5, 5] = np.nan
    pages, table, x = _core.new_pages(p.words, 1, 1), np.zeros((1, 1), np.int32), np.ones((1, 1, 3, 64), np.float32)
    _core.set_isa(isa)
    try:
        _core.append(p.words, x, x, np.array([3], np.int32), pages, table, rotation=np.concatenate([matrix, matrix], 1))
    finally:
        _core.set_isa(None)
    for side in ("key", "value"):
        np.testing.assert_array_equal(ref.unpack(p, side, pages[0, 0])[0][:3], 128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dim", SIZES)
def test_attend_is_near_float64(level: str, dim: int, group: int, dtype: str) -> None:
    widths = [*((n, 32) for n in ref.WIDTHS), (8, 16), (mixed(dim, 32), 32), (mixed(dim, 16), 16)]
    for bits, channels in [*widths, (TERM, 32), (TERM, 16)]:
        case, want, want_lse = answered(dim, bits, channels, (300, 37), group, 1, dtype, exact=True)
        _core.set_isa(level)
        out, lse = _core.attend(**case.arguments)
        assert _core.kernel_name("attend", case.plan.words) == f"attend_{level}"
        tolerance, lse_tolerance = (2e-5, 1e-5) if dtype == "float32" else (2**-8 + 1e-3, 1e-4)
        assert abs(ref.widen(out) - want).max() <= tolerance * abs(want).max()
        np.testing.assert_allclose(lse, want_lse, rtol=lse_tolerance, atol=10 * lse_tolerance)


@pytest.mark.parametrize(("group", "tokens"), [(16, 1), (3, 7)])
@pytest.mark.parametrize("dim", [24, 128])
def test_many_rows_are_near_float64(level: str, dim: int, group: int, tokens: int) -> None:
    """From 16 rows of a KV head on, some instruction sets multiply in another way."""
    for widths in (*ref.WIDTHS, mixed(dim, 32), TERM):
        for dtype, tolerance in (("float32", 2e-5), ("bfloat16", 2**-8 + 1e-3)):
            case, want, _ = answered(dim, widths, 32, (300, 77), group, tokens, dtype, exact=False)
            _core.set_isa(level)
            out, _ = _core.attend(**case.arguments)
            assert abs(ref.widen(out) - want).max() <= tolerance * abs(want).max()


@pytest.mark.parametrize("group", [4, 20])
def test_numbers_that_are_not_finite_stay_so(level: str, group: int, rng: np.random.Generator) -> None:
    """A query with NaN gives NaN in its own row and in no other."""
    for bits in ref.WIDTHS:
        case = make_case(rng, ref.plan(64, bits, bits), [200], group=group)
        q = case.arguments["q"].copy()
        q[0, 1, 0, 5] = np.nan
        _core.set_isa(level)
        out, lse = _core.attend(**{**case.arguments, "q": q})
        rows = np.isnan(out).any(axis=-1)
        assert rows[0, 1, 0] and np.isnan(lse[0, 1, 0])
        assert rows.sum() == 1


@pytest.mark.parametrize("dim", [*SIZES, 1000, 1024])
def test_dot_is_near_float64(level: str, dim: int, rng: np.random.Generator) -> None:
    table, queries = np.arange(2, dtype=np.int32)[None], rng.standard_normal((19, dim)).astype(np.float32)
    for bits in ref.WIDTHS:
        words = ref.plan(dim, bits, 0).words
        pages, length = _core.new_pages(words, 2, 1), np.array([200], np.int32)
        _core.set_isa("scalar")
        _core.append(words, rng.standard_normal((1, 1, 200, dim)).astype(np.float32), None, length, pages, table)
        x, _ = _core.dequantize(words, pages, table, length, 200)
        want = queries.astype(np.float64) @ x[0, 0].astype(np.float64).T
        _core.set_isa(level)
        got = _core.dot(words, queries, pages, 200)
        assert abs(got - want).max() <= 1e-5 * np.sqrt(dim) * abs(queries).max() * abs(x).max()
