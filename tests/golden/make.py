"""Makes the golden files: codes files that every version of this format must write again and read, and files to refuse.

    python tests/golden/make.py

good/<name>.tqcodes   header and pages of CASES[name] (plain plans, by tests/reference.py) or MODES[name] (others, by
                      tests/reference_modes.py), made from the vectors of `vectors(name)`
bad/<name>.tqcodes    each has one thing wrong, named by the file

The bytes are the format. A change that makes other bytes needs another TQ_FORMAT_VERSION, not another golden file.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import reference as ref  # noqa: E402
import reference_modes as modes  # noqa: E402
from reference import Plan, Transform  # noqa: E402

SMALL = dict(page_tokens=32)
# name: plan, number of vectors, is there a centre and are there steps?
CASES: dict[str, tuple[Plan, int, bool]] = {
    "1bit-hadamard-eden": (ref.plan(40, 1, 1, seed=11, **SMALL), 45, False),
    "2bit-hadamard-norm": (ref.plan(40, 2, 2, seed=12, scale=ref.NORM, **SMALL), 45, False),
    "3bit-none-norm-corrected": (ref.plan(40, 3, 3, rotation=ref.NONE, scale=ref.NORM_CORRECTED, **SMALL), 45, False),
    "4bit-dense-least-squares": (ref.plan(40, 4, 4, rotation=ref.DENSE, scale=ref.LEAST_SQUARES, **SMALL), 45, False),
    "5bit-sphere-keys-only": (ref.plan(40, 5, codebook=ref.SPHERE, seed=15, **SMALL), 45, False),
    "mixed-centred-steps": (ref.plan(104, (5, 0, 3, 1), (2, 4, 0, 5), seed=2**62 + 1, **SMALL), 33, True),
    "whole-page": (ref.plan(8, 2, 3, seed=17), 128, False),
    "empty": (ref.plan(8, 4), 0, False),
    "groups-of-16-centred-steps": (ref.plan(40, (5, 8, 3), (8, 0, 1), seed=18, page_tokens=64, group=16), 77, True),
    "6bit-and-8bit": (ref.plan(104, (6, 8, 0, 6), (8, 6, 5, 8), seed=21, **SMALL), 45, False),
    "6bit-8bit-settled-steps": (ref.plan(128, (6, 8, 4, 6), (8, 8, 6, 6), seed=22, **SMALL), 37, True),
    "groups-of-16-6bit": (ref.plan(40, (6, 8, 6), (6, 0, 6), seed=23, page_tokens=64, group=16), 77, True),
    "settled": (ref.plan(128, (4, 3, 2, 1), (2, 5, 0, 4), seed=19, **SMALL), 37, False),
    "settled-centred-steps": (ref.plan(64, (3, 4), (4, 1), seed=20, **SMALL), 37, True),
}
# the others: plan and number of vectors
MODES: dict[str, tuple[modes.Plan, int]] = {
    "blocks-mixed-widths": (modes.Plan(104, modes.Side((5, 2, 4, 1), (0, 1, 3)), seed=31, **SMALL), 37),
    "blocks-6bit-8bit": (
        modes.Plan(104, modes.Side((6, 8, 6, 8), (0, 1, 3)), modes.Side((8, 6, 3, 6)), seed=37, **SMALL),
        37,
    ),
    "6bit-table-affine-sketch": (
        modes.Plan(
            40,
            modes.Side((6, 6), (0,), ref.NONE, modes.TABLE, modes.SIGN),
            modes.Side((6, 6), (0, 1), ref.HADAMARD, modes.AFFINE, modes.GAUSSIAN, 16),
            seed=38,
            **SMALL,
        ),
        37,
    ),
    "two-rotations": (
        modes.Plan(40, modes.Side((3, 4), rotation=ref.NONE), modes.Side((2, 5), rotation=ref.DENSE), **SMALL),
        37,
    ),
    "affine-gaussian-sketch": (
        modes.Plan(
            40,
            modes.Side((3, 3), (0,), ref.DENSE, modes.AFFINE, modes.GAUSSIAN, 24),
            modes.Side((8, 5), (0, 1), ref.NONE, modes.AFFINE),
            seed=33,
            **SMALL,
        ),
        37,
    ),
    "absmax-sign-sketch": (
        modes.Plan(
            40,
            modes.Side((8, 8), (0, 1), ref.NONE, modes.ABSMAX),
            modes.Side((2, 2), (0,), ref.HADAMARD, modes.ABSMAX, modes.SIGN),
            seed=34,
            **SMALL,
        ),
        37,
    ),
    "table-sign-sketch": (
        modes.Plan(
            40,
            modes.Side((3, 3), (0,), ref.DENSE, modes.TABLE, modes.SIGN),
            modes.Side((2, 2), (0,), ref.NONE, modes.TABLE),
            **SMALL,
        ),
        37,
    ),
    "uniform-least-squares-sketch": (
        modes.Plan(
            64,
            modes.Side((3, 3), (0,), ref.HADAMARD, modes.CODEBOOK, modes.GAUSSIAN, 16),
            modes.Side((4, 4)),
            codebook=modes.UNIFORM,
            scale=ref.LEAST_SQUARES,
            seed=36,
            page_tokens=64,
        ),
        70,
    ),
}


def numbers(stream: int, *shape: int) -> ref.F32:
    """Float32 in [-4, 4), exact multiples of 2^-21, from Philox alone; channels differ in size."""
    count = int(np.prod(shape))
    words = [w for block in range(-(-count // 4)) for w in ref.random(2024, stream, block)][:count]
    x = ((np.array(words, np.int64) >> 8) / 2.0**21 - 4.0).astype(np.float32).reshape(shape)
    return np.ldexp(x, np.arange(shape[-1]) % 5 - 2)


def vectors(name: str) -> tuple[ref.F32, ref.F32 | None]:
    """Keys and values [vectors, head_dim]; the third is zero."""
    p, n = (CASES | MODES)[name][:2]
    stream = 10 * zlib.crc32(name.encode())
    has_values = p.value is not None if name in MODES else any(p.value_bits)
    k, v = numbers(stream, n, p.head_dim), numbers(stream + 1, n, p.head_dim) if has_values else None
    for x in (k, v):
        if x is not None:
            x[2:3] = 0
    return k, v


def transforms(name: str) -> tuple[Transform, Transform]:
    """Of keys and values, for one head."""
    p, _, centred = CASES[name]
    matrix = ref.haar(19, p.head_dim)[None] if p.rotation == ref.DENSE else None
    if not centred:
        return Transform(matrix), Transform(matrix)
    return tuple(
        Transform(matrix, numbers(5 + i, 1, p.head_dim), np.abs(numbers(7 + i, 1, p.groups)) + np.float32(0.125))
        for i in range(2)
    )


def mode_transforms(name: str) -> tuple[modes.Transform, modes.Transform]:
    """Of keys and values of one of MODES."""
    p, _ = MODES[name]
    made = []
    for i, side in enumerate((p.key, p.value)):
        rows, table = [], None
        if side is not None and side.rotation == ref.DENSE:
            rows.append(ref.haar(19, p.head_dim))
        if side is not None and side.sketch == modes.GAUSSIAN:
            rows.append(modes.gaussian(23, side.sketch_rows, p.head_dim))
        if side is not None and side.levels == modes.TABLE:
            levels = np.arange(2 ** side.bits[0], dtype=np.float32) / 2 - (2 ** side.bits[0] - 1) / np.float32(4)
            table = np.append(levels, np.float32(0.25)) if side.sketch == modes.SIGN else levels
        centre = numbers(5 + i, p.head_dim) / 8
        made.append(modes.Transform(np.concatenate(rows) if rows else None, centre, table))
    return tuple(made)


def build(name: str) -> bytes:
    """The file, by the reference."""
    if name in MODES:
        p, n = MODES[name]
        (k, v), (key, value) = vectors(name), mode_transforms(name)
        values = None if v is None else v[None, None]
        payload = modes.pages_of(p, k[None, None], values, [key], [value]).tobytes()
        return ref.file_header(p.words, n, payload) + payload
    p, n, _ = CASES[name]
    (k, v), (key, value) = vectors(name), transforms(name)
    pages = -(-n // p.page_tokens)
    c = ref.Cache(np.zeros((pages, 1, p.record_bytes), np.uint8), np.arange(pages, dtype=np.int32)[None])
    values = None if v is None else v[None, None]
    ref.append(p, c, k[None, None], values, np.array([n]), key, value)
    payload = c.pages.tobytes()
    return ref.file_header(p.words, n, payload) + payload


def header(words: tuple[int, ...], count: int, vectors: int, payload_bytes: int, checksum: int = 0) -> bytes:
    """A header whose own checksum is right, whatever else it says; `count` is what it gives as the number of words."""
    head = b"TQCODES\0" + (1).to_bytes(4, "little") + count.to_bytes(4, "little")
    head += b"".join(n.to_bytes(8, "little", signed=n < 0) for n in (*words, vectors, payload_bytes))
    head += checksum.to_bytes(4, "little")
    return head + zlib.crc32(head).to_bytes(4, "little")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def bad_files() -> dict[str, bytes]:
    """Refused by the header's reader. The sound file has a header of 192 bytes and a page of 320."""
    p = ref.plan(8, 2, page_tokens=32)
    payload = np.arange(p.record_bytes, dtype=np.uint16).astype(np.uint8).tobytes()
    good = ref.file_header(p.words, 20, payload) + payload
    size, words = len(payload), p.words

    def replaced(i: int, value: int) -> bytes:
        return header((*words[:i], value, *words[i + 1 :]), len(words), 20, size) + payload

    return {
        "nothing": b"",
        "magic-only": good[:8],
        "header-cut": good[:100],
        "payload-cut": good[:-1],
        "payload-gone": good[: len(good) - size],
        "byte-too-many": good + b"\0",
        "magic": flipped(good, 3),
        "version": flipped(good, 8),
        "word-flipped": flipped(good, 16 + 8 * 6),
        "vectors-flipped": flipped(good, 16 + 8 * len(words)),
        "header-checksum": flipped(good, len(good) - size - 1),
        "words-none": header((), 0, 20, size) + payload,
        "words-too-many": header(words, 264, 20, size) + payload,
        "words-beyond-reason": header(words, 2**32 - 1, 20, size) + payload,
        "words-one-more": header((*words, 0), len(words) + 1, 20, size) + payload,
        "plan-version": replaced(0, 2),
        "plan-group": replaced(3, 16),
        "plan-wave": replaced(15, 1),
        "plan-metric": replaced(16, 6),
        "plan-head-dim-12": replaced(1, 12),
        "plan-head-dim-huge": replaced(1, 2**62),
        "plan-page-tokens-0": replaced(2, 0),
        "plan-rotation": replaced(7, 3),
        "plan-seed-negative": replaced(6, -1),
        "plan-bits-9": replaced(17, 25),
        "plan-bits-none": replaced(17, 16),
        "vectors-too-many": header(words, len(words), 33, size) + payload,
        "vectors-none": header(words, len(words), 0, size) + payload,
        "vectors-overflow": header(words, len(words), 2**64 - 1, size) + payload,
        "payload-bytes-too-many": header(words, len(words), 20, size + 1) + payload,
        "payload-bytes-overflow": header(words, len(words), 20, 2**64 - 8) + payload,
    }


def main() -> None:
    makers: dict[str, Callable[[], bytes]] = {
        f"good/{name}": lambda name=name: build(name) for name in [*CASES, *MODES]
    }
    makers |= {f"bad/{name}": lambda data=data: data for name, data in bad_files().items()}
    for folder in ("good", "bad"):
        (HERE / folder).mkdir(exist_ok=True)
        for old in (HERE / folder).glob("*.tqcodes"):
            old.unlink()
    for name, make in makers.items():
        (HERE / f"{name}.tqcodes").write_bytes(make())


if __name__ == "__main__":
    main()
