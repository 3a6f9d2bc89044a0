"""ContextCache: proteins read once by the model's exact pass, their packed keys and values read ever after.

    cache = ContextCache(model)
    cache.encode(["MKTAYIAKQR", "GGSHHHHHH"])        # exact; stores every layer's keys and values, packed
    cache.decode([["W"], ["<mask>", "A"]], [[3], [0, 8]])  # protein 0 with W at residue 3, 1 with two changes

Reuse in an encoder that looks both ways is an approximation, whatever the bits: a changed residue changes the keys and
values of *all* others from layer 1 on, and those are kept as they were. Only layer 0's are what a full pass would
compute. Within it, decoding is careful: of every layer, a changed residue reads its own new keys and values and those
of the residues changed with it, and never the stored ones they replace.

A layer holds, for n proteins together:

    pages     uint8 [pages, heads, record_bytes], 128 tokens each; no page is shared between proteins
    sinks     2 x [n, heads, sinks, head_dim]: the first tokens of each protein in the model's dtype, if any
    centre    float32 [n, heads, head_dim], for a spec centred by the prompt

and all layers together the block table, int32 [n, most pages], and the lengths, int32 [n]. `decode` has every copy of a
protein name the same pages: nothing is copied but new rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..calibration import Calibration, layer_specs
from ..calibration.measure import fingerprint
from ..plan import PAGE_TOKENS
from ..routing import routed
from ..spec import CacheSpec, resolve
from .attention import NAME, PackedAttention, centre_of, plain_attention, real_last, real_tokens
from .model import EOS, PAD, attentions, checked_model, dropout_factor, embed, padded, positioned, tokenise

__all__ = ["EXACT", "ContextCache", "Letters", "Residues"]

# Keeps everything in the model's dtype: what decoding costs without quantisation.
EXACT = CacheSpec(sinks=2**24)

_append = torch.ops.turboquant.append.default
_attend = torch.ops.turboquant.attend.default
_merge = torch.ops.turboquant.merge.default

Letters = str | Sequence[str]  # of a protein; only a list can hold "<mask>"


@dataclass(frozen=True)
class Residues:
    """What a model says of residues: one entry per protein (`encode`) or copy (`decode`), in the order given.

    hidden   [residues, hidden_size] each: the last layer's states, without ``<cls>`` and ``<eos>``
    logits   [residues, vocabulary] each, of a model with a masked-language head; None of others
    """

    hidden: list[torch.Tensor]
    logits: list[torch.Tensor] | None


@dataclass
class _Layer:
    """What is held of one layer."""

    pages: torch.Tensor
    sink_k: torch.Tensor | None = None
    sink_v: torch.Tensor | None = None
    centre: torch.Tensor | None = None  # of the store's `centres`

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (t for t in (self.pages, self.sink_k, self.sink_v, self.centre) if t is not None)


@dataclass
class _Store:
    """What `encode` keeps. Row r of every tensor is the protein `tokens[r]`."""

    tokens: list[list[int]]
    row_of: list[int]  # of each protein, in the order in which they were given
    lengths: torch.Tensor
    table: torch.Tensor
    factor: torch.Tensor  # of token dropout, float32 [n]
    layers: list[_Layer]
    centres: torch.Tensor  # float32 [layers, n, heads, head_dim]; of no layers where no spec is centred by the prompt
    stamp: tuple[Any, ...]  # of the weights that made it


class ContextCache:
    """Packed keys and values of proteins, all layers, to run changed or new residues against.

    model    an ESM-2 model of transformers (EsmModel or one with a head), in eval mode, patched or not; left as it is
    spec     a CacheSpec or the name of a preset. Sinks stay exact; `window` and `prefill` do not apply to an encoder.
             `EXACT` keeps everything in the model's dtype.
    calibration   a Calibration or its file, for a spec that uses one

    One cache serves one thread at a time, and so does the model while a cache runs it.
    Raises what `turboquant.patch` raises.
    """

    def __init__(
        self,
        model: Any,
        spec: CacheSpec | str = "esm-default",
        calibration: Calibration | str | os.PathLike[str] | None = None,
    ) -> None:
        base, chosen = checked_model(model), resolve(spec)
        found = None if calibration is None else Calibration.of(calibration)
        if found is not None:
            found.check(fingerprint(model))
        modules = attentions(base)
        specs = layer_specs(chosen, found, len(modules))
        self.model, self.spec = model, chosen
        self._base, self._modules = base, modules
        self._packed = [
            PackedAttention(i, module.attention_head_size, one, found if one.calibrated else None)
            for i, (module, one) in enumerate(zip(modules, specs))
        ]
        self._layer_of = {id(module): i for i, module in enumerate(modules)}
        self._store: _Store | None = None

    def __repr__(self) -> str:
        held = f"{len(self.lengths)} proteins, {sum(self.lengths)} residues, {self.nbytes} bytes"
        return f"ContextCache({held}, spec={self.spec})"

    # ---- what is held ----

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
        """Bytes that the allocator holds: pages with their empty places, sinks, centres, table and lengths; and what
        the spec takes from a calibration."""
        if self._store is None:
            return 0
        shared = [self._store.lengths, self._store.table, self._store.factor]
        held = [t for layer in self._store.layers for t in layer.tensors()]
        held += [t for packed in self._packed for t in packed.transforms.values()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*shared, *held]}.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes of pages and sinks over tokens held, ``<cls>`` and ``<eos>`` included; all layers and heads."""
        store = self._held()
        parts = (t for layer in store.layers for t in (layer.pages, layer.sink_k, layer.sink_v) if t is not None)
        return sum(t.untyped_storage().nbytes() for t in parts) / sum(map(len, store.tokens))

    @property
    def effective_bits(self) -> float:
        """The same per number held."""
        numbers: int = 2 * sum(module.all_head_size for module in self._modules)
        return 8 * self.bytes_per_token / numbers

    def _held(self) -> _Store:
        if self._store is None:
            raise RuntimeError("nothing is stored yet: call encode first")
        if self._store.stamp != _stamp(self._base):
            raise RuntimeError("the model's weights, dtype or device changed since encode: encode again")
        return self._store

    # ---- reading proteins ----

    @torch.no_grad()
    def encode(self, proteins: Sequence[Letters], *, batch_size: int = 8) -> Residues:
        """Runs the model's own pass over whole proteins and stores what it attends with, in place of what was stored.

        proteins     strings of upper-case letters of the ESM-2 alphabet, or lists of letters and "<mask>"; any lengths
        batch_size   proteins that run together, by length; padding is not stored

        Returns what the model says, unaffected by quantisation. ValueError names the protein and residue that it is
        about, and for a model in training mode; what was stored before stays then.
        """
        if isinstance(proteins, str) or not proteins:
            raise ValueError(f"`proteins` must be a list of at least one protein, got {proteins!r}")
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        self._check_mode()
        given = [tokenise(p, self.model.config, f"proteins[{i}]") for i, p in enumerate(proteins)]
        order = sorted(range(len(given)), key=lambda i: len(given[i]))
        store = self._empty([given[i] for i in order], [order.index(i) for i in range(len(given))])
        hidden: list[torch.Tensor] = []
        for start in range(0, len(order), batch_size):
            rows = slice(start, min(start + batch_size, len(order)))
            ids, real = padded(store.tokens[rows], store.lengths.device)
            context = _Storing(self, store, rows)
            states = self._run(embed(self._base, ids, store.factor[rows]), real, None, context)
            hidden += [states[b, 1 : len(row) - 1] for b, row in enumerate(store.tokens[rows])]
        said = self._said([hidden[row] for row in store.row_of])
        self._store = store
        return said

    def _empty(self, tokens: list[list[int]], row_of: list[int]) -> _Store:
        """Room for proteins whose token ids these are."""
        weights = self._base.embeddings.word_embeddings.weight
        device, n = weights.device, len(tokens)
        layers, counts = [], []
        first, centred = self._modules[0], any(p.spec.centre == "prompt" for p in self._packed)
        shape = (len(self._packed) if centred else 0, n, first.num_attention_heads, first.attention_head_size)
        centres = torch.zeros(shape, device=device)
        for packed, module in zip(self._packed, self._modules):
            heads, head_dim, sinks = module.num_attention_heads, packed.head_dim, packed.spec.sinks
            counts = [-(-max(len(row) - sinks, 0) // PAGE_TOKENS) for row in tokens]
            layer = _Layer(packed.on(device).pages(sum(counts), heads, device))
            if sinks:
                shape = (n, heads, min(sinks, max(map(len, tokens))), head_dim)
                layer.sink_k, layer.sink_v = (torch.zeros(shape, dtype=weights.dtype, device=device) for _ in "kv")
            if packed.spec.centre == "prompt":
                layer.centre = centres[packed.layer]
            layers.append(layer)
        ids, real = padded(tokens, device)
        lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int32, device=device)
        return _Store(tokens, row_of, lengths, _table(counts, device), dropout_factor(ids, real), layers, centres,
                      _stamp(self._base))  # fmt: skip

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
        """Runs changed or new residues against stored proteins; each entry is a copy of a protein of its own.

        residues     of each copy, what stands at its positions: letters, or "<mask>"
        positions    of each copy, as many residues, counted from 0, each once. A protein of n residues may be continued
                     by residues n, n + 1, ...: its end token moves behind them.
        proteins     of each copy, which protein it is one of, in the order of `encode`. None: copy i is of protein i.
        batch_size   copies that run together. Any number of residues each: shorter ones are padded.

        Returns what the model says of these residues. The stored proteins stay as they were.
        IndexError for a position or protein outside, ValueError for other wrong arguments, RuntimeError where nothing
        is stored or the model has changed since.
        """
        self._check_mode()
        store = self._held()
        copies = self._copies(store, residues, positions, proteins)
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        hidden: list[torch.Tensor] = []
        for start in range(0, len(copies), batch_size):
            batch = copies[start : start + batch_size]
            context = _Reading(self, store, batch)
            factor = store.factor[context.rows]
            states = self._run(embed(self._base, context.ids, factor), None, context.positions, context)
            hidden += [states[b, -len(copy.tokens) :][: copy.asked] for b, copy in enumerate(batch)]
        return self._said(hidden)

    def _copies(
        self,
        store: _Store,
        residues: Sequence[Letters],
        positions: Sequence[Sequence[int]],
        proteins: Sequence[int] | None,
    ) -> list[_Copy]:
        """The arguments of `decode`, checked."""
        count, held = len(residues), len(store.row_of)
        chosen = range(count) if proteins is None else proteins
        if len(positions) != count or len(chosen) != count:
            raise ValueError(f"`residues`, `positions` and `proteins` must have one entry per copy, got {count}, "
                             f"{len(positions)} and {len(chosen)}")  # fmt: skip
        copies = []
        for i, (letters, at, protein) in enumerate(zip(residues, positions, chosen)):
            if not 0 <= protein < held:
                raise IndexError(f"`proteins[{i}]` must be in 0..{held - 1}, which are stored, got {protein}")
            tokens = tokenise(letters, self.model.config, f"residues[{i}]")[1:-1]
            row = store.row_of[protein]
            copies.append(_copy(i, row, len(store.tokens[row]) - 2, tokens, list(at), self.model.config))
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
            found = self._base(inputs_embeds=embeddings, attention_mask=mask, turboquant_context=context, **arguments)
        return found.last_hidden_state  # type: ignore[no-any-return]

    def _said(self, hidden: list[torch.Tensor]) -> Residues:
        head = getattr(self.model, "lm_head", None)
        if head is None:
            return Residues(hidden, None)
        return Residues(hidden, list(head(torch.cat(hidden)).split([len(h) for h in hidden])) if hidden else [])


def _stamp(base: Any) -> tuple[Any, ...]:
    """Changes whenever a weight does, in place or by another one."""
    modules, held = [base], []
    for module in modules:  # `base.parameters()` names what it walks, which takes seven times as long
        if module is not None:
            modules += module._modules.values()
            held += module._parameters.values()
    weights = [weight for weight in held if weight is not None]
    versions = [w._version for w in weights if not w.is_inference()]  # the others cannot be changed in place
    return sum(versions), hash(tuple([w.data_ptr() for w in weights])), base.embeddings.word_embeddings.weight.dtype


def _table(counts: list[int], device: Any) -> torch.Tensor:
    """int32 [n, most]: pages 0, 1, 2, ... dealt out, counts[r] to row r."""
    rows, first = [], 0
    for count in counts:
        rows.append([*range(first, first + count), *[0] * (max(counts) - count)])
        first += count
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(counts), max(counts, default=0))


