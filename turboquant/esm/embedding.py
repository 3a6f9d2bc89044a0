"""Embeddings of many proteins, in batches of similar length within a memory budget. Long proteins are read in windows.
An interrupted run goes on with its unfinished file."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..arguments import bounded, integer, listed
from ..files import file_to_write, write_whole
from ..models.esm import CLS, EOS, checked_model, dropout_factor, letter_tokens, padded
from ..models.esm import embed as embedded
from ..models.identity import fingerprint
from ..models.placement import device_of
from ..models.routing import evaluating, routed
from ..progress import Progress
from ..quantizer import Quantizer
from .attention import NAME
from .context import Letters
from .embeddings import Arrays, Embeddings, described, placed
from .scan import Plain
from .windows import Window, sizes, windows

__all__ = ["embed"]

_MEMORY = (2**30, 2**26)  # default of `memory` in bytes: on GPUs and other devices, on CPUs
_SAVED = 10.0  # seconds between two notes of how far a file is
_TIMES_WIDTH = 24  # numbers of a token that a layer holds at once, in widths of the model: two norms and the MLP


@dataclass(frozen=True)
class _Job:
    """What is embedded, and how."""

    names: tuple[str, ...]
    tokens: list[list[int]]  # of each protein, without start and end
    layers: tuple[int, ...]
    residues: str
    window: int
    overlap: int
    budget: int  # how many tokens run together

    def windows_of(self, protein: int) -> list[Window]:
        return windows(len(self.tokens[protein]), self.window, self.overlap)

    def steps(self) -> list[list[int]]:
        """Returns groups of proteins of similar length, the longest first, that are embedded and written together."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-len(self.tokens[i]), i))
        steps: list[list[int]] = []
        room = 0
        for i in order:
            wanted = sum(w.stop - w.start + 2 for w in self.windows_of(i))
            if wanted > room:
                steps.append([])
                room = self.budget
            steps[-1].append(i)
            room -= wanted
        return steps


class _Piece(NamedTuple):
    protein: int
    window: Window


def embed(
    model: Any,
    sequences: Sequence[Letters],
    *,
    names: Sequence[str] | None = None,
    layers: Sequence[int] = (-1,),
    residues: str = "none",
    out: str | os.PathLike[str] | None = None,
    window: int | None = None,
    overlap: int | None = None,
    memory: int | None = None,
    progress: bool = False,
) -> Embeddings:
    """Embeds proteins: the mean over the residues of each, and on request every residue. See `Embeddings`.

    model      an ESM-2 model, with or without a head, patched or not: its own attention is used
    sequences  of the ESM-2 alphabet, of any length
    names      of the proteins, without line feeds; None: their numbers
    layers     whose states are taken: 0 is the input of the first layer, -1 the model's output
    residues   "none"; "float16"; or "4bit", packed by `turboquant.Quantizer`, each protein by itself
    out        the file to write; its arrays are mapped, not held in memory. None: no file. Until it is done it is
               `out`.part beside `out`.part.json; after an interruption the same call goes on with them
    window, overlap   A protein longer than `window` residues is read in windows, which share at least `overlap`
               residues with the next. By default a window is as long as the model has positions for, and the overlap a
               quarter of it. Each shared residue is taken from the window whose ends are farther from it
    memory     bytes for what a layer computes, beside the model; it decides how many proteins run together. None:
               1 GiB, or 64 MiB on CPUs, which take longer with more
    progress   whether to show the progress on stderr

    ValueError for a letter that ESM-2 does not know, no proteins, layers that the model lacks, a number that float16
    does not hold, and a file of another run at `out`.part; TypeError or NotImplementedError for another model.
    """
    base = checked_model(model)
    job = _job(model, base, sequences, names, layers, residues, window, overlap, memory)
    lengths = np.array([len(tokens) for tokens in job.tokens], np.int32)
    quantizer = Quantizer(base.config.hidden_size, 4) if residues == "4bit" else None
    plan = None if quantizer is None else quantizer.plan
    meta = {"layers": list(job.layers), "residues": residues, "plan": None if plan is None else list(plan.words)}
    tensors = described(job.names, lengths, job.layers, base.config.hidden_size, residues, plan)
    part = None if out is None else f"{file_to_write(out, 'out')}.part"
    steps = job.steps()
    note = _Note(part, job, model)
    arrays = placed(part, meta, tensors, fresh=not note.done)
    arrays["names"][:] = np.frombuffer("\n".join(job.names).encode(), np.uint8)
    arrays["lengths"][:] = lengths
    embeddings = Embeddings(job.names, lengths, job.layers, arrays, plan)
    with Progress("embed", float(lengths.sum()), "residues", progress) as shown:
        for n, step in enumerate(steps):
            amount = float(lengths[step].sum())
            if n < note.done:
                shown.skip(amount)
                continue
            _write(embeddings, job, step, _states(base, job, step), quantizer)
            note.reached(n + 1, arrays)
            shown.add(amount)
    if part is None or out is None:
        return embeddings
    note.reached(len(steps), arrays, last=True)
    os.replace(part, out)
    os.unlink(note.path)
    return Embeddings.load(out)


