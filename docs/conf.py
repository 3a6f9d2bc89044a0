"""Sphinx's settings: `make docs` builds the site into build/docs. Nothing of it is loaded from a network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import turboquant

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "calculator")]  # docstrings.py, directives.py; make.py

import make  # noqa: E402

project = "TurboQuant"
author = "The turboquant-attention maintainers"
copyright = author
version = release = turboquant.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "docstrings", "directives"]
exclude_patterns = ["_generated", "calculator/*"]
nb_execution_mode = "off"  # notebooks are committed with their outputs; tests/test_notebooks.py runs them

myst_heading_anchors = 4  # links such as page.md#a-heading work here as they do in a repository
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["config.cache"]

# Single backticks in docstrings link to what has an entry and are plain code otherwise. Annotations name classes of
# packages whose pages are elsewhere.
default_role = "py:obj"
smartquotes = False
nitpick_ignore_regex = [
    ("py:obj", r".*"),
    ("py:.*", r"(torch|numpy|transformers|os|collections|typing|enum)\..*"),
    ("py:class", r".*\._Model"),  # a type variable
    ("py:class", r"turboquant\.(kvcache\.again\.Seen|models\.attention\.(Call|MaskRequest))"),  # of no interest outside
]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"TurboQuant {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]


def _calculator(app: Any) -> None:
    """Writes the page of the calculator, which docs/calculator.md shows."""
    make.write(HERE / "_generated")


def _home(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Links names to where they are described: `patch` to turboquant.patch, turboquant.spec.CacheSpec to its entry."""
    last = "." + node.get("reftarget", "").rpartition(".")[2]
    python = env.get_domain("py")
    whole = ("class", "function", "data")  # a bare word such as `tokens` may be anybody's attribute
    found = [name for name, entry in python.objects.items() if name.endswith(last) and entry.objtype in whole]
    if not found and "." in node["reftarget"]:
        last = "." + ".".join(node["reftarget"].split(".")[-2:])
        found = [name for name in python.objects if name.endswith(last)]
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, contnode)


def setup(app: Any) -> None:
    app.connect("missing-reference", _home)
    app.connect("builder-inited", _calculator)
