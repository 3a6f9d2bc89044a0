"""Models with linear attention, state spaces or convolutions beside attention. Keys and values are packed, and states
are kept as the model makes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from causal_types import EXACT, TYPES, VERSION, tiny
from hybrids import HOLDS_ALL, IDS, PACKED, PADDED, PIECES, check_generate, run
from models import torch
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache

NAMES = """
    bamba falcon_h1 granitemoehybrid jamba lara_mini lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid qwen3_5_moe_text
    qwen3_5_text qwen3_next recurrent_gemma zamba2 zaya
    """.split()
QUICK = ("qwen3_5_text", "falcon_h1", "lfm2", "nemotron_h")
TRIED = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES if n in TYPES and n in EXACT]
pytestmark = pytest.mark.skipif(VERSION < (5, 20), reason="older transformers has no cache layers with states")


def made(name: str = "qwen3_5_text", spec: Any = PACKED) -> Any:
    return turboquant.patch(tiny(name), spec)


def states(cache: TurboQuantCache) -> list[torch.Tensor]:
    return [state.clone() for layer in cache.state_layers for state in layer.states()]


@pytest.mark.parametrize("name", TRIED)
def test_exact_while_the_window_holds_all_and_close_when_packed(name):
    model = tiny(name)
    want = run(model, DynamicCache(config=model.config))
    check_generate(model, ids=IDS[:, :20], mask=PADDED[:, :20])
    torch.testing.assert_close(run(model, TurboQuantCache(model)), want, rtol=0, atol=5e-5)
    turboquant.patch(model, PACKED)
    got = run(model, TurboQuantCache(model))
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94


def test_only_layers_with_keys_are_packed_and_states_count():
    model = made()
    cache = TurboQuantCache(model)
    run(model, cache)
    assert [type(layer).__name__ for layer in cache.layers] == ["StateLayer"] * 3 + ["PackedLayer"]
    report = cache.report()
    assert [layer.layer for layer in report.layers] == [3]  # as the model counts
    held = sum(state.nbytes for state in states(cache))
    assert held > 0 and report.shared["states"] == held == report.nbytes - cache.report().layers[0].nbytes - sum(
        size for part, size in report.shared.items() if part != "states"
    )
    assert cache.nbytes >= held


def test_overrides_count_the_layers_of_the_model():
    model = tiny("qwen3_5_text")
    cache = TurboQuantCache(model, PACKED.with_(overrides={3: {"key_bits": 2}}))
    assert cache.layers[3].spec.key_bits == 2
    assert TurboQuantCache(model, PACKED.with_(overrides={0: {"key_bits": 2}})).layers[3].spec.key_bits == 5


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_a_fork_goes_its_own_way(name):
    model = made(name)
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:2])
    fork, copied = cache.fork(), copy.deepcopy(cache)
    want = run(model, cache, PIECES[2:])
    assert torch.equal(run(model, fork, PIECES[2:]), want) and torch.equal(run(model, copied, PIECES[2:]), want)


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_a_failed_forward_asks_for_a_reset(name, monkeypatch):
    model = made(name)
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:1])
    last = cache.packed_layers[-1]
    monkeypatch.setattr(last.storage, "store", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        run(model, cache, PIECES[1:2])
    monkeypatch.undo()
    for call in (lambda: run(model, cache, PIECES[1:2]), cache.fork, lambda: cache.crop(-1)):
        with pytest.raises(RuntimeError, match=r"an earlier forward failed .* call cache\.reset\(\)"):
            call()
    cache.reset()
    assert torch.equal(run(model, cache), run(model, TurboQuantCache(model)))


def test_a_forward_that_fails_outside_attention_is_noticed_too(monkeypatch):
    model = made()
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:1])
    with monkeypatch.context() as patched:  # in the first linear layer: no packed layer has seen the forward
        patched.setattr(model.model.layers[1].mlp, "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(model, cache, PIECES[1:2])
    with pytest.raises(RuntimeError, match=r"call cache\.reset\(\)"):
        run(model, cache, PIECES[1:2])


def test_after_a_first_forward_that_failed_the_cache_is_empty(monkeypatch):
    model = made()
    cache = TurboQuantCache(model)
    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].mlp, "forward", lambda x: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            run(model, cache, PIECES[:1])
    assert torch.equal(run(model, cache), run(model, TurboQuantCache(model)))


def test_another_batch_after_a_reset():
    model = made()
    cache = TurboQuantCache(model)
    run(model, cache)
    cache.reset()
    one = torch.ones(1, 40, dtype=torch.long)
    assert torch.equal(run(model, cache, mask=one), run(model, TurboQuantCache(model), mask=one))


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_sequences_are_repeated_and_chosen(name):
    model = made(name)
    whole = torch.ones(2, 40, dtype=torch.long)
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:1], whole)
    before = states(cache)
    cache.batch_repeat_interleave(3)
    assert all(torch.equal(a, b.repeat_interleave(3, 0)) for a, b in zip(states(cache), before, strict=True))
    cache.batch_select_indices(torch.tensor([0, 5]))
    want = TurboQuantCache(model)
    run(model, want, PIECES[:1], whole)
    torch.testing.assert_close(
        run(model, cache, PIECES[1:], whole), run(model, want, PIECES[1:], whole), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_a_choice_of_sequences_that_is_refused_changes_no_layer(name):
    model = made(name)
    cache, want = TurboQuantCache(model), TurboQuantCache(model)
    for one in (cache, want):
        run(model, one, PIECES[:1])
    for wrong in ([True], [True, False, False], [], [0, 2]):
        with pytest.raises((ValueError, IndexError), match="must be a bool for each of 2|must be in 0..1|must stay"):
            cache.batch_select_indices(wrong)
    with pytest.raises(IndexError, match=r"sequences must be in 0\.\.1, got \[0, 2\]"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert torch.equal(run(model, cache, PIECES[1:]), run(model, want, PIECES[1:]))


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("spec", [HOLDS_ALL, PACKED, PACKED.with_(centre="wave", metric="query")])
def test_a_file_has_the_states(name, spec, tmp_path):
    model = made(name, spec)
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:3])
    if name == "lfm2":
        cache.activate_past_recording()
        run(model, cache, PIECES[3:4])
    cache.save(tmp_path / "c", model)
    other = TurboQuantCache.load(tmp_path / "c", model)
    assert [type(layer) for layer in other.layers] == [type(layer) for layer in cache.layers]
    rest = PIECES[4:] if name == "lfm2" else PIECES[3:]
    assert torch.equal(run(model, other, rest), run(model, cache, rest))


def test_a_cache_whose_forward_failed_is_not_saved(tmp_path):
    cache = TurboQuantCache(made())
    run(made(), cache, PIECES[:1])
    cache.at_work = True
    with pytest.raises(RuntimeError, match=r"save: an earlier call failed .* call cache\.reset\(\)"):
        cache.save(tmp_path / "c")


def test_crop_is_refused_and_convolutions_alone_can_be_cropped():
    model = made()
    cache = TurboQuantCache(model)
    run(model, cache)
    with pytest.raises(NotImplementedError, match=r"crop: states of recurrent layers .* cache\.fork\(\)"):
        cache.crop(-1)
    cache.crop(0)
    assert cache.get_seq_length() == 40
    model = made("lfm2")
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=3), want)


def recorded(model: Any, pieces: Any, **options: Any) -> TurboQuantCache:
    """A cache that records the past, after forwards of these pieces."""
    cache = TurboQuantCache(model)
    cache.activate_past_recording()
    run(model, cache, pieces, **options)
    return cache


def test_a_crop_that_attention_refuses_leaves_convolutions_alone():
    cache = recorded(made("lfm2"), PIECES[:3])
    before = states(cache)
    with pytest.raises(NotImplementedError, match="crop: keeping less than the padding of a left-padded batch"):
        cache.crop(4)
    assert cache.get_seq_length() == 22
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before, strict=True))


def test_convolutions_go_back_as_far_as_they_recorded():
    model, whole = made("lfm2"), torch.ones(2, 40, dtype=torch.long)
    for keep in (1, 2, 3, 15, 20):
        cache, want = recorded(model, PIECES[:2], mask=whole), TurboQuantCache(model)
        cache.crop(keep)
        run(model, want, ((0, keep),), whole)
        rest = ((keep, 40),)
        torch.testing.assert_close(run(model, cache, rest, whole), run(model, want, rest, whole), rtol=0, atol=2e-5)
    late = TurboQuantCache(model)
    run(model, late, PIECES[:1], whole)
    late.activate_past_recording()
    run(model, late, PIECES[1:3], whole)
    again = recorded(model, PIECES[:3], mask=whole)
    again.crop(20)  # forgets what was recorded before
    for cache in (late, again):
        length, before = cache.get_seq_length(), states(cache)
        with pytest.raises(NotImplementedError, match=r"crop: convolutions have recorded too few .* cache\.fork\(\)"):
            cache.crop(19)
        assert cache.get_seq_length() == length
        assert all(torch.equal(a, b) for a, b in zip(states(cache), before, strict=True))
        cache.crop(20)


def test_other_models_say_what_they_lack():
    with pytest.raises(
        NotImplementedError, match="`cuda_graphs` is for text models without recurrent states, shared keys and latents"
    ):
        turboquant.patch(tiny("qwen3_5_text"), cuda_graphs=True)
