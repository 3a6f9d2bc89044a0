"""Specs for tests of one feature: what is not named is off."""

from __future__ import annotations

from typing import Any

from turboquant import CacheSpec


def bare(*args: Any, **fields: Any) -> CacheSpec:
    """A CacheSpec without a centre, sinks and window, unless they are named."""
    off: dict[str, Any] = {"centre": "none", "metric": "none", "centre_tokens": 128, "sinks": 0, "window": 0}
    if fields.get("budget") is not None:
        del off["centre"]  # the budget's own
    return CacheSpec(*args, **off | fields)
