"""Specs with a budget: bit widths by layer and side, methods tried on held-out text, and what files keep of that."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from esm_models import protein, tiny_esm
from models import prompts, tiny
from profiles import calibrate, profile_of
from profiles import load as load_calibration

import turboquant
from turboquant import CacheSpec, TurboQuantCache, preset
from turboquant.calibration import trial
from turboquant.calibration.unfinished import Unfinished
from turboquant.esm import protein_batches
from turboquant.evaluation.decoder import evaluate_all
from turboquant.measured import layer_specs
from turboquant.measured.choice import POWER, SECOND_BIT, Trial, chosen, side_widths, table, uniform_widths
from turboquant.measured.distortion import distortions
from turboquant.models import texts as text

torch = pytest.importorskip("torch")


class Words:
    """A tokenizer of the tiny models: a token for each character."""

    bos_token_id = 1
    all_special_ids = (0, 1)

    def __call__(self, text, **_):
        return {"input_ids": [2 + ord(letter) % 94 for letter in text]}


@pytest.fixture(scope="module", autouse=True)
def short_texts():
    """Takes 300 tokens of each kind of text of the package, so that a window leaves some of them packed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text, "OF_A_KIND", 300)
        yield


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def texts():
    return [prompts(1, 160, seed=s)["input_ids"] for s in range(5)]


