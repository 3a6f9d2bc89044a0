"""Runs the fuzzers: python tests/fuzz/run.py --seconds 600 (make fuzz), or less.

    calls        csrc: append, attend and dequantize, hostile sizes and tables   libFuzzer, ASan and UBSan; needs clang
    cache_file   Python: `TurboQuantCache.load`, checksums made to fit           mutations of whole files; no clang
    index_file   Python: `Index.load`, checksums made to fit                      the same; no torch

Each gets so many seconds, and says how many inputs it ran. Those in C run one after the other, those in Python beside
them. A crash ends the run: in C the input is in build/fuzz, in Python the seed and the input's number are printed.
`calls` begins with the corpus in tests/fuzz/corpus; what it finds is not written back to it.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from c_library import ROOT, clean_environment, objects, program

FOLDER = ROOT / "build" / "fuzz"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
IN_C, IN_PYTHON = ("calls",), ("cache_file", "index_file")


def build(compiler: str) -> dict[str, Path]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Kernels have no coverage and no UBSan, with which clang takes a quarter of an hour for each level.
    flags = ["-fsanitize=fuzzer-no-link", *SANITIZERS]
    library = objects(compiler, flags, FOLDER, ("scalar", "avx2"), ["-fsanitize=address", "-Wno-pass-failed"])
    flags = ["-fsanitize=fuzzer", *SANITIZERS]
    source = ROOT / "tests" / "fuzz"
    return {name: program(compiler, flags, source / f"{name}.c", library, FOLDER / name) for name in IN_C}


def run_in_c(name: str, binary: Path, seconds: int, seed: int) -> str:
    """Returns how many inputs ran, and how many edges of the core's control flow they took. Raises RuntimeError with
    the sanitizer's words if one crashed."""
    found = FOLDER / f"{name}.corpus"
    found.mkdir(exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        "-print_final_stats=1",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-max_len=2048",
    ]
    command = [binary, found, ROOT / "tests" / "fuzz" / "corpus" / name, *options, f"-artifact_prefix={FOLDER}/{name}-"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=clean_environment())
    if done.returncode:
        raise RuntimeError(f"{name} found something:\n{done.stderr[-6000:]}")
    inputs, edges = (int(re.search(what, done.stderr)[1]) for what in (r"executed_units: (\d+)", r"\((\d+) inline"))
    covered = int(re.findall(r"cov: (\d+)", done.stderr)[-1])
    return f"{inputs:,} inputs, {covered:,} of {edges:,} edges"


def run_in_python(name: str, seconds: int) -> str:
    fuzzer = importlib.import_module(f"fuzz.{name}_fuzzer")
    return f"{fuzzer.fuzz(seconds):,} inputs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="for each fuzzer")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzers in C; 0: another one each time")
    parser.add_argument("--compiler", default=shutil.which("clang"), help="a clang with libFuzzer")
    parser.add_argument("only", nargs="*", choices=[*IN_C, *IN_PYTHON, []], help="these alone")
    given = parser.parse_args()
    names = given.only or [*IN_C, *IN_PYTHON]
    binaries = {}
    if set(names) & set(IN_C):
        if not given.compiler:
            sys.exit("the fuzzers in C need clang and its libFuzzer: apt install clang libclang-rt-14-dev")
        binaries = build(given.compiler)
    with ThreadPoolExecutor(max_workers=1) as beside:  # those in C are processes of their own
        runs = {
            name: beside.submit(run_in_c, name, binaries[name], given.seconds, given.seed)
            for name in names
            if name in binaries
        }
        for name in names:
            if name not in binaries:
                print(f"{name}: {run_in_python(name, given.seconds)} in {given.seconds} s, none crashed", flush=True)
        for name, run in runs.items():
            print(f"{name}: {run.result()} in {given.seconds} s, none crashed", flush=True)


if __name__ == "__main__":
    main()
