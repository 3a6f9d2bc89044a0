"""A simulated engine for tests of the vLLM plug-in without vLLM. Requests share, free and take over blocks. Attention
is compared with a slow reference, and rows of exact tokens hold NaN wherever none may be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from turboquant import Plan
from turboquant.vllm.batch import Batch, ExactRows
from turboquant.vllm.ragged import Attention, Exact, append, attend, share_with_learned_sinks
from turboquant.vllm.rows import PAGE, Sinks, Tails

HEADS, KV_HEADS, HEAD_DIM, RING = 4, 2, 16, 32


@cache
def table_of(kind: int, heads: int) -> torch.Tensor:
    """[positions, tokens, heads, head_dim]"""
    made = np.random.default_rng(kind).standard_normal((600, 24, heads, HEAD_DIM), np.float32)
    return torch.from_numpy(made)


def vectors(kind: int, tokens: list[int], heads: int) -> torch.Tensor:
    """[tokens, heads, head_dim], which depend on a token and its position alone."""
    return table_of(kind, heads)[torch.arange(len(tokens)), torch.tensor(tokens)]


@dataclass
class Request:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Pool:
    """vLLM's blocks. A full one is found by its content, also after it is freed, until it is taken again."""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(1, blocks + 1))
        self.users = dict.fromkeys(self.free, 0)
        self.cached: dict[tuple[int, ...], int] = {}
        self.taken: list[int] = []  # blocks taken since the last `poison`: nothing that they held may be read

    def hit(self, tokens: list[int]) -> list[int]:
        found = []
        for end in range(PAGE, len(tokens), PAGE):  # not the last token: it must be computed
            block = self.cached.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        for block in found:
            self.users[block] += 1
            if block in self.free:
                self.free.remove(block)
        return found

    def take(self) -> int | None:
        if not self.free:
            return None
        block = self.free.pop(0)
        self.cached = {key: b for key, b in self.cached.items() if b != block}
        self.users[block] = 1
        self.taken.append(block)
        return block

    def release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        request.blocks, request.computed = [], 0

    def full(self, request: Request) -> None:
        for i in range(request.computed // PAGE):
            self.cached.setdefault(tuple(request.tokens[: (i + 1) * PAGE]), request.blocks[i])


class Engine:
    def __init__(
        self, bits: int, sinks: int, window: int, blocks: int = 7, rows: int = 18, device: str = "cpu", **options: Any
    ) -> None:  # fmt: skip
        plan = Plan(HEAD_DIM, bits, bits)

        def exact(size: int) -> Exact | None:
            if not size:
                return None
            k, v = (torch.full((rows, KV_HEADS, size, HEAD_DIM), torch.nan, device=device) for _ in range(2))
            return Exact(k, v)

        self.rows = ExactRows(Sinks(rows, sinks) if sinks else None, Tails(rows, RING) if window else None, window)
        self.attention = Attention(plan, {}, HEAD_DIM**-0.5, sinks=exact(sinks),
                                   tails=exact(RING if window else 0), **options)  # fmt: skip
        self.pages = torch.full((blocks + 1, KV_HEADS, plan.record_bytes), 0xFF, dtype=torch.uint8, device=device)
        self.pool = Pool(blocks)
        self.plan, self.exact, self.sinks = plan, 0, sinks

    def poison(self) -> None:
        """Writes NaN to the exact rows of blocks that were taken, before the new requests write them."""
        for table, rows in ((self.rows.sinks, self.attention.sinks), (self.rows.tails, self.attention.tails)):
            for block in self.pool.taken if table is not None else ():
                if (held := table.of.get(block)) is not None:
                    rows.k[held.number], rows.v[held.number] = torch.nan, torch.nan
        self.pool.taken.clear()

    def step(self, work: list[tuple[Request, int]]) -> None:
        """Computes new tokens of each request, as many as `work` says, and compares attention with a slow reference."""
        self.poison()
        starts, lens = [0], []
        table = np.zeros((len(work), max(len(r.blocks) for r, _ in work)), np.int32)
        q, k, v = [], [], []
        for i, (request, tokens) in enumerate(work):
            length = request.computed + tokens
            starts.append(starts[-1] + tokens)
            lens.append(length)
            table[i, : len(request.blocks)] = request.blocks
            for to, kind, heads in ((q, 0, HEADS), (k, 1, KV_HEADS), (v, 2, KV_HEADS)):
                to.append(vectors(kind, request.tokens[:length], heads)[request.computed :])
        query = torch.cat(q)
        out = torch.full(query.shape, torch.nan)
        batch = self.compute(starts, lens, table, query, torch.cat(k), torch.cat(v), out)
        for i, (request, _) in enumerate(work):
            want = self.reference(request, batch, i)
            np.testing.assert_allclose(out[starts[i] : starts[i + 1]], want, atol=2e-3 if self.pages.is_cpu else 5e-3)
            request.computed = lens[i]
            self.pool.full(request)

    def compute(self, starts, lens, table, q, k, v, out) -> Batch:
        """Writes the attention of the queries to `out` and returns the batch that the operators took."""
        sinks, tails, reads = (None if x is None else torch.from_numpy(x)
                                   for x in self.rows.rows_of(starts, lens, table))  # fmt: skip
        batch = Batch(torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32),
                      torch.from_numpy(table), sinks, tails, reads, self.rows.window,
                      int(np.diff(starts).max()))  # fmt: skip
        append(self.attention, k, v, batch, self.pages)
        lse = torch.empty(q.shape[:2])
        attend(self.attention, q, batch, self.pages, out, lse=lse)
        if self.attention.learned_sinks is not None:
            share_with_learned_sinks(self.attention, out, lse)
        return batch

    def read_exactly(self, tokens: int) -> bool:
        """Whether `tokens` new tokens of a request see one another exact, not packed."""
        return False

    def reference(self, request: Request, batch: Batch, i: int) -> torch.Tensor:
        """Returns plain attention over decoded tokens, and over exact ones where the batch says that there are any."""
        length, past, options = int(batch.lengths[i]), request.computed, self.attention
        table, lengths = (x[i : i + 1].to(self.pages.device) for x in (batch.block_table, batch.lengths))
        k, v = (x[0].transpose(0, 1).cpu() for x in
                torch.ops.turboquant.dequantize(self.plan.words, self.pages, table, lengths, length))  # fmt: skip
        sunk = batch.sink_rows is not None and batch.sink_rows[i] >= 0
        exact = torch.arange(length) < (options.sinks.k.shape[2] if sunk else 0)
        last = (length - 1) // PAGE
        for page in (last, last - 1):
            if batch.tail_reads is None or page < 0 or batch.tail_reads[i, page % 2] < 0:
                break
            positions = torch.arange(length)
            exact |= (positions >= length - batch.window) & (positions // PAGE == page)
        if self.read_exactly(length - past):
            exact |= torch.arange(length) >= past
        self.exact += int(exact.sum())
        true = [vectors(kind, request.tokens[:length], KV_HEADS) for kind in (1, 2)]
        at = exact[:, None, None]
        k, v = (torch.where(at, new, old).repeat_interleave(HEADS // KV_HEADS, 1) for new, old in zip(true, (k, v)))
        q = vectors(0, request.tokens[:length], HEADS)[past:]
        logits = torch.einsum("qhd,khd->hqk", q, k) * options.scale
        if options.softcap:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        own, all_of = torch.arange(past, length)[:, None], torch.arange(length)
        hidden = all_of > own
        if options.sliding_window:
            hidden |= all_of <= own - options.sliding_window
        logits = logits.masked_fill(hidden, -torch.inf)
        if options.learned_sinks is not None:
            sinks = options.learned_sinks.cpu().view(-1, 1, 1).expand(-1, length - past, 1)
            logits = torch.cat([logits, sinks], -1)
        weights = logits.softmax(-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, v)


def live(engine: Engine, rng: np.random.Generator, steps: int) -> dict[str, int]:
    """Runs random steps: requests with common beginnings come, are computed in chunks and token by token, with drafts
    that are rejected, are preempted, and end. Returns how often each happened."""
    running: list[Request] = []
    seen = dict.fromkeys(("hits", "preempted", "rejected", "chunks", "steps"), 0)

    def admit() -> None:
        text, length = int(rng.integers(3)), int(rng.integers(1, 420))
        tokens = [text] * min(length, 300) + rng.integers(10, 12, max(0, length - 300)).tolist()
        resume(Request(tokens))

    def resume(request: Request) -> None:
        request.blocks = engine.pool.hit(request.tokens)
        request.computed = len(request.blocks) * PAGE
        seen["hits"] += bool(request.blocks)
        running.append(request)

    while seen["steps"] < steps:
        if (len(running) < 6 and rng.random() < 0.5) or not running:
            admit()
        work = []
        for request in list(running):
            left = len(request.tokens) - request.computed
            if left == 0:
                request.tokens += rng.integers(10, 12, 1).tolist()
                left = 1
            tokens = min(left, int(rng.choice([1, 3, 130, 300, 300])))
            drafts = int(rng.integers(4)) if tokens == left else 0
            true = list(request.tokens)
            request.tokens = true[: request.computed + tokens] + rng.integers(20, 24, drafts).tolist()
            while len(request.blocks) * PAGE < request.computed + tokens + drafts:
                block = engine.pool.take()
                if block is None:
                    break
                request.blocks.append(block)
            else:
                work.append((request, tokens + drafts, true, drafts))
                continue
            request.tokens = true
            engine.pool.release(request)  # preempted
            running.remove(request)
            seen["preempted"] += 1
            if len(true) < 500:
                resume(request)
        if not work:
            continue
        engine.step([(request, tokens) for request, tokens, *_ in work])
        seen["steps"] += 1
        for request, tokens, true, drafts in work:
            seen["chunks"] += tokens > 4
            if drafts:  # all of them are rejected
                request.tokens, seen["rejected"] = true, seen["rejected"] + 1
                request.computed = len(true)
                engine.pool.cached = {key: b for key, b in engine.pool.cached.items()
                                      if not (b in request.blocks and any(t >= 20 for t in key))}  # fmt: skip
            if len(request.tokens) > 480 or rng.random() < 0.03:
                engine.pool.release(request)
                running.remove(request)
    return seen


def dense_attention(attention, q, k, v, q_loc, k_loc, most_q, most_k, causal, out):
    """`steps.Dense`, in plain PyTorch."""
    of_q, of_k = q_loc.tolist(), k_loc.tolist()
    assert most_q >= np.diff(of_q).max() and most_k >= np.diff(of_k).max()
    sums = torch.empty(q.shape[1], len(q), device=q.device)
    for (begin, end), (first, last) in zip(pairwise(of_q), pairwise(of_k)):
        keys, values = (x[first:last].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * attention.scale
        if attention.softcap:
            logits = attention.softcap * torch.tanh(logits / attention.softcap)
        if causal:
            own = torch.arange(end - begin, device=q.device)[:, None]
            of = own.T
            hidden = of > own
            if attention.sliding_window:
                hidden |= of <= own - attention.sliding_window
            logits = logits.masked_fill(hidden, -torch.inf)
        sums[:, begin:end] = logits.logsumexp(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
    return sums
