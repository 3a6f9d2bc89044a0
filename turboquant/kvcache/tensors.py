"""The tensors of one layer of a TurboQuantCache, [ sinks | packed pages | window ] (turboquant.h, "the cache").

Each sequence has its own length. Padding is never stored. It is counted as if it were all in front: token i of sequence
b has position i - padding[b], and is padding if that is negative. Padding between a prefix and what follows (`rows`)
moves the prefix of its sequence to the right. If the model places a sequence `shifts` positions later than that, its
wave is turned by so many more.

    pages        uint8 [n_pages, kv_heads, record_bytes], zeros where nothing is stored
    block_table  int32 [batch, max_pages]: the page of each 128 packed tokens of a sequence
    sinks        keys and values in the model's dtype, each [batch, kv_heads, sinks, head_dim]
    window       the same, a ring of [batch, kv_heads, window, head_dim]; both have fewer rows, or are None, until there
                 are enough tokens (`exact`)
    transforms   rotations, steps and centres of a calibration, wave and metric of the keys (`transforms`): shared by
                 all caches of a calibration and moments on a device, and counted in each
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..ops import PackedKV
from ..plan import MAX_CUDA_BASELINE_DIM, Plan
from ..spec import CacheSpec
from .pages import PageTable, outside_autograd
from .shared import Common
from .transforms import layer_transforms

__all__ = ["LayerTensors"]

_NOTHING = torch.empty(0)  # the pages of an empty layer


class LayerTensors(PackedKV):
    """The tokens of one layer, as the operators take them. Its pages are those of `table`, which other forks may move.

    index           place of the layer in the model
    rank            place among the layers that have keys and values, by which calibration and moments count
    tokens          positions seen, padding included: what transformers calls the sequence length
    padding         how many of them are padding, which is not stored, for each sequence
    shifts          how many positions later the model places the tokens of each sequence than they are counted
    sliding_window  that of the last forward; 0: none
    released        the pages of positions before this one are freed
    shape           (batch, kv_heads, head_dim, dtype, device), None while there is nothing
    """

    has_values = True

    def __init__(self, index: int, spec: CacheSpec, shared: Common) -> None:
        self.index, self.spec, self.shared = index, spec, shared
        self.rank = index
        self.reset()

    def reset(self) -> None:
        """Frees all memory. The next forward may have another batch size, dtype or device."""
        self.tokens = 0
        self.padding: tuple[int, ...] = ()
        self.shifts: tuple[int, ...] = ()
        self.position_offset: torch.Tensor | None = None  # `shifts` for operators; None: all 0
        self.shape: tuple[Any, ...] | None = None
        self.table: PageTable | None = None
        self.sliding_window = 0
        self.released = 0
        self.sink_k = self.sink_v = self.window_k = self.window_v = None
        self.exact_ready = 0.0  # positions that sinks and window have rows for
        self.flag: torch.Tensor | None = None  # argument of `append` on CUDA, int64 [1]
        self.transforms = {}
        self.own_transforms: dict[str, torch.Tensor] = {}  # without a rotation that all layers share
        self.split: dict[str, torch.Tensor] = {}  # rotations that split off outlier channels, by side: views

    @outside_autograd
    def start(self, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Empties the storage and fixes its shape. Raises ValueError for a shape that spec or calibration refuses."""
        plan = self.plan_for(kv_heads, head_dim)
        if device.type == "cuda" and head_dim > MAX_CUDA_BASELINE_DIM and not plan.is_plain:
            raise NotImplementedError(f"layer {self.index}: with this spec a GPU packs heads of at most "
                                      f"{MAX_CUDA_BASELINE_DIM} channels, got {head_dim}: choose another, such as "
                                      "'default', or call turboquant.unpatch(model)")  # fmt: skip
        calibration = self.shared.calibration
        if calibration is not None and calibration.sizes[self.rank] != (kv_heads, head_dim):
            heads, channels = calibration.sizes[self.rank]
            wants = f"{heads} KV heads of {channels} channels of the calibration"
            raise ValueError(f"layer {self.index}: keys must have the {wants}, got {kv_heads} of {head_dim}")
        self.reset()
        self.plan, self.dtype, self.device = plan, dtype, device
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.padding = (0,) * batch
        self.table = PageTable.empty(batch, kv_heads, plan.record_bytes, device)
        if device.type == "cuda":
            self.flag = torch.zeros(1, dtype=torch.int64, device=device)
        self.hold_split({})
        shifts = self.shared.shifts
        self.hold_shifts(shifts if len(shifts) == batch else (shifts or (0,)) * batch)
        self.shape = (batch, kv_heads, head_dim, dtype, device)

    def plan_for(self, kv_heads: int, head_dim: int) -> Plan:
        moments = self.shared.moments
        if not self.spec.measured or moments is None:
            return self.spec.plan(head_dim)
        measured = moments.layers[self.rank]
        heads, channels = measured.centre.shape
        if (heads, channels) != (kv_heads, head_dim):
            raise ValueError(f"layer {self.index}: keys must have the {heads} KV heads of {channels} channels of the "
                             f"moments, got {kv_heads} of {head_dim}")  # fmt: skip
        return self.spec.plan(head_dim, *measured.sizes)

    def hold_split(self, rotations: dict[str, torch.Tensor]) -> None:
        """Sets the rotations that split off outlier channels, by side, and makes the transforms."""
        moments = self.shared.moments if self.spec.measured else None
        common = self.shared.rotation(self.spec, self.head_dim, self.device)
        self.own_transforms = layer_transforms(
            self.spec, self.rank, self.head_dim, self.device, self.shared.calibration, moments, prompt=rotations
        )
        self.transforms = self.own_transforms if common is None else {**self.own_transforms, "rotation": common}
        rows = {side: rotation.shape[1] for side, rotation in rotations.items()}
        whole = self.transforms.get("rotation", _NOTHING)
        self.split = {side: whole[:, :n] if side == "key" else whole[:, -n:] for side, n in rows.items()}

    def hold_shifts(self, shifts: tuple[int, ...]) -> None:
        """Sets `shifts`, one for each sequence."""
        self.shifts, self.position_offset = shifts, self.shared.offsets(shifts, self.device)

    def turned(self, sequences: slice = slice(None)) -> dict[str, torch.Tensor]:
        """The transforms of these sequences, and how far their waves are turned, as keyword arguments of operators."""
        offset = self.position_offset
        return self.transforms if offset is None else {**self.transforms, "position_offset": offset[sequences]}

    def arguments(self) -> dict[str, torch.Tensor]:
        """See `PackedKV.arguments`."""
        return {**self.exact(), **self.turned()}

    def __str__(self) -> str:
        heads = f"{self.kv_heads} KV heads of {self.head_dim} channels"
        return f"{self.tokens} positions of {len(self.padding)} sequences with {heads} in {self.dtype} on {self.device}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index}, tokens={self.tokens})"

    @property
    def pages(self) -> torch.Tensor:  # type: ignore[override]
        """uint8 [n_pages, kv_heads, record_bytes]; forks and beams may share it."""
        return _NOTHING if self.table is None else self.table.pool.storage

    @property
    def block_table(self) -> torch.Tensor:  # type: ignore[override]
        return _NOTHING if self.table is None else self.table.tensor

    @property
    def lengths(self) -> torch.Tensor:  # type: ignore[override]
        return self.shared.lengths(self.tokens, self.padding, self.device)

    def packed(self, positions: int, padding: Sequence[int]) -> list[int]:
        """Packed tokens of each sequence at this many positions."""
        exact = self.spec.sinks + self.spec.window
        return [max(0, positions - pad - exact) for pad in padding]

    def by_part(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(part, tensor) of all tensors that belong to this layer alone."""
        yield from (("pages", self.pages), ("block_table", self.block_table))
        if self.flag is not None:
            yield "flag", self.flag
        yield from (("window" if name[0] == "w" else "sinks", tensor) for name, tensor in self.exact().items())
        yield from (("transforms", tensor) for tensor in self.own_transforms.values())

    def ring(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the window. Where no values are stored they have no channels. None: there is no window."""
        if self.window_k is None:
            return None
        return self.window_k, self.window_k[..., :0] if self.window_v is None else self.window_v

    def hold_exact(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sets those of "sink_k", "sink_v", "window_k" and "window_v" that `tensors` names."""
        self.__dict__.update(tensors)
        whole = (self.sinks, self.window) == (self.spec.sinks, self.spec.window)
        self.exact_ready = math.inf if whole else self.sinks + self.window
