"""Methods that spend a budget of bits, and the choice of the best one by trials. NumPy.

    none             the same widths in all layers, moments of the model: what a preset without a calibration does
    moments          the same widths, moments of the calibration's text and the model's together
    widths           moments of the model, and a width for each side of each layer
    moments+widths   both
    axes             principal axes, and a width for each of their groups of 32 or 16 (`Calibration`)

Sides get their widths greedily: each bit goes to the side where it reduces this sum most:

    sum over sides of cost^POWER * D / (1 - D)

A side's cost is the divergence that errors as large as its vectors would cause. D is the distortion of a width
(`distortion`), and D / (1 - D) its squared error relative to the squared norm, because EDEN's scale is unbiased
(arXiv 2108.08842). From 1 to 2 bits the reduction counts SECOND_BIT times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..arguments import bounded
from ..plan import FINE_GROUP, GROUP
from ..spec import LEAST_SIDE_BITS, MOST_SIDE_BITS, CacheSpec
from ..tables import html
from ..tables import table as markdown
from .distortion import distortions

__all__ = ["METHODS", "WINDOWS", "Trial", "chosen", "side_widths", "table", "uniform_widths"]

METHODS = ("none", "moments", "widths", "moments+widths", "axes")
POWER = 0.7  # applied to a side's cost: costs of several sides do not simply add
# At 1 bit the squared error is 0.57 times the squared norm, and costs more than in proportion. If it counted once,
# Gemma would diverge 1.6 times as much on WikiText-2, at an average of 2 bits, as with the same width everywhere.
SECOND_BIT = 3
WINDOWS = (0, CacheSpec().window)  # exact last tokens for which a decoder is calibrated: none, and as in the presets
TOLERANCE = 0.05  # how much worse than "none" a method may be on any kind of text of the package
GAIN = 0.05  # how much better it has to be on the text of the trial; a gain of 3 % was a loss of 13 % on another text
NOISE = 1e-7  # nats a token: a smaller divergence is rounding, and may be negative

Widths = NDArray[np.int64]


@dataclass(frozen=True)
class Trial:
    """One method at one average of bits and one window.

    average        bits of a code;  group  channels of a group, for axes
    window         last tokens that were exact, beside the sinks
    kl_divergence  mean over the held-out text, or all the text of the package if none was given, nats a token
    elsewhere      the divergence divided by that of "none", for the kind of text of the package (prose, source code,
                   German, Japanese) where it is largest: geometric mean over all averages at which it was tried,
                   since a kind has some hundred tokens, on which one ratio scatters by 20 %. None: not measured
    chosen         the best of this average and window
    """

    window: int
    average: float
    method: str
    group: int
    kl_divergence: float
    elsewhere: float | None = None
    chosen: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {self.method!r}")
        bounded("Trial: `window`", self.window)
        for name in ("average", "kl_divergence"):
            if not (isinstance(value := getattr(self, name), float) and math.isfinite(value)):
                raise ValueError(f"`{name}` must be a finite float, got {value!r}")
        if self.elsewhere is not None and not (isinstance(self.elsewhere, float) and math.isfinite(self.elsewhere)):
            raise ValueError(f"`elsewhere` must be a finite float or None, got {self.elsewhere!r}")
        if type(self.group) is not int or self.group not in (GROUP, FINE_GROUP):
            raise ValueError(f"`group` must be {GROUP} or {FINE_GROUP} channels, got {self.group!r}")
        if type(self.chosen) is not bool:
            raise ValueError(f"`chosen` must be True or False, got {self.chosen!r}")

    @property
    def label(self) -> str:
        """The method, and for axes the size of their groups."""
        return f"axes, groups of {self.group}" if self.method == "axes" else self.method


def uniform_widths(average: float, layers: int) -> Widths:
    """[layers, 2]: the same bits everywhere. Bits that remain go to keys of layers, spread evenly, and then to values:
    errors of keys cost more."""
    total = int(average * 2 * layers + 1e-6)
    low, more = divmod(total, 2 * layers)
    widths = np.full((layers, 2), low)
    for side in range(2):
        count = min(layers, more - side * layers)
        if count > 0:
            widths[np.arange(count) * layers // count, side] += 1
    return widths


@cache
def _errors(tries: int, channels: int) -> dict[int, float]:
    """D / (1 - D) of each width that a side may have. That of 1 bit is raised: the step to 2 bits counts SECOND_BIT
    times."""
    ratios = {b: d / (1 - d) for b, d in distortions(tries, channels).items() if LEAST_SIDE_BITS <= b <= MOST_SIDE_BITS}
    return {**ratios, 1: ratios[2] + SECOND_BIT * (ratios[1] - ratios[2])}


def side_widths(
    costs: NDArray[np.floating],
    average: float,
    tries: int = 0,
    channels: int = 128,
    least: int = LEAST_SIDE_BITS,
    most: int = MOST_SIDE_BITS,
) -> Widths:
    """Returns widths [layers, 2] for costs [layers, 2]: `least` to `most` bits each, their mean at most `average`.
    tries, channels: of the encoder and of a head, as `distortions` takes them."""
    weights = np.maximum(costs.astype(np.float64), 1e-30) ** POWER
    widths = np.full(costs.shape, least)
    widen(widths, int(average * costs.size + 1e-6), range(least, most + 1), weights, 2 * [_errors(tries, channels)])
    return widths


def widen(
    widths: Widths, total: int, choices: Sequence[int], weights: NDArray[np.float64], errors: Sequence[dict[int, float]]
) -> None:
    """Makes widths [layers, 2, ..] larger, in place, until they sum to `total`: the next of the ascending `choices`
    goes where it reduces the sum of weight * error most per bit. Where it costs more than is left, there is none.
    errors: of keys and of values, by width."""
    wider = dict(pairwise(choices))
    queue: list[tuple[float, tuple[int, ...]]] = []

    def add(at: tuple[int, ...]) -> None:
        now, error = int(widths[at]), errors[at[1]]
        if then := wider.get(now):
            heapq.heappush(queue, (-float(weights[at] * (error[now] - error[then])) / (then - now), at))

    for at in np.ndindex(widths.shape):
        add(at)
    left = total - int(widths.sum())
    while left and queue:
        _, at = heapq.heappop(queue)
        price = wider[int(widths[at])] - int(widths[at])
        if price <= left:
            widths[at] += price
            left -= price
            add(at)


def added_cost(cost: float, bits: int, fewer: int, tries: int, channels: int) -> float:
    """What a side of a layer adds to the divergence, in the units of `side_widths`, with `fewer` than `bits` bits."""
    errors = _errors(tries, channels)
    return float(max(cost, 1e-30) ** POWER * (errors[fewer] - errors[bits]))


def chosen(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """The same trials, with the best of each window and average marked: that of least divergence among "none" and those
    that are better than it by GAIN, and on every kind of text of the package at most TOLERANCE worse."""
    marked: list[Trial] = []
    every = list(trials)
    for window, average in sorted({(trial.window, -trial.average) for trial in every}):
        here = [trial for trial in every if (trial.window, trial.average) == (window, -average)]
        (plain,) = (trial for trial in here if trial.method == "none")
        better = (t for t in here if _gains(t, plain) and _holds(t))
        best = min(better, key=lambda t: t.kl_divergence, default=plain)
        marked += [replace(trial, chosen=trial is best) for trial in here]
    return tuple(marked)


def _gains(trial: Trial, plain: Trial) -> bool:
    return max(NOISE, trial.kl_divergence) < (1 - GAIN) * max(NOISE, plain.kl_divergence)


def _holds(trial: Trial) -> bool:
    return trial.elsewhere is None or trial.elsewhere <= 1 + TOLERANCE


def table(trials: Sequence[Trial], as_html: bool = False) -> str:
    """A table for each window, in Markdown or HTML: averages by methods, with the divergence and in brackets
    `Trial.elsewhere`; below it what was chosen, and why."""
    parts = []
    for window in dict.fromkeys(trial.window for trial in trials):
        exact = f"The last {window} tokens exact" if window else "No token at the end exact"
        rows, reasons = _rows([trial for trial in trials if trial.window == window])
        left = [len(rows[0]) - 1]
        written = html(rows, left, reasons) if as_html else "\n".join(
            [markdown(rows, left, markdown=True), "", *reasons])  # fmt: skip
        parts.append(f"<p>{exact}:</p>{written}" if as_html else f"{exact}:\n\n{written}")
    return "\n\n".join(parts)


def _rows(trials: Sequence[Trial]) -> tuple[list[list[str]], list[str]]:
    """The cells, and a sentence for each average."""
    labels = list(dict.fromkeys(trial.label for trial in trials))
    at = {(trial.average, trial.label): trial for trial in trials}
    rows = [["bits", *labels, "chosen"]]
    reasons = []
    for average in dict.fromkeys(trial.average for trial in trials):
        here = [at.get((average, label)) for label in labels]
        (best,) = (trial for trial in here if trial is not None and trial.chosen)
        (plain,) = (trial for trial in here if trial is not None and trial.method == "none")
        rows.append([f"{average:g}", *map(_cell, here), best.label])
        reasons.append(f"{average:g} bits: {best.label}, {_reason(best, plain, [t for t in here if t is not None])}.")
    return rows, reasons


def _cell(trial: Trial | None) -> str:
    if trial is None:
        return "-"
    return f"{trial.kl_divergence:.5f}" + ("" if trial.elsewhere is None else f" ({trial.elsewhere:.2f}x)")


def _reason(best: Trial, plain: Trial, here: Sequence[Trial]) -> str:
    better = [t for t in here if t.kl_divergence < best.kl_divergence and _gains(t, plain)]
    refused = ", ".join(f"{t.label} costs {t.elsewhere - 1:.0%} more on another kind of text"
                        for t in better if t.elsewhere is not None)  # fmt: skip
    if best is plain:
        return f"since {refused}" if refused else f"nothing diverges {GAIN:.0%} less"
    gain = f"{1 - best.kl_divergence / plain.kl_divergence:.1%} less than none"
    return f"{gain}; {refused}" if refused else gain