@pytest.fixture(scope="module")
def found(model, texts, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TURBOQUANT_CACHE", str(tmp_path_factory.mktemp("moments")))
        return calibrate(model, texts[:4], held_out=texts[4:], averages=(4, 3, 2.5), tokenizer=Words())


# ---- widths ----


@pytest.mark.parametrize("average", [2, 2.4, 3, 3.5, 3.9, 6])
def test_the_same_width_everywhere_with_keys_first(average):
    widths = uniform_widths(average, 10)
    assert widths.shape == (10, 2) and widths.sum() == round(20 * average)
    assert np.ptp(widths[:, 0]) <= 1 and np.ptp(widths[:, 1]) <= 1 and (widths[:, 0] >= widths[:, 1]).all()
    if average == 2.4:  # 8 of 10 layers have 3 bits, and not the first 8
        assert np.flatnonzero(widths[:, 0] == 2).tolist() != [8, 9]


def test_sharing_among_sides_is_greedy_and_best(rng):
    costs = rng.gamma(0.3, size=(2, 2))

    eden = {b: d / (1 - d) for b, d in distortions().items() if b}
    eden[1] += (SECOND_BIT - 1) * (eden[1] - eden[2])

    def loss(widths):
        return sum(costs[at] ** POWER * eden[int(widths[at])] for at in np.ndindex(2, 2))

    for total in range(8, 25):
        widths = side_widths(costs, total / 4)
        each = (np.array(w).reshape(2, 2) for w in itertools.product(range(1, 7), repeat=4) if sum(w) == total)
        assert widths.sum() == total and widths.min() >= 1 and widths.max() <= 6
        assert loss(widths) == pytest.approx(min(map(loss, each)), rel=1e-12)
    assert side_widths(np.zeros((3, 2)), 2.5).sum() == 15
    assert side_widths(costs, 2.6).sum() == 10  # never above what was asked for


def test_a_side_has_1_bit_where_another_one_costs_40_times_as_much():
    """D(1), D(2), D(3) = 0.363, 0.119, 0.035. D / (1 - D) falls by 0.099 with the third bit and by 0.436 with the
    second one, which counts three times: 13.2 times as much, and 40^0.7 is 13.2."""
    assert side_widths(np.array([[38, 1]]), 2).tolist() == [[2, 2]]
    assert side_widths(np.array([[42, 1]]), 2).tolist() == [[3, 1]]
    assert side_widths(np.array([[42, 1]]), 2.5).tolist() == [[3, 2]]


@pytest.mark.parametrize("window, tries", [(0, 0), (24, 0), (24, 3)])
def test_costs_of_sides_are_what_they_do(model, texts, found, window, tries):
    """The estimate from a backward pass predicts the KL divergence that one side adds with 3 bits instead of 6."""
    quiet = {i: {"key_bits": 6, "value_bits": 6} for i in range(3)}
    specs = {"quiet": CacheSpec(overrides=quiet, sinks=4, window=window, tries=tries)}
    for layer, side in np.ndindex(3, 2):
        name = ("key_bits", "value_bits")[side]
        overrides = {**quiet, layer: {**quiet[layer], name: 3}}
        specs[layer, side] = CacheSpec(overrides=overrides, sinks=4, window=window, tries=tries)

    def cache(model, spec, profile):
        return TurboQuantCache(model, spec, profile=profile or profile_of(found.moments["text"]))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("turboquant.evaluation.decoder.TurboQuantCache", cache)
        results = evaluate_all(model, torch.cat(texts), specs, batch=5, generate=0)
    kl = {name: one.kl_divergence for name, one in results.items()}
    added = np.array([[kl[layer, side] - kl["quiet"] for side in range(2)] for layer in range(3)])
    costs = np.mean([trial.side_costs(model, one, found.moments["text"], seed, window)
                     for seed, one in enumerate(texts)], 0)  # fmt: skip
    error = distortions(tries, 32)
    ratio = added / (costs * (error[3] - error[6]))
    assert ratio.min() > 0.6 and ratio.max() < 1.6, ratio


# ---- what is chosen ----


def trials(*rows):
    return [Trial(0, average, method, 32, kl, other) for average, method, kl, other in rows]


def test_the_best_is_chosen_and_none_is_always_there():
    at3 = (3.0, "none", 0.05, 1.0), (3.0, "moments", 0.04, 1.08), (3.0, "axes", 0.03, 1.04)
    at25 = (2.5, "none", 0.1, 1.0), (2.5, "moments", 0.096, 0.9)
    at2 = (2.0, "none", 0.2, 1.0), (2.0, "moments", 0.21, 0.7), (2.0, "axes", 0.18, 1.07)
    marked = chosen(trials(*at3, *at25, *at2))
    assert [(t.average, t.method) for t in marked if t.chosen] == [(3.0, "axes"), (2.5, "none"), (2.0, "none")]
    printed = table(marked)
    assert "| 3 | 0.05000 (1.00x) | 0.04000 (1.08x) | 0.03000 (1.04x) | axes, groups of 32 |" in printed
    assert "3 bits: axes, groups of 32, 40.0% less than none." in printed
    assert "2.5 bits: none, nothing diverges 5% less." in printed
    assert "2 bits: none, since axes, groups of 32 costs 7% more on another kind of text." in printed


def earlier(trials):
    """The checkpoint of a calibration that has done these trials."""
    run = Unfinished("", None)
    run.trials = trials
    return run


def test_other_kinds_of_text_are_judged_over_all_averages():
    ratios = {(1, 3.0): 1.2, (1, 4.0): 0.9, (2, 3.0): 1.02, (2, 4.0): 1.0}  # by place (0: held-out text) and average
    done = {f"{i} 8 {average} none 32": 0.1 for i, average in ratios}
    done |= {f"{i} 8 {average} widths 32": 0.1 * ratio for (i, average), ratio in ratios.items()}
    given = [Trial(8, average, method, 32, 0.1) for average in (3.0, 4.0) for method in ("none", "widths")]
    for kinds, wanted in (([{}, {}], [1.0, 1.08**0.5] * 2), ([], [None] * 4)):
        measure = trial._Trials(None, None, [{}], kinds, earlier(done), False)
        assert [t.elsewhere for t in measure.elsewhere(given)] == [x and pytest.approx(x) for x in wanted]


def test_averages_that_are_nearly_equal_are_tried_apart(monkeypatch):
    monkeypatch.setattr(trial._Trials, "_losses", lambda self, batch, specs: {n: s.budget for n, s in specs.items()})
    measure = trial._Trials(None, None, [{"input_ids": torch.zeros(1, 8)}], [], earlier({}), False)
    which = [(average, method, 32) for average in (3.0000001, 3.0) for method in ("none", "widths")]
    assert measure(0, which) == [Trial(0, *one, kl_divergence=one[0]) for one in which]


def test_divergences_that_are_rounding_have_a_ratio():
    """If sliding windows hide all packed tokens, divergences are 0 up to rounding. Their ratio is 1."""
    done = {"0 8 3.0 none 32": 0.0, "0 8 3.0 widths 32": -1e-8, "1 8 3.0 none 32": -1e-9, "1 8 3.0 widths 32": 2e-8}
    given = [Trial(8, 3.0, method, 32, 0.1) for method in ("none", "widths")]
    for kinds, texts in (([{}, {}], []), ([{}], [{}])):
        measure = trial._Trials(None, None, texts, kinds, earlier(done), False)
        assert [t.elsewhere for t in measure.elsewhere(given)] == [1.0, 1.0]
    marked = chosen(trials((3.0, "none", 0.0, 1.0), (3.0, "widths", -1e-8, 1.0)))
    assert [t.chosen for t in marked] == [True, False] and "3 bits: none, nothing diverges 5% less." in table(marked)


def test_no_text_of_the_package_no_veto():
    marked = chosen(trials((3.0, "none", 0.05, None), (3.0, "axes", 0.03, None)))
    assert [t.chosen for t in marked] == [False, True] and "(" not in table(marked).partition("3 bits")[0]


@pytest.mark.parametrize("fields, message", [
    (dict(method="best"), "`method` must be one of none, moments"),
    (dict(kl_divergence=float("nan")), "`kl_divergence` must be a finite float, got nan"),
    (dict(average=3), "`average` must be a finite float, got 3"),
    (dict(window=-1), "Trial: `window` must be in 0..2147483647, got -1"),
    (dict(elsewhere=float("nan")), "`elsewhere` must be a finite float or None, got nan"),
    (dict(elsewhere="1.0"), "`elsewhere` must be a finite float or None, got '1.0'"),
    (dict(group=8), "`group` must be 32 or 16 channels, got 8"),
    (dict(chosen=1), "`chosen` must be True or False, got 1"),
])  # fmt: skip
def test_trials_that_are_none(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Trial(0, 3.0, "none", 32, 0.1), **fields)


# ---- a calibration that tries ----


def test_what_was_tried_is_what_evaluate_measures(model, texts, found):
    """The chosen method is not worse than "none" on the held-out text, and its figure is what `evaluate_all` finds."""
    assert {t.average for t in found.trials} == {4.0, 3.0, 2.5}
    assert {t.window for t in found.trials} == {*found.windows} == {0, CacheSpec().window}
    for window, average in itertools.product(found.windows, (4.0, 3.0, 2.5)):
        here = [t for t in found.trials if (t.window, t.average) == (window, average)]
        (best,), (plain,) = [t for t in here if t.chosen], [t for t in here if t.method == "none"]
        assert best.kl_divergence <= plain.kl_divergence
        spec = CacheSpec(budget=average, window=window)
        again = evaluate_all(model, texts[4], {"x": spec}, profile=profile_of(found), generate=0)["x"]
        assert again.kl_divergence == pytest.approx(best.kl_divergence, rel=1e-6)
        bits = again.spec.effective_bits(32, 3)
        assert bits <= average + 0.5 + 1e-9  # a scale of 16 bits for 32 channels
    assert {(t.method, t.group) for t in found.trials if t.average == 3} == {*trial._METHODS}


def test_none_is_the_preset_of_the_same_bits(model, texts, found):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("turboquant.evaluation.decoder.TurboQuantCache", lambda model, spec, profile: TurboQuantCache(
            model, spec, profile=profile or profile_of(found.moments["model"])))  # fmt: skip
        specs = {"plain": CacheSpec(3, 3), "none": CacheSpec(budget=3, method="none")}
        results = evaluate_all(model, texts[4], specs, profile=profile_of(found), everything_packed=True, generate=0)
    assert results["plain"].kl_divergence == results["none"].kl_divergence


@pytest.mark.parametrize("method, whose", [
    ("none", "model"), ("moments", "text"), ("widths", "model"), ("moments+widths", "text"), ("axes", None),
])  # fmt: skip
def test_each_method_stores_what_it_says(model, found, method, whose):
    spec = CacheSpec(budget=3, method=method, sinks=0, window=0)
    cache = TurboQuantCache(model, spec, profile=profile_of(found))
    assert cache._shared.moments is (found.moments[whose] if whose else None)
    specs = layer_specs(spec, found, 3)
    if method == "axes":
        assert all(s.rotation == s.centre == "calibrated" for s in specs)
    else:
        bits = np.array([(s.key_bits, s.value_bits) for s in specs])
        assert bits.mean() == 3 and (np.ptp(bits) > 0) == ("widths" in method)
        assert all((s.rotation, s.centre, s.metric, s.budget) == ("hadamard", "wave", "query", None) for s in specs)
    with torch.no_grad():
        turboquant.patch(model, spec, profile=profile_of(found))
        model(prompts(1, 300)["input_ids"], use_cache=True, past_key_values=cache)
        turboquant.unpatch(model)
    assert cache.report().parts["pages"] == 3 * 128 * spec.bytes_per_token(32, 2, 3)


def test_a_budget_has_the_variance_term_as_its_average_has_it(found):
    """All layers have it, whatever their widths, except with axes, which cannot have it."""

    def terms(average, **fields):
        spec = CacheSpec(budget=average, **{"method": "widths", "sinks": 4, "window": 128} | fields)
        return {bool(s.plan(32).words[18]) for one in (spec, spec.settled()) for s in layer_specs(one, found, 3)}

    widths = {s.key_bits for s in layer_specs(CacheSpec(budget=3, method="widths", sinks=4, window=128), found, 3)}
    assert max(widths) > 3 and terms(3) == terms(2) == terms(2.5, method="none") == {True}
    for without in (dict(sinks=0), dict(window=0), dict(variance_term=False), dict(method="axes")):
        assert terms(3, **without) == {False}
    assert terms(3.5) == {False}
    axes = dataclasses.replace(found, trials=chosen(trials((3.0, "none", 0.2, 1.0), (3.0, "axes", 0.05, 1.0))))
    spec = CacheSpec(budget=3, sinks=4, window=128)
    assert spec.settled().variance_term and axes.method(spec)[0] == "axes"
    assert not any(s.variance_term for s in layer_specs(spec, axes, 3))


def test_an_average_in_between_is_stored_as_the_nearest_one(found):
    other = dataclasses.replace(found, trials=chosen([
        Trial(128, 4.0, "none", 32, 0.2), Trial(128, 4.0, "moments", 32, 0.1), Trial(128, 3.0, "none", 32, 0.2),
        Trial(128, 3.0, "axes", 16, 0.1)]))  # fmt: skip
    methods = {b: other.method(CacheSpec(budget=b)) for b in (2, 3.4, 3.5, 3.6, 6)}
    assert methods == {2: ("axes", 16), 3.4: ("axes", 16), 3.5: ("axes", 16), 3.6: ("moments", 32), 6: ("moments", 32)}
    high = dataclasses.replace(other, trials=other.trials[2:])  # axes are chosen at 3 bits, and have at most 5
    assert high.method(CacheSpec(budget=5)) == ("axes", 16) and high.method(CacheSpec(budget=5.5)) == ("none", 32)
    costly = chosen(trials((5.0, "none", 0.2, 1.0), (5.0, "moments", 0.1, 1.5), (5.0, "axes", 0.05, 1.0)))
    most = dataclasses.replace(other, trials=costly)  # moments would cost too much elsewhere
    assert [most.method(CacheSpec(budget=bits))[0] for bits in (5, 5.5)] == ["axes", "none"]
    specs = layer_specs(CacheSpec(budget=3.5), other, 3)
    assert all(s.group == 16 and len(s.key_bits) == 2 for s in specs)


@pytest.mark.parametrize("change", [
    lambda t: t[1:],
    lambda t: [*t, t[0]],
    lambda t: [dataclasses.replace(one, chosen=False) for one in t],
    lambda t: [dataclasses.replace(one, chosen=True) for one in t],
])  # fmt: skip
def test_trials_without_a_choice_are_refused(found, change):
    given = [Trial(0, 3.0, "none", 32, 0.2), Trial(0, 3.0, "widths", 32, 0.1, chosen=True)]
    with pytest.raises(ValueError, match="`trials` must have the method 'none' once, and one .* 0 tokens and 3 bits"):
        dataclasses.replace(found, trials=tuple(change(given)))


def test_what_was_found_without_a_window_is_for_specs_without_one(found):
    plain = [Trial(window, 3.0, method, 32, kl) for window, kl in ((0, 0.01), (128, 0.03))
             for method, kl in (("none", 0.02), ("widths", kl))]  # fmt: skip
    costs = np.ones((2, 3, 2), np.float32)
    costs[1, 2] = 300
    other = dataclasses.replace(found, trials=chosen(plain), side_costs=costs)
    methods = {window: other.method(CacheSpec(budget=3, window=window))[0] for window in (0, 8, 64, 500)}
    assert methods == {0: "widths", 8: "none", 64: "none", 500: "none"}
    widths = [layer_specs(CacheSpec(budget=3, method="widths", window=w), other, 3)[2].key_bits for w in (0, 128)]
    assert widths == [3, 5]


def test_the_file_holds_all_of_it(found, tmp_path):
    profile_of(found).save(tmp_path / "one")
    back = load_calibration(tmp_path / "one")
    assert back.trials == found.trials and back.trials
    assert back.windows == found.windows
    np.testing.assert_array_equal(back.side_costs, found.side_costs)
    for whose in ("model", "text"):
        for a, b in zip(back.moments[whose].layers, found.moments[whose].layers):
            np.testing.assert_array_equal(a.amplitudes, b.amplitudes)
            np.testing.assert_array_equal(a.scale, b.scale)
    assert back.moments["text"].tokens > back.moments["model"].tokens


def test_a_saved_cache_knows_its_choice(model, found, tmp_path):
    spec = preset("calibrated-3").with_(sinks=0, window=0)
    turboquant.patch(model, spec, profile=profile_of(found))
    with torch.no_grad():
        cache = model(prompts(1, 150)["input_ids"], use_cache=True).past_key_values
    cache.save(tmp_path / "cache", model)
    back = TurboQuantCache.load(tmp_path / "cache", model)
    assert [layer.spec for layer in back.layers] == [layer.spec for layer in cache.layers]
    turboquant.unpatch(model)
    marked = [dataclasses.replace(t, chosen=t.method == "none") for t in found.trials]
    with pytest.raises(ValueError, match="needs the `profile` it was made with"):
        TurboQuantCache.load(
            tmp_path / "cache", model, profile=profile_of(dataclasses.replace(found, trials=tuple(marked)))
        )


def test_an_interrupted_trial_goes_on(model, texts, found, tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    plain, calls = trial._Trials._losses, []

    def losses(self, batch, specs):
        calls.append(len(specs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, batch, specs)

    monkeypatch.setattr(trial._Trials, "_losses", losses)
    given = dict(held_out=texts[4:], averages=(4, 3, 2.5), tokenizer=Words(), checkpoint=tmp_path / "half")
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, texts[:4], **given)
    assert calibrate(model, texts[:4], **given).trials == found.trials
    # two windows, two rounds each, of the held-out text and four kinds of text; the interrupted call ran twice
    assert len(calls) == 21


def test_a_checkpoint_knows_which_texts_are_held_out(model, texts, tmp_path):
    given = dict(sensitivity_batches=1, checkpoint=tmp_path / "half")
    calibrate(model, texts[:3], **given)
    with pytest.raises(ValueError, match="`checkpoint` must be one of this model, these batches"):
        calibrate(model, texts[:2], held_out=texts[2:3], **given)


def test_a_method_has_to_hold_on_each_kind_of_text(model, texts, found, tmp_path, monkeypatch):
    """The worst of the four kinds of text counts, not their mean."""
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    kinds = [ids.shape[1] for ids in text.kinds(model, Words())]
    assert len(kinds) == 4 and all(16 < n <= text.OF_A_KIND for n in kinds)
    seen = []

    def losses(self, batch, specs):
        seen.append(batch["input_ids"].shape[1])
        worse = 2.0 if len(seen) % 5 == 4 else 0.5  # the third kind, with each window
        return {name: 1.0 if "none" in name else worse for name in specs}

    monkeypatch.setattr(trial._Trials, "_losses", losses)
    again = calibrate(model, texts[:4], held_out=texts[4:], averages=(3,), tokenizer=Words())
    assert seen == 2 * [160, *kinds] and [t.method for t in again.trials if t.chosen] == 2 * ["none"]
    assert {t.elsewhere for t in again.trials if t.method != "none"} == {2.0}


@pytest.mark.parametrize("learned, tried", [((160, 160), (132,)), ((132, 132), (160,)), ((60, 60), (40,))])
def test_a_window_that_leaves_nothing_packed_is_not_tried(model, texts, learned, tried, monkeypatch):
    monkeypatch.setattr(trial, "_METHODS", trial._METHODS[:3])
    found = of_lengths(model, texts, learned, tried)
    assert found.windows == (0,) == tuple({t.window for t in found.trials})
    assert layer_specs(preset("calibrated-3"), found, 3)


def test_a_short_text_among_others_does_not_count_with_a_window(model, texts, monkeypatch):
    monkeypatch.setattr(trial, "_METHODS", trial._METHODS[:3])
    both, long = of_lengths(model, texts, (160, 20), (160, 20)), of_lengths(model, texts, (160,), (160,))
    assert both.windows == long.windows == trial.WINDOWS
    np.testing.assert_array_equal(both.side_costs[1], long.side_costs[1])
    assert (both.side_costs[0] != long.side_costs[0]).any()


def of_lengths(model, texts, learned, tried):
    """A calibration of texts that are cut to these lengths."""
    cut = [one[:, :count] for one, count in zip(texts, (*learned, *tried))]
    return calibrate(model, cut[: len(learned)], held_out=cut[len(learned) :], averages=(3,),
                                tokenizer=Words())  # fmt: skip


def test_without_text_the_package_has_it(model, tmp_path, monkeypatch):
    """Costs are those of its four kinds of text. "none" and "widths" are tried on all of them, weighted by tokens."""
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    kinds = text.kinds(model, Words())
    found = calibrate(model, averages=(3, 2.5), tokenizer=Words(), seed=5)
    assert found.source == "the text of the package" and found.tokens == sum(ids.shape[1] - 4 for ids in kinds)
    assert {(t.window, t.average, t.method) for t in found.trials} == set(
        itertools.product((0, 128), (3.0, 2.5), ("none", "widths"))
    )
    moments = turboquant.measure(model, Words()).moments
    costs = [trial.side_costs(model, ids, moments, 5 + i, 128) for i, ids in enumerate(kinds)]
    want = np.mean([cost / cost.sum() for cost in costs], 0)
    np.testing.assert_allclose(found.side_costs[1], want, rtol=1e-5)
    for one in (t for t in found.trials if t.average == 3):
        spec = CacheSpec(budget=3, method=one.method, sinks=4, window=one.window)
        kl = [
            turboquant.evaluate(model, ids, spec, profile=profile_of(found), generate=0).kl_divergence for ids in kinds
        ]
        assert one.kl_divergence == pytest.approx(np.average(kl, weights=[ids.shape[1] for ids in kinds]), rel=1e-5)
    profile_of(found).save(tmp_path / "file.safetensors")
    again = turboquant.Profile.load(tmp_path / "file.safetensors")
    assert again.calibration.trials == found.trials
    assert TurboQuantCache(model, "calibrated-3", profile=again).report()


def test_the_tokenizer_is_looked_for_once(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(text, "found_tokenizer", lambda model: (Words(), "") if not calls.append(1) else None)
    assert {t.elsewhere is None for t in calibrate(model, averages=(3,)).trials} == {False}
    assert len(calls) == 1


@pytest.mark.parametrize("make, fields, error, message", [
    (tiny, dict(batches=[prompts(1, 60)], held_out=[prompts(1, 60)], tokenizer=3), TypeError, "`tokenizer` must be a "),
    (tiny, dict(held_out=[prompts(1, 60)]), ValueError, "`held_out` must be None without `batches`, got list"),
    (tiny, dict(), ValueError, "`batches` or `tokenizer` must be given: the model's `name_or_path` is empty"),
    (tiny, dict(tokenizer="words"), TypeError, "`tokenizer` must be a tokenizer of transformers or None, got str"),
    (tiny_esm, dict(), ValueError, "`batches` must be given for an ESM-2 model .*protein_batches.*, got None"),
])  # fmt: skip
def test_where_the_text_of_the_package_does_not_serve(make, fields, error, message, monkeypatch):
    monkeypatch.setattr("turboquant.measuring.passes.forward", None)  # before anything runs
    with pytest.raises(error, match=message):
        calibrate(make(), **fields)


def test_without_held_out_text_a_budget_names_its_method(model, texts):
    plain = calibrate(model, texts[:2], sensitivity_batches=1)
    assert not plain.trials and not plain.moments
    for spec, message in (
        (CacheSpec(budget=3), "`profile` must have tried its methods on some text"),
        (CacheSpec(budget=3, method="widths"), "`profile` must have moments for the method 'widths'"),
    ):
        with pytest.raises(ValueError, match=message):
            TurboQuantCache(model, spec, profile=profile_of(plain))


@pytest.mark.parametrize("fields, message", [
    (dict(held_out=[]), "`held_out` must hold at least one batch, or be None, got none"),
    (dict(held_out=[prompts(2, 60, padding=(3, 0))]), "`held_out` must have no padding"),
    (dict(held_out=[prompts(1, 60), prompts(2, 1)]), r"`held_out\[1\]` must hold at least one row of two tokens"),
    (dict(held_out=[prompts(1, 60)], averages=(7,)), r"`averages` must be in 2..6 bits, at least one, got \[7\]"),
    (dict(held_out=[prompts(1, 60)], averages=()), r"`averages` must be in 2..6 bits, at least one, got \[\]"),
])  # fmt: skip
def test_what_it_refuses_to_try(model, texts, fields, message, monkeypatch):
    monkeypatch.setattr("turboquant.measuring.passes.forward", None)  # before anything runs
    with pytest.raises(ValueError, match=message):
        calibrate(model, texts, **fields)


def test_proteins_are_tried_by_their_hidden_states():
    model = tiny_esm(head_dim=64)
    batches = protein_batches(model, [protein(60 + n, n) for n in range(24)])
    found = calibrate(model, batches[1:], held_out=batches[:1], averages=(3,))
    assert {(t.method, t.group) for t in found.trials} == {*trial._METHODS} and len(found.moments) == 2
    assert sum(t.chosen for t in found.trials) == 1 and all(t.elsewhere is None for t in found.trials)
    assert min(found.trials, key=lambda t: t.kl_divergence).chosen
    turboquant.patch(model, "calibrated-3", profile=profile_of(found))
    turboquant.unpatch(model)
