"""Measures the quality and the bytes of a spec on text."""

from .decoder import Evaluation, FreeRunning, evaluate, evaluate_all, text_windows

__all__ = ["Evaluation", "FreeRunning", "evaluate", "evaluate_all", "text_windows"]
