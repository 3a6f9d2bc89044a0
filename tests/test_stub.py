"""turboquant/_core.pyi agrees with turboquant._core in names, signatures, constants and keys, and mypy reads it."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import turboquant
from turboquant import _core
from turboquant.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
STUB = ast.parse((ROOT / "turboquant" / "_core.pyi").read_text())
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
CONSTANTS = {
    node.target.id: ast.unparse(node.annotation)
    for node in STUB.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}
DICTS = {
    node.name: [ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)]
    for node in STUB.body
    if isinstance(node, ast.ClassDef)
}


def stub_signature(node: ast.FunctionDef) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of every parameter."""
    kinds = inspect.Parameter
    a = node.args
    assert not a.posonlyargs and a.vararg is None and a.kwarg is None
    empty = [kinds.empty] * (len(a.args) - len(a.defaults))
    defaults = empty + [ast.literal_eval(default) for default in a.defaults]
    rows = [(arg.arg, kinds.POSITIONAL_OR_KEYWORD, default) for arg, default in zip(a.args, defaults)]
    for arg, default in zip(a.kwonlyargs, a.kw_defaults):
        rows.append((arg.arg, kinds.KEYWORD_ONLY, kinds.empty if default is None else ast.literal_eval(default)))
    return rows


def test_the_stub_names_what_there_is() -> None:
    there = {name for name in vars(_core) if not name.startswith("_")} | {"__version__"}
    assert there == FUNCTIONS.keys() | CONSTANTS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_agree(name: str) -> None:
    signature = inspect.signature(getattr(_core, name))
    real = [(p.name, p.kind, p.default) for p in signature.parameters.values()]
    assert real == stub_signature(FUNCTIONS[name])
    assert [type(p[2]) for p in real] == [type(p[2]) for p in stub_signature(FUNCTIONS[name])]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_their_arguments_by_these_names(name: str) -> None:
    """The parser of arguments knows the names in the text signature, and no others."""
    rows = stub_signature(FUNCTIONS[name])
    function = getattr(_core, name)
    with pytest.raises(TypeError, match="argument"):
        function(**{row[0]: None for row in rows}, colour=None)
    if not rows:
        return
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**{row[0]: object() for row in rows})
    assert "keyword" not in str(caught.value)
    required = [row[0] for row in rows if row[2] is inspect.Parameter.empty]
    if required:
        with pytest.raises(TypeError, match=required[-1]):
            function(**dict.fromkeys(required[:-1]))
    positional = sum(row[1] is inspect.Parameter.POSITIONAL_OR_KEYWORD for row in rows)
    with pytest.raises(TypeError, match="argument"):
        function(*[None] * (positional + 1))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_docstrings(name: str) -> None:
    assert len(getattr(_core, name).__doc__) > 20


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_agree(name: str) -> None:
    assert CONSTANTS[name] == f"Final[{type(getattr(_core, name)).__name__}]"


def test_dictionaries_agree() -> None:
    plan = Plan(64, 4, page_tokens=32).words
    real = {
        "CodebookTables": _core.codebook(0, 64, 3),
        "PlanInfo": _core.plan_info(plan),
    }
    assert {name: list(value) for name, value in real.items()} == DICTS
    assert {type(value) for table in real.values() for value in table.values()} == {int, float, tuple, np.ndarray}


def test_versions_agree() -> None:
    assert turboquant.__version__ == _core.__version__
    header = (ROOT / "csrc" / "include" / "turboquant.h").read_text()
    assert f'#define TQ_VERSION "{_core.__version__}"' in header


@pytest.mark.slow
def test_types_are_what_a_checker_must_reveal() -> None:
    """mypy says what tests/typing expects: the type in the comment behind each reveal_type, the code behind each
    mistake."""
    pytest.importorskip("mypy")
    paths = sorted((ROOT / "tests" / "typing").glob("*.py"))
    if find_spec("torch") is None:
        paths = [path for path in paths if path.name != "ops_api.py"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--follow-imports=silent",
    ]
    command += ["--config-file", str(ROOT / "pyproject.toml"), *map(str, paths)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = set()
    for line in result.stdout.splitlines():
        found = re.fullmatch(r'(.+?):(\d+): (?:note: Revealed type is "(.+)"|error: .*\[([\w-]+)\])', line)
        if found:
            text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", found[3] or found[4])  # without modules: NumPy's change
            said.add((Path(found[1]).name, int(found[2]), text))
        else:
            assert ": note: " in line, line
    wanted = set()
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            found = re.search(r"  # (?:type: (.+)|error: ([\w-]+))$", text)
            if found:
                wanted.add((path.name, number, found[1] or found[2]))
    assert len(wanted) > 20
    assert said == wanted, result.stderr
