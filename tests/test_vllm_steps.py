"""Steps of the vLLM plug-in on a GPU, tested on CPU tensors too: the table of exact rows on the device, and chunks of
prompts, in a simulated engine whose blocks requests share, free and take over."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ops_cases import needs_cuda
from paged_engine import HEAD_DIM, HEADS, KV_HEADS, Engine, Request, dense_attention, live

from turboquant.vllm import steps
from turboquant.vllm.batch import Batch
from turboquant.vllm.device_rows import DeviceSinks
from turboquant.vllm.ragged import attend_workspace
from turboquant.vllm.rows import PAGE, Sinks
from turboquant.vllm.steps import Step, reserve, run

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
FEW = 4


class GpuEngine(Engine):
    """few: the most tokens of a request that is not a chunk. parts: which parts the steps so far had."""

    def __init__(self, bits, sinks, blocks=7, rows=18, device="cpu", few=FEW, **options):
        super().__init__(bits, sinks, 0, blocks, rows, device, **options)
        self.few = few
        window = options.get("sliding_window", 0)
        self.table = DeviceSinks(rows, sinks, blocks + 1, torch.device(device), window)
        self.parts = set()

    def poison(self):
        for block in self.pool.taken:
            row = self.table.row_of[block]
            if self.table.owner[row] == block:
                self.attention.sinks.k[row], self.attention.sinks.v[row] = torch.nan, torch.nan
        self.pool.taken.clear()

    def compute(self, starts, lens, table, q, k, v, out):
        # vLLM sorts requests by their numbers of new tokens. So they are sorted here, and `out` is put back in order.
        counts = np.diff(starts)
        order = np.argsort(counts, kind="stable")
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
        loc = np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int32)
        lengths, table = np.array(lens, np.int32)[order], table[order]
        past, most = lengths - counts[order], int(counts.max())
        device = self.pages.device
        given = tuple(torch.from_numpy(x).to(device) for x in (loc, lengths, table))
        rows = self.table.rows_of(*given, most, begins=bool((past == 0).any()),
                                  enters=bool(((lengths - 1) // PAGE > (past - 1) // PAGE).any()))  # fmt: skip
        step = Step.of(Batch(*given, rows, None, None, 0, most), loc, lengths, self.few)
        self.parts |= {(name, getattr(step, name) is not None) for name in ("few", "chunks")}
        self.parts.add(("past", len(step.pasts) > 0))
        sorted_out = torch.full_like(out, torch.nan, device=device)
        given_vectors = (x[tokens].to(device) for x in (q, k, v))
        run(self.attention, step, *given_vectors, self.pages, sorted_out, dense_attention)
        out[tokens] = sorted_out.cpu()
        back, rows = np.argsort(order), rows.cpu()
        return Batch(torch.tensor(starts), torch.tensor(lens, dtype=torch.int32), given[2].cpu()[back], rows[back],
                     None, None, 0, most)  # fmt: skip

    def read_exactly(self, tokens):
        return tokens > self.few


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("few", [FEW, 1])
@pytest.mark.parametrize("sinks", [4, 1])
def test_no_row_of_another_life_is_read(sinks, few, device, rng):
    engine = GpuEngine(4, sinks, device=device, few=few)
    seen = live(engine, rng, 40)
    assert seen["preempted"] and seen["rejected"] and seen["chunks"], seen
    found, lost, _ = engine.table.counts.tolist()
    assert found and engine.exact and not lost
    assert engine.parts >= {("few", True), ("chunks", True), ("past", False)}
    if few == 1:
        assert ("past", True) in engine.parts


@pytest.mark.parametrize("device", DEVICES)
def test_long_chunks_read_decoded_tokens(device, monkeypatch):
    """A long chunk reads some pages at a time, of which the first has exact tokens."""
    decoded, decode = [], steps._decoded
    monkeypatch.setattr(steps, "LEAST_ROWS", (512, 512))
    monkeypatch.setattr(steps, "SCRATCH_BYTES", 2 * 2 * PAGE * KV_HEADS * HEAD_DIM * 4)
    monkeypatch.setattr(steps, "_decoded", lambda *given: decoded.append(given[3:5]) or decode(*given))
    engine, request = GpuEngine(4, 4, device=device), Request([0] * 599)
    request.blocks = [engine.pool.take() for _ in range(5)]
    for tokens in (299, 1, 299):
        engine.step([(request, tokens)])
    assert decoded == [(0, 256), (256, 44)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"sliding_window": 50}, {"softcap": 2.0}, {"sliding_window": 9, "softcap": 5.0}])
def test_sliding_windows_and_soft_caps(options, device, rng):
    live(GpuEngine(4, 4, device=device, **options), rng, 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 50}])
def test_learned_sinks(options, device, rng):
    """Learned sinks take part in attention of chunks, to the tokens before them, and of steps with few tokens."""
    sinks = torch.tensor([-2.0, 0.0, 3.0, 5.0], device=device)
    engine = GpuEngine(4, 4, device=device, few=1, learned_sinks=sinks, **options)
    live(engine, rng, 20)
    assert engine.parts >= {("few", True), ("chunks", True), ("past", True)}


def test_rows_that_are_lost_cost_quality_alone(rng, monkeypatch):
    engine = GpuEngine(8, 4)
    step = engine.step

    def losing(work):
        engine.table.owner[int(rng.integers(18))] = -1
        step(work)

    monkeypatch.setattr(engine, "step", losing)
    live(engine, rng, 30)
    found, lost, _ = engine.table.counts.tolist()
    assert found and lost


def test_memory_for_a_step_is_asked_of_the_operator(monkeypatch):
    engine, taken = GpuEngine(4, 4), []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **how: taken.append(new_empty(x, *size, **how)))
    for tokens in (600, 100):  # so many queries that pages are decoded for them, and fewer
        taken.clear()
        query = torch.zeros(tokens, HEADS, HEAD_DIM)
        reserve(engine.attention, query, KV_HEADS, 6, 4096, FEW)
        outs, workspace, *decoded = taken
        assert outs.numel() == 2 * query.numel() and len(decoded) == (tokens == 600)
        few = attend_workspace(engine.attention, query[: 6 * FEW], KV_HEADS, 6, 4096, FEW)
        assert workspace.numel() >= few > 0


def rows_of(table, past, lens, blocks):
    """One step of DeviceSinks: requests with so many tokens before and after it."""
    past, lens, blocks = (np.array(x, np.int32) for x in (past, lens, blocks))
    loc = np.concatenate([[0], np.cumsum(lens - past)]).astype(np.int32)
    rows = table.rows_of(*(torch.from_numpy(x) for x in (loc, lens, blocks)), int((lens - past).max()), begins=True,
                         enters=True)  # fmt: skip
    return rows.tolist()


def test_device_tables_keep_what_host_tables_keep():
    device, host = DeviceSinks(2, 4, 12, torch.device("cpu")), Sinks(2, 4)
    life = [  # (block, tokens before, tokens after)
        (5, 0, 2), (5, 2, 3), (5, 3, 90), (9, 2, 10), (5, 200, 201), (5, 0, 1), (6, 0, 9), (8, 0, 9), (6, 130, 131),
        (5, 1, 2), (8, 9, 10),
    ]  # fmt: skip
    sought = 0
    for block, past, length in life:
        want = host.written(block, past, length) if past < PAGE else host.find(block)
        (found,) = rows_of(device, [past], [length], [[block, 11]])
        assert (found >= 0) == (want >= 0), (block, past, length)
        sought += want >= 0
    assert device.counts.tolist() == [sought, len(life) - sought, 0]


def test_a_step_keeps_the_rows_that_it_uses():
    """The oldest rows go first, and none that the same step uses."""
    requests = 5
    table = DeviceSinks(3 * requests, 4, 400, torch.device("cpu"))
    kept = rows_of(table, [0] * 2, [9] * 2, [[1], [2]])
    for step in range(20):
        blocks = [[10 + step * requests + i] for i in range(requests)]
        rows = rows_of(table, [9, 9] + [0] * requests, [10, 10] + [5] * requests, [[1], [2], *blocks])
        assert rows[:2] == kept and len({*rows}) == requests + 2


def test_padding_has_no_rows():
    """Requests without tokens in a CUDA graph, and the null block of dummy runs, get no rows."""
    table = DeviceSinks(6, 4, 12, torch.device("cpu"))
    assert rows_of(table, [0, 0, 0], [1, 0, 1], [[0], [7], [3]])[:2] == [-1, -1]
    assert table.counts.tolist() == [1, 0, 2]


def test_pages_that_are_written_again_lose_their_rows():
    """A block that was the first one of a sequence loses its row as a later one of another sequence."""
    table = DeviceSinks(6, 4, 12, torch.device("cpu"))
    assert rows_of(table, [0], [200], [[5, 6]]) != [-1]
    assert rows_of(table, [0], [300], [[7, 8, 5]]) != [-1]
    assert rows_of(table, [200], [201], [[5, 6]]) == [-1]
    assert rows_of(table, [300], [301], [[7, 8, 5]]) != [-1]


def test_a_schedule_is_written_for_each_plan(monkeypatch):
    """It is written once a step for all layers of the plan. Kernels of other plans may divide the work differently."""
    written, used = [], []
    monkeypatch.setattr(steps, "write_schedule", lambda attention, *_: written.append(attention.words))
    monkeypatch.setattr(steps, "append", lambda *_: None)
    monkeypatch.setattr(steps, "attend", lambda *_, schedule: used.append((len(schedule), int(schedule[0, 0]))))
    tables = {plan: torch.full((9, 4), i, dtype=torch.int32) for i, plan in enumerate(("3, 3", "4, 2"))}
    schedule = steps.Schedule(tables, 5)
    step = SimpleNamespace(tokens=2, few=object(), first=2, chunks=None, schedule=schedule, whole=None, pasts=())
    x = torch.empty(2, HEADS, HEAD_DIM)
    for plan in ("3, 3", "4, 2", "3, 3"):
        run(SimpleNamespace(words=plan, learned_sinks=None), step, x, x, x, None, x.clone(), dense_attention)
    assert written == ["3, 3", "4, 2"] and used == [(5, 0), (5, 1), (5, 0)]
