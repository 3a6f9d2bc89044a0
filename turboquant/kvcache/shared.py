"""Tensors that the layers of one TurboQuantCache share; their bytes are counted once:

lengths      int32 [batch] on each device: one tensor for all its layers
offsets      int32 [batch] on each device, for a wave: how many positions later tokens lie than the cache counts
schedule     how a step's attention is divided among a GPU's thread blocks, for all layers of the same sizes
rotation     the random matrices of a spec (Haar, sketches) on each device
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .. import ops
from ..measured import Calibration, Moments
from ..spec import CacheSpec
from .pages import PageTable, in_place, outside_autograd
from .transforms import random_rotation

__all__ = ["Common"]

_write_schedule = torch.ops.turboquant.schedule.default


_tensor, _zeros = outside_autograd(torch.tensor), outside_autograd(torch.zeros)


@outside_autograd
def _fewer(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.sub(lengths, tokens).clamp_(min=0)


@outside_autograd
def _add(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    with in_place(lengths):
        return lengths.add_(tokens)


class Layer(Protocol):
    """What `Common` asks of a layer: see `storage.LayerStorage`."""

    rank: int
    tokens: int
    padding: tuple[int, ...]
    shifts: tuple[int, ...]
    table: PageTable | None
    damaged: bool

    def reset(self) -> None: ...
    def take_back(self, positions: int) -> None: ...
    def can_crop_to(self, tokens: int) -> bool: ...


class Limit(Protocol):
    """What caches and their layers ask of a limit: see `limit.MemoryLimit`."""

    most: int
    specs: list[CacheSpec]

    def restore(self, layers: Sequence[Any]) -> None: ...
    def make_room(self, shared: Any, now: Any, after: int, padding: Sequence[int]) -> None: ...
    def described(self, layers: Sequence[Any]) -> str: ...


class Common:
    """What the layers of a cache share.

    calibration, moments   those of all layers, or None
    layers                 the layers that have keys and values, in order
    model_layers           how many layers the model has, those with a state or without a cache included; 0: not known
    limit                  the limit of the cache's bytes, or None
    stateful               whether some layers have a state, which no failed forward can take back
    shifts                 of the first forward (`LayerTensors.hold_shifts`): one a sequence, one for all, or (): 0
    """

    def __init__(self, calibration: Calibration | None, moments: Moments | None = None) -> None:
        self.calibration, self.moments = calibration, moments
        self._layers: list[weakref.ref[Layer]] = []  # weak: a dropped cache is freed at once
        self.model_layers, self.stateful = 0, False
        self.limit: Limit | None = None
        self.shifts: tuple[int, ...] = ()
        self._offsets: dict[tuple[torch.device, int], tuple[tuple[int, ...], torch.Tensor]] = {}
        self._lengths: dict[torch.device, tuple[int, tuple[int, ...], torch.Tensor]] = {}
        self._earlier: dict[tuple[torch.device, int], torch.Tensor] = {}  # of the current forward
        self._rotations: dict[tuple[Any, ...], torch.Tensor] = {}
        self._equal: dict[torch.device, torch.Tensor] = {}
        self._schedules: dict[tuple[Any, ...], tuple[Any, torch.Tensor]] = {}  # each with the step that wrote it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layers": []}

    @property
    def layers(self) -> list[Layer]:
        return [layer for reference in self._layers if (layer := reference()) is not None]

    @layers.setter
    def layers(self, layers: Iterable[Layer]) -> None:
        ranked = list(layers)
        for rank, layer in enumerate(ranked):
            layer.rank = rank
        self._layers = [weakref.ref(layer) for layer in ranked]

    def layer(self, rank: int) -> Layer | None:
        return self._layers[rank]() if 0 <= rank < len(self._layers) else None

    def lengths(self, after: int, padding: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Lengths of all sequences at `after` positions, int32 [batch]. The first layer of a forward updates the
        tensor, and all use it. It stays the same tensor from step to step, so that a step can be replayed as a CUDA
        graph.
        """
        known = self._lengths.get(device)
        if known is None or known[0] != after or known[1] != padding:
            self._earlier = {}
            if known is not None and known[1] != padding:
                self._schedules = {}  # other sequences
            known = self._lengths[device] = (after, padding, self._moved_lengths(known, after, padding, device))
        return known[2]

    @staticmethod
    def _moved_lengths(
        known: tuple[int, tuple[int, ...], torch.Tensor] | None,
        after: int,
        padding: tuple[int, ...],
        device: torch.device,
    ) -> torch.Tensor:
        if known is None or known[1] != padding:
            return _tensor([after - p for p in padding], dtype=torch.int32, device=device)
        if device.type == "cpu":  # runs in every step: sums of torch and NumPy take several times as long
            numbers = known[2].numpy().data
            for i, pad in enumerate(padding):
                numbers[i] = after - pad
            return known[2]
        return _add(known[2], after - known[0])

    def offsets(self, shifts: tuple[int, ...], device: torch.device, more: int = 0) -> torch.Tensor | None:
        """`shifts` plus `more` as the operators take them, one tensor for all layers of a device. None if all are 0."""
        if not any(shifts) and not more:
            return None
        known = self._offsets.get((device, more))
        if known is None or known[0] != shifts:
            offsets = _tensor([shift + more for shift in shifts], dtype=torch.int32, device=device)
            known = self._offsets[device, more] = shifts, offsets
        return known[1]

    def equal_schedule(self, after: int, padding: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """The schedule of sequences that are about equally long (`ops.schedule`), or None where they are not."""
        if not ops.about_equal(after - max(padding), after - min(padding)):
            return None
        if device not in self._equal:
            self._equal[device] = torch.empty((0, 4), dtype=torch.int32, device=device)
        return self._equal[device]

    def schedule(
        self,
        layer: ops.PackedKV,
        query: torch.Tensor,
        lengths: torch.Tensor,
        after: int,
        padding: tuple[int, ...],
        sliding_window: int,
    ) -> torch.Tensor | None:
        """The schedule of `attend` for a forward that ends at `after` positions. If sequences differ in length, the
        first layer with the plan and the sizes of `layer` writes it. The tensor stays the same from step to step, so
        that a step can be replayed as a CUDA graph. None on a CPU.
        """
        equal = self.equal_schedule(after, padding, query.device)
        if equal is not None or query.device.type == "cpu":
            return equal
        pages, table, sizes = layer.pages, layer.block_table, (layer.sinks, layer.window, sliding_window)
        where = (query.device, query.shape, pages.shape[1:], layer.plan.words, sizes)
        written, schedule = self._schedules.get(where, (None, None))
        if schedule is None:
            rows = ops.schedule_rows(len(padding), query.device)
            schedule = _zeros((rows, 4), dtype=torch.int32, device=query.device)
        step = after, padding, table.shape
        if written != step:
            _write_schedule(layer.plan.words, schedule, query, pages, table, lengths, sinks=layer.sinks,
                            window=layer.window, sliding_window=sliding_window)  # fmt: skip
            self._schedules[where] = step, schedule
        return schedule

    def earlier(self, lengths: torch.Tensor, fewer: int) -> torch.Tensor:
        """`lengths` of this forward minus `fewer`, int32 [batch], at least 0: made once for all layers."""
        where = lengths.device, fewer
        if where not in self._earlier:
            self._earlier[where] = _fewer(lengths, fewer)
        return self._earlier[where]

    def lengths_on(self, device: torch.device) -> torch.Tensor | None:
        known = self._lengths.get(device)
        return None if known is None else known[2]

    def replayed(self, device: torch.device) -> None:
        """Counts a replayed step, which has increased the lengths of a device by one."""
        after, padding, lengths = self._lengths[device]
        self._lengths[device], self._earlier = (after + 1, padding, lengths), {}
        self._schedules = {where: (None, schedule) for where, (_, schedule) in self._schedules.items()}

    def rotation(self, spec: CacheSpec, head_dim: int, device: torch.device) -> torch.Tensor | None:
        """`random_rotation`, one for all layers of a device."""
        rows = spec.sketch_rows(head_dim)
        where = (spec.rotation_of("key"), spec.rotation_of("value"), rows, spec.seed, head_dim, device)
        if where not in self._rotations:
            matrix = random_rotation(spec, head_dim, device)
            if matrix is None:
                return None
            self._rotations[where] = matrix
        return self._rotations[where]

    def fork(self) -> Common:
        other = Common(self.calibration, self.moments)
        other._rotations, other.limit = dict(self._rotations), self.limit
        return other

    def make_room(self, now: Layer, after: int, padding: tuple[int, ...]) -> None:
        """Calls `MemoryLimit.make_room`, if there is a limit, before layer `now` stores the tokens of a forward."""
        if self.limit is not None:
            self.limit.make_room(self, now, after, padding)

    def undo(self, before: int) -> None:
        """Takes all layers back to `before` positions after a failed forward; one that cannot go back is damaged."""
        for layer in self.layers:
            if before == 0:
                layer.reset()
            else:
                layer.take_back(before)
        if before == 0 and self.limit is not None:
            self.limit.restore(self.layers)
        if before == 0:
            self._lengths, self._earlier, self._schedules, self.shifts = {}, {}, {}, ()
        for device, (_, padding, _) in list(self._lengths.items()):
            padding = next((layer.padding for layer in self.layers if layer.tokens == before), padding)
            self.lengths(before, padding, device)  # usually in place: there may be no memory for another tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("lengths", known[2]) for known in self._lengths.values())
        yield from (("lengths", tensor) for tensor in self._earlier.values())
        yield from (("lengths", tensor) for _, tensor in self._offsets.values())
        yield from (("lengths", schedule) for _, schedule in self._schedules.values())
        yield from (("rotation", matrix) for matrix in self._rotations.values())
