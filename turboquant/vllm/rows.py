"""Which rows hold the exact tokens of which block, on the host.

Every token is packed on arrival. Beside the pages an engine has some rows of exact keys and values, and a row belongs
to a block. The block manager does not know of rows. Losing a row only costs quality: its tokens are read from the page.
But a row must never hold tokens that are no longer its block's. So every write of a page is noted here, and the row of
its block then takes the new tokens or is dropped.

    Sinks   a row has the first tokens of a sequence, and belongs to the sequence's first block
    Tails   a row is a ring of the last 32 tokens that were written to a page, and belongs to that page's block

If no row is free, the one that has not been used for longest is taken. With three rows for each request the running
requests keep theirs: a step uses at most two for each.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NULL_BLOCK", "PAGE", "ROWS_PER_REQUEST", "Held", "Sinks", "Tails"]

PAGE = 128
NULL_BLOCK = 0  # vLLM's: stands for pages that a sliding window has left, and for those of dummy runs
ROWS_PER_REQUEST = 3


@dataclass
class Held:
    """The row of a block. It has the tokens from `first` up to `stop`, counted from the page's start."""

    number: int
    first: int
    stop: int


class _Table:
    """Rows of `size` tokens by block, in the order of their last use."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size = rows, size
        self.of: dict[int, Held] = {}
        self._free = list(range(rows))

    def _used(self, block: int) -> Held | None:
        row = self.of.pop(block, None)
        if row is not None:
            self.of[block] = row
        return row

    def _new(self, block: int, first: int, stop: int) -> Held:
        self.drop(block)
        number = self._free.pop() if self._free else self.of.pop(next(iter(self.of))).number
        row = self.of[block] = Held(number, first, stop)
        return row

    def drop(self, block: int) -> None:
        """Frees a block's row, because its page is written without the row."""
        row = self.of.pop(block, None)
        if row is not None:
            self._free.append(row.number)


class Sinks(_Table):
    """Rows of the first `size` tokens of sequences."""

    def written(self, block: int, start: int, stop: int) -> int:
        """Notes that tokens start..stop - 1 of a sequence are written to its first block. Returns the row that takes
        those below `size`, or -1 if the block has no row with the tokens before them."""
        row = self._used(block)
        if start == 0:
            row = row or self._new(block, 0, 0)
        elif row is None or row.stop < min(start, self.size):
            self.drop(block)
            return -1
        if start < self.size:
            row.stop = min(stop, self.size)
        return row.number

    def find(self, block: int) -> int:
        """Returns the row of a first block if it has all `size` tokens, otherwise -1."""
        row = self._used(block)
        return row.number if row is not None and row.stop >= self.size else -1


class Tails(_Table):
    """Rows of the last `size` tokens that were written to a page."""

    def written(self, block: int, start: int, stop: int) -> Held:
        """Notes that tokens start..stop - 1 of a page are written, and returns the row that takes them. A start before
        the end of what was written replaces that: drafts were rejected."""
        row = self._used(block)
        follows = row is not None and 0 < start <= row.stop
        row = row or self._new(block, start, stop)
        first = min(row.first, start) if follows else start
        row.first, row.stop = max(first, stop - self.size), stop
        return row

    def find(self, block: int) -> Held | None:
        """Returns the row of a block, or None."""
        return self._used(block)
