"""The settings of an engine: the mapping under "turboquant" in vLLM's `--additional-config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..named_specs import named
from ..spec import CacheSpec

__all__ = ["FIND", "RING", "Settings"]

FIND = "find"  # look the profile up by the checkpoint's digest
RING = 32  # the most exact tokens that a page's row holds
_OF_NO_ENGINE = ("prefill", "outlier_tokens", "uniform")  # fields of a CacheSpec that mean nothing here


@dataclass(frozen=True)
class Settings:
    """Checked settings.

    spec     how layers are stored; its `sinks` and `window` are the exact tokens of each sequence
    name     of the preset
    profile  path of a file, FIND, or None: pack without wave and metric
    """

    spec: CacheSpec
    name: str = "default"
    profile: str | None = FIND

    @classmethod
    def of(cls, options: object) -> Settings:
        """Reads ``{"spec": PRESET, "profile": FILE or null, "sinks": 4, "window": 0}``, all optional. Other keys are
        fields of `CacheSpec` that differ from the preset; keys of "overrides" are layers, as text. Raises TypeError or
        ValueError that names the entry."""
        if not isinstance(options, Mapping):
            raise TypeError(f'"turboquant" in --additional-config must be a mapping, such as {{"spec": "default"}}, '
                            f"got {options!r}")  # fmt: skip
        fields = dict(options)
        name, profile = fields.pop("spec", "default"), fields.pop("profile", FIND)
        if not isinstance(name, str):
            raise TypeError(f'"spec" of turboquant must be the name of a preset, got {name!r}')
        if profile is not None and not (isinstance(profile, str) and profile):
            raise TypeError(f'"profile" of turboquant must be the path of a file or null, got {profile!r}')
        known = {f.name for f in dataclasses.fields(CacheSpec)} - {*_OF_NO_ENGINE}
        if unknown := sorted(map(str, {*fields} - known)):
            names = ", ".join(["spec", "profile", *sorted(known)])
            raise ValueError(f'"{unknown[0]}" of turboquant must be one of {names}')
        spec = named(name, '"spec" of turboquant').with_(window=0, uniform=True).with_(**_from_json(fields))
        return cls(_without_profile(spec) if profile is None else _checked(spec), name, profile)

    @property
    def exact(self) -> tuple[int, int]:
        """(sinks, window)."""
        return self.spec.sinks, self.spec.window


def _from_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Converts what JSON cannot hold: lists become tuples, and layers given as text become numbers."""
    converted = {key: tuple(x) if isinstance(x, list) and key != "overrides" else x for key, x in fields.items()}
    if isinstance(overrides := converted.get("overrides"), Mapping):
        try:
            converted["overrides"] = {int(layer): _from_json(dict(changed)) for layer, changed in overrides.items()}
        except (TypeError, ValueError):
            raise ValueError(f'"overrides" of turboquant must map layers to fields, got {overrides!r}') from None
    return converted


def _checked(spec: CacheSpec) -> CacheSpec:
    if spec.window > RING:
        raise ValueError(f'"window" of turboquant must be at most {RING} tokens, got {spec.window}')
    if spec.sinks > RING:
        raise ValueError(f'"sinks" of turboquant must be at most {RING} tokens, got {spec.sinks}')
    for layer, changed in spec.overrides:
        if own := [name for name, _ in changed if name in ("sinks", "window")]:
            raise ValueError(f'"overrides" of turboquant must not have "{own[0]}", which is one number for all layers, '
                             f"got it for layer {layer}")  # fmt: skip
    if "prompt" in (spec.outliers, *(dict(changed).get("outliers") for _, changed in spec.overrides)):
        raise ValueError('"outliers" of turboquant must not be "prompt": pages that requests share cannot depend on '
                         "one prompt; use \"none\" or \"calibrated\"")  # fmt: skip
    return spec


def _without_profile(spec: CacheSpec) -> CacheSpec:
    """Returns the spec without wave and metric. ValueError if it needs a calibration."""
    if spec.calibrated:
        raise ValueError('"profile" of turboquant must be the file of a calibrated profile for this spec, got null: '
                         "`turboquant calibrate` makes one")  # fmt: skip
    fields = {"centre": "none", "metric": "none"}
    overrides = {layer: {k: x for k, x in changed if k not in fields} for layer, changed in spec.overrides}
    return _checked(spec.with_(overrides=overrides, **fields))
