"""`patch(model)` makes a transformers model keep its keys and values packed; `unpatch(model)` takes that back.

One module per family of architectures: `llama` for decoders, `esm` for ESM-2.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from ...calibration import Calibration
from ...models.wrappers import base_model, checked_base_model
from ...moments import Moments
from ...moments.text import check_tokenizer
from ...named_specs import resolve
from ...spec import CacheSpec
from . import esm, llama

__all__ = ["check", "patch", "unpatch"]

_Model = TypeVar("_Model")


def patch(
    model: _Model,
    spec: CacheSpec | str = "default",
    calibration: Calibration | str | os.PathLike[str] | None = None,
    *,
    prefill: str | None = None,
    cuda_graphs: bool = False,
    moments: Moments | str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
) -> _Model:
    """Prepares `model`, in place, and returns it: ``patch(model).generate(**inputs)`` works as before, on a packed
    cache.

    model   a causal language model of transformers whose attention goes through its AttentionInterface (Llama, Mistral,
            Qwen2, Qwen3, ...), also with a vision or audio tower, which is left as it is; or an ESM-2 model; or a
            PeftModel, whose base model is patched
    spec    a CacheSpec or the name of a preset
    calibration   a Calibration or its file, for a spec that uses one, such as "calibrated-3"
    prefill   "exact" or "packed" instead of the spec's own; None: the spec's. With "exact", the default of specs and
            presets, the first forward on an empty cache gives the full cache's logits: its loss says nothing about
            quantisation. With "packed" it does
    cuda_graphs   replay decoding steps as CUDA graphs (`graph.DecodeGraph`): on a GPU a small batch is then as fast as
                  its kernels. For models on one device, whose forward of one token depends on nothing but its tokens,
                  positions and cache; after switching adapters, use a new cache
    moments   of the model (`turboquant.measure`) or their file, for a spec with a wave or a metric. None: measured when
              the first cache is made, on text that ships with the package; for ESM-2 measured now, on proteins
    tokenizer   to measure with; None: the one at `model.name_or_path`, from local files only. Without one, random token
              ids are used instead of text, with a warning

    From then on `generate`, and a forward with use_cache=True or without gradients, create a `TurboQuantCache` unless
    they are given `cache` (or `past_key_values`, with any version of transformers), which may be a `TurboQuantCache`
    made by hand or carried over from an earlier turn. With any other cache, and in a forward without one (training,
    use_cache=False), the model attends by SDPA as without a patch. What packs nothing without an error, such as another
    cache, is one warning after each call of `patch` (docs/troubleshooting.md). Patching again replaces the spec.
    Existing caches keep theirs; a cache of another spec or calibration than the model's warns once. Models that share
    one configuration object share its attention setting, but not the spec.

    An ESM-2 model (EsmModel and those with a head) has no cache to carry over: in each forward every layer's keys and
    values are packed, and all queries read the packed bytes, in both directions. That shows the effect of quantisation;
    to save time or memory use `turboquant.esm.ContextCache`. All tokens but the spec's sinks are packed; `window` and
    `prefill` do not apply, because an encoder reads all tokens at once. Inference only: a backward pass raises
    RuntimeError.

    Raises TypeError for anything but a transformers model, or a tokenizer that is none, and NotImplementedError,
    naming the class, for a model that cannot be patched; the model is unchanged then. A forward raises ValueError for
    a `TurboQuantCache` of a model of another configuration.
    """
    chosen = resolve(spec) if prefill is None else resolve(spec).with_(prefill=prefill)
    base = checked_base_model(model)
    found = None if calibration is None else Calibration.of(calibration)
    measured = None if moments is None else Moments.of(moments)
    check_tokenizer(tokenizer)
    if _family(base) is esm:
        if cuda_graphs:
            raise NotImplementedError(
                f"{type(base).__name__}: `cuda_graphs` is for decoders, ESM-2 has no decoding step"
            )
        if tokenizer is not None:
            raise NotImplementedError(
                f"{type(base).__name__}: `tokenizer` is for decoders, ESM-2 is measured on proteins of the package"
            )
        esm.patch(base, chosen, found, measured)
    else:
        llama.patch(base, chosen, found, cuda_graphs, measured, tokenizer)
    return model


def check(model: Any, spec: CacheSpec | str = "default") -> None:
    """Raises what `patch` would raise, and changes nothing. The weights may be on the meta device."""
    base = checked_base_model(model)
    _family(base).check(base, resolve(spec), None)


def unpatch(model: _Model) -> _Model:
    """Undoes `patch` and returns the model; a model that is not patched is left as it is.

    A `TurboQuantCache` cannot be used with it any more: its next forward raises RuntimeError.
    """
    base = base_model(model)
    _family(base).unpatch(base)
    return model


def _family(model: Any) -> Any:
    return esm if getattr(getattr(model, "config", None), "model_type", None) == "esm" else llama
