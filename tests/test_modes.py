"""Plans that are not plain (blocks, tables, sketches): bytes, attention and inner products against
tests/reference_modes.py, and the statistical properties that the schemes promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference as ref
import reference_modes as modes
import tolerance
from cases import aligned_pages, awkward_rows
from mode_cases import HEADS, PLANS, f32, keywords, side, transforms
from reference_modes import ABSMAX, CODEBOOK, SIGN, TABLE, Transform

import turboquant
from turboquant.plan import Levels, Sketch
from turboquant.plan import Plan as WordedPlan
from turboquant.plan import Side as PlanSide

core = pytest.importorskip("turboquant._core")


HEAD_DIMS = (8, 64, 80, 128, 512)


def filled(p, rng, k, v, by_side, pieces):
    """Pages of a cache to which k and v were appended in pieces."""
    batch, heads, tokens, _ = k.shape
    n = -(-tokens // p.page_tokens)
    pages, table = core.new_pages(p.words, batch * n, heads), np.arange(batch * n, dtype=np.int32).reshape(batch, n)
    for first, last in zip([0, *pieces], [*pieces, tokens]):
        lengths = np.full(batch, last, np.int32)
        core.append(p.words, k[:, :, first:last], v[:, :, first:last], lengths, pages, table, **keywords(**by_side))
    return pages, table


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", PLANS)
def test_bytes_and_numbers(name, head_dim, rng):
    """Tokens appended in pieces give the reference's bytes (codes within a tolerance if there is a matrix), and decode
    to its numbers."""
    p = PLANS[name](head_dim)
    tokens = 150
    k, v = (np.stack([np.stack([awkward_rows(rng, tokens, head_dim) for _ in range(HEADS)])] * 1) for _ in range(2))
    by_side = {side: transforms(rng, p, side) for side in ("key", "value")}
    pages, table = filled(p, rng, k, v, by_side, [1, 37, 64])
    info = core.plan_info(p.words)
    assert info["record_bytes"] == p.record_bytes
    assert (info["key_scales"], info["value_scales"]) == (p.numbers("key"), p.numbers("value"))
    if tolerance.has_matrix(p):
        tolerance.check_pages(p, pages, table, dict(key=k, value=v), by_side)
    else:
        np.testing.assert_array_equal(pages, modes.pages_of(p, k, v, by_side["key"], by_side["value"]))

    got = core.dequantize(p.words, pages, table, np.array([tokens], np.int32), tokens, **keywords(**by_side))
    for one, name in zip(got, ("key", "value")):
        want = modes.decode_pages(p, name, pages, table, tokens, by_side[name])
        assert np.abs(one - want).max() <= 2e-5 * np.abs(want).max()


def test_zeros_without_a_centre():
    """The scale of a zero vector is 0, not 0 / 0."""
    p = modes.Plan(64, side(64, 3, 1, rotation=ref.NONE), side(64, 2, 1, rotation=ref.NONE))
    k, v = np.zeros((1, HEADS, 8, 64), f32), np.zeros((1, HEADS, 8, 64), f32)
    k[:, :, ::2, :32], v[:, :, 1::2, 32:] = 1, 1  # in each token one block is zeros, or both are
    by_side = {name: [Transform() for _ in range(HEADS)] for name in ("key", "value")}
    pages, table = filled(p, None, k, v, by_side, [3])
    np.testing.assert_array_equal(pages, modes.pages_of(p, k, v, by_side["key"], by_side["value"]))
    got = core.dequantize(p.words, pages, table, np.array([8], np.int32), 8, **keywords(**by_side))
    for one, x in zip(got, (k, v)):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one != 0, x != 0)


def test_ties():
    """Absmax rounds halves away from 0. A table takes the lower of two entries that are equally near."""
    p = modes.Plan(32, side(32, 4, rotation=ref.NONE, levels=ABSMAX), side(32, 2, rotation=ref.NONE, levels=TABLE))
    k, v = np.zeros((1, HEADS, 8, 32), f32), np.zeros((1, HEADS, 8, 32), f32)
    k[..., :9] = 7, 0.5, 1.5, 2.5, 6.5, -0.5, -1.5, -2.5, -6.5
    v[..., :5] = -2, 0, 2, 5, -5
    by_side = {
        "key": [Transform() for _ in range(HEADS)],
        "value": [Transform(table=np.array([-3, -1, 1, 3], f32)) for _ in range(HEADS)],
    }
    pages, table = filled(p, None, k, v, by_side, [3])
    np.testing.assert_array_equal(pages, modes.pages_of(p, k, v, by_side["key"], by_side["value"]))
    got = core.dequantize(p.words, pages, table, np.array([8], np.int32), 8, **keywords(**by_side))
    np.testing.assert_array_equal(got[0][0, 0, 0, :9], [7, 1, 2, 3, 7, -1, -2, -3, -7])
    np.testing.assert_array_equal(got[1][0, 0, 0, :5], [-3, -1, 1, 3, -3])


@pytest.mark.parametrize("head_dim", (64, 80))
@pytest.mark.parametrize("name", PLANS)
def test_attend_matches_fp64(name, head_dim, rng):
    """Grouped causal queries attend over shuffled pages. Bytes that may not be read are poisoned."""
    p = PLANS[name](head_dim)
    tokens, queries = 150, 3
    k, v = (rng.standard_normal((2, HEADS, tokens, head_dim)).astype(f32) for _ in range(2))
    by_side = {side: transforms(rng, p, side) for side in ("key", "value")}
    pages, table = filled(p, rng, k, v, by_side, [])
    keys, values = (modes.decode_pages(p, side, pages, table, tokens, by_side[side]) for side in ("key", "value"))
    order = rng.permutation(len(pages) + 1)
    shuffled = aligned_pages(len(pages) + 1, HEADS, p.record_bytes, 0xFF)
    shuffled[order[: len(pages)]] = pages
    table = np.concatenate([order[: len(pages)].reshape(table.shape), np.full((2, 1), 2**30)], 1).astype(np.int32)
    q = 2 * rng.standard_normal((2, 2 * HEADS, queries, head_dim)).astype(f32)
    lengths, starts = np.array([tokens, 140], np.int32), np.array([0, 33], np.int32)
    out, lse = core.attend(p.words, q, shuffled, table, lengths, starts=starts, **keywords(**by_side))
    assert core.kernel_name("attend", p.words) == "attend_baseline"
    for b, h, i in np.ndindex(2, 2 * HEADS, queries):
        seen = slice(starts[b], lengths[b] - queries + i + 1)
        logits = keys[b, h // 2, seen] @ q[b, h, i].astype(np.float64) * head_dim**-0.5
        want, want_lse = ref.softmax(logits[None], values[b, h // 2, seen], 0.0)
        assert np.abs(out[b, h, i] - want[0]).max() <= 2e-5 * max(1, np.abs(want).max())
        assert abs(lse[b, h, i] - want_lse[0]) <= 1e-4


@pytest.mark.parametrize("name", ("prod", "affine, dense, qjl", "tables, sign", "blocks of 32"))
def test_window_and_sinks_leave_the_same_bytes(name, rng):
    """Tokens that leave the window get the bytes that they would get at once. float16 tokens get those of the same
    float32 numbers."""
    p = PLANS[name](64)
    k, v = (rng.standard_normal((1, HEADS, 80, 64)).astype(np.float16) for _ in range(2))
    by_side = {side: transforms(rng, p, side) for side in ("key", "value")}
    pages = core.new_pages(p.words, 1, HEADS)
    exact = {
        f"{part}_{x}": np.zeros((1, HEADS, n, 64), np.float16)
        for part, n in (("sink", 3), ("window", 20))
        for x in "kv"
    }
    for first, last in ((0, 10), (10, 45), (45, 80)):
        core.append(p.words, k[:, :, first:last], v[:, :, first:last], np.array([last], np.int32), pages,
                    np.zeros((1, 1), np.int32), **exact, **keywords(**by_side))  # fmt: skip
    want = modes.pages_of(p, k[:, :, 3:60].astype(f32), v[:, :, 3:60].astype(f32), by_side["key"], by_side["value"])
    np.testing.assert_array_equal(pages, want)
    np.testing.assert_array_equal(exact["sink_k"], k[:, :, :3])


VECTORS = {
    "prod": dict(bits=2, scale="norm", sketch="gaussian"),
    "quarter sketch, haar": dict(bits=3, codebook="uniform", rotation="dense", sketch="gaussian", sketch_rows=96),
    "affine": dict(bits=4, levels="affine", block=64, rotation="none"),
    "q8_0": dict(bits=8, levels="absmax", block=32, rotation="none"),
    "sign": dict(bits=3, sketch="sign"),
}


@pytest.mark.parametrize("fields", VECTORS.values(), ids=VECTORS)
def test_vectors(fields, rng, tmp_path):
    """A Quantizer's inner products are those of what it decodes to, and its files are read again."""
    q = turboquant.Quantizer(384, seed=5, **fields)
    x, queries = (rng.standard_normal((n, 384)).astype(f32) for n in (70, 4))
    codes = q.quantize(x)
    decoded = q.dequantize(codes)
    np.testing.assert_allclose(q.dot(queries, codes), queries @ decoded.T, atol=2e-4 * 384**0.5)
    assert np.square(decoded - x).sum() < 0.4 * np.square(x).sum()
    codes.save(tmp_path / "codes")
    again = turboquant.Codes.load(tmp_path / "codes")
    assert again.plan == q.plan and np.array_equal(again.pages, codes.pages)
    twin = turboquant.Quantizer.from_plan(again.plan)
    assert np.array_equal(twin.dequantize(again), decoded) and repr(twin) == repr(q)


