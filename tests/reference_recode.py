"""tq_recode in NumPy, from the text of docs/rounding.md: pages of one plan as pages of another with fewer bits."""

from __future__ import annotations

import numpy as np
import reference as ref
from numpy.typing import NDArray

Pages = NDArray[np.uint8]


def nested(p: ref.Plan, before: int, after: int) -> tuple[ref.Codebook, ref.Codebook, NDArray[np.uint8]]:
    """Both codebooks, and the new code of each old one: 2^(before - after) cells become one."""
    old, new = (ref.codebook(p.codebook, p.head_dim, bits) for bits in (before, after))
    codes = np.zeros(2**before, np.uint8)
    for rank in range(2**before):
        codes[old.code_of_rank[rank]] = new.code_of_rank[rank // 2 ** (before - after)]
    return old, new, codes


def recode_side(p: ref.Plan, target: ref.Plan, side: str, record: Pages, out: Pages) -> None:
    """One side of one record."""
    codes, scales = ref.unpack(p, side, record)
    live = scales != 0
    made = np.zeros_like(codes)
    yy = np.zeros(len(codes), np.float32)
    yz = np.zeros(len(codes), np.float32)
    runs: list[tuple[int, int, list[int]]] = []  # groups in a row with the same widths and no padding have one sum
    for group, (before, after) in enumerate(zip(p.bits(side), target.bits(side))):
        whole = p.group * (group + 1) <= p.head_dim
        if before and runs and runs[-1][:2] == (before, after) and whole:
            runs[-1][2].append(group)
        elif before:
            runs.append((before, after, [group]))
    for before, after, groups in runs:
        old, new, table = nested(p, before, after)
        channels = np.concatenate([np.arange(p.group * g, min(p.group * (g + 1), p.head_dim)) for g in groups])
        made[:, channels] = np.where(live[:, None], table[codes[:, channels]], 0)
        y = old.levels[codes[:, channels]].astype(np.int64)
        z = new.levels[table[codes[:, channels]]].astype(np.int64)
        yy += (old.step * old.step) * (y * y).sum(1).astype(np.float32)
        yz += (old.step * new.step) * (y * z).sum(1).astype(np.float32)
    if p.bits(side) != target.bits(side):
        s = scales[live].astype(np.float32) * (yy[live] / yz[live])
        scales[live] = np.minimum(s, np.float32(65504)).astype(np.float16)
    ref.pack(target, side, out, np.arange(p.page_tokens), made, scales)


def recode(p: ref.Plan, target: ref.Plan, pages: Pages) -> Pages:
    """uint8 [n_pages, kv_heads, record_bytes] of `target`."""
    out = np.zeros((*pages.shape[:2], target.record_bytes), np.uint8)
    for where in np.ndindex(*pages.shape[:2]):
        for side in ("key", "value"):
            if any(p.bits(side)):
                recode_side(p, target, side, pages[where], out[where])
    return out
