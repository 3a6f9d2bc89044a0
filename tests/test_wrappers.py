"""Patched models inside a PeftModel, for which a class with the same methods stands in, and continuous batching."""

from __future__ import annotations

import pytest
from adapters import PeftModel
from models import prompts, tiny, torch
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.models import names

EXACT = bare(4, 4, sinks=2, window=256)


@pytest.mark.parametrize("peft_type", ["LORA", "PROMPT_TUNING"])
def test_patch_and_unpatch_reach_the_model_inside(peft_type):
    wrapper, inputs = PeftModel(tiny(), peft_type), prompts(2, 9, (3, 0))
    want = wrapper.generate(**inputs)
    assert type(want[names.CACHE]) is DynamicCache
    assert turboquant.patch(wrapper, EXACT) is wrapper
    got = wrapper.generate(**inputs)
    assert type(got[names.CACHE]) is TurboQuantCache and got[names.CACHE].spec == EXACT
    assert torch.equal(got.sequences, want.sequences)
    assert turboquant.unpatch(wrapper) is wrapper
    assert not hasattr(wrapper.get_base_model(), "_turboquant")
    assert type(wrapper.generate(**inputs)[names.CACHE]) is DynamicCache


@pytest.mark.parametrize("peft_type", ["PREFIX_TUNING", "CARTRIDGE"])
def test_prefix_tuning_is_refused(peft_type):
    wrapper, inputs = PeftModel(tiny(), peft_type), prompts(1, 9)
    with pytest.raises(NotImplementedError, match="PeftModel: prefix tuning .* use the model without a patch"):
        turboquant.patch(wrapper)
    assert not hasattr(wrapper.base_model, "_turboquant")
    want = wrapper.generate(**inputs).sequences
    turboquant.patch(wrapper.base_model)
    with pytest.raises(NotImplementedError, match=r"prefix tuning .*turboquant\.unpatch\(model\)"):
        wrapper.generate(**inputs)
    assert torch.equal(wrapper.generate(**inputs, use_cache=False).sequences, want)
    assert type(wrapper.base_model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)[names.CACHE]) is (
        TurboQuantCache
    )
    turboquant.unpatch(wrapper)
    assert torch.equal(wrapper.generate(**inputs).sequences, want)


def test_another_wrapper_is_told_what_it_holds():
    wrapper = torch.nn.Sequential(tiny())
    with pytest.raises(TypeError, match="got Sequential, which holds a LlamaForCausalLM: patch that one"):
        turboquant.patch(wrapper)


METHODS = ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"]


@pytest.mark.parametrize("method", METHODS)
def test_continuous_batching_is_refused_until_unpatch(method):
    model = tiny()
    if not hasattr(model, method):
        pytest.skip("this transformers has no such method")
    turboquant.patch(model)
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM: continuous batching .*unpatch\(model\) first"):
        getattr(model, method)([[5, 6, 7], [8, 9]])
    turboquant.unpatch(model)
    assert method not in vars(model) and getattr(model, method).__func__ is getattr(type(model), method)


def test_a_paged_cache_by_name_is_refused():
    model = tiny()
    if not hasattr(model, METHODS[2]):
        pytest.skip("this transformers has no cache_implementation='paged'")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        turboquant.patch(model).generate(**prompts(1, 5), max_new_tokens=2, cache_implementation="paged")
