"""A model warns once if it packs nothing, shows no quantisation, or gets positions that its wave does not follow."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from models import prompts, tiny
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import CacheSpec, TurboQuantCache
from turboquant.hf import attention, notices
from turboquant.models import routing

PLAIN = bare(4, 4)
MEASURE = 'turboquant.patch(model, spec, prefill="packed")'


def generate(model, **kwargs):
    return model.generate(**prompts(1, 9), max_new_tokens=3, do_sample=False, **kwargs)


def said(run) -> list[str]:
    """Returns the warnings of ours that `run` gives, including those of dropped caches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            run()
    ours = [text for one in caught if " because " in (text := str(one.message))]
    return [text for text in ours if "random token ids" not in text]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("where", ["argument", "generation_config"])
def test_a_cache_that_generate_names(kind, where):
    model = turboquant.patch(tiny(), PLAIN)
    given = {"cache_implementation": kind} if where == "argument" else {}
    if where == "generation_config":
        model.generation_config.cache_implementation = kind
    (text,) = said(lambda: generate(model, **given))
    assert text == (
        f"LlamaForCausalLM: nothing is packed, because `cache_implementation` is '{kind}': call generate without it, "
        "and set model.generation_config.cache_implementation = None"
    )
    assert not said(lambda: generate(model, **given))
    turboquant.patch(model, PLAIN)
    assert len(said(lambda: generate(model, **given))) == 1
    model.generation_config.cache_implementation = None
    turboquant.patch(model, PLAIN)
    assert not said(lambda: generate(model))


@pytest.mark.parametrize("call", [generate, lambda m, **cache: m(prompts(1, 5)["input_ids"], **cache)])
@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_cache_of_another_class(call, copied):
    model = copied(turboquant.patch(tiny(), PLAIN))
    name = model._turboquant.cache_name
    (text,) = said(lambda: call(model, **{name: DynamicCache()}))
    assert text.startswith("LlamaForCausalLM: nothing is packed, ") and "brought a DynamicCache: pass" in text
    assert f"`{name}=turboquant.TurboQuantCache(model)`" in text
    assert not said(lambda: call(model, **{name: DynamicCache()}))
    turboquant.patch(model, PLAIN)
    assert not said(lambda: call(model, **{name: TurboQuantCache(model)}))


VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
)


def test_a_model_around_the_patched_one_makes_its_cache():
    config = transformers.LlavaConfig(
        text_config=tiny().config,
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=90,
    )
    torch.manual_seed(0)
    outer = transformers.LlavaForConditionalGeneration(config).eval()
    inner = turboquant.patch(outer.model.language_model, PLAIN)
    (text,) = said(lambda: generate(outer))
    assert text.startswith(f"{type(inner).__name__}: nothing is packed, because the caller, or a model around this one")
    cache = TurboQuantCache(inner)  # what the warning asks for
    assert not said(lambda: generate(outer, **{inner._turboquant.cache_name: cache}))
    assert cache.get_seq_length() == 11


def test_a_part_of_a_patched_model_with_a_cache_of_another_class():
    model = turboquant.patch(tiny(), PLAIN)
    cache = DynamicCache()
    name = model._turboquant.cache_name
    ids = prompts(1, 5)["input_ids"]
    assert not said(lambda: model.model(ids, **{name: cache}))  # as many keys as queries: it may have no cache
    (text,) = said(lambda: [model.model(ids, **{name: cache}) for _ in range(2)])
    assert text.startswith("LlamaForCausalLM: nothing is packed, ")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_attention_without_a_patch(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(notices, "_told", set())
    tiny().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, attn_implementation="turboquant")
    (text,) = said(lambda: generate(model, cache_implementation=kind))
    assert text == (
        "LlamaAttention: nothing is packed, because attn_implementation='turboquant' alone changes no cache: call "
        "turboquant.patch(model) after from_pretrained"
    )
    assert not said(lambda: generate(load(tmp_path, attn_implementation="turboquant")))
    assert not said(lambda: generate(turboquant.patch(model, PLAIN)))


def test_training_and_forwards_without_a_cache_say_nothing():
    model, ids = turboquant.patch(tiny(), PLAIN), prompts(2, 9)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        model.eval()(ids, use_cache=False)
        turboquant.unpatch(model)


def test_logits_of_a_cache_that_is_dropped_unread():
    """Such logits are warned of: programs that measure the likelihood of texts use them."""
    model, ids = turboquant.patch(tiny(), PLAIN), prompts(2, 9)["input_ids"]
    (text,) = said(lambda: [model(ids) for _ in range(3)])
    assert text.startswith("LlamaForCausalLM: the logits of a forward show no quantisation, ") and MEASURE in text
    turboquant.patch(model, PLAIN)
    assert len(said(lambda: model(inputs_embeds=model.get_input_embeddings()(ids)))) == 1
    name = turboquant.models.names.CACHE

    def failed():
        with pytest.raises(NotImplementedError, match="custom masks"):
            model(ids, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))

    for run in (
        lambda: model(ids[:, :1]),  # a step of one token may begin a text
        lambda: model(ids[:, :4], **{name: model(ids)[name]}),
        lambda: model(ids)[name].report(),
        lambda: model(ids)[name].fork(),
        lambda: model(ids)[name].nbytes,
        lambda: pickle.dumps(model(ids)[name]),
        lambda: model(ids, use_cache=False),
        lambda: generate(model),
        lambda: model(ids, **{name: TurboQuantCache(model)}),  # made by the caller, who can look into it
        failed,
        lambda: turboquant.patch(model, PLAIN, prefill="packed")(ids),
    ):
        turboquant.patch(model, PLAIN)
        assert not said(run)


