"""Plans that are not plain, by name, and their transforms: those of presets, and combinations that no preset has."""

from __future__ import annotations

import numpy as np
import reference as ref
import reference_modes as modes
from cases import orthogonal
from reference_modes import ABSMAX, AFFINE, GAUSSIAN, SIGN, TABLE, Side, Transform

from turboquant.transforms import transforms as arrays

f32 = np.float32
HEADS = 2


def side(head_dim: int, bits: int | tuple[int, ...], block: int = 0, **rest: int) -> Side:
    groups = -(-head_dim // 32)
    widths = (bits,) * groups if isinstance(bits, int) else bits
    return Side(widths, tuple(range(0, groups, block or groups)), **rest)


def qjl(head_dim: int, part: int = 1) -> dict[str, int]:
    return dict(sketch=GAUSSIAN, sketch_rows=head_dim // part)


# name: function of head_dim. Together they cover the presets, and combinations that no preset has.
PLANS = {
    "prod": lambda d: modes.Plan(d, side(d, 3, **qjl(d)), side(d, 4), scale=ref.NORM),
    "prod of 1 bit": lambda d: modes.Plan(d, side(d, 1, **qjl(d)), side(d, 2, **qjl(d, 2))),
    "blocks of 32": lambda d: modes.Plan(d, side(d, 3, 1), side(d, 2, 1), scale=ref.LEAST_SQUARES),
    "split": lambda d: modes.Plan(
        d,
        Side((4, *(2,) * (-(-d // 32) - 1)), (0, 1) if d > 32 else (0,), ref.DENSE),
        side(d, 3, rotation=ref.DENSE),
        scale=ref.NORM_CORRECTED,
    ),
    "affine, plain": lambda d: modes.Plan(
        d, side(d, 4, 2, rotation=ref.NONE, levels=AFFINE), side(d, 8, 2, rotation=ref.NONE, levels=AFFINE)
    ),
    "affine, dense, qjl": lambda d: modes.Plan(
        d,
        side(d, 3, 2, rotation=ref.DENSE, levels=AFFINE, **qjl(d)),
        side(d, 3, 2, rotation=ref.DENSE, levels=AFFINE),
    ),
    "q8_0 keys": lambda d: modes.Plan(d, side(d, 8, 1, rotation=ref.NONE, levels=ABSMAX), side(d, 4, 1, levels=ABSMAX)),
    "absmax, 2 and 5 bits, sign": lambda d: modes.Plan(
        d, side(d, 2, 1, levels=ABSMAX, sketch=SIGN), side(d, 5, 0, levels=ABSMAX)
    ),
    "uniform, quarter sketch": lambda d: modes.Plan(
        d, side(d, 3, **qjl(d, 4)), side(d, 5), codebook=modes.UNIFORM, scale=ref.NORM
    ),
    "tables, sign": lambda d: modes.Plan(
        d,
        side(d, 3, rotation=ref.DENSE, levels=TABLE, sketch=SIGN),
        side(d, 3, rotation=ref.NONE, levels=TABLE),
    ),
    "table, qjl": lambda d: modes.Plan(d, side(d, 2, levels=TABLE, **qjl(d, 2)), side(d, 4, levels=TABLE)),
}


def transforms(rng: np.random.Generator, p: modes.Plan, name: str) -> list[Transform]:
    """A transform for each head, with a centre."""
    s, made = p.side(name), []
    for head in range(HEADS):
        rows = [orthogonal(p.head_dim, head)] if s.rotation == ref.DENSE else []
        if s.sketch == GAUSSIAN:
            rows.append(modes.gaussian(p.seed, s.sketch_rows, p.head_dim))
        table = None
        if s.levels == TABLE:
            table = np.sort(2 * rng.standard_normal(2 ** s.bits[0])).astype(f32)
            table = np.append(table, f32(0.25)) if s.sketch == SIGN else table
        centre = rng.standard_normal(p.head_dim).astype(f32)
        made.append(Transform(np.concatenate(rows) if rows else None, centre, table))
    return made


def keywords(**sides: list[Transform]) -> dict[str, np.ndarray]:
    """Returns the transforms as keyword arguments of `turboquant._core`."""
    given = {}
    for name, by_head in sides.items():
        for ours, theirs in (("matrix", "rotation"), ("centre", "centre"), ("table", "steps")):
            if getattr(by_head[0], ours) is not None:
                given[f"{name}_{theirs}"] = np.stack([getattr(t, ours) for t in by_head])
    return arrays(**given)
