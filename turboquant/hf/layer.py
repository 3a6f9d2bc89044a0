"""One layer of a TurboQuantCache, as transformers and the attention function use it: it checks the tensors, padding and
window of a forward and has the methods that transformers calls. `storage` keeps the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch
from transformers.cache_utils import CacheLayerMixin

from ..arguments import bounded, quoted
from ..kvcache.again import Seen, attend_again
from ..kvcache.pages import outside_autograd
from ..kvcache.rows import moved, store_rows
from ..kvcache.shared import Common
from ..kvcache.sliding import attention_behind_window, attention_under_mask, chunk_starts, visible_past
from ..kvcache.storage import LayerStorage
from ..kvcache.variance import wide_queries
from ..models.attention import Call, MaskRequest, own_attention, refuse_transforms, without_gradient
from ..models.names import CACHE
from ..spec import CacheSpec
from .attention import FreshKeys

__all__ = ["NO_GRADIENT", "PackedLayer", "autocast", "indices_of"]

NO_GRADIENT = "attention through a TurboQuantCache has no gradient: train with use_cache=False"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Keywords of attention functions that change the weights in ways that `attend` does not know.
_UNKNOWN_OPTIONS = ("position_bias", "head_mask", "output_attentions")


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts tensors of one device as SDPA would: under torch.autocast a rotary embedding may have made queries and keys
    float32 again."""
    kind = tensors[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
    return tensors


def indices_of(argument: str, sequences: Any, masks: bool = False) -> torch.Tensor:
    """Makes a tensor of a list or tensor of integers, or of bools if `masks`. Raises TypeError for anything else."""
    try:
        indices = torch.as_tensor(sequences)
    except (TypeError, ValueError, RuntimeError):
        indices = None
    if indices is not None and indices.dim() == 1:
        if not len(indices):
            return indices.long()
        if indices.dtype in (torch.int64, torch.int32) or (masks and indices.dtype == torch.bool):
            return indices
    raise TypeError(f"`{argument}` must be integers{' or bools' * masks} [sequences], got {quoted(sequences)}")


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a TurboQuantCache. Models reach it through the cache; `attend` is called by the attention function.

    storage     its tokens
    is_shared   whether later layers of the model read its keys and values too
    chunk       tokens of a chunk of text: a token sees those of its own chunk, up to itself; 0: all tokens
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, index: int, spec: CacheSpec, shared: Common) -> None:
        super().__init__()
        self.index, self._shared, self.is_shared, self.chunk = index, shared, False, 0
        self.storage = LayerStorage(index, spec, shared)

    def __repr__(self) -> str:
        return f"PackedLayer({self.index}, tokens={self.storage.tokens})"

    def reset(self) -> None:
        """Empties the layer and gives its memory back: it may then be used with another batch size, dtype or device."""
        self.storage.reset()

    @property
    def spec(self) -> CacheSpec:
        """The layer's spec, with the widths that its pages have now."""
        return self.storage.spec

    @property
    def is_initialized(self) -> bool:
        return self.storage.shape is not None

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Ignores what the mixin's constructor sets."""

    @property
    def max_batch_size(self) -> int:
        return len(self.storage.padding)

    # ---- what transformers calls ----

    @outside_autograd
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Fixes batch, heads, head_dim, dtype and device to those of key_states [batch, kv_heads, any, head_dim]."""
        value_states = key_states if value_states is None else value_states
        if key_states.dim() != 4 or (self.storage.has_values and key_states.shape != value_states.shape):
            raise ValueError(f"layer {self.index}: keys and values must both be [batch, kv_heads, tokens, head_dim], "
                             f"got {tuple(key_states.shape)} and {tuple(value_states.shape)}")  # fmt: skip
        if key_states.dtype not in _DTYPES or value_states.dtype != key_states.dtype:
            raise TypeError(f"layer {self.index}: keys and values must be float32, float16 or bfloat16 alike, got "
                            f"{key_states.dtype} and {value_states.dtype}")  # fmt: skip
        batch, kv_heads, _, head_dim = key_states.shape
        self.storage.start(batch, kv_heads, head_dim, key_states.dtype, key_states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes the new keys and values of a forward, [batch, kv_heads, tokens, head_dim], on to its attention.

        Nothing is stored yet. Returns the keys as `FreshKeys`, which only this package's attention function accepts,
        and the values. Raises ValueError or TypeError for another shape, dtype or device than that of the tokens
        already stored; what earlier layers have stored of the forward is forgotten then. Under torch.autocast keys and
        values are stored in its dtype, as SDPA would read them.
        """
        key_states, value_states = autocast(key_states, value_states)
        try:
            self._prepare(key_states, value_states)
        except Exception:
            self._shared.undo(self.storage.tokens)
            raise
        return FreshKeys.of(key_states, self), value_states

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Checks and allocates all that `update` needs."""
        refuse_transforms(NO_GRADIENT, key_states, value_states)
        stored, shape = self.storage, key_states.shape
        signature = (shape[0], shape[1], shape[-1], key_states.dtype, key_states.device)
        if signature != stored.shape or value_states.shape != (shape if stored.has_values else (*shape[:3], 0)):
            if stored.tokens:
                repeats, rest = divmod(shape[0], self.max_batch_size)
                repeated = repeats > 1 and not rest and signature[1:] == (stored.shape or ())[1:]
                beams = f"; for {repeats} beams or texts of each prompt, cache.batch_repeat_interleave({repeats}) first"
                raise ValueError(
                    f"layer {self.index}: the cache holds {stored}, got keys {tuple(shape)} "
                    f"{key_states.dtype} on {key_states.device} and values {tuple(value_states.shape)}: use a new "
                    f"cache, or cache.reset(){beams if repeated else ''}"
                )
            self.lazy_initialization(key_states, value_states)
        if not stored.is_on(stored.device):
            self.prefetch()
        if stored.damaged:
            raise RuntimeError(
                f"layer {self.index}: an earlier call failed after it had changed the cache: call cache.reset()"
            )

    def get_seq_length(self) -> int:
        return self.storage.tokens

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """(positions, offset) of the mask of a forward that is about to add `query_length` tokens (4.57: a tensor)."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.storage.tokens + new, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def offload(self) -> None:
        """Moves pages, table, sinks and window to the CPU. `prefetch`, or the next forward, brings them back;
        forks that share the pages bring those back as well."""
        self.storage.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Brings an offloaded layer back to its device."""
        self.storage.bring_back()

    def activate_past_recording(self) -> None:
        """From now on every forward keeps a copy of the window, so that `crop` can bring back tokens that left it.
        transformers calls this before assisted decoding."""
        if self._shared.limit is not None:
            raise NotImplementedError(
                "assisted decoding with a `memory_limit` is not supported: make the cache without one"
            )
        self.storage.record_past = True

    is_croppable = True

    def crop(self, tokens: int) -> None:
        """Forgets the last -tokens positions; a positive number is how many to keep (transformers 4.57).

        The result is exactly that of a shorter text. Raises NotImplementedError if it would need tokens that have left
        the window (unless they were recorded, see `activate_past_recording`) or fallen out of a sliding window.
        """
        stored, tokens = self.storage, bounded("crop: `tokens`", tokens)
        keep = stored.tokens + tokens if tokens <= 0 else min(tokens, stored.tokens)
        if keep <= 0:
            if stored.tokens:
                self.reset()
            return
        self.check_crop(keep)
        stored.crop_to(keep)

    def check_crop(self, keep: int) -> None:
        """Raises what a `crop` to `keep` positions, more than 0, would raise."""
        stored = self.storage
        keep = min(keep, stored.tokens)
        if stored.has_released(keep):
            raise NotImplementedError(
                f"crop: layer {self.index} has freed positions that fell out of its sliding window"
            )
        if keep < stored.least:
            raise NotImplementedError(f"crop: up to position {stored.least} there is padding between tokens or behind "
                                      "them, which was not stored: fork the cache before such a forward")  # fmt: skip
        if not stored.can_crop_to(keep):
            raise NotImplementedError(
                f"crop: layer {self.index} has a window of {self.spec.window} tokens and older ones are quantised "
                "already: use a spec with window=0, or call cache.activate_past_recording() before the forward that is "
                "to be undone"
            )
        if keep < max(stored.padding, default=0):
            raise NotImplementedError("crop: keeping less than the padding of a left-padded batch is not supported")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes sequence b what sequence beam_idx[b] was. Full pages are shared, not copied; see `pages`."""
        self._select(self.chosen("beam_idx", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times, one after the other."""
        times = range(bounded("batch_repeat_interleave: `repeats`", repeats))
        self._select([b for b in range(self.max_batch_size) for _ in times])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keeps the sequences `indices` (integers, or a bool for each sequence)."""
        self._select(self.chosen("indices", indices, masks=True))

    def chosen(self, argument: str, sequences: Any, masks: bool = False) -> list[int]:
        """Returns the sequences that a list or tensor of integers chooses, or of bools if `masks`. Raises for those
        that there are not."""
        rows, batch = indices_of(argument, sequences, masks), self.max_batch_size
        if rows.dtype == torch.bool:
            if self.is_initialized and len(rows) != batch:
                raise ValueError(
                    f"layer {self.index}: `{argument}` must be a bool for each of {batch} sequences, got {len(rows)}"
                )
            rows = rows.nonzero().view(-1)
        numbers: list[int] = rows.tolist()
        if self.is_initialized and not all(0 <= b < batch for b in numbers):
            raise IndexError(f"layer {self.index}: sequences must be in 0..{batch - 1}, got {numbers}")
        if self.is_initialized and not numbers:
            raise ValueError(f"layer {self.index}: at least one sequence must stay, got none; reset() forgets all")
        return numbers

    def _select(self, sequences: Sequence[int]) -> None:
        if not self.is_initialized:
            return
        batch = self.max_batch_size
        if self._shared.limit is not None and len(sequences) > batch:
            raise NotImplementedError(
                f"{batch} sequences to {len(sequences)} with a `memory_limit` is not supported: begin with as many"
            )
        try:
            self.storage.select(sequences)
        except RuntimeError:
            for layer in self._shared.layers if self.storage.rank else ():  # the first ones are reordered already
                layer.damaged = True
            raise

    def fork(self, shared: Common) -> Self:
        """The same layer for another cache, whose layers have `shared` in common."""
        other = copy(self)
        other._shared, other.storage = shared, self.storage.fork(shared)
        return other

    # ---- attention ----

    def attend(self, call: Call, return_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, Seen | None]:
        """Stores the new tokens and attends from their queries to all that is stored.

        call   key, value [batch, kv_heads, tokens, head_dim], checked by `update`; mask: a MaskRequest or None
        Returns out [batch, tokens, query_heads, head_dim], dense; lse, None without return_lse: the natural logarithms
        of the softmax's denominators, float32 [batch, query_heads, tokens]; and what `attend_again` takes, None unless
        the layer `is_shared`.
        A failure leaves the cache as it was, and its message names the layer.
        """
        before = self.storage.tokens
        self.storage.begin()
        with self._undone_on_failure(before):
            if self.storage.rank == 0:
                self._check_model(call.module)
            refuse_transforms(NO_GRADIENT, call.query)
            if call.query.dtype != call.key.dtype:  # `update` has cast the keys
                (call.query,) = autocast(call.query)
            followed = call.query, call.key, call.value
            if torch.is_grad_enabled() and any(x.requires_grad for x in followed):
                with torch.no_grad():
                    call.query, call.key, call.value = (x.detach() for x in followed)
                    out, lse, seen = self._attend(call, return_lse)
                return without_gradient(out, NO_GRADIENT, *followed), lse, seen
            return self._attend(call, return_lse)

    def attend_again(
        self, call: Call, seen: Seen, return_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends, as `attend` did, from the queries of a later layer of the same forward, which has no keys and values
        of its own. The queries may be on another device. If they are fewer than the new tokens, they are those of the
        last ones. Returns out and lse as `attend` does."""
        query = call.query
        with self._undone_on_failure(seen.before.tokens), torch.no_grad():
            refuse_transforms(NO_GRADIENT, query)
            here = query.detach().to(self.storage.device)
            if here.dtype != seen.key.dtype:
                (here,) = autocast(here)
            how, lse = {**seen.how, "softmax_scale": self._scale(call.scaling)}, None
            if seen.before.tokens == 0 and self.spec.prefill == "exact" and not return_lse:
                out, _ = own_attention(replace(call, query=here, key=seen.key, value=seen.value))
            elif type(call.mask) is MaskRequest and not call.mask.causal:
                out = self._attend_under(
                    seen.before, call.mask, here, seen.key, seen.value, seen.lengths, seen.padding, how
                )
            else:
                out, lse = attend_again(self.storage, seen, here, how, return_lse)
                out = out.transpose(1, 2).contiguous()
        out, lse = out.to(query.device), None if lse is None else lse.to(query.device)
        if torch.is_grad_enabled() and query.requires_grad:
            out = without_gradient(out, NO_GRADIENT, query)
        return out, lse

    @contextmanager
    def _undone_on_failure(self, before: int) -> Iterator[None]:
        """Takes all layers back to `before` positions after an error, whose message gets the name of the layer."""
        try:
            yield
        except Exception as error:
            if self.storage.tokens == before:
                self.storage.abort()
            self._shared.undo(before)
            if error.args and isinstance(error.args[0], str):
                error.args = (f"layer {self.index}: {error.args[0]}", *error.args[1:])
            raise

    def _scale(self, scaling: float | None) -> float:
        return float(self.storage.head_dim**-0.5) if scaling is None else scaling

    def _check_model(self, module: torch.nn.Module) -> None:
        """Checks that the cache is of this model, before the first layer of a forward stores anything."""
        layers, own = getattr(getattr(module, "config", None), "num_hidden_layers", 0), self._shared.model_layers
        if layers and layers != own:
            raise ValueError(f"`{CACHE}` must be a cache of this model's {layers} layers, got one of {own}")

    def _attend(self, call: Call, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None, Seen | None]:
        """Moves padding behind the tokens of a sequence to their front, attends, and moves the result back."""
        padding, sliding = self._visible(call.mask, call.options, self.storage.tokens, call.key.shape[2])
        behind = call.mask.behind if type(call.mask) is MaskRequest else ()
        if not behind:
            return self._attend_in_front(call, call, padding, sliding, return_lse)
        exact = self._is_exact_prefill(return_lse)
        if not exact and (self.is_shared or not call.mask.causal):
            what = "keys that later layers share" if self.is_shared else "a pattern other than causal"
            raise NotImplementedError(f"padding behind a sequence's tokens is not supported with {what}: pad on the "
                                      'left (`tokenizer.padding_side = "left"`)')  # fmt: skip
        query, key, value = (moved(x, behind) for x in (call.query, call.key, call.value))
        left = replace(call, query=query, key=key, value=value)
        out, lse, seen = self._attend_in_front(call, left, padding, sliding, return_lse)
        self.storage.least = self.storage.tokens
        if exact:
            return out, lse, seen
        back = [-n for n in behind]
        out = moved(out.transpose(1, 2), back).transpose(1, 2).contiguous()
        return out, None if lse is None else moved(lse, back), seen

    def _is_exact_prefill(self, return_lse: bool) -> bool:
        """Whether this is the first forward, and the model's own attention reads its tokens."""
        return self.storage.tokens == 0 and self.spec.prefill == "exact" and not return_lse

    def _attend_in_front(
        self, call: Call, left: Call, padding: tuple[int, ...], sliding: int, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, Seen | None]:
        """`_attend` for padding in front. call: of the model; left: the same with all padding moved to the front."""
        query, key, value, mask, options = left.query, left.key, left.value, call.mask, call.options
        stored, new = self.storage, key.shape[2]
        after = stored.tokens + new
        self._shared.make_room(stored, after, padding)
        how: dict[str, Any] | None
        how = {
            "softmax_scale": self._scale(call.scaling),
            "sliding_window": sliding,
            "softcap": options.get("softcap") or 0.0,
        }
        behind = stored.tokens and any(a > b for a, b in zip(padding, stored.padding) if b < stored.tokens)
        if behind:
            self._check_padding_behind(mask, sliding)
        lengths = self._shared.lengths(after, padding, stored.device)
        if behind:
            out, lse = store_rows(stored, query, key, value, lengths, padding, how, return_lse)
            return out.transpose(1, 2).contiguous(), lse, None
        seen = Seen.of(stored, call.key, call.value, lengths, padding, how) if self.is_shared else None
        if self._is_exact_prefill(return_lse):
            out, _ = own_attention(call)
            how = None
        if how is not None and type(mask) is MaskRequest and not mask.causal:
            out, how = self._attend_under(stored, mask, query, key, value, lengths, padding, how), None
        stored.learn(key, value, padding)
        if self.chunk and how is not None and new > 1:
            out, lse = self._attend_in_chunks(query, key, value, padding, how, return_lse)
            return out.transpose(1, 2).contiguous(), lse, seen
        if self.chunk and how is not None:
            how["starts"] = chunk_starts(lengths, self.chunk)
        attended = stored.store(query, key, value, lengths, padding, sliding, how, return_lse, self.is_shared)
        if attended is None:
            return out, None, seen
        out, lse = attended
        return out.transpose(1, 2).contiguous(), lse, seen

    def _check_padding_behind(self, mask: MaskRequest | torch.Tensor | None, sliding: int) -> None:
        """Raises NotImplementedError where padding between stored and new tokens, or behind these, is not supported."""
        why = {
            "a sliding window": sliding,
            "chunked attention": self.chunk,
            "keys that later layers share": self.is_shared,
            "keys and values of different sizes": not self.storage.has_values,
            "states of linear attention": self._shared.stateful,
            "a pattern other than causal": type(mask) is MaskRequest and not mask.causal,
        }
        for what, there in why.items():
            if there:
                raise NotImplementedError(
                    f"padding between stored and new tokens, or behind these, is not supported with {what}: give each "
                    "text to a fork of the cache, and put these together by TurboQuantCache.join"
                )

    def _attend_in_chunks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: tuple[int, ...],
        how: dict[str, Any],
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Does what `LayerStorage.store` does, for several tokens of a layer with chunks. With prefill="packed" tokens
        are stored and read in pieces that end where a chunk of some sequence does."""
        stored, before, after = self.storage, self.storage.tokens, self.storage.tokens + key.shape[2]
        if self.spec.prefill == "exact":
            lengths = self._shared.lengths(after, padding, stored.device)
            past = visible_past(stored, lengths, key, value, padding, self.chunk)
            out, lse = attention_behind_window(
                wide_queries(query, stored, how["softmax_scale"]),
                past,
                key,
                value,
                before,
                lengths,
                self.chunk,
                how["softmax_scale"],
                how["softcap"],
                return_lse,
                chunked=True,
            )
            stored.store(query, key, value, lengths, padding, self.chunk, None)
            return out, lse
        ends = {p for pad in padding for p in range(pad % self.chunk, after, self.chunk) if p > before}
        parts = []
        for end in sorted({*ends, after}):
            some = slice(stored.tokens - before, end - before)
            so_far = tuple(min(pad, end) for pad in padding)  # of a sequence that begins behind this piece: all of it
            lengths = self._shared.lengths(end, so_far, stored.device)
            starts = chunk_starts(lengths, self.chunk)
            part = stored.store(query[:, :, some], key[:, :, some], value[:, :, some], lengths, so_far, self.chunk,
                                {**how, "starts": starts}, return_lse)  # fmt: skip
            assert part is not None
            parts.append(part)
        outs, lses = zip(*parts)
        return torch.cat(outs, 2), torch.cat(lses, 2) if return_lse else None

    def _attend_under(
        self,
        stored: LayerStorage,
        mask: MaskRequest,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        padding: tuple[int, ...],
        how: dict[str, Any],
    ) -> torch.Tensor:
        """Attends in a pattern that the model makes, to stored tokens, decoded for the time of the call, and to new
        ones. stored: the layer before it stores these. Returns out as `attend` does."""
        if self.spec.prefill == "packed":
            raise NotImplementedError(
                "an attention pattern other than causal, such as images whose tokens all see each other, needs "
                'prefill="exact", got "packed": call turboquant.patch(model, prefill="exact")'
            )
        pattern = mask.of_kind("sdpa")
        assert pattern is not None  # transformers leaves only causal masks out
        window = how["sliding_window"] or stored.tokens + key.shape[2]
        past = visible_past(stored, lengths, key, value, padding, window)
        query = wide_queries(query, stored, how["softmax_scale"])
        return attention_under_mask(query, past, key, value, pattern, how["softmax_scale"], how["softcap"])

    def _visible(
        self, mask: MaskRequest | torch.Tensor | None, options: dict[str, Any], before: int, new: int
    ) -> tuple[tuple[int, ...], int]:
        """The padding of each sequence and the sliding window of a forward; raises for what `attend` cannot do."""
        stored = self.storage
        for name in _UNKNOWN_OPTIONS:
            if options.get(name) is not None and options[name] is not False:
                raise NotImplementedError(f"`{name}` is not supported with a TurboQuantCache")
        after = before + new
        if type(mask) is MaskRequest:
            if mask.positions != after:
                back = (
                    before
                    and not self._shared.stateful
                    and all(layer.can_crop_to(before) for layer in self._shared.layers)
                )
                raise RuntimeError(  # `attend` takes the layers back before it passes this on
                    f"the cache holds {before} positions here and {mask.positions - new} in its first layer: an "
                    "earlier forward was cut off; "
                    + (f"all layers are back at {before} now: try again" if back else "call cache.reset()")
                )
            padding, sliding = mask.padding(before, new, stored.padding), mask.local_size
        elif mask is None:
            padding, sliding = stored.padding, int(options.get("sliding_window") or 0)
        else:
            shape = tuple(getattr(mask, "shape", ()))
            raise NotImplementedError(f"`attention_mask` must be [batch, positions], got {shape}: custom masks are not "
                                      "supported with a TurboQuantCache")  # fmt: skip
        if stored.released and not 0 < sliding <= before + 1 - stored.released:
            raise ValueError(f"the sliding window must be the one of earlier forwards, {stored.sliding_window}, got "
                             f"{sliding or 'none'}: pages that fell out of it are freed")  # fmt: skip
        return padding, sliding
