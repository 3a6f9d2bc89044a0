"""Which rows hold the exact first tokens of which block, on a device: `rows.Sinks` for block tables that are not on the
host. The rules are the same. Nothing is read back: a step costs a few small operations, queued before the model.

A block and its row name each other: `row_of` finds the row of a block, and `owner` says whether it still belongs to the
block. So one write takes a row away.
"""

from __future__ import annotations

import torch

from .rows import NULL_BLOCK, PAGE

__all__ = ["DeviceSinks"]


class DeviceSinks:
    """Rows of the first `size` tokens of sequences.

    sliding_window  how many tokens the layers see, 0: all (`batch.ExactRows`)
    counts          int64 [3] on the device: look-ups that found a row, that did not, and requests without a look-up
    """

    def __init__(self, rows: int, size: int, blocks: int, device: torch.device, sliding_window: int = 0) -> None:
        self.rows, self.size, self.sliding_window = rows, size, sliding_window

        def table(length: int, value: int) -> torch.Tensor:
            return torch.full((length,), value, dtype=torch.int64, device=device)

        self.row_of = table(blocks, 0)  # row of each block; valid if `owner` of the row is the block
        # One entry behind the rows takes the writes of requests without a row. It has no owner and no tokens.
        self.owner, self.stop, self.used = table(rows + 1, -1), table(rows + 1, 0), table(rows + 1, 0)
        self.counts = table(3, 0)
        self._ones = table(1, 1)
        self._step = 0

    def rows_of(
        self, query_start_loc: torch.Tensor, lengths: torch.Tensor, block_table: torch.Tensor, max_query_len: int,
        *, begins: bool, enters: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Notes all that a batch writes, and returns its `Batch.sink_rows`, int32 [requests].

        begins  whether any request may be at its first token
        enters  whether any request may write the first token of a page
        """
        self._step += 1
        tokens = query_start_loc.diff().long()
        lengths = lengths.long()
        past, new = lengths - tokens, tokens > 0
        if enters:
            self._drop(block_table, past, lengths, new, max_query_len)
        first = block_table[:, 0].long()
        row = self.row_of[first]
        sought = new & (first != NULL_BLOCK)
        if self.sliding_window:  # not where the window is past the first tokens: `ExactRows`
            sought &= past - self.size + 1 < self.sliding_window
        hits = sought & (self.owner[row] == first) & (self.stop[row] >= past.clamp(max=self.size))
        if begins:
            begun = sought & (past == 0) & ~hits
            row = torch.where(begun, self._claim(first, row, hits, begun), row)
            hits |= begun
        mine = torch.where(hits, row, self.rows)
        self.used.index_fill_(0, mine, self._step)
        written = torch.where(past < self.size, mine, self.rows)
        self.stop[written] = lengths.clamp(max=self.size)
        self.counts.index_add_(0, torch.where(sought, (~hits).long(), 2), self._ones.expand(len(hits)))
        return torch.where(hits, row, -1).int()

    def _drop(
        self, block_table: torch.Tensor, past: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor, most: int
    ) -> None:
        """Takes their rows from blocks that are written as pages behind the first one, which have no row."""
        width = (most + PAGE - 2) // PAGE + 1
        page = past[:, None] // PAGE + torch.arange(width, device=past.device)
        written = new[:, None] & (page > 0) & (page * PAGE < lengths[:, None])
        block = block_table.gather(1, page.clamp(max=block_table.shape[1] - 1)).long()
        row = self.row_of[torch.where(written, block, NULL_BLOCK)]
        gone = torch.where(written & (self.owner[row] == block), row, self.rows)
        self.owner.index_fill_(0, gone.flatten(), -1)

    def _claim(self, block: torch.Tensor, row: torch.Tensor, hits: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
        """Assigns a row to each request that has `begun`: free rows, then those not used for longest. Returns it."""
        self.used.index_fill_(0, torch.where(hits, row, self.rows), self._step)
        age = torch.where(self.owner[: self.rows] < 0, -1, self.used[: self.rows])
        oldest = age.argsort(stable=True)
        new = oldest[(begun.cumsum(0) - 1).clamp(0, self.rows - 1)]
        self.owner[torch.where(begun, new, self.rows)] = torch.where(begun, block, -1)
        self.row_of[torch.where(begun, block, NULL_BLOCK)] = torch.where(begun, new, 0)
        return new
