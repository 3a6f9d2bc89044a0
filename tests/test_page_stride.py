"""Pages that lie apart, as in an engine's memory: [pages, layers, kv_heads, record_bytes], one layer a view of it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from turboquant import Plan, ops  # noqa: E402
from turboquant.plan import Side  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
PLANS = {
    "plain": Plan(64, 4, 3),
    "two widths": Plan(64, (4, 2), (3, 2)),
    "blocks": Plan(64, Side(4, "none", "affine", 32), Side(4, "none", "affine", 32)),
}


def in_memory(dense: torch.Tensor, layers: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of several layers with 0xff around this one's pages, and a view of these."""
    memory = torch.full((dense.shape[0], layers, *dense.shape[1:]), 0xFF, dtype=torch.uint8, device=dense.device)
    memory[:, at] = dense
    return memory, memory[:, at]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_pages_apart_are_read_and_written(plan: Plan, device: str, rng: np.random.Generator) -> None:
    k, v = (torch.from_numpy(rng.standard_normal((2, 2, 300, 64)).astype(np.float32)).to(device) for _ in range(2))
    q = torch.from_numpy(rng.standard_normal((2, 4, 1, 64)).astype(np.float32)).to(device)
    dense = ops.pack(k[:, :, :200], v[:, :, :200], plan, max_tokens=300, sinks=4, window=16)
    dense.block_table.copy_(dense.block_table.flip(0).flip(1))
    dense.pages.zero_()
    dense.lengths.zero_()
    dense.tokens = 0
    apart = ops.PackedKV(**{**vars(dense), "lengths": dense.lengths.clone()})
    for name in ("sink_k", "sink_v", "window_k", "window_v"):
        setattr(apart, name, getattr(dense, name).clone())
    memory, apart.pages = in_memory(dense.pages, 3, 1)
    for packed in (dense, apart):
        ops.append(packed, k[:, :, :170], v[:, :, :170])
        ops.append(packed, k[:, :, 170:299], v[:, :, 170:299])
    last = [ops.append_attend(q, k[:, :, 299:], v[:, :, 299:], packed) for packed in (dense, apart)]
    assert torch.equal(*last) and torch.equal(apart.pages, dense.pages)
    assert (memory[:, 0] == 0xFF).all() and (memory[:, 2] == 0xFF).all()
    assert torch.equal(ops.attend(q, apart), ops.attend(q, dense))
    for got, want in zip(ops.dequantize(apart), ops.dequantize(dense), strict=True):
        assert torch.equal(got, want)


def test_strides_that_are_refused() -> None:
    plan, k = PLANS["plain"], torch.zeros(1, 2, 5, 64)
    packed = ops.pack(k, k, plan, max_tokens=400)
    size = 2 * plan.record_bytes
    memory = torch.zeros(8 * size + 64, dtype=torch.uint8)
    shape = packed.pages.shape
    wants = "append: `pages` must be of a stride between pages that is a multiple of 64 and no less than a page, got "
    for stride in (0, size // 2, size + 32):
        packed.pages = memory.as_strided(shape, (stride, plan.record_bytes, 1))
        with pytest.raises(ValueError, match=f"{wants}{stride}$"):
            ops.append(packed, k, k)
    packed.pages = memory.as_strided(shape, (2 * size, 2 * plan.record_bytes, 1))
    with pytest.raises(ValueError, match="`pages` must be dense in all but its first dimension, got strides"):
        ops.append(packed, k, k)
