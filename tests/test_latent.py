"""Latent attention (MLA): latents and rotary parts are packed, and the model expands them, decoded, as it would."""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import IDS, PADDED, PIECES, run
from models import torch
from specs import bare
from test_causal_types import EXACT, TYPES, VERSION, tiny
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf.latent import LatentLayer
from turboquant.models import names

NAMES = """
    axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 sarvam_mla youtu
    """.split()
QUICK = ("deepseek_v3", "minicpm3")
TRIED = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES if n in TYPES and n in EXACT]
pytestmark = pytest.mark.skipif(VERSION < (5, 20), reason="older transformers caches expanded keys and values")

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(6, 6)


def made(name: str = "deepseek_v3", spec: Any = PACKED) -> Any:
    return turboquant.patch(tiny(name), spec)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_exact_while_the_window_holds_all_and_close_when_packed(name: str, prefill: Any) -> None:
    model = tiny(name)
    want = run(model, DynamicCache(config=model.config))
    got = run(turboquant.patch(model, HOLDS_ALL, prefill=prefill), TurboQuantCache(model))
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    for spec in (PACKED, PACKED.with_(sinks=3, window=6)):
        got = run(turboquant.patch(model, spec, prefill=prefill), TurboQuantCache(model))
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94
        assert (got - want).abs().max() > 1e-3  # something is packed


@pytest.mark.parametrize("name", TRIED)
def test_generate(name: str) -> None:
    model = tiny(name)
    prompt = dict(input_ids=IDS, attention_mask=PADDED)
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    want = [model.generate(**prompt, **options, num_beams=n).sequences for n in (1, 3)]
    turboquant.patch(model, HOLDS_ALL)
    for n, text in zip((1, 3), want):
        got = model.generate(**prompt, **options, num_beams=n)
        assert type(got[names.CACHE]) is TurboQuantCache and torch.equal(got.sequences, text)


def test_what_is_held() -> None:
    """The default preset keeps its exact tokens and bits; latents have no wave and metric, so nothing is measured."""
    model = made(spec="default")
    cache = TurboQuantCache(model)
    run(model, cache)
    layers = cache.packed_layers
    assert all(type(layer) is LatentLayer and not layer.storage.spec.measured for layer in layers)
    cache = TurboQuantCache(made())
    run(model, cache)
    stored, text = cache.packed_layers[0].storage, model.config
    assert stored.kv_heads * stored.head_dim == text.kv_lora_rank + text.qk_rope_head_dim
    report = cache.report()
    assert report.layers[0].numbers == 2 * 40 * (text.kv_lora_rank + text.qk_rope_head_dim)
    assert {name for name, _ in stored.by_part()} == {"pages", "block_table"}


def test_crop_fork_and_sequences() -> None:
    model = made(spec=PACKED.with_(sinks=2))
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:3])
    fork = cache.fork()
    want = run(model, fork, PIECES[3:])
    run(model, cache, PIECES[3:4])
    cache.crop(-5)
    assert torch.equal(run(model, cache, PIECES[3:]), want)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    a, b = (run(model, one, ((39, 40),)) for one in (cache, fork))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_failed_forward_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    cache, other = TurboQuantCache(model), TurboQuantCache(model)
    run(model, cache, PIECES[:1])
    run(model, other, PIECES[:1])
    fail: Any = lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no room"))  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(cache.packed_layers[-1].storage, "store", fail)
        with pytest.raises(MemoryError, match="layer 1: no room"):
            run(model, cache, PIECES[1:2])
    with monkeypatch.context() as patched:  # behind the first layer's cache
        patched.setattr(model.model.layers[0].mlp, "forward", fail)
        with pytest.raises(MemoryError, match="no room"):
            run(model, cache, PIECES[1:2])
    with pytest.raises(RuntimeError, match="an earlier forward was cut off: all layers are back"):
        run(model, cache, PIECES[1:2])
    assert torch.equal(run(model, cache, PIECES[1:]), run(model, other, PIECES[1:]))


def test_what_is_refused(tmp_path: Any) -> None:
    model = tiny("deepseek_v3")
    for spec in ("paper-prod-3", bare(4, 4, rotation="dense"), bare(3.5, 3.5, outliers="prompt")):
        with pytest.raises(NotImplementedError, match="latent attention takes specs of one number of bits"):
            turboquant.patch(model, spec)
    with pytest.raises(NotImplementedError, match="`cuda_graphs` is for text models"):
        turboquant.patch(model, PACKED, cuda_graphs=True)
    cache = TurboQuantCache(model, PACKED)
    with pytest.raises(NotImplementedError, match="save: a cache of latents"):
        cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match="layer 0: latents and rotary parts must be"):
        cache.update(torch.zeros(1, 1, 3, 64), torch.zeros(1, 2, 3, 8), 0)
