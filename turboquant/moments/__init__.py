"""Moments of a model: where its keys lie and where its queries look, measured once.

`data` is the file (NumPy). `rotary` asks the model how it turns keys, `metric` holds the arithmetic, `text` has the
tokens and `measure` runs the model (torch).
"""

from .data import LayerMoments, Moments

__all__ = ["LayerMoments", "Moments"]
