"""The worked row of docs/rounding.md, by the core and by float32 arithmetic that follows the page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import reference as ref

from turboquant import _core
from turboquant.plan import Plan

PAGE = (Path(__file__).parents[1] / "docs" / "rounding.md").read_text()


def cells(name: str) -> list[str]:
    """Returns the cells of a row of a table after the first cell, which begins with `name`."""
    (row,) = re.findall(rf"^\| {re.escape(name)}[^|]*\| (.+) \|$", PAGE, re.MULTILINE)
    return row.split(" | ")


def numbers(name: str) -> np.ndarray:
    return np.array([np.float32(cell) for cell in cells(name)])


def number(name: str) -> np.float32:
    return np.float32(cells(name)[-1])


def total(v: np.ndarray) -> np.float32:
    """v[i] += v[i + h] for h = 4, 2, 1."""
    for h in (4, 2, 1):
        v = v[:h] + v[h : 2 * h]
    return v[0]


def test_the_core_makes_the_bytes() -> None:
    plan = Plan(8, 4)
    pages = _core.new_pages(plan.words, 1, 1)
    x = numbers("x").reshape(1, 1, 1, 8)
    _core.append(plan.words, x, None, np.array([1], np.int32), pages, np.zeros((1, 1), np.int32))
    codes, scales = ref.unpack(ref.plan(8, 4), "key", pages[0, 0])
    assert list(codes[0, :8]) == list(numbers("code of the rank"))
    assert scales.view(np.float16)[0] == number("s")


def test_the_page_says_how() -> None:
    x, book = numbers("x"), _core.codebook(0, 8, 4)
    signs = np.array([-1 if sign == "-" else 1 for sign in re.search(r"signs ([-+ ]+),", PAGE)[1].split()], np.float32)
    z = (x * signs).reshape(2, 2, 2)
    for axis in (2, 1, 0):
        a, b = np.split(z, 2, axis)
        z = np.concatenate([a + b, a - b], axis)
    z = z.reshape(8) * (1 / np.sqrt(np.float32(8)))
    zz = total(z * z)
    rms = np.sqrt(zz / np.float32(8))
    r = 1 / rms
    u = z * r
    rank = (book["thresholds"][:, None] <= u).sum(0)
    codes = book["code_of_rank"][rank]
    levels = book["levels"][codes]
    c = levels.astype(np.float32) * np.float32(book["step"])
    uu, cu = total(u * u), total(c * u)
    assert z.dtype == u.dtype == c.dtype == uu.dtype == np.float32
    found = {"z:": z, "u =": u, "rank": rank, "code": codes, "level,": levels}
    for name, row in found.items():
        assert list(row) == list(numbers(name)), name
    values = {"<z, z>": zz, "rms(z)": rms, "r ": r, "<u, u>": uu, "<c, u>": cu, "s ": np.float16(rms * (uu / cu))}
    for name, value in values.items():
        assert value == number(name), name
    assert np.float32(book["step"]) == np.float32(re.search(r"steps of ([\d.]+)", PAGE)[1])
