"""Widths by layer and side from costs that are measured with the moments, and budgets of memory and quality."""

from __future__ import annotations

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import turboquant
from turboquant import CacheSpec, Profile, TurboQuantCache, preset
from turboquant.evaluation import evaluate_all
from turboquant.evaluation.decoder import divergence_from
from turboquant.measured import shared_widths
from turboquant.measured.budget import _Choice, forecast, solve
from turboquant.measured.choice import side_widths
from turboquant.measuring.costs import side_costs, with_costs
from turboquant.measuring.used import own_moments
from turboquant.models.texts import OF_COSTS, kinds, sample
from turboquant.sizes import model_of, packed_parts

DEMO = str(Path(__file__).parents[1] / "demo/turboquant_demo")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def profile(model, tokenizer):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TURBOQUANT_CACHE", "")
        return turboquant.measure(model, tokenizer, budget=True)


def widths(cache):
    return np.array([[layer.spec.key_bits, layer.spec.value_bits] for layer in cache.packed_layers])


# ---- costs ----


def test_costs_are_those_of_the_texts_of_the_package(model, tokenizer, profile):
    """Each text has the same weight, whatever its costs add up to. The sum is the geometric mean of the texts' sums."""
    each = [side_costs(model, ids[:, :OF_COSTS], profile.moments, i, 128)
            for i, ids in enumerate(kinds(model, tokenizer))]  # fmt: skip
    want = np.mean([one / one.sum() for one in each], 0) * np.exp(np.mean([np.log(one.sum()) for one in each]))
    np.testing.assert_allclose(profile.moments.costs, want, rtol=1e-3)


def test_a_profile_keeps_costs_and_reasons(profile, tmp_path):
    profile.save(tmp_path / "costs")
    np.testing.assert_array_equal(Profile.load(tmp_path / "costs").moments.costs, profile.moments.costs)
    assert Profile.load(tmp_path / "costs").moments.divergence == profile.moments.divergence
    why = dataclasses.replace(profile.moments.without_costs(), no_costs="its weights are quantised")
    Profile(why).save(tmp_path / "none")
    back = Profile.load(tmp_path / "none").moments
    assert back.costs is None and back.no_costs == "its weights are quantised" and "no_costs=" in repr(back)


