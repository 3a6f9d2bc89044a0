"""The examples of README and docs/using.md run as they stand, each in a process of its own, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

DEMO = ROOT / "demo" / "turboquant_demo"
PAGES = ("README.md", "docs/using.md", "docs/vectors.md")
CAUSAL, PROTEINS = "HuggingFaceTB/SmolLM2-135M-Instruct", "facebook/esm2_t6_8M_UR50D"


def examples() -> dict[str, str]:
    """Heading or page, and number -> code, of each block of Python."""
    found = {}
    for page in PAGES:
        for i, part in enumerate(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)):
            found[f"{page} {i + 1}"] = part
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of the Hugging Face hub's cache, with small models under the names that the examples have: the
    demo's, and an ESM-2 with random weights."""
    pytest.importorskip("transformers")
    from esm_models import tiny_esm

    folder = tmp_path_factory.mktemp("hub")
    proteins = tmp_path_factory.mktemp("esm")
    tiny_esm().save_pretrained(proteins)
    for name, model in {CAUSAL: DEMO, PROTEINS: proteins}.items():
        place = folder / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        (place / "snapshots").mkdir()
        (place / "snapshots" / ("0" * 40)).symlink_to(model, target_is_directory=True)
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = EXAMPLES[name]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path)))
    if "torch" in code or "transformers" in code:
        pytest.importorskip("torch")
    if "from_pretrained" in code:
        environment |= {"HF_HUB_CACHE": str(request.getfixturevalue("hub")), "HF_HUB_OFFLINE": "1"}
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # docs/vectors.md reads tests/data
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "print(" in code:
        assert done.stdout.strip()


def test_the_first_screen() -> None:
    """What it is, figures, install line, example, support and links within 60 lines; 150 in all; short examples."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:60])
    for wanted in ("pip install 'turboquant-attention[hf]'", "turboquant.patch(model)", "**Status**", "**More**"):
        assert wanted in first
    readme = [code for name, code in EXAMPLES.items() if name.startswith("README")]
    assert len(readme) >= 5 and all(len(code.splitlines()) <= 15 for code in readme)


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
