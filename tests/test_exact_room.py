"""Sinks and window grow as tokens come. The results are bit for bit those of a cache whose sinks and window have their
full size from the start."""

from __future__ import annotations

import copy

import pytest
import torch
from models import prompts, tiny
from specs import WAVE, bare

import turboquant
from turboquant import TurboQuantCache
from turboquant.kvcache import room

SPECS = {
    "sinks": bare(3, 3, sinks=50, **WAVE),
    "window": bare(3, 3, window=37),
    "both": bare(3, 3, sinks=21, window=45, prefill="packed"),
}


@pytest.fixture(params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture
def whole(monkeypatch):
    """A function. After it is called, sinks and windows that grow get their full size at once."""
    return lambda: monkeypatch.setattr(room, "with_room", lambda have, need, most: most)


def patched(spec):
    model = turboquant.patch(tiny(), spec)
    return model, TurboQuantCache(model, spec)


def feed(model, cache, ids, pieces, padding=(0, 0)):
    logits, at = [], cache.get_seq_length()
    for tokens in pieces:
        mask = torch.ones(len(ids), at + tokens, dtype=torch.int64)
        for b, pad in enumerate(padding):
            mask[b, :pad] = 0
        with torch.no_grad():
            logits.append(model(ids[:, at : at + tokens], mask, past_key_values=cache).logits)
        at += tokens
    return torch.cat(logits, 1)


def long_life(spec, path):
    """Logits, cache and file after steps, a crop, a fork, a reorder, a save, a load and an offload."""
    model, cache = patched(spec)
    ids = prompts(2, 300, (5, 0))["input_ids"]
    said = [feed(model, cache, ids, [7, *[1] * 20, 3, 2, *[1] * 3], (5, 0))]
    cache.crop(30)
    fork = cache.fork()
    said.append(feed(model, fork, ids, [9, 40, 1, 1], (5, 0)))
    cache.reorder_cache(torch.tensor([1, 0]))
    said.append(feed(model, cache, ids, [1] * 12, (0, 5)))
    cache.save(path)
    read = TurboQuantCache.load(path)
    for each in (cache, read):
        said.append(feed(model, each, ids, [*[1] * 30, 70, 1], (0, 5)))
    cache.layers[0].offload()
    said.append(feed(model, cache, ids, [1, 4], (0, 5)))
    return said, cache, path.read_bytes()


def test_all_is_as_with_the_full_size(spec, whole, tmp_path):
    ours, cache, file = long_life(spec, tmp_path / "a")
    whole()
    want, full, full_file = long_life(spec, tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))
    assert file == full_file
    assert all(
        name == other and torch.equal(a, b)
        for (name, a), (other, b) in zip(cache.tensors(), full.tensors(), strict=True)
    )


def test_crop_with_past_windows_of_other_sizes(spec, whole):
    ids, keeps, said = prompts(2, 120)["input_ids"], [5, 17, 22, 30, 45, 66, 67, 80], []
    for full in (False, True):
        if full:
            whole()
        model, lived = patched(spec)
        lived.activate_past_recording()
        feed(model, lived, ids, [5, *[1] * 25, 8, *[1] * 42, 10])
        said.append({})
        for keep in keeps:
            cache = copy.deepcopy(lived)
            if cache.layers[0].storage.can_crop_to(keep):
                cache.crop(keep)
                said[full][keep] = feed(model, cache, ids, [1, 3, *[1] * 20])
    assert said[0].keys() == said[1].keys() and 80 in said[0]
    assert all(torch.equal(said[0][keep], said[1][keep]) for keep in said[0])


def test_bytes_are_those_of_the_tokens_that_came():
    """One row has a key and a value of 32 float32 channels for each of 2 KV heads."""
    model, cache = patched(bare(sinks=2**24, window=2**24))
    ids, row = prompts(1, 60)["input_ids"], 2 * 2 * 32 * 4
    for pieces, rows in (([1], 16), ([1] * 15, 16), ([1], 32), ([40], 64)):
        feed(model, cache, ids, pieces, (0,))
        for one in cache.report().layers:
            assert one.parts["sinks"] == rows * row and "window" not in one.parts
        assert cache.nbytes == sum(t.untyped_storage().nbytes() for _, t in cache.tensors()) < 3 * rows * row + 100
    model, cache = patched(bare(sinks=4, window=2**24))
    feed(model, cache, ids, [10, 20], (0,))
    assert cache.report().layers[0].parts["sinks"] == 4 * row
    assert cache.report().layers[0].parts["window"] == 32 * row


@pytest.mark.parametrize("sizes", [(2**14, 0), (4, 2**14), (21, 45)], ids=str)
def test_joined_sequences_have_the_rows_of_the_longest(sizes):
    model, _ = patched(spec := bare(4, 4, sinks=sizes[0], window=sizes[1]))
    ids, lengths, parts = prompts(1, 160)["input_ids"], (3, 20, 90), []
    for length in lengths:
        parts.append(TurboQuantCache(model, spec))
        feed(model, parts[-1], ids, [length], (0,))
    before = sum(part.nbytes for part in parts)
    joined, most = TurboQuantCache.join(parts), max(lengths)
    assert joined.nbytes < 3 * before and sum(part.nbytes for part in parts) < 2 * before
    for new in (1, 40, 1):
        rows = [ids[:, part.get_seq_length() : part.get_seq_length() + new] for part in parts]
        mask = torch.arange(joined.get_seq_length() + new) >= torch.tensor([[most - n] for n in lengths])
        with torch.no_grad():
            positions = torch.stack([torch.arange(new) + part.get_seq_length() for part in parts])
            got = model(torch.cat(rows), mask.long(), positions, past_key_values=joined).logits
            want = torch.cat([model(row, past_key_values=part).logits for row, part in zip(rows, parts)])
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_files_have_the_rows_that_hold_tokens(tmp_path):
    model, cache = patched(bare(sinks=2, window=2**24))
    feed(model, cache, prompts(1, 60)["input_ids"], [20], (0,))
    cache.save(tmp_path / "a")
    read = TurboQuantCache.load(tmp_path / "a").layers[0].storage
    assert read.sink_k.shape[2] == 2 and read.window_k.shape[2] == 18
    assert (tmp_path / "a").stat().st_size < 3 * 20 * 2 * 2 * 32 * 4 + 10_000


def test_reserved_tensors_keep_their_places():
    """Their addresses must not change, because a CUDA graph of decoding steps contains them."""
    model, cache = patched(bare(sinks=40, window=100))
    ids = prompts(1, 120)["input_ids"]
    feed(model, cache, ids, [5], (0,))
    for one in (layer.storage for layer in cache.layers):
        one.reserve(110)
        assert one.exact_ready >= 110 and one.ready >= 110
    before = [tensor.data_ptr() for name, tensor in cache.tensors() if name in ("sinks", "window")]
    feed(model, cache, ids, [1] * 105, (0,))
    assert before == [tensor.data_ptr() for name, tensor in cache.tensors() if name in ("sinks", "window")]
