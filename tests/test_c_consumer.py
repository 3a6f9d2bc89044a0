"""The core as a C library, without Python: the programs of tests/c under ThreadSanitizer. In `make sanitize`, which has
compiled the library for it, they run under AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from c_library import BASE, CSRC, ROOT, clean_environment, objects, program, run

CC = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
PROGRAMS = ("consumer", "threads", "index")
SANITIZED = os.environ.get("TURBOQUANT_SANITIZED")  # the library that make sanitize has compiled
ASAN = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
TSAN = ["-fsanitize=thread"]

pytestmark = pytest.mark.skipif(CC is None, reason="there is no C compiler")
if not SANITIZED:
    pytestmark = [pytestmark, pytest.mark.slow]


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(kind of sanitizer, path of the program `consumer`). `threads` and `index` are in the same folder."""
    kind, flags = ("address", ASAN) if SANITIZED else ("thread", TSAN)
    folder = tmp_path_factory.mktemp("consumer")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    for step in ([CC, *BASE, *flags, str(probe), "-o", str(folder / "probe")], [str(folder / "probe")]):
        tried = subprocess.run(step, env=clean_environment(), capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no {kind} sanitizer here: {tried.stderr.strip()[:200]}")
    if SANITIZED:
        library, flags = [Path(SANITIZED)], [*flags, f"-Wl,-rpath,{Path(SANITIZED).parent}"]
    else:  # threads share data in csrc/core alone; compiling the kernels of one instruction set takes half a minute
        library = objects(CC, flags, folder, ("scalar", "avx2", "neon"))
    for name in PROGRAMS:
        program(CC, flags, ROOT / "tests" / "c" / f"{name}.c", library, folder / name)
    return kind, folder / "consumer"


def test_consumer(consumer: tuple[str, Path]) -> None:
    kind, program = consumer
    if kind == "thread":  # slow, and it cannot run a forked child that starts threads
        assert run(program, "default-isa", "no-fork", env=clean_environment()).stdout.endswith("\nok\n")
        return
    out = run(program, env=clean_environment()).stdout.splitlines()
    assert out[-1] == "ok"
    levels = [line.split(":")[0] for line in out[:-1]]
    assert levels[-1] == "scalar" and len(levels) == len(set(levels))
    assert len({line.split(":")[1] for line in out[:-1]}) == 1  # the same bytes on every instruction set
    forced = run(program, "default-isa", env=clean_environment(TURBOQUANT_ISA="scalar")).stdout.splitlines()
    assert forced == [out[-2], "ok"]


def test_index(consumer: tuple[str, Path]) -> None:
    """The same bytes and results on every instruction set; ThreadSanitizer, which is slow, runs one."""
    kind, program = consumer
    level = ["scalar"] if kind == "thread" else []
    *levels, last = run(program.parent / "index", *level, env=clean_environment()).stdout.splitlines()
    assert last == "ok" and levels and len({line.split(": ")[1] for line in levels}) == 1


def test_several_callers_at_once(consumer: tuple[str, Path]) -> None:
    """Callers share the thread pool: each gets its own right result, with no data race."""
    assert run(consumer[1].parent / "threads", env=clean_environment()).stdout == "ok\n"


def test_a_level_that_is_not_there_is_an_error(consumer: tuple[str, Path]) -> None:
    environment = clean_environment(TURBOQUANT_ISA="avx1024")
    result = subprocess.run([consumer[1], "default-isa"], env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "`TURBOQUANT_ISA[-1]` must be " in result.stderr and "scalar" in result.stderr


def test_the_header_stands_alone(tmp_path: Path) -> None:
    """Each header needs no other one before it, and compiles as C99 and as C++11."""
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", f"-I{CSRC / 'include'}"]
    for header in ("turboquant.h", "turboquant_schemes.h", "turboquant_index.h", "turboquant_cuda.h"):
        text = f"#include <{header}>\nint main(void) {{ return TQ_OK; }}\n"
        (tmp_path / "alone.c").write_text(text)
        run(CC, "-std=c99", *strict, tmp_path / "alone.c")
        if CXX:
            (tmp_path / "alone.cpp").write_text(text.replace("(void)", "()"))
            run(CXX, "-std=c++11", *strict, tmp_path / "alone.cpp")


def test_everything_declared_is_defined(consumer: tuple[str, Path]) -> None:
    """All functions of the headers are defined, and every global function of the library begins with tq_."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    headers = "".join(
        (CSRC / "include" / f"{name}.h").read_text()
        for name in ("turboquant", "turboquant_schemes", "turboquant_index")
    )
    declared = set(re.findall(r"\b(tq_\w+)\(", re.sub(r"/\*.*?\*/", "", headers, flags=re.S)))
    defined = set()
    for file in [SANITIZED] if SANITIZED else consumer[1].parent.glob("*.o"):
        lines = run("nm", "--defined-only", "--dynamic" if SANITIZED else "--extern-only", file).stdout.splitlines()
        defined |= {line.split()[-1] for line in lines if " T " in line}
    assert declared <= defined
    assert all(name.startswith("tq_") for name in defined), defined
