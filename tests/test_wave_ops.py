"""Waves and metrics where operators encode and decode, on every device and in each of CUDA's kernels: codes against the
float64 residual, decoded keys against float64, at positions up to 2^20 and amplitudes of norm 1,000."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference as ref
import tolerance
from cases import keywords, random_moments, random_transform

torch = pytest.importorskip("torch", reason="torch is not installed")
from ops_cases import DEVICES, DTYPES, needs_cuda, on, tensor  # noqa: E402

from turboquant import ops  # noqa: E402
from turboquant.plan import Plan, Side  # noqa: E402

tq = torch.ops.turboquant
FAR = 2**20
Layout = tuple[np.ndarray, np.ndarray]  # pages and block table


def moments_of(rng: np.random.Generator, p: ref.Plan, heads: int, **rest: Any) -> ref.Transform:
    """Everything that keys may have: a wave, a metric, and a constant centre."""
    turns, moments = random_moments(rng, p, heads, **rest)
    centre = rng.standard_normal((heads, p.head_dim)).astype(np.float32)
    return replace(random_transform(rng, p, heads, plain=True), centre=centre, turns=turns, moments=moments)


def around_the_wave(rng: np.random.Generator, p: ref.Plan, key: ref.Transform, shape: tuple, first: int, dtype: str):
    """Keys [batch, heads, tokens, head_dim] around their centres at positions first .., as a dtype holds them."""
    k = rng.standard_normal((*shape, p.head_dim))
    for h in range(shape[1]):
        head = ref.moments.head_of(p, key.at(h))
        k[:, h] += ref.moments.centres(head, first + np.arange(shape[2]), np.float64)
    return ref.narrow(k.astype(np.float32), dtype)


def empty(p: ref.Plan, batch: int, heads: int, last: int, used: int) -> Layout:
    """Zeroed pages for the last `used` of `last` packed tokens, and a block table. Pages before these were released."""
    pages = -(-last // p.page_tokens)
    first = max(0, last - used) // p.page_tokens
    table = np.full((batch, pages), 2**30, np.int32)
    table[:, first:] = np.arange(batch * (pages - first)).reshape(batch, -1)[:, ::-1]
    return np.zeros((batch * (pages - first), heads, p.record_bytes), np.uint8), table


def appended(device: str, p: ref.Plan, layout: Layout, k: Any, dtype: str, lengths: Any, key: ref.Transform, sinks=0):
    """The pages after `append` of k as keys and values."""
    pages, table = (tensor(x).to(device) for x in layout)
    new = tensor(k, dtype).to(device)
    exact = {
        f"sink_{side}": torch.zeros(k.shape[0], k.shape[1], sinks, p.head_dim, dtype=DTYPES[dtype], device=device)
        for side in "kv"
        if sinks
    }
    size = torch.tensor(lengths, dtype=torch.int32, device=device)
    both = keywords(key, ref.Transform(rotation=key.rotation))
    tq.append(p.words, new, new, size, pages, table, **exact, **on(device, both))
    return pages.cpu().numpy()


def check_keys(p: ref.Plan, layout: Layout, lengths: Any, k: np.ndarray, key: ref.Transform, sinks: int = 0, slack=0.0):
    """Asserts that codes are those of the float64 residual of k, the last tokens, except near thresholds, and that
    scales fit the codes. Codes of settled rows are of numbers rounded to cells of 1/64, and CUDA keeps 11 bits of such
    rows."""
    pages, table = layout
    moves = 2**-8 if ref.is_settled(p) else 2**-13
    near = moves + (1 / 64 if ref.is_settled(p) else 0)
    for b, length in enumerate(lengths):
        positions = np.arange(max(sinks, length - k.shape[2]), length)
        for h in range(k.shape[1]):
            rows = ref.widen(k[b, h, k.shape[2] - length + positions]).astype(np.float64)
            y = ref.moments.prepared(ref.moments.head_of(p, key.at(h)), rows, positions, np.float64)
            u = y @ ref.rotation_matrix(p, key.at(h).rotation).T
            rms = np.sqrt((u[:, p.coded("key")] ** 2).mean(1, keepdims=True))
            u = np.where(p.coded("key"), u / rms, 0)
            index = positions - sinks
            records = {page: ref.unpack(p, "key", pages[table[b, page], h]) for page in set(index // p.page_tokens)}
            codes = np.array([records[i // p.page_tokens][0][i % p.page_tokens] for i in index])
            scales = np.array([records[i // p.page_tokens][1][i % p.page_tokens] for i in index], np.float64)
            both = (np.full(u.shape, x + slack) for x in (near, moves))
            c = tolerance.check_codes(p, "key", u, codes, next(both), np.ones_like(u), next(both))
            want = rms[:, 0] * (u * u).sum(1) / (c * u).sum(1)
            np.testing.assert_allclose(scales, want, rtol=2e-3 + slack)


# Tokens of a call: CUDA has a kernel for one token, one for up to 32 and for rare plans, and one for more tokens.
KERNELS = {1: "append_one_token", 30: "append_general", 150: "append_prefill"}
KINDS = {
    "wave": dict(wave_pairs=32),
    "few pairs": dict(wave_pairs=8),
    "metric of rank 0": dict(metric=1),
    "metric of rank 3": dict(metric=4),
    "both": dict(wave_pairs=32, metric=5),
    "both, tries": dict(wave_pairs=32, metric=5, tries=3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim,bits", [(64, 4), (128, 3), (256, 2), (512, 4)])
def test_codes(dim: int, bits: int, dtype: str, tokens: int, device: str, rng: np.random.Generator) -> None:
    for kind in ("both", "both, tries") if dim > 64 else KINDS:
        p = ref.plan(dim, bits, bits, **(KINDS[kind] | ({"wave_pairs": dim // 2} if "both" in kind else {})))
        key, sinks, first = moments_of(rng, p, 2, interleaved=bits == 3), 3, 50
        k = around_the_wave(rng, p, key, (2, 2, tokens), first, dtype)
        lengths = [first + tokens, first + tokens - 9]
        layout = empty(p, 2, 2, first + tokens, tokens + 60)
        check_keys(p, (appended(device, p, layout, k, dtype, lengths, key, sinks), layout[1]), lengths, k, key, sinks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", KERNELS)
@pytest.mark.parametrize(
    "p",
    [
        ref.plan(40, 5, 4, wave_pairs=24, metric=5),
        ref.plan(80, 3, 3, wave_pairs=40, metric=3),
        ref.plan(96, 4, 4, wave_pairs=8),
        ref.plan(48, 4, 4, rotation=ref.NONE, wave_pairs=24, metric=2),
        ref.plan(64, 3, 3, rotation=ref.DENSE, wave_pairs=32, metric=5),
        ref.plan(128, (4, 0, 6, 8), 4, wave_pairs=64, metric=5),
        ref.plan(64, (3, 5, 0, 4), 4, group=16, wave_pairs=32, metric=5),
        ref.plan(128, (4, 2, 1, 3), 4, wave_pairs=40, page_tokens=64),
        ref.plan(80, 5, 3, wave_pairs=40, metric=3, tries=5),
        ref.plan(64, 3, 3, rotation=ref.DENSE, wave_pairs=32, metric=5, tries=3),
        ref.plan(128, (4, 0, 6, 8), 4, wave_pairs=64, metric=5, tries=7),
        ref.plan(64, (3, 5, 0, 4), 4, group=16, wave_pairs=32, metric=5, tries=3),
        ref.plan(128, (4, 2, 1, 3), 4, wave_pairs=40, page_tokens=64, tries=7),
        ref.plan(320, (4, 2, 1, 3, 0) * 2, 4, wave_pairs=160, metric=3, tries=5),
        ref.plan(512, 3, 3, rotation=ref.DENSE, wave_pairs=64, metric=5),
    ],
    ids=[
        "40",
        "80",
        "96",
        "no rotation",
        "dense",
        "mixed",
        "groups of 16",
        "mixed, prefill",
        "80, tries",
        "dense, tries",
        "mixed, tries",
        "groups of 16, tries",
        "mixed, prefill, tries",
        "320, tries",
        "512, dense",
    ],
)
def test_codes_of_every_plan(p: ref.Plan, tokens: int, device: str, rng: np.random.Generator) -> None:
    key, lengths = moments_of(rng, p, 3), [70 + tokens]
    k = around_the_wave(rng, p, key, (1, 3, tokens), 70, "float16")
    layout = empty(p, 1, 3, 70 + tokens, tokens + 64)
    check_keys(p, (appended(device, p, layout, k, "float16", lengths, key), layout[1]), lengths, k, key)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_million_tokens_and_amplitudes_of_a_thousand(
    dtype: str, tokens: int, device: str, rng: np.random.Generator
) -> None:
    """Decoded keys are those that the bytes stand for, to 2e-3 for queries of norm 1, and the keys except for what
    codes lose. The last tokens are before and after position 2^20."""
    p = ref.plan(64, 4, 4, wave_pairs=32, metric=5)
    key, last, sinks = moments_of(rng, p, 2, size=1000.0), FAR + 40, 4
    k = around_the_wave(rng, p, key, (1, 2, tokens), last - tokens, dtype)
    pages, table = empty(p, 1, 2, last - sinks, tokens)
    pages = appended(device, p, (pages, table), k, dtype, [last], key, sinks)
    check_keys(p, (pages, table), [last], k, key, sinks, slack=4e-3)
    first = int((table[0] == 2**30).sum())  # pages that were released
    count = last - sinks - first * p.page_tokens
    near = on(device, dict(pages=pages, block_table=table[:, first:], lengths=np.array([count], np.int32)))
    got, _ = tq.dequantize(p.words, **near, max_tokens=count, sinks=sinks + first * p.page_tokens,
                           **on(device, keywords(key)))  # fmt: skip
    for h in range(2):
        for i in range(count - tokens, count):
            page, token = divmod(i, p.page_tokens)
            codes, scales = ref.unpack(p, "key", pages[table[0, first + page], h])
            one, at = slice(token, token + 1), np.array([sinks + first * p.page_tokens + i])
            want = ref.decode(p, "key", codes[one], scales[one], key.at(h), at)[0]
            assert np.linalg.norm(got[0, h, i].cpu().numpy() - want) < 2e-3
            assert np.linalg.norm(want - ref.widen(k[0, h, i - count + tokens])) < 6


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_do_not_depend_on_what_is_appended_together(device: str, rng: np.random.Generator) -> None:
    """One call, and calls of 1 or 23 tokens, give the same codes, except for 0.4 % at thresholds. Padding changes
    nothing."""
    p = ref.plan(64, 4, 4, wave_pairs=32, metric=5)
    key = moments_of(rng, p, 2, size=30.0)
    k = around_the_wave(rng, p, key, (1, 2, 150), 0, "bfloat16")
    padded = np.concatenate([np.full_like(k[:, :, :14], 0x7FC0), k], 2)
    codes = []
    for tokens, step in ((k, 150), (padded, 164), (k, 1), (k, 23)):
        layout = empty(p, 1, 2, 150, 150)
        for last in [*range(step, tokens.shape[2], step), tokens.shape[2]]:
            part = np.ascontiguousarray(tokens[:, :, last - ((last - 1) % step + 1) : last])
            held = [last - tokens.shape[2] + 150]
            layout = (appended(device, p, layout, part, "bfloat16", held, key), layout[1])
        codes.append(np.stack([ref.unpack(p, "key", layout[0][page, h])[0] for page in layout[1][0] for h in (0, 1)]))
    np.testing.assert_array_equal(codes[0], codes[1])
    for other in codes[2:]:
        assert (codes[0] != other).mean() < 4e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", KERNELS)
def test_pairs_that_share_channels(tokens: int, device: str, rng: np.random.Generator) -> None:
    """A channel may be in several pairs or be paired with itself, and pairs with amplitude 0 need not be the last."""
    p = ref.plan(64, 4, 4, wave_pairs=32, metric=2)
    key = moments_of(rng, p, 2)
    turns, moments = key.turns.copy(), key.moments.copy()
    turns[3, :2], turns[4, 1], turns[5, :2], turns[6, :2] = turns[2, :2], turns[2, 0], (7, 7), turns[8, :2]
    moments[:, 12:14] = 0
    key = replace(key, turns=turns, moments=moments)
    k = around_the_wave(rng, p, key, (1, 2, tokens), 40, "float16")
    layout, lengths = empty(p, 1, 2, 40 + tokens, tokens + 40), [40 + tokens]
    check_keys(p, (appended(device, p, layout, k, "float16", lengths, key), layout[1]), lengths, k, key)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "side", [Side(3, blocks=32), Side(8, "none", "affine", 32), Side(3, sketch="sign"), Side(4, levels="absmax")]
)
def test_plans_that_are_not_plain(side: Side, device: str, rng: np.random.Generator) -> None:
    """Decoded keys are near those that were quantised, and near the CPU's."""
    plan = Plan(64, side, side, wave_pairs=32, metric=4)
    p = ref.plan(64, 3, 3, wave_pairs=32, metric=5)  # it describes the moments only
    key = keywords(moments_of(rng, p, 2))
    k = torch.from_numpy(rng.standard_normal((1, 2, 200, 64)).astype(np.float32))
    decoded = []
    for at in ("cpu", device):
        arguments = on(at, key)
        pages = tq.quantize(plan.words, k.to(at), k.to(at), **arguments)
        table = torch.arange(pages.shape[0], dtype=torch.int32, device=at)[None]
        lengths = torch.tensor([200], dtype=torch.int32, device=at)
        decoded.append(tq.dequantize(plan.words, pages, table, lengths, 200, **arguments)[0].cpu())
    assert (decoded[1] - k).norm() < 0.6 * k.norm()
    assert (decoded[0] - decoded[1]).norm() < 2e-3 * k.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoil", ["turns", "moments"])
