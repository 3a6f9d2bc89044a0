"""Appends a ragged batch to packed pages, and attends for one: the only place where this plug-in calls operators.

Every query reads what was packed, but for the tokens that exact rows have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import operators as _operators  # noqa: F401  # registers them
from .batch import Batch
from .rows import PAGE

__all__ = ["Attention", "Exact", "append", "attend"]

_append, _attend, _merge = (getattr(torch.ops.turboquant, name).default for name in ("append", "attend", "merge"))


@dataclass(frozen=True)
class Exact:
    """Rows of exact keys and values of one layer, [rows, kv_heads, tokens, head_dim] in the model's dtype."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """What a layer's attention computes with.

    words       of its plan
    transforms  the operators' arguments
    """

    words: tuple[int, ...]
    transforms: dict[str, torch.Tensor]
    scale: float
    softcap: float = 0.0
    sliding_window: int = 0
    sinks: Exact | None = None
    tails: Exact | None = None


@dataclass(frozen=True)
class _Run:
    """Neighbouring requests with equally many new tokens, and equally many of them in the window's rows."""

    first: int
    count: int
    tokens: int
    start: int
    recent: int  # tokens in the tail rows


def append(attention: Attention, key: torch.Tensor, value: torch.Tensor, batch: Batch, pages: torch.Tensor) -> None:
    """Packs new keys and values, [tokens, kv_heads, head_dim], into `pages` uint8 [pages, kv_heads, record_bytes], and
    copies those that have exact rows."""
    for run in _runs(batch):
        requests = slice(run.first, run.first + run.count)
        k, v = (_batched(x, run) for x in (key, value))
        _append(attention.words, k, v, batch.lengths[requests], pages, batch.block_table[requests],
                **attention.transforms)  # fmt: skip
        for i in range(run.count):
            _copy_exact(attention, k[i], v[i], batch, run.first + i)


def attend(attention: Attention, query: torch.Tensor, batch: Batch, pages: torch.Tensor, out: torch.Tensor) -> None:
    """Writes to out [tokens, heads, head_dim] what the queries of the same shape see: all tokens up to their own."""
    for run in _runs(batch):
        rows = slice(run.start, run.start + run.count * run.tokens)
        found = _attended(attention, _batched(query, run), batch, run, pages)
        out[rows].view(run.count, run.tokens, *out.shape[1:]).copy_(found.transpose(1, 2))


def _runs(batch: Batch) -> Iterator[_Run]:
    run = None
    for r, length in enumerate(batch.lens):
        tokens = batch.starts[r + 1] - batch.starts[r]
        if not tokens:
            continue
        recent = length - _tail_from(batch, r)
        if run is not None and (run.first + run.count, run.tokens, run.recent) == (r, tokens, recent):
            run = _Run(run.first, run.count + 1, tokens, run.start, recent)
            continue
        if run is not None:
            yield run
        run = _Run(r, 1, tokens, batch.starts[r], recent)
    if run is not None:
        yield run


def _tail_from(batch: Batch, r: int) -> int:
    """The position from which request r's tail rows are read."""
    length = batch.lens[r]
    last = (length - 1) // PAGE
    if batch.tail_reads is None or int(batch.tail_reads[r, last % 2]) < 0:
        return length
    first = max(0, length - batch.window)
    if first < last * PAGE and int(batch.tail_reads[r, 1 - last % 2]) < 0:
        first = last * PAGE
    if batch.sink_rows is not None and int(batch.sink_rows[r]) >= 0:
        first = min(length, max(first, batch.sinks))
    return first


def _batched(x: torch.Tensor, run: _Run) -> torch.Tensor:
    """[requests, heads, tokens, head_dim] of the run's part of [tokens, heads, head_dim]."""
    part = x[run.start : run.start + run.count * run.tokens]
    return part.view(run.count, run.tokens, *x.shape[1:]).transpose(1, 2)


def _copy_exact(attention: Attention, k: torch.Tensor, v: torch.Tensor, batch: Batch, r: int) -> None:
    """New tokens of one request, [kv_heads, tokens, head_dim], into its rows."""
    length = batch.lens[r]
    past = length - k.shape[1]
    if attention.sinks is not None and batch.sink_rows is not None and (row := int(batch.sink_rows[r])) >= 0:
        stop = min(length, attention.sinks.k.shape[2])
        if past < stop:
            for to, new in ((attention.sinks.k, k), (attention.sinks.v, v)):
                to[row, :, past:stop] = new[:, : stop - past]
    if attention.tails is not None and batch.tail_rows is not None:
        last, ring = (length - 1) // PAGE, attention.tails.k.shape[2]
        for page in (last - 1, last):
            row = int(batch.tail_rows[r, page % 2])
            stop = min(length, (page + 1) * PAGE)
            start = max(past, page * PAGE, stop - ring)
            if row >= 0 and start < stop:
                slots = torch.arange(start, stop) % ring
                for to, new in ((attention.tails.k, k), (attention.tails.v, v)):
                    to[row][:, slots] = new[:, start - past : stop - past]


