"""Valid calls of turboquant._core, which the tests of the binding vary or make invalid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from turboquant import _core
from turboquant.plan import Plan, Side

DIM, HEADS, BATCH, TOKENS, PAGES, MAX_PAGES = 64, 2, 3, 5, 8, 2
PLAN = Plan(DIM, 4, 3, page_tokens=32).words
DENSE = Plan(DIM, Side(4, "dense"), 3, page_tokens=32).words
VECTORS = Plan(DIM, 4, page_tokens=32).words
f32 = np.float32


def rows(*shape: int, dtype: Any = f32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy whose data begins one byte past a multiple of 64."""
    raw = np.zeros(array.nbytes + 65, np.uint8)
    start = -raw.ctypes.data % 64 + 1
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@dataclass
class Call:
    """An operation of turboquant._core and its arguments, by name."""

    op: str
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        return getattr(_core, self.op)(**self.arguments)

    def with_(self, **changes: Any) -> Call:
        return Call(self.op, self.arguments | changes)


def sample(op: str) -> Call:
    """A valid call of `op`, with most optional arrays given. All arrays are new in each call."""
    shared = dict(
        plan=PLAN,
        pages=_core.new_pages(PLAN, PAGES, HEADS),
        block_table=np.arange(BATCH * MAX_PAGES, dtype=np.int32).reshape(BATCH, MAX_PAGES),
        key_numbers=np.concatenate([rows(HEADS, DIM), np.ones((HEADS, 4), f32)], 1),
    )
    lengths = np.array([5, 17, 40], np.int32)
    exact = {name: rows(BATCH, HEADS, n, DIM) for name, n in
             {"sink_k": 2, "sink_v": 2, "window_k": 4, "window_v": 4}.items()}  # fmt: skip
    k, v = rows(BATCH, HEADS, TOKENS, DIM), rows(BATCH, HEADS, TOKENS, DIM)
    match op:
        case "append":
            return Call(op, dict(k=k, v=v, lengths=lengths, **shared, **exact))
        case "attend":
            fresh = dict(fresh_k=k, fresh_v=v)
            q = rows(BATCH, 2 * HEADS, TOKENS, DIM)
            starts = np.array([0, 1, 2], np.int32)
            return Call(op, dict(q=q, lengths=lengths, starts=starts, **shared, **exact, **fresh))
        case "dequantize":
            return Call(op, dict(lengths=np.array([0, 3, 33], np.int32), max_tokens=40, **shared))
        case "dot":
            pages = _core.new_pages(VECTORS, PAGES, 1)
            return Call(op, dict(plan=VECTORS, queries=rows(3, DIM), pages=pages, n=100, key_numbers=rows(1, DIM)))
        case "rotate":
            return Call(op, dict(plan=DENSE, x=rows(3, DIM), matrix=rows(DIM, DIM)))
        case "merge":
            return Call(op, dict(outs=rows(3, 4, DIM), lses=rows(3, 4)))
    raise AssertionError(op)


OPS = ["append", "attend", "dequantize", "dot", "rotate", "merge"]
