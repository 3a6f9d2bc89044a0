"""The exact rows of the vLLM plug-in, without vLLM, in a simulated engine whose blocks requests share, free and take
over. A row of other content, or of an earlier use of its block, must never be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_engine import RING, Engine, live

from turboquant.vllm.batch import ExactRows
from turboquant.vllm.ragged import pages_of
from turboquant.vllm.rows import NULL_BLOCK, ROWS_PER_REQUEST, Sinks, Tails


@pytest.mark.parametrize("sinks, window", [(4, 0), (0, 28), (4, 28), (1, 32)])
def test_no_row_of_another_life_is_read(sinks, window, rng):
    engine = Engine(4, sinks, window)
    seen = live(engine, rng, 40)
    assert all(seen.values()), seen
    assert engine.exact
    if sinks:
        assert engine.rows.exact_count


def test_rows_that_are_lost_cost_quality_alone(rng, monkeypatch):
    """If rows are dropped before a step, attention is still the reference's, with fewer exact tokens."""
    engine = Engine(8, 4, 28)
    step = engine.step

    def losing(work):
        for table in (engine.rows.sinks, engine.rows.tails):
            table.drop(int(rng.integers(1, 8)))
        step(work)

    monkeypatch.setattr(engine, "step", losing)
    live(engine, rng, 30)
    assert engine.rows.lost and engine.rows.exact_count


@pytest.mark.parametrize("options", [{"sliding_window": 50}, {"softcap": 2.0}, {"sliding_window": 9, "softcap": 5.0}])
def test_sliding_windows_and_soft_caps(options, rng):
    live(Engine(4, 4, 28, **options), rng, 20)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 50}])
def test_learned_sinks(options, rng):
    """A logit of each head takes part in the softmax."""
    live(Engine(4, 4, 28, learned_sinks=torch.tensor([-2.0, 0.0, 3.0, 5.0]), **options), rng, 20)


def test_pages_that_a_sliding_window_left_have_no_rows():
    rows = ExactRows(Sinks(6, 4), None)
    table = np.array([[NULL_BLOCK, 7]])
    assert rows.rows_of([0, 1], [150], table)[0].tolist() == [-1]
    assert (rows.exact_count, rows.lost) == (0, 0)


def test_block_tables_keep_pages_that_a_sliding_window_left():
    """vLLM frees a page that no query sees any more and leaves its number in the block table; by then it may be the
    first page of another request, whose row would be taken for this one's."""
    rows = ExactRows(Sinks(6, 4), Tails(6, RING), 28, sliding_window=20)
    other = rows.rows_of([0, 256], [256], np.array([[7, 9]]))
    assert other[0].tolist() != [-1]
    sinks, _, reads = rows.rows_of([0, 1], [277], np.array([[7, 9, 8]]))
    assert sinks.tolist() == [-1] and reads.tolist()[0][1] == -1
    assert (rows.exact_count, rows.lost) == (1, 0)
    for past, seen in ((22, True), (23, False)):  # the query at 23 sees the tokens from 4 on
        rows = ExactRows(Sinks(6, 4), None, sliding_window=20)
        row = rows.rows_of([0, past], [past], np.array([[7]]))[0]
        assert (rows.rows_of([0, 1], [past + 1], np.array([[7]]))[0] == row).all() == seen


def test_sinks_hold_whole_beginnings():
    sinks = Sinks(2, 4)
    row = sinks.written(5, 0, 2)
    assert row >= 0 and sinks.find(5) == -1  # two of four
    assert sinks.written(5, 2, 3) == row and sinks.written(5, 3, 90) == row and sinks.find(5) == row
    assert sinks.written(9, 2, 10) == -1  # the first two tokens were not written to this block's row
    assert sinks.written(5, 0, 1) == row and sinks.find(5) == -1  # the block begins anew
    assert sinks.written(6, 0, 9) != row
    assert sinks.written(8, 0, 9) == row and sinks.find(5) == -1  # the least recently used row


def test_tails_follow_rejected_drafts():
    tails = Tails(3, RING)
    tails.written(5, 0, 40)
    held = tails.find(5)
    assert (held.first, held.stop) == (8, 40)
    held = tails.written(5, 40, 44)  # one token and three drafts
    assert (held.first, held.stop) == (12, 44)
    held = tails.written(5, 41, 42)  # rejected: what they have overwritten is gone
    assert (held.first, held.stop) == (12, 42)
    held = tails.written(5, 100, 101)  # a gap: another wrote between
    assert (held.first, held.stop) == (100, 101)
    held = tails.written(5, 0, 3)
    assert (held.first, held.stop) == (0, 3)


def test_a_step_keeps_the_rows_that_it_uses():
    """Three rows a request: one step claims at most two, and the oldest go first."""
    requests = 5
    tails = Tails(ROWS_PER_REQUEST * requests, RING)
    for step in range(20):
        used = [tails.written(100 * step + i, 0, 5).number for i in range(2 * requests)]
        assert len({*used}) == 2 * requests


def test_pages_are_never_a_copy_of_the_cache():
    """An engine that lays tokens out before heads is refused: what is written to a copy would be lost."""
    memory = torch.zeros(3, 2, 128, 36, dtype=torch.uint8)
    pages_of(memory[1:])[0, 1, -1] = 7
    assert memory[1, 1, 127, 35] == 7
    with pytest.raises(RuntimeError, match="view"):
        pages_of(memory.view(3, 128, 2, 36).transpose(1, 2))
