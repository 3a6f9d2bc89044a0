"""Calibration. With NumPy: `data` has the file and its arithmetic, `choice` the methods that spend a budget of bits.
With torch: `measure` calibrates a model on text, `trial` tries the methods."""

from .choice import Trial
from .data import Calibration, allocate, layer_specs

__all__ = ["Calibration", "Trial", "allocate", "layer_specs"]
