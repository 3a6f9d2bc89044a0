"""`turboquant.Codec` encodes keys and values as bytes that attention reads."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import real_model
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

import turboquant
from turboquant import CacheSpec, Codec, Profile, ops
from turboquant.measuring.moments import measure_model
from turboquant.plan import PAGE_TOKENS

SPECS = {
    "default": CacheSpec(sinks=4),
    "plain": CacheSpec(4, 3, centre="none", metric="none", sinks=4, window=0),
    "no sinks": CacheSpec(3, 3, centre="none", metric="none", sinks=0, window=0),
    "dense": turboquant.preset("paper-mse-4"),
}


@pytest.fixture(scope="module")
def model():
    return tiny(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def profile(model):
    with pytest.warns(UserWarning, match="random token ids"):
        return turboquant.measure(model)


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS)
def codec(request, model, profile):
    return Codec(model, request.param, profile=profile if request.param.measured else None)


def tokens(n, layers=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layers, 2, n, 32, generator=generator).to(dtype) for _ in range(2)]


def as_packed(codec, k, v, sinks):
    """What `ops.pack` makes of whole sequences."""
    cpu = torch.device("cpu")
    return [
        ops.pack(k[None, i], v[None, i], layer.plan, sinks=sinks, transforms=codec._transforms(layer, 0, cpu))
        for i, layer in enumerate(codec._layers)
    ]


@pytest.mark.parametrize("n", [1, 3, 4, 5, 132, 133, 400])
def test_attention_reads_what_pack_would_have_stored(codec, n):
    k, v = tokens(n)
    layers = codec.packed(codec.encode(k, v))
    q = torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(1))
    for got, want in zip(layers, as_packed(codec, k, v, codec.sinks), strict=True):
        assert got.tokens == n and got.sinks == codec.sinks
        torch.testing.assert_close(ops.attend(q, got), ops.attend(q, want), rtol=0, atol=2e-3)
        for mine, theirs in zip(ops.dequantize(got), ops.dequantize(want), strict=True):
            assert ((mine - theirs).abs() > 1e-2).float().mean() < 0.01  # a tie of two codes


def test_decoded_tokens_are_near(codec):
    k, v = tokens(300)
    for plain, decoded in zip((k, v), codec.decode(codec.encode(k, v)), strict=True):
        for one, other in zip(plain, decoded, strict=True):
            assert one.shape == other.shape and other.dtype == torch.float32
            assert torch.equal(one[:, : codec.sinks], other[:, : codec.sinks])  # sinks are exact
            assert (one - other).square().mean() < 0.06
    half = codec.encode(k.bfloat16(), v.bfloat16())
    assert codec.decode(half)[0][0].dtype == torch.bfloat16
    assert codec.decode(half, dtype=torch.float16)[0][0].dtype == torch.float16


def test_parts_join_to_what_the_whole_is(codec):
    """Parts encoded separately, or cut from the whole, join to its bytes. With a wave, the former only come close."""
    k, v = tokens(3 * PAGE_TOKENS + 40)
    whole = codec.encode(k, v)
    at = [0, codec.boundary(1), codec.boundary(3), k.shape[2]]
    parts = [codec.encode(k[:, :, a:b], v[:, :, a:b], start=a) for a, b in pairwise(at)]
    assert [codec.span(part) for part in parts] == list(pairwise(at))
    joined = codec.join(parts)
    assert codec.span(joined) == (0, k.shape[2]) and len(joined) == len(whole)
    for one, other in zip(codec.decode(joined)[0], codec.decode(whole)[0], strict=True):
        assert ((one - other).abs() > 1e-2).float().mean() < 0.01
    if not codec.spec.measured:
        assert joined == whole
    cut = [codec.cut(whole, a, b) for a, b in pairwise(at[:-1])] + [codec.cut(whole, at[-2], None)]
    assert codec.join(cut) == whole
    middle = codec.decode(cut[1])[0]
    for one, other in zip(middle, codec.decode(whole)[0], strict=True):
        torch.testing.assert_close(one, other[:, at[1] : at[2]], rtol=0, atol=1e-4)


def test_a_decode_step_over_tokens_from_elsewhere(model, profile):
    """Attention of a decoding step over the bytes of a prompt is close to attention over its keys and values."""
    codec = Codec(model, SPECS["default"], profile=profile)
    k, v = tokens(200)
    layer = codec.packed(codec.encode(k, v))[1]
    q = torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(1))
    keys, values = (x[None, 1].repeat_interleave(2, 1) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
    assert torch.nn.functional.cosine_similarity(ops.attend(q, layer).flatten(), want.flatten(), 0) > 0.97


def test_bytes_are_few(model, profile):
    codec = Codec(model, SPECS["default"], profile=profile)
    k, v = tokens(1024, dtype=torch.bfloat16)
    data = codec.encode(k, v)
    assert codec.nbytes(1024) <= len(data) < codec.nbytes(1024) + 4096
    assert codec.nbytes(1024) < 0.35 * (k.nbytes + v.nbytes)


def test_another_plan_profile_or_model_is_refused(codec, model, profile):
    data = codec.encode(*tokens(10))
    others = {one.digest for one in (Codec(model, spec, profile=profile if spec.measured else None)
                                     for spec in SPECS.values())}  # fmt: skip
    assert len(others) == len(SPECS) and codec.digest in others
    other = Codec(model, CacheSpec(2, 2, centre="none", metric="none", sinks=4, window=0))
    with pytest.raises(ValueError, match="`data` must be bytes that this Codec made: its digest must be"):
        other.decode(data)
    assert Codec(model, codec.spec, profile=profile if codec.spec.measured else None).digest == codec.digest


MISTAKES = {
    "a layer too few": (lambda c, k, v: c.encode(k[:2], v), "`keys` must have 3 layers, got 2"),
    "other heads": (lambda c, k, v: c.encode(k[:, :1], v), r"`keys\[0\]` must be \[2, 10, 32\], got \[1, 10, 32\]"),
    "a batch": (
        lambda c, k, v: c.encode(k[:, None], v),
        r"`keys\[0\]` must be \[2, tokens, 32\], got \[1, 2, 10, 32\]",
    ),
    "other tokens": (
        lambda c, k, v: c.encode(k, v[:, :, :9]),
        r"`values\[0\]` must be \[2, 10, 32\], got \[2, 9, 32\]",
    ),
    "two dtypes": (
        lambda c, k, v: c.encode(k, v.half()),
        r"`values\[0\]` must be torch.float32 on cpu .* got torch.float16",
    ),
    "float64": (lambda c, k, v: c.encode(k.double(), v), r"`keys\[0\]` must be float32, float16 or bfloat16, got"),
    "a gradient": (lambda c, k, v: c.encode(k, v.requires_grad_()), r"`values\[0\]` must not require a gradient"),
    "within a page": (lambda c, k, v: c.encode(k, v, start=7), "`start` must be 0 or"),
    "negative": (lambda c, k, v: c.encode(k, v, start=-1), "encode: `start` must be in 0"),
    "nan": (lambda c, k, v: c.encode(k * torch.nan, v), "finite"),
    "nan among the first": (
        lambda c, k, v: c.encode(k, torch.cat((v[:, :, :1] * torch.nan, v[:, :, 1:]), 2)),
        "finite",
    ),
    "no tokens": (lambda c, k, v: c.encode(k[:, :, :0], v[:, :, :0]), "`tokens` must be in 1"),
    "a negative end": (lambda c, k, v: c.cut(c.encode(k, v), 0, -1), "cut: `end` must be in 0"),
    "a dtype": (lambda c, k, v: c.nbytes(9, torch.float64), "`dtype` must be float32, float16 or bfloat16"),
    "a gap": (lambda c, k, v: c.join([c.encode(k, v)] * 2), r"`parts\[1\]` must begin at token 10"),
    "no parts": (lambda c, k, v: c.join([]), "`parts` must be at least one"),
    "an empty cut": (lambda c, k, v: c.cut(c.encode(k, v), 0, 0), "must be in 0..10"),
    "a cut beyond": (lambda c, k, v: c.cut(c.encode(k, v), 0, c.boundary(9)), "must be in 0..10"),
}


@pytest.mark.parametrize("call, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(codec, call, message):
    with pytest.raises(ValueError, match=message):
        call(codec, *tokens(10))


def test_what_is_no_tensor(codec):
    k, v = tokens(10)
    with pytest.raises(TypeError, match="`keys` must be a tensor for each layer, got NoneType"):
        codec.encode(None, v)
    with pytest.raises(TypeError, match=r"`values\[0\]` must be a tensor, got ndarray"):
        codec.encode(k, [x.numpy() for x in v])


def test_repr(codec):
    assert repr(codec) == f"Codec(3 layers, {codec.spec!r}, digest {codec.digest[:8]}..)"


def test_what_is_no_data(codec):
    for data in (None, 3, "text"):
        with pytest.raises(TypeError, match="`data` must be bytes"):
            codec.decode(data)


def _header(data):
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    return entries, json.loads(entries["__metadata__"]["turboquant"]), data[8 + length :]


def _forged(data, change):
    import zlib

    entries, meta, rest = _header(data)
    change(entries, meta)
    text = json.dumps(meta)
    entries["__metadata__"] |= {"turboquant": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + rest


FORGED = {
    "tokens": lambda e, m: m.update(tokens=2**31 - 1),
    "no tokens": lambda e, m: m.update(tokens=None),
    "start": lambda e, m: m.update(start=5),
    "dtype": lambda e, m: m.update(dtype="U8"),
    "sums": lambda e, m: m.update(crc32={}),
    "shape": lambda e, m: e["0.pages"].update(shape=[2**31, 2**31, 2**31]),
    "a tensor more": lambda e, m: e.update(x=e.pop("0.pages")),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_forged_headers_ask_for_no_memory(codec, change):
    data = _forged(codec.encode(*tokens(10)), change)
    with pytest.raises(ValueError, match="`data` must be bytes that this Codec made"):
        codec.decode(data)


@pytest.fixture(scope="module")
def sound(model):
    codec = Codec(model, SPECS["plain"])
    return codec, codec.encode(*tokens(140))


@given(data=st.data())
def test_mutated_bytes_are_refused(data, sound):
    codec, sound = sound
    held = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        held[data.draw(st.integers(0, len(held) - 1))] ^= data.draw(st.integers(1, 255))
    held = held[: data.draw(st.integers(0, len(held)) | st.just(len(held)))]
    try:
        got = codec.decode(held)
    except ValueError:
        return
    want = codec.decode(sound)  # a changed byte that has no meaning, such as padding
    assert all(torch.equal(a, b) for one, other in zip(got, want) for a, b in zip(one, other))


def test_layers_of_other_kinds_are_refused():
    from causal_types import tiny as of_type

    with pytest.raises(NotImplementedError, match="states"):
        Codec(of_type("qwen3_next"), SPECS["plain"])
    with pytest.raises(NotImplementedError, match="latents"):
        Codec(of_type("deepseek_v3"), SPECS["plain"])
    with pytest.raises(NotImplementedError, match="prompt"):
        Codec(tiny(), CacheSpec(2.5, 2.5, outliers="prompt", centre="none", metric="none", sinks=0, window=0))


def test_overrides_of_layers(model):
    plain = SPECS["plain"]
    split = {"key_bits": 2.5, "value_bits": 2.5, "outliers": "prompt"}
    with pytest.raises(NotImplementedError, match='Codec: outliers="prompt" is not supported'):
        Codec(model, plain.with_(overrides={0: split}))
    with pytest.raises(NotImplementedError, match=r"Codec: `sinks` must be the same in all layers, got \[4, 9, 4\]"):
        Codec(model, plain.with_(overrides={1: {"sinks": 9}}))
    codec = Codec(model, plain.with_(overrides={i: {"sinks": 9} for i in range(3)}))
    k, v = tokens(200)
    assert codec.sinks == 9 and codec.boundary(1) == 9 + PAGE_TOKENS
    decoded = codec.decode(codec.encode(k, v))
    assert all(torch.equal(a[:, :9], b[:, :9]) for a, b in zip((*k, *v), (*decoded[0], *decoded[1]), strict=True))
    Codec(model, plain.with_(overrides={0: {"key_bits": 2, "window": 8}})).encode(k, v)


@pytest.mark.slow
def test_smollm2_goes_on_from_bytes():
    """The first token after a prompt whose keys and values came as bytes is the right answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    folder = real_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is Paris. The capital of Italy is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :-1], past_key_values=DynamicCache()).past_key_values
        moments = measure_model(model, tokenizer, costs=False)
        codec = Codec(model, CacheSpec(uniform=True), profile=Profile(moments))
        data = codec.encode([one.keys[0] for one in cache.layers], [one.values[0] for one in cache.layers])
        keys, values = codec.decode(data)
        again = DynamicCache([(k[None], v[None]) for k, v in zip(keys, values, strict=True)])
        got = model(ids[:, -1:], past_key_values=again).logits[0, -1]
    assert tokenizer.decode(got.argmax()) == " Rome"
    assert np.isfinite(got.numpy()).all()
