"""benchmarks/chunks.py: its check of errors, on a CPU. The times need a GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
from conftest import ROOT

from turboquant.plan import Plan

pytest.importorskip("torch")

SHAPE = 1, 2, 4, 700, 64


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("chunks")


@pytest.mark.parametrize("term", [False, True])
@pytest.mark.parametrize("pairs, rank", [(0, None), (32, 4)])
def test_decoded_tokens_are_checked_against_float64(term, pairs, rank, chunks):
    plan = Plan(64, 3, 3, wave_pairs=pairs, metric=rank, variance_term=term)
    found = chunks.errors(SHAPE, plan, 40, "cpu")
    assert 0 < found["error_median"] < found["error_worst"] < 1e-2


@pytest.mark.parametrize("pairs, rank", [(0, None), (32, 4)])
def test_the_check_has_the_variance_term(pairs, rank, chunks, monkeypatch):
    """Without the term, the reference differs from the output by more than the bound."""
    plan = Plan(64, 2, 2, wave_pairs=pairs, metric=rank, variance_term=True)
    monkeypatch.setattr(chunks, "wide_queries", lambda q, *_: q)
    monkeypatch.setattr(chunks, "wide_keys", lambda k, *_: k)
    assert chunks.errors(SHAPE, plan, 40, "cpu")["error_worst"] > 1e-2
