"""Trials of a calibration: every method through the packed path, on text that nothing was learned from, or, if nothing
was given to learn from, on the text of the package.

At the average nearest to 3 bits all methods are tried; at the others those that came near the best there. A decoder is
measured by the divergence of the next token, with each of `WINDOWS` beside the sinks. It is measured on each kind of
text of the package too, which shows what a method costs on text of another kind. An ESM-2 model is measured by 1 minus
the cosine of last hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..measured.calibration import Calibration
from ..measured.choice import NOISE, WINDOWS, Trial, chosen
from ..measured.profile import Profile
from ..measuring.costs import side_costs
from ..models.families import SINKS, family_of
from ..progress import Progress, steps
from ..spec import BUDGET_BITS, CacheSpec
from .unfinished import Unfinished

__all__ = ["tried", "with_moments"]

FIRST = 3.0  # bits at which all methods are tried, or the average nearest to it
NEAR = 1.25  # a method above this multiple of the best is not tried at other averages
_METHODS = (("none", 32), ("moments", 32), ("widths", 32), ("moments+widths", 32), ("axes", 32), ("axes", 16))
_ON_THE_PACKAGE = (("none", 32), ("widths", 32))  # moments are the model's, and axes want more text

Batch = Mapping[str, torch.Tensor]
F64 = NDArray[np.float64]


def with_moments(
    calibration: Calibration,
    model: Any,
    tokenizer: Any,
    batches: Sequence[Batch],
    probes: Sequence[Batch],
    held_out: Sequence[Batch],
    run: Unfinished,
    progress: bool,
) -> Calibration:
    """Returns `calibration` with moments, and with costs of sides for each of `WINDOWS` that leaves something packed in
    the texts. Raises what `turboquant.measure` raises. Without batches, probes and text held out all is of the
    package's text.

    Costs are those on some of the batches. With a window, those on the text of the package count as much: where a model
    looks back far depends on the language, and widths from English text alone made Gemma diverge 1.35 times as much on
    German. Without a window other texts gain less than this text loses.
    """
    from ..measuring.moments import measure_model, measure_with_text

    moments = {"model": run.measured("model", lambda: measure_model(model, tokenizer))}
    moments["text"] = moments["model"]
    if batches:
        rows = _rows(batches)
        moments["text"] = run.measured("text", lambda: measure_with_text(model, rows, tokenizer, calibration.source))
    own, others = _rows(probes), family_of(model).kinds(model, tokenizer)

    def shares(texts: Sequence[torch.Tensor], window: int) -> F64:
        """The mean share of each side in the costs of texts, so that one very costly token counts no more."""
        each = []
        for i, ids in ((i, ids) for i, ids in enumerate(texts) if _packs(ids, window)):
            name = f"costs of {'own' if texts is own else 'kind'} {i}, window {window}"
            measure = partial(side_costs, model, ids, moments["model"], calibration.seed + i, window)
            (shown.skip if name in run.arrays else shown.add)(ids.numel())
            each.append(run.array(name, measure))
        mean: F64 = np.mean([costs / (costs.sum() or 1) for costs in each], 0)
        return mean

    needed = [own, [batch["input_ids"] for batch in held_out], *([ids] for ids in others)]
    windows = _windows(model, [texts for texts in needed if texts])
    used = {window: [texts for texts in (own, others if window or not own else []) if texts] for window in windows}
    tokens = sum(ids.numel() for window, groups in used.items() for texts in groups for ids in texts
                 if _packs(ids, window))  # fmt: skip
    with Progress("calibrate, what sides cost", tokens, "tokens", progress) as shown:
        costs = [np.mean([shares(texts, window) for texts in groups], 0) for window, groups in used.items()]
    return replace(calibration, moments=moments, windows=windows, side_costs=np.stack(costs).astype(np.float32))


def _windows(model: Any, needed: Sequence[Sequence[torch.Tensor]]) -> tuple[int, ...]:
    """Those of `WINDOWS` that leave something packed in a text of each group; 0 alone for proteins, read both ways."""
    if family_of(model).proteins:
        return (0,)
    return tuple(window for window in WINDOWS
                 if all(any(_packs(ids, window) for ids in group) for group in needed))  # fmt: skip


def _packs(ids: torch.Tensor, window: int) -> bool:
    """Whether a text [.., tokens] has tokens that are packed with this window."""
    return window == 0 or ids.shape[1] > SINKS + window


def _rows(batches: Sequence[Batch]) -> list[torch.Tensor]:
    """The sequences of batches, without padding, each [1, tokens]."""
    rows = []
    for batch in batches:
        ids, mask = batch["input_ids"].cpu(), batch.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool().cpu()
        rows += [row[which][None] for row, which in zip(ids, real)]
    return rows


def tried(
    calibration: Calibration,
    model: Any,
    tokenizer: Any,
    held_out: Sequence[Batch],
    averages: Sequence[float],
    run: Unfinished,
    progress: bool,
) -> Calibration:
    """Returns `calibration` with its trials.

    held_out  batches without padding; none: the text of the package, with two methods.  averages  from high to low.
    run       has earlier results; new ones are added, and it is saved after each text.
    """
    possible = _METHODS if held_out else _ON_THE_PACKAGE
    methods = [m for m in possible if calibration.moments or m[0] in ("none", "axes")]
    first = min(averages, key=lambda average: abs(average - FIRST))
    others: list[Batch] = [{"input_ids": ids} for ids in family_of(model).kinds(model, tokenizer)]
    measure = _Trials(calibration, model, list(held_out), others, run, progress)
    trials: list[Trial] = []
    for window in calibration.windows:
        here = measure(window, [(first, *method) for method in methods])
        limit = NEAR * min(trial.kl_divergence for trial in here)
        near = [(t.method, t.group) for t in here if t.method == "none" or t.kl_divergence <= limit]
        rest = [(average, *method) for average in averages if average != first for method in near]
        trials += [*here, *measure(window, rest)]
    return replace(calibration, trials=chosen(measure.elsewhere(trials)))


class _Trials:
    """Runs methods at averages, text by text. kinds: of text of the package, which are judged if there are no texts."""

    def __init__(
        self,
        calibration: Calibration,
        model: Any,
        texts: list[Batch],
        kinds: list[Batch],
        run: Unfinished,
        progress: bool,
    ) -> None:
        self.found, self.model, self.places = calibration, model, [*texts, *kinds]
        self.judged = range(len(texts) or len(kinds))
        self.kinds = range(len(texts), len(self.places))
        self.run, self.done, self.progress = run, run.trials, progress

    def __call__(self, window: int, which: Sequence[tuple[float, str, int]]) -> list[Trial]:
        which = [one for one in which if one[1] != "axes" or one[0] <= BUDGET_BITS]
        if not which:
            return []
        specs = {_name(window, average, method, group):
                 CacheSpec(budget=average, method=method, group=group, sinks=SINKS, window=window)
                 for average, method, group in which}  # fmt: skip
        what = f"calibrate, {len(specs)} trials with the last {window} tokens exact"
        for i, batch in steps(list(enumerate(self.places)), what, "texts", self.progress):
            left = {name: spec for name, spec in specs.items() if f"{i} {name}" not in self.done}
            if not left:
                continue
            losses = self._losses(batch, left)
            self.done.update({f"{i} {name}": loss for name, loss in losses.items()})
            self.run.save()
        sizes = [self.places[i]["input_ids"].numel() for i in self.judged]
        trials = []
        for (average, method, group), name in zip(which, specs):
            each = [self.done[f"{i} {name}"] for i in self.judged]
            trials.append(Trial(window, average, method, group, float(np.average(each, weights=sizes))))
        return trials

    def elsewhere(self, trials: Sequence[Trial]) -> list[Trial]:
        """The same trials with `Trial.elsewhere`."""

        def ratios(t: Trial) -> list[float]:
            """By kind: the divergence divided by that of "none". Sliding windows may hide all that is packed: then both
            are rounding."""
            names = (_name(t.window, t.average, *which) for which in ((t.method, t.group), ("none", 32)))
            own, plain = ([max(NOISE, self.done[f"{i} {name}"]) for i in self.kinds] for name in names)
            return [a / b for a, b in zip(own, plain)]

        worst: dict[tuple[int, str, int], float] = {}
        for one in {(t.window, t.method, t.group) for t in trials} if self.kinds else ():
            logs = np.log([ratios(t) for t in trials if (t.window, t.method, t.group) == one])
            worst[one] = float(np.exp(logs.mean(0).max()))
        return [replace(t, elsewhere=worst.get((t.window, t.method, t.group))) for t in trials]

    def _losses(self, batch: Batch, specs: dict[str, CacheSpec]) -> dict[str, float]:
        profile = Profile(self.found.moments["model"], self.found)
        if family_of(self.model).proteins:
            from ..esm.quality import cosine_losses

            return cosine_losses(self.model, batch, specs, profile)
        from ..evaluation.decoder import evaluate_all

        results = evaluate_all(self.model, batch["input_ids"], specs, profile=profile, generate=0)
        return {name: one.kl_divergence for name, one in results.items()}


def _name(window: int, average: float, method: str, group: int) -> str:
    return f"{window} {average} {method} {group}"
