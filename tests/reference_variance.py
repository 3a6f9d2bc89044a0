"""A slow reference of the variance term (turboquant.h, "VARIANCE TERM"), in float64. tests/reference.py calls it.

The term is the product of a number of the query and one of the key. So one channel more in both adds it to the logits.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import reference_moments as moments
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]

TABLE = Path(__file__).parent.parent / "csrc" / "core" / "variance_table.h"


@cache
def shares() -> F64:
    """variance_table.h: [bits 1..6 and 8, tries 0, 3, 5 and 7, channels 8, 16 .. 512]."""
    return np.array(re.findall(r"([0-9][0-9.e-]*)f\b", TABLE.read_text()), np.float64).reshape(7, 4, 7)


def constant(p: Any) -> float:
    """K of the variance term; 0 if the plan has none."""
    if not p.variance_term:
        return 0.0
    row = shares()[(1, 2, 3, 4, 5, 6, 8).index(p.key_bits[0]), (0, 3, 5, 7).index(p.tries)]
    return float(p.head_dim * np.interp(p.head_dim, 8 << np.arange(7), row))


def of_keys(p: Any, keys: F64, scales: Array) -> F64:
    """Adds the channel to keys [tokens, head_dim]. scales [tokens]: the stored ones, 0 for exact keys."""
    return np.column_stack([keys, constant(p) * scales.astype(np.float64) ** 2])


def of_queries(p: Any, q: F64, scale: float, transform: Any) -> F64:
    """Multiplies queries [rows, head_dim] by the softmax scale and adds the channel. transform: that of the KV head."""
    head = moments.head_of(p, transform)
    coded = q if head is None else moments.shrunk(head, q, np.float64)
    return np.column_stack([scale * q, -((scale * coded) ** 2).sum(-1) / (2 * p.head_dim)])