class _Storing:
    """The context of `encode`: attention is the model's own, and its keys and values are packed into rows of a
    store."""

    def __init__(self, cache: ContextCache, store: _Store, rows: slice) -> None:
        self.cache, self.store, self.rows = cache, store, rows

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        index = self.cache._layer_of[id(module)]
        packed, layer, rows = self.cache._packed[index], self.store.layers[index], self.rows
        k, v, lengths = real_last(key, value, real_tokens(mask, key.shape[0], key.shape[2]))
        centre = {}
        if layer.centre is not None:
            layer.centre[rows] = centre_of(k, lengths, packed.spec.centre_tokens)
            centre["key_centre"] = layer.centre[rows]
        sinks = {} if layer.sink_k is None or layer.sink_v is None else {
            "sink_k": layer.sink_k[rows], "sink_v": layer.sink_v[rows]}  # fmt: skip
        table = self.store.table[rows]
        _append(k, v, lengths, layer.pages, table, packed.plan, **sinks, **packed.transforms, **centre)
        return plain_attention(module, query, key, value, mask, scaling)


@dataclass(frozen=True)
class _Copy:
    """One entry of `decode`."""

    row: int  # of the store
    tokens: list[int]  # ids of what runs: `asked` residues, and the end token if it moves
    positions: list[int]  # of these tokens
    asked: int
    replaced: list[int]  # stored tokens whose places these take, rising; at least one
    length: int  # of the stored protein

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Of stored tokens start to stop, what it sees, in pieces. The first begins at 0 and may be empty."""
        edges = [start - 1, *self.replaced, stop]
        found = [(before + 1, after) for before, after in pairwise(edges) if after > before + 1]
        return found if found and found[0][0] == 0 else [(0, 0), *found]


def _copy(i: int, row: int, n: int, tokens: list[int], at: list[int], config: Any) -> _Copy:
    """`tokens` at residues `at` of a protein of n residues."""
    if len(tokens) != len(at):
        raise ValueError(f"`positions[{i}]` must have one entry per residue, {len(tokens)}, got {len(at)}")
    if len(set(at)) != len(at):
        raise ValueError(f"`positions[{i}]` must name each position once, got {at}")
    new = sorted(p for p in at if p >= n)
    for p in at:
        if p < 0 or p >= n + len(new):
            further = f", or continue it from {n}" if p >= n else ""
            raise IndexError(f"`positions[{i}]` must be in 0..{n - 1}{further}, got {p}")
    most = config.max_position_embeddings - 4
    if n + len(new) > most:
        raise ValueError(f"`positions[{i}]` must keep the protein within {most} residues, got {n + len(new)}")
    tokens, where = list(tokens), [p + 1 for p in at]
    if new:
        tokens.append(EOS)
        where.append(n + len(new) + 1)
    replaced = sorted(p for p in where if p < n + 2)
    return _Copy(row, tokens, where, len(at), replaced, n + 2)


class _Reading:
    """The context of `decode`: rows attend to their copy's own new keys and values and to stored ranges.

    The new ones go in front of the stored as sinks of the operator, so that one softmax runs over both; what lies
    between the stored tokens that a copy replaces is read in several ranges, whose results are merged. Copies of one
    protein read together, once for all of them, what stands in front of the first token that any of them replaces and
    behind the last. All that is the same in every layer is made here, before the first.

    ids, positions   [copies, m]: tokens that run, padded in front to the most that a copy has
    """

    def __init__(self, cache: ContextCache, store: _Store, copies: list[_Copy]) -> None:
        self.cache, self.store, self.copies = cache, store, len(copies)
        device = store.lengths.device
        self.common: _Common | None = None
        if len({c.row for c in copies}) == 1 < len(copies):
            start, stop = min(c.replaced[0] for c in copies), max(c.replaced[-1] for c in copies) + 1
            self.common = _Common(store, copies[0], start, stop)
            pieces = [c.ranges(start, stop) for c in copies]
        else:
            pieces = [c.ranges(0, c.length) for c in copies]
        m, self.parts = max(len(c.tokens) for c in copies), max(map(len, pieces))
        tokens = [[[PAD] * (m - len(c.tokens)) + c.tokens for c in copies],
                  [[0] * (m - len(c.tokens)) + c.positions for c in copies]]  # fmt: skip
        self.ids, self.positions = torch.tensor(tokens, device=device)
        self.rows = torch.tensor([c.row for c in copies], device=device)
        ranges = []
        for copy, (first, *others) in zip(copies, pieces):
            unused = [(0, 0)] * (self.parts - 1 - len(others))
            ranges.append([(m - len(copy.tokens), m + first[1]), *((m + a, m + b) for a, b in others), *unused])
        bounds = torch.tensor(ranges, dtype=torch.int32, device=device).permute(2, 1, 0).flatten(1)
        self.starts, self.stops = bounds.contiguous()  # [parts * copies], as rows of all that `attend` takes
        each = self.rows.repeat(self.parts)
        self.table, self.centres = store.table[each], store.centres[:, each].unbind()
        self.room: dict[int, _Room] = {}  # by how many sinks are stored: layers may differ in that

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        index = self.cache._layer_of[id(module)]
        packed, layer = self.cache._packed[index], self.store.layers[index]
        scale = packed.head_dim**-0.5 if scaling is None else scaling
        centre = None if layer.centre is None else self.centres[index]
        out, lse = self._own(packed, layer, query, key, value, centre, scale)
        if self.common is not None:
            common = self.common.attend(packed, layer, query, scale)
            out, lse = torch.cat([out, common[0]]), torch.cat([lse, common[1]])
        dense: torch.Tensor = _merge(out, lse)[0].transpose(1, 2).contiguous()
        return dense

    def _own(
        self,
        packed: PackedAttention,
        layer: _Layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        centre: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each copy, its new tokens and its ranges: (out, lse) [parts, copies, heads, m, ..]."""
        sinks = 0 if layer.sink_k is None else layer.sink_k.shape[2]
        room = self.room.get(sinks)
        if room is None:
            room = self.room[sinks] = _Room(query, self.parts, sinks)
        room.fill(query, key, value, layer, self.rows)
        out, lse = _attend(
            room.query,
            layer.pages,
            self.table,
            self.stops,
            packed.plan,
            starts=self.starts,
            sink_k=room.sink_k,
            sink_v=room.sink_v,
            softmax_scale=scale,
            causal=False,
            **(packed.transforms if centre is None else {**packed.transforms, "key_centre": centre}),
        )
        shape = (self.parts, self.copies, *lse.shape[1:])
        return out.view(*shape, -1), lse.view(shape)


