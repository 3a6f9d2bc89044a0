"""Calls of the core that do what tests/reference.py does, and shapes and tolerances for tests of attention."""

from __future__ import annotations

import numpy as np
import reference as ref
from cases import Case, keywords

from turboquant import _core

# (largest error of outputs relative to the largest output, largest error of the log-sum-exp). fp16 and bf16 outputs are
# rounded (2^-11, 2^-8), and their queries and weights keep 15 bits.
TOLERANCE = {"float32": (2e-5, 1e-4), "float16": (2**-11 + 1e-4, 2e-3), "bfloat16": (2**-8 + 1e-4, 2e-3)}
SHAPES = {  # the name is the test's id
    "one token": dict(lengths=[1]),
    "empty beside full page": dict(lengths=[0, 128]),
    "tile -1, tile, tile +1": dict(lengths=[31, 32, 33]),
    "page -1, page, page +1": dict(lengths=[127, 128, 129]),
    "several pages, one head each": dict(lengths=[300, 517], group=1, kv_heads=3),
    "many query heads": dict(lengths=[200], group=8, kv_heads=1),
    "more rows than a chunk": dict(lengths=[150], group=5, query_tokens=14),
    "left padding up to the last token": dict(lengths=[64], starts=[63]),
    "starts inside tiles and pages": dict(lengths=[300, 300, 40], starts=[130, 33, 0]),
    "everything masked": dict(lengths=[64], starts=[64]),
    "all empty": dict(lengths=[0, 0]),
    "sinks alone": dict(lengths=[3, 4, 5], sinks=4),
    "window alone": dict(lengths=[6, 7, 8, 40], window=7),
    "sinks, pages and window": dict(lengths=[3, 5, 45, 200], sinks=4, window=40),
    "start inside the sinks": dict(lengths=[90], starts=[2], sinks=4, window=16),
    "start behind all pages": dict(lengths=[90], starts=[80], sinks=4, window=16),
    "several queries, packed": dict(lengths=[150, 6, 3], query_tokens=6),
    "several queries, sinks": dict(lengths=[150, 9, 2], query_tokens=6, sinks=5),
    "fresh": dict(lengths=[200, 20, 9, 3], query_tokens=9, sinks=2, window=16, fresh=True),
    "fresh, more than the window": dict(lengths=[100, 41], query_tokens=40, sinks=3, window=8, fresh=True),
    "fresh, all of it": dict(lengths=[50, 17], query_tokens=50, sinks=3, window=8, fresh=True),
    "fresh, one token": dict(lengths=[70, 1], query_tokens=1, window=8, fresh=True),
    "fresh, no window": dict(lengths=[70, 2], query_tokens=4, sinks=3, fresh=True),
    "fresh with starts": dict(lengths=[100, 30], starts=[50, 25], query_tokens=7, sinks=2, window=10, fresh=True),
    "sliding": dict(lengths=[300, 50, 10], sliding_window=37),
    "sliding, one token": dict(lengths=[300, 1], sliding_window=1),
    "sliding inside the window": dict(lengths=[300, 20], sliding_window=10, sinks=4, window=32),
    "sliding over sinks, pages, window": dict(lengths=[60, 300], sliding_window=57, sinks=4, window=20),
    "sliding, several queries": dict(lengths=[300, 12], sliding_window=33, query_tokens=12),
    "sliding, fresh, starts": dict(
        lengths=[300, 31], starts=[270, 3], sliding_window=50, query_tokens=20, sinks=2, window=30, fresh=True
    ),
    "not causal": dict(lengths=[150, 20], query_tokens=5, causal=False),
    "not causal, all parts": dict(
        lengths=[150, 20, 0], starts=[7, 0, 0], query_tokens=5, causal=False, sinks=3, window=16
    ),
    "more queries than tokens, not causal": dict(lengths=[3], query_tokens=9, causal=False),
    "softcap": dict(lengths=[200, 40], sinks=2, window=16, softcap=5.0),
    "softcap far above all logits": dict(lengths=[200, 40], sinks=2, window=16, softcap=1e6),
    "softcap, fresh": dict(lengths=[200, 40], query_tokens=5, window=16, fresh=True, softcap=2.0),
    "scale of its own": dict(lengths=[100], softmax_scale=0.4, spread=1.0),
    "scale 0": dict(lengths=[100, 7], softmax_scale=0.0),
    "negative scale": dict(lengths=[100, 7], softmax_scale=-0.2),
    "sharp": dict(lengths=[400], spread=30.0),
    "flat": dict(lengths=[400], spread=0.0),
}


