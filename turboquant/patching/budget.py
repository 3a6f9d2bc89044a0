"""Bits by layer from memory, tokens and quality, for `patch`."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import bounded
from ..evaluation.forecast import with_divergence_of
from ..hf.patching import llama
from ..measured import Moments, Profile
from ..measured.budget import solve
from ..measuring.used import keep_moments, own_moments
from ..models.families import family_of
from ..progress import log
from ..sizes import bytes_of, model_of
from ..spec import CacheSpec

__all__ = ["budgeted"]


def budgeted(
    model: Any,
    spec: CacheSpec,
    profile: Profile | None,
    tokenizer: Any,
    tokens: int | None,
    memory: int | str | None,
    quality: float | None,
) -> CacheSpec:
    """Returns the spec with the bits of each layer that two of tokens, memory and quality choose (`turboquant.patch`).
    Measures the model, if no profile is given."""
    if family_of(model).proteins:
        raise NotImplementedError(f"{type(model).__name__}: a budget is for decoders, ESM-2 keeps no cache")
    llama.check(model, spec, profile)
    most = None if memory is None else bytes_of(memory, "`memory`")
    if tokens is not None:
        tokens = bounded("patch: `tokens`", tokens)
    moments = _budget_moments(model, tokenizer, None if profile is None else profile.moments)
    budget = solve(model_of(model.config), spec, moments, tokens=tokens, memory=most, quality=quality,
                  item_bytes=model.dtype.itemsize)  # fmt: skip
    log.info("%s gets %s", type(model).__name__, budget)
    return budget.spec


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _budget_moments(model: Any, tokenizer: Any, measured: Moments | None) -> Moments:
    """Returns the moments given, or the model's own. If they have costs, they get the divergence that a forecast starts
    from. If it is missing it is measured, and kept in memory with the model's own moments."""
    moments = own_moments(model, tokenizer) if measured is None else measured
    complete = with_divergence_of(moments, model, tokenizer)
    if measured is None and complete is not moments:
        keep_moments(model, complete)
    return complete
