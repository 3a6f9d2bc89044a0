"""Compares fingerprints of models (`models.identity.fingerprint`). A calibration, moments and a saved cache each have
one, and are valid only for that model. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["differences"]


def differences(was: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Returns how a model's fingerprint differs from an earlier one, in words; empty if it is the same model.

    Only entries that both have are compared: a configuration alone has no weights. Sampled weights may differ as much
    as rounding to bfloat16 changes them, so that a model can be calibrated in one dtype and run in another.
    """
    sentences = [f"{name} {model[name]!r} instead of {x!r}" for name, x in was.items()
             if name != "weights" and name in model and model[name] != x]  # fmt: skip
    if not sentences and "weights" in model and "weights" in was:
        try:
            a, b = (np.asarray(mark["weights"], np.float64) for mark in (model, was))
            alike = a.shape == b.shape and np.allclose(a, b, rtol=2**-7, atol=1e-3 * np.abs(b).max(initial=0))
        except (OverflowError, TypeError, ValueError):  # of a damaged file
            alike = False
        sentences += [] if alike else ["other weights"]
    return sentences
