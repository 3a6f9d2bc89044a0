"""Waves and metrics in the core: codes against the reference, attention and decoded keys against float64, at positions
up to 2^20 and amplitudes of norm 1,000."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference as ref
from cases import aligned_pages, empty_cache, keywords, make_case, random_moments, random_transform
from core_calls import PLANS, SHAPES, check, core_append

from turboquant import _core
from turboquant.plan import Plan, Side

MOMENTS = {
    "wave": dict(wave_pairs=32),
    "half of the pairs": dict(wave_pairs=16),
    "metric of rank 0": dict(metric=1),
    "metric of rank 4": dict(metric=5),
    "wave and metric": dict(wave_pairs=32, metric=5),
    "few pairs and rank 1": dict(wave_pairs=8, metric=2),
}
FAR = 2**20


def moments_of(rng, p: ref.Plan, kv_heads: int, centre: bool = True, **rest) -> ref.Transform:
    turns, moments = random_moments(rng, p, kv_heads, **rest)
    constant = rng.standard_normal((kv_heads, p.head_dim)).astype(np.float32) if centre else None
    return replace(random_transform(rng, p, kv_heads, plain=True), centre=constant, turns=turns, moments=moments)


# ---- attention ----


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_of_every_shape(shape: dict, rng: np.random.Generator) -> None:
    spread = min(shape.get("spread", 3.0), 8.0)  # A^-1 makes logits larger
    check(make_case(rng, ref.plan(64, 3, 3, wave_pairs=32, metric=5), **shape | {"spread": spread}))


@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize(("bits", "term"), [(4, False), (3, False), (2, False), (2, True)])
def test_attention_of_every_kind(moments: dict, bits: int, term: bool, rng: np.random.Generator) -> None:
    p = ref.plan(64, bits, bits, variance_term=term, **moments)
    check(make_case(rng, p, [333, 60], sinks=3, window=20, query_tokens=5, fresh=True, group=3))


@pytest.mark.parametrize("p", PLANS.values(), ids=PLANS)
def test_attention_of_every_plan(p: ref.Plan, rng: np.random.Generator) -> None:
    pairs = -(-p.head_dim // 16) * 8  # rounded up, so the last pairs may be padding
    check(make_case(rng, replace(p, wave_pairs=pairs, metric=5), [333, 60], sinks=3, query_tokens=3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_of_halves(dtype: str, rng: np.random.Generator) -> None:
    p = ref.plan(80, 4, 3, wave_pairs=40, metric=5)
    check(make_case(rng, p, [200, 40], sinks=2, window=16, dtype=dtype, spread=2.0))


@pytest.mark.parametrize("threads", [2, 5])
def test_splits_of_pages(threads: int, rng: np.random.Generator) -> None:
    p = ref.plan(64, 3, 2, wave_pairs=32, metric=2)
    check(make_case(rng, p, [3000], sinks=4, kv_heads=1, group=4, sliding_window=2500), threads=threads)


def test_every_instruction_set(level: str, rng: np.random.Generator) -> None:
    """Codes equal the scalar ones bit for bit, and attention is near float64."""
    for dim, tokens in ((64, 128), (40, 32), (256, 96)):
        p = ref.plan(dim, 3, 3, wave_pairs=-(-dim // 16) * 8, metric=5, page_tokens=tokens)
        case = make_case(rng, p, [300, 77], group=5)
        _core.set_isa(level)
        check(case)
        k = rng.standard_normal((1, 2, 100, dim)).astype(np.float32)
        packed = []
        key = moments_of(rng, p, 2)
        for isa in ("scalar", level):
            _core.set_isa(isa)
            c = empty_cache(np.random.default_rng(0), p, np.array([100]), kv_heads=2)
            core_append(p, c, k, k, [100], key, ref.Transform())
            packed.append(c.pages)
        np.testing.assert_array_equal(*packed)
    _core.set_isa(None)


# ---- far away, and large ----


def far_case(rng, p: ref.Plan, tokens: int, size: float) -> tuple[ref.Cache, np.ndarray, ref.Transform, int]:
    """Keys around a wave whose amplitudes have norm `size`. The last is at position 2^20; earlier pages were
    released."""
    key = moments_of(rng, p, 2, size=size)
    length = FAR + 1
    pages = -(-length // p.page_tokens)
    table = np.full((1, pages), 2**30, np.int32)
    used = -(-tokens // p.page_tokens) + 1
    table[0, -used:] = rng.permutation(used)
    positions = np.arange(length - tokens, length)
    k = rng.standard_normal((1, 2, tokens, p.head_dim))
    for h in range(2):
        head = ref.moments.head_of(p, key.at(h))
        k[0, h] += ref.moments.centres(head, positions, np.float64)
    return ref.Cache(aligned_pages(used, 2, p.record_bytes, 0xFF), table), k.astype(np.float32), key, length


@pytest.mark.parametrize("group", [32, 16])
def test_a_million_tokens_and_amplitudes_of_a_thousand(group: int, rng: np.random.Generator) -> None:
    """Attention to one token: its log-sum-exp is the logit, to 2e-3 for queries of scale * |q| = 1."""
    p = ref.plan(64, 4, 4, wave_pairs=32, metric=5, group=group)
    c, k, key, length = far_case(rng, p, 70, 1000.0)
    core_append(p, c, k, k, [length], key, ref.Transform())
    q = rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    q *= 8 / np.linalg.norm(q, axis=-1, keepdims=True)
    largest = 0.0
    for last in (length, length - 1, length - 33, length - 64):
        _, lse = _core.attend(p.words, q, c.pages, c.block_table, np.array([last], np.int32), sliding_window=1,
                              **keywords(key))  # fmt: skip
        at = last - 1
        page, token = divmod(at, p.page_tokens)
        for h in range(2):
            codes, scales = ref.unpack(p, "key", c.pages[c.block_table[0, page], h])
            one = slice(token, token + 1)
            decoded = ref.decode(p, "key", codes[one], scales[one], key.at(h), np.array([at]))
            want = float(q[0, h, 0].astype(np.float64) @ decoded[0]) / 8
            largest = max(largest, abs(want))
            assert abs(lse[0, h, 0] - want) < 2e-3
            # the decoded key is the key, except for what codes lose of its residual
            assert np.linalg.norm(decoded[0] - k[0, h, 70 - (length - at)]) < 6
    assert largest > 50


CUDA_PLANS = {  # one for each kind of kernel: fused, of many rows, three kernels, tiles of 16
    "fused": ref.plan(128, 4, 4, wave_pairs=64, metric=5),
    "fused, head_dim 64": ref.plan(64, 2, 2, wave_pairs=32, metric=5),
    "split, head_dim 80": ref.plan(80, 3, 3, wave_pairs=40, metric=5),
    "split, head_dim 256": ref.plan(256, 4, 3, wave_pairs=128, metric=5),
    "groups of 16": ref.plan(64, 4, 4, wave_pairs=32, metric=5, group=16),
    "a metric alone": ref.plan(128, 3, 3, metric=5),
    "few pairs": ref.plan(128, 3, 3, wave_pairs=8),
}


def on_cuda(torch, arguments: dict) -> dict:
    return {name: torch.from_numpy(np.ascontiguousarray(x)).cuda() for name, x in arguments.items()}


@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("p", CUDA_PLANS.values(), ids=CUDA_PLANS)
def test_a_million_tokens_and_amplitudes_of_a_thousand_on_cuda(p: ref.Plan, group: int, rng) -> None:
    """As above, with `group` queries at once, and also over a sliding window whose earlier pages were released."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from turboquant import ops  # noqa: F401  makes torch.ops.turboquant

    c, k, key, length = far_case(rng, p, 70, 1000.0)
    core_append(p, c, k, k, [length], key, ref.Transform())
    q = rng.standard_normal((1, 2 * group, 1, p.head_dim)).astype(np.float32)
    q *= np.sqrt(p.head_dim) / np.linalg.norm(q, axis=-1, keepdims=True)
    fixed = on_cuda(torch, {"q": q, "pages": c.pages, "block_table": c.block_table, **keywords(key)})
    for last, window in ((length, 1), (length - 33, 1), (length - 64, 1), (length, 60)):
        lengths = torch.tensor([last], dtype=torch.int32, device="cuda")
        _, lse = torch.ops.turboquant.attend(p.words, lengths=lengths, sliding_window=window, **fixed)
        for h in range(2):
            positions = np.arange(last - window, last)
            pages, tokens = positions // p.page_tokens, positions % p.page_tokens
            decoded = []
            for at, page, token in zip(positions, pages, tokens, strict=True):
                codes, scales = ref.unpack(p, "key", c.pages[c.block_table[0, page], h])
                one = slice(token, token + 1)
                decoded.append(ref.decode(p, "key", codes[one], scales[one], key.at(h), np.array([at]))[0])
            logits = q[0, h * group : (h + 1) * group, 0].astype(np.float64) @ np.array(decoded).T
            logits /= np.sqrt(p.head_dim)
            top = logits.max(1)
            want = top + np.log(np.exp(logits - top[:, None]).sum(1))
            assert np.abs(lse[0, h * group : (h + 1) * group, 0].cpu().numpy() - want).max() < 2e-3


