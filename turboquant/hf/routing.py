"""Sets the attention function that the configurations of patched models name, and restores it.

Models may share one configuration object: it names its own attention again when the last patched one of them is
unpatched.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Previous", "adopt", "check_route", "evaluating", "measuring", "patched_with", "restore", "route", "routed"]

_patched: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose state, model._turboquant, has `previous`

# Held while a model is routed through a tap (`tap`), which all models have under one name. `calibrate` holds it for
# minutes, so only those wait for it who have to.
measuring = threading.RLock()

Previous = list[tuple[Any, str | None]]  # configurations of a model, and the attention that each named before


def route(model: Any, name: str) -> Previous:
    """Has every configuration in `model` name the attention function `name`; the caller keeps what is returned in
    model._turboquant.previous."""
    configs = {
        id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    previous: Previous = [(config, _before(config)) for config in configs.values()]
    for config, _ in previous:
        config._attn_implementation = name
    _patched.add(model)
    return previous


def adopt(model: Any) -> None:
    """Counts a copy of a patched model, which came about without `route`, as patched."""
    _patched.add(model)


def patched_with(config: Any) -> Any:
    """A patched model that has this configuration object; None if there is none."""
    for model in list(_patched):
        if any(theirs is config for theirs, _ in model._turboquant.previous):
            return model
    return None


def check_route(model: Any, name: str) -> None:
    """RuntimeError if the configuration of a routed model now names another attention than `name`."""
    if model.config._attn_implementation == name:
        return
    with measuring:  # another thread may be measuring this model
        found = model.config._attn_implementation
    if found != name:
        raise RuntimeError(
            f"{type(model).__name__}: attention is {found!r} since the model was patched (by set_attn_implementation, "
            "or because another model was made from its configuration): call turboquant.patch(model) again"
        )


def restore(model: Any) -> None:
    """Takes back what `route` did, while the model still has its state."""
    _patched.discard(model)
    shared = {id(config) for other in _patched for config, _ in other._turboquant.previous}
    for config, before in model._turboquant.previous:
        if id(config) not in shared:
            config._attn_implementation = before


@contextmanager
def routed(model: Any, name: str) -> Iterator[None]:
    """Has the model's configuration name `name` for the time of a call, whether or not the model is patched."""
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
    for other in _patched:
        for theirs, before in other._turboquant.previous:
            if theirs is config:
                return before  # type: ignore[no-any-return]
    return config._attn_implementation  # type: ignore[no-any-return]
