"""The storage of a layer whose keys and values are not two vectors of one size: it has latents, or values that are
narrower or wider than keys. What is stored for a token and a KV head is cut into pieces of equal size, which are packed
as heads of keys without values. Sinks and window keep exact ones."""

from __future__ import annotations

from typing import Any

import torch

from ..plan import Plan
from ..spec import AUTO, CacheSpec
from .shared import Common
from .storage import LayerStorage

__all__ = ["LatentStorage", "PieceStorage", "pieces_spec"]

_dequantize = torch.ops.turboquant.dequantize.default


def pieces_spec(spec: CacheSpec, unequal: bool = False) -> CacheSpec:
    """The spec of a layer with latents: the bits of keys, sinks and window, without a wave and a metric. unequal: the
    layer has keys and values of different sizes instead, which must have the same bits. Raises NotImplementedError for
    a spec whose keys are not plain."""
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
        or (unequal and plain.plan(64).value != plain.plan(64).key)
    ):
        what, bits = "latent attention takes", "for keys"
        if unequal:
            what, bits = "keys and values of different sizes take", "for both"
        raise NotImplementedError(
            f"{what} specs of one number of bits {bits}, with Hadamard rotations and the levels of a codebook, and "
            f"without a variance term, got {spec}"
        )
    return plain.with_(value_bits=plain.key_bits)


class PieceStorage(LayerStorage):
    """Pieces, [batch, KV heads * pieces, tokens, channels of a piece]."""

    has_values = False

    def __init__(self, index: int, spec: CacheSpec, shared: Common, unequal: bool = False) -> None:
        super().__init__(index, pieces_spec(spec, unequal), shared)

    def plan_for(self, kv_heads: int, head_dim: int) -> Plan:
        plan = self.spec.plan(head_dim)
        return Plan(head_dim, plan.key, group=plan.group, codebook=plan.codebook, scale=plan.scale, seed=plan.seed,
                    tries=plan.tries)  # fmt: skip


class LatentStorage(PieceStorage):
    """The latents and rotary parts of a layer with latent attention (MLA), [batch, heads, tokens, head_dim]. All heads
    of the model share them; the model itself expands them to keys and values. Padding is stored like other tokens,
    because the model reads all of them."""

    def history(self) -> list[torch.Tensor]:
        """Returns all stored tokens, decoded, in consecutive parts: each [batch, heads, tokens, head_dim]."""
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
        return parts
