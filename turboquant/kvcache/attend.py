"""Attention of a forward's queries before its tokens are stored: `attend` over the stored tokens and PyTorch's own
attention over the new ones, merged into one softmax."""

from __future__ import annotations

from typing import Any

import torch

from .chunk import attention_in_chunk, merged
from .decoded import attend_to_decoded, decodes, reads_packed_chunks
from .sliding import attention_behind_window, visible_past
from .tensors import LayerTensors
from .variance import wide_queries

__all__ = ["attend_in_parts", "reads_in_parts"]

_attend = torch.ops.turboquant.attend.default

# From this many new tokens on, PyTorch's own attention over them is faster than `attend` over all tokens. Drafts of
# speculative decoding are usually shorter, and are verified as their tokens would be decoded one by one.
IN_PARTS_FROM = {"cpu": 32, "cuda": 128}

_Attended = tuple[torch.Tensor, torch.Tensor | None]  # out, lse


def reads_in_parts(stored: LayerTensors, new: int) -> bool:
    """Whether a forward's queries attend to its own tokens, not packed yet, and to stored tokens separately."""
    if stored.spec.prefill == "packed":
        return False
    if not stored.tokens:
        return True
    return new >= IN_PARTS_FROM.get(stored.device.type, 2)


def attend_in_parts(
    stored: LayerTensors,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    padding: tuple[int, ...],
    how: dict[str, Any],
    return_lse: bool = False,
) -> _Attended:
    """Attends in parts; arguments and result are those of `LayerStorage.store`. If a sliding window hides some tokens,
    the visible ones are decoded, and PyTorch's attention alone reads them (`sliding`). `stored` may be empty."""
    before, new, sliding_window = stored.tokens, key.shape[2], how["sliding_window"]
    scale, softcap = how["softmax_scale"], how["softcap"]
    if sliding_window and before + new - min(padding) > sliding_window:  # it hides some tokens from some queries
        past = visible_past(stored, lengths, key, value, padding, sliding_window)
        query = wide_queries(query, stored, scale)
        return attention_behind_window(
            query, past, key, value, before, lengths, sliding_window, scale, softcap, return_lse
        )
    arguments, exact = stored.arguments(), 0
    earlier = []
    packed = stored.packed(before, padding)
    decoded = min(packed) > 0 and decodes(stored, query, max(packed), softcap)
    if stored.sinks + stored.window <= before - max(padding):  # all exact rows hold tokens: PyTorch can read them too
        sizes = {"sink": stored.sinks, "window": stored.window}
        if stored.plan.wave_pairs and not decoded:  # `attend` derives positions from the number of sinks
            if reads_packed_chunks(stored, query):
                offset = stored.shared.offsets(stored.shifts, stored.device, more=stored.sinks)
                arguments |= {} if offset is None else {"position_offset": offset}
            else:
                del sizes["sink"]
        exact = sum(sizes.values())
        earlier = [(arguments.pop(f"{part}_k"), arguments.pop(f"{part}_v")) for part, rows in sizes.items() if rows]
    pad = tuple(max(0, pad - before) for pad in padding)
    own = attention_in_chunk(query, earlier, key, value, scale, softcap, pad)
    if before - min(padding) <= exact:
        return own
    if decoded:
        seen = attend_to_decoded(stored, query, packed, scale)
        return merged(seen, own), torch.logaddexp(seen[1], own[1]) if return_lse else None
    assert stored.table is not None
    with stored.table.pool.lock:  # forks may add pages
        where = stored.pages, stored.block_table
    count = stored.shared.earlier(lengths, new + exact)
    equal = stored.shared.equal_schedule(before, padding, stored.device)
    how = {**how, "sliding_window": 0, "causal": False, "schedule": equal}
    past = _attend(stored.plan.words, query, *where, count, **how, **arguments)
    return merged(past, own), torch.logaddexp(past[1], own[1]) if return_lse else None
