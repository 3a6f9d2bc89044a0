"""Each memory allocation of a call fails in turn: the call raises MemoryError and changes nothing.

`_testcapi.set_nomemory` makes the n-th allocation of the interpreter's allocators fail. The binding takes its workspace
and its objects from them; the C core itself allocates nothing.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from refusals import OPERATIONS, snapshot

from turboquant import _core

_testcapi = pytest.importorskip("_testcapi", reason="this Python was built without its test modules")


@pytest.fixture(autouse=True)
def child(request: pytest.FixtureRequest) -> None:
    """Runs each test in a forked process, where no other thread can make the n-th allocation."""
    test = request.function

    def forked(**arguments: Any) -> None:
        if not (pid := os.fork()):
            try:
                test(**arguments)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    request.node.obj = forked


def failing(n: int, call: Callable[[], Any]) -> bool:
    """Whether `call` ended in MemoryError when the n-th allocation from here on failed."""
    _testcapi.set_nomemory(n, n + 1)
    try:
        call()
    except MemoryError:
        return True
    finally:
        _testcapi.remove_mem_hooks()
    return False


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_allocation_of_a_call_may_fail(op: str) -> None:
    arguments = OPERATIONS[op][0]()
    function, before, failed = getattr(_core, op), snapshot(arguments), 0
    for n in range(200):
        if failing(n, lambda: function(**arguments)):
            failed += 1
            assert snapshot(arguments) == before, n
        else:
            before = snapshot(arguments)  # the call succeeded and wrote its results
    assert failed >= 2
    function(**OPERATIONS[op][0]())
