"""A cache file identifies the weights that its keys and values were computed with."""

from __future__ import annotations

import copy
import time

import models
import pytest
import torch
from adapters import PeftModel, adapted
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.models.identity import changed_weights, weight_sums

LAST = 2  # layer of `tiny`


def changed(model, other):
    return changed_weights(weight_sums(model), weight_sums(other))


def touched(model, name):
    other = copy.deepcopy(model)
    weight = other.state_dict()[name]
    with torch.no_grad():
        weight.add_(weight * torch.linspace(0.25, 1, weight.shape[-1], device=weight.device))
    return other


def keys_and_values(model):
    with torch.no_grad():
        cache = model(**models.prompts(1, 9), past_key_values=DynamicCache(), use_cache=True).past_key_values
    return [torch.cat([layer.keys, layer.values], -1) for layer in cache.layers]


@pytest.mark.parametrize("kind", models.KINDS)
def test_the_weights_that_count_are_those_that_change_keys_and_values(kind):
    """Each weight is changed alone. If the change is not found, keys and values are the same."""
    model = models.tiny(kind, tie_word_embeddings=False)
    want, sums, behind = keys_and_values(model), weight_sums(model), set()
    for name in model.state_dict():
        other = touched(model, name)
        found = changed_weights(sums, weight_sums(other))
        assert found in ([], [name.removeprefix(f"{model.base_model_prefix}.")])
        if not found:
            behind.add(name)
            assert all(map(torch.equal, keys_and_values(other), want)), name
    assert len(behind) >= 3  # the head, the last norm, and weights of the last layer


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.norm.weight", f"model.layers.{LAST}.mlp.up_proj.weight",
     f"model.layers.{LAST}.self_attn.q_proj.weight", f"model.layers.{LAST}.post_attention_layernorm.weight"],
)  # fmt: skip
def test_weights_behind_the_last_key_do_not_count(name):
    model = models.tiny(tie_word_embeddings=False)
    assert not changed(model, touched(model, name))


def test_unchanged_models_agree(tmp_path):
    model = models.tiny()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert not changed(model, again)
    assert not changed(model, model.model) and not changed(model, PeftModel(model, "LORA"))
    assert not changed(model, turboquant.patch(copy.deepcopy(model)))


def test_adapters():
    model = models.tiny()
    other, layer = adapted(model)
    name = "layers.1.self_attn.v_proj"
    assert changed(model, other) == [f"{name}.scaling", f"{name}.lora_A.mine.weight", f"{name}.lora_B.mine.weight"]
    active = weight_sums(other)
    layer.scaling["mine"] = 1.0
    assert changed_weights(active, weight_sums(other)) == [f"{name}.scaling"]
    layer.disable_adapters = True
    assert not changed(model, other)
    layer.disable_adapters = False
    layer.active_adapters = []
    assert not changed(model, other)
    layer.merge()
    assert changed(model, other) == [f"{name}.weight"]
    plain = copy.deepcopy(model)
    plain.model.layers[1].self_attn.v_proj.weight.data = layer.base_layer.weight.data
    assert not changed(plain, other)
    assert not changed(model, adapted(model, LAST, "q_proj")[0])


def test_an_adapter_is_told_by_its_whole_name():
    """An idle adapter whose name is a prefix of an active one's does not hide the active one."""
    other, layer = adapted(models.tiny())
    before = weight_sums(other)
    for part in (layer.lora_A, layer.lora_B):
        part["mi"] = copy.deepcopy(part["mine"])
    assert weight_sums(other) == before


@pytest.mark.filterwarnings("ignore:the model is measured on random token ids")
def test_kept_moments_are_those_of_the_active_adapters(tmp_path, monkeypatch):
    """Moments differ, and are kept apart, with an adapter, with it switched off, and with another scale of it."""
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    other, layer = adapted(models.tiny(), name="k_proj")
    scaled = turboquant.measure(other).layers[1]
    layer.disable_adapters = True
    off = turboquant.measure(other).layers[1]
    assert abs(scaled.amplitudes - off.amplitudes).max() > 0.1
    layer.disable_adapters, layer.scaling["mine"] = False, 0.5
    assert abs(turboquant.measure(other).layers[1].amplitudes - scaled.amplitudes).max() > 0.1
    assert len([*tmp_path.iterdir()]) == 3


def test_a_tuned_prompt_counts():
    model = models.tiny()
    wrapper = PeftModel(model, "PROMPT_TUNING")
    wrapper.prompt_encoder = torch.nn.ModuleDict(
        {"mine": torch.nn.Embedding(4, 64), "other": torch.nn.Embedding(4, 64)}
    )
    wrapper.active_adapter = "mine"
    assert changed(model, wrapper) == ["prompt_encoder.mine.weight"]


def test_a_prefix_of_another_fine_tune_is_refused(tmp_path):
    model = turboquant.patch(models.tiny(), "default")
    with torch.no_grad():
        cache = model(models.prompts(1, 150)["input_ids"]).past_key_values
    cache.save(tmp_path / "prefix", model)
    TurboQuantCache.load(tmp_path / "prefix", model)
    TurboQuantCache.load(tmp_path / "prefix", model.config)
    name = "layers.1.self_attn.k_proj.weight"
    for other, says in [
        (touched(model, f"model.{name}"), f"this one has other weights .{name}."),
        (touched(model, "model.layers.0.input_layernorm.weight"), "other weights .layers.0.input_layernorm.weight"),
        (adapted(model)[0], "other weights .layers.1.self_attn.v_proj.scaling and 2 more"),
        (models.tiny().to(torch.bfloat16), "other weights .embed_tokens.weight and [0-9]+ more"),
    ]:
        with pytest.raises(ValueError, match=f"`path` must be a cache file.*it is of another model: .*{says}"):
            TurboQuantCache.load(tmp_path / "prefix", other)


def test_long_tensors_are_sampled_all_over():
    from turboquant.models.identity import _RUN, _places, _sum_of

    for numbers in (2**14 + 1, 4096 * 4096):
        runs = torch.tensor(_places(numbers))
        assert len(runs.unique()) == 16 and int(runs.min()) == 0 and int(runs.max()) <= numbers - _RUN
        assert int(torch.cat([runs, torch.tensor([numbers])]).diff().max()) < numbers / 8
    weight = torch.randn(300, 300)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        cast = weight.to(dtype)
        assert _sum_of(cast) == _sum_of(cast.clone()) != _sum_of((weight * 1.5).to(dtype))
    assert _sum_of(weight) == _sum_of(weight.T.contiguous().T) != _sum_of(weight.T)


def test_weights_that_are_nowhere():
    with torch.device("meta"):
        model = models.tiny()
    with pytest.raises(ValueError, match="`model` must have its weights loaded, got embed_tokens.weight on the meta"):
        weight_sums(model)


def test_the_time_does_not_grow_with_the_weights():
    """A Llama of 8 billion parameters in bfloat16 takes less than 1 s. Its memory is never written, so it takes no
    RAM."""
    shape = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False)
    with torch.device("meta"):
        model = models.tiny(**shape, **heads, dtype=torch.bfloat16)
    held = model.state_dict().items()
    assert 8.0e9 < sum(weight.numel() for _, weight in held) < 8.1e9
    model.load_state_dict({name: torch.empty_like(weight, device="cpu") for name, weight in held}, assign=True)
    start = time.process_time()
    assert len(weight_sums(model)) == 283  # 291 less the head, two norms and five weights of the last layer
    assert time.process_time() - start < 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_finds_the_same():
    model = models.tiny()
    assert not changed(model, copy.deepcopy(model).cuda())
