"""The notebooks of docs/ run, and what is committed is what they print."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import real_model

pytest.importorskip("turboquant._core")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
import notebooks

MEASURED = re.compile(r"\d[\d,]*\.\d+")  # numbers with a decimal point; integers are counts and bytes
CLOSE = 0.1  # relative; other CPUs and compilers change a divergence over a few hundred tokens by less


def outputs(notebook: Any) -> list[tuple[str, str]]:
    """(kind, text or an empty string) of every output."""
    found = [one for cell in notebook.cells if cell.cell_type == "code" for one in cell.outputs]
    return [(one.output_type + " " + " ".join(sorted(one.get("data", ()))), one.get("text", "")) for one in found]


def lines_with_digits(output: tuple[str, str]) -> str:
    """Lines without digits are texts that a model has written, which may differ on another CPU."""
    return "\n".join(line for line in output[1].splitlines() if re.search(r"\d", line))


def check(notebook: Any, name: str) -> None:
    wanted = outputs(notebooks.read(name))
    found = outputs(notebook)
    assert [kind for kind, _ in found] == [kind for kind, _ in wanted]
    for text, committed in zip(*(map(lines_with_digits, each) for each in (found, wanted))):
        assert MEASURED.sub("#", text) == MEASURED.sub("#", committed)
        numbers, old = ([float(n.replace(",", "")) for n in MEASURED.findall(t)] for t in (text, committed))
        assert numbers == pytest.approx(old, rel=CLOSE), text


def test_operators():
    """Its random numbers have a seed, and its codes are the same on every machine."""
    check(notebooks.execute("operators"), "operators")


@pytest.mark.slow
def test_patch_and_generate():
    real_model("smollm2")
    check(notebooks.execute("patch_and_generate"), "patch_and_generate")


@pytest.mark.slow
def test_patch_and_generate_with_the_model_of_the_demo(tmp_path, monkeypatch):
    """Without a real model the notebook uses the model of the demo. Its texts and figures differ, but there are as
    many."""
    monkeypatch.setenv("TURBOQUANT_REAL_MODELS", str(tmp_path))
    notebook = notebooks.execute("patch_and_generate")
    text = "".join(text for _, text in outputs(notebook))
    assert text.startswith("turboquant_demo: ") and "SmolLM2" not in text
    assert len(outputs(notebook)) == len(outputs(notebooks.read("patch_and_generate")))


@pytest.mark.parametrize("name", notebooks.NOTEBOOKS)
def test_what_is_committed(name):
    """Committed notebooks are complete runs with their plot, of less than 75,000 bytes, without times, warnings or
    errors."""
    notebook = notebooks.read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all("execution" not in cell.metadata for cell in code)
    kinds = [kind for kind, _ in outputs(notebook)]
    assert kinds.count("display_data image/png text/plain") == 1 and not any("error" in kind for kind in kinds)
    assert not any(one.get("name") == "stderr" for cell in code for one in cell.outputs)
    assert (notebooks.FOLDER / f"{name}.ipynb").stat().st_size < 75_000
