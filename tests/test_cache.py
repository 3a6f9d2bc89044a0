"""TurboQuantCache without a model: the tests hand it keys and values as a model would."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import models  # noqa: F401  skips without torch and transformers
import numpy as np
import pytest
import torch
from specs import WAVE, bare
from streams import (
    CONFIG,
    DIM,
    KV_HEADS,
    LAYERS,
    PACKED,
    SHAPES,
    Stream,
    close,
    exact,
    forward,
    module,
    new,
    packed_bytes,
    rows,
)
from transformers import LlamaConfig

from turboquant import TurboQuantCache, ops
from turboquant.hf.attention import FreshKeys, attention
from turboquant.kvcache.pages import RELEASED
from turboquant.models.attention import request_mask
from turboquant.models.names import CACHE


def snapshot(cache):
    return [(part, tensor.clone()) for part, tensor in cache.tensors()], cache.get_seq_length()


def assert_unchanged(cache, before):
    tensors, length = snapshot(cache)
    assert length == before[1] and [p for p, _ in tensors] == [p for p, _ in before[0]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors, before[0]))


# ---- what transformers asks it ----


def test_lengths_as_transformers_asks_for_them():
    cache, stream = new("default"), Stream()
    assert len(cache) == LAYERS and not cache.is_initialized and not cache.is_compileable
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(7, 0) == (7, 0)
    forward(cache, stream.piece(0, 5))
    forward(cache, stream.piece(5, 6))
    assert cache.get_seq_length() == cache.get_seq_length(1) == 6 and cache.is_initialized
    layer = cache.layers[0]
    assert (
        layer.get_mask_sizes(3) == layer.get_mask_sizes(torch.arange(6, 9)) == (9, 0)
    )  # transformers 4.57 passes positions
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    assert cache.is_sliding == [False] * LAYERS
    assert "tokens=6" in repr(cache) and "PackedLayer(0" in repr(layer)


def test_keys_on_their_way_can_be_described_and_nothing_else():
    cache, stream = new(PACKED), Stream()
    _, k, v = stream.piece(0, 4)[0]
    fresh, value = cache.update(k, v, 0)
    assert value is v and type(fresh) is FreshKeys and isinstance(fresh, torch.Tensor)
    assert (fresh.shape, fresh.dtype, fresh.device, fresh.dim(), fresh.size(1), len(fresh)) == (
        k.shape,
        k.dtype,
        k.device,
        4,
        KV_HEADS,
        1,
    )
    assert "layer=0" in repr(fresh)
    uses = [
        lambda: fresh.transpose(2, 3),
        lambda: fresh[:, :, 1:],
        lambda: stream.q[0] @ fresh,
        lambda: torch.cat([fresh, k], 2),
        lambda: torch.nn.functional.scaled_dot_product_attention(k, fresh, v),
        lambda: fresh + 1,
        lambda: fresh.clone(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"kept in a TurboQuantCache.*Call turboquant\.patch\(model\)"):
            use()
    assert cache.get_seq_length() == 0
    with pytest.raises(NotImplementedError, match="layer 0: its keys and values were given to attention twice"):
        for _ in range(2):
            attention(module(), k.repeat(1, 2, 1, 1), fresh, value, None)


@pytest.mark.parametrize(
    "config, message",
    {
        "t5": (dict(is_encoder_decoder=True), "encoder-decoder"),
        "linear alone": (dict(layer_types=["linear_attention"] * 2), "no layer has keys and values"),
        "sparse": (dict(layer_types=["full_attention", "indexed_attention"]), "not indexed_attention"),
        "sharing": (dict(num_kv_shared_layers=2), "shared between layers"),
    }.values(),
)
def test_models_that_cannot_be_packed(config, message):
    made = LlamaConfig(num_hidden_layers=2)
    for name, value in config.items():
        object.__setattr__(made, name, value)
    with pytest.raises(NotImplementedError, match=message):
        TurboQuantCache(made, "default")


def test_calibrated_centres_need_a_calibration():
    with pytest.raises(ValueError, match="`profile` must be a calibrated Profile"):
        new(bare(centre="calibrated"))


# ---- what it computes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_a_window_that_holds_everything_is_exact(prefill, dtype):
    stream = Stream(batch=2, tokens=40, dtype=dtype)
    cache = new(bare(2, 2, sinks=3, window=64, **WAVE, prefill=prefill))
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for start, stop in [(0, 17), (17, 18), (18, 30), (30, 31), (31, 40)]:
        out = forward(cache, stream.piece(start, stop))
        assert out.dtype == dtype
        close(out, exact(stream, start, stop), tolerance)
    assert cache.report().parts["pages"] == 0


@pytest.mark.parametrize("bits, error", [(5, 0.08), (4, 0.15), (3, 0.28), (2, 0.6)])
@pytest.mark.parametrize("rotation", ["hadamard", "dense", "none"])
def test_packed_is_close(rotation, bits, error):
    stream = Stream(tokens=200)
    cache = new(bare(bits, bits, rotation=rotation, prefill="packed"))
    out = torch.cat([forward(cache, stream.piece(0, 150)), forward(cache, stream.piece(150, 200))], 2)
    want = exact(stream, 0, 200)
    assert ((out - want).norm() / want.norm()).item() < error


def test_groups_of_16():
    """Groups of 16 may have 8 bits, and take fewer bytes where head_dim is not a multiple of 32."""
    stream, errors = Stream(tokens=200), []
    for bits in ((8, 8), (8, 2), (4, 4)):
        cache = new(bare(bits, bits, group=16, prefill="packed"))
        out = torch.cat([forward(cache, stream.piece(0, 150)), forward(cache, stream.piece(150, 200))], 2)
        want = exact(stream, 0, 200)
        errors.append(((out - want).norm() / want.norm()).item())
    assert errors[0] < 0.02 < errors[2] < 0.15 and errors[1] < 0.55
    room = [bare(4, 4, group=g).bytes_per_token(d) for d in (16, 24, 80) for g in (32, 16)]
    assert room == [36, 20, 36, 36, 100, 84]


def test_one_haar_matrix_serves_all_layers():
    cache = new(bare(rotation="dense"))
    forward(cache, Stream().piece(0, 9))
    assert len({id(held) for layer in cache.layers for held in layer.storage.transforms.values()}) == 1
    assert [t.shape for p, t in cache.tensors() if p == "rotation"] == [(1, 2 * DIM, DIM)]


def test_the_first_forward_is_exact_or_packed():
    stream = Stream(tokens=50)
    want = exact(stream, 0, 50)
    caches = {p: new(bare(2, 2, prefill=p)) for p in ("exact", "packed")}
    outs = {p: forward(cache, stream.piece(0, 50)) for p, cache in caches.items()}
    close(outs["exact"], want, 2e-6)
    assert (outs["packed"] - want).norm() / want.norm() > 0.1
    for a, b in zip(*(packed_bytes(cache) for cache in caches.values())):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("pieces", [(40, 41, 42, 105, 140, 300), (128, 256, 300), (50, 300)], ids=str)
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_pieces_make_the_same_cache_as_one_prefill(fields, pieces):
    stream, spec = Stream(batch=2), PACKED.with_(**fields)
    whole, parts = new(spec), new(spec)
    want = forward(whole, stream.piece(0, 300))
    out = torch.cat([forward(parts, stream.piece(a, b)) for a, b in zip((0, *pieces), pieces)], 2)
    close(out, want)
    for a, b in zip(packed_bytes(parts), packed_bytes(whole)):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_token_by_token_makes_the_same_cache(fields):
    """A prefill of 128 tokens and then single tokens give the cache of one prefill."""
    stream, spec = Stream(tokens=270), PACKED.with_(**fields)
    whole, single = new(spec), new(spec)
    want = forward(whole, stream.piece(0, 270))
    out = torch.cat(
        [forward(single, stream.piece(0, 128))] + [forward(single, stream.piece(t, t + 1)) for t in range(128, 270)], 2
    )
    close(out, want)
    for a, b in zip(packed_bytes(single), packed_bytes(whole)):
        assert torch.equal(a[0], b[0])


@pytest.mark.parametrize("prefill", ["exact", "packed"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_left_padding_is_never_stored(fields, prefill):
    """Each sequence of a padded batch has the bytes and the outputs that it has alone."""
    spec, padding = bare(3, 3, prefill=prefill).with_(**fields), (0, 1, 37, 150)
    stream = Stream(batch=4, tokens=190)
    mask = torch.arange(160)[None, :] >= torch.tensor(padding)[:, None]
    together = new(spec)
    outs = [forward(together, stream.piece(0, 160), mask)]
    for t in range(160, 190):
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        outs.append(forward(together, stream.piece(t, t + 1), mask))
    out = torch.cat(outs, 2)
    for b, pad in enumerate(padding):
        one = copy.copy(stream)
        one.q, one.k, one.v = (x[:, b : b + 1, :, pad:] for x in (stream.q, stream.k, stream.v))
        alone = new(spec)
        outs = [forward(alone, one.piece(0, 160 - pad))] + [
            forward(alone, one.piece(t - pad, t - pad + 1)) for t in range(160, 190)
        ]
        close(out[:, b : b + 1, pad:], torch.cat(outs, 2))
        for a, w in zip(packed_bytes(together), packed_bytes(alone)):
            assert torch.equal(a[b], w[0])
        assert together.report().layers[0].tokens == sum(190 - p for p in padding)


@pytest.mark.parametrize("prefill", ["exact", "packed"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_padding_may_be_longer_than_the_first_forward(fields, prefill):
    """A short prompt beside a long one that comes in chunks has the bytes that it has alone; with prefill="packed" it
    has the outputs too."""
    spec, padding, pieces = bare(3, 3, prefill=prefill).with_(**fields), (0, 37, 100, 150), (100, 140, 200, 201)
    stream = Stream(batch=4, tokens=201)
    mask = torch.arange(201)[None, :] >= torch.tensor(padding)[:, None]
    together, outs, start = new(spec), [], 0
    for stop in pieces:
        outs.append(forward(together, stream.piece(start, stop), mask[:, :stop]))
        start = stop
    for b, pad in enumerate(padding):
        one = copy.copy(stream)
        one.q, one.k, one.v = (x[:, b : b + 1, :, pad:] for x in (stream.q, stream.k, stream.v))
        alone, own, start = new(spec), [], 0
        for stop in (stop - pad for stop in pieces if stop > pad):
            own.append(forward(alone, one.piece(start, stop)))
            start = stop
        if prefill == "packed" or pad == 0:
            close(torch.cat(outs, 2)[:, b : b + 1, pad:], torch.cat(own, 2))
        for a, w in zip(packed_bytes(together), packed_bytes(alone)):
            assert torch.equal(a[b], w[0])
    hidden = mask.clone()
    hidden[3, 160] = False
    with pytest.raises(ValueError, match="must mask as many stored positions of each sequence as were padding"):
        forward(together, stream.piece(0, 1), torch.nn.functional.pad(hidden, (0, 1), value=True))


def over_packed(stream, spec, local_size=None, softcap=None):
    """Returns float64 attention in which every query sees the last `spec.window` tokens exactly and older ones decoded,
    in the layout of `forward`. For specs without a centre, where a token decodes alike in every cache."""
    plan = spec.plan(DIM)
    packed = [ops.pack(stream.k[i].contiguous(), stream.v[i].contiguous(), plan) for i in range(LAYERS)]
    decoded = [ops.dequantize(held) for held in packed]
    packed_k, packed_v = (torch.stack([layer[side] for layer in decoded]) for side in (0, 1))
    q, k, v, packed_k, packed_v = (x.double() for x in (stream.q, stream.k, stream.v, packed_k, packed_v))
    k, v, packed_k, packed_v = (x.repeat_interleave(2, 2) for x in (k, v, packed_k, packed_v))
    at = torch.arange(q.shape[3])
    age = at[:, None] - at[None, :]
    in_window = age < spec.window
    logits = torch.where(in_window, q @ k.transpose(3, 4), q @ packed_k.transpose(3, 4)) * DIM**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    seen = (age >= 0) & (age < (local_size or len(at)))
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return ((weights * in_window) @ v + (weights * ~in_window) @ packed_v).transpose(2, 3)


@pytest.mark.parametrize("options", [dict(local_size=40), dict(softcap=0.5), dict(local_size=40, softcap=0.5)], ids=str)
def test_sliding_window_and_softcap_reach_the_packed_history(options):
    """In a prefill, in chunks and token by token. Pages that left the sliding window are freed, except the last one."""
    stream, spec = Stream(tokens=310), bare(3, 3, window=16, prefill="packed")
    cache, outs, start = new(spec), [], 0
    for stop in (50, 150, *range(151, 161), 300, *range(301, 311)):
        outs.append(forward(cache, stream.piece(start, stop), **options))
        start = stop
    for layer in cache.layers:
        freed = [page == RELEASED for page in layer.storage.table.rows[0]]  # 294 packed tokens are 3 pages
        assert freed == ["local_size" in options, False, False]
    out, want = torch.cat(outs, 2), over_packed(stream, spec, **options)
    close(out, want)
    without = over_packed(stream, spec.with_(window=310), **options)  # if nothing were packed
    assert (want - without).norm() / without.norm() > 0.05
    assert (want - over_packed(stream, spec)).norm() / want.norm() > 0.05  # if an option were ignored


def test_layers_may_differ():
    spec = bare(3, 3, overrides={-1: {"key_bits": 5, "window": 16}})
    cache, stream = new(spec), Stream()
    forward(cache, stream.piece(0, 100))
    assert cache.layers[1].storage.pages.shape[2] - cache.layers[0].storage.pages.shape[2] == 128 * 2 * 4
    assert cache.layers[0].storage.window_k is None and cache.layers[1].storage.window_k.shape == (1, KV_HEADS, 16, DIM)


# ---- batches change ----


CHANGES = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
    "select by list": (lambda c: c.batch_select_indices([2, 1]), [2, 1]),
    "select by mask": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@pytest.mark.parametrize("change, order", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_sequences_change_places(fields, change, order):
    stream, spec = Stream(batch=3, tokens=310), PACKED.with_(**fields)
    mask = torch.arange(150)[None, :] >= torch.tensor([0, 20, 149])[:, None]
    changed, built = new(spec), new(spec)
    forward(changed, stream.piece(0, 150), mask)
    change(changed)
    other = rows(stream, order)
    forward(built, other.piece(0, 150), mask[order])
    for t, u in [(150, 151), (151, 290), (290, 310)]:
        close(forward(changed, other.piece(t, u)), forward(built, other.piece(t, u)), 1e-6)
    for a, b in zip(packed_bytes(changed), packed_bytes(built)):
        assert all(map(torch.equal, a, b))
    assert changed.layers[0].max_batch_size == len(order) and changed.nbytes <= built.nbytes


def test_a_sequence_that_is_not_there():
    cache = new(PACKED)
    forward(cache, Stream(batch=2).piece(0, 5))
    with pytest.raises(IndexError, match=r"layer 0: sequences must be in 0\.\.1, got \[0, 2\]"):
        cache.reorder_cache(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="layer 0: at least one sequence must stay, got none"):
        cache.batch_select_indices([])
    for mask in ([True], [True, False, False]):
        with pytest.raises(ValueError, match=f"`indices` must be a bool for each of 2 sequences, got {len(mask)}"):
            cache.batch_select_indices(mask)
    for call, name in ((cache.reorder_cache, "beam_idx"), (cache.batch_select_indices, "indices")):
        for wrong in (None, 1, [0.0, 1.0], [[0, 1]], "01"):
            with pytest.raises(TypeError, match=f"`{name}` must be integers.* .sequences., got "):
                call(wrong)
    with pytest.raises(TypeError, match="`beam_idx` must be integers"):
        cache.reorder_cache(torch.tensor([True, False]))
    for wrong in (2.0, True):
        with pytest.raises(TypeError, match=f"`repeats` must be an integer, got {wrong}"):
            cache.batch_repeat_interleave(wrong)
    assert cache.layers[0].max_batch_size == 2


@pytest.mark.parametrize(
    "fields, tokens",
    [(dict(), 200), (dict(sinks=3, **WAVE), 131), (dict(sinks=4, window=32), 36), (WAVE, 150)],
    ids=str,
)
def test_crop_forgets(fields, tokens):
    stream, spec = Stream(tokens=300), PACKED.with_(**fields)
    cropped, plain = new(spec), new(spec)
    forward(plain, stream.piece(0, 20))
    forward(cropped, stream.piece(0, 20))
    forward(cropped, Stream(seed=1).piece(20, tokens))
    cropped.crop(0)
    assert cropped.get_seq_length() == tokens
    cropped.crop(20 - tokens)
    assert cropped.get_seq_length() == 20
    close(forward(cropped, stream.piece(20, 300)), forward(plain, stream.piece(20, 300)), 1e-6)
    cropped.crop(5 if not fields.get("window") else 300)  # how many to keep, as transformers 4.57 passes it
    cropped.crop(-10_000)
    assert cropped.get_seq_length() == 0 and cropped.nbytes < 100


def test_crop_below_the_window_is_refused():
    cache = new(PACKED.with_(overrides={1: {"window": 32}}))
    forward(cache, Stream().piece(0, 50))
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="crop: layer 1 has a window of 32 tokens"):
        cache.crop(-2)
    assert_unchanged(cache, before)


def test_crop_below_the_window_of_one_sequence_is_refused():
    """The sequence without padding has overflowed its window, the other one has not."""
    cache, mask = new(PACKED.with_(window=32)), torch.ones(2, 60, dtype=torch.bool)
    mask[1, :33] = False
    forward(cache, Stream(batch=2).piece(0, 60), mask)
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="has a window of 32 tokens"):
        cache.crop(-5)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("number", [np.int64(-20), torch.tensor(-20)], ids=["NumPy", "torch"])
def test_crop_takes_integers_of_all_kinds(number):
    cache, other = new(PACKED), new(PACKED)
    for each, forget in [(cache, number), (other, -20)]:
        forward(each, Stream().piece(0, 50))
        each.crop(forget)
    assert_unchanged(cache, snapshot(other))
    assert type(cache.layers[0].storage.tokens) is int
    for crop in (cache.crop, cache.layers[0].crop):
        for wrong in (-2.0, True):
            with pytest.raises(TypeError, match=f"`tokens` must be an integer, got {wrong}"):
                crop(wrong)
    assert_unchanged(cache, snapshot(other))


def test_reset_gives_the_memory_back():
    cache = new("default")
    forward(cache, Stream(batch=2).piece(0, 300))
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized and cache.nbytes <= 8
    close(forward(cache, Stream(batch=3).piece(0, 9)), exact(Stream(batch=3), 0, 9), 2e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_its_own_way(copied):
    stream, cache = Stream(), new(PACKED.with_(sinks=2, window=16, **WAVE))
    forward(cache, stream.piece(0, 150))
    other = copied(cache)
    assert other.nbytes == cache.nbytes
    forward(other, Stream(seed=1).piece(150, 290))
    fresh = new(cache.spec)
    forward(fresh, stream.piece(0, 150))
    close(forward(cache, stream.piece(150, 160)), forward(fresh, stream.piece(150, 160)), 1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_a_copy_takes_a_failed_forward_back(copied):
    cache, stream = new(PACKED), Stream()
    forward(cache, stream.piece(0, 150))
    other, poisoned = copied(cache), copy.deepcopy(stream)
    poisoned.k[1, 0, 0, 155, 0] = float("nan")
    with pytest.raises((ValueError, RuntimeError), match="layer 1: "):
        forward(other, poisoned.piece(150, 160))
    assert [layer.storage.tokens for layer in other.layers] == [150] * LAYERS
    close(forward(other, stream.piece(150, 160)), forward(cache, stream.piece(150, 160)), 1e-6)


def test_prefill_and_decode_in_different_modes():
    stream, cache, plain = Stream(), new("default"), new("default")
    with torch.inference_mode():
        outs = [forward(cache, stream.piece(0, 140))]
    outs += [forward(cache, stream.piece(140, 141))]
    with torch.inference_mode():
        outs += [forward(cache, stream.piece(141, 290))]
    outs += [forward(cache, stream.piece(290, 291))]
    with torch.no_grad():
        pieces = [(0, 140), (140, 141), (141, 290), (290, 291)]
        close(torch.cat(outs, 2), torch.cat([forward(plain, stream.piece(*p)) for p in pieces], 2), 1e-6)


@pytest.mark.parametrize("trained", "qkv")
def test_there_is_no_gradient_and_backward_says_so(trained):
    stream, cache = Stream(), new("default")
    getattr(stream, trained).requires_grad_()
    for start, stop in [(0, 5), (5, 6)]:
        out = forward(cache, stream.piece(start, stop))
        with pytest.raises(RuntimeError, match="has no gradient: train with use_cache=False"):
            out.sum().backward()


# ---- memory ----


def test_room_for_tokens_to_come_is_at_most_a_64th():
    cache, stream = new(bare(1, 1)), Stream(tokens=128, dim=8, kv_heads=1)
    for pages in range(1, 140):
        forward(cache, stream.piece(0, 128))
        held = cache.layers[0].storage.pages
        assert pages <= len(held) <= pages + pages // 64
        assert held.untyped_storage().nbytes() == held.numel()
        assert not held[pages:].any()


def test_pages_are_shared_out_among_uneven_sequences():
    cache, stream = new(PACKED), Stream(batch=3, tokens=600)
    mask = torch.arange(300)[None, :] >= torch.tensor([0, 200, 299])[:, None]
    forward(cache, stream.piece(0, 300), mask)
    assert [len(row) for row in cache.layers[0].storage.table.rows] == [3, 1, 1]
    for t in range(300, 600, 10):
        forward(cache, stream.piece(t, t + 10))
    held = cache.layers[0].storage
    used = sorted(page for row in held.table.rows for page in row)
    assert [len(row) for row in held.table.rows] == [5, 4, 3] and used == list(range(12)) and len(held.pages) == 12
    assert all(held.block_table[b, : len(row)].tolist() == row for b, row in enumerate(held.table.rows))


def test_report_counts_every_byte_once():
    cache = new(bare(3, 3, sinks=2, window=8, **WAVE, rotation="dense"))
    forward(cache, Stream(batch=2, dtype=torch.bfloat16).piece(0, 300))
    report = cache.report()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in cache.tensors()}
    assert report.nbytes == cache.nbytes == sum(report.parts.values()) == sum(held.values())
    assert set(report.parts) == {"pages", "block_table", "transforms", "sinks", "window", "lengths", "rotation"}
    assert (report.parts["window"] / 16, report.numbers / 300) == (LAYERS * 2 * 2 * KV_HEADS * DIM,) * 2
    assert report.ratio_fp32 == 2 * report.ratio_bf16 == pytest.approx(4 * report.numbers / report.nbytes)
    assert report.effective_bits == pytest.approx(16 / report.ratio_bf16)
    assert f"{report.nbytes:,} bytes" in str(report) and "float32" in str(report)
    assert "0 bytes: no token is stored yet" in str(new("default").report())


# ---- bad input: a clear error, nothing changed ----


def misuse(cache, stream):
    """Keys and values whose batch size, head count, head_dim, dtype or shape differs from what is stored."""
    _, k, v = stream.piece(100, 101)[0]
    wide = torch.cat([k, k], 1)
    return {
        "batch": (torch.cat([k, k]), torch.cat([v, v])),
        "heads": (wide, wide),
        "head_dim": (k[..., :16], v[..., :16]),
        "dtype": (k.half(), v.half()),
        "values of another length": (k, torch.cat([v, v], 2)),
    }


@pytest.mark.parametrize("what", misuse(None, Stream()))
def test_another_batch_or_model(what):
    cache, stream = new("default"), Stream()
    forward(cache, stream.piece(0, 100))
    before = snapshot(cache)
    k, v = misuse(cache, stream)[what]
    message = "layer 0: the cache holds 100 positions of 1 sequences with 2 KV heads of 32 .* on cpu, got"
    with pytest.raises(ValueError, match=message) as caught:
        cache.update(k, v, 0)
    assert ("cache.batch_repeat_interleave(2) first" in str(caught.value)) == (what == "batch")
    assert_unchanged(cache, before)


def test_another_device():
    cache, stream = new("default"), Stream()
    forward(cache, stream.piece(0, 10))
    _, k, v = stream.piece(10, 11)[0]
    with pytest.raises(ValueError, match="on cpu, got .* on meta"):
        cache.update(k.to("meta"), v.to("meta"), 0)


def test_shapes_and_dtypes_that_no_cache_takes():
    k = torch.zeros(1, 2, 3, 32)
    for cache_k, cache_v, error, message in [
        (k[0], k[0], ValueError, r"must both be \[batch, kv_heads, tokens, head_dim\]"),
        (k, k[..., :16], ValueError, "must both be"),
        (k.double(), k.double(), TypeError, "float32, float16 or bfloat16 alike"),
        (k[..., :12], k[..., :12], ValueError, "head_dim"),
        (torch.zeros(1, 2, 3, 520), torch.zeros(1, 2, 3, 520), ValueError, "head_dim"),
    ]:
        with pytest.raises(error, match=message):
            new(PACKED).update(cache_k, cache_v, 0)
    with pytest.raises(ValueError, match=r"`layer_idx` must be in 0\.\.1, got 2: is this cache of another model"):
        new("default").update(k, k, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("fields", [dict(), dict(sinks=4, window=32, **WAVE)], ids=str)
def test_numbers_that_cannot_be_stored(fields, which, bad):
    cache, stream = new(PACKED.with_(**fields)), Stream()
    poisoned = copy.deepcopy(stream)
    getattr(poisoned, which)[0, 0, 1, 105, 7] = bad
    forward(cache, stream.piece(0, 100))
    before = snapshot(cache)
    for start, stop in [(100, 110), (105, 106)]:
        with pytest.raises((ValueError, RuntimeError), match=f"layer 0: append(_attend)?: `{which}"):
            forward(cache, poisoned.piece(start, stop))
        assert_unchanged(cache, before)
    close(forward(cache, stream.piece(100, 110)), forward_from_scratch(cache.spec, stream, 100, 110), 1e-6)


def forward_from_scratch(spec, stream, *stops):
    cache = new(spec)
    return [forward(cache, stream.piece(a, b)) for a, b in zip((0, *stops), stops)][-1]


@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_a_first_forward_that_fails_leaves_an_empty_cache(prefill):
    cache, stream = new(bare(prefill=prefill, **WAVE, window=8)), Stream()
    poisoned = copy.deepcopy(stream)
    poisoned.k[1, 0, 0, 3, 0] = float("nan")
    with pytest.raises((ValueError, RuntimeError), match="layer 1: "):
        forward(cache, poisoned.piece(0, 10))
    assert cache.get_seq_length() == cache.get_seq_length(1) == 0 and cache.nbytes <= 8
    forward(cache, stream.piece(0, 10))


def test_a_later_forward_that_fails_half_way():
    """Layer 0 has stored the tokens when layer 1 refuses them. Without a window that is undone; with one it cannot be,
    and the cache must be reset."""
    stream = Stream()
    poisoned = copy.deepcopy(stream)
    poisoned.k[1, 0, 0, 205, 0] = float("nan")
    plain, ring = new(PACKED), new(PACKED.with_(window=16))
    for cache in (plain, ring):
        forward(cache, stream.piece(0, 200))
        with pytest.raises((ValueError, RuntimeError), match="layer 1: append"):
            forward(cache, poisoned.piece(200, 210))
    assert plain.get_seq_length() == 200
    close(forward(plain, stream.piece(200, 210)), forward_from_scratch(PACKED, stream, 200, 210), 1e-6)
    with pytest.raises(
        RuntimeError, match=r"layer 0: an earlier call failed after it had changed the cache: call cache.reset\(\)"
    ):
        forward(ring, stream.piece(200, 210))
    ring.reset()
    forward(ring, stream.piece(0, 10))


def test_a_forward_that_was_cut_off_is_noticed():
    cache, stream = new(PACKED), Stream()
    forward(cache, stream.piece(0, 20))
    forward(cache, stream.piece(20, 21)[:1])  # as after Ctrl-C between two layers
    says = "layer 1: the cache holds 20 positions here and 21 in its first layer: .* all layers are back at 20 now: try"
    with pytest.raises(RuntimeError, match=says):
        forward(cache, stream.piece(21, 22))
    assert [layer.storage.tokens for layer in cache.layers] == [20] * len(cache.layers)
    forward(cache, stream.piece(20, 22))
    assert cache.get_seq_length() == 22


def test_a_forward_that_was_cut_off_and_cannot_be_taken_back_is_noticed():
    cache, stream = new(PACKED.with_(window=8)), Stream()
    forward(cache, stream.piece(0, 20))
    forward(cache, stream.piece(20, 21)[:1])
    with pytest.raises(RuntimeError, match=r"an earlier forward was cut off; call cache.reset\(\)"):
        forward(cache, stream.piece(21, 22))


def test_a_model_of_more_layers_stores_nothing():
    cache, stream = new(PACKED), Stream()
    forward(cache, stream.piece(0, 20))
    q, k, v = stream.piece(20, 25)[0]
    fresh, value = cache.update(k, v, 0)
    larger = SimpleNamespace(**vars(module()), config=SimpleNamespace(num_hidden_layers=LAYERS + 1))
    says = f"layer 0: `{CACHE}` must be a cache of this model's {LAYERS + 1} layers, got one of {LAYERS}"
    with pytest.raises(ValueError, match=says):
        attention(larger, q, fresh, value, None, scaling=DIM**-0.5)
    assert [layer.storage.tokens for layer in cache.layers] == [20] * LAYERS


def test_a_model_is_no_configuration():
    with pytest.raises(
        TypeError, match=r"`model` must be a model or its configuration \(model.config\), got SimpleNamespace"
    ):
        TurboQuantCache(SimpleNamespace(config=CONFIG))


def test_beams_may_be_a_list():
    cache, stream = new(PACKED), Stream(batch=2)
    forward(cache, stream.piece(0, 20))
    other = cache.fork()
    cache.reorder_cache([1, 0])
    other.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(a.storage.block_table, b.storage.block_table) for a, b in zip(cache.layers, other.layers))


MASKS = {
    "a hole": ([[1, 0, 1, 1], [0, 1, 0, 1]], "must mask .* got masked ones between tokens in 2 of 2 sequences"),
    "a hole and padding": ([[1, 0, 1, 0], [1, 1, 1, 0]], "must mask .* got masked ones between tokens in 1 of 2"),
    "too short": ([[1, 1, 1], [1, 1, 1]], r"must cover .* shape \(2, 4\), got \(2, 3\)"),
    "another batch": ([[1, 1, 1, 1]], r"must cover .* shape \(2, 4\), got \(1, 4\)"),
}


@pytest.mark.parametrize("mask, message", MASKS.values(), ids=MASKS)
def test_masks_of_a_first_forward(mask, message):
    cache = new(PACKED)
    with pytest.raises(ValueError, match=f"layer 0: `attention_mask` {message}"):
        forward(cache, Stream(batch=2).piece(0, 4), torch.tensor(mask, dtype=torch.bool))
    assert cache.get_seq_length() == 0


def test_masks_of_a_later_forward():
    cache, stream = new(PACKED), Stream(batch=2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    forward(cache, stream.piece(0, 4), mask)
    before = snapshot(cache)

    def later(tail, head=mask):
        return torch.cat([head, torch.tensor(tail, dtype=torch.bool)], 1)

    for tokens, bad in [
        (1, later([[1], [1]], torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]], dtype=torch.bool))),
        (2, later([[1, 1]] * 2, ~mask)),
    ]:
        with pytest.raises(
            ValueError,
            match="layer 0: `attention_mask` must mask as many stored positions of each sequence as were padding",
        ):
            forward(cache, stream.piece(4, 4 + tokens), bad)
    with pytest.raises(
        ValueError, match=r"must cover the 4 stored positions and the 2 new ones, shape \(2, 6\), got \(2, 2\)"
    ):
        forward(cache, stream.piece(4, 6), torch.ones(2, 2, dtype=torch.bool))
    assert_unchanged(cache, before)
    a, b = copy.deepcopy(cache), copy.deepcopy(cache)
    close(
        forward(a, stream.piece(4, 6), later([[1, 1]] * 2)), forward(b, stream.piece(4, 6)), 1e-7
    )  # without a mask, the known padding applies


def test_masks_and_options_of_other_kinds():
    cache, stream = new(PACKED), Stream()
    q, k, v = stream.piece(0, 4)[0]
    with pytest.raises(
        NotImplementedError, match=r"layer 0: `attention_mask` must be \[batch, positions\], got \(1, 1, 4, 4\): custom"
    ):
        attention(module(), q, *cache.update(k, v, 0), torch.zeros(1, 1, 4, 4))
    extra = request_mask(
        batch_size=1, q_length=4, q_offset=0, kv_length=4, kv_offset=0, attention_mask=None, allow_is_causal_skip=False
    )
    with pytest.raises(NotImplementedError, match="layer 0: an attention pattern other than causal"):
        attention(module(), q, *cache.update(k, v, 0), extra)
    for option in (dict(position_bias=torch.zeros(1)), dict(output_attentions=True)):
        with pytest.raises(NotImplementedError, match=f"layer 0: `{next(iter(option))}` is not supported"):
            attention(module(), q, *cache.update(k, v, 0), None, **option)
    assert cache.get_seq_length() == 0
