"""The tables of bad arguments that every binding must refuse; test_refusals.py runs them.

Each operation has valid NumPy arguments. Each row of its table replaces some of them by bad ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import reference as ref
from cases import aligned_pages, orthogonal

PLAN = ref.plan(64, 3, 2, page_tokens=32)
WAVE = ref.plan(64, 3, 2, page_tokens=32, wave_pairs=8, metric=2)
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


def wave_arguments(**spoiled: Any) -> Arguments:
    """`WAVE`, turns, and moments of each head: 16 amplitudes, 64 scales, a direction of 64, a stretch padded to 4."""
    turns, moments = np.zeros((8, 3), np.int32), np.ones((2, 148), np.float32)
    turns[:, 1], moments[:, 80:144] = 1, 0.125
    made = dict(plan=WAVE.words, key_turns=turns, key_numbers=moments) | spoiled
    return {name: x for name, x in made.items() if x is not None}


def changed(array: np.ndarray, at: Any, value: float) -> np.ndarray:
    """A copy with one element set. Not for pages: the copy does not keep their alignment."""
    result = array.copy()
    result[at] = value
    return result


def apart(pages: np.ndarray) -> np.ndarray:
    """The same pages, with unused bytes between their heads."""
    room = np.zeros((len(pages), 2 * pages.shape[1], pages.shape[2]), np.uint8)[:, ::2]
    room[:] = pages
    return room


def locked(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def unaligned(pages: np.ndarray) -> np.ndarray:
    raw = aligned_pages(pages.shape[0] + 1, *pages.shape[1:]).reshape(-1)
    return raw[16 : 16 + pages.size].reshape(pages.shape)


HEADER = len(PLAN.words) - 2 * PLAN.groups  # words before those of the groups


def words(at: int, value: Any) -> tuple:
    return (*PLAN.words[:at], value, *PLAN.words[at + 1 :])


V, T = ValueError, TypeError
# Fault -> (exception, the argument that its message names, the arguments that replace valid ones).
Faults = dict[str, tuple[type[Exception], str, Callable[[Arguments], Arguments]]]

PLANS: Faults = {
    "plan: None": (T, "plan", lambda a: dict(plan=None)),
    "plan: a number": (T, "plan", lambda a: dict(plan=3)),
    "plan: a dict": (T, "plan", lambda a: dict(plan={1: 2})),
    "plan: a name": (T, "plan[0]", lambda a: dict(plan="default")),
    "plan: empty": (V, "len(plan)", lambda a: dict(plan=())),
    "plan: too short": (V, "len(plan)", lambda a: dict(plan=PLAN.words[:-1])),
    "plan: too long": (V, "len(plan)", lambda a: dict(plan=(*PLAN.words, 3))),
    "plan: far too long": (V, "len(plan)", lambda a: dict(plan=(*PLAN.words, *[3] * 400))),
    "plan: floats": (T, "plan[7]", lambda a: dict(plan=words(7, 3.0))),
    "plan: beyond 64 bits": (V, "plan[6]", lambda a: dict(plan=words(6, 2**70))),
    "plan: an array without dimensions": (T, "plan", lambda a: dict(plan=np.array(None, dtype=object))),
    "plan: version": (V, "plan[0]", lambda a: dict(plan=words(0, 4))),
    "plan: group 16": (V, "len(plan)", lambda a: dict(plan=(*words(3, 16)[:2], 128, *words(3, 16)[3:]))),
    "plan: group 8": (V, "group", lambda a: dict(plan=words(3, 8))),
    "plan: head_dim 12": (V, "head_dim", lambda a: dict(plan=words(1, 12))),
    "plan: head_dim 0": (V, "head_dim", lambda a: dict(plan=words(1, 0))),
    "plan: head_dim -64": (V, "head_dim", lambda a: dict(plan=words(1, -64))),
    "plan: head_dim with values": (V, "head_dim", lambda a: dict(plan=(*words(1, 520)[:HEADER], *2 * (19, *[3] * 16)))),
    "plan: page_tokens 100": (V, "page_tokens", lambda a: dict(plan=words(2, 100))),
    "plan: page_tokens 160": (V, "page_tokens", lambda a: dict(plan=words(2, 160))),
    "plan: rotation": (V, "key_rotation", lambda a: dict(plan=words(7, 3))),
    "plan: codebook": (V, "codebook", lambda a: dict(plan=words(4, -1))),
    "plan: scale": (V, "scale", lambda a: dict(plan=words(5, 4))),
    "plan: seed": (V, "seed", lambda a: dict(plan=words(6, -1))),
    "plan: bits 9": (V, "key_bits[1]", lambda a: dict(plan=words(HEADER + 1, 9))),
    "plan: bits -1": (V, "value_bits[0]", lambda a: dict(plan=words(HEADER + 2, -1))),
    "plan: wave": (V, "wave_pairs", lambda a: dict(plan=words(15, 4))),
    "plan: metric": (V, "metric", lambda a: dict(plan=words(16, 6))),
    "plan: no key bits": (V, "key_bits", lambda a: dict(plan=(*PLAN.words[:HEADER], 16, 0, 18, 2))),
}


def steps(*rows: tuple[float, float]) -> np.ndarray:
    """key_numbers or value_numbers of a plan of two groups, with steps alone."""
    return np.array([(*row, 1, 1) for row in rows], np.float32)


def dense(made: np.ndarray) -> Arguments:
    return dict(plan=DENSE.words, rotation=made)


TRANSFORMS: Faults = {
    "rotation: not dense": (V, "rotation", lambda a: dict(rotation=floats(1, 64, 64))),
    "rotation: missing": (V, "rotation", lambda a: dict(plan=DENSE.words)),
    "rotation: shape": (V, "rotation", lambda a: dense(floats(1, 64, 32))),
    "rotation: rows of one side": (V, "rotation", lambda a: dense(floats(1, 64, 64))),
    "rotation: heads": (V, "rotation", lambda a: dense(floats(3, 128, 64))),
    "rotation: no heads": (V, "rotation", lambda a: dense(floats(128, 64))),
    "rotation: float64": (T, "rotation", lambda a: dense(np.ones((1, 128, 64)))),
    "rotation: order": (V, "rotation", lambda a: dense(floats(1, 64, 128).transpose(0, 2, 1))),
    "key_turns: missing": (V, "key_turns", lambda a: wave_arguments(key_turns=None)),
    "key_turns: no wave": (V, "key_turns", lambda a: wave_arguments(plan=words(16, 2), key_numbers=floats(2, 132))),
    "key_turns: shape": (V, "key_turns", lambda a: wave_arguments(key_turns=np.ones((16, 3), np.int32))),
    "key_turns: int64": (T, "key_turns", lambda a: wave_arguments(key_turns=np.ones((8, 3), np.int64))),
    "key_turns: channel": (
        V,
        "key_turns[1]",
        lambda a: wave_arguments(key_turns=np.full((8, 3), (63, 64, 5), np.int32)),
    ),
    "key_numbers: missing": (V, "key_numbers", lambda a: wave_arguments(key_numbers=None)),
    "key_numbers: neither wave nor metric": (V, "key_numbers", lambda a: dict(key_numbers=floats(2, 148))),
    "key_numbers: too few moments": (V, "key_numbers", lambda a: wave_arguments(key_numbers=floats(2, 144))),
    "key_numbers: heads": (V, "key_numbers", lambda a: wave_arguments(key_numbers=floats(3, 148))),
    "key_numbers: float64": (T, "key_numbers", lambda a: wave_arguments(key_numbers=np.ones((2, 148)))),
    "key_numbers: one dimension": (V, "key_numbers", lambda a: dict(key_numbers=floats(64))),
    "key_numbers: per sequence": (V, "key_numbers", lambda a: dict(key_numbers=floats(2, 2, 64))),
    "key_numbers: float16": (T, "key_numbers", lambda a: dict(key_numbers=np.zeros((2, 64), np.float16))),
    "key_numbers: three columns": (V, "key_numbers", lambda a: dict(key_numbers=floats(2, 3))),
    "key_numbers: a step of 0": (V, "key_numbers[5]", lambda a: dict(key_numbers=steps((1, 1), (1, 0)))),
    "key_numbers: a negative step": (V, "key_numbers[0]", lambda a: dict(key_numbers=steps((-1, 1), (1, 1)))),
    "key_numbers: a step of NaN": (V, "key_numbers[1]", lambda a: dict(key_numbers=steps((1, np.nan), (1, 1)))),
    "key_numbers: an infinite step": (V, "key_numbers[4]", lambda a: dict(key_numbers=steps((1, 1), (np.inf, 1)))),
    "key_numbers: a step of 0 behind a centre": (
        V,
        "key_numbers[133]",
        lambda a: dict(key_numbers=np.concatenate([floats(2, 64), steps((1, 1), (1, 0))], 1)),
    ),
}
VALUE_TRANSFORMS: Faults = {
    "value_numbers: half a centre": (V, "value_numbers", lambda a: dict(value_numbers=floats(2, 32))),
    "value_numbers: a step of 0": (V, "value_numbers[0]", lambda a: dict(value_numbers=steps((0, 1), (1, 1)))),
}

TABLES: Faults = {
    "lengths: uint32": (T, "lengths", lambda a: dict(lengths=a["lengths"].astype(np.uint32))),
    "block_table: big-endian": (T, "block_table", lambda a: dict(block_table=a["block_table"].astype(">i4"))),
    "block_table: one dimension": (V, "block_table", lambda a: dict(block_table=a["block_table"].ravel())),
    "pages: bytes": (T, "pages", lambda a: dict(pages=a["pages"].tobytes())),
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
    "pages: heads apart": (V, "pages", lambda a: dict(pages=apart(a["pages"]))),
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
PLACE = "1, 0, 39, 5"  # as the operators write it
LAST = 2 * 2 * 40 * 64 - 1
APPEND: Faults = {
    "k: None": (T, "k", lambda a: dict(k=None)),
    "k: objects": (T, "k", lambda a: dict(k=a["k"].astype(object))),
    "k: a number": (V, "k", lambda a: dict(k=np.array(1, np.float32))),
    "k: order": (V, "k", lambda a: dict(k=np.asfortranarray(a["k"]))),
    "k: float64": (T, "k", lambda a: dict(k=a["k"].astype(np.float64))),
    "k: big-endian": (T, "k", lambda a: dict(k=a["k"].astype(">f4"))),
    "k: bfloat16 without a word": (T, "k", lambda a: dict(k=ref.narrow(a["k"], "bfloat16"))),
    "k: said to be bfloat16": (T, "k", lambda a: dict(dtype="bfloat16")),
    "k: a list": (T, "k", lambda a: dict(k=[1.0])),
    "k: three dimensions": (V, "k", lambda a: dict(k=a["k"][0])),
    "k: head_dim": (V, "k", lambda a: dict(k=floats(2, 2, 40, 32), v=floats(2, 2, 40, 32))),
    "k: rows not dense": (V, "k", lambda a: dict(k=floats(2, 2, 40, 128)[..., ::2])),
    "k: backwards": (V, "k", lambda a: dict(k=a["k"][:, :, ::-1])),
    "k: NaN": (V, f"k[{FLAT}]|k[{PLACE}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), np.nan))),
    "k: inf": (V, f"k[{FLAT}]|k[{PLACE}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), np.inf))),
    "k: -inf": (V, f"k[{FLAT}]|k[{PLACE}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), -np.inf))),
    "k: too large": (V, f"k[{FLAT}]|k[{PLACE}]", lambda a: dict(k=changed(a["k"], (1, 0, 39, 5), -16385))),
    "v: NaN": (V, f"v[{FLAT}]|v[{PLACE}]", lambda a: dict(v=changed(a["v"], (1, 0, 39, 5), np.nan))),
    "v: NaN at the end": (V, f"v[{LAST}]|v[1, 1, 39, 63]", lambda a: dict(v=changed(a["v"], (1, 1, 39, 63), np.nan))),
    "v: None": (V, "v", lambda a: dict(v=None)),
    "v: float16": (T, "v", lambda a: dict(v=a["v"].astype(np.float16))),
    "v: tokens": (V, "v", lambda a: dict(v=floats(2, 2, 39, 64))),
    "v: heads": (V, "v", lambda a: dict(v=floats(2, 1, 40, 64))),
    "v: though none in the plan": (
        V,
        "v",
        lambda a: dict(
            plan=KEYS_ONLY.words, pages=aligned_pages(4, 2, KEYS_ONLY.record_bytes), sink_v=None, window_v=None
        ),
    ),
    "sink_v: though no values in the plan": (
        V,
        "sink_v",
        lambda a: dict(plan=KEYS_ONLY.words, pages=aligned_pages(4, 2, KEYS_ONLY.record_bytes), v=None),
    ),
    "value_numbers: though no values in the plan": (
        V,
        "value_numbers",
        lambda a: dict(
            plan=KEYS_ONLY.words,
            pages=aligned_pages(4, 2, KEYS_ONLY.record_bytes),
            value_numbers=floats(2, 64),
            **dict.fromkeys(("v", "sink_v", "window_v")),
        ),
    ),
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
    "block_table: read from starts on": (
        V,
        "block_table[2]",
        lambda a: dict(block_table=changed(a["block_table"], (1, 0), -1), starts=np.array([0, 16], np.int32)),
    ),
    "softcap: None": (T, "softcap", lambda a: dict(softcap=None)),
    "softcap: negative": (V, "softcap", lambda a: dict(softcap=-1.0)),
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
    "max_tokens: text": (T, "max_tokens", lambda a: dict(max_tokens="3")),
    "max_tokens: enormous": (V, "max_tokens", lambda a: dict(max_tokens=2**31 - 1)),
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
    "n: a float": (T, "n", lambda a: dict(n=3.0)),
    "n: more than the pages": (V, "n", lambda a: dict(n=65)),
    "n: negative": (V, "n", lambda a: dict(n=-1)),
    "queries: float64": (T, "queries", lambda a: dict(queries=a["queries"].astype(np.float64))),
    "queries: one dimension": (V, "queries", lambda a: dict(queries=a["queries"][0])),
    "queries: head_dim": (V, "queries", lambda a: dict(queries=floats(3, 56))),
    "queries: order": (V, "queries", lambda a: dict(queries=np.asfortranarray(a["queries"]))),
    "pages: two heads": (V, "pages", lambda a: dict(pages=aligned_pages(1, 2, KEYS_ONLY.record_bytes))),
    "pages: unaligned": (V, "pages", lambda a: dict(pages=unaligned(a["pages"]))),
    "rotation: not dense": TRANSFORMS["rotation: not dense"],
    "key_numbers: a step of 0": (V, "key_numbers[1]", lambda a: dict(key_numbers=steps((1, 0)))),
    "threads: negative": EXACT["threads: negative"],
    **PLANS,
}

MERGE: Faults = {
    "outs: None": (T, "outs", lambda a: dict(outs=None)),
    "outs: no parts": (V, "outs|parts", lambda a: dict(outs=floats(0, 5, 8), lses=floats(0, 5))),
    "outs: float16": (T, "outs", lambda a: dict(outs=a["outs"].astype(np.float16))),
    "outs: one dimension": (V, "outs", lambda a: dict(outs=floats(3))),
    "outs: order": (V, "outs", lambda a: dict(outs=a["outs"][:, :, ::2])),
    "lses: shape": (V, "lses", lambda a: dict(lses=floats(3, 4))),
    "lses: float64": (T, "lses", lambda a: dict(lses=a["lses"].astype(np.float64))),
}

ROTATE: Faults = {
    "x: a number": (T, "x", lambda a: dict(x=1.0)),
    "x: no dimensions": (V, "x", lambda a: dict(x=np.array(1, np.float32))),
    "matrix: a number": (T, "matrix", lambda a: dict(plan=DENSE.words, matrix=1)),
    "x: float64": (T, "x", lambda a: dict(x=a["x"].astype(np.float64))),
    "x: shape": (V, "x", lambda a: dict(x=floats(3, 32))),
    "x: order": (V, "x", lambda a: dict(x=np.asfortranarray(a["x"]))),
    "matrix: missing": (V, "rotation|matrix", lambda a: dict(plan=DENSE.words)),
    "matrix: not dense": (V, "rotation|matrix", lambda a: dict(matrix=orthogonal(64))),
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

# Faults that the torch operators accept: they convert these dtypes and strides.
NUMPY_ALONE = {("merge", "outs: float16"), ("merge", "outs: order"), ("rotate", "x: order"), ("rotate", "x: float64")}


def snapshot(arguments: Arguments) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}
