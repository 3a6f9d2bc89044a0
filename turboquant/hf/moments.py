"""The moments that a cache of a model uses: those given, those that the model was patched with, or measured once."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..calibration.measure import describe
from ..moments import Moments
from ..moments.data import RANDOM_IDS
from ..spec import CacheSpec
from .routing import measuring

__all__ = ["moments_for", "moments_notes"]

AnyMoments = Moments | str | os.PathLike[str] | None

_SAID_AFTER = 2.0  # seconds
_WAY_OUT = 'pass `moments` from a file (turboquant.Moments.load), or use a spec with centre="none" and metric="none"'

# For each model the moments measured last and their tokenizer.
_measured: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Moments]] = weakref.WeakKeyDictionary()


def moments_for(model: Any, specs: Sequence[CacheSpec], given: AnyMoments = None) -> Moments | None:
    """The moments for `model`, with one spec per layer; None if no spec uses any.

    model   the model, or its configuration if `given` is not None
    Raises TypeError for another object, ValueError for moments that are missing, not used, damaged or of another model,
    NotImplementedError for a model that cannot be measured.
    """
    if not any(spec.measured for spec in specs):
        if given is not None:
            raise ValueError('`moments` must be None for a spec without centre="wave" and metric="query", got some')
        return None
    from .patching.wrappers import base_model

    base = base_model(model)
    state = getattr(base, "_turboquant", None) or getattr(getattr(base, "base_model", None), "_turboquant", None)
    if given is None:
        given = getattr(state, "moments", None)
    if given is not None:
        found = Moments.of(given)
        config: Any = base.config if isinstance(base, torch.nn.Module) else base
        try:
            mark = describe(config.get_text_config(decoder=True))
            found.check(mark)
            for i, rotary in enumerate(mark.get("no_rope_layers", ())):
                if not rotary and len(found.layers[i].pairs):
                    raise ValueError(f"`moments` must have no wave in layer {i}, whose keys are not rotary, got one")
        except ValueError as error:
            raise ValueError(f'{error}. Use moments of this model, or centre="none" and metric="none"') from None
        return found
    if not isinstance(base, torch.nn.Module):
        needs = "with a configuration, from which nothing can be measured"
        raise ValueError(f"`moments` must be given {needs}, got None: give the model itself, {_WAY_OUT}")
    tokenizer = getattr(state, "tokenizer", None)
    if not _is_measured(base, tokenizer):
        with measuring:
            if not _is_measured(base, tokenizer):  # by another thread, meanwhile
                _measured[base] = tokenizer, _measure(base, tokenizer)
    return _measured[base][1]


def _is_measured(model: torch.nn.Module, tokenizer: Any) -> bool:
    return model in _measured and _measured[model][0] is tokenizer


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _measure(model: torch.nn.Module, tokenizer: Any) -> Moments:
    from ..moments.measure import measure

    began = time.monotonic()
    try:
        found = measure(model, tokenizer)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"{error}: {_WAY_OUT}") from error
    if (took := time.monotonic() - began) > _SAID_AFTER:
        print(f"turboquant: the moments of {type(model).__name__} took {took:.0f} s", file=sys.stderr)
    return found


def moments_notes(moments: Moments | None, specs: Sequence[CacheSpec]) -> tuple[str, ...]:
    """Notes on the moments for the report of a cache."""
    if moments is None:
        return ()
    notes = [f"moments of {moments.tokens:,} tokens: {moments.source or 'of unknown source'}"]
    if moments.source == RANDOM_IDS:
        notes.append("random token ids cost 1.2 to 1.5 times the divergence: pass `tokenizer` to turboquant.patch")
    waves = [i for i, spec in enumerate(specs) if spec.centre == "wave"]
    for kind, why in (
        ("constant", "their keys do not turn"),
        ("not probed", "it was not found whether and how their keys turn"),
    ):
        if layers := [i for i in waves if moments.layers[i].kind == kind]:
            which = ", ".join(map(str, layers))
            notes.append(f"constant centre in layers {which}: {why}")
    return tuple(notes)
