"""Whether a model can be packed, and what that would save: from its configuration alone, no weights are read.

The model is made on the meta device, and asked what `patch` asks, by the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from ..calibration.measure import describe
from ..findings import Finding
from ..moments.text import found_tokenizer
from ..named_specs import resolve
from ..spec import CacheSpec
from .cache import TurboQuantCache
from .layer import PackedLayer
from .patching import check

__all__ = ["diagnose"]

_HELP = "docs/troubleshooting.md says what is supported; the model runs without a patch as before"


def diagnose(name: str, spec: str, tokens: int) -> Iterator[Finding]:
    """Findings about the model at a folder or hub name, for a preset and one sequence of so many tokens.

    Ends with the first that fails. ValueError for an unknown preset or fewer than 1 token.
    """
    chosen = resolve(spec)
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {tokens}")
    try:
        config = AutoConfig.from_pretrained(name)
        family = AutoModelForMaskedLM if config.model_type == "esm" else AutoModelForCausalLM
        with torch.device("meta"):
            model = family.from_config(config)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        newer = "a newer transformers may know it: pip install -U transformers"
        how = newer if "model type" in str(error) else "MODEL must be a folder or a hub name of a model of transformers"
        yield Finding("model", f"{name} cannot be made: {_first_sentence(error)}", how, True)
        return
    parameters = sum(weight.numel() for weight in model.parameters())
    facts = describe(config)
    yield Finding("model", f"{type(model).__name__}, {parameters / 1e6:,.0f} million parameters")
    try:
        check(model, chosen)
    except NotImplementedError as error:
        yield Finding("layers", f"none can be packed: {error}", _HELP, True)
        return
    except ValueError as error:  # of the spec: a calibration is missing
        yield Finding("preset", f"{spec} does not fit: {error}", "the preset default needs nothing", True)
        return
    if config.model_type == "esm":
        yield Finding("layers", f"{facts['layers']} of {facts['layers']} packed, by esm.ContextCache")
        yield Finding("preset", f"{spec} fits; esm-default is the one for ESM-2")
        return
    layers = TurboQuantCache(config, chosen).layers
    text = config.get_text_config(decoder=True)
    windows = [_window(text, i) for i, layer in enumerate(layers) if isinstance(layer, PackedLayer)]
    heads = "1 KV head" if facts["kv_heads"] == 1 else f"{facts['kv_heads']} KV heads"
    fact = f"{len(windows)} of {len(layers)} packed, {heads} of {facts['head_dim']} channels"
    yield Finding("layers", f"{fact}; {_kinds(windows)}")
    yield Finding("preset", f"{spec} fits: {_words(chosen)}")
    yield _savings(chosen, facts, windows, tokens)
    model.name_or_path = name
    tokenizer, why = found_tokenizer(model)
    if tokenizer is None:
        how = f"pass one to turboquant.measure: {why}"
        yield Finding("moments", "measured on random token ids, because no tokenizer is found", how)
    else:
        yield Finding("moments", "measured on the text of the package, with the tokenizer of the model")


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0]


def _window(text: Any, layer: int) -> int:
    """The width of a layer's sliding window; 0: it sees all tokens."""
    kinds = getattr(text, "layer_types", None)
    return 0 if kinds and kinds[layer] != "sliding_attention" else getattr(text, "sliding_window", None) or 0


def _kinds(windows: list[int]) -> str:
    count = Counter(windows)
    kinds = ((n, f"a window of {width} tokens" if width else "full attention") for width, n in sorted(count.items()))
    return ", ".join(f"{n} with {kind}" for n, kind in kinds)


def _words(spec: CacheSpec) -> str:
    bits = f"{spec.budget} bits on average" if spec.budget else f"keys {spec.key_bits} bits, values {spec.value_bits}"
    return f"{bits}; exact are the first {spec.sinks} tokens and the last {spec.window}"


def _savings(spec: CacheSpec, facts: dict[str, Any], windows: list[int], tokens: int) -> Finding:
    """Bytes of one sequence: in bfloat16, and with all but the exact tokens packed."""
    kv_heads, head_dim, full, held = facts["kv_heads"], facts["head_dim"], 0, 0
    per_token = 2 * 2 * kv_heads * head_dim
    packed_per_token = spec.bytes_per_token(head_dim, kv_heads, facts["layers"]) / facts["layers"]
    for width in windows:
        stored = min(tokens, width or tokens)
        exact = min(stored, spec.sinks + spec.window)
        full += stored * per_token
        held += round(exact * per_token + (stored - exact) * packed_per_token)
    text = f"{full / 2**20:,.1f} MiB in bfloat16, {held / 2**20:,.1f} MiB packed: {full / held:.2f}x smaller"
    return Finding("cache", f"{tokens:,} tokens of one sequence: {text}")
