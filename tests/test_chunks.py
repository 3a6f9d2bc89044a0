"""A chunk on a packed history: PyTorch attends within the chunk, and `attend` attends to what is stored.

Results are compared with float64 attention over exact sinks and window, decoded packed tokens, and the exact chunk.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import models  # noqa: F401  skips without torch and transformers
import numpy as np
import pytest
import reference as ref
import reference_variance as variance
import torch
from cases import random_moments
from ops_cases import DEVICES
from specs import bare
from transformers import LlamaConfig

from turboquant import Plan, TurboQuantCache, ops
from turboquant.hf.attention import attention
from turboquant.kvcache import attend, chunk, decoded, sliding
from turboquant.kvcache import variance as term
from turboquant.models.attention import Call, request_mask

DTYPES = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
WINDOWED = dict(sinks=4, window=32)
CHUNK = 70


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "IN_PARTS_FROM", {"cpu": 40, "cuda": 40})


def random(batch, heads, tokens, dim, dtype=torch.float32, device="cpu", seed=0):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, dim, generator=make).to(device, dtype)


def widened(keys):
    """Exact keys, with the channel of a variance term."""
    return torch.nn.functional.pad(keys, (0, 1))


class Layer:
    """One layer of a cache, fed by hand, and the oracle over what it stores."""

    def __init__(self, spec, heads=4, kv_heads=2, dim=32, **how):
        config = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * dim
        )
        self.cache, self.dim, self.group, self.how = TurboQuantCache(config, spec), dim, heads // kv_heads, how
        self.stored = self.cache.layers[0].storage

    def forward(self, q, k, v, mask=None, lse=False):
        tokens = k.shape[2]
        before = self.stored.tokens
        request = request_mask(batch_size=len(k), kv_length=before + tokens, kv_offset=0, attention_mask=mask,
                               local_size=self.how.get("local_size"), allow_is_causal_skip=True, q_length=tokens,
                               q_offset=before, cache_position=torch.arange(before, before + tokens))  # fmt: skip
        module = SimpleNamespace(num_key_value_groups=self.group, is_causal=True)
        options = {"softcap": self.how["softcap"]} if "softcap" in self.how else {}
        fresh, value = self.cache.update(k, v, 0)
        with patch("turboquant.hf.layer.own_attention", lambda call: (call.query.transpose(1, 2), None)):
            if lse:
                layer = self.cache.layers[0]
                out, found, _ = layer.attend(
                    Call(module, q, k, value, request, self.dim**-0.5, 0.0, options), return_lse=True
                )
                return out.transpose(1, 2), found
            return attention(module, q, fresh, value, request, scaling=self.dim**-0.5, **options)[0].transpose(1, 2)

    def history(self, b):
        """Keys and values of sequence b as `attend` reads them, float64 [kv_heads, tokens, dim] each; keys with the
        channel of a variance term."""
        stored = self.stored
        length = stored.tokens - stored.padding[b]
        keys, values = (x[b, :, :length].double() for x in ops.dequantize(stored))
        keys, first, count = widened(keys), stored.sinks, stored.packed(stored.tokens, stored.padding)[b]
        if stored.plan.variance_term and count:
            pages = ref.Cache(stored.pages.cpu().numpy(), stored.block_table.cpu().numpy())
            for head in range(len(keys)):
                scales = torch.from_numpy(ref.key_scales(self.plan, pages, b, head, count)).double()
                keys[head, first : first + count, -1] = variance.constant(self.plan) * scales.square()
        return [keys, values]

    @property
    def plan(self):
        """The layer's plan, as one of the reference."""
        p = self.stored.spec.plan(self.dim)
        term = dict(tries=p.tries, variance_term=p.variance_term)
        return ref.plan(p.head_dim, p.key_bits, p.value_bits, group=p.group, **term)

    def attended(self, q, keys, values):
        """(out, lse) in float64 of the last queries of a sequence, [heads, queries, dim], over all its tokens."""
        keys, values = (x.repeat_interleave(self.group, 0) for x in (keys, values))
        rows = [variance.of_queries(self.plan, x.double().cpu().numpy(), self.dim**-0.5, ref.Transform()) for x in q]
        logits = torch.from_numpy(np.stack(rows)).to(keys.device) @ keys.transpose(1, 2)
        if cap := self.how.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        queries, seen = logits.shape[1:]
        age = torch.arange(queries)[:, None] + seen - queries - torch.arange(seen)[None, :]
        near = (age >= 0) & (age < (self.how.get("local_size") or seen + 1))
        logits = logits.masked_fill(~near.to(logits.device), -torch.inf)
        return logits.softmax(-1) @ values, logits.logsumexp(-1)

    def oracle(self, q, k, v, padding=None):
        """(out, lse) expected of the chunk q, k, v, which is not stored yet. Rows of padding are 0 and -inf."""
        outs, lses = [], []
        for b in range(len(q)):
            past = self.history(b) if self.stored.tokens else [x[b, :, :0].double() for x in (k, v)]
            pad = min(max(0, padding[b] - self.stored.tokens), q.shape[2]) if padding else 0
            past[0] = past[0] if past[0].shape[-1] > self.dim else widened(past[0])
            own = widened(k[b, :, pad:].double()), v[b, :, pad:].double()
            whole = (torch.cat([held, new], 1) for held, new in zip(past, own))
            out, lse = self.attended(q[b, :, pad:], *whole)
            outs.append(torch.nn.functional.pad(out, (0, 0, pad, 0)))
            lses.append(torch.nn.functional.pad(lse, (pad, 0), value=-torch.inf))
        return torch.stack(outs), torch.stack(lses)


