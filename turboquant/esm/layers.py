"""How each layer of an ESM-2 model packs, from a spec and a profile; and a full pass that shows queries
and keys of its layers, to measure moments on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..hf.moments import moments_for
from ..hf.routing import evaluating, routed
from ..measured import Profile, used_by
from ..models.identity import fingerprint
from ..models.placement import device_of
from ..spec import CacheSpec
from .attention import NAME, PackedAttention, plain_attention
from .model import attentions, checked_model

__all__ = ["packed_layers", "run_watched"]


def packed_layers(
    model: Any,
    spec: CacheSpec,
    profile: Profile | str | os.PathLike[str] | None = None,
    measured: bool = True,
) -> list[PackedAttention]:
    """How each layer packs. Raises what `turboquant.patch` raises for a model that cannot be packed in this way.

    profile    None: moments are those that the model was patched with, or measured now
    measured   False: moments are not looked for, and nothing is ready to run. Without a profile, the weights may be on
               the meta device
    """
    modules = attentions(checked_model(model))
    given = None if profile is None else Profile.of(profile)
    if given is not None:
        given.check(fingerprint(model))
    specs, calibration, moments = used_by(spec, given, len(modules))
    found = moments_for(model, specs, moments) if measured else None
    return [
        PackedAttention(i, module.attention_head_size, one, calibration if one.calibrated else None, found)
        for i, (module, one) in enumerate(zip(modules, specs))
    ]


class _Watched:
    """The context of a pass with the model's own attention, patched or not."""

    def __init__(self, base: Any, watch: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        self.layer_of, self.watch = {id(module): i for i, module in enumerate(attentions(base))}, watch

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None) -> torch.Tensor:
        self.watch(self.layer_of[id(module)], query, key)
        return plain_attention(module, query, key, value, mask, scaling)


def run_watched(
    model: Any, proteins: Sequence[torch.Tensor], watch: Callable[[int, torch.Tensor, torch.Tensor], None]
) -> None:
    """Runs the model over token ids [1, tokens] of one protein after the other, and calls watch(layer, query, key) with
    [1, heads, tokens, head_dim] after RoPE. Without gradients and dropout; the mode of each module is put back."""
    base = checked_model(model)
    with evaluating(base), routed(base, NAME):
        for ids in proteins:
            base(input_ids=ids.to(device_of(base)), turboquant_context=_Watched(base, watch))
