"""torch.ops.turboquant.*: bytes and numbers against the reference, torch's own checks of operators, and compiling."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
import tolerance
from cases import keywords, make_case, orthogonal, random_transform
from ops_cases import (
    ACCURACY,
    DENSE,
    DEVICES,
    DTYPES,
    FINE,
    KEYS_ONLY,
    MIXED,
    MOMENTS,
    PLAN,
    ROUNDING,
    SHAPES,
    WIDE,
    WIDE_MOMENTS,
    array,
    attend_arguments,
    from_cache_layout,
    needs_cuda,
    on,
    samples,
    tensor,
    tq,
)

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch import Tensor  # noqa: E402

from turboquant import ops  # noqa: E402
from turboquant.plan import Plan, Side  # noqa: E402

TRIES = ref.plan(128, 4, (3, 2, 4, 1), tries=5)
WIDEST = ref.plan(512, 4, 3, tries=3)
TERM = ref.plan(80, 2, 3, tries=3, variance_term=True)
PLANS = {
    "4 and 3 bits": PLAN,
    "mixed": MIXED,
    "dense": DENSE,
    "groups of 16": FINE,
    "tries": TRIES,
    "320 channels": WIDE,
    "512 channels": WIDEST,
    "variance term": TERM,
}


# ---- parity ----


def largest_product(case: Any) -> float:
    """Returns a bound of logits: softmax_scale times the norms of the longest query and the longest key."""
    p, query = case.plan, case.query
    sequences, heads = len(case.cache.block_table), case.cache.pages.shape[1]
    keys = [ref.history(p, "key", case.cache, query, b, h) for b in range(sequences) for h in range(heads)]
    longest = max(
        (np.linalg.norm(x[:, : p.head_dim], axis=-1).max(initial=0) for both in keys for x in both), default=0
    )
    scale = query.softmax_scale or p.head_dim**-0.5
    return float(scale * np.linalg.norm(ref.widen(query.q), axis=-1).max(initial=0) * longest)


@pytest.mark.parametrize("device", [*DEVICES, pytest.param("cuda, three kernels", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "plan", [*PLANS.values(), MOMENTS, WIDE_MOMENTS], ids=[*PLANS, "moments", "moments of 512 channels"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attend_matches_fp64(
    shape: dict[str, Any],
    plan: ref.Plan,
    dtype: str,
    device: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda, three kernels":
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("only on compute capability 9.x is there anything else")
        monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "hopper-line")
        device = "cuda"
    if plan.head_dim > 256 and "softmax_scale" in shape:  # so that logits, which grow with the channels, stay as small
        shape = shape | dict(softmax_scale=0.1)
    case = make_case(rng, plan, dtype=dtype, **shape)
    want, want_lse = ref.attend(case.plan, case.cache, case.query)
    out, lse = tq.attend(**attend_arguments(case, device))
    assert out.dtype == DTYPES[dtype] and out.is_contiguous() and lse.dtype == torch.float32
    assert out.shape == want.shape and lse.shape == want_lse.shape and out.device.type == lse.device.type == device
    np.testing.assert_array_equal(np.isneginf(array(lse)), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    accuracy = ACCURACY.get((device, dtype), 1e-3)
    if device == "cuda":  # queries are rounded to 16 bits (turboquant_cuda.h), so errors grow with the largest logit
        accuracy = max(accuracy, 2.5e-5 * float(abs(want_lse[seen]).max(initial=0)), 1e-3 if plan.wave_pairs else 0)
    off = 2 * accuracy
    if device == "cuda" and plan.head_dim > 256:  # lse of one token is a logit: large products in it may cancel
        off = max(off, 2e-5 * largest_product(case))
    np.testing.assert_allclose(array(lse)[seen], want_lse[seen], rtol=accuracy, atol=off)
    limit = accuracy * abs(want).max() + ROUNDING[dtype] * abs(want)
    assert (abs(ref.widen(array(out)) - want) <= limit).all()
    assert not array(out)[~seen].any()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("group", [4, 12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_all_rows_of_a_prompt_see_the_sinks(
    head_dim: int, dtype: str, group: int, device: str, rng: np.random.Generator
) -> None:
    """The prompt has so many rows that a thread block prepares 16 of them, and so few exact tokens that it takes 8 at a
    time."""
    rows = 20 * torch.cuda.get_device_properties(0).multi_processor_count
    tokens = rows // group
    case = make_case(
        rng,
        ref.plan(head_dim, 4, 4),
        dtype=dtype,
        lengths=[tokens],
        query_tokens=tokens,
        sinks=4,
        kv_heads=1,
        group=group,
    )
    want, want_lse = ref.attend(case.plan, case.cache, case.query)
    out, lse = tq.attend(**attend_arguments(case, device))
    np.testing.assert_allclose(array(lse), want_lse, rtol=1e-3, atol=2e-3)
    assert (abs(ref.widen(array(out)) - want) <= 1e-3 * abs(want).max() + ROUNDING[dtype] * abs(want)).all()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("bits,batch,tokens", [(4, 16, 20_000), (4, 32, 9_000), (3, 64, 4_200), (2, 32, 16_000)])
def test_exact_tokens_of_a_large_batch(
    bits: int, batch: int, tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wave, such a batch is short of shared memory for exact tokens: fewer warps have them, or they come last.
    The kernel without a schedule is not short of it, and gives the same."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    plan = Plan(128, bits, bits, wave_pairs=64, metric=4)
    (step,) = import_module("attend").steps((batch, 8, 4, tokens, 128), plan, 4, 128, 1)
    out = torch.ops.turboquant.append_attend(plan.words, **step)
    stored = {name: x for name, x in step.items() if name not in ("k", "v", "schedule")}
    want, _ = torch.ops.turboquant.attend(plan.words, **stored)
    torch.testing.assert_close(out.float(), want.float(), rtol=1 / 128, atol=2e-3 * float(want.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [4, 8, 24])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_schedules_change_speed_alone(plan: ref.Plan, group: int, device: str, rng: np.random.Generator) -> None:
    """`attend` with a written schedule equals `attend` without one, bit for bit. With the schedule for equally long
    sequences it is close, whatever their lengths, and `append_attend` equals `append`, then `attend`. On a GPU they
    are long, so that a schedule has several blocks for each."""
    batch, heads, tokens, dim = 2, 2, 17_000 if device == "cuda" else 300, plan.head_dim
    key, value = (random_transform(rng, plan, heads) for _ in range(2))
    transforms = on(device, keywords(key, value))

    def draw(*size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(device, torch.bfloat16)

    k, v, q = draw(batch, heads, tokens, dim), draw(batch, heads, tokens, dim), draw(batch, heads * group, 1, dim)
    pages = tq.quantize(plan.words, k, v, **transforms)
    table = torch.arange(len(pages), dtype=torch.int32, device=device).view(batch, -1)
    equal = torch.empty((0, 4), dtype=torch.int32, device=device)
    line = torch.empty((ops.schedule_rows(batch, equal.device), 4), dtype=torch.int32, device=device)
    for lengths in ([tokens, tokens], [tokens - 1, 70]):
        packed = (pages, table, torch.tensor(lengths, dtype=torch.int32, device=device))
        want, want_lse = tq.attend(plan.words, q, *packed, **transforms)
        if device == "cuda":  # a schedule for other sizes is ignored
            line.fill_(-1)
            assert torch.equal(tq.attend(plan.words, q, *packed, **transforms, schedule=line)[0], want)
        tq.schedule(plan.words, line, q, *packed)
        scheduled = tq.attend(plan.words, q, *packed, **transforms, schedule=line)
        assert torch.equal(scheduled[0], want) and torch.equal(scheduled[1], want_lse)
        out, lse = tq.attend(plan.words, q, *packed, **transforms, schedule=equal)
        torch.testing.assert_close(out, want, rtol=0.008, atol=0.004 * want.abs().max().item())
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-3)
        if device == "cpu":
            assert torch.equal(out, want) and torch.equal(lse, want_lse)
        new = draw(batch, heads, 1, dim)
        both = tq.append_attend(plan.words, q, new, new, packed[2], pages.clone(), table, **transforms, schedule=equal)
        tq.append(plan.words, new, new, packed[2], pages, table, **transforms)
        assert torch.equal(both, tq.attend(plan.words, q, *packed, **transforms, schedule=equal)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_append_writes_the_bytes_of_the_reference(
    plan: ref.Plan, dtype: str, device: str, rng: np.random.Generator
) -> None:
    """Tokens come in steps of one and of many, from strided tensors and with left padding."""
    from cases import empty_cache

    last = np.array([100, 140], np.int32)
    key, value = (random_transform(rng, plan, 2) for _ in range(2))
    want = empty_cache(rng, plan, last, kv_heads=2, sinks=3, window=20, dtype=dtype, fill=0)
    got = on(device, dict(pages=want.pages, block_table=want.block_table, **want.arrays()), dtype)
    transforms = on(device, keywords(key, value))
    steps = [60, 1, 1, 70, 8]
    for i, tokens in enumerate(steps):
        lengths = np.maximum(last - sum(steps[i + 1 :]), 0).astype(np.int32)
        k, v = (rng.standard_normal((2, 2, tokens, plan.head_dim)).astype(np.float32) for _ in range(2))
        for b, first in enumerate(lengths - tokens):  # padding is not read
            k[b, :, : max(0, -first)] = v[b, :, : max(0, -first)] = np.nan
        k, v = (ref.narrow(x, dtype) for x in (k, v))
        ref.append(plan, want, k, v, lengths, key, value)
        new = [from_cache_layout(tensor(x, dtype).to(device)) for x in (k, v)]
        assert tq.append(plan.words, *new, tensor(lengths).to(device), **got, **transforms) is None
    if tolerance.has_matrix(plan):
        assert (array(got["pages"]) != want.pages).mean() < 0.005
    else:
        np.testing.assert_array_equal(array(got["pages"]), want.pages)
    for name, exact in want.arrays().items():
        np.testing.assert_array_equal(array(got[name]), exact, err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 17, 150])
@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("tries", [0, 5])
def test_codes_of_a_dense_rotation(
    tries: int, group: int, tokens: int, device: str, rng: np.random.Generator
) -> None:  # fmt: skip
    """Plans with a dense rotation promise a tolerance: each code is checked against float64."""
    for bits, value_bits in ((3, 2), (6, 5), (8, 1), (4, 6)):
        p = ref.plan(96, bits, value_bits, rotation=ref.DENSE, group=group, tries=tries)
        key, value = (random_transform(rng, p, 2) for _ in range(2))
        k, v = (rng.standard_normal((2, 2, tokens, 96)).astype(np.float32) for _ in range(2))
        pages = tq.quantize(p.words, *(tensor(x).to(device) for x in (k, v)), **on(device, keywords(key, value)))
        table = np.arange(len(pages)).reshape(2, -1)
        tolerance.check_pages(p, array(pages), table, dict(key=k, value=v), dict(key=key, value=value))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize(("bits", "value_bits", "tries"), [(4, 4, 0), (3, 2, 0), (2, 3, 0), (4, 3, 3), (3, 4, 7)])
def test_single_tokens_of_one_width_write_the_bytes_of_the_reference(
    bits: int, value_bits: int, tries: int, group: int, device: str, rng: np.random.Generator
) -> None:
    """One token at a time, through a whole page and into the next. CUDA has kernels of their own for these plans."""
    plan, tokens = ref.plan(128, bits, value_bits, group=group, tries=tries), 140
    k, v = (ref.narrow(rng.standard_normal((1, 2, tokens, 128)).astype(np.float32), "bfloat16") for _ in range(2))
    k, v = (tensor(x, "bfloat16").to(device) for x in (k, v))
    want = tq.quantize(plan.words, k.cpu(), v.cpu())
    pages = torch.zeros((2, 2, plan.record_bytes), dtype=torch.uint8, device=device)
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    for i in range(tokens):
        length = torch.tensor([i + 1], dtype=torch.int32, device=device)
        tq.append(plan.words, k[:, :, i : i + 1], v[:, :, i : i + 1], length, pages, table)
    assert torch.equal(pages.cpu(), want)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_centre_that_is_not_finite_spoils_its_own_head_alone(
    bad: float, device: str, rng: np.random.Generator
) -> None:
    """A CPU refuses such a centre. On CUDA the codes of its head are useless, but no other head changes."""
    plan = ref.plan(128, 4, 4)
    k, v = (torch.from_numpy(rng.standard_normal((1, 2, 300, 128)).astype(np.float32)) for _ in range(2))
    k, v = k.to(device, torch.bfloat16), v.to(device, torch.bfloat16)
    centre = torch.from_numpy(rng.standard_normal((2, 128)).astype(np.float32)).to(device)
    want = tq.quantize(plan.words, k, v, key_numbers=centre)
    centre[0, 77] = bad
    got = tq.quantize(plan.words, k, v, key_numbers=centre)
    assert torch.equal(got[:, 1], want[:, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_stored_and_no_heads(device: str) -> None:
    """A cache without pages holds zeros, and attention of no heads is empty."""
    pages = torch.zeros((0, 2, PLAN.record_bytes), dtype=torch.uint8, device=device)
    table, counts = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((1, 1), (1,)))
    for x in tq.dequantize(PLAN.words, pages, table, counts, 3):
        assert x.shape == (1, 2, 3, 64) and not x.any()
    none = torch.zeros((1, 0, 1, 64), device=device)
    pages = torch.zeros((1, 0, PLAN.record_bytes), dtype=torch.uint8, device=device)
    assert tq.quantize(PLAN.words, none, none).shape == (1, 0, PLAN.record_bytes)
    out, lse = tq.attend(PLAN.words, none, pages, table, counts)
    assert out.shape == (1, 0, 1, 64) and lse.shape == (1, 0, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_single_elements_do_not_matter(device: str, rng: np.random.Generator) -> None:
    pages = torch.zeros((1, 2, PLAN.record_bytes), dtype=torch.uint8, device=device)
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [1]))
    q = torch.empty_strided((1, 2, 1, 64), (129, 64, 1, 1), dtype=torch.bfloat16, device=device).normal_()
    torch.testing.assert_close(tq.attend(PLAN.words, q, pages, table, lengths)[0], torch.zeros_like(q))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_refusals_of_cuda_alone(device: str) -> None:
    pages = torch.zeros((2, 2, PLAN.record_bytes), dtype=torch.uint8, device=device)
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0], [1]], [1, 1]))
    q = torch.zeros((2, 129), dtype=torch.bfloat16, device=device)[:, :128].view(2, 2, 1, 64)
    with pytest.raises(ValueError, match="`q` must be of strides that are multiples of 4 on CUDA, got 129"):
        tq.attend(PLAN.words, q, pages, table, lengths)
    rotation = torch.eye(64, device=device)[None]
    with pytest.raises(ValueError, match="`rotation` must be absent, because .*, got a tensor"):
        tq.attend(PLAN.words, q.contiguous(), pages, table, lengths, rotation=rotation)
    for plan, most in ((Plan(512, Side(3, blocks=32), 3), "256 channels on CUDA in plans that are not plain"),
                       (Plan(520, 3, 0), "512 channels on CUDA")):  # fmt: skip
        k = torch.zeros((1, 1, 1, plan.head_dim), device=device)
        with pytest.raises(RuntimeError, match=f"`head_dim` must be at most {most}.*, got {plan.head_dim}"):
            tq.quantize(plan.words, k, k if any(plan.value_bits) else None)
    keys, k = ref.plan(8, 3, 0), torch.zeros((1, 1, 1, 8), device=device)
    pages = torch.zeros((1, 1, keys.record_bytes), dtype=torch.uint8, device=device)
    many = torch.zeros((1, 2**23), dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="`max_pages` must be fewer: positions are 32-bit, got 8388608"):
        tq.append(keys.words, k, None, lengths[:1], pages, many)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_append_flags_bad_numbers_and_keeps_the_others(device: str, rng: np.random.Generator) -> None:
    """A CPU raises an error where CUDA records the first bad number in `flag`. No other token changes."""
    k, v = (torch.from_numpy(rng.standard_normal((2, 2, 40, 64)).astype(np.float32)).to(device) for _ in range(2))
    want = tq.quantize(PLAN.words, k, v)
    table, lengths = torch.tensor([[0], [1]], dtype=torch.int32, device=device), torch.full((2,), 40, dtype=torch.int32)
    pages, flag = torch.zeros_like(want), torch.zeros(1, dtype=torch.int64, device=device)
    tq.append(PLAN.words, k, v, lengths.to(device), pages, table, flag=flag)
    assert torch.equal(pages, want) and flag.item() == 0
    v[1, 0, 33, 5] = torch.nan
    tq.append(PLAN.words, k, v, lengths.to(device), pages, table, flag=flag)
    assert flag.item() == 1 + 33 + (1 << 32) + (1 << 62)
    counts = lengths.to(device)
    for x, y in zip(
        tq.dequantize(PLAN.words, pages, table, counts, 40), tq.dequantize(PLAN.words, want, table, counts, 40)
    ):
        same = (x == y).all(-1)
        same[1, 0, 33] = True
        assert same.all() and x.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129])
def test_quantize_and_dequantize(tokens: int, device: str, rng: np.random.Generator) -> None:
    key, value = (random_transform(rng, PLAN, 3) for _ in range(2))
    transforms = on(device, keywords(key, value))
    k, v = (torch.from_numpy(rng.standard_normal((2, 3, tokens, 64)).astype(np.float32)).to(device) for _ in range(2))
    pages = tq.quantize(PLAN.words, from_cache_layout(k), v, **transforms)
    n = -(-tokens // 128)
    table = torch.arange(2 * n, dtype=torch.int32, device=device).view(2, n)
    by_append = torch.zeros((2 * n, 3, PLAN.record_bytes), dtype=torch.uint8, device=device)
    lengths = torch.full((2,), tokens, dtype=torch.int32, device=device)
    tq.append(PLAN.words, k, v, lengths, by_append, table, **transforms)
    assert torch.equal(pages, by_append) and pages.is_contiguous()

    cache = ref.Cache(array(pages), array(table))
    counts = torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=device)
    decoded = tq.dequantize(PLAN.words, pages, table, counts, tokens, **transforms)
    for side, x, transform in zip(("key", "value"), decoded, (key, value)):
        assert x.dtype == torch.float32 and x.shape == (2, 3, tokens, 64)
        for b, count in enumerate(counts.tolist()):
            for head in range(3):
                want = ref.decode_packed(PLAN, side, cache, b, head, count, transform)
                np.testing.assert_allclose(array(x[b, head, :count]), want, rtol=1e-5, atol=1e-5)
            assert not x[b, :, count:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_keys_alone(device: str, rng: np.random.Generator) -> None:
    k = torch.from_numpy(rng.standard_normal((1, 2, 40, 64)).astype(np.float32)).to(device)
    pages = tq.quantize(KEYS_ONLY.words, k, None)
    table, counts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [40]))
    back, nothing = tq.dequantize(KEYS_ONLY.words, pages, table, counts, 40)
    assert (back - k).square().mean() < 0.05 and nothing.shape == (1, 2, 0, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_rotate(plan: ref.Plan, dtype: str, device: str, rng: np.random.Generator) -> None:
    matrix = orthogonal(plan.head_dim) if plan.rotation == ref.DENSE else None
    on_device = None if matrix is None else tensor(matrix).to(device)
    x = tensor(ref.narrow(rng.standard_normal((2, 3, 5, plan.head_dim)).astype(np.float32), dtype), dtype).to(device)
    y = tq.rotate(plan.words, from_cache_layout(x), on_device)
    want = ref.narrow(ref.rotate(plan, ref.widen(array(x)).reshape(-1, plan.head_dim), matrix), dtype)
    if matrix is None:
        np.testing.assert_array_equal(array(y).reshape(want.shape), want)
    else:
        off = np.abs(ref.widen(array(y)).reshape(want.shape) - ref.widen(want))
        assert off.max() <= tolerance.TOLERANCE + 2 * ROUNDING[dtype] * np.abs(ref.widen(want)).max()
    assert y.dtype == x.dtype and y.is_contiguous() and y.shape == x.shape
    back = tq.rotate(plan.words, y, on_device, inverse=True)
    assert (back.float() - x.float()).abs().max() <= 1e-5 + 16 * ROUNDING[dtype]
    assert tq.rotate(plan.words, x[0, 0, 0], on_device).shape == (plan.head_dim,)
    assert tq.rotate(plan.words, x[:0], on_device).shape == (0, 3, 5, plan.head_dim)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge(dtype: str, device: str, rng: np.random.Generator) -> None:
    outs = ref.narrow(rng.standard_normal((3, 2, 4, 16)).astype(np.float32), dtype)
    lses = (10 * rng.standard_normal((3, 2, 4))).astype(np.float32)
    lses[:, 0, 0], lses[1, 1] = -np.inf, -np.inf
    want, want_lse = ref.merge(ref.widen(outs).reshape(3, 8, 16), lses.reshape(3, 8))
    strided = from_cache_layout(tensor(outs, dtype).to(device))
    out, lse = tq.merge(strided, tensor(lses).to(device))
    assert out.dtype == DTYPES[dtype] and out.shape == (2, 4, 16) and lse.shape == (2, 4)
    limit = 1e-6 + ROUNDING[dtype] * abs(want)
    assert (abs(ref.widen(array(out)).reshape(8, 16) - want) <= limit).all()
    np.testing.assert_allclose(array(lse).reshape(8), want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_merge_to_the_whole(device: str, rng: np.random.Generator) -> None:
    case = make_case(rng, PLAN, [150, 90])
    arguments = attend_arguments(case, device)
    whole, whole_lse = tq.attend(**arguments)
    cut = torch.tensor([64, 30], dtype=torch.int32, device=device)
    first = tq.attend(**arguments | dict(lengths=cut, causal=False))
    rest = tq.attend(**arguments | dict(starts=cut))
    out, lse = tq.merge(torch.stack([first[0], rest[0]]), torch.stack([first[1], rest[1]]))
    limit = 1e-4 if device == "cpu" else 3e-4  # 16-bit queries and weights
    torch.testing.assert_close(out, whole, rtol=0, atol=limit)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["append_attend, plain", "append_attend, full", "append_attend, several"])
def test_append_attend_is_append_then_attend(name: str, device: str, rng: np.random.Generator) -> None:
    _, (plan, q, k, v, lengths, pages, table), options = samples(rng, device)[name]
    how = {key: options.pop(key) for key in ("softmax_scale", "sliding_window", "softcap") if key in options}
    twice = [{key: x.clone() for key, x in (options | {"pages": pages}).items()} for _ in range(2)]
    for at in range(3):  # each call reads what the calls before it stored
        both, apart = (state | {"lengths": lengths + at, "block_table": table} for state in twice)
        lse = torch.empty(q.shape[:3], device=device)
        got = tq.append_attend(plan, q, k * (at + 1), v, **both, **how, lse=lse)
        seen = {x: apart[x].clone() for x in ("window_k", "window_v") if x in apart and k.shape[2] > 1}
        tq.append(plan, k * (at + 1), v, **apart)
        fresh = seen and {**seen, "fresh_k": k * (at + 1), "fresh_v": v}
        want, want_lse = tq.attend(plan, q, **{**apart, **fresh}, **how)
        assert torch.equal(got, want) and torch.equal(lse, want_lse) and want.abs().sum() > 0
        assert all(torch.equal(twice[0][key], twice[1][key]) for key in twice[0])


@pytest.mark.parametrize("device", DEVICES)
def test_append_attend_flags_bad_numbers(device: str, rng: np.random.Generator) -> None:
    _, (plan, q, k, v, *rest), options = samples(rng, device)["append_attend, full"]
    flag = torch.zeros(1, dtype=torch.int64, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"append_attend: `v\[.*` must be finite"):
            tq.append_attend(plan, q, k, v / 0, *rest, flag=flag, **options)
        assert not rest[1].any() and not options["sink_k"].any()
    else:
        tq.append_attend(plan, q, k, v / 0, *rest, flag=flag, **options)
        assert flag.item() >> 62 & 1


# ---- torch's own checks ----


SAMPLES = list(samples(np.random.default_rng(0), "cpu"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, device: str, rng: np.random.Generator) -> None:
    op, args, kwargs = samples(rng, device)[name]
    torch.library.opcheck(op, args, kwargs)


def step(k: Tensor, v: Tensor, q: Tensor, lengths: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One layer's step of a model: our operators between torch's functions."""
    tq.append(PLAN.words, k * 2, v, lengths, cache["pages"], cache["block_table"], **exact_of(cache))
    out, lse = tq.attend(PLAN.words, q + 1, cache["pages"], cache["block_table"], lengths, **exact_of(cache))
    again, _ = tq.merge(torch.stack([out, out]), torch.stack([lse, lse]))
    return tq.rotate(PLAN.words, again).sum(-1), lse


