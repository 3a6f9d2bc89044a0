"""Calibration: statistics of a model's keys and values that tell how to store them, measured once for any budget.

`choice.py` lists the methods and chooses one. Here are the file and the method "axes" (after TurboESM's head-wise
principal axes). It has a centre and axes (`axes.plan_axes`) of the centred vectors for each layer, side and KV head. 32
axes, or 16 (`CacheSpec.group`), form a group, which is mixed by a random-sign Hadamard and scaled by a fixed step (the
root of its mean variance). Bits are given greedily to the groups of all layers and sides; the next bit goes where

    sum over heads of (sum of sensitivity over the group's axes) * (mean variance of the group) * (E(b) - E(b + 1))

is largest. This is reverse water-filling (Cover and Thomas, Elements of Information Theory, section 10.3.3). E(b) is
the error of b bits (`distortion.errors`). The sensitivity is measured: the Kullback-Leibler divergence that a unit of
squared error along an axis causes.

Where layers differ in KV heads or head_dim (Gemma 4), a bit costs more bytes in some of them, and those may hold fewer
tokens (sliding windows). So layers share bits with those of their own size alone: each size keeps to the average, and a
cache has the bytes of the average however long it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..arguments import bounded
from ..fingerprints import differences
from ..plan import FINE_GROUP, GROUP, WIDE_BITS, Plan
from ..spec import BUDGET_BITS, CacheSpec, group_bits_of
from .axes import singular_axes
from .choice import Trial, chosen, side_widths, table, uniform_widths, widen
from .distortion import errors
from .kmeans import COLUMNS
from .moments import Moments

__all__ = ["Calibration", "allocate", "layer_specs", "layered"]

F32 = NDArray[np.float32]
Layered = F32 | tuple[F32, ...]  # of all layers: see `layered`


def layered(layers: Sequence[NDArray[Any]]) -> Any:
    """Arrays of all layers: stacked, or a tuple of them where their shapes differ."""
    return np.stack(layers) if len({layer.shape for layer in layers}) == 1 else tuple(layers)


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was measured on one model. Arrays are float32, [layers, 2 (keys, values), ...]; where layers differ in
    kv_heads or head_dim, a tuple has the array of each layer instead. Two calibrations are equal if they are the same
    object.

    centre        [layers, 2, kv_heads, head_dim]: means, in the units of keys (after RoPE) and values.
    covariance    [layers, 2, kv_heads, head_dim, head_dim].
    axes          of the same shape: row i is the i-th axis of the plan.
    variance      [layers, 2, kv_heads, head_dim]: along each axis.
    sensitivity   [layers, 2, kv_heads, head_dim]: nats per token of KL divergence (ESM-2: 1 - cosine of last hidden
                  states) for a unit of squared error per token along each axis.
    fingerprint   of the model (`models.identity.fingerprint`): a calibration serves the model it was made on.
    tokens        how many tokens were measured.  seed  of the Hadamard signs inside groups.
    source        which text it was, in the words of whoever calibrated.
    tables        [layers, 2, kv_heads, 9] (`kmeans.kmeans_table`): of keys along their singular axes, and of plain
                  values.
    moments       "model": of the model, as `turboquant.measure` finds them; "text": of the calibration's text and the
                  package's, each counted half. Empty where none were measured.
    windows       numbers of last tokens, exact beside sinks, for which costs were measured and methods tried. A spec
                  without a window takes what was found without one; any other what was found for the nearest one.
    side_costs    [windows, layers, 2]: the share of a layer's keys or values in the KL divergence if each error were as
                  large as what is quantised, mean over parts of the text; with the moments of the model.
    trials        results of methods (`choice.Trial`); may be empty.

    Raises ValueError that names what is wrong: a shape, a dtype, a number that is not finite, a negative variance.
    """

    centre: Layered
    covariance: Layered
    axes: Layered
    variance: Layered
    sensitivity: Layered
    fingerprint: dict[str, Any]
    tokens: int
    seed: int = 0
    source: str = ""
    tables: Layered | None = None
    moments: Mapping[str, Moments] = field(default_factory=dict)
    windows: tuple[int, ...] = ()
    side_costs: F32 | None = None
    trials: tuple[Trial, ...] = ()

    def __post_init__(self) -> None:
        shapes = _shapes(self.centre)
        if not shapes or any(len(shape) != 3 or shape[0] != 2 or 0 in shape for shape in shapes):
            raise ValueError(f"`centre` must be [layers, 2, kv_heads, head_dim], got shape {_told(self.centre)}")
        squares = [(*shape, shape[-1]) for shape in shapes]
        wanted = {"centre": shapes, "covariance": squares, "axes": squares, "variance": shapes, "sensitivity": shapes}
        if self.tables is not None:
            wanted["tables"] = [(*shape[:2], COLUMNS) for shape in shapes]
        if self.side_costs is not None:
            wanted["side_costs"] = [(self.layers, 2)] * len(self.windows)
        for name, expected in wanted.items():
            value = getattr(self, name)
            if _shapes(value) != expected:
                alike = len({*expected}) == 1
                shape = (len(expected), *expected[0]) if alike else expected
                raise ValueError(f"`{name}` must have shape {shape}, got {_told(value)}")
            for array in value if isinstance(value, tuple) else (value,):
                if array.dtype != np.float32 or not np.isfinite(array).all():
                    raise ValueError(f"`{name}` must be finite float32")
                if name in ("variance", "sensitivity", "side_costs") and array.min() < 0:
                    raise ValueError(f"`{name}` must not be negative, got {array.min()}")
        if not isinstance(self.fingerprint, dict):
            raise ValueError(f"`fingerprint` must be a mapping, got {self.fingerprint!r}")
        if {*self.moments} not in (set(), {"model", "text"}) or bool(self.moments) != (self.side_costs is not None):
            raise ValueError(f"`moments` must be those of the model and of the text, with `side_costs`, or none, got "
                             f"{[*self.moments]}")  # fmt: skip
        for window in self.windows:
            bounded("Calibration: `windows`", window)
        if bool(self.windows) != bool(self.moments):
            raise ValueError(f"`windows` must be numbers of tokens, one for each of `side_costs`, got {self.windows!r}")
        if {t.window for t in self.trials} - {*self.windows}:
            raise ValueError(f"`trials` must be with one of the windows {self.windows}, got others")
        for at in {(t.window, t.average) for t in self.trials}:
            here = [t for t in self.trials if (t.window, t.average) == at]
            if [t.method for t in here].count("none") != 1 or sum(t.chosen for t in here) != 1:
                raise ValueError("`trials` must have the method 'none' once, and one that is chosen, for each window "
                                 f"and average, got others for {at[0]} tokens and {at[1]:g} bits")  # fmt: skip
        for name, moments in self.moments.items():
            if len(moments.layers) != self.layers:
                raise ValueError(f"`moments` must have {self.layers} layers, got {len(moments.layers)} of the {name}")
        bounded("Calibration: `tokens`", self.tokens)
        bounded("Calibration: `seed`", self.seed)

    def __repr__(self) -> str:
        heads, channels = ([*dict.fromkeys(each)] for each in zip(*self.sizes))
        shape = f"layers={self.layers}, kv_heads={_listed(heads)}, head_dim={_listed(channels)}"
        return f"Calibration({shape}, tokens={self.tokens}, seed={self.seed}, source={self.source!r})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{table(self.trials, as_html=True)}"

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.centre)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(KV heads, channels of a head) of each layer."""
        return [(shape[1], shape[2]) for shape in _shapes(self.centre)]

    def alike(self) -> list[list[int]]:
        """The layers of each size, by index."""
        sizes = self.sizes
        return [[i for i, size in enumerate(sizes) if size == one] for one in dict.fromkeys(sizes)]

    def groups(self, group: int = GROUP) -> list[int]:
        """How many groups of `group` channels a head of each layer has."""
        return [-(-channels // group) for _, channels in self.sizes]

    def group_variance(self, layer: int, group: int = GROUP) -> NDArray[np.float64]:
        """Mean variance of each group of a layer, [2, kv_heads, groups]; of a short last group, over its own
        channels."""
        variance = self.variance[layer]
        channels = np.minimum(group, variance.shape[-1] - np.arange(0, variance.shape[-1], group))
        means: NDArray[np.float64] = _sums(variance, group) / channels
        return means

    def steps(self, layer: int, group: int = GROUP) -> F32:
        """The fixed step of each group of a layer, [2, kv_heads, groups]: the root of its variance. It is never 0, so
        that constant channels can be divided by it."""
        variance = self.group_variance(layer, group)
        floor = np.maximum(variance.max(-1, keepdims=True) * 1e-10, 1e-12)
        steps: F32 = np.sqrt(np.maximum(variance, floor)).astype(np.float32)
        return steps

    def merged(self, layer: int, side: int, bits: Sequence[int], group: int = GROUP) -> tuple[F32, F32]:
        """(rotation [kv_heads, head_dim, head_dim], steps [kv_heads, groups]) of one side of a layer whose groups have
        these bits: neighbours with the same bits are mixed by one Hadamard and share a step.

        Separate Hadamards would not reduce the squared error. One Hadamard spreads it evenly over the axes of both
        groups, instead of leaving it where the variance and most of the query are.
        """
        steps = self.steps(layer, group)[side].astype(np.float64)
        _, channels = self.sizes[layer]
        mix = np.zeros((channels, channels), np.float32)
        for start, stop in runs(bits):
            at = slice(start * group, min(stop * group, channels))
            mix[at, at] = _signed_hadamard(at.stop - at.start, self.seed + at.start)
            steps[:, start:stop] = np.sqrt(np.square(steps[:, start:stop]).mean(-1, keepdims=True))
        turned: F32 = np.matmul(mix, self.axes[layer][side])
        return turned, steps.astype(np.float32)

    def singular_axes(self, layer: int) -> F32:
        """[2, kv_heads, head_dim, head_dim]: the right singular vectors of a layer's keys and values, not centred."""
        return singular_axes(self.centre[layer], self.covariance[layer])

    def second_moment(self, layer: int) -> NDArray[np.float64]:
        """[2, kv_heads, head_dim]: the mean square of each channel of a layer."""
        variance = np.diagonal(self.covariance[layer], axis1=-2, axis2=-1).astype(np.float64)
        moment: NDArray[np.float64] = variance + self.centre[layer].astype(np.float64) ** 2
        return moment

    def _check_average(self, name: str, average: float, group: int) -> None:
        groups, channels = min(self.groups(group)), min(channels for _, channels in self.sizes)
        if not 1 <= groups * average <= groups * BUDGET_BITS:  # a NaN is refused as well
            raise ValueError(f"`{name}` must be in {1 / groups:.4g}..{BUDGET_BITS} bits for heads of "
                             f"{channels} channels, got {average}")  # fmt: skip

    def bits(self, average: float, group: int = GROUP) -> NDArray[np.int64] | tuple[NDArray[np.int64], ...]:
        """Bits of each group of `group` channels, [layers, 2, groups] (`layered`), for an average of at most `average`
        code bits over all groups of the layers of each size.

        Scales are not counted: 16 bits per token, head and side. Raises ValueError for an average that no plan of this
        model can have.
        """
        self._check_average("average", average, group)
        # Rare keys of ESM-2 lie far out, at 8 steps, along axes of little variance; zero bits would lose them.
        whole_keys = self.fingerprint.get("model_type") == "esm"
        bits_of_layer: dict[int, NDArray[np.int64]] = {}
        for layers in self.alike():
            # The Hadamard of a group spreads its error evenly: every axis has the group's mean variance times E(bits).
            costs = [(self.group_variance(i, group) * _sums(self.sensitivity[i], group)).sum(1) for i in layers]
            budget = group_bits_of(average, len(layers), self.groups(group)[layers[0]])
            bits_of_layer |= zip(layers, allocate(np.stack(costs), budget, whole_keys, widths_of(group)))
        bits: NDArray[np.int64] = layered([bits_of_layer[i] for i in range(self.layers)])
        return bits

    def method(self, spec: CacheSpec) -> tuple[str, int]:
        """(method, channels of a group) of a spec with a budget: the method that it names, or the one that did best.

        That is the best for the spec's window (`windows`) at the nearest average that was tried, the lower one of two.
        Raises ValueError if nothing was tried.
        """
        assert spec.budget is not None
        average = spec.budget
        if spec.method != "chosen":
            return spec.method, spec.group
        if not self.trials:
            raise ValueError("`profile` must have tried its methods on some text for a spec whose method is "
                             "'chosen': pass `held_out` to turboquant.calibrate, or name a method")  # fmt: skip
        window = _nearest({t.window for t in self.trials}, spec.window)
        here = [t for t in self.trials if t.window == window]
        nearest = min({t.average for t in here}, key=lambda tried: (abs(tried - average), tried))
        here = [t for t in here if t.average == nearest]
        if average > BUDGET_BITS:  # axes cannot have so many bits: the best of the others
            here = [*chosen(t for t in here if t.method != "axes")]
        best = next(t for t in here if t.chosen)
        return best.method, best.group

    def side_bits(self, average: float, method: str, window: int, tries: int = 0) -> list[list[int]]:
        """Bits of keys and values of each layer, [layers][2], for an average of at most `average` code bits over the
        layers of each size. window: exact tokens at the end. tries: of the encoder."""
        if not self.moments and method != "none":
            raise ValueError(f"`profile` must have moments for the method {method!r}, got one without: pass "
                             "`held_out` to turboquant.calibrate, of a model that can be measured")  # fmt: skip
        widths = np.zeros((self.layers, 2), np.int64)
        for layers in self.alike():
            if self.side_costs is None or "widths" not in method:
                widths[layers] = uniform_widths(average, len(layers))
            else:
                costs = self.side_costs[self.windows.index(_nearest(self.windows, window)), layers]
                widths[layers] = side_widths(costs, average, tries, self.sizes[layers[0]][1])
        return [[int(key), int(value)] for key, value in widths]

    def moments_of(self, spec: CacheSpec) -> Moments | None:
        """The moments that a spec takes from here; None if it has no budget, or its method is "axes"."""
        if spec.budget is None or not self.moments or (method := self.method(spec)[0]) == "axes":
            return None
        return self.moments["text" if "moments" in method else "model"]

    def average_of_bytes(self, bytes_per_token: float, group: int = GROUP) -> float:
        """The `average` that makes one packed token take `bytes_per_token`: keys and values of all layers and heads,
        scales included.

        Raises ValueError if there is no plan that small.
        """
        groups, heads = self.groups(group), [heads for heads, _ in self.sizes]
        scales = 2 * 2 * sum(heads)
        bit = group // 8 * 2 * sum(one * each for one, each in zip(heads, groups))  # bytes of an average bit
        average = (bytes_per_token - scales) / bit
        if not average * min(groups) >= 1:
            least = scales + bit // min(groups)
            raise ValueError(f"`bytes_per_token` must be at least {least} for this model, got {bytes_per_token}")
        return min(average, float(BUDGET_BITS))

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Raises ValueError, naming what differs, unless `fingerprint` is of the model that this was measured on; see
        `fingerprints.differences`."""
        differs = differences(self.fingerprint, fingerprint)
        if differs:
            raise ValueError(f"`profile` must be of this model, got one of another: this one has {', '.join(differs)}")

    def described(self) -> dict[str, Any]:
        """All but the arrays, as JSON holds it."""
        return {
            **{name: getattr(self, name) for name in _DESCRIBED},
            "text": None if (text := self._of_text()) is None else text.described(),
            "trials": [asdict(trial) for trial in self.trials],
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that are not None, by name. Where layers differ in size, that of layer i is under "NAME.i".
        Moments of the text are under "moments.text.i.NAME"."""
        arrays: dict[str, NDArray[Any]] = {}
        for name in (*_ARRAYS, *_OPTIONAL):
            value = getattr(self, name)
            if isinstance(value, tuple):
                arrays |= {f"{name}.{i}": array for i, array in enumerate(value)}
            elif value is not None:
                arrays[name] = value
        if (text := self._of_text()) is not None:
            arrays |= {f"moments.text.{name}": array for name, array in text.arrays().items()}
        return arrays

    @classmethod
    def of_arrays(cls, described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], model: Moments) -> Calibration:
        """Returns what `described` and `arrays` were made of, with the moments of the model. Raises KeyError, TypeError
        or ValueError for other contents."""
        own: dict[str, Any] = {}
        for key, array in arrays.items():
            name, _, layer = key.partition(".")
            if name == "moments":
                continue
            own[name] = {**own.get(name, {}), int(layer): array} if layer else array
        for name, layers in own.items():
            if isinstance(layers, dict):
                own[name] = tuple(layers[i] for i in range(len(layers)))
        moments = {"model": model} if described["windows"] else {}
        if (told := described["text"]) is not None:
            start = "moments.text."
            moments["text"] = Moments.of_arrays(told, {
                key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)})  # fmt: skip
        elif moments:
            moments["text"] = model
        trials = tuple(Trial(**told) for told in described["trials"])
        arguments: dict[str, Any] = {**own, **{key: described[key] for key in _DESCRIBED}}
        arguments["windows"] = tuple(arguments["windows"])
        return cls(**arguments, moments=moments, trials=trials)

    def _of_text(self) -> Moments | None:
        """Moments of the text, where these are others than the model's."""
        text = self.moments.get("text")
        return None if text is self.moments.get("model") else text


