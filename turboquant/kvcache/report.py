"""The bytes of a cache, by layer and part, and how they compare with bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..plan import PAGE_TOKENS
from ..tables import html, table
from .pages import RELEASED
from .storage import LayerStorage

__all__ = ["CacheReport", "LayerReport", "bytes_by_part", "layer_report", "layer_tensors"]


@dataclass(frozen=True)
class LayerReport:
    """The contents of one layer.

    layer     its index, from 0
    tokens    tokens of all sequences; padding is not stored
    numbers   how many numbers their keys and values have
    parts     bytes by part: pages, sinks, window, transforms, ...
    """

    layer: int
    tokens: int
    numbers: int
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class CacheReport:
    """All bytes of a cache, and ratios. `str` makes a table.

    layers   one `LayerReport` for each layer
    shared   bytes held once for all layers, by part
    notes    remarks, one line each
    """

    layers: tuple[LayerReport, ...]
    shared: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, and of what they share."""
        return sum(layer.nbytes for layer in self.layers) + sum(self.shared.values())

    @property
    def numbers(self) -> int:
        """How many numbers the stored keys and values have, over all layers."""
        return sum(layer.numbers for layer in self.layers)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, over all layers."""
        total = dict(self.shared)
        for layer in self.layers:
            for part, size in layer.parts.items():
                total[part] = total.get(part, 0) + size
        return total

    @property
    def effective_bits(self) -> float:
        """Bits held per number stored."""
        return 8 * self.nbytes / self.numbers if self.numbers else float("nan")

    @property
    def ratio_bf16(self) -> float:
        """Bytes of the same tokens in bfloat16 over bytes held."""
        return 2 * self.numbers / self.nbytes if self.nbytes else float("nan")

    @property
    def ratio_fp32(self) -> float:
        """Bytes of the same tokens in float32 over bytes held."""
        return 2 * self.ratio_bf16

    def __str__(self) -> str:
        return "\n".join([table(self._rows()), *self._lines()])

    def _repr_html_(self) -> str:
        return html(self._rows(), notes=self._lines())

    def _rows(self) -> list[list[str]]:
        """A row for each group of layers that are alike."""
        names = list(dict.fromkeys(part for layer in self.layers for part in layer.parts))
        alike: dict[tuple[int, ...], list[int]] = {}
        for layer in self.layers:
            cells = (layer.tokens, *(layer.parts.get(n, 0) for n in names), layer.nbytes)
            alike.setdefault(cells, []).append(layer.layer)
        rows = [["each of", "tokens", *names, "bytes"]]
        rows += [[_ranges(layers), *(f"{cell:,}" for cell in cells)] for cells, layers in alike.items()]
        return rows

    def _lines(self) -> list[str]:
        """What all layers share, the sum and the notes."""
        lines = [f"{part + ' (all layers)':<24}{size:,}" for part, size in self.shared.items()]
        if not self.numbers:
            return [*lines, f"{self.nbytes:,} bytes: no token is stored yet", *self.notes]
        size = f"{self.ratio_bf16:.2f} times smaller than bfloat16, {self.ratio_fp32:.2f} than float32"
        if self.ratio_bf16 < 1:
            size = f"{1 / self.ratio_bf16:.2f} times larger than bfloat16, {self._largest()}"
        lines.append(f"{self.nbytes:,} bytes: {self.effective_bits:.3f} bits per number, {size}")
        return [*lines, *self.notes]

    def _largest(self) -> str:
        """Why a cache is large: its largest part, in words."""
        part, size = max(self.parts.items(), key=lambda part_size: part_size[1])
        longer = "a longer text is smaller"
        if part == "pages":
            return f"because pages are allocated whole, {PAGE_TOKENS} tokens each: {longer}"
        if part in ("sinks", "window", "past windows"):
            return f"because most tokens are exact ones, in the model's dtype ({part}): {longer}"
        return f"because {part} are {size:,} bytes at any length: {longer}"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as "0-4,6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def layer_tensors(stored: LayerStorage) -> Iterator[tuple[str, torch.Tensor]]:
    """(part, tensor) of all tensors that belong to this layer alone."""
    yield from stored.by_part()
    yield from (("past windows", tensor) for _, pair in stored.past.snapshots for tensor in pair)


def layer_report(stored: LayerStorage) -> LayerReport:
    released = sum(row.count(RELEASED) for row in stored.table.rows) if stored.table is not None else 0
    tokens = sum(stored.tokens - pad for pad in stored.padding) - PAGE_TOKENS * released
    numbers = (1 + stored.has_values) * tokens * stored.kv_heads * stored.head_dim if tokens else 0
    return LayerReport(stored.index, tokens, numbers, bytes_by_part(layer_tensors(stored)))


def bytes_by_part(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Sums the bytes of the storages behind tensors, by part."""
    parts: dict[str, int] = {}
    for part, tensor in tensors:
        parts[part] = parts.get(part, 0) + tensor.untyped_storage().nbytes()
    return parts
