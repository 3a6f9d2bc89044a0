"""Warnings of what a user may not expect, and no error tells: nothing is packed, logits show no quantisation, or keys
lie at other positions than a wave can follow. Each is given once after each `patch` of a model.

`state` is that of a patched model (`patching.llama`). The model's pre-hook sees its own forwards, the attention
function sees all others.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..kvcache.storage import LayerStorage
from ..models.routing import adopt, patched_with

__all__ = ["Unread", "foreign_cache", "foreign_keys", "named_cache", "positions_off", "quiet"]

_KINDS = ("cache", "positions", "spec", "unread")
FAR = 4  # positions. At 2 bits, 4 make the divergence of SmolLM2-135M 1.3 times as large, 16 make it 1.6 times

_met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # attention modules that `foreign_keys` has seen
_told: set[type] = set()  # classes of those that belong to no patched model


def _say(said: set[str], kind: str, text: str) -> None:
    if kind not in said:
        said.add(kind)
        warnings.warn(text, stacklevel=3)


@contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Silences warnings about a patched model, for programs that compare caches with one another."""
    state = model._turboquant
    before, state.said = state.said, set(_KINDS)
    try:
        yield
    finally:
        state.said = before


@torch.compiler.disable  # type: ignore[untyped-decorator]
def named_cache(model: Any, state: Any, kind: str) -> None:
    """Warns that `generate` is about to make the cache that `cache_implementation` names."""
    how = "call generate without it, and set model.generation_config.cache_implementation = None"
    why = f"because `cache_implementation` is {kind!r}"
    _say(state.said, "cache", f"{type(model).__name__}: nothing is packed, {why}: {how}")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def foreign_cache(model: Any, state: Any, kind: str = "cache of transformers") -> None:
    """Warns that a patched model attends to the keys of a cache of class `kind`, which is not ours."""
    adopt(model)
    name = type(model).__name__
    why = f"because the caller, or a model around this one, brought a {kind}"
    how = f"pass `{state.cache_name}=turboquant.TurboQuantCache(model)`, model being this {name}"
    _say(state.said, "cache", f"{name}: nothing is packed, {why}: {how}")


def foreign_keys(module: torch.nn.Module) -> None:
    """Warns that the attention of `module` was called with more keys than queries, and the keys are not ours."""
    if module in _met:
        return
    _met.add(module)
    model, kind = patched_with(getattr(module, "config", None)), type(module)
    if model is not None:
        foreign_cache(model, model._turboquant)
    elif kind not in _told:
        _told.add(kind)
        why = "because attn_implementation='turboquant' alone changes no cache"
        how = "call turboquant.patch(model) after from_pretrained"
        warnings.warn(f"{kind.__name__}: nothing is packed, {why}: {how}", stacklevel=3)


class Unread:
    """Kept by a cache that a forward of several tokens made for itself. Warns when the cache is dropped and nothing
    else has read it: whoever wanted the logits alone may take them for those of a packed cache."""

    def __init__(self, model: Any, state: Any, last: LayerStorage) -> None:
        """last: the storage of the cache's last layer."""
        self.read, self._said, self._name, self._last = False, state.said, type(model).__name__, last

    def __del__(self) -> None:
        if self.read or not self._last.tokens or sys.is_finalizing():  # no tokens: the forward failed
            return
        why = 'because with prefill="exact" a first forward attends in full precision, and its cache was dropped unread'
        how = 'to measure quantisation, turboquant.patch(model, spec, prefill="packed"), otherwise pass use_cache=False'
        _say(self._said, "unread", f"{self._name}: the logits of a forward show no quantisation, {why}: {how}")


def positions_off(model: Any, state: Any, off: int, images: bool) -> None:
    """Warns if tokens of a forward lie up to `off` positions from where the wave expects them, because of an image in a
    later forward (`images`) or because of `position_ids`."""
    if off < FAR:
        return
    if images:
        why = f"because an image in a later turn moves positions by up to {off}, and the wave cannot follow"
        how = 'give images in the first turn, or use a spec with centre="none"'
    else:
        why = f"because `position_ids` jump by up to {off} inside a sequence, and the wave cannot follow"
        how = 'number the tokens of each sequence one after the other, or use a spec with centre="none"'
    _say(state.said, "positions", f"{type(model).__name__}: keys are quantised worse, {why}: {how}")