def test_a_saved_cache_was_read(tmp_path):
    model, ids = turboquant.patch(tiny(), PLAIN), prompts(2, 9)["input_ids"]
    assert not said(lambda: model(ids)[turboquant.models.names.CACHE].save(tmp_path / "x.tqc"))


WAVE = CacheSpec(4, 4, prefill="packed")


@pytest.mark.parametrize("spec, warns", [(WAVE, True), (WAVE.with_(centre="none"), False)], ids=["wave", "none"])
def test_positions_far_from_the_count(spec, warns):
    model, ids = tiny(), prompts(2, 30)["input_ids"]
    at = torch.arange(30)[None]
    mask = prompts(2, 30, (0, 5))["attention_mask"]
    padded = (mask.cumsum(1) - 1).clamp(min=0)

    def notices_of(ids=ids, **inputs):
        turboquant.patch(model, spec)
        return [t for t in said(lambda: model(ids, **inputs)) if "position_ids" in t]

    assert not notices_of() and not notices_of(position_ids=at) and not notices_of(position_ids=at + 3)
    assert not notices_of(position_ids=padded, attention_mask=mask)
    assert not notices_of(position_ids=torch.cat([at + 4, at + 300]))  # one shift a row
    assert not notices_of(attention_mask=mask)  # the model counts padding, the cache does not
    for off, moved in (
        (12, torch.cat([at[:, :12], at[:, :18]], 1)),  # two texts in a row
        (9, torch.cat([at[:, :20], at[:, 20:] + 9], 1)),
    ):
        found = notices_of(position_ids=moved)
        assert len(found) == warns
        assert not warns or f"`position_ids` jump by up to {off} inside a sequence" in found[0]

    def steps(offset):
        turboquant.patch(model, spec)
        cache = TurboQuantCache(model)
        name = model._turboquant.cache_name
        model(ids, position_ids=padded, attention_mask=mask, **{name: cache})
        for i in range(2):
            longer = torch.cat([mask, torch.ones(2, i + 1, dtype=mask.dtype)], 1)
            model(ids[:, :1], position_ids=padded[:, -1:] + 1 + i + offset, attention_mask=longer, **{name: cache})

    assert not said(lambda: steps(0)) and len(said(lambda: steps(7))) == warns

    def without_ids():  # the model counts the padding now, and did not before
        turboquant.patch(model, spec)
        cache = TurboQuantCache(model)
        name = model._turboquant.cache_name
        model(ids, position_ids=padded, attention_mask=mask, **{name: cache})
        model(ids[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), **{name: cache})

    assert len(said(without_ids)) == warns


def test_generate_keeps_to_the_count():
    model = turboquant.patch(tiny(), WAVE)
    inputs = prompts(3, 20, (0, 8, 15))
    assert not said(lambda: model.generate(**inputs, max_new_tokens=4, do_sample=False))
    assert not said(lambda: model.generate(**inputs, max_new_tokens=4, num_beams=2))


@pytest.mark.parametrize("kind", ["llama", "gemma2, soft-cap and sliding"])
@pytest.mark.parametrize("cached", ["ours", "another", "none"])
def test_unpatch_during_a_forward(kind, cached):
    """If `unpatch` is called between two layers, the forward fails with a plain error, and the next one works."""
    model, inputs = tiny(kind), prompts(2, 9, (3, 0))
    with torch.no_grad():
        want = model(**inputs).logits
        turboquant.patch(model, PLAIN)
        layer = model.model.layers[1]
        handle = layer.register_forward_pre_hook(lambda *_: turboquant.unpatch(model) and None)
        given = {"another": {model._turboquant.cache_name: DynamicCache()}, "none": {"use_cache": False}, "ours": {}}
        words = (
            "does not attend through it" if cached == "ours" else "the model's attention changed during this forward"
        )
        with pytest.raises(RuntimeError, match=words):
            model(**inputs, **given[cached])
        handle.remove()
        assert torch.equal(model(**inputs).logits, want)


def test_a_mask_says_what_happened_whatever_is_asked_of_it():
    mask = attention.MaskRequest({"kv_length": 3})
    for ask in (lambda: mask[:, :, 0], lambda: torch.zeros(3) + mask, lambda: mask.dtype):
        with pytest.raises((RuntimeError, AttributeError), match="changed during this forward, by turboquant.unpatch"):
            ask()
    assert not hasattr(mask, "to")  # accelerate asks, to move arguments


def test_patched_models_that_another_thread_unpatches():
    """A model may lose its state while it is still among the patched ones: `unpatch` takes the state first."""
    model, other = turboquant.patch(tiny(), PLAIN), tiny()
    state, model._turboquant = model._turboquant, None
    try:
        assert routing.patched_with(other.config) is None
        assert type(turboquant.unpatch(turboquant.patch(other, PLAIN))) is type(other)
    finally:
        model._turboquant = state


def test_unpatch_while_a_thread_is_about_to_run():
    """A hook that was removed after torch listed the hooks of a forward still runs, and does nothing."""
    model = turboquant.patch(tiny(), PLAIN)
    ids = prompts(1, 5)["input_ids"]
    hook = next(iter(model._forward_pre_hooks.values()))
    turboquant.unpatch(model)
    assert hook(model, (ids,), {}) is None


def test_comparisons_of_caches_say_nothing():
    model = turboquant.patch(tiny(), PLAIN)
    windows = torch.randint(1, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    assert not said(lambda: turboquant.evaluate(model, windows, bare(3, 3), generate=2))
    assert len(said(lambda: generate(model, cache_implementation="static"))) == 1
