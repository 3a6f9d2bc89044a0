"""What an engine may not have beside packed caches. Found before anything is loaded, with a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .rows import PAGE

__all__ = ["check_engine", "check_exact", "check_kind", "check_layer"]

_PACKS = "turboquant packs"
_OFF = 'or remove "turboquant" from --additional-config'
_DTYPE = '--kv-cache-dtype must be auto or bfloat16, got {}: the preset under "turboquant" sets the bits'
_PLAIN_DTYPES = ("auto", "float16", "bfloat16", "float32")


def check_engine(config: Any) -> None:
    """Raises ValueError for a `VllmConfig` that cannot have packed caches, naming each reason and what to do."""
    if reasons := list(_of_engine(config)):
        raise ValueError("; ".join(reasons))


def _of_engine(config: Any) -> Iterator[str]:
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    device = _get(_get(config, "device_config"), "device_type", "cpu")
    if device not in ("cpu", "cuda"):
        yield f"turboquant serves vLLM on CPUs and CUDA, got a device of type {device!r}: {_OFF.removeprefix('or ')}"
    if _get(parallel, "use_ubatching"):
        yield f"{_PACKS} no batches that are halved: remove --enable-dbo and --ubatch-size"
    if _get(model, "use_mla"):
        yield f"{_PACKS} no MLA models, whose keys are one latent vector: serve another model, {_OFF}"
    if _get(model, "is_hybrid"):
        yield f"{_PACKS} no hybrids with linear attention or Mamba layers in vLLM yet: {_OFF.removeprefix('or ')}"
    if _get(_get(model, "hf_text_config"), "attention_chunk_size"):
        yield f"{_PACKS} no chunked attention in vLLM yet: {_OFF.removeprefix('or ')}"
    if _get(model, "is_encoder_decoder"):
        yield f"{_PACKS} no cross attention: serve a decoder, {_OFF}"
    if _get(model, "is_mm_prefix_lm"):
        yield f"{_PACKS} no images whose tokens see each other (use_mm_prefix): {_OFF.removeprefix('or ')}"
    if _get(model, "uses_mrope") and _takes_images(model):
        yield (f"{_PACKS} no images with M-RoPE, whose positions run apart from the token's index: pass "
               "--language-model-only for text alone")  # fmt: skip
    if (dtype := str(cache.cache_dtype)) not in _PLAIN_DTYPES:
        yield _DTYPE.format(dtype)
    block = cache.block_size
    if block is not None and block % PAGE and _get(cache, "user_specified_block_size", True):
        yield f"--block-size must be a multiple of {PAGE}, got {block}"
    if _get(parallel, "decode_context_parallel_size", 1) > 1 or _get(parallel, "prefill_context_parallel_size", 1) > 1:
        yield f"{_PACKS} no caches that context parallelism splits: pass --decode-context-parallel-size 1"
    if _get(parallel, "pipeline_parallel_size", 1) > 1:
        yield "pipeline parallelism is not tested with turboquant: pass --pipeline-parallel-size 1"
    if _get(config, "kv_transfer_config") is not None:
        yield "KV connectors do not know turboquant's pages yet: remove --kv-transfer-config and --kv-offloading-size"
    if (speculation := _get(config, "speculative_config")) is not None and _get(speculation, "method") != "ngram":
        yield (f"speculation by the method {_get(speculation, 'method')!r} is not tested with turboquant in vLLM yet: "
               'pass "ngram", or remove --speculative-config')  # fmt: skip


def check_exact(window: int, device: str) -> None:
    """Raises ValueError for a window of exact tokens on a GPU."""
    if window and device != "cpu":
        raise ValueError(f'"window" of turboquant must be 0 on {device} so far, got {window}')


def _takes_images(model: Any) -> bool:
    multimodal = _get(model, "multimodal_config")
    return multimodal is not None and not _get(multimodal, "language_model_only")


def check_layer(
    head_dim: int, attn_type: str, alibi: object, shares: str | None, dtype: str, others: Mapping[str, object]
) -> None:  # fmt: skip
    """Raises ValueError for an attention layer that cannot be packed. others: arguments unknown to this package."""
    if dtype not in _PLAIN_DTYPES:  # a checkpoint may name one
        raise ValueError(_DTYPE.format(dtype))
    if attn_type != "decoder":
        raise ValueError(f"{_PACKS} no {attn_type} attention: serve a decoder, {_OFF}")
    if alibi is not None:
        raise ValueError(f"{_PACKS} no ALiBi attention: serve another model, {_OFF}")
    if shares is not None:
        raise ValueError(f"{_PACKS} no layers that read the cache of another one ({shares}) yet: {_OFF}")
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"{_PACKS} heads of 8 to 256 channels, a multiple of 8, got {head_dim}: "
                         f"{_OFF.removeprefix('or ')}")  # fmt: skip
    for name, value in others.items():
        if value not in (None, False, -1):
            raise ValueError(f"{_PACKS} no attention with {name}={value!r} in vLLM: {_OFF.removeprefix('or ')}")


def check_kind(kind: str, head_dim: int, value_dim: int) -> None:
    """Raises ValueError for a layer of another class than vLLM's `Attention`, which may mask, store or read keys in
    another way, and for one whose keys and values differ in size."""
    if kind != "Attention":
        raise ValueError(f"{_PACKS} no layers of the class {kind} in vLLM: {_OFF.removeprefix('or ')}")
    if value_dim != head_dim:
        raise ValueError(f"{_PACKS} heads whose keys and values have equally many channels, got {head_dim} and "
                         f"{value_dim}: {_OFF.removeprefix('or ')}")  # fmt: skip


def _get(of: Any, name: str, default: Any = None) -> Any:
    return getattr(of, name, default)
