"""Block tables that name pages outside the cache. On a CPU they are an error. On CUDA, where contents are not checked,
such a page is not read: its tokens have no weight in attention and decode to 0. tests/cuda has more shapes."""

from __future__ import annotations

from typing import Any

import mode_cases
import numpy as np
import pytest
import reference as ref
from cases import keywords, orthogonal, random_moments
from ops_cases import DENSE, FINE, MIXED, MOMENTS, PLAN, needs_cuda, on

torch = pytest.importorskip("torch", reason="torch is not installed")

tq = torch.ops.turboquant
CUDA = pytest.param("cuda", marks=needs_cuda)
PLANS: dict[str, Any] = {
    "4 and 3 bits": PLAN,
    "mixed": MIXED,
    "dense": DENSE,
    "groups of 16": FINE,
    **{f"{bits} bits": ref.plan(128, bits, bits) for bits in (1, 2, 3, 4, 5, 8)},
    "3 bits, 256 channels": ref.plan(256, 3, 3),
    "pages of 96": ref.plan(64, 3, 3, page_tokens=96),
    "blocks of 32": mode_cases.PLANS["blocks of 32"](64),
    "affine": mode_cases.PLANS["affine, plain"](64),
}
ALL = PLANS | {"moments": MOMENTS}
HEADS, PAGES = 2, 5  # of KV; full pages of the first sequence
BAD = (-1, 2 * PAGES + 2, 2**31 - 1, -(2**31))  # no page has such a number


