"""`patch(model)` makes a transformers model keep its keys and values packed; `unpatch(model)` takes that back.

`hf.patching` has a module for each family of models; `budget` chooses bits from memory, tokens and quality.
"""

from __future__ import annotations

import os
from numbers import Real
from typing import Any, TypeVar

import torch

from ..arguments import quoted
from ..hf.patching import esm, llama
from ..measured import Profile
from ..models.esm import base_of
from ..models.families import family_of
from ..models.texts import check_tokenizer
from ..models.wrappers import base_model, checked_base_model
from ..named_specs import resolve
from ..spec import CacheSpec
from .budget import budgeted

__all__ = ["check", "is_patched", "patch", "unpatch"]

_Model = TypeVar("_Model")


def patch(
    model: _Model,
    spec: CacheSpec | str | float = "default",
    *,
    bits: float | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    uniform: bool = False,
    memory: int | str | None = None,
    tokens: int | None = None,
    quality: float | None = None,
    prefill: str | None = None,
    tokenizer: Any = None,
    cuda_graphs: bool = False,
) -> _Model:
    """Prepares `model`, in place, and returns it: ``patch(model).generate(**inputs)`` works as before, on a packed
    cache.

    model   a causal language model of transformers whose attention goes through its AttentionInterface (Llama, Mistral,
            Qwen2, Qwen3, ...), also with a vision or audio tower, which is left as it is; or an ESM-2 model; or a
            PeftModel, whose base model is patched
    spec    a CacheSpec, the name of a preset, or a number of bits for the preset default, such as 4
    bits    of keys and values, in place of the spec's own, such as 3; not with a spec that has a budget
    profile   a Profile of the model or its file: of `turboquant.calibrate` for a spec that needs one, such as
              "calibrated-3"; else of `turboquant.measure` or `turboquant.calibrate`. None: what the spec takes is
              measured when the first cache is made, on text that ships with the package; for ESM-2 now, on proteins
    uniform   True: all layers have the same widths (`CacheSpec.uniform`)
    memory, tokens, quality   two of them choose the bits of each layer, in place of the spec's own. memory: bytes, as a
              number or a text such as "8 GiB", that the cache of one sequence never exceeds, exact tokens included.
              tokens: those of that sequence. quality: the divergence of the next token that is allowed, in nats. The
              third follows from the costs in the moments, which without a profile are measured now. One line on
              stderr says what was chosen and is expected
    prefill   "exact" or "packed" instead of the spec's own; None: the spec's. With "exact", the default of specs and
            presets, the first forward on an empty cache gives the full cache's logits: its loss says nothing about
            quantisation. With "packed" it does
    cuda_graphs   replay decoding steps as CUDA graphs (`graph.DecodeGraph`): on a GPU a small batch is then as fast as
                  its kernels. For models on one device, whose forward of one token depends on nothing but its tokens,
                  positions and cache; after switching adapters, use a new cache. Models without a rotary embedding
                  replay only steps that are given `position_ids`, as by `generate`
    tokenizer   to measure with; None: the one at `model.name_or_path`, from local files only. Without one, random token
              ids are used instead of text, with a warning

    From then on `generate`, and a forward with use_cache=True or without gradients, create a `TurboQuantCache` unless
    they are given `cache` (or `past_key_values`, with any version of transformers), which may be a `TurboQuantCache`
    made by hand or carried over from an earlier turn. With any other cache, and in a forward without one (training,
    use_cache=False), the model attends by SDPA as without a patch. If nothing is packed and no error says so, as with
    another cache, there is one warning after each `patch` (docs/troubleshooting.md). Patching again replaces the spec.
    Existing caches keep theirs; a cache of another spec or profile than the model's warns once. Models that share
    one configuration object share its attention setting, but not the spec.

    An ESM-2 model (EsmModel and those with a head) has no cache to carry over: in each forward every layer's keys and
    values are packed, and all queries read the packed bytes, in both directions. That shows the effect of quantisation;
    to save time or memory use `turboquant.esm.ContextCache`. All tokens but the spec's sinks are packed; `window` and
    `prefill` do not apply, because an encoder reads all tokens at once. Inference only: a backward pass raises
    RuntimeError.

    Raises ValueError for arguments that contradict each other, and a profile that the spec does not use or that is of
    another model; TypeError for anything but a transformers model, or a tokenizer that is none; and
    NotImplementedError, naming the class, for a model that cannot be patched. The model is unchanged then. A forward
    raises ValueError for a `TurboQuantCache` of a model of another configuration.
    """
    chosen = _chosen(spec, bits, uniform, prefill)
    base = checked_base_model(model)
    _check_dtype(base)
    loaded = None if profile is None else Profile.of(profile)
    check_tokenizer(tokenizer)
    if any(value is not None for value in (tokens, memory, quality)):
        if bits is not None:
            raise ValueError(f"`bits` must be None where `memory` or `quality` chooses them, got {bits!r}")
        if uniform:
            raise ValueError("`uniform` must be False where `memory` or `quality` chooses bits, got True")
        chosen = budgeted(base, chosen, loaded, tokenizer, tokens, memory, quality)
    _family(base).patch(base, chosen, loaded, cuda_graphs, tokenizer)
    return model


def _chosen(spec: CacheSpec | str | float, bits: float | None, uniform: bool, prefill: str | None) -> CacheSpec:
    """The spec with the changes that arguments of `patch` ask for."""
    chosen = resolve(spec)
    if bits is not None:
        if isinstance(bits, bool) or not isinstance(bits, Real):
            raise TypeError(f"`bits` must be a number or None, got {quoted(bits)}")
        if chosen.budget is not None:
            raise ValueError(f"`bits` must be None for a spec with a budget of {chosen.budget:g} bits, got {bits!r}")
        bits = int(bits) if float(bits).is_integer() else float(bits)
        chosen = chosen.with_(key_bits=bits, value_bits=bits)
    if uniform is not False:
        chosen = chosen.with_(uniform=uniform)
    return chosen if prefill is None else chosen.with_(prefill=prefill)


def _check_dtype(model: Any) -> None:
    """Raises NotImplementedError for weights whose keys and values could not be stored."""
    if getattr(model, "dtype", None) == torch.float64:
        raise NotImplementedError(f"{type(model).__name__} cannot be patched: its weights are float64; use float32, "
                                  "bfloat16 or float16 (model.to(torch.float32))")  # fmt: skip


def check(model: Any, spec: CacheSpec | str | float = "default") -> None:
    """Raises what `patch` would raise, and changes nothing. The weights may be on the meta device."""
    base = checked_base_model(model)
    _check_dtype(base)
    _family(base).check(base, resolve(spec), None)


def is_patched(model: Any) -> bool:
    """Whether `patch` has prepared a model, or the base model of a PeftModel, and `unpatch` has not undone that."""
    base = base_model(model)
    return hasattr(base_of(base) if family_of(base).proteins else base, "_turboquant")


def unpatch(model: _Model) -> _Model:
    """Undoes `patch` and returns the model; a model that is not patched is left as it is.

    A `TurboQuantCache` cannot be used with it any more: its next forward raises RuntimeError. Raises TypeError for
    anything but a transformers model.
    """
    base = checked_base_model(model, tuned=True)
    _family(base).unpatch(base)
    return model


def _family(model: Any) -> Any:
    """The module that patches a model."""
    return esm if family_of(model).proteins else llama
