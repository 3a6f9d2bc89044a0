"""Attention of many queries to packed tokens that all of them see: pages are decoded, a bounded number of tokens at a
time, and PyTorch's own attention reads them. From some hundred query rows of a KV head on, that is faster than
`attend`, which unpacks the pages once for every 32 rows, and computes a wave for each row.

Tensors are [batch, heads, tokens, head_dim]; query head h reads KV head h // (query_heads / kv_heads).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..plan import GROUP, PAGE_TOKENS, Rotation, Side
from .chunk import merged
from .tensors import LayerTensors
from .variance import CHANNELS, more_channels, wide_keys, wide_queries, widened

__all__ = ["attend_to_decoded", "decodes", "reads_packed_chunks"]

_dequantize = torch.ops.turboquant.dequantize.default
_merge = torch.ops.turboquant.merge.default
_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default

MOST_CHANNELS = 256  # limit of csrc/cuda/dequantize_16bit.cu and of flash attention
SCRATCH_BYTES = 128 << 20  # keys and values that are decoded at once
LEAST_TOKENS = {"cuda": 2048}  # for fewer packed tokens, launching the kernels takes longer than `attend`
LEAST_ROWS = 512, 1024  # query rows of a KV head: with a wave, without (H100, 32k tokens: benchmarks/chunks.py)
# The same with a variance term, whose additional channels PyTorch's attention reads too (H200, 32k tokens). Without a
# wave, `attend` is faster up to at least 8,192 rows.
LEAST_ROWS_OF_TERM = 1536, 1 << 31
# The same where `attend` decodes a page once for 128 rows (csrc/cuda/attend/chunk; H200). There `attend` is always
# faster with a variance term, and for several sequences without a wave.
LEAST_ROWS_OF_CHUNK, NO_ROWS = (1024, 4096), 1 << 31
MOST_WAVE_BYTES = 128 << 20  # of the wave's rows that it makes, at most
# cuDNN takes 40 ms to plan each new shape. So it gets blocks of exactly this many keys, and queries padded to a
# multiple of rows. Flash attention, which plans nothing, takes the remaining keys.
BLOCK = 8192
_ROWS = 128  # query rows of a thread block of cuDNN's attention

_Pair = tuple[torch.Tensor, torch.Tensor]  # (out, lse)


def decodes(stored: LayerTensors, query: torch.Tensor, packed: int, softcap: float) -> bool:
    """Whether many queries attend to decoded tokens. packed: packed tokens of the longest sequence."""
    plan, kind = stored.plan, stored.device.type
    channels = plan.head_dim + more_channels(stored)
    is_fast = plan.is_plain and plan.group == GROUP and plan.head_dim % 16 == 0 and channels <= MOST_CHANNELS
    if not is_fast or softcap or (kind != "cpu" and query.dtype == torch.float32):
        return False
    rows = query.shape[2] * (query.shape[1] // stored.kv_heads)
    if reads_packed_chunks(stored, query):
        one = len(query) == 1 or plan.wave_pairs
        least = LEAST_ROWS_OF_CHUNK if one and not plan.variance_term else (NO_ROWS, NO_ROWS)
    else:
        least = LEAST_ROWS_OF_TERM if plan.variance_term else LEAST_ROWS
    return rows >= least[not plan.wave_pairs] and packed >= LEAST_TOKENS.get(kind, 1 << 31)


def reads_packed_chunks(stored: LayerTensors, query: torch.Tensor) -> bool:
    """Whether `attend`, without exact tokens, has a kernel for many queries that decodes a page once for all of them.
    These are the conditions of csrc/cuda/attend/chunk/cut.cu."""
    plan = stored.plan
    if query.device.type != "cuda" or query.dtype == torch.float32 or not plan.is_plain or plan.group != GROUP:
        return False
    assert isinstance(plan.key, Side)
    if plan.key.rotation is Rotation.DENSE or not GROUP < plan.head_dim <= 4 * GROUP:
        return False
    groups, pages = -(-plan.head_dim // GROUP), stored.block_table.numel()
    wave_bytes = pages * stored.kv_heads * (plan.wave_pairs // 8 + 1) * groups * 1024 if plan.wave_pairs else 0
    few_bits = all(1 <= bits <= 5 for bits in (*plan.key_bits, *plan.value_bits))
    fits = few_bits and wave_bytes <= MOST_WAVE_BYTES
    return fits and torch.cuda.get_device_capability(query.device)[0] == 9


def attend_to_decoded(stored: LayerTensors, query: torch.Tensor, packed: list[int], scale: float) -> _Pair:
    """Returns (out, lse) of queries that all see the first packed[b] packed tokens of sequence b. packed: at least 1
    for each sequence. lse: float32 [batch, query_heads, tokens], natural logarithms."""
    if len(set(packed)) == 1:
        return _attend(stored, query, slice(None), packed[0], scale)
    each = [_attend(stored, query[b : b + 1], slice(b, b + 1), count, scale) for b, count in enumerate(packed)]
    outs, lses = zip(*each)
    return torch.cat(outs), torch.cat(lses)


def _attend(stored: LayerTensors, query: torch.Tensor, sequences: slice, packed: int, scale: float) -> _Pair:
    """Does the same for sequences with equally many packed tokens."""
    assert stored.table is not None
    batch, heads, tokens, channels = query.shape
    query = wide_queries(query, stored, scale)
    rows = query.reshape(batch, stored.kv_heads, -1, query.shape[-1])
    token_bytes = 2 * query.element_size() * batch * stored.kv_heads * query.shape[-1]
    step = max(1, SCRATCH_BYTES // token_bytes // PAGE_TOKENS) * PAGE_TOKENS
    result: _Pair | None = None
    for first in range(0, packed, step):
        count = min(step, packed - first)
        with stored.table.pool.lock:  # forks may add pages
            pages, table = stored.pages, stored.block_table[sequences, first // PAGE_TOKENS :].contiguous()
        lengths = torch.full((batch,), count, dtype=torch.int32, device=stored.device)
        k, v = _dequantize(stored.plan.words, pages, table, lengths, count, sinks=stored.spec.sinks + first,
                           dtype=query.dtype, **stored.turned(sequences))  # fmt: skip
        k, v = wide_keys(k, stored, pages, table, lengths), widened(v, query.shape[-1])
        for part in _attention(rows, k, v, scale):
            result = part if result is None else _joined(result, part)
    assert result is not None
    out, lse = result
    out = out[..., :channels]
    return out.reshape(batch, heads, tokens, channels), lse.reshape(batch, heads, tokens)


def _joined(a: _Pair, b: _Pair) -> _Pair:
    return merged(a, b), torch.logaddexp(a[1], b[1])


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Iterator[_Pair]:
    """Yields (out, lse) for blocks of keys, by PyTorch's fastest kernels. Queries, keys and values have equally many
    heads, and every query sees every key."""
    rows, tokens = query.shape[2], key.shape[2]
    blocks = tokens // BLOCK if _has_cudnn(query) else 0
    if blocks:
        multiple = 4 * _ROWS if rows > 4 * _ROWS else 2 * _ROWS
        padded = torch.nn.functional.pad(query, (0, 0, 0, -rows % multiple))
        for first in range(0, blocks * BLOCK, BLOCK):
            k, v = (x[:, :, first : first + BLOCK] for x in (key, value))
            out, lse = _by_cudnn(padded, k, v, scale)
            yield out[:, :, :rows], lse[:, :, :rows]
    if rest := tokens - blocks * BLOCK:
        flash = _flash_on_cpu if query.device.type == "cpu" else _flash
        out, lse, *_ = flash(query, key[:, :, -rest:], value[:, :, -rest:], 0.0, False, scale=scale)
        yield out, lse


def _has_cudnn(query: torch.Tensor) -> bool:
    """Whether cuDNN's attention is enabled, and faster than flash attention: from Hopper on, with at most 128 channels
    and those of a variance term."""
    if query.device.type != "cuda" or not torch._C._get_cudnn_sdp_enabled():
        return False
    return torch.cuda.get_device_capability(query.device)[0] >= 9 and query.shape[-1] <= 128 + CHANNELS


def _by_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Pair:
    """Attends to a block of keys. With few rows of one sequence, parts of the block become a batch, to fill the GPU."""
    batch, heads, rows, channels = query.shape
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    parts = 1
    while batch == 1 and 2 * parts * heads * (rows // _ROWS) <= processors and parts < 16:
        parts *= 2
    if parts > 1:
        query = query.expand(parts, -1, -1, -1)
        key, value = (x.view(heads, parts, -1, channels).transpose(0, 1) for x in (key, value))
    out, lse, *_ = _cudnn(query, key, value, None, True, 0.0, False, False, scale=scale)
    lse = lse.squeeze(-1)
    if parts == 1:
        return out, lse
    out, lse = _merge(out, lse)
    return out.unsqueeze(0), lse.unsqueeze(0)