def test_positions_count_sinks_and_not_padding(rng: np.random.Generator) -> None:
    """Left padding does not change the bytes. Positions of packed tokens count the sinks before them."""
    p = ref.plan(64, 4, 4, wave_pairs=32)
    key = moments_of(rng, p, 1)
    k = rng.standard_normal((1, 1, 50, 64)).astype(np.float32)
    padded = np.concatenate([np.full((1, 1, 14, 64), np.nan, np.float32), k], 2)
    pages = []
    for tokens in (k, padded):
        c = empty_cache(np.random.default_rng(1), p, np.array([50]), kv_heads=1, sinks=5)
        core_append(p, c, tokens, tokens, [50], key, ref.Transform())
        pages.append(c.pages)
    np.testing.assert_array_equal(*pages)
    decoded, _ = _core.dequantize(p.words, pages[0], c.block_table, np.array([45], np.int32), 45, sinks=5,
                                  **keywords(key))  # fmt: skip
    elsewhere, _ = _core.dequantize(p.words, pages[0], c.block_table, np.array([45], np.int32), 45, **keywords(key))
    assert np.linalg.norm(decoded[0, 0] - k[0, 0, 5:]) < 0.15 * np.linalg.norm(k)
    assert np.linalg.norm(elsewhere - decoded) > 3


