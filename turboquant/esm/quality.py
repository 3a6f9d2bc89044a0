"""The quality of an ESM-2 model under a spec, with all keys and values of every layer packed in a full pass.

The model runs alone and patched, over whole proteins and over proteins with some residues masked. Hidden states are
compared per residue after the last layer, which has the errors of all layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..arguments import bounded, quoted
from ..measured import Profile
from ..models.attention import Call
from ..models.esm import MASK, attentions, check_batch_size, checked_model, dropout_factor, embed, padded, tokenise
from ..models.outputs import token_divergence
from ..models.placement import device_of
from ..models.routing import evaluating, routed
from ..named_specs import resolve
from ..plan import PAGE_TOKENS
from ..progress import Progress
from ..spec import CacheSpec
from ..tables import html, measures
from .attention import NAME, PackedAttention, Pass, packed_layers, plain_attention

__all__ = ["ProteinEvaluation", "cosine_losses", "evaluate", "protein_batches"]

FIRST_RESIDUE = 4  # the first token id that is no special token


@dataclass(frozen=True)
class ProteinEvaluation:
    """Results of one spec.

    spec            as evaluated
    proteins, residues   how many;  masked  how many residues were masked for divergence and perplexity
    final_cosine_mean, final_cosine_min   cosine of a residue's last hidden state with the model's own: mean, and worst
    worst           (protein, residue) of the worst cosine, counted from 0
    masked_kl_divergence   from the model's own distribution (Kullback-Leibler), mean over masked residues, nats
    masked_perplexity, reference_perplexity   of the true residues at masked places, packed and unpacked
    bytes_per_token   bytes of pages and sinks for each token, in all layers and heads
    effective_bits  bits per number, from the same bytes;  packed_bits  bits per number of full pages without sinks
    """

    spec: CacheSpec
    proteins: int
    residues: int
    masked: int
    final_cosine_mean: float
    final_cosine_min: float
    worst: tuple[int, int]
    masked_kl_divergence: float
    masked_perplexity: float
    reference_perplexity: float
    bytes_per_token: float
    effective_bits: float
    packed_bits: float

    def metrics(self) -> dict[str, float]:
        """The numbers by name, as `turboquant eval --json` and benchmarks write them."""
        names = ("final_cosine_mean", "final_cosine_min", "masked_kl_divergence", "masked_perplexity",
                 "reference_perplexity", "effective_bits", "packed_bits", "bytes_per_token")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def _repr_html_(self) -> str:
        about = f"{self.proteins} proteins, {self.residues:,} residues, {self.masked:,} of them masked; {self.spec}"
        return html(measures(self.metrics()), notes=[about])

    def __str__(self) -> str:
        return (
            f"final cosine {self.final_cosine_mean:.5f} (worst residue {self.final_cosine_min:.4f}), at masked "
            f"residues KL divergence {self.masked_kl_divergence:.5f}, perplexity {self.masked_perplexity:.3f} (alone "
            f"{self.reference_perplexity:.3f}), {self.effective_bits:.3f} bits per number; {self.proteins} proteins, "
            f"{self.residues} residues"
        )


def evaluate(
    model: Any,
    sequences: Sequence[str],
    specs: Mapping[str, CacheSpec | str],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    mask_share: float = 0.15,
    seed: int = 0,
    batch_size: int = 8,
    progress: bool = False,
) -> dict[str, ProteinEvaluation]:
    """Measures the quality of specs on proteins, which a calibration should not have seen; see `ProteinEvaluation`.

    model      an ESM-2 model with a masked-language head, patched or not; it is left as it was
    sequences  upper-case letters of the ESM-2 alphabet
    specs      CacheSpecs or names of presets, under names of your choice; `window` does not apply to an encoder
    profile    for specs that use one; None: moments are those that the model was patched with, or are measured
    mask_share   the chance of each residue to be masked;  seed  of the random choice

    Before anything is run, raises what `turboquant.patch` raises, and ValueError or TypeError that names the argument.
    """
    base = checked_model(model)
    if getattr(model, "lm_head", None) is None:
        raise NotImplementedError(f"{type(model).__name__} has no masked-language head: use EsmForMaskedLM")
    _check_choice(sequences, mask_share, seed)
    if not isinstance(specs, Mapping):
        raise TypeError(f"`specs` must be a mapping of names to specs, got {quoted(specs)}")
    if not 0 < mask_share < 1:
        raise ValueError(f"`mask_share` must be above 0 and below 1, got {mask_share}")
    loaded = None if profile is None else Profile.of(profile)
    batches = _masked_batches(model, sequences, mask_share, seed, batch_size)
    if not any(batch.masked.any() for batch in batches):
        raise ValueError("`mask_share` must mask at least one residue, got none: another `seed`, or more proteins")
    chosen = {name: resolve(spec) for name, spec in specs.items()}
    packed = {name: _layers(model, spec, loaded) for name, spec in chosen.items()}
    tallies = {name: _Tally() for name in chosen}
    with evaluating(model), Progress("evaluate", len(batches) * (1 + len(chosen)), "runs", progress) as shown:
        for batch in batches:
            reference = _outputs(model, base, batch, None)
            shown.add()
            for name, layers in packed.items():
                tallies[name].add(batch, reference, _outputs(model, base, batch, layers))
                shown.add()
    return {name: tallies[name].result(spec, packed[name], base, batches) for name, spec in chosen.items()}


class _Batch(NamedTuple):
    """Proteins of similar lengths. ids, masked_ids, real, masked: [batch, tokens]."""

    proteins: list[int]
    ids: torch.Tensor
    masked_ids: torch.Tensor
    real: torch.Tensor
    masked: torch.Tensor


def _check_choice(sequences: Any, mask_share: Any, seed: Any) -> None:
    """Checks the arguments that `evaluate` and `protein_batches` share."""
    wants = "`sequences` must be a list of at least one protein"
    if isinstance(sequences, (bytes, Mapping)) or not isinstance(sequences, Collection):
        raise TypeError(f"{wants}, got {quoted(sequences)}")
    if isinstance(sequences, str) or not len(sequences):
        raise ValueError(f"{wants}, got {sequences!r}")
    if not isinstance(mask_share, Real):
        raise TypeError(f"`mask_share` must be a number, got {quoted(mask_share)}")
    bounded("`seed`", seed)


def protein_batches(
    model: Any, sequences: Sequence[str], *, mask_share: float = 0.15, seed: int = 0, batch_size: int = 8
) -> list[dict[str, torch.Tensor]]:
    """Proteins as `turboquant.calibrate` takes them: batches of `batch_size` proteins of similar lengths, in random
    order. Each residue is masked with a chance of `mask_share`, as in training. Errors as in `evaluate`."""
    _check_choice(sequences, mask_share, seed)
    if not 0 <= mask_share < 1:
        raise ValueError(f"`mask_share` must be at least 0 and below 1, got {mask_share}")
    batches = _masked_batches(model, sequences, mask_share, seed, batch_size)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed), device="cpu")
    return [dict(input_ids=batches[i].masked_ids, attention_mask=batches[i].real.long()) for i in order.tolist()]


def _masked_batches(model: Any, sequences: Sequence[str], mask_share: float, seed: int, size: int) -> list[_Batch]:
    """Returns proteins by length, `size` at a time, each residue masked with a chance of `mask_share`."""
    check_batch_size(size)
    tokens = [tokenise(s, model.config, f"sequences[{i}]") for i, s in enumerate(sequences)]
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    generator, device = torch.Generator().manual_seed(seed), device_of(model)
    batches = []
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        ids, real = padded([tokens[i] for i in chosen], "cpu")
        chance = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu")
        hidden = (chance < mask_share) & (ids >= FIRST_RESIDUE)
        masked_ids = ids.masked_fill(hidden, MASK)
        batches.append(_Batch(chosen, *(t.to(device) for t in (ids, masked_ids, real, hidden))))
    return batches


def _layers(model: Any, spec: CacheSpec, profile: Profile | None) -> list[PackedAttention]:
    """Returns how each layer packs. A spec that uses no profile gets none."""
    count = len(attentions(model))
    uses = any(one.calibrated or one.measured for one in (spec.for_layer(i, count) for i in range(count)))
    return packed_layers(model, spec, profile if uses else None)


def cosine_losses(
    model: Any, batch: Mapping[str, torch.Tensor], specs: Mapping[str, CacheSpec], profile: Profile
) -> dict[str, float]:
    """Returns for each spec 1 minus the cosine of the last hidden states with the model's own, with all keys and values
    packed: the mean over the tokens of a batch from `protein_batches`."""
    base, device = checked_model(model), device_of(model)
    ids = batch["input_ids"].to(device)
    real = batch.get("attention_mask", torch.ones_like(ids)).to(device).bool()
    packed = {name: _layers(model, spec, profile) for name, spec in specs.items()}

    def states(layers: list[PackedAttention] | None) -> torch.Tensor:
        embeddings = embed(base, ids, dropout_factor(ids, real))
        inputs = {"inputs_embeds": embeddings, "attention_mask": real.long()}
        rows: torch.Tensor = base(**inputs, turboquant_context=_Packed(base, layers)).last_hidden_state[real]
        return rows

    with evaluating(model), routed(base, NAME):
        plain = states(None).double()
        losses = {}
        for name, layers in packed.items():
            losses[name] = float((1 - torch.cosine_similarity(plain, states(layers).double(), dim=-1)).mean())
    return losses


class _Packed:
    """The context of a full pass with these `PackedAttention`s, whatever the model is patched with; None: unpacked."""

    def __init__(self, base: Any, layers: list[PackedAttention] | None) -> None:
        self.at = None if layers is None else {id(m): layer for m, layer in zip(attentions(base), layers)}
        self.shared = Pass()

    def attend(self, call: Call) -> torch.Tensor:
        if self.at is None:
            return plain_attention(call)
        return self.at[id(call.module)].attend(call, self.shared)


def _outputs(
    model: Any, base: Any, batch: _Batch, layers: list[PackedAttention] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (last hidden states of the proteins, logits of the masked proteins), each protein as if it ran alone:
    transformers 4.57 would count padding in `token_dropout`."""
    states = []
    with routed(base, NAME):
        for ids in (batch.ids, batch.masked_ids):
            embeddings = embed(base, ids, dropout_factor(ids, batch.real))
            output = base(inputs_embeds=embeddings, attention_mask=batch.real.long(),
                         turboquant_context=_Packed(base, layers))  # fmt: skip
            states.append(output.last_hidden_state)
    return states[0], model.lm_head(states[1])


