"""Embeddings of proteins and their file: safetensors, with

names             uint8: UTF-8, with a line feed between two names
lengths           int32 [proteins]: residues of each
mean.LAYER        float32 [proteins, width]: mean over the residues of each
residues.LAYER    float16 [residues, width], of one protein after the other
codes.LAYER       uint8 [pages, 1, record bytes]: residues as `Quantizer` packs them; each protein begins a new page
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import integer_in
from ..files import Tensor, existing_file, header_of, layout, read_header
from ..plan import Plan
from ..quantizer import Codes, Quantizer

__all__ = ["FORMAT", "Embeddings", "described", "placed"]

FORMAT = "turboquant-embeddings-1"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings:
    """Embeddings of proteins: what `embed` returns. They are mapped if they are in a file.

    names     of the proteins
    lengths   int32 [proteins], residues of each
    layers    whose states were taken: 0 is the input of the first layer; the number of layers is the model's output,
              after its last norm
    """

    names: tuple[str, ...]
    lengths: NDArray[np.int32]
    layers: tuple[int, ...]
    _arrays: Arrays
    _plan: Plan | None

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        names = {"residues": "residues in float16", "codes": "packed residues"}
        more = [what for kind, what in names.items() if f"{kind}.{self.layers[0]}" in self._arrays]
        return f"<Embeddings: {len(self)} proteins, layers {list(self.layers)}, {', '.join(['means', *more])}>"

    def _layer(self, layer: int | None) -> int:
        if layer is None:
            return self.layers[-1]
        if layer not in self.layers:
            raise ValueError(f"`layer` must be one of {list(self.layers)}, got {layer!r}")
        return layer

    def _array_of(self, kind: str, layer: int | None) -> NDArray[Any]:
        name = f"{kind}.{self._layer(layer)}"
        if name not in self._arrays:
            raise ValueError(f"`residues` were not kept as {'float16' if kind == 'residues' else '4bit'}: embed anew")
        return self._arrays[name]

    def means(self, layer: int | None = None) -> NDArray[np.float32]:
        """float32 [proteins, width]: means over the residues. layer: one of `layers`; None: the last of them."""
        return self._array_of("mean", layer)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first row of each protein, or its first page if residues are packed; then the number of all."""
        counts = self.lengths if self._plan is None else -(-self.lengths // self._plan.page_tokens)
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def _rows(self, protein: int, kind: str, layer: int | None) -> NDArray[Any]:
        array = self._array_of(kind, layer)
        i = integer_in(protein, "`protein`", 0, len(self) - 1)
        return array[self._starts[i] : self._starts[i + 1]]

    def residues(self, protein: int, layer: int | None = None) -> NDArray[np.float32]:
        """float32 [residues, width] of one protein, by its index, from float16 or codes. ValueError if residues were
        not kept, or for an unknown index or layer."""
        if self._plan is None:
            return self._rows(protein, "residues", layer).astype(np.float32)
        codes = self.codes(protein, layer)
        return Quantizer.from_plan(codes.plan).dequantize(codes)

    def codes(self, protein: int, layer: int | None = None) -> Codes:
        """The packed residues of one protein, for `Quantizer.from_plan(codes.plan)`: `dot` and `dequantize`."""
        pages = self._rows(protein, "codes", layer)
        assert self._plan is not None
        return Codes(self._plan, pages, int(self.lengths[protein]))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Embeddings:
        """Map a file that `embed` wrote. FileNotFoundError if there is none, ValueError if it is another kind of file
        or damaged. The numbers themselves are not checked."""
        name = existing_file(path, "a file of embeddings")
        try:
            with open(name, "rb") as file:
                meta, tensors, start = read_header(file, FORMAT)
            data = np.memmap(name, np.uint8, "r", start)
            plan = None if meta["plan"] is None else Plan.from_words(meta["plan"])
            layers, kind = tuple(meta["layers"]), meta["residues"]
            if not layers or any(type(layer) is not int for layer in layers) or kind not in ("none", "float16", "4bit"):
                raise ValueError("it must name layers, and how residues are kept")
            if (kind == "4bit") != (plan is not None):
                raise ValueError("it must have a plan with packed residues, and only then")
            arrays = {key: _array(data, tensor) for key, tensor in tensors.items()}
            names = tuple(arrays["names"].tobytes().decode().split("\n"))
            lengths = arrays["lengths"]
            if lengths.shape != (len(names),) or not (lengths > 0).all():
                raise ValueError("`lengths` must have one positive length for each name")
            width = int(arrays[f"mean.{layers[0]}"].shape[1])
            if plan is not None and plan.head_dim != width:
                raise ValueError(f"its plan must be of {width} numbers, got {plan.head_dim}")
            wanted = described(names, lengths, layers, width, kind, plan)
            if {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()} != {
                key: (tensor.dtype, tensor.shape) for key, tensor in wanted.items()
            }:
                raise ValueError("its tensors must be of the sizes that its proteins have")
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(f"`path` must be a file of embeddings, got {name!r}: {error}") from None
        return cls(names, lengths, layers, arrays, plan)


def _array(data: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    return data[tensor.start : tensor.start + tensor.nbytes].view(tensor.numpy_dtype).reshape(tensor.shape)


def described(
    names: Sequence[str], lengths: NDArray[np.int32], layers: Sequence[int], width: int, kind: str, plan: Plan | None
) -> dict[str, Tensor]:
    """Returns the sizes of the tensors of embeddings. kind: how residues are kept, "none", "float16" or "4bit"."""
    text = len("\n".join(names).encode())
    tensors = {"names": Tensor("U8", (text,)), "lengths": Tensor("I32", (len(names),))}
    for layer in layers:
        tensors[f"mean.{layer}"] = Tensor("F32", (len(names), width))
        if kind == "float16":
            tensors[f"residues.{layer}"] = Tensor("F16", (int(lengths.sum(dtype=np.int64)), width))
        if kind == "4bit":
            assert plan is not None
            pages = int((-(-lengths // plan.page_tokens)).sum(dtype=np.int64))
            tensors[f"codes.{layer}"] = Tensor("U8", (pages, 1, plan.record_bytes))
    return tensors


def placed(path: str | None, meta: dict[str, Any], tensors: dict[str, Tensor], fresh: bool) -> Arrays:
    """Returns the arrays of embeddings to write to: in memory if `path` is None, otherwise mapped from that file. With
    `fresh` the file is made and all its bytes are allocated, so that a full disk shows now."""
    if path is None:
        return {name: np.zeros(tensor.shape, tensor.numpy_dtype) for name, tensor in tensors.items()}
    where = layout(tensors)
    header = header_of(FORMAT, meta, where)
    if fresh:
        with open(path, "wb") as file:
            file.write(header)
            file.flush()
            if size := sum(tensor.nbytes for tensor in where.values()):
                os.posix_fallocate(file.fileno(), len(header), size)
    data = np.memmap(path, np.uint8, "r+", len(header))
    return {name: _array(data, where[name]) for name in tensors}
