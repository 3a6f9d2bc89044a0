"""A process has one core: `_core` and the torch operators share its threads and its instruction set."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import forks
import pytest
import torch

from turboquant import Plan, _core, ops

PACKAGE = Path(_core.__file__).parent
LIBRARIES = [Path(_core.__file__).name, "_torch.so"]
PLAN = Plan(64, 4, 4).words

COUNT_THREADS = f"""
import os, torch
from turboquant import _core, ops
torch.set_num_threads(4)
k = torch.zeros(8, 8, 64, 64)
def pool(n):
    _core.set_num_threads(n)
    torch.ops.turboquant.quantize({PLAN}, k, k)
    return len(os.listdir("/proc/self/task"))
before = pool(1)
print(pool(3) - before)
pages = _core.new_pages({PLAN}, 8, 8)
table, lengths = torch.arange(8, dtype=torch.int32)[:, None].numpy(), torch.full((8,), 64, dtype=torch.int32).numpy()
_core.append({PLAN}, k.numpy(), k.numpy(), lengths, pages, table)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_process_maps_the_library_once() -> None:
    ops.pack(torch.zeros(1, 1, 4, 64), None, Plan(64, 4))
    maps = Path("/proc/self/maps").read_text()
    files = {line.split()[-1] for line in maps.splitlines() if "turboquant" in line.rpartition("/")[2]}
    assert {Path(file).resolve() for file in files} == {(PACKAGE / "libturboquant.so").resolve()}


@pytest.mark.parametrize("name", LIBRARIES)
def test_both_libraries_have_no_core_of_their_own(name: str) -> None:
    """dlsym looks in a library, then in what it needs: both find the same functions, those of libturboquant.so."""
    mine, shared = ctypes.CDLL(str(PACKAGE / name)), ctypes.CDLL(str(PACKAGE / "libturboquant.so"))
    for function in ("tq_num_threads", "tq_set_isa", "tq_append", "tq_index_search"):
        found = [ctypes.cast(getattr(library, function), ctypes.c_void_p).value for library in (mine, shared)]
        assert found[0] == found[1], function


def test_what_one_side_sets_the_other_sees() -> None:
    torch_side = ctypes.CDLL(str(PACKAGE / "_torch.so"))
    torch_side.tq_isa.restype = ctypes.c_char_p
    torch_side.tq_set_isa.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    threads, isa = _core.num_threads(), _core.isa()
    try:
        _core.set_num_threads(3)
        assert torch_side.tq_num_threads() == 3
        assert torch_side.tq_set_num_threads(5, None) == 0
        assert _core.num_threads() == 5
        for level in _core.isa_available():
            _core.set_isa(level)
            assert torch_side.tq_isa() == level.encode()
        for level in _core.isa_available():
            assert torch_side.tq_set_isa(level.encode(), None) == 0
            assert _core.isa() == level
    finally:
        _core.set_num_threads(threads)
        _core.set_isa(None)
    assert _core.isa() == isa


def test_operators_run_at_the_level_that_core_sets() -> None:
    """TURBOQUANT_ISA is invalid here, so operators work only because `_core.set_isa` reaches them too."""
    code = (
        "import torch\nfrom turboquant import _core, ops\nk = torch.zeros(1, 1, 4, 64)\n"
        f"call = lambda: torch.ops.turboquant.quantize({PLAN}, k, k)\n"
        "try:\n    call()\nexcept RuntimeError:\n    print('refused')\n"
        "_core.set_isa('scalar')\ncall()\nprint('scalar')"
    )
    done = forks.python(code, TURBOQUANT_ISA="sse9")
    assert done.stdout.split() == ["refused", "scalar"], done.stderr


def test_operators_and_core_share_one_pool() -> None:
    """Of three threads two belong to the pool, and `_core` uses the same two as the operators."""
    done = forks.python(COUNT_THREADS, TURBOQUANT_NUM_THREADS="1")
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_the_library_exports_what_the_headers_declare() -> None:
    shared, headers = ctypes.CDLL(str(PACKAGE / "libturboquant.so")), Path(__file__).parent.parent / "csrc/include"
    if not headers.exists():
        pytest.skip("there are no headers beside these tests")
    text = "".join(path.read_text() for path in headers.glob("*.h") if "cuda" not in path.name)
    names = re.findall(r"^TQ_API [^;(]*?(tq_\w+)\(", text, re.MULTILINE)
    assert len(names) > 20
    assert not [name for name in names if not hasattr(shared, name)]
    assert not hasattr(shared, "tq_parallel")
