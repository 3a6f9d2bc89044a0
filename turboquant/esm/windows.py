"""Windows over proteins that are longer than a model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from ..arguments import integer

__all__ = ["Window", "sizes", "windows"]


class Window(NamedTuple):
    """Residues `start` to `stop` are read together, and the results for `first` to `last` are kept."""

    start: int
    stop: int
    first: int
    last: int


def sizes(config: Any, window: int | None = None, overlap: int | None = None) -> tuple[int, int]:
    """Checks and returns (residues of a window, residues that neighbours share at least): by default as many as the
    model has positions for, and a quarter of that. ValueError if the model is too short, or the overlap above half."""
    most = config.max_position_embeddings - 4
    window = most if window is None else integer(window, "`window`")
    if not 2 <= window <= most:
        raise ValueError(f"`window` must be in 2..{most}, which the model has positions for, got {window}")
    overlap = window // 4 if overlap is None else integer(overlap, "`overlap`")
    if not 0 <= overlap <= window // 2:
        raise ValueError(f"`overlap` must be in 0..{window // 2}, half of the window, got {overlap}")
    return window, overlap


def windows(length: int, window: int, overlap: int) -> list[Window]:
    """Returns the fewest windows of equal length, spread evenly, that cover a protein and share at least `overlap`
    residues with the next. A shared residue is kept from the window whose ends are farther from it."""
    if length <= window:
        return [Window(0, length, 0, length)]
    count = -(-(length - overlap) // (window - overlap))
    starts = [round(i * (length - window) / (count - 1)) for i in range(count)]
    cuts = [0, *((after + before + window) // 2 for before, after in pairwise(starts)), length]
    return [Window(start, start + window, cuts[i], cuts[i + 1]) for i, start in enumerate(starts)]
