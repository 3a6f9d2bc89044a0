"""Caches whose keys have a wave and a metric: attention, where their moments come from, and what is refused. Crops,
forks, reorders, padding and sliding windows of such caches are in the `SHAPES` of test_cache.py and test_pages.py."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT
from models import prompts, tiny, with_key_biases
from profiles import layer as random_moments
from profiles import profile_of
from specs import WAVE, bare
from streams import CONFIG, DIM, KV_HEADS, LAYERS, MOMENTS, PACKED, Stream, exact, forward, new
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import turboquant
from turboquant import CacheSpec, Profile, TurboQuantCache
from turboquant.evaluation.decoder import text_windows
from turboquant.hf.attention import NAME
from turboquant.kvcache import decoded
from turboquant.measured import Moments
from turboquant.measuring.moments import measure_model
from turboquant.measuring.tap import tapped
from turboquant.models.identity import describe, fingerprint

SPEC = PACKED.with_(**WAVE, sinks=2)
OURS = bare(4, 4, **WAVE)  # for models
DEMO = ROOT / "demo" / "turboquant_demo"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setenv("TURBOQUANT_CACHE", "")


@pytest.fixture(scope="module")
def measured():
    """A model and its moments."""
    model = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, turboquant.measure(model)


def waving(batch=1, tokens=420, padding=(0,), size=30.0, noise=1.0):
    """(stream, moments) of keys near a wave of norm `size`. Token t of a sequence has position t - padding."""
    made = tuple(random_moments(np.random.default_rng(i), DIM, KV_HEADS, size=size) for i in range(LAYERS))
    made = tuple(replace(m, scale=1 + 0.2 * np.cos(m.scale), stretch=0.1 * m.stretch) for m in made)
    stream = Stream(batch=batch, tokens=tokens)
    for i, moments in enumerate(made):
        for b in range(batch):
            at = np.maximum(np.arange(tokens) - padding[b], 0)
            centre = torch.from_numpy(moments.centre_at(at)).float()
            stream.k[i, b] = centre + noise * (stream.k[i, b] - stream.k[i, b].mean(1, keepdim=True))
    return stream, Moments(made, describe(CONFIG), 2048)


# ---- what it computes ----


@pytest.mark.parametrize("fields", [dict(), dict(sinks=3), dict(sinks=4, window=40)], ids=str)
@pytest.mark.parametrize("what", [WAVE, dict(centre="wave"), dict(metric="query")], ids=["both", "wave", "metric"])
def test_attention_is_that_of_the_keys(what, fields):
    """It is close to exact attention in a prefill, in chunks and token by token. A wave is most of a key."""
    stream, moments = waving(size=30.0 if "centre" in what else 1.0)
    spec = bare(5, 5, prefill="packed", tries=0).with_(**fields)
    errors = []
    for cache in (
        TurboQuantCache(CONFIG, spec.with_(**what), profile=profile_of(moments)),
        TurboQuantCache(CONFIG, spec),
    ):
        outs, start = [], 0
        for stop in (150, 151, 152, 300, *range(301, 310), 420):
            outs.append(forward(cache, stream.piece(start, stop)))
            start = stop
        want = exact(stream, 0, 420)
        errors.append(((torch.cat(outs, 2) - want).norm() / want.norm()).item())
    assert errors[0] < 0.1
    if "centre" in what:
        assert errors[1] > 3 * errors[0]  # without a centre, the large wave itself is quantised


@pytest.mark.parametrize("decodes", [False, True], ids=["packed", "decoded"])
@pytest.mark.parametrize("fields", [dict(), dict(sinks=3), dict(sinks=4, window=40), dict(window=30)], ids=str)
def test_chunks_that_pytorch_attends_to_itself(fields, decodes, monkeypatch):
    """With prefill="exact", attention within a chunk is computed separately and merged with attention to the tokens
    before it, which are read packed or are decoded first."""
    monkeypatch.setattr(decoded, "LEAST_TOKENS", {"cpu": 1} if decodes else {})
    monkeypatch.setattr(decoded, "LEAST_ROWS", (1, 1))
    monkeypatch.setattr(decoded, "SCRATCH_BYTES", 100_000)
    stream, moments = waving()
    cache = TurboQuantCache(CONFIG, bare(5, 5, **WAVE).with_(**fields), profile=profile_of(moments))
    pieces = (20, 150, 151, 300, 420)
    out = torch.cat([forward(cache, stream.piece(start, stop)) for start, stop in zip((0, *pieces), pieces)], 2)
    want = exact(stream, 0, 420)
    assert ((out - want).norm() / want.norm()).item() < 0.1


@pytest.mark.parametrize("fields", [dict(), dict(sinks=3), dict(sinks=4, window=40)], ids=str)
def test_chunks_behind_a_sliding_window(fields):
    """Packed tokens that a chunk sees through a sliding window are decoded at their own positions."""
    stream, moments = waving()
    cache = TurboQuantCache(CONFIG, bare(5, 5, **WAVE).with_(**fields), profile=profile_of(moments))
    pieces = (20, 250, 251, 300, 420)
    out = torch.cat(
        [forward(cache, stream.piece(start, stop), local_size=90) for start, stop in zip((0, *pieces), pieces)], 2
    )
    age = torch.arange(420)[:, None] - torch.arange(420)[None, :]
    q, k, v = (x.double() for x in (stream.q, stream.k.repeat_interleave(2, 2), stream.v.repeat_interleave(2, 2)))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(age >= 0) & (age < 90))
    assert ((out - want.transpose(2, 3)).norm() / want.norm()).item() < 0.1


@pytest.mark.parametrize("positions", ["right", "off by 9"])
def test_positions_are_those_of_real_tokens(positions):
    """Positions do not count padding. The keys are near the wave only if their positions are right."""
    padding = (0, 70, 149)
    stream, moments = waving(3, 300, padding if positions == "right" else tuple(pad - 9 for pad in padding))
    cache = TurboQuantCache(CONFIG, bare(4, 4, prefill="packed", **WAVE), profile=profile_of(moments))
    mask = torch.arange(300)[None, :] >= torch.tensor(padding)[:, None]
    out = [forward(cache, stream.piece(0, 200), mask[:, :200]), forward(cache, stream.piece(200, 300), mask)]
    error = []
    for b, pad in enumerate(padding):
        one = copy.copy(stream)
        one.q, one.k, one.v = (x[:, b : b + 1, :, pad:] for x in (stream.q, stream.k, stream.v))
        want = exact(one, 0, 300 - pad)
        error.append(((torch.cat(out, 2)[:, b : b + 1, pad:] - want).norm() / want.norm()).item())
    assert max(error) < 0.16 if positions == "right" else min(error) > 0.3, error


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), TurboQuantCache.fork]
)
def test_copies_have_the_moments(copied):
    cache, stream = new(SPEC), Stream(batch=2, tokens=300)
    forward(cache, stream.piece(0, 200))
    other = copied(cache)
    assert torch.equal(forward(other, stream.piece(200, 300)), forward(cache, stream.piece(200, 300)))
    other.reset()
    forward(other, stream.piece(0, 200))
    assert torch.equal(forward(other, stream.piece(200, 300)), forward(new_at(stream, 200), stream.piece(200, 300)))


def new_at(stream, tokens):
    cache = new(SPEC)
    forward(cache, stream.piece(0, tokens))
    return cache


def test_a_layer_without_a_wave_has_a_constant_centre():
    """A layer has no wave if its keys have no RoPE, or one that was not found. The report names such layers."""
    rng = np.random.default_rng(0)
    nothing = (np.zeros((0, 2), np.int32), np.zeros(0, np.uint32), np.zeros((KV_HEADS, 0, 2), np.float32))
    centre = 20 * rng.standard_normal((KV_HEADS, DIM)).astype(np.float32)
    still = replace(MOMENTS.layers[0], kind="not probed", centre=centre, scale=np.ones_like(centre),
                    stretch=0 * MOMENTS.layers[0].stretch, pairs=nothing[0], increments=nothing[1],
                    amplitudes=nothing[2])  # fmt: skip
    moments = Moments((still, replace(still, kind="constant")), describe(CONFIG), 7, "a text of the user")
    stream = Stream(tokens=300)
    stream.k += torch.from_numpy(centre)[None, None, :, None] - stream.k.mean(3, keepdim=True)
    cache = TurboQuantCache(CONFIG, bare(4, 4, prefill="packed", **WAVE), profile=profile_of(moments))
    out, want = forward(cache, stream.piece(0, 300)), exact(stream, 0, 300)
    assert (out - want).norm() / want.norm() < 0.15
    report = str(cache.report())
    assert "moments of 7 tokens: a text of the user" in report
    assert "constant centre in layers 0: it was not found whether and how their keys turn" in report
    assert "constant centre in layers 1: their keys do not turn" in report


def test_moments_are_shared_and_counted():
    caches = [new(SPEC) for _ in range(2)]
    for cache in caches:
        forward(cache, Stream().piece(0, 5))
    a, b = ({t.data_ptr() for part, t in cache.tensors() if part == "transforms"} for cache in caches)
    assert a and a == b
    assert caches[0].report().parts["transforms"] == sum(
        array.nbytes for each in MOMENTS.layers for array in each.transforms(True, True).values()
    )
    assert new(PACKED).report().notes == ()


@pytest.mark.parametrize("bits", [4, 3])
def test_keys_with_large_biases(bits):
    """Biases with the norms of Qwen2.5-7B's (605 in the first layer, 921 in the last) cost little with the moments of
    the shipped text, and ruin the predictions without a centre."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    windows = text_windows((DEMO / "a_christmas_carol.txt").read_text(encoding="utf-8"), tokenizer, 1, 384)
    found = []
    for model, spec in [
        (plain, bare(bits, bits, **WAVE)),
        (with_key_biases(plain, 605, 921, 22), bare(bits, bits, **WAVE)),
        (with_key_biases(plain, 605, 921, 22), bare(bits, bits)),
    ]:
        turboquant.patch(model, spec, tokenizer=tokenizer)
        found.append(turboquant.evaluate(model, windows, spec, generate=0).kl_divergence)
    assert found[1] < 1.6 * found[0] < 0.05 < 0.5 < found[2], found


