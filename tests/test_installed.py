"""The package installed from a wheel, on a machine without a compiler (make test-wheel)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import turboquant

pytestmark = pytest.mark.skipif(
    not os.environ.get("TURBOQUANT_WHEEL"), reason="TURBOQUANT_WHEEL names no wheel (make wheel test-wheel)"
)


def test_it_is_the_installed_one_and_there_is_no_compiler() -> None:
    assert not Path(turboquant.__file__).resolve().is_relative_to(ROOT / "turboquant")
    assert Path(turboquant.__file__).is_relative_to(sys.prefix)
    assert not [name for name in ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ninja") if shutil.which(name)]


def test_numpy_alone(rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 128)).astype(np.float32)
    quantizer = turboquant.Quantizer(dim=128, bits=4)
    codes = quantizer.quantize(x)
    assert codes.nbytes < x.nbytes / 7
    assert np.abs(quantizer.dequantize(codes) - x).mean() < 0.1


def test_attention() -> None:
    torch = pytest.importorskip("torch")
    from turboquant import ops

    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 300, 64)
    q = torch.randn(1, 4, 1, 64)
    got = ops.attend(q, ops.pack(k, v, bits=5))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99


def test_the_command() -> None:
    done = subprocess.run(["turboquant", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0 and "ok    torch operators  loaded" in done.stdout, done.stdout
    import turboquant_attention

    assert turboquant_attention.damage() == ("", False)
    script = Path(shutil.which("turboquant") or "").read_text()
    assert "turboquant_attention" in script  # which looks at the package before it imports it
