"""Commands on proteins: `calibrate --fasta`, `eval --fasta`, `esm-embed`, `esm-scan`."""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from transformers import AutoConfig

from ..arguments import standard_output
from ..calibration.calibrate import calibrate
from ..esm.context import ContextCache
from ..esm.embedding import chosen_layers, embed
from ..esm.heatmap import heat_map
from ..esm.mutants import SCORE, Mutant, read_mutants, summed
from ..esm.quality import ProteinEvaluation, evaluate, protein_batches
from ..esm.scan import Scan, joined, joint_marginals, masked_marginals, wild_type_marginals
from ..esm.windows import sizes, windows
from ..index import Index
from ..index.training import LEAST
from ..measured import Profile
from ..models.esm import AMINO_ACIDS, checked_model, letter_tokens, tokenise
from ..models.fasta import Entries, Protein, doubts, read_entries
from ..progress import log
from ..spec import CacheSpec
from ..tables import table
from .commands import HELD_OUT
from .index_commands import check_names, fill

__all__ = ["calibrated", "check_embedding", "embedded", "evaluated", "markdown", "scan"]

Amount = tuple[int | None, int]  # the number asked for, or None, and the default
Read = Entries | None  # the entries of a file that has been read already: a pipe can be read only once


def _usable(path: str, read: Read, model: Any, any_length: bool = False) -> tuple[list[Protein], list[str]]:
    """Returns the proteins of a file that the model can read, whole or in windows (`any_length`), and for each other
    protein an error that says why not.

    ValueError if it can read none. Warns on stderr of entries that look like DNA or a PIR file.
    """
    proteins, errors = read_entries(path) if read is None else read
    for doubt in doubts(proteins):
        log.warning("%s: %s", path, doubt)
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
    """Returns sequences spaced evenly over a file. Their sizes sum to about the amount asked for, or to the default, or
    to all if there is less. Warns of those that cannot be used."""
    proteins, left_out = _usable(path, read, model)
    if left_out:
        log.warning("%d of %d proteins are left out, the first: %s", len(left_out), len(proteins) + len(left_out),
                    left_out[0])  # fmt: skip
    wanted, usual = amount
    there = sum(map(sizes, proteins))
    if wanted is not None and not 1 <= wanted <= there:
        raise ValueError(f"{option} must be in 1..{there}, which the proteins of --fasta have, got {wanted}")
    count = -(-min(wanted or usual, there) * len(proteins) // there)
    return [proteins[i * len(proteins) // count].sequence for i in range(count)]


def calibrated(
    model: Any, fasta: str, tokens: Amount, averages: Sequence[float], seed: int, checkpoint: str, read: Read = None
) -> Profile:
    """Calibrates `model` on about this many tokens of the proteins in a file. A quarter of the proteins is held out to
    try methods on."""
    checked_model(model)
    sequences = _spread(fasta, read, model, "--tokens", tokens, lambda protein: len(protein.sequence) + 2)
    if len(sequences) < 2:
        raise ValueError("--tokens must take in two proteins, one of them held out to try on, got one")
    held_out = protein_batches(model, sequences[::HELD_OUT], seed=seed)
    learned = [one for i, one in enumerate(sequences) if i % HELD_OUT]
    batches = protein_batches(model, learned, seed=seed)
    source = f"{Path(fasta).name}, {len(sequences)} proteins"
    return calibrate(model, batches, held_out=held_out, averages=averages, seed=seed, source=source,
                             progress=True, checkpoint=checkpoint)  # fmt: skip


def evaluated(
    model: Any, fasta: str, specs: Mapping[str, CacheSpec], profile: Profile | None, count: Amount, read: Read = None
) -> dict[str, ProteinEvaluation]:
    """Evaluates each spec on this many proteins of a file."""
    checked_model(model)
    sequences = _spread(fasta, read, model, "--proteins", count, lambda protein: 1)
    return evaluate(model, sequences, specs, profile=profile, progress=True)


def markdown(evaluations: Mapping[str, ProteinEvaluation]) -> str:
    """Returns a table of results, and below it what they were measured on."""
    head = ("spec", "final cosine", "worst residue", "KL divergence", "perplexity", "bits", "bytes per token")
    rows = [head]
    for name, e in evaluations.items():
        rows.append((name, f"{e.final_cosine_mean:.5f}", f"{e.final_cosine_min:.4f}", f"{e.masked_kl_divergence:.5f}",
                     f"{e.masked_perplexity:.3f}", f"{e.effective_bits:.3f}", f"{e.bytes_per_token:,.0f}"))  # fmt: skip
    notes = dict.fromkeys(f"{e.proteins} proteins, {e.residues:,} residues, {e.masked:,} of them masked for divergence "
                          f"and perplexity ({e.reference_perplexity:.3f} alone); all keys and values packed, "
                          f"{e.packed_bits:.3f} bits without the empty places of last pages"
                          + (f"; exact: {e.spec.sinks} sinks" if e.spec.sinks else "")
                          for e in evaluations.values())  # fmt: skip
    return "\n".join([table(rows, markdown=True), "", *(f"{note}." for note in notes)])


def check_embedding(chosen: argparse.Namespace) -> None:
    """Checks the options of `esm-embed` against the model's configuration, before its weights are read."""
    config = AutoConfig.from_pretrained(chosen.model)
    chosen_layers(chosen.layers, config.num_hidden_layers)
    sizes(config, chosen.window, chosen.overlap)


def embedded(model: Any, chosen: argparse.Namespace, read: Read = None) -> int:
    """Embeds the proteins of a file that the model can read. Lists the others on stderr at the end."""
    checked_model(model)
    proteins, left_out = _usable(chosen.fasta, read, model, any_length=True)
    names = [protein.name for protein in proteins]
    if chosen.index is not None:
        check_names(names, "--index")
    embeddings = embed(model, [protein.sequence for protein in proteins], names=names, layers=chosen.layers,
                  residues=chosen.residues, out=chosen.out, window=chosen.window, overlap=chosen.overlap,
                  memory=None if chosen.memory is None else chosen.memory << 20, progress=True)  # fmt: skip
    print(f"{chosen.out}: {embeddings!r}, {os.path.getsize(chosen.out):,} bytes")
    if chosen.index is not None:
        means = embeddings.means()
        index = Index(means.shape[1], 4, "cosine")
        fill(index, means, chosen.index, chosen.fasta, train=len(embeddings) >= LEAST, names=names)
    _list_left_out(proteins, left_out)
    return 0


def _list_left_out(proteins: Sequence[Protein], left_out: Sequence[str]) -> None:
    if left_out:
        lines = "".join(f"\n  {why}" for why in left_out)
        log.warning("left out %d of %d proteins:%s", len(left_out), len(proteins) + len(left_out), lines)


def scan(model: Any, chosen: argparse.Namespace, profile: Profile | None, read: Read = None) -> int:
    """Writes marginals of the proteins of a file, by `--method`, as CSV and on request as pictures, or the scores of
    mutants of its one protein. Skips proteins that the model cannot read, and lists them on stderr at the end. An
    existing CSV file is replaced at the end. "-" is standard output, which gets each protein's rows at once."""
    checked_model(model)
    proteins, left_out = _usable(chosen.fasta, read, model, any_length=True)
    check_names([protein.name for protein in proteins], "the FASTA file")
    mutants = None
    if chosen.mutants is not None:
        if len(proteins) != 1:
            raise ValueError(f"--mutants needs a FASTA file with the one protein that they are of, got {len(proteins)}")
        mutants = read_mutants(chosen.mutants, proteins[0].sequence)
    context = ContextCache(model, chosen.spec, profile=profile) if chosen.method == "shared-context" else None
    if chosen.csv == "-":
        _write(standard_output(), model, chosen, proteins, context, mutants)
    else:
        unfinished = f"{chosen.csv}.part"
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            _write(file, model, chosen, proteins, context, mutants)
        os.replace(unfinished, chosen.csv)
    _list_left_out(proteins, left_out)
    return 0


def _write(
    file: TextIO,
    model: Any,
    chosen: argparse.Namespace,
    proteins: Sequence[Protein],
    context: ContextCache | None,
    mutants: tuple[list[str], list[Mutant]] | None,
) -> None:
    """Scans proteins. Writes the rows of each to `file` and on request its picture to another file."""
    writer = csv.writer(file)
    if mutants is None:
        writer.writerow(("protein", "position", "wild_type", "mutation", "score", "log_probability"))
    else:
        writer.writerow((*mutants[0], SCORE))
    for i, protein in enumerate(proteins):
        log.info("%d of %d, %s: %d residues", i + 1, len(proteins), protein.name, len(protein.sequence))
        if mutants is not None and chosen.joint:
            scores = _jointly_scored(model, protein.sequence, mutants[1], chosen, context)
            writer.writerows([*mutant.row, f"{score:.5f}"] for mutant, score in zip(mutants[1], scores, strict=True))
            continue
        positions = None if mutants is None else {p for mutant in mutants[1] for p in mutant.positions}
        scan = _scanned(model, protein.sequence, chosen, context, positions)
        if mutants is None:
            writer.writerows(_rows(protein.name, scan))
        else:
            by_position = dict(zip(scan.positions, scan.scores, strict=True))
            writer.writerows([*mutant.row, f"{summed(mutant, by_position):.5f}"] for mutant in mutants[1])
        if chosen.heatmap:
            heat_map(scan, _numbered(chosen.heatmap, i, len(proteins)), title=protein.name)


def _scanned(
    model: Any,
    sequence: str,
    chosen: argparse.Namespace,
    context: ContextCache | None,
    positions: Collection[int] | None,
) -> Scan:
    """Scans some positions, or all, in windows if the protein is longer than the model can read at once."""
    parts = []
    for w in windows(len(sequence), *sizes(model.config)):
        at = [p - w.start for p in range(w.first, w.last) if positions is None or p in positions]
        if not at:
            continue
        letters = sequence[w.start : w.stop]
        if chosen.method == "wild-type-marginals":
            parts.append((w.start, wild_type_marginals(model, letters, at)))
            continue
        if context is not None:
            context.encode([letters])
        result = masked_marginals(model, letters, at, context is not None, context=context, batch_size=chosen.batch,
                                 progress=True)  # fmt: skip
        parts.append((w.start, result))
    return joined(sequence, parts)


def _jointly_scored(
    model: Any, sequence: str, mutants: Sequence[Mutant], chosen: argparse.Namespace, context: ContextCache | None
) -> list[float]:
    """Returns the score of each mutant with its positions masked together: all those that the same window keeps."""
    scores = [0.0] * len(mutants)
    for w in windows(len(sequence), *sizes(model.config)):
        of_set: dict[tuple[int, ...], list[int]] = {}  # mutants by the positions that this window keeps
        for i, mutant in enumerate(mutants):
            places = tuple(p for p in mutant.positions if w.first <= p < w.last)
            if places:
                of_set.setdefault(places, []).append(i)
        if not of_set:
            continue
        letters = sequence[w.start : w.stop]
        if context is not None:
            context.encode([letters])
        sets = sorted(of_set, key=lambda places: (len(places), places))  # sets of equal size run together
        scans = joint_marginals(model, letters, [[p - w.start for p in places] for places in sets], context is not None,
                                context=context, batch_size=chosen.batch, progress=True)  # fmt: skip
        for places, scan in zip(sets, scans, strict=True):
            by_position = dict(zip(places, scan.scores, strict=True))
            for i in of_set[places]:
                mine = tuple(change for change in mutants[i].changes if change[0] in by_position)
                scores[i] += summed(Mutant([], mine), by_position)
    return scores


def _rows(name: str, scan: Scan) -> list[tuple[Any, ...]]:
    """Returns one row per position and amino acid. Positions count from 1, as mutations are written (A12W)."""
    return [
        (name, p + 1, scan.sequence[p], letter, f"{scan.scores[i, a]:.5f}", f"{scan.log_probabilities[i, a]:.5f}")
        for i, p in enumerate(scan.positions)
        for a, letter in enumerate(AMINO_ACIDS)
    ]


def _numbered(path: str, i: int, count: int) -> Path:
    """Returns the file of picture i: "x.svg" for one protein, "x-1.svg", "x-2.svg", ... for several."""
    target = Path(path)
    return target if count == 1 else target.with_stem(f"{target.stem}-{i + 1}")