def packed(plan: Any, device: str, rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    """(arguments of operators, block table on the CPU). Sequences of PAGES and PAGES - 1 full pages, and 20 tokens."""
    rotation = np.stack([orthogonal(plan.head_dim)] * HEADS) if plan is DENSE else None
    turns, moments = random_moments(rng, plan, HEADS) if plan is MOMENTS else (None, None)
    given = on(device, keywords(ref.Transform(rotation, turns=turns, moments=moments), ref.Transform(rotation)))
    lengths = torch.tensor([PAGES, PAGES - 1]) * plan.page_tokens + 20
    k, v = (torch.from_numpy(rng.standard_normal((2, HEADS, int(lengths[0]), plan.head_dim))).float() for _ in range(2))
    table = torch.arange(2 * (PAGES + 1), dtype=torch.int32).view(2, -1)
    pages = torch.zeros((table.numel(), HEADS, plan.record_bytes), dtype=torch.uint8, device=device)
    cache = dict(pages=pages, lengths=lengths.int().to(device), **given)
    tq.append(plan.words, k.to(device), v.to(device), block_table=table.to(device), **cache)
    return cache, table


def queries(plan: Any, device: str, tokens: int, rows: int, rng: np.random.Generator) -> Any:
    shape = (2, HEADS * rows, tokens, plan.head_dim)
    return 3 * torch.from_numpy(rng.standard_normal(shape)).to(device, torch.bfloat16)


def close(got: Any, want: Any) -> None:
    for x, y in zip(got, want):
        assert x.isfinite().all()
        torch.testing.assert_close(x.float(), y.float(), rtol=1 / 64, atol=4e-3 * float(y.abs().max()))


@pytest.fixture(params=["", "hopper-line", "portable"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How pages are loaded: TURBOQUANT_CUDA_PATH of turboquant_cuda.h."""
    if request.param == "hopper-line" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("of compute capability 9.x alone")
    if request.param:
        monkeypatch.setenv("TURBOQUANT_CUDA_PATH", request.param)
    return str(request.param)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("group,tokens", [(1, 1), (4, 1), (12, 1), (4, 33)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_attend_as_if_the_tokens_were_not_there(
    plan: Any, group: int, tokens: int, softcap: float, path: str, device: str, rng: np.random.Generator
) -> None:
    """Without a wave, only the order of positions matters. So an absent page changes nothing, wherever it is."""
    cache, table = packed(plan, device, rng)
    q = queries(plan, device, tokens, group, rng)
    want = tq.attend(plan.words, q, block_table=table.to(device), softcap=softcap, **cache)
    longer = cache | dict(lengths=cache["lengths"] + plan.page_tokens)
    for number in BAD:
        for at in (0, 2, 4)[: 3 if tokens == 1 else 2]:  # not 4 for 33 queries, which begin in that page of sequence 1
            absent = torch.full((2, 1), number, dtype=torch.int32)
            with_one = torch.cat([table[:, :at], absent, table[:, at:]], 1).to(device)
            close(tq.attend(plan.words, q, block_table=with_one, softcap=softcap, **longer), want)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("group,tokens", [(1, 1), (4, 1), (12, 1), (4, 33)])
@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_attend_as_if_it_began_behind_them(
    plan: Any, group: int, tokens: int, path: str, device: str, rng: np.random.Generator
) -> None:
    cache, table = packed(plan, device, rng)
    q = queries(plan, device, tokens, group, rng)
    starts = torch.tensor([2, 1], dtype=torch.int32, device=device) * plan.page_tokens
    want = tq.attend(plan.words, q, block_table=table.to(device), starts=starts, **cache)
    table[0, :2], table[1, 0] = 2 * PAGES + 2, -1
    close(tq.attend(plan.words, q, block_table=table.to(device), **cache), want)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_nothing_is_left(plan: Any, path: str, device: str, rng: np.random.Generator) -> None:
    """Without any page the output is 0 and the log-sum-exp -inf. With a window, the output is that of the window."""
    cache, table = packed(plan, device, rng)
    q = queries(plan, device, 1, 4, rng)
    none = torch.full_like(table, -1).to(device)
    window = torch.randn((2, 2, HEADS, 32, plan.head_dim), device=device).to(q.dtype)
    for pages in (cache["pages"], cache["pages"][:0]):
        given = cache | dict(pages=pages)
        out, lse = tq.attend(plan.words, q, block_table=none, **given)
        assert not out.any() and torch.isneginf(lse).all()
        out, _ = tq.attend(plan.words, q, block_table=none, window_k=window[0], window_v=window[1], **given)
        keys, values = (x.repeat_interleave(4, 1) for x in window)
        close([out], [torch.nn.functional.scaled_dot_product_attention(q, keys, values)])


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
def test_dequantize_to_0(plan: Any, dtype: Any, device: str, rng: np.random.Generator) -> None:
    cache, table = packed(plan, device, rng)
    size, asked = plan.page_tokens, dict(max_tokens=int(cache["lengths"].max()), dtype=dtype)
    want = tq.dequantize(plan.words, block_table=table.to(device), **asked, **cache)
    for x in want:
        assert x[0, :, size : 2 * size].any() and x[1, :, :size].any()
        x[0, :, size : 2 * size], x[1, :, :size] = 0, 0
    for number in BAD:
        table[0, 1], table[1, 0] = number, number
        for x, y in zip(tq.dequantize(plan.words, block_table=table.to(device), **asked, **cache), want):
            assert x.dtype == dtype and torch.equal(x, y)
    none = cache | dict(pages=cache["pages"][:0])
    assert not any(x.any() for x in tq.dequantize(plan.words, block_table=table.to(device), **asked, **none))


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("plan", [PLAN, MOMENTS], ids=["plain", "moments"])
def test_an_error_on_a_cpu(plan: Any, number: int, rng: np.random.Generator) -> None:
    cache, table = packed(plan, "cpu", rng)
    table[1, 2] = number
    wants = rf"`block_table\[{PAGES + 3}\]` must be in 0..n_pages - 1, got {number}"
    with pytest.raises(ValueError, match=wants):
        tq.attend(plan.words, queries(plan, "cpu", 1, 4, rng), block_table=table, **cache)
    with pytest.raises(ValueError, match=wants):
        tq.dequantize(plan.words, block_table=table, max_tokens=int(cache["lengths"].max()), **cache)
