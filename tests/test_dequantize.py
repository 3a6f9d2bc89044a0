"""`dequantize` to float16 and bfloat16. On a CPU these are the float32 numbers, rounded. On CUDA, where tensor cores
undo steps, rotation and metric (csrc/cuda/dequantize_16bit.cu), they are within the stated error."""

from __future__ import annotations

from typing import Any

import mode_cases
import numpy as np
import pytest
import reference as ref
from cases import keywords, orthogonal, random_moments
from ops_cases import DENSE, FINE, MIXED, MOMENTS, PLAN, WIDE, WIDE_MOMENTS, needs_cuda, on

from turboquant.plan import Plan

torch = pytest.importorskip("torch", reason="torch is not installed")

tq = torch.ops.turboquant
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
DTYPES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative rounding error
HEADS, LENGTHS = 3, (333, 70)
PLANS: dict[str, Any] = {
    "4 and 3 bits": PLAN,
    "mixed": MIXED,
    "dense": DENSE,
    "dense, 128 channels": ref.plan(128, 4, 2, rotation=ref.DENSE),
    "groups of 16": FINE,
    "moments": MOMENTS,
    "moments, 80 channels": ref.plan(80, 4, 4, wave_pairs=40, metric=3),
    "moments, 256 channels": ref.plan(256, 2, 3, wave_pairs=128, metric=5),
    "metric alone": ref.plan(96, 4, 4, metric=2),
    "keys alone": ref.plan(64, 4, 0),
    "320 channels": WIDE,
    "512 channels": WIDE_MOMENTS,
    "dense, 320 channels": ref.plan(320, 4, 2, rotation=ref.DENSE),
    "affine": mode_cases.PLANS["affine, plain"](64),
    **{f"{bits} bits, {dim} channels": ref.plan(dim, bits, bits) for bits, dim in
       ((1, 32), (2, 48), (3, 112), (4, 128), (5, 160), (6, 64), (8, 256))},
}  # fmt: skip


def packed(plan: Any, device: str, rng: np.random.Generator, shared_channel: bool = False) -> dict[str, Any]:
    """Arguments of `dequantize` for pages in random order, with every kind of transform that the plan has."""
    is_plain = isinstance(plan, ref.Plan)
    is_dense = is_plain and plan.rotation == ref.DENSE
    has_values = any(Plan.from_words(plan.words).value_bits)

    def transform(keys: bool) -> Any:
        rotation = np.stack([orthogonal(plan.head_dim, seed) for seed in range(HEADS)])
        turns, moments = random_moments(rng, plan, HEADS, 8.0) if keys and is_plain else (None, None)
        if shared_channel and turns is not None:
            turns[1, 0], turns[2, 1] = turns[0, 0], turns[2, 0]
        centre = rng.standard_normal((HEADS, plan.head_dim)).astype(np.float32)
        steps = np.exp(rng.standard_normal((HEADS, plan.groups))).astype(np.float32) if is_plain else None
        return ref.Transform(rotation if is_dense else None, centre, steps, turns, moments)

    given = on(device, keywords(transform(True), transform(False) if has_values else None))
    pages_each = -(-max(LENGTHS) // plan.page_tokens)
    table = torch.from_numpy(rng.permutation(2 * pages_each).astype(np.int32)).view(2, -1).to(device)
    x = torch.from_numpy(rng.standard_normal((2, HEADS, max(LENGTHS), plan.head_dim)).astype(np.float32)).to(device)
    pages = torch.zeros((table.numel(), HEADS, plan.record_bytes), dtype=torch.uint8, device=device)
    whole = torch.full((2,), max(LENGTHS), dtype=torch.int32, device=device)
    tq.append(plan.words, x, x.flip(2) if has_values else None, whole, pages, table, **given)
    return dict(pages=pages, block_table=table, lengths=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
                max_tokens=max(LENGTHS) + 2, sinks=4, **given)  # fmt: skip


def check(got: Any, want: Any, dtype: str) -> None:
    for x, y in zip(got, want):
        assert x.dtype == getattr(torch, dtype) and x.shape == y.shape and x.isfinite().all()
        for b, length in enumerate(LENGTHS):
            assert not x[b, :, length:].any()
        error, size = (x.float() - y).norm(dim=-1), y.norm(dim=-1)
        if x.device.type == "cpu":
            assert torch.equal(x, y.to(x.dtype))
        assert (error <= (2e-3 + DTYPES[dtype]) * size).all(), float((error / size).nan_to_num().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_to_16_bits(plan: Any, dtype: str, device: str, rng: np.random.Generator) -> None:
    given = packed(plan, device, rng)
    want = tq.dequantize(plan.words, **given)
    check(tq.dequantize(plan.words, dtype=getattr(torch, dtype), **given), want, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_that_share_channels(device: str, rng: np.random.Generator) -> None:
    given = packed(MOMENTS, device, rng, shared_channel=True)
    check(tq.dequantize(MOMENTS.words, dtype=torch.float16, **given), tq.dequantize(MOMENTS.words, **given), "float16")


def test_other_dtypes_are_refused(rng: np.random.Generator) -> None:
    given = packed(PLAN, "cpu", rng)
    with pytest.raises(TypeError, match="dequantize: `dtype` must be float32, float16 or bfloat16, got float64"):
        tq.dequantize(PLAN.words, dtype=torch.float64, **given)
