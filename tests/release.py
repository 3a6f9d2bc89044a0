"""Checks what is to be published: python tests/release.py dist

Checks the distributions in the folder (make release-check builds them), and that the changelog, the citation and the
notes have the same version. Writes SHA256SUMS beside the distributions. If anything is wrong, prints a line for each
fault and ends with status 1."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME, DEMO = "turboquant_attention", "turboquant_attention_demo"
WANTED = ("Name", "Version", "Summary", "Author", "License-Expression", "Requires-Python", "Project-URL")
# Files of a source distribution beside the folders csrc and turboquant.
SOURCE_FILES = (
    "LICENSE README.md CHANGELOG.md CITATION.cff SECURITY.md pyproject.toml setup.py turboquant_attention.py".split()
)


def version(root: Path) -> str:
    found = re.search(r'^#define TQ_VERSION "([^"]+)"', (root / "csrc/include/turboquant.h").read_text(), re.MULTILINE)
    assert found
    return found[1]


def text_faults(root: Path) -> Iterator[str]:
    """Finds faults of the texts that name the version."""
    wanted = version(root)
    changes = (root / "CHANGELOG.md").read_text()
    entry = re.search(rf"^## \[{re.escape(wanted)}\]\n(.*?)(?=^## |^\[|\Z)", changes, re.MULTILINE | re.DOTALL)
    if entry is None or len(entry[1].split()) < 5:
        yield f"CHANGELOG.md: has no entry for {wanted}"
    notes = f"docs/release-{wanted}.md"
    if not (root / notes).exists() or f"[{wanted}]: {notes}" not in changes:
        yield f"CHANGELOG.md: has no link to notes, {notes}, that are there"
    if not re.search(rf"^version: {re.escape(wanted)}$", (root / "CITATION.cff").read_text(), re.MULTILINE):
        yield f"CITATION.cff: must have the version {wanted}"


def metadata_faults(file: str, text: str, wanted: str | None) -> Iterator[str]:
    """Finds faults of a wheel's METADATA, or of PKG-INFO. wanted: the version, or None for any."""
    about: Message = Parser().parsestr(text)
    for field in WANTED:
        if not about[field]:
            yield f"{file}: its metadata has no {field}"
    if wanted is not None and about["Version"] != wanted:
        yield f"{file}: its version must be {wanted}, got {about['Version']}"
    if about["Description-Content-Type"] != "text/markdown" or not str(about.get_payload()).strip():
        yield f"{file}: its metadata has no description in Markdown"


def wheel_faults(path: Path, wanted: str | None) -> Iterator[str]:
    """Finds faults of a wheel's metadata, and files whose digest is not the one that its RECORD names."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        yield from metadata_faults(path.name, wheel.read(f"{folder}/METADATA").decode(), wanted)
        if not any(name.startswith(f"{folder}/licenses/LICENSE") for name in names) and not path.name.startswith(DEMO):
            yield f"{path.name}: has no licence"
        recorded = dict(line.rsplit(",", 2)[:2] for line in wheel.read(f"{folder}/RECORD").decode().splitlines())
        for name in names:
            digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).decode().rstrip("=")
            if not name.endswith("/RECORD") and recorded.get(name) != f"sha256={digest}":
                yield f"{path.name}: {name} is not what RECORD says"


def source_faults(path: Path, wanted: str, tracked: list[str]) -> Iterator[str]:
    """Finds sources that a source distribution lacks, and files that it should not have. tracked: git's files."""
    with tarfile.open(path) as archive:
        top = f"{NAME}-{wanted}"
        names = {name.removeprefix(f"{top}/") for name in archive.getnames() if archive.getmember(name).isfile()}
        member = archive.extractfile(f"{top}/PKG-INFO")
        assert member
        yield from metadata_faults(path.name, member.read().decode(), wanted)
    sources = {name for name in tracked if name.startswith(("csrc/", "turboquant/"))} | set(SOURCE_FILES)
    generated = re.compile(rf"PKG-INFO|setup\.cfg|MANIFEST\.in|{NAME}\.egg-info/.*")
    yield from (f"{path.name}: {name} is missing" for name in sorted(sources - names))
    yield from (
        f"{path.name}: {name} has no place there" for name in sorted(names - sources) if not generated.match(name)
    )


def folder_faults(folder: Path, wanted: str) -> Iterator[str]:
    """Finds what the folder lacks or may not have: two wheels, a source distribution, perhaps a wheel for aarch64."""
    names = {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    kinds = {
        f"{NAME}-{wanted}-cp311-abi3-manylinux_2_28_x86_64.whl": True,
        f"{NAME}-{wanted}-cp311-abi3-manylinux_2_28_aarch64.whl": False,
        f"{NAME}-{wanted}.tar.gz": True,
    }
    demos = [name for name in names if re.fullmatch(rf"{DEMO}-[\d.]+-py3-none-any\.whl", name)]
    yield from (f"{name} is missing" for name, needed in kinds.items() if needed and name not in names)
    if len(demos) != 1:
        yield f"there must be one wheel of the demo, got {demos}"
    yield from (f"{name} has no place in {folder.name}" for name in sorted(names - {*kinds, *demos}))


def faults(root: Path, folder: Path) -> Iterator[str]:
    wanted = version(root)
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    yield from text_faults(root)
    yield from folder_faults(folder, wanted)
    for path in sorted(folder.glob("*.whl")):
        yield from wheel_faults(path, None if path.name.startswith(DEMO) else wanted)
    for path in sorted(folder.glob("*.tar.gz")):
        yield from source_faults(path, wanted, listed.stdout.splitlines())


def main() -> int:
    folder = Path(sys.argv[1])
    found = list(faults(ROOT, folder))
    print(*found, sep="\n", file=sys.stderr)
    if found:
        return 1
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text(sums)
    print(sums, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
