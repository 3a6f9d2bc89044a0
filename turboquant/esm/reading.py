"""A decoding step of a ContextCache: its copies, and how their attention reads the store.

A step has a `Shape` and numbers. The shape and the store decide the size of every tensor and every kernel. The numbers,
one int32 tensor, say which tokens run where; all else is computed from them on the device. The host reads none of
them, so a step that was recorded as a CUDA graph can be replayed with other numbers of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..models.attention import Call
from ..models.esm import EOS, PAD
from ..ops import PackedKV
from .attention import PackedAttention, attend
from .store import Store

__all__ = ["Copy", "Reading", "Shape", "described"]

_merge = torch.ops.turboquant.merge.default


@dataclass(frozen=True)
class Copy:
    """One entry of `decode`."""

    row: int  # row of the protein in the store
    tokens: list[int]  # ids of the tokens that run: `asked` residues, then the end token if it moves
    positions: list[int]  # of these tokens
    asked: int
    replaced: list[int]  # positions of the stored tokens that these replace, ascending; at least one
    length: int  # tokens of the stored protein

    @classmethod
    def of(cls, i: int, row: int, n: int, tokens: list[int], at: list[int], config: Any) -> Copy:
        """Returns a copy with `tokens` at residues `at` of a protein of n residues. i: the copy's index in errors."""
        if len(tokens) != len(at):
            raise ValueError(f"`positions[{i}]` must have one entry per residue, {len(tokens)}, got {len(at)}")
        if len(set(at)) != len(at):
            raise ValueError(f"`positions[{i}]` must name each position once, got {at}")
        new = sorted(p for p in at if p >= n)
        for p in at:
            if p < 0 or p >= n + len(new):
                further = f", or continue it from {n}" if p >= n else ""
                raise IndexError(f"`positions[{i}]` must be in 0..{n - 1}{further}, got {p}")
        most = config.max_position_embeddings - 4
        if n + len(new) > most:
            raise ValueError(f"`positions[{i}]` must keep the protein within {most} residues, got {n + len(new)}")
        tokens, where = list(tokens), [p + 1 for p in at]
        if new:
            tokens.append(EOS)
            where.append(n + len(new) + 1)
        replaced = sorted(p for p in where if p < n + 2)
        return cls(row, tokens, where, len(at), replaced, n + 2)

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ranges of stored tokens, start to stop, that it sees. The first begins at 0 and may be empty."""
        edges = [start - 1, *self.replaced, stop]
        ranges = [(before + 1, after) for before, after in pairwise(edges) if after > before + 1]
        return ranges if ranges and ranges[0][0] == 0 else [(0, 0), *ranges]


class Shape(NamedTuple):
    copies: int
    m: int  # the most tokens of a copy
    parts: int  # the most ranges of a copy
    common: bool  # whether all copies are of one protein; they then read tokens before and after all changes together


def described(copies: Sequence[Copy]) -> tuple[Shape, list[int]]:
    """Returns the shape of a step, and its numbers:

    ids, positions    [copies, m] each: tokens that run, padded in front
    rows              [copies], of the store
    starts, stops     [parts, copies] each: ranges that each copy reads alone, counted with m new tokens in front
    starts, stops     [2] each, if `common`: the ranges before and after these, which all copies read
    """
    common = len({c.row for c in copies}) == 1 < len(copies)
    start = min(c.replaced[0] for c in copies) if common else 0
    stop = max(c.replaced[-1] for c in copies) + 1 if common else 0
    pieces = [c.ranges(start, stop if common else c.length) for c in copies]
    m, parts = max(len(c.tokens) for c in copies), max(map(len, pieces))
    ranges = []
    for copy, (first, *others) in zip(copies, pieces):
        unused = [(0, 0)] * (parts - 1 - len(others))
        ranges.append([(m - len(copy.tokens), m + first[1]), *((m + a, m + b) for a, b in others), *unused])
    numbers = [x for c in copies for x in [PAD] * (m - len(c.tokens)) + c.tokens]
    numbers += [x for c in copies for x in [0] * (m - len(c.tokens)) + c.positions]
    numbers += [c.row for c in copies]
    numbers += [own[part][edge] for edge in (0, 1) for part in range(parts) for own in ranges]
    if common:
        numbers += [0, stop, start, copies[0].length]
    return Shape(len(copies), m, parts, common), numbers


class Reading:
    """The context of `decode`: tokens attend to the new keys and values of their copy and to ranges of stored ones.

    New tokens are passed to the operator as sinks in front of the stored ones, so that one softmax covers both. The
    tokens between those that a copy replaces are read in several ranges, whose results are merged. If all copies are of
    one protein, the tokens before the first and after the last replaced one of any copy are read once for all copies.
    Everything that is the same in all layers is made here, before the first layer.

    numbers   int32, as made by `described`, on the device of the store
    layers    by the `id` of each attention module: how its layer packs, and the layer's part of the store
    """

    def __init__(
        self, store: Store, layers: Mapping[int, tuple[PackedAttention, PackedKV]], shape: Shape, numbers: torch.Tensor
    ) -> None:
        copies, m, parts, common = shape
        self.layers, self.shape = layers, shape
        sizes = [2 * copies * m, copies, 2 * parts * copies, 4 if common else 0]
        tokens, self.rows, ranges, shared = numbers.split_with_sizes(sizes)
        self.ids, self.positions = tokens.view(2, copies, m)
        self.starts, self.stops = ranges.view(2, parts * copies)  # each is one sequence in calls of `attend`
        each = self.rows.repeat(parts)
        self.table = store.table.index_select(0, each)
        self.factor = store.factor.index_select(0, self.rows)
        self.common = _Common(store, self.rows, shared) if common else None
        self.room: dict[int, _Room] = {}  # by the number of stored sinks, in which layers may differ

    def attend(self, call: Call) -> torch.Tensor:
        packed, layer = self.layers[id(call.module)]
        scale = packed.head_dim**-0.5 if call.scaling is None else call.scaling
        out, lse = self._own(packed, layer, call.query, call.key, call.value, scale)
        if self.common is not None:
            common = self.common.attend(layer, call.query, scale)
            out, lse = torch.cat([out, common[0]]), torch.cat([lse, common[1]])
        dense: torch.Tensor = _merge(out, lse)[0].transpose(1, 2).contiguous()
        return dense

    def _own(
        self,
        packed: PackedAttention,
        layer: PackedKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends from each copy to its new tokens and its ranges. Returns (out, lse) [parts, copies, heads, m, ..]."""
        room = self.room.get(layer.sinks)
        if room is None:
            room = self.room[layer.sinks] = _Room(query, self.shape.parts, layer.sinks)
        room.fill(query, key, value, layer, self.rows)
        seen = replace(layer, block_table=self.table, lengths=self.stops, sink_k=room.sink_k, sink_v=room.sink_v,
                       transforms=packed.shifted(self.shape.m))  # fmt: skip
        out, lse = attend(room.query, seen, scale, self.starts)
        each = (self.shape.parts, self.shape.copies, *lse.shape[1:])
        return out.view(*each, -1), lse.view(each)


