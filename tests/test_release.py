"""The checks of what is published (tests/release.py): a release without faults has none, and each fault is found."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import release

VERSION = "1.2.3"
METADATA = f"""\
Metadata-Version: 2.4
Name: turboquant-attention
Version: {VERSION}
Summary: what it is
Author: somebody
License-Expression: Apache-2.0
Requires-Python: >=3.11
Project-URL: Homepage, https://example.org
Description-Content-Type: text/markdown

# What it is
"""
TRACKED = ["csrc/core/plan.c", "turboquant/__init__.py", "tests/test_plan.py"]


@pytest.fixture
def root(tmp_path) -> Path:
    texts = {
        "csrc/include/turboquant.h": f'#define TQ_VERSION "{VERSION}"\n',
        "CHANGELOG.md": f"## [{VERSION}]\n\nThe first release of all that.\n\n[{VERSION}]: docs/release-{VERSION}.md\n",
        "CITATION.cff": f"title: x\nversion: {VERSION}\n",
        f"docs/release-{VERSION}.md": "notes\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def wheel(path: Path, metadata: str = METADATA, changed: bytes = b"") -> Path:
    files = {
        "turboquant/__init__.py": b"x",
        "a-1.dist-info/METADATA": metadata.encode(),
        "a-1.dist-info/licenses/LICENSE": b"y",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digest},1\n" for name, digest in digests.items()) + "a-1.dist-info/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as made:
        for name, data in files.items():
            made.writestr(name, data + changed if name.startswith("turboquant") else data)
        made.writestr("a-1.dist-info/RECORD", record)
    return path


def source(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name in [*names, "PKG-INFO"]:
            data = METADATA.encode() if name == "PKG-INFO" else b"x"
            entry = tarfile.TarInfo(f"turboquant_attention-{VERSION}/{name}")
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
    return path


def test_texts(root):
    assert not list(release.text_faults(root))
    for name, old, new, fault in (
        ("CHANGELOG.md", f"## [{VERSION}]", "## [9.9.9]", f"CHANGELOG.md: has no entry for {VERSION}"),
        ("CHANGELOG.md", "The first release of all that.", "", f"CHANGELOG.md: has no entry for {VERSION}"),
        ("CHANGELOG.md", ": docs/release", ": docs/other", "CHANGELOG.md: has no link to notes"),
        ("CITATION.cff", VERSION, "0.0.1", f"CITATION.cff: must have the version {VERSION}"),
    ):
        text = (root / name).read_text()
        (root / name).write_text(text.replace(old, new))
        (found,) = release.text_faults(root)
        assert found.startswith(fault)
        (root / name).write_text(text)
    (root / f"docs/release-{VERSION}.md").unlink()
    (found,) = release.text_faults(root)
    assert "notes" in found


def test_wheels(tmp_path):
    assert not list(release.wheel_faults(wheel(tmp_path / "a.whl"), VERSION))
    (found,) = release.wheel_faults(wheel(tmp_path / "a.whl", changed=b"!"), VERSION)
    assert found == "a.whl: turboquant/__init__.py is not what RECORD says"
    (found,) = release.wheel_faults(wheel(tmp_path / "a.whl"), "2.0.0")
    assert found == f"a.whl: its version must be 2.0.0, got {VERSION}"
    for field in release.WANTED:
        without = re.sub(rf"^{field}: .*\n", "", METADATA, flags=re.MULTILINE)
        faults = list(release.wheel_faults(wheel(tmp_path / "a.whl", without), VERSION))
        assert faults[0] == f"a.whl: its metadata has no {field}"
    (found,) = release.wheel_faults(wheel(tmp_path / "a.whl", METADATA.replace("text/markdown", "text/plain")), VERSION)
    assert found == "a.whl: its metadata has no description in Markdown"


def test_source_distributions(tmp_path):
    whole = [
        *release.SOURCE_FILES,
        "csrc/core/plan.c",
        "turboquant/__init__.py",
        "turboquant_attention.egg-info/SOURCES.txt",
    ]
    assert not list(release.source_faults(source(tmp_path / "a.tar.gz", whole), VERSION, TRACKED))
    other = [name for name in whole if name != "csrc/core/plan.c"] + ["tests/test_plan.py"]
    assert list(release.source_faults(source(tmp_path / "a.tar.gz", other), VERSION, TRACKED)) == [
        "a.tar.gz: csrc/core/plan.c is missing",
        "a.tar.gz: tests/test_plan.py has no place there",
    ]


def test_the_folder(tmp_path):
    names = [f"{release.NAME}-{VERSION}-cp311-abi3-manylinux_2_28_x86_64.whl", f"{release.NAME}-{VERSION}.tar.gz",
             f"{release.DEMO}-0.1.0-py3-none-any.whl", "SHA256SUMS"]  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    assert not list(release.folder_faults(tmp_path, VERSION))
    (tmp_path / names[0]).rename(tmp_path / "other.whl")
    (tmp_path / names[2]).unlink()
    found = list(release.folder_faults(tmp_path, VERSION))
    assert found[0] == f"{names[0]} is missing" and "one wheel of the demo, got []" in found[1]
    assert found[2] == f"other.whl has no place in {tmp_path.name}"
