"""The kernels of CHUNK (csrc/cuda/attend/chunk) without a GPU. Their source is compiled for a GPU that the host
simulates (tests/cuda/simulated). It runs the cases of tests/cuda/chunk_harness.cu, which compares with float64
attention over what the core decodes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import turboquant

ROOT = Path(__file__).parents[1]
CXX = os.environ.get("CXX") or shutil.which("g++")
LIBRARY = Path(turboquant.__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CXX is None, reason="there is no g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulated GPU changes stacks in x86-64 assembly"),
]

# Each case with the number of simulated multiprocessors, in some cases more than there are pages, in others fewer.
CASES = {
    "33 query tokens": 5,
    "129 packed tokens": 9,
    "dim 96, bits 4/3": 5,
    "dim 64, bits 5312/3": 7,
    "ragged queries, bf16, wave, metric 5": 5,
    "soft-cap and variance term, wave, metric 1": 5,
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunk")
    (folder / "real").symlink_to(ROOT / "csrc/cuda/device")  # which the simulated headers include
    folders = [ROOT / "tests/cuda/simulated", folder, ROOT / "csrc/include", ROOT / "csrc", ROOT / "tests/cuda"]
    command = [
        str(CXX),
        "-std=c++17",
        "-O2",
        *(f"-I{x}" for x in folders),
        str(ROOT / "tests/cuda/chunk_simulated.cpp"),
    ]
    command += [str(LIBRARY / "libturboquant.so"), f"-Wl,-rpath,{LIBRARY}", "-lpthread", "-o", str(folder / "harness")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "harness"


@pytest.mark.parametrize("case, processors", CASES.items(), ids=list(CASES))
def test_a_case(case: str, processors: int, harness: Path) -> None:
    environment = os.environ | {"TQ_SIMULATED_PROCESSORS": str(processors)}
    done = subprocess.run([harness, "check", case], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("0 of ")
