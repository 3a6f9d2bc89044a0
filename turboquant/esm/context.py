"""ContextCache: an exact pass of the model reads proteins once; later calls read their packed keys and values.

    cache = ContextCache(model)
    cache.encode(["MKTAYIAKQR", "GGSHHHHHH"])        # exact; stores every layer's keys and values, packed
    cache.decode([["W"], ["<mask>", "A"]], [[3], [0, 8]])  # protein 0 with W at residue 3, 1 with two changes

Reuse in an encoder is an approximation at any bit width: a changed residue changes the keys and values of *all* other
residues from layer 1 on, but the stored ones are kept. Only in layer 0 are they what a full pass would compute. In
every layer, a changed residue reads its own new keys and values and those of the residues changed with it, and never
the stored ones that they replace.

Proteins lie in a `store.Store`: for each layer pages of 128 tokens, which no two proteins share, and exact sinks if the
spec has them; for all layers a block table and lengths. In `decode`, all copies of a protein read the same pages: only
new rows are copied (`reading.Reading`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arguments import quoted
from ..measured import Profile
from ..models.attention import Call
from ..models.esm import attentions, check_batch_size, checked_model, embed, integers, padded, positioned, tokenise
from ..models.routing import routed
from ..named_specs import resolve
from ..spec import CacheSpec
from .attention import NAME, Pass, packed_layers, plain_attention, store
from .graph import StepGraphs
from .reading import Copy, Reading, Shape, described
from .store import Store, empty

__all__ = ["EXACT", "ContextCache", "Letters", "Residues"]

#: A spec that keeps everything in the model's dtype, to measure decoding without quantisation.
EXACT = CacheSpec(centre="none", metric="none", sinks=2**24, window=0)

Letters = str | Sequence[str]  # residues of a protein; only a list can hold "<mask>"


@dataclass(frozen=True)
class Residues:
    """A model's outputs for residues: one entry per protein (`encode`) or copy (`decode`), in the order given.

    hidden   [residues, hidden_size] each: the last layer's states, without ``<cls>`` and ``<eos>``
    logits   [residues, vocabulary] each, if the model has a masked-language head; else None
    """

    hidden: list[torch.Tensor]
    logits: list[torch.Tensor] | None


class ContextCache:
    """Packed keys and values of proteins, all layers, to run changed or new residues against.

    model    an ESM-2 model of transformers (EsmModel or one with a head), in eval mode, patched or not; left as it is
    spec     a CacheSpec or the name of a preset. Sinks stay exact; `window` and `prefill` do not apply to an encoder.
             `EXACT` keeps everything in the model's dtype.
    profile  of the model (`turboquant.measure`, `turboquant.calibrate`) or its file, for a spec that uses one. None:
             moments are those that the model was patched with, or are measured, once for the weights that `encode` runs
    cuda_graphs   whether to replay steps of `decode` on a GPU as CUDA graphs, recorded in the second step of a shape
                  (`graph.StepGraphs`). Every shape needs more memory, which `nbytes` does not count.

    One cache serves one thread at a time, and so does the model while a cache runs it.
    Raises what `turboquant.patch` raises.
    """

    def __init__(
        self,
        model: Any,
        spec: CacheSpec | str = "esm-default",
        *,
        profile: Profile | str | os.PathLike[str] | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        base, chosen = checked_model(model), resolve(spec)
        modules = attentions(base)
        self.model, self.spec = model, chosen
        self._base, self._modules = base, modules
        self._packed = packed_layers(model, chosen, profile)
        self._has_own_moments = profile is None and any(layer.moments is not None for layer in self._packed)
        self._layer_of = _numbered(modules)
        self._store: Store | None = None
        self._cuda_graphs = cuda_graphs
        self._graphs: StepGraphs | None = None  # steps over the present store

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: with the model, but without recorded steps, which use the original's memory."""
        return {**self.__dict__, "_layer_of": {}, "_graphs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layer_of = _numbered(self._modules)
        self._graphs = self._new_graphs()

    def __repr__(self) -> str:
        contents = f"{len(self.lengths)} proteins, {sum(self.lengths)} residues, {self.nbytes} bytes"
        return f"ContextCache({contents}, spec={self.spec!r})"

    # ---- properties ----

    @property
    def lengths(self) -> list[int]:
        """Residues of each protein held."""
        return [len(tokens) - 2 for tokens in self.tokens]

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of each protein held, ``<cls>`` and ``<eos>`` included."""
        return [] if self._store is None else [self._store.tokens[row] for row in self._store.row_of]

    @property
    def nbytes(self) -> int:
        """Bytes that the allocator holds: pages with their unused room, sinks, table, lengths, and the tensors of
        rotations and profile."""
        if self._store is None:
            return 0
        tensors = [*self._store.tensors(), *(t for packed in self._packed for t in packed.transforms.values())]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes of pages and sinks for each token held, ``<cls>`` and ``<eos>`` included, in all layers and heads."""
        store = self._filled_store()
        parts = (t for layer in store.layers for t in (layer.pages, *layer.exact().values()))
        return sum(t.untyped_storage().nbytes() for t in parts) / sum(map(len, store.tokens))

    @property
    def effective_bits(self) -> float:
        """Bits of pages and sinks per number held."""
        numbers: int = 2 * sum(module.all_head_size for module in self._modules)
        return 8 * self.bytes_per_token / numbers

    def _filled_store(self) -> Store:
        if self._store is None:
            raise RuntimeError("nothing is stored yet: call encode first")
        if not self._store.weights.unchanged():
            raise RuntimeError("the model's weights, dtype or device changed since encode: encode again")
        return self._store

    def _new_graphs(self) -> StepGraphs | None:
        recordable = self._cuda_graphs and self._store is not None and self._store.lengths.is_cuda
        return StepGraphs() if recordable else None

    # ---- reading proteins ----

    @torch.no_grad()
    def encode(self, proteins: Sequence[Letters], *, batch_size: int = 8) -> Residues:
        """Runs the model's own pass over whole proteins and stores its keys and values, replacing earlier ones.

        proteins     strings of upper-case letters of the ESM-2 alphabet, or lists of letters and "<mask>"; any lengths
        batch_size   how many proteins of similar length run together; padding is not stored

        Returns the model's outputs, unaffected by quantisation. ValueError for a bad protein, naming it and the
        residue, and for a model in training mode; then the store is unchanged.
        """
        if isinstance(proteins, (str, torch.Tensor)) or not isinstance(proteins, Sized) or not len(proteins):
            raise ValueError(f"`proteins` must be a list of at least one protein, got {proteins!r}")
        check_batch_size(batch_size)
        self._check_mode()
        tokenised = [tokenise(p, self.model.config, f"proteins[{i}]") for i, p in enumerate(proteins)]
        order = sorted(range(len(tokenised)), key=lambda i: len(tokenised[i]))
        tokens, row_of = [tokenised[i] for i in order], sorted(range(len(order)), key=order.__getitem__)
        packed = packed_layers(self.model, self.spec) if self._has_own_moments else self._packed  # of present weights
        store = empty(self._base, self._modules, packed, tokens, row_of)
        hidden: list[torch.Tensor] = []
        for start in range(0, len(order), batch_size):
            rows = slice(start, min(start + batch_size, len(order)))
            ids, real = padded(store.tokens[rows], store.lengths.device)
            context = _Storing(self, store, rows)
            states = self._run(embed(self._base, ids, store.factor[rows]), real, None, context)
            hidden += [states[b, 1 : len(row) - 1] for b, row in enumerate(store.tokens[rows])]
        said = self._said([hidden[row] for row in store.row_of])
        self._store, self._packed = store, packed
        self._graphs = self._new_graphs()
        return said

    # ---- running residues against them ----

    @torch.no_grad()
    def decode(
        self,
        residues: Sequence[Letters],
        positions: Sequence[Sequence[int]],
        proteins: Sequence[int] | None = None,
        *,
        batch_size: int = 64,
    ) -> Residues:
        """Runs changed or new residues against stored proteins. Each entry is an independent copy of a protein.

        residues     for each copy, the residues at its positions: letters, or "<mask>"
        positions    for each copy, the places of its residues, from 0, each once. A protein of n residues may be
                     continued by residues n, n + 1, ...: its end token moves behind them.
        proteins     for each copy, the index of its protein in `encode`. None: copy i is of protein i.
        batch_size   how many copies run together; they may have different numbers of residues.

        Returns the model's outputs for these residues. The stored proteins do not change.
        IndexError for a position or protein out of range, TypeError for one that is no integer, ValueError for other
        wrong arguments. RuntimeError if nothing is stored or the model has changed since `encode`; changes through
        `.data` are not detected: encode again after them.
        """
        self._check_mode()
        store = self._filled_store()
        copies = self._copies(store, residues, positions, proteins)
        check_batch_size(batch_size)
        hidden: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        for start in range(0, len(copies), batch_size):
            batch = copies[start : start + batch_size]
            shape, numbers = described(batch)
            on_device = torch.tensor(numbers, dtype=torch.int32, device=store.lengths.device)
            graphs = self._graphs
            outputs = graphs.run(self._step, shape, on_device) if graphs else self._step(shape, on_device)
            for said, states in zip((hidden, logits), outputs):
                said += [states[b, -len(copy.tokens) :][: copy.asked] for b, copy in enumerate(batch)]
        return Residues(hidden, None if self._head() is None else logits)

    def _step(self, shape: Shape, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs a step. Returns last hidden states [copies, m, hidden_size], and logits if the model has the head."""
        store = self._store
        assert store is not None
        layers = {key: (self._packed[i], store.layers[i]) for key, i in self._layer_of.items()}
        context = Reading(store, layers, shape, numbers)
        states = self._run(embed(self._base, context.ids, context.factor), None, context.positions, context)
        head = self._head()
        return (states,) if head is None else (states, head(states))

    def _copies(
        self,
        store: Store,
        residues: Sequence[Letters],
        positions: Sequence[Sequence[int]],
        proteins: Sequence[int] | None,
    ) -> list[Copy]:
        """Checks the arguments of `decode` and returns its copies."""
        for name, argument in (("residues", residues), ("positions", positions)):
            if not isinstance(argument, Sized):
                raise TypeError(f"`{name}` must be a list with one entry per copy, got {quoted(argument)}")
        count, stored = len(residues), len(store.row_of)
        chosen = list(range(count)) if proteins is None else integers(proteins, "proteins")
        if len(positions) != count or len(chosen) != count:
            raise ValueError(f"`residues`, `positions` and `proteins` must have one entry per copy, got {count}, "
                             f"{len(positions)} and {len(chosen)}")  # fmt: skip
        copies = []
        for i, (letters, at, protein) in enumerate(zip(residues, positions, chosen)):
            if not 0 <= protein < stored:
                raise IndexError(f"`proteins[{i}]` must be in 0..{stored - 1}, which are stored, got {protein}")
            tokens = tokenise(letters, self.model.config, f"residues[{i}]")[1:-1]
            row, where = store.row_of[protein], integers(at, f"positions[{i}]")
            copies.append(Copy.of(i, row, len(store.tokens[row]) - 2, tokens, where, self.model.config))
        return copies

    # ---- the model ----

    def _check_mode(self) -> None:
        if self.model.training:
            raise ValueError("`model` must be in eval mode (model.eval()), got one in training mode")

    def _run(
        self, embeddings: torch.Tensor, real: torch.Tensor | None, positions: torch.Tensor | None, context: Any
    ) -> torch.Tensor:
        mask = None if real is None or bool(real.all()) else real.long()
        with routed(self._base, NAME), positioned(self._modules, positions) as arguments:
            output = self._base(inputs_embeds=embeddings, attention_mask=mask, turboquant_context=context, **arguments)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _head(self) -> Any:
        """The masked-language head of the model, or None."""
        return getattr(self.model, "lm_head", None)

    def _said(self, hidden: list[torch.Tensor]) -> Residues:
        head = self._head()
        logits = None if head is None else list(head(torch.cat(hidden)).split([len(h) for h in hidden]))
        return Residues(hidden, logits)


def _numbered(modules: Sequence[Any]) -> dict[int, int]:
    """Returns the layer of each attention module by the `id` of the module."""
    return {id(module): i for i, module in enumerate(modules)}


class _Storing:
    """The context of `encode`: packs keys and values into rows of a store, and runs the model's own attention."""

    def __init__(self, cache: ContextCache, store: Store, rows: slice) -> None:
        self.cache, self.store, self.rows, self.shared = cache, store, rows, Pass()

    def attend(self, call: Call) -> torch.Tensor:
        index = self.cache._layer_of[id(call.module)]
        layer, rows = self.store.layers[index], self.rows
        k, v, lengths = self.shared.real_last(call.key, call.value, call.mask)
        sinks: dict[str, Any] = {name: tensor[rows] for name, tensor in layer.exact().items()}
        store(replace(layer, block_table=layer.block_table[rows], lengths=lengths, **sinks), k, v)
        return plain_attention(call)
