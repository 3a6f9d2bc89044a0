"""Writes the lists of model types in docs/models.md, and why others are refused, from the tables of the tests.

python tests/table.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
HEAD = "| refused, in the words of the error | types |\n|---|---|\n"


def listed(types: Iterable[str]) -> str:
    """One block of the page."""
    return textwrap.indent(textwrap.fill(", ".join(sorted(types)), 130, break_on_hyphens=False), "    ")


def refused(*tables: Mapping[str, str]) -> str:
    """Returns rows of the table of refusals: the sentence of an error, a pattern in `tables`, and all its types."""
    types: dict[str, set[str]] = {}
    for table in tables:
        for pattern, names in table.items():
            types.setdefault(re.sub(r"\\(.)", r"\1", pattern), set()).update(names.split())
    rows = sorted(types.items(), key=lambda row: (-len(row[1]), row[0]))
    return "".join(f"| {why} | {', '.join(sorted(names))} |\n" for why, names in rows)


def page(text: str) -> str:
    """Returns the page with the lists of the tests' tables: five indented blocks, in this order, and the refusals."""
    import causal_types
    import test_multimodal_types

    types, images = causal_types, test_multimodal_types
    not_built = {*types.NOT_BUILT, *types.NOT_RUN, *images.NOT_BUILT} - {*types.EXACT, *images.EXACT, *images.EMBEDDED}
    for names in (*types.REFUSED.values(), *images.REFUSED.values(), " ".join(images.PATCHED)):
        not_built -= {*names.split()}
    tables = [{**types.EXACT, **types.WITH_TOWERS}, not_built, images.EXACT, images.EMBEDDED, images.PATCHED]
    left = iter(tables)
    filled = re.sub(r"^ {4}\S.*(?:\n {4}\S.*)*", lambda _: listed(next(left)), text, flags=re.MULTILINE)
    if next(left, None) is not None:
        raise ValueError(f"{FILE} has fewer blocks than there are tables")
    rows = refused(types.REFUSED, images.REFUSED)
    filled, found = re.subn(rf"(?<={re.escape(HEAD)})(?:\|.*\n)*", lambda _: rows, filled)
    if found != 1:
        raise ValueError(f"{FILE} must have one table of refusals, got {found}")
    return filled


if __name__ == "__main__":
    FILE.write_text(page(FILE.read_text(encoding="utf-8")), encoding="utf-8")