class _Room:
    """Queries, and new keys and values in front of stored sinks, once for every part, as `attend` takes them: made once
    for a step, filled anew by each layer.

    query          [parts * copies, heads, m, head_dim]
    sink_k, sink_v  [parts * copies, heads, m + sinks, head_dim]
    """

    def __init__(self, like: torch.Tensor, parts: int, sinks: int) -> None:
        copies, heads, m, head_dim = like.shape
        each = [like.new_empty((parts, copies, heads, m + more, head_dim)) for more in (0, sinks, sinks)]
        self.query, self.sink_k, self.sink_v = (x.flatten(0, 1) for x in each)
        self._new = [x[..., :m, :] for x in each]
        self._held = [x[..., m:, :] for x in each[1:]]

    def fill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: _Layer, rows: torch.Tensor
    ) -> None:
        """Of one layer: query, key, value [copies, heads, m, head_dim], and the sinks of these rows of the store."""
        for room, new in zip(self._new, (query, key, value)):
            room.copy_(new)
        for room, held in zip(self._held, (layer.sink_k, layer.sink_v)):
            if held is not None:
                room.copy_(held.index_select(0, rows))


class _Common:
    """Stored tokens of one protein that all its copies see: those in front of `start` and those from `stop` on, read
    once, the rows of all copies being queries of one sequence."""

    def __init__(self, store: _Store, copy: _Copy, start: int, stop: int) -> None:
        device = store.lengths.device
        self.starts, self.stops = torch.tensor([[0, stop], [start, copy.length]], dtype=torch.int32, device=device)
        self.rows = slice(copy.row, copy.row + 1)
        self.table = store.table[self.rows].repeat(2, 1)

    def attend(
        self, packed: PackedAttention, layer: _Layer, query: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [copies, heads, m, head_dim] -> (out, lse) [2, copies, heads, m, ..]."""
        copies, _, m, _ = query.shape
        held = {"sink_k": layer.sink_k, "sink_v": layer.sink_v, "key_centre": layer.centre}
        found = _attend(
            query.transpose(0, 1).flatten(1, 2).expand(2, -1, -1, -1),
            layer.pages,
            self.table,
            self.stops,
            packed.plan,
            starts=self.starts,
            softmax_scale=scale,
            causal=False,
            **packed.transforms,
            **{name: x[self.rows].repeat(2, *[1] * (x.dim() - 1)) for name, x in held.items() if x is not None},
        )
        out, lse = (x.unflatten(2, (copies, m)).transpose(1, 2) for x in found)
        return out, lse