def _attended(attention: Attention, q: torch.Tensor, batch: Batch, run: _Run, pages: torch.Tensor) -> torch.Tensor:
    """[requests, heads, tokens, head_dim]: the softmax over packed tokens, exact first ones and exact last ones."""
    at = slice(run.first, run.first + run.count)
    lengths, table = batch.lengths[at], batch.block_table[at]
    rows = None if attention.sinks is None or batch.sink_rows is None else batch.sink_rows[at]
    sunk = rows is not None and bool((rows >= 0).any())
    options = dict(softmax_scale=attention.scale, softcap=attention.softcap, **attention.transforms)
    if rows is not None and sunk and attention.sinks is not None:
        size = attention.sinks.k.shape[2]
        options["starts"] = torch.where(rows >= 0, size, 0).to(torch.int32).minimum(lengths)
    window = attention.sliding_window
    if not run.recent:
        packed = _attend(attention.words, q, pages, table, lengths, sliding_window=window, **options)
        parts = [packed]
    else:
        parts = [_before_tails(attention, q, run, pages, table, lengths, options), _tails(attention, q, batch, run)]
    if rows is not None and sunk:
        parts.append(_sinks(attention, q, rows, lengths))
    outs, lses = zip(*parts)
    merged: torch.Tensor = outs[0] if len(outs) == 1 else _merge(torch.stack(outs), torch.stack(lses))[0]
    return merged


_Part = tuple[torch.Tensor, torch.Tensor]


def _before_tails(
    attention: Attention, q: torch.Tensor, run: _Run, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
    options: dict[str, object],
) -> _Part:  # fmt: skip
    """Over the packed tokens that lie before those of the tail rows, where the first queries of a long chunk are."""
    before = lengths - run.recent
    early = max(0, run.tokens - run.recent)
    parts = []
    window = attention.sliding_window
    if early:
        parts.append(_attend(attention.words, q[:, :, :early], pages, table, before, sliding_window=window, **options))
    for i in range(early, run.tokens):
        # With a sliding window each query sees another beginning: one call for each. Without, one for all.
        late = slice(i, i + 1) if window else slice(i, run.tokens)
        starts = options.get("starts", torch.zeros_like(before))
        assert isinstance(starts, torch.Tensor)
        if window:
            seen = lengths - (run.tokens - 1 - i) - window
            starts = starts.maximum(seen.to(torch.int32))
        given = {**options, "starts": starts.minimum(before)}
        parts.append(_attend(attention.words, q[:, :, late], pages, table, before, causal=False, **given))
        if not window:
            break
    outs, lses = zip(*parts)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _sinks(attention: Attention, q: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> _Part:
    """Over the exact first tokens; requests without a row see none."""
    assert attention.sinks is not None
    positions = torch.arange(attention.sinks.k.shape[2]).expand(len(rows), -1)
    there = (rows >= 0)[:, None] & (positions < lengths[:, None])
    k, v = (x[rows.clamp(min=0).long()] for x in (attention.sinks.k, attention.sinks.v))
    return _over(attention, q, k, v, positions, there, lengths)


def _tails(attention: Attention, q: torch.Tensor, batch: Batch, run: _Run) -> _Part:
    """Over the exact last tokens, the same number of each request."""
    assert attention.tails is not None and batch.tail_reads is not None
    at = slice(run.first, run.first + run.count)
    lengths = batch.lengths[at]
    positions = lengths[:, None] - run.recent + torch.arange(run.recent)
    row = batch.tail_reads[at].long().gather(1, positions // PAGE % 2)
    slots = positions % attention.tails.k.shape[2]
    k, v = (x[row, :, slots].transpose(1, 2) for x in (attention.tails.k, attention.tails.v))
    return _over(attention, q, k, v, positions, torch.ones_like(positions, dtype=torch.bool), lengths)


def _over(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor,
    there: torch.Tensor, lengths: torch.Tensor,
) -> _Part:  # fmt: skip
    """Causal attention of q [requests, heads, tokens, head_dim] over a few keys and values [requests, kv_heads, n,
    head_dim] at `positions` [requests, n], of which those that are not `there` may hold anything."""
    group, tokens = q.shape[1] // k.shape[1], q.shape[2]
    hidden = ~there[:, None, :, None]
    k, v = (x.float().masked_fill(hidden, 0).repeat_interleave(group, 1) for x in (k, v))
    logits = (q.float() @ k.mT) * attention.scale
    if attention.softcap:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    own = lengths[:, None] - tokens + torch.arange(tokens)
    seen = there[:, None, :] & (positions[:, None, :] <= own[:, :, None])
    if attention.sliding_window:
        seen &= positions[:, None, :] > own[:, :, None] - attention.sliding_window
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0, lse)[..., None])
    return (weights @ v).to(q.dtype), lse
