"""The table of a report: one row for layers that are alike, and why a cache is larger than bfloat16."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from turboquant.hf.cache import CacheReport, LayerReport


def test_a_report_has_one_row_for_layers_that_are_alike():
    parts = {"pages": 64, "window": 8}
    layers = [LayerReport(i, 10, 20, parts if i % 3 else {"pages": 64}) for i in range(7)]
    lines = str(CacheReport(tuple(layers), {"lengths": 4})).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["each", "of", "tokens", "pages", "window", "bytes"],
        ["0,3,6", "10", "64", "0", "64"],
        ["1-2,4-5", "10", "64", "8", "72"],
    ]


@pytest.mark.parametrize(
    "parts, why",
    [
        ({"pages": 900, "window": 8}, "pages are allocated whole, 128 tokens each"),
        ({"pages": 4, "window": 900}, "most tokens are exact ones, in the model's dtype (window)"),
        ({"pages": 4, "transforms": 900}, "transforms are 900 bytes at any length"),
    ],
)
def test_a_cache_larger_than_bfloat16(parts, why):
    report = CacheReport((LayerReport(0, 10, 226, parts),), {})
    assert f"{report.nbytes / 452:.2f} times larger than bfloat16, because {why}: a longer text is smaller" in str(
        report
    )
    assert "smaller than bfloat16" not in str(report)
