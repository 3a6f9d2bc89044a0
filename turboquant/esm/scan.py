"""The variant-effect scans of Meier et al. (2021, doi 10.1101/2021.07.09.450648): a mutation to amino acid a at a
position scores ``log p(a) - log p(wild type)``, in nats, with the model's distribution p at that position.

Masked marginals mask the position. An exact scan needs a full pass per position. With a shared context, one pass stores
packed keys and values, and then only one token per position runs: the masked residue, which reads its own new keys and
values and all stored ones but those it replaces. The stored states of other residues still depend on the true residue,
so the two results differ. Wild-type marginals mask nothing; one pass gives all positions.
`docs/esm-results.md` says how long each takes and how far their ranks agree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..arguments import listed, quoted
from ..measured import Profile
from ..models.attention import Call
from ..models.esm import ALPHABET, AMINO_ACIDS, MASK, check_batch_size, checked_model, integers, tokenise
from ..models.placement import device_of
from ..models.routing import routed
from ..progress import steps
from ..spec import CacheSpec
from .attention import NAME, plain_attention
from .context import ContextCache, Letters

__all__ = ["Plain", "Scan", "joined", "joint_marginals", "masked_marginals", "wild_type_marginals"]


@dataclass(frozen=True)
class Scan:
    """The result of a scan.

    sequence    letters of the protein, one for each residue: a str, or a tuple if one is "<mask>"
    positions   the positions that were scanned, counted from 0
    log_probabilities   float32 [positions, 20], nats: of each amino acid of `AMINO_ACIDS` at the position, from the
                distribution over all tokens of the alphabet
    wild_type   float32 [positions], nats: the same for the protein's own letter
    """

    sequence: str | tuple[str, ...]
    positions: tuple[int, ...]
    log_probabilities: NDArray[np.float32]
    wild_type: NDArray[np.float32]

    @property
    def scores(self) -> NDArray[np.float32]:
        """float32 [positions, 20]: ``log p(mutation) - log p(wild type)``, nats; below 0 where the model prefers the
        wild type."""
        return self.log_probabilities - self.wild_type[:, None]


def masked_marginals(
    model: Any,
    sequence: Letters,
    positions: Sequence[int] | None = None,
    shared_context: bool = True,
    *,
    spec: CacheSpec | str = "esm-default",
    profile: Profile | str | os.PathLike[str] | None = None,
    context: ContextCache | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> Scan:
    """Masks each position of a protein in turn and takes the model's distribution there; see `Scan`.

    model      an ESM-2 model with a masked-language head, in eval mode, patched or not: the exact scan and the pass
               that fills the context use the model's own attention
    sequence   upper-case letters of the ESM-2 alphabet
    positions  counted from 0; None: all
    shared_context   True: one full pass, then one token per position over packed keys and values. False: a full pass
               for each position
    spec, profile   how the shared context is packed, as in `ContextCache`; ignored if `context` is given
    context    a ContextCache of this model that has read this sequence, to be used again
    batch_size   masked copies that run together.  progress: whether to show the progress on stderr

    ValueError for wrong letters, no positions, and a context of another model or without this sequence; IndexError for
    a position outside the protein, TypeError for one that is no integer; RuntimeError for a context whose model has
    changed; NotImplementedError for a model without the head.
    """
    _scannable(model)
    at = _chosen(tokenise(sequence, model.config), positions)
    scans = joint_marginals(model, sequence, [[p] for p in at], shared_context, spec=spec, profile=profile,
                            context=context, batch_size=batch_size, progress=progress)  # fmt: skip
    return joined(scans[0].sequence, [(0, scan) for scan in scans])


def joint_marginals(
    model: Any,
    sequence: Letters,
    sets: Sequence[Sequence[int]],
    shared_context: bool = True,
    *,
    spec: CacheSpec | str = "esm-default",
    profile: Profile | str | os.PathLike[str] | None = None,
    context: ContextCache | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> list[Scan]:
    """Masks all positions of a set at once, such as those of a mutant with several mutations, and takes the model's
    distribution at each of them. Returns one `Scan` for each set.

    sets    of positions, counted from 0; a set has at least one position, and each once
    batch_size   copies that run together, one for each set.
    The other arguments and the errors are as in `masked_marginals`; ValueError for a position that is twice in a set.
    """
    base = _scannable(model)
    check_batch_size(batch_size)
    tokens = tokenise(sequence, model.config)
    each = listed(sets, "`sets` must be a list of lists of positions")
    chosen = [_chosen(tokens, positions, f"sets[{i}]") for i, positions in enumerate(each)]
    for i, at in enumerate(chosen):
        if len(set(at)) != len(at):
            raise ValueError(f"`sets[{i}]` must name each position once, got {list(at)}")
    _check_context(context, shared_context)
    batches = [chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)]
    logits: list[torch.Tensor] = []
    with torch.no_grad(), routed(base, NAME):
        filled = _filled(model, sequence, tokens, spec, profile, context) if shared_context else None
        for batch in steps(batches, "scan", "batches", progress):
            logits += _jointly(model, tokens, batch) if filled is None else _masked_in(*filled, batch)
    if not chosen:
        return []
    whole, ends = _scan(tokens, tuple(chain(*chosen)), torch.cat(logits)), np.cumsum([len(at) for at in chosen])[:-1]
    parts = zip(chosen, np.split(whole.log_probabilities, ends), np.split(whole.wild_type, ends), strict=True)
    return [Scan(whole.sequence, *part) for part in parts]


def wild_type_marginals(model: Any, sequence: Letters, positions: Sequence[int] | None = None) -> Scan:
    """Takes the model's distribution at each position of a protein with nothing masked, in one full pass; see `Scan`.

    model      an ESM-2 model with a masked-language head, in eval mode, patched or not: its own attention is used
    sequence, positions   as in `masked_marginals`

    Raises what `masked_marginals` raises for these three.
    """
    base = _scannable(model)
    tokens = tokenise(sequence, model.config)
    at = _chosen(tokens, positions)
    with torch.no_grad(), routed(base, NAME):
        device = device_of(model)
        states = _states(model, torch.tensor([tokens], device=device))[0]
        logits = model.lm_head(states[torch.tensor(at, device=device) + 1])
    return _scan(tokens, at, logits)


def _scannable(model: Any) -> Any:
    """Checks that a model can be scanned, and returns its base model."""
    base = checked_model(model)
    if getattr(model, "lm_head", None) is None:
        raise NotImplementedError(f"{type(model).__name__} has no masked-language head: use EsmForMaskedLM")
    if model.training:
        raise ValueError("`model` must be in eval mode (model.eval()), got one in training mode")
    return base


def _check_context(context: ContextCache | None, shared_context: bool) -> None:
    if context is not None and not isinstance(context, ContextCache):
        raise TypeError(f"`context` must be a ContextCache or None, got {quoted(context)}")
    if context is not None and not shared_context:
        raise ValueError("`context` must be None for an exact scan (shared_context=False)")


def _chosen(tokens: Sequence[int], positions: Sequence[int] | None, argument: str = "positions") -> tuple[int, ...]:
    """Checks and returns the positions to scan. tokens: of the protein, with those for start and end."""
    n = len(tokens) - 2
    at = tuple(range(n) if positions is None else integers(positions, argument))
    if not at:
        raise ValueError(f"`{argument}` must name at least one position, got none")
    for i, position in enumerate(at):
        if not 0 <= position < n:
            raise IndexError(f"`{argument}[{i}]` must be in 0..{n - 1}, got {position}")
    return at


def _scan(tokens: Sequence[int], at: tuple[int, ...], logits: torch.Tensor) -> Scan:
    """Makes the result of a scan. logits: [positions, vocabulary], at the positions `at`."""
    log_p = logits.float().log_softmax(-1).cpu().numpy()
    amino_acids = [ALPHABET.index(letter) for letter in AMINO_ACIDS]
    wild = log_p[np.arange(len(at)), [tokens[p + 1] for p in at]]
    letters = tuple(ALPHABET[t] for t in tokens[1:-1])
    return Scan(letters if MASK in tokens else "".join(letters), at, log_p.take(amino_acids, axis=1), wild)


def joined(sequence: str | tuple[str, ...], parts: Sequence[tuple[int, Scan]]) -> Scan:
    """Joins scans of a protein's windows to one. parts: the first residue of each window, and its scan."""
    positions = tuple(start + p for start, part in parts for p in part.positions)
    log_p = np.concatenate([part.log_probabilities for _, part in parts])
    return Scan(sequence, positions, log_p, np.concatenate([part.wild_type for _, part in parts]))


