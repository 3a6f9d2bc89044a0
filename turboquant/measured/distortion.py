"""The quantisation error of a number of unit variance, by its bits. NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np

from .. import _core
from ..plan import MAX_BITS, WIDE_BITS, WIDE_STEP, WIDTHS, Codebook, Plan, Rotation, Side

__all__ = ["distortions", "errors"]

_VECTORS = 1024  # Gaussian vectors on which a search of scales is measured: they tell its share of the noise to 0.5 %


@cache
def distortions(tries: int = 0, channels: int = 128) -> dict[int, float]:
    """D(b) for b = 0..6 and 8: mean squared error of the codebook for N(0, 1), by the trapezoidal rule. With `tries`,
    that of vectors of `channels` numbers whose encoder tries so many scales (`CacheSpec.tries`): the share of the noise
    D / (1 - D) that a search leaves is measured, at 1..6 bits."""
    if tries:
        shares = distortions()
        for bits in range(1, MAX_BITS + 1):
            noise = shares[bits] / (1 - shares[bits]) * _noise(bits, channels, tries) / _noise(bits, channels, 0)
            shares = {**shares, bits: noise / (1 + noise)}
        return shares
    out = {0: 1.0}
    for bits in WIDTHS[1:]:
        if bits == WIDE_BITS:
            levels = np.arange(-127, 128) * WIDE_STEP
        else:
            book = _core.codebook(Codebook.NORMAL, 128, bits)
            levels = np.sort(book["levels"].astype(np.float64)) * book["step"]
        x = np.linspace(-9, 9, 36001)
        error = (x - levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]) ** 2
        out[bits] = float(np.trapezoid(error * np.exp(-x * x / 2) / np.sqrt(2 * np.pi), x))
    return out


def _noise(bits: int, channels: int, tries: int) -> float:
    """Mean of 1 / cosine^2 - 1 between Gaussian vectors and their codes."""
    plan = Plan(channels, Side(bits, Rotation.NONE), tries=tries)
    x = _core.gaussian(0, _VECTORS, channels)
    pages = _core.new_pages(plan.words, -(-_VECTORS // plan.page_tokens), 1)
    table = np.arange(len(pages), dtype=np.int32)[None]
    count = np.array([_VECTORS], np.int32)
    _core.append(plan.words, x[None, None], None, count, pages, table)
    decoded = _core.dequantize(plan.words, pages, table, count, _VECTORS)[0][0, 0]
    true, stored = x.astype(np.float64), decoded.astype(np.float64)
    squares = np.square(true).sum(1) * np.square(stored).sum(1)
    return float((squares / np.square((true * stored).sum(1)) - 1).mean())


@cache
def errors() -> tuple[dict[int, float], dict[int, float]]:
    """E(b) for b = 0..6 and 8, of keys and of values: the cost of a coordinate of unit variance at b bits. D is its
    mean squared error.

    Values: D. Keys: D + D^2, which counts the error that all tokens share twice. A decoded key is on average 1 - D of
    the true one, and keys that are all too short flatten a softmax more than noise of that size would. Without D^2,
    plans of few bits leave groups of keys empty (reference model, 2 bits: 0.034 nats instead of 0.031).
    """
    values = distortions()
    return {b: d + d * d for b, d in values.items()}, values
