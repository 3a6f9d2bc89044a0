"""Real models, if `make real-models` has prepared them: their weights load correctly, and fewer bits diverge more."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, real_model, shared_file
from models import with_key_biases
from profiles import profile_of
from specs import bare
from transformers import AutoModelForCausalLM, AutoTokenizer

from turboquant import CacheSpec, calibrate, evaluate, patch
from turboquant.calibration import trial
from turboquant.evaluation.decoder import evaluate_all, text_windows
from turboquant.measuring.moments import measure_model
from turboquant.models import texts as text_of_package

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
    found = [evaluate(model, windows, bare(bits, bits, sinks=4), generate=0) for bits in (4, 3, 2)]
    question = tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model(input_ids=question).logits[0, -1].argmax()
    assert tokenizer.decode(answer) == " Paris"  # the weights were read correctly
    assert found[0].kl_divergence < found[1].kl_divergence / 2 < found[2].kl_divergence / 4


def test_a_tokenizer_of_letters_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    check = import_module("real_models").check_words
    check(SimpleNamespace(tokenize=str.split))
    with pytest.raises(RuntimeError, match=r"must have words as tokens, got \['T', 'h', 'e', ' '"):
        check(SimpleNamespace(tokenize=list))


@pytest.mark.slow
@pytest.mark.parametrize("norms", [(605, 921, 22), (424, 424, 424)], ids=["as Qwen2.5-7B", "every layer"])
def test_smollm2_with_large_key_biases(norms):
    """Large key biases cost little at 4 and 3 bits with a wave. Its moments are from the package's text, not from the
    text measured on."""
    folder = real_model("smollm2")
    model = with_key_biases(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), *norms)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (ROOT / "demo" / "turboquant_demo" / "a_christmas_carol.txt").read_text(encoding="utf-8")
    windows = text_windows(text, tokenizer, 1, 512)
    for bits, most in ((4, 0.03), (3, 0.1)):
        spec = bare(bits, bits, sinks=4, centre="wave", metric="query")
        patch(model, spec, tokenizer=tokenizer)
        assert evaluate(model, windows, spec, generate=0).kl_divergence < most


@pytest.fixture(scope="module")
def smollm2():
    folder = real_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_a_calibration_on_one_half_of_a_book_serves_the_other(smollm2, monkeypatch):
    """At as many bits, a calibration does not diverge more on held-out text than no calibration, to 5 % on the other
    half and on Python source; with a window, it diverges much less on the book.
    Two methods are tried and texts are short, to save time. No spec has the variance term.
    """
    model, tokenizer = smollm2
    monkeypatch.setattr(text_of_package, "OF_A_KIND", 160)
    monkeypatch.setattr(trial, "_METHODS", [(method, 32) for method in ("none", "moments+widths")])
    text = shared_file("data/books_val.txt").read_text(encoding="utf-8")
    windows = text_windows(text[-700_000:], tokenizer, 3, 256).split(1)
    found = calibrate(
        model, windows[:2], held_out=windows[2:], averages=(3,), tokenizer=tokenizer, sensitivity_batches=1
    )
    specs: dict[str, CacheSpec] = {}
    for window in found.calibration.windows:
        here = {one.method: one for one in found.calibration.trials if one.window == window}
        (best,) = (one for one in here.values() if one.chosen)
        assert best.kl_divergence <= here["none"].kl_divergence and best.elsewhere <= 1.05
        specs |= {
            f"calibrated, {window}": CacheSpec(budget=3, window=window, variance_term=False),
            f"{window}": CacheSpec(3, 3, window=window, variance_term=False),
        }
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    source = import_module("texts").text_of("source")[:200_000]
    others = {
        "book": text_windows(text[:400_000], tokenizer, 2, 256),
        "source": text_windows(source, tokenizer, 1, 256),
    }
    for name, other in others.items():
        kl = {spec: one.kl_divergence for spec, one in
              evaluate_all(model, other, specs, profile=profile_of(found), generate=0).items()}  # fmt: skip
        most = 0.7 if name == "book" else 1.05
        assert kl["calibrated, 0"] < 1.05 * kl["0"] and kl["calibrated, 128"] < most * kl["128"], (name, kl)


@pytest.mark.slow
def test_costs_of_sides_of_smollm2_are_what_they_do(smollm2):
    """The costs of values in layers 4 to 8 predict the divergence that 3 bits there add. The product of mean lengths
    and mean gradients would be three times too high."""
    model, tokenizer = smollm2
    windows = text_windows((ROOT / "turboquant/data/moments/prose.txt").read_text(encoding="utf-8"), tokenizer, 2, 256)
    moments = measure_model(model, tokenizer, costs=False)
    costs = sum(trial.side_costs(model, one, moments, 0) for one in windows.split(1)) / 2
    layers = range(model.config.num_hidden_layers)
    quiet = {i: {"key_bits": 6, "value_bits": 6} for i in layers}
    coarse = {i: {"key_bits": 6, "value_bits": 3} for i in range(4, 9)}
    specs = {"quiet": CacheSpec(overrides=quiet, sinks=4), "coarse": CacheSpec(overrides={**quiet, **coarse}, sinks=4)}
    kl = evaluate_all(model, windows, specs, everything_packed=True, generate=0)
    added = kl["coarse"].kl_divergence - kl["quiet"].kl_divergence
    assert 0.6 < added / (costs[4:9, 1].sum() * 0.035) < 1.6  # 0.035: the error of 3 bits, of unit variance