def _job(
    model: Any,
    base: Any,
    sequences: Sequence[Letters],
    names: Sequence[str] | None,
    layers: Sequence[int],
    residues: str,
    window: int | None,
    overlap: int | None,
    memory: int | None,
) -> _Job:
    """Checks the arguments of `embed`."""
    if isinstance(sequences, (bytes, Mapping)) or not isinstance(sequences, Collection):
        raise TypeError(f"`sequences` must be a list of at least one protein, got {sequences!r:.80}")
    if isinstance(sequences, str) or not len(sequences):
        raise ValueError(f"`sequences` must be a list of at least one protein, got {sequences!r:.80}")
    if residues not in ("none", "float16", "4bit"):
        raise ValueError(f"`residues` must be none, float16 or 4bit, got {residues!r}")
    named = list(map(str, range(len(sequences)))) if names is None else listed(names, "`names` must be a list of texts")
    if len(named) != len(sequences):
        raise ValueError(f"`names` must have one name for each of {len(sequences)} proteins, got {len(named)}")
    for i, name in enumerate(named):
        if not isinstance(name, str) or "\n" in name or not name:
            raise ValueError(f"`names[{i}]` must be a text of one line, got {name!r}")
    most, shared = sizes(model.config, window, overlap)
    chosen = chosen_layers(layers, len(base.encoder.layer))
    width, size = model.config.hidden_size, next(base.parameters()).element_size()
    each = width * (_TIMES_WIDTH * size + 8 * len(chosen))
    room = _MEMORY[device_of(base).type == "cpu"] if memory is None else bounded("embed: `memory`", memory)
    budget = max(most + 2, room // each)
    tokens = [letter_tokens(sequence, f"sequences[{i}]") for i, sequence in enumerate(sequences)]
    return _Job(tuple(named), tokens, tuple(sorted(chosen)), residues, most, shared, budget)


def chosen_layers(layers: Sequence[int], count: int) -> list[int]:
    """Returns the numbers of layers, counted from 0, for a model that has `count`. ValueError if the model lacks one,
    if one is named twice, or if there are none."""
    chosen = []
    for i, layer in enumerate(listed(layers, "`layers` must be a list of integers")):
        number = integer(layer, f"`layers[{i}]`")
        if not -count - 1 <= number <= count:
            raise ValueError(f"`layers[{i}]` must be in {-count - 1}..{count}, got {number}")
        chosen.append(number % (count + 1))
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"`layers` must name at least one layer, and each once, got {list(layers)}")
    return chosen


# ---- the model ----


