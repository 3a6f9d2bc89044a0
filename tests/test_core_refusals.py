"""turboquant._core: its error messages, what this binding alone refuses, and that calls leak nothing."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from binding_cases import (
    BATCH,
    DIM,
    HEADS,
    OPS,
    PAGES,
    PLAN,
    TOKENS,
    VECTORS,
    Call,
    f32,
    frozen,
    rows,
    sample,
    unaligned,
)
from refusals import OPERATIONS

from turboquant import _core

# One message of each kind in full; the table of refusals.py checks names and types only.
WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("append", dict(k=[1.0]), "`k` must be an array of float32, float16 or bfloat16, got list"),
    ("append", dict(k=np.zeros(3)), '`k` must be float32 or float16, or uint16 with dtype="bfloat16", got float64'),
    ("append", dict(lengths=np.zeros(3, ">i4")), "`lengths` must be an array of int32, got >i4"),
    ("append", dict(lengths=np.zeros((3, 1), np.int32)), "`lengths` must be of shape [3], got [3, 1]"),
    ("append", dict(plan={1: 2}), "`plan` must be a sequence of integers, the words of a turboquant.Plan, got dict"),
    ("append", dict(plan=(1.0, *PLAN[1:])), "`plan[0]` must be an integer, got float"),
    ("append", dict(plan=(4, *PLAN[1:])), "`plan[0]` must be format version 2, got 4"),
    ("append", dict(plan=(*PLAN[:19], 25, *PLAN[20:])), "`key_bits[0]` must be "),
    ("append", dict(v=rows(BATCH, HEADS, TOKENS, DIM)[:, :, ::-1]),
     "`v` must be an array of dense rows in ascending order, got other strides"),
    ("append", dict(block_table=np.zeros((3, 4), np.int32)[:, ::2]), "`block_table` must be C-contiguous, got "),
    ("append", dict(block_table=unaligned(np.zeros((3, 2), np.int32))),
     "`block_table` must be aligned to its elements, got one that is not"),
    ("append", dict(window_v=frozen(rows(BATCH, HEADS, 4, DIM))), "`window_v` must be writable, got a read-only array"),
    ("append", dict(threads=10**5000), "`threads` must be in -2147483648..2147483647, got a number of more than 64"),
    ("append", dict(lengths=np.array([5, 17, 71], np.int32)),
     "`lengths[2]` must be in 0..sinks + window + max_pages * page_tokens, got 71"),
    ("attend", dict(softmax_scale="x"), "`softmax_scale` must be a number, got str"),
    ("attend", dict(starts=np.array([0, 18, 0], np.int32)), "`starts[1]` must be in 0..lengths, got 18"),
    ("dequantize", dict(max_tokens=65), "`max_tokens` must be at most max_pages * page_tokens, got 65"),
    ("dot", dict(n=257), "`n` must be in 0..256, what the pages hold, got 257"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "says"), WORDS, ids=[says for *_, says in WORDS])
def test_words(op: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        sample(op).with_(**change)()
    assert str(caught.value).startswith(f"{op}: {says}"), str(caught.value)


@pytest.mark.parametrize("unseen", [dict(starts=np.array([0, 1, 34], np.int32)), dict(sliding_window=2)], ids=str)
def test_pages_that_nothing_reads_may_be_anything(unseen: dict[str, Any]) -> None:
    call = sample("attend").with_(**unseen)
    want = call()
    table = call.arguments["block_table"].copy()
    table[2, 0] = -1
    for got, one in zip(call.with_(block_table=table)(), want):
        np.testing.assert_array_equal(got, one)


def test_attend_refuses_to_write_into_pages() -> None:
    call = sample("attend")
    shape = call.arguments["q"].shape
    out = call.arguments["pages"].reshape(-1)[: 4 * np.prod(shape)].view(f32).reshape(shape)
    with pytest.raises(ValueError, match="attend: `out` must be apart from pages"):
        call.with_(out=out)()


@pytest.mark.parametrize("name", ["q", "sink_k", "sink_v", "window_k", "window_v", "fresh_k", "fresh_v"])
def test_attend_refuses_to_write_into_what_it_reads(name: str) -> None:
    call = sample("attend")
    q, array = call.arguments["q"], call.arguments[name]
    memory = np.concatenate([rows(q.size - 1), array.ravel()])  # the two share one number
    own = {"out": memory[: q.size].reshape(q.shape), name: memory[q.size - 1 :].reshape(array.shape)}
    before = memory.copy()
    with pytest.raises(ValueError, match=f"attend: `out` must be apart from {name}"):
        call.with_(**own)()
    np.testing.assert_array_equal(memory, before)


def test_attend_refuses_a_plan_without_values() -> None:
    call = sample("attend")
    pages = _core.new_pages(VECTORS, PAGES, HEADS)
    only_keys = dict.fromkeys(("sink_k", "sink_v", "window_k", "window_v", "fresh_k", "fresh_v"))
    with pytest.raises(ValueError, match="attend: `plan.*` must "):
        call.with_(plan=VECTORS, pages=pages, **only_keys)()


@pytest.mark.parametrize("name", ["sink_k", "sink_v", "window_k", "window_v"])
def test_append_refuses_overlap(name: str) -> None:
    call = sample("append")
    with pytest.raises(ValueError, match=f"append: `{name}` must be apart from k and v"):
        call.with_(k=call.arguments[name][:, :, :1], v=call.arguments[name][:, :, :1])()


@pytest.mark.parametrize("fresh", ["k", "v"])
def test_append_refuses_overlap_of_either(fresh: str) -> None:
    call = sample("append")
    with pytest.raises(ValueError, match="append: `sink_k` must be apart from k and v"):
        call.with_(k=rows(BATCH, HEADS, 1, DIM), v=rows(BATCH, HEADS, 1, DIM)).with_(
            **{fresh: call.arguments["sink_k"][:, :, :1]}
        )()


NEEDS_AN_ALLOCATOR_THAT_FAILS = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", "") and "return_null=1" not in os.environ.get("ASAN_OPTIONS", ""),
    reason="AddressSanitizer ends the process unless ASAN_OPTIONS has allocator_may_return_null=1",
)


def test_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="missing required argument 'k'"):
        _core.append(PLAN)
    with pytest.raises(TypeError, match="colour"):
        sample("attend").with_(colour=1)()
    with pytest.raises(TypeError):
        _core.isa(1)
    with pytest.raises(TypeError, match="positional"):
        _core.dot(VECTORS, rows(1, DIM), _core.new_pages(VECTORS, 1, 1), 1, None)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: _core.codebook(3, 64, 3), ValueError, "codebook: `law` must be 0 (normal), 1 (sphere) or 2 "),
        (lambda: _core.codebook(0, 64, 0), ValueError, "codebook: `bits` must be in 1..6, got 0"),
        (lambda: _core.codebook(0, 64, 9), ValueError, "codebook: `bits` must be in 1..6, got 9"),
        (lambda: _core.codebook(1, -8, 3), ValueError, "codebook: `head_dim` must be "),
        (lambda: _core.codebook("normal", 64, 3), TypeError, "codebook: `law` must be an integer, got str"),
        (lambda: _core.random(-1, 0, 0), ValueError, "random: `seed` must be in 0..2**64 - 1"),
        (lambda: _core.random(0, 0, 2**64), ValueError, "random: `block` must be in 0..2**64 - 1"),
        (lambda: _core.random(0, None, 0), TypeError, "random: `stream` must be an integer, got NoneType"),
        (lambda: _core.haar(0, 4104), ValueError, "haar: `head_dim` must be in 8..4096, got 4104"),
        (lambda: _core.haar(0, 12), ValueError, "haar: `head_dim` must be "),
        (lambda: _core.haar(-1, 8), ValueError, "haar: `seed` must be "),
        (lambda: _core.set_num_threads("two"), TypeError, "set_num_threads: `n` must be an integer, got str"),
        (lambda: _core.new_pages(PLAN, -1, 1), ValueError, "new_pages: `n_pages` must be in 0..2**63 - 1, got -1"),
        (lambda: _core.new_pages(PLAN, 2**62, 2), ValueError, "new_pages: `n_pages` must be small enough"),
        (lambda: _core.new_pages(PLAN, 1, 0), ValueError, "new_pages: `kv_heads` must be in 1..2147483647, got 0"),
        pytest.param(lambda: _core.new_pages(PLAN, 2**46, 1), MemoryError, "", marks=NEEDS_AN_ALLOCATOR_THAT_FAILS),
        (lambda: _core.kernel_name("divide", PLAN), ValueError, "kernel_name: `operation` must be rotate, append, "),
        (lambda: _core.kernel_name(b"rotate", PLAN), TypeError, "kernel_name: `operation` must be a str, got bytes"),
        (lambda: _core.kernel_name("\ud800", PLAN), UnicodeEncodeError, ""),
        (lambda: _core.set_isa(3), TypeError, "set_isa: `name` must be a str or None, got int"),
        (lambda: _core.set_isa("sse\u00e9"), RuntimeError, "set_isa: `name` must be one of: "),
        (lambda: _core.set_isa("scalar\0"), RuntimeError, "set_isa: `name` must be one of: "),
        (lambda: _core.set_num_threads(0), ValueError, "set_num_threads: `n` must be in 1..256, got 0"),
        (lambda: _core.record_bytes((2, 512, 32, 32, 1, *[0] * 14, 20, *[4] * 15, *[0] * 16)), ValueError,
         "`head_dim` must be at most 256 with the sphere codebook, got 512"),
        (lambda: _core.record_bytes(()), ValueError, "`len(plan)` must be 19 + 2 * "),
        (lambda: _core.record_bytes(PLAN[:-1]), ValueError, "`len(plan)` must be 19 + 2 * "),
        (lambda: _core.record_bytes((1, *PLAN[1:])), ValueError, "`plan[0]` must be format version 2, got 1"),
        (lambda: _core.record_bytes((*PLAN[:17], 4, *PLAN[18:])), ValueError, "`tries` must be 0, 3, 5 or 7, got 4"),
        (lambda: _core.record_bytes((*PLAN[:18], 2, *PLAN[19:])), ValueError, "`variance_term` must be 0 or 1, got 2"),
        (lambda: _core.record_bytes((*PLAN[:19], 25, *PLAN[20:])), ValueError, "`key_bits[0]` must be"),
        (lambda: _core.record_bytes((2, 12, *PLAN[2:])), ValueError, "`head_dim` must be a multiple"),
        (lambda: _core.status_message(2**31), ValueError, "status_message: `status` must be in "),
    ],
)  # fmt: skip
def test_refuses_elsewhere(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(says)


def test_an_unknown_isa_lists_the_levels() -> None:
    with pytest.raises(RuntimeError) as caught:
        _core.set_isa("sse9")
    levels = " ".join(_core.isa_available())
    assert str(caught.value) == f"set_isa: `name` must be one of: {levels}, got 'sse9'"
    assert _core.isa() in _core.isa_available()


# ---- leaks ----

# With malloc in pymalloc's place, tracemalloc counts every old block that a free list hands out again as a new one.
MEASURES_MEMORY = os.environ.get("PYTHONMALLOC") != "malloc"


def grown_in_100_rounds(run_all: Callable[[], None]) -> int:
    """Returns by how many bytes Python's memory grows, the least of up to three attempts. Threads that other tests left
    behind may allocate too, but a leak shows in every attempt."""
    attempts = []
    for _ in range(3):
        tracemalloc.start()
        try:
            for round_ in range(150):
                run_all()
                if round_ == 49:
                    gc.collect()
                    first = tracemalloc.get_traced_memory()[0]
            gc.collect()
            attempts.append(tracemalloc.get_traced_memory()[0] - first)
        finally:
            tracemalloc.stop()
        if attempts[-1] < 100 * 16:
            break
    return min(attempts)


@pytest.mark.parametrize("op", OPS)
def test_nothing_leaks(op: str) -> None:
    """Good and bad calls leave no reference and no memory behind."""
    make, faults = OPERATIONS[op]
    calls = [sample(op)]
    for _, _, fault in faults.values():
        arguments = make()
        calls.append(Call(op, arguments | fault(arguments)))

    def run_all() -> None:
        for call in calls:
            try:
                call()
            except (TypeError, ValueError):
                pass

    objects = [value for call in calls for value in call.arguments.values()]
    run_all()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in objects]
    if MEASURES_MEMORY:
        assert grown_in_100_rounds(run_all) < 100 * 16  # the smallest object has more than 16 bytes
    else:
        for _ in range(150):
            run_all()
    immortal = 2**20  # counts this large are of immortal objects
    after = [sys.getrefcount(thing) for thing in objects]
    changed = [(type(thing), a, b) for thing, a, b in zip(objects, before, after) if a < immortal and abs(a - b) > 100]
    assert not changed


def test_nothing_leaks_elsewhere() -> None:
    calls: list[Callable[[], object]] = [
        lambda: _core.codebook(1, 64, 3),
        lambda: _core.random(1, 2, 3),
        lambda: _core.haar(0, 16),
        lambda: _core.haar(0, 12),
        lambda: _core.plan_info(PLAN),
        lambda: _core.new_pages(PLAN, 3, 2),
        lambda: _core.isa_available(),
        lambda: _core.set_isa("no such level"),
        lambda: _core.kernel_name("attend", PLAN),
        lambda: _core.kernel_name("no such operation", PLAN),
    ]

    def run_all() -> None:
        for call in calls:
            try:
                call()
            except (ValueError, RuntimeError, MemoryError):
                pass

    run_all()
    if MEASURES_MEMORY:
        assert grown_in_100_rounds(run_all) < 100 * 16
    else:
        for _ in range(150):
            run_all()
