"""Checks of what callers pass to an index."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import quoted

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def number(op: str, name: str, value: Any, low: float, high: float) -> float:
    """Returns a number as a float. Raises TypeError for anything else, ValueError unless low <= value <= high."""
    try:
        own = float(value.__float__())
    except (AttributeError, TypeError):  # also for text, which float() would take
        raise TypeError(f"{op}: `{name}` must be a number, got {quoted(value)}") from None
    if not low <= own <= high:  # NaN too
        wanted = f"at least {low:g}" if math.isinf(high) else f"in {low:g}..{high:g}"
        raise ValueError(f"{op}: `{name}` must be {wanted}, got {own:g}")
    return own


def _is_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "dtype")


def unmasked(op: str, name: str, x: Any) -> NDArray[Any]:
    """Returns x as a plain array. Raises ValueError if entries are masked: NumPy would read them like the others."""
    if np.ma.is_masked(x):
        raise ValueError(f"{op}: `{name}` must have no masked entries, got {np.ma.getmaskarray(x).sum()} of them")
    return np.asarray(x)


def vectors(op: str, name: str, x: Any, dim: int) -> Any:
    """Returns x, [n, dim] or [dim], as a NumPy array of numbers. A bfloat16 tensor, which NumPy cannot view, stays a
    tensor; others are viewed, not copied. `as_float32` converts parts of arrays and tensors."""
    device, kind = getattr(x, "device", None), type(x).__name__
    if getattr(device, "type", "cpu") != "cpu":
        raise TypeError(f"{op}: `{name}` must be on the CPU, got one on {device}; write {name}.cpu()")
    if _is_torch(x):
        x = x.detach()
        if str(x.dtype) != "torch.bfloat16":
            x = x.numpy()
    else:
        try:
            x = unmasked(op, name, x)
        except ValueError as error:  # lists of unequal lengths
            if np.ma.is_masked(x):
                raise
            raise ValueError(f"{op}: `{name}` must be of shape [n, {dim}] or [{dim}]: {error}") from None
    if isinstance(x, np.ndarray) and x.dtype.kind not in "biuf":
        got = kind if x.dtype == object else f"{kind} of {x.dtype}"
        raise TypeError(f"{op}: `{name}` must be an array or lists of numbers, got {got}")
    if x.ndim not in (1, 2) or x.shape[-1] != dim:
        raise ValueError(f"{op}: `{name}` must be of shape [n, {dim}] or [{dim}], got {list(x.shape)}")
    return x


def as_float32(x: Any) -> Floats:
    """Numbers beyond float32 become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(x.float().numpy() if _is_torch(x) else x, np.float32, order="C")


LARGEST = 2.0**55  # the largest number that the core takes, except with cosine (TQ_INDEX_MAX_INPUT)


class TooLarge(ValueError):
    """Raised for finite numbers that are larger than the core takes."""


def exponent(rows: Floats) -> int:
    """Returns the least e >= 0 for which rows / 2^e are small enough for the core."""
    most = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    return max(0, math.frexp(most / LARGEST)[1]) if most > LARGEST else 0


def undivided(scores: Floats, exponent: int) -> Floats:
    """Multiplies scores of vectors that were divided by 2^exponent by its square, and clips them to float32."""
    if not exponent:
        return scores
    most = np.finfo(np.float32).max
    wide = np.clip(np.ldexp(scores.astype(np.float64), 2 * exponent), -most, most)
    return np.where(np.isinf(scores), scores, wide).astype(np.float32)


def id_array(op: str, ids: Any, name: str = "ids") -> Ids:
    array = unmasked(op, name, ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        got = type(ids).__name__ if array.dtype == object else array.dtype
        raise TypeError(f"{op}: `{name}` must be integers in a list or an array, got {got}")
    if array.ndim > 1:
        raise ValueError(f"{op}: `{name}` must have one dimension, got {array.ndim}")
    array = array.reshape(-1)
    wrong = array < 0 if array.dtype.kind == "i" else array >= 2**63
    if wrong.any():
        raise ValueError(f"{op}: `{name}` must be in 0..2^63 - 1, got {array[wrong.argmax()]}")
    return array.astype(np.int64)


def check(op: str, name: str, rows: Floats, metric: str, first: int | Ids = 0, given: Any = None) -> None:
    """Raises ValueError unless rows are finite and, with cosine, not zero. first: the number of rows[0] in errors, or
    the numbers of all rows. given: the rows before `as_float32`, if they had another type."""

    def which(i: int) -> int:
        return first + i if isinstance(first, int) else int(first[i])

    good = np.isfinite(rows)
    if not good.all():
        i, j = divmod(int(np.argmin(good)), rows.shape[1])
        got = float(rows[i, j] if given is None else given.reshape(rows.shape)[i, j])
        raise ValueError(f"{op}: `{name}[{which(i)}, {j}]` must be finite in float32, got {got:g}")
    if metric == "cosine" and not (there := rows.any(axis=1)).all():
        raise ValueError(f"{op}: `{name}[{which(int(np.argmin(there)))}]` must not be zero with cosine")


def normalised(rows: Floats) -> Floats:
    """Returns the rows scaled to length 1. Squares of small numbers need float64."""
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    out = np.empty_like(rows)
    np.divide(rows, length[:, None], out=out, casting="same_kind")
    return out


@contextmanager
def explained(op: str, name: str, rows: Floats, metric: str, first: int, given: Any) -> Iterator[None]:
    """Turns the core's refusal of a number into an error that names its row and column, or TooLarge if all numbers are
    finite. Nothing is checked before: the core checks numbers as it reads them."""
    try:
        yield
    except ValueError as error:
        check(op, name, rows, metric, first, given)
        if metric != "cosine" and exponent(rows):
            raise TooLarge from error
        raise
