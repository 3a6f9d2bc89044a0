"""The adapter for vLLM before 0.29, in which a backend sets the shape of a cache, and a layer the size of its pages.
Tested with vLLM 0.26 on CUDA, with both of its model runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import backend
from .layers import Layer
from .rows import PAGE

__all__ = ["PackedBackend", "PackedImpl"]


class PackedBackend(backend.PackedBackend):
    """A block is [kv_heads, tokens, bytes]: a head's bytes are one record after the other."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        return PackedImpl

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, cls.record_bytes // PAGE

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        return "HND"

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        return True


class PackedImpl(backend.PackedImpl):
    """Layers of this adapter."""

    backend = PackedBackend
    supports_quant_query_input = False

    def adopt(self, layer: Any, prepared: Layer) -> None:
        super().adopt(layer, prepared)
        layer.get_kv_cache_spec = _sized(layer.get_kv_cache_spec, prepared.plan.record_bytes // PAGE)


def _sized(spec_of: Callable[[Any], Any], token_bytes: int) -> Callable[[Any], Any]:
    """Wraps `spec_of` for tokens of `token_bytes` a head, halved here because vLLM counts a key and a value apart."""

    def sized(config: Any) -> Any:
        spec = spec_of(config)
        block = -(-spec.block_size // PAGE) * PAGE  # with a sliding window, vLLM takes its smallest block size
        key = token_bytes // 2
        return replace(spec, block_size=block, dtype=torch.uint8, head_size=key, head_size_v=token_bytes - key)

    return sized
