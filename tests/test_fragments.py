"""The look-ups of CUDA attention give every code's level. No GPU is needed: csrc/cuda/tile/fragments.cuh is compiled
for the host with an emulation of prmt (tests/cuda/fragments.cpp)."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from conftest import ROOT

import turboquant

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
LIBRARY = Path(turboquant.__file__).parent / "libturboquant.so"
ONE_PRODUCT, TWO_PRODUCTS, EXACTLY = range(3)

pytestmark = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("fragments") / "fragments.so"
    folders = [f"-I{ROOT / folder}" for folder in ("tests/cuda/emulated", "csrc", "csrc/include")]  # the first one wins
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *folders]
    flags += ["-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    sources = [str(ROOT / "tests/cuda/fragments.cpp"), str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}"]
    subprocess.run([str(CXX), *flags, *sources, "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize(
    "bits, way",
    [
        *((bits, ONE_PRODUCT) for bits in (3, 4, 5, 6, 8)),
        *((bits, TWO_PRODUCTS) for bits in (4, 5)),
        *((bits, EXACTLY) for bits in (4, 5, 6)),
    ],
)
def test_every_code_becomes_its_level(library: ctypes.CDLL, bits: int, way: int, multiply: bool) -> None:
    rng = np.random.default_rng(bits)
    for _ in range(4):  # 4,096 codes: every code is met in every row and column parity
        codes = rng.integers(0, 2**bits, (32, 32))
        string = np.zeros(32 * 32 * bits, np.uint8)
        for k in range(bits):
            string[ref.tile_places(bits)[:, :, k]] = codes >> k & 1
        words = np.packbits(string, bitorder="little").view("<u4")
        words = np.append(words, np.uint32(0))  # for reads that start two bytes into a word
        got = np.zeros((8, 4, 4, 8), np.int32)  # g, t, r, n
        pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (words, got))
        library.fragments(bits, way, multiply, *pointers)
        g, t, r, n = np.indices(got.shape)
        levels = ref.codebook(ref.NORMAL, 0, bits).levels if bits <= 6 else np.arange(-128, 128)
        want = levels[codes[g + 8 * r, np.where(n < 4, 4 * t + n, 16 + 4 * t + n - 4)]]
        np.testing.assert_array_equal(got, want)
