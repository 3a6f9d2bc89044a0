"""Bad arguments: one clear error that names the argument, what it must be and what it was; and nothing is changed."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference as ref
from cases import aligned_pages, orthogonal
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core

PLAN = ref.plan(64, 3, 2, page_tokens=32)
KEYS_ONLY = ref.plan(64, 3, page_tokens=32)
DENSE = ref.plan(64, 3, 2, rotation=ref.DENSE, page_tokens=32)
Arguments = dict[str, Any]


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def exact_parts() -> Arguments:
    sizes = {"sink_k": 2, "sink_v": 2, "window_k": 8, "window_v": 8}
    return {name: floats(2, 2, n, 64) for name, n in sizes.items()}


def append_arguments() -> Arguments:
    """Two sequences of 40 and 25 tokens, the second with 15 of padding."""
    return dict(
        plan=PLAN.words,
        k=floats(2, 2, 40, 64),
        v=floats(2, 2, 40, 64),
        lengths=np.array([40, 25], np.int32),
        pages=aligned_pages(4, 2, PLAN.record_bytes, 0xA5),
        block_table=np.array([[3, 99], [1, 99]], np.int32),
        **exact_parts(),
    )


def attend_arguments() -> Arguments:
    return dict(
        plan=PLAN.words,
        q=floats(2, 4, 3, 64),
        pages=aligned_pages(4, 2, PLAN.record_bytes, 0x35),
        block_table=np.array([[3, 99], [1, 99]], np.int32),
        lengths=np.array([40, 25], np.int32),
        starts=np.array([0, 3], np.int32),
        fresh_k=floats(2, 2, 3, 64),
        fresh_v=floats(2, 2, 3, 64),
        out=floats(2, 4, 3, 64),
        **exact_parts(),
    )


def dequantize_arguments() -> Arguments:
    table = np.array([[3, 0], [1, 99]], np.int32)
    pages, counts = aligned_pages(4, 2, PLAN.record_bytes), np.array([40, 25], np.int32)
    return dict(plan=PLAN.words, pages=pages, block_table=table, lengths=counts, max_tokens=50)


def dot_arguments() -> Arguments:
    pages = aligned_pages(2, 1, KEYS_ONLY.record_bytes)
    return dict(plan=KEYS_ONLY.words, queries=floats(3, 64), pages=pages, n=40)


def merge_arguments() -> Arguments:
    return dict(outs=floats(3, 5, 8), lses=floats(3, 5))


def rotate_arguments() -> Arguments:
    return dict(plan=PLAN.words, x=floats(3, 64))


def changed(array: np.ndarray, at: Any, value: float) -> np.ndarray:
    """A copy of an array of any alignment but pages', with one element set."""
    result = array.copy()
    result[at] = value
    return result