# ---- where moments come from ----


def test_they_are_measured_once_for_a_model_and_tokenizer(monkeypatch):
    runs, model = [], tiny()
    plain = measure_model
    monkeypatch.setattr(
        "turboquant.measuring.moments.measure_model", lambda *args, **how: runs.append(args[1]) or plain(*args, **how)
    )
    turboquant.patch(model, OURS)
    with pytest.warns(UserWarning, match="measured on random token ids"):
        out = model.generate(**prompts(2, 9, (3, 0)), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache = out.past_key_values
    assert type(cache) is TurboQuantCache and cache.spec == OURS and runs == [None]
    assert "pass `tokenizer` to turboquant.patch" in str(cache.report())
    again = TurboQuantCache(model, OURS.with_(key_bits=3))
    assert again._shared.moments is cache._shared.moments and runs == [None]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.encode_special_tokens = False
    monkeypatch.setattr("turboquant.models.texts._check", lambda *args: None)
    monkeypatch.setattr("turboquant.models.texts._tokens", lambda *args: list(range(2, 96)))
    turboquant.patch(model, OURS, tokenizer=tokenizer)
    found = TurboQuantCache(model)._shared.moments
    assert runs == [None, tokenizer] and found.source == "the text of the package"


@pytest.mark.filterwarnings("ignore:the model is measured on random token ids")
@pytest.mark.parametrize("models", [1, 2])
def test_first_caches_of_several_threads(models):
    """Threads whose first caches need moments at the same time, of one model or of two, get those that `measure` finds
    alone. One of the threads runs forwards without a cache meanwhile."""
    patched, same = ([tiny(seed=i, max_position_embeddings=300) for i in range(models)] for _ in range(2))
    want = [turboquant.measure(model) for model in same]
    for model in patched:
        turboquant.patch(model, OURS)
    inputs, texts, begin = prompts(1, 40), {}, threading.Barrier(5)

    def run(thread):
        model = patched[thread % models]
        begin.wait()
        if thread == 4:
            texts[thread] = [model(**inputs, use_cache=False).logits.argmax() for _ in range(40)][-1]
        else:
            texts[thread] = model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(5)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(texts) == 5 and texts[0] == texts[models] and {m.config._attn_implementation for m in patched} == {NAME}
    for model, moments in zip(patched, want):
        found = TurboQuantCache(model)._shared.moments
        assert all(np.array_equal(a.amplitudes, b.amplitudes) for a, b in zip(found.layers, moments.layers))


def test_measured_models_do_not_wait_for_the_measurement_of_another():
    model, begun, done = tiny(seed=3), threading.Event(), threading.Event()
    turboquant.patch(model, OURS)
    want = model.generate(**prompts(1, 20), max_new_tokens=2, do_sample=False).tolist()

    def measure_another():
        with tapped(tiny(seed=4)):
            begun.set()
            done.wait(60)

    texts = []
    other = threading.Thread(target=measure_another)
    ours = threading.Thread(
        target=lambda: texts.append(model.generate(**prompts(1, 20), max_new_tokens=2, do_sample=False).tolist())
    )
    other.start(), begun.wait(60), ours.start(), ours.join(60)
    try:
        assert texts == [want]
    finally:
        done.set(), other.join(), ours.join()


def test_those_of_patch_serve_every_cache_of_the_model(measured, tmp_path):
    model, moments = copy.deepcopy(measured[0]), measured[1]
    moments.save(tmp_path / "moments")
    for given in (moments, tmp_path / "moments", str(tmp_path / "moments")):
        turboquant.patch(model, OURS, profile=profile_of(given))
        for cache in (TurboQuantCache(model), TurboQuantCache(model, OURS.with_(value_bits=2))):
            assert cache._shared.moments is model._turboquant.moments
    other = Profile(replace(moments.moments, layers=moments.layers[::-1]))
    cache = TurboQuantCache(model, OURS, profile=profile_of(other))
    assert cache._shared.moments is other.moments
    with pytest.warns(UserWarning, match="another profile than the model was patched with"):
        model(**prompts(1, 9), past_key_values=cache)
    turboquant.patch(model, "paper-mse-4")
    assert TurboQuantCache(model)._shared.moments is None


def test_one_line_before_a_model_is_measured(measured, monkeypatch, caplog, tmp_path):
    model = tiny(seed=3)
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="random token ids"):
        TurboQuantCache(model, OURS)
    what = "LlamaForCausalLM runs over 2,048 tokens, to measure its moments"
    assert caplog.messages == [f"{what}, kept in {tmp_path}"]
    with pytest.warns(UserWarning, match="random token ids"):
        TurboQuantCache(tiny(seed=3), OURS)  # reads the file
    assert len(caplog.messages) == 1