def close(got, want, dtype):
    limit = max(DTYPES[dtype], 1.5e-4 if got.is_cuda else 0)  # queries and weights have 16 bits in CUDA kernels
    assert got.shape == want.shape and got.dtype == dtype
    assert (got.double() - want).abs().max() <= limit * want.abs().max()


def run(layer, pieces, dtype=torch.float32, device="cpu", heads=4, kv_heads=2, dim=32, batch=1, padding=None):
    """Feeds pieces of random tokens. Compares those of 40 tokens or more, except the first, with the oracle."""
    total = sum(pieces)
    q, k, v = (random(batch, h, total, dim, dtype, device, seed) for seed, h in enumerate((heads, kv_heads, kv_heads)))
    mask = None
    if padding:
        mask = (torch.arange(total)[None, :] >= torch.tensor(padding)[:, None]).to(device)
    start, checked = 0, 0
    for piece in pieces:
        stop = start + piece
        q_, k_, v_ = (x[:, :, start:stop] for x in (q, k, v))
        want = layer.oracle(q_, k_, v_, padding)[0] if start and piece >= 40 else None
        got = layer.forward(q_, k_, v_, None if mask is None else mask[:, :stop])
        if want is not None:
            real = torch.ones(batch, 1, piece, 1, dtype=torch.bool, device=device)
            if padding:
                real = mask[:, None, start:stop, None]
            assert got.isfinite().all()
            close(got.where(real, torch.zeros_like(got)), want, dtype)
            checked += 1
        start = stop
    assert checked


SPECS = {
    "all packed": bare(3, 3),
    "sinks": bare(3, 3, sinks=4),
    "window": bare(4, 2, window=32),
    "sinks and window": bare(3, 3, **WINDOWED),
    "dense": bare(3, 3, rotation="dense", **WINDOWED),
    "groups of 16": bare(4, 4, group=16, **WINDOWED),
    "variance term": bare(2, 2, variance_term=True, **WINDOWED),
    "variance term, groups of 16": bare(3, 2, variance_term=True, group=16),
    "blocks": bare(3, 3, key_levels="affine", value_levels="affine", key_block=32, **WINDOWED),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_chunk_sees_what_is_stored_and_itself_exactly(spec, device):
    run(Layer(spec), (150, CHUNK, 1, 3, CHUNK, 200), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 64), (8, 2, 128), (6, 2, 80), (4, 1, 256), (2, 2, 24)])