def test_bytes_do_not_depend_on_what_is_appended_together(rng: np.random.Generator) -> None:
    """Tokens appended in one call, one at a time or 23 at a time give the same bytes."""
    p = ref.plan(40, 4, 4, wave_pairs=16, metric=5)
    key = moments_of(rng, p, 2, size=100.0)
    k = rng.standard_normal((2, 2, 70, 40)).astype(np.float32)
    lengths, pages = np.array([70, 49]), []
    for step in (70, 1, 23):
        c = empty_cache(np.random.default_rng(1), p, lengths, kv_heads=2, sinks=3)
        c.pages[...] = 0
        for last in [*range(step, 70, step), 70]:
            first = last - step if last % step == 0 else last // step * step
            held = np.maximum(lengths - (70 - last), 0)
            core_append(p, c, k[:, :, first:last], k[:, :, first:last], held, key, ref.Transform())
        pages.append(c.pages)
    np.testing.assert_array_equal(pages[0], pages[1])
    np.testing.assert_array_equal(pages[0], pages[2])


def test_pairs_that_share_channels(rng: np.random.Generator) -> None:
    """A channel may be in several pairs or be paired with itself, and pairs with amplitude 0 need not be the last."""
    p = ref.plan(40, 4, 4, wave_pairs=16, metric=1)
    turns, moments = random_moments(rng, p, 2)
    turns[3, :2], turns[4, 1], turns[5, :2], turns[6, :2] = turns[2, :2], turns[2, 0], (7, 7), turns[8, :2]
    moments[:, 12:14] = 0
    key = replace(ref.Transform(), turns=turns, moments=moments)
    k = rng.standard_normal((1, 2, 60, 40)).astype(np.float32)
    c, want = (empty_cache(np.random.default_rng(1), p, np.array([60]), kv_heads=2) for _ in range(2))
    core_append(p, c, k, k, [60], key, ref.Transform())
    ref.append(p, want, k, k, np.array([60], np.int32), key, ref.Transform())
    for h in range(2):
        got, codes = (ref.unpack(p, "key", x.pages[x.block_table[0, 0], h])[0][:60] for x in (c, want))
        assert (got != codes).mean() < 0.002


