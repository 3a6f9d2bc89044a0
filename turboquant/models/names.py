"""The name of transformers' cache argument: `cache` since 5.24, `past_key_values` before.

It is read from the signature of a forward, because a model's code may be older than transformers (remote code).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

__all__ = ["CACHE", "NAMES", "cache_argument", "given_cache", "outputs_with", "renamed"]

NAMES = ("cache", "past_key_values")  # the newest first


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name of the argument of `forward` that takes a cache; None if there is none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def _installed_name() -> str:
    """The name in `generate`'s model_kwargs and in a model's outputs."""
    fields = CausalLMOutputWithPast.__dataclass_fields__
    return next(name for name in NAMES if name in fields)


CACHE = _installed_name()


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, whichever name it has there; None if there is none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def renamed(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Keyword arguments with the cache under `name`, whichever name it was given by."""
    names = [other for other in NAMES if arguments.get(other) is not None]
    if names in ([], [name]) or len(names) > 1:  # a forward refuses two
        return arguments
    return {**{other: x for other, x in arguments.items() if other not in NAMES}, name: arguments[names[0]]}


def outputs_with(logits: Any, cache: Any) -> CausalLMOutputWithPast:
    """The outputs of a forward."""
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
