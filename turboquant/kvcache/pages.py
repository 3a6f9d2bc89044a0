"""Pages of one layer, shared by reference, so that caches can be forked and beams reordered without copying.

A `PagePool` is the storage and counts the references to each of its pages; a `PageTable` has the rows of page indices
of some sequences. Rows that come from one another (a fork, a beam, a repeated sequence) name the same pages. Only one
row writes to a page: before an append, `reserve` gives a row its own copy of the shared page that it will write, which
can only be its last, part-filled one (copy-on-write). Nothing is decoded or quantised again.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from ..plan import PAGE_TOKENS

__all__ = ["RELEASED", "PagePool", "PageTable", "in_place", "outside_autograd"]

RELEASED = -1  # in a row: the page fell out of a sliding window and was given back

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def outside_autograd(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Runs a function so that the tensors it allocates are neither in an autograd graph nor inference tensors, which
    cannot be written outside inference mode."""

    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def in_place(tensor: torch.Tensor) -> torch.inference_mode:
    """The mode in which `tensor` may be written: a cache copied in inference mode can only be written in that mode."""
    return torch.inference_mode(tensor.is_inference())


class PagePool:
    """The storage, uint8 [n_pages, kv_heads, record_bytes], and how many rows refer to each page; 0: the page is free.

    storage   the caller that makes the pool must give every page a reference

    Growth replaces `storage`. A writer holds `lock` from reading it to the end of the write, so that several threads
    may use forks. (On CUDA they must use one stream.)
    """

    def __init__(self, storage: torch.Tensor) -> None:
        self.storage = storage
        self.tables = 0  # PageTables that refer to pages of it
        self.lock = threading.RLock()
        self._references = [0] * len(storage)
        self._free: list[int] = []  # a heap: low pages first, so that used pages lie together
        self._used_before: set[int] = set()  # free pages that are not zeros

    @property
    def free(self) -> int:
        """Pages that nothing refers to."""
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def state(self) -> tuple[Any, ...]:
        """The state, for `restore`."""
        return self.storage, list(self._references), list(self._free), set(self._used_before)

    def restore(self, state: tuple[Any, ...]) -> None:
        self.storage, self._references, self._free, self._used_before = state

    def take(self, count: int) -> list[int]:
        """Takes `count` free pages, zeroed, with a reference each. Storage grows by missing pages, at least by 1/64."""
        missing = count - len(self._free)
        if missing > 0:
            self._grow(max(missing, len(self._references) // 64))
        pages = [heapq.heappop(self._free) for _ in range(count)]
        if stale := [page for page in pages if page in self._used_before]:
            self.storage.index_fill_(0, torch.tensor(stale, device=self.storage.device), 0)
            self._used_before.difference_update(stale)
        for page in pages:
            self._references[page] = 1
        return pages

    def _grow(self, by: int) -> None:
        before = len(self._references)
        fresh = self.storage.new_zeros(by, *self.storage.shape[1:])
        self.storage = torch.cat((self.storage, fresh))
        self._free += range(before, before + by)  # larger than all others: still a heap
        self._references += [0] * by

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != RELEASED:
                self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != RELEASED:
                self._references[page] -= 1
                if not self._references[page]:
                    self._used_before.add(page)
                    heapq.heappush(self._free, page)

    def copy(self, page: int) -> int:
        """Copies a shared page, which loses a reference, and returns the copy."""
        (own,) = self.take(1)
        with in_place(self.storage):
            self.storage[own] = self.storage[page]
        self.release([page])
        return own


def _tensor(rows: Sequence[Sequence[int]], device: torch.device, other: PageTable | None = None) -> torch.Tensor:
    """Makes the tensor of the rows for operators. If `other` has the same rows, its tensor is copied on the device,
    which is quicker. Not after pages were released: their numbers may still stand there."""
    released = any(RELEASED in row for row in rows)
    if other is not None and not released and other.tensor.device == device and other.rows == rows:
        return other.tensor.clone()
    width = max(map(len, rows), default=0)
    table = [[max(page, 0) for page in row] + [0] * (width - len(row)) for row in rows]
    pinned = device.type == "cuda"
    tensor = torch.tensor(table, dtype=torch.int32, device="cpu", pin_memory=pinned).view(len(rows), width)
    return tensor.to(device, non_blocking=True)  # pinned: the host does not wait for the device


class PageTable:
    """The pages of each sequence of a layer.

    rows     for each sequence the pages of its packed tokens, in order; `RELEASED` for those it gave back
    tensor   int32 [sequences, longest row]: the rows for operators; 0 where there is no page
    ready    positions up to which an append needs no `reserve`: its pages are there, and no other row refers to them
    """

    def __init__(self, pool: PagePool, rows: Sequence[Sequence[int]]) -> None:
        tensor = _tensor(rows, pool.storage.device)  # may raise for lack of memory, before anything is counted
        self.rows, self.tensor, self.ready = [list(row) for row in rows], tensor, -1
        with pool.lock:
            self.pool = pool
            pool.tables += 1
            for row in self.rows:
                pool.share(row)

    @classmethod
    @outside_autograd
    def empty(cls, sequences: int, kv_heads: int, record_bytes: int, device: torch.device) -> PageTable:
        storage = torch.empty((0, kv_heads, record_bytes), dtype=torch.uint8, device=device)
        return cls(PagePool(storage), [[] for _ in range(sequences)])

    @classmethod
    @outside_autograd
    def joined(cls, tables: Sequence[PageTable]) -> PageTable:
        """Joins the rows of all tables, one after the other, in the first one's pool. Other pools' pages are copied."""
        pool, rows = tables[0].pool, list[list[int]]()
        others = {id(table): table.packed() for table in tables if table.pool is not pool}  # one lock at a time
        taken: list[int] = []
        with pool.lock:
            try:
                for table in tables:
                    table.ready = -1
                    if table.pool is pool:
                        rows += table.rows
                        continue
                    pages, numbered = others[id(table)]
                    copies = pool.take(len(pages))
                    taken += copies
                    where = torch.tensor(copies, dtype=torch.int64, device=pool.storage.device)
                    with in_place(pool.storage):
                        pool.storage.index_copy_(0, where, pages)
                    number = dict(enumerate(copies)) | {RELEASED: RELEASED}
                    rows += [[number[page] for page in row] for row in numbered]
                return cls(pool, rows)
            finally:
                pool.release(taken)  # the rows, if they were made, have references of their own

    def __del__(self) -> None:
        if (pool := getattr(self, "pool", None)) is not None:
            with pool.lock:
                pool.tables -= 1
                for row in self.rows:
                    pool.release(row)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: its own pages alone, whatever else is in the pool."""
        pages, rows = self.packed()
        return {"pages": pages, "rows": rows, "ready": self.ready}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(PagePool(state["pages"]), state["rows"])  # type: ignore[misc]
        self.ready = state["ready"]

    @outside_autograd
    def packed(self, counts: Sequence[int] | None = None) -> tuple[torch.Tensor, list[list[int]]]:
        """Returns (pages, rows): a copy of each page that the rows refer to, and the rows renumbered to these copies.

        counts   packed tokens of each sequence; pages behind them, reserved for more, are left out
        """
        with self.pool.lock:
            ends = [len(row) for row in self.rows] if counts is None else [-(-count // PAGE_TOKENS) for count in counts]
            rows = [row[:end] for row, end in zip(self.rows, ends)]
            used = list(dict.fromkeys(page for row in rows for page in row if page != RELEASED))
            pages = self.pool.storage[torch.tensor(used, dtype=torch.int64, device=self.pool.storage.device)]
        number = {page: i for i, page in enumerate(used)} | {RELEASED: RELEASED}
        return pages, [[number[page] for page in row] for row in rows]

    def move(self, device: torch.device) -> None:
        """Moves pages and table. The tensors of the pool's other tables stay where they are until they are used."""
        with self.pool.lock:
            self.pool.storage, self.tensor = self.pool.storage.to(device), self.tensor.to(device)

    @outside_autograd
    def fork(self) -> PageTable:
        """Makes another table of the same pages."""
        self.ready = -1
        return PageTable(self.pool, self.rows)

    @outside_autograd
    def reserve(
        self, first: Sequence[int], packed: Sequence[int], other: PageTable | None = None
    ) -> Callable[[], None]:
        """Gives each row b pages for writing its packed tokens first[b] .. packed[b] - 1, and returns a function that
        undoes this. The caller holds `pool.lock`, and sets `ready` afterwards. Nothing is changed if memory runs out.

        other   the table of another layer, which may have the same new rows already
        """
        pool, before = self.pool, (self.rows, self.tensor, self.ready, self.pool.state())
        rows = [list(row) for row in self.rows]

        def undo() -> None:
            self.rows, self.tensor, self.ready, state = before
            pool.restore(state)

        try:
            shared = [
                (row, i)
                for row, start in zip(rows, first)
                for i in range(max(start, 0) // PAGE_TOKENS, len(row))
                if row[i] != RELEASED and pool.references(row[i]) > 1
            ]
            for row, i in shared:  # one by one: the row with the last reference that is left needs no copy
                if pool.references(row[i]) > 1:
                    row[i] = pool.copy(row[i])
            missing = [max(0, -(-count // PAGE_TOKENS) - len(row)) for row, count in zip(rows, packed)]
            fresh = iter(pool.take(sum(missing)))
            for row, count in zip(rows, missing):
                row += [next(fresh) for _ in range(count)]
            self.rows, self.tensor = rows, _tensor(rows, pool.storage.device, other)
        except BaseException:
            undo()
            raise
        return undo

    @outside_autograd
    def select(self, sequences: Sequence[int], other: PageTable | None = None) -> None:
        """Makes row b what row sequences[b] was. No page is copied, except by `compact`. other: as in `reserve`."""
        pool, before = self.pool, self.rows
        rows = [list(before[b]) for b in sequences]
        with pool.lock:
            self.tensor = _tensor(rows, pool.storage.device, other)  # may raise for lack of memory
            for row in rows:
                pool.share(row)
            for row in before:
                pool.release(row)
            self.rows, self.ready = rows, -1
            self.compact()

    @outside_autograd
    def compact(self) -> None:
        """Moves the used pages together and frees the others, if more than 1/64 of the pool plus one page for each row
        are free. Does nothing while forks share the pool, or if there is no memory for both copies: it is optional, and
        the caller may be undoing a forward that ran out of memory."""
        pool = self.pool
        with pool.lock:
            if pool.tables > 1 or pool.free <= len(pool.storage) // 64 + len(self.rows):
                return
            try:
                pages, rows = self.packed()
                self.__init__(PagePool(pages), rows)  # type: ignore[misc]
            except RuntimeError as error:
                # on a CPU, torch has no exception class for a lack of memory, and nothing else can fail here
                if isinstance(error, torch.OutOfMemoryError) or pool.storage.device.type == "cpu":
                    return
                raise

    @outside_autograd
    def truncate(self, packed: Sequence[int]) -> None:
        """Gives back the pages of row b behind its first packed[b] tokens."""
        with self.pool.lock:
            for row, count in zip(self.rows, packed):
                keep = -(-max(count, 0) // PAGE_TOKENS)
                if keep < len(row):  # else the row still writes to the same page next, which is its own
                    self.pool.release(row[keep:])
                    del row[keep:]
                    self.ready = -1

    def release_before(self, packed: Sequence[int]) -> None:
        """Gives back the pages of row b that hold only tokens before packed[b]. Their numbers stay in the tensor, where
        nothing reads them any more."""
        with self.pool.lock:
            for row, count in zip(self.rows, packed):
                for i in range(min(count // PAGE_TOKENS, len(row)) - 1, -1, -1):
                    if row[i] == RELEASED:
                        break
                    self.pool.release([row[i]])
                    row[i] = RELEASED
