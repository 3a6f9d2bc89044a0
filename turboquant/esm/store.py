"""The store of a ContextCache: packed keys and values of every layer, and tensors that all layers share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..models.esm import dropout_factor, padded
from ..ops import PackedKV
from ..plan import PAGE_TOKENS
from .attention import PackedAttention

__all__ = ["Store", "Weights", "empty"]

_DATA_PTR, _VERSION = torch.Tensor.data_ptr, torch.Tensor._version.__get__  # type: ignore[attr-defined]


class Weights:
    """Remembers the weights of a model to detect changes: writes in place, another tensor or another module, but not
    writes through `.data`. Every step checks, so all loops run in C. A copy refers to the weights of the copied model,
    and is unchanged if the original was."""

    _before: tuple[list[Any], ...] | None  # None in a copy of one whose weights had changed

    def __init__(self, base: Any) -> None:
        self._modules = list(base.modules())
        self._members = [members for module in self._modules for members in (module._modules, module._parameters)]
        self._params = list(base.parameters())
        self._look()

    def __getstate__(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("_modules", "_members", "_params")}  # ids differ in a copy
        return {**fields, "unchanged": self.unchanged()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        unchanged = state.pop("unchanged")
        self.__dict__.update(state)
        self._look()
        if not unchanged:
            self._before = None

    def _look(self) -> None:
        self._versioned = [weight for weight in self._params if not weight.is_inference()]  # others have no version
        self._before = self._now()

    def unchanged(self) -> bool:
        return self._now() == self._before

    def _now(self) -> tuple[list[Any], ...]:
        """Returns the ids of all modules and weights, which are kept alive so that no id is reused, and the addresses,
        versions and dtype of the weights."""
        members = list(map(id, chain.from_iterable(map(dict.values, self._members))))
        return (
            members,
            list(map(_DATA_PTR, self._params)),
            list(map(_VERSION, self._versioned)),
            [self._params[0].dtype],
        )


@dataclass
class Store:
    """The result of `encode`. Row r of every tensor is the protein `tokens[r]`."""

    tokens: list[list[int]]
    row_of: list[int]  # the row of each protein, in the order in which they were given
    lengths: torch.Tensor  # int32 [n]
    table: torch.Tensor  # int32 [n, most pages]
    factor: torch.Tensor  # float32 [n]: `dropout_factor`
    layers: list[PackedKV]  # with this table and these lengths
    weights: Weights  # of the model that made it

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.lengths, self.table, self.factor)
        for layer in self.layers:
            yield from (layer.pages, *layer.exact().values())


def empty(base: Any, modules: Sequence[Any], specs: Sequence[PackedAttention], tokens: list[list[int]],
          row_of: list[int]) -> Store:  # fmt: skip
    """Returns an empty store for proteins of these token ids. modules: the attention of each layer. Layers share one
    block table, so each has as many pages as the layer with the fewest sinks needs."""
    weights = base.embeddings.word_embeddings.weight
    device = weights.device
    fewest = min(packed.spec.sinks for packed in specs)
    counts = [-(-max(len(row) - fewest, 0) // PAGE_TOKENS) for row in tokens]
    ids, real = padded(tokens, device)
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int32, device=device)
    factor, table = dropout_factor(ids, real), _table(counts, device)
    size, dtype = (sum(counts), modules[0].num_attention_heads, max(map(len, tokens))), weights.dtype
    layers = [packed.empty(table, lengths, *size, dtype) for packed in specs]
    return Store(tokens, row_of, lengths, table, factor, layers, Weights(base))


def _table(counts: list[int], device: Any) -> torch.Tensor:
    """Returns a block table, int32 [n, most]: row r gets the next counts[r] of the pages 0, 1, 2, ..."""
    rows, first = [], 0
    for count in counts:
        rows.append([*range(first, first + count), *[0] * (max(counts) - count)])
        first += count
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(counts), max(counts, default=0))
