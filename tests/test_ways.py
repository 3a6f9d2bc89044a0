"""Ways of running a model that no other test covers: a patched model whose window holds everything gives what it gives
without a patch. Generation is in test_generate.py, offloading in test_placement.py. `make test-placement`
runs those that need peft, accelerate, torchao or bitsandbytes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import transformers
from conftest import ROOT
from models import prompts, tiny, torch
from specs import bare

import turboquant
from turboquant import TurboQuantCache
from turboquant.models.names import CACHE

DEMO = str(ROOT / "demo" / "turboquant_demo")
HOLDS_ALL = bare(4, 4, window=1024)
GREEDY: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
TEXTS = ["The keeper of the lighthouse", "In the autumn, when the ships"]


def demo() -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return model, tokenizer


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pipeline(batch: int) -> None:
    model, tokenizer = demo()
    run = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    want = run(TEXTS, batch_size=batch, **GREEDY)
    turboquant.patch(run.model, HOLDS_ALL)
    assert run(TEXTS, batch_size=batch, **GREEDY) == want
    assert run(TEXTS[0], **GREEDY) == want[0]


def test_a_streamer_in_a_thread() -> None:
    model, tokenizer = demo()
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    want = model.generate(**inputs, **GREEDY)
    turboquant.patch(model, HOLDS_ALL)
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=model.generate, kwargs=dict(**inputs, **GREEDY, streamer=streamer))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(want[0, inputs["input_ids"].shape[1] :]) and text


def test_a_classifier() -> None:
    config = transformers.LlamaConfig(**tiny().config.to_diff_dict() | dict(num_labels=3))
    torch.manual_seed(0)
    model, inputs = transformers.LlamaForSequenceClassification(config).eval(), prompts(2, 20, (0, 6))
    with torch.no_grad():
        want = model(**inputs).logits
        turboquant.patch(model, HOLDS_ALL)
        torch.testing.assert_close(model(**inputs).logits, want, rtol=0, atol=5e-5)


@pytest.mark.parametrize("how", ["LoRA before", "LoRA after", "prompt tuning"])
def test_an_adapter(how: str) -> None:
    """With the real peft; `test_wrappers` has a class that stands in for it."""
    peft = pytest.importorskip("peft")
    if how == "prompt tuning":
        adapter = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    else:
        modules = ["q_proj", "k_proj", "v_proj"]
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=modules, init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, adapter).eval()

    # peft puts tuned prompts in front of the padding, and padding between tokens is refused
    inputs = prompts(2, 20, (0, 0 if how == "prompt tuning" else 6))
    want, plain = (model.generate(**inputs, **GREEDY) for model in (adapted(tiny()), tiny()))
    model = adapted(turboquant.patch(tiny(), HOLDS_ALL)) if how == "LoRA after" else adapted(tiny())
    if how != "LoRA after":
        turboquant.patch(model, HOLDS_ALL)
    got = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(got.sequences, want) and not torch.equal(want, plain)
    assert type(got[CACHE]) is TurboQuantCache
    if how == "prompt tuning":
        with pytest.raises(ValueError, match="got masked ones between tokens in 1 of 2 sequences"):
            model.generate(**prompts(2, 20, (0, 6)), **GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits", "4 bits", "torchao"])
def test_quantised_weights(kind: str, tmp_path: Any) -> None:
    pytest.importorskip("torchao" if kind == "torchao" else "bitsandbytes")
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        weights = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        weights = transformers.BitsAndBytesConfig(load_in_8bit=kind == "8 bits", load_in_4bit=kind == "4 bits")
    tiny(intermediate_size=128).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=weights, device_map="cpu")
    inputs = prompts(2, 20, (0, 6))
    want = model.generate(**inputs, **GREEDY)
    got = turboquant.patch(model, HOLDS_ALL).generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(got.sequences, want) and type(got[CACHE]) is TurboQuantCache


@pytest.mark.slow
def test_a_trainer(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    ids = prompts(8, 30)["input_ids"]
    rows = [dict(input_ids=row, labels=row) for row in ids]
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=0
    )
    found = []
    for patched in (False, True):
        model = turboquant.patch(tiny(), HOLDS_ALL) if patched else tiny()
        trainer = transformers.Trainer(model, options, train_dataset=rows, eval_dataset=rows)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        found.append((before, trainer.evaluate()["eval_loss"]))
    assert found[1] == pytest.approx(found[0], abs=1e-4) and found[0][1] < found[0][0]
