"""How each layer of an ESM-2 model packs, from a spec and a profile."""

from __future__ import annotations

import os
from typing import Any

from ..measured import Profile, used_by
from ..measuring.used import moments_for
from ..models.esm import attentions, checked_model
from ..models.identity import fingerprint
from ..spec import CacheSpec
from .attention import PackedAttention

__all__ = ["packed_layers"]


def packed_layers(
    model: Any, spec: CacheSpec, profile: Profile | str | os.PathLike[str] | None = None, measured: bool = True
) -> list[PackedAttention]:
    """Returns how each layer packs. Raises what `turboquant.patch` raises for a model that cannot be packed this way.

    profile    None: moments are those that the model was patched with, or are measured now
    measured   False: moments are not looked for, and nothing is ready to run. Without a profile, the weights may then
               be on the meta device
    """
    modules = attentions(checked_model(model))
    loaded = None if profile is None else Profile.of(profile)
    if loaded is not None:
        loaded.check(fingerprint(model))
    specs, calibration, moments = used_by(spec, loaded, len(modules))
    layer_moments = moments_for(model, specs, moments) if measured else None
    return [
        PackedAttention(i, module.attention_head_size, one, calibration if one.calibrated else None, layer_moments)
        for i, (module, one) in enumerate(zip(modules, specs))
    ]