def exact_of(cache: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in cache.items() if "_k" in name or "_v" in name}


def new_cache(device: str, window: int) -> dict[str, Tensor]:
    cache = {
        "pages": torch.zeros((2, 2, PLAN.record_bytes), dtype=torch.uint8, device=device),
        "block_table": torch.tensor([[1], [0]], dtype=torch.int32, device=device),
    }
    if window:
        cache |= {name: torch.zeros(2, 2, window, 64, device=device) for name in ("window_k", "window_v")}
    return cache


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, window: int, device: str, rng: np.random.Generator) -> None:
    """A step compiled to one graph writes the bytes of eager mode, to the same tensors."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager_cache, cache = new_cache(device, window), new_cache(device, window)
    places = {name: x.data_ptr() for name, x in cache.items()}
    for length in (1, 2, 9, 20):
        k, v = (torch.from_numpy(rng.standard_normal((2, 2, 1, 64)).astype(np.float32)).to(device) for _ in range(2))
        q = torch.from_numpy(rng.standard_normal((2, 4, 1, 64)).astype(np.float32)).to(device)
        lengths = torch.full((2,), length, dtype=torch.int32, device=device)
        with torch.inference_mode() if length % 2 else torch.no_grad():
            want = step(k, v, q, lengths, eager_cache)
            got = compiled(k, v, q, lengths, cache)
        torch.testing.assert_close(got, want)
    for name, x in cache.items():
        torch.testing.assert_close(x, eager_cache[name], rtol=0, atol=0, msg=name)
        assert x.data_ptr() == places[name]
    assert cache["pages"].any()


def test_compile_with_changing_sizes(rng: np.random.Generator) -> None:
    """With dynamic sizes, another batch size, number of tokens or max_tokens compiles no new graph."""
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def there_and_back(k: Tensor, max_tokens: int) -> Tensor:
        pages = tq.quantize(PLAN.words, k, k)
        batch, n = k.shape[0], pages.shape[0] // k.shape[0]
        table = torch.arange(batch * n, dtype=torch.int32).view(batch, n)
        counts = torch.full((batch,), max_tokens, dtype=torch.int32)
        return tq.dequantize(PLAN.words, pages, table, counts, max_tokens)[0]

    compiled = torch.compile(there_and_back, fullgraph=True, backend=backend, dynamic=True)
    for batch, tokens in ((3, 300), (4, 200), (5, 400)):
        k = torch.from_numpy(rng.standard_normal((batch, 2, tokens, 64)).astype(np.float32))
        assert torch.equal(compiled(k, tokens), there_and_back(k, tokens))
    assert graphs == 1


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode(device: str, rng: np.random.Generator) -> None:
    case = make_case(rng, PLAN, [70], sinks=2, window=8)
    want = tq.attend(**attend_arguments(case, device))
    with torch.inference_mode():
        got = tq.attend(**attend_arguments(case, device))
        assert got[0].is_inference()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_documented() -> None:
    """Every operator says what it does and explains each of its arguments."""
    found = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "turboquant::" in name]
    assert len(found) == 13 and "attend.out" in found
    for overloaded in found:
        name, _, overload = overloaded.partition(".")
        text = getattr(tq, name).__doc__
        signatures, head = text.split("\n\n")[:2]
        assert f"\n{overloaded}(" in f"\n{signatures}" and len(head) > 40
        arguments = [a.name for a in getattr(getattr(tq, name), overload or "default")._schema.arguments]
        unexplained = [a for a in arguments if not re.search(rf"^(\w+, )*{a}(, \w+)*: \S", text, re.MULTILINE)]
        assert not unexplained, (name, unexplained)