def test_large_vectors(rng):
    """Vectors of 4,096 channels and 4,096 sketch rows fill the buffers on the stack."""
    q = turboquant.Quantizer(4096, 2, block=32, sketch="gaussian", sketch_rows=4096)
    x = rng.standard_normal((33, 4096)).astype(f32)
    codes = q.quantize(x)
    decoded = q.dequantize(codes)
    np.testing.assert_allclose(q.dot(x[:2], codes), x[:2] @ decoded.T, atol=2e-2)


def test_gaussian(rng):
    np.testing.assert_array_equal(core.gaussian(7, 13, 21), modes.gaussian(7, 13, 21))
    draws = core.gaussian(1, 400, 500).astype(np.float64)
    assert abs(draws.mean()) < 3 / 447 and abs(draws.var() - 1) < 0.01 and abs((draws**4).mean() - 3) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("bits", (2, 4))
def test_prod_is_unbiased_over_sketches(bits, rng):
    """TurboQuant prod (arXiv 2504.19874, Theorem 2): over rotations and sketches the mean of its estimate is <q, x>,
    and the variance at most sqrt(3) pi^2 |q|^2 / d * 4^-b for a unit x."""
    dim, n = 64, 10_000
    x = rng.standard_normal((1, dim)).astype(f32)
    x /= np.linalg.norm(x)
    query = (x + 0.1 * rng.standard_normal((1, dim))).astype(f32)
    exact = float((query.astype(np.float64) @ x.astype(np.float64).T).item())
    found = np.empty(n)
    for seed in range(n):
        q = turboquant.Quantizer(dim, bits - 1, scale="norm", seed=seed, sketch="gaussian")
        found[seed] = q.dot(query, q.quantize(x)).item()
    error, bound = found - exact, math.sqrt(3) * math.pi**2 * float(np.square(query).sum()) / dim * 4.0**-bits
    print(f"bias {error.mean():+.6f} +- {error.std() / n**0.5:.6f}, variance {error.var():.6f}, bound {bound:.6f}")
    assert abs(error.mean()) <= 3 * error.std() / n**0.5
    assert error.var() <= bound