def test_the_model_is_evaluated_with_them():
    model = tiny()
    windows = prompts(2, 300)["input_ids"]
    with pytest.warns(UserWarning, match="random token ids"):
        found = turboquant.evaluate(model, windows, bare(5, 5, **WAVE), generate=2)
    assert 0 < found.kl_divergence < turboquant.evaluate(model, windows, bare(2, 2), generate=0).kl_divergence
    assert not hasattr(model, "_turboquant")


# ---- what is refused, before anything is stored ----


def test_what_a_cache_refuses(measured):
    model, moments = measured
    with pytest.raises(ValueError, match=r"`profile` must be given with a configuration.*metric=\"none\""):
        TurboQuantCache(CONFIG, SPEC)
    with pytest.raises(ValueError, match="`profile` must be None for a spec"):
        TurboQuantCache(CONFIG, PACKED, profile=profile_of(MOMENTS))
    with pytest.raises(TypeError, match="`profile` must be a Profile or the path of a file, got 7"):
        TurboQuantCache(CONFIG, SPEC, profile=profile_of(7))
    with pytest.raises(FileNotFoundError, match="`profile` must be a profile"):
        TurboQuantCache(CONFIG, SPEC, profile=profile_of("absent"))
    other = LlamaConfig(**{**CONFIG.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    if describe(other)["rope"] == describe(CONFIG)["rope"]:  # transformers 4.57 has rope_theta alone
        other = LlamaConfig(**{**CONFIG.to_dict(), "rope_theta": 500.0})
    with pytest.raises(ValueError, match=r"`profile` must be of this model.*rope.*500.*metric=\"none\""):
        TurboQuantCache(other, SPEC, profile=profile_of(MOMENTS))
    with pytest.raises(ValueError, match="`spec` must be given where `profile` is, got None"):
        TurboQuantCache(model, profile=profile_of(moments))
    with pytest.raises(ValueError, match="`profile` must be of this model, .* other weights"):
        turboquant.patch(tiny(seed=1), OURS, profile=profile_of(moments))
    with pytest.raises(ValueError, match="`profile` must be None for a spec"):
        turboquant.patch(tiny(), "paper-mse-4", profile=profile_of(moments))


@pytest.mark.parametrize("heads, dim", [(KV_HEADS + 1, DIM), (KV_HEADS, 2 * DIM)])
def test_keys_of_another_shape(heads, dim):
    cache = new(SPEC)
    keys = torch.zeros(1, heads, 5, dim)
    with pytest.raises(
        ValueError, match=f"layer 0: keys must have the {KV_HEADS} KV heads of {DIM} channels of the mom"
    ):
        cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_a_model_that_cannot_be_measured(monkeypatch):
    model = tiny()
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(TypeError("no ids")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            NotImplementedError, match=r"forward of token ids failed .*centre=\"none\" and metric=\"none\""
        ):
            TurboQuantCache(model, OURS)


def test_specs():
    axes = CacheSpec(budget=3.0, method="axes")
    assert CacheSpec(rotation="svd").settled().metric == axes.settled().metric == "none"
    with pytest.raises(ValueError, match="`metric` must be 'none' where `rotation` is 'svd'"):
        CacheSpec(rotation="svd", metric="query")
    with pytest.raises(ValueError, match="`metric` must be 'auto' where `budget` shares the bits, got 'none'"):
        CacheSpec(budget=3.0, metric="none")
    with pytest.raises(ValueError, match="`metric` must be one of auto, none, query, got 'queries'"):
        CacheSpec(metric="queries")
    for spec in (OURS, CacheSpec(budget=3.0)):
        assert CacheSpec.from_dict(spec.to_dict()) == spec
    assert OURS.bytes_per_token(64) == bare(4, 4).bytes_per_token(64)


def test_layers_may_differ():
    spec = PACKED.with_(overrides={0: WAVE})
    cache = TurboQuantCache(CONFIG, spec, profile=profile_of(MOMENTS))
    stream = Stream()
    forward(cache, stream.piece(0, 40))
    assert cache.layers[0].storage.plan.wave_pairs and not cache.layers[1].storage.plan.wave_pairs
    assert cache.layers[0].storage.transforms and not cache.layers[1].storage.transforms


def test_fingerprints_may_be_of_weights_or_of_a_configuration(measured):
    model, moments = measured
    assert moments.fingerprint == fingerprint(model)
    TurboQuantCache(model.config, OURS, profile=profile_of(moments))