_ARRAYS = ("centre", "covariance", "axes", "variance", "sensitivity")
_OPTIONAL = ("tables", "side_costs")
_DESCRIBED = ("fingerprint", "tokens", "seed", "source", "windows")
assert {*_ARRAYS, *_OPTIONAL, *_DESCRIBED, "moments", "trials"} == {field.name for field in fields(Calibration)}


def _shapes(layers: Layered) -> list[tuple[int, ...]]:
    """The shape of each layer's array."""
    arrays = layers if isinstance(layers, tuple) or layers.ndim else ()
    return [array.shape for array in arrays]


def _told(layers: Layered) -> str:
    return str(_shapes(layers) if isinstance(layers, tuple) else layers.shape)


def _listed(numbers: Sequence[int]) -> str:
    """One number, or several in the order of layers."""
    return "/".join(map(str, numbers))


def _sums(of_axes: F32, group: int) -> NDArray[np.float64]:
    """Sums of [.., head_dim] over the axes of each group, [.., groups]."""
    return np.add.reduceat(of_axes.astype(np.float64), np.arange(0, of_axes.shape[-1], group), axis=-1)


def _nearest(windows: Iterable[int], window: int) -> int:
    """The one of `windows` whose costs serve `window` best. Costs without a window are unlike all others, even those of
    a window of 8 tokens (docs/calibration.md)."""
    return min(windows, key=lambda known: (bool(known) != bool(window), abs(known - window)))


