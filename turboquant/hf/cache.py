"""TurboQuantCache: a transformers Cache whose layers (`layer.PackedLayer`) hold packed keys and values and attend to
them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from ..arguments import bounded, listed
from ..kvcache.limit import MemoryLimit, can_fall
from ..kvcache.pieces import pieces_spec
from ..kvcache.report import CacheReport, LayerReport, bytes_by_part, layer_report, layer_tensors
from ..kvcache.rows import join
from ..kvcache.shared import Common
from ..measured import Calibration, Moments, Profile, shared_widths, used_by
from ..measuring.used import moments_for, moments_notes, warn_of_changes
from ..models.identity import describe
from ..models.kinds import has_keys, kinds_of, packed_indices, piece_size, unequal_size
from ..models.wrappers import base_model
from ..named_specs import resolve
from ..sizes import bytes_of
from ..spec import CacheSpec
from .latent import LatentLayer
from .layer import PackedLayer
from .notices import Unread
from .refusals import checked_config
from .states import StateLayer, made_layer

__all__ = ["CacheReport", "LayerReport", "PackedLayer", "TurboQuantCache"]


def _patched_with(model: Any, profile: Any) -> tuple[CacheSpec, Profile | None]:
    """The spec and the profile of a patched model."""
    if profile is not None:
        raise ValueError("`spec` must be given where `profile` is, got None")
    if not isinstance(model, torch.nn.Module):
        right = "TurboQuantCache(model) of a patched model, or TurboQuantCache(config, spec)"
        raise TypeError(f"`spec` must be given with a configuration: call {right}")
    state = getattr(model, "_turboquant", None)
    if state is None:
        right = "call turboquant.patch(model, spec) first, or TurboQuantCache(model, spec)"
        raise ValueError(f"`model` must be patched where no `spec` is given: {right}")
    warn_of_changes(state, base_model(model))
    return state.spec, state.profile


def _check_joined(caches: list[Any]) -> None:
    """Checks that caches can be put together."""
    if not caches or not all(isinstance(cache, TurboQuantCache) for cache in caches):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in caches})) or "none"
        raise TypeError(f"join: `caches` must be TurboQuantCaches, at least one, got {kinds}")
    first = caches[0]
    for i, cache in enumerate(caches):
        cache.was_read()
        cache._check_states()
        same = (cache.fingerprint, cache.kinds) == (first.fingerprint, first.kinds)
        same = same and cache.spec.settled() == first.spec.settled()  # a cache from a file has a settled one
        if not same or not cache.get_seq_length():
            what = "hold tokens" if same else "be of the model and spec of the first"
            raise ValueError(f"join: `caches[{i}]` must {what}, got {cache!r}")
        for layer, other in zip(cache.packed_layers, first.packed_layers):
            stored, like = layer.storage, other.storage
            if isinstance(layer, LatentLayer) or stored.split:
                what_is_kept = "latents, padding included" if isinstance(layer, LatentLayer) else 'outliers="prompt"'
                raise NotImplementedError(f"join: caches with {what_is_kept} cannot be put together")
            if stored.damaged:
                raise ValueError(f"join: `caches[{i}]` must be whole, got one that an earlier failure left unusable")
            if stored.plan != like.plan:
                raise ValueError(f"join: `caches[{i}]` must have the widths of the first in layer {layer.index}, "
                                 f"{other.spec}, got {layer.spec}")  # fmt: skip
            if stored.shape is None or like.shape is None or stored.shape[1:] != like.shape[1:]:
                raise ValueError(f"join: `caches[{i}]` must be like the first in layer {layer.index}, which holds "
                                 f"{like}, got {stored}")  # fmt: skip
            if not all(torch.equal(tensor, like.transforms[name]) for name, tensor in stored.transforms.items()):
                raise ValueError(f"join: `caches[{i}]` must have the moments of the first, got others")


class TurboQuantCache(Cache):  # type: ignore[misc]
    """Compressed keys and values of a model, for `cache=` of a model that `turboquant.patch` has prepared
    with every version of transformers.

    model    the model, or its configuration. Only the number and kind of its layers matter, shapes come from tensors
    spec     a CacheSpec or the name of a preset; None: what `model` was patched with, its profile included
    profile  a Profile of the model (`turboquant.measure`, `turboquant.calibrate`) or its file, if `spec` is given and
             uses one: for a wave or a metric any, for a budget a calibrated one. None: the moments that `model` was
             patched with. If there are none, they are measured, once for each model, and one line on stderr says so
    memory_limit  bytes that the cache never exceeds, such as "2 GiB" or a number; None: no limit. When memory runs
             short, layers fall to 3 and to 2 bits, the keys or values of a layer at a time, in the order that costs
             least (docs/memory.md, "A limit"). Where all are at 2 bits, a forward raises MemoryError and the cache
             stays as it was. `report` says what lies at which width

    Raises TypeError for a configuration without a spec, and ValueError without a spec for a model that is not patched.
    Raises NotImplementedError for layers that cannot be packed and models that cannot be measured, and ValueError for
    a profile that is missing, not used by the spec, or of another configuration (`turboquant.patch`
    also compares weights).
    """

    def __init__(
        self,
        model: Any,
        spec: CacheSpec | str | None = None,
        *,
        profile: Profile | str | os.PathLike[str] | None = None,
        memory_limit: int | str | None = None,
    ) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "a TurboQuantCache has no gradient: inside a transform of torch.func use use_cache=False"
            )
        config = model.config if isinstance(model, torch.nn.Module) and hasattr(model, "config") else model
        text = checked_config(config)
        if spec is None:
            spec, profile = _patched_with(model, profile)
        self.spec = resolve(spec)
        own_profile = None if profile is None else Profile.of(profile)
        if own_profile is not None and own_profile.calibration is not None:
            own_profile.check(describe(text))
        kinds = kinds_of(text)
        specs, calibration, moments = used_by(self.spec, own_profile, len(kinds), packed_indices(text))
        if piece_size(text):
            specs = [pieces_spec(one, unequal_size(text) > 0) for one in specs]
        moments = moments_for(model, specs, moments)
        specs = shared_widths(self.spec, specs, moments, [kind for kind, _ in kinds if has_keys(kind)])
        self._set_up(calibration, describe(text), specs, moments, kinds)
        if memory_limit is not None:
            self._shared.limit = self._checked_limit(bytes_of(memory_limit, "`memory_limit`"))

    def _set_up(
        self,
        calibration: Calibration | None,
        fingerprint: dict[str, Any],
        specs: Sequence[CacheSpec],
        moments: Moments | None = None,
        kinds: Sequence[tuple[str, dict[str, Any]]] = (),
    ) -> None:
        """fingerprint: of the model's configuration (`models.identity.describe`). specs: of each layer that has keys
        and values. kinds: of each layer (`models.kinds.kinds_of`); (): all have keys and values."""
        self.fingerprint = fingerprint
        self.kinds = list(kinds) or [("full_attention", {})] * len(specs)
        self._shared = Common(calibration, moments)
        left = iter(specs)
        layers = [
            made_layer(kind, options, i, next(left) if has_keys(kind) else None, self._shared)
            for i, (kind, options) in enumerate(self.kinds)
        ]
        self._hold(layers)

    def _checked_limit(self, most: int) -> MemoryLimit:
        """Makes a limit of this many bytes, if layers can fall."""
        layers = self.packed_layers
        whole = all(layer.storage.has_values for layer in layers)
        if len(layers) != len(self.layers) or self.state_layers or not whole:
            raise NotImplementedError(
                "`memory_limit` is for models whose layers all have keys and values of one size, without states and "
                "latents: leave it out for this model"
            )
        for layer in layers:
            if not can_fall(layer.spec):
                raise ValueError(
                    "`memory_limit` needs one whole width for all channels of a side, a codebook, groups of 32 and "
                    f"EDEN scales, such as the preset 'default', got {layer.spec!r} in layer {layer.index}"
                )
        return MemoryLimit(most, [layer.spec for layer in layers], self.moments)

    @property
    def fell(self) -> bool:
        """Whether pages have fewer bits than they began with."""
        limit = self._shared.limit
        return limit is not None and [layer.spec for layer in self.packed_layers] != limit.specs

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the cache never holds more of; None: no limit."""
        return None if self._shared.limit is None else self._shared.limit.most

    #: int32 [batch, tokens], the tokens that the cache begins with, as far as they are known, for `generate` to compare
    #: its prompt with (`patching.continuation`). None: unknown.
    known_ids: torch.Tensor | None = None
    #: The spec of a patched model that this cache was compared with: a difference is warned of once.
    compared_with: CacheSpec | None = None
    # Warns when the cache is dropped, unless `was_read` was called. None: there is nothing to warn of.
    unread: Unread | None = None

    def was_read(self) -> None:
        """Notes that the contents of the cache are used."""
        if self.unread is not None:
            self.unread.read = True
            self.unread = None

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of all layers."""
        return self._shared.calibration

    @property
    def moments(self) -> Moments | None:
        """The moments of all layers."""
        return self._shared.moments

    @moments.setter
    def moments(self, moments: Moments | None) -> None:
        self._shared.moments = moments

    #: The moments as they were measured, where `turn` has others in use. None: the same.
    measured_moments: Moments | None = None

    @property
    def waves(self) -> bool:
        """Whether keys are packed around a mean that turns with their position."""
        moments = self.moments if self._may_wave else None
        return moments is not None and any(len(layer.pairs) for layer in moments.layers)

    @property
    def padding(self) -> tuple[int, ...]:
        """Positions of each sequence that are padding."""
        first = self._shared.layer(0)
        return () if first is None else first.padding

    @property
    def shifts(self) -> tuple[int, ...]:
        """How many positions later the model places each sequence than it is counted."""
        first = self._shared.layer(0)
        return () if first is None else first.shifts

    def turn(
        self, shifts: Sequence[int], spread: tuple[NDArray[np.integer], NDArray[np.floating]] | None = None
    ) -> None:
        """Says, before the first forward, how many positions later the model places the tokens of each sequence than
        they are counted: one number for each sequence or for all, (): 0. spread: further shifts, beside these, and the
        weight of each, where tokens of a sequence differ (`LayerMoments.averaged`)."""
        measured = self.measured_moments or self.moments
        self.measured_moments = None if spread is None else measured
        self.moments = measured if spread is None or measured is None else measured.averaged(*spread)
        self._shared.shifts = tuple(shifts)

    #: A forward has begun and not ended. Only known of caches with states.
    at_work = False

    def begin(self) -> None:
        """Begins a forward. Raises RuntimeError if an earlier one failed and has left states ahead of packed layers."""
        if not self._shared.stateful:
            return
        if self.at_work and not self.get_seq_length():  # the first forward failed
            self.reset()
        self._check_states()
        self.at_work = True

    def _check_states(self) -> None:
        if self.at_work:
            raise RuntimeError(
                "an earlier forward failed and has left the states of its linear layers ahead of the packed layers: "
                "call cache.reset()"
            )

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that have keys and values."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The layers that have a state, some beside keys and values."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def _hold(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self._shared.layers = [layer.storage for layer in self.packed_layers]
        self._shared.model_layers, self._shared.stateful = len(layers), bool(self.state_layers)
        self._may_wave = any(layer.spec.centre == "wave" for layer in self.packed_layers)

    def __getstate__(self) -> dict[str, Any]:
        self.was_read()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.layers = [layer.storage for layer in self.packed_layers]

    def __repr__(self) -> str:
        size = f"layers={len(self.layers)}, tokens={self.get_seq_length()}, nbytes={self.nbytes}"
        if self.memory_limit is not None:
            size += f", memory_limit={self.memory_limit}"
        return f"TurboQuantCache({size}, spec={self.spec!r})"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedLayer.update`."""
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"`layer_idx` must be in 0..{len(self.layers) - 1}, got {layer_idx}: is this cache of another model?"
            )
        layer: PackedLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def fork(self) -> TurboQuantCache:
        """Another cache that begins with all that this one holds, such as a system prompt encoded once for many chats.

        Both are independent from here. They share packed pages; the first to write to a shared page, which can only be
        the last, part-filled one, copies it. Sinks and window are copied. Shared pages count in `nbytes` of both, and
        are freed with the last of them. On CUDA, use all forks on one stream.
        """
        self.was_read()
        self._check_states()
        other = TurboQuantCache.__new__(TurboQuantCache)
        other.spec, other.fingerprint, other.kinds = self.spec, self.fingerprint, self.kinds
        other._shared = self._shared.fork()
        own = (PackedLayer, StateLayer)
        other._hold([layer.fork(other._shared) if isinstance(layer, own) else copy(layer) for layer in self.layers])
        other.measured_moments = self.measured_moments
        other.known_ids, other.compared_with = self.known_ids, self.compared_with
        return other

    @classmethod
    def join(cls, caches: Sequence[TurboQuantCache]) -> TurboQuantCache:
        """Returns a cache with the sequences of several, one after the other, such as forks of one prefix, each of
        which has read a text of its own. They go on as a batch with padding on the left: `attention_mask` masks in
        front of each sequence as many positions as the longest has more. Pages of forks are shared, those of other
        caches copied; sinks, window and states are copied.

        Raises ValueError for caches of other models, specs, moments, dtypes or devices than the first, for empty ones
        and for damaged ones; NotImplementedError for latents, outliers="prompt" and a `memory_limit`.
        """
        caches = listed(caches, "join: `caches` must be a list of TurboQuantCaches")
        _check_joined(caches)
        if any(cache.memory_limit is not None for cache in caches):
            raise NotImplementedError("join: caches with a `memory_limit` cannot be put together: make them without")
        first: TurboQuantCache = caches[0]
        joined = first.fork()
        for i, layer in enumerate(joined.layers):
            parts = [cache.layers[i] for cache in caches]
            if isinstance(layer, PackedLayer):
                layer.storage = type(layer.storage)(layer.index, layer.spec, joined._shared)
                join(layer.storage, [part.storage for part in parts])
            if isinstance(layer, StateLayer):
                layer.join_states(parts)
        joined._shared.layers = [layer.storage for layer in joined.packed_layers]
        joined.known_ids = None
        return joined

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Writes the cache to a file (`docs/format.md`), whole or not at all, for `load` on any machine and device.

        model   the model, its configuration, or None. With the model the file gets a sample of every weight that keys
                and values depend on, active adapters included, so that `load` refuses it for another fine-tune.
        Raises RuntimeError for a cache that an earlier forward left unusable, ValueError for a model of another
        configuration than the cache's.
        """
        from .persistence import save

        self.was_read()
        save(self, path, model)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any = None,
        *,
        profile: Profile | str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
    ) -> TurboQuantCache:
        """Returns the cache that `save` wrote: the same bytes on any device.

        model         the model that will use it, or its configuration: the file must be of it. None: not compared
        profile       the one that the file must have been made with. None: moments are not compared, and a spec that
                      uses a calibration takes that of a patched `model`. The cache keeps the moments of the file
        device        where to put it; None: where the layers of `model` are, or else the CPU
        Raises FileNotFoundError; ValueError, with what is wrong, for a file that is truncated, damaged, foreign, of
        another version or another model. Holds no more memory than a small multiple of the file's bytes
        (docs/security.md).
        """
        from .persistence import load

        return load(path, model, profile, device)

    def crop(self, tokens: int) -> None:
        """See `PackedLayer.crop`. If one layer cannot be cropped, none is."""
        tokens = bounded("crop: `tokens`", tokens)
        keep = self.get_seq_length() + tokens if tokens <= 0 else tokens
        self._check_states()
        if keep <= 0:
            self.reset()
            return
        for layer in self.packed_layers:
            layer.check_crop(keep)
        if states := self.state_layers:
            tokens = min(keep - self.get_seq_length(), 0)  # as these layers take it
            if tokens and not all(layer.is_croppable and layer.record_past for layer in states):
                raise NotImplementedError(
                    "crop: states of recurrent layers cannot be taken back: call cache.fork() before the tokens that "
                    "are to be forgotten"
                )
            if tokens and not all(layer.has_recorded(keep, -tokens) for layer in states):
                raise NotImplementedError(
                    f"crop: convolutions have recorded too few inputs to forget {-tokens} positions: call "
                    "cache.activate_past_recording() before the forwards that are to be undone and crop once, or "
                    "cache.fork()"
                )
        for layer in self.layers:
            if tokens or not isinstance(layer, StateLayer) or layer.record_past:
                layer.crop(tokens)
        if self.known_ids is not None:
            self.known_ids = self.known_ids[:, :keep].clone()

    def lengths_on(self, device: torch.device) -> torch.Tensor | None:
        """int32 [batch], the lengths that the last forward used on a device; None if there was none."""
        return self._shared.lengths_on(device)

    def replayed(self, device: torch.device) -> None:
        """Counts a replay of the last forward, of one token, on the device (`graph.DecodeGraph`)."""
        self._shared.replayed(device)

    def check(self) -> None:
        """Raises ValueError if a key or value stored on CUDA since the cache was empty was not finite or exceeded
        16384; the message names the layer, sequence and position of the first one of a layer.

        Waits for the device; forwards do not call it. Such a number was stored as 0 or as the limit, and affects no
        other token. On the CPU the forward itself raises.
        """
        layers = self.packed_layers
        flagged = [(layer.index, flag) for layer in layers if (flag := layer.storage.flag) is not None]
        for device in {flag.device for _, flag in flagged}:
            here = [(index, flag) for index, flag in flagged if flag.device == device]
            for (index, _), value in zip(here, torch.cat([flag for _, flag in here]).tolist()):
                if value:
                    raise ValueError(f"layer {index}: {_describe_flag(value)}")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See `PackedLayer.reorder_cache`."""
        super().reorder_cache(self._chosen("beam_idx", beam_idx))
        self.known_ids = None

    def reset(self) -> None:
        """Empties the cache: see `PackedLayer.reset`."""
        self.known_ids, self.at_work = None, False
        self.turn(())
        super().reset()
        if self._shared.limit is not None:
            self._shared.limit.restore([layer.storage for layer in self.packed_layers])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `PackedLayer.batch_select_indices`."""
        super().batch_select_indices(self._chosen("indices", indices, masks=True))
        self.known_ids = None

    def _chosen(self, argument: str, sequences: Any, masks: bool = False) -> torch.Tensor:
        """`PackedLayer.chosen`, read back and checked once, before a layer changes."""
        return torch.tensor(self.packed_layers[0].chosen(argument, sequences, masks), dtype=torch.int64, device="cpu")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `PackedLayer.batch_repeat_interleave`."""
        super().batch_repeat_interleave(repeats)
        self.known_ids = None

    def activate_past_recording(self) -> None:
        """See `PackedLayer.activate_past_recording`."""
        for layer in self.layers:
            if isinstance(layer, (PackedLayer, StateLayer)):
                layer.activate_past_recording()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(part, tensor) of everything the cache holds."""
        self.was_read()
        for layer in self.packed_layers:
            yield from layer_tensors(layer.storage)
        yield from self._common_tensors()

    def _common_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._shared.tensors()
        for layer in self.state_layers:
            yield from (("states", state) for state in layer.states())
        if self.known_ids is not None:
            yield "token ids", self.known_ids

    @property
    def nbytes(self) -> int:
        """Bytes that the allocator holds for this cache: every storage once, unused room included."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in self.tensors()}
        return sum(storages.values())

    def report(self) -> CacheReport:
        """The bytes of each layer by part, compared with bfloat16; ``print`` it for a table."""
        self.was_read()
        layers = tuple(layer_report(layer.storage) for layer in self.packed_layers)
        notes = moments_notes(self.spec, self.moments, [layer.spec for layer in self.packed_layers])
        if self._shared.limit is not None:
            notes = (*notes, self._shared.limit.described([layer.storage for layer in self.packed_layers]))
        return CacheReport(layers, bytes_by_part(self._common_tensors()), notes)


def _describe_flag(flag: int) -> str:
    """Describes the `flag` of `append`, if it is not 0 (turboquant_cuda.h)."""
    side = "value" if flag >> 62 & 1 else "key"
    sequence, position = flag >> 32 & 0x3FFFFFFF, (flag & 0xFFFFFFFF) - 1
    return f"the {side} of position {position} of sequence {sequence} held a number that is not finite or above 16384"
