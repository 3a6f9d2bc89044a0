"""Patching ESM-2: each layer's keys and values of a forward are packed, and attention reads the packed bytes.

What changes in a model: the attention that its configuration names, `layer_idx` of each self-attention module (None in
transformers' ESM) and `_turboquant` of these and of the EsmModel, which keeps what was there before. A hook gives every
forward of the EsmModel the `Pass` that its layers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...esm.attention import NAME, Pass, packed_layers
from ...measured import Moments, Profile
from ...measuring.used import warn_of_changes
from ...models.esm import attentions, checked_model
from ...models.identity import Identity
from ...models.routing import Previous, check_route, restore, route
from ...spec import CacheSpec

__all__ = ["check", "patch", "unpatch"]


@dataclass
class _Patch:
    """The state of a patched model, in _turboquant of its EsmModel."""

    previous: Previous
    layer_idx: list[Any]
    hook: Any  # handle of `_with_pass`
    spec: CacheSpec
    profile: Profile | None  # that given to `patch`
    identity: Identity | None  # of the weights, if a profile or measured moments are used

    @property
    def moments(self) -> Moments | None:
        """The moments that other caches of the model take, unless they are given a profile."""
        return None if self.profile is None else self.profile.moments


def check(model: Any, spec: CacheSpec, profile: Profile | None) -> None:
    """Raises what `patch` raises for a model that cannot be packed in this way."""
    packed_layers(model, spec, profile, measured=False)


def patch(model: Any, spec: CacheSpec, profile: Profile | None, cuda_graphs: bool, tokenizer: Any) -> None:
    """See `turboquant.patch`. model: a transformers.PreTrainedModel."""
    name = type(model).__name__
    if cuda_graphs:
        raise NotImplementedError(f"{name}: `cuda_graphs` is for decoders, ESM-2 has no decoding step")
    if tokenizer is not None:
        raise NotImplementedError(f"{name}: `tokenizer` is for decoders, ESM-2 is measured on proteins of the package")
    layers = packed_layers(model, spec, profile)
    base = checked_model(model)
    modules = attentions(base)
    if not hasattr(base, "_turboquant"):
        hook = base.register_forward_pre_hook(_with_pass, with_kwargs=True)
        before = [module.layer_idx for module in modules]
        base._turboquant = _Patch(route(base, NAME), before, hook, spec, profile, None)
    elif base.config._attn_implementation != NAME:
        base._turboquant.previous = route(base, NAME)
    state = base._turboquant
    state.spec, state.profile = spec, profile
    measured = profile is not None or any(layer.moments is not None for layer in layers)
    state.identity = Identity.of(base) if measured else None
    for module, layer in zip(modules, layers):
        module.layer_idx, module._turboquant = layer.layer, layer


def _with_pass(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    check_route(base, NAME)
    if not torch.compiler.is_compiling():
        _check_weights(base)
    return args, {**kwargs, "turboquant_pass": Pass()}


def _check_weights(base: Any) -> None:
    """If weights have changed: gives the layers moments of the new ones, or warns where a profile is used."""
    state = base._turboquant
    if state.identity is None or state.identity.holds(base):
        return
    if state.profile is None:
        state.identity = Identity.of(base)  # first, because measuring runs forwards, which check again
        for module, layer in zip(attentions(base), packed_layers(base, state.spec)):
            module._turboquant = layer
    else:
        warn_of_changes(state, base)


def unpatch(model: Any) -> None:
    """See `turboquant.unpatch`."""
    base = getattr(model, "base_model", model)
    if not hasattr(base, "_turboquant"):
        return
    restore(base)
    base._turboquant.hook.remove()
    for module, before in zip(attentions(base), base._turboquant.layer_idx):
        module.layer_idx = before
        del module._turboquant
    del base._turboquant
