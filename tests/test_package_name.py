"""Other distributions install a package `turboquant` too: the command says so instead of running a mixture."""

from __future__ import annotations

import csv
import hashlib
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from conftest import ROOT

OURS = {
    "turboquant_attention.py": (ROOT / "turboquant_attention.py").read_text(),
    "turboquant/__init__.py": "",
    "turboquant/cli/__init__.py": "def main(arguments=None):\n    print('ran')\n    return 0\n",
    "turboquant/plan.py": "PAGE_TOKENS = 128\n",
    "turboquant/_core.abi3.so": "not stripped",
}
THEIRS = {
    "turboquant/__init__.py": "import torch_that_is_not_there\n",
    "turboquant/cli.py": "def main():\n    raise SystemExit('theirs')\n",
    "turboquant/cache.py": "",
}


def install(site: Path, name: str, files: dict[str, str], record: bool = True) -> Path:
    """Writes files and metadata as pip does: over what is there."""
    about = site / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append((path, f"sha256={digest}", len(text)))
    rows.append(("turboquant/__pycache__/plan.cpython-311.pyc", "", ""))
    rows.append((f"{about.name}/RECORD", "", ""))
    if record:
        with open(about / "RECORD", "w", newline="") as file:
            csv.writer(file).writerows(rows)
    return about


def uninstall(site: Path, about: Path, files: dict[str, str]) -> None:
    for path in files:
        (site / path).unlink()
    for path in about.iterdir():
        path.unlink()
    about.rmdir()


def run(site: Path, *how: str) -> tuple[int, str, str]:
    """Runs the console script's function, as pip writes it, with nothing but `site` on the path."""
    code = "import sys; from turboquant_attention import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-S", *(how or ("-c", code))], cwd=site.parent, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site", "turboquant-attention", OURS)
    return tmp_path / "site"


def test_all_files_are_ours(site: Path) -> None:
    assert run(site) == (0, "ran", "")
    assert run(site, "-m", "turboquant_attention") == (0, "ran", "")
    (site / "turboquant/_core.abi3.so").write_text("stripped")
    (site / "turboquant/notes.py").write_text("")  # a file more does no harm
    assert run(site) == (0, "ran", "")


def test_another_one_is_installed_after_ours(site: Path) -> None:
    install(site, "turboquant", THEIRS)
    status, out, said = run(site)
    assert (status, out) == (1, "")
    assert said == (
        f"turboquant: 1 of the 4 files of {site / 'turboquant'} are missing or are not those of "
        "turboquant-attention 1.0 (turboquant/__init__.py is the first), because turboquant installs a package "
        "`turboquant` too: pip uninstall turboquant turboquant-attention, then pip install turboquant-attention"
    )


def test_another_one_is_uninstalled_after_ours(site: Path) -> None:
    uninstall(site, install(site, "turboquant", THEIRS), THEIRS)
    status, out, said = run(site)
    assert (status, out) == (1, "")
    assert "1 of the 4 files of" in said and "because" not in said
    assert said.endswith(": pip install --force-reinstall --no-deps turboquant-attention")


def test_ours_after_another_one_works(tmp_path: Path) -> None:
    install(tmp_path / "site", "turboquant", THEIRS)
    install(tmp_path / "site", "turboquant-attention", OURS)
    assert run(tmp_path / "site") == (0, "ran", "")


def test_a_file_that_somebody_edited_is_a_note(site: Path) -> None:
    (site / "turboquant/plan.py").write_text("PAGE_TOKENS = 64\n")
    status, out, said = run(site)
    assert (status, out) == (0, "ran")
    assert "1 of the 4 files of" in said and "(turboquant/plan.py is the first)" in said


def test_without_a_record_nothing_is_compared(tmp_path: Path) -> None:
    install(tmp_path / "site", "turboquant-attention", OURS | {"turboquant/plan.py": ""}, record=False)
    (tmp_path / "site/turboquant/plan.py").unlink()
    assert run(tmp_path / "site") == (0, "ran", "")


def test_in_this_tree() -> None:
    """A clone, which may have metadata of an editable installation beside it."""
    import turboquant_attention

    assert turboquant_attention.damage() == ("", False)
