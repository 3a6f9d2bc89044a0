"""TurboQuantCache: a transformers Cache whose layers hold packed keys and values, and attend to them.

One layer is [ sinks | packed pages | window ] (turboquant.h, "the cache"), each sequence with its own length. Padding
on the left of a batch is never stored: token i of sequence b has position i - padding[b], and none if that is negative.

    pages        uint8 [n_pages, kv_heads, record_bytes], zeros where nothing is stored
    block_table  int32 [batch, max_pages]: the page of each 128 packed tokens of a sequence
    sinks        keys and values in the model's dtype, each [batch, kv_heads, sinks, head_dim]
    window       the same, a ring of [batch, kv_heads, window, head_dim]
    centre       float32 [batch, kv_heads, head_dim], or none
    lengths      int32 [batch], one tensor for all layers of a device;  rotation (Haar) the same
    calibration  rotations, steps and centres of keys and values (`calibration.tensors`): shared by all caches of a
                 calibration on a device, and counted in each

Growth: pages are added when a sequence fills its last one, as many as are needed or 1/64 of those there are, whichever
is more: at most 1/64 lies idle. Adding copies the layer's packed bytes. A sequence needs a page every 128 tokens, and
every step reads all its packed bytes anyway: while the sequences of a batch are in step, the copies add less than 2 %
to the memory traffic of attention.

A step reads no device tensor back: lengths and pages are counted on the host, from the padding of the first forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from . import ops as _ops  # noqa: F401  registers torch.ops.turboquant
from .attention import FreshKeys, MaskRequest, own_attention
from .calibration import Calibration, layer_specs
from .calibration.measure import describe
from .calibration.tensors import transforms
from .plan import PAGE_TOKENS
from .spec import CacheSpec, resolve

__all__ = ["CacheReport", "LayerReport", "PackedLayer", "TurboQuantCache", "checked_config"]

_append = torch.ops.turboquant.append.default  # the overload itself: nothing is looked up in a decode step
_attend = torch.ops.turboquant.attend.default

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NOTHING = torch.empty(0)  # where a layer that holds nothing has no pages yet
_NONE: torch.Tensor | None = None

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Keywords of attention functions that change the weights in ways that `attend` does not know.
_UNKNOWN_OPTIONS = ("s_aux", "position_bias", "head_mask", "output_attentions")


def _outside_autograd(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """What it allocates is neither part of a graph nor an inference tensor: those cannot be written outside inference
    mode."""

    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


class _NoGradient(torch.autograd.Function):
    """Passes a result on; a backward pass that comes through it is an error instead of a gradient without the keys and
    values."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("attention through a TurboQuantCache has no gradient: train with use_cache=False")


