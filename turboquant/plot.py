"""Pictures of results, for ``--plot`` of commands. They need matplotlib, which writes PNG, SVG or PDF files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["check_picture", "figure_class", "lines", "points"]

ENDINGS = (".png", ".svg", ".pdf")


def figure_class() -> Any:
    """Returns matplotlib's class of figures. ImportError, which says how to get it, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'turboquant-attention[plot]'") from error
    return Figure


def check_picture(path: str, option: str) -> None:
    """Raises ValueError for the name of no picture, ImportError without matplotlib."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(f"{option} must end in .png, .svg or .pdf, got {path!r}")
    figure_class()


def points(path: str, of: Mapping[str, tuple[float, float]], x: str, y: str) -> None:
    """Plots a named point for each entry (x, y), on a logarithmic axis of y, which is above 0."""
    figure, axes = _axes(x, y)
    for name, (across, up) in of.items():
        axes.plot(across, up, "o", label=name)
        axes.annotate(name, (across, up), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_yscale("log")
    figure.savefig(path, dpi=120)


def lines(path: str, at: Sequence[float], of: Mapping[str, Sequence[float]], x: str, y: str) -> None:
    """Plots a named line for each entry, with its values at each x, all above 0, on logarithmic axes."""
    figure, axes = _axes(x, y)
    for name, values in of.items():
        axes.plot(at, values, "o-", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(at, [f"{tokens:,.0f}" for tokens in at], fontsize=7)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _axes(x: str, y: str) -> tuple[Any, Any]:
    figure = figure_class()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes
