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
    """All entries of a file or pipe, in order, read once. Lower-case letters (soft masking) become upper-case, blanks
    and the "*" of a stop codon at the end are left out; whether letters are of a model's alphabet is for the model to
    say. Lines end with LF, CR LF or CR and nothing else; a byte order mark in front is left out.

    ValueError, naming the line, for a file without entries, text in front of the first, an entry without a sequence, or
    one with a character that is not printable ASCII: upper case of others may be several letters.
    """
    name = os.fspath(path)
    found: list[tuple[int, str, list[str]]] = []
    content = Path(path).read_text(encoding="utf-8-sig")  # which has every end of a line as "\n"
    for number, line in enumerate(content.split("\n"), 1):
        text = line.strip(" \t")
        if text.startswith(">"):
            words = text[1:].split()
            found.append((number, words[0] if words else f"protein-{len(found) + 1}", []))
        elif text and not found:
            raise ValueError(f"{name}:{number}: must be a FASTA header, '>' and a name, got {text[:40]!r}")
        elif text:
            _, header, parts = found[-1]
            letters = text.replace(" ", "").replace("\t", "")
            if not (letters.isascii() and letters.isprintable()):
                wrong = next(letter for letter in letters if not "!" <= letter <= "~")
                raise ValueError(f"{name}:{number}: the sequence of {header!r} must be in ASCII letters, got {wrong!r}")
            parts.append(letters.upper())
    if not found:
        raise ValueError(f"{name}: must be a FASTA file with at least one protein, got none")
    proteins = [Protein(header, "".join(parts).removesuffix("*")) for _, header, parts in found]
    for (number, header, _), protein in zip(found, proteins):
        if not protein.sequence:
            raise ValueError(f"{name}:{number}: {header!r} must have a sequence, got none")
    return proteins
