"""Checks of arguments that several modules share. No NumPy and no torch here."""

from __future__ import annotations

from operator import index
from typing import Any

__all__ = ["integer", "integer_in"]


def integer(value: Any, what: str) -> int:
    """An integer of any type, such as NumPy's or a tensor of one, as an int. TypeError, which calls it `what`, for any
    other object; True and False are none."""
    try:
        return index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {value!r}") from None


def integer_in(value: Any, what: str, low: int, high: int) -> int:
    """`integer`, and ValueError for one that is not in low..high."""
    number = integer(value, what)
    if not low <= number <= high:
        raise ValueError(f"{what} must be in {low}..{high}, got {number}")
    return number
