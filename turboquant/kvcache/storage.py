"""The storage of one layer of a TurboQuantCache, [ sinks | packed pages | window ] (turboquant.h, "the cache"). A
failed write changes nothing, `crop_to` forgets tokens, `take_back` undoes a forward that failed elsewhere.

Each sequence has its own length. Padding on the left of a batch is never stored: token i of sequence b has position
i - padding[b], and is padding if that is negative.

    pages        uint8 [n_pages, kv_heads, record_bytes], zeros where nothing is stored
    block_table  int32 [batch, max_pages]: the page of each 128 packed tokens of a sequence
    sinks        keys and values in the model's dtype, each [batch, kv_heads, sinks, head_dim]
    window       the same, a ring of [batch, kv_heads, window, head_dim]; both have fewer rows, or are None, until there
                 are enough tokens (`exact`)
    calibration  rotations, steps and centres of keys and values (`calibration.tensors`): shared by all caches of a
                 calibration on a device, and counted in each
    moments      wave and metric of the keys (`moments.tensors`), likewise

Growth: when a sequence fills its last page, the needed pages are added, or 1/64 of the present ones if that is more. So
at most 1/64 is unused. Adding copies the layer's packed bytes. A sequence needs a page every 128 tokens, and every step
reads all its packed bytes anyway: if the sequences of a batch grow together, the copies add less than 2 % to the memory
traffic of attention. Forks, beams and repeated sequences share pages (`pages.PageTable`). A layer with a sliding window
frees pages that no query can see any more, except one that `crop` may need. Later tokens use them; after a prompt or a
crop, they go back to the allocator.

A step reads no device tensor back: lengths and pages are counted on the host, from the padding of the first forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ops as _ops  # noqa: F401  registers torch.ops.turboquant
from ..calibration.tensors import transforms
from ..modes import is_split
from ..moments.tensors import transforms as moments_of
from ..plan import PAGE_TOKENS, Plan
from ..spec import CacheSpec
from .chunk import attention_in_chunk, merged
from .common import Common
from .exact import exact_rows, laid_out, rows_of, with_room
from .pages import PageTable, outside_autograd
from .prompt import prompt_rotations
from .rewind import PastWindows
from .sliding import attention_behind_window, visible_past

__all__ = ["LayerStorage"]

_append = torch.ops.turboquant.append.default  # the overload itself: nothing is looked up in a decode step
_attend = torch.ops.turboquant.attend.default
_append_attend = torch.ops.turboquant.append_attend.default

# From this many new tokens on, PyTorch's own attention over them is faster than `attend` over all tokens. Drafts of
# speculative decoding are usually shorter, and are verified as their tokens would be decoded one by one.
IN_PARTS_FROM = {"cpu": 32, "cuda": 128}

_NOTHING = torch.empty(0)  # the pages of an empty layer
_NONE: torch.Tensor | None = None

# Attributes of a layer for each sequence beside its pages: tensors [batch, ..], or None.
_STATE = ("sink_k", "sink_v", "window_k", "window_v")


class LayerStorage:
    """The tokens of one layer.

    tokens          positions seen, padding included: what transformers calls the sequence length
    padding         how many of them in front of each sequence are padding, which is not stored
    sliding_window  of the last forward, 0: none
    released        the pages of positions before this one are freed
    damaged         the contents are wrong: a write or its undoing failed half-way
    shape           (batch, kv_heads, head_dim, dtype, device), None while there is nothing
    """

    def __init__(self, index: int, spec: CacheSpec, shared: Common) -> None:
        self.index, self.spec, self.shared = index, spec, shared
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Frees all memory. The next forward may have another batch size, dtype or device."""
        self.tokens = 0
        self.padding: tuple[int, ...] = ()
        self.damaged = False
        self.shape: tuple[Any, ...] | None = None
        self.table: PageTable | None = None
        self.past = PastWindows()
        self.sliding_window = 0
        self.released = 0
        self._earlier: tuple[Any, Any] = ((), [])  # padding and past windows before the current forward
        self.sink_k = self.sink_v = self.window_k = self.window_v = _NONE
        self.exact_ready = 0.0  # positions that sinks and window have rows for
        self.rotations: dict[str, torch.Tensor | None] = {"key": None, "value": None}
        self.split: dict[str, torch.Tensor] = {}  # rotations that split off the prompt's outlier channels
        self.flag = _NONE  # of `append` on CUDA, int64 [1]
        self.calibrated: dict[str, torch.Tensor] = {}  # arguments of the operators
        self.measured: dict[str, torch.Tensor] = {}  # the same

    @outside_autograd
    def start(self, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Empties the storage and fixes its shape. ValueError for a shape that the spec or the calibration refuses."""
        plan = self._plan(kv_heads, head_dim)
        found = self.shared.calibration
        if found is not None and (found.kv_heads, found.head_dim) != (kv_heads, head_dim):
            raise ValueError(f"layer {self.index}: keys must have the {found.kv_heads} KV heads of {found.head_dim} "
                             f"channels of the calibration, got {kv_heads} of {head_dim}")  # fmt: skip
        self.reset()
        self.plan, self.dtype, self.device = plan, dtype, device
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.padding = (0,) * batch
        self.table = PageTable.empty(batch, kv_heads, PAGE_TOKENS * self.spec.bytes_per_token(head_dim), device)
        if device.type == "cuda":
            self.flag = torch.zeros(1, dtype=torch.int64, device=device)
        for side in ("key", "value"):
            if not is_split(self.spec, side) and self.spec.rotation_of(side) != "svd":
                self.rotations[side] = self.shared.rotation(self.spec, side, head_dim, device)
        if found is not None:
            self.calibrated = transforms(found, self.spec, self.index, device)
        if self.spec.measured and self.shared.moments is not None:
            self.measured = moments_of(self.shared.moments, self.spec, self.index, device)
        self.shape = (batch, kv_heads, head_dim, dtype, device)

    def _plan(self, kv_heads: int, head_dim: int) -> Plan:
        moments = self.shared.moments
        if not self.spec.measured or moments is None:
            return self.spec.plan(head_dim)
        measured = moments.layers[self.index]
        heads, channels = measured.centre.shape
        if (heads, channels) != (kv_heads, head_dim):
            raise ValueError(f"layer {self.index}: keys must have the {heads} KV heads of {channels} channels of the "
                             f"moments, got {kv_heads} of {head_dim}")  # fmt: skip
        return self.spec.plan(head_dim, *measured.sizes)

    def __str__(self) -> str:
        heads = f"{self.kv_heads} KV heads of {self.head_dim} channels"
        return f"{self.tokens} positions of {len(self.padding)} sequences with {heads} in {self.dtype} on {self.device}"

    @property
    def pages(self) -> torch.Tensor:
        """uint8 [n_pages, kv_heads, record_bytes]; forks and beams may share it."""
        return _NOTHING if self.table is None else self.table.pool.storage

    @property
    def block_table(self) -> torch.Tensor:
        return _NOTHING if self.table is None else self.table.tensor

    def packed(self, positions: int, padding: Sequence[int]) -> list[int]:
        """Packed tokens of each sequence at this many positions."""
        exact = self.spec.sinks + self.spec.window
        return [max(0, positions - pad - exact) for pad in padding]

    # ---- device ----

    @outside_autograd
    def move(self, device: torch.device) -> None:
        """Pages, table, sinks and window; forks that share the pages bring those back when they are used."""
        if self.table is None or self.pages.device == self.block_table.device == device:
            return
        moved = {name: held.to(device) for name in (*_STATE, "flag") if (held := getattr(self, name)) is not None}
        self.table.move(device)
        self.__dict__.update(moved)

    def bring_back(self) -> None:
        """To the device that it was made for."""
        if self.table is not None:
            self.move(self.device)

    # ---- writing ----

    def begin(self) -> None:
        """A forward begins: `take_back` goes back to here."""
        self._earlier = self.padding, self.past.snapshots

    def abort(self) -> None:
        """The forward failed before it stored anything here."""
        self.past.snapshots = self._earlier[1]

    def learn(self, key: torch.Tensor, value: torch.Tensor, padding: tuple[int, ...]) -> None:
        """Finds outlier channels in the first tokens. `reset` undoes it, also after a failed first forward."""
        if self.tokens == 0 and self.spec.outliers == "prompt":
            self.split = prompt_rotations(self.spec, key, value, padding)

    def arguments(self) -> dict[str, torch.Tensor]:
        """The operators' arguments beside pages and plan. Those that are None are left out, which is faster."""
        state = {
            "sink_k": self.sink_k,
            "sink_v": self.sink_v,
            "window_k": self.window_k,
            "window_v": self.window_v,
            "key_rotation": self.rotations["key"],
            "value_rotation": self.rotations["value"],
            **self.split,
            **self.calibrated,
            **self.measured,
        }
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        padding: tuple[int, ...],
        sliding_window: int,
        how: dict[str, Any] | None,
    ) -> torch.Tensor | None:
        """Stores the tokens of a forward, and attends from their queries to all that is stored.

        query          [batch, query_heads, tokens, head_dim];  key, value [batch, kv_heads, tokens, head_dim]
        lengths        int32 [batch], of the sequences with these tokens
        padding, sliding_window   of the forward
        how            softmax_scale, sliding_window and softcap of the operator `attend`; None: store only
        Returns [batch, query_heads, tokens, head_dim], or None for `how`=None.
        """
        new = key.shape[2]
        before, after = self.tokens, self.tokens + new
        attended: torch.Tensor | None = None
        if how is not None and self._in_parts(new):
            attended, how = self._attend_in_parts(query, key, value, lengths, padding, how), None
        if after > self.exact_ready:
            self.make_exact_room(after)
        if self.record_past and self.window_k is not None and self.window_v is not None:
            window = self.window_k.clone(), self.window_v.clone()
            self.past.add(before, window)
            self.past.add_fresh(before, (key, value), window, padding)
        state = self.arguments()
        assert self.table is not None
        where = self.pages, self.block_table
        # Forks may attend in several threads at the same time, but not write.
        apart = how is not None and self.table.pool.tables > 1 and (new == 1 or self.window_k is None)

        def write(table: PageTable) -> None:
            nonlocal where, attended
            where = table.pool.storage, table.tensor
            if how is None or apart:
                _append(self.plan.words, key, value, lengths, *where, flag=self.flag, **state)
                return
            schedule = self._schedule(query, where, lengths, after, padding, sliding_window)
            attended = _append_attend(
                self.plan.words, query, key, value, lengths, *where, flag=self.flag, schedule=schedule, **how, **state
            )

        self._with_room(after, padding, write)
        self.tokens, self.padding, self.sliding_window = after, padding, sliding_window
        if how is not None and apart:
            schedule = self._schedule(query, where, lengths, after, padding, sliding_window)
            attended, _ = _attend(self.plan.words, query, *where, lengths, schedule=schedule, **how, **state)
        if sliding_window and new > 1:  # the earlier queries have read these pages: now forks may reuse them
            self._release()
            self.table.compact()
        return attended

    def _in_parts(self, new: int) -> bool:
        """Whether the queries of a forward attend to its own tokens, not packed yet, and to stored ones separately."""
        if self.spec.prefill == "packed" or not self.tokens:
            return False
        return new >= IN_PARTS_FROM.get(self.device.type, 2)

    def _attend_in_parts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        padding: tuple[int, ...],
        how: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of a forward's queries before its tokens are stored: `attend` over the stored tokens and PyTorch's
        own attention over the new ones, merged into one softmax. If a sliding window hides some tokens, PyTorch's alone
        (`sliding`). Arguments and result are those of `store`."""
        before, new, sliding_window = self.tokens, key.shape[2], how["sliding_window"]
        if sliding_window and before + new - min(padding) > sliding_window:  # which hides some of it from some queries
            past = visible_past(self, lengths, new, padding, sliding_window)
            out = attention_behind_window(query, past, key, value, before, lengths, sliding_window,
                                          how["softmax_scale"], how["softcap"])  # fmt: skip
            return out.transpose(1, 2)
        state = self.arguments()
        sizes, exact = {"sink": rows_of(self.sink_k), "window": rows_of(self.window_k)}, 0
        earlier = []
        if sum(sizes.values()) <= before - max(padding):  # every row holds a token: PyTorch may read them too
            if self.plan.wave_pairs:  # except sinks: their number gives `attend` the positions of packed tokens
                del sizes["sink"]
            exact = sum(sizes.values())
            earlier = [(state.pop(f"{part}_k"), state.pop(f"{part}_v")) for part, rows in sizes.items() if rows]
        pad = tuple(max(0, pad - before) for pad in padding)
        own = attention_in_chunk(query, earlier, key, value, how["softmax_scale"], how["softcap"], pad)
        if before - min(padding) <= exact:
            return own[0]
        assert self.table is not None
        with self.table.pool.lock:  # forks may add pages
            pages, rows_of_pages = self.table.pool.storage, self.table.tensor
        stored = self.shared.earlier(lengths, new + exact)
        equal = self.shared.equal_schedule(before, padding, self.device)
        how = {**how, "sliding_window": 0, "causal": False, "schedule": equal}
        return merged(_attend(self.plan.words, query, pages, rows_of_pages, stored, **how, **state), own)

    def _schedule(
        self,
        query: torch.Tensor,
        where: tuple[torch.Tensor, torch.Tensor],
        lengths: torch.Tensor,
        after: int,
        padding: tuple[int, ...],
        sliding_window: int,
    ) -> torch.Tensor | None:
        """`Common.schedule` of a forward; where: (pages, block_table)."""
        sizes = rows_of(self.sink_k), rows_of(self.window_k), sliding_window
        return self.shared.schedule(after, padding, self.plan, sizes, (query, *where, lengths))

    def _with_room(self, after: int, padding: tuple[int, ...], write: Callable[[PageTable], None]) -> None:
        """write(table) once there are pages for `after` positions. A failure leaves the table as it was."""
        table = self.table
        assert table is not None
        with table.pool.lock:
            undo = None if after <= table.ready else self._reserve(table, after, padding)
            try:
                write(table)
            except BaseException as error:
                if undo is not None:
                    undo()
                if self.window_k is not None and getattr(error, "stored", False):
                    self.damaged = True  # the tokens that left the window are lost
                raise

    # ---- room ----

    def reserve(self, positions: int) -> None:
        """Makes room for this many positions of each sequence, so that forwards up to there do not allocate, and pages,
        sinks and window keep their addresses. The layer must hold tokens."""
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
        nothing = torch.empty(
            (len(self.padding), self.kv_heads, 0, self.head_dim), dtype=self.dtype, device=self.device
        )
        for side, need, most in (("sink", sinks, self.spec.sinks), ("window", window, self.spec.window)):
            for name in (f"{side}_k", f"{side}_v"):
                held = nothing if (found := getattr(self, name)) is None else found
                if (rows := with_room(held.shape[2], need, most)) > held.shape[2]:
                    if side == "sink":  # zeros behind the rows there are
                        grown[name] = torch.nn.functional.pad(held, (0, 0, 0, rows - held.shape[2]))
                    else:
                        grown[name] = laid_out(held, rows, self.spec.sinks)
        self.hold_exact(grown)

    def hold_exact(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sets those of "sink_k", "sink_v", "window_k" and "window_v" that `tensors` names."""
        self.__dict__.update(tensors)
        sinks, window = rows_of(self.sink_k), rows_of(self.window_k)
        whole = (sinks, window) == (self.spec.sinks, self.spec.window)
        self.exact_ready = math.inf if whole else sinks + window

    def _reserve(self, table: PageTable, after: int, padding: tuple[int, ...]) -> Callable[[], None]:
        if self.sliding_window:
            self._release()
        undo = table.reserve(self.packed(self.tokens, padding), self.packed(after, padding), self._table_before())
        exact = self.spec.sinks + self.spec.window
        table.ready = min((len(row) * PAGE_TOKENS + exact + pad for row, pad in zip(table.rows, padding)), default=-1)
        return undo

    def _table_before(self) -> PageTable | None:
        """That of the layer before this one, which a forward comes to first."""
        before = self.shared.layer(self.index - 1)
        return None if before is None else before.table

    def _release(self) -> None:
        """Frees the pages that no query sees any more, except one that `crop` may need."""
        assert self.table is not None
        self.released = max(self.released, self.tokens - self.sliding_window + 1 - PAGE_TOKENS)
        self.table.release_before([self.released - pad - self.spec.sinks for pad in self.padding])

    # ---- going back ----

    def can_crop_to(self, tokens: int) -> bool:
        """Whether a crop would be exact: every token that the next query sees is stored as in a shorter text."""
        window, first = self.spec.window, self.spec.sinks + min(self.padding, default=0)
        if tokens >= self.tokens:
            return True
        if self.has_released(tokens):
            return False
        inside = window == 0 or self.tokens <= first + window
        return inside or self.past.reaches(tokens, self.tokens, window, first)

    def has_released(self, tokens: int) -> bool:
        """Whether pages were freed that a sliding window of this many positions would see."""
        return bool(self.sliding_window) and max(0, tokens - self.sliding_window + 1) < self.released

    @outside_autograd
    def crop_to(self, keep: int) -> None:
        """`crop` to `keep` positions, 0 < keep; `can_crop_to(keep)` is true."""
        if keep < self.tokens:
            if self.window_k is not None and self.window_v is not None and self.past.snapshots:
                self.bring_back()  # past windows have stayed where they were
                now = self.window_k, self.window_v
                window = self.past.ring(keep, self.tokens, now, self.padding, self.spec.sinks)
                self.window_k, self.window_v = window
            if self.table is not None:
                self.table.truncate(self.packed(keep, self.padding))
            self.tokens = keep
            if self.table is not None:
                self.table.compact()
        self.past.cropped(keep)
        self.begin()  # so that `take_back` does not restore forgotten tokens

    def take_back(self, positions: int) -> None:
        """Restores the layer at `positions`, before the forward that failed. It is damaged if that is not possible."""
        if self.tokens <= positions:
            return
        padding, snapshots = self._earlier
        try:
            self.damaged = self.damaged or not self.can_crop_to(positions)
            if not self.damaged:
                self.crop_to(positions)
                self.padding, self.past.snapshots = padding, [one for one in snapshots if one[0] <= positions]
        except RuntimeError:  # no memory for the earlier window
            self.damaged = True

    # ---- sequences ----

    @outside_autograd
    def select(self, sequences: Sequence[int]) -> None:
        """Sequence b becomes what sequence sequences[b] was; RuntimeError where there is no memory for that."""
        self.bring_back()
        table = self.table
        assert table is not None and self.shape is not None
        where = torch.tensor(list(sequences), device=self.device)
        state = {name: held.index_select(0, where) for name in _STATE if (held := getattr(self, name)) is not None}
        table.select(sequences, self._table_before())
        self.__dict__.update(state)
        self.past = PastWindows()
        self.padding = tuple(self.padding[b] for b in sequences)
        self.begin()
        self.shape = (len(sequences), *self.shape[1:])

    @outside_autograd
    def fork(self, shared: Common) -> LayerStorage:
        """The same tokens for another cache, whose layers have `shared` in common. Pages are shared, sinks and window
        copied."""
        other = LayerStorage(self.index, self.spec, shared)
        other.record_past = self.record_past
        if self.table is not None:
            other.__dict__.update(self.__dict__, shared=shared, table=self.table.fork(), past=PastWindows())
            own = {name: held.clone() for name in (*_STATE, "flag") if (held := getattr(self, name)) is not None}
            other.__dict__.update(own)
            other.begin()
        return other
