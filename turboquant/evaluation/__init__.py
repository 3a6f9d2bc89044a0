"""The quality and the bytes of a spec, measured on text."""

from .decoder import Evaluation, FreeRunning, evaluate, evaluate_all, text_windows

__all__ = ["Evaluation", "FreeRunning", "evaluate", "evaluate_all", "text_windows"]
