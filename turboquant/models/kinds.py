"""The kinds of a decoder's layers: which have keys and values, which a state of fixed size, which both or neither."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils

__all__ = ["has_keys", "has_state", "is_known", "kinds_of", "latent_size", "packed_indices", "piece_size",
           "sources_of", "unequal_size", "unknown_kinds"]  # fmt: skip

_PACKED = ("full_attention", "sliding_attention")
_CHUNKED = "chunked_attention"
_STATES = ("linear_attention", "conv")
_BOTH = ("hybrid", "hybrid_sliding")

_read_kinds = getattr(cache_utils, "get_layer_types_and_kwargs", None)  # transformers 4.57 has no such layers


def kinds_of(text: Any) -> list[tuple[str, dict[str, Any]]]:
    """The kind of each layer of a text configuration ("dummy": a layer without a cache), and what else is to be known
    of it, integers by name: number_of_states; is_shared, 1 if later layers read its keys and values; chunk, tokens of a
    chunk in chunked attention; latent, `latent_size`; unequal, `unequal_size`."""
    if _read_kinds is None:
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        return [(kind, {}) for kind in kinds]
    kinds, arguments = _read_kinds(text)  # older releases: the same arguments for all layers
    each = [arguments] * len(kinds) if isinstance(arguments, dict) else arguments
    each = [_numbers(kind, one) for kind, one in zip(kinds, each, strict=True)]
    for i, source in enumerate(sources_of(text)):
        if source != i:
            each[source]["is_shared"] = 1
    if size := latent_size(text):
        for kind, one in zip(kinds, each):
            one |= {"latent": size} if kind == _PACKED[0] else {}
    if size := unequal_size(text):
        for kind, one in zip(kinds, each):
            one |= {"unequal": size} if kind in _PACKED else {}
    return list(zip(kinds, each, strict=True))


def latent_size(text: Any) -> int:
    """Channels of the heads that latents and rotary parts are cut into: the largest multiple of 8 up to 256 that
    divides both numbers; 0 without latents, or if there is none."""
    rank, rotary = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    return _common_size(rank, rotary) if rank and rotary else 0


def unequal_size(text: Any) -> int:
    """The same for keys and values whose heads differ in size (MiMo V2); 0 where they do not, or with latents."""
    value = getattr(text, "v_head_dim", None)
    if not value or getattr(text, "kv_lora_rank", None):
        return 0
    key = getattr(text, "head_dim", None)
    return _common_size(key, value) if key and key != value else 0


def piece_size(text: Any) -> int:
    """Channels of the heads of a cache whose layers cut what they store into pieces (`latent_size`, `unequal_size`);
    0: they store heads as they are."""
    return latent_size(text) or unequal_size(text)


def _common_size(one: int, other: int) -> int:
    return next((size for size in range(256, 0, -8) if one % size == 0 and other % size == 0), 0)


def _numbers(kind: str, arguments: dict[str, Any]) -> dict[str, int]:
    """What `kinds_of` tells of a layer, from the arguments of transformers' class."""
    if kind == _CHUNKED:
        return {"chunk": arguments["sliding_window"]}
    return {name: arguments[name] for name in ("number_of_states",) if name in arguments}


def sources_of(text: Any) -> list[int]:
    """For each layer the one whose keys and values it reads: itself, or the last earlier one of its kind that stores
    them (Gemma 4, Gemma 3n)."""
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is None:
        return list(range(text.num_hidden_layers))
    kinds, stored = text.layer_types, {}
    sources = []
    for i, (kind, mode) in enumerate(zip(kinds, modes)):
        if mode == "store":
            stored[kind] = i
        sources.append(stored.get(kind, i) if mode == "reuse" else i)
    return sources


def is_known(kind: str) -> bool:
    """Whether layers of a kind can be packed, or kept as a state."""
    return kind in _PACKED or (_read_kinds is not None and kind in (_CHUNKED, *_STATES, *_BOTH, "dummy"))


def unknown_kinds(text: Any) -> set[str]:
    """Kinds of layers that cannot be packed, nor kept as a state."""
    return {kind for kind, _ in kinds_of(text) if not is_known(kind)}


def has_state(kind: str) -> bool:
    """Whether layers of a kind have a state."""
    return kind in (*_STATES, *_BOTH)


def has_keys(kind: str) -> bool:
    """Whether layers of a kind have keys and values."""
    return kind not in (*_STATES, "dummy")


def packed_indices(text: Any) -> list[int]:
    """The layers that have keys and values."""
    return [i for i, (kind, _) in enumerate(kinds_of(text)) if has_keys(kind)]
