"""Runs the C consumer of tests/c under valgrind's memcheck, which must find no error and no leak.

`make valgrind` takes minutes. It runs the scalar and AVX2 kernels, because valgrind has no AVX-512. Valgrind's
allocator knows the exact size of each block that the consumer allocates.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from c_library import ROOT, clean_environment, objects, program, run

OPTIONS = ["--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite", "--quiet"]


def main() -> None:
    if not shutil.which("valgrind") or not shutil.which("gcc"):
        sys.exit("this needs valgrind and gcc")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        binary = program(
            "gcc", [], ROOT / "tests/c/consumer.c", objects("gcc", [], folder, ("scalar", "avx2")), folder / "c"
        )
        for level in ("scalar", "avx2"):
            environment = clean_environment(TURBOQUANT_ISA=level)
            out = run("valgrind", *OPTIONS, binary, "default-isa", "no-fork", env=environment).stdout
            assert out.endswith("\nok\n"), out
            print(f"{level}: no error, no leak")


if __name__ == "__main__":
    main()
