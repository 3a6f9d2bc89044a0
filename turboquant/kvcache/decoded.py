"""Attention of many queries to packed tokens that all of them see: pages are decoded, a bounded number of tokens at a
time, and PyTorch's own attention reads them. From some hundred query rows a KV head on that is faster than `attend`,
which unpacks the pages once for every 32 rows, and computes a wave for each row.

Tensors are [batch, heads, tokens, head_dim]; query head h reads KV head h // (query_heads / kv_heads).
"""

from __future__ import annotations

import torch

from ..plan import GROUP, PAGE_TOKENS
from .chunk import merged
from .tensors import LayerTensors

__all__ = ["attend_to_decoded", "decodes"]

_dequantize = torch.ops.turboquant.dequantize.default
_merge = torch.ops.turboquant.merge.default
_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default

SCRATCH_BYTES = 128 << 20  # keys and values that are decoded at once
LEAST_TOKENS = {"cuda": 2048}  # for fewer packed tokens, launching the kernels takes longer than `attend`
LEAST_ROWS = 256, 768  # query rows a KV head, with a wave and without (H200, 32k tokens: benchmarks/chunks.py)
_ROWS = 128  # of a thread block of cuDNN's attention

_Pair = tuple[torch.Tensor, torch.Tensor]  # (out, lse)


def decodes(stored: LayerTensors, query: torch.Tensor, packed: int, softcap: float) -> bool:
    """Whether many queries attend to decoded tokens. packed: the most of a sequence."""
    plan, kind = stored.plan, stored.device.type
    is_fast = plan.is_plain and plan.group == GROUP and plan.head_dim % 16 == 0  # csrc/cuda/dequantize_16bit.cu
    if not is_fast or softcap or (kind != "cpu" and query.dtype == torch.float32):
        return False
    rows = query.shape[2] * (query.shape[1] // stored.kv_heads)
    return rows >= LEAST_ROWS[not plan.wave_pairs] and packed >= LEAST_TOKENS.get(kind, 1 << 31)


def attend_to_decoded(stored: LayerTensors, query: torch.Tensor, packed: list[int], scale: float) -> _Pair:
    """(out, lse) of queries that see the first packed[b] packed tokens of sequence b, all of them. packed: at least 1
    each. lse: float32 [batch, query_heads, tokens], natural logarithms."""
    if len(set(packed)) == 1:
        return _attend(stored, query, slice(None), packed[0], scale)
    each = [_attend(stored, query[b : b + 1], slice(b, b + 1), count, scale) for b, count in enumerate(packed)]
    outs, lses = zip(*each)
    return torch.cat(outs), torch.cat(lses)


def _attend(stored: LayerTensors, query: torch.Tensor, sequences: slice, packed: int, scale: float) -> _Pair:
    """The same for sequences with equally many packed tokens."""
    assert stored.table is not None
    batch, heads, tokens, channels = query.shape
    rows = query.reshape(batch, stored.kv_heads, -1, channels)
    token_bytes = 2 * query.element_size() * batch * stored.kv_heads * channels
    step = max(1, SCRATCH_BYTES // token_bytes // PAGE_TOKENS) * PAGE_TOKENS
    result: _Pair | None = None
    for first in range(0, packed, step):
        count = min(step, packed - first)
        with stored.table.pool.lock:  # forks may add pages
            pages, table = stored.pages, stored.block_table[sequences, first // PAGE_TOKENS :].contiguous()
        lengths = torch.full((batch,), count, dtype=torch.int32, device=stored.device)
        k, v = _dequantize(stored.plan.words, pages, table, lengths, count, sinks=stored.spec.sinks + first,
                           dtype=query.dtype, **stored.transforms)  # fmt: skip
        part = _attention(rows, k, v, scale)
        result = part if result is None else _joined(result, part)
    assert result is not None
    out, lse = result
    return out.reshape(batch, heads, tokens, channels), lse.reshape(batch, heads, tokens)


def _joined(a: _Pair, b: _Pair) -> _Pair:
    return merged(a, b), torch.logaddexp(a[1], b[1])


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Pair:
    """(out, lse) by PyTorch's best kernel. All have as many heads, and every query sees every key."""
    if query.device.type == "cpu":
        out, lse = _flash_on_cpu(query, key, value, 0.0, False, scale=scale)
        return out, lse
    if not _has_cudnn(query):
        out, lse, *_ = _flash(query, key, value, 0.0, False, scale=scale)
        return out, lse
    batch, heads, rows, channels = query.shape
    blocks = batch * heads * -(-rows // _ROWS)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    parts = min(max(1, processors // blocks), key.shape[2] // 512) if batch == 1 else 1
    if parts < 2:
        return _by_cudnn(query, key, value, scale)
    # Few rows leave most of the GPU idle: parts of the keys are sequences of a batch.
    each = key.shape[2] // parts
    k, v = (x[:, :, : each * parts].view(heads, parts, each, channels).transpose(0, 1) for x in (key, value))
    outs, lses = _by_cudnn(query.expand(parts, -1, -1, -1), k, v, scale)
    out, lse = (x.unsqueeze(0) for x in _merge(outs, lses))
    if each * parts == key.shape[2]:
        return out, lse
    return _joined((out, lse), _by_cudnn(query, key[:, :, each * parts :], value[:, :, each * parts :], scale))


def _has_cudnn(query: torch.Tensor) -> bool:
    """Whether cuDNN's attention is there and faster than flash attention: from Hopper on, up to 128 channels."""
    return torch.cuda.get_device_capability(query.device)[0] >= 9 and query.shape[-1] <= 128


def _by_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Pair:
    out, lse, *_ = _cudnn(query, key, value, None, True, 0.0, False, False, scale=scale)
    return out, lse.squeeze(-1)