def core_attend(case: Case, **rest) -> tuple[np.ndarray, np.ndarray]:
    """Runs `_core.attend` into an output filled with NaN. Returns the output as float32, and the log-sum-exp."""
    out = ref.narrow(np.full(case.query.q.shape, np.nan, np.float32), case.dtype)
    got, lse = _core.attend(**case.arguments, out=out, **rest)
    assert got is out
    assert lse.dtype == np.float32
    return ref.widen(got), lse


def check(case: Case, **rest) -> None:
    """Compares the core with the reference in float64."""
    error, lse_error = TOLERANCE[case.dtype]
    out, lse = core_attend(case, **rest)
    want, want_lse = ref.attend(case.plan, case.cache, case.query)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    assert (out[~seen] == 0).all()
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-5, atol=lse_error)
    assert abs(out - want).max(initial=0) <= error * abs(want).max(initial=0)


PLANS = {
    "512 channels, mixed": ref.plan(512, (6, 0, 3, 1, 2, 8, 4, 5) * 2, (0, 4, 2, 5, 0, 3, 8, 1) * 2),
    "512 channels, dense": ref.plan(512, 3, 3, rotation=ref.DENSE),
    "keys 1, values 5": ref.plan(64, 1, 5),
    "mixed": ref.plan(160, (5, 0, 3, 1, 2), (0, 4, 2, 5, 0)),
    "mixed with 6 and 8 bits": ref.plan(160, (6, 0, 8, 1, 6), (8, 4, 0, 6, 8)),
    "mixed, dense": ref.plan(96, (4, 2, 0), (3, 0, 1), rotation=ref.DENSE),
    "one group of many": ref.plan(256, (0, 0, 0, 0, 0, 0, 0, 3), (4, 0, 0, 0, 0, 0, 0, 0)),
    "last group is short": ref.plan(40, (0, 5), (3, 5)),
    "dense": ref.plan(80, 3, 3, rotation=ref.DENSE),
    "not rotated": ref.plan(48, 4, 4, rotation=ref.NONE),
    "sphere, norm": ref.plan(64, 3, 3, codebook=ref.SPHERE, scale=ref.NORM),
    "small pages": ref.plan(64, 3, 2, page_tokens=32),
    "middling pages": ref.plan(64, 3, 2, page_tokens=96),
    "groups of 16": ref.plan(64, (8, 4, 2, 1), (5, 3, 0, 8), group=16),
    "groups of 16, dense": ref.plan(80, (5, 4, 0, 1, 3), (0, 3, 0, 4, 2), group=16, rotation=ref.DENSE),
    "variance term, tries": ref.plan(80, 2, 3, tries=3, variance_term=True),
    "variance term, 5 bits": ref.plan(512, 5, 2, variance_term=True),
    "variance term, 8 bits, one channel tile": ref.plan(24, 8, 2, tries=7, variance_term=True),
    "variance term, dense, small pages": ref.plan(96, 1, 4, rotation=ref.DENSE, page_tokens=32, variance_term=True),
    "variance term, groups of 16": ref.plan(48, 3, (3, 0, 4), tries=5, group=16, variance_term=True),
    "one group of 16": ref.plan(256, (0,) * 15 + (3,), (4,) + (0,) * 15, group=16),
}


def core_append(p, c, k, v, lengths, key, value, dtype="float32", **rest) -> None:
    """Does what `reference.append` does, with the core."""
    transform = keywords(key, value if v is not None else None)
    size = np.array(lengths, np.int32)
    _core.append(p.words, k, v, size, c.pages, c.block_table, **c.arrays(), **transform, dtype=dtype, **rest)
