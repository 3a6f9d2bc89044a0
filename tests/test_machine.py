"""Instruction sets, threads and forks: which of them a call uses, and that results do not depend on them."""

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import reference as ref
from cases import Case, make_case
from conftest import ODD_HEAD_DIMS
from core_calls import check, core_attend

from turboquant import _core

OPERATIONS = ("rotate", "append", "attend", "dequantize", "dot")
LEVELS = {"scalar", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_amx", "neon", "neon_dot"}


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = _core.num_threads()
    yield
    _core.set_num_threads(before)


# ---- instruction sets ----


def test_levels(isa: str) -> None:
    available = _core.isa_available()
    assert isa in available
    assert available[-1] == "scalar"  # it is complete, and defines the results
    assert set(available) <= LEVELS
    if "TURBOQUANT_ISA" not in os.environ:
        assert isa == available[0]


@pytest.mark.parametrize("head_dim", (*ODD_HEAD_DIMS, 128))
def test_attend_runs_the_level_in_use(head_dim: int, isa: str) -> None:
    """Attention uses the chosen instruction set at odd sizes too. It does not fall back to scalar."""
    available = _core.isa_available()
    borrowed = available[available.index(isa) :]  # other operations may run simpler ones, whose names they then have
    for bits in ref.WIDTHS:
        p = ref.plan(head_dim, bits, bits)
        assert _core.kernel_name("attend", p.words) == f"attend_{isa}"
        for op in OPERATIONS:
            name, _, level = _core.kernel_name(op, p.words).partition("_")
            assert name == op
            assert level in borrowed


@pytest.mark.usefixtures("restore_isa")
def test_levels_can_be_forced() -> None:
    p = ref.plan(96, 3, 3)
    for level in _core.isa_available():
        _core.set_isa(level)
        assert _core.isa() == level
        assert _core.kernel_name("attend", p.words) == f"attend_{level}"
    with pytest.raises(RuntimeError, match=r"scalar.*got 'sse9'"):
        _core.set_isa("sse9")
    assert _core.isa() == "scalar"  # a failed call changes nothing


@pytest.mark.usefixtures("restore_isa")
@pytest.mark.parametrize("head_dim", ODD_HEAD_DIMS)
def test_levels_agree(head_dim: int, rng: np.random.Generator) -> None:
    """Pages, rotations and decoded numbers are equal bit for bit on every instruction set. Attention is equal up to
    rounding."""
    p, results = ref.plan(head_dim, 3, 4), []
    case = make_case(rng, p, [150, 40], sinks=2, window=9)
    x = rng.standard_normal((1, 2, 150, head_dim)).astype(np.float32)
    table, length = np.array([[0, 1]], np.int32), np.array([150], np.int32)
    for level in _core.isa_available():
        _core.set_isa(level)
        pages = _core.new_pages(p.words, 2, 2)
        _core.append(p.words, x, x, length, pages, table)
        exact = [pages, _core.rotate(p.words, x), *_core.dequantize(p.words, pages, table, length, 150)]
        results.append((exact, _core.attend(**case.arguments)))
    for exact, (out, lse) in results[1:]:
        for got, want in zip(exact, results[0][0]):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_allclose(out, results[0][1][0], rtol=0, atol=4e-5 * abs(out).max())
        np.testing.assert_allclose(lse, results[0][1][1], rtol=0, atol=1e-4)


ROTATE = (
    "from turboquant import _core; print(_core.isa()); _core.rotate({words}, __import__('numpy').ones((1, 8), 'f4'))"
)


def in_a_process(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that imports the same turboquant."""
    here = Path(_core.__file__).parent.parent
    variables = {**os.environ, "PYTHONPATH": str(here), "PYTHONSAFEPATH": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False, timeout=300
    )


def rotate_in_a_process(level: str) -> subprocess.CompletedProcess[str]:
    return in_a_process(ROTATE.format(words=ref.plan(8, 3).words), TURBOQUANT_ISA=level)


def test_environment_forces_a_level() -> None:
    for level in _core.isa_available():
        done = rotate_in_a_process(level)
        assert (done.returncode, done.stdout.strip()) == (0, level)


@pytest.mark.parametrize("level", ["sse9", "AVX2", "avx2 scalar"])
def test_a_level_that_is_not_there_is_an_error(level: str) -> None:
    """There is no silent fallback: the first call that runs a kernel fails and lists the available instruction sets."""
    done = rotate_in_a_process(level)
    assert done.returncode == 1
    assert done.stdout.strip() == "none"
    assert "RuntimeError: rotate: `TURBOQUANT_ISA` must be" in done.stderr
    assert " ".join(_core.isa_available()) in done.stderr


# The core reports this error after the binding has allocated everything, so a leak would show.
EVERY_OPERATION = """
import sys
from binding_cases import OPS, PLAN, sample
from turboquant import _core
def said(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
for op in [op for op in OPS if op != "merge"]:
    good = sample(op)
    before = [sys.getrefcount(x) for x in good.arguments.values()]
    words = {said(good) for _ in range(250)}
    after = [sys.getrefcount(x) for x in good.arguments.values()]
    assert all(y - x < 200 for x, y in zip(before, after)), op
    print(*words, said(lambda: _core.kernel_name(op, PLAN)), sep="\\n")
"""


def test_every_operation_says_that_the_level_is_not_there_and_leaks_nothing() -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{EVERY_OPERATION}"
    done = in_a_process(program, TURBOQUANT_ISA="sse9")
    assert done.returncode == 0, done.stderr
    wants = f"`TURBOQUANT_ISA` must be one of: {' '.join(_core.isa_available())}, got sse9"
    ops = ["append", "attend", "dequantize", "dot", "rotate"]
    assert done.stdout.splitlines() == [f"{who}: {wants}" for op in ops for who in (op, "kernel_name")]


def test_no_level_is_the_default_and_set_isa_comes_first() -> None:
    best = _core.isa_available()[0]
    program = "from turboquant import _core; print(_core.isa()); _core.set_isa({0!r}); print(_core.isa())"
    done = in_a_process(program.format("scalar"), TURBOQUANT_ISA="")
    assert (done.returncode, done.stdout.split()) == (0, [best, "scalar"]), done.stderr
    done = in_a_process(program.format(best), TURBOQUANT_ISA="scalar")
    assert (done.returncode, done.stdout.split()) == (0, ["scalar", best]), done.stderr


def test_the_environment_counts_on_first_use() -> None:
    """Later changes of the variable are ignored: another thread may be in a call, and must not read it while it
    changes."""
    program = ROTATE.format(words=ref.plan(8, 3).words)
    program += "; import os; os.environ['TURBOQUANT_ISA'] = 'sse9'; print(_core.isa())"
    done = in_a_process(program, TURBOQUANT_ISA="scalar")
    assert (done.returncode, done.stdout.split()) == (0, ["scalar", "scalar"]), done.stderr


# ---- threads ----


THREADS_OF_A_CALL = """
import os, sys
import numpy as np
from turboquant import _core
from turboquant.plan import Plan
_core.set_num_threads(4)
threads, floats = int(sys.argv[1]), np.random.default_rng(0).standard_normal
if sys.argv[2] == "attend":
    words = Plan(64, 4, 4).words
    pages, table = _core.new_pages(words, 32, 8), np.arange(32, dtype=np.int32)[None]
    q = floats((1, 8, 16, 64)).astype("f4")
    call = lambda: _core.attend(words, q, pages, table, np.array([4096], np.int32), threads=threads)
else:
    words = Plan(64, 4).words
    pages, q = _core.new_pages(words, 64, 1), floats((8, 64)).astype("f4")
    call = lambda: _core.dot(words, q, pages, 64 * 128, threads=threads)
before = len(os.listdir("/proc/self/task"))
call()
print(len(os.listdir("/proc/self/task")) - before + 1)
"""


@pytest.mark.parametrize("op", ["attend", "dot"])
@pytest.mark.parametrize(("threads", "used"), [(0, 4), (1, 1), (3, 3), (99, 4)])
def test_threads_of_a_call(op: str, threads: int, used: int) -> None:
    done = in_a_process(f"import sys; sys.argv = ['', '{threads}', '{op}']\n{THREADS_OF_A_CALL}")
    assert (done.returncode, done.stdout.strip()) == (0, str(used)), done.stderr


def test_threads_from_the_environment() -> None:
    program = "from turboquant import _core; print(_core.num_threads())"
    for text, want in (("3", 3), ("1", 1), ("256", 256), ("", len(os.sched_getaffinity(0)))):
        assert int(in_a_process(program, TURBOQUANT_NUM_THREADS=text).stdout) == want


WITHOUT_A_NUMBER = """
from binding_cases import OPS, sample
from turboquant import _core
assert _core.num_threads() == 0 and _core.isa() != "none"
for op in OPS:
    try:
        sample(op)()
    except RuntimeError as error:
        print(op, error.argument, error.got, error)
_core.set_num_threads(2)
for op in OPS:
    sample(op)()
"""


@pytest.mark.parametrize("text", ["many", "3x", "0", "-1", "257", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused(text: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{WITHOUT_A_NUMBER}"
    done = in_a_process(program, TURBOQUANT_NUM_THREADS=text)
    assert done.returncode == 0, done.stderr
    wants = f"`TURBOQUANT_NUM_THREADS` must be an integer in 1..256, got {text}"
    ops = ["append", "attend", "dequantize", "dot", "rotate"]
    assert done.stdout.splitlines() == [f"{op} TURBOQUANT_NUM_THREADS None {op}: {wants}" for op in ops]


def test_info_says_which_variable_is_wrong() -> None:
    done = forks.python("from turboquant.cli import main; main(['info'])", TURBOQUANT_ISA="avx1024")
    wants = f"none: TURBOQUANT_ISA must be one of {', '.join(_core.isa_available())}, got 'avx1024'"
    assert wants in done.stdout, done.stderr
    done = forks.python("from turboquant.cli import main; main(['info'])", TURBOQUANT_NUM_THREADS="3x")
    assert "none: TURBOQUANT_NUM_THREADS must be an integer in 1..256, got '3x'" in done.stdout, done.stderr


def large_case(rng: np.random.Generator, lengths: list[int], kv_heads: int, **rest: Any) -> Case:
    """A case with enough work for several threads, at 2^18 products for each."""
    p = ref.plan(64, 3, 3, page_tokens=32)
    return make_case(rng, p, lengths, kv_heads=kv_heads, group=4, query_tokens=9, **rest)


@pytest.mark.usefixtures("restore_threads")
def test_number_of_threads_does_not_matter(rng: np.random.Generator) -> None:
    """Results agree for any number of threads. With more threads than tasks, sequences are split."""
    _core.set_num_threads(7)
    assert _core.num_threads() == 7
    for lengths, kv_heads in (([1800], 1), ([900, 10, 9, 333], 2)):
        case = large_case(rng, lengths, kv_heads, sinks=2, window=17, fresh=True)
        for threads in (0, 1, 2, 3, 5, 7, 100):
            check(case, threads=threads)


@pytest.mark.usefixtures("restore_threads")
def test_same_numbers_whatever_thread_comes_first(rng: np.random.Generator) -> None:
    _core.set_num_threads(4)
    case = large_case(rng, [900, 700], 1)
    first = core_attend(case)  # outputs start as NaN, so a call that returns before its threads are done shows
    for _ in range(50):
        for got, want in zip(core_attend(case), first):
            np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("restore_threads")
def test_calls_from_many_threads(rng: np.random.Generator) -> None:
    """Calls release the GIL and overlap, and each returns its own result."""
    _core.set_num_threads(3)
    cases = [large_case(rng, [300 + i], 2) for i in range(6)]
    wanted, wrong = [_core.attend(**case.arguments)[0] for case in cases], []

    def work(i: int) -> None:
        for _ in range(10):
            if not np.allclose(_core.attend(**cases[i].arguments)[0], wanted[i], rtol=0, atol=1e-5):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)


def long_call(op: str, rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of a call that takes about 10 ms and reads its tables until its end."""
    sequences, tokens, words = 256, 128, ref.plan(64, 4, 3).words
    k, v = rng.standard_normal((2, sequences, 1, tokens, 64)).astype(np.float32)
    rest = dict(plan=words, pages=_core.new_pages(words, 2 * sequences, 1), threads=1)
    rest["block_table"] = 2 * np.arange(sequences, dtype=np.int32)[:, None] + 1
    full = np.full(sequences, tokens, np.int32)
    _core.append(k=k, v=v, lengths=full, **rest)
    if op == "append":
        return rest | dict(k=v, v=k, lengths=full)
    if op == "attend":
        q = rng.standard_normal((sequences, 8, 2, 64)).astype(np.float32)
        return rest | dict(q=q, lengths=full, starts=np.full(sequences, 3, np.int32))
    return {name: rest[name] for name in ("plan", "pages", "block_table")} | dict(lengths=full, max_tokens=tokens)


@pytest.mark.parametrize(
    ("op", "table"),
    [(op, table) for op in ("append", "attend") for table in ("block_table", "lengths")]
    + [("attend", "starts"), ("dequantize", "block_table"), ("dequantize", "lengths")],
)
def test_tables_that_another_thread_rewrites(op: str, table: str, rng: np.random.Generator) -> None:
    """A call uses the tables that it has checked, even if another thread overwrites them. The values written are valid,
    so that a fault shows as a wrong result and not as a crash."""
    arguments = long_call(op, rng)
    numbers, pages = arguments[table], arguments["pages"]
    good, stored = numbers.copy(), pages.copy()

    def outcome() -> list[np.ndarray]:
        result = getattr(_core, op)(**arguments)
        return [pages.copy()] if result is None else list(result)

    want, go, interval = outcome(), threading.Semaphore(0), sys.getswitchinterval()

    def write() -> None:
        go.acquire()
        numbers.fill(0)

    for _ in range(3):
        writer = threading.Thread(target=write)
        writer.start()
        numbers[...], pages[...] = good, stored
        sys.setswitchinterval(100)
        go.release()  # the writer runs when the call releases the GIL, and not before
        try:
            got = outcome()
        finally:
            sys.setswitchinterval(interval)
        writer.join()
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(rng: np.random.Generator) -> None:
    _core.set_num_threads(3)
    case = large_case(rng, [300, 200], 2)
    want = _core.attend(**case.arguments)[0]
    assert len(os.listdir("/proc/self/task")) >= 3  # the pool is running now
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(_core.attend(**case.arguments)[0]))
    child.start()
    child.join(120)
    hung = child.is_alive()
    if hung:
        child.kill()
    assert not hung
    np.testing.assert_array_equal(queue.get(), want)
    np.testing.assert_array_equal(_core.attend(**case.arguments)[0], want)


# ---- statuses ----


def test_status_messages() -> None:
    known = [_core.status_message(status) for status in (0, 1, 2, 10, 11, 12, 20)]
    assert len(set(known)) == 7
    assert _core.status_message(99) == _core.status_message(-1)
    assert all(known)


def test_constants() -> None:
    assert _core.FORMAT_VERSION == ref.PLAN_VERSION == 2
    assert _core.__version__.count(".") == 2
