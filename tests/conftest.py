"""What all tests share: seeded random numbers, lists of sizes, the instruction set in use, optional shared data."""

from __future__ import annotations

import ast
import atexit
import collections
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices here are small: more threads only wait for each other

import numpy as np
import pytest
from hypothesis import settings

# Use nothing that an earlier run cached. Inductor looks up compiled code by the graph alone, even where an operator's
# arguments have changed since, and moments are cached by the version of the package.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="turboquant-inductor-")
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ["TURBOQUANT_CACHE"] = ""
# The exception is the fixture `kept_profiles`: tests of commands and pages all use the demo's model, which is measured
# once per run instead of once per test. The parallel workers of a run inherit the name of the folder.
if "TURBOQUANT_TEST_PROFILES" not in os.environ:
    os.environ["TURBOQUANT_TEST_PROFILES"] = tempfile.mkdtemp(prefix="turboquant-profiles-")
    atexit.register(shutil.rmtree, os.environ["TURBOQUANT_TEST_PROFILES"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("TURBOQUANT_SHARED", ROOT.parent / "shared"))

REAL_MODELS = Path(os.environ.get("TURBOQUANT_REAL_MODELS", ROOT / "build" / "real-models"))

ALL_HEAD_DIMS = tuple(range(8, 257, 8))
ODD_HEAD_DIMS = (24, 40, 80, 96, 200)  # real models have them; no kernel may lose speed or correctness there
HEAD_DIMS = (8, 64, 80, 128, 256)
WIDE_HEAD_DIMS = (264, 384, 512)  # tiles of 16 channels and the sphere codebook end at 256

# By default every run has the same examples. `make soak` uses "explore", with a seed that it prints.
settings.register_profile("turboquant", deadline=None, max_examples=40, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=400, derandomize=False, database=None)
settings.load_profile("turboquant")


MANY_CASES = 16

OPTIONAL = frozenset({"torch", "transformers", "safetensors"})
ABSENT = {name for name in OPTIONAL if importlib.util.find_spec(name) is None}


@functools.cache
def imported_on_loading(module: Path) -> frozenset[str]:
    """The packages that a module of the tests imports at its top level, and those that the helpers it imports do."""
    names: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    helpers = (module.parent / f"{name}.py" for name in names)
    return frozenset(names).union(*(imported_on_loading(helper) for helper in helpers if helper.exists()))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the modules that import a package which is not installed: the core is also tested without torch."""
    if ABSENT and collection_path.match("test_*.py"):
        return True if imported_on_loading(collection_path) & ABSENT else None
    return None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks about two thirds of a test with more than MANY_CASES cases as `grid`, which `make test` leaves out."""
    cases = collections.Counter(item.nodeid.partition("[")[0] for item in items)
    for item in items:
        if cases[item.nodeid.partition("[")[0]] > MANY_CASES and zlib.crc32(item.nodeid.encode()) % 3:
            item.add_marker(pytest.mark.grid)


def pytest_collection_finish() -> None:
    """Calls a vector function of MKL on one thread before any test does. These functions detect the CPU on first use,
    and if two threads do so at once, one may get a cosine that is wrong by 1.5e-4. A model's first forward in a process
    would then differ from later ones."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.ones(1).cos()


@pytest.fixture
def kept_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what is measured of a model for all tests of this run that have this fixture."""
    monkeypatch.setenv("TURBOQUANT_CACHE", os.environ["TURBOQUANT_TEST_PROFILES"])


LEVELS = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_amx", "neon", "neon_dot")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an instruction set that this machine and build have; after the test the usual one is in use again."""
    from turboquant import _core

    if request.param not in _core.isa_available():
        pytest.skip(f"this CPU or build has no {request.param}")
    yield request.param
    _core.set_isa(None)


def pytest_report_header() -> str | list[str]:
    try:
        from turboquant import _core
    except ImportError as error:
        return f"turboquant._core: {error}"
    isa = f"turboquant isa: {_core.isa()} of {', '.join(_core.isa_available())}; threads: {_core.num_threads()}"
    return [isa, *(f"test modules that import {name} are left out: it is not installed" for name in sorted(ABSENT))]


def random_numbers(name: str) -> np.random.Generator:
    """A generator seeded by `name` and by TURBOQUANT_TEST_SEED, if that is set. A failing test shows the seed."""
    seed = [zlib.crc32(name.encode()), int(os.environ.get("TURBOQUANT_TEST_SEED", "0"))]
    print(f"{name}: np.random.default_rng({seed})")  # pytest shows it if the test fails
    return np.random.default_rng(seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the id of the test."""
    return random_numbers(request.node.nodeid)


@pytest.fixture(scope="session")
def isa() -> str:
    """The instruction set in use. `make test-levels` runs the suite once for each, with TURBOQUANT_ISA set."""
    from turboquant import _core

    level = _core.isa()
    assert level == os.environ.get("TURBOQUANT_ISA", level)
    return level


@pytest.fixture
def restore_isa() -> Iterator[None]:
    """Restores the default instruction set after a test that forces another."""
    from turboquant import _core

    yield
    _core.set_isa(None)


def shared_file(name: str) -> Path:
    """A file of the shared data, such as "data/sift5k.tsv"; the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not there: set TURBOQUANT_SHARED to the folder that holds it")
    return path


def real_model(name: str) -> Path:
    """The folder of smollm2 or gemma3, made by `make real-models`; the test is skipped where it is absent."""
    path = REAL_MODELS / name
    if not path.exists():
        pytest.skip(f"{name} is not there: make real-models, or set TURBOQUANT_REAL_MODELS to the folder that holds it")
    return path