class _Tally:
    """The sums of one spec over batches."""

    def __init__(self) -> None:
        self.cosines = self.divergence = self.loss = self.reference_loss = 0.0
        self.residues = self.masked = 0
        self.worst = (math.inf, 0, 0)

    def add(self, batch: _Batch, reference: Any, packed: Any) -> None:
        residue = batch.real & (batch.ids >= FIRST_RESIDUE)
        cosine = torch.cosine_similarity(reference[0].double(), packed[0].double(), dim=-1)
        self.cosines += float(cosine[residue].sum())
        self.residues += int(residue.sum())
        lowest = cosine.masked_fill(~residue, math.inf)
        at = divmod(int(lowest.argmin()), lowest.shape[1])
        self.worst = min(self.worst, (float(lowest[at]), batch.proteins[at[0]], at[1] - 1))
        hidden = batch.masked
        self.masked += int(hidden.sum())
        self.divergence += float(token_divergence(reference[1], packed[1])[hidden].double().sum())
        right = batch.ids[hidden]
        self.reference_loss += _loss(reference[1][hidden], right)
        self.loss += _loss(packed[1][hidden], right)

    def result(
        self, spec: CacheSpec, layers: list[PackedAttention], base: Any, batches: Sequence[_Batch]
    ) -> ProteinEvaluation:
        lengths = [int(n) for batch in batches for n in batch.real.sum(1)]
        width = base.config.hidden_size
        nbytes = sum(_held_bytes(layer, n, base) for layer in layers for n in lengths)
        alone = sum(layer.plan.record_bytes / PAGE_TOKENS for layer in layers) * base.config.num_attention_heads
        numbers = 2 * width * len(layers)
        return ProteinEvaluation(
            spec=spec,
            proteins=len(lengths),
            residues=self.residues,
            masked=self.masked,
            final_cosine_mean=self.cosines / self.residues,
            final_cosine_min=self.worst[0],
            worst=self.worst[1:],
            masked_kl_divergence=self.divergence / self.masked,
            masked_perplexity=math.exp(self.loss / self.masked),
            reference_perplexity=math.exp(self.reference_loss / self.masked),
            bytes_per_token=nbytes / sum(lengths),
            effective_bits=8 * nbytes / (sum(lengths) * numbers),
            packed_bits=8 * alone / numbers,
        )


def _held_bytes(layer: PackedAttention, tokens: int, base: Any) -> int:
    """Returns the bytes of the pages and sinks of one protein in one layer, stored alone."""
    heads: int = base.config.num_attention_heads
    item: int = base.embeddings.word_embeddings.weight.element_size()
    sinks = min(layer.spec.sinks, tokens)
    pages = -(-(tokens - sinks) // PAGE_TOKENS)
    return heads * (pages * layer.record_bytes + 2 * sinks * layer.head_dim * item)


def _loss(logits: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.float(), right, reduction="sum"))