@contextmanager
def _watched(base: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Yields a dict that each forward fills with the outputs of some layers, [batch, tokens, width]. Input and output
    of the model are not among them."""
    seen: dict[int, torch.Tensor] = {}

    def hook(layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    with ExitStack() as stack:
        for layer in layers:
            if 0 < layer < len(base.encoder.layer):
                stack.callback(base.encoder.layer[layer - 1].register_forward_hook(hook(layer)).remove)
        yield seen


class _Part(NamedTuple):
    """The kept residues of a window, by layer, on the CPU."""

    sums: dict[int, torch.Tensor]  # float64 [width]
    rows: dict[int, torch.Tensor]  # float32 [residues, width]; empty if only means are wanted


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """Sums over residues in float64, on the device if it has float64: copying all rows to the CPU takes longer."""
    return (rows if rows.device.type in ("cpu", "cuda") else rows.cpu()).sum(0, dtype=torch.float64)


def _states(base: Any, job: _Job, step: Sequence[int]) -> Iterator[tuple[_Piece, _Part]]:
    """Yields what is kept of each window of some proteins."""
    pieces = [_Piece(i, one) for i in step for one in job.windows_of(i)]
    pieces.sort(key=lambda piece: piece.window.start - piece.window.stop)  # stable
    longest = pieces[0].window.stop - pieces[0].window.start + 2
    for at in range(0, len(pieces), max(1, job.budget // longest)):
        batch = pieces[at : at + max(1, job.budget // longest)]
        ids, real = padded([[CLS, *job.tokens[p][w.start : w.stop], EOS] for p, w in batch], device_of(base))
        with evaluating(base), routed(base, NAME), _watched(base, job.layers) as seen:
            seen[0] = embedded(base, ids, dropout_factor(ids, real))
            mask = None if bool(real.all()) else real.long()
            last = base(inputs_embeds=seen[0], attention_mask=mask, turboquant_context=Plain()).last_hidden_state
        seen[len(base.encoder.layer)] = last
        inner = [slice(1 + w.first - w.start, 1 + w.last - w.start) for _, w in batch]
        sums = {layer: torch.stack([_sum(seen[layer][b, rows]) for b, rows in enumerate(inner)]).cpu()
                for layer in job.layers}  # fmt: skip
        for b, piece in enumerate(batch):
            rows = {} if job.residues == "none" else {i: seen[i][b, inner[b]].float().cpu() for i in job.layers}
            yield piece, _Part({layer: each[b] for layer, each in sums.items()}, rows)


# ---- what is kept ----


def _write(
    embeddings: Embeddings,
    job: _Job,
    step: Sequence[int],
    states: Iterator[tuple[_Piece, _Part]],
    quantizer: Quantizer | None,
) -> None:
    """Writes the embeddings of the proteins of a step."""
    parts_of: dict[int, list[tuple[int, _Part]]] = {i: [] for i in step}
    for piece, part in states:
        parts_of[piece.protein].append((piece.window.first, part))
    for i, parts in parts_of.items():
        parts.sort(key=lambda part: part[0])
        for layer in job.layers:
            total = torch.stack([part.sums[layer] for _, part in parts]).sum(0)
            embeddings._arrays[f"mean.{layer}"][i] = (total / len(job.tokens[i])).numpy()
            if job.residues == "none":
                continue
            x = torch.cat([part.rows[layer] for _, part in parts])
            if job.residues == "float16":
                embeddings._rows(i, "residues", layer)[:] = _float16(x, job.names[i])
            if quantizer is not None:
                embeddings._rows(i, "codes", layer)[:] = quantizer.quantize(x.numpy()).pages


def _float16(x: torch.Tensor, name: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        rows: NDArray[np.float16] = x.numpy().astype(np.float16)
    if not np.isfinite(rows).all():
        raise ValueError(f"the residues of {name!r} must be finite in float16, got {float(x.abs().max()):g}")
    return rows


class _Note:
    """The file beside an unfinished one that says which run it is of and how many steps are done."""

    def __init__(self, part: str | None, job: _Job, model: Any) -> None:
        self.path = f"{part}.json"
        self.done, self.saved, self.is_written = 0, time.monotonic(), part is not None
        if part is None:
            return
        dtype = str(next(model.parameters()).dtype)
        told = [job.names, job.tokens, job.layers, job.residues, job.window, job.overlap, job.budget, dtype]
        self.run = hashlib.sha256(json.dumps([told, fingerprint(model)], sort_keys=True).encode()).hexdigest()
        if not os.path.exists(part) and not os.path.exists(self.path):
            self._write(0)  # before `part` is there, so that no other file is taken for it
            return
        try:
            with open(self.path, encoding="utf-8") as file:
                said = json.load(file)
            run, self.done = said["run"], integer(said["done"], "`done`")
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            run = None
        if run != self.run or (self.done and not os.path.exists(part)):
            raise ValueError(f"{part!r} must be of this run (proteins, model, options), and {self.path!r} must say so: "
                             "remove them, or name another output")  # fmt: skip

    def _write(self, done: int) -> None:
        write_whole(self.path, [json.dumps({"run": self.run, "done": done}).encode()])

    def reached(self, done: int, arrays: Arrays, last: bool = False) -> None:
        """Notes that this many steps are on the disk, at most every ten seconds."""
        if not self.is_written or (time.monotonic() - self.saved < _SAVED and not last):
            return
        self.saved = time.monotonic()
        for array in arrays.values():
            flush = getattr(array, "flush", None)
            if flush is not None:
                flush()
        self._write(done)
