"""`turboquant.Index` with torch tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import turboquant
from turboquant.index import inputs


def test_tensors_on_the_cpu():
    x = torch.randn(300, 24, generator=torch.Generator().manual_seed(0))
    index, other = turboquant.Index(24, 4), turboquant.Index(24, 4)
    index.train(x.clone().requires_grad_())
    other.train(x.numpy())
    index.add(x)
    other.add(x.numpy())
    for a, b in zip(index.search(x[:5], 7), other.search(x[:5].numpy(), 7), strict=True):
        assert (a == b).all()
    assert index.search(x[3], 1)[1].shape == (1,)
    assert index.search(x[3], 300, filter=torch.tensor([5, 9]))[1][:3].tolist().count(-1) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_tensors_are_converted_block_by_block(dtype, monkeypatch):
    x = torch.randn(150, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    most, convert = [], inputs.as_float32
    monkeypatch.setattr(inputs, "as_float32", lambda part: most.append(len(part)) or convert(part))
    monkeypatch.setattr("turboquant.index.storage.ROWS", 64)
    index, other = turboquant.Index(24, 4), turboquant.Index(24, 4)
    index.add(x)
    assert most == [64, 64, 22]
    other.add(x.float().numpy())
    for a, b in zip(index.search(x[:5], 7), other.search(x[:5].float().numpy(), 7), strict=True):
        assert (a == b).all()


def test_float32_tensors_are_viewed():
    x = torch.randn(30, 24)
    assert inputs.as_float32(inputs.vectors("add", "x", x, 24)).ctypes.data == x.data_ptr()


class OnGpu:
    """The attributes of an array on a GPU that an index looks at."""

    device = torch.device("cuda:0")
    shape, ndim = (3, 8), 2


def test_refusals():
    index = turboquant.Index(8)
    with pytest.raises(TypeError, match=r"`x` must be on the CPU, got one on cuda:0; write x\.cpu\(\)"):
        index.add(OnGpu())
    with pytest.raises(TypeError, match=r"write queries\.cpu\(\)"):
        index.search(OnGpu(), 1)
    with pytest.raises(TypeError, match=r"on meta"):
        index.add(torch.empty(3, 8, device="meta"))
    with pytest.raises(TypeError, match="got Tensor of complex64"):
        index.add(torch.zeros(3, 8, dtype=torch.complex64))
    assert len(index) == 0 and np.isneginf(index.search(torch.ones(8), 1)[0]).all()
