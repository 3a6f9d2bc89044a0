"""`measure`, and the divergence from which budgets forecast quality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..measured import Moments, Profile
from ..measured.choice import NOISE
from ..measuring.moments import measure_model, positions_of
from ..models.families import SINKS
from ..models.texts import found_tokenizer, sample
from ..models.wrappers import checked_base_model
from ..progress import log
from ..spec import CacheSpec
from .decoder import divergence_from

__all__ = ["measure", "with_divergence_of"]

DIVERGED = "compact"  # the preset whose divergence is measured


def measure(model: Any, tokenizer: Any = None, text: str | None = None, budget: bool = False) -> Profile:
    """Measures a profile of a model, without a calibration: the mean of its keys before RoPE, and the second moment of
    its queries.

    model      a causal language model of transformers with attention through AttentionInterface, or a PeftModel of one,
               or an ESM-2 model; patched or not, of any floating dtype, quantised, on one or several devices, or with
               weights that a `device_map` offloads. It is left as it was: no gradients, same training mode and random
               state.
    tokenizer  of the model. None: the one at `model.name_or_path`, from local files only. If there is none, random
               token ids are used instead of text, with a warning.
    text       what to measure on; its first 2,048 tokens are used, or as many as the model has positions. None: the
               text that ships with the package: prose, source code, German and Japanese. An ESM-2 model takes neither
               tokenizer nor text: it is measured on the nine proteins of the package, 2,028 residues.
    budget     also measure the divergence from which a budget forecasts (`turboquant.patch` with `memory` or `quality`,
               `turboquant calc`): two more forwards over the text.

    It runs one forward without the head, over BOS, if the tokenizer has one, and the tokens (ESM-2: one forward for
    each protein). The first 4 tokens do not count. A decoder then runs forward and backward over up to 384 tokens of
    each text, for the costs of errors. The result, without the divergence of `budget`, is kept in a file, named by a
    digest of the model and the ids, in the folder TURBOQUANT_CACHE (an environment variable; default: turboquant in the
    user's cache folder; empty: nothing is kept).

    Raises TypeError for anything but a transformers model, NotImplementedError for one that cannot be measured,
    ValueError for a text that is too short, a tokenizer of another model, a tokenizer or text for ESM-2, and keys or
    queries that are not finite.
    """
    moments = measure_model(model, tokenizer, text)
    return Profile(with_divergence_of(moments, model, tokenizer, text) if budget else moments)


def with_divergence_of(moments: Moments, model: Any, tokenizer: Any, text: str | None = None) -> Moments:
    """Returns `moments` with the divergence that a forecast starts from, if they have costs. If it is missing, it is
    measured on the tokens of `measure`."""
    if moments.costs is None or moments.divergence is not None:
        return moments
    base = checked_base_model(model)
    tokenizer, why = (tokenizer, "") if tokenizer is not None else found_tokenizer(base)
    if tokenizer is None:
        log.info("the divergence of %s is not measured: %s", type(base).__name__, why)
        return moments
    drawn = sample(base, tokenizer, text, positions_of(base))
    seen = f"{drawn.ids[0].numel():,}"
    log.info("%s runs twice over %s tokens, to measure how much it diverges", type(base).__name__, seen)
    try:
        return _with_divergence(moments, base, drawn.ids[0])
    except (NotImplementedError, MemoryError, torch.OutOfMemoryError) as error:
        log.info("the divergence of %s is not known: %s", type(base).__name__, error)
        return moments


def _with_divergence(moments: Moments, model: Any, ids: torch.Tensor) -> Moments:
    """Returns `moments`, which have costs, with the divergence of `DIVERGED` on ids [1, tokens]: the mean over the last
    three quarters, because in the first quarter queries see few packed tokens.

    Costs alone only compare choices of widths: they are measured on short texts, and on long ones divergence is larger
    by a factor that differs between models.
    """
    tokens = ids.shape[1]
    start = min(max(tokens // 4, SINKS + CacheSpec().window), tokens - 1)
    divergence = divergence_from(model, ids, DIVERGED, Profile(moments), start)
    return replace(moments, divergence=max(NOISE, divergence))
