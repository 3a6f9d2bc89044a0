"""Commands on proteins: `calibrate --fasta`, `eval --fasta`, `esm-embed`, `esm-scan`."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..calibration import measure
from ..index import Index
from ..index.training import LEAST
from ..index_commands import check_names, fill
from ..measured import Profile
from ..spec import CacheSpec
from ..tables import table
from .context import ContextCache
from .embedding import embed
from .fasta import Entries, Protein, doubts, read_entries
from .heatmap import figure_class, heat_map
from .model import AMINO_ACIDS, checked_model, letter_tokens, tokenise
from .quality import ProteinEvaluation, evaluate, protein_batches
from .scan import Scan, masked_marginals, wild_type_marginals

__all__ = ["calibrated", "embedded", "evaluated", "markdown", "scan"]


HELD_OUT = 4  # 1 protein in 4 is held out of a calibration
Amount = tuple[int | None, int]  # the number asked for, or None, and the default
Read = Entries | None  # the entries of a file that was read before: a pipe can be read only once


def _usable(path: str, read: Read, model: Any, any_length: bool = False) -> tuple[list[Protein], list[str]]:
    """The proteins of a file that the model can read, at once or in windows (`any_length`), and for each of the others
    an error that says why not.

    ValueError if there is none that it can read. Warns on stderr of entries that look like DNA or a PIR file.
    """
    proteins, errors = read_entries(path) if read is None else read
    for doubt in doubts(proteins):
        print(f"warning: {path}: {doubt}", file=sys.stderr)
    usable, left_out = [], list(errors)
    for protein in proteins:
        try:
            if any_length:
                letter_tokens(protein.sequence, f"{path}: {protein.name}")
            else:
                tokenise(protein.sequence, model.config, f"{path}: {protein.name}")
        except ValueError as error:
            left_out.append(str(error))
        else:
            usable.append(protein)
    if not usable:
        raise ValueError(f"the FASTA file must have a protein that the model can read, got {path!r}, whose "
                         f"{len(left_out)} cannot be used; the first: {left_out[0]}")  # fmt: skip
    return usable, left_out


def _spread(
    path: str, read: Read, model: Any, option: str, amount: Amount, sizes: Callable[[Protein], int]
) -> list[str]:
    """Sequences spaced evenly over a file, whose sizes sum to the amount asked for, or else to the default or all.
    Prints how many cannot be used."""
    proteins, left_out = _usable(path, read, model)
    if left_out:
        print(f"{len(left_out)} of {len(proteins) + len(left_out)} proteins are left out, the first: {left_out[0]}",
              file=sys.stderr)  # fmt: skip
    wanted, usual = amount
    there = sum(map(sizes, proteins))
    if wanted is not None and not 1 <= wanted <= there:
        raise ValueError(f"{option} must be in 1..{there}, which the proteins of --fasta have, got {wanted}")
    count = -(-min(wanted or usual, there) * len(proteins) // there)
    return [proteins[i * len(proteins) // count].sequence for i in range(count)]


def calibrated(
    model: Any,
    fasta: str,
    tokens: Amount,
    averages: Sequence[float],
    seed: int,
    checkpoint: str,
    read: Read = None,
) -> Profile:
    """A calibration of `model` on about this many tokens of the proteins in a file. A quarter is held out, to try
    methods on."""
    checked_model(model)
    sequences = _spread(fasta, read, model, "--tokens", tokens, lambda protein: len(protein.sequence) + 2)
    if len(sequences) < 2:
        raise ValueError("--tokens must take in two proteins, one of them held out to try on, got one")
    held_out = protein_batches(model, sequences[::HELD_OUT], seed=seed)
    learned = [one for i, one in enumerate(sequences) if i % HELD_OUT]
    batches = protein_batches(model, learned, seed=seed)
    source = f"{Path(fasta).name}, {len(sequences)} proteins"
    return measure.calibrate(model, batches, held_out=held_out, averages=averages, seed=seed, source=source,
                             progress=True, checkpoint=checkpoint)  # fmt: skip


def evaluated(
    model: Any,
    fasta: str,
    specs: Mapping[str, CacheSpec],
    profile: Profile | None,
    count: Amount,
    read: Read = None,
) -> dict[str, ProteinEvaluation]:
    """Evaluates each spec on this many proteins of a file."""
    checked_model(model)
    sequences = _spread(fasta, read, model, "--proteins", count, lambda protein: 1)
    return evaluate(model, sequences, specs, profile=profile, progress=True)


def markdown(found: Mapping[str, ProteinEvaluation]) -> str:
    """A table of results, and below it what they were measured on."""
    head = ("spec", "final cosine", "worst residue", "KL divergence", "perplexity", "bits", "bytes per token")
    rows = [head]
    for name, e in found.items():
        rows.append((name, f"{e.final_cosine_mean:.5f}", f"{e.final_cosine_min:.4f}", f"{e.masked_kl_divergence:.5f}",
                     f"{e.masked_perplexity:.3f}", f"{e.effective_bits:.3f}", f"{e.bytes_per_token:,.0f}"))  # fmt: skip
    notes = dict.fromkeys(f"{e.proteins} proteins, {e.residues:,} residues, {e.masked:,} of them masked for divergence "
                          f"and perplexity ({e.reference_perplexity:.3f} alone); all keys and values packed, "
                          f"{e.packed_bits:.3f} bits without the empty places of last pages"
                          + (f"; exact: {e.spec.sinks} sinks" if e.spec.sinks else "")
                          for e in found.values())  # fmt: skip
    return "\n".join([table(rows, markdown=True), "", *(f"{note}." for note in notes)])


def embedded(model: Any, chosen: argparse.Namespace, read: Read = None) -> int:
    """Embeds the proteins of a file that the model can read; lists the others on stderr at the end."""
    checked_model(model)
    proteins, left_out = _usable(chosen.fasta, read, model, any_length=True)
    names = [protein.name for protein in proteins]
    if chosen.index is not None:
        check_names(names, "--index")
    found = embed(model, [protein.sequence for protein in proteins], names=names, layers=chosen.layers,
                  residues=chosen.residues, out=chosen.out, window=chosen.window, overlap=chosen.overlap,
                  memory=chosen.memory << 20, progress=True)  # fmt: skip
    print(f"{chosen.out}: {found!r}, {os.path.getsize(chosen.out):,} bytes")
    if chosen.index is not None:
        means = found.means()
        index = Index(means.shape[1], 4, "cosine")
        fill(index, means, chosen.index, chosen.fasta, train=len(found) >= LEAST, names=names)
    _list_left_out(proteins, left_out)
    return 0


def _list_left_out(proteins: Sequence[Protein], left_out: Sequence[str]) -> None:
    if left_out:
        print(f"left out {len(left_out)} of {len(proteins) + len(left_out)} proteins:", file=sys.stderr)
        print(*(f"  {why}" for why in left_out), sep="\n", file=sys.stderr)


def scan(model: Any, chosen: argparse.Namespace, profile: Profile | None, read: Read = None) -> int:
    """Marginals of the proteins of a file, by `--method`, as CSV and, if wanted, as pictures. Skips proteins that the
    model cannot read, and lists them on stderr at the end. An existing CSV file is replaced at the end; "-" is standard
    output, which gets each protein's rows at once."""
    checked_model(model)
    if chosen.heatmap:
        figure_class()
    proteins, left_out = _usable(chosen.fasta, read, model)
    names: set[str] = set()
    for protein in proteins:
        if protein.name in names:
            raise ValueError(
                f"--fasta must name every protein differently up to the first blank, got two {protein.name!r}"
            )
        names.add(protein.name)
    context = ContextCache(model, chosen.spec, profile=profile) if chosen.method == "shared-context" else None
    if chosen.csv == "-":
        _write(sys.stdout, model, chosen, proteins, context)
        sys.stdout.flush()
    else:
        unfinished = f"{chosen.csv}.part"
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            _write(file, model, chosen, proteins, context)
        os.replace(unfinished, chosen.csv)
    _list_left_out(proteins, left_out)
    return 0


