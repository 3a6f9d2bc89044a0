"""What callers hand to an index, checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..arguments import integer_in

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def integer(op: str, name: str, value: Any, low: int, high: int) -> int:
    return integer_in(value, f"{op}: `{name}`", low, high)


def _is_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "dtype")


def unmasked(op: str, name: str, x: Any) -> NDArray[Any]:
    """x as a plain array; ValueError if entries are masked, which would be read all the same."""
    if np.ma.is_masked(x):
        raise ValueError(f"{op}: `{name}` must have no masked entries, got {np.ma.getmaskarray(x).sum()} of them")
    return np.asarray(x)


def vectors(op: str, name: str, x: Any, dim: int) -> Any:
    """x, [n, dim] or [dim]: a NumPy array of float32 or float16, or a bfloat16 tensor, which NumPy cannot view. Other
    torch tensors are viewed, not copied. `as_float32` converts parts of either."""
    device = getattr(x, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise TypeError(f"{op}: `{name}` must be on the CPU, got one on {device}; write {name}.cpu()")
    if _is_torch(x):
        x = x.detach()
        if str(x.dtype) != "torch.bfloat16":
            x = x.numpy()
    elif isinstance(x, np.ndarray):
        x = unmasked(op, name, x)
    else:
        raise TypeError(f"{op}: `{name}` must be an array of float32 or float16, got {type(x).__name__}")
    if isinstance(x, np.ndarray) and x.dtype not in (np.float32, np.float16):
        raise TypeError(f"{op}: `{name}` must be an array of float32 or float16, got {x.dtype}")
    if x.ndim not in (1, 2) or x.shape[-1] != dim:
        raise ValueError(f"{op}: `{name}` must be of shape [n, {dim}] or [{dim}], got {list(x.shape)}")
    return x


def as_float32(x: Any) -> Floats:
    return np.asarray(x.float().numpy() if _is_torch(x) else x, np.float32, order="C")


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


def check(op: str, name: str, rows: Floats, metric: str, first: int = 0) -> None:
    """ValueError unless rows are finite and small enough, and not zero with cosine. first: the number of rows[0]."""
    good = np.abs(rows) <= _core.MAX_INPUT  # false for NaN
    if not good.all():
        i, j = divmod(int(np.argmin(good)), rows.shape[1])
        limit = f"finite and at most {_core.MAX_INPUT:.0f} in magnitude"
        raise ValueError(f"{op}: `{name}[{first + i}, {j}]` must be {limit}, got {rows[i, j]}")
    if metric == "cosine" and not (there := rows.any(axis=1)).all():
        raise ValueError(f"{op}: `{name}[{first + int(np.argmin(there))}]` must not be zero with cosine")


def normalised(rows: Floats) -> Floats:
    """Rows of length 1. Squares of small numbers need float64."""
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    out = np.empty_like(rows)
    np.divide(rows, length[:, None], out=out, casting="same_kind")
    return out


@contextmanager
def explained(op: str, name: str, rows: Floats, metric: str, first: int = 0) -> Iterator[None]:
    """Names row and column if the core refuses numbers. The core checks them as it reads them, so nothing else does."""
    try:
        yield
    except ValueError:
        check(op, name, rows, metric, first)
        raise
