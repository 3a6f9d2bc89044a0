"""Layers of a TurboQuantCache with a state of fixed size, instead of keys and values or beside them, for linear
attention, state-space models and convolutions. States are kept as the model makes them.

A forward writes states in place, and nothing can take that back. A forward that fails leaves them ahead of packed
layers: `TurboQuantCache.begin` notices that in the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Self

import torch
from transformers import cache_utils

from ..arguments import bounded
from ..kvcache.shared import Common
from ..models.kinds import has_state
from ..spec import CacheSpec
from .latent import LatentLayer
from .layer import PackedLayer, indices_of
from .unequal import UnequalLayer

__all__ = ["BothLayer", "StateLayer", "made_layer"]

_LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", object)  # transformers 4.57 has none


def made_layer(kind: str, arguments: dict[str, Any], index: int, spec: CacheSpec | None, shared: Common) -> Any:
    """A cache layer of this kind. spec: None for a layer without keys and values."""
    states = arguments.get("number_of_states", 1)
    if spec is None:
        return StateLayer(number_of_states=states) if has_state(kind) else cache_utils.DummyLayer()
    if "latent" in arguments:
        return LatentLayer(index, spec, shared, arguments["latent"])
    if "unequal" in arguments:
        return UnequalLayer(index, spec, shared, arguments["unequal"])
    layer = BothLayer(index, spec, shared, states) if has_state(kind) else PackedLayer(index, spec, shared)
    layer.is_shared, layer.chunk = bool(arguments.get("is_shared")), arguments.get("chunk", 0)
    return layer


class StateLayer(_LinearAttentionLayer):  # type: ignore[misc]
    """transformers' layer of states, with what a TurboQuantCache needs in addition."""

    record_past: bool

    def states(self) -> Iterator[torch.Tensor]:
        """All tensors of the layer."""
        for by_index in (self.conv_states, self.recurrent_states):
            yield from (state for state in by_index.values() if state is not None)

    def reset(self) -> None:
        """Forgets the states. The next forward may have another batch size, dtype or device."""
        recording = self.record_past
        _LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self.record_past = recording

    def has_recorded(self, keep: int, tokens: int) -> bool:
        """Whether convolutions still have what they need behind `keep` positions, with `tokens` forgotten."""
        convolutions = ((x, self.conv_kernel_size[i]) for i, x in self.conv_states.items() if x is not None)
        return all(x.shape[-1] >= tokens + min(keep, size) for x, size in convolutions)

    def _select(self, sequences: Sequence[int]) -> None:
        for by_index in (self.conv_states, self.recurrent_states):
            for i, state in by_index.items():
                if state is not None:
                    by_index[i] = state.index_select(0, torch.tensor(list(sequences), device=state.device))

    @property
    def _batch(self) -> int:
        return next((len(state) for state in self.states()), 0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times, one after the other."""
        times = range(bounded("batch_repeat_interleave: `repeats`", repeats))
        self._select([b for b in range(self._batch) for _ in times])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keeps the sequences `indices` (integers, or a bool for each sequence)."""
        chosen = indices_of("indices", indices, masks=True)
        self._select((chosen.nonzero().view(-1) if chosen.dtype == torch.bool else chosen).tolist())

    def fill(self, part: str, at: int, state: torch.Tensor) -> None:
        """Sets state number `at` of a part, "conv" or "recurrent"."""
        _LinearAttentionLayer.lazy_initialization(self, **{f"{part}_states": state, "state_idx": at})
        getattr(self, f"{part}_states")[at].copy_(state)
        self.has_previous_state[at] = True

    def join_states(self, parts: Sequence[StateLayer]) -> None:
        """Joins the states of all parts, one sequence after the other; the layer already has those of the first."""
        for name in ("conv_states", "recurrent_states"):
            by_index = getattr(self, name)
            for i, state in by_index.items():
                if state is not None:
                    by_index[i] = torch.cat([getattr(part, name)[i] for part in parts])

    def fork(self, shared: Common) -> Self:
        """The same layer for another cache, with copies of all states."""
        other = copy(self)
        for name, x in vars(self).items():
            if isinstance(x, dict):
                copies = {i: state.clone() if isinstance(state, torch.Tensor) else state for i, state in x.items()}
                setattr(other, name, copies)
        return other


class BothLayer(StateLayer, PackedLayer):
    """A layer with attention and a state side by side."""

    is_compileable = False
    is_croppable = False

    def __init__(self, index: int, spec: CacheSpec, shared: Common, states: int) -> None:
        PackedLayer.__init__(self, index, spec, shared)
        _LinearAttentionLayer.__init__(self, number_of_states=states)

    def __repr__(self) -> str:
        return PackedLayer.__repr__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialises keys and values, which are positional arguments, or a state."""
        (PackedLayer if args else _LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        """Empties both."""
        PackedLayer.reset(self)
        StateLayer.reset(self)

    def offload(self) -> None:
        """Moves both to the CPU."""
        PackedLayer.offload(self)
        StateLayer.offload(self)

    def prefetch(self) -> None:
        """Brings both back."""
        PackedLayer.prefetch(self)
        StateLayer.prefetch(self)

    reorder_cache = PackedLayer.reorder_cache  # which calls `_select`

    def _select(self, sequences: Sequence[int]) -> None:
        PackedLayer._select(self, sequences)
        StateLayer._select(self, sequences)

    @property
    def _batch(self) -> int:
        return self.max_batch_size

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """See `PackedLayer.activate_past_recording`."""
        PackedLayer.activate_past_recording(self)
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """Raises NotImplementedError where a token would be forgotten."""
        if bounded("crop: `tokens`", tokens):
            raise NotImplementedError(f"crop: the state of layer {self.index} cannot be taken back")

    def fork(self, shared: Common) -> Self:
        """The same layer for another cache, whose layers have `shared` in common."""
        other = StateLayer.fork(self, shared)
        other._shared, other.storage = shared, self.storage.fork(shared)
        return other
