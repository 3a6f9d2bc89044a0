"""One step's requests as operators take them, and the rows of exact tokens that each of them writes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .rows import NULL_BLOCK, PAGE, Sinks, Tails

__all__ = ["Batch", "ExactRows"]

Rows = NDArray[np.int32] | None


@dataclass(frozen=True)
class Batch:
    """A ragged batch. Requests without new tokens are padding.

    query_start_loc  int32 [requests + 1]: request r has the new tokens query_start_loc[r] .. query_start_loc[r + 1] - 1
    lengths          int32 [requests], tokens of each, new ones included
    block_table      int32 [requests, pages]
    sink_rows        int32 [requests], the row of the first tokens, -1: read the page. None: no request has a row
    tail_rows        int32 [requests, 2], the rows to which new tokens of the last two pages are copied, for even and
                     for odd pages; -1: none
    tail_reads       the same for rows that are read: they have all tokens of the window that lie in their page. Both
                     are None without a window
    window           how many exact tokens a sequence ends with
    max_query_len    the most new tokens of a request
    """

    query_start_loc: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    sink_rows: torch.Tensor | None
    tail_rows: torch.Tensor | None
    tail_reads: torch.Tensor | None
    window: int
    max_query_len: int


@dataclass
class ExactRows:
    """The rows of exact tokens of one group of layers, which see the same blocks.

    sliding_window   how many tokens the layers see, 0: all. vLLM frees pages that no query sees any more, but block
                     tables keep their numbers, which may be blocks of other requests by now
    exact_count, lost  how many look-ups of a sequence's first tokens found a row, and how many did not
    """

    sinks: Sinks | None
    tails: Tails | None
    window: int = 0
    sliding_window: int = 0
    exact_count: int = 0
    lost: int = 0

    def rows_of(self, starts: Sequence[int], lens: Sequence[int], table: NDArray[np.integer]) -> list[Rows]:
        """Notes all that a batch writes, and returns [sink_rows, tail_rows, tail_reads] of its `Batch`.

        table  [requests, pages]: the block of each page
        """
        n = len(lens)
        sinks = None if self.sinks is None else np.full(n, -1, np.int32)
        tails, reads = (None if self.tails is None else np.full((n, 2), -1, np.int32) for _ in range(2))
        for r, length in enumerate(lens):
            past = length - (starts[r + 1] - starts[r])
            if past == length:
                continue
            if sinks is not None:
                sinks[r] = self._sinks(table[r], past, length)
            if tails is not None and reads is not None:
                self._tails(table[r], past, length, tails[r], reads[r])
        return [sinks, tails, reads]

    def _sinks(self, blocks: NDArray[np.integer], past: int, length: int) -> int:
        assert self.sinks is not None
        for page in range(max(1, past // PAGE), (length - 1) // PAGE + 1):
            self.sinks.drop(int(blocks[page]))
        first = int(blocks[0])
        if first == NULL_BLOCK or self._left(self.sinks.size, past):
            return -1
        row = self.sinks.written(first, past, length) if past < PAGE else self.sinks.find(first)
        self.exact_count, self.lost = self.exact_count + (row >= 0), self.lost + (row < 0)
        return row

    def _left(self, stop: int, past: int) -> bool:
        """Whether a sliding window is past all tokens before `stop`, so that no query from `past` on sees one."""
        return 0 < self.sliding_window <= past - stop + 1

    def _tails(
        self, blocks: NDArray[np.integer], past: int, length: int, rows: NDArray[np.int32], reads: NDArray[np.int32]
    ) -> None:
        assert self.tails is not None
        last = (length - 1) // PAGE
        for page in range(past // PAGE, last - 1):
            self.tails.drop(int(blocks[page]))
        for page in (last - 1, last):
            if page < 0 or (block := int(blocks[page])) == NULL_BLOCK:
                continue
            begin, end = page * PAGE, min(length, (page + 1) * PAGE)
            if self._left(end, past):
                continue
            if past < end:
                tail = self.tails.written(block, max(past, begin) - begin, end - begin)
                rows[page % 2] = tail.number
            else:
                earlier = self.tails.find(block)
                if earlier is None or earlier.stop < PAGE:
                    continue
                tail = earlier
            if tail.first <= max(0, length - self.window - begin):
                reads[page % 2] = tail.number
