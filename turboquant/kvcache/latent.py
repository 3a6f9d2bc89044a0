"""The storage of a layer with latent attention (MLA): one latent and one rotary part a token, which all heads share and
the model expands to keys and values itself. Both are cut into heads of equal size, which are packed as keys without
values; sinks and window hold exact ones. Padding is stored like other tokens, because the model reads all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..plan import Plan
from ..spec import AUTO, CacheSpec
from .shared import Common
from .storage import LayerStorage

__all__ = ["LatentStorage", "latent_spec"]

_dequantize = torch.ops.turboquant.dequantize.default


def latent_spec(spec: CacheSpec) -> CacheSpec:
    """The spec of a layer with latents: the bits of keys, sinks and window, without a wave and a metric.
    NotImplementedError for a spec whose keys are not plain."""
    off: dict[str, Any] = {"centre": "none", "metric": "none"}
    if spec.variance_term == AUTO:
        off["variance_term"] = False
    plain = spec.budget is None and spec.settled().with_(**off)
    if (
        not plain
        or not plain.plan(64).is_plain
        or plain.rotation not in ("hadamard", "none")
        or plain.outliers != "none"
        or plain.variance_term
    ):
        raise NotImplementedError(
            "latent attention takes specs of one number of bits for keys, with Hadamard rotations and the levels of a "
            f"codebook, and without a variance term, got {spec}"
        )
    return plain.with_(value_bits=plain.key_bits)


class LatentStorage(LayerStorage):
    """Latents and rotary parts, [batch, heads, tokens, head_dim]."""

    has_values = False

    def __init__(self, index: int, spec: CacheSpec, shared: Common) -> None:
        super().__init__(index, latent_spec(spec), shared)

    def plan_for(self, kv_heads: int, head_dim: int) -> Plan:
        plan = self.spec.plan(head_dim)
        return Plan(head_dim, plan.key, group=plan.group, codebook=plan.codebook, scale=plan.scale, seed=plan.seed)

    def history(self) -> torch.Tensor:
        """All that is stored, in order, decoded: [batch, heads, tokens, head_dim]."""
        sinks = min(self.spec.sinks, self.tokens)
        window = min(self.spec.window, self.tokens - sinks)
        packed = self.tokens - sinks - window
        parts = []
        if sinks and self.sink_k is not None:
            parts.append(self.sink_k[:, :, :sinks])
        if packed:
            assert self.table is not None
            with self.table.pool.lock:  # forks may add pages
                pages, table = self.pages, self.block_table
            counts = torch.full((len(self.padding),), packed, dtype=torch.int32, device=self.device)
            parts.append(_dequantize(self.plan.words, pages, table, counts, packed, sinks=self.spec.sinks,
                                     dtype=self.dtype, **self.transforms)[0])  # fmt: skip
        if window and self.window_k is not None:
            rows = torch.arange(self.tokens - window, self.tokens, device=self.device) % self.window_k.shape[2]
            parts.append(self.window_k.index_select(2, rows))
        return torch.cat(parts, 2)
