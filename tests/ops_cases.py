"""Devices, dtypes, plans and shapes of the operators' tests, and arrays as tensors and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from cases import Case, make_case
from torch import Tensor

from turboquant import operators  # noqa: F401  registers torch.ops.turboquant

tq = torch.ops.turboquant
NO_CUDA = "torch finds no CUDA device" if not torch.cuda.is_available() else None
needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(bool(NO_CUDA), reason=str(NO_CUDA))]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}  # of the output, relative
# Error of attention, relative to the largest output. 16-bit dtypes are allowed 1e-3: their queries keep 15 bits or
# more.
ACCURACY = {("cpu", "float32"): 2e-5, ("cuda", "float32"): 4e-4}
PLAN = ref.plan(64, 4, 3)
MIXED = ref.plan(80, (5, 1, 4), (2, 0, 3), codebook=ref.SPHERE, scale=ref.LEAST_SQUARES, seed=7, page_tokens=32)
DENSE = ref.plan(40, 3, 2, rotation=ref.DENSE)
FINE = ref.plan(80, (8, 5, 4, 0, 1), (3, 8, 0, 2, 4), group=16)
KEYS_ONLY = ref.plan(64, 3, 0)
MOMENTS = ref.plan(128, 3, 4, wave_pairs=64, metric=5)
WIDE_MOMENTS = ref.plan(512, 4, 4, wave_pairs=256, metric=5)
WIDE = ref.plan(320, (4, 3, 5, 0, 2) * 2, (3, 4, 8, 1, 6) * 2, page_tokens=64)


def tensor(x: np.ndarray, dtype: str = "") -> Tensor:
    """An array of tests/cases.py as a tensor; bfloat16 comes as uint16."""
    if dtype == "bfloat16" and x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).clone()
    return torch.from_numpy(x).clone()  # torch's own memory: NumPy's is not aligned to 64 bytes


def array(t: Tensor) -> np.ndarray:
    """A tensor as an array for the reference; bfloat16 becomes uint16."""
    t = t.detach().cpu()
    return t.view(torch.int16).numpy().view(np.uint16) if t.dtype == torch.bfloat16 else t.numpy()


def on(device: str, arguments: dict[str, Any], dtype: str = "") -> dict[str, Any]:
    """Returns keyword arguments of the reference or `_core` as those of an operator, on `device`."""
    return {
        name: tensor(value, dtype).to(device) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def attend_arguments(case: Case, device: str = "cpu") -> dict[str, Any]:
    return on(device, {name: x for name, x in case.arguments.items() if name != "dtype"}, case.dtype)


def from_cache_layout(x: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim] as a view of [batch, tokens, heads, head_dim] between poisoned channels."""
    batch, heads, tokens, dim = x.shape
    wide = torch.full((batch, tokens, heads, 2 * dim), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[..., 8 : dim + 8].transpose(1, 2)
    view.copy_(x)
    return view


SHAPES: dict[str, dict[str, Any]] = {
    "one token": dict(lengths=[1]),
    "empty beside a full page": dict(lengths=[0, 128]),
    "tile -1, tile, tile +1": dict(lengths=[31, 32, 33]),
    "page -1, page, page +1": dict(lengths=[127, 128, 129]),
    "starts, one past the end": dict(lengths=[64, 64], starts=[37, 64]),
    "sinks and window": dict(lengths=[2, 50, 170], sinks=4, window=32),
    "several queries": dict(lengths=[5, 140], query_tokens=5),
    "several queries, fresh": dict(lengths=[70, 140], query_tokens=5, sinks=4, window=16, fresh=True),
    "sliding window and softcap": dict(lengths=[40, 150], sliding_window=33, softcap=15.0, sinks=2, window=8),
    "not causal": dict(lengths=[9, 100], query_tokens=3, causal=False),
    "own scale, group of 8": dict(lengths=[90], softmax_scale=0.3, kv_heads=1, group=8),
}
Sample = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def samples(rng: np.random.Generator, device: str) -> dict[str, Sample]:
    """Name -> operator, arguments, keyword arguments; every operator, with and without its optional tensors."""
    found: dict[str, Sample] = {}
    for name, shape in {
        "plain": dict(lengths=[40], plain=True),
        "full": dict(lengths=[70, 140], query_tokens=3, sinks=4, window=16, fresh=True, starts=[0, 5]),
    }.items():
        case = make_case(rng, MIXED, **shape)
        rest = attend_arguments(case, device)
        first = tuple(rest.pop(key) for key in ("plan", "q", "pages", "block_table", "lengths"))
        found[f"attend, {name}"] = (tq.attend.default, first, rest)
    half = make_case(rng, PLAN, [33], dtype="bfloat16")
    found["attend, bfloat16"] = (tq.attend.default, (), attend_arguments(half, device))

    k = torch.from_numpy(rng.standard_normal((2, 2, 30, 64)).astype(np.float32)).to(device)
    pages = torch.zeros((4, 2, PLAN.record_bytes), dtype=torch.uint8, device=device)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    counts = torch.tensor([30, 17], dtype=torch.int32, device=device)
    exact = {f"{name}_{side}": torch.zeros(2, 2, 4, 64, device=device) for name in ("sink", "window") for side in "kv"}
    empty = {name: x[:, :, :0] for name, x in exact.items()}
    centre = {"key_numbers": torch.ones(2, 64, device=device)}
    narrow = torch.zeros((1, 2, KEYS_ONLY.record_bytes), dtype=torch.uint8, device=device)
    found |= {
        "append, plain": (tq.append.default, (PLAN.words, k, k, counts, pages, table), {}),
        "append, full": (tq.append.default, (PLAN.words, k, k, counts, pages, table), exact | centre),
        "append, empty": (tq.append.default, (PLAN.words, k, k, counts, pages, table), empty),
        "append, no tokens": (tq.append.default, (PLAN.words, k[:, :, :0], k[:, :, :0], counts, pages, table), exact),
        "append, keys": (
            tq.append.default,
            (KEYS_ONLY.words, k[:1], None, counts[:1], narrow, table.new_zeros(1, 1)),
            {name: x[:1] for name, x in exact.items() if name.endswith("k")},
        ),
        "append_attend, plain": (
            tq.append_attend.default,
            (PLAN.words, k.repeat(1, 2, 1, 1), k, k, counts, pages, table),
            dict(sliding_window=20, softcap=3.0),
        ),
        "append_attend, full": (
            tq.append_attend.default,
            (PLAN.words, k[:, :, :1].repeat(1, 3, 1, 1), k[:, :, :1], k[:, :, 1:2], counts, pages, table),
            exact | centre | dict(softmax_scale=0.3),
        ),
        "append_attend, several": (  # more tokens than the window holds, in strided tensors
            tq.append_attend.default,
            (PLAN.words, k[:, :, :7].repeat(1, 3, 1, 1), k[:, :, :7], k[:, :, 7:14], counts, pages, table),
            exact | centre,
        ),
        "rotate": (tq.rotate.default, (PLAN.words, k), {}),
        "rotate, strided half": (tq.rotate.default, (PLAN.words, k.half().transpose(1, 2)), dict(inverse=True)),
        "quantize": (tq.quantize.default, (PLAN.words, k, k.transpose(0, 1)), centre),
        "quantize, keys": (tq.quantize.default, (KEYS_ONLY.words, k.bfloat16(), None), {}),
        "dequantize": (tq.dequantize.default, (PLAN.words, pages, table, counts, 30), centre),
        "dequantize, half": (tq.dequantize.default, (PLAN.words, pages, table, counts, 30), dict(dtype=torch.half)),
        "dequantize, keys": (
            tq.dequantize.default,
            (KEYS_ONLY.words, narrow, table.new_zeros(1, 1), counts[1:], 20),
            {},
        ),
        "recode": (tq.recode.default, (PLAN.words, pages, ref.plan(64, 3, 2).words), {}),
        "merge": (tq.merge.default, (k, k[..., 0]), {}),
        "merge, half": (tq.merge.default, (k.half().transpose(0, 2), k[..., 0].transpose(0, 2)), {}),
    }
    return found


GRAD = (
    "without requires_grad (inference only: call under torch.no_grad() or detach it), got a tensor that requires grad"
)