def test_shapes_and_dtypes(heads, kv_heads, dim, dtype, device):
    shape = dict(heads=heads, kv_heads=kv_heads, dim=dim)
    run(Layer(bare(4, 4, **WINDOWED), **shape), (200, CHUNK, 130), dtype, device, batch=2, **shape)


@pytest.fixture
def decoding(monkeypatch):
    """Makes chunks attend to decoded tokens, 128 or 256 at a time. Returns the list of these calls."""
    calls = []
    monkeypatch.setattr(decoded, "LEAST_TOKENS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(decoded, "LEAST_ROWS", (1, 1))
    monkeypatch.setattr(decoded, "LEAST_ROWS_OF_TERM", (1, 1))
    monkeypatch.setattr(decoded, "reads_packed_chunks", lambda stored, query: False)
    monkeypatch.setattr(decoded, "SCRATCH_BYTES", 200_000)
    monkeypatch.setattr(
        attend, "attend_to_decoded", lambda *given: calls.append(given) or decoded.attend_to_decoded(*given)
    )
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 64), (8, 2, 128), (6, 2, 80), (4, 1, 256)])
@pytest.mark.parametrize("fields", [{}, WINDOWED, {"variance_term": True, **WINDOWED}], ids=str)
def test_a_chunk_that_sees_decoded_tokens(fields, heads, kv_heads, dim, dtype, device, decoding):
    if "variance_term" in fields and dim == 256:
        pytest.skip("flash attention has no room for the term's channels")
    shape = dict(heads=heads, kv_heads=kv_heads, dim=dim)
    run(Layer(bare(4, 3, **fields), **shape), (700, CHUNK, 1, 130), dtype, device, batch=2, **shape)
    run(Layer(bare(4, 3, **fields), **shape), (700, CHUNK), dtype, device, batch=1, **shape)
    assert len(decoding) == (0 if device == "cuda" and dtype == torch.float32 else 3)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch, tokens", [(1, 9000), (2, 8300)])