def _filled(
    model: Any,
    sequence: Letters,
    tokens: list[int],
    spec: CacheSpec | str,
    profile: Profile | str | os.PathLike[str] | None,
    context: ContextCache | None,
) -> tuple[ContextCache, int]:
    """Returns a context that holds the sequence, and the index of the sequence in it."""
    if context is None:
        context = ContextCache(model, spec, profile=profile)
        context.encode([sequence])
        return context, 0
    if context.model is not model:
        raise ValueError("`context` must be of this model, got one of another")
    encoded = context.tokens
    if tokens not in encoded:
        raise ValueError(f"`context` must have read this sequence, got one that holds {len(encoded)} others: encode it")
    return context, encoded.index(tokens)


def _masked_in(cache: ContextCache, protein: int, batch: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
    """Returns the logits at each set of positions, masked together, over packed keys and values."""
    masks = [["<mask>"] * len(at) for at in batch]
    said = cache.decode(masks, batch, [protein] * len(batch), batch_size=len(batch))
    assert said.logits is not None
    return said.logits


class Plain:
    """The context of an exact pass: the model's own attention, whether it is patched or not."""

    def attend(self, call: Call) -> torch.Tensor:
        return plain_attention(call)


def _jointly(model: Any, tokens: list[int], batch: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns what `_masked_in` returns, from full passes."""
    device = device_of(model)
    ids = torch.tensor([tokens] * len(batch), device=device)
    rows = torch.tensor([i for i, at in enumerate(batch) for _ in at], device=device)
    where = torch.tensor([p + 1 for at in batch for p in at], device=device)
    ids[rows, where] = MASK
    logits: torch.Tensor = model.lm_head(_states(model, ids)[rows, where])
    return list(torch.split(logits, [len(at) for at in batch]))


def _states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the last hidden states [batch, tokens, hidden] of the model's own full pass over unpadded token ids."""
    states: torch.Tensor = checked_model(model)(input_ids=ids, turboquant_context=Plain()).last_hidden_state
    return states
