"""What turboquant._core refuses and in which words; that a failed call has written nothing and leaks nothing."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from binding_cases import (
    BATCH,
    DENSE,
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

from turboquant import _core
from turboquant.plan import plan_words


@dataclass
class Bad:
    """An argument that is refused, and what is said about it."""

    op: str
    name: str
    change: Any  # of the good value
    error: type[Exception]
    says: str  # behind "`name` must be ", or behind "`name" if it begins with an index
    also: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.op} {self.name} {self.says}"

    def call(self) -> Call:
        good = sample(self.op).with_(**self.also)
        value = self.change(good.arguments.get(self.name)) if callable(self.change) else self.change
        return good.with_(**{self.name: value})


def to(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def edited(index: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def edit(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return edit


FLOATS = 'float32 or float16, or uint16 with dtype="bfloat16", got '
WORDS = "a sequence of integers as from turboquant.plan.plan_words, got "
ROWS = "an array of dense rows in ascending order, got other strides"
STRIDES = "C-contiguous, got other strides"
UNALIGNED = "aligned to its elements, got one that is not"
READ_ONLY = "writable, got a read-only array"
CAPACITY = "` must be in 0..sinks + window + max_pages * page_tokens, got "
LIMIT = "` must be finite and at most 16384 in magnitude, got "
THREE = rows(3, DIM, DIM)
KEYS_TURN = dict(plan=DENSE, key_rotation=rows(DIM, DIM))
TWO_HEADS = _core.new_pages(VECTORS, 4, 2)
RECORD, VECTOR_RECORD = _core.record_bytes(PLAN), _core.record_bytes(VECTORS)
BAD = [
    # objects and dtypes
    Bad("append", "k", lambda k: k.tolist(), TypeError, "an array of float32, float16 or bfloat16, got list"),
    Bad("append", "k", lambda k: k.astype(float), TypeError, FLOATS + "float64"),
    Bad("append", "k", lambda k: k.astype(np.uint16), TypeError, FLOATS + "uint16"),
    Bad("append", "k", lambda k: k.astype(">f4"), TypeError, FLOATS + ">f4"),
    Bad("append", "k", lambda k: k.astype(object), TypeError, FLOATS + "object"),
    Bad("append", "k", None, TypeError, "an array of float32, float16 or bfloat16, got NoneType"),
    Bad("append", "v", lambda v: v.astype(np.float16), TypeError, "an array of float32, got float16"),
    Bad("append", "v", None, TypeError, "an array of float32, got NoneType"),
    Bad("append", "v", lambda v: v, ValueError, "None, because the plan has no values", dict(plan=plan_words(DIM, 4))),
    Bad("append", "lengths", lambda x: x.astype(np.int64), TypeError, "an array of int32, got int64"),
    Bad("append", "lengths", lambda x: x.astype(np.uint32), TypeError, "an array of int32, got uint32"),
    Bad("append", "lengths", lambda x: x.tolist(), TypeError, "an array of int32, got list"),
    Bad("append", "pages", lambda x: x.view(np.int8), TypeError, "an array of uint8, got int8"),
    Bad("append", "pages", lambda x: bytes(x), TypeError, "an array of uint8, got bytes"),
    Bad("append", "block_table", lambda x: x.astype(">i4"), TypeError, "an array of int32, got >i4"),
    Bad("append", "window_k", lambda x: x.astype(np.float16), TypeError, "an array of float32, got float16"),
    Bad("append", "key_centre", lambda x: x.astype(np.float16), TypeError, "an array of float32, got float16"),
    Bad("append", "threads", 1.5, TypeError, "an integer, got float"),
    Bad("append", "threads", np.arange(3), TypeError, "an integer, got numpy.ndarray"),
    Bad("append", "dtype", "float64", ValueError, """None, "float32", "float16" or "bfloat16", got 'float64'"""),
    Bad("append", "dtype", to(np.float32), TypeError, 'None, "float32", "float16" or "bfloat16", got type'),
    Bad("append", "k", lambda k: k, TypeError, "an array of float16, got float32", dict(dtype="float16")),
    Bad("attend", "softmax_scale", "x", TypeError, "a number, got str"),
    Bad("attend", "softcap", None, TypeError, "a number, got NoneType"),
    Bad("attend", "q", lambda q: q.astype(complex), TypeError, FLOATS + "complex128"),
    Bad("attend", "out", to(np.zeros((BATCH, 2 * HEADS, TOKENS, DIM))), TypeError, "an array of float32, got float64"),
    Bad("dequantize", "max_tokens", "3", TypeError, "an integer, got str"),
    Bad("dot", "n", 3.0, TypeError, "an integer, got float"),
    Bad("rotate", "x", lambda x: x.astype(float), TypeError, "an array of float32, got float64"),
    Bad("rotate", "x", 1.0, TypeError, "an array of float32, got float"),
    Bad("rotate", "matrix", 1, TypeError, "an array of float32, got int"),
    Bad("merge", "outs", None, TypeError, "an array of float32, got NoneType"),
    Bad("merge", "lses", lambda x: x.astype(float), TypeError, "an array of float32, got float64"),
    # plans
    Bad("append", "plan", None, TypeError, WORDS + "NoneType"),
    Bad("append", "plan", {1: 2}, TypeError, WORDS + "dict"),
    Bad("append", "plan", "plan", TypeError, "[0]` must be an integer, got str"),
    Bad("append", "plan", (0,) * 300, ValueError, "at most 271 words, got 300"),
    Bad("append", "plan", (4, *PLAN[1:]), ValueError, "[0]` must be format version 1, 2 or 3, got 4"),
    Bad("append", "plan", (2**63, *PLAN[1:]), ValueError, "[0]` must be in -2**63..2**63 - 1, got a number of"),
    Bad("append", "plan", (1.0, *PLAN[1:]), TypeError, "[0]` must be an integer, got float"),
    Bad("append", "plan", (*PLAN[:7], 9, *PLAN[8:]), ValueError, "[7]` must be bits of a group, 0..5, got 9"),
    # shapes
    Bad("append", "k", lambda k: k[0], ValueError, "of shape [*, *, *, 64], got [2, 5, 64]"),
    Bad("append", "k", lambda k: k[..., :32], ValueError, "of shape [*, *, *, 64], got [3, 2, 5, 32]"),
    Bad("append", "k", to(np.array(1, f32)), ValueError, "of shape [*, *, *, 64], got []"),
    Bad("append", "v", lambda v: v[:, :, 1:], ValueError, "of shape [3, 2, 5, 64], got [3, 2, 4, 64]"),
    Bad("append", "lengths", lambda x: x[:2].copy(), ValueError, "of shape [3], got [2]"),
    Bad("append", "lengths", lambda x: x[:, None], ValueError, "of shape [3], got [3, 1]"),
    Bad("append", "pages", lambda x: x[:, :1].copy(), ValueError, f"of shape [*, 2, {RECORD}], got [8, 1, {RECORD}]"),
    Bad("append", "pages", lambda x: x[..., 64:], ValueError, f"of shape [*, 2, {RECORD}], got [8, 2, {RECORD - 64}]"),
    Bad("append", "block_table", lambda x: x.ravel(), ValueError, "of shape [3, *], got [6]"),
    Bad("append", "sink_k", lambda x: x[:2], ValueError, "of shape [3, 2, *, 64], got [2, 2, 2, 64]"),
    Bad("append", "sink_v", lambda x: x[:, :, :1].copy(), ValueError, "of shape [3, 2, 2, 64], got [3, 2, 1, 64]"),
    Bad("append", "sink_v", None, ValueError, "given exactly if `sink_k` is"),
    Bad("append", "window_v", None, ValueError, "given exactly if `window_k` is"),
    Bad("append", "key_centre", lambda x: x[:1], ValueError, "of shape [2, 64], got [1, 64]"),
    Bad("append", "key_centre", lambda x: np.stack([x, x]), ValueError, "of shape [3, 2, 64], got [2, 2, 64]"),
    Bad("append", "key_steps", lambda x: x[0], ValueError, "of shape [2, 2], got [2]"),
    Bad("append", "key_rotation", to(rows(DIM, DIM)), ValueError, "None, because the plan's rotation is not"),
    Bad("append", "key_rotation", None, ValueError, "an array, because the plan's rotation is dense", dict(plan=DENSE)),
    Bad("append", "value_rotation", to(THREE), ValueError, "of shape [2, 64, 64], got [3, 64, 64]", KEYS_TURN),
    Bad("attend", "starts", lambda x: x[:1], ValueError, "of shape [3], got [1]"),
    Bad("attend", "fresh_k", lambda x: x[:, :, 1:], ValueError, "of shape [3, 2, 5, 64], got [3, 2, 4, 64]"),
    Bad("attend", "fresh_v", None, ValueError, "given exactly if `fresh_k` is"),
    Bad("attend", "out", to(rows(1, 4, 5, 64)), ValueError, "of shape [3, 4, 5, 64], got [1, 4, 5, 64]"),
    Bad("attend", "pages", lambda x: x[0], ValueError, f"of shape [*, *, {RECORD}], got [2, {RECORD}]"),
    Bad("dot", "pages", to(TWO_HEADS), ValueError, f"of shape [*, 1, {VECTOR_RECORD}], got [4, 2, {VECTOR_RECORD}]"),
    Bad("dot", "queries", lambda x: x[0], ValueError, "of shape [*, 64], got [64]"),
    Bad("rotate", "x", lambda x: x[:, :32].copy(), ValueError, "of shape [*, 64], got [3, 32]"),
    Bad("rotate", "x", to(np.array(1, f32)), ValueError, "of shape [64], got []"),
    Bad("rotate", "matrix", lambda x: x[:32], ValueError, "of shape [64, 64], got [32, 64]"),
    Bad("rotate", "matrix", None, ValueError, "an array, because the plan's rotation is dense, got None"),
    Bad("rotate", "matrix", lambda x: x, ValueError, "None, because the plan's rotation is not dense", dict(plan=PLAN)),
    Bad("merge", "outs", lambda x: x[0, 0], ValueError, "of shape [*, *], got [64]"),
    Bad("merge", "lses", lambda x: x[:2], ValueError, "of shape [3, 4], got [2, 4]"),
    # memory order, alignment, writability
    Bad("append", "k", lambda k: k[:, :, ::-1], ValueError, ROWS),
    Bad("append", "k", lambda k: np.asfortranarray(k), ValueError, ROWS),
    Bad("append", "k", lambda k: np.repeat(k, 2, -1)[..., ::2], ValueError, ROWS),
    Bad("append", "k", unaligned, ValueError, UNALIGNED),
    Bad("append", "lengths", lambda x: np.repeat(x, 2)[::2], ValueError, STRIDES),
    Bad("append", "pages", lambda x: unaligned(x), ValueError, "64-byte aligned as from new_pages, got 1 past"),
    Bad("append", "pages", lambda x: x[::2], ValueError, STRIDES),
    Bad("append", "pages", frozen, ValueError, READ_ONLY),
    Bad("append", "window_v", frozen, ValueError, READ_ONLY),
    Bad("append", "block_table", lambda x: np.asfortranarray(x), ValueError, STRIDES),
    Bad("append", "block_table", unaligned, ValueError, UNALIGNED),
    Bad("append", "sink_k", lambda x: x[:, ::-1], ValueError, STRIDES),
    Bad("attend", "q", lambda x: x[..., ::-1], ValueError, ROWS),
    Bad("attend", "out", lambda _: frozen(np.zeros((BATCH, 2 * HEADS, TOKENS, DIM), f32)), ValueError, READ_ONLY),
    Bad("attend", "out", lambda _: np.zeros((BATCH, TOKENS, 2 * HEADS, DIM), f32).swapaxes(1, 2), ValueError, STRIDES),
    Bad("rotate", "x", lambda x: x[:, ::-1], ValueError, STRIDES),
    Bad("merge", "outs", lambda x: x[::-1], ValueError, STRIDES),
    # numbers
    Bad("append", "threads", -1, ValueError, "in 0..2147483647, got -1"),
    Bad("append", "threads", 10**5000, ValueError, "in 0..2147483647, got a number of more than 64 bits"),
    Bad("append", "lengths", edited(1, -1), ValueError, "[1]" + CAPACITY + "-1"),
    Bad("append", "lengths", edited(1, -(2**31)), ValueError, "[1]" + CAPACITY + "-2147483648"),
    Bad("append", "lengths", edited(2, 71), ValueError, "[2]" + CAPACITY + "71"),
    Bad("append", "block_table", edited((2, 1), 8), ValueError, "[5]` must be in 0..n_pages - 1, got 8"),
    Bad("append", "block_table", edited((2, 1), -1), ValueError, "[5]` must be in 0..n_pages - 1, got -1"),
    Bad("append", "k", edited((1, 1, 2, 3), np.nan), ValueError, f"[{((1 * 2 + 1) * 5 + 2) * 64 + 3}]" + LIMIT + "nan"),
    Bad("append", "v", edited((2, 0, 4, 0), -np.inf), ValueError, f"[{(2 * 2 * 5 + 4) * 64}]" + LIMIT + "-inf"),
    Bad("append", "k", edited((0, 0, 0, 0), 16385), ValueError, "[0]" + LIMIT + "16385"),
    Bad("append", "key_steps", edited((1, 0), 0), ValueError, "[2]` must be in 2^-40..2^40, got 0"),
    Bad("append", "key_steps", edited((1, 1), np.nan), ValueError, "[3]` must be in 2^-40..2^40, got nan"),
    Bad("attend", "lengths", edited(0, -5), ValueError, "[0]" + CAPACITY + "-5"),
    Bad("attend", "lengths", edited(0, 2**31 - 1), ValueError, "[0]" + CAPACITY + "2147483647"),
    Bad("attend", "starts", edited(1, 18), ValueError, "[1]` must be in 0..lengths, got 18"),
    Bad("attend", "starts", edited(1, -1), ValueError, "[1]` must be in 0..lengths, got -1"),
    Bad("attend", "block_table", edited((2, 0), 2**30), ValueError, "[4]` must be in 0..n_pages - 1, got 1073741824"),
    Bad("attend", "sliding_window", -1, ValueError, "in 0..2147483647, got -1"),
    Bad("attend", "softmax_scale", np.nan, ValueError, "finite in float32, got nan"),
    Bad("attend", "softmax_scale", 1e300, ValueError, "finite in float32, got 1e+300"),
    Bad("attend", "softcap", np.inf, ValueError, "finite in float32, got inf"),
    Bad("attend", "block_table", edited((2, 0), -1), ValueError, "[4]` must be in 0..n_pages - 1, got -1",
        dict(starts=np.array([0, 1, 33], np.int32))),  # 33 is the last position of the page
    Bad("attend", "block_table", edited((2, 0), -1), ValueError, "[4]` must be in 0..n_pages - 1, got -1",
        dict(sliding_window=3)),
    Bad("append", "key_steps", lambda x: x * f32(2**41), ValueError, "[0]` must be in 2^-40..2^40, got 2"),
    Bad("dequantize", "max_tokens", 65, ValueError, "in 0..64, what the block table holds, got 65"),
    Bad("dequantize", "max_tokens", -1, ValueError, "in 0..2147483647, got -1"),
    Bad("dequantize", "lengths", edited(1, 41), ValueError, "[1]` must be in 0..max_tokens, got 41"),
    Bad("dequantize", "lengths", edited(1, -1), ValueError, "[1]` must be in 0..max_tokens, got -1"),
    Bad("dequantize", "block_table", edited((2, 1), 8), ValueError, "[5]` must be in 0..n_pages - 1, got 8"),
    Bad("dequantize", "value_steps", to(np.zeros((HEADS, 2), f32)), ValueError, "[0]` must be in 2^-40..2^40, got 0"),
    Bad("dot", "n", 257, ValueError, "in 0..256, what the pages hold, got 257"),
    Bad("dot", "n", -1, ValueError, "in 0..2**63 - 1, got -1"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_refuses(bad: Bad) -> None:
    call = bad.call()
    arrays = {name: value for name, value in call.arguments.items() if isinstance(value, np.ndarray)}
    before = {name: value.tobytes() for name, value in arrays.items()}
    with pytest.raises(bad.error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is bad.error, message
    says = bad.says if bad.says.startswith("[") else f"` must be {bad.says}"
    assert message.startswith(f"{bad.op}: `{bad.name}{says}"), message
    assert before == {name: value.tobytes() for name, value in arrays.items()}, "a failed call has written something"


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
    memory = np.concatenate([rows(q.size - 1), array.ravel()])  # one number is of both
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
        (lambda: _core.codebook(3, 64, 3), ValueError, "codebook: `law` must be in 0..2, got 3"),
        (lambda: _core.codebook(0, 64, 0), ValueError, "codebook: `bits` must be in 1..5, got 0"),
        (lambda: _core.codebook(0, 64, 9), ValueError, "codebook: `bits` must be in 1..5, got 9"),
        (lambda: _core.codebook(1, -8, 3), ValueError, "codebook: `head_dim` must be "),
        (lambda: _core.codebook("normal", 64, 3), TypeError, "codebook: `law` must be an integer, got str"),
        (lambda: _core.random(-1, 0, 0), ValueError, "random: `seed` must be in 0..2**64 - 1"),
        (lambda: _core.random(0, 0, 2**64), ValueError, "random: `block` must be in 0..2**64 - 1"),
        (lambda: _core.random(0, None, 0), TypeError, "random: `stream` must be an integer, got NoneType"),
        (lambda: _core.haar(0, 4104), ValueError, "haar: `head_dim` must be in 8..4096, got 4104"),
        (lambda: _core.haar(0, 12), ValueError, "haar: `head_dim` must be "),
        (lambda: _core.new_pages(PLAN, -1, 1), ValueError, "new_pages: `n_pages` must be in 0..2**63 - 1, got -1"),
        (lambda: _core.new_pages(PLAN, 2**62, 2), ValueError, "new_pages: `n_pages` must be small enough"),
        (lambda: _core.new_pages(PLAN, 1, 0), ValueError, "new_pages: `kv_heads` must be in 1..2147483647, got 0"),
        pytest.param(lambda: _core.new_pages(PLAN, 2**46, 1), MemoryError, "", marks=NEEDS_AN_ALLOCATOR_THAT_FAILS),
        (lambda: _core.file_header_read("text", 4), TypeError, "file_header_read: `data` must be"),
        (lambda: _core.file_header_read(np.zeros((4, 4))[::2], 64), TypeError, "file_header_read: `data` must be"),
        (lambda: _core.file_header_write(VECTORS, 0, 0, 2**32), ValueError, "file_header_write: `payload_checksum`"),
        (lambda: _core.file_header_read(b"", 0), ValueError, "file_header_read: `file_bytes` must be "),
        (lambda: _core.file_header_read(b"x" * 64, 64), ValueError, "file_header_read: `magic` must be "),
        (lambda: _core.file_header_read(b"x", -1), ValueError, "file_header_read: `file_bytes` must be in 0..2"),
        (lambda: _core.file_header_write(VECTORS, -1, 0, 0), ValueError, "file_header_write: `vectors` must be"),
        (lambda: _core.kernel_name("divide", PLAN), ValueError, "kernel_name: `operation` must be rotate, append, "),
        (lambda: _core.kernel_name(b"rotate", PLAN), TypeError, "kernel_name: `operation` must be a str, got bytes"),
        (lambda: _core.kernel_name("\ud800", PLAN), UnicodeEncodeError, ""),
        (lambda: _core.set_isa(3), TypeError, "set_isa: `name` must be a str or None, got int"),
        (lambda: _core.set_isa("sse\u00e9"), RuntimeError, "set_isa: `name` must be one of: "),
        (lambda: _core.set_isa("scalar\0"), RuntimeError, "set_isa: `name` must be one of: "),
        (lambda: _core.set_num_threads(0), ValueError, "set_num_threads: `n` must be in 1..2147483647, got 0"),
        (lambda: _core.record_bytes((1, 512, 32, 1, 1, 0, 0, *[4] * 16, *[0] * 16)), ValueError,
         "record_bytes: `head_dim` must be at most 256 with the sphere codebook, got 512"),
        (lambda: _core.record_bytes(()), ValueError, "record_bytes: `len(plan)` must be 7 + 2 * "),
        (lambda: _core.record_bytes(PLAN[:-1]), ValueError, "record_bytes: `len(plan)` must be 7 + 2 * "),
        (lambda: _core.record_bytes((1, 12, *PLAN[2:])), ValueError, "record_bytes: `head_dim` must be a multiple"),
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


def grown_in_200_rounds(run_all: Callable[[], None]) -> int:
    """Bytes of Python's memory: the least of three attempts, since threads that other tests left behind allocate as
    well, now and then; a leak is there each time."""
    attempts = []
    for _ in range(3):
        tracemalloc.start()
        try:
            for round_ in range(250):
                run_all()
                if round_ == 49:
                    gc.collect()
                    first = tracemalloc.get_traced_memory()[0]
            gc.collect()
            attempts.append(tracemalloc.get_traced_memory()[0] - first)
        finally:
            tracemalloc.stop()
        if attempts[-1] < 200 * 16:
            break
    return min(attempts)


@pytest.mark.parametrize("op", OPS)
def test_nothing_leaks(op: str) -> None:
    """Good and bad calls leave no reference and no memory behind."""
    calls = [sample(op)] + [bad.call() for bad in BAD if bad.op == op]

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
        assert grown_in_200_rounds(run_all) < 200 * 16  # the smallest object has more than 16 bytes
    else:
        for _ in range(250):
            run_all()
    immortal = 2**20  # None and small integers count, or are immortal
    after = [sys.getrefcount(thing) for thing in objects]
    changed = [(type(thing), a, b) for thing, a, b in zip(objects, before, after) if a < immortal and abs(a - b) > 200]
    assert not changed


def test_nothing_leaks_elsewhere() -> None:
    header = _core.file_header_write(VECTORS, 3, _core.record_bytes(VECTORS), 0)
    calls: list[Callable[[], object]] = [
        lambda: _core.codebook(1, 64, 3),
        lambda: _core.random(1, 2, 3),
        lambda: _core.haar(0, 16),
        lambda: _core.haar(0, 12),
        lambda: _core.plan_info(PLAN),
        lambda: _core.new_pages(PLAN, 3, 2),
        lambda: _core.file_header_read(header, len(header) + _core.record_bytes(VECTORS)),
        lambda: _core.file_header_read(header, len(header)),
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
    references = sys.getrefcount(header)
    if MEASURES_MEMORY:
        assert grown_in_200_rounds(run_all) < 200 * 16
    else:
        for _ in range(250):
            run_all()
    assert sys.getrefcount(header) == references
