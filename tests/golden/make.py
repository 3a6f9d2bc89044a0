"""Makes the golden files: pages that every version of this format must write again and read.

    python tests/golden/make.py

good/<name>.pages   of CASES[name] (plain plans, by tests/reference.py) or MODES[name] (others, by
                    tests/reference_modes.py), made from the vectors of `vectors(name)`

The bytes are the format. A change that makes other bytes needs another TQ_FORMAT_VERSION, not another golden file.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import reference as ref  # noqa: E402
import reference_modes as modes  # noqa: E402
import reference_random as draws  # noqa: E402
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
    "4bit-tries": (ref.plan(40, 4, 3, tries=5, seed=24, **SMALL), 45, False),
    "settled-tries-steps": (ref.plan(128, (4, 5, 6, 3), (2, 5, 0, 8), tries=7, seed=25, **SMALL), 37, True),
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
    words = [w for block in range(-(-count // 4)) for w in draws.random(2024, stream, block)][:count]
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
    matrix = draws.haar(19, p.head_dim)[None] if p.rotation == ref.DENSE else None
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
            rows.append(draws.haar(19, p.head_dim))
        if side is not None and side.sketch == modes.GAUSSIAN:
            rows.append(modes.gaussian(23, side.sketch_rows, p.head_dim))
        if side is not None and side.levels == modes.TABLE:
            levels = np.arange(2 ** side.bits[0], dtype=np.float32) / 2 - (2 ** side.bits[0] - 1) / np.float32(4)
            table = np.append(levels, np.float32(0.25)) if side.sketch == modes.SIGN else levels
        centre = numbers(5 + i, p.head_dim) / 8
        made.append(modes.Transform(np.concatenate(rows) if rows else None, centre, table))
    return tuple(made)


def build(name: str) -> bytes:
    """The pages, by the reference."""
    if name in MODES:
        p, n = MODES[name]
        (k, v), (key, value) = vectors(name), mode_transforms(name)
        values = None if v is None else v[None, None]
        return modes.pages_of(p, k[None, None], values, [key], [value]).tobytes()
    p, n, _ = CASES[name]
    (k, v), (key, value) = vectors(name), transforms(name)
    pages = -(-n // p.page_tokens)
    c = ref.Cache(np.zeros((pages, 1, p.record_bytes), np.uint8), np.arange(pages, dtype=np.int32)[None])
    values = None if v is None else v[None, None]
    ref.append(p, c, k[None, None], values, np.array([n]), key, value)
    return c.pages.tobytes()


def main() -> None:
    (HERE / "good").mkdir(exist_ok=True)
    for old in (HERE / "good").glob("*.pages"):
        old.unlink()
    for name in [*CASES, *MODES]:
        (HERE / "good" / f"{name}.pages").write_bytes(build(name))


if __name__ == "__main__":
    main()
