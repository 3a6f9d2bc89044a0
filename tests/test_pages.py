"""Caches whose pages are shared, freed or rewound (forks, beams, sliding windows, crop) equal caches filled alone."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from models import storages
from specs import WAVE, bare
from streams import (
    KV_HEADS,
    PACKED,
    SHAPES,
    Stream,
    check,
    check_references,
    close,
    forward,
    new,
    packed_bytes,
    rows,
    same,
)

from turboquant.kvcache.pages import RELEASED, PagePool, PageTable
from turboquant.kvcache.report import layer_tensors
from turboquant.kvcache.storage import LayerStorage


def storage_bytes(*caches):
    """Bytes of all caches together, what they share counted once."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for c in caches for _, t in c.tensors()}
    return sum(held.values())


# ---- forks ----


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_forks_share_what_they_have_in_common(fields):
    spec, prefix = PACKED.with_(**fields), Stream(batch=2, tokens=700)
    streams = [prefix, Stream(batch=2, tokens=700, seed=1), Stream(batch=2, tokens=700, seed=2)]
    parent = new(spec)
    forward(parent, prefix.piece(0, 500))
    held = storage_bytes(parent)
    forks = [parent, parent.fork(), parent.fork().fork()]
    exact = held - sum(layer.storage.pages.numel() for layer in parent.layers)
    assert storage_bytes(*forks) <= held + 2 * exact
    check(*forks)
    for start, stop in [(500, 501), (501, 530), (530, 700)]:
        for cache, stream in zip(forks, streams):
            forward(cache, stream.piece(start, stop))
            check(*forks)
    for cache, stream in zip(forks, streams):
        alone = new(spec)
        forward(alone, prefix.piece(0, 500))
        for piece in [(500, 501), (501, 530), (530, 700)]:
            forward(alone, stream.piece(*piece))
        same(cache, alone)
        assert torch.equal(forward(cache, stream.piece(0, 3)), forward(alone, stream.piece(0, 3)))


def test_only_the_last_page_is_copied():
    parent, stream = new(PACKED), Stream(tokens=500)
    forward(parent, stream.piece(0, 400))
    fork = parent.fork()
    before = fork.layers[0].storage.table.rows[0]
    assert fork.layers[0].storage.pages.data_ptr() == parent.layers[0].storage.pages.data_ptr()
    forward(fork, stream.piece(400, 401))
    after = fork.layers[0].storage.table.rows[0]
    assert after[:3] == before[:3] and after[3] != before[3] and len(fork.layers[0].storage.pages) == 5
    forward(parent, stream.piece(400, 401))  # the parent is now alone on its last page, and copies nothing
    assert parent.layers[0].storage.table.rows[0] == before and len(parent.layers[0].storage.pages) == 5


def test_what_a_fork_held_is_free_again():
    parent, stream = new(PACKED), Stream(tokens=700)
    forward(parent, stream.piece(0, 400))
    fork = parent.fork()
    forward(fork, stream.piece(400, 700))
    del fork
    check(parent)
    pages = len(parent.layers[0].storage.pages)
    forward(parent, stream.piece(400, 700))
    assert len(parent.layers[0].storage.pages) == pages  # the fork's pages, zeroed and used again
    whole = new(PACKED)
    forward(whole, stream.piece(0, 700))
    same(parent, whole)


def test_a_parent_may_go_first():
    stream = Stream(tokens=500)
    cache = new(PACKED)
    forward(cache, stream.piece(0, 300))
    cache = cache.fork()
    whole = new(PACKED)
    forward(whole, stream.piece(0, 300))
    close(forward(cache, stream.piece(300, 500)), forward(whole, stream.piece(300, 500)), 1e-6)
    check(cache)


