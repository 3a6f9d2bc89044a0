"""Runs the notebooks of docs/ and writes them with their outputs: python tests/notebooks.py [NAME...], make notebooks

tests/test_notebooks.py compares the committed outputs with what `execute` returns.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = ("patch_and_generate", "operators")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, timeout: int = 1500) -> Any:
    """Runs the notebook in a new kernel, in its folder, and returns it with the outputs. Errors in cells are raised."""
    notebook = read(name)
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False,
                            resources={"metadata": {"path": str(FOLDER)}})  # fmt: skip
    with tempfile.TemporaryDirectory() as settings:  # so that the settings of the user have no effect
        python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": python, "IPYTHONDIR": settings, "HF_HUB_OFFLINE": "1",
                                    "TURBOQUANT_CACHE": "", "PYTHONWARNINGS": "ignore:IProgress not found"}  # fmt: skip
        client.execute(env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Joins consecutive outputs of one stream, because timing decides into how many pieces a cell's text is split.
    Drops the progress lines of the package's logger, which contain times."""
    joined: list[Any] = []
    for one in outputs:
        lines = one.text.replace("\r", "\n").split("\n") if one.get("name") == "stderr" else ["kept"]
        if all(not line.strip() or re.match(r"turboquant: |[\w ,]+: +\d+%", line) for line in lines):
            continue
        last = joined[-1] if joined else None
        if one.output_type == "stream" and last is not None and last.get("name") == one.name:
            last.text += one.text
        else:
            joined.append(one)
    return joined


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NOTEBOOKS:
        done = execute(chosen)
        done.metadata = {"kernelspec": done.metadata["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(done, FOLDER / f"{chosen}.ipynb")
