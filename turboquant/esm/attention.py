"""The attention function "turboquant_esm", by which an ESM-2 model attends to packed keys and values.

Every layer of a patched model has a `PackedAttention` in `module._turboquant`. It packs the layer's keys and values in
each forward, and all queries attend to the packed bytes, in both directions. If a forward has a `turboquant_context`,
that gets the keys and values instead. The layers of a forward share a `turboquant_pass`. (The model hands both keyword
arguments down to here.) With neither `_turboquant` nor a context, attention is the model's own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..kvcache.transforms import layer_transforms, random_rotation
from ..measured import Calibration, Moments, Profile, used_by
from ..measuring.used import moments_for
from ..models.attention import Call, own_attention, refuse_transforms, without_gradient
from ..models.esm import attentions, checked_model
from ..models.identity import fingerprint
from ..ops import PackedKV
from ..plan import PAGE_TOKENS
from ..spec import CacheSpec

__all__ = ["NAME", "Context", "PackedAttention", "Pass", "attend", "attention", "packed_layers", "store"]

NAME = "turboquant_esm"

_append = torch.ops.turboquant.append.default
_attend = torch.ops.turboquant.attend.default


def store(kv: PackedKV, key: torch.Tensor, value: torch.Tensor) -> None:
    """Stores the last tokens of sequences. ``kv.lengths`` counts them already."""
    _append(kv.plan.words, key, value, kv.lengths, kv.pages, kv.block_table, **kv.arguments())


def attend(
    query: torch.Tensor, kv: PackedKV, scale: float, starts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of queries that see every stored token from `starts` on."""
    where = kv.pages, kv.block_table, kv.lengths
    out, lse = _attend(kv.plan.words, query, *where, starts=starts, softmax_scale=scale, causal=False, **kv.arguments())
    return out, lse


class Context(Protocol):
    """The interface of a forward's argument `turboquant_context`."""

    def attend(self, call: Call) -> torch.Tensor:
        """Returns the attention output [batch, tokens, heads, head_dim]. Query, key and value in `call` are [batch,
        heads, tokens, head_dim], after RoPE."""


