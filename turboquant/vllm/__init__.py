"""Packed KV caches in vLLM: a plug-in, loaded through the entry point group `vllm.general_plugins`.

It does nothing until an engine is given `--additional-config '{"turboquant": {...}}'`. Scheduler, blocks and prefix
cache stay vLLM's; a block of the packed cache is one or several pages of 128 tokens.

    settings     what the configuration asks for
    refusals     what an engine may not have, and what to do about it
    rows         which rows hold the exact tokens of which block
    batch        one step's requests, as operators take them
    device_rows  the same as rows, where the host has no block table
    ragged       appends a ragged batch, and attends for one
    steps        a step on a GPU: few tokens of many requests, and chunks of prompts
    layers       plan, transforms and exact rows of each layer, for one engine
    backend      vLLM's backend, metadata builder and implementation
    gpu          the builder for GPUs
    by_spec      the adapter for vLLM 0.29 and newer
    by_shape     the adapter for older releases, on CUDA
    versions     the releases that were tested
    choose       the classes that vLLM resolves by name
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Tells vLLM where the backend is. Runs in each of vLLM's processes, perhaps more than once."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "turboquant.vllm.choose.Custom")
    if current_platform.is_cpu():  # where `--attention-backend` is ignored
        register_backend(AttentionBackendEnum.CPU_ATTN, "turboquant.vllm.choose.CpuAttention")
        for name in ("CPU_MLA", "AMX_MLA"):
            if name in AttentionBackendEnum.__members__:
                register_backend(AttentionBackendEnum[name], f"turboquant.vllm.choose.{name}")