class _Room:
    """Memory for queries, and for new keys and values in front of stored sinks, repeated for every part, as `attend`
    takes them. It is allocated once for a step and filled by each layer.

    query          [parts * copies, heads, m, head_dim]
    sink_k, sink_v  [parts * copies, heads, m + sinks, head_dim]
    """

    def __init__(self, like: torch.Tensor, parts: int, sinks: int) -> None:
        copies, heads, m, head_dim = like.shape
        self._query = like.new_empty((parts, copies, heads, m, head_dim))
        both = like.new_empty((2, parts, copies, heads, m + sinks, head_dim))
        self.query, (self.sink_k, self.sink_v) = self._query.flatten(0, 1), both.flatten(1, 2)
        self._key, self._value = both[..., :m, :]
        self._sinks = both[..., m:, :]

    def fill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: PackedKV, rows: torch.Tensor
    ) -> None:
        """Copies query, key, value [copies, heads, m, head_dim] of one layer and the sinks of these rows into it."""
        self._query.copy_(query)
        self._key.copy_(key)
        self._value.copy_(value)
        for own, stored in zip(self._sinks, layer.exact().values()):
            torch.index_select(stored.expand(own.shape[0], *stored.shape), 1, rows, out=own)


class _Common:
    """Stored tokens of one protein that all its copies see, in two ranges. They are read once: the queries of all
    copies are those of one sequence.

    rows     int32 [copies], of the store, all the same;  bounds   int32 [4]: starts and stops
    """

    def __init__(self, store: Store, rows: torch.Tensor, bounds: torch.Tensor) -> None:
        self.starts, self.stops = bounds.view(2, 2)
        self.rows = rows[:2]
        self.table = store.table.index_select(0, self.rows)

    def attend(self, layer: PackedKV, query: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """query [copies, heads, m, head_dim] -> (out, lse) [2, copies, heads, m, ..]."""
        copies, _, m, _ = query.shape
        sinks: dict[str, Any] = {name: tensor.index_select(0, self.rows) for name, tensor in layer.exact().items()}
        seen = replace(layer, block_table=self.table, lengths=self.stops, **sinks)
        parts = attend(query.transpose(0, 1).flatten(1, 2).expand(2, -1, -1, -1), seen, scale, self.starts)
        out, lse = (x.view(2, -1, copies, m, *x.shape[3:]).transpose(1, 2) for x in parts)
        return out, lse
