"""benchmarks/paired.py: means, differences and their errors from the divergences of tokens."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip("torch")


@pytest.fixture
def paired(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("paired")


def test_specs_are_compared_with_the_last_one(paired, rng):
    """Token 7 has all of the excess of `other` over `base` but for a constant, which is left without that token."""
    ids = rng.integers(0, 5, (2, 64))
    ids[:, ::8] = 7
    base = rng.gamma(1.0, 0.01, ids.shape).astype(np.float32)
    other = base + np.float32(0.001) + np.where(ids == 7, np.float32(1), np.float32(0))
    worst, rows = paired.compared({"other": other, "base": base}, ids, 16)
    assert worst == 7 and list(rows) == ["other", "base"]
    assert rows["base"]["ratio"] == 1 and rows["base"]["difference"] == rows["base"]["standard_error"] == 0
    assert rows["base"]["kl_divergence"] == pytest.approx(base.mean(), rel=1e-3)
    assert rows["other"]["difference"] == pytest.approx(0.126, rel=1e-3)
    assert rows["other"]["difference_without"] == pytest.approx(0.001, rel=1e-3)
    assert rows["other"]["standard_error"] < 1e-6  # each block of 16 has two of them
    assert rows["other"]["share_of_worst_token"] == pytest.approx(other[ids == 7].sum() / other.sum(), rel=1e-3)
    blocks = rng.permutation(ids.ravel()).reshape(ids.shape)
    one = np.where(blocks == 7, np.float32(1), np.float32(0))
    _, rows = paired.compared({"one": one, "none": np.zeros_like(one) + np.float32(1e-9)}, blocks, 16)
    spread = one.reshape(-1, 16).mean(1).std(ddof=1) / 8**0.5
    assert rows["one"]["standard_error"] == pytest.approx(spread, rel=1e-3)


def test_names_of_specs(paired):
    assert paired.spec_of("compact, plain").settled().tries == 0 and paired.spec_of("compact, plain").uniform
    assert paired.spec_of("compact, searched").settled().tries == 3 and not paired.spec_of("compact").uniform
    with pytest.raises(SystemExit, match="`--specs` must have names such as .*, got 'compact, plane'"):
        paired.spec_of("compact, plane")
