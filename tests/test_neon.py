"""The NEON kernels on a machine without NEON: tests/c/consumer.c and tests/c/index.c cross-compiled, under qemu-user.
They check attention, codes, refusals and the vector index on each level, and that all levels write the same bytes."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from c_library import ROOT, clean_environment, objects, program, run

CC, QEMU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="this machine has NEON: all tests run on it"),
    pytest.mark.skipif(CC is None, reason="there is no aarch64-linux-gnu-gcc (gcc-aarch64-linux-gnu)"),
    pytest.mark.skipif(QEMU is None, reason="there is no qemu-aarch64 (qemu-user)"),
]


def test_every_level_under_emulation(tmp_path: Path) -> None:
    library = objects(CC, ["-O2"], tmp_path, machine="aarch64")
    for name, options in (("consumer", ("all", "no-fork")), ("index", ())):
        made = program(CC, ["-static"], ROOT / "tests" / "c" / f"{name}.c", library, tmp_path / name)
        out = run(QEMU, made, *options, env=clean_environment()).stdout.splitlines()
        levels, sums = zip(*(line.split(": ") for line in out[:-1]))
        assert levels == ("neon_dot", "neon", "scalar") and len(set(sums)) == 1 and out[-1] == "ok"
