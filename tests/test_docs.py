"""The pages of docs: commands run and print what is shown, flags exist, drawings and lists are up to date, and every
public name has an entry in the API reference. tests/test_readme.py runs their Python."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import forks
import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
NOT_RUN = "# not run here: "


# Runs the commands of a block one after the other.
RUN = """
import contextlib, io, json, sys
from turboquant.cli import main

results = []
for command in json.loads(sys.argv[1]):
    out, err, status = io.StringIO(), io.StringIO(), 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(command)
        except SystemExit as end:
            status = end.code
    results.append([status, out.getvalue(), err.getvalue()])
json.dump(results, sys.stdout)
"""
# These try every method of calibration on a model. tests/test_evaluate.py calibrates in fewer seconds.
SLOW = ("calibration.md 1",)


def consoles() -> dict[str, str]:
    """Blocks of commands, by page and number."""
    found = {}
    for page in PAGES:
        for i, block in enumerate(re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S)):
            found[f"{page.relative_to(DOCS)} {i + 1}"] = block
    return found


CONSOLES = consoles()


def commands(block: str) -> list[tuple[list[str], list[str]]]:
    """(words after `turboquant`, lines shown) of each command; [] for a block that says why it is not run."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
    return [] if block.startswith(NOT_RUN) else [(shlex.split(line)[1:], shown.splitlines()) for line, shown in found]


@pytest.mark.usefixtures("kept_profiles")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CONSOLES])
def test_commands(name: str, tmp_path: Path) -> None:
    """Each command succeeds. The lines shown below it are among those that it prints, in that order; "..." stands for
    any lines."""
    block = CONSOLES[name]
    assert all(line.split()[1] == "turboquant" for line in block.splitlines() if line[:2] == "$ ") or NOT_RUN in block
    if block.startswith(NOT_RUN):
        pytest.skip(block.partition("\n")[0].removeprefix(NOT_RUN))
    pytest.importorskip("transformers")
    from esm_models import protein
    from hub import make_hub

    make_hub(forks.hub(), shape_alone="doctor" in block)  # doctor wants the real sizes, and no weights
    (tmp_path / "book.txt").symlink_to(ROOT / "demo" / "turboquant_demo" / "a_christmas_carol.txt")
    (tmp_path / "vectors.npy").symlink_to(ROOT / "tests" / "data" / "sentences.npy")
    (tmp_path / "proteins.fasta").write_text("".join(f">p{i}\n{protein(60, i)}\n" for i in range(8)))
    done = forks.python(RUN, [json.dumps([command for command, _ in commands(block)])], tmp_path)
    assert done.returncode == 0, done.stderr
    for (command, shown), (status, out, err) in zip(commands(block), json.loads(done.stdout), strict=True):
        assert status == 0, f"turboquant {' '.join(command)}: {err}"
        lines = iter([line.rstrip() for line in out.splitlines()])
        for line in shown:
            assert line in ("", "...") or line.rstrip() in lines, f"{' '.join(command)} did not print {line!r}:\n{out}"


def test_commands_stand_in_blocks_that_run() -> None:
    for page in PAGES:
        for line in page.read_text().splitlines():
            assert not re.match(r"    (\$ )?(turboquant|python|pip|make) ", line), f"{page.name}: {line}"


def test_flags_exist() -> None:
    """The scripts, flags and make targets that pages name, in blocks or in lines of text, exist."""
    cli = "".join(path.read_text() for path in (ROOT / "turboquant/cli").glob("*.py"))
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        for script, rest in re.findall(r"(?:python )?(benchmarks/\w+\.py)([^`\n)]*)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"
            for flag in re.findall(r"--[a-z][\w-]*", rest):
                assert f'"{flag}"' in (ROOT / script).read_text(), f"{page.name}: {script} {flag}"
        for rest in re.findall(r"\bturboquant [a-z-]+([^`\n]*)", text):
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
                assert f'"{flag}"' in cli or flag == "--help", f"{page.name}: turboquant {flag}"
        for target in re.findall(r"(?:`|^ {4}|^\$ )make ([a-z][a-z0-9-]*)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


def test_drawings_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    assert spec is not None and spec.loader is not None
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    for name, draw in drawings.DRAWINGS.items():
        assert (DOCS / name).read_text() == draw(), f"python docs/drawings.py writes another {name}"


def test_models_that_are_patched() -> None:
    pytest.importorskip("transformers")
    from causal_types import EXACT, WITH_TOWERS

    listed = re.search(r"^((?: {4}[\w, -]+\n)+)", (DOCS / "models.md").read_text(), re.M)
    assert listed is not None and set(re.split(r"[,\s]+", listed[1].strip())) == {*EXACT, *WITH_TOWERS}


def test_the_compatibility_page_is_that_of_the_script() -> None:
    """The page has the introduction and rows of the script, and each row has tests. Its cells are of other versions."""
    pytest.importorskip("transformers")
    import compatibility

    assert compatibility.FILE.read_text().startswith(compatibility.HEAD), "run `python tests/compatibility.py`"
    for version, outcomes in compatibility.columns().items():
        assert list(outcomes) == list(compatibility.FEATURES), version
    text = "".join((ROOT / "tests" / name).read_text() for name in compatibility.TESTS)
    names = re.findall(r"^def (test_\w+)", text, re.M)
    for expression in compatibility.FEATURES.values():
        for part in expression.split(" or "):
            assert (ROOT / "tests" / part).is_file() or any(part in name for name in names), part


def test_every_public_name_is_described() -> None:
    pytest.importorskip("transformers")
    import turboquant
    from turboquant import esm, ops

    pages = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    described = set(re.findall(r"^\.\. auto(?:class|function|data|module):: ([\w.]+)", pages, re.M))
    public = {f"{module.__name__}.{name}" for module in (turboquant, ops, esm) for name in module.__all__}
    assert public <= described


def test_each_command_has_an_example_that_parses() -> None:
    from turboquant.cli import make_parser
    from turboquant.cli.commands import _EXAMPLES

    parser = make_parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    assert {*_EXAMPLES} == {*commands.choices} - {"index"}  # which has parsers of its own
    (actions,) = (action for action in commands.choices["index"]._actions if action.dest == "action")
    for name, action in actions.choices.items():
        (told,) = re.findall(r"example: turboquant (.*)", " ".join(action.format_help().split()))
        assert parser.parse_args(told.split()).command == f"index {name}"
    for name, example in _EXAMPLES.items():
        assert parser.parse_args(example.split()).command == name
        assert f"example: turboquant {example}" in " ".join(commands.choices[name].format_help().split())
