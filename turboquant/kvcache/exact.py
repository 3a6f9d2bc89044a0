"""Sinks and window of a layer, which hold tokens in the model's dtype and grow with the tokens.

A window is a ring (turboquant.h, "the cache"): position p lies in row p % rows. As long as no token has left the
window, a ring of fewer rows holds the same tokens as the whole one; the operators take its size from its shape.
"""

from __future__ import annotations

import torch

from ..spec import CacheSpec

__all__ = ["exact_rows", "laid_out", "with_room"]

_LEAST = 16  # the fewest rows to allocate


def exact_rows(spec: CacheSpec, positions: int) -> tuple[int, int]:
    """Rows of sinks and of the window that sequences of this many positions need."""
    return min(spec.sinks, positions), min(spec.window, max(0, positions - spec.sinks))


def with_room(have: int, need: int, most: int) -> int:
    """Rows to allocate where `have` rows exist and `need` are needed. The number at least doubles, up to `most`, so
    that all copies together move at most twice the last size."""
    return have if have >= need else min(most, max(need, 2 * have, _LEAST))


def laid_out(ring: torch.Tensor, rows: int, sinks: int) -> torch.Tensor:
    """Lays out a ring [batch, kv_heads, any, head_dim] in `rows` rows. A ring of that size is returned as it is.

    It holds the tokens of positions `sinks` and on, and both sizes must have room for all of them.
    """
    batch, heads, have, channels = ring.shape
    if have == rows:
        return ring
    positions = torch.arange(sinks, sinks + min(have, rows), device=ring.device)
    out = ring.new_zeros(batch, heads, rows, channels)
    return out.index_copy_(2, positions % rows, ring.index_select(2, positions % have)) if len(positions) else out
