"""The plug-in inside vLLM's engine on a CPU: `make test-vllm`. One process builds all engines, since vLLM takes longest
to import. Most have the model of the demo; tiny random models have other kinds of attention; SmolLM2-135M (`make
real-models`) shows the quality."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from conftest import REAL_MODELS

from engines import Engine, log_probs_of  # isort: skip  # skips without vLLM
import models
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from turboquant.cli import main
from turboquant.vllm.layers import engine_of

pytest_plugins = ["engines"]  # its fixtures
SMOLLM2 = REAL_MODELS / "smollm2"
EIGHT = {"key_bits": 8, "value_bits": 8}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="session")
def windows(ids):
    return [ids[:500], ids[500:1000]]


@pytest.fixture(scope="session")
def stock(demo, windows):
    """(log-probabilities, blocks) of vLLM's own cache, while the plug-in is there but not asked for."""
    with Engine(None, demo) as engine:
        assert AttentionBackendEnum.CPU_ATTN.is_overridden()
        return engine.log_probs(windows), engine.blocks


def test_nothing_configured_is_vllm(demo, stock, windows):
    """Without settings, log-probabilities are bit for bit those of vLLM without the plug-in."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    path = AttentionBackendEnum.CPU_ATTN.get_path()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    try:
        with Engine(None, demo) as engine:
            found = engine.log_probs(windows)
    finally:
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        _cached_get_attn_backend.cache_clear()
    assert np.array_equal(found, stock[0])


def test_eight_bits_are_near_vllm(demo, stock, windows):
    with Engine(EIGHT, demo) as engine:
        found = engine.log_probs(windows)
        assert 1.9 < engine.blocks / stock[1] < 1.95
    assert abs(found - stock[0]).mean() < 0.03 and abs(found.mean() - stock[0].mean()) < 0.002


def test_chunks_change_nothing(demo, stock, windows):
    """Smaller chunks change log-probabilities by less than a tenth of what 4 bits cost: every query reads packed
    tokens, also those of its own chunk. Matrix products may round differently, which changes a code now and then."""
    found = []
    for tokens in (1024, 100):
        with Engine({}, demo, dtype="float32", max_num_batched_tokens=tokens) as engine:
            found.append(engine.log_probs(windows))
    whole, parts = found
    assert abs(parts - whole).mean() < 0.1 * abs(whole - stock[0]).mean()


@pytest.mark.parametrize("settings", [{"sinks": 0}, {}], ids=["all packed", "sinks"])
def test_a_prefix_hit_gives_what_a_miss_gives(settings, demo, ids):
    """Log-probabilities are equal bit for bit, with chunks that end where the hit ends, so that both multiply matrices
    of the same sizes; also after other requests, which take over blocks of the prefix's middle."""
    prompt, others = ids[:870], [ids[300:550], ids[600:1100], ids[100:400]]
    with Engine(settings, demo, enable_prefix_caching=True, max_num_batched_tokens=128,
                num_gpu_blocks_override=14) as engine:  # fmt: skip
        engine.poison()
        miss, hit = (engine.generate([prompt], max_tokens=20, logprobs=0)[0] for _ in range(2))
        assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 768)
        engine.texts(others, 20)
        again = engine.generate([prompt], max_tokens=20, logprobs=0)[0]
        assert again.num_cached_tokens < 768
    for other in (hit, again):
        for a, b in zip(miss.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert {token: x.logprob for token, x in a.items()} == {token: x.logprob for token, x in b.items()}


@pytest.mark.parametrize("settings", [{"sinks": 0}, {}, {"window": 28}], ids=["all packed", "sinks", "window"])
def test_preempted_requests(settings, demo, ids):
    """6 requests, preempted for want of blocks, lose no row; without a window texts are those with room for all."""
    prompts = [ids[200 * i : 200 * i + 250] for i in range(6)]
    with Engine(settings, demo, dtype="float32") as engine:
        engine.poison()
        want = engine.texts(prompts, 150)
        assert not engine.preempted
    with Engine(settings, demo, dtype="float32", num_gpu_blocks_override=12) as engine:
        engine.poison()
        found = engine.texts(prompts, 150)
        assert engine.preempted >= 3
        assert all(not builder.rows.lost for builder in engine.builders)
    if not settings.get("window"):  # a chunk's queries share the tail of its end, and a resumed request is a chunk
        assert found == want


def test_short_chunks_and_short_prompts(demo, ids, rng):
    """Texts depend on no chunks and no prefix cache. Prompts of 1 to 3 tokens fill a row of 4 in part."""
    lengths = rng.choice([1, 2, 3, 4, 5, 100, 127, 128, 129, 130, 131, 256, 257, 300], 30)
    prompts = [ids[at : at + length] for at, length in zip(rng.integers(0, 900, 30).tolist(), lengths.tolist())]
    want = None
    for caching, tokens in ((False, 130), (True, 131)):
        with Engine({}, demo, dtype="float32", num_gpu_blocks_override=13, max_num_seqs=12,
                    max_num_batched_tokens=tokens, enable_prefix_caching=caching) as engine:  # fmt: skip
            engine.poison()
            found = engine.texts(prompts + prompts[:3], 60)
            assert engine.preempted
        assert found == (want or found)
        want = found


@pytest.mark.parametrize("settings", [{}, {"window": 28}], ids=["sinks", "window"])
def test_speculation_gives_the_text_of_plain_decoding(settings, demo, ids):
    """Drafts from the text so far change no text, also across the ends of pages."""
    prompts = [ids[:100] * 2, ids[300:420] + ids[300:350], ids[500:627], ids[700:800]]
    with Engine(settings, demo, dtype="float32") as engine:
        plain, steps = engine.texts(prompts, 150), engine.steps
    with Engine(settings, demo, dtype="float32", speculative_config=SPECULATION) as engine:
        engine.poison()
        assert engine.texts(prompts, 150) == plain
        assert engine.steps < 0.9 * steps  # drafts were accepted


def test_widths_by_layer(demo, stock, windows):
    """Layers with records of one size share a builder."""
    with Engine({}, demo) as engine:
        plain = engine.blocks
    overrides = {"0": {"key_bits": 5, "value_bits": 5}, "2": {"key_bits": 5, "value_bits": 5}, "3": {"value_bits": 2}}
    with Engine({"overrides": overrides}, demo) as engine:
        found = engine.log_probs(windows)
        assert len(engine.builders) == 3
        sizes = {name: layer.attn_backend.record_bytes for name, layer in engine.layers.items()}
        assert len({*sizes.values()}) == 3
        assert engine.blocks < plain  # 5, 4, 5 and 3 bits: more than 4 in the mean
    assert 0 < abs(found - stock[0]).mean() < 0.2


@pytest.mark.parametrize("kind", ["mistral, sliding", "gemma2, soft-cap and sliding", "gemma3, alternating"])
def test_sliding_and_alternating_windows(kind, tmp_path, rng):
    """With windows of 200 tokens at 8 bits, log-probabilities are near vLLM's own, and in small chunks, with a prefix
    cache and few blocks, nearly those of one chunk, with the same texts."""
    models.tiny(kind, sliding_window=200).save_pretrained(tmp_path)
    assert main(["measure", str(tmp_path)]) == 0  # on random token ids, as it says
    prompts = [rng.integers(2, 96, n).tolist() for n in (500, 127, 300)]
    with Engine(None, tmp_path, dtype="float32") as engine:
        stock = engine.log_probs(prompts)
    with Engine(EIGHT, tmp_path, dtype="float32") as engine:
        engine.poison()
        whole, texts = engine.log_probs(prompts), engine.texts(prompts * 2, 100)
    with Engine(EIGHT, tmp_path, dtype="float32", max_num_batched_tokens=130, enable_prefix_caching=True,
                num_gpu_blocks_override=30) as engine:  # fmt: skip
        engine.poison()
        parts = engine.log_probs(prompts)
        assert engine.texts(prompts * 2, 100) == texts
        assert all(not builder.rows.lost for builder in engine.builders)
    assert abs(whole - stock).mean() < 0.05
    assert abs(parts - whole).mean() < 1e-3


def test_learned_sinks_and_large_blocks(tmp_path, rng):
    """gpt-oss is near transformers: layers with and without windows, learned sinks, blocks of 2 pages."""
    shape = models._SHAPE | dict(num_local_experts=2, num_experts_per_tok=2, sliding_window=200, num_hidden_layers=2,
                                 layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape)).eval()
    prompts = [rng.integers(2, 96, n).tolist() for n in (500, 127, 300)]
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    without = log_probs_of(model, prompts)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.tensor([2.0, 4.0, 6.0, 8.0])
    want = log_probs_of(model, prompts)
    model.save_pretrained(tmp_path)
    assert main(["measure", str(tmp_path)]) == 0
    with Engine(EIGHT, tmp_path, dtype="float32", max_num_batched_tokens=130, enable_prefix_caching=True,
                block_size=256) as engine:  # fmt: skip
        engine.poison()
        found = engine.log_probs(prompts)
        assert engine.config.cache_config.block_size == 256
    assert abs(found - want).mean() < 0.1 * abs(without - want).mean()


