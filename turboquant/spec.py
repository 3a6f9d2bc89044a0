"""CacheSpec: how a cache quantises, as one value. `turboquant.presets` returns those with names.

A spec is data: it can be compared, hashed and stored beside a cache. The plan of each layer (`turboquant.plan`) is made
from it once head_dim is known. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, Literal

from .arguments import integer_in, quoted
from .plan import FINE_GROUP, GROUP, MAX_BITS, PAGE_TOKENS, WIDE_BITS, WIDTHS, Plan, Side

__all__ = ["CacheSpec"]

Width = int | float | tuple[int, ...]
Bits = Width | Literal["auto"]
Overrides = tuple[tuple[int, tuple[tuple[str, Any], ...]], ...]

AUTO: Literal["auto"] = "auto"
_CHOICES = {
    "rotation": (AUTO, "hadamard", "dense", "none", "calibrated", "svd"),
    "value_rotation": ("same", "hadamard", "dense", "none", "svd"),
    "codebook": ("normal", "sphere", "uniform"),
    "key_levels": ("codebook", "affine", "absmax", "table"),
    "value_levels": ("codebook", "affine", "absmax", "table"),
    "sketch": ("none", "gaussian", "gaussian/4", "sign"),
    "outliers": ("none", "prompt", "calibrated"),
    "scale": ("eden", "norm", "norm_corrected", "least_squares"),
    "centre": (AUTO, "none", "calibrated", "wave"),
    "metric": (AUTO, "none", "query"),
    "prefill": ("exact", "packed"),
    "method": ("chosen", "none", "moments", "widths", "moments+widths", "axes"),
}
_SIDES = ("key", "value")
_RANGES = {
    "key_block": (0, 2**12),
    "value_block": (0, 2**12),
    "outlier_tokens": (1, 2**31 - 1),
    "sinks": (0, 2**24),
    "window": (0, 2**24),
    "seed": (0, 2**63 - 1),
}
# What "auto" stands for. The next table has what differs if axes come from a calibration, which computes them without a
# wave and a metric.
_AUTO: dict[str, Any] = {
    "key_bits": 4,
    "value_bits": 4,
    "rotation": "hadamard",
    "centre": "wave",
    "metric": "query",
    "tries": 3,
    "variance_term": True,
}
_OF_AXES = {"calibrated": {"centre": "calibrated", "metric": "none"}, "svd": {"centre": "none", "metric": "none"}}
BUDGET_BITS = 5  # the most bits that a budget gives a group of axes; groups of 16 may also get 8
LEAST_AVERAGE = 2  # the smallest budget, except with `method="axes"`
LEAST_SIDE_BITS = 1  # the fewest and the most bits that a budget gives a side of a layer
MOST_SIDE_BITS = MAX_BITS
_TRIES = (0, 3, 5, 7)
VARIANCE_TERM_BITS = 3  # the most bits of keys for which `variance_term="auto"` is True
SHARED_BITS = (2, 3, 4, 5)  # averages that layers can share by the cost of their errors
_WHOLE_CACHE = (
    "prefill",
    "overrides",
    "budget",
    "method",
    "group",
    "uniform",
)  # fields of all layers: an override may not set them


def _bits(value: Any, field: str) -> Bits:
    """Checks and returns bits: an integer in 1..6 or 8; a multiple of 1/4 between 1 and 6; a tuple of integers in 0..6
    or 8, one per group and not all 0; or "auto"."""
    if isinstance(value, str) and value == AUTO:
        return AUTO
    if isinstance(value, (bool, str, bytes, Set, Mapping)):
        raise TypeError(f"`{field}` must be an integer or a sequence of integers, got {quoted(value)}")
    if isinstance(value, float) and not value.is_integer():
        if not (1 < value < MAX_BITS and (4 * value).is_integer()):
            raise ValueError(f"`{field}` must be whole or a number of quarters between 1 and {MAX_BITS}, got {value}")
        return value
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        value = int(value) if isinstance(value, float) else value
        try:
            bits = index(value)
        except TypeError:
            raise TypeError(f"`{field}` must be an integer or a sequence of integers, got {quoted(value)}") from None
        if bits < 1 or bits not in WIDTHS:
            raise ValueError(f"`{field}` must be in 1..{MAX_BITS} or {WIDE_BITS}, got {bits}")
        return bits
    widths = tuple(_integer(b, f"{field}[{i}]", 0, WIDE_BITS) for i, b in enumerate(value))
    for i, width in enumerate(widths):
        if width not in WIDTHS:
            raise ValueError(f"`{field}[{i}]` must be in 0..{MAX_BITS} or {WIDE_BITS}, got {width}")
    if not any(widths):
        raise ValueError(f"`{field}` must give bits to at least one group of channels, got {widths}")
    return widths


def _integer(value: Any, field: str, low: int, high: int) -> int:
    return integer_in(value, f"`{field}`", low, high)


def first_part(bits: float, head_dim: int, group: int = GROUP) -> int:
    """Returns how many groups have one bit more for bits such as 2.5: the nearest number, at least one and not all."""
    groups = -(-head_dim // group)
    if groups < 2:
        raise ValueError(f"`key_bits` and `value_bits` must be whole for heads of at most {group} channels, got {bits} "
                         f"for {head_dim} channels")  # fmt: skip
    return min(max(1, round((bits - math.floor(bits)) * groups)), groups - 1)


def group_widths(bits: Width, head_dim: int, group: int = GROUP) -> tuple[int, ...]:
    """Returns the bits of each group of channels. With fractional bits, the first groups have one bit more."""
    groups = max(1, -(-head_dim // group))  # a plan refuses head_dim 0
    if isinstance(bits, tuple):
        return bits
    low, first = math.floor(bits), first_part(bits, head_dim, group) if isinstance(bits, float) else 0
    return (low + 1,) * first + (low,) * (groups - first)


@dataclass(frozen=True, repr=False)
class CacheSpec:
    """How the keys and values of a model's layers are stored. Frozen, hashable; `with_` makes a changed copy.

    A field that is not named has the value of the preset "default". To switch a feature off, name it:
    ``centre="none", sinks=0, window=0``. "auto" depends on other fields; `settled` puts a value in its place. By
    default that is 4 bits, "hadamard", "wave", "query", 3 tries and no variance term; with axes of a calibration it is
    another centre and no metric. Two specs are equal if all their fields are, so "auto" is not equal to the value that
    it stands for.

    key_bits, value_bits   bits of a code: 1..6 or 8 for all channels; a multiple of 1/4 such as 2.5: that fraction of
                           the groups has one bit more (see `outliers`); a tuple with one entry in 0..6 or 8 per group
                           of rotated channels; or "auto": 4, or with a budget what the budget gives. On CUDA, 6 and 8
                           bits run in the kernels for any width.
    group           channels of a group: 32 or 16. With 16, a budget follows the variance more closely and may give a
                    few groups 8 bits, and a head_dim that is no multiple of 32 is padded less.
    rotation        "hadamard": random signs and Walsh-Hadamard, nothing is stored; "dense": a dense random matrix;
                    "none"; "calibrated": the axes of a calibration for each KV head and side, each group divided
                    by its fixed step; "svd": per KV head, the right singular vectors of the calibration's
                    vectors, not centred (TurboESM); "auto": "hadamard", but "calibrated" with `method="axes"`.
    value_rotation  rotation of the values; "same": that of the keys.
    codebook        "normal": levels for N(0, 1); "sphere": for the exact distribution of a coordinate of a unit vector
                    (matters below 64 channels); "uniform": the best equally spaced levels for N(0, 1).
    key_levels, value_levels   what codes decode to: "codebook"; "affine": a zero point and a scale from the smallest
                    and the largest number; "absmax": a scale from the largest magnitude (q8_0); "table": 8 levels per
                    head, K-means of a calibration (3 bits), nothing stored per token.
    key_block, value_block   channels that share a scale and zero point, a multiple of 32; 0: all.
    sketch          signs stored of the quantisation error of a key: "none"; "gaussian": of head_dim Gaussian
                    projections, and the error's norm (TurboQuant prod, QJL); "gaussian/4": of a quarter as many
                    projections; "sign": of its coordinates, and their mean magnitude (TurboESM).
    outliers        which channels get the extra bit of 2.5 or 3.25 bits. "none": the first after the rotation, which
                    makes all channels alike. Otherwise those of largest magnitude before it, per KV head; both parts
                    are then rotated and scaled separately. Magnitudes are those of the first `outlier_tokens` tokens of
                    the first forward, all sequences together ("prompt"), or of a calibration ("calibrated").
    outlier_tokens  how many tokens `outliers="prompt"` reads.
    scale           the number kept per token, head and side: "eden" makes inner products unbiased over the random signs
                    (arXiv 2108.08842), "norm" is TurboQuant's mse mode (arXiv 2504.19874), "norm_corrected" keeps the
                    norm, "least_squares" minimises the squared error.
    centre          a vector subtracted from every key before the rotation. Without quantisation it would change no
                    softmax weight. "wave": the mean of the model's keys before RoPE, turned to each key's position
                    (`turboquant.measure`); "calibrated": the means of a calibration, of keys and values; "none";
                    "auto": "wave", but "calibrated" with `rotation="calibrated"` and "none" with "svd".
    metric          "query": keys are multiplied by a matrix, and queries by its inverse, so that errors go where the
                    model's queries do not look (`turboquant.measure`); "none"; "auto": "query", but "none" with
                    `rotation="calibrated"` and "svd".
    sinks, window   how many tokens stay in the model's dtype at the start and at the end of each sequence.
    prefill         "exact": queries of the first forward read full-precision keys and values. Queries of a later
                    forward of many tokens (32 on a CPU, 128 on CUDA), such as a second turn, read the tokens of that
                    forward in full precision. "packed": every query reads what was stored, as when tokens come one by
                    one. That is for measuring quantisation, and slower (docs/performance.md).
    overrides       layer index (negative counts from the last layer) -> fields that differ in it, such as {0:
                    {"key_bits": 5}}. Given as a mapping, held as sorted tuples.
    seed            of the rotation and the sketch; 0..2**63 - 1. (A calibration has its own.)
    tries           how many scales encoding tries for each vector, to keep the best: 3, 5, 7, or 0 for none. The cache
                    is not larger, but a prompt takes longer. "auto": 3, but 0 at 2 bits and less, where tries gain
                    nothing, and where a plan cannot have tries: with another scale than "eden", blocks, tables,
                    sketches, outliers and `value_rotation`.
    variance_term   True: attention subtracts from a packed token's logit half the variance that quantisation adds to
                    it, so that its exponential is right on average beside those of exact tokens. Takes no more bytes.
                    Not with `rotation="calibrated"`, another codebook than "normal", keys of several widths, or where
                    `tries` must be 0; a budget whose chosen method is "axes" leaves it out. "auto": True if there are
                    sinks and a window, and keys, or a budget, have 3 bits or less; otherwise False.
    uniform         True: all layers have `key_bits` and `value_bits`. False: if both are the same number, 2..5, and
                    the spec has a window and moments, that number is an average. A side of a layer whose errors cost
                    more (`Moments.costs`) gets one bit more; as many other sides get one bit less. Layers of one kind
                    (full or sliding attention) share among themselves, so the cache takes as many bytes. Widths are
                    also uniform if overrides name bits or tries, or if the moments have no costs.
    budget          average bits of a code over all layers, keys and values, which a calibration distributes: 2 to 6;
                    with `method="axes"` above 0 and at most 5. key_bits, value_bits, rotation, centre and metric are
                    then "auto": the method sets them for each layer. None: these fields hold as they are.
    method          how to spend a budget: "chosen": what did best in the trials of the calibration;
                    "none": the same widths in all layers, moments of the model; "moments": moments of the calibration's
                    text and the model's; "widths": moments of the model, widths by layer and side;
                    "moments+widths"; "axes": calibrated axes, widths by group of channels.

    Raises TypeError or ValueError that name the field, what it was and what it should be.
    """

    key_bits: Bits = AUTO
    value_bits: Bits = AUTO
    rotation: str = AUTO
    codebook: str = "normal"
    scale: str = "eden"
    centre: str = AUTO
    metric: str = AUTO
    sinks: int = 4
    window: int = 128
    prefill: str = "exact"
    overrides: Overrides = ()
    seed: int = 0
    budget: float | None = None
    method: str = "chosen"
    value_rotation: str = "same"
    key_levels: str = "codebook"
    value_levels: str = "codebook"
    key_block: int = 0
    value_block: int = 0
    sketch: str = "none"
    outliers: str = "none"
    outlier_tokens: int = 128
    group: int = GROUP
    tries: int | Literal["auto"] = AUTO
    uniform: bool = False
    variance_term: bool | Literal["auto"] = AUTO

    def __new__(cls, *_: Any, **fields: Any) -> CacheSpec:
        """Checks names of fields, because the message of a dataclass does not list them."""
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in fields if name not in names]:
            near = difflib.get_close_matches(unknown[0], names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise TypeError(f"CacheSpec: `{unknown[0]}` must be a field: {hint}there are {', '.join(names)}")
        return super().__new__(cls)

    def __repr__(self) -> str:
        """As `str`, and as a comment the bits if the fields do not say them."""
        told = {name for name in ("key_bits", "value_bits") if getattr(self, name) != AUTO}
        if self.budget is not None or len(told) == 2 or self._overridden & {"key_bits", "value_bits"}:
            return str(self)
        return f"{self}  # {self.bits_in_words()}"

    def __str__(self) -> str:
        """The call that makes an equal spec, with the fields that differ from the preset "default"."""
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"CacheSpec({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def bits_in_words(self) -> str:
        """The bits in words, such as "4 bits", "keys 8 bits, values 4" or "3 bits on average"."""
        if average := self.budget or self.shared_bits:
            return f"{average:g} bits on average"
        key, value = self._meant("key_bits"), self._meant("value_bits")
        return f"{key} bits" if key == value else f"keys {key} bits, values {value}"

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("key_bits", "value_bits"):
            put(self, name, _bits(getattr(self, name), name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"`{name}` must be one of {', '.join(choices)}, got {quoted(value)}")
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
        self._check_budget()
        for name, (low, high) in _RANGES.items():
            put(self, name, _integer(getattr(self, name), name, low, high))
        if self.tries != AUTO:
            if isinstance(self.tries, bool) or self.tries not in _TRIES:
                raise ValueError(f"`tries` must be 0, 3, 5, 7 or 'auto', got {self.tries!r}")
            put(self, "tries", int(self.tries))
        if not isinstance(self.uniform, bool):
            raise TypeError(f"`uniform` must be True or False, got {quoted(self.uniform)}")
        if self.variance_term != AUTO and not isinstance(self.variance_term, bool):
            raise TypeError(f"`variance_term` must be True, False or 'auto', got {quoted(self.variance_term)}")
        put(self, "group", _integer(self.group, "group", 0, 2**12))
        if self.group not in (GROUP, FINE_GROUP):
            raise ValueError(f"`group` must be {GROUP} or {FINE_GROUP} channels, got {self.group!r}")
        if (
            isinstance(self.key_bits, tuple)
            and isinstance(self.value_bits, tuple)
            and len(self.key_bits) != len(self.value_bits)
        ):
            groups = f"{len(self.key_bits)} and {len(self.value_bits)}"
            raise ValueError(f"`key_bits` and `value_bits` must have the same number of groups, got {groups}")
        self._check_modes()
        put(self, "overrides", self._checked_overrides())

    def _check_modes(self) -> None:
        """Refuses fields that contradict each other."""

        def refuse(field: str, wants: str) -> None:
            raise ValueError(f"`{field}` must be {wants}, got {self._meant(field)!r}")

        split = [isinstance(getattr(self, f"{side}_bits"), float) for side in _SIDES]
        rotation = self._meant("rotation")
        for side in _SIDES:
            levels, bits, block = (self._meant(f"{side}_{name}") for name in ("levels", "bits", "block"))
            if bits == 1 and levels == "absmax":
                refuse(f"{side}_bits", f"at least 2 where `{side}_levels` are absmax")
            if levels == "table" and bits != 3:
                refuse(f"{side}_bits", f"3 where `{side}_levels` are a table")
            if levels != "codebook" and not isinstance(bits, int):
                refuse(f"{side}_bits", f"one integer where `{side}_levels` are {levels}")
            if block % GROUP:
                refuse(f"{side}_block", f"0 or a multiple of {GROUP} channels")
            if block and (levels == "table" or self.outliers != "none"):
                refuse(f"{side}_block", "0 with a table, and with outliers, which are blocks of their own")
        if self.outliers != "none":
            if not any(split):
                refuse("outliers", "'none' where no side has a fractional number of bits")
            if (self.key_levels, self.value_levels) != ("codebook", "codebook") or self.value_rotation != "same":
                refuse("outliers", "'none' unless both sides have the levels of a codebook and one kind of rotation")
            if rotation not in ("hadamard", "dense", "none"):
                refuse("outliers", f"'none' where `rotation` is {rotation!r}")
        if "codebook" not in (self.key_levels, self.value_levels):
            for name, left in (("scale", "eden"), ("codebook", "normal")):
                if getattr(self, name) != left:
                    refuse(name, "left alone where no side has the levels of a codebook")
        if self.group != GROUP and self.blocked:
            refuse("group", f"{GROUP} with blocks, tables, sketches, outliers and `value_rotation`")
        if self._meant("metric") != "none" and rotation in _OF_AXES:
            refuse("metric", f"'none' where `rotation` is {rotation!r}, whose axes were made without it")
        if rotation == "calibrated" and self.blocked:
            what = "blocks, tables, sketches, outliers and `value_rotation`"
            refuse("rotation", f"other than 'calibrated' with {what}")
        if self.tries != AUTO and self.tries and (self.blocked or self.scale != "eden"):
            what = "blocks, tables, sketches, outliers, `value_rotation` and a `scale` that is not 'eden'"
            refuse("tries", f"0 or 'auto' with {what}")
        if self.variance_term is True and not self._may_have_variance_term:
            what = "several widths of keys, calibrated axes, blocks, and another codebook or scale"
            refuse("variance_term", f"False with {what}")
        if self.blocked and any(isinstance(b, tuple) and 0 in b for b in (self.key_bits, self.value_bits)):
            refuse("key_bits", "above 0 in every group, as `value_bits`, with blocks, tables, sketches and outliers")

    @property
    def blocked(self) -> bool:
        """Whether its plans are not plain (turboquant.h), so that the fast kernels do not run them. Ignores
        overrides."""
        plain = ("same", "codebook", "codebook", 0, 0, "none", "none")
        return plain != (self.value_rotation, self.key_levels, self.value_levels, self.key_block, self.value_block,
                         self.sketch, self.outliers)  # fmt: skip

    @property
    def _may_have_variance_term(self) -> bool:
        """Whether its plans may have a variance term (turboquant.h, "VARIANCE TERM")."""
        bits = self._meant("key_bits")
        one_width = isinstance(bits, int) or (isinstance(bits, tuple) and len(set(bits)) == 1)
        plain = not self.blocked and self.scale == "eden" and self.codebook == "normal"
        return plain and one_width and self._meant("rotation") != "calibrated"

    def _check_budget(self) -> None:
        put = object.__setattr__
        if self.budget is None:
            if self.method != "chosen":
                raise ValueError(f"`method` must be left alone where there is no `budget`, got {self.method!r}")
            return
        if isinstance(self.budget, bool) or not isinstance(self.budget, Real):
            raise TypeError(f"`budget` must be a number of bits or None, got {quoted(self.budget)}")
        put(self, "budget", float(self.budget))
        axes = self.method == "axes"
        if axes and not 0 < self.budget <= BUDGET_BITS:  # a NaN is refused as well
            raise ValueError(f"`budget` must be above 0 and at most {BUDGET_BITS} bits, got {self.budget}")
        if not axes and not LEAST_AVERAGE <= self.budget <= MOST_SIDE_BITS:
            wants = f"in {LEAST_AVERAGE}..{MOST_SIDE_BITS} bits"
            raise ValueError(f"`budget` must be {wants}, got {self.budget}")
        own = {**_AUTO, **({"rotation": "calibrated", **_OF_AXES["calibrated"]} if axes else {})}
        del own["tries"], own["variance_term"]
        for name, value in own.items():
            got = getattr(self, name)
            if got != AUTO and (name.endswith("_bits") or got != value):
                raise ValueError(f"`{name}` must be 'auto' where `budget` shares the bits, got {got!r}")
        if self.blocked:
            what = "blocks, tables, sketches, outliers and `value_rotation`"
            raise ValueError(f"`budget` must be None with {what}, got {self.budget}")
        if self.group != GROUP and not axes:
            raise ValueError(f"`group` must be {GROUP} where a budget's method is not 'axes', got {self.group!r}")

    @property
    def calibrated(self) -> bool:
        """Whether it cannot be used without a calibration. Ignores overrides."""
        centre = self._meant("centre")
        taken = (self.rotation, self.value_rotation, centre, self.outliers, self.key_levels, self.value_levels)
        return self.budget is not None or any(field in ("calibrated", "svd", "table") for field in taken)

    @property
    def measured(self) -> bool:
        """Whether it cannot be used without the moments of the model. With a budget the calibration has them. Ignores
        overrides."""
        return self.budget is None and (self._meant("centre") == "wave" or self._meant("metric") == "query")

    @property
    def _overridden(self) -> set[str]:
        """Fields that an override of any layer names."""
        return {name for _, fields in self.overrides for name, _ in fields}

    @property
    def shared_bits(self) -> int | None:
        """The average that layers share by the cost of their errors; None if widths are uniform (see `uniform`)."""
        bits = self._meant("key_bits")
        named = self._overridden
        if self.uniform or self.budget is not None or not self.measured or self.blocked or not self.window:
            return None
        if bits != self._meant("value_bits") or bits not in SHARED_BITS or named & {"key_bits", "value_bits", "tries"}:
            return None
        return int(bits)

    def with_widths(self, average: CacheSpec, key_bits: int, value_bits: int) -> CacheSpec:
        """Returns the spec of a layer with its share of the bits. average: the whole spec, with `shared_bits`."""
        tries = {"tries": AUTO} if average.tries == AUTO else {}
        term = average._meant("variance_term")
        widths = {"key_bits": key_bits, "value_bits": value_bits, "uniform": True, "variance_term": term}
        return self.with_(**widths, **tries).settled()

    def _meant(self, name: str) -> Any:
        """Returns the value of a field, or what "auto" stands for there."""
        value = getattr(self, name)
        if not isinstance(value, str) or value != AUTO:
            return value
        if name == "rotation" and self.method == "axes":
            return "calibrated"
        if name == "tries" and (self.blocked or self.scale != "eden" or self._most_bits() <= 2):
            return 0
        if name == "variance_term" and not (self._may_have_variance_term and self.sinks and self.window):
            return False
        if name == "variance_term":
            bits = self._meant("key_bits") if self.budget is None else self.budget
            return max(bits if isinstance(bits, tuple) else (bits,)) <= VARIANCE_TERM_BITS
        of = _OF_AXES.get(self._meant("rotation"), _AUTO) if name in ("centre", "metric") else _AUTO
        return of[name]

    def _most_bits(self) -> float:
        """Returns the most bits of any group of either side, or the most that a budget may give."""
        if self.budget is not None:
            return MOST_SIDE_BITS
        sides = (self._meant(f"{side}_bits") for side in _SIDES)
        return float(max(max(bits) if isinstance(bits, tuple) else bits for bits in sides))

    def settled(self) -> CacheSpec:
        """The spec with a value in place of each "auto". Bits that a budget shares stay "auto"."""
        autos = [name for name in _AUTO if getattr(self, name) == AUTO]
        if self.budget is not None:
            autos = [name for name in autos if not name.endswith("_bits")]
        plain = self.with_(overrides=(), **{name: self._meant(name) for name in autos})
        layers = {}
        for layer, changed in self.overrides:
            one, fields = self.with_(overrides=(), **dict(changed)).settled(), dict(changed)
            layers[layer] = {
                name: getattr(one, name)
                for name in {**fields, **_AUTO}
                if name in fields or getattr(one, name) != getattr(plain, name)
            }
        return plain.with_(overrides=layers)

    def _checked_overrides(self) -> Overrides:
        overrides: Any = self.overrides
        try:
            layers = dict(overrides)
            fields_of = {layer: dict(fields) for layer, fields in layers.items()}
        except (TypeError, ValueError):
            raise TypeError(
                f"`overrides` must map a layer index to a mapping of fields, got {quoted(overrides)}"
            ) from None
        plain = self.with_(overrides=()) if fields_of else self
        known = [f.name for f in dataclasses.fields(self) if f.name not in _WHOLE_CACHE]
        checked = []
        for layer, fields in fields_of.items():
            number = _integer(layer, "layer` in `overrides", -(2**16), 2**16)
            for name in fields:
                if name not in known:
                    raise ValueError(
                        f"`overrides[{number}]` must name fields among {', '.join(known)}, got {quoted(name)}"
                    )
            try:
                changed = plain.with_(**fields)
            except (TypeError, ValueError) as error:
                raise type(error)(f"`overrides[{number}]`: {error}") from None
            checked.append((number, tuple((name, getattr(changed, name)) for name in sorted(fields))))
        return tuple(sorted(checked))

    def with_(self, **fields: Any) -> CacheSpec:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """The value of each field, as `from_dict` takes it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CacheSpec:
        """The spec that `to_dict` described, checked again."""
        if not isinstance(fields, Mapping):
            raise TypeError(f"`fields` must be a mapping, as `to_dict` returns it, got {quoted(fields)}")
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in fields]:
            raise ValueError(f"`fields` must have every field of a CacheSpec, got no {', '.join(missing)}")
        return cls(**fields)

    def with_boundary(self, layers: int, **fields: Any) -> CacheSpec:
        """A copy whose first and last `layers` layers differ in some fields: ``spec.with_boundary(2, key_bits=5)``.
        Other overrides of these layers stay. ValueError for layers without fields."""
        count = _integer(layers, "layers", 0, 2**15)
        if count and not fields:
            raise ValueError(f"with_boundary: a field must be given for {count} layers, such as key_bits=5, got none")
        overrides = {layer: dict(changed) for layer, changed in self.overrides}
        for layer in (*range(count), *range(-count, 0)):
            overrides[layer] = {**overrides.get(layer, {}), **fields}
        return self.with_(overrides=overrides)

    def for_layer(self, layer: int, n_layers: int) -> CacheSpec:
        """The spec of one layer of `n_layers`, with its overrides applied and removed, and `settled`.

        Raises ValueError for a layer outside the model, an override outside the model, and two overrides of one layer.
        """
        n_layers = _integer(n_layers, "n_layers", 1, 2**31 - 1)
        layer = _integer(layer, "layer", 0, n_layers - 1)
        if not self.overrides:
            return self.settled()
        fields: dict[int, tuple[tuple[str, Any], ...]] = {}
        for number, changed in self.overrides:
            where = number + n_layers if number < 0 else number
            if not 0 <= where < n_layers:
                raise ValueError(
                    f"`overrides` must name layers in {-n_layers}..{n_layers - 1} of this model, got {number}"
                )
            if where in fields:
                raise ValueError(
                    f"`overrides` must name each layer once, got layer {where} as {where} and {where - n_layers}"
                )
            fields[where] = changed
        return self.with_(overrides=(), **dict(fields.get(layer, ()))).settled()

    def plan(self, head_dim: int, wave_pairs: int = 0, rank: int = 0) -> Plan:
        """How a layer is stored, for heads of `head_dim` channels (a multiple of 8, 8..512). Ignores overrides.

        wave_pairs, rank: sizes of the layer's wave and metric in the model's moments, for a spec that has these. The
        size of a record does not depend on them.
        ValueError for a spec with a budget: `turboquant.measured.layer_specs` gives the spec of each layer.
        """
        if self.budget is not None:
            raise ValueError(
                "`budget` must be None in the spec of a layer: a calibration turns it into the bits of each group"
            )
        head_dim = _integer(head_dim, "head_dim", 0, 2**15)  # the core refuses some of these
        key, value = self._side("key", head_dim), self._side("value", head_dim)
        pairs = wave_pairs if self._meant("centre") == "wave" else 0
        metric = rank if self._meant("metric") == "query" else None
        return Plan(head_dim, key, value, group=self.group, codebook=self.codebook, scale=self.scale, seed=self.seed,
                    wave_pairs=pairs, metric=metric, tries=self._meant("tries"),
                    variance_term=self._meant("variance_term"))  # fmt: skip

    def rotation_of(self, side: str) -> str:
        """Rotation of "key" or "value"."""
        own = self.value_rotation if side == "value" else "same"
        return self._meant("rotation") if own == "same" else own

    def sketch_rows(self, head_dim: int) -> int:
        """Rows of the Gaussian sketch of keys; 0 without one."""
        return {"gaussian": head_dim, "gaussian/4": head_dim // 4}.get(self.sketch, 0)

    def _side(self, side: str, head_dim: int) -> Side:
        bits, rotation = self._meant(f"{side}_bits"), self.rotation_of(side)
        split = self.outliers != "none" and isinstance(bits, float)
        rows = self.sketch_rows(head_dim) if side == "key" else 0
        return Side(
            group_widths(bits, head_dim, self.group),
            "dense" if split or rotation in ("dense", "calibrated", "svd") else rotation,
            getattr(self, f"{side}_levels"),
            (0, first_part(bits, head_dim)) if split else getattr(self, f"{side}_block"),
            "gaussian" if rows else "sign" if side == "key" and self.sketch == "sign" else "none",
            rows,
        )

    def bytes_per_token(self, head_dim: int, kv_heads: int = 1, n_layers: int = 1) -> int:
        """Bytes of one packed token, keys and values, with scales and channel padding, over `kv_heads` heads of
        `n_layers` layers. Exact tokens of sinks and window and the unused part of a last page do not count
        (`TurboQuantCache.nbytes` counts both). A budget is for all layers together: pass `n_layers` with it.
        Raises TypeError or ValueError that names the argument."""
        head_dim = _integer(head_dim, "head_dim", 8, 2**15)
        kv_heads, n_layers = _integer(kv_heads, "kv_heads", 1, 2**15), _integer(n_layers, "n_layers", 1, 2**15)
        if self.budget is not None:
            self.with_(budget=None, method="chosen", overrides=()).plan(head_dim)
            groups = -(-head_dim // self.group)
            shared = groups if self.method == "axes" else 1  # bits are distributed over groups, or over sides
            bits = group_bits_of(self.budget, n_layers, shared) * groups // shared
            return kv_heads * (self.group * bits // 8 + 2 * 2 * n_layers)
        if not self.overrides:
            return kv_heads * n_layers * (self.plan(head_dim).record_bytes // PAGE_TOKENS)
        plans = (self.for_layer(i, n_layers).plan(head_dim) for i in range(n_layers))
        return kv_heads * sum(plan.record_bytes // PAGE_TOKENS for plan in plans)

    def effective_bits(self, head_dim: int, n_layers: int = 1) -> float:
        """Bits per number of a packed token, the average of keys and values, from all bytes of `bytes_per_token`."""
        return self.bytes_per_token(head_dim, 1, n_layers) * 8 / (2 * head_dim * n_layers)


def group_bits_of(average: float, n_layers: int, groups: int) -> int:
    """Returns the sum of bits over all layers, both sides and their groups for this average, rounded down."""
    return int(average * n_layers * 2 * groups + 1e-6)
