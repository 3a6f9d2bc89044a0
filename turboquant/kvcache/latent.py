"""The storage of a layer with latent attention (MLA). All heads share one latent and one rotary part for each token;
the model itself expands them to keys and values. Both are cut into heads of equal size, which are packed as keys
without values. Sinks and window keep exact ones. Padding is stored like other tokens, because the model reads all of
them."""

from __future__ import annotations

import torch

from .pieces import PieceStorage

__all__ = ["LatentStorage"]

_dequantize = torch.ops.turboquant.dequantize.default


class LatentStorage(PieceStorage):
    """Latents and rotary parts, [batch, heads, tokens, head_dim]."""

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
