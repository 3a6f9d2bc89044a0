"""Engines of vLLM for tests, in this process, and a check that no exact row is read where it was not written."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm has an environment with it")

ENVIRONMENT = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="INFO", VLLM_CPU_CI_ENV="1",
)  # fmt: skip
os.environ.update(ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import vllm.model_executor.models.registry as model_registry  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from turboquant.vllm.rows import PAGE  # noqa: E402

GREEDY = dict(temperature=0.0, ignore_eos=True, detokenize=False)

# vLLM would inspect each kind of model in a process of its own, which imports torch again.
model_registry._run_in_subprocess = lambda function: function()
# vLLM would replace its kernels for each engine, and search all modules for them. It stumbles over llvmlite, which
# n-gram speculation imports, so here it does that once.
_replace_kernels, _replaced = current_platform.register_triton_kernel_overrides, []
type(current_platform).register_triton_kernel_overrides = staticmethod(
    lambda: _replaced or _replaced.append(_replace_kernels())
)


class Engine:
    """An engine, and what is asked of it. settings: those under "turboquant"; None: vLLM's own cache."""

    def __init__(self, settings, model, **options):
        given = dict(model=str(model), dtype="bfloat16", max_model_len=1024, max_num_seqs=8, enforce_eager=True, seed=0,
                     enable_prefix_caching=False, max_num_batched_tokens=1024, skip_tokenizer_init=True)  # fmt: skip
        if settings is not None:
            given["additional_config"] = {"turboquant": settings}
        self.llm = LLM(**given | options)
        self.config = self.llm.llm_engine.vllm_config
        context = self.config.compilation_config.static_forward_context
        self.layers = {name: layer for name, layer in context.items() if hasattr(layer, "impl")}  # experts have none
        impls = {type(layer.impl).__name__ for layer in self.layers.values()}
        assert impls == ({"CPUAttentionBackendImpl"} if settings is None else {"PackedImpl"})
        self.blocks = self.config.cache_config.num_gpu_blocks
        self.core = self.llm.llm_engine.engine_core
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.preempted, self.steps = 0, 0
        self._count()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.core.shutdown()  # before the next engine starts, whoever still refers to this one
        del self.llm, self.core, self.runner, self.layers
        gc.collect()

    def _count(self):
        scheduler = self.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def counted(*args, **more):
            self.steps += 1
            return schedule(*args, **more)

        def counted_too(*args, **more):
            self.preempted += 1
            return preempt(*args, **more)

        scheduler.schedule, scheduler._preempt_request = counted, counted_too

    @property
    def scheduler(self):
        return self.core.engine_core.scheduler

    @property
    def builders(self):
        groups = [group for groups in self.runner.attn_groups for group in groups]
        return [builder for group in groups for builder in group.metadata_builders]

    def poison(self):
        """Puts NaN into rows wherever nothing may be read: into all of them now, into those of a block whenever a
        request takes it and, without a prefix cache (which keeps blocks), whenever a block is freed."""
        pool = self.scheduler.kv_cache_manager.block_pool
        take, free = pool.get_new_blocks, pool.free_blocks
        pages = self.config.cache_config.block_size // PAGE
        for builder in self.builders:
            for rows, _ in self._rows(builder):
                rows.k.fill_(torch.nan), rows.v.fill_(torch.nan)

        def end(blocks):
            blocks = list(blocks)
            for builder in self.builders:
                for rows, table in self._rows(builder):
                    for page in (block.block_id * pages + i for block in blocks for i in range(pages)):
                        if (held := table.of.get(page)) is not None:
                            rows.k[held.number], rows.v[held.number] = torch.nan, torch.nan

        def taken(count):
            blocks = take(count)
            end(blocks)
            return blocks

        def freed(blocks):
            blocks = list(blocks)
            free(blocks)
            if not pool.enable_caching:
                end(block for block in blocks if not block.ref_cnt)

        pool.get_new_blocks, pool.free_blocks = taken, freed

    def _rows(self, builder):
        """Yields (rows of a layer, their table) for all layers of a builder."""
        for name in builder.layer_names:
            attention = self.layers[name].impl.attention
            for rows, table in ((attention.sinks, builder.rows.sinks), (attention.tails, builder.rows.tails)):
                if rows is not None:
                    yield rows, table

    def generate(self, prompts, lora_request=None, **sampling):
        how = SamplingParams(**GREEDY | sampling)
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False,
                                 lora_request=lora_request)  # fmt: skip

    def texts(self, prompts, tokens):
        """Returns the tokens that follow each prompt. A NaN anywhere fails."""
        found = [one.outputs[0] for one in self.generate(prompts, max_tokens=tokens, logprobs=0)]
        assert np.isfinite([one.cumulative_logprob for one in found]).all()
        return [list(one.token_ids) for one in found]

    def log_probs(self, prompts, lora_request=None):
        """Returns the log-probabilities of all tokens of all prompts but each first one."""
        found = self.generate(prompts, lora_request, max_tokens=1, prompt_logprobs=0)
        log_probs = np.array([given[token].logprob for one, ids in zip(found, prompts, strict=True)
                              for given, token in zip(one.prompt_logprobs[1:], ids[1:], strict=True)])  # fmt: skip
        assert np.isfinite(log_probs).all()
        return log_probs


def log_probs_of(model, prompts):
    """As `Engine.log_probs`, for a model of transformers."""
    found = []
    with torch.no_grad():
        for ids in prompts:
            log_probs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            found += log_probs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    return np.array(found)


DEMO = Path(__file__).parents[2] / "demo" / "turboquant_demo"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Sets where `turboquant measure` keeps profiles."""
    os.environ["TURBOQUANT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo's model, measured, without its profile, which vLLM would load as weights."""
    from turboquant.cli import main

    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("profile.safetensors"))
    assert main(["measure", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def tokens_of():
    """The demo's text as a model's tokens."""
    from transformers import AutoTokenizer

    text = (DEMO / "a_christmas_carol.txt").read_text(encoding="utf-8")
    return lambda folder: AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


@pytest.fixture(scope="session")
def ids(demo, tokens_of):
    return tokens_of(demo)
