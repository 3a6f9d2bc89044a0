"""Which decoders cannot be packed, as data: what to look for, and the sentence that a user reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin

from ..models.families import family_of
from ..models.identity import describe, layer_sizes
from ..models.kinds import latent_size, packed_indices, piece_size, unequal_size, unknown_kinds
from ..models.names import cache_argument
from ..models.routing import attention_modules, decoder_of, uses_interface
from ..plan import MAX_HEAD_DIM

__all__ = ["check_model", "checked_config", "head_dims_of"]


def _has(name: str) -> Callable[[Any], Any]:
    return lambda text: getattr(text, name, None)


# What a text configuration must not have, and why; "{}" is what was found. The first row comes first, because reading
# such a `kv_lora_rank` raises.
_CONFIGS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda text: "kv_lora_rank" in (getattr(text, "per_layer_attributes", None) or ()),
     "its latents differ in size (`kv_lora_rank`)"),
    (_has("index_topk"), "sparse attention with an indexer is not supported"),
    (lambda text: not latent_size(text) and getattr(text, "kv_lora_rank", None),
     "latents of {} channels, and rotary ones beside them, must be multiples of 8"),
    (_has("cross_attention_layers"), "cross-attention layers are not supported"),
    (lambda text: getattr(text, "n_recurrent_loops", 1) > 1,
     "layers that run several times in a forward (`n_recurrent_loops`) are not supported"),
    (lambda text: getattr(text, "num_hidden_layers", None) is None, "its configuration has no `num_hidden_layers`"),
    (lambda text: ", ".join(sorted(unknown_kinds(text))),
     "layers must be full, sliding, chunked or linear attention, not {}"),
    (lambda text: getattr(text, "num_kv_shared_layers", 0) and not hasattr(text, "kv_sharing_modes"),
     "keys and values shared between layers are not supported"),  # by older transformers
    (lambda text: not packed_indices(text), "no layer has keys and values"),
)  # fmt: skip

FLOAT64 = "its weights are float64; use float32, bfloat16 or float16 (model.to(torch.float32))"
OWN_GENERATE = "its `generate` is its own"
_ALIBI = ("bloom", "mpt")  # types with ALiBi biases that their configurations do not mention

# Types that cannot be patched for a reason that only a forward would show.
_TYPES = {
    "diffllama": "its attention uses the keys of a layer twice",
    "musicgen_melody_decoder": OWN_GENERATE,
    "minimax": "it demands a cache class of its own",
    **dict.fromkeys(["inkling_text", "inkling2_text", "inkling2_loop_text"], "its attention adds position biases"),
    "jetmoe": "its attention computes with the keys between cache and AttentionInterface",
}


def _is_latent(text: Any) -> bool:
    return bool(getattr(text, "kv_lora_rank", None))


def _wider(model: Any, text: Any, most: int) -> int:
    """The width of a head that has more channels than `most`; 0: none has."""
    return max((size for size in head_dims_of(model, text) if size > most), default=0)


def _unequal(model: Any) -> str:
    """The channels of a head's keys and values where they differ."""
    for module in attention_modules(model):
        key, value = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
        if key != value:
            return f"{key or getattr(module, 'head_dim', None)} and {value} channels"
    return ""


def _cuts_heads(model: Any, text: Any) -> int:
    """The ranks of a `tp_plan` that cuts KV heads into pieces; 0: it does not."""
    ranks = getattr(model, "tp_size", None) or 1
    plan = (getattr(model, "tp_plan", None) or {}) if ranks > 1 else {}
    by_heads = any(name.endswith("k_proj") and how == "colwise" for name, how in plan.items())
    return ranks if by_heads and any(heads % ranks for heads, _ in layer_sizes(describe(text))) else 0


# What a model and its text configuration must not have, and why.
_MODELS: tuple[tuple[Callable[[Any, Any], Any], str], ...] = (
    (lambda model, text: text.model_type in _ALIBI or getattr(text, "alibi", False), "its attention adds ALiBi biases"),
    (lambda model, text: _TYPES.get(text.model_type), "{}"),
    (lambda model, text: hasattr(model, "generate") and not isinstance(model, GenerationMixin), OWN_GENERATE),
    (lambda model, text: getattr(model, "dtype", None) == torch.float64, FLOAT64),
    (lambda model, text: not uses_interface(model),
     "its attention does not go through transformers' AttentionInterface"),
    (_cuts_heads, "`tp_plan` on {} ranks would cut KV heads into pieces: use as many ranks as divide them"),
    (lambda model, text: cache_argument(model.forward) is None, "its forward takes no cache"),
    (lambda model, text: any(hasattr(part, "_update_causal_mask") for part in decoder_of(model).modules()),
     "it makes its attention masks itself"),
    (lambda model, text: not all(layer.is_causal for layer in attention_modules(model)),
     "not all of its attention is causal"),
    (lambda model, text: any("Indexer" in type(part).__name__ for part in decoder_of(model).modules()),
     "sparse attention with an indexer is not supported"),
    (lambda model, text: _is_latent(text) and not all(hasattr(m, "expand_kv") for m in attention_modules(model)),
     "its cache gets keys and values of latent attention (`kv_lora_rank`) that are expanded already"),
    (lambda model, text: not _is_latent(text) and not unequal_size(text) and _unequal(model),
     "its keys and values have different sizes, {}, which are no multiples of 8 or not told by its configuration"),
    (lambda model, text: _wider(model, text, MAX_HEAD_DIM),
     f"its head_dim is {{}}, at most {MAX_HEAD_DIM} can be packed"),
)  # fmt: skip


def checked_config(config: Any) -> Any:
    """Returns the configuration of the decoder, if its layers are of a kind that can be packed. Raises TypeError for
    what is no configuration, NotImplementedError for other layers."""
    name = type(config).__name__
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"`model` must be a model or its configuration (model.config), got {name}")
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"encoder-decoder models are not supported, got {name}")
    if family_of(config).proteins:
        raise NotImplementedError("ESM-2 is an encoder, which continues no text: use turboquant.esm.ContextCache")
    text = config.get_text_config(decoder=True)
    for refused, why in _CONFIGS:
        if reason := refused(text):
            raise NotImplementedError(f"{why.format(reason)}, got {name}")
    return text


def check_model(model: Any) -> Any:
    """Checks a model, and returns its decoder's configuration. The NotImplementedError names the class of the model."""
    name = type(model).__name__
    try:
        text = checked_config(model.config)
    except NotImplementedError as error:
        raise NotImplementedError(f"{name} cannot be patched: {error}") from None
    for refused, why in _MODELS:
        if reason := refused(model, text):
            raise NotImplementedError(f"{name} cannot be patched: {why.format(reason)}")
    return text


def head_dims_of(model: Any, text: Any, layer: int | None = None) -> set[int]:
    """The channels of a head: of all layers, or of one of those that have keys, where the configuration knows it."""
    known = layer_sizes(describe(text))
    if layer is not None and len({*known}) > 1:
        return {known[layer][1]}
    sizes = (getattr(m, "head_dim", None) for m in attention_modules(model))
    own = set() if piece_size(text) else {size for size in sizes if isinstance(size, int)}
    return own or {size for _, size in known}