def _write(
    file: TextIO, model: Any, chosen: argparse.Namespace, proteins: Sequence[Protein], context: ContextCache | None
) -> None:
    """Scans proteins; writes the rows of each to `file` and its picture, if wanted, to a file of its own."""
    writer = csv.writer(file)
    writer.writerow(("protein", "position", "wild_type", "mutation", "score", "log_probability"))
    for i, protein in enumerate(proteins):
        print(f"{i + 1} of {len(proteins)}, {protein.name}: {len(protein.sequence)} residues", file=sys.stderr)
        found = _scanned(model, protein.sequence, chosen, context)
        writer.writerows(_rows(protein.name, found))
        if chosen.heatmap:
            heat_map(found, _numbered(chosen.heatmap, i, len(proteins)), title=protein.name)


def _scanned(model: Any, sequence: str, chosen: argparse.Namespace, context: ContextCache | None) -> Scan:
    if chosen.method == "wild-type-marginals":
        return wild_type_marginals(model, sequence)
    if context is not None:
        context.encode([sequence])
    return masked_marginals(model, sequence, shared_context=context is not None, context=context,
                            batch_size=chosen.batch, progress=True)  # fmt: skip


def _rows(name: str, scan: Scan) -> list[tuple[Any, ...]]:
    """One per position and amino acid; positions count from 1, as mutations are written (A12W)."""
    return [
        (name, p + 1, scan.sequence[p], letter, f"{scan.scores[i, a]:.5f}", f"{scan.log_probabilities[i, a]:.5f}")
        for i, p in enumerate(scan.positions)
        for a, letter in enumerate(AMINO_ACIDS)
    ]


def _numbered(path: str, i: int, count: int) -> Path:
    """The file of picture i: "x.svg" for one protein, "x-1.svg", "x-2.svg", ... for several."""
    target = Path(path)
    return target if count == 1 else target.with_stem(f"{target.stem}-{i + 1}")
