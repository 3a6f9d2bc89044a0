"""turboquant._core: unusual arguments that it accepts, arguments that run code while they are read, the GIL, threads.

Refusals are in test_core_refusals.py. The tests that use reference.py check whether the numbers are right.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from binding_cases import BATCH, DENSE, DIM, HEADS, OPS, PLAN, VECTORS, f32, rows, sample, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st

from turboquant import Index, _core
from turboquant.plan import Plan, Side


@pytest.mark.parametrize("op", OPS)
def test_samples_work(op: str) -> None:
    sample(op)()


# ---- what is accepted ----


def test_new_pages() -> None:
    for n_pages in (0, 1, 3):
        pages = _core.new_pages(PLAN, n_pages, HEADS)
        assert pages.shape == (n_pages, HEADS, _core.record_bytes(PLAN))
        assert pages.dtype == np.uint8 and pages.flags.c_contiguous and pages.flags.writeable
        assert pages.ctypes.data % 64 == 0 and not pages.any()
        pages.fill(255)  # all of it may be written


def test_plan_info_adds_up() -> None:
    plan = Plan(80, Side((5, 0, 2), "none"), (1, 3, 0), codebook="sphere", scale="norm", seed=2**63 - 1).words
    info = _core.plan_info(plan)
    assert info["record_bytes"] == _core.record_bytes(plan) == 128 * 7 * 4 + 128 * 4 * 4 + 2 * 2 * 128
    assert info["key_bits"] == (5, 0, 2) and info["value_bits"] == (1, 3, 0)
    assert info["key_tile_offsets"] == (0, 640, 640) and info["value_tile_offsets"] == (0, 128, 512)
    assert (info["key_tile_bytes"], info["value_tile_bytes"]) == (896, 512)
    assert (info["key_coded_channels"], info["value_coded_channels"]) == (48, 64)
    assert (info["key_codes_offset"], info["value_codes_offset"]) == (0, 3584)
    assert (info["key_scales_offset"], info["value_scales_offset"]) == (5632, 5888)
    common = [info[name] for name in ("head_dim", "page_tokens", "group_channels", "codebook", "scale", "seed")]
    assert plan == (2, *common, *[0] * 12, 16 + 5, 0, 2, 16 + 1, 3, 0) and info["rotation"] == 0


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda plan: [np.int64(word) for word in plan]])
def test_a_plan_is_any_sequence(make: Callable[[Any], Any]) -> None:
    assert _core.record_bytes(make(PLAN)) == _core.record_bytes(PLAN)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    """Small integers are exact in every dtype, so the bytes must be the same, and the results nearly so."""

    def typed(array: np.ndarray) -> np.ndarray:
        array = np.round(array)
        return (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else array.astype(dtype)

    def both(floats: Callable[[np.ndarray], np.ndarray], **keywords: Any) -> tuple[np.ndarray, Any]:
        calls = [sample("append"), sample("attend")]
        for call in calls:
            for name in {"k", "v", "q", "sink_k", "sink_v", "window_k", "window_v", "fresh_k", "fresh_v"} & set(
                call.arguments
            ):
                call.arguments[name] = floats(call.arguments[name])
            call.arguments |= keywords
        calls[0]()
        shared = {name: calls[0].arguments[name] for name in ("pages", "sink_k", "sink_v", "window_k", "window_v")}
        return shared["pages"], calls[1].with_(**shared)()

    pages, (out, lse) = both(typed, dtype=dtype)
    want_pages, (want, want_lse) = both(np.round)
    assert out.dtype == (np.uint16 if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        out = (out.astype(np.uint32) << 16).view(f32)
    assert np.array_equal(pages, want_pages)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    np.testing.assert_allclose(out, want, atol=0.02)


def test_strides_and_subclasses_make_no_difference() -> None:
    """[batch, tokens, heads, dim] storage, slices, broadcasting and memory maps give the bytes of a dense copy."""

    def bytes_of(k: np.ndarray, v: np.ndarray) -> bytes:
        call = sample("append").with_(k=k, v=v)
        call()
        return b"".join(call.arguments[name].tobytes() for name in ("pages", "sink_k", "window_v"))

    k, v = sample("append").arguments["k"], sample("append").arguments["v"]
    want = bytes_of(k, v)
    assert any(want)
    assert bytes_of(k.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), v) == want
    assert (
        bytes_of(
            np.repeat(np.repeat(k, 2, 0), 2, 2)[::2, :, ::2], np.pad(v, ((0, 0), (1, 2), (3, 4), (0, 0)))[:, 1:3, 3:8]
        )
        == want
    )
    assert bytes_of(np.concatenate([k, v], -1)[..., :DIM], np.concatenate([k, v], -1)[..., DIM:]) == want
    assert bytes_of(k.view(type("Subclass", (np.ndarray,), {})), v) == want
    same = np.broadcast_to(k[:1, :1, :1], k.shape)
    assert bytes_of(same, v) == bytes_of(same.copy(), v)


def test_attend_with_strides_and_out() -> None:
    call = sample("attend")
    q = call.arguments["q"]
    want, want_lse = call()
    out = np.full_like(q, np.nan)
    got, lse = call.with_(q=q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), out=out)()
    assert got is out
    assert np.array_equal(out, want) and np.array_equal(lse, want_lse)


def test_one_element_dimensions_may_have_any_stride() -> None:
    plan = Plan(DIM, 4, page_tokens=32).words
    k = rows(1, 1, 1, DIM)
    odd = np.lib.stride_tricks.as_strided(k, k.shape, (-12, 7 * 4, 10**15 * 4, 4))
    results = []
    for x in (k, odd):
        pages = _core.new_pages(plan, 1, 1)
        _core.append(plan, x, None, np.array([1], np.int32), pages, np.zeros((1, 1), np.int32))
        results.append(pages.tobytes())
    assert results[0] == results[1] and any(results[0])


def test_empty_arrays() -> None:
    """Calls on empty arrays succeed. Attention to no tokens gives an output of 0 and a log-sum-exp of -inf."""
    empty = {name: rows(BATCH, HEADS, 0, DIM) for name in ("sink_k", "sink_v", "window_k", "window_v")}
    nothing = rows(BATCH, HEADS, 0, DIM)
    sample("append").with_(k=nothing, v=nothing)()
    backwards = np.lib.stride_tricks.as_strided(np.zeros(1, f32), nothing.shape, (-4096, -4, -256, -4))
    sample("append").with_(k=backwards, v=backwards)()
    pages = unaligned(np.zeros((1, HEADS, _core.record_bytes(PLAN)), np.uint8))[:0]  # of no bytes: nothing to align
    call = sample("attend").with_(
        **empty, fresh_k=None, fresh_v=None, pages=pages, lengths=np.zeros(BATCH, np.int32), starts=None,
        block_table=np.zeros((BATCH, 0), np.int32),
    )  # fmt: skip
    out, lse = call()
    assert not out.any() and np.isneginf(lse).all()
    assert _core.dot(VECTORS, rows(0, DIM), _core.new_pages(VECTORS, 1, 1), 3).shape == (0, 3)
    assert _core.dot(VECTORS, rows(2, DIM), _core.new_pages(VECTORS, 0, 1), 0).shape == (2, 0)
    assert _core.rotate(PLAN, rows(0, 3, DIM)).shape == (0, 3, DIM)
    k, v = sample("dequantize").with_(max_tokens=0, lengths=np.zeros(BATCH, np.int32))()
    assert k.shape == v.shape == (BATCH, HEADS, 0, DIM)


def test_merge_and_rotate_keep_leading_dimensions() -> None:
    outs, lses = rows(2, 3, 4, 5, DIM), rows(2, 3, 4, 5)
    out, lse = _core.merge(outs, lses)
    assert out.shape == (3, 4, 5, DIM) and lse.shape == (3, 4, 5)
    weights = np.exp(lses.astype(float) - np.logaddexp(*lses.astype(float)))
    np.testing.assert_allclose(out, (weights[..., None] * outs).sum(0), atol=1e-5)
    out, lse = _core.merge(np.ascontiguousarray(outs[:, 0, 0, 0]), np.ascontiguousarray(lses[:, 0, 0, 0]))
    assert out.shape == (DIM,) and lse.shape == ()
    x = rows(2, 3, DIM)
    assert _core.rotate(PLAN, x).shape == x.shape
    np.testing.assert_allclose(_core.rotate(PLAN, _core.rotate(PLAN, x), inverse=True), x, atol=1e-5)
    assert np.array_equal(_core.rotate(PLAN, x[0, 0]), _core.rotate(PLAN, x)[0, 0])


def test_a_plan_without_values() -> None:
    pages = _core.new_pages(VECTORS, 1, HEADS)
    window = rows(1, HEADS, 4, DIM)
    lengths = np.array([10], np.int32)
    _core.append(VECTORS, rows(1, HEADS, 10, DIM), None, lengths, pages, np.zeros((1, 1), np.int32), window_k=window)
    k, v = _core.dequantize(VECTORS, pages, np.zeros((1, 1), np.int32), np.array([6], np.int32), 6)
    assert v is None and k.shape == (1, HEADS, 6, DIM)
    assert np.corrcoef(k.ravel(), rows(1, HEADS, 10, DIM)[:, :, :6].ravel())[0, 1] > 0.99


def test_statuses_and_threads() -> None:
    assert _core.status_message(0) == "success"
    assert _core.status_message(12345) == _core.status_message(-1) == "unknown status"
    before = _core.num_threads()
    try:
        _core.set_num_threads(3)
        assert _core.num_threads() == 3
    finally:
        _core.set_num_threads(before)


def test_the_module_can_be_loaded_again() -> None:
    """Multi-phase initialisation makes a second module object over the same process-wide core."""
    import importlib

    name = "turboquant._core"
    first = sys.modules.pop(name)
    try:
        second = importlib.import_module(name)
        assert second is not first
        assert second.record_bytes(PLAN) == first.record_bytes(PLAN)
    finally:
        sys.modules[name] = first
        sys.modules["turboquant"]._core = first


@pytest.mark.skipif(sys.version_info < (3, 12), reason="interpreters refuse modules from 3.12 on")
def test_sub_interpreters_are_refused() -> None:
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
    number = interpreters.create()
    try:
        problem = interpreters.run_string(number, "import turboquant._core")
        assert problem is not None
    except interpreters.RunFailedError:
        pass
    finally:
        interpreters.destroy(number)


# ---- arguments that run code while they are read ----


class Meddler:
    """An integer that calls `act` when it is read."""

    def __init__(self, value: int, act: Callable[[], object]) -> None:
        self.value, self.act = value, act

    def __index__(self) -> int:
        self.act()
        return self.value


def test_a_plan_that_changes_while_it_is_read() -> None:
    words: list[Any] = list(PLAN)
    words[0] = Meddler(2, words.clear)
    assert _core.record_bytes(words) == _core.record_bytes(PLAN)
    assert words == []


def test_a_number_that_changes_arrays_while_it_is_read() -> None:
    """Numbers are read before arrays are checked, so the core sees what was checked."""
    call = sample("append")
    lengths = np.array([5, 17, 40], np.int32)
    shrink = Meddler(1, lambda: lengths.resize((1,), refcheck=False))
    with pytest.raises(ValueError, match=r"`lengths` must be of shape \[3\], got \[1\]"):
        call.with_(threads=shrink, lengths=lengths)()


def test_an_index_reads_numbers_before_arrays() -> None:
    """No code of the caller runs between the check of an array and its use."""
    index = Index(DIM, 4)
    index.add(rows(70, DIM))
    now, queries = index._contents, rows(3, DIM)
    space, (segment,) = index._space(now), now.rows(None)
    bits = space[3].copy()

    class Width:
        def __float__(self) -> float:
            bits.resize((0,), refcheck=False)
            return 1.0

    with pytest.raises(ValueError, match="`bits` must be of shape"):
        _core.index_search((*space[:3], bits, *space[4:8], Width()), queries, (segment,), 3)
    with pytest.raises(TypeError, match="index_search: `sigmas` must be a number, got str"):
        _core.index_search((*space[:8], "wide"), queries, (segment,), 3)
    number = Meddler(0, lambda: pytest.fail("it ran"))
    with pytest.raises(TypeError, match="`ids` must be an array of int64 or an int"):
        _core.index_search(space, queries, ((*segment[:4], number, *segment[5:]),), 3)


def test_exceptions_of_arguments_come_through() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sample("append").with_(threads=Meddler(1, fail))()
    with pytest.raises(KeyError, match="mine"):
        _core.record_bytes([Meddler(1, fail), *PLAN[1:]])


ODD = [
    None,
    0,
    -1,
    2**70,
    1.5,
    "text",
    b"bytes",
    (),
    [1],
    np.float32(3),
    np.array(None),
    np.array("text"),
    np.zeros(0, f32),
    np.zeros((0, 2**40), np.int32),
    np.zeros((BATCH, HEADS, 0, DIM), f32),
    np.zeros((0, HEADS, 3, DIM), f32),
    np.zeros((BATCH, 0, 3, DIM), f32),
    np.zeros((1, 1, 1, 8), f32),
    np.zeros(BATCH, np.int32),
    np.zeros((BATCH, 1), np.int32),
    np.zeros((0, 2**31), np.int32),
    np.full(BATCH, 2**31 - 1, np.int32),
    np.full((BATCH, 5), -(2**31), np.int32),
    _core.new_pages(PLAN, 1, HEADS),
    _core.new_pages(PLAN, 0, 5),
    _core.new_pages(PLAN, 2, 3),
    PLAN,
    DENSE,
    VECTORS,
    Plan(8, 1).words,
    Plan(256, 5, 5).words,
    Plan(4096, 1).words,
    "bfloat16",
    "float16",
    rows(DIM, DIM),
    rows(HEADS, DIM),
    np.full((HEADS, 2), np.nan, f32),
    rows(BATCH, HEADS, 1, DIM, dtype=np.float16),
    np.zeros((BATCH, HEADS, 3, DIM), np.uint16),
    np.broadcast_to(np.zeros(1, f32), (BATCH, HEADS, 2, DIM)),
    np.zeros((1,) * 40, f32),
    np.lib.stride_tricks.as_strided(np.zeros(1, f32), (BATCH, 0, 3, DIM), (-4, 2**62, -8, 4)),
    np.ma.masked_array(rows(BATCH, DIM)),
]


@settings(max_examples=400)
@given(data=st.data())
def test_odd_arguments_give_errors_not_crashes(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(OPS))
    call = sample(op)
    transforms = {"key_numbers", "value_numbers", "key_turns", "rotation"}
    names = st.sampled_from(sorted({*call.arguments, *transforms, "threads", "dtype"}))
    call = call.with_(**data.draw(st.dictionaries(names, st.sampled_from(ODD), min_size=1, max_size=4)))
    try:
        call()
    except (TypeError, ValueError, MemoryError):
        pass


# ---- the GIL, threads ----


def lasting(op: str, size: int) -> Callable[[], object]:
    """A call whose time grows with `size`; size 1 takes a millisecond or less."""
    n = 32 * size
    plan = Plan(128, 4, 4 if op in ("append", "attend", "dequantize") else 0, page_tokens=32).words
    table = np.arange(size, dtype=np.int32)[None]
    counts = np.array([n], np.int32)
    pages = _core.new_pages(plan, size, 1)
    match op:
        case "append":
            x = rows(1, 1, n, 128)
            return lambda: _core.append(plan, x, x, counts, pages, table, threads=1)
        case "attend":
            q = rows(1, 4, 1, 128)
            return lambda: _core.attend(plan, q, pages, table, counts, threads=1)
        case "dequantize":
            return lambda: _core.dequantize(plan, pages, table, counts, n)
        case "dot":
            q = rows(8, 128)
            return lambda: _core.dot(plan, q, pages, n, threads=1)
        case "rotate":
            x = rows(n, 128)
            return lambda: _core.rotate(plan, x)
        case "merge":
            outs, lses = rows(8, n, 16), rows(8, n)
            return lambda: _core.merge(outs, lses)
        case "haar":
            return lambda: _core.haar(0, 8 * min(512, 4 + size // 4))
    raise AssertionError(op)


@pytest.mark.parametrize("op", [*OPS, "haar"])
def test_the_gil_is_released(op: str) -> None:
    """In at least one of 20 calls of 50 ms or more, another thread runs during the middle half of the call.

    One call is not enough, because on a busy machine the call or the other thread may have to wait for a CPU core.
    """
    size, calls = 16, 0
    while calls < 20:
        call = lasting(op, size)
        span: list[float] = []

        def work(span: list[float] = span, call: Callable[[], object] = call) -> None:
            span.append(time.perf_counter())
            call()
            span.append(time.perf_counter())

        thread = threading.Thread(target=work)
        alive = []
        thread.start()
        while thread.is_alive():
            alive.append(time.perf_counter())
            time.sleep(0.001)
        quarter = (span[1] - span[0]) / 4
        if quarter < 0.05 / 4:
            size *= 2
            continue
        calls += 1
        if any(span[0] + quarter < t < span[1] - quarter for t in alive):
            return
    pytest.fail("no other thread ran during the call")


def test_calls_from_many_threads() -> None:
    call = sample("attend")
    sample("append").with_(**{name: call.arguments[name] for name in ("pages", "sink_k", "window_k")})()
    want, want_lse = call()
    wrong = []

    def work() -> None:
        for _ in range(50):
            out, lse = call()
            if not (np.array_equal(out, want) and np.array_equal(lse, want_lse)):
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
