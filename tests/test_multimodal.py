"""Models that read images or sound: `patch` packs their text decoder and leaves the rest alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from multimodal import TYPES, give_features, prompt, tiny
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf import names
from turboquant.models.identity import weight_sums

pytestmark = pytest.mark.skipif("qwen3_vl" not in TYPES or "voxtral" not in TYPES, reason="transformers is older")

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(5, 5)

# (as one tensor or a list of them) how a type takes the features of its images
TAKES_LIST = {"llava": True, "mistral3": True, "gemma3": False, "qwen2_vl": True, "qwen3_vl": True, "voxtral": False}


def made(name: str, **text: Any) -> Any:
    model = tiny(name, text)
    give_features(model, TAKES_LIST[name])
    return model


def two_turns(model: Any, cache: Any) -> list[torch.Tensor]:
    """Logits of a turn with an image, two tokens, and another turn with an image."""
    first, second = prompt(model), prompt(model, 14, 3, seed=2)
    del first["attention_mask"], second["attention_mask"]
    logits = []
    with torch.no_grad():
        for step in (first, {"input_ids": torch.tensor([[7]])}, {"input_ids": torch.tensor([[8]])}, second):
            logits.append(model(**step, use_cache=True, **{names.CACHE: cache}).logits)
    return logits


@pytest.mark.parametrize("name", TAKES_LIST)
def test_an_image_in_the_prompt(name):
    model = made(name)
    inputs = prompt(model)
    towers = {id(m.config): (m.config, m.config._attn_implementation) for m in model.modules() if hasattr(m, "config")}
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    with torch.no_grad():
        want, text = model(**inputs, use_cache=True).logits, model.generate(**inputs, **options)
        assert (want - model(input_ids=inputs["input_ids"] % 80, use_cache=True).logits).abs().max() > 0.1
        turboquant.patch(model, HOLDS_ALL)
        others = {k: before for k, (_, before) in towers.items() if k != id(model.config.get_text_config(decoder=True))}
        assert all(towers[k][0]._attn_implementation == before for k, before in others.items()) and others
        got, same = model(**inputs, use_cache=True).logits, model.generate(**inputs, **options)
    assert torch.equal(got, want) and torch.equal(same.sequences, text.sequences)
    assert type(same[names.CACHE]) is TurboQuantCache and same[names.CACHE].get_seq_length() == 25
    turboquant.unpatch(model)
    assert all(config._attn_implementation == before for config, before in towers.values())


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen3_vl"])
def test_an_image_in_a_later_turn(name):
    model = made(name, **({"sliding_window": 24} if name == "gemma3" else {}))
    want = two_turns(model, DynamicCache(config=model.config))
    turboquant.patch(model, HOLDS_ALL)
    for a, b in zip(two_turns(model, TurboQuantCache(model)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)
    turboquant.patch(model, PACKED)
    for a, b in zip(two_turns(model, TurboQuantCache(model)), want, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.94


def test_tokens_that_see_each_other_need_an_exact_prefill():
    model = turboquant.patch(made("gemma3"), PACKED, prefill="packed")
    cache = TurboQuantCache(model)
    with pytest.raises(
        NotImplementedError, match=r'layer 0: .* images whose tokens all see each other.*prefill="exact"'
    ):
        model(**prompt(model), use_cache=True, **{names.CACHE: cache})
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True, **{names.CACHE: cache})
    assert cache.get_seq_length() == 3


def test_only_weights_behind_the_last_keys_do_not_identify_a_model():
    model = made("llava")  # tower and decoder have lists of layers of the same length below
    model = tiny("llava", {"num_hidden_layers": 2})
    found = weight_sums(model)
    assert any("vision_tower" in name for name in found)
    assert any("language_model.layers.1.self_attn.k_proj" in name for name in found)
    assert not any(
        "language_model.layers.1.mlp" in name or name.endswith("language_model.norm.weight") for name in found
    )


def test_cuda_graphs_are_refused():
    with pytest.raises(NotImplementedError, match="LlavaForConditionalGeneration: `cuda_graphs` is for text models"):
        turboquant.patch(made("llava"), cuda_graphs=True)