@pytest.mark.parametrize("of", ["copy", "reset", "crop"])
def test_forks_do_not_feel_each_other(of):
    stream, parent = Stream(tokens=500), new(PACKED)
    forward(parent, stream.piece(0, 300))
    fork, other = parent.fork(), Stream(tokens=500, seed=1)
    if of == "copy":
        fork = copy.deepcopy(fork)
        pages = fork.layers[0].storage.pages
        assert len(pages) == 3 and pages.data_ptr() != parent.layers[0].storage.pages.data_ptr()
    elif of == "reset":
        fork.reset()
    else:
        fork.crop(-100)
    forward(fork, other.piece(fork.get_seq_length(), 400))
    whole = new(PACKED)
    forward(whole, stream.piece(0, 300))
    same(parent, whole)
    close(forward(parent, stream.piece(300, 500)), forward(whole, stream.piece(300, 500)), 1e-6)


def test_forks_in_threads():
    """Forks in threads share storage, which one of them replaces when it grows. None of them loses tokens."""
    spec, streams = PACKED.with_(window=16), [Stream(tokens=900, seed=seed) for seed in range(4)]
    parent = new(spec)
    forward(parent, streams[0].piece(0, 200))
    forks = [parent.fork() for _ in streams]

    def run(cache, stream):
        for t in range(200, 900, 7):
            forward(cache, stream.piece(t, t + 7))

    threads = [threading.Thread(target=run, args=each) for each in zip(forks, streams)]
    [t.start() for t in threads], [t.join() for t in threads]
    check(parent, *forks)
    for cache, stream in zip(forks, streams):
        alone = new(spec)
        forward(alone, streams[0].piece(0, 200))
        run(alone, stream)
        same(cache, alone)


def test_a_dropped_cache_is_freed_at_once():
    gc.disable()
    try:
        cache = new("default")
        forward(cache, Stream().piece(0, 200))
        pages, layer = weakref.ref(cache.layers[0].storage.pages), weakref.ref(cache.layers[0])
        del cache
        assert layer() is None and pages() is None
    finally:
        gc.enable()


# ---- beams ----


def test_beams_move_no_full_page():
    """In 200 steps of beam search with four beams, no full page is copied, and each beam equals a cache filled
    alone."""
    stream, torch_rng = Stream(batch=4, tokens=600), torch.Generator().manual_seed(0)
    cache = new(PACKED)
    forward(cache, rows(stream, [0, 0, 0, 0]).piece(0, 290))
    cache.reorder_cache(torch.tensor([0, 0, 0, 0]))
    layer = cache.layers[0]
    assert len(layer.storage.pages) - layer.storage.table.pool.free == 3  # one prompt, held once
    history = [torch.zeros(290, dtype=torch.int64) for _ in range(4)]  # which stream each token came from
    copied, take = [], PagePool.copy
    try:
        PagePool.copy = lambda pool, page: copied.append(page) or take(pool, page)
        for t in range(290, 490):
            forward(cache, stream.piece(t, t + 1))
            history = [torch.cat([h, torch.tensor([b])]) for b, h in enumerate(history)]
            order = torch.randint(0, 4, (4,), generator=torch_rng)
            cache.reorder_cache(order)
            history = [history[b] for b in order]
            check(cache)
    finally:
        PagePool.copy = take
    assert 0 < len(copied) <= 200 * 3 * 2  # at most three beams a step give up a page, in two layers
    for b in range(4):
        mixed = Stream(tokens=490)
        for name in "qkv":
            whole = getattr(stream, name)
            setattr(mixed, name, torch.stack([whole[:, h, :, t] for t, h in enumerate(history[b])], 2).unsqueeze(1))
        alone = new(PACKED)
        forward(alone, mixed.piece(0, 490))
        for ours, theirs in zip(packed_bytes(cache), packed_bytes(alone)):
            assert torch.equal(ours[b], theirs[0])


def test_few_sequences_give_the_room_of_many_back():
    cache = new(PACKED)
    forward(cache, Stream(batch=8).piece(0, 300))
    whole = cache.nbytes
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.nbytes <= whole / 7
    check(cache)


