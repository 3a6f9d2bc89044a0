"""FASTA files: names and sequences of proteins."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..files import existing_file, file_name

__all__ = ["Entries", "Protein", "doubts", "read_entries", "read_fasta"]

GZIP = b"\x1f\x8b"  # the first bytes of every gzip file (RFC 1952)
XZ = b"\xfd7zXZ\0"
# Types of entries of a PIR file (">P1;CRAB_ANAPL"), in which a title follows each header.
PIR = re.compile(r"(P1|F1|DL|DC|RL|RC|N1|N3|XX);", re.IGNORECASE)
NUCLEOTIDES = frozenset("ACGTUN")
NUCLEOTIDE_CODES = frozenset("ACGTUNRYSWKMBDHV-")  # with those of IUPAC for several nucleotides
LEAST_NUCLEOTIDES = 10  # shorter peptides may have such letters alone


class Protein(NamedTuple):
    """One entry: the name is the header up to its first white space, the sequence is in upper-case letters."""

    name: str
    sequence: str


class Entries(NamedTuple):
    """The contents of a file: its proteins, and for each bad entry an error that names file, line and entry."""

    proteins: Sequence[Protein]
    errors: Sequence[str]


def read_fasta(path: str | os.PathLike[str]) -> list[Protein]:
    """Reads all entries of a file or pipe, plain or compressed by gzip or xz, in order, once. Lower-case letters (soft
    masking) become upper-case; blanks and the "*" of a stop codon at the end are left out. It is for the model to say
    whether letters are of its alphabet. Lines end with LF, CR LF or CR and nothing else; a byte order mark in front is
    left out.

    Raises FileNotFoundError if there is no file. Raises ValueError, naming the line, for a file without entries, text
    in front of the first, an entry without a sequence, or one with a character that is not printable ASCII, whose upper
    case may be several letters. Raises ValueError for a damaged gzip or xz file, and UnicodeDecodeError for text that
    is not UTF-8. Gives a UserWarning for sequences that look like DNA or RNA, and for headers of a PIR file, whose
    titles would be read as residues.
    """
    proteins, errors = read_entries(path)
    if errors:
        raise ValueError(errors[0])
    for doubt in doubts(proteins):
        warnings.warn(f"{file_name(path)}: {doubt}", stacklevel=2)
    return list(proteins)


def read_entries(path: str | os.PathLike[str]) -> Entries:
    """As `read_fasta`, but returns errors for bad entries beside the good ones, and does not warn.

    Raises ValueError for what is no FASTA file at all: no entries, text in front of the first, damaged gzip or xz.
    """
    name = file_name(path)
    if os.path.isdir(name) or not os.path.exists(name):
        existing_file(name, "a file of proteins")  # raises; a pipe is none, and can be read
    entries: list[tuple[int, str, list[str]]] = []
    wrong: dict[int, str] = {}  # by entry, its first error
    for number, line in enumerate(_text(name).split("\n"), 1):
        text = line.strip(" \t")
        if text.startswith(">"):
            words = text[1:].split()
            entries.append((number, words[0] if words else f"protein-{len(entries) + 1}", []))
        elif text and not entries:
            raise ValueError(f"{name}:{number}: must be a FASTA header, '>' and a name, got {text[:40]!r}")
        elif text:
            _, header, parts = entries[-1]
            letters = text.replace(" ", "").replace("\t", "")
            if not (letters.isascii() and letters.isprintable()):
                odd = next(letter for letter in letters if not "!" <= letter <= "~")
                error = f"{name}:{number}: the sequence of {header!r} must be in ASCII letters, got {odd!r}"
                wrong.setdefault(len(entries) - 1, error)
            parts.append(letters.upper())
    if not entries:
        raise ValueError(f"{name}: must be a FASTA file with at least one protein, got none")
    proteins = [Protein(header, "".join(parts).removesuffix("*")) for _, header, parts in entries]
    for i, (number, header, _) in enumerate(entries):
        if not proteins[i].sequence:
            wrong[i] = f"{name}:{number}: {header!r} must have a sequence, got none"
    return Entries([p for i, p in enumerate(proteins) if i not in wrong], [wrong[i] for i in sorted(wrong)])


def _text(name: str) -> str:
    """The text of a file, with every end of a line as "\\n"."""
    content = Path(name).read_bytes()
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{name}: must be a whole gzip file, got a damaged one: {error}") from None
    elif content.startswith(XZ):
        try:
            content = lzma.decompress(content)
        except lzma.LZMAError as error:
            raise ValueError(f"{name}: must be a whole xz file, got a damaged one: {error}") from None
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def doubts(proteins: Sequence[Protein]) -> list[str]:
    """Sentences about sequences that are probably not those of proteins."""
    sentences = []
    titled = [p.name for p in proteins if PIR.match(p.name)]
    if titled:
        sentences.append(f"{len(titled)} of {len(proteins)} headers are those of a PIR file, the first {titled[0]!r}: "
                         "the title in the line after each is read as residues; convert the file to FASTA")  # fmt: skip
    nucleotides = [p.name for p in proteins if _of_nucleotides(p.sequence)]
    if nucleotides:
        sentences.append(f"{len(nucleotides)} of {len(proteins)} sequences look like DNA or RNA, the first "
                     f"{nucleotides[0]!r}: their letters are read as amino acids; translate them first")  # fmt: skip
    return sentences


def _of_nucleotides(sequence: str) -> bool:
    """Whether a sequence is of three or more nucleotides and little else. Of 20 amino acids 5 have such letters."""
    letters = set(sequence)
    if len(sequence) < LEAST_NUCLEOTIDES or not letters <= NUCLEOTIDE_CODES or len(letters & set("ACGTU")) < 3:
        return False
    return sum(map(sequence.count, NUCLEOTIDES)) >= 0.9 * len(sequence)
