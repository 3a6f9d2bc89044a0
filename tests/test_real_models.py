"""Real models, where `make real-models` has made them: they are what they should be, and fewer bits diverge more."""

from __future__ import annotations

import torch
from conftest import real_model
from specs import bare
from transformers import AutoModelForCausalLM, AutoTokenizer

from turboquant import evaluate
from turboquant.hf.evaluation import text_windows

TEXT = """The quality of a compressed cache shows in what a model says next. A window of a few hundred tokens is enough
to tell one width from another: each bit less multiplies the divergence by four or five. The text may be about anything,
as long as it has words in an order that a reader would expect, and goes on for long enough that keys of far tokens
matter.
"""


def test_smollm2_is_a_trained_model_and_widths_are_ordered():
    folder = real_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = text_windows(TEXT, tokenizer, 1, 64)
    found = [evaluate(model, windows, bare(bits, bits, sinks=4), generate=16) for bits in (4, 3, 2)]
    question = tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model(input_ids=question).logits[0, -1].argmax()
    assert tokenizer.decode(answer) == " Paris"  # the weights were read as they were meant
    assert found[0].kl_divergence < found[1].kl_divergence / 2 < found[2].kl_divergence / 4
