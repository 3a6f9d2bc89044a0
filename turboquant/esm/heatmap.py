"""A scan as a picture: one column per position, one row per amino acid. Needs matplotlib."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..files import file_name
from ..models.esm import AMINO_ACIDS
from ..plot import check_picture, figure_class
from .scan import Scan

__all__ = ["heat_map"]

COLUMNS = 60  # positions in one strip


def heat_map(scan: Scan, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draws the scores of a scan to a PNG, SVG or PDF file, by its ending. A dot marks the wild type at each position.

    TypeError for what is no scan or no path, ValueError for another ending; ImportError without matplotlib
    (``pip install 'turboquant-attention[plot]'``).
    """
    if not isinstance(scan, Scan):
        raise TypeError(f"`scan` must be a Scan, as masked_marginals returns it, got {type(scan).__name__}")
    name = file_name(path)
    check_picture(name, "`path`")
    scores = scan.scores
    strips = -(-len(scan.positions) // COLUMNS)
    widest = min(COLUMNS, len(scan.positions))
    figure = figure_class()(figsize=(2 + 0.16 * max(widest, 20), 0.6 + 3.1 * strips), layout="constrained")
    limit = float(np.abs(scores).max(initial=1e-6))
    image: Any = None
    for strip, axes in enumerate(figure.subplots(strips, 1, squeeze=False)[:, 0]):
        chosen = slice(strip * COLUMNS, (strip + 1) * COLUMNS)
        image = _strip(axes, scan, scores[chosen], scan.positions[chosen], limit)
        axes.set_xlim(-0.5, widest - 0.5)
    figure.colorbar(image, ax=figure.axes, label="log p(mutation) - log p(wild type)", shrink=min(1.0, 2.5 / strips))
    if title:
        figure.suptitle(title)
    figure.savefig(name, dpi=120)


def _strip(axes: Any, scan: Scan, scores: Any, positions: tuple[int, ...], limit: float) -> Any:
    image = axes.imshow(scores.T, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    letters = [scan.sequence[p] for p in positions]
    wild = [(i, AMINO_ACIDS.index(letter)) for i, letter in enumerate(letters) if letter in AMINO_ACIDS]
    axes.plot(*zip(*wild), ".", color="black", markersize=2) if wild else None
    axes.set_yticks(range(len(AMINO_ACIDS)), list(AMINO_ACIDS), fontsize=6)
    every = range(0, len(positions), 10)
    axes.set_xticks(every, [f"{letters[i]}{positions[i] + 1}" for i in every], fontsize=6)
    return image