def layer_specs(
    spec: CacheSpec, calibration: Calibration | None, n_layers: int, packed: Sequence[int] | None = None
) -> list[CacheSpec]:
    """The spec of each layer that has keys and values, its overrides applied, its bits known and nothing
    "auto".

    n_layers   layers of the model, by which overrides count
    packed     those that have keys and values; None: all. The calibration has only these

    Raises ValueError if the spec needs a calibration and there is none, if there is one that it does not need, and for
    a calibration of other layers or without what the budget's method needs.
    """
    each = [spec.for_layer(i, n_layers) for i in (range(n_layers) if packed is None else packed)]
    if calibration is None:
        if any(s.calibrated for s in each):
            which = "the presets calibrated-N, a budget, calibrated axes or tables, and rotation='svd'"
            needs = f"`profile` must be a calibrated Profile or its file for {which}"
            raise ValueError(f"{needs}, got None: make one with turboquant.calibrate(model), or `turboquant calibrate`")
        return each
    if not any(s.calibrated for s in each):
        raise ValueError("`profile` must be None for a spec that does not use one, such as this: " + str(spec))
    if calibration.layers != len(each):
        raise ValueError("`profile` must be of this model, got one of another: this model has "
                         f"{len(each)} layers instead of {calibration.layers}")  # fmt: skip
    if spec.budget is None:
        return each
    method, group = calibration.method(spec)
    if method != "axes":
        widths = calibration.side_bits(spec.budget, method, spec.window, int(spec.settled().tries))
        plain: dict[str, Any] = {"budget": None, "method": "chosen"}
        if not calibration.moments:
            plain |= {"centre": "none", "metric": "none"}
        return [s.with_(**plain, key_bits=k, value_bits=v) for s, (k, v) in zip(each, widths)]
    calibration._check_average("budget", spec.budget, group)
    bits = [each.tolist() for each in calibration.bits(spec.budget, group)]
    axes: dict[str, Any] = {"budget": None, "method": "chosen", "rotation": "calibrated", "group": group}
    axes |= {"centre": "calibrated", "metric": "none", "variance_term": False}
    return [s.with_(**axes, key_bits=tuple(b[0]), value_bits=tuple(b[1])) for s, b in zip(each, bits)]


def widths_of(group: int) -> tuple[int, ...]:
    """The bits that a budget may give a group of `group` channels, ascending."""
    return (*range(BUDGET_BITS + 1), *((WIDE_BITS,) if group == FINE_GROUP else ()))


def runs(bits: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring groups with equal bits: (first, one past the last)."""
    edges = [g for g in range(len(bits) + 1) if g in (0, len(bits)) or bits[g - 1] != bits[g]]
    return list(pairwise(edges))


def allocate(
    energy: NDArray[np.float64], budget: int, whole_keys: bool = False, widths: Sequence[int] = range(BUDGET_BITS + 1)
) -> NDArray[np.int64]:
    """Distributes `budget` group-bits greedily: the next width goes where it reduces sum(energy * E(bits)) most per
    bit.

    energy: [layers, 2, groups], the cost of a group for E = 1.  Returns bits of the same shape, each one of `widths`,
    which start with 0 and 1. They sum to `budget`, or to a bit or two less where a group's next width costs more than
    is left. Every layer's keys and values get at least one group with a bit, because a side without any cannot be
    attended to; with `whole_keys`, every group of keys gets one, if there are enough. A group's bits gain less and
    less, so the greedy result is optimal, except for the last bits where a width costs several.
    Raises ValueError if the budget cannot be met.
    """
    least, most = energy[..., 0].size, energy.size * widths[-1]
    if not least <= budget <= most:
        raise ValueError(
            f"`budget` must be in {least}..{most} group-bits (each side of each layer needs one), got {budget}"
        )
    bits = np.zeros(energy.shape, np.int64)
    np.put_along_axis(bits, energy.argmax(-1)[..., None], 1, -1)
    if whole_keys and energy[:, 0].size + len(energy) <= budget:
        bits[:, 0] = 1
    widen(bits, budget, widths, energy, errors())
    return bits


def _signed_hadamard(n: int, seed: int) -> F32:
    """[n, n]: a random-sign Hadamard (turboquant.h)."""
    plan = Plan(n, 1, seed=seed % 2**63)  # callers add the first channel of the group
    matrix: F32 = _core.rotate(plan.words, np.eye(n, dtype=np.float32)).T
    return matrix