# ---- codes and decoded keys ----


@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize(
    "dim,rotation", [(64, ref.HADAMARD), (40, ref.HADAMARD), (64, ref.DENSE), (48, ref.NONE), (384, ref.HADAMARD)]
)
def test_codes(moments: dict, dim: int, rotation: int, rng: np.random.Generator) -> None:
    """Codes are those of the float64 residual, except where it is close to a threshold."""
    moments = {name: min(n, dim // 16 * 8) if name == "wave_pairs" else n for name, n in moments.items()}
    p = ref.plan(dim, 3, 4, rotation=rotation, **moments)
    key = moments_of(rng, p, 2)
    value = random_transform(rng, p, 2)
    lengths = np.array([300, 41], np.int32)
    c = empty_cache(rng, p, lengths, kv_heads=2, sinks=3)
    c.pages[...] = 0
    want = c.copy()
    k, v = rng.standard_normal((2, 2, 2, 300, dim)).astype(np.float32)
    core_append(p, c, k, v, lengths, key, value)
    ref.append(p, want, k, v, lengths, key, value)
    settled, differing = ref.is_settled(p), 0
    for b, length in enumerate(lengths):
        for h in range(2):
            head = ref.moments.head_of(p, key.at(h))
            for i, page in enumerate(c.block_table[b, : -(-(length - 3) // 128)]):
                count = min(128, length - 3 - 128 * i)
                positions = 3 + 128 * i + np.arange(count)
                rows = k[b, h, 300 - length + positions].astype(np.float64)
                y = ref.moments.prepared(head, rows, positions, np.float64)
                u = y @ ref.rotation_matrix(p, key.at(h).rotation).T
                u /= np.sqrt((u * u).mean(1, keepdims=True))
                (got, got_scales), (codes, scales) = (ref.unpack(p, "key", x.pages[page, h]) for x in (c, want))
                np.testing.assert_allclose(got_scales[:count].astype(float), scales[:count].astype(float), rtol=2e-3)
                differing += (got[:count] != codes[:count]).sum()
                near = 0.02 if settled else 1e-4  # codes of settled rows are of u rounded to a cell of 1/64
                for channels, book in p.books("key"):
                    ranks = np.argsort(book.code_of_rank)[got[:count, channels]]
                    edges = np.concatenate([[-np.inf], book.thresholds, [np.inf]])
                    assert (u[:, channels] >= edges[ranks] - near).all()
                    assert (u[:, channels] <= edges[ranks + 1] + near).all()
    assert differing <= 20
    for name in ("sink_k", "sink_v"):
        np.testing.assert_array_equal(getattr(c, name), getattr(want, name))


@pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("group", [32, 16])
def test_decoded_keys(moments: dict, group: int, rng: np.random.Generator) -> None:
    p = ref.plan(64, 3, 2, group=group, **moments)
    case = make_case(rng, p, [200, 77], sinks=3)
    counts = np.array([197, 74], np.int32)
    k, v = _core.dequantize(p.words, case.cache.pages, case.cache.block_table, counts, 200, sinks=3,
                            **keywords(case.query.key, case.query.value))  # fmt: skip
    for side, got, transform in (("key", k, case.query.key), ("value", v, case.query.value)):
        for b, count in enumerate(counts):
            for h in range(2):
                want = ref.decode_packed(p, side, case.cache, b, h, int(count), transform)
                assert np.abs(got[b, h, :count] - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    "side", [Side(3, blocks=32), Side(8, "none", "affine", 32), Side(3, sketch="sign"), Side(4, levels="absmax")]
)
def test_plans_that_are_not_plain(side: Side, rng: np.random.Generator) -> None:
    """Decoded keys are near those that were appended, and attention is that of decoded keys and values."""
    plan = Plan(64, side, side, wave_pairs=32, metric=4)
    assert not plan.is_plain
    p = ref.plan(64, 3, 3, wave_pairs=32, metric=5)  # it describes the moments only
    key = moments_of(rng, p, 2)
    pages = aligned_pages(3, 2, plan.record_bytes)
    table, length = np.array([[1, 2]], np.int32), np.array([200], np.int32)
    k, v = rng.standard_normal((2, 1, 2, 200, 64)).astype(np.float32)
    _core.append(plan.words, k, v, length, pages, table, **keywords(key))
    decoded, values = _core.dequantize(plan.words, pages, table, length, 200, **keywords(key))
    assert np.linalg.norm(decoded - k) < 0.5 * np.linalg.norm(k)
    q = 2 * rng.standard_normal((1, 4, 3, 64)).astype(np.float32)
    out, lse = _core.attend(plan.words, q, pages, table, length, **keywords(key))
    for h in range(4):
        for i in range(3):
            logits = q[0, h, i].astype(np.float64) @ decoded[0, h // 2, : 198 + i].astype(np.float64).T / 8
            want, want_lse = ref.softmax(logits[None], values[0, h // 2, : 198 + i].astype(np.float64), 0.0)
            assert abs(lse[0, h, i] - want_lse[0]) < 1e-4 and np.abs(out[0, h, i] - want[0]).max() < 1e-4


# ---- vectors without a position ----


def test_dot_knows_a_metric_and_refuses_a_wave(rng: np.random.Generator) -> None:
    p = ref.plan(64, 4, metric=5)
    key = moments_of(rng, p, 1)
    x = rng.standard_normal((1, 1, 100, 64)).astype(np.float32)
    pages = aligned_pages(1, 1, p.record_bytes)
    _core.append(p.words, x, None, np.array([100], np.int32), pages, np.zeros((1, 1), np.int32), **keywords(key))
    queries = rng.standard_normal((5, 64)).astype(np.float32)
    got = _core.dot(p.words, queries, pages, 100, **keywords(key))
    want = ref.dot(p, queries, pages, 100, key)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()
    waved = replace(p, wave_pairs=8)
    with pytest.raises(ValueError, match="dot: `plan` must be one without a wave, since vectors have no position"):
        _core.dot(waved.words, queries, pages, 100)


# ---- what is refused ----


TURN, AMPLITUDE = "a channel in 0..head_dim - 1, got", "an amplitude, finite and at most 16384 in magnitude, got nan"
SCALE, STRETCH = r"a scale in 2\^-10..2\^10, got", r"a stretch in 2\^-10 - 1..2\^10, got -1"
BAD = {  # the array and number to change; a head has 64 numbers of the wave, then 5 * 64 and 4 of the metric
    "no turns": (("turns", None, None), "`key_turns` must be given, because the plan has a wave, got"),
    "no moments": (
        ("moments", None, None),
        "`key_numbers` must be as wide as its parts: a centre or none, steps or none, the plan's moments, got 64",
    ),
    "a channel that is not there": (("turns", (2, 1), 64), rf"`key_turns\[7\]` must be {TURN} 64"),
    "a negative channel": (("turns", (2, 0), -1), rf"`key_turns\[6\]` must be {TURN} -1"),
    "an amplitude that is not finite": (("moments", (1, 3), np.nan), rf"`key_numbers\[519\]` must be {AMPLITUDE}"),
    "a scale of 0": (("moments", (0, 64), 0), rf"`key_numbers\[128\]` must be {SCALE} 0"),
    "a negative scale": (("moments", (0, 70), -1), rf"`key_numbers\[134\]` must be {SCALE} -1"),
    "a long direction": (("moments", (0, 130), 3), r"`key_numbers\[194\]` must be a number of a unit vector, got 3"),
    "a stretch of -1": (("moments", (0, 385), -1), rf"`key_numbers\[449\]` must be {STRETCH}"),
}


@pytest.mark.parametrize("change,message", BAD.values(), ids=BAD)
def test_refused_before_anything_is_stored(change: tuple, message: str, rng: np.random.Generator) -> None:
    p = ref.plan(64, 3, 3, wave_pairs=32, metric=5)
    key = moments_of(rng, p, 2)
    name, index, number = change
    array = None
    if index is not None:
        array = getattr(key, name).copy()
        array[index] = number
    key = replace(key, **{name: array})
    c = empty_cache(rng, p, np.array([20]), kv_heads=2)
    before = c.pages.copy()
    k = rng.standard_normal((1, 2, 20, 64)).astype(np.float32)
    with pytest.raises(ValueError, match=f"append: {message}"):
        core_append(p, c, k, k, [20], key, ref.Transform())
    np.testing.assert_array_equal(c.pages, before)


def test_arrays_that_a_plan_does_not_take(rng: np.random.Generator) -> None:
    waved = ref.plan(64, 3, 3, wave_pairs=32, metric=5)
    key = moments_of(rng, waved, 1)
    k = rng.standard_normal((1, 1, 5, 64)).astype(np.float32)
    for p, name in ((ref.plan(64, 3, 3, metric=5), "turns"), (ref.plan(64, 3, 3), "moments")):
        c = empty_cache(rng, p, np.array([5]), kv_heads=1)
        with pytest.raises(ValueError, match=f"append: `key_{name.replace('moments', 'numbers')}` must be"):
            core_append(p, c, k, k, [5], replace(ref.Transform(), **{name: getattr(key, name)}), ref.Transform())
    for name in ("turns", "moments"):
        short = {name: np.ascontiguousarray(getattr(key, name)[..., :-1])}
        c = empty_cache(rng, waved, np.array([5]), kv_heads=1)
        with pytest.raises(ValueError, match=f"append: `key_{name.replace('moments', 'numbers')}` must be"):
            core_append(waved, c, k, k, [5], replace(key, **short), ref.Transform())


def test_plans(rng: np.random.Generator) -> None:
    plan = Plan(72, 4, 3, wave_pairs=40, metric=0)
    assert Plan.from_words(plan.words) == plan and (plan.words[15], plan.words[16]) == (40, 1)
    for pairs in (4, -8, 48):
        with pytest.raises(ValueError, match="`wave_pairs` must be a multiple of 8 up to head_dim / 2"):
            Plan(72, 4, 3, wave_pairs=pairs)
    with pytest.raises(ValueError, match="`wave_pairs` must be"):
        Plan(1024, 4, wave_pairs=8)
    for rank in (-2, 5):
        with pytest.raises(ValueError, match="`metric` must be a rank in 0..4, or None, got"):
            Plan(64, 4, 4, metric=rank)
