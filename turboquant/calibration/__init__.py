"""Calibration. NumPy: `data` is the file and its arithmetic, `choice` what a budget of bits can mean. torch: `measure`
makes one of a model and text, `trial` tries its methods."""

from .choice import Trial
from .data import Calibration, allocate, layer_specs

__all__ = ["Calibration", "Trial", "allocate", "layer_specs"]
