"""Plans that are not plain (blocks, tables, sketches) through torch.ops.turboquant, on a CPU and on CUDA: the bytes of
tests/reference_modes.py, and attention in float64 over them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import reference as ref
import reference_modes as modes
import tolerance
from cases import FAR, awkward_rows, orthogonal
from mode_cases import HEADS, PLANS, keywords, transforms
from ops_cases import DEVICES, DTYPES, ROUNDING, SHAPES, array, from_cache_layout, needs_cuda, on, tensor, tq

import turboquant
from turboquant.plan import Plan
from turboquant.transforms import transforms as joined

torch = pytest.importorskip("torch", reason="torch is not installed")

DIM, MOST = 80, 170  # channels; tokens of the longest sequence
BLOCKED = {name: spec for name, spec in turboquant.presets().items() if spec.blocked}
CUDA = pytest.param("cuda", marks=needs_cuda)


@cache
def stored(name: str, dtype: str) -> tuple[Any, ...]:
    """(plan, {side: tokens [3, heads, MOST, DIM]}, {side: transforms}) of a plan."""
    rng = np.random.default_rng([7, *name.encode()])
    p = PLANS[name](DIM)
    sides = ("key", "value")
    given = {side: ref.narrow(rng.standard_normal((3, HEADS, MOST, DIM)).astype(np.float32), dtype) for side in sides}
    by_side = {side: transforms(rng, p, side) for side in sides}
    return p, given, by_side


def right(x: np.ndarray, lengths: np.ndarray, heads: int, dtype: str) -> np.ndarray:
    """The first lengths[b] tokens of each sequence, left-padded to max(lengths) with NaN."""
    shape = (len(lengths), heads, int(lengths.max()), x.shape[-1])
    out = ref.narrow(np.full(shape, np.nan, np.float32), dtype)
    for b, n in enumerate(lengths):
        out[b, :, shape[2] - n :] = x[b, :heads, :n]
    return out


def exact_arrays(batch: int, heads: int, dim: int, sinks: int, window: int, dtype: str) -> dict[str, np.ndarray]:
    return {
        f"{name}_{x}": ref.narrow(np.full((batch, heads, n, dim), np.nan, np.float32), dtype)
        for name, n in (("sink", sinks), ("window", window))
        for x in ("k", "v")
        if n
    }


def answer(
    name: str, dtype: str, q: np.ndarray, shape: dict[str, Any], decoded: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 over exact tokens in sinks and window, and `decoded` [batch, heads, packed tokens]
    elsewhere."""
    p, given, _ = stored(name, dtype)
    lengths, starts = shape["lengths"], shape.get("starts") or [0] * len(shape["lengths"])
    sinks, window, causal = shape.get("sinks", 0), shape.get("window", 0), shape.get("causal", True)
    sliding, tokens, group = shape.get("sliding_window", 0), q.shape[2], q.shape[1] // shape.get("kv_heads", HEADS)
    scale = shape.get("softmax_scale") or p.head_dim**-0.5
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, head, i in np.ndindex(q.shape[:3]):
        position = lengths[b] - tokens + i
        end = position + 1 if causal else lengths[b]
        first = max(starts[b], position - sliding + 1 if sliding else 0)
        if first >= end:
            continue
        j = np.arange(first, end)
        is_exact = ((j < sinks) | (j >= end - window))[:, None]
        k, v = (
            np.where(
                is_exact,
                ref.widen(given[side][b, head // group, j]),
                decoded[side][b, head // group, np.clip(j - sinks, 0, decoded[side].shape[2] - 1)],
            )
            for side in ("key", "value")
        )
        logits = (ref.widen(q[b, head, i]).astype(np.float64) @ k.T * scale)[None]
        out[b, head, i], lse[b, head, i] = (x[0] for x in ref.softmax(logits, v, shape.get("softcap", 0.0)))
    return out, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", (8, 64, 80, 128))
@pytest.mark.parametrize("name", PLANS)
def test_bytes_and_numbers(name: str, head_dim: int, device: str, rng: np.random.Generator) -> None:
    """Rows of all sizes, appended in pieces of one and of many tokens, give the reference's bytes and decode to its
    numbers."""
    p, tokens = PLANS[name](head_dim), 150
    k, v = (np.stack([np.stack([awkward_rows(rng, tokens, head_dim) for _ in range(HEADS)])]) for _ in range(2))
    by_side = {side: transforms(rng, p, side) for side in ("key", "value")}
    given = on(device, keywords(**by_side))
    pages = torch.zeros((2, HEADS, p.record_bytes), dtype=torch.uint8, device=device)
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    for first, last in ((0, 1), (1, 37), (37, 64), (64, tokens)):
        new = [from_cache_layout(tensor(x[:, :, first:last]).to(device)) for x in (k, v)]
        tq.append(p.words, *new, torch.tensor([last], dtype=torch.int32, device=device), pages, table, **given)
    if tolerance.has_matrix(p):
        tolerance.check_pages(p, array(pages), array(table), dict(key=k, value=v), by_side)
    else:
        want = modes.pages_of(p, k, v, by_side["key"], by_side["value"])
        np.testing.assert_array_equal(array(pages), want[::-1])
    counts = torch.tensor([tokens], dtype=torch.int32, device=device)
    for side, got in zip(("key", "value"), tq.dequantize(p.words, pages, table, counts, tokens, **given)):
        decoded = modes.decode_pages(p, side, array(pages), array(table), tokens, by_side[side])
        assert np.abs(array(got) - decoded).max() <= 2e-5 * np.abs(decoded).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ("prod", "prod of 1 bit", "split", "affine, plain", "q8_0 keys", "tables, sign"))
def test_attend_matches_fp64(
    name: str, shape: dict[str, Any], dtype: str, device: str, rng: np.random.Generator
) -> None:
    """Attention over shuffled pages that the device filled. Bytes that may not be read are poisoned."""
    p, given, by_side = stored(name, dtype)
    lengths, heads = np.array(shape["lengths"], np.int32), shape.get("kv_heads", HEADS)
    sinks, window, queries = (shape.get(x, n) for x, n in (("sinks", 0), ("window", 0), ("query_tokens", 1)))
    q = ref.narrow(
        (2 * rng.standard_normal((len(lengths), heads * shape.get("group", 2), queries, DIM))).astype(np.float32), dtype
    )
    pages_each = -(-int(lengths.max()) // p.page_tokens)
    order = rng.permutation(len(lengths) * pages_each + 1)[: len(lengths) * pages_each]
    table = np.concatenate([order.reshape(len(lengths), -1), np.full((len(lengths), 1), FAR)], 1).astype(np.int32)
    pages = np.full((len(order) + 1, heads, p.record_bytes), 0xFF, np.uint8)
    arrays = exact_arrays(len(lengths), heads, DIM, sinks, window, dtype)
    cached = on(device, dict(pages=pages, block_table=table, **arrays), dtype)
    same = on(device, keywords(**{side: transform[:heads] for side, transform in by_side.items()}))

    k, v = (tensor(right(given[side], lengths, heads, dtype), dtype).to(device) for side in ("key", "value"))
    cut = k.shape[2] - queries if shape.get("fresh") else k.shape[2]
    before = np.maximum(lengths - (k.shape[2] - cut), 0)
    tq.append(p.words, k[:, :, :cut], v[:, :, :cut], tensor(before).to(device), **cached, **same)
    asked = {name: shape[name] for name in ("sliding_window", "softcap", "causal", "softmax_scale") if name in shape}
    asked |= same
    ring = {name: x.clone() for name, x in cached.items() if name.startswith("window")}
    if shape.get("fresh"):
        tq.append(p.words, k[:, :, cut:], v[:, :, cut:], tensor(lengths).to(device), **cached, **same)
        asked |= dict(fresh_k=k[:, :, cut:], fresh_v=v[:, :, cut:])
    if "starts" in shape:
        asked["starts"] = torch.tensor(shape["starts"], dtype=torch.int32, device=device)
    out, lse = tq.attend(
        p.words, tensor(q, dtype).to(device), lengths=tensor(lengths).to(device), **(cached | ring), **asked
    )
    most = int(max(0, lengths.max() - sinks - window))
    decoded = {
        side: modes.decode_pages(p, side, array(cached["pages"]), table, max(1, most), transform[:heads])
        for side, transform in by_side.items()
    }
    want, want_lse = answer(name, dtype, q, shape, decoded)
    np.testing.assert_array_equal(np.isneginf(array(lse)), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(array(lse)[seen], want_lse[seen], rtol=0, atol=1e-4)
    assert out.dtype == DTYPES[dtype] and out.shape == want.shape
    limit = 2e-5 * abs(want).max() + ROUNDING[dtype] * abs(want)
    assert (abs(ref.widen(array(out)) - want) <= limit).all()
    assert not array(out)[~seen].any()


def given_of(plan: Plan, heads: int) -> dict[str, np.ndarray]:
    """Matrices, centres and tables for a plan that is not plain."""
    rng, words, dim, given = np.random.default_rng(5), plan.words, plan.head_dim, {}
    for name, first, bits in (("key", 7, plan.key_bits[0]), ("value", 11, plan.value_bits[0])):
        rotation, levels, sketch, rows = words[first : first + 4]
        matrix = [orthogonal(dim, h) for h in range(heads)] if rotation == ref.DENSE else [np.zeros((0, dim))] * heads
        signs = modes.gaussian(words[6], rows, dim) if sketch == modes.GAUSSIAN else np.zeros((0, dim))
        matrix = np.stack([np.concatenate([one, signs]) for one in matrix]).astype(np.float32)
        if matrix.size:
            given[f"{name}_rotation"] = matrix
        if levels == modes.TABLE:
            table = np.sort(2 * rng.standard_normal((heads, 2**bits)), axis=-1)
            sign = np.full((heads, int(sketch == modes.SIGN)), 0.25)
            given[f"{name}_steps"] = np.concatenate([table, sign], 1).astype(np.float32)
        given[f"{name}_centre"] = rng.standard_normal((heads, dim)).astype(np.float32)
    return dict(joined(**given))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKED)
def test_presets_are_the_same_on_cuda(name: str, dtype: str, device: str, rng: np.random.Generator) -> None:
    """After an append, pages, sinks and window are the CPU's, and attention is close. Plans with a matrix have a
    tolerance."""
    plan = BLOCKED[name].plan(128)
    words, batch, sinks, window = plan.words, 2, 3, 20
    given, steps = given_of(plan, HEADS), (70, 1, 1, 33, 200, 1)
    record = torch.ops.turboquant.quantize(
        words, *(torch.zeros(1, HEADS, 1, 128) for _ in "kv"), **on("cpu", given)
    ).shape[2]
    state = dict(
        pages=np.zeros((2 * 3, HEADS, record), np.uint8),
        block_table=rng.permutation(6).reshape(2, 3).astype(np.int32),
        **exact_arrays(batch, HEADS, 128, sinks, window, dtype),
    )
    caches = {where: on(where, state, dtype) for where in ("cpu", device)}
    for i, tokens in enumerate(steps):
        lengths = torch.tensor([sum(steps[: i + 1]), sum(steps[: i + 1]) - 29], dtype=torch.int32)
        k, v = (
            tensor(ref.narrow(np.stack([np.stack([awkward_rows(rng, max(tokens, 10), 128)[:tokens]
                                                  for _ in range(HEADS)]) for _ in range(batch)]), dtype), dtype)
            for _ in "kv"
        )  # fmt: skip
        for where, cached in caches.items():
            tq.append(words, k.to(where), v.to(where), lengths.to(where), **cached, **on(where, given))
        if "rotation" in given:  # plans with a matrix: tests/tolerance.py
            pages, same = caches[device]["pages"], caches["cpu"]["pages"].to(device)
            assert float((pages != same).float().mean()) < 0.005
            pages.copy_(same)
        for part, want in caches["cpu"].items():
            assert torch.equal(caches[device][part].cpu().view(torch.uint8), want.view(torch.uint8)), (part, i)
        q = tensor(ref.narrow(rng.standard_normal((batch, 6, 1, 128)).astype(np.float32) / 4096, dtype), dtype)
        (out, lse), (want, want_lse) = (
            tq.attend(words, q.to(where), lengths=lengths.to(where), **cached, **on(where, given))
            for where, cached in reversed(caches.items())
        )
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-4, atol=1e-4)
        limit = (1e-4 + 2 * ROUNDING[dtype]) * float(want.float().abs().max())  # both are rounded
        assert float((out.cpu().float() - want.float()).abs().max()) <= limit


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", ("prod", "affine, dense, qjl", "tables, sign"))
def test_bad_numbers_are_flagged_and_spoil_no_other_token(name: str, device: str) -> None:
    p, given, by_side = stored(name, "float32")
    k, v = (tensor(given[side][:2, :, :40]).to(device) for side in ("key", "value"))
    same = on(device, keywords(**by_side))
    want = tq.quantize(p.words, k, v, **same)
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0], [1]], [40, 40]))
    pages, flag = torch.zeros_like(want), torch.zeros(1, dtype=torch.int64, device=device)
    v[1, 0, 33, 5] = torch.inf
    tq.append(p.words, k, v, lengths, pages, table, flag=flag, **same)
    assert flag.item() == 1 + 33 + (1 << 32) + (1 << 62)
    for x, y in zip(*(tq.dequantize(p.words, one, table, lengths, 40, **same) for one in (pages, want))):
        equal = (x == y).all(-1)
        equal[1, 0, 33] = True
        assert equal.all() and x.isfinite().all()


@pytest.mark.parametrize("device", [CUDA])
def test_a_graph_sees_the_lengths_of_each_replay(device: str) -> None:
    p, given, by_side = stored("affine, dense, qjl", "float32")
    k, v = (tensor(given[side][:2]).to(device) for side in ("key", "value"))
    same = on(device, keywords(**by_side))
    pages = tq.quantize(p.words, k, v, **same)
    table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    lengths, q = torch.tensor([1, 1], dtype=torch.int32, device=device), k[:, :, -1:].contiguous()
    tq.attend(p.words, q, pages, table, lengths, **same)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tq.attend(p.words, q, pages, table, lengths, **same)
    for n in ([0, 33], [128, 129], [150, 170]):
        lengths.copy_(torch.tensor(n, dtype=torch.int32))
        want, want_lse = tq.attend(p.words, q, pages, table, lengths, **same)
        graph.replay()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
