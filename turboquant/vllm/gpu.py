"""The metadata builder for GPUs, where the host does not know block tables or, with drafts, exact lengths; and the
attention of chunks."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from ..ops import schedule_rows
from .backend import Builder
from .batch import Batch
from .device_rows import DeviceSinks
from .ragged import Attention
from .rows import PAGE
from .steps import Schedule, Step

__all__ = ["GpuBuilder", "dense_attention"]

TELL = 64  # steps between two copies of the counts of rows to the host


class GpuBuilder(Builder):
    """Makes the `Step` of a batch without waiting for the device. Tensors that CUDA graphs see have fixed addresses:
    vLLM's own, the rows of first tokens, and the schedules."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.drafts = vllm_config.speculative_config is not None
        requests = vllm_config.scheduler_config.max_num_seqs
        self.tables = defaultdict[Any, torch.Tensor](partial(self._new_table, requests))
        self.sink_rows = torch.full((requests,), -1, dtype=torch.int32, device=device)
        self.steps, self.exact_count, self.lost = 0, 0, 0
        self.told = torch.zeros(3, dtype=torch.int64).pin_memory() if device.type == "cuda" else torch.zeros(3).long()
        self.sinks = self._table()

    def _new_table(self, requests: int) -> torch.Tensor:
        return torch.zeros(schedule_rows(requests, self.device), 4, dtype=torch.int32, device=self.device)

    def _table(self) -> DeviceSinks | None:
        """Returns the rows of first tokens. None if the spec has no sinks, or while vLLM measures its memory: then it
        makes builders before it has counted blocks."""
        size, blocks = self.engine.settings.exact[0], self.vllm_config.cache_config.num_gpu_blocks
        if not size or blocks is None:
            return None
        spec = self.kv_cache_spec
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
        pages = blocks * max(1, self.vllm_config.cache_config.block_size // PAGE)  # spec.block_size is the kernels'
        return DeviceSinks(self.engine.rows, size, pages, self.device, window)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        m = common_attn_metadata
        starts, bounds = m.query_start_loc_cpu.numpy(), m.seq_lens_cpu_upper_bound.numpy()[: m.num_reqs]
        counts = starts[1:] - starts[:-1]
        past = bounds - counts
        rows = None
        self.sinks = self.sinks or self._table()
        if self.sinks is not None:
            begins = bool(((past == 0) & (counts > 0)).any())
            enters = self.drafts or bool(((bounds - 1) // PAGE > (past - 1) // PAGE).any())
            row_of = self.sinks.rows_of(m.query_start_loc, m.seq_lens, m.block_table_tensor, m.max_query_len,
                                       begins=begins, enters=enters)  # fmt: skip
            rows = self.sink_rows[: m.num_reqs].copy_(row_of)
            self._count()
        whole = Batch(m.query_start_loc, m.seq_lens, m.block_table_tensor, rows, None, None, 0, m.max_query_len)
        few = self.reorder_batch_threshold or 1
        n = int((counts <= few).argmin()) if (counts > few).any() else len(counts)
        on_gpu = self.device.type == "cuda"
        schedule = Schedule(self.tables, schedule_rows(n, self.device)) if n and on_gpu else None
        return Step.of(whole, starts, bounds, few, schedule)

    def _count(self) -> None:
        """Every `TELL` steps, passes the last copy of the device's counts to metrics and log, and starts the next."""
        if self.steps % TELL == 0:
            assert self.sinks is not None
            exact, lost, _ = self.told.tolist()
            self.count(exact - self.exact_count, lost - self.lost)
            self.told.copy_(self.sinks.counts, non_blocking=True)
        self.steps += 1


def dense_attention(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_loc: torch.Tensor, k_loc: torch.Tensor,
    most_q: int, most_k: int, causal: bool, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A `steps.Dense` that runs vLLM's FlashAttention."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    window = [attention.sliding_window - 1, 0] if causal and attention.sliding_window else None
    output = flash_attn_varlen_func(
        q, k, v, max_seqlen_q=most_q, cu_seqlens_q=q_loc, max_seqlen_k=most_k, cu_seqlens_k=k_loc,
        softmax_scale=attention.scale, causal=causal, window_size=window, softcap=attention.softcap,
        return_softmax_lse=True, out=out, fa_version=get_flash_attn_version(head_size=q.shape[-1]),
    )  # fmt: skip
    lse: torch.Tensor = output[1]
    return lse
