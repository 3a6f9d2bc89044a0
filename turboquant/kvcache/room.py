"""Room for more tokens of a layer: pages, sinks and window that grow, move, are shared and are freed.

Growth: when a sequence fills its last page, the needed pages are added, or 1/64 of the present ones if that is more. So
at most 1/64 is unused. Adding copies the layer's packed bytes. A sequence needs a page every 128 tokens, and every step
reads all its packed bytes anyway: if the sequences of a batch grow together, the copies add less than 2 % to the memory
traffic of attention. Forks, beams and repeated sequences share pages (`pages.PageTable`). A layer with a sliding window
frees pages that no query can see any more, except one that `crop` may need. Later tokens use them; after a prompt or a
crop, they go back to the allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..plan import PAGE_TOKENS
from .exact import exact_rows, laid_out, with_room
from .pages import PageTable, outside_autograd
from .tensors import LayerTensors

__all__ = ["LayerRoom"]


class LayerRoom(LayerTensors):
    """A layer's tensors, where they are and how many tokens fit."""

    # ---- device ----

    @outside_autograd
    def move(self, device: torch.device) -> None:
        """Moves pages, table, sinks and window. Forks that share the pages bring these back when they are used."""
        if self.table is None or self.is_on(device):
            return
        moved = self._own(lambda tensor: tensor.to(device))
        self.table.move(device)
        self.__dict__.update(moved)

    def is_on(self, device: torch.device) -> bool:
        """Whether pages, table, sinks and window are on a device. A fork moves the pages that it shares, and these
        alone."""
        rows = self.sink_k if self.window_k is None else self.window_k
        return self.pages.device == self.block_table.device == device and (rows is None or rows.device == device)

    def bring_back(self) -> None:
        """Moves the layer to the device that it was made for."""
        if self.table is not None:
            self.move(self.device)

    def _own(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Applies `change` to sinks, window and flag, and returns the results by name."""
        flag = {} if self.flag is None else {"flag": self.flag}
        return {name: change(tensor) for name, tensor in {**self.exact(), **flag}.items()}

    # ---- room ----

    def reserve(self, positions: int) -> None:
        """Makes room for this many positions of each sequence, so that forwards up to there do not allocate, and pages,
        sinks and window keep their addresses. The layer must hold tokens."""
        assert self.table is not None
        if positions > self.exact_ready:
            self.make_exact_room(positions)
        with self.table.pool.lock:
            if positions > self.table.ready:
                self.reserve_pages(positions, self.padding)

    @property
    def ready(self) -> float:
        """Positions that there is room for."""
        assert self.table is not None
        return min(self.table.ready, self.exact_ready)

    @outside_autograd
    def make_exact_room(self, positions: int) -> None:
        """Makes room for the exact tokens of that many positions. A failure leaves sinks and window as they were."""
        sinks, window = exact_rows(self.spec, positions)
        rows = with_room(self.sinks, sinks, self.spec.sinks), with_room(self.window, window, self.spec.window)
        self.hold_exact(self.exact_of_rows(*rows))

    def exact_of_rows(self, sinks: int, window: int) -> dict[str, torch.Tensor]:
        """Returns those of `exact` that must grow to have this many rows, in new tensors of that size."""
        grown: dict[str, torch.Tensor] = {}
        nothing = torch.empty(
            (len(self.padding), self.kv_heads, 0, self.head_dim), dtype=self.dtype, device=self.device
        )
        for side, rows in (("sink", sinks), ("window", window)):
            for name in (f"{side}_{part}" for part in ("kv" if self.has_values else "k")):
                tensor = nothing if (present := getattr(self, name)) is None else present
                if rows > tensor.shape[2]:
                    if side == "sink":  # zeros behind the present rows
                        grown[name] = torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[2]))
                    else:
                        grown[name] = laid_out(tensor, rows, self.spec.sinks)
        return grown

    def reserve_pages(self, after: int, padding: tuple[int, ...]) -> Callable[[], None]:
        """Makes room for packed tokens up to `after` positions, and returns what undoes it. The pool's lock is held."""
        table = self.table
        assert table is not None
        if self.sliding_window:
            self.release()
        undo = table.reserve(self.packed(self.tokens, self.padding), self.packed(after, padding), self._table_before())
        exact = self.spec.sinks + self.spec.window
        table.ready = min((len(row) * PAGE_TOKENS + exact + pad for row, pad in zip(table.rows, padding)), default=-1)
        return undo

    def _table_before(self) -> PageTable | None:
        """The table of the layer before this one, which a forward reaches first."""
        before = self.shared.layer(self.rank - 1)
        return None if before is None else before.table

    def release(self) -> None:
        """Frees the pages that no query sees any more, except one that `crop` may need."""
        assert self.table is not None
        self.released = max(self.released, self.tokens - self.sliding_window + 1 - PAGE_TOKENS)
        self.table.release_before([self.released - pad - self.spec.sinks for pad in self.padding])

    def has_released(self, tokens: int) -> bool:
        """Whether the query behind `tokens` positions would see freed pages through the sliding window."""
        return bool(self.sliding_window) and max(0, tokens - self.sliding_window + 1) < self.released

    # ---- sequences ----

    @outside_autograd
    def select(self, sequences: Sequence[int]) -> None:
        """Makes sequence b what sequence sequences[b] was. Raises RuntimeError if there is no memory for that."""
        self.bring_back()
        table = self.table
        assert table is not None and self.shape is not None
        where = torch.tensor(list(sequences), device=self.device)
        state = {name: tensor.index_select(0, where) for name, tensor in self.exact().items()}
        table.select(sequences, self._table_before())
        self.__dict__.update(state)
        self.padding = tuple(self.padding[b] for b in sequences)
        self.hold_shifts(tuple(self.shifts[b] for b in sequences))
        self.shape = (len(sequences), *self.shape[1:])

    def share(self, other: LayerTensors) -> None:
        """Makes `other`, an empty layer of another cache, hold the same tokens. Pages are shared, sinks and window
        copied."""
        assert self.table is not None
        own = self._own(torch.clone) | {"shared": other.shared, "table": self.table.fork()}
        other.__dict__.update(self.__dict__, **own)
