"""Models that read images or sound: `patch` packs their text decoder and leaves the rest alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from causal_types import PER_LAYER_INPUTS
from multimodal import TYPES, give_features, prompt, tiny
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.models import names
from turboquant.models.identity import weight_sums

pytestmark = pytest.mark.skipif("qwen3_vl" not in TYPES or "voxtral" not in TYPES, reason="transformers is older")

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(5, 5)

# How a type takes the features of its images. True: as a list of tensors; False: as one tensor.
TAKES_LIST = {"llava": True, "mistral3": True, "gemma3": False, "qwen2_vl": True, "qwen3_vl": True, "voxtral": False}
FIELDS = {"gemma4": PER_LAYER_INPUTS}


def made(name: str, **text: Any) -> Any:
    model = tiny(name, FIELDS.get(name, {}) | text)
    give_features(model, TAKES_LIST.get(name, True))
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


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "qwen3_5", "gemma4"])
def test_an_image_beside_a_text_that_is_padded(name):
    """A batch of both generates the same tokens, with beams too, and close logits when it is packed."""
    model = made(name)
    model.generation_config.eos_token_id = None
    inputs = prompt(model)
    short = torch.randint(2, 80, (1, 20), generator=torch.Generator().manual_seed(9))
    inputs["input_ids"] = torch.cat([inputs["input_ids"], short])
    inputs["attention_mask"] = torch.ones(2, 20, dtype=torch.long)
    inputs["attention_mask"][1, :6] = inputs["input_ids"][1, :6] = 0
    for kinds in {"mm_token_type_ids", "token_type_ids"} & {*inputs}:
        inputs[kinds] = torch.cat([inputs[kinds], torch.zeros_like(inputs[kinds])])
    options = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0)
    want, beams = (model.generate(**inputs, **options, num_beams=n) for n in (1, 3))
    turboquant.patch(model, HOLDS_ALL)
    got = model.generate(**inputs, **options)
    assert type(got[names.CACHE]) is TurboQuantCache and torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=5e-5)
    assert torch.equal(model.generate(**inputs, **options, num_beams=3).sequences, beams.sequences)
    turboquant.patch(model, PACKED)
    got = model.generate(**inputs, **options | dict(max_new_tokens=2))
    for a, b in zip(got.logits, want.logits):
        assert torch.nn.functional.cosine_similarity(a, b).min() > 0.94


@pytest.mark.parametrize("name", ["llava", "gemma3", "gemma4", "qwen3_vl", "qwen3_5"])
def test_an_image_in_a_later_turn(name):
    model = made(name, **({"sliding_window": 24} if name == "gemma3" else {}))
    want = two_turns(model, DynamicCache(config=model.config))
    turboquant.patch(model, HOLDS_ALL)
    for a, b in zip(two_turns(model, TurboQuantCache(model)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5)
    turboquant.patch(model, PACKED)
    for a, b in zip(two_turns(model, TurboQuantCache(model)), want, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.94


def divergences(model: Any, spec: Any, moments: Any, turns: list[Any], follows: bool = True) -> float:
    """Returns the mean KL divergence of logits after an image in the last turn from the model's own, all packed."""
    turboquant.unpatch(model)
    found = []
    for own in (True, False):
        if not own:
            turboquant.patch(model, spec, profile=moments)
        cache = DynamicCache(config=model.config) if own else TurboQuantCache(model)
        if not own and not follows:
            cache.turn = lambda *given: None
        model.model.rope_deltas = None  # left by the last text with an image; a text without one would use it
        with torch.no_grad():
            for inputs in turns:
                logits = model(**inputs, use_cache=True, **{names.CACHE: cache}).logits
        found.append(logits[:, 74:].log_softmax(-1))
    want, got = found
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.filterwarnings("ignore:.*an image in a later turn moves positions")
def test_behind_an_image_the_wave_does_no_harm(name):
    """The wave helps after an image with far fewer positions than tokens, if the mean of keys is large."""
    model = made(name)
    give_features(model, True, tokens=64)
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.language_model.layers:
        attention = layer.self_attn
        attention.q_norm = attention.k_norm = torch.nn.Identity()  # Qwen3-VL's would bring the mean down again
        mean = torch.randn(attention.k_proj.out_features, generator=generator)
        attention.k_proj.bias = torch.nn.Parameter(10 * 8 * attention.k_proj.weight.detach().std() * mean)
        attention.q_proj.weight.data *= 0.2
    moments = turboquant.measure(model)
    assert {layer.kind for layer in moments.layers} == {"wave"}
    inputs = prompt(model, 100, 10, grid=(8, 8))
    wave, none = bare(3, 8, centre="wave", prefill="packed"), bare(3, 8, prefill="packed")
    without = divergences(model, none, None, [inputs])
    followed = divergences(model, wave, moments, [inputs])
    ignored = divergences(model, wave, moments, [inputs], follows=False)
    assert followed < 0.5 * without and followed < 0.75 * ignored
    del inputs["attention_mask"]
    text = {"input_ids": torch.randint(2, 80, (1, 60), generator=generator)}
    for first in (text, {**prompt(model, 100, 10, seed=7, grid=(8, 8)), "attention_mask": None}):
        later = [divergences(model, *how, [first, inputs]) for how in ((wave, moments), (none, None))]
        assert later[0] < 0.7 * later[1]


def test_positions_that_move_in_a_later_turn_are_warned_of():
    model = made("qwen3_vl")
    moments = turboquant.measure(model)
    turboquant.patch(model, bare(4, 4, centre="wave"), profile=moments)
    cache = TurboQuantCache(model)
    decoder, embeddings = model.model.language_model, torch.randn(1, 8, 64)

    def forward(first: int) -> None:
        positions = torch.arange(first, first + 8).expand(3, 1, -1)
        with torch.no_grad():
            decoder(inputs_embeds=embeddings, position_ids=positions, use_cache=True, **{names.CACHE: cache})

    forward(0)
    assert cache._shared.moments is moments.moments
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(8)
    with pytest.warns(UserWarning, match="an image in a later turn moves positions by up to 20, and the wave cannot"):
        forward(36)
    cache.reset()
    forward(5)
    assert cache._shared.moments is moments.moments and cache.shifts == (5,)
    cache.reset()
    forward(0)
    assert cache._shared.moments is moments.moments


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
    model = tiny("llava", {"num_hidden_layers": 2})  # tower and decoder have lists of layers of the same length
    found = weight_sums(model)
    assert any("vision_tower" in name for name in found)
    assert any("language_model.layers.1.self_attn.k_proj" in name for name in found)
    assert not any(
        "language_model.layers.1.mlp" in name or name.endswith("language_model.norm.weight") for name in found
    )


def test_cuda_graphs_are_refused():
    with pytest.raises(NotImplementedError, match="LlavaForConditionalGeneration: `cuda_graphs` is for text models"):
        turboquant.patch(made("llava"), cuda_graphs=True)