def test_a_crop_gives_the_room_back():
    """`crop` frees pages at once, unless a fork holds them. The cache goes on like one that never had more tokens."""
    stream = Stream(tokens=1600)
    cache, other = new(PACKED), new(PACKED)
    forward(cache, stream.piece(0, 1500))
    whole = cache.nbytes
    fork = cache.fork()
    cache.crop(-1300)
    assert cache.nbytes == whole
    del fork
    cache.crop(-1)
    assert cache.nbytes <= whole / 5
    check(cache)
    forward(other, stream.piece(0, 199))
    for start, stop in [(199, 200), (200, 500)]:
        assert torch.equal(forward(cache, stream.piece(start, stop)), forward(other, stream.piece(start, stop)))


# ---- sliding windows ----


def test_a_prompt_that_fell_out_of_the_window_leaves_no_pages():
    cache, stream = new(PACKED), Stream(tokens=1600)
    forward(cache, stream.piece(0, 1500), local_size=100)
    pages = [len(layer.storage.pages) for layer in cache.layers]
    assert max(pages) <= 3
    for t in range(1500, 1600):
        forward(cache, stream.piece(t, t + 1), local_size=100)
    assert max(len(layer.storage.pages) for layer in cache.layers) <= 4
    check(cache)


@pytest.mark.parametrize("fields", [dict(), dict(sinks=4, window=32), dict(window=200), WAVE], ids=str)
def test_pages_that_fell_out_of_the_window_are_freed(fields, monkeypatch):
    spec, stream, window = PACKED.with_(**fields), Stream(batch=2, tokens=1000), 150
    mask = torch.arange(300)[None, :] >= torch.tensor([0, 170])[:, None]
    freeing, keeping = new(spec), new(spec)
    most = -(-(window + 128) // 128) + 1
    for start, stop in [(0, 300), (300, 450), *((t, t + 1) for t in range(450, 700)), (700, 1000)]:
        piece, seen = stream.piece(start, stop), mask if start == 0 else None
        got = forward(freeing, piece, seen, local_size=window)
        with monkeypatch.context() as patched:
            patched.setattr(LayerStorage, "release", lambda layer: None)
            assert torch.equal(got, forward(keeping, piece, seen, local_size=window))
        check(freeing)
        if stop - start == 1 and stop > 600:
            for row in freeing.layers[0].storage.table.rows:
                assert sum(page != RELEASED for page in row) <= most
    assert freeing.report().numbers < keeping.report().numbers
    assert len(freeing.layers[0].storage.pages) < len(keeping.layers[0].storage.pages)
    if not spec.window:
        freeing.crop(-60), keeping.crop(-60)
        piece = stream.piece(940, 945)
        assert torch.equal(forward(freeing, piece, local_size=window), forward(keeping, piece, local_size=window))


def test_a_table_is_made_anew_where_it_must_be():
    """Rejected drafts do not replace the block table. After a fork, writing to a shared page makes a new table."""
    cache, other, stream = new(PACKED), new(PACKED), Stream(tokens=400)
    forward(cache, stream.piece(0, 300)), forward(other, stream.piece(0, 300))
    cache = copy.deepcopy(cache)
    tables = [layer.storage.block_table for layer in cache.layers]
    for start in range(300, 370, 7):
        cache.crop(start), other.crop(start)
        draft = stream.piece(start, start + 9)
        assert torch.equal(forward(cache, draft), forward(other, draft))
        assert all(a is layer.storage.block_table for a, layer in zip(tables, cache.layers))
    fork = cache.fork()
    fork.crop(301), forward(fork, stream.piece(0, 20))
    cache.crop(301), other.crop(301)
    assert torch.equal(forward(cache, stream.piece(301, 390)), forward(other, stream.piece(301, 390)))
    assert all(a is not layer.storage.block_table for a, layer in zip(tables, cache.layers))
    check(cache, fork)


@pytest.mark.parametrize("tokens", [40, 98, 99, 100, 130])
def test_a_text_that_fits_its_sliding_window_can_be_cropped(tokens):
    """Nothing has been freed yet, whether the window is full or not."""
    stream, cropped, plain = Stream(tokens=300), new(PACKED), new(PACKED)
    for cache, first in ((cropped, Stream(tokens=300, seed=1).piece(20, tokens)), (plain, None)):
        forward(cache, stream.piece(0, 20), local_size=100)
        if first is not None:
            forward(cache, first, local_size=100)
    cropped.crop(20 - tokens)
    got, want = (forward(cache, stream.piece(20, 60), local_size=100) for cache in (cropped, plain))
    close(got, want, 1e-6)
    check(cropped)


def test_a_window_that_grows_and_a_crop_too_far():
    cache, stream = new(PACKED), Stream(tokens=800)
    forward(cache, stream.piece(0, 700), local_size=100)
    with pytest.raises(
        ValueError, match="layer 0: the sliding window must be the one of earlier forwards, 100, got 300"
    ):
        forward(cache, stream.piece(700, 701), local_size=300)
    with pytest.raises(
        NotImplementedError, match="crop: layer 0 has freed positions that fell out of its sliding window"
    ):
        cache.crop(-400)
    assert cache.get_seq_length() == 700
    forward(cache, stream.piece(700, 701), local_size=100)


# ---- crop across the window's edge ----


REWINDS = {  # tokens of each forward after a text of 90 positions, and how many tokens are then cropped
    "a token": ([1], 1),
    "a draft": ([6], 4),
    "a draft, all of it": ([6], 6),
    "drafts token by token": ([1] * 9, 7),
    "drafts of several kinds": ([1, 4, 1, 11], 16),
    "more than the window at once": ([50], 30),
    "more than two windows at once": ([110], 64),
    "a chunk and a draft": ([70, 5], 3),
}


@pytest.mark.parametrize("pieces, forget", REWINDS.values(), ids=REWINDS)
@pytest.mark.parametrize("padding", [(0,), (0, 33)], ids=["", "padded"])
# 40, because at 32 a window is as long as head_dim, and code that confuses the two would pass
@pytest.mark.parametrize(
    "fields", [dict(window=32), dict(window=40, sinks=4, **WAVE), dict(window=32, **WAVE), dict()], ids=str
)
def test_crop_brings_tokens_back_into_the_window(fields, padding, pieces, forget):
    spec, batch = PACKED.with_(**fields), len(padding)
    stream, drafts = Stream(batch=batch, tokens=400), Stream(batch=batch, tokens=400, seed=1)
    mask = torch.arange(90)[None, :] >= torch.tensor(padding)[:, None]
    cropped = new(spec)
    forward(cropped, stream.piece(0, 90), mask)
    cropped.activate_past_recording()
    plain = copy.deepcopy(cropped)
    at, keep = 90, 90 + sum(pieces) - forget
    for tokens in pieces:
        mixed = copy.deepcopy(drafts)
        for name in "qkv":
            getattr(mixed, name)[:, :, :, :keep] = getattr(stream, name)[:, :, :, :keep]
        forward(cropped, mixed.piece(at, at + tokens))
        at += tokens
    cropped.crop(-forget)
    assert cropped.get_seq_length() == keep
    if keep > 90:
        forward(plain, stream.piece(90, keep))
    for start, stop in [(keep, keep + 1), (keep + 1, keep + 20), (keep + 20, 400)]:
        close(forward(cropped, stream.piece(start, stop)), forward(plain, stream.piece(start, stop)), 1e-6)
    same(cropped, plain)
    check(cropped)


def test_a_long_forward_over_a_window_of_one_token_is_taken_back():
    """The window before that forward is recorded too."""
    cache, stream = new(PACKED.with_(window=1)), Stream(tokens=200)
    forward(cache, stream.piece(0, 90))
    plain = cache.fork()
    cache.activate_past_recording()
    forward(cache, stream.piece(90, 170))
    cache.crop(-80)
    close(forward(cache, stream.piece(90, 200)), forward(plain, stream.piece(90, 200)), 1e-6)
    same(cache, plain)


def test_a_sliding_window_goes_back_and_widens_as_far_as_its_pages_reach():
    cache, stream = new(PACKED), Stream(tokens=720)
    forward(cache, stream.piece(0, 700), local_size=100)
    layer = cache.layers[0]
    first = layer.storage.released  # position of the first token that is still in a page
    assert 0 < first < 601
    assert layer.storage.can_crop_to(first + 99) and not layer.storage.can_crop_to(first + 98)
    widest = 701 - first  # the next token's: itself and all that is left
    with pytest.raises(ValueError, match="the sliding window must be the one of earlier forwards, 100, got"):
        forward(cache, stream.piece(700, 701), local_size=widest + 1)
    forward(cache, stream.piece(700, 701), local_size=widest)


def test_recording_ends_with_a_crop_and_counts():
    cache, stream = new(PACKED.with_(window=16)), Stream(tokens=300)
    cache.activate_past_recording()
    forward(cache, stream.piece(0, 50))
    for t in range(50, 200):
        forward(cache, stream.piece(t, t + 1))
    held = cache.report().parts["past windows"]
    assert held == 65 * 2 * 2 * KV_HEADS * 16 * 32 * 4  # 65 forwards, two layers, keys and values
    with pytest.raises(NotImplementedError, match="crop: layer 0 has a window of 16 tokens.*activate_past_recording"):
        cache.crop(-100)
    assert cache.get_seq_length() == 200 and cache.layers[0].is_croppable
    cache.crop(0)
    assert cache.report().parts["past windows"] <= held / 65


# ---- elsewhere ----


def test_offload_and_prefetch_on_a_cpu():
    stream, cache = Stream(tokens=300), new("default")
    forward(cache, stream.piece(0, 200))
    fork = cache.fork()
    for layer in cache.layers:
        layer.offload()
    got = forward(cache, stream.piece(200, 210))
    for layer in new("default").layers:
        layer.offload(), layer.prefetch()  # nothing to move
    assert torch.equal(got, forward(fork, stream.piece(200, 210)))


@pytest.mark.parametrize("away", ["table", "window"])
def test_an_offloaded_layer_whose_pages_a_fork_brought_back_is_brought_back_too(monkeypatch, away):
    """The other device is "meta" here. It keeps no numbers, so a stand-in of `bring_back` puts the old tensor back."""
    stream, cache = Stream(tokens=300), new(bare(3, 3, sinks=2, window=16))
    forward(cache, stream.piece(0, 200))
    want, back = forward(cache.fork(), stream.piece(200, 210)), []
    for layer in cache.layers:
        held = layer.storage
        place, name = (held.table, "tensor") if away == "table" else (held, "window_k")
        back.append((place, name, getattr(place, name)))
        setattr(place, name, getattr(place, name).to("meta"))
    monkeypatch.setattr(LayerStorage, "bring_back", lambda stored: setattr(*back[stored.index]))
    assert torch.equal(forward(cache, stream.piece(200, 210)), want)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_offload_and_prefetch():
    stream, cache = Stream(tokens=300), new(bare(3, 3, sinks=2, window=16, **WAVE))

    def piece(start, stop):
        return [tuple(x.cuda() for x in layer) for layer in stream.piece(start, stop)]

    forward(cache, piece(0, 200))
    fork = cache.fork()
    before = torch.cuda.memory_allocated()
    for layer in cache.layers:
        layer.offload()
    assert torch.cuda.memory_allocated() < before
    where = {part: t.device.type for part, t in layer_tensors(cache.layers[0].storage)}
    assert where.pop("transforms") == "cuda" and set(where.values()) == {"cpu"}  # all caches share the transforms
    assert torch.equal(forward(fork, piece(200, 210)), forward(cache, piece(200, 210)))  # fork: brings pages back
    assert {t.device.type for _, t in cache.tensors()} == {"cuda"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_offloaded_layers_are_cropped_across_the_window():
    stream, cache = Stream(tokens=300), new(bare(3, 3, sinks=2, window=16, **WAVE))

    def piece(start, stop):
        return [tuple(x.cuda() for x in layer) for layer in stream.piece(start, stop)]

    forward(cache, piece(0, 200))
    cache.activate_past_recording()
    for t in range(200, 210):
        forward(cache, piece(t, t + 1))
    other = copy.deepcopy(cache)
    for layer in cache.layers:
        layer.offload()
    cache.crop(-5), other.crop(-5)
    assert torch.equal(forward(cache, piece(205, 215)), forward(other, piece(205, 215)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_huge_sliding_window_hides_nothing_on_a_gpu():
    stream, spec = Stream(batch=2, tokens=200), PACKED.with_(sinks=2, window=16)
    mask = (torch.arange(100)[None, :] >= torch.tensor([0, 33])[:, None]).cuda()

    def outputs(local_size):
        cache = new(spec)
        for start, stop in [(0, 100), (100, 101), (101, 130)]:
            piece = [tuple(x.cuda() for x in layer) for layer in stream.piece(start, stop)]
            yield forward(cache, piece, mask if start == 0 else None, local_size=local_size)[:, :, -1]

    for with_window, without in zip(outputs(2**31 - 1), outputs(None)):
        close(with_window, without, 1e-6)


def test_reserve_that_runs_out_of_memory_changes_nothing(monkeypatch):
    stream, cache = Stream(tokens=700), new(PACKED)
    forward(cache, stream.piece(0, 300))
    fork = cache.fork()
    rows_before = [list(row) for row in fork.layers[0].storage.table.rows]

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for where in ("_grow", "copy"):
        with monkeypatch.context() as patched:
            patched.setattr(PagePool, where, no_memory)
            with pytest.raises(torch.OutOfMemoryError, match="layer 0: CUDA out of memory"):
                forward(fork, stream.piece(300, 700))
        assert fork.layers[0].storage.table.rows == rows_before and fork.get_seq_length() == 300
        check(cache, fork)
    close(forward(fork, stream.piece(300, 700)), forward(cache, stream.piece(300, 700)), 1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_without_memory_changes_nothing():
    """Torch may take no more GPU memory, and what it has is full. Each failed forward changes nothing. Memory is freed
    bit by bit until one succeeds."""
    stream, cache = Stream(tokens=910), new(bare(3, 3, sinks=2, **WAVE))

    def piece(start, stop):
        return [tuple(x.cuda() for x in layer) for layer in stream.piece(start, stop)]

    forward(cache, piece(0, 300))
    fork, more = cache.fork(), piece(300, 900)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )
    filling, failures = [], 0
    try:
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                filling.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
        while fork.get_seq_length() == 300:
            try:
                forward(fork, more)
            except RuntimeError as error:  # OutOfMemoryError is one; operators raise the plain kind
                assert "out of memory" in str(error)
                if fork.get_seq_length() != 300:
                    break  # tokens were stored, and there was no room for the output
                failures += 1
                assert all(not x.damaged and [len(row) for row in x.table.rows] == [3] for x in storages(fork))
            if not filling:  # large allocations need more than the small blocks that were freed
                torch.cuda.set_per_process_memory_fraction(1.0)
            del filling[-max(1, len(filling) // 32) :]
    finally:
        filling.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failures >= 5
    forward(cache, more)
    assert torch.equal(forward(fork, piece(900, 910)), forward(cache, piece(900, 910)))
    check(cache, fork)


def test_a_table_of_its_own():
    table = PageTable.empty(2, 1, 64, torch.device("cpu"))
    table.reserve([0, 0], [130, 5])
    assert table.rows == [[0, 1], [2]] and table.tensor.tolist() == [[0, 1], [2, 0]]
    table.truncate([10, 0])
    assert table.rows == [[0], []] and table.pool.free == 2
    other = table.fork()
    other.pool.storage[0] = 7
    other.reserve([100, 0], [140, 0])
    assert other.rows == [[1, 2], []] and table.rows == [[0], []]
    assert other.pool.storage[:3, 0, 0].tolist() == [7, 7, 0]
    check_references(table, other)
    del other
    check_references(table)


def test_what_reserve_did_is_taken_back():
    """The returned function restores the rows, the reference counts and the storage from before `reserve`."""
    table = PageTable.empty(2, 1, 64, torch.device("cpu"))
    table.reserve([0, 0], [130, 5])
    fork, storage = table.fork(), table.pool.storage
    storage.fill_(7)
    undo = table.reserve([129, 5], [700, 140])
    assert table.rows != fork.rows and table.pool.storage is not storage
    undo()
    assert table.rows == fork.rows and torch.equal(table.tensor, fork.tensor)
    assert table.pool.storage is storage and (storage == 7).all()
    check_references(table, fork)


def test_pages_that_forks_share_stay_where_they_are():
    table = PageTable.empty(8, 1, 64, torch.device("cpu"))
    table.reserve([0] * 8, [12800] * 8)
    fork, pool = table.fork(), table.pool
    for one in (table, fork):
        one.select([3])
    assert table.pool is fork.pool is pool and pool.free == 700
    check_references(table, fork)
    del table
    fork.compact()
    assert fork.pool is not pool and len(fork.pool.storage) == 100
    check_references(fork)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_the_same_bits_on_any_number_of_threads(fields):
    before, outs, caches = torch.get_num_threads(), [], []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            caches.append(new(PACKED.with_(**fields)))
            stream = Stream(batch=3, tokens=400)
            pieces = [(0, 380), (380, 381), (381, 400)]
            outs.append(torch.cat([forward(caches[-1], stream.piece(*piece)) for piece in pieces], 2))
    finally:
        torch.set_num_threads(before)
    for cache, out in zip(caches[1:], outs[1:]):
        assert torch.equal(out, outs[0])
        same(cache, caches[0])


# ---- allocations and forwards that fail ----


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("out of memory")


def test_a_fork_without_memory_leaves_its_parent_alone(monkeypatch):
    cache, stream = new(PACKED), Stream(tokens=500)
    forward(cache, stream.piece(0, 400))
    with monkeypatch.context() as patched:
        patched.setattr("turboquant.kvcache.pages._tensor", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.fork()
    gc.collect()
    check(cache)
    assert cache.layers[0].storage.table.pool.tables == 1


def test_a_crop_needs_no_memory(monkeypatch):
    cache, other, stream = new(PACKED), new(PACKED), Stream(tokens=1100)
    forward(cache, stream.piece(0, 1000))
    forward(other, stream.piece(0, 500))
    with monkeypatch.context() as patched:
        patched.setattr(PageTable, "packed", no_memory)
        cache.crop(-500)
    assert cache.get_seq_length() == 500
    check(cache)
    close(forward(cache, stream.piece(500, 510)), forward(other, stream.piece(500, 510)))


def test_a_forward_is_taken_back_without_memory(monkeypatch):
    """A chunk fails in the last layer, and there is no memory to move pages together afterwards. The cache still
    works."""
    cache, stream, bad = new(PACKED), Stream(tokens=1600), Stream(tokens=1600)
    bad.k[1, 0, 0, 700, 0] = float("nan")
    forward(cache, stream.piece(0, 300))
    with monkeypatch.context() as patched:
        patched.setattr(PageTable, "packed", no_memory)
        with pytest.raises(ValueError, match="layer 1: .* must be finite"):
            forward(cache, bad.piece(300, 1500))
    assert [layer.storage.tokens for layer in cache.layers] == [300, 300]
    other = new(PACKED)
    forward(other, stream.piece(0, 300))
    close(forward(cache, stream.piece(300, 310)), forward(other, stream.piece(300, 310)))


def test_a_table_of_the_same_rows_is_copied_from_the_layer_before(monkeypatch):
    """A table of other rows is built from its own rows. Two layers never share one tensor."""
    first, second, third = (PageTable.empty(2, 1, 64, torch.device("cpu")) for _ in range(3))
    first.reserve([0, 0], [130, 5])
    with monkeypatch.context() as patched:
        patched.setattr(torch, "tensor", None)
        second.reserve([0, 0], [130, 5], first)
    third.reserve([0, 0], [5, 130], first)
    second.select([1, 0], first)
    assert first.tensor.tolist() == [[0, 1], [2, 0]]
    assert second.tensor.tolist() == [[2, 0], [0, 1]]
    assert third.tensor.tolist() == [[0, 0], [1, 2]]
    second.select([1, 0], first)
    assert torch.equal(second.tensor, first.tensor) and second.tensor.data_ptr() != first.tensor.data_ptr()


@pytest.mark.parametrize("first", [True, False])
def test_sequences_that_could_not_all_change_places(first, monkeypatch):
    """If this fails in the first layer, nothing has changed. If it fails in a later one, the cache must be reset."""
    cache, stream = new(PACKED), Stream(batch=2)
    forward(cache, stream.piece(0, 200))
    other = cache.fork()
    make, calls = PageTable.select, []

    def select(self, sequences, other):
        calls.append(sequences)
        if len(calls) == (1 if first else 2):
            no_memory()
        make(self, sequences, other)

    with monkeypatch.context() as patched:
        patched.setattr(PageTable, "select", select)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reorder_cache(torch.tensor([1, 0]))
    if first:
        assert torch.equal(forward(cache, stream.piece(200, 201)), forward(other, stream.piece(200, 201)))
    else:
        with pytest.raises(RuntimeError, match=r"call cache.reset\(\)"):
            forward(cache, stream.piece(200, 201))


def test_forks_in_threads_over_sliding_windows():
    """Early queries of a chunk see pages that its last query does not. No fork may reuse these pages before the chunk
    ends."""
    stream, alone = Stream(tokens=1000), []
    others = [Stream(tokens=1000, seed=seed) for seed in range(1, 4)]

    def run(cache, stream, out):
        out.append(forward(cache, stream.piece(100, 900), local_size=140))

    def prefix():
        cache = new(PACKED)
        forward(cache, stream.piece(0, 100), local_size=140)
        return cache

    run(prefix(), stream, alone)
    for _ in range(10):
        cache = prefix()
        forks, outs = [cache, *(cache.fork() for _ in others)], [[] for _ in range(1 + len(others))]
        threads = [threading.Thread(target=run, args=each) for each in zip(forks, [stream, *others], outs)]
        [t.start() for t in threads], [t.join() for t in threads]
        close(outs[0][0], alone[0])


def test_past_windows_of_a_forward_that_failed_are_forgotten_and_others_kept():
    stream, bad = Stream(tokens=400), Stream(tokens=400)
    bad.k[1, 0, 0, 120, 0] = float("nan")
    cache = new(PACKED.with_(window=8))
    forward(cache, stream.piece(0, 100))
    cache.activate_past_recording()
    for i in range(100, 120):
        forward(cache, stream.piece(i, i + 1))
    with pytest.raises(ValueError, match="must be finite"):
        forward(cache, bad.piece(112, 128))
    assert [layer.storage.tokens for layer in cache.layers] == [120, 120]
    assert all(layer.storage.can_crop_to(105) for layer in cache.layers)
    assert all(then <= 120 for layer in cache.layers for then, _ in layer.storage.past.snapshots)
    dropped = weakref.ref(cache.layers[0].storage.past.snapshots[-1][1][0])
    cache.crop(-15)
    gc.collect()
    assert dropped() is None  # what `nbytes` no longer counts is not held either
    other = new(PACKED.with_(window=8))
    forward(other, stream.piece(0, 105))
    close(forward(cache, stream.piece(105, 110)), forward(other, stream.piece(105, 110)))


def test_padding_of_a_forward_that_failed_is_taken_back():
    stream, bad = Stream(batch=2, tokens=100), Stream(batch=2, tokens=100)
    bad.k[1, 0, 0, 15, 0] = float("nan")
    mask = torch.arange(100)[None] >= torch.tensor([0, 30])[:, None]
    cache, other = new(PACKED), new(PACKED)
    for each in (cache, other):
        forward(each, stream.piece(0, 10), mask[:, :10])
    with pytest.raises(ValueError, match="must be finite"):
        forward(cache, bad.piece(10, 20), mask[:, :20])
    assert [layer.storage.padding for layer in cache.layers] == [layer.storage.padding for layer in other.layers]
    for start, stop in ((10, 20), (20, 50)):
        ours, want = (forward(each, stream.piece(start, stop), mask[:, :stop]) for each in (cache, other))
        assert torch.equal(ours, want)


def test_a_fork_of_an_empty_cache_records_as_it_does():
    cache = new(PACKED.with_(window=8))
    cache.activate_past_recording()
    assert all(layer.storage.record_past for layer in cache.fork().layers)
