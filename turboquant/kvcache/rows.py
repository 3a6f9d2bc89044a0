"""What is done to each sequence of a layer on its own: `store_rows`, for forwards with padding between stored and new
tokens or behind the new ones, and `join`, which puts sequences of several layers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .pages import PageTable, outside_autograd
from .rewind import PastWindows
from .storage import LayerStorage

__all__ = ["join", "moved", "store_rows"]

_append_attend = torch.ops.turboquant.append_attend.default


def moved(x: torch.Tensor, by: Sequence[int]) -> torch.Tensor:
    """Shifts sequence b of x [batch, heads, tokens, ..] by by[b] tokens to the right, cyclically."""
    return torch.stack([row.roll(n, 1) for row, n in zip(x, by, strict=True)])


def store_rows(
    stored: LayerStorage,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    padding: tuple[int, ...],
    how: dict[str, Any],
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Does what `LayerStorage.store` does, for a layer without a sliding window where the first padding[b] -
    stored.padding[b] new tokens of sequence b are padding. Each sequence is a batch of its own. Padding gets 0 as out
    and -inf as lse."""
    table, new = stored.table, key.shape[2]
    assert table is not None
    after = stored.tokens + new
    out = query.new_zeros(query.shape)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32) if return_lse else None
    if after > stored.exact_ready:
        stored.make_exact_room(after)
    with table.pool.lock:
        undo, begun = stored.reserve_pages(after, padding), False
        exact = stored.exact()
        try:
            for b, first in enumerate(masked - known for masked, known in zip(padding, stored.padding)):
                if first >= new:
                    continue
                row, some = slice(b, b + 1), slice(first, new)
                step = {**how, **stored.turned(row), **{name: tensor[row] for name, tensor in exact.items()}}
                if stored.flag is not None:
                    step["flag"] = flag = torch.zeros_like(stored.flag)
                if lse is not None:
                    step["lse"] = part = query.new_empty((1, query.shape[1], new - first), dtype=torch.float32)
                begun = True
                out[row, :, some] = _append_attend(
                    stored.plan.words, query[row, :, some], key[row, :, some], value[row, :, some], lengths[row],
                    stored.pages, stored.block_table[row], **step
                )  # fmt: skip
                if lse is not None:
                    lse[row, :, some] = part
                if stored.flag is not None:  # in `flag` this is sequence 0
                    stored.flag.copy_(torch.where((stored.flag == 0) & (flag != 0), flag + (b << 32), stored.flag))
        except BaseException:
            if begun:
                stored.damaged = True  # some sequences hold the new tokens already
            else:
                undo()
            raise
    stored.tokens, stored.padding, stored.sliding_window = after, padding, 0
    stored.past, stored.least = PastWindows(), after
    return out, lse


@outside_autograd
def join(joined: LayerStorage, parts: Sequence[LayerStorage]) -> None:
    """Makes `joined`, an empty layer of a cache of its own, hold the sequences of `parts`, one after the other, as a
    batch with padding on the left. Pages of forks are shared, others copied."""
    tokens, first = max(part.tokens for part in parts), parts[0]
    assert first.shape is not None
    for part in parts:
        part.bring_back()
    tables = [part.table for part in parts]
    rows = max(part.sinks for part in parts), max(part.window for part in parts)
    exact = [{**part.exact(), **part.exact_of_rows(*rows)} for part in parts]
    state: dict[str, Any] = {name: torch.cat([tensors[name] for tensors in exact]) for name in exact[0]}
    state["table"] = PageTable.joined([table for table in tables if table is not None])
    if first.flag is not None:
        state["flag"] = torch.zeros_like(first.flag)
    joined.__dict__.update({**first.__dict__, **state, "shared": joined.shared})
    joined.tokens = tokens
    joined.padding = tuple(tokens - part.tokens + pad for part in parts for pad in part.padding)
    joined.released = max(part.released and part.released + tokens - part.tokens for part in parts)
    joined.shape = (len(joined.padding), *first.shape[1:])
    joined.hold_exact({})  # counts the rows
    joined.hold_shifts(tuple(shift for part in parts for shift in part.shifts))
    joined.least = max(part.least and part.least + tokens - part.tokens for part in parts)
    joined.past, joined.damaged = PastWindows(), False
    joined.begin()
