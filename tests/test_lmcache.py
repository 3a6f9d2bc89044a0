"""The serialiser of docs/codec.md in LMCache: its interfaces, its buffers and its threads (make test-lmcache)."""

from __future__ import annotations

import re
import time

import pytest
from conftest import ROOT

pytest.importorskip("lmcache", reason="lmcache is not installed: make test-lmcache")
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde.base import SerdeConfig
from lmcache.v1.distributed.serde.factory import create_serde_processor, get_registered_serde_types
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from models import tiny

import turboquant

LAYERS, HEADS, DIM = 3, 2, 32
KEY = ObjectKey(chunk_hash=b"0", model_name="tiny", kv_rank=0)


@pytest.fixture(scope="module")
def codec():
    spec = turboquant.CacheSpec(4, 4, centre="none", metric="none", sinks=4, window=0)
    return turboquant.Codec(
        tiny(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, head_dim=DIM), spec
    )


@pytest.fixture(scope="module")
def processor(codec):
    (block,) = [code for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/codec.md").read_text(), re.M | re.S)
                if "lmcache" in code]  # fmt: skip
    exec(block, names := {})
    names["serde"](codec, LAYERS, HEADS)
    assert "packed" in get_registered_serde_types()
    made = create_serde_processor(SerdeConfig("packed"))
    yield made
    made.close()


def done(query, task: int) -> bool:
    for _ in range(1000):
        if (found := query(task)) is not None:
            return found
        time.sleep(0.01)
    raise TimeoutError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 100, 256])
def test_chunks_come_back(processor, codec, tokens, dtype):
    """Chunks come back as the codec decodes them, through a buffer of the size that LMCache asks for."""
    shape = torch.Size([2, LAYERS, tokens, HEADS * DIM])
    room = processor.estimate_serialized_size(MemoryLayoutDesc([shape], [dtype]))
    allocator = HostMemoryAllocator(2**22)
    chunk, again = (allocator.allocate(shape, dtype) for _ in range(2))
    packed, read = (allocator.allocate(torch.Size([room]), torch.uint8, MemoryFormat.BINARY_BUFFER) for _ in range(2))
    chunk.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(tokens)))
    read.tensor.fill_(255)
    assert done(processor.query_serialize_result, processor.submit_serialize([chunk], [packed], [KEY]))
    used = packed.get_size()
    assert codec.nbytes(tokens, dtype) < used <= room
    read.tensor[:used].copy_(packed.tensor.flatten()[:used])  # what a disk gives back, in a buffer of the whole size
    assert done(processor.query_deserialize_result, processor.submit_deserialize([read], [again], [KEY]))
    keys, values = chunk.tensor.unflatten(3, (HEADS, DIM)).transpose(2, 3)
    want = codec.decode(codec.encode(keys, values), dtype=dtype)
    for side, layers in zip(again.tensor, want, strict=True):
        for got, one in zip(side, layers, strict=True):
            assert torch.equal(got, one.transpose(0, 1).flatten(1))
    error = (again.tensor.float() - chunk.tensor.float()).norm() / chunk.tensor.float().norm()
    assert error < 0.12
    for one in (chunk, again, packed, read):
        one.ref_count_down()


def test_damage_is_a_failed_task(processor):
    shape = torch.Size([2, LAYERS, 100, HEADS * DIM])
    allocator = HostMemoryAllocator(2**22)
    into, damaged = allocator.allocate(shape, torch.float32), allocator.allocate(torch.Size([4096]), torch.uint8)
    damaged.tensor.fill_(7)
    assert not done(processor.query_deserialize_result, processor.submit_deserialize([damaged], [into], [KEY]))
    for one in (into, damaged):
        one.ref_count_down()
