"""Models of transformers inside others: peft's PeftModel, found by its attributes, as peft may not be installed."""

from __future__ import annotations

from typing import Any

import torch
import transformers

__all__ = ["base_model", "checked_base_model", "refuse_prefix"]

_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")  # peft types that come with trained keys and values, in a cache of their own


def base_model(model: Any) -> Any:
    """The model whose forward a patch changes: `model`, or what its get_base_model() gives."""
    if isinstance(model, transformers.PreTrainedModel) or not callable(getattr(model, "get_base_model", None)):
        return model
    return model.get_base_model()


def checked_base_model(model: Any, tuned: bool = False) -> transformers.PreTrainedModel:
    """Returns what `base_model` does. Raises TypeError for anything but a model of transformers, NotImplementedError
    for prefix tuning unless `tuned`."""
    base, name = base_model(model), type(model).__name__
    if not isinstance(base, transformers.PreTrainedModel):
        inner = model.modules() if isinstance(model, torch.nn.Module) else ()
        inside = next((type(m).__name__ for m in inner if isinstance(m, transformers.PreTrainedModel)), None)
        hint = "" if inside is None else f", which holds a {inside}: patch that one"
        raise TypeError(f"`model` must be a transformers model, got {name}{hint}")
    if base is not model and not tuned:
        _refuse(model)
    return base


def refuse_prefix(model: Any) -> None:
    """Raises NotImplementedError if a wrapper that tunes a prefix calls `generate` of a patched model. It is found
    because the wrapper's `prepare_inputs_for_generation` then replaces the model's own."""
    _refuse(getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None))


def _refuse(wrapper: Any) -> None:
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    if kind in _PREFIXES:
        raise NotImplementedError(
            f"{type(wrapper).__name__}: prefix tuning brings a cache of its own, which cannot be packed; use the model "
            "without a patch (turboquant.unpatch(model))"
        )