def test_arrays_that_are_missing(spoil: str, device: str, rng: np.random.Generator) -> None:
    p = ref.plan(64, 3, 3, wave_pairs=32, metric=5)
    key = replace(moments_of(rng, p, 1), **{spoil: None})
    k = np.zeros((1, 1, 5, 64), np.float32)
    name = {"turns": "key_turns` must be given, because the plan has a wave", "moments": "key_numbers` must be as wide"}
    with pytest.raises(ValueError, match=f"append: `{name[spoil]}"):
        appended(device, p, empty(p, 1, 1, 5, 5), k, "float32", [5], key)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at,number,wants", [(0, np.nan, "an amplitude"), (64, -1.0, "a scale"), (65, 0.0, "a scale")])
def test_pack_looks_at_moments(at: int, number: float, wants: str, device: str, rng: np.random.Generator) -> None:
    """`pack` checks moments on CUDA too, where no operator does."""
    p = ref.plan(64, 3, 3, wave_pairs=32, metric=5)
    key = keywords(moments_of(rng, p, 2))
    key["key_numbers"][1, 64 + at] = number
    k = torch.zeros(1, 2, 5, 64, device=device)
    with pytest.raises(ValueError, match=rf"`key_numbers\[{64 + 388 + 64 + at}\]` must be {wants}"):
        ops.pack(k, k, Plan.from_words(p.words), transforms=on(device, key))