def test_a_matrix_of_nan_spoils_its_own_head_alone(rng):
    """No call checks the numbers of a matrix. A NaN in it gives affine codes of 0 and does not change other heads."""
    p = PLANS["affine, dense, qjl"](64)
    k = rng.standard_normal((1, HEADS, 40, 64)).astype(f32)
    by_side = {side: transforms(rng, p, side) for side in ("key", "value")}
    want, _ = filled(p, rng, k, k, by_side, [])
    spoiled = by_side["value"][0]
    by_side["value"][0] = Transform(np.full_like(spoiled.matrix, np.nan), spoiled.centre, spoiled.table)
    got, _ = filled(p, rng, k, k, by_side, [])
    first = core.plan_info(p.words)["value_codes_offset"]
    codes = slice(first, first + 4 * core.plan_info(p.words)["value_tile_bytes"])
    assert np.array_equal(got[:, 1], want[:, 1]) and np.array_equal(got[:, 0, :first], want[:, 0, :first])
    assert want[0, 0, codes].any() and not got[0, 0, codes].any()


def test_refused_tables(rng):
    p = PLANS["tables, sign"](64)
    by_side = {side: transforms(rng, p, side) for side in ("key", "value")}
    k = rng.standard_normal((1, HEADS, 4, 64)).astype(f32)
    given = keywords(**by_side)

    def call(**changes):
        pages, table = core.new_pages(p.words, 1, HEADS), np.zeros((1, 1), np.int32)
        core.append(p.words, k, k, np.array([4], np.int32), pages, table,
                    **{**given, **changes})  # fmt: skip

    call()
    steps = given["key_numbers"][:, -12:]  # of each head: 8 levels, the factor of the signs, and padding

    def changed(at, number):
        result = given["key_numbers"].copy()
        result[:, -12:][at] = number
        return result

    call(key_numbers=changed((1, 3), steps[1, 2]))
    width = given["key_numbers"].shape[1]
    for message, changes in {
        rf"`key_numbers\[{2 * width - 9}\]` must be finite and not below": dict(
            key_numbers=changed((1, 3), steps[1, 1] - 1)
        ),
        rf"`key_numbers\[{width - 4}\]` must be finite": dict(key_numbers=changed((0, 8), -steps[0, 8])),
        "`value_numbers` must be given: the plan's table": dict(value_numbers=None),
        "`key_numbers` must be as wide as its parts": dict(key_numbers=given["key_numbers"][:, :-4].copy()),
        "`rotation` must be given": dict(rotation=None),
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**changes)


def test_python_words_are_the_reference_s():
    p = PLANS["affine, dense, qjl"](128)
    key = PlanSide(3, "dense", Levels.AFFINE, 64, Sketch.GAUSSIAN, 128)
    assert WordedPlan(128, key, PlanSide(3, "dense", "affine", 64)).words == p.words
    assert CODEBOOK == Levels.CODEBOOK and TABLE == Levels.TABLE and SIGN == Sketch.SIGN