class _Shared:
    """What the layers of one cache have in common."""

    def __init__(self, calibration: Calibration | None) -> None:
        self.calibration = calibration
        self.layers: list[PackedLayer] = []
        self._lengths: dict[torch.device, tuple[int, tuple[int, ...], torch.Tensor]] = {}
        self._rotations: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def lengths(self, after: int, padding: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Lengths of all sequences at `after` positions, int32 [batch]: made by the first layer of a forward, used by
        all."""
        held = self._lengths.get(device)
        if held is not None and held[1] == padding:
            if held[0] == after:
                return held[2]
            lengths = held[2] + (after - held[0])
        else:
            lengths = torch.tensor([after - p for p in padding], dtype=torch.int32, device=device)
        self._lengths[device] = (after, padding, lengths)
        return lengths

    @_outside_autograd
    def rotation(self, seed: int, head_dim: int, device: torch.device) -> torch.Tensor:
        """The Haar matrix of a seed, float32 [1, head_dim, head_dim], one for all layers of a device."""
        from . import _core

        where = (seed, head_dim, device)
        if where not in self._rotations:
            self._rotations[where] = torch.from_numpy(_core.haar(seed, head_dim)).to(device).unsqueeze(0)
        return self._rotations[where]

    def undo(self, before: int) -> None:
        """Back to `before` positions in every layer, after a forward that failed; a layer that cannot is marked."""
        for layer in self.layers:
            if before == 0:
                layer.reset()
            elif layer.tokens > before:
                if layer.can_crop_to(before):
                    layer.tokens = before
                else:
                    layer.damaged = True
        held, self._lengths = self._lengths, {}
        for device, (_, padding, _) in held.items():
            if before:
                self.lengths(before, padding, device)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("lengths", held[2]) for held in self._lengths.values())
        yield from (("rotation", matrix) for matrix in self._rotations.values())


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a TurboQuantCache. Models reach it through the cache; `attend` is called by the attention function.

    tokens    positions seen, padding included: what transformers calls the sequence length
    padding   of those, how many in front of each sequence are not stored
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, index: int, spec: CacheSpec, shared: _Shared) -> None:
        super().__init__()
        self.index, self.spec, self._shared = index, spec, shared
        self.reset()

    def __repr__(self) -> str:
        return f"PackedLayer({self.index}, tokens={self.tokens})"

    def reset(self) -> None:
        """Empties the layer and gives its memory back: it may then be used with another batch size, dtype or device."""
        self.tokens = 0
        self.padding: tuple[int, ...] = ()
        self.damaged = False
        self.is_initialized = False
        self._signature: tuple[Any, ...] | None = None
        self._rows: list[list[int]] = []  # block_table on the host, without its padding
        self._full_at = -1  # positions up to which no sequence needs another page
        self.pages = self.block_table = _NOTHING
        self.sink_k = self.sink_v = self.window_k = self.window_v = self.centre = self.rotation = _NONE
        self.calibrated: dict[str, torch.Tensor] = {}  # arguments of the operators

    # ---- what transformers calls ----

    @_outside_autograd
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Fixes batch, heads, head_dim, dtype and device to those of key_states [batch, kv_heads, any, head_dim]."""
        value_states = key_states if value_states is None else value_states
        if key_states.dim() != 4 or key_states.shape != value_states.shape:
            raise ValueError(f"layer {self.index}: keys and values must both be [batch, kv_heads, tokens, head_dim], "
                             f"got {tuple(key_states.shape)} and {tuple(value_states.shape)}")  # fmt: skip
        if key_states.dtype not in _DTYPES or value_states.dtype != key_states.dtype:
            raise TypeError(f"layer {self.index}: keys and values must be float32, float16 or bfloat16 alike, got "
                            f"{key_states.dtype} and {value_states.dtype}")  # fmt: skip
        batch, kv_heads, _, head_dim = key_states.shape
        plan = self.spec.plan(head_dim)
        found = self._shared.calibration
        if found is not None and (found.kv_heads, found.head_dim) != (kv_heads, head_dim):
            raise ValueError(f"layer {self.index}: keys must have the {found.kv_heads} KV heads of {found.head_dim} "
                             f"channels of the calibration, got {kv_heads} of {head_dim}")  # fmt: skip
        self.reset()
        self.plan, self.dtype, self.device, self.batch_size = plan, key_states.dtype, key_states.device, batch
        self.max_batch_size = batch
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.record_bytes = PAGE_TOKENS * self.spec.bytes_per_token(head_dim)
        self.padding = (0,) * batch
        self.pages = torch.empty((0, kv_heads, self.record_bytes), dtype=torch.uint8, device=self.device)
        self.block_table = torch.empty((batch, 0), dtype=torch.int32, device=self.device)
        self._rows = [[] for _ in range(batch)]
        for side, count in (("sink", self.spec.sinks), ("window", self.spec.window)):
            for which in "kv" if count else "":
                shape = (batch, kv_heads, count, head_dim)
                setattr(self, f"{side}_{which}", torch.zeros(shape, dtype=self.dtype, device=self.device))
        if self.spec.rotation == "haar":
            self.rotation = self._shared.rotation(self.spec.seed, head_dim, self.device)
        if found is not None:
            self.calibrated = transforms(found, self.spec, self.index, self.device)
        self._signature = (batch, kv_heads, head_dim, self.dtype, self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the new keys and values of a forward, [batch, kv_heads, tokens, head_dim], on to its attention.

        Nothing is stored yet. Returns the keys as `FreshKeys`, which only this package's attention function accepts,
        and the values. Raises ValueError or TypeError for another shape, dtype or device than that of the tokens
        already stored.
        """
        shape = key_states.shape
        signature = (shape[0], shape[1], shape[-1], key_states.dtype, key_states.device)
        if signature != self._signature or value_states.shape != shape:
            if self.tokens:
                raise ValueError(
                    f"layer {self.index}: the cache holds {self._described()}, got keys {tuple(shape)} "
                    f"{key_states.dtype} on {key_states.device} and values {tuple(value_states.shape)}: use a new "
                    "cache, or cache.reset()"
                )
            self.lazy_initialization(key_states, value_states)
        if self.damaged:
            raise RuntimeError(
                f"layer {self.index}: an earlier forward failed after it had stored tokens: call cache.reset()"
            )
        return FreshKeys.of(key_states, self), value_states

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """(positions, offset) of the mask of a forward that is about to add `query_length` (4.57: a tensor of them)."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.tokens + new, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def offload(self) -> None:
        raise NotImplementedError("offload: moving packed layers off the device is not supported yet")

    def prefetch(self) -> None:
        raise NotImplementedError("prefetch: moving packed layers off the device is not supported yet")

    def can_crop_to(self, tokens: int) -> bool:
        """Whether going back is exact: no token, which is quantised when it leaves the window, would have to return."""
        stored = self.tokens - min(self.padding, default=0)
        return tokens >= self.tokens or self.spec.window == 0 or stored <= self.spec.sinks + self.spec.window

    @property
    def is_croppable(self) -> bool:
        return self.spec.window == 0

    def crop(self, tokens: int) -> None:
        """Forgets the last -tokens positions; a positive number is how many to keep (transformers 4.57).

        Pages stay, for the tokens to come. Raises NotImplementedError where tokens that left the window would have to
        come back.
        """
        keep = self.tokens + tokens if tokens <= 0 else min(tokens, self.tokens)
        if keep <= 0:
            if self.tokens:
                self.reset()
            return
        if not self.can_crop_to(keep):
            raise NotImplementedError(
                f"crop: layer {self.index} has a window of {self.spec.window} tokens and older ones are quantised "
                "already; only a cache with window=0 can be cropped"
            )
        if keep < max(self.padding, default=0):
            raise NotImplementedError("crop: keeping less than the padding of a left-padded batch is not supported")
        self.tokens = keep

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes a copy of sequence beam_idx[b], byte for byte. Costs a copy of the layer."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after the other."""
        self._select([b for b in range(len(self.padding)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences `indices` (integers, or a bool for each sequence)."""
        chosen = indices.nonzero().view(-1) if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    @_outside_autograd
    def _select(self, sequences: Sequence[int]) -> None:
        if not self.is_initialized:
            return
        batch = len(self._rows)
        if not all(0 <= b < batch for b in sequences):
            raise IndexError(f"layer {self.index}: sequences must be in 0..{batch - 1}, got {list(sequences)}")
        kept = [self._rows[b] for b in sequences]
        where = torch.tensor(list(sequences), device=self.device)
        pages = torch.tensor([page for row in kept for page in row], dtype=torch.int64, device=self.device)
        self.pages = self.pages.index_select(0, pages)
        rows, used = [], 0
        for row in kept:
            rows.append(list(range(used, used + len(row))))
            used += len(row)
        self._rows, self.block_table = rows, self._table(rows)
        for name in ("sink_k", "sink_v", "window_k", "window_v", "centre"):
            if (held := getattr(self, name)) is not None:
                setattr(self, name, held.index_select(0, where))
        self.padding = tuple(self.padding[b] for b in sequences)
        self.batch_size = self.max_batch_size = len(rows)
        self._signature = (len(rows), self.kv_heads, self.head_dim, self.dtype, self.device)
        self._full_at = min((self._room(row, pad) for row, pad in zip(rows, self.padding)), default=-1)

    # ---- attention ----

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: MaskRequest | torch.Tensor | None,
        scaling: float | None,
        dropout: float,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Stores the new tokens and attends from their queries to all that is stored.

        query [batch, query_heads, tokens, head_dim];  key, value [batch, kv_heads, tokens, head_dim], checked by
                                                       `update`
        Returns [batch, tokens, query_heads, head_dim], dense.
        A failure leaves the cache as it was, and its message names the layer.
        """
        before = self.tokens
        try:
            if torch.is_grad_enabled() and query.requires_grad:
                with torch.no_grad():
                    query_, key, value = query.detach(), key.detach(), value.detach()
                    out = self._attend(module, query_, key, value, mask, scaling, dropout, options)
                return _NoGradient.apply(out, query)  # type: ignore[no-any-return,no-untyped-call]
            return self._attend(module, query, key, value, mask, scaling, dropout, options)
        except Exception as error:
            self._shared.undo(before)
            if error.args and isinstance(error.args[0], str):
                error.args = (f"layer {self.index}: {error.args[0]}", *error.args[1:])
            raise

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: MaskRequest | torch.Tensor | None,
        scaling: float | None,
        dropout: float,
        options: dict[str, Any],
    ) -> torch.Tensor:
        before, new, spec = self.tokens, key.shape[2], self.spec
        after = before + new
        for name in _UNKNOWN_OPTIONS:
            if options.get(name) is not None and options[name] is not False:
                raise NotImplementedError(f"`{name}` is not supported with a TurboQuantCache")
        if type(mask) is MaskRequest:
            if mask.positions != after:
                raise RuntimeError(
                    f"the cache holds {before} positions here and {mask.positions - new} in its first layer: an "
                    "earlier forward was cut off; call cache.reset()"
                )
            padding, sliding = mask.padding(before, new, self.padding), mask.local_size
        elif mask is None:
            padding, sliding = self.padding, int(options.get("sliding_window") or 0)
        else:
            shape = tuple(getattr(mask, "shape", ()))
            raise NotImplementedError(f"`attention_mask` must be [batch, positions], got {shape}: custom masks are not "
                                      "supported with a TurboQuantCache")  # fmt: skip

        first = before == 0
        out = None
        if first and spec.prefill == "exact":
            out, _ = own_attention(module, query, key, value, mask, scaling, dropout, options)
        lengths = self._shared.lengths(after, padding, self.device)
        if first and spec.centre == "prompt":
            self.centre = self._mean(key, padding)  # undone by reset, which a failed first forward ends in
        state = self._state()
        pages, table, rows, full_at = self.pages, self.block_table, self._rows, self._full_at
        if after > full_at:
            pages, table, rows, full_at = self._grown(after, padding)
        read = state
        if new > 1 and out is None and self.window_k is not None and self.window_v is not None:
            before_append = {"window_k": self.window_k.clone(), "window_v": self.window_v.clone()}
            read = {
                **state,
                **before_append,
                "fresh_k": key,
                "fresh_v": value,
            }  # early queries need what later tokens push out

        _append(key, value, lengths, pages, table, self.plan, **state)
        self.pages, self.block_table, self._rows, self._full_at = pages, table, rows, full_at
        self.tokens, self.padding = after, padding
        if out is None:
            out, _ = _attend(
                query,
                pages,
                table,
                lengths,
                self.plan,
                softmax_scale=self.head_dim**-0.5 if scaling is None else scaling,
                sliding_window=sliding,
                softcap=options.get("softcap") or 0.0,
                **read,
            )
            out = out.transpose(1, 2).contiguous()
        return out

    def _state(self) -> dict[str, torch.Tensor | None]:
        return {
            "sink_k": self.sink_k,
            "sink_v": self.sink_v,
            "window_k": self.window_k,
            "window_v": self.window_v,
            "key_rotation": self.rotation,
            "value_rotation": self.rotation,
            "key_centre": self.centre,
            **self.calibrated,
        }

    @_outside_autograd
    def _mean(self, key: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
        """float32 [batch, kv_heads, head_dim]: the mean of the first real tokens of each sequence, 0 where there is
        none."""
        count = self.spec.centre_tokens
        if not any(padding):
            return key[:, :, :count].to(torch.float32).mean(2)
        each = [key[b, :, pad : pad + count].to(torch.float32).mean(1) for b, pad in enumerate(padding)]
        return torch.stack(each).nan_to_num_() if max(padding) == key.shape[2] else torch.stack(each)

    def _room(self, row: list[int], padding: int) -> int:
        """Positions up to which a sequence needs no page beyond those of its row."""
        return len(row) * PAGE_TOKENS + self.spec.sinks + self.spec.window + padding

    def _table(self, rows: list[list[int]]) -> torch.Tensor:
        width = max((len(row) for row in rows), default=0)
        table = [row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(table, dtype=torch.int32, device=self.device).view(len(rows), width)

    @_outside_autograd
    def _grown(self, after: int, padding: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], int]:
        """Pages, block table, its rows and their room for `after` positions; the layer itself is not changed."""
        rows = [list(row) for row in self._rows]
        used = sum(map(len, rows))
        for row, pad in zip(rows, padding):
            while self._room(row, pad) < after:
                row.append(used)
                used += 1
        pages, capacity = self.pages, self.pages.shape[0]
        if used > capacity:
            size = max(used, capacity + capacity // 64)
            pages = torch.zeros((size, self.kv_heads, self.record_bytes), dtype=torch.uint8, device=self.device)
            pages[:capacity].copy_(self.pages)
        return pages, self._table(rows), rows, min(self._room(row, pad) for row, pad in zip(rows, padding))

    # ---- accounting ----

    def _described(self) -> str:
        heads = f"{self.kv_heads} KV heads of {self.head_dim} channels"
        return f"{self.tokens} positions of {self.batch_size} sequences with {heads} in {self.dtype} on {self.device}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(part, tensor) of all that this layer alone holds."""
        parts = {"pages": ("pages",), "block_table": ("block_table",), "centre": ("centre",),
                 "sinks": ("sink_k", "sink_v"), "window": ("window_k", "window_v")}  # fmt: skip
        for part, names in parts.items():
            for name in names:
                if (held := getattr(self, name)) is not None:
                    yield part, held
        yield from (("calibration", held) for held in self.calibrated.values())

    def report(self) -> LayerReport:
        parts: dict[str, int] = {}
        for part, tensor in self.tensors():
            parts[part] = parts.get(part, 0) + tensor.untyped_storage().nbytes()
        tokens = sum(self.tokens - pad for pad in self.padding)
        numbers = 2 * tokens * self.kv_heads * self.head_dim if tokens else 0
        return LayerReport(self.index, tokens, numbers, parts)


@dataclass(frozen=True)
class LayerReport:
    """What one layer holds: tokens of all sequences (padding is not stored), numbers = keys and values, bytes by
    part."""

    layer: int
    tokens: int
    numbers: int
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class CacheReport:
    """Bytes of a cache, all counted, and what they come to. `str` makes a table."""

    layers: tuple[LayerReport, ...]
    shared: dict[str, int]  # bytes held once for all layers

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers) + sum(self.shared.values())

    @property
    def numbers(self) -> int:
        return sum(layer.numbers for layer in self.layers)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, over all layers."""
        total = dict(self.shared)
        for layer in self.layers:
            for part, size in layer.parts.items():
                total[part] = total.get(part, 0) + size
        return total

    @property
    def effective_bits(self) -> float:
        """Bits held per number stored."""
        return 8 * self.nbytes / self.numbers if self.numbers else float("nan")

    @property
    def ratio_bf16(self) -> float:
        """Bytes of the same tokens in bfloat16 over bytes held."""
        return 2 * self.numbers / self.nbytes if self.nbytes else float("nan")

    @property
    def ratio_fp32(self) -> float:
        return 2 * self.ratio_bf16

    def __str__(self) -> str:
        names = list(dict.fromkeys(part for layer in self.layers for part in layer.parts))
        lines = ["".join(["layer".ljust(8), *(n.rjust(13) for n in ("tokens", *names, "bytes"))])]
        for layer in self.layers:
            cells = (layer.tokens, *(layer.parts.get(n, 0) for n in names), layer.nbytes)
            lines.append("".join([str(layer.layer).ljust(8), *(f"{cell:,}".rjust(13) for cell in cells)]))
        lines += [f"{part + ' (all layers)':<21}{size:,}" for part, size in self.shared.items()]
        smaller = f"{self.ratio_bf16:.2f} times smaller than bfloat16, {self.ratio_fp32:.2f} than float32"
        lines.append(f"{self.nbytes:,} bytes: {self.effective_bits:.3f} bits per number, {smaller}")
        return "\n".join(lines)


def checked_config(config: Any) -> Any:
    """The configuration of the decoder, if its layers are of a kind that can be packed."""
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"encoder-decoder models are not supported, got {type(config).__name__}")
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(text, "attention_chunk_size", None) is not None:
        kinds.add("chunked_attention")
    if kinds:
        raise NotImplementedError(
            f"layers must be full or sliding attention, got {', '.join(sorted(kinds))} in {type(config).__name__}"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise NotImplementedError(
            f"keys and values shared between layers are not supported, got {type(config).__name__}"
        )
    return text


class TurboQuantCache(Cache):  # type: ignore[misc]
    """Compressed keys and values of a model, for `past_key_values=` of a model that `turboquant.patch` has prepared.

    config   the model's configuration; only the number and kind of its layers matter, shapes come from the tensors
    spec     a CacheSpec or the name of a preset
    calibration   a Calibration or its file, for a spec that uses one; None otherwise

    Raises NotImplementedError for layers that cannot be packed, and ValueError for a calibration that is missing, not
    wanted, or of a model of another configuration (its weights are compared by `turboquant.patch`, which has them).
    """

    def __init__(
        self,
        config: Any,
        spec: CacheSpec | str = "default",
        calibration: Calibration | str | os.PathLike[str] | None = None,
    ) -> None:
        self.spec = resolve(spec)
        text = checked_config(config)
        found = None if calibration is None else Calibration.of(calibration)
        if found is not None:
            found.check(describe(text))
        specs = layer_specs(self.spec, found, text.num_hidden_layers)
        self._shared = _Shared(found)
        self._shared.layers = [PackedLayer(i, s, self._shared) for i, s in enumerate(specs)]
        super().__init__(layers=self._shared.layers)

    def __repr__(self) -> str:
        size = f"layers={len(self.layers)}, tokens={self.get_seq_length()}, nbytes={self.nbytes}"
        return f"TurboQuantCache({size}, spec={self.spec})"

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedLayer.update`."""
        if not 0 <= layer_idx < len(self._shared.layers):
            raise ValueError(
                f"`layer_idx` must be in 0..{len(self.layers) - 1}, got {layer_idx}: is this cache of another model?"
            )
        return self._shared.layers[layer_idx].update(key_states, value_states)

    def crop(self, tokens: int) -> None:
        """See `PackedLayer.crop`. If one layer cannot be cropped, none is."""
        keep = self.get_seq_length() + tokens if tokens <= 0 else tokens
        for layer in self._shared.layers:
            if keep > 0 and not layer.can_crop_to(keep):
                layer.crop(tokens)  # raises
        super().crop(tokens)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(part, tensor) of everything the cache holds."""
        for layer in self._shared.layers:
            yield from layer.tensors()
        yield from self._shared.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes that the allocator holds for this cache: every storage once, room for tokens to come included."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in self.tensors()}
        return sum(storages.values())

    def report(self) -> CacheReport:
        shared: dict[str, int] = {}
        for part, tensor in self._shared.tensors():
            shared[part] = shared.get(part, 0) + tensor.untyped_storage().nbytes()
        return CacheReport(tuple(layer.report() for layer in self._shared.layers), shared)