def test_adapters_run_with_the_base_models_profile(demo, tmp_path, windows):
    model = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    torch.manual_seed(0)
    tensors, changes = {}, []
    for i, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(layer.self_attn, name)
            a, b = 0.05 * torch.randn(8, linear.in_features), 0.05 * torch.randn(linear.out_features, 8)
            at = f"base_model.model.model.layers.{i}.self_attn.{name}"
            tensors |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
            changes.append((linear.weight, b @ a))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with Engine(EIGHT, demo, dtype="float32", enable_lora=True, max_lora_rank=8) as engine:
        made = [one.outputs[0] for one in engine.generate(windows, LoRARequest("mine", 1, str(tmp_path)), max_tokens=20,
                                                          logprobs=0)]  # fmt: skip
        assert "adapters run with the profile of the base model" in engine_of(engine.config).said
    found = np.array([seen[token].logprob for one in made for token, seen in zip(one.token_ids, one.logprobs)])

    def log_probs():
        texts = [[*ids, *one.token_ids] for ids, one in zip(windows, made)]
        return np.concatenate([log_probs_of(model, [ids])[-20:] for ids in texts])

    base = log_probs()
    for weight, change in changes:
        weight.data += change
    want = log_probs()
    assert abs(found - want).mean() < 0.1 * abs(base - want).mean()


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2: make real-models")
def test_sinks_bring_four_bits_nearer(tokens_of):
    assert main(["measure", str(SMOLLM2)]) == 0
    found, ids = [], tokens_of(SMOLLM2)
    for settings in (None, {"sinks": 0}, {}):
        with Engine(settings, SMOLLM2) as engine:
            found.append((engine.log_probs([ids[:500], ids[500:1000]]), engine.blocks))
    (stock, blocks), (far, _), (near, packed) = found
    assert 3.7 < packed / blocks < 3.8
    assert abs(near - stock).mean() < 0.14 and abs(near - stock).mean() < 0.8 * abs(far - stock).mean()
