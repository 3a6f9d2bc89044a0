"""The builder for GPUs and its steps, inside vLLM's engine on a CPU: the table of exact rows as tensors, chunks that
attend to themselves exactly. A slow reference replaces FlashAttention."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engines import Engine  # isort: skip  # skips without vLLM
from paged_engine import dense_attention

from turboquant.vllm import backend, gpu

pytest_plugins = ["engines"]  # its fixtures
EIGHT = {"key_bits": 8, "value_bits": 8}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend.PackedBackend, "get_builder_cls", staticmethod(lambda: gpu.GpuBuilder))
    monkeypatch.setattr(gpu, "dense_attention", dense_attention)


def lost(engine):
    return sum(int(builder.sinks.counts[1]) for builder in engine.builders)


def test_chunks_and_decoding_are_near_vllm(demo, ids):
    windows, prompts = [ids[:500], ids[500:1000]], [ids[:250], ids[300:420], [ids[7]], ids[600:900]]
    with Engine(None, demo) as engine:
        stock = engine.log_probs(windows)
    for settings, near in ((EIGHT, 0.03), ({}, 0.2)):
        found = []
        for tokens in (1024, 130):
            with Engine(settings, demo, max_num_batched_tokens=tokens) as engine:
                assert isinstance(engine.builders[0], gpu.GpuBuilder)
                found.append(engine.log_probs(windows))
                engine.texts(prompts, 150)
                assert not lost(engine)
        whole, parts = found
        assert abs(whole - stock).mean() < 0.02  # one chunk reads nothing that is packed
        assert 0 < abs(parts - stock).mean() < near


def test_hits_preemption_and_drafts(demo, ids):
    """With hits and preemption no NaN is read and no row is lost; texts may differ. Drafts change no text."""
    prompts = [ids[200 * i : 200 * i + 250] for i in range(6)]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with Engine({}, demo, dtype="float32", enable_prefix_caching=True, num_gpu_blocks_override=12) as engine:
        poison(engine)
        engine.texts(prompts, 150)
        assert engine.preempted and not lost(engine)
        hits = engine.generate([ids[:250]], max_tokens=5, logprobs=0)[0]
        assert np.isfinite(hits.outputs[0].cumulative_logprob)
    with Engine({}, demo, dtype="float32") as engine:
        poison(engine)
        plain, steps = engine.texts(prompts, 150), engine.steps
    with Engine({}, demo, dtype="float32", speculative_config=speculation) as engine:
        poison(engine)
        assert engine.texts(prompts, 150) == plain
        assert engine.steps < 0.9 * steps and not lost(engine)


def test_builders_that_are_made_before_blocks_are_counted(demo):
    """A builder made before blocks are counted, as by vLLM's runner V1, gets its rows later, with blocks of 2 pages."""
    with Engine({}, demo, block_size=256) as engine:
        config, old = engine.config, engine.builders[0]
        blocks, config.cache_config.num_gpu_blocks = config.cache_config.num_gpu_blocks, None
        builder = gpu.GpuBuilder(old.kv_cache_spec, old.layer_names, config, torch.device("cpu"))
        assert builder.sinks is None
        config.cache_config.num_gpu_blocks = blocks
        numbers = {name: torch.tensor(x, dtype=torch.int32) for name, x in (
            ("query_start_loc", [0, 5]), ("query_start_loc_cpu", [0, 5]), ("seq_lens", [5]),
            ("seq_lens_cpu_upper_bound", [5]), ("block_table_tensor", [[2 * blocks - 1]]))}  # fmt: skip
        step = builder.build(0, SimpleNamespace(num_reqs=1, max_query_len=5, **numbers))
        assert step.whole.sink_rows.tolist() == [0] and len(builder.sinks.row_of) == 2 * blocks


def poison(engine):
    """Puts NaN into rows that nobody may read: into all at first, and into those of a block when a request takes it."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    take = pool.get_new_blocks
    attentions = [layer.impl.attention for layer in engine.layers.values()]
    for attention in attentions:
        attention.sinks.k.fill_(np.nan), attention.sinks.v.fill_(np.nan)

    def taken(count):
        blocks = take(count)
        for builder in engine.builders:
            for block in blocks:
                row = int(builder.sinks.row_of[block.block_id])
                if builder.sinks.owner[row] == block.block_id:
                    for attention in attentions:
                        attention.sinks.k[row], attention.sinks.v[row] = np.nan, np.nan
        return blocks

    pool.get_new_blocks = taken
