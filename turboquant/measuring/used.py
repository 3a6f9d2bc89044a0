"""The moments that a cache of a model uses: those given, those that the model was patched with, or measured once."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from ..measured import Moments
from ..measured.moments import RANDOM_IDS
from ..models.identity import Identity, describe
from ..models.placement import on_all_ranks
from ..models.routing import tap_lock
from ..models.wrappers import base_model
from ..progress import log
from ..spec import CacheSpec

__all__ = ["keep_moments", "moments_for", "moments_notes", "own_moments", "warn_of_changes"]

_WAY_OUT = 'pass a `profile` from a file (turboquant.Profile.load), or use a spec with centre="none" and metric="none"'


@dataclass
class _Measured:
    """What was measured of a model for a tokenizer: moments of the weights `identity`, with costs if they were asked
    for (`costs`); and in `others` those of weights that it had before, by digest. At most `_KEPT` moments in all."""

    tokenizer: Any
    identity: Identity
    moments: Moments
    costs: bool
    others: dict[str, Moments]


_KEPT = 8  # moments of a model whose adapters are switched back and forth
_measured: weakref.WeakKeyDictionary[torch.nn.Module, _Measured] = weakref.WeakKeyDictionary()


def moments_for(model: Any, specs: Sequence[CacheSpec], moments: Moments | None = None) -> Moments | None:
    """Returns the moments for `model`, with one spec per layer; None if no spec uses any. If they are measured now,
    they get costs only if a spec needs them, for widths by layer: costs take as long as all else.

    model   the model, or its configuration if `moments` are given
    Raises TypeError for another object, ValueError for moments that are missing or of another model,
    NotImplementedError for a model that cannot be measured.
    """
    if not any(spec.measured for spec in specs):
        return None
    base = base_model(model)
    state = getattr(base, "_turboquant", None) or getattr(getattr(base, "base_model", None), "_turboquant", None)
    if moments is None and (moments := getattr(state, "moments", None)) is not None:
        warn_of_changes(state, base)
    if moments is not None:
        config: Any = base.config if isinstance(base, torch.nn.Module) else base
        try:
            mark = describe(config.get_text_config(decoder=True))
            moments.check(mark)
            for i, rotary in enumerate(mark.get("no_rope_layers", ())):
                if not rotary and len(moments.layers[i].pairs):
                    raise ValueError(f"`profile` must have no wave in layer {i}, whose keys are not rotary, got one")
        except ValueError as error:
            raise ValueError(f'{error}. Use a profile of this model, or centre="none" and metric="none"') from None
        return moments
    if not isinstance(base, torch.nn.Module):
        needs = "with a configuration, from which nothing can be measured"
        raise ValueError(f"`profile` must be given {needs}, got None: give the model itself, {_WAY_OUT}")
    costs = any(spec.shared_bits is not None for spec in specs)
    own: Moments = own_moments(base, getattr(state, "tokenizer", None), costs)
    return own


@torch.compiler.disable  # type: ignore[untyped-decorator]
def own_moments(model: Any, tokenizer: Any, costs: bool = True) -> Moments:
    """Returns moments of the present weights of a model, measured once. costs: they must have costs; else they may."""
    body = model.base_model  # the same with every head
    known = _measured.get(body)
    if not _holds(known, body, tokenizer, costs):
        with tap_lock:
            known = _measured.get(body)
            if not _holds(known, body, tokenizer):  # not measured by another thread, meanwhile
                known = _measured[body] = _measured_anew(model, tokenizer, known, costs)
            assert known is not None
            if costs and not known.costs:
                known.moments = _measure(model, tokenizer, read=False, write=False, before=known.moments)
                known.costs = True
    assert known is not None
    return known.moments


def keep_moments(model: Any, moments: Moments) -> None:
    """Replaces what `own_moments` has measured of a model by moments that hold more."""
    _measured[model.base_model].moments = moments


def _holds(known: _Measured | None, model: torch.nn.Module, tokenizer: Any, costs: bool = False) -> bool:
    if known is None or known.tokenizer is not tokenizer or (costs and not known.costs):
        return False
    same = known.identity.holds(model)
    return on_all_ranks(model, same) if known.identity.sharded else same


def _measured_anew(model: Any, tokenizer: Any, known: _Measured | None, costs: bool) -> _Measured:
    identity = Identity.of(model.base_model)
    if known is None or known.tokenizer is not tokenizer:
        return _Measured(tokenizer, identity, _measure(model, tokenizer, costs), costs, {})
    changed = known.identity.changes(identity)
    if on_all_ranks(model, not changed):
        return replace(known, identity=identity)
    others = {known.identity.digest: known.moments, **known.others}
    others = dict(islice(others.items(), _KEPT - 1))
    # A change that the samples do not show leaves the digest, by which moments are kept, as it was.
    seen = identity.digest != known.identity.digest
    moments = others.get(identity.digest) if seen else None
    if on_all_ranks(model, moments is not None):
        assert moments is not None
        costs = moments.costs is not None or bool(moments.no_costs)
    else:
        which = f" ({_some(changed)})" if changed else ""  # empty if other ranks alone have changes
        log.info("weights of %s have changed%s: its moments are measured anew", type(model).__name__, which)
        # Not kept in a file: a model in training has other weights for each cache.
        moments = _measure(model, tokenizer, costs, read=seen, write=False)
    return _Measured(tokenizer, identity, moments, costs, others if seen else {})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def warn_of_changes(state: Any, model: torch.nn.Module) -> None:
    """Warns, once, if weights have changed since a model was patched with a profile, which is still used. state:
    `model._turboquant`, whose `identity` is None without one."""
    was = state.identity
    if was is None or was.holds(model):
        return
    state.identity = Identity.of(model)
    if changed := was.changes(state.identity):
        warnings.warn(
            f"weights of {type(model).__name__} have changed since it was patched ({_some(changed)}): its cache will "
            "diverge more, because the profile that it was patched with is of the old ones. Make it again and patch "
            "the model with it.",
            stacklevel=4,
        )


def _some(names: Sequence[str]) -> str:
    return f"{names[0]:.200}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _measure(model: torch.nn.Module, tokenizer: Any, costs: bool = True, **options: Any) -> Moments:
    from .moments import measure_model

    try:
        return measure_model(model, tokenizer, costs=costs, **options)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"{error}: {_WAY_OUT}") from error


def moments_notes(spec: CacheSpec, moments: Moments | None, specs: Sequence[CacheSpec]) -> tuple[str, ...]:
    """Notes on the moments for the report of a cache of this spec, with one of `specs` for each layer."""
    if moments is None:
        return ()
    notes = [f"moments of {moments.tokens:,} tokens: {moments.source or 'of unknown source'}"]
    if moments.source == RANDOM_IDS:
        notes.append("random token ids cost 1.2 to 1.5 times the divergence: pass `tokenizer` to turboquant.patch")
    if spec.shared_bits is not None:
        bits = [bits for one in specs for bits in (one.key_bits, one.value_bits)]
        if len({*bits}) > 1:
            notes.append(f"{min(bits)} to {max(bits)} bits by layer and side, {spec.shared_bits} on average")
        else:
            notes.append(f"the same widths in all layers: {moments.no_costs or 'the profile has no costs'}")
    waves = [i for i, one in enumerate(specs) if one.centre == "wave"]
    for kind, why in (
        ("constant", "their keys do not turn"),
        ("not probed", "it was not found whether and how their keys turn"),
    ):
        if layers := [i for i in waves if moments.layers[i].kind == kind]:
            which = ", ".join(map(str, layers))
            notes.append(f"constant centre in layers {which}: {why}")
    return tuple(notes)
