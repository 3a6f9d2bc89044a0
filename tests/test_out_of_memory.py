"""Runs tests/out_of_memory.py with a preloaded library that makes torch's allocations fail."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import models  # noqa: F401  skips without torch and transformers
import pytest
from c_library import ROOT, clean_environment, run

CC = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")


@pytest.mark.slow
@pytest.mark.skipif(CC is None, reason="there is no C compiler")
def test_every_tensor_may_be_missing(tmp_path: Path) -> None:
    library = tmp_path / "no_memory.so"
    run(CC, "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", ROOT / "tests/c/no_memory.c", "-o", library)
    environment = clean_environment(LD_PRELOAD=str(library))
    said = run(sys.executable, ROOT / "tests" / "out_of_memory.py", env=environment).stdout
    seen = {what: int(n.split(",")[0]) for what, _, n in (line.rpartition(": ") for line in said.splitlines())}
    assert seen["append, plain"] >= 1  # workspace
    assert seen["attend, plain"] >= 3  # workspace, out, lse
    assert min(seen.values()) >= 1 and len(seen) >= 21 + 9 + 2
