"""Mutants of a protein in a CSV file, as ProteinGym writes them: a column `mutant` of mutations such as "A12W:C30D",
with positions from 1, and any other columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.esm import AMINO_ACIDS

__all__ = ["SCORE", "Mutant", "read_mutants", "summed"]

SCORE = "score"  # the column that is added
_MUTATION = re.compile(r"([A-Z])([0-9]{1,9})([A-Z])")


class Mutant(NamedTuple):
    """A row of the file, and its changes: (position from 0, letter), by position."""

    row: list[str]
    changes: tuple[tuple[int, str], ...]

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(position for position, _ in self.changes)


def read_mutants(path: str, sequence: str, option: str = "--mutants") -> tuple[list[str], list[Mutant]]:
    """Returns (names of the columns, mutants). ValueError for a file without the column `mutant`, with a column `score`
    or without rows. ValueError, which names the row, for a mutation that is malformed, of another wild type, beyond the
    protein or to no amino acid, and for two mutations at one position."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{option} must be a CSV file, got {path!r}: {error}") from None
    columns = rows[0] if rows else []
    if columns.count("mutant") != 1:
        raise ValueError(f"{option} must have one column `mutant`, got {path!r} with {columns}")
    if SCORE in columns:
        raise ValueError(f"{option} must have no column `{SCORE}`, which is added, got {path!r} with {columns}")
    at, mutants = columns.index("mutant"), []
    for number, row in enumerate(rows[1:], 2):
        if not row:  # a blank line
            continue
        if len(row) != len(columns):
            raise ValueError(f"{option}, {path!r} row {number}: must have {len(columns)} columns, got {len(row)}")
        mutants.append(Mutant(row, _changes(row[at], sequence, f"{option}, {path!r} row {number}")))
    if not mutants:
        raise ValueError(f"{option} must have at least one mutant, got {path!r} without any")
    return columns, mutants


def _changes(text: str, sequence: str, where: str) -> tuple[tuple[int, str], ...]:
    residues: dict[int, str] = {}
    for mutation in text.split(":"):
        match = _MUTATION.fullmatch(mutation.strip())
        if match is None or match[3] not in AMINO_ACIDS:
            raise ValueError(f"{where}: a mutation must be like A12W, to one of {AMINO_ACIDS}, got {mutation!r}")
        wild, position = match[1], int(match[2]) - 1
        if not 0 <= position < len(sequence):
            raise ValueError(f"{where}: {mutation!r} must be at 1..{len(sequence)}, the residues of the protein")
        if sequence[position] != wild:
            raise ValueError(f"{where}: {mutation!r} must replace {sequence[position]!r}, which the protein has there")
        if position in residues:
            raise ValueError(f"{where}: must change each position once, got {text!r}")
        residues[position] = match[3]
    return tuple(sorted(residues.items()))


def summed(mutant: Mutant, scores: Mapping[int, NDArray[np.float32]]) -> float:
    """Returns the sum of a mutant's scores, nats. scores: by position, the score of each of `AMINO_ACIDS`."""
    return sum(float(scores[position][AMINO_ACIDS.index(letter)]) for position, letter in mutant.changes)
