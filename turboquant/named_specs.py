"""Presets: CacheSpecs with names. OURS are this project's methods, OTHERS those of papers and of other tools."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from .arguments import quoted
from .spec import LEAST_AVERAGE, MOST_SIDE_BITS, CacheSpec
from .tables import table

__all__ = ["OTHERS", "OURS", "named", "named_or_bits", "of_bits", "preset", "presets", "print_presets", "resolve"]

# Switches off defaults of CacheSpec that no other scheme has.
_OFF: dict[str, Any] = {"centre": "none", "metric": "none", "sinks": 0, "window": 0}
_BUDGETS = ("4", "3.5", "3", "2.5", "2")

OURS: dict[str, CacheSpec] = {
    # The best method without calibration. It needs only the model's moments.
    "default": CacheSpec(),
    # The same for an encoder of proteins, whose heads are small. It reads all tokens at once, so there is no window,
    # and encoding takes a larger share of its time, so there are no tries.
    "esm-default": CacheSpec(codebook="sphere", window=0, tries=0),
    # The same in other widths: a divergence below that of fp8, and smaller caches.
    "near-lossless": CacheSpec(5, 5),
    "compact": CacheSpec(3, 3),
    "tiny": CacheSpec(2, 2),
    # The method that a calibration found best for an average of code bits. `preset` takes any average in 2..6.
    **{f"calibrated-{bits}": CacheSpec(budget=float(bits)) for bits in _BUDGETS},
}


def _paper(bits: float) -> CacheSpec:
    outliers = "none" if isinstance(bits, int) else "prompt"
    return CacheSpec(key_bits=bits, value_bits=bits, scale="norm", outliers=outliers, **_OFF)


def _affine(bits: int, rotation: str, sketch: str = "none") -> CacheSpec:
    return CacheSpec(bits, bits, rotation=rotation, key_levels="affine", value_levels="affine", key_block=64,
                     value_block=64, sketch=sketch, **_OFF)  # fmt: skip


def _absmax(key_bits: int, value_bits: int, **rotations: Any) -> CacheSpec:
    return CacheSpec(key_bits, value_bits, key_levels="absmax", value_levels="absmax", key_block=32, value_block=32,
                     **rotations, **_OFF)  # fmt: skip


OTHERS: dict[str, CacheSpec] = {
    # TurboQuant mse as published (arXiv 2504.19874, Algorithm 1): norms, no centre, no token kept exact. With fractions
    # of bits, outlier channels are apart (section 4.3).
    **{f"paper-mse-{bits}": _paper(bits) for bits in (4, 3.5, 3, 2.5, 2)},
    # TurboQuant prod (Algorithm 2): one bit of the keys is a sketch. Values are as in mse.
    **{f"paper-prod-{bits}": CacheSpec(bits - 1, bits, scale="norm", sketch="gaussian", **_OFF) for bits in (4, 3, 2)},
    "turboesm": CacheSpec(3, 3, rotation="svd", value_rotation="none", key_levels="table", value_levels="table",
                          sketch="sign", **_OFF),
    "mlx-v2-4-lean": _affine(4, "none"),
    "mlx-v2-4-rotated": _affine(4, "dense"),
    "mlx-v2-3-rotated-qjl": _affine(3, "dense", "gaussian"),
    **{
        f"mlx-v3-{bits}": CacheSpec(bits, bits, rotation="dense", scale="norm", **_OFF)
        for bits in (4, 3.5, 3.25, 3, 2.75, 2.5, 2)
    },
    "skainet-safe-lowbit": _absmax(8, 4, rotation="none", value_rotation="hadamard"),
    "skainet-balanced": _absmax(4, 4),
    "skainet-experimental-max": _absmax(3, 3),
    "polarquant-3-2": CacheSpec(3, 2, codebook="uniform", scale="norm", sketch="gaussian/4", **_OFF),
}  # fmt: skip
_PRESETS = {**OURS, **OTHERS}
_CALIBRATED = re.compile(r"calibrated-(\d+(?:\.\d+)?)")


def presets() -> dict[str, CacheSpec]:
    """All named specs, by name."""
    return dict(_PRESETS)


def preset(name: str) -> CacheSpec:
    """The spec of that name; "calibrated-N" for any average N in 2..6. TypeError for another object, ValueError for an
    unknown name; the message has the names most like it."""
    if not isinstance(name, str):
        raise TypeError(f"`name` must be the name of a preset, got {quoted(name)}")
    return named(name, "`name`")


def named(name: str, argument: str) -> CacheSpec:
    """As `preset`. argument: what errors call the argument, or the option of a command."""
    if match := _CALIBRATED.fullmatch(name):
        average = float(match[1])
        if not LEAST_AVERAGE <= average <= MOST_SIDE_BITS:
            wants = f"calibrated-N with an N in {LEAST_AVERAGE}..{MOST_SIDE_BITS}"
            raise ValueError(f"{argument} must be a preset, such as {wants}, got {name!r}")
        return CacheSpec(budget=average)
    if name not in _PRESETS:
        near = difflib.get_close_matches(name.lower(), _PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"{argument} must be a preset, got {name!r}: {hint}`turboquant presets` lists them")
    return _PRESETS[name]


def named_or_bits(text: str, argument: str) -> CacheSpec:
    """Returns what an option names: a preset, or the preset default with this number of bits. Errors as in `named`."""
    try:
        bits = float(text)
    except ValueError:
        return named(text, argument)
    return of_bits(bits, argument)


def of_bits(bits: Any, argument: str) -> CacheSpec:
    """Returns the preset default with this number of bits for keys and values. ValueError, which calls it `argument`,
    for a number of bits that is not possible."""
    try:
        return OURS["default"].with_(key_bits=float(bits), value_bits=float(bits))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{argument} must be a preset or a number of bits, got {bits!r}: {error}") from None


def resolve(spec: CacheSpec | str | float) -> CacheSpec:
    """Returns a spec as it is, the preset of that name, or the preset default with that number of bits."""
    if isinstance(spec, CacheSpec):
        return spec
    if isinstance(spec, str):
        return named(spec, "`spec`")
    if isinstance(spec, Real) and not isinstance(spec, bool):
        return of_bits(spec, "`spec`")
    wanted = "a CacheSpec, the name of a preset or a number of bits"
    raise TypeError(f"`spec` must be {wanted}, got {'a mapping' if isinstance(spec, Mapping) else quoted(spec)}")


_HEAD_DIM = 128  # for which bits are printed


def print_presets() -> int:
    """Print all presets: their bits, what they keep exact and what they need."""
    rows = [("preset", "codes", "bits", "exact tokens", "needs")]
    rows += [(name, spec.bits_in_words(), f"{spec.effective_bits(_HEAD_DIM, 32):.3f}", _exact(spec), _needs(spec))
             for name, spec in _PRESETS.items()]  # fmt: skip
    print(table(rows, left=(0, 1, 3, 4)))
    print(f"\nBits are those of a packed number, scales included, with {_HEAD_DIM} channels a head.\n"
          f"calibrated-N takes any average N in {LEAST_AVERAGE}..{MOST_SIDE_BITS}.")  # fmt: skip
    return 0


def _exact(spec: CacheSpec) -> str:
    parts = [f"{word} {count}" for word, count in (("first", spec.sinks), ("last", spec.window)) if count]
    return ", ".join(parts) or "none"


def _needs(spec: CacheSpec) -> str:
    return "turboquant calibrate" if spec.calibrated else "moments, measured by itself" if spec.measured else "nothing"
