"""The storage of one layer of a TurboQuantCache: how forwards write to its tensors (`tensors`, `room`), and how to go
back. A failed write changes nothing, `crop_to` forgets tokens, `take_back` undoes a forward that failed elsewhere.

A step reads no device tensor back: lengths and pages are counted on the host, from the padding of the first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..spec import CacheSpec
from .attend import attend_in_parts, reads_in_parts
from .pages import outside_autograd
from .rewind import PastWindows
from .room import LayerRoom
from .shared import Common
from .transforms import prompt_rotations

__all__ = ["LayerStorage"]

_append = torch.ops.turboquant.append.default  # the overload itself: nothing is looked up in a decode step
_attend = torch.ops.turboquant.attend.default
_recode = torch.ops.turboquant.recode.default
_append_attend = torch.ops.turboquant.append_attend.default


class LayerStorage(LayerRoom):
    """The tokens of one layer, and what is needed to go back.

    record_past   whether every forward keeps a copy of the window
    past          these copies
    damaged       whether the contents are wrong, because a write or its undoing failed half-way
    owes_release  whether a forward has kept pages that fell out of the sliding window, for layers behind this one
    least         no crop keeps fewer positions: padding between or behind tokens up to there lies elsewhere in a
                  shorter text
    """

    def __init__(self, index: int, spec: CacheSpec, shared: Common) -> None:
        self.record_past = False
        super().__init__(index, spec, shared)

    def reset(self) -> None:
        """Frees all memory. The next forward may have another batch size, dtype or device."""
        super().reset()
        self.damaged = self.owes_release = False
        self.past, self.least = PastWindows(), 0
        # before the current forward: padding and `least`, past windows
        self._earlier: tuple[tuple[tuple[int, ...], int], Any] = (((), 0), [])

    # ---- writing ----

    def begin(self) -> None:
        """Marks the beginning of a forward, to which `take_back` returns."""
        self._earlier = (self.padding, self.least), self.past.snapshots

    def abort(self) -> None:
        """Restores past windows after a forward that failed before it stored anything here."""
        self.past.snapshots = self._earlier[1]

    def learn(self, key: torch.Tensor, value: torch.Tensor, padding: tuple[int, ...]) -> None:
        """Finds outlier channels in the first tokens, which come after padding alone. `reset` undoes it, also after a
        failed first forward."""
        if self.spec.outliers == "prompt" and all(pad == self.tokens for pad in self.padding):
            self.hold_split(prompt_rotations(self.spec, key, value, tuple(pad - self.tokens for pad in padding)))

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        padding: tuple[int, ...],
        sliding_window: int,
        how: dict[str, Any] | None,
        return_lse: bool = False,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Stores the tokens of a forward, and attends from their queries to all that is stored.

        query          [batch, query_heads, tokens, head_dim];  key, value [batch, kv_heads, tokens, head_dim]
        lengths        int32 [batch], lengths of the sequences with these tokens
        padding, sliding_window   those of the forward
        how            for `attend`: softmax_scale, sliding_window, softcap and perhaps starts; None: only store
        return_lse     also return the logarithms of the softmax's denominators
        keep           later layers read these tokens: pages that fall out of a sliding window stay until a later
                       forward
        Returns (out, lse): out [batch, query_heads, tokens, head_dim], lse float32 [batch, query_heads, tokens] or
        None; None for `how`=None.
        """
        table, new, attended = self.table, key.shape[2], None
        before, after = self.tokens, self.tokens + new
        assert table is not None
        if self.owes_release:
            self.release()
            table.compact()
        self.owes_release = keep and new > 1 and sliding_window > 0
        if how is not None and reads_in_parts(self, new):
            attended = attend_in_parts(self, query, key, value, lengths, padding, how, return_lse)
            how = None
        if after > self.exact_ready:
            self.make_exact_room(after)
        if self.record_past and (ring := self.ring()) is not None:
            window = ring[0].clone(), ring[1].clone()
            self.past.add(before, window)
            self.past.add_fresh(before, (key, value), window, padding)
        words, arguments = self.plan.words, self.arguments()
        # Forks may attend in several threads at the same time, but not write; `append_attend` has no starts.
        apart = how is not None and (table.pool.tables > 1 or "starts" in how)
        seen = arguments
        if apart and new > 1 and self.window_k is not None and self.window_v is not None:
            # The first of the new tokens see what the last ones push out of the window.
            earlier = {"window_k": self.window_k.clone(), "window_v": self.window_v.clone()}
            seen = {**arguments, **earlier, "fresh_k": key, "fresh_v": value}
        with table.pool.lock:
            undo = None if after <= table.ready else self.reserve_pages(after, padding)
            where = self.pages, self.block_table
            try:
                if how is not None:
                    schedule = None
                    if "starts" not in how:  # a schedule would have to be made with them
                        schedule = self.shared.schedule(self, query, lengths, after, padding, sliding_window)
                if how is None or apart:
                    _append(
                        words, key, value if self.has_values else None, lengths, *where, flag=self.flag, **arguments
                    )
                else:
                    step, lse = {"flag": self.flag, "schedule": schedule, **how, **arguments}, None
                    if return_lse:
                        step["lse"] = lse = query.new_empty(query.shape[:3], dtype=torch.float32)
                    attended = _append_attend(words, query, key, value, lengths, *where, **step), lse
            except BaseException as error:
                if undo is not None:
                    undo()
                if self.window_k is not None and getattr(error, "stored", False):
                    self.damaged = True  # the tokens that left the window are lost
                raise
        self.tokens, self.padding, self.sliding_window = after, padding, sliding_window
        if how is not None and apart:
            attended = _attend(words, query, *where, lengths, schedule=schedule, **how, **seen)
        if (
            sliding_window and new > 1 and not keep
        ):  # the earlier queries have read these pages: now forks may reuse them
            self.release()
            table.compact()
        return attended

    @outside_autograd
    def fall(self, key_bits: int, value_bits: int) -> None:
        """Recodes the pages to fewer bits, into new memory. No other table may refer to them."""
        spec = self.spec
        self.spec = spec.with_(key_bits=key_bits, value_bits=value_bits)
        if self.table is None:
            return
        pool, plan = self.table.pool, self.plan_for(self.kv_heads, self.head_dim)
        with pool.lock:
            try:
                pool.storage = _recode(self.plan.words, pool.storage, plan.words)
            except BaseException:
                self.spec = spec
                raise
        self.plan = plan

    # ---- going back ----

    def can_crop_to(self, tokens: int) -> bool:
        """Whether a crop would be exact: every token that the next query sees is stored as in a shorter text."""
        window, first = self.spec.window, self.spec.sinks + min(self.padding, default=0)
        if tokens >= self.tokens:
            return True
        if tokens < self.least or self.has_released(tokens):
            return False
        inside = window == 0 or self.tokens <= first + window
        return inside or self.past.reaches(tokens, self.tokens, window, first)

    @outside_autograd
    def crop_to(self, keep: int) -> None:
        """Keeps the first `keep` positions, 0 < keep. `can_crop_to(keep)` must be true."""
        if keep < self.tokens:
            if self.window_k is not None and self.past.snapshots:
                self.bring_back()  # `move` leaves past windows where they are
                now = self.ring()
                assert now is not None
                self.window_k, values = self.past.ring(keep, self.tokens, now, self.padding, self.spec.sinks)
                if self.has_values:
                    self.window_v = values
            if self.table is not None:
                self.table.truncate(self.packed(keep, self.padding))
            self.tokens = keep
            if self.table is not None:
                self.table.compact()
        self.past.cropped(keep)
        self.begin()  # so that `take_back` does not restore forgotten tokens

    def take_back(self, positions: int) -> None:
        """Takes the layer back to `positions`, before the failed forward. If that is impossible, it becomes damaged."""
        if self.tokens <= positions:
            return
        (self.padding, self.least), snapshots = self._earlier
        try:
            self.damaged = self.damaged or not self.can_crop_to(positions)
            if not self.damaged:
                self.crop_to(positions)
                self.past.snapshots = [one for one in snapshots if one[0] <= positions]
        except RuntimeError:  # no memory for the earlier window
            self.damaged = True

    # ---- sequences ----

    def select(self, sequences: Sequence[int]) -> None:
        """Makes sequence b what sequence sequences[b] was. Raises RuntimeError if there is no memory for that."""
        super().select(sequences)
        self.past = PastWindows()
        self.begin()

    @outside_autograd
    def fork(self, shared: Common) -> LayerStorage:
        """Returns a layer with the same tokens, without past windows, for another cache, whose layers have `shared`."""
        other = type(self)(self.index, self.spec, shared)
        other.record_past = self.record_past
        if self.table is not None:
            self.share(other)
            other.past = PastWindows()
            other.begin()
        return other