@pytest.mark.cuda
@pytest.mark.skipif(needs_cuda[1].args[0], reason=needs_cuda[1].kwargs["reason"])
@pytest.mark.parametrize("tokens", KERNELS)
def test_moments_that_are_no_numbers_stay_in_their_pages(tokens: int, rng: np.random.Generator) -> None:
    """Operators on CUDA do not check moments. They keep channels below head_dim, and write nothing outside their
    pages."""
    p = ref.plan(64, 3, 3, wave_pairs=32, metric=5)
    key = moments_of(rng, p, 2)
    turns, moments = key.turns.copy(), key.moments.copy()
    turns[::3, :2], moments[:, ::5] = (-(2**31), 2**31 - 1), np.nan
    moments[:, 1::7] = np.inf
    pages, table = empty(p, 1, 2, tokens, tokens)
    guarded = np.concatenate([pages, np.full_like(pages[:1], 0xA5)])
    spoilt = replace(key, turns=turns, moments=moments)
    k = rng.standard_normal((1, 2, tokens, 64)).astype(np.float32)
    got = appended("cuda", p, (guarded, table), ref.narrow(k, "float16"), "float16", [tokens], spoilt)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(got[-1], guarded[-1])


@pytest.mark.cuda
@pytest.mark.skipif(needs_cuda[1].args[0], reason=needs_cuda[1].kwargs["reason"])
@pytest.mark.parametrize("tokens,name", KERNELS.items())
def test_kernels(tokens: int, name: str) -> None:
    """A wave and a metric do not keep a prompt from the fast kernel."""
    plan = Plan(128, 4, 4, wave_pairs=64, metric=4)
    k = torch.zeros(1, 2, tokens, 128, dtype=torch.bfloat16, device="cuda")
    pages = torch.zeros(2, 2, plan.record_bytes, dtype=torch.uint8, device="cuda")
    table, lengths = (
        torch.zeros(1, 2, dtype=torch.int32, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    assert tq.append_kernel(plan.words, k, k, lengths, pages, table) == name
