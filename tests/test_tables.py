"""The one writer of tables."""

from __future__ import annotations

import pytest

from turboquant.tables import table

ROWS = [("name", "bytes", "how"), ("a", "1", "left"), ("longer", "1,000", "")]


def test_for_terminals():
    assert table(ROWS, left=(0, 2)).splitlines() == ["name    bytes  how", "a           1  left", "longer  1,000"]


def test_in_markdown():
    assert table(ROWS, left=(0, 2), markdown=True).splitlines() == [
        "| name | bytes | how |",
        "| --- | ---: | --- |",
        "| a | 1 | left |",
        "| longer | 1,000 |  |",
    ]


def test_rows_have_as_many_cells_as_the_head():
    with pytest.raises(ValueError):
        table([*ROWS, ("one", "two", "three", "four")])
