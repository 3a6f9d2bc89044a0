"""Pictures of results, and `--plot` of `calc` and `eval`."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("turboquant._core")
from turboquant import plot
from turboquant.cli import main


@pytest.fixture
def drawn(monkeypatch):
    """The axes that were drawn on."""
    made, plain = [], plot._axes

    def kept(*labels):
        figure, axes = plain(*labels)
        made.append(axes)
        return figure, axes

    monkeypatch.setattr(plot, "_axes", kept)
    return made


def test_bytes_by_tokens(drawn, tmp_path, capsys):
    target = tmp_path / "calc.svg"
    assert main(["calc", "llama-3-8b", "--tokens", "4096", "--spec", "default,2", "--plot", str(target)]) == 0
    lines = {line.get_label(): line.get_xydata() for line in drawn[0].get_lines()}
    assert [*lines] == ["fp32", "bf16", "fp8", "default", "2"] and target.read_bytes().startswith(b"<?xml")
    assert lines["bf16"][-1].tolist() == [4096, 4096 * 32 * 2 * 8 * 128 * 2 / 2**30]
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("default"))
    assert lines["default"][-1][1] * 2**30 == int(printed.split()[1].replace(",", ""))


def test_divergence_against_bits(drawn, tmp_path):
    pytest.importorskip("transformers")
    book, target = tmp_path / "book.txt", tmp_path / "eval.png"
    book.write_text((ROOT / "demo" / "turboquant_demo" / "a_christmas_carol.txt").read_text(encoding="utf-8"), "utf-8")
    command = ["eval", str(ROOT / "demo" / "turboquant_demo"), "--text", str(book), "--windows", "1", "--length", "160"]
    assert main([*command, "--generate", "0", "--spec", "paper-mse-4,paper-mse-2", "--plot", str(target)]) == 0
    shown = {line.get_label(): line.get_xydata()[0].tolist() for line in drawn[0].get_lines()}
    assert [*shown] == ["paper-mse-4", "paper-mse-2"] and target.read_bytes().startswith(b"\x89PNG")
    assert shown["paper-mse-2"][0] < shown["paper-mse-4"][0] and shown["paper-mse-2"][1] > shown["paper-mse-4"][1] > 0


@pytest.mark.parametrize("command", [["calc", "llama-3-8b"], ["eval", "MODEL", "--text", "t", "--spec", "default"]])
def test_no_picture(command, capsys, monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        main([*command, "--plot", str(tmp_path / "a.txt")])
    assert "--plot must end in .png, .svg or .pdf, got" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main([*command, "--plot", str(tmp_path / "a.png")])
    assert "a picture needs matplotlib: pip install 'turboquant-attention[plot]'" in capsys.readouterr().err


def test_recall_of_indexes_against_bytes(drawn, monkeypatch, tmp_path):
    """--plot of the benchmarks of indexes, on their committed results."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import index_recall
    from timing import Report

    for machine, name in (("zen3-2core", "index"), ("zen3-2core", "index_recall"), ("zen4-2core", "index_lists")):
        drawn.clear()
        rows = json.loads((ROOT / f"benchmarks/results/{machine}/{name}.json").read_text())["rows"]
        index_recall.picture(Report(name, "cpu", rows), str(target := tmp_path / f"{name}.svg"))
        shown = {line.get_label(): line.get_xydata()[0].tolist() for line in drawn[0].get_lines()}
        assert len(shown) == len(rows) and target.read_bytes().startswith(b"<?xml")
        for place, row in zip(shown.values(), rows, strict=True):
            assert place == pytest.approx([row["metrics"]["bytes"], max(1 - row["metrics"]["recall"], 1e-4)])
