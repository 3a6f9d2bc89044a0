"""AMX without a CPU that has it: csrc/kernels/avx512_amx.c over emulated tiles (tests/c/amx_emulated.h)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from c_library import BASE, CSRC, ROOT, isa_flags, objects, program, run

from turboquant import _core

CC = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CC is None, reason="there is no C compiler"),
    pytest.mark.skipif("avx512_vnni" not in _core.isa_available(), reason="this CPU or build has no avx512_vnni"),
]


def test_products_are_those_of_vnni(tmp_path: Path) -> None:
    assert CC
    library = objects(CC, [], tmp_path, ["scalar"])
    emulated: dict[str, list[str | Path]] = {
        "avx512_vnni": [],
        "avx512_amx": ["-include", ROOT / "tests" / "c" / "amx_emulated.h"],
    }
    for unit, more in emulated.items():
        library.append(tmp_path / f"{unit}.o")
        source = CSRC / "kernels" / f"{unit}.c"
        run(CC, *BASE, f"-I{CSRC}", *isa_flags("x86_64")(unit), *more, "-c", source, "-o", library[-1])
    amx = program(CC, [f"-I{CSRC}"], ROOT / "tests" / "c" / "amx.c", library, tmp_path / "amx")
    assert run(amx).stdout == f"{8 * 8 * 6 * 2}\n"
