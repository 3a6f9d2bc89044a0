"""CacheSpec: how a cache quantises, as one value. Presets are named specs.

A spec is data: it is compared, hashed, stored beside a cache, and turned into a plan (the integers of
`turboquant.plan`) for each layer when its head_dim is known. No torch here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any

from .plan import GROUP, MAX_BITS, PAGE_TOKENS, Plan, plan_words

__all__ = ["CacheSpec", "preset", "presets", "resolve"]

Bits = int | tuple[int, ...]
Overrides = tuple[tuple[int, tuple[tuple[str, Any], ...]], ...]

_CHOICES = {
    "rotation": ("hadamard", "haar", "none", "calibrated"),
    "codebook": ("normal", "sphere"),
    "scale": ("eden", "norm", "norm_corrected", "least_squares"),
    "centre": ("none", "prompt", "calibrated"),
    "prefill": ("exact", "packed"),
}
_RANGES = {"centre_tokens": (1, 2**31 - 1), "sinks": (0, 2**24), "window": (0, 2**24), "seed": (0, 2**63 - 1)}
_WHOLE_CACHE = ("prefill", "overrides", "budget")  # the same for all layers: an override may not set them


def _bits(value: Any, field: str) -> Bits:
    """An integer in 1..5, or a tuple of integers in 0..5, one per group, not all 0."""
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"`{field}` must be an integer or a sequence of integers, got {value!r}")
    if not isinstance(value, Iterable):
        try:
            bits = index(value)
        except TypeError:
            raise TypeError(f"`{field}` must be an integer or a sequence of integers, got {value!r}") from None
        if not 1 <= bits <= MAX_BITS:
            raise ValueError(f"`{field}` must be in 1..{MAX_BITS}, got {bits}")
        return bits
    widths = tuple(_integer(b, f"{field}[{i}]", 0, MAX_BITS) for i, b in enumerate(value))
    if not any(widths):
        raise ValueError(f"`{field}` must give bits to at least one group of {GROUP} channels, got {widths}")
    return widths


def _integer(value: Any, field: str, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"`{field}` must be an integer, got {value!r}")
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"`{field}` must be an integer, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"`{field}` must be in {low}..{high}, got {number}")
    return number


def _token_bytes(bits: Bits, head_dim: int) -> int:
    """Bytes of one token of one head and side: 4 per bit and group of 32 channels, the last one padded, and a scale."""
    groups = -(-head_dim // GROUP)
    total = sum(bits) if isinstance(bits, tuple) else bits * groups
    return 4 * total + (2 if total else 0)


@dataclass(frozen=True)
class CacheSpec:
    """How the keys and values of a model's layers are stored. Frozen, hashable; `with_` makes a changed copy.

    key_bits, value_bits   bits of a code: 1..5 for all channels, or a tuple with one entry in 0..5 per group of 32
                           rotated channels.
    rotation        "hadamard": random signs and Walsh-Hadamard, nothing is stored; "haar": a dense random matrix;
                    "none"; "calibrated": per KV head, keys and values apart, the principal axes of a calibration, each
                    group of 32 divided by its fixed step.
    codebook        "normal": levels for N(0, 1); "sphere": for the exact law of a coordinate of a unit vector (matters
                    below 64 channels).
    scale           the one number kept per token, head and side: "eden" makes inner products unbiased (arXiv
                    2108.08842), "norm" is TurboQuant's mse mode (arXiv 2504.19874), "norm_corrected" keeps the norm,
                    "least_squares" the least error.
    centre          a vector taken from every key before the rotation: "none"; "prompt": per sequence and KV head, the
                    mean of the first `centre_tokens` tokens of the first forward, fixed from then on; "calibrated":
                    the means of a calibration, of keys and values. It changes no softmax weight beyond what
                    quantisation does.
    sinks, window   the first and the last so many tokens of each sequence stay in the model's dtype.
    prefill         "exact": the queries of the first forward see full-precision keys and values, as the model alone
                    would; "packed": every query reads what was stored.
    overrides       layer index (negative counts from the last layer) -> fields that differ in it, such as {0:
                    {"key_bits": 5}}. Given as a mapping, held as sorted tuples.
    seed            of the rotation; 0..2**63 - 1. (A calibration has its own.)
    budget          average code bits, above 0 and at most 5, that a calibration shares among the groups of all layers,
                    keys and values; then key_bits and value_bits are not looked at and must be left alone, and rotation
                    and centre become "calibrated". None: key_bits and value_bits hold.

    Raises TypeError or ValueError that name the field, what it was and what it should be.
    """

    key_bits: Bits = 4
    value_bits: Bits = 4
    rotation: str = "hadamard"
    codebook: str = "normal"
    scale: str = "eden"
    centre: str = "none"
    centre_tokens: int = 128
    sinks: int = 0
    window: int = 0
    prefill: str = "exact"
    overrides: Overrides = ()
    seed: int = 0
    budget: float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.budget is not None:
            self._check_budget()
        for name in ("key_bits", "value_bits"):
            put(self, name, _bits(getattr(self, name), name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
        for name, (low, high) in _RANGES.items():
            put(self, name, _integer(getattr(self, name), name, low, high))
        if (
            isinstance(self.key_bits, tuple)
            and isinstance(self.value_bits, tuple)
            and len(self.key_bits) != len(self.value_bits)
        ):
            groups = f"{len(self.key_bits)} and {len(self.value_bits)}"
            raise ValueError(f"`key_bits` and `value_bits` must have the same number of groups, got {groups}")
        put(self, "overrides", self._checked_overrides())

    def _check_budget(self) -> None:
        put = object.__setattr__
        if isinstance(self.budget, bool) or not isinstance(self.budget, Real):
            raise TypeError(f"`budget` must be a number of bits or None, got {self.budget!r}")
        put(self, "budget", float(self.budget))
        if not 0 < self.budget <= MAX_BITS:  # a NaN is refused as well
            raise ValueError(f"`budget` must be above 0 and at most {MAX_BITS} bits, got {self.budget}")
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) != 4:
                raise ValueError(
                    f"`{name}` must be left alone where `budget` shares the bits, got {getattr(self, name)!r}"
                )
        for name, left in (("rotation", "hadamard"), ("centre", "none")):
            if getattr(self, name) not in (left, "calibrated"):
                raise ValueError(
                    f"`{name}` must be 'calibrated' or left alone where `budget` is set, got {getattr(self, name)!r}"
                )
            put(self, name, "calibrated")

    @property
    def calibrated(self) -> bool:
        """Whether it cannot be used without a calibration. Overrides are not looked at."""
        return self.rotation == "calibrated" or self.centre == "calibrated"

    def _checked_overrides(self) -> Overrides:
        given: Any = self.overrides
        try:
            layers = dict(given)
            fields_of = {layer: dict(fields) for layer, fields in layers.items()}
        except (TypeError, ValueError):
            raise TypeError(f"`overrides` must map a layer index to a mapping of fields, got {given!r}") from None
        plain = dataclasses.replace(self, overrides=()) if fields_of else self
        known = [f.name for f in dataclasses.fields(self) if f.name not in _WHOLE_CACHE]
        held = []
        for layer, fields in fields_of.items():
            number = _integer(layer, "overrides", -(2**16), 2**16)
            for name in fields:
                if name not in known:
                    raise ValueError(f"`overrides[{number}]` must name fields among {', '.join(known)}, got {name!r}")
            try:
                changed = dataclasses.replace(plain, **fields)
            except (TypeError, ValueError) as error:
                raise type(error)(f"`overrides[{number}]`: {error}") from None
            held.append((number, tuple((name, getattr(changed, name)) for name in sorted(fields))))
        return tuple(sorted(held))

    def with_(self, **fields: Any) -> CacheSpec:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **fields)

    def for_layer(self, layer: int, n_layers: int) -> CacheSpec:
        """The spec of one layer of `n_layers`: its overrides applied, and none left.

        Raises ValueError for a layer outside the model, an override outside the model, and two overrides of one layer.
        """
        if not 0 <= layer < n_layers:
            raise ValueError(f"`layer` must be in 0..{n_layers - 1}, got {layer}")
        if not self.overrides:
            return self
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
        return dataclasses.replace(self, overrides=(), **dict(fields.get(layer, ())))

    def plan(self, head_dim: int) -> Plan:
        """The integers that operators take, for heads of `head_dim` channels (a multiple of 8, 8..256). Overrides are
        not looked at.

        ValueError for a spec with a budget: `turboquant.calibration.layer_specs` tells what it means for each layer.
        """
        if self.budget is not None:
            raise ValueError(
                "`budget` must be None in the spec of a layer: a calibration turns it into the bits of each group"
            )
        return plan_words(
            head_dim,
            self.key_bits,
            self.value_bits,
            rotation="dense" if self.rotation in ("haar", "calibrated") else self.rotation,
            codebook=self.codebook,
            scale=self.scale,
            seed=self.seed,
            page_tokens=PAGE_TOKENS,
        )

    def bytes_per_token(self, head_dim: int, kv_heads: int = 1, n_layers: int = 1) -> int:
        """Bytes of one packed token, keys and values, scales and channel padding included, over `kv_heads` heads of
        `n_layers` layers. Sinks and window keep their tokens in the model's dtype, and a sequence's last page may be
        part empty: neither is in this number (`TurboQuantCache.nbytes` counts both). A budget is one for all layers:
        say how many there are."""
        if self.budget is not None:
            groups = -(-head_dim // GROUP)
            self.with_(budget=None, overrides=()).plan(head_dim)
            return kv_heads * (4 * group_bits_of(self.budget, n_layers, groups) + 2 * 2 * n_layers)
        self.plan(head_dim)
        layers = (self.for_layer(i, n_layers) for i in range(n_layers)) if self.overrides else [self] * n_layers
        return kv_heads * sum(_token_bytes(s.key_bits, head_dim) + _token_bytes(s.value_bits, head_dim) for s in layers)

    def effective_bits(self, head_dim: int, n_layers: int = 1) -> float:
        """Bits per number of a packed token, keys and values averaged, every byte of `bytes_per_token` counted."""
        return self.bytes_per_token(head_dim, 1, n_layers) * 8 / (2 * head_dim * n_layers)


def group_bits_of(average: float, n_layers: int, groups: int) -> int:
    """What an average comes to in bits counted once per group of 32 channels; never more than it says."""
    return int(average * n_layers * 2 * groups + 1e-6)


def _paper(bits: int) -> CacheSpec:
    return CacheSpec(key_bits=bits, value_bits=bits, scale="norm")


_PRESETS: dict[str, CacheSpec] = {
    # The method that measures best without calibration.
    "default": CacheSpec(key_bits=4, value_bits=4, centre="prompt", sinks=4, window=128),
    # TurboQuant mse as published (arXiv 2504.19874): norms, no centre, no token kept exact.
    "paper-mse-4": _paper(4),
    "paper-mse-3": _paper(3),
    "paper-mse-2": _paper(2),
    # The calibrated plan, by its average of code bits; all of them take the same calibration.
    **{
        f"calibrated-{bits}": CacheSpec(budget=float(bits), sinks=4, window=128)
        for bits in ("4", "3.5", "3", "2.5", "2")
    },
}


def presets() -> dict[str, CacheSpec]:
    """All named specs, by name."""
    return dict(_PRESETS)


def preset(name: str) -> CacheSpec:
    """The spec of that name. ValueError for an unknown one; the message lists the names, the likeliest first."""
    if not isinstance(name, str):
        raise TypeError(f"`name` must be the name of a preset, got {name!r}")
    if name not in _PRESETS:
        near = difflib.get_close_matches(name.lower(), _PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"`name` must be a preset, got {name!r}: {hint}there are {', '.join(_PRESETS)}")
    return _PRESETS[name]


def resolve(spec: CacheSpec | str) -> CacheSpec:
    """A spec as it is, or the preset of that name."""
    if isinstance(spec, CacheSpec):
        return spec
    if isinstance(spec, str):
        return preset(spec)
    wanted = "a CacheSpec or the name of a preset"
    raise TypeError(f"`spec` must be {wanted}, got {'a mapping' if isinstance(spec, Mapping) else repr(spec)}")
