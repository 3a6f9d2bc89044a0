"""The pages of docs: every public name has an entry in the API reference."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"


def test_every_public_name_is_described() -> None:
    pytest.importorskip("transformers")
    import turboquant
    from turboquant import esm, ops

    pages = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    described = set(re.findall(r"^\.\. auto(?:class|function|data|module):: ([\w.]+)", pages, re.M))
    public = {f"{module.__name__}.{name}" for module in (turboquant, ops, esm) for name in module.__all__}
    assert public <= described
