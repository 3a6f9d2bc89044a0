"""Models whose last layers read the keys and values of earlier ones, and whose layers differ in size: Gemma 4 and
Gemma 3n."""

from __future__ import annotations

from typing import Any

import pytest
from causal_types import VERSION
from hybrids import IDS, PADDED, PIECES
from models import torch, transformers
from ops_cases import DEVICES
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf.attention import NAME
from turboquant.models import names
from turboquant.models.attention import MaskRequest
from turboquant.models.kinds import sources_of

pytestmark = pytest.mark.skipif(VERSION < (5, 20), reason="older transformers does not say which layers share keys")

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(5, 5)
SMALL: dict[str, Any] = dict(
    vocab_size=96,
    vocab_size_per_layer_input=96,
    hidden_size=64,
    hidden_size_per_layer_input=16,
    intermediate_size=96,
    num_hidden_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    sliding_window=8,
    num_kv_shared_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 4": ("Gemma4", dict(global_head_dim=32)),
    "gemma 4, 512 channels": ("Gemma4", dict(head_dim=256, global_head_dim=512)),
    "gemma 4, keys made as values are": (
        "Gemma4",
        dict(global_head_dim=32, num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma 3n": ("Gemma3n", dict(laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=None)),
}


def made(kind: str = "gemma 4", **more: Any) -> Any:
    name, fields = KINDS[kind]
    config = getattr(transformers, f"{name}TextConfig")(**{**SMALL, **fields, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for layer in model.model.layers:  # their softmax scale is 1: attention would nearly choose one token
        layer.self_attn.q_norm.weight.data *= 4 * layer.self_attn.head_dim**-0.5
    return model


def run(model: Any, cache: Any, keep: int = 0, pieces: Any = PIECES) -> torch.Tensor:
    """Logits of real tokens, fed in pieces: of all, or of the last `keep` of each piece."""
    ids, mask = IDS.to(model.device), PADDED.to(model.device)
    with torch.no_grad():
        parts = [
            model(ids[:, a:b], attention_mask=mask[:, :b], logits_to_keep=keep, **{names.CACHE: cache}).logits
            for a, b in pieces
        ]
    got = torch.cat(parts, 1)
    return got if keep else got[mask[:, pieces[0][0] : pieces[-1][1]].bool()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_exact_while_the_window_holds_all_and_close_when_packed(kind: str, keep: int, device: str) -> None:
    model = made(kind).to(device)
    pieces = [(0, 20), (20, 27), (27, 40)] if keep == 3 else PIECES
    want = run(model, DynamicCache(config=model.config), keep, pieces)
    for spec in (HOLDS_ALL, HOLDS_ALL.with_(prefill="packed")):
        got = run(turboquant.patch(model, spec), TurboQuantCache(model), keep, pieces)
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5 if device == "cpu" else 1e-3)
    for spec in (PACKED, PACKED.with_(window=3), PACKED.with_(prefill="packed", sinks=1)):
        got = run(turboquant.patch(model, spec), TurboQuantCache(model), keep, pieces)
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if "512" in k else ()) for k in KINDS])
def test_generate_with_the_default_preset(kind: str, device: str) -> None:
    model = made(kind).to(device)
    prompt = dict(input_ids=IDS.to(device), attention_mask=PADDED.to(device))
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    want, beams = (model.generate(**prompt, **options, num_beams=n).sequences for n in (1, 3))
    turboquant.patch(model, bare(4, 4, centre="wave", metric="query", sinks=4, window=128))
    for n, text in ((1, want), (3, beams)):
        got = model.generate(**prompt, **options, num_beams=n)
        assert type(got[names.CACHE]) is TurboQuantCache and torch.equal(got.sequences, text)
    assert turboquant.measure(model).not_probed == ()


def test_which_layers_are_packed_and_what_they_measure() -> None:
    model = made()
    assert sources_of(model.config) == [0, 1, 2, 3, 2, 3]
    cache = TurboQuantCache(turboquant.patch(model, PACKED))
    run(model, cache)
    assert [type(layer).__name__ for layer in cache.layers] == ["PackedLayer"] * 4 + ["DummyLayer"] * 2
    assert [layer.is_shared for layer in cache.packed_layers] == [False, False, True, True]
    assert [layer.storage.head_dim for layer in cache.packed_layers] == [16, 32] * 2
    layers = turboquant.measure(model).layers
    assert [layer.centre.shape for layer in layers] == [(2, 16), (2, 32)] * 2


def test_the_metric_has_the_queries_of_all_readers() -> None:
    """Directions of a shared layer's metric change with the queries of the layers that read it."""
    model = made()
    before = turboquant.measure(model)
    with torch.no_grad():
        model.model.layers[4].self_attn.q_norm.weight[:4] *= 50
    after = turboquant.measure(model)
    changed = [not (a.scale == b.scale).all() for a, b in zip(before.layers, after.layers)]
    assert changed == [False, False, True, True]  # the last layer's hidden states change too


def test_nothing_of_a_forward_stays_in_full_precision() -> None:
    model = made()
    cache = TurboQuantCache(turboquant.patch(model, PACKED))
    run(model, cache, pieces=PIECES[:1])
    held = {name for layer in cache.packed_layers for name, _ in layer.storage.by_part()}
    assert held == {"pages", "block_table"} and not hasattr(cache.packed_layers[2], "seen")


def test_pages_behind_a_sliding_window_are_freed_in_the_next_forward() -> None:
    model = made()
    cache = TurboQuantCache(turboquant.patch(model, PACKED))
    ids = torch.randint(2, 90, (1, 600), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **{names.CACHE: cache})
        pages = [len(layer.storage.pages) for layer in cache.packed_layers]
        assert pages[2] > pages[0] and pages[1] == pages[3] == 5
        model(ids[:, :1], **{names.CACHE: cache})
    pages = [len(layer.storage.pages) for layer in cache.packed_layers]
    assert pages[0] == pages[2] <= 2


def test_forks_and_files(tmp_path: Any) -> None:
    model = made()
    cache = TurboQuantCache(turboquant.patch(model, PACKED.with_(centre="wave", metric="query")))
    run(model, cache, pieces=PIECES[:3])
    cache.save(tmp_path / "c", model)
    fork, other = cache.fork(), TurboQuantCache.load(tmp_path / "c", model)
    want = run(model, cache, pieces=PIECES[3:])
    assert torch.equal(run(model, fork, pieces=PIECES[3:]), want)
    assert torch.equal(run(model, other, pieces=PIECES[3:]), want)


def test_a_failure_in_a_reading_layer_takes_all_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    cache = TurboQuantCache(turboquant.patch(model, HOLDS_ALL))
    run(model, cache, pieces=PIECES[:1])
    layer = cache.packed_layers[3]
    with monkeypatch.context() as patched:
        patched.setattr(layer, "_scale", lambda scaling: 1 / 0 if layer.storage.tokens == 21 else scaling)
        with pytest.raises(ZeroDivisionError):
            run(model, cache, pieces=PIECES[1:2])
    assert {layer.storage.tokens for layer in cache.packed_layers} == {20}
    other = TurboQuantCache(model)
    run(model, other, pieces=PIECES[:1])
    assert torch.equal(run(model, cache, pieces=PIECES[1:]), run(model, other, pieces=PIECES[1:]))


def test_layers_on_other_devices_read_where_the_keys_are() -> None:
    """accelerate calls `to` on what a layer is given: keys that later layers read must accept that call."""
    model = made()
    turboquant.patch(model, PACKED)
    held: list[Any] = []
    reading = model.model.layers[4]
    hook = reading.register_forward_pre_hook(
        lambda _, args, kwargs: held.append(kwargs["shared_kv_states"].to(torch.device("cpu"))), with_kwargs=True
    )
    run(model, TurboQuantCache(model), pieces=PIECES[:1])
    hook.remove()
    assert len(held) == 1


def test_masks_can_be_cut_to_their_last_queries_and_to_nothing_else() -> None:
    asked: list[Any] = []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        asked.append(kwargs["attention_mask"])

    model = made()
    turboquant.patch(model, PACKED)
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(watch, with_kwargs=True)
    run(model, TurboQuantCache(model), pieces=PIECES[:1])
    hook.remove()
    mask = asked[0]
    assert type(mask) is MaskRequest
    torch.testing.assert_close(mask[:, :, -3:, :].of_kind("sdpa"), mask.of_kind("sdpa")[:, :, -3:])
    for where in (0, slice(None), (0, 0), (slice(None), slice(None), slice(0, 3), slice(None))):
        with pytest.raises(RuntimeError, match="the model's attention changed"):
            mask[where]


def test_what_is_refused() -> None:
    model = made()
    with pytest.raises(NotImplementedError, match="`cuda_graphs` is for text models .* shared keys and latents"):
        turboquant.patch(model, cuda_graphs=True)
    assert model.config._attn_implementation != NAME
