"""Specs for tests of one feature: what is not named is off."""

from __future__ import annotations

from typing import Any

from turboquant import CacheSpec

#: The method of the preset "default", for `bare`.
WAVE: dict[str, Any] = {"centre": "wave", "metric": "query"}


def bare(*args: Any, **fields: Any) -> CacheSpec:
    """A CacheSpec without a centre, sinks and window, unless they are named."""
    off: dict[str, Any] = {"centre": "none", "metric": "none", "sinks": 0, "window": 0}
    if fields.get("budget") is not None:  # a budget brings its own rotation, centre and metric
        off = {"method": "axes", "sinks": 0, "window": 0}
    return CacheSpec(*args, **off | fields)
