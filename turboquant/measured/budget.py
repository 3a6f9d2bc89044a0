"""A budget instead of a preset: bits by layer and side from two of tokens, memory and quality, without running a model.

Bytes are those that `turboquant calc` counts. Divergence is forecast from that of one preset, which is measured
with the moments, and from costs (`forecast`). NumPy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from ..arguments import quoted
from ..sizes import MOST_TOKENS, Model, packed_parts, tokens_that_fit
from ..spec import MOST_SIDE_BITS, CacheSpec
from .choice import POWER, side_widths, uniform_widths
from .distortion import distortions
from .moments import Moments

__all__ = ["Budget", "forecast", "solve"]

LEAST = 2  # average bits
KNOWN = 3  # average bits of the preset whose divergence is measured (`evaluation.forecast.DIVERGED`)
# Large errors cost more than in proportion: the divergence of a cache goes with the sum of costs times
# noise (1 + BEND noise). BEND is between what SmolLM2-135M and Gemma 3 270M have from 4 to 2 bits.
BEND = 4.5

F64 = NDArray[np.float64]
Widths = NDArray[np.int64]


@dataclass(frozen=True)
class Budget:
    """What was chosen.

    spec      the spec with the bits of each layer as overrides
    bits      average bits of a number, over all layers
    tokens    of one sequence;  memory  bytes that its cache takes at most, exact tokens and tables included
    quality   the divergence of the next token that is expected, nats; None where it was not measured for one preset
    """

    spec: CacheSpec
    bits: float
    tokens: int
    memory: int
    quality: float | None

    def __str__(self) -> str:
        expected = "" if self.quality is None else f", an expected divergence of {self.quality:.2g} nats a token"
        return (f"{self.bits:.2f} bits on average, {self.memory / 2**20:,.1f} MiB for {self.tokens:,} "
                f"tokens{expected}")  # fmt: skip


def forecast(costs: NDArray[np.floating], widths: Widths, tries: int, channels: Sequence[int]) -> float:
    """Returns a number that is proportional to the divergence of the next token, within one model, for costs and widths
    [layers, 2] and the exact tokens of the presets. channels: of a head, by layer.

    Sides count by cost^POWER, as where widths are chosen: a plain sum promises more from sharing than caches gain.
    """
    weights = np.maximum(costs.astype(np.float64), 1e-30) ** POWER
    errors = [distortions(tries, one) for one in channels]
    noise = np.array([[d[int(b)] / (1 - d[int(b)]) for b in row] for d, row in zip(errors, widths)])
    return float((weights * noise * (1 + BEND * noise)).sum())


def solve(
    model: Model,
    spec: CacheSpec,
    moments: Moments,
    *,
    tokens: int | None = None,
    memory: int | None = None,
    quality: float | None = None,
    item_bytes: int = 2,
) -> Budget:
    """Solves for the third of tokens of one sequence, bytes, and divergence in nats: the least divergence within a
    memory, the least memory with a divergence, or the most tokens within both.

    spec    its exact tokens and method hold; its bits are replaced
    moments   of the model; without costs widths are uniform, and without a divergence none is forecast
    item_bytes   of a number of the model's dtype, in which exact tokens stay
    Raises ValueError unless two of the three are given, for what no widths of 2 to 6 bits reach, and for a quality
    without costs or divergence; NotImplementedError for a model whose packed cache is not counted.
    """
    limits = {"tokens": tokens, "memory": memory, "quality": quality}
    if sum(value is not None for value in limits.values()) != 2:
        named = ", ".join(f"{name}={value!r}" for name, value in limits.items() if value is not None) or "none"
        raise ValueError(f"two of `tokens`, `memory` and `quality` must be given, got {named}")
    if quality is not None and (isinstance(quality, bool) or not isinstance(quality, Real)):
        raise TypeError(f"`quality` must be a divergence in nats, got {quoted(quality)}")
    if quality is not None and not quality > 0:
        raise ValueError(f"`quality` must be a divergence above 0 in nats, got {quality!r}")
    if spec.shared_bits is None or spec.overrides:
        raise ValueError("`spec` must leave widths to the library, such as the preset default, where `memory` or "
                         f"`quality` chooses them, got {spec}")  # fmt: skip
    if quality is not None and (other := unlike_presets(spec)):
        raise ValueError(f"`quality` must be None for a spec whose {other} is not that of the presets, got {quality!r}"
                         ": the divergence that it is forecast from was measured with theirs")  # fmt: skip
    if quality is not None and moments.divergence is None:
        what = "costs" if moments.costs is None else "a divergence (turboquant.measure with budget=True)"
        raise ValueError(f"`quality` must be None for a model without {what} in its profile, got {quality!r}: give "
                         "`tokens` and `memory`")  # fmt: skip
    choice = _Choice(model, spec, moments, item_bytes)
    if quality is not None:
        enough = choice.first(lambda step: choice.quality(step) <= quality)
        if enough is None:
            raise ValueError(f"`quality` must be at least {choice.quality(choice.steps[-1]):.2g} nats, the divergence "
                             f"with {MOST_SIDE_BITS} bits, got {quality!r}")  # fmt: skip
        step: int = enough
        if tokens is None:
            assert memory is not None
            fits = tokens_that_fit(lambda n: choice.nbytes(step, n), memory)
            tokens = MOST_TOKENS if fits is None else fits
            if not tokens:
                raise ValueError(f"`memory` must be at least {choice.nbytes(step, 1):,} bytes, got {memory:,}")
    else:
        assert tokens is not None and memory is not None
        count, limit = tokens, memory
        over = choice.first(lambda step: choice.nbytes(step, count) > limit)
        if over is not None and over == choice.steps[0]:
            raise ValueError(f"`memory` must be at least {choice.nbytes(over, tokens):,} bytes for {tokens:,} tokens, "
                             f"which take {LEAST} bits each, got {memory:,}")  # fmt: skip
        step = choice.steps[-1] if over is None else over - 1
    return choice.budget(step, tokens)


def unlike_presets(spec: CacheSpec) -> str:
    """The first field beside the widths that decides a divergence and is not as in the presets; "" if there is none."""
    names = ("sinks", "window", "centre", "metric")
    return next((name for name in names if getattr(spec, name) != getattr(CacheSpec(), name)), "")


class _Choice:
    """Widths by steps: a step is the sum of bits over both sides of all layers."""

    def __init__(self, model: Model, spec: CacheSpec, moments: Moments, item_bytes: int) -> None:
        self.model, self.spec, self.item_bytes = model, spec, item_bytes
        self.costs, self.divergence = moments.costs, moments.divergence
        self.packed = [i for i, one in enumerate(model.layers) if one.kind != "none"]
        self.layers = [model.layers[i] for i in self.packed]
        self.tries = 3 if spec.tries == "auto" else int(spec.tries)
        sides = 2 * len(self.layers)
        self.steps = range(LEAST * sides, MOST_SIDE_BITS * sides + 1)
        self._known: dict[int, Widths] = {}

    def first(self, holds: Callable[[int], bool]) -> int | None:
        """The least step for which `holds` is true; None if there is none. It must stay true for larger steps."""
        at = bisect_left(self.steps, True, key=holds)
        return self.steps[at] if at < len(self.steps) else None

    def widths(self, step: int) -> Widths:
        """[layers, 2]. Layers of a kind share the average, so that it holds for contexts of every length."""
        if step in self._known:
            return self._known[step]
        average = step / (2 * len(self.layers))
        bits = np.zeros((len(self.layers), 2), np.int64)
        for one in dict.fromkeys(self.layers):
            alike = [i for i, other in enumerate(self.layers) if other == one]
            if self.costs is None:
                bits[alike] = uniform_widths(average, len(alike))
                continue
            low = int(average)
            least, most = max(low - 1, 1 if low == LEAST else LEAST), min(MOST_SIDE_BITS, -int(-average // 1) + 1)
            bits[alike] = side_widths(self.costs[alike], average, self.tries, one.head_dim, least, most)
        self._known[step] = bits
        return bits

    def spec_of(self, step: int) -> CacheSpec:
        bits = {layer: {"key_bits": int(key), "value_bits": int(value)}
                for layer, (key, value) in zip(self.packed, self.widths(step))}  # fmt: skip
        return self.spec.with_(overrides=bits)

    def nbytes(self, step: int, tokens: int) -> int:
        """The most bytes that a cache takes: one that has grown token by token may hold 1/64 more pages, and one; on a
        GPU a layer has 8 bytes more."""
        parts = packed_parts(self.model, self.spec_of(step), 1, tokens, self.item_bytes)
        pages = packed_parts(self.model, self.spec_of(step), 1, self.spec.sinks + self.spec.window + 1, self.item_bytes)
        return sum(parts.values()) + -(-parts.get("pages", 0) // 64) + pages.get("pages", 0) + 8 * len(self.layers)

    def quality(self, step: int) -> float:
        assert self.costs is not None and self.divergence is not None
        channels = [one.head_dim for one in self.layers]
        known = self.widths(KNOWN * 2 * len(self.layers))
        here = forecast(self.costs, self.widths(step), self.tries, channels)
        return self.divergence * here / forecast(self.costs, known, 3, channels)  # measured with the presets' tries

    def budget(self, step: int, tokens: int) -> Budget:
        sizes = np.array([one.kv_heads * one.head_dim for one in self.layers])
        bits = float((self.widths(step).sum(1) * sizes).sum() / (2 * sizes.sum()))
        quality = None if self.divergence is None or unlike_presets(self.spec) else self.quality(step)
        return Budget(self.spec_of(step), bits, tokens, self.nbytes(step, tokens), quality)
