"""Says whether a model can be packed and what that would save, from its configuration alone: no weights are read.

The model is made on the meta device and checked by the code that `patch` uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig

from ..files import cache_folder
from ..measured.moments import PROTEINS
from ..models.families import family_of
from ..models.identity import describe, layer_sizes
from ..models.kinds import kinds_of, packed_indices, piece_size
from ..models.texts import found_tokenizer
from ..named_specs import named_or_bits, resolve
from ..patching import check
from ..sizes import Model, full_bytes, layers_of, packed_parts, refused
from ..spec import CacheSpec
from .findings import Finding

__all__ = ["diagnose"]

_HELP = "the model runs without a patch as before, on a cache of transformers"


def diagnose(name: str, spec: str, tokens: int) -> Iterator[Finding]:
    """Yields findings about the model at a folder or hub name, for a preset or number of bits and one sequence of
    `tokens` tokens.

    Ends with the first finding that fails. ValueError for any other spec.
    """
    chosen = named_or_bits(spec, "--spec")
    try:
        config = AutoConfig.from_pretrained(name)
        family = family_of(config)
        with torch.device("meta"):
            model = family.auto_class(config).from_config(config)
    except Exception as error:  # any type: code of transformers or of the model has failed
        yield Finding("model", f"{name} cannot be made: {_first_sentence(error)}", _way_out(error), True)
        return
    parameters = sum(weight.numel() for weight in model.parameters())
    yield Finding("model", f"{type(model).__name__}, {parameters / 1e6:,.0f} million parameters")
    if (refused := _refusal(model, chosen)) is not None:
        always = _refusal(model, resolve("default"))
        if always is not None:
            yield Finding("layers", f"none can be packed: {always}", _HELP, True)
        else:
            yield Finding("preset", f"{spec} does not fit: {refused}", "the preset default fits", True)
        return
    facts = describe(config)
    layers = facts["layers"]
    if family.proteins:
        yield Finding("layers", f"{layers} of {layers} packed, by esm.ContextCache")
        yield Finding("preset", f"{spec} fits; esm-default is the one for ESM-2")
        yield _moments(model, name, spec, chosen)
        return
    text = config.get_text_config(decoder=True)
    yield Finding("layers", f"{layers} of {len(kinds_of(text))} packed, {_heads(facts)}; {_kinds(text)}")
    yield Finding("preset", f"{spec} fits: {_words(chosen)}")
    yield _savings(name, text, chosen, tokens)
    if not piece_size(text):
        yield _moments(model, name, spec, chosen)


def _heads(facts: dict[str, Any]) -> str:
    """Returns the sizes of the layers in words, the most frequent first."""
    count = Counter(layer_sizes(facts)).most_common()
    return " or ".join(f"{heads} KV head{'s' * (heads > 1)} of {channels} channels" for (heads, channels), _ in count)


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".:") or type(error).__name__


def _way_out(error: Exception) -> str:
    if "model type" in str(error):
        return "a newer transformers may know it: pip install -U transformers"
    return "MODEL must be a folder or a hub name of a causal language model or an ESM-2 that transformers can make"


def _refusal(model: Any, spec: CacheSpec) -> str | None:
    """Returns why `patch` refuses the model, or the model with this spec; None if it does not."""
    try:
        check(model, spec)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return None


def _moments(model: Any, name: str, preset: str, spec: CacheSpec) -> Finding:
    """Says what moments are measured on, and where they are kept."""
    if not spec.measured:
        return Finding("moments", f"{preset} needs none")
    source, why = PROTEINS, ""
    if not family_of(model).proteins:
        model.name_or_path = name
        tokenizer, why = found_tokenizer(model)
        source = "the text of the package" if tokenizer is not None else "random token ids: no tokenizer is found"
    folder = cache_folder()
    place = f"kept in {folder}" if folder else "not kept, because TURBOQUANT_CACHE is empty"
    way_out = f"pass `tokenizer` to turboquant.patch: {why}" if why else ""
    return Finding("moments", f"measured on {source}, when a cache is first made; {place}", way_out)


def _seen(text: Any, layer: int) -> tuple[int, str]:
    """Returns how many tokens the attention of a layer sees at most, 0 if it sees all, and that in words."""
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds else "sliding_attention"
    chunk, window = getattr(text, "attention_chunk_size", None), getattr(text, "sliding_window", None)
    if kind == "chunked_attention" and chunk:
        return chunk, f"chunks of {chunk} tokens"
    if kind in ("sliding_attention", "hybrid_sliding") and window:
        return window, f"a window of {window} tokens"
    return 0, "full attention"


def _kinds(text: Any) -> str:
    """Returns in words what the layers that have keys and values see."""
    count = Counter(_seen(text, i) for i in packed_indices(text))
    return ", ".join(f"{n} with {words}" for (_, words), n in sorted(count.items()))


def _words(spec: CacheSpec) -> str:
    return f"{spec.bits_in_words()}; exact are the first {spec.sinks} tokens and the last {spec.window}"


def _savings(name: str, text: Any, spec: CacheSpec, tokens: int) -> Finding:
    """Says how many bytes the cache of one sequence has, as `turboquant calc` counts them."""
    try:
        layers = layers_of(text, name)
    except ValueError as error:
        return Finding("cache", f"its bytes are not counted: {error}")
    model = Model(name, name, layers, refused(layers))
    full = full_bytes(model, 1, tokens, 2)
    before = f"{tokens:,} tokens of one sequence: {full / 2**20:,.1f} MiB in bfloat16"
    if model.refused:
        return Finding("cache", f"{before}; packed it is not counted, because {model.refused}")
    packed = sum(packed_parts(model, spec, 1, tokens).values())
    return Finding("cache", f"{before}, {packed / 2**20:,.1f} MiB packed: {full / packed:.2f}x smaller")
