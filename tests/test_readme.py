"""The examples of README.md and of docs/ run unchanged, in an empty folder. Each of README.md's has a process of its
own; those of a page in docs/ run one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import forks
import pytest
from conftest import ROOT


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


README = {f"README.md {i + 1}": code for i, code in enumerate(blocks(ROOT / "README.md"))}
ALL = {path.name: blocks(path) for path in sorted((ROOT / "docs").glob("**/*.md"))}
# Text in an example, and the package that the example then needs.
OPTIONAL = {
    "turboquant.langchain": "langchain_core",
    "turboquant.haystack": "haystack",
    "turboquant.llama_index": "llama_index.core",
    "lists=": "faiss",
    "lmcache": "lmcache",
}


def optional(code: str) -> str | None:
    return next((words for words in OPTIONAL if words in code), None)


# These stand alone, because not everybody has what they need.
ALONE = {f"{page} optional {words}": code for page, codes in ALL.items() for code in codes if (words := optional(code))}
PAGES = {page: "\n".join(rest) for page, codes in ALL.items() if (rest := [c for c in codes if not optional(c)])}
EXAMPLES = README | PAGES | ALONE
SLOW = ("calibration.md",)


@pytest.mark.usefixtures("kept_profiles")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in EXAMPLES])
def test_example(name: str, tmp_path: Path) -> None:
    code = EXAMPLES[name]
    if "torch" in code or "transformers" in code:
        pytest.importorskip("torch")
    if name in ALONE:
        needed = OPTIONAL[str(optional(code))]
        pytest.importorskip(needed, reason=f"{needed} is not installed: make test-adapters test-lmcache")
    if "lm_eval" in code:
        pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[hf]'")
    if "from_pretrained" in code:
        pytest.importorskip("transformers")
        from hub import make_hub

        make_hub(forks.hub())
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # docs/vectors.md reads tests/data
    (tmp_path / "book.txt").symlink_to(ROOT / "demo" / "turboquant_demo" / "a_christmas_carol.txt")
    done = forks.python(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "print(" in code:
        assert done.stdout.strip()


def test_the_first_screen() -> None:
    """README.md has at most 150 lines. The first 60 have the install line, an example, the status and links. Examples
    are short."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:60])
    for wanted in ("pip install 'turboquant-attention[hf]'", "turboquant.patch(model)", "**Status**", "**More**"):
        assert wanted in first
    assert len(README) >= 5 and all(len(code.splitlines()) <= 15 for code in README.values())


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