def locked(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def unaligned(pages: np.ndarray) -> np.ndarray:
    raw = aligned_pages(pages.shape[0] + 1, *pages.shape[1:]).reshape(-1)
    return raw[16 : 16 + pages.size].reshape(pages.shape)


def words(at: int, value: Any) -> tuple:
    return (*PLAN.words[:at], value, *PLAN.words[at + 1 :])


V, T = ValueError, TypeError
# what is wrong: the exception, the name in its message, the arguments that replace good ones
Faults = dict[str, tuple[type[Exception], str, Callable[[Arguments], Arguments]]]

PLANS: Faults = {
    "plan: None": (T, "plan", lambda a: dict(plan=None)),
    "plan: a number": (T, "plan", lambda a: dict(plan=3)),
    "plan: empty": (V, "len(plan)", lambda a: dict(plan=())),
    "plan: too short": (V, "len(plan)", lambda a: dict(plan=PLAN.words[:-1])),
    "plan: too long": (V, "len(plan)", lambda a: dict(plan=(*PLAN.words, 3))),
    "plan: far too long": (V, "plan", lambda a: dict(plan=(*PLAN.words, *[3] * 400))),
    "plan: floats": (T, "plan[7]", lambda a: dict(plan=words(7, 3.0))),
    "plan: beyond 64 bits": (V, "plan[6]", lambda a: dict(plan=words(6, 2**70))),
    "plan: version": (V, "plan[0]", lambda a: dict(plan=words(0, 4))),
    "plan: version of other groups": (V, "len(plan)", lambda a: dict(plan=words(0, 3))),
    "plan: head_dim 12": (V, "head_dim", lambda a: dict(plan=words(1, 12))),
    "plan: head_dim 0": (V, "head_dim", lambda a: dict(plan=words(1, 0))),
    "plan: head_dim -64": (V, "head_dim", lambda a: dict(plan=words(1, -64))),
    "plan: head_dim with values": (V, "head_dim", lambda a: dict(plan=(*words(1, 264)[:7], *[3] * 18))),
    "plan: page_tokens 100": (V, "page_tokens", lambda a: dict(plan=words(2, 100))),
    "plan: page_tokens 160": (V, "page_tokens", lambda a: dict(plan=words(2, 160))),
    "plan: rotation": (V, "plan[3]", lambda a: dict(plan=words(3, 3))),
    "plan: codebook": (V, "plan[4]", lambda a: dict(plan=words(4, -1))),
    "plan: scale": (V, "plan[5]", lambda a: dict(plan=words(5, 4))),
    "plan: seed": (V, "seed", lambda a: dict(plan=words(6, -1))),
    "plan: bits 9": (V, "plan[8]", lambda a: dict(plan=words(8, 9))),
    "plan: bits -1": (V, "plan[9]", lambda a: dict(plan=words(9, -1))),
    "plan: no key bits": (V, "key_bits", lambda a: dict(plan=(*PLAN.words[:7], 0, 0, 2, 2))),
}

TRANSFORMS: Faults = {
    "key_rotation: not dense": (V, "key_rotation", lambda a: dict(key_rotation=orthogonal(64))),
    "key_rotation: missing": (V, "key_rotation", lambda a: dict(plan=DENSE.words, value_rotation=orthogonal(64))),
    "key_rotation: shape": (V, "key_rotation", lambda a: dict(plan=DENSE.words, key_rotation=orthogonal(32))),
    "key_rotation: heads": (V, "key_rotation", lambda a: dict(plan=DENSE.words, key_rotation=floats(3, 64, 64))),
    "key_rotation: float64": (T, "key_rotation", lambda a: dict(plan=DENSE.words, key_rotation=np.eye(64))),
    "key_rotation: order": (V, "key_rotation", lambda a: dict(plan=DENSE.words, key_rotation=orthogonal(64).T)),
    "key_centre: shape": (V, "key_centre", lambda a: dict(key_centre=floats(64))),
    "key_centre: batch": (V, "key_centre", lambda a: dict(key_centre=floats(3, 2, 64))),
    "key_centre: float64": (T, "key_centre", lambda a: dict(key_centre=np.zeros((2, 64)))),
    "key_steps: shape": (V, "key_steps", lambda a: dict(key_steps=floats(2, 3))),
    "key_steps: zero": (V, "key_steps[3]", lambda a: dict(key_steps=np.array([[1, 1], [1, 0]], np.float32))),
    "key_steps: negative": (V, "key_steps[0]", lambda a: dict(key_steps=np.array([[-1, 1], [1, 1]], np.float32))),
    "key_steps: NaN": (V, "key_steps[1]", lambda a: dict(key_steps=np.array([[1, np.nan], [1, 1]], np.float32))),
    "key_steps: inf": (V, "key_steps[2]", lambda a: dict(key_steps=np.array([[1, 1], [np.inf, 1]], np.float32))),
}
VALUE_TRANSFORMS: Faults = {
    "value_centre: shape": (V, "value_centre", lambda a: dict(value_centre=floats(2, 32))),
    "value_steps: zero": (V, "value_steps[0]", lambda a: dict(value_steps=np.zeros((2, 2), np.float32))),
    "value_rotation: not dense": (V, "value_rotation", lambda a: dict(value_rotation=orthogonal(64))),
    "value_rotation: missing": (V, "value_rotation", lambda a: dict(plan=DENSE.words, key_rotation=orthogonal(64))),
}

TABLES: Faults = {
    "lengths: int64": (T, "lengths", lambda a: dict(lengths=a["lengths"].astype(np.int64))),
    "lengths: a list": (T, "lengths", lambda a: dict(lengths=[40, 25])),
    "lengths: shape": (V, "lengths", lambda a: dict(lengths=np.zeros(3, np.int32))),
    "lengths: two dimensions": (V, "lengths", lambda a: dict(lengths=np.zeros((2, 1), np.int32))),
    "lengths: strided": (V, "lengths", lambda a: dict(lengths=np.zeros(4, np.int32)[::2])),
    "lengths: negative": (V, "lengths[1]", lambda a: dict(lengths=np.array([40, -1], np.int32))),
    "lengths: smallest": (V, "lengths[0]", lambda a: dict(lengths=np.array([-(2**31), 1], np.int32))),
    "lengths: beyond capacity": (V, "lengths[0]", lambda a: dict(lengths=np.array([75, 25], np.int32))),
    "lengths: largest": (V, "lengths[1]", lambda a: dict(lengths=np.array([40, 2**31 - 1], np.int32))),
    "block_table: int64": (T, "block_table", lambda a: dict(block_table=a["block_table"].astype(np.int64))),
    "block_table: batch": (V, "block_table", lambda a: dict(block_table=np.zeros((3, 2), np.int32))),
    "block_table: order": (V, "block_table", lambda a: dict(block_table=np.asfortranarray(a["block_table"]))),
    "block_table: page 4": (V, "block_table[2]", lambda a: dict(block_table=changed(a["block_table"], (1, 0), 4))),
    "block_table: page -1": (V, "block_table[0]", lambda a: dict(block_table=changed(a["block_table"], (0, 0), -1))),
    "block_table: needed second": (V, "block_table[1]", lambda a: dict(lengths=np.array([43, 25], np.int32))),
    "pages: int8": (T, "pages", lambda a: dict(pages=a["pages"].view(np.int8))),
    "pages: record": (V, "pages", lambda a: dict(pages=aligned_pages(4, 2, PLAN.record_bytes - 64))),
    "pages: two dimensions": (V, "pages", lambda a: dict(pages=a["pages"][0])),
    "pages: unaligned": (V, "pages", lambda a: dict(pages=unaligned(a["pages"]))),
    "pages: every other": (V, "pages", lambda a: dict(pages=a["pages"][::2])),
}

EXACT: Faults = {
    "sink_v: missing": (V, "sink_v", lambda a: dict(sink_v=None)),
    "sink_v: alone": (V, "sink_v", lambda a: dict(sink_k=None)),
    "sink_k: float16": (T, "sink_k", lambda a: dict(sink_k=a["sink_k"].astype(np.float16))),
    "sink_k: shape": (V, "sink_k", lambda a: dict(sink_k=floats(2, 3, 2, 64))),
    "sink_v: other number": (V, "sink_v", lambda a: dict(sink_v=floats(2, 2, 3, 64))),
    "window_v: missing": (V, "window_v", lambda a: dict(window_v=None)),
    "window_k: float64": (T, "window_k", lambda a: dict(window_k=a["window_k"].astype(np.float64))),
    "window_k: head_dim": (V, "window_k", lambda a: dict(window_k=floats(2, 2, 8, 32))),
    "window_v: other number": (V, "window_v", lambda a: dict(window_v=floats(2, 2, 9, 64))),
    "window_k: order": (
        V,
        "window_k",
        lambda a: dict(window_k=a["window_k"].transpose(0, 1, 3, 2).copy().swapaxes(2, 3)),
    ),
    "dtype: unknown": (V, "dtype", lambda a: dict(dtype="float64")),
    "dtype: a type": (T, "dtype", lambda a: dict(dtype=np.float32)),
    "threads: negative": (V, "threads", lambda a: dict(threads=-1)),
    "threads: a float": (T, "threads", lambda a: dict(threads=1.5)),
}

FLAT = ((1 * 2 + 0) * 40 + 39) * 64 + 5  # k[1, 0, 39, 5]
LAST = 2 * 2 * 40 * 64 - 1
APPEND: Faults = {
    "k: float64": (T, "k", lambda a: dict(k=a["k"].astype(np.float64))),
    "k: big-endian": (T, "k", lambda a: dict(k=a["k"].astype(">f4"))),
    "k: bfloat16 without a word": (T, "k", lambda a: dict(k=ref.narrow(a["k"], "bfloat16"))),
    "k: said to be bfloat16": (T, "k", lambda a: dict(dtype="bfloat16")),
    "k: a list": (T, "k", lambda a: dict(k=[1.0])),
    "k: three dimensions": (V, "k", lambda a: dict(k=a["k"][0])),
    "k: head_dim": (V, "k", lambda a: dict(k=floats(2, 2, 40, 32), v=floats(2, 2, 40, 32))),
    "k: rows not dense": (V, "k", lambda a: dict(k=floats(2, 2, 40, 128)[..., ::2])),
    "k: backwards": (V, "k", lambda a: dict(k=a["k"][:, :, ::-1])),
    "k: NaN": (V, f"k[{FLAT}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), np.nan))),
    "k: inf": (V, f"k[{FLAT}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), np.inf))),
    "k: -inf": (V, f"k[{FLAT}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), -np.inf))),
    "k: too large": (V, f"k[{FLAT}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), -16385))),
    "v: NaN": (V, f"v[{FLAT}]", lambda a: dict(v=changed(a["v"], (1, 0, 39, 5), np.nan))),
    "v: NaN at the end": (V, f"v[{LAST}]", lambda a: dict(v=changed(a["v"], (1, 1, 39, 63), np.nan))),
    "v: None": (T, "v", lambda a: dict(v=None)),
    "v: float16": (T, "v", lambda a: dict(v=a["v"].astype(np.float16))),
    "v: tokens": (V, "v", lambda a: dict(v=floats(2, 2, 39, 64))),
    "v: heads": (V, "v", lambda a: dict(v=floats(2, 1, 40, 64))),
    "v: though none in the plan": (V, "v", lambda a: dict(plan=KEYS_ONLY.words)),
    "pages: heads": (V, "pages", lambda a: dict(pages=aligned_pages(4, 1, PLAN.record_bytes))),
    "pages: read-only": (V, "pages", lambda a: dict(pages=locked(aligned_pages(4, 2, PLAN.record_bytes)))),
    "window_v: read-only": (V, "window_v", lambda a: dict(window_v=locked(a["window_v"].copy()))),
    "sink_k: read-only": (V, "sink_k", lambda a: dict(sink_k=locked(a["sink_k"].copy()))),
    "window_v: is window_k": (V, "window_v", lambda a: dict(window_v=a["window_k"])),
    "window_k: part of k": (
        V,
        "window_k",
        lambda a: dict(window_k=a["k"].reshape(-1)[: 2 * 2 * 8 * 64].reshape(2, 2, 8, 64)),
    ),
    **PLANS,
    **TRANSFORMS,
    **VALUE_TRANSFORMS,
    **TABLES,
    **EXACT,
}

ATTEND: Faults = {
    "q: float64": (T, "q", lambda a: dict(q=a["q"].astype(np.float64))),
    "q: a list": (T, "q", lambda a: dict(q=[[1.0]])),
    "q: three dimensions": (V, "q", lambda a: dict(q=a["q"][0])),
    "q: head_dim": (V, "q", lambda a: dict(q=floats(2, 4, 3, 72))),
    "q: heads": (V, "query_heads", lambda a: dict(q=floats(2, 3, 3, 64), out=None)),
    "q: rows not dense": (V, "q", lambda a: dict(q=floats(2, 4, 3, 128)[..., ::2])),
    "plan: without values": (
        V,
        "plan",
        lambda a: dict(
            plan=KEYS_ONLY.words, pages=aligned_pages(4, 2, KEYS_ONLY.record_bytes), sink_v=None, window_v=None
        ),
    ),
    "starts: negative": (V, "starts[1]", lambda a: dict(starts=np.array([0, -1], np.int32))),
    "starts: beyond the length": (V, "starts[1]", lambda a: dict(starts=np.array([0, 26], np.int32))),
    "starts: int64": (T, "starts", lambda a: dict(starts=np.array([0, 1]))),
    "starts: shape": (V, "starts", lambda a: dict(starts=np.zeros(1, np.int32))),
    "fresh_v: missing": (V, "fresh_v", lambda a: dict(fresh_v=None)),
    "fresh_k: tokens": (V, "fresh_k", lambda a: dict(fresh_k=floats(2, 2, 4, 64))),
    "fresh_v: float16": (T, "fresh_v", lambda a: dict(fresh_v=a["fresh_v"].astype(np.float16))),
    "fresh_k: not causal": (V, "fresh_k", lambda a: dict(causal=False)),
    "sliding_window: not causal": (
        V,
        "sliding_window",
        lambda a: dict(causal=False, sliding_window=5, fresh_k=None, fresh_v=None),
    ),
    "sliding_window: negative": (V, "sliding_window", lambda a: dict(sliding_window=-1)),
    "softmax_scale: NaN": (V, "softmax_scale", lambda a: dict(softmax_scale=float("nan"))),
    "softmax_scale: inf": (V, "softmax_scale", lambda a: dict(softmax_scale=float("inf"))),
    "softmax_scale: text": (T, "softmax_scale", lambda a: dict(softmax_scale="1")),
    "softcap: NaN": (V, "softcap", lambda a: dict(softcap=float("nan"))),
    "softcap: beyond float32": (V, "softcap", lambda a: dict(softcap=1e300)),
    "out: shape": (V, "out", lambda a: dict(out=floats(2, 4, 4, 64))),
    "out: float16": (T, "out", lambda a: dict(out=a["out"].astype(np.float16))),
    "out: read-only": (V, "out", lambda a: dict(out=locked(a["out"].copy()))),
    "out: order": (V, "out", lambda a: dict(out=floats(2, 3, 4, 64).transpose(0, 2, 1, 3))),
    "out: in the pages": (
        V,
        "out",
        lambda a: dict(out=a["pages"].reshape(-1)[: 4 * 2 * 4 * 3 * 64].view(np.float32).reshape(2, 4, 3, 64)),
    ),
    "sink_k: batch": (V, "sink_k", lambda a: dict(sink_k=floats(1, 2, 2, 64))),
    **PLANS,
    **TRANSFORMS,
    **VALUE_TRANSFORMS,
    **TABLES,
    **EXACT,
}

DEQUANTIZE: Faults = {
    "lengths: int64": (T, "lengths", lambda a: dict(lengths=np.array([40, 25]))),
    "lengths: shape": (V, "lengths", lambda a: dict(lengths=np.zeros(3, np.int32))),
    "lengths: negative": (V, "lengths[0]", lambda a: dict(lengths=np.array([-1, 25], np.int32))),
    "lengths: beyond max_tokens": (V, "lengths[1]", lambda a: dict(lengths=np.array([40, 51], np.int32))),
    "max_tokens: beyond the table": (V, "max_tokens", lambda a: dict(max_tokens=65)),
    "max_tokens: negative": (V, "max_tokens", lambda a: dict(max_tokens=-1)),
    "block_table: page 4": (V, "block_table[1]", lambda a: dict(block_table=changed(a["block_table"], (0, 1), 4))),
    "block_table: page -1": (V, "block_table[2]", lambda a: dict(block_table=changed(a["block_table"], (1, 0), -1))),
    "pages: unaligned": (V, "pages", lambda a: dict(pages=unaligned(a["pages"]))),
    **PLANS,
    **TRANSFORMS,
    **VALUE_TRANSFORMS,
}

DOT: Faults = {
    "n: more than the pages": (V, "n", lambda a: dict(n=65)),
    "n: negative": (V, "n", lambda a: dict(n=-1)),
    "queries: float64": (T, "queries", lambda a: dict(queries=a["queries"].astype(np.float64))),
    "queries: one dimension": (V, "queries", lambda a: dict(queries=a["queries"][0])),
    "queries: head_dim": (V, "queries", lambda a: dict(queries=floats(3, 56))),
    "queries: order": (V, "queries", lambda a: dict(queries=np.asfortranarray(a["queries"]))),
    "pages: two heads": (V, "pages", lambda a: dict(pages=aligned_pages(1, 2, KEYS_ONLY.record_bytes))),
    "pages: unaligned": (V, "pages", lambda a: dict(pages=unaligned(a["pages"]))),
    "key_rotation: not dense": TRANSFORMS["key_rotation: not dense"],
    "key_steps: zero": (V, "key_steps[1]", lambda a: dict(key_steps=np.array([[1, 0]], np.float32))),
    "threads: negative": EXACT["threads: negative"],
    **PLANS,
}

MERGE: Faults = {
    "outs: no parts": (V, "outs|parts", lambda a: dict(outs=floats(0, 5, 8), lses=floats(0, 5))),
    "outs: float16": (T, "outs", lambda a: dict(outs=a["outs"].astype(np.float16))),
    "outs: one dimension": (V, "outs", lambda a: dict(outs=floats(3))),
    "outs: order": (V, "outs", lambda a: dict(outs=a["outs"][:, :, ::2])),
    "lses: shape": (V, "lses", lambda a: dict(lses=floats(3, 4))),
    "lses: float64": (T, "lses", lambda a: dict(lses=a["lses"].astype(np.float64))),
}

ROTATE: Faults = {
    "x: float64": (T, "x", lambda a: dict(x=a["x"].astype(np.float64))),
    "x: shape": (V, "x", lambda a: dict(x=floats(3, 32))),
    "x: order": (V, "x", lambda a: dict(x=np.asfortranarray(a["x"]))),
    "matrix: missing": (V, "key_rotation|matrix", lambda a: dict(plan=DENSE.words)),
    "matrix: not dense": (V, "key_rotation|matrix", lambda a: dict(matrix=orthogonal(64))),
    "matrix: shape": (V, "matrix", lambda a: dict(plan=DENSE.words, matrix=orthogonal(32))),
    **PLANS,
}

OPERATIONS = {
    "append": (append_arguments, APPEND),
    "attend": (attend_arguments, ATTEND),
    "dequantize": (dequantize_arguments, DEQUANTIZE),
    "dot": (dot_arguments, DOT),
    "merge": (merge_arguments, MERGE),
    "rotate": (rotate_arguments, ROTATE),
}
ALL = [
    pytest.param(op, make, *fault, id=f"{op}, {what}")
    for op, (make, faults) in OPERATIONS.items()
    for what, fault in faults.items()
]


def snapshot(arguments: Arguments) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}


@pytest.mark.parametrize("op, make, exception, name, fault", ALL)
def test_faults(op: str, make: Callable[[], Arguments], exception: type[Exception], name: str, fault: Callable) -> None:
    arguments = make()
    arguments |= fault(arguments)
    before = snapshot(arguments)
    wants = r"must be (given exactly if .+|.+, got .+)"
    pattern = "|".join(rf"^{op}: `{re.escape(n)}` {wants}" for n in name.split("|"))
    with pytest.raises(exception, match=pattern) as caught:
        getattr(_core, op)(**arguments)
    assert type(caught.value) is exception
    assert snapshot(arguments) == before


@pytest.mark.parametrize("op, make", [(op, make) for op, (make, _) in OPERATIONS.items()])
def test_without_faults(op: str, make: Callable[[], Arguments]) -> None:
    """The arguments that the faults are planted in are good ones."""
    getattr(_core, op)(**make())


@pytest.mark.parametrize("op, make", [(op, make) for op, (make, _) in OPERATIONS.items()])
def test_unknown_and_missing_arguments(op: str, make: Callable[[], Arguments]) -> None:
    with pytest.raises(TypeError, match=r"bogus|keyword arguments"):
        getattr(_core, op)(**make(), bogus=1)
    with pytest.raises(TypeError, match=op):
        getattr(_core, op)()


def test_the_message_says_it_all() -> None:
    arguments = append_arguments()
    arguments["block_table"][1, 0] = 8
    with pytest.raises(ValueError) as caught:
        _core.append(**arguments)
    assert str(caught.value) == "append: `block_table[2]` must be in 0..n_pages - 1, got 8"
    arguments = append_arguments()
    arguments["v"][0, 1, 3, 2] = np.inf
    with pytest.raises(ValueError) as caught:
        _core.append(**arguments)
    where = (1 * 40 + 3) * 64 + 2
    assert str(caught.value) == f"append: `v[{where}]` must be finite and at most 16384 in magnitude, got inf"


def test_an_overflowed_window_needs_the_fresh_tokens() -> None:
    """Without them early queries of a chunk would silently miss what it pushed out of the window."""
    arguments = attend_arguments()
    del arguments["fresh_k"], arguments["fresh_v"]
    with pytest.raises(ValueError, match=r"`fresh_k` must be given: early queries need what the new tokens pushed out"):
        _core.attend(**arguments)
    arguments["lengths"] = np.array([10, 9], np.int32)  # two sinks and a window of eight still hold everything
    assert np.isfinite(_core.attend(**arguments)[0]).all()
    arguments["lengths"] = np.array([11, 9], np.int32)
    with pytest.raises(ValueError, match="`fresh_k` must be given"):
        _core.attend(**arguments)


@pytest.mark.parametrize("name", ["key_centre", "value_centre"])
def test_centres_are_looked_at(name: str) -> None:
    centre = floats(2, 2, 64)
    centre[1, 0, 5] = np.inf
    with pytest.raises(
        ValueError, match=rf"`{name}\[{2 * 64 + 5}\]` must be finite and at most 16384 in magnitude, got inf"
    ):
        _core.append(**append_arguments(), **{name: centre})


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "largest", "next_one"),
    [("float32", 16384, 16384.002), ("float16", 16384, 16400), ("bfloat16", 0x4680, 0x4681)],
)
def test_the_largest_input_is_accepted(dtype: str, largest: float, next_one: float, sign: int) -> None:
    """bfloat16 by its bits."""
    arguments = append_arguments()
    assert _core.MAX_INPUT == 16384
    kind = np.uint16 if dtype == "bfloat16" else dtype
    for name in ("k", "v", "sink_k", "sink_v", "window_k", "window_v"):
        arguments[name] = np.zeros(arguments[name].shape, kind)
    arguments["dtype"] = dtype

    def signed(x: float) -> float:
        return int(x) | (sign < 0) << 15 if dtype == "bfloat16" else sign * x

    arguments["k"][...] = signed(largest)
    _core.append(**arguments)
    arguments["k"][0, 1, 3, 2] = signed(next_one)
    with pytest.raises(ValueError, match="must be finite and at most 16384 in magnitude, got -?16"):
        _core.append(**arguments)


OTHERS = {
    "haar: head_dim": (V, "haar", "head_dim", lambda: _core.haar(0, 12)),
    "haar: seed": (V, "haar", "seed", lambda: _core.haar(-1, 8)),
    "random: block": (V, "random", "block", lambda: _core.random(0, 0, 2**64)),
    "new_pages: n_pages": (V, "new_pages", "n_pages", lambda: _core.new_pages(PLAN.words, -1, 1)),
    "new_pages: kv_heads": (V, "new_pages", "kv_heads", lambda: _core.new_pages(PLAN.words, 1, 0)),
    "new_pages: too many": (V, "new_pages", "n_pages", lambda: _core.new_pages(PLAN.words, 2**62, 4)),
    "record_bytes: plan": (V, "record_bytes", "len(plan)", lambda: _core.record_bytes(())),
    "plan_info: plan": (V, "plan_info", "head_dim", lambda: _core.plan_info(words(1, 12))),
    "kernel_name: operation": (V, "kernel_name", "operation", lambda: _core.kernel_name("fly", PLAN.words)),
    "set_num_threads: 0": (V, "set_num_threads", "n", lambda: _core.set_num_threads(0)),
    "set_num_threads: text": (T, "set_num_threads", "n", lambda: _core.set_num_threads("two")),
    "set_isa: misspelt": (RuntimeError, "set_isa", "", lambda: _core.set_isa("avx3")),
    "set_isa: a number": (T, "set_isa", "name", lambda: _core.set_isa(3)),
    "file_header_read: text": (T, "file_header_read", "data", lambda: _core.file_header_read("text", 4)),
    "file_header_read: size": (V, "file_header_read", "file_bytes", lambda: _core.file_header_read(b"", -1)),
    "file_header_write: vectors": (
        V,
        "file_header_write",
        "vectors",
        lambda: _core.file_header_write(PLAN.words, -1, 0, 0),
    ),
    "file_header_write: plan": (V, "file_header_write", "len(plan)", lambda: _core.file_header_write((), 0, 0, 0)),
}


@pytest.mark.parametrize("exception, op, name, call", OTHERS.values(), ids=OTHERS)
def test_other_faults(exception: type[Exception], op: str, name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(exception, match=rf"^{op}: `{re.escape(name) or '.*'}` must be .+, got .+"):
        call()


# ---- hostile numbers in arrays that are otherwise right ----

anything = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 80))


def outcome(op: str, arguments: Arguments) -> None:
    """It works, or it is a ValueError that has changed nothing."""
    before = snapshot(arguments)
    try:
        getattr(_core, op)(**arguments)
    except ValueError as error:
        assert re.match(rf"{op}: `.*` must be", str(error))
        assert snapshot(arguments) == before


@given(st.lists(anything, min_size=4, max_size=4), st.lists(anything, min_size=2, max_size=2))
def test_hostile_tables_append(table: list[int], lengths: list[int]) -> None:
    arguments = append_arguments()
    if table[0] == table[1] or table[0] in table[2:]:
        table = [0, 1, 2, 3]  # no page may be written through two entries
    arguments |= dict(block_table=np.array(table, np.int32).reshape(2, 2), lengths=np.array(lengths, np.int32))
    outcome("append", arguments)


@given(
    st.lists(anything, min_size=4, max_size=4),
    st.lists(anything, min_size=2, max_size=2),
    st.lists(anything, min_size=2, max_size=2),
    st.one_of(st.just(0), anything),
    st.booleans(),
)
def test_hostile_tables_attend(
    table: list[int], lengths: list[int], starts: list[int], sliding: int, fresh: bool
) -> None:
    arguments = attend_arguments()
    arguments |= dict(block_table=np.array(table, np.int32).reshape(2, 2), lengths=np.array(lengths, np.int32))
    arguments |= dict(starts=np.array(starts, np.int32), sliding_window=sliding)
    if not fresh:
        arguments |= dict(fresh_k=None, fresh_v=None)
    outcome("attend", arguments)
