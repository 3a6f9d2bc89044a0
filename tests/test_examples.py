"""The programs in examples/ run and check themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT
from ranks import run_ranks

pytest.importorskip("torch")


def test_attend() -> None:
    out = subprocess.run([sys.executable, str(ROOT / "examples" / "attend.py")], capture_output=True, text=True,
                         check=True, cwd=ROOT).stdout  # fmt: skip
    assert "the bytes are the same: True" in out and "the output is the same: True" in out


def test_context_parallel() -> None:
    first, second = run_ranks(2, str(ROOT / "examples" / "context_parallel.py"), timeout=120)
    assert "2 ranks, the first with 1,536 of 3,000 tokens" in first and first.count("off a cache on one rank") == 3
    assert not second
