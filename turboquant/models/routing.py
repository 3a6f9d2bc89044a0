"""Sets the attention function that the configurations of patched models name, and restores it.

Only the text decoder of a model is routed. A vision or audio tower keeps its attention.

Models may share one configuration object: it names its own attention again when the last patched one of them is
unpatched.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["TAP", "Previous", "adopt", "attention_modules", "check_route", "decoder_of", "evaluating", "patched_with",
           "restore", "route", "routed", "routed_configs", "set_name", "tap_lock", "text_config",
           "uses_interface"]  # fmt: skip

_patched: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose state, model._turboquant, has `previous`

# Held while a model is routed through a tap (`measuring.tap`), because all taps have one name. `calibrate` holds it for
# minutes, so only those wait for it who have to.
tap_lock = threading.RLock()
TAP = "turboquant_tap"

Previous = list[tuple[Any, str | None]]  # configurations of a model, and the attention that each named before


def text_config(model: Any) -> Any:
    """The configuration of a model's text decoder; for a text model its own."""
    return model.config.get_text_config(decoder=True)


def decoder_of(model: Any) -> Any:
    """The part of a model that is its text decoder, whose layers have a cache: `model` itself if it is a text model."""
    text = text_config(model)
    return next((part for part in model.modules() if getattr(part, "config", None) is text), model)


def attention_modules(model: Any) -> list[Any]:
    """The attention of each layer of a model's text decoder."""
    parts = decoder_of(model).modules()
    return [part for part in parts if isinstance(getattr(part, "layer_idx", None), int) and hasattr(part, "is_causal")]


def uses_interface(model: Any) -> bool:
    """Whether each layer of the text decoder asks AttentionInterface for its attention. That is read from the code: the
    flag `_supports_attention_backend` is False on many models that do."""
    names_used = [inspect.unwrap(type(part).forward).__code__.co_names for part in attention_modules(model)]
    return bool(names_used) and all("ALL_ATTENTION_FUNCTIONS" in names for names in names_used)


def routed_configs(model: Any) -> list[Any]:
    """The configuration of a model's text decoder, and copies of it that its parts have."""
    kind = type(text_config(model))
    configs = (getattr(part, "config", None) for part in decoder_of(model).modules())
    return list({id(config): config for config in configs if type(config) is kind}.values())


def set_name(config: Any, name: str | None) -> None:
    """Makes one configuration, without those inside it, name an attention function."""
    config._attn_implementation = {"": name}


def route(model: Any, name: str) -> Previous:
    """Makes the text decoder of `model` use the attention function `name`. The caller keeps the result in
    model._turboquant.previous."""
    previous: Previous = [(config, _before(config)) for config in routed_configs(model)]
    for config, _ in previous:
        set_name(config, name)
    _patched.add(model)
    return previous


def adopt(model: Any) -> None:
    """Counts a copy of a patched model, which came about without `route`, as patched."""
    _patched.add(model)


def patched_with(config: Any) -> Any:
    """A patched model that has this configuration object; None if there is none."""
    return next((model for model, previous in _patched_now() if any(x is config for x, _ in previous)), None)


def _patched_now() -> list[tuple[Any, Previous]]:
    """The patched models. Another thread may unpatch one of them meanwhile."""
    states = ((model, getattr(model, "_turboquant", None)) for model in list(_patched))
    return [(model, state.previous) for model, state in states if state is not None]


def check_route(model: Any, name: str) -> None:
    """Raises RuntimeError if the configuration of a routed model now names another attention than `name`."""
    text = text_config(model)
    if text._attn_implementation == name:
        return
    with tap_lock:  # another thread may be measuring this model, or this one is
        now = text._attn_implementation
    if now not in (name, TAP):
        raise RuntimeError(
            f"{type(model).__name__}: attention is {now!r} since the model was patched (by set_attn_implementation, "
            "or because another model was made from its configuration): call turboquant.patch(model) again"
        )


def restore(model: Any) -> None:
    """Takes back what `route` did, while the model still has its state."""
    _patched.discard(model)
    shared = {id(config) for _, previous in _patched_now() for config, _ in previous}
    for config, before in model._turboquant.previous:
        if id(config) not in shared:
            set_name(config, before)


@contextmanager
def routed(model: Any, name: str) -> Iterator[None]:
    """Makes the model's configuration name `name` for the time of a call, whether or not the model is patched."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Runs the model in evaluation mode and without gradients. Afterwards each module has the mode that it had."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _before(config: Any) -> str | None:
    """What a configuration named before any patch: another patched model may share the object."""
    for _, previous in _patched_now():
        for theirs, before in previous:
            if theirs is config:
                return before
    return config._attn_implementation  # type: ignore[no-any-return]
