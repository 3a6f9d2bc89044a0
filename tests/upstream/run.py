"""Runs transformers' own tests of caches and generation for Llama on our cache: python tests/upstream/run.py TREE

TREE   a checkout of transformers with its tests, which are not in its packages. Its own sources (src/) are used; what
       its tests import beyond that must be installed: parameterized, datasets, requests, psutil

Nothing is copied from it, and nothing downloaded. The tests run three times (plugin.py): as they are, on our cache, and
on our cache with padding on the left; what they said goes into docs/compatibility.md, one section for each version. A
test applies if it passes as it is and hands keys to our cache, or asks for it and is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
FILES = [
    "tests/models/llama/test_modeling_llama.py",
    "tests/generation/test_utils.py",
    "tests/utils/test_cache_utils.py",
]
TITLE = "## transformers' own tests on our cache"
HEAD = f"""{TITLE}

`python tests/upstream/run.py TREE` writes this section. TREE is a checkout of transformers, whose packages lack tests:
{", ".join(f"`{name}`" for name in FILES)}, with
every `LlamaForCausalLM` patched and a window that holds everything.
Tests that want models from the hub or a GPU cannot run there, and tests of other
classes of caches never use ours.

By their messages, none of the tests below fails because of a wrong number. Some ask for attention weights with a cache.
Some compare `layer.keys`, full-precision tensors that a packed layer does not have ("NoneType"; in
`test_generate_continue_*` after texts and scores agreed). Some demand the class `DynamicCache` ("False is not true"),
or set `config._attn_implementation`.
"""

Outcome = tuple[str, str, bool]  # passed, failed or skipped; why; whether our cache was given keys


def outcomes(tree: Path, mode: str) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        paths = [tree / "src", ROOT, HERE, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "TURBOQUANT_UPSTREAM": mode,
            "TURBOQUANT_OUTCOMES": str(file),
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            "-W",
            "ignore",
        ]
        done = subprocess.run([*command, *FILES], cwd=tree, env=environment, capture_output=True, text=True)
        if not file.exists():
            sys.exit(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        print(f"{mode}: {done.stdout.strip().splitlines()[-1]}", flush=True)
        return {name: tuple(what) for name, what in json.loads(file.read_text()).items()}


def section(version: str, runs: dict[str, dict[str, Outcome]]) -> str:
    own = runs["own"]
    able = [name for name, (outcome, _, _) in own.items() if outcome == "passed"]
    lines = [f"### transformers {version}", "", f"{len(own)} tests, of which {len(able)} pass here as they are.", ""]
    lines += ["| | apply | pass | fail |", "|---|---|---|---|"]
    for mode, title in (("ours", "as they are written, padded on the right"), ("left", "padded on the left")):
        run = runs[mode]
        failed = [name for name in able if run[name][0] != "passed"]
        passed = [name for name in able if run[name][0] == "passed" and run[name][2]]
        lines.append(f"| {title} | {len(passed) + len(failed)} | {len(passed)} | {len(failed)} |")
        left = by_reason(run, failed)
    lines += ["", "Why those padded on the left fail:", ""]
    for reason, names in sorted(left.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {reason}: " + ", ".join(f"`{name}`" for name in sorted(names)))
    return "\n".join(lines) + "\n"


def by_reason(run: dict[str, Outcome], failed: list[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for name in failed:
        test = re.sub(r"_\d+_\w+$", "*", name.rpartition("::")[2])
        reason = run[name][1].replace("|", "/")
        if test not in found[reason]:
            found[reason].append(test)
    return found


def write(version: str, text: str) -> None:
    """Writes text into the page, in place of what it says about this version."""
    page = PAGE.read_text()
    before, _, rest = page.partition(TITLE)
    parts = re.split(r"(?m)^(?=### )", rest)[1:]
    parts = [part.strip() for part in parts if not part.startswith(f"### transformers {version}\n")]
    PAGE.write_text(before.rstrip() + "\n\n" + HEAD + "\n" + "\n\n".join(sorted([*parts, text.strip()])) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    tree = parser.parse_args().tree.resolve()
    version = re.search(r'__version__ = "(.*)"', (tree / "src" / "transformers" / "__init__.py").read_text())[1]
    text = section(version, {mode: outcomes(tree, mode) for mode in ("own", "ours", "left")})
    write(version, text)
    print(text)


if __name__ == "__main__":
    main()
