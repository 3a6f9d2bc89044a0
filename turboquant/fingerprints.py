"""Fingerprints of models (`calibration.measure.fingerprint`), compared. A calibration, moments and a saved cache have
one each, and serve the model that it is of. NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["differences"]


def differences(was: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """In what a model's fingerprint differs from an earlier one, in words; empty if it is the same model.

    Only what both have is compared: a configuration alone has no weights. Weights are samples: they may differ by what
    rounding to bfloat16 does, so that a model may be calibrated in one dtype and run in another.
    """
    found = [f"{name} {model[name]!r} instead of {x!r}" for name, x in was.items()
             if name != "weights" and name in model and model[name] != x]  # fmt: skip
    if not found and "weights" in model and "weights" in was:
        a, b = (np.asarray(mark["weights"], np.float64) for mark in (model, was))
        if a.shape != b.shape or not np.allclose(a, b, rtol=2**-7, atol=1e-3 * float(np.abs(b).max(initial=0))):
            found.append("other weights")
    return found
