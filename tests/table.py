"""Writes the lists of model types in docs/models.md, from the tables of the tests.

python tests/table.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "models.md"


def listed(types: Iterable[str]) -> str:
    """One block of the page."""
    return textwrap.indent(textwrap.fill(", ".join(sorted(types)), 130, break_on_hyphens=False), "    ")


def page(text: str) -> str:
    """The page, with the lists that the tables have: four indented blocks, in this order."""
    import test_causal_types
    import test_multimodal_types

    types, images = test_causal_types, test_multimodal_types
    tables = [{**types.EXACT, **types.WITH_TOWERS}, images.EXACT, images.EMBEDDED, images.PATCHED]
    left = iter(tables)
    filled = re.sub(r"^ {4}\S.*(?:\n {4}\S.*)*", lambda _: listed(next(left)), text, flags=re.MULTILINE)
    if next(left, None) is not None:
        raise ValueError(f"{FILE} has fewer blocks than there are tables")
    return filled


if __name__ == "__main__":
    FILE.write_text(page(FILE.read_text(encoding="utf-8")), encoding="utf-8")