class PackedAttention:
    """How one layer packs keys and values: its plan, and the tensors that the operators need."""

    def __init__(
        self,
        layer: int,
        head_dim: int,
        spec: CacheSpec,
        calibration: Calibration | None = None,
        moments: Moments | None = None,
    ) -> None:
        if spec.outliers == "prompt":
            raise NotImplementedError("outliers='prompt' is for decoders: an encoder's proteins have no common prompt")
        self.layer, self.spec, self.calibration = layer, spec, calibration
        self.moments = moments if spec.measured else None
        sizes = () if self.moments is None else self.moments.layers[layer].sizes
        self.head_dim, self.plan = head_dim, spec.plan(head_dim, *sizes)
        self.record_bytes = self.plan.record_bytes
        self.transforms: dict[str, torch.Tensor] = {}
        self._device: torch.device | None = None

    def on(self, device: torch.device) -> PackedAttention:
        """Puts the random matrices and the tensors of calibration and moments on `device`, and returns itself."""
        if device != self._device:
            self._device = device
            self.transforms = self._transforms_of(0)
            rotation = random_rotation(self.spec, self.head_dim, device)
            if rotation is not None:
                self.transforms["rotation"] = rotation
        return self

    def shifted(self, by: int) -> dict[str, torch.Tensor]:
        """Returns `transforms` for a call of `attend` in which packed tokens lie `by` positions later than stored."""
        if self.moments is None or self.spec.centre != "wave":
            return self.transforms
        return self.transforms | self._transforms_of(by)

    def _transforms_of(self, later: int) -> dict[str, torch.Tensor]:
        assert self._device is not None
        return dict(
            layer_transforms(
                self.spec, self.layer, self.head_dim, self._device, self.calibration, self.moments, later=later
            )
        )

    def empty(
        self, table: torch.Tensor, lengths: torch.Tensor, pages: int, heads: int, tokens: int, dtype: torch.dtype
    ) -> PackedKV:
        """Allocates zeroed pages, and zeroed sinks if the spec has any, for sequences of up to `tokens` tokens with
        this block table and these lengths."""
        shape = len(lengths), heads, min(self.spec.sinks, tokens), self.head_dim
        device = table.device
        sinks = [torch.zeros(shape, dtype=dtype, device=device) if shape[2] else None for _ in "kv"]
        packed = torch.zeros((pages, heads, self.record_bytes), dtype=torch.uint8, device=device)
        return PackedKV(packed, table, lengths, self.plan, tokens, self.on(device).transforms, *sinks)

    def attend(self, call: Call, shared: Pass) -> torch.Tensor:
        """Packs the keys and values of all tokens but padding, and attends to them from every query. The pages are
        freed after this call. shared: the state that all layers of a forward share."""
        batch, heads, tokens, head_dim = call.key.shape
        key, value, lengths = shared.real_last(call.key, call.value, call.mask)
        count = -(-max(tokens - self.spec.sinks, 0) // PAGE_TOKENS)
        table = shared.table(batch, count, key.device)
        kv = self.empty(table, lengths, batch * count, heads, tokens, key.dtype)
        store(kv, key, value)
        out, _ = attend(call.query, kv, head_dim**-0.5 if call.scaling is None else call.scaling)
        dense: torch.Tensor = out.transpose(1, 2).contiguous()
        return dense


def packed_layers(
    model: Any, spec: CacheSpec, profile: Profile | str | os.PathLike[str] | None = None, measured: bool = True
) -> list[PackedAttention]:
    """Returns how each layer packs. Raises what `turboquant.patch` raises for a model that cannot be packed this way.

    profile    None: moments are those that the model was patched with, or are measured now
    measured   False: moments are not looked for, and nothing is ready to run. Without a profile, the weights may then
               be on the meta device
    """
    modules = attentions(checked_model(model))
    loaded = None if profile is None else Profile.of(profile)
    if loaded is not None:
        loaded.check(fingerprint(model))
    specs, calibration, moments = used_by(spec, loaded, len(modules))
    layer_moments = moments_for(model, specs, moments) if measured else None
    return [
        PackedAttention(i, module.attention_head_size, one, calibration if one.calibrated else None, layer_moments)
        for i, (module, one) in enumerate(zip(modules, specs))
    ]


def real_tokens(mask: torch.Tensor | None, batch: int, tokens: int) -> torch.Tensor | None:
    """Returns bool [batch, tokens], True for real tokens and False for padding; None without a mask.

    mask   as the attention function gets it: what `padding_mask` returned, or transformers 4.57's own, [batch, 1, 1,
           tokens], 0 for real tokens.

    NotImplementedError for a mask that is not the same for all queries.
    """
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
        mask = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    if mask.dim() != 2 or mask.dtype != torch.bool or mask.shape != (batch, tokens):
        raise NotImplementedError(
            f"`attention_mask` must be [batch, tokens], {(batch, tokens)} here, got {tuple(mask.shape)}: masks that "
            "differ between queries are not supported over packed keys"
        )
    return mask


class Pass:
    """State that the layers of one forward share: which tokens are real, and block tables. The first layer that needs
    a part of it makes that part."""

    def __init__(self) -> None:
        self._real: tuple[torch.Tensor, torch.Tensor | None] | None = None  # lengths; order, real tokens last
        self._tables: dict[int, torch.Tensor] = {}

    def real_last(
        self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns keys and values [batch, heads, tokens, head_dim] with all padding moved to the front, where `append`
        skips it, and lengths, int32 [batch]. The order of keys does not matter to attention in both directions."""
        if self._real is None:
            self._real = _real(mask, key)
        lengths, order = self._real
        if order is None:
            return key, value, lengths
        return key.take_along_dim(order, 2), value.take_along_dim(order, 2), lengths

    def table(self, batch: int, count: int, device: torch.device) -> torch.Tensor:
        """Returns a block table, int32 [batch, count]: page j of sequence b is page b * count + j."""
        if count not in self._tables:
            numbers = torch.arange(batch * count, dtype=torch.int32, device=device)
            self._tables[count] = numbers.view(batch, count)
        return self._tables[count]


def _real(mask: torch.Tensor | None, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns lengths, int32 [batch], and indices [batch, 1, tokens, 1] that put real tokens last (None: no mask)."""
    batch, _, tokens, _ = key.shape
    real = real_tokens(mask, batch, tokens)
    if real is None:
        return torch.full((batch,), tokens, dtype=torch.int32, device=key.device), None
    real = real.to(key.device)
    return real.sum(1, dtype=torch.int32), real.sort(dim=1, stable=True).indices[:, None, :, None]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    turboquant_context: Context | None = None,
    turboquant_pass: Pass | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function "turboquant_esm".

    query, key, value   [batch, heads, tokens, head_dim], after RoPE; ESM-2 scales queries before it, and has scaling 1
    returns             [batch, tokens, heads, head_dim], dense, in the dtype of query, and no weights
    """
    call = Call(module, query, key, value, attention_mask, scaling)
    packed: PackedAttention | Context | None = turboquant_context or getattr(module, "_turboquant", None)
    if packed is None:
        return plain_attention(call), None
    for name in ("output_attentions", "head_mask"):
        if options.get(name) is not None and options[name] is not False:
            raise NotImplementedError(f"`{name}` is not supported over packed keys and values: no weights are formed")
    tensors = query, key, value
    why = "attention over packed keys and values has no gradient (inference only): train after turboquant.unpatch"
    refuse_transforms(why, *tensors)
    with torch.no_grad():
        if isinstance(packed, PackedAttention):
            out = packed.attend(call, turboquant_pass or Pass())
        else:
            out = packed.attend(call)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return without_gradient(out, why, *tensors), None
    return out, None


def plain_attention(call: Call) -> torch.Tensor:
    """Runs the model's own attention, by SDPA. Returns [batch, tokens, heads, head_dim]."""
    mask = call.mask
    return own_attention(call if mask is None or mask.dim() != 2 else replace(call, mask=mask[:, None, None, :]))[0]


def padding_mask(**arguments: Any) -> torch.Tensor | None:
    """The mask function: returns the mask that the model was given, [batch, tokens] bool, or None."""
    return arguments.get("attention_mask")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)  # always both: without a mask function padding would be attended to