@pytest.mark.parametrize("costs, message", [
    (np.zeros((4, 3), np.float32), r"`costs` must be float32 \[4, 2\], got float32 \[4, 3\]"),
    (np.zeros((4, 2)), r"`costs` must be float32 \[4, 2\], got float64 \[4, 2\]"),
    (np.full((4, 2), -1, np.float32), "`costs` must be finite and not negative"),
    (np.full((4, 2), np.nan, np.float32), "`costs` must be finite and not negative"),
])  # fmt: skip
def test_costs_that_are_none(profile, costs, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(profile.moments, costs=costs)


def test_a_model_without_a_backward_pass_gets_uniform_widths(model, tokenizer, profile, monkeypatch, caplog):
    """The reason is one line of the log, and is in the profile."""
    text = kinds(model, tokenizer)

    def reason(changed, texts=text):
        found = with_costs(profile.moments.without_costs(), changed, texts)
        assert found.costs is None
        return found.no_costs

    assert reason(model, []) == "it has no text"
    assert reason(model, [text[0][:, :132]]) == "its texts have fewer than 133 tokens"
    with monkeypatch.context() as patched:
        patched.setattr(model, "is_quantized", True, raising=False)
        assert reason(model) == "its weights are quantised"
    with monkeypatch.context() as patched:
        patched.setattr(model, "get_output_embeddings", lambda: None)
        assert reason(model).startswith("it has no head")
    with torch.inference_mode():
        inferred = AutoModelForCausalLM.from_config(model.config)
    assert reason(inferred) == "its weights were made in inference mode"

    def failing(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More.")

    monkeypatch.setattr("turboquant.measuring.costs.gradients", failing)
    monkeypatch.setenv("TURBOQUANT_CACHE", "")
    found = turboquant.measure(model, tokenizer)
    why = "its backward pass failed (OutOfMemoryError: CUDA out of memory)"
    assert found.moments.no_costs == why and found.moments.costs is None
    assert caplog.messages.count(f"all layers of LlamaForCausalLM get the same widths: {why}") == 1
    cache = TurboQuantCache(model, "compact", profile=found)
    assert (widths(cache) == 3).all()
    assert f"the same widths in all layers: {why}" in str(cache.report())


def test_costs_are_measured_in_inference_mode(model, tokenizer, profile):
    with torch.inference_mode():
        found = with_costs(profile.moments.without_costs(), model, [kinds(model, tokenizer)[0][:, :OF_COSTS]])
    assert found.costs is not None and not found.no_costs
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_backward_pass_in_another_thread(model, tokenizer, profile, monkeypatch):
    """Costs are the same if layers run again in another thread: autograd has one for each GPU."""
    grad, ids = torch.autograd.grad, kinds(model, tokenizer)[0][:, :200]

    def elsewhere(*args, **options):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(grad, *args, **options).result()

    want = side_costs(model, ids, profile.moments, 0, 128)
    monkeypatch.setattr(torch.autograd, "grad", elsewhere)
    np.testing.assert_array_equal(side_costs(model, ids, profile.moments, 0, 128), want)


def test_another_thread_may_use_a_model_whose_costs_are_measured(model, tokenizer, profile, monkeypatch):
    ids, found = kinds(model, tokenizer)[0][:, :200], []
    grad, want = torch.autograd.grad, model(ids).logits

    def meanwhile(*args, **options):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(torch.no_grad()(model), ids).result().logits)
        return grad(*args, **options)

    alone = side_costs(model, ids, profile.moments, 0, 128)
    monkeypatch.setattr(torch.autograd, "grad", meanwhile)
    np.testing.assert_array_equal(side_costs(model, ids, profile.moments, 0, 128), alone)
    torch.testing.assert_close(found, [want])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_costs_are_measured_on_a_gpu(tokenizer, profile, monkeypatch):
    monkeypatch.setenv("TURBOQUANT_CACHE", "")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval().cuda()
    found = turboquant.measure(model, tokenizer, budget=True).moments
    assert found.costs is not None, found.no_costs
    np.testing.assert_allclose(found.costs, profile.moments.costs, rtol=0.3)


# ---- widths ----


@pytest.mark.parametrize("name, bits", [("near-lossless", 5), ("default", 4), ("compact", 3), ("tiny", 2)])
def test_presets_share_their_bits(model, profile, name, bits):
    """Widths are at most one bit from the average, and take as many bytes as one width."""
    plain = TurboQuantCache(model, preset(name).with_(uniform=True), profile=profile)
    cache = TurboQuantCache(model, name, profile=profile)
    found = widths(cache)
    assert found.sum() == bits * found.size and abs(found - bits).max() == 1 and (widths(plain) == bits).all()
    costs = profile.moments.costs
    assert (np.diff(found.ravel()[np.argsort(costs.ravel())]) >= 0).all()
    assert all(layer.spec.tries == (3 if max(row) > 2 else 0) for layer, row in zip(cache.packed_layers, found))
    ids = torch.randint(4096, (1, 300), generator=torch.Generator().manual_seed(1))
    turboquant.patch(model, name, profile=profile)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.warns(UserWarning, match="has another spec"):
            model(ids, past_key_values=plain)
    turboquant.unpatch(model)
    assert cache.nbytes == plain.nbytes
    assert f"{bits - 1} to {bits + 1} bits by layer and side, {bits} on average" in str(cache.report())


@pytest.mark.parametrize("spec", [
    CacheSpec(uniform=True), CacheSpec(window=0), CacheSpec(4, 3), CacheSpec(6, 6), CacheSpec(3.5, 3.5),
    CacheSpec(centre="none", metric="none"), CacheSpec(overrides={1: {"key_bits": 5}}),
    CacheSpec(overrides={1: {"tries": 0}}), CacheSpec(budget=3, method="none"), preset("paper-mse-4"),
])  # fmt: skip
def test_specs_of_uniform_widths(spec):
    assert spec.shared_bits is None


def test_other_fields_may_be_overridden():
    assert CacheSpec(3, 3, window=32, overrides={-1: {"seed": 3}}).shared_bits == 3


def test_uniform_is_a_bool(model):
    with pytest.raises(TypeError, match="`uniform` must be True or False, got 1"):
        CacheSpec(uniform=1)
    with pytest.raises(ValueError, match=re.escape("`overrides[0]` must name fields among")):
        CacheSpec(overrides={0: {"uniform": True}})


def test_layers_of_a_kind_share_their_bits(profile):
    """Sliding layers hold few tokens: bits that they leave must not go to layers that hold all."""
    spec, specs = preset("compact"), [preset("compact").settled()] * 4
    for kinds_of_layers in (["full"] * 2 + ["sliding"] * 2, ["sliding", "full"] * 2, ["full"] * 4):
        found = shared_widths(spec, specs, profile.moments, kinds_of_layers)
        for kind in {*kinds_of_layers}:
            bits = [(one.key_bits, one.value_bits) for one, k in zip(found, kinds_of_layers) if k == kind]
            assert np.mean(bits) == 3


def test_patch_switches_widths_off(model, profile):
    turboquant.patch(model, "compact", profile=profile, uniform=True)
    assert (widths(TurboQuantCache(model)) == 3).all()
    turboquant.patch(model, "compact", profile=profile)
    assert (widths(TurboQuantCache(model)) != 3).any()
    turboquant.unpatch(model)


def test_files_keep_widths(model, profile, tmp_path):
    turboquant.patch(model, "tiny", profile=profile)
    ids = torch.randint(4096, (1, 300), generator=torch.Generator().manual_seed(1))
    cache = TurboQuantCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache")
        back = TurboQuantCache.load(tmp_path / "cache", model, profile=profile)
        assert [layer.spec for layer in back.packed_layers] == [layer.spec for layer in cache.packed_layers]
        assert "1 to 3 bits by layer and side, 2 on average" in str(back.report())
        outs = [model(ids[:, :150], past_key_values=one).logits for one in (cache, back)]
    turboquant.unpatch(model)
    assert torch.equal(*outs)


def test_caches_of_other_widths_are_not_joined(model, profile):
    other = Profile(dataclasses.replace(profile.moments, costs=profile.moments.costs[::-1].copy()))
    caches = [TurboQuantCache(model, "compact", profile=one) for one in (profile, other)]
    turboquant.patch(model, "compact", profile=profile)
    with torch.no_grad():
        for cache in caches:
            model(torch.arange(200)[None], past_key_values=cache)
    turboquant.unpatch(model)
    with pytest.raises(ValueError, match=re.escape("join: `caches[1]` must have the widths of the first in layer 0")):
        TurboQuantCache.join(caches)


def test_widths_are_bounded():
    costs = np.array([[1e6, 1], [1, 1e-6]])
    assert side_widths(costs, 3, least=2, most=4).tolist() == [[4, 3], [3, 2]]


# ---- budgets ----


@pytest.mark.parametrize("tokens", [300, 5000, 131072])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_memory_is_never_exceeded_nor_left(model, profile, tokens, share):
    """The chosen widths fit into the memory, and use it to 10 % and 60,000 bytes."""
    described = model_of(model.config)
    plain = packed_parts(described, CacheSpec(6, 6, uniform=True), 1, tokens, 4)
    memory = int(share * sum(plain.values()))
    least = sum(packed_parts(described, CacheSpec(2, 2, uniform=True), 1, tokens, 4).values())
    if memory < 1.05 * least + 50_000:
        with pytest.raises(ValueError, match="`memory` must be at least"):
            solve(described, CacheSpec(), profile.moments, tokens=tokens, memory=least // 2, item_bytes=4)
        return
    found = solve(described, CacheSpec(), profile.moments, tokens=tokens, memory=memory, item_bytes=4)
    assert found.memory <= memory < found.memory * 1.1 + 60_000
    assert 2 <= found.bits <= 6 and found.tokens == tokens


def test_a_cache_stays_within_its_budget(model, profile, caplog):
    """It does so after a prompt, and token by token."""
    memory = 900_000
    turboquant.patch(model, memory=memory, tokens=420, profile=profile)
    said = caplog.messages[-1]
    assert re.search(r"LlamaForCausalLM gets \d\.\d\d bits on average, 0\.\d MiB for 420 tokens, an expected", said)
    ids = torch.randint(4096, (1, 420), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for pieces in ([420], [300, *[1] * 120]):
            cache = TurboQuantCache(model)
            for piece in ids.split(pieces, 1):
                model(piece, past_key_values=cache)
            assert 0.7 * memory < cache.nbytes <= memory
    turboquant.unpatch(model)


def test_a_quality_is_met_with_the_fewest_bits(model, profile):
    described, moments = model_of(model.config), profile.moments
    found = [solve(described, CacheSpec(), moments, tokens=5000, quality=quality) for quality in (1e-4, 1e-3, 1e-2)]
    assert all(one.quality <= quality for one, quality in zip(found, (1e-4, 1e-3, 1e-2)))
    assert found[0].bits > found[1].bits > found[2].bits and found[0].memory > found[2].memory
    memory = found[1].memory
    again = solve(described, CacheSpec(), moments, memory=memory, quality=1e-3)
    assert again.tokens >= 5000 and again.memory <= memory and again.spec == found[1].spec
    three, four = (forecast(moments.costs, np.full((4, 2), bits), 3, [64] * 4) for bits in (3, 4))
    assert three > four


@pytest.mark.parametrize("given, message", [
    (dict(tokens=100), "two of `tokens`, `memory` and `quality` must be given, got tokens=100"),
    (dict(tokens=100, memory=10**6, quality=0.1), "two of `tokens`, `memory` and `quality` must be given"),
    (dict(tokens=100, memory=1000), "`memory` must be at least [0-9,]+ bytes for 100 tokens"),
    (dict(memory=1000, quality=0.1), "`memory` must be at least [0-9,]+ bytes, got 1,000"),
    (dict(tokens=100, quality=1e-9), "`quality` must be at least .* nats, the divergence with 6 bits, got 1e-09"),
    (dict(tokens=100, quality=0.0), "`quality` must be a divergence above 0 in nats, got 0.0"),
    (dict(tokens=100, memory=10**6, spec="paper-mse-4"), "`spec` must leave widths to the library"),
    (dict(tokens=100, memory=10**6, bits=3), "`bits` must be None where `memory` or `quality` chooses them, got 3"),
    (dict(tokens=100, memory="8 XB"), "`memory` must be a size above 0 such as 40GB or 512MiB, got '8 XB'"),
    (dict(tokens=0, memory="1MiB"), "patch: `tokens` must be"),
])  # fmt: skip
def test_budgets_that_are_refused(model, profile, given, message):
    with pytest.raises(ValueError, match=message):
        turboquant.patch(model, profile=None if "paper" in given.get("spec", "") else profile, **given)
    assert not hasattr(model, "_turboquant")


def test_a_forecast_starts_from_a_divergence_that_is_measured(model, profile, tokenizer):
    """At the bits of `compact` it is that divergence; at those of other presets it is near what is measured there."""
    described, moments = model_of(model.config), profile.moments
    (ids,) = sample(model, tokenizer, None, model.config.max_position_embeddings).ids
    names = ("near-lossless", "default", "compact", "tiny")
    found = evaluate_all(model, ids, dict(zip(names, names)), profile=profile, generate=0)
    choice = _Choice(described, CacheSpec(), moments, 4)
    forecasts = [choice.quality(bits * moments.costs.size) for bits in (5, 4, 3, 2)]
    assert forecasts[2] == pytest.approx(moments.divergence)
    for name, expected in zip(names, forecasts):
        assert expected / 2.4 < found[name].kl_divergence < 2.4 * expected, name  # a bit is a factor of 4 to 5
    again = divergence_from(model, ids, "compact", profile, len(ids[0]) // 4)
    assert again == pytest.approx(moments.divergence, rel=1e-4)
    bare = dataclasses.replace(moments, divergence=None)
    assert solve(described, CacheSpec(), bare, tokens=5000, memory=3_000_000).quality is None
    with pytest.raises(ValueError, match="`quality` must be None for a model without a divergence"):
        solve(described, CacheSpec(), bare, tokens=5000, quality=0.1)


def test_patch_measures_the_divergence_that_a_profile_lacks(model, profile, tokenizer, caplog):
    bare = Profile(dataclasses.replace(profile.moments, divergence=None))
    turboquant.patch(model, tokens=5000, quality=0.01, profile=bare, tokenizer=tokenizer)
    turboquant.unpatch(model)
    assert "to measure how much it diverges" in caplog.text
    said = caplog.messages[-1]
    turboquant.patch(model, tokens=5000, quality=0.01, profile=profile)
    turboquant.unpatch(model)
    assert caplog.messages[-1] == said and caplog.text.count("to measure how much") == 1


def test_a_model_keeps_its_divergence(model, profile, tokenizer, monkeypatch, caplog):
    """It is measured for the first budget of a model without a profile, and for no other."""
    bare = dataclasses.replace(profile.moments, divergence=None)
    monkeypatch.setattr("turboquant.measuring.moments.measure_model", lambda *_, **__: bare)
    for quality in (0.01, 0.001):
        turboquant.patch(model, tokens=5000, quality=quality, tokenizer=tokenizer)
        turboquant.unpatch(model)
    assert caplog.text.count("to measure how much it diverges") == 1
    assert own_moments(model, tokenizer).divergence == pytest.approx(profile.moments.divergence, rel=1e-4)


@pytest.mark.parametrize("changed, message", [
    (dict(divergence=0.0), "`divergence` must be a finite float above 0, or None, got 0.0"),
    (dict(divergence=0.1, costs=None), "`divergence` must be None without costs, got 0.1"),
])  # fmt: skip
def test_divergences_that_are_none(profile, changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(profile.moments, **changed)


def test_without_costs_a_budget_has_uniform_widths(model, profile):
    none = profile.moments.without_costs()
    bare = Profile(dataclasses.replace(none, no_costs="its weights are quantised"))
    found = solve(model_of(model.config), CacheSpec(), bare.moments, tokens=5000, memory=3_000_000)
    assert found.quality is None and "divergence" not in str(found)
    with pytest.raises(ValueError, match="`quality` must be None for a model without costs"):
        turboquant.patch(model, profile=bare, tokens=5000, quality=0.1)


def test_calc_chooses_bits(profile, tmp_path, capsys):
    from turboquant.cli import main

    profile.save(tmp_path / "demo.safetensors")
    told = ["calc", DEMO, "--dtype", "float32", "--profile", str(tmp_path / "demo.safetensors")]
    assert main([*told, "--tokens", "8192", "--memory", "4MiB"]) == 0
    found = re.search(r"Bits by layer and side for each sequence: (\S+) bits on average, (\S+) MiB for 8,192 tokens",
                      capsys.readouterr().out)  # fmt: skip
    assert 2 < float(found[1]) < 6 and 3.5 < float(found[2]) <= 4
    assert main([*told, "--memory", "4MiB", "--quality", "0.01"]) == 0
    assert "an expected divergence of 0.0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["calc", "llama-3-8b", "--quality", "0.1"])
    assert "--profile must be a file of `turboquant measure` where --quality is given" in capsys.readouterr().err


def test_costs_are_tried_again(model, tokenizer, tmp_path, monkeypatch):
    """What was in the way once, such as too little memory, does not make a model's widths uniform for good."""
    from turboquant.measuring import costs

    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(costs, "side_costs", lambda *_: 1 / 0)
        found = turboquant.measure(model, tokenizer).moments
    assert found.costs is None and "ZeroDivisionError" in found.no_costs
    (file,) = tmp_path.iterdir()
    assert Profile.load(file).moments.no_costs == found.no_costs
    again = turboquant.measure(model, tokenizer).moments
    assert again.costs is not None and not again.no_costs and again.tokens == found.tokens
    np.testing.assert_array_equal(Profile.load(file).moments.costs, again.costs)


def test_costs_are_measured_when_a_spec_needs_them(tokenizer, monkeypatch):
    """Specs of one width need the moments alone, which take half the time. Moments are not measured again for costs."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    turboquant.patch(model, CacheSpec(uniform=True), tokenizer=tokenizer)
    first = TurboQuantCache(model)._shared.moments
    assert first.costs is None and not first.no_costs
    monkeypatch.setattr("turboquant.measuring.moments._measured", None)  # the forward
    turboquant.patch(model, CacheSpec(), tokenizer=tokenizer)
    cache = TurboQuantCache(model)
    np.testing.assert_array_equal(widths(cache), widths(TurboQuantCache(model)))
    assert cache._shared.moments.costs is not None and cache._shared.moments.layers is first.layers
    turboquant.patch(model, CacheSpec(uniform=True), tokenizer=tokenizer)
    assert len(np.unique(widths(TurboQuantCache(model)))) == 1
    assert own_moments(model, tokenizer) is cache._shared.moments
