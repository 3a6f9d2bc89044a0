"""Attention of layers that have no keys and values of their own and read those of an earlier layer (Gemma 4, Gemma 3n).
The earlier layer has stored the forward's tokens by then; the later ones see what it saw."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from .attend import attend_in_parts, reads_in_parts

if TYPE_CHECKING:
    from .storage import LayerStorage

__all__ = ["Seen", "attend_again"]

_attend = torch.ops.turboquant.attend.default


@dataclass
class Seen:
    """A forward as a layer saw it, for later layers.

    before       the layer before it stored the tokens: its pages, and copies of what storing them overwrites
    key, value   keys and values of the new tokens, [batch, kv_heads, tokens, head_dim]
    lengths      int32 [batch], lengths of the sequences with these tokens
    padding      padding in front of each sequence
    how          the argument of `LayerStorage.store`
    """

    before: LayerStorage
    key: torch.Tensor
    value: torch.Tensor
    lengths: torch.Tensor
    padding: tuple[int, ...]
    how: dict[str, Any]

    @classmethod
    def of(cls, stored: LayerStorage, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Seen:
        """Records a layer that is about to store tokens. If it is one token, nothing is copied."""
        if key.shape[2] > 1:
            stored.make_exact_room(stored.tokens + key.shape[2])
        before = copy(stored)
        if key.shape[2] > 1 and stored.window_k is not None and stored.window_v is not None:
            before.window_k, before.window_v = stored.window_k.clone(), stored.window_v.clone()
        return cls(before, key, value, *rest)


def attend_again(
    stored: LayerStorage, seen: Seen, query: torch.Tensor, how: dict[str, Any], return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (out, lse) for queries [batch, query_heads, tokens, head_dim] of the last new tokens. stored: the layer,
    which now holds the new tokens; how: as in `LayerStorage.store`."""
    new, asked = seen.key.shape[2], query.shape[2]
    if 1 < asked < new:
        out, lse = attend_again(stored, seen, pad(query, (0, 0, new - asked, 0)), how, return_lse)
        return out[:, :, -asked:], None if lse is None else lse[:, :, -asked:]
    if asked > 1 and reads_in_parts(seen.before, new):
        return attend_in_parts(seen.before, query, seen.key, seen.value, seen.lengths, seen.padding, how, return_lse)
    arguments, window_k, window_v = stored.arguments(), seen.before.window_k, seen.before.window_v
    if asked > 1 and window_k is not None and window_v is not None:
        # The first queries see what the last new tokens push out of the window.
        window = {"window_k": window_k, "window_v": window_v}
        arguments = {**arguments, **window, "fresh_k": seen.key, "fresh_v": seen.value}
    assert stored.table is not None
    with stored.table.pool.lock:  # forks may add pages
        where = stored.pages, stored.block_table
        schedule = stored.shared.schedule(
            stored, query, seen.lengths, stored.tokens, seen.padding, how["sliding_window"]
        )
    return _attend(stored.plan.words, query, *where, seen.lengths, schedule=schedule, **how, **arguments)  # type: ignore[no-any-return]
