"""Calibrated plans: `data` is the file and its arithmetic (NumPy), `measure` makes one of a model and text (torch)."""

from .data import Calibration, allocate, layer_specs

__all__ = ["Calibration", "allocate", "layer_specs"]
