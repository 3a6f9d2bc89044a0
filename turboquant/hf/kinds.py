"""The kinds of a decoder's layers: which have keys and values, which a state of fixed size, which both or neither."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils

__all__ = ["has_keys", "has_state", "kinds_of", "packed_indices", "unknown_kinds"]

_PACKED = ("full_attention", "sliding_attention")
_STATES = ("linear_attention", "conv")
_BOTH = ("hybrid", "hybrid_sliding")

_read_kinds = getattr(cache_utils, "get_layer_types_and_kwargs", None)  # transformers 4.57 has no such layers


def kinds_of(text: Any) -> list[tuple[str, dict[str, Any]]]:
    """The kind of each layer of a text configuration, and arguments of transformers' class for it. ("dummy": a layer
    without a cache.)"""
    if _read_kinds is None:
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        return [(kind, {}) for kind in kinds]
    kinds, arguments = _read_kinds(text)  # up to some release the same arguments for all layers
    return list(zip(kinds, [arguments] * len(kinds) if isinstance(arguments, dict) else arguments, strict=True))


def unknown_kinds(text: Any) -> set[str]:
    """Kinds of layers that cannot be packed, nor kept as a state."""
    known = {*_PACKED, *(() if _read_kinds is None else (*_STATES, *_BOTH, "dummy"))}
    return {kind for kind, _ in kinds_of(text)} - known


def has_state(kind: str) -> bool:
    """Whether layers of a kind have a state."""
    return kind in (*_STATES, *_BOTH)


def has_keys(kind: str) -> bool:
    """Whether layers of a kind have keys and values."""
    return kind not in (*_STATES, "dummy")


def packed_indices(text: Any) -> list[int]:
    """The layers that have keys and values."""
    return [i for i, (kind, _) in enumerate(kinds_of(text)) if has_keys(kind)]
