"""The plug-in inside vLLM's engine on a CPU, with SmolLM2-135M (`make real-models`) and tiny random models: `make
test-vllm`. One process builds all engines, since vLLM takes longest to import."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm has an environment with it")

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="INFO", VLLM_CPU_CI_ENV="1",
)  # fmt: skip
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
from conftest import REAL_MODELS
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from turboquant.cli import main

SMOLLM2 = REAL_MODELS / "smollm2"
pytestmark = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2: make real-models")
TEXT = Path(__file__).parents[2] / "demo" / "turboquant_demo" / "a_christmas_carol.txt"
GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="session", autouse=True)
def profile(tmp_path_factory):
    """Where `turboquant measure` keeps it."""
    os.environ["TURBOQUANT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    assert main(["measure", str(SMOLLM2)]) == 0


class Engine:
    """An engine in this process, and what is asked of it."""

    def __init__(self, settings=None, model=SMOLLM2, **options):
        given = dict(model=str(model), dtype="bfloat16", max_model_len=1024, max_num_seqs=8, enforce_eager=True, seed=0,
                     enable_prefix_caching=False, max_num_batched_tokens=1024)  # fmt: skip
        if settings is not None:
            given["additional_config"] = {"turboquant": settings}
        self.llm = LLM(**given | options)
        self.config = self.llm.llm_engine.vllm_config
        layers = self.config.compilation_config.static_forward_context
        self.impls = {type(layer.impl).__name__ for layer in layers.values()}
        assert self.impls == ({"CPUAttentionBackendImpl"} if settings is None else {"PackedImpl"})
        self.blocks = self.config.cache_config.num_gpu_blocks
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def __enter__(self):
        return self

    def __exit__(self, *_):
        del self.llm, self.runner
        gc.collect()

    def generate(self, prompts, **sampling):
        found = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(**sampling),
                                  use_tqdm=False)  # fmt: skip
        return found

    def texts(self, prompts, tokens):
        return [one.outputs[0].token_ids for one in self.generate(prompts, max_tokens=tokens, **GREEDY)]

    def log_probs(self, prompts):
        found = self.generate(prompts, max_tokens=1, prompt_logprobs=0, **GREEDY)
        return np.array([[given[token].logprob for given, token in zip(one.prompt_logprobs[1:], ids[1:])]
                         for one, ids in zip(found, prompts)])  # fmt: skip

    @property
    def builders(self):
        groups = [group for groups in self.runner.attn_groups for group in groups]
        return [builder for group in groups for builder in group.metadata_builders]


@pytest.fixture(scope="session")
def ids():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SMOLLM2)(TEXT.read_text(encoding="utf-8")[:20_000])["input_ids"]


@pytest.fixture(scope="session")
def windows(ids):
    return [ids[:500], ids[500:1000]]


@pytest.fixture(scope="session")
def stock(windows):
    """(log-probabilities, blocks) of vLLM's own cache, while the plug-in is there but not asked for."""
    with Engine() as engine:
        assert AttentionBackendEnum.CPU_ATTN.is_overridden()
        return engine.log_probs(windows), engine.blocks


def test_nothing_configured_is_vllm(stock, windows):
    """Bit for bit what vLLM gives without the plug-in."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    path = AttentionBackendEnum.CPU_ATTN.get_path()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    try:
        with Engine() as engine:
            found = engine.log_probs(windows)
    finally:
        from vllm.v1.attention.backends.registry import register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        _cached_get_attn_backend.cache_clear()
    assert np.array_equal(found, stock[0])


@pytest.fixture(scope="session")
def with_sinks(windows):
    with Engine({}) as engine:
        return engine.log_probs(windows), engine.blocks


def test_eight_bits_are_near_vllm(stock, windows):
    with Engine({"key_bits": 8, "value_bits": 8}) as engine:
        found = engine.log_probs(windows)
        assert 1.9 < engine.blocks / stock[1] < 1.95
    assert abs(found - stock[0]).mean() < 0.05 and abs(found.mean() - stock[0].mean()) < 0.005


def test_sinks_bring_four_bits_nearer(stock, with_sinks, windows):
    with Engine({"sinks": 0}) as engine:
        without = engine.log_probs(windows)
    assert 3.7 < with_sinks[1] / stock[1] < 3.8
    far, near = (abs(found - stock[0]).mean() for found in (without, with_sinks[0]))
    assert near < 0.15 and near < 0.8 * far


@pytest.mark.parametrize("settings", [{"sinks": 0}, {}], ids=["all packed", "sinks"])
def test_a_prefix_hit_gives_what_a_miss_gives(settings, ids):
    """Bit for bit, with chunks that end where the hit ends, so that both multiply matrices of the same sizes."""
    prompt = ids[:870]
    with Engine(settings, enable_prefix_caching=True, max_num_batched_tokens=128) as engine:
        miss, hit = (engine.generate([prompt], max_tokens=20, logprobs=0, **GREEDY)[0] for _ in range(2))
        assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 768)
    for a, b in zip(miss.outputs[0].logprobs, hit.outputs[0].logprobs, strict=True):
        assert {token: x.logprob for token, x in a.items()} == {token: x.logprob for token, x in b.items()}