@pytest.mark.parametrize("term", [False, True])
def test_a_long_history_is_read_by_cudnn(term, batch, tokens, dtype, device, decoding, monkeypatch):
    """cuDNN reads whole blocks, in parts if the batch is one sequence, and flash attention reads the rest."""
    monkeypatch.setattr(decoded, "SCRATCH_BYTES", 128 << 20)
    blocks = []
    monkeypatch.setattr(decoded, "_by_cudnn", lambda *given, by=decoded._by_cudnn: blocks.append(1) or by(*given))
    shape = dict(heads=8, kv_heads=2, dim=128)
    spec = bare(3, 3, variance_term=term, **WINDOWED)
    run(Layer(spec, **shape), (tokens, 300), dtype, device, batch=batch, **shape)
    assert len(blocks) == torch.cuda.get_device_capability()[0] // 9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoded_tokens_and_left_padding(dtype, device, decoding):
    run(Layer(bare(3, 3, **WINDOWED)), (400, CHUNK), dtype, device, batch=4, padding=(0, 1, 37, 300))
    assert len(decoding) == (0 if device == "cuda" and dtype == torch.float32 else 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fields", [{}, WINDOWED], ids=str)
def test_softcap(fields, dtype, device):
    run(Layer(bare(3, 3, **fields), softcap=0.5), (150, CHUNK, 90), dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [1, 3, 10, 20, 36, 50])
def test_a_chunk_on_a_short_history(first, device):
    """Sinks and window are not full yet."""
    run(Layer(bare(3, 3, **WINDOWED)), (first, CHUNK), device=device)
    run(Layer(bare(3, 3, **WINDOWED)), (first, CHUNK, CHUNK), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pieces", [(160, CHUNK, 50), (60, CHUNK, CHUNK, 50), (10, 50, 50, 90)], ids=str)
@pytest.mark.parametrize("how", [{}, {"softcap": 0.5}], ids=str)
@pytest.mark.parametrize("fields", [{}, WINDOWED], ids=str)
def test_left_padding(fields, how, pieces, device):
    """Padding in the first forward, and in chunks in which some sequences begin."""
    run(Layer(bare(3, 3, **fields), **how), pieces, device=device, batch=4, padding=(0, 1, 37, 100))


@pytest.mark.parametrize("device", DEVICES)
def test_a_sliding_window_that_hides_nothing(device):
    run(Layer(bare(3, 3, **WINDOWED), local_size=320), (180, CHUNK, CHUNK), device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 50, 130, 300])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_sliding_window_that_hides_what_is_stored(spec, size, device, monkeypatch):
    calls = []
    monkeypatch.setattr(attend, "visible_past", lambda *given: calls.append(given) or sliding.visible_past(*given))
    monkeypatch.setattr(sliding, "_QUERIES", 64)
    run(Layer(spec, local_size=size), (150, CHUNK, 1, 300, CHUNK, 200), device=device)
    assert len(calls) == (4 if size < 220 else 3)  # the first chunk ends at 220 positions


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [{}, {"softcap": 0.5}], ids=str)
@pytest.mark.parametrize("fields", [{}, WINDOWED], ids=str)
def test_a_sliding_window_and_left_padding(fields, how, device):
    layer = Layer(bare(3, 3, **fields), local_size=60, **how)
    run(layer, (300, CHUNK, 50, 1, CHUNK), device=device, batch=4, padding=(0, 1, 37, 330))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sliding_window_in_every_dtype(dtype, device):
    shape = dict(heads=8, kv_heads=2, dim=80)
    run(Layer(bare(4, 4, **WINDOWED), local_size=100, **shape), (200, CHUNK, 130), dtype, device, batch=2, **shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "how", [{}, {"softcap": 0.5}, {"local_size": 100}, {"local_size": 100, "softcap": 0.5}], ids=str
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"sinks": 4}, WINDOWED, {"prefill": "packed", **WINDOWED}, {"variance_term": True, **WINDOWED}],
    ids=str,
)
def test_the_lse_of_every_path(fields, how, device):
    """It is right in a first forward, in chunks, in drafts and in decoding steps, also after a fork. A model with
    learned sinks needs it: a sink multiplies the output by sigmoid(lse - sink)."""
    layer, padding, total = Layer(bare(3, 3, **fields), **how), (0, 37), 460
    q, k, v = (random(2, heads, total, 32, device=device, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    mask = (torch.arange(total)[None, :] >= torch.tensor(padding)[:, None]).to(device)
    start = 0
    for piece in (60, CHUNK, 1, 1, 300, 20, 1):
        stop = start + piece
        one = [x[:, :, start:stop] for x in (q, k, v)]
        exact = piece >= 40 and "prefill" not in fields
        want = layer.oracle(*one, padding) if exact else None
        if piece == 20:  # a draft: as its tokens would be decoded one by one
            twin = Layer(layer.stored.spec, **how)
            twin.cache = layer.cache.fork()
            twin.stored = twin.cache.layers[0].storage
            steps = [twin.forward(*(x[:, :, i : i + 1] for x in (q, k, v)), mask[:, : i + 1], True)
                     for i in range(start, stop)]  # fmt: skip
            want = [torch.cat(parts, 2).double() for parts in zip(*steps)]
        out, lse = layer.forward(*one, mask[:, :stop], lse=True)
        if want is None and piece == 1:
            each = [layer.attended(one[0][b], *layer.history(b)) for b in range(2)]
            want = [torch.stack(x) for x in zip(*each)]
        assert lse.shape == out.shape[:3] and lse.dtype == torch.float32
        if want is not None:
            close(out, want[0], torch.float32)
            real = mask[:, None, start:stop].expand_as(lse)
            torch.testing.assert_close(lse.double()[real], want[1][real], rtol=0, atol=2e-4)
            assert (lse[~real] < -1e30).all()
        start = stop


def test_neither_blocks_nor_autocast_change_the_plain_way(monkeypatch):
    q, k, v = (random(2, heads, 50, 16, seed=seed) for seed, heads in enumerate((6, 2, 2)))
    earlier = [(random(2, 2, 20, 16, seed=3), random(2, 2, 20, 16, seed=4))]
    whole = chunk.attention_in_chunk(q, earlier, k, v, 0.25, 2.0, (0, 7))
    monkeypatch.setattr(chunk, "_BLOCK", 12 * 70 * 7)  # blocks of 7 queries
    for a, b in zip(whole, chunk.attention_in_chunk(q, earlier, k, v, 0.25, 2.0, (0, 7))):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(whole, chunk.attention_in_chunk(q, earlier, k, v, 0.25, 2.0, (0, 7))):
            torch.testing.assert_close(a, b)
    nothing = chunk.attention_in_chunk(q, [], k, v, 0.25, 0.0, (0, 7))
    assert not nothing[0][1, :, :7].any() and nothing[1].isfinite().all()


def test_a_chunk_that_fails_leaves_the_cache_as_it_was():
    layer = Layer(bare(3, 3, **WINDOWED))
    q, k, v = (random(1, heads, 300, 32, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    layer.forward(*(x[:, :, :150] for x in (q, k, v)))
    before = [(part, tensor.clone()) for part, tensor in layer.cache.tensors()]
    bad = v[:, :, 150:250].clone()
    bad[0, 0, 99, 0] = torch.nan
    with pytest.raises(ValueError, match="layer 0: append: `v"):
        layer.forward(q[:, :, 150:250], k[:, :, 150:250], bad)
    after = layer.cache.tensors()
    assert all(part == name and torch.equal(x, y) for (part, x), (name, y) in zip(before, after, strict=True))
    rest = [x[:, :, 150:] for x in (q, k, v)]
    want, _ = layer.oracle(*rest)
    close(layer.forward(*rest), want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 16])
def test_decoded_keys_have_the_variance_term_of_a_metric(group, dtype):
    """Scores of decoded keys with the term's channels have the log-sum-exp of `attend`; without them it is far off."""
    rng = np.random.default_rng(1)
    p = ref.plan(64, 2, 2, wave_pairs=32, metric=4, group=group, variance_term=True)
    plan, (turns, moments) = Plan.from_words(p.words), random_moments(rng, p, 2, 3.0)
    transforms = ops.transforms(key_turns=torch.from_numpy(turns), key_moments=torch.from_numpy(moments))
    k, v, q = random(2, 2, 300, 64), random(2, 2, 300, 64, seed=1), 3 * random(2, 4, 5, 64, seed=2)
    pages, table = (
        torch.zeros(6, 2, plan.record_bytes, dtype=torch.uint8),
        torch.arange(6, dtype=torch.int32).view(2, 3),
    )
    lengths = torch.tensor([300, 211], dtype=torch.int32)
    torch.ops.turboquant.append(plan.words, k, v, lengths, pages, table, **transforms)
    how = dict(causal=False, softmax_scale=0.1, **transforms)
    _, want = torch.ops.turboquant.attend(plan.words, q, pages, table, lengths, **how)
    stored = SimpleNamespace(plan=plan, kv_heads=2, head_dim=64, transforms=transforms)
    keys, _ = torch.ops.turboquant.dequantize(plan.words, pages, table, lengths, 300, **transforms)
    keys = term.wide_keys(keys.to(dtype), stored, pages, table, lengths).repeat_interleave(2, 1).double()
    queries = term.wide_queries(q.to(dtype), stored, 0.1).double()
    hidden = (torch.arange(300) >= lengths[:, None])[:, None, None]

    def off(channels):
        logits = queries[..., :channels] @ keys[..., :channels].mT * 0.1
        return float((logits.masked_fill(hidden, -torch.inf).logsumexp(-1) - want).abs().max())

    assert off(72) < 2 * DTYPES[dtype] and off(64) > 1


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_graph_of_attention_to_decoded_tokens(device):
    """A graph can be replayed for other pages and queries. The number of tokens is fixed when it is recorded."""
    layer = Layer(bare(4, 4), heads=8, dim=128)
    layer.forward(*(random(1, heads, 8320, 128, torch.bfloat16, device, seed=heads) for heads in (8, 2, 2)))
    stored, query = layer.stored, random(1, 8, 512, 128, torch.bfloat16, device)

    def attended():
        return decoded.attend_to_decoded(stored, query, [8320], 0.1)

    attended()  # cuDNN plans a shape when it first gets it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attended()
    for _ in range(2):
        stored.pages.copy_(stored.pages.roll(1, 0))
        query.neg_()
        graph.replay()
        want = attended()
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("term", [False, True])
@pytest.mark.parametrize("metric", [None, 0, 4])
@pytest.mark.parametrize("pairs", [0, 1])
@pytest.mark.parametrize("dim, bits", [(128, (4, 4)), (128, (3, 2)), (96, (5, 3)), (64, (2, 2)), (40, (1, 4))])
def test_many_queries_attend_to_pages_that_are_decoded_once(dim, bits, pairs, metric, term, dtype, device, monkeypatch):
    """CHUNK (csrc/cuda/attend/chunk) gives what a CPU does, for a batch and for ragged queries."""
    rng = np.random.default_rng(1)
    fields = {} if metric is None else {"metric": metric}
    p = ref.plan(dim, *bits, wave_pairs=pairs * (dim // 2 // 8 * 8), variance_term=term, **fields)
    plan, (turns, moments) = Plan.from_words(p.words), random_moments(rng, p, 2, 3.0)
    numbers = {"key_turns": turns, "key_moments": moments}
    transforms = ops.transforms(**{name: torch.from_numpy(x) for name, x in numbers.items() if x is not None})
    k, v, q = random(3, 2, 700, dim), random(3, 2, 700, dim, seed=1), random(3, 8, 40, dim, dtype, seed=2)
    pages = torch.zeros(18, 2, plan.record_bytes, dtype=torch.uint8)
    table = torch.randperm(18, generator=torch.Generator().manual_seed(3)).int().view(3, 6)
    lengths, offset = torch.tensor([700, 0, 389]).int(), torch.tensor([4, 0, 1000]).int()
    torch.ops.turboquant.append(plan.words, k, v, lengths, pages, table, position_offset=offset, **transforms)

    def attend_on(where, query, **how):
        arrays = {name: x.to(where) for name, x in (transforms | {"position_offset": offset}).items()}
        held = [x.to(where) for x in (query, pages, table, lengths)]
        return torch.ops.turboquant.attend(plan.words, *held, causal=False, softmax_scale=0.1, **arrays, **how)

    want = attend_on("cpu", q.float())
    if torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "hopper-chunk")  # for few pages another kernel is faster
    got = attend_on(device, q)
    if torch.cuda.get_device_capability()[0] == 9:
        arrays = {name: x.to(device) for name, x in transforms.items()}
        packed = ops.PackedKV(pages.to(device), table.to(device), lengths.to(device), plan, 700, arrays)
        assert ops.attend_kernel(q.to(device), packed, causal=False).startswith("attend_chunk_")
    limit = (1e-2 if pairs else 4e-3) + (4e-3 if dtype == torch.bfloat16 else 0)
    off = (got[0].float().cpu() - want[0]).norm(dim=-1) / want[0].norm(dim=-1).clamp(min=1e-9)
    assert off[lengths > 0].max() < limit and not got[0][1].any()
    torch.testing.assert_close(got[1].cpu(), want[1], atol=limit, rtol=0)
    counts = torch.tensor([40, 0, 33])
    some = torch.cat([q[b, :, :n].transpose(0, 1) for b, n in enumerate(counts)])
    loc = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
    ragged = attend_on(device, some.contiguous(), query_start_loc=loc, max_query_len=40)
    for b, n in enumerate(counts):
        rows = ragged[0][loc[b] : loc[b + 1]].transpose(0, 1)
        assert torch.equal(rows, got[0][b, :, :n])
