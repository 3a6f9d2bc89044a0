"""patch and unpatch: what they change, what they refuse, and that nothing else of the model changes."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import forks
import pytest
import torch
import transformers
from models import KINDS, prompts, tiny
from profiles import profile_of
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import CacheSpec, TurboQuantCache
from turboquant.models import names

EXACT = bare(4, 4, sinks=2, window=256)


def generate(model, tokens=12, **kwargs):
    return model.generate(
        **{**prompts(2, 9, (3, 0)), **kwargs}, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True
    )


def state(model):
    """Everything of a model that `patch` may change."""
    return {
        "attention": model.config._attn_implementation,
        "attributes": {name: id(value) for name, value in vars(model).items()},
        "hooks": dict(model._forward_pre_hooks),
        "method": getattr(model._prepare_cache_for_generation, "__func__", None),
    }


def test_patch_and_unpatch():
    model = tiny()
    before, logits = state(model), model(**prompts(2, 20, (0, 5))).logits
    assert turboquant.patch(model, EXACT) is model
    assert state(model) != before
    cache = generate(model).past_key_values
    assert type(cache) is TurboQuantCache and cache.spec == EXACT
    assert turboquant.unpatch(model) is model
    for call in (turboquant.patch, turboquant.unpatch):
        with pytest.raises(TypeError, match="`model` must be a transformers model, got NoneType"):
            call(None)
    assert state(model) == before and torch.equal(model(**prompts(2, 20, (0, 5))).logits, logits)
    assert type(generate(model).past_key_values) is DynamicCache
    with pytest.raises(RuntimeError, match=r"Call turboquant\.patch\(model\)"):
        model(torch.tensor([[5], [6]]), past_key_values=cache)
    turboquant.unpatch(model)
    assert state(model) == before


@pytest.mark.parametrize("spec", ["paper-mse-2", bare(1, 1)], ids=["preset", "spec"])
def test_log_likelihoods_see_the_quantisation_only_with_packed_prefill(spec):
    """One forward over a whole text, as programs that measure perplexity do it."""
    model, ids = tiny(), prompts(2, 100)["input_ids"]

    def log_likelihoods():
        with torch.no_grad():
            scores = model(ids).logits.log_softmax(-1)
        return scores[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)

    want = log_likelihoods()
    turboquant.patch(model, spec)
    assert torch.equal(log_likelihoods(), want)
    turboquant.patch(model, spec, prefill="packed")
    packed = log_likelihoods()
    assert (packed - want).abs().max() > 0.1
    packing = model._turboquant.spec
    assert packing.prefill == "packed"
    turboquant.patch(model, packing)
    assert torch.equal(log_likelihoods(), packed)
    turboquant.patch(model, packing, prefill="exact")
    assert torch.equal(log_likelihoods(), want)


def test_packed_prefill_of_tokens_that_all_stay_in_the_window_is_exact():
    model, inputs = tiny(), prompts(2, 60)
    with torch.no_grad():
        want = model(**inputs).logits
        got = turboquant.patch(model, EXACT, prefill="packed")(**inputs).logits
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_an_unknown_prefill_is_refused():
    model = tiny()
    before = state(model)
    with pytest.raises(ValueError, match="`prefill` must be"):
        turboquant.patch(model, prefill="chunked")
    assert state(model) == before


def test_a_number_of_bits_instead_of_a_spec():
    model = tiny()
    assert not turboquant.is_patched(model)
    assert turboquant.patch(model, 3)._turboquant.spec == CacheSpec(3, 3) and turboquant.is_patched(model)
    assert turboquant.patch(model, bits=3)._turboquant.spec == CacheSpec(3, 3)
    with pytest.raises(ValueError, match="`key_bits` must be whole or .* between 1 and 6, got nan"):
        turboquant.patch(model, bits=float("nan"))
    assert not turboquant.is_patched(turboquant.unpatch(model))


def test_float64_is_refused_before_anything_is_measured(monkeypatch):
    model = tiny(dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"its weights are float64; use float32, .*model.to\(torch.float32\)"):
        turboquant.patch(model)
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM cannot be patched: its weights are float64"):
        turboquant.evaluate(model, prompts(1, 20)["input_ids"], "default")
    assert not turboquant.is_patched(model) and not turboquant.is_patched(object())


def test_patch_twice_replaces_the_spec():
    model = tiny()
    before = state(model)
    turboquant.patch(model)
    assert generate(model).past_key_values.spec == turboquant.preset("default")
    hooks = len(model._forward_pre_hooks)
    turboquant.patch(model, "paper-mse-3")
    assert (
        generate(model).past_key_values.spec == turboquant.preset("paper-mse-3")
        and len(model._forward_pre_hooks) == hooks
    )
    turboquant.unpatch(model)
    assert state(model) == before


@pytest.mark.parametrize("shared", [False, True], ids=["own configs", "one config"])
def test_two_models_two_specs(shared):
    first, second = tiny(), tiny(seed=1)
    if shared:
        second = type(first)(first.config).eval()
    want = generate(first).sequences, generate(second).sequences
    turboquant.patch(first, EXACT)
    turboquant.patch(second, EXACT.with_(window=300))
    got = generate(first), generate(second)
    assert [g.past_key_values.spec.window for g in got] == [256, 300]
    assert all(torch.equal(g.sequences, w) for g, w in zip(got, want))
    turboquant.unpatch(first)
    assert type(generate(second).past_key_values) is TurboQuantCache
    assert type(generate(first).past_key_values) is DynamicCache and torch.equal(generate(first).sequences, want[0])
    turboquant.unpatch(second)
    assert first.config._attn_implementation == second.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_patched_model_is_patched(copied):
    model = turboquant.patch(tiny(), EXACT)
    other = copied(model)
    turboquant.patch(other, "paper-mse-4")
    assert generate(model).past_key_values.spec == EXACT
    assert generate(other).past_key_values.spec == turboquant.preset("paper-mse-4")
    turboquant.unpatch(other)
    assert type(generate(other).past_key_values) is DynamicCache
    assert type(generate(model).past_key_values) is TurboQuantCache


def test_saving_a_patched_model_saves_no_trace(tmp_path):
    turboquant.patch(tiny()).save_pretrained(tmp_path)
    assert all("turboquant" not in path.read_text() for path in tmp_path.glob("*.json"))
    assert type(generate(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)).past_key_values) is DynamicCache


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_cache_the_model_attends_as_before(kind):
    """Causality and padding hold although no mask tensor is made in advance."""
    model, inputs = tiny(kind), prompts(3, 24, (0, 4, 15))
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits
        turboquant.patch(model, "paper-mse-2")
        assert (model(**inputs, use_cache=False).logits - want)[real].abs().max() < 1e-4
        with_dynamic = model(**inputs, past_key_values=DynamicCache())
        assert type(with_dynamic.past_key_values) is DynamicCache
        assert (with_dynamic.logits - want)[real].abs().max() < 1e-4


def test_attention_weights_without_a_cache():
    model, inputs = tiny(), prompts(2, 12, (0, 5))
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(**inputs, use_cache=False, output_attentions=True).attentions
        turboquant.patch(model, EXACT)
        got = model(**inputs, use_cache=False, output_attentions=True).attentions
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a.transpose(1, 2)[real], b.transpose(1, 2)[real], atol=1e-5)
        with pytest.raises(NotImplementedError, match="layer 0: `output_attentions` is not supported with"):
            model(**inputs, output_attentions=True)


@pytest.mark.parametrize("how", ["set", "shared"])
def test_attention_changed_after_patching(how):
    """The user, or a model made from the same configuration, changes the attention. generate says so, and patching
    again repairs it."""
    model = tiny()
    before = state(model)
    turboquant.patch(model, EXACT)
    want = generate(model).sequences
    if how == "set":
        model.set_attn_implementation("eager")
    else:
        type(model)._from_config(model.config, attn_implementation="eager")
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM: attention is 'eager' since .*patch\(model\) again"):
        generate(model)
    assert type(generate(model, past_key_values=DynamicCache()).past_key_values) is DynamicCache
    assert torch.equal(generate(turboquant.patch(model, EXACT)).sequences, want)
    turboquant.unpatch(model)
    assert state(model) == before


def test_training_as_before():
    model, inputs = tiny().train(), prompts(2, 16, (0, 5))
    gradients = []
    for patch in (lambda m: m, turboquant.patch):
        model = patch(model)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))
    model.eval().zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"]).loss  # gradients are on, and no cache was asked for
    loss.backward()


def test_a_plain_forward_makes_its_cache():
    model, ids = turboquant.patch(tiny(), EXACT), prompts(1, 10)["input_ids"]
    assert type(model(ids, use_cache=True).past_key_values) is TurboQuantCache
    assert type(model(ids, None, None, None, use_cache=True).past_key_values) is TurboQuantCache  # by position
    assert type(model(ids).past_key_values) is DynamicCache  # gradients are on: it might be trained
    with torch.no_grad():
        out = model(ids)
        assert type(out.past_key_values) is TurboQuantCache
        assert model(ids, use_cache=False).past_key_values is None
        want = model(torch.cat([ids, ids], 1), use_cache=False).logits[:, 10:]
        got = model(ids, past_key_values=out.past_key_values)
        assert got.past_key_values is out.past_key_values and (got.logits - want).abs().max() < 1e-4
        base = turboquant.patch(tiny().model, EXACT)  # no generate, no language head
        assert type(base(ids).past_key_values) is TurboQuantCache


def test_generate_keeps_its_choices():
    model = turboquant.patch(tiny(), EXACT)
    assert generate(model, use_cache=False).past_key_values is None
    assert type(generate(model, past_key_values=DynamicCache()).past_key_values) is DynamicCache
    assert type(generate(model, cache_implementation="static").past_key_values).__name__ == "StaticCache"
    mine = TurboQuantCache(model.config, "paper-mse-4")
    assert generate(model, past_key_values=mine).past_key_values is mine and mine.get_seq_length() == 20


def test_threads_side_by_side():
    model = turboquant.patch(tiny(), "paper-mse-3")
    want = [generate(model, **prompts(2, 9, (b, 0), seed=b)).sequences for b in range(4)]
    got = [None] * 4

    def run(b):
        got[b] = generate(model, **prompts(2, 9, (b, 0), seed=b)).sequences

    threads = [threading.Thread(target=run, args=(b,)) for b in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_names_of_the_package_are_functions_whatever_was_imported():
    names = ["calibrate", "evaluate", "measure", "patch", "preset", "presets", "unpatch"]
    modules = [
        f"turboquant.{name}"
        for name in ("evaluation.decoder", "patching", "named_specs", "evaluation.forecast", "calibration.calibrate")
    ]
    code = f"import turboquant, {', '.join(modules)}\nprint([type(getattr(turboquant, n)).__name__ for n in {names}])"
    done = forks.python(code)
    assert done.stdout.strip() == str(["function"] * len(names)), done.stderr


# ---- what is refused ----

SMALL = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=16,
)


def other_model(name, **fields):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind = getattr(transformers, name)
    with torch.device("meta"):  # what is refused needs no weights
        return kind(kind.config_class(**fields))


HEADS = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
GEMMA_4 = {
    **SMALL,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
UNSUPPORTED = {
    "T5": (
        "T5ForConditionalGeneration",
        dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=16),
        "encoder-decoder",
    ),
    "BERT": ("BertForMaskedLM", HEADS, ""),
    "ESM with absolute positions": (
        "EsmForMaskedLM",
        {**HEADS, "pad_token_id": 1, "position_embedding_type": "absolute"},
        "positions must be rotary",
    ),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        dict(hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], vocab_size=16),
        "AttentionInterface",
    ),
    "BLOOM": ("BloomForCausalLM", dict(hidden_size=16, n_layer=1, n_head=2, vocab_size=16), "ALiBi"),
    "Falcon with ALiBi": (
        "FalconForCausalLM",
        dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, alibi=True),
        "ALiBi",
    ),
    "MPT": ("MptForCausalLM", dict(d_model=16, n_layers=1, n_heads=2, vocab_size=16), "ALiBi"),
    "Mamba": ("MambaForCausalLM", dict(hidden_size=16, num_hidden_layers=1, vocab_size=16), ""),
    "head_dim 520": ("LlamaForCausalLM", {**SMALL, "head_dim": 520}, "its head_dim is 520, at most 512"),
    "Llama 3.2 Vision": (
        "MllamaForCausalLM",
        {**SMALL, "pad_token_id": 0, "cross_attention_layers": [1], "rope_scaling": {"rope_type": "default"}},
        "cross-attention",
    ),
    "DiffLlama": ("DiffLlamaForCausalLM", SMALL, "keys of a layer twice"),
    "JetMoe": (
        "JetMoeForCausalLM",
        {**HEADS, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "computes with the keys",
    ),
}


@pytest.mark.parametrize("name, fields, message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_models(name, fields, message):
    model = other_model(name, **fields)
    before = model.config._attn_implementation, set(vars(model)), dict(model._forward_pre_hooks)
    with pytest.raises(NotImplementedError, match=f"{name}.*{message}"):
        turboquant.patch(model)
    assert (model.config._attn_implementation, set(vars(model)), dict(model._forward_pre_hooks)) == before


@pytest.mark.parametrize("name", names.NAMES)
def test_the_cache_by_each_name_in_every_version(name):
    """A cache may be given by each name, whichever this transformers has, without its warning of an old one."""
    model, inputs = turboquant.patch(tiny()), prompts(1, 6)
    taken = names.cache_argument(type(model).forward)
    assert taken in names.NAMES and names.cache_argument(model.forward) == taken
    cache = TurboQuantCache(model, EXACT)
    turboquant.patch(model, EXACT)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        out = model(inputs["input_ids"], **{name: cache})
        assert out[names.CACHE] is cache and cache.get_seq_length() == 6
        cache = TurboQuantCache(model)
        assert model.generate(**inputs, max_new_tokens=2, **{name: cache}).shape == (1, 8)
        assert cache.get_seq_length() == 7
    other = next(one for one in names.NAMES if one != name)
    assert names.given_cache({name: cache, other: None}) is cache and names.given_cache({other: None}) is None
    for renamed in (
        names.renamed({"a": 1, name: cache, other: None}, taken),
        names.renamed({"a": 1, name: cache}, taken),
    ):
        assert names.given_cache(renamed) is cache and renamed["a"] == 1 and renamed[taken] is cache
    both = {name: cache, other: cache}
    assert names.renamed(both, taken) is both


def test_other_wrong_arguments():
    model = tiny()
    before = state(model)
    for error, message, arguments in [
        (TypeError, "`model` must be a transformers model, got Linear", (torch.nn.Linear(2, 2),)),
        (ValueError, "did you mean 'default'", (model, "defalt")),
        (TypeError, "`spec` must be", (model, [4])),
        (ValueError, "`spec` must be a preset or a number of bits, got 7", (model, 7)),
        (ValueError, "`overrides` must name layers", (model, bare(overrides={7: {"sinks": 1}}))),
        (ValueError, "`key_bits`", (model, bare(key_bits=(4, 4, 4)))),
        (ValueError, "`head_dim` .*got 12", (tiny(head_dim=12),)),
    ]:
        with pytest.raises(error, match=message):
            turboquant.patch(*arguments)
    assert state(model) == before


def test_an_unpatched_model_does_not_take_the_cache():
    model = tiny()
    cache = TurboQuantCache(model, "default")
    with pytest.raises(RuntimeError, match=r"this model does not attend through it. Call turboquant\.patch\(model\)"):
        generate(model, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_cache_of_another_model():
    model = turboquant.patch(tiny(), EXACT)
    cache = generate(model).past_key_values
    wider = turboquant.patch(tiny(num_key_value_heads=4), EXACT)
    with pytest.raises(ValueError, match="must be a cache of this model, .*: this one has kv_heads 4 instead of 2"):
        wider(torch.tensor([[5], [6]]), past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds .* of 2 sequences"):
        model(torch.tensor([[5]]), past_key_values=cache)
    deeper = turboquant.patch(tiny(num_hidden_layers=4), EXACT)
    with pytest.raises(ValueError, match="must be a cache of this model, .*: this one has layers 4 instead of 3"):
        deeper(torch.tensor([[5], [6]]), past_key_values=TurboQuantCache(model.config, EXACT))
    shallower = turboquant.patch(tiny(num_hidden_layers=2), EXACT)
    with pytest.raises(ValueError, match="must be a cache of this model, .*: this one has layers 2 instead of 3"):
        shallower(torch.tensor([[5], [6]]), past_key_values=cache)
    # The decoder inside knows only the cache, not the model around it.
    with pytest.raises(ValueError, match="`.*` must be a cache of this model's 2 layers, got one of 3"):
        shallower.model(torch.tensor([[5], [6]]), past_key_values=cache)
    mistral = turboquant.patch(tiny("mistral, sliding"), EXACT)  # of the same shape: it would give a wrong answer
    with pytest.raises(ValueError, match=".*'mistral' instead of 'llama'"):
        mistral(torch.tensor([[5], [6]]), past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_a_configuration_that_changes_after_patching():
    model, plain = turboquant.patch(tiny(), EXACT), tiny()
    old = generate(model)[names.CACHE]
    if hasattr(model.config, "rope_parameters"):
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 500000.0}
    else:
        model.config.rope_theta = 500000.0
    assert torch.equal(generate(model).sequences, generate(plain).sequences)  # the rotary embedding is made already
    with pytest.raises(ValueError, match="must be a cache of this model, .*: this one has rope .*500000"):
        model(torch.tensor([[5], [6]]), **{names.CACHE: old})


def test_custom_masks_are_refused():
    model = turboquant.patch(tiny(), EXACT)
    with pytest.raises(NotImplementedError, match="layer 0: `attention_mask` must be"):
        model(torch.tensor([[5, 6]]), attention_mask=torch.zeros(1, 1, 2, 2), use_cache=True)
    with torch.no_grad():
        model(torch.tensor([[5, 6]]), attention_mask=torch.zeros(1, 1, 2, 2), use_cache=False)
    with pytest.raises(ValueError, match="got masked ones between tokens in 1 of 1 sequences"):
        model(torch.tensor([[5, 0, 6]]), attention_mask=torch.tensor([[1, 0, 1]]), use_cache=True)


def test_a_cache_of_the_model_has_what_it_was_patched_with():
    model = turboquant.patch(tiny(), CacheSpec(3, 2, window=0))
    assert TurboQuantCache(model).spec == CacheSpec(3, 2, window=0)
    assert TurboQuantCache(model, "default").spec == CacheSpec()
    with pytest.raises(TypeError, match=r"`spec` must be given with a configuration: call TurboQuantCache\(model\)"):
        TurboQuantCache(model.config)
    with pytest.raises(ValueError, match="`spec` must be given where `profile` is, got None"):
        TurboQuantCache(model, profile=profile_of("calibration.safetensors"))
    with pytest.raises(ValueError, match=r"`model` must be patched .*call turboquant.patch\(model, spec\) first"):
        TurboQuantCache(turboquant.unpatch(model))
    with pytest.raises(TypeError, match="`model` must be a model or its configuration"):
        TurboQuantCache("model")


def test_patch_refuses_the_name_of_a_tokenizer():
    model = tiny()
    with pytest.raises(TypeError, match="`tokenizer` must be a tokenizer of transformers or None, got str"):
        turboquant.patch(model, tokenizer="a-name")
    assert not hasattr(model, "_turboquant")


def test_files_that_patch_is_given_are_named_by_argument(tmp_path):
    (tmp_path / "x").write_bytes(b"no tensors")
    for spec in ("calibrated-3", "default"):
        with pytest.raises(FileNotFoundError, match="`profile` must be a profile, .*, which is not there"):
            turboquant.patch(tiny(), spec, profile=tmp_path / "none")
        with pytest.raises(ValueError, match="`profile` must be a profile.*not one that turboquant wrote"):
            turboquant.patch(tiny(), spec, profile=tmp_path / "x")


def test_a_cache_of_another_spec_warns_once():
    model, ids = turboquant.patch(tiny(), CacheSpec(3, 2)), prompts(1, 6)["input_ids"]
    other = TurboQuantCache(model, "default")
    with torch.no_grad():
        with pytest.warns(UserWarning, match="another spec, .* than the model was patched with"):
            model(ids, **{names.CACHE: other})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for cache in (other, other.fork(), TurboQuantCache(model), TurboQuantCache(model, CacheSpec(3, 2))):
                model(ids, **{names.CACHE: cache})
