"""Compiles csrc/core and csrc/kernels and links them into test programs: those of tests/c and tests/fuzz."""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BASE = ["-std=c11", "-O1", "-g1", "-ffp-contract=off", "-fno-omit-frame-pointer", "-pthread", f"-I{CSRC / 'include'}"]


def isa_flags(machine: str) -> Any:
    """`isa_flags` of setup.py: the compiler flags of each kernel on `machine`, named as in platform.machine()."""
    nodes = []
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        match node:
            case ast.Assign() | ast.AnnAssign():
                text = ast.unparse(node).split("=")[0]
                wanted = "X86" in text or "ISA_UNITS" in text
            case ast.FunctionDef(name=name):
                wanted = name in ("isa_flags", "fail")
            case _:
                wanted = False
        if wanted:
            nodes.append(node)
    scope: dict[str, Any] = {"machine": lambda: machine, "re": re}
    exec(compile(ast.Module(nodes, []), "setup.py", "exec"), scope)
    return scope["isa_flags"]


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    return result


def clean_environment(**more: str) -> dict[str, str]:
    ours = ("TURBOQUANT_", "LD_PRELOAD", "ASAN_", "UBSAN_", "TSAN_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | more


def objects(
    compiler: str,
    flags: Sequence[str],
    folder: Path,
    levels: Sequence[str] = ("*",),
    kernel_flags: Sequence[str] | None = None,
    machine: str = platform.machine(),
) -> list[Path]:
    """Object files of the library, compiled with BASE and `flags` into `folder`.

    levels        glob patterns of the instruction sets whose kernels are compiled
    kernel_flags  flags of the kernels, instead of `flags`
    machine       the architecture that `compiler` compiles for
    """
    find_flags = isa_flags(machine)
    units = (unit for level in levels for unit in (level, f"{level}_scan"))  # kernels of attention and of the index
    kernels = {path: find_flags(path.stem) for unit in units for path in sorted(CSRC.glob(f"kernels/{unit}.c"))}
    kernels = {path: special for path, special in kernels.items() if special is not None}
    common = [*BASE, f"-I{CSRC}", *(f"-DTQ_HAVE_{path.stem.upper()}" for path in kernels)]
    sources = {path: [*common, *flags] for path in sorted(CSRC.glob("core/*.c"))}
    own = flags if kernel_flags is None else kernel_flags
    sources |= {path: [*common, *own, *special] for path, special in kernels.items()}
    made = [folder / f"{path.stem}.o" for path in sources]
    commands = [[compiler, *options, "-c", path, "-o", out] for (path, options), out in zip(sources.items(), made)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: run(*command), commands))
    return made


def program(compiler: str, flags: Sequence[str], source: Path, library: Sequence[Path], out: Path) -> Path:
    """Compiles `source` with BASE and `flags`, and links it with the objects of the library."""
    strict = ["-Wall", "-Wextra", "-Werror", f"-I{CSRC / 'include'}"]
    run(compiler, *BASE, *flags, *strict, source, *library, "-lm", "-o", out)
    return out
