"""Keys, values and queries as a model would hand them to a TurboQuantCache, and comparisons of caches."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import torch
from profiles import layer as random_moments
from specs import WAVE, bare
from transformers import LlamaConfig

from turboquant import Profile, TurboQuantCache, measured
from turboquant.hf.attention import attention
from turboquant.kvcache.pages import RELEASED
from turboquant.models.attention import request_mask
from turboquant.models.identity import describe
from turboquant.named_specs import resolve

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
CONFIG = LlamaConfig(
    num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HEADS * DIM
)
PACKED = bare(3, 3, prefill="packed")
RANDOM = tuple(random_moments(np.random.default_rng(i), DIM, KV_HEADS, size=4.0) for i in range(LAYERS))
MOMENTS = measured.Moments(RANDOM, describe(CONFIG), 2048, "random numbers")


def new(spec):
    """A cache of CONFIG, with moments if the spec has a wave or a metric."""
    return TurboQuantCache(CONFIG, spec, profile=Profile(MOMENTS) if resolve(spec).measured else None)


class Stream:
    """Keys, values and queries of some sequences, [batch, heads, tokens, DIM] per layer, to be fed in pieces."""

    def __init__(self, batch=1, tokens=300, seed=0, dtype=torch.float32, dim=DIM, kv_heads=KV_HEADS):
        make = torch.Generator().manual_seed(seed)
        mean = torch.randn(LAYERS, 1, kv_heads, 1, dim, generator=make)
        self.k = (torch.randn(LAYERS, batch, kv_heads, tokens, dim, generator=make) + mean).to(dtype)
        self.v = torch.randn(LAYERS, batch, kv_heads, tokens, dim, generator=make).to(dtype)
        self.q = torch.randn(LAYERS, batch, 2 * kv_heads, tokens, dim, generator=make).to(dtype)

    def piece(self, start, stop):
        return [
            (self.q[i, :, :, start:stop], self.k[i, :, :, start:stop], self.v[i, :, :, start:stop])
            for i in range(LAYERS)
        ]


def module():
    return SimpleNamespace(num_key_value_groups=2, is_causal=True)


def forward(cache, piece, mask=None, local_size=None, **options):
    """One forward pass: out [layers, batch, tokens, heads, dim]."""
    tokens = piece[0][0].shape[2]
    kv_length, offset = cache.get_mask_sizes(tokens, 0)
    where = dict(
        q_length=tokens, q_offset=kv_length - tokens, cache_position=torch.arange(kv_length - tokens, kv_length)
    )  # arguments of transformers 5.x and 4.57
    request = request_mask(batch_size=piece[0][0].shape[0], kv_length=kv_length, kv_offset=offset, attention_mask=mask,
                           local_size=local_size, allow_is_causal_skip=True, **where)  # fmt: skip
    out = []
    for i, (q, k, v) in enumerate(piece):
        fresh, value = cache.update(k, v, i)
        out.append(attention(module(), q, fresh, value, request, scaling=DIM**-0.5, **options)[0])
    return torch.stack(out)


def exact(stream, start, stop, first=0):
    """Full-precision attention of queries start..stop-1 over positions first and on, float64, as `forward` lays it
    out."""
    q, k, v = (
        x.double()
        for x in (stream.q[:, :, :, start:stop], stream.k[:, :, :, first:stop], stream.v[:, :, :, first:stop])
    )
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    seen = torch.arange(first, stop)[None, :] <= torch.arange(start, stop)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(2, 3)


def packed_bytes(cache):
    """Returns, for each layer and sequence, its records in order."""
    return [
        [held.pages[held.block_table[b].long()[: len(row)]] for b, row in enumerate(held.table.rows)]
        for held in (layer.storage for layer in cache.layers)
    ]


def close(a, b, tolerance=2e-5):
    assert (a.double() - b.double()).abs().max() <= tolerance * b.double().abs().max()


SHAPES = {
    "all packed": dict(),
    "sinks and window": dict(sinks=4, window=32),
    "wave and metric": dict(**WAVE, sinks=2, window=20),
}


def rows(stream, order):
    other = copy.copy(stream)
    other.q, other.k, other.v = (x[:, order] for x in (stream.q, stream.k, stream.v))
    return other


def check_references(*tables):
    """A page's reference count is how often rows of its pool's tables name it. It is free if none does."""
    for pool in {id(t.pool): t.pool for t in tables}.values():
        named = [page for t in tables if t.pool is pool for row in t.rows for page in row if page != RELEASED]
        assert [pool.references(page) for page in range(len(pool.storage))] == [
            named.count(page) for page in range(len(pool.storage))
        ]
        assert sorted(pool._free) == sorted(set(range(len(pool.storage))) - set(named))
        assert not pool.storage[sorted(set(pool._free) - pool._used_before)].any()


def check(*caches):
    for i in range(len(caches[0].layers)):
        tables = (cache.layers[i].storage.table for cache in caches)
        check_references(*(table for table in tables if table is not None))


def same(a, b):
    for one, other in zip(packed_bytes(a), packed_bytes(b)):
        assert all(map(torch.equal, one, other))
