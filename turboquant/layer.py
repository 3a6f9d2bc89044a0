"""One layer of a TurboQuantCache: [ sinks | packed pages | window ] (turboquant.h, "the cache").

Each sequence has its own length. Padding on the left of a batch is never stored: token i of sequence b has position
i - padding[b], and none if that is negative.

    pages        uint8 [n_pages, kv_heads, record_bytes], zeros where nothing is stored
    block_table  int32 [batch, max_pages]: the page of each 128 packed tokens of a sequence
    sinks        keys and values in the model's dtype, each [batch, kv_heads, sinks, head_dim]
    window       the same, a ring of [batch, kv_heads, window, head_dim]; both have fewer rows, or are None, as long as
                 there are not so many tokens (`exact`)
    centre       float32 [batch, kv_heads, head_dim], or none
    calibration  rotations, steps and centres of keys and values (`calibration.tensors`): shared by all caches of a
                 calibration on a device, and counted in each

Growth: pages are added when a sequence fills its last one, as many as are needed or 1/64 of those there are, whichever
is more: at most 1/64 lies idle. Adding copies the layer's packed bytes. A sequence needs a page every 128 tokens, and
every step reads all its packed bytes anyway: while the sequences of a batch are in step, the copies add less than 2 %
to the memory traffic of attention. Forks, beams and repeated sequences share pages (`pages.PageTable`). A layer with a
sliding window gives pages back that no query can see any more, but for one in reserve for `crop`: to later tokens,
and after a prompt, as after a crop, to the allocator.

A step reads no device tensor back: lengths and pages are counted on the host, from the padding of the first forward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import CacheLayerMixin

from . import ops as _ops  # noqa: F401  registers torch.ops.turboquant
from .attention import FreshKeys, MaskRequest, own_attention
from .calibration.tensors import transforms
from .common import Common
from .exact import exact_rows, grown_sinks, laid_out, rows_of, with_room
from .modes import is_split
from .names import CACHE
from .pages import RELEASED, PageTable, outside_autograd
from .plan import PAGE_TOKENS
from .prompt import prompt_mean, prompt_rotations
from .report import LayerReport
from .rewind import PastWindows
from .spec import CacheSpec

__all__ = ["PackedLayer", "describe_flag"]

_append = torch.ops.turboquant.append.default  # the overload itself: nothing is looked up in a decode step
_attend = torch.ops.turboquant.attend.default
_append_attend = torch.ops.turboquant.append_attend.default

_Result = TypeVar("_Result")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NOTHING = torch.empty(0)  # where a layer that holds nothing has no pages yet
_NONE: torch.Tensor | None = None

# Keywords of attention functions that change the weights in ways that `attend` does not know.
_UNKNOWN_OPTIONS = ("s_aux", "position_bias", "head_mask", "output_attentions")

# What a layer holds for each sequence beside its pages: attributes, tensors [batch, ..], or None.
_STATE = ("sink_k", "sink_v", "window_k", "window_v", "centre")


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """x as SDPA would read it: under torch.autocast a rotary embedding may have made queries and keys float32 again."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _NoGradient(torch.autograd.Function):
    """Passes a result on; a backward pass that comes through it is an error instead of a gradient without the keys and
    values."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("attention through a TurboQuantCache has no gradient: train with use_cache=False")


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a TurboQuantCache. Models reach it through the cache; `attend` is called by the attention function.

    tokens    positions seen, padding included: what transformers calls the sequence length
    padding   of those, how many in front of each sequence are not stored
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, index: int, spec: CacheSpec, shared: Common) -> None:
        super().__init__()
        self.index, self.spec, self._shared = index, spec, shared
        self.record_past = False
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
        self.table: PageTable | None = None
        self.past = PastWindows()
        self.sliding_window = 0  # of the last forward
        self._released = 0  # positions before this one are in no page any more
        self._earlier: tuple[Any, Any] = ((), [])  # padding and past windows before the forward at work
        self.sink_k = self.sink_v = self.window_k = self.window_v = self.centre = _NONE
        self.exact_ready = 0.0  # positions that sinks and window have rows for
        self.rotations: dict[str, torch.Tensor | None] = {"key": None, "value": None}
        self.split: dict[str, torch.Tensor] = {}  # rotations that sort out the prompt's outlier channels
        self.flag = _NONE  # of `append` on CUDA, int64 [1]
        self.calibrated: dict[str, torch.Tensor] = {}  # arguments of the operators

    @property
    def pages(self) -> torch.Tensor:
        """uint8 [n_pages, kv_heads, record_bytes]; forks and beams may share it."""
        return _NOTHING if self.table is None else self.table.pool.storage

    @property
    def block_table(self) -> torch.Tensor:
        return _NOTHING if self.table is None else self.table.tensor

    # ---- what transformers calls ----

    @outside_autograd
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
        self.table = PageTable.empty(batch, kv_heads, self.record_bytes, self.device)
        if self.device.type == "cuda":
            self.flag = torch.zeros(1, dtype=torch.int64, device=self.device)
        for side in ("key", "value"):
            if not is_split(self.spec, side) and self.spec.rotation_of(side) != "svd":
                self.rotations[side] = self._shared.rotation(self.spec, side, head_dim, self.device)
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
        already stored; what earlier layers have stored of the forward is forgotten then. Under torch.autocast keys and
        values are stored in its dtype, as SDPA would read them.
        """
        key_states, value_states = _autocast(key_states), _autocast(value_states)
        try:
            self._prepare(key_states, value_states)
        except Exception:
            self._shared.undo(self.tokens)
            raise
        return FreshKeys.of(key_states, self), value_states

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """All that `update` checks and allocates."""
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
        if self.pages.device != self.device:
            self.prefetch()
        if self.damaged:
            raise RuntimeError(
                f"layer {self.index}: an earlier call failed after it had changed the cache: call cache.reset()"
            )

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
        """Moves pages, table, sinks, window and centre to the CPU. `prefetch`, or the next forward, brings them back;
        forks that share the pages bring those back as well."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Brings an offloaded layer back to its device."""
        if self.is_initialized:
            self._move(self.device)

    @outside_autograd
    def _move(self, device: torch.device) -> None:
        if self.table is None or self.pages.device == self.block_table.device == device:
            return
        moved = {name: held.to(device) for name in (*_STATE, "flag") if (held := getattr(self, name)) is not None}
        self.table.move(device)
        self.__dict__.update(moved)

    def activate_past_recording(self) -> None:
        """From now on keeps, until the next `crop`, what leaves the window, so that crop can bring it back: a copy of
        the window for each forward. transformers calls it before assisted decoding."""
        self.record_past = True

    is_croppable = True

    def can_crop_to(self, tokens: int) -> bool:
        """Whether going back is exact: every token that the next query sees is where it would be."""
        window, first = self.spec.window, self.spec.sinks + min(self.padding, default=0)
        if tokens >= self.tokens:
            return True
        if self.sliding_window and tokens - self.sliding_window + 1 < self._released:
            return False
        inside = window == 0 or self.tokens <= first + window
        return inside or self.past.reaches(tokens, self.tokens, window, first)

    def crop(self, tokens: int) -> None:
        """Forgets the last -tokens positions; a positive number is how many to keep (transformers 4.57).

        Exact: what stays is what a shorter text would have left. Raises NotImplementedError where tokens would have to
        come back that have left the window (unless they were recorded, see `activate_past_recording`) or fallen out of
        a sliding window.
        """
        tokens = operator.index(tokens)
        keep = self.tokens + tokens if tokens <= 0 else min(tokens, self.tokens)
        if keep <= 0:
            if self.tokens:
                self.reset()
            return
        if not self.can_crop_to(keep):
            raise NotImplementedError(self._uncroppable(keep))
        if keep < max(self.padding, default=0):
            raise NotImplementedError("crop: keeping less than the padding of a left-padded batch is not supported")
        self.crop_to(keep)

    def _uncroppable(self, keep: int) -> str:
        if self.sliding_window and keep - self.sliding_window + 1 < self._released:
            return f"crop: layer {self.index} has freed positions that fell out of its sliding window"
        return (
            f"crop: layer {self.index} has a window of {self.spec.window} tokens and older ones are quantised already: "
            "use a spec with window=0, or call cache.activate_past_recording() before the forward that is to be undone"
        )

    @outside_autograd
    def crop_to(self, keep: int) -> None:
        """`crop` to `keep` positions, 0 < keep; `can_crop_to(keep)` is true."""
        if keep < self.tokens:
            if self.window_k is not None and self.window_v is not None and self.past.snapshots:
                self.prefetch()  # past windows have stayed where they were
                now = self.window_k, self.window_v
                window = self.past.ring(keep, self.tokens, now, self.padding, self.spec.sinks)
                self.window_k, self.window_v = window
            if self.table is not None:
                self.table.truncate(self._packed(keep, self.padding))
            self.tokens = keep
            if self.table is not None:
                self.table.compact()
        self.past.cropped(keep)
        self._earlier = self.padding, self.past.snapshots  # or it would hold what was forgotten

    def take_back(self, positions: int) -> None:
        """Back to what the layer was at `positions`, before the forward that is at work and failed; it is damaged where
        that cannot be had."""
        if self.tokens <= positions:
            return
        padding, snapshots = self._earlier
        try:
            self.damaged = self.damaged or not self.can_crop_to(positions)
            if not self.damaged:
                self.crop_to(positions)
                self.padding, self.past.snapshots = padding, [one for one in snapshots if one[0] <= positions]
        except RuntimeError:  # not even memory for the window as it was
            self.damaged = True

    def _packed(self, positions: int, padding: Sequence[int]) -> list[int]:
        """Packed tokens of each sequence at so many positions."""
        exact = self.spec.sinks + self.spec.window
        return [max(0, positions - pad - exact) for pad in padding]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes what sequence beam_idx[b] was. Full pages are shared, not copied; see `pages`."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after the other."""
        self._select([b for b in range(len(self.padding)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keeps the sequences `indices` (integers, or a bool for each sequence)."""
        given = torch.as_tensor(indices)
        self._select((given.nonzero().view(-1) if given.dtype == torch.bool else given).tolist())

    @outside_autograd
    def _select(self, sequences: Sequence[int]) -> None:
        if self.table is None:
            return
        batch = len(self.padding)
        if not all(0 <= b < batch for b in sequences):
            raise IndexError(f"layer {self.index}: sequences must be in 0..{batch - 1}, got {list(sequences)}")
        if not sequences:
            raise ValueError(f"layer {self.index}: at least one sequence must stay, got none; reset() forgets all")
        try:
            self.prefetch()
            where = torch.tensor(list(sequences), device=self.device)
            state = {name: held.index_select(0, where) for name in _STATE if (held := getattr(self, name)) is not None}
            self.table.select(sequences)
        except RuntimeError:
            for layer in self._shared.layers if self.index else ():  # of which the first ones have changed places
                layer.damaged = True
            raise
        self.__dict__.update(state)
        self.past = PastWindows()
        self.padding = tuple(self.padding[b] for b in sequences)
        self._earlier = self.padding, self.past.snapshots
        self.batch_size = self.max_batch_size = len(sequences)
        self._signature = (len(sequences), self.kv_heads, self.head_dim, self.dtype, self.device)

    @outside_autograd
    def fork(self, shared: Common) -> PackedLayer:
        """The same layer for another cache, whose layers have `shared` in common. Pages are shared, sinks and window
        copied."""
        other = PackedLayer(self.index, self.spec, shared)
        other.record_past = self.record_past
        if self.table is not None:
            other.__dict__.update(self.__dict__, _shared=shared, table=self.table.fork(), past=PastWindows())
            own = {name: held.clone() for name in (*_STATE, "flag") if (held := getattr(self, name)) is not None}
            other.__dict__.update(own)
            other._earlier = other.padding, other.past.snapshots
        return other

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
        before, self._earlier = self.tokens, (self.padding, self.past.snapshots)
        try:
            if self.index == 0:
                self._check_model(module)
            query = _autocast(query)
            if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
                with torch.no_grad():
                    q, k, v = query.detach(), key.detach(), value.detach()
                    out = self._attend(module, q, k, v, mask, scaling, dropout, options)
                return _NoGradient.apply(out, query, key, value)  # type: ignore[no-any-return,no-untyped-call]
            return self._attend(module, query, key, value, mask, scaling, dropout, options)
        except Exception as error:
            if self.tokens == before:
                self.past.snapshots = self._earlier[1]
            self._shared.undo(before)
            if error.args and isinstance(error.args[0], str):
                error.args = (f"layer {self.index}: {error.args[0]}", *error.args[1:])
            raise

    def _check_model(self, module: torch.nn.Module) -> None:
        """Before the first layer of a forward stores anything."""
        layers, held = getattr(getattr(module, "config", None), "num_hidden_layers", 0), len(self._shared.layers)
        if layers > held:
            raise ValueError(f"`{CACHE}` must be a cache of this model's {layers} layers, got one of {held}")

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
        after, first = before + new, before == 0
        padding, sliding = self._visible(mask, options, before, new)
        exact = first and spec.prefill == "exact"
        if exact:
            out, _ = own_attention(module, query, key, value, mask, scaling, dropout, options)
        lengths = self._shared.lengths(after, padding, self.device)
        if first and spec.centre == "prompt":  # undone by reset, which a failed first forward ends in
            self.centre = prompt_mean(key, padding, spec.centre_tokens)
        elif self.centre is not None and max(self.padding, default=0) >= before:
            self._begin_centres(key, padding, before)
        if first and spec.outliers == "prompt":
            self.split = prompt_rotations(spec, key, value, padding)
        if after > self.exact_ready:
            self.make_exact_room(after)
        state, fresh = self._state(), self._fresh(key, value, before, padding, new > 1 and not exact)
        how = {
            "softmax_scale": self.head_dim**-0.5 if scaling is None else scaling,
            "sliding_window": sliding,
            "softcap": options.get("softcap") or 0.0,
            "even_lengths": not padding or 8 * max(padding) <= after,
        }
        attended: torch.Tensor | None = None
        assert self.table is not None
        if exact or fresh or self.table.pool.tables > 1:  # forks may attend at the same time, but not write
            pages, rows = self._append(key, value, lengths, state, after, padding)
        else:
            attended = self._with_room(after, padding, lambda table: _append_attend(
                self.plan.words, query, key, value, lengths, table.pool.storage, table.tensor, flag=self.flag, **how,
                **state,
            ))  # fmt: skip
        self.tokens, self.padding, self.sliding_window = after, padding, sliding
        if attended is None and not exact:
            attended, _ = _attend(self.plan.words, query, pages, rows, lengths, **how, **{**state, **fresh})
        if sliding and new > 1:  # the earlier queries have seen them: forks may take these pages now
            self._release()
            self.table.compact()
        return out if attended is None else attended.transpose(1, 2).contiguous()

    @outside_autograd
    def _begin_centres(self, key: torch.Tensor, padding: tuple[int, ...], before: int) -> None:
        """The centres of sequences that begin in this forward: so far they were padding alone."""
        assert self.centre is not None
        means = prompt_mean(key, tuple(max(0, pad - before) for pad in padding), self.spec.centre_tokens)
        begin = torch.tensor([pad >= before for pad in self.padding], device=self.device)
        self.centre = torch.where(begin.view(-1, 1, 1), means, self.centre)

    def _append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        state: dict[str, torch.Tensor],
        after: int,
        padding: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new tokens, and returns the pages and the table that hold them."""

        def append(table: PageTable) -> tuple[torch.Tensor, torch.Tensor]:
            _append(self.plan.words, key, value, lengths, table.pool.storage, table.tensor, flag=self.flag, **state)
            return table.pool.storage, table.tensor

        return self._with_room(after, padding, append)

    def _visible(
        self, mask: MaskRequest | torch.Tensor | None, options: dict[str, Any], before: int, new: int
    ) -> tuple[tuple[int, ...], int]:
        """The padding of each sequence and the sliding window of a forward; raises for what `attend` does not know."""
        for name in _UNKNOWN_OPTIONS:
            if options.get(name) is not None and options[name] is not False:
                raise NotImplementedError(f"`{name}` is not supported with a TurboQuantCache")
        after = before + new
        if type(mask) is MaskRequest:
            if mask.positions != after:
                back = before and all(layer.can_crop_to(before) for layer in self._shared.layers)
                raise RuntimeError(  # `attend` takes the layers back before it passes this on
                    f"the cache holds {before} positions here and {mask.positions - new} in its first layer: an "
                    "earlier forward was cut off; "
                    + (f"all layers are back at {before} now: try again" if back else "call cache.reset()")
                )
            padding, sliding = mask.padding(before, new, self.padding), mask.local_size
        elif mask is None:
            padding, sliding = self.padding, int(options.get("sliding_window") or 0)
        else:
            shape = tuple(getattr(mask, "shape", ()))
            raise NotImplementedError(f"`attention_mask` must be [batch, positions], got {shape}: custom masks are not "
                                      "supported with a TurboQuantCache")  # fmt: skip
        if self._released and not 0 < sliding <= before + 1 - self._released:
            raise ValueError(f"the sliding window must be the one of earlier forwards, {self.sliding_window}, got "
                             f"{sliding or 'none'}: pages that fell out of it are freed")  # fmt: skip
        return padding, sliding

    def _fresh(
        self, key: torch.Tensor, value: torch.Tensor, before: int, padding: tuple[int, ...], several: bool
    ) -> dict[str, torch.Tensor]:
        """What `attend` is to read instead of the stored window, for several queries: the earlier ones need what later
        tokens push out. Keeps it for `crop` as well, if that was asked for."""
        if self.window_k is None or self.window_v is None or not (self.record_past or several):
            return {}
        window = self.window_k.clone(), self.window_v.clone()
        if self.record_past:
            self.past.add(before, window)
            self.past.add_fresh(before, (key, value), window, padding)
        if not several:
            return {}
        return {"window_k": window[0], "window_v": window[1], "fresh_k": key, "fresh_v": value}

    def _with_room(self, after: int, padding: tuple[int, ...], write: Callable[[PageTable], _Result]) -> _Result:
        """write(table) once there are pages for `after` positions. A failure leaves the table as it was."""
        table = self.table
        assert table is not None
        with table.pool.lock:
            undo = None if after <= table.ready else self._reserve(table, after, padding)
            try:
                return write(table)
            except BaseException as error:
                if undo is not None:
                    undo()
                if self.window_k is not None and getattr(error, "stored", False):
                    self.damaged = True  # what they pushed out of the window is gone
                raise

    def reserve(self, positions: int) -> None:
        """Makes room for that many positions of each sequence, so that no forward up to there has to allocate: pages,
        sinks and window keep their places. The layer holds tokens already."""
        assert self.table is not None
        if positions > self.exact_ready:
            self.make_exact_room(positions)
        with self.table.pool.lock:
            if positions > self.table.ready:
                self._reserve(self.table, positions, self.padding)

    @property
    def ready(self) -> float:
        """Positions that there is room for."""
        assert self.table is not None
        return min(self.table.ready, self.exact_ready)

    @outside_autograd
    def make_exact_room(self, positions: int) -> None:
        """Rows of sinks and window for that many positions. A failure leaves them as they were."""
        grown: dict[str, torch.Tensor] = {}
        sinks, window = exact_rows(self.spec, positions)
        nothing = torch.empty((self.batch_size, self.kv_heads, 0, self.head_dim), dtype=self.dtype, device=self.device)
        for side, need, most in (("sink", sinks, self.spec.sinks), ("window", window, self.spec.window)):
            for name in (f"{side}_k", f"{side}_v"):
                held = nothing if (found := getattr(self, name)) is None else found
                if (rows := with_room(held.shape[2], need, most)) > held.shape[2]:
                    sink = side == "sink"
                    grown[name] = grown_sinks(held, rows) if sink else laid_out(held, rows, self.spec.sinks)
        self.hold_exact(grown)

    def hold_exact(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes these for "sink_k", "sink_v", "window_k", "window_v"; those that are not named stay."""
        self.__dict__.update(tensors)
        sinks, window = rows_of(self.sink_k), rows_of(self.window_k)
        whole = (sinks, window) == (self.spec.sinks, self.spec.window)
        self.exact_ready = math.inf if whole else sinks + window

    def _reserve(self, table: PageTable, after: int, padding: tuple[int, ...]) -> Callable[[], None]:
        if self.sliding_window:
            self._release()
        undo = table.reserve(self._packed(self.tokens, padding), self._packed(after, padding))
        exact = self.spec.sinks + self.spec.window
        table.ready = min((len(row) * PAGE_TOKENS + exact + pad for row, pad in zip(table.rows, padding)), default=-1)
        return undo

    def _release(self) -> None:
        """Frees the pages that no query sees any more, but for one page that `crop` may need."""
        assert self.table is not None
        self._released = max(self._released, self.tokens - self.sliding_window + 1 - PAGE_TOKENS)
        self.table.release_before([self._released - pad - self.spec.sinks for pad in self.padding])

    def _state(self) -> dict[str, torch.Tensor]:
        """The operators' arguments beside pages and plan; those that are None are left out, which is quicker."""
        state = {
            "sink_k": self.sink_k,
            "sink_v": self.sink_v,
            "window_k": self.window_k,
            "window_v": self.window_v,
            "key_rotation": self.rotations["key"],
            "value_rotation": self.rotations["value"],
            "key_centre": self.centre,
            **self.split,
            **self.calibrated,
        }
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    # ---- accounting ----

    def _described(self) -> str:
        heads = f"{self.kv_heads} KV heads of {self.head_dim} channels"
        return f"{self.tokens} positions of {self.batch_size} sequences with {heads} in {self.dtype} on {self.device}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(part, tensor) of all that this layer alone holds."""
        parts = {"pages": ("pages",), "block_table": ("block_table",), "centre": ("centre",), "flag": ("flag",),
                 "sinks": ("sink_k", "sink_v"), "window": ("window_k", "window_v")}  # fmt: skip
        for part, names in parts.items():
            for name in names:
                if (held := getattr(self, name)) is not None:
                    yield part, held
        yield from (("past windows", held) for _, pair in self.past.snapshots for held in pair)
        yield from (("rotation", held) for held in self.split.values())
        yield from (("calibration", held) for held in self.calibrated.values())

    def report(self) -> LayerReport:
        parts: dict[str, int] = {}
        for part, tensor in self.tensors():
            parts[part] = parts.get(part, 0) + tensor.untyped_storage().nbytes()
        released = sum(row.count(RELEASED) for row in self.table.rows) if self.table is not None else 0
        tokens = sum(self.tokens - pad for pad in self.padding) - PAGE_TOKENS * released
        numbers = 2 * tokens * self.kv_heads * self.head_dim if tokens else 0
        return LayerReport(self.index, tokens, numbers, parts)


def describe_flag(flag: int) -> str:
    """What the `flag` of `append` says, if it is not 0 (turboquant_cuda.h)."""
    side = "value" if flag >> 62 & 1 else "key"
    sequence, position = flag >> 32 & 0x3FFFFFFF, (flag & 0xFFFFFFFF) - 1
    return f"the {side} of position {position} of sequence {sequence} held a number that is not finite or above 16384"
