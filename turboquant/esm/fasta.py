"""FASTA files: names and sequences of proteins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Protein", "read_fasta"]


class Protein(NamedTuple):
    """One entry: the name is the header up to its first white space, the sequence is in upper-case letters."""

    name: str
    sequence: str


def read_fasta(path: str | os.PathLike[str]) -> list[Protein]:
    """All entries of a file, in order. Lower-case letters (soft masking) become upper-case, and the "*" of a stop codon
    at the end is left out; whether letters are of a model's alphabet is for the model to say.

    ValueError, naming the line, for a file without entries, text in front of the first, or an entry without a sequence.
    """
    name = os.fspath(path)
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if text.startswith(">"):
            words = text[1:].split()
            found.append((number, words[0] if words else f"protein-{len(found) + 1}", []))
        elif text and not found:
            raise ValueError(f"{name}:{number}: must be a FASTA header, '>' and a name, got {text[:40]!r}")
        elif text:
            found[-1][2].append("".join(text.split()).upper())
    if not found:
        raise ValueError(f"{name}: must be a FASTA file with at least one protein, got none")
    proteins = [Protein(header, "".join(parts).removesuffix("*")) for _, header, parts in found]
    for (number, header, _), protein in zip(found, proteins):
        if not protein.sequence:
            raise ValueError(f"{name}:{number}: {header!r} must have a sequence, got none")
    return proteins
