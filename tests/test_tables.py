"""`turboquant.tables` writes tables for terminals, in Markdown and in HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from turboquant.tables import html, measures, table

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


def cells(text: str) -> list[list[str]]:
    """The cells of an HTML table, by an HTML parser, with the side to which each is aligned."""
    rows: list[list[str]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag == "tr":
                rows.append([])
            if tag in ("td", "th"):
                rows[-1].append(f"{dict(attributes)['style'].removeprefix('text-align: ')}:")

        def handle_data(self, data):
            if rows and self.lasttag in ("td", "th"):
                rows[-1][-1] += data

    Reader().feed(text)
    return rows


def test_in_html():
    found = html([("name", "bytes"), ("<a & b>", "1")], notes=["x < y", "z"])
    assert cells(found) == [["left:name", "right:bytes"], ["left:<a & b>", "right:1"]]
    assert found.endswith("<p>x &lt; y<br>z</p>")
    assert measures({"kl_divergence": 0.00123456789, "bytes": 12345}) == [
        ("measure", "value"), ("kl divergence", "0.00123457"), ("bytes", "12,345")]  # fmt: skip


def test_what_notebooks_show():
    """HTML of reports, evaluations and trials of a calibration has the numbers of their text."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from turboquant import CacheSpec
    from turboquant.evaluation.decoder import Evaluation
    from turboquant.hf.cache import CacheReport, LayerReport
    from turboquant.measured.choice import Trial
    from turboquant.measured.choice import table as trials

    report = CacheReport((LayerReport(0, 10, 20, {"pages": 1064}),), {"lengths": 4}, ("a note",))
    assert cells(report._repr_html_())[1] == ["left:0", "right:10", "right:1,064", "right:1,064"]
    assert "lengths (all layers)" in report._repr_html_() and report._repr_html_().endswith("<br>a note</p>")
    one = Evaluation(CacheSpec(), "packed", 2, 64, 0.5, 1.0, 2.0, 3.0, 10.0, 9.0, 0.75, 100.0, 4.5, 8)
    shown = dict(row for row in cells(one._repr_html_())[1:])
    assert shown["left:kl divergence"] == "right:0.5" and len(shown) == len(one.metrics())
    assert "2 x 64 tokens, exact: 4 sinks, 128 window, prefill packed; CacheSpec()" in one._repr_html_()
    made = [Trial(0, 3.0, "none", 32, 0.25, chosen=True), Trial(0, 3.0, "widths", 32, 0.5)]
    assert cells(trials(made, as_html=True))[1] == ["right:3", "right:0.25000", "right:0.50000", "left:none"]
    assert "3 bits: none, nothing diverges 5% less." in trials(made, as_html=True)
