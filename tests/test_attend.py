"""tq_attend against float64 attention over the decoded bytes. Pages are shuffled; what must not be read holds NaN."""

from itertools import pairwise

import numpy as np
import pytest
import reference as ref
from cases import aligned_pages, make_case, random_transform, realigned
from conftest import HEAD_DIMS, ODD_HEAD_DIMS, WIDE_HEAD_DIMS
from core_calls import PLANS, SHAPES, TOLERANCE, check, core_attend
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core


@pytest.mark.parametrize(("bits", "term"), [(2, False), (3, False), (4, False), (2, True)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(bits: int, term: bool, shape: dict, rng: np.random.Generator) -> None:
    check(make_case(rng, ref.plan(64, bits, bits, variance_term=term), **shape))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_with_groups_of_16(shape: dict, rng: np.random.Generator) -> None:
    check(make_case(rng, ref.plan(40, (3, 0, 4), (2, 5, 1), group=16, page_tokens=64), **shape))


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("head_dim", sorted({*HEAD_DIMS, *ODD_HEAD_DIMS}))
@pytest.mark.parametrize("bits", ref.WIDTHS)
def test_widths_and_sizes(head_dim: int, bits: int, group: int, rng: np.random.Generator) -> None:
    p = ref.plan(head_dim, bits, ref.WIDTHS[-1 - ref.WIDTHS.index(bits)], seed=int(rng.integers(2**63)), group=group)
    check(make_case(rng, p, [200, 37], sinks=2, window=9))


@pytest.mark.parametrize("head_dim", WIDE_HEAD_DIMS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_more_than_256_channels(head_dim: int, bits: int, rng: np.random.Generator) -> None:
    p = ref.plan(head_dim, bits, bits, seed=int(rng.integers(2**63)))
    check(make_case(rng, p, [200, 37], sinks=2, window=9, query_tokens=5, fresh=True))


@pytest.mark.parametrize("p", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "centred"])
def test_plans(p: ref.Plan, plain: bool, rng: np.random.Generator) -> None:
    check(make_case(rng, p, [333, 60], sinks=3, window=20, query_tokens=3, fresh=True, plain=plain))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["sinks, pages and window", "fresh", "several queries, packed", "not causal", "softcap"]
)
def test_dtypes(dtype: str, name: str, rng: np.random.Generator) -> None:
    check(make_case(rng, ref.plan(80, 4, 3), dtype=dtype, **SHAPES[name]))


def test_bfloat16_is_torchs(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = rng.standard_normal(10000).astype(np.float32) * np.float32(2.0) ** rng.integers(-60, 60, 10000)
    x = x.astype(np.float32)
    want = torch.from_numpy(x).to(torch.bfloat16)
    np.testing.assert_array_equal(ref.narrow(x, "bfloat16"), want.view(torch.int16).numpy().view(np.uint16))
    np.testing.assert_array_equal(ref.widen(ref.narrow(x, "bfloat16")), want.float().numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_output_is_rounded_to_nearest(dtype: str, rng: np.random.Generator) -> None:
    """A query that sees a single token returns its value, bit for bit."""
    case = make_case(rng, ref.plan(64, 4, 4), [30], window=30, sliding_window=1, dtype=dtype, group=1)
    out, _ = _core.attend(**case.arguments)
    np.testing.assert_array_equal(out[:, :, 0], case.cache.window_v[:, :, 29])


def test_queries_are_independent(rng: np.random.Generator) -> None:
    """A call with five queries gives the results of five calls with one query and the length that it sees."""
    case = make_case(rng, ref.plan(64, 3, 4), [90, 50], query_tokens=5, sinks=3)
    out, lse = core_attend(case)
    for i in range(5):
        q = np.ascontiguousarray(case.query.q[:, :, i : i + 1])
        one = case.arguments | dict(q=q, lengths=case.query.lengths - 4 + i)
        got, got_lse = _core.attend(**one)
        np.testing.assert_allclose(got[:, :, 0], out[:, :, i], rtol=0, atol=1e-5 * abs(out).max())
        np.testing.assert_allclose(got_lse[:, :, 0], lse[:, :, i], rtol=0, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads(threads: int, rng: np.random.Generator) -> None:
    """With few tasks and many pages, a sequence is split among threads and the parts are merged."""
    check(make_case(rng, ref.plan(32, 3, 3, page_tokens=32), [900], kv_heads=1, sinks=2, window=17), threads=threads)


SPLIT = {  # few tasks and long sequences, which are split among threads and merged
    "all parts": dict(lengths=[1800], query_tokens=9, sinks=2, window=17, fresh=True),
    "parts that see nothing": dict(lengths=[1800, 700], query_tokens=9, sliding_window=300, starts=[900, 0]),
    "softcap": dict(lengths=[1800], query_tokens=9, softcap=5.0),
}


@pytest.mark.parametrize("threads", [5, 7, 16])
@pytest.mark.parametrize("term", [False, True])
@pytest.mark.parametrize("shape", SPLIT.values(), ids=SPLIT)
def test_splits(shape: dict, term: bool, threads: int, rng: np.random.Generator) -> None:
    case = make_case(rng, ref.plan(64, 3, 4, page_tokens=32, variance_term=term), kv_heads=1, group=4, **shape)
    check(case, threads=threads)
    whole, parts = core_attend(case, threads=1), core_attend(case, threads=threads)
    assert not np.array_equal(whole[0], parts[0])  # sums are rounded differently: it was split


@pytest.mark.parametrize("threads", [1, 16])
def test_a_nan_stays_in_its_query(threads: int, rng: np.random.Generator) -> None:
    case = make_case(rng, ref.plan(64, 3, 4, page_tokens=32), [1800], kv_heads=1, group=4, query_tokens=9)
    case.query.q[0, 2, 5, 7] = np.nan
    out, lse = core_attend(case, threads=threads)
    wrong = np.zeros((1, 4, 9), bool)
    wrong[0, 2, 5] = True
    assert (np.isnan(out).all(-1) == wrong).all() and (np.isnan(out).any(-1) == wrong).all()
    assert (np.isnan(lse) == wrong).all()


def test_strides(rng: np.random.Generator) -> None:
    """q, fresh_k and fresh_v may be views of [batch, tokens, heads, head_dim]."""
    case = make_case(rng, ref.plan(64, 3, 3), [90, 20], query_tokens=6, sinks=2, window=16, fresh=True)
    want, _ = core_attend(case)
    views = {}
    for name in ("q", "fresh_k", "fresh_v"):
        dense = np.ascontiguousarray(getattr(case.query, name).transpose(0, 2, 1, 3))
        views[name] = dense.transpose(0, 2, 1, 3)
        assert not views[name].flags.c_contiguous
    got, _ = _core.attend(**case.arguments | views)
    np.testing.assert_array_equal(got, want)


def test_nothing_but_out_is_written(rng: np.random.Generator) -> None:
    case = make_case(rng, ref.plan(64, 3, 3), [90, 20], query_tokens=6, sinks=2, window=16, fresh=True)
    arrays = {name: x for name, x in case.arguments.items() if isinstance(x, np.ndarray)}
    before = {name: x.tobytes() for name, x in arrays.items()}
    core_attend(case)
    assert {name: x.tobytes() for name, x in arrays.items()} == before


def test_bytes_behind_the_length_do_not_matter(rng: np.random.Generator) -> None:
    """Codes and scales of tokens that do not exist yet may be all ones (NaN scales) or zeros."""
    case = make_case(rng, ref.plan(64, 3, 3), [77, 140], kv_heads=1)
    out, lse = core_attend(case)
    clean = realigned(case.cache.pages)
    for b, length in enumerate(case.query.lengths):
        for page in case.cache.block_table[b, : -(-int(length) // 128)]:
            first = 128 * list(case.cache.block_table[b]).index(page)
            unused = np.arange(128)[first + np.arange(128) >= length]
            for side in ("key", "value"):
                codes = np.zeros((len(unused), 64), np.uint8)
                ref.pack(case.plan, side, clean[page, 0], unused, codes, np.zeros(len(unused)))
    got, got_lse = _core.attend(**case.arguments | dict(pages=clean))
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(got_lse, lse)


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("bits", ref.WIDTHS)
@pytest.mark.parametrize("head_dim", [40, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_at_their_largest(bits: int, head_dim: int, dtype: str, group: int) -> None:
    """No sum overflows where every code is the outermost level (all bits set) and all queries and scales are equal."""
    p = ref.plan(head_dim, bits, bits, rotation=ref.NONE, group=group)
    pages = aligned_pages(3, 1, p.record_bytes, 0xFF)
    for record in pages[:, 0]:
        ref.scale_view(p, "key", record)[:] = 1
        ref.scale_view(p, "value", record)[:] = 15000
    q = ref.narrow(np.full((1, 2, 1, head_dim), 300, np.float32), dtype)
    q[0, 1] = ref.narrow(np.float32([-300]), dtype)
    c, lengths = ref.Cache(pages, np.array([[2, 0, 1]], np.int32)), np.array([384], np.int32)
    out, lse = _core.attend(p.words, q, pages, c.block_table, lengths, softmax_scale=1e-5)
    want, want_lse = ref.attend(p, c, ref.Query(q, lengths, softmax_scale=1e-5))
    np.testing.assert_allclose(out, want, rtol=TOLERANCE[dtype][0])
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


# ---- properties ----


@given(st.data())
def test_any_case(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    head_dim = 8 * data.draw(st.integers(1, 20))
    group = data.draw(st.sampled_from((32, 16)))
    groups = -(-head_dim // group)
    widths = st.lists(st.sampled_from((0, *ref.WIDTHS)), min_size=groups, max_size=groups).filter(any).map(tuple)
    page = data.draw(st.sampled_from((32, 64, 128) if group == 32 else (64, 128)))
    keys = data.draw(widths)
    term = len(set(keys)) == 1 and data.draw(st.booleans())
    p = ref.plan(head_dim, keys, data.draw(widths), page_tokens=page, group=group, variance_term=term)
    lengths = data.draw(st.lists(st.integers(0, 180), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, n)) for n in lengths] if data.draw(st.booleans()) else None
    window, fresh = data.draw(st.integers(0, 40)), data.draw(st.booleans())
    causal = fresh or data.draw(st.booleans())
    several = fresh or window == 0 or not causal  # otherwise early queries need tokens that left the window
    case = make_case(
        rng,
        p,
        lengths,
        starts=starts,
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.integers(1, 3)),
        query_tokens=data.draw(st.integers(1, 20)) if several else 1,
        sinks=data.draw(st.integers(0, 10)),
        window=window,
        fresh=fresh,
        causal=causal,
        sliding_window=data.draw(st.sampled_from((0, 0, 1, 20, 64))) if causal else 0,
        softcap=data.draw(st.sampled_from((0.0, 0.0, 3.0))),
    )
    check(case, threads=data.draw(st.integers(0, 3)))


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 4))
def test_parts_merge_into_the_whole(seed: int, length: int, parts: int) -> None:
    """Attending to slices of the history (by starts and lengths) and merging is attending to all of it."""
    rng = np.random.default_rng(seed)
    p = ref.plan(32, 3, 3, page_tokens=32, variance_term=bool(seed % 2))
    case = make_case(rng, p, [length], kv_heads=1, causal=False)
    whole, whole_lse = core_attend(case)
    cuts = np.sort(np.concatenate([[0, length], rng.integers(0, length + 1, parts - 1)]))
    outs, lses = [], []
    for start, end in pairwise(cuts):
        part = case.arguments | dict(lengths=np.array([end], np.int32), starts=np.array([start], np.int32))
        out, lse = _core.attend(**part)
        outs.append(out.reshape(-1, 32))
        lses.append(lse.reshape(-1))
    out, lse = _core.merge(np.stack(outs), np.stack(lses))
    np.testing.assert_allclose(out, whole.reshape(-1, 32), rtol=0, atol=2e-5 * abs(whole).max())
    np.testing.assert_allclose(lse, whole_lse.reshape(-1), rtol=0, atol=1e-5)


def test_centres_of_keys_change_the_bytes_but_hardly_the_answer(rng: np.random.Generator) -> None:
    """Keys share a large offset. Without a centre, 3 bits do not resolve their differences; with it they do."""
    offset = 30 * rng.standard_normal(64).astype(np.float32)
    k, v = rng.standard_normal((2, 1, 1, 128, 64)).astype(np.float32)
    k, q = k + offset, rng.standard_normal((1, 1, 1, 64)).astype(np.float32)
    p, table, lengths = ref.plan(64, 3, 5), np.zeros((1, 1), np.int32), np.array([128], np.int32)
    exact, _ = ref.softmax(q[0, 0].astype(np.float64) @ k[0, 0].T / 8, v[0, 0], 0.0)
    errors = []
    for centre in (None, k.mean(axis=(0, 2))):
        pages = _core.new_pages(p.words, 1, 1)
        _core.append(p.words, k, v, lengths, pages, table, key_numbers=centre)
        out, _ = _core.attend(p.words, q, pages, table, lengths, key_numbers=centre)
        errors.append(np.linalg.norm(out[0, 0] - exact) / np.linalg.norm(exact))
    assert errors[1] < 0.3 < errors[0]


def test_values_centre_is_added_back(rng: np.random.Generator) -> None:
    p, table, lengths = ref.plan(64, 4, 4), np.zeros((1, 1), np.int32), np.array([100], np.int32)
    k, v = rng.standard_normal((2, 1, 2, 100, 64)).astype(np.float32)
    v, q = v * 1e-3 + 7, rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    centre = random_transform(rng, p, 2).centre * 0 + 7
    pages = _core.new_pages(p.words, 1, 2)
    _core.append(p.words, k, v, lengths, pages, table, value_numbers=centre)
    out, _ = _core.attend(p.words, q, pages, table, lengths, value_numbers=centre)
    assert abs(out - 7).max() < 1e-2
