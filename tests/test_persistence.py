"""Caches in files: the same bytes come back, on any model of the same kind, and damage is found before it does harm."""

from __future__ import annotations

import json
import os
import random
import re
import tracemalloc
import zlib
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from cache_file import joined, split, wrapped
from cache_file import read as independent_read
from profiles import made_calibration, profile_of
from safetensors.torch import load_file, save_file
from specs import WAVE, bare
from streams import CONFIG, MOMENTS, PACKED, Stream, forward, new

import turboquant
from turboquant import Codes, Quantizer, TurboQuantCache
from turboquant.hf.persistence import FORMAT
from turboquant.kvcache.attend import IN_PARTS_FROM
from turboquant.measured import Moments

SPECS = {
    "all packed": PACKED,
    "sinks and window": PACKED.with_(sinks=3, window=40),
    "layers that differ": bare(2, 3, rotation="dense", overrides={1: {"key_bits": 5, "window": 8}}),
    "nothing packed": bare(window=512),
    "wave and metric": PACKED.with_(**WAVE, sinks=2, window=20),
    "groups of 16": bare((8, 1), (4, 3), group=16, sinks=2, window=16),
}


def filled(spec, batch=2, dtype=torch.float32, padding=(0, 60)):
    cache, stream = new(spec), Stream(batch=batch, tokens=300, dtype=dtype)
    mask = torch.arange(200)[None, :] >= torch.tensor(padding[:batch])[:, None]
    forward(cache, stream.piece(0, 200), mask)
    return cache, stream


def same_tensors(a, b):
    for one, other in zip(models.storages(a), models.storages(b)):
        assert torch.equal(one.table.packed()[0], other.table.packed()[0])
        held, found = one.arguments(), other.arguments()
        assert held.keys() == found.keys()
        assert [name for name in held if not torch.equal(held[name], found[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_cache_goes_on_after_loading(tmp_path, spec, dtype):
    cache, stream = filled(spec, dtype=dtype)
    cache.save(tmp_path / "c.tqc")
    other = TurboQuantCache.load(tmp_path / "c.tqc", CONFIG)
    same_tensors(cache, other)
    assert other.spec == cache.spec.settled() and other.get_seq_length() == 200 and other.nbytes <= cache.nbytes
    for start, stop in [(200, 201), (201, 260)]:
        piece = stream.piece(start, stop)
        assert torch.equal(forward(other, piece), forward(cache, piece))
    same_tensors(cache, other)
    assert os.listdir(tmp_path) == ["c.tqc"]


def test_a_file_without_calibration_for_a_model_that_has_one(tmp_path, rng):
    model = turboquant.patch(models.tiny(), "default")
    model._turboquant.calibration = made_calibration(rng)  # as of patch(model, "calibrated-3", ..)
    TurboQuantCache(model, "default").save(tmp_path / "c.tqc", model)
    assert TurboQuantCache.load(tmp_path / "c.tqc", model).get_seq_length() == 0
    with pytest.raises(ValueError, match="it was made with another `profile`"):
        TurboQuantCache.load(tmp_path / "c.tqc", model, profile=profile_of(made_calibration(rng)))


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c.tqc").symlink_to(tmp_path / "elsewhere" / "real")
    cache, _ = filled(PACKED)
    for _ in range(2):
        cache.save(tmp_path / "c.tqc")
    same_tensors(cache, TurboQuantCache.load(tmp_path / "elsewhere" / "real"))
    assert (tmp_path / "c.tqc").is_symlink() and os.listdir(tmp_path / "elsewhere") == ["real"]


def test_the_default_device_is_not_where_files_are_read(tmp_path):
    cache, _ = filled(PACKED)
    cache.save(tmp_path / "c.tqc")
    with torch.device("meta"):
        other = TurboQuantCache.load(tmp_path / "c.tqc", device="cpu")
    same_tensors(cache, other)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:99", 1.5, []])
def test_a_device_that_torch_lacks(tmp_path, device):
    new("default").save(tmp_path / "c")
    with pytest.raises(ValueError, match=f"`device` must be one that .* can use, got {re.escape(repr(device))}"):
        TurboQuantCache.load(tmp_path / "c", device=device)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_prefix_from_a_gpu_goes_on_on_a_cpu(tmp_path, spec, monkeypatch, device="cuda"):
    monkeypatch.setitem(IN_PARTS_FROM, "cuda", IN_PARTS_FROM["cpu"])  # so that both attend alike
    cache, stream = new(spec), Stream(batch=2, tokens=300)

    def gpu_piece(start, stop):
        return [tuple(x.to(device) for x in layer) for layer in stream.piece(start, stop)]

    forward(cache, gpu_piece(0, 200))
    cache.save(tmp_path / "gpu")
    other = TurboQuantCache.load(tmp_path / "gpu", CONFIG, device="cpu")
    assert {t.device.type for _, t in other.tensors()} == {"cpu"}
    other.save(tmp_path / "cpu")
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "gpu").read_bytes()
    for start, stop in [(200, 201), (201, 260)]:
        got, want = forward(other, stream.piece(start, stop)), forward(cache, gpu_piece(start, stop)).cpu()
        assert (got - want).abs().max() <= 2e-3 * want.abs().max()


def test_saving_twice_gives_the_same_file(tmp_path):
    cache, _ = filled(SPECS["sinks and window"])
    cache.save(tmp_path / "a")
    TurboQuantCache.load(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_numbers_of_open_files_are_no_paths(tmp_path):
    """`open` takes the number of an open file as a path, and closes that file. Paths here may not be numbers."""
    classes = (turboquant.Index, Codes, turboquant.Profile, TurboQuantCache)
    with open(tmp_path / "x", "wb+") as file:
        file.write(bytes(100))
        loaders = [*(one.load for one in classes), turboquant.esm.read_fasta]
        for path in (file.fileno(), True, None):
            for use in (*loaders, new(PACKED).save):
                with pytest.raises(TypeError, match=f"`path` must be a str or a path, got {path!r}"):
                    use(path)
        file.write(b"still open")


@pytest.mark.parametrize("kind, what", [
    (TurboQuantCache, "a cache file"), (turboquant.Profile, "a profile"),
    (turboquant.Index, "a file of an index"), (Codes, "a file of codes"),
    (SimpleNamespace(load=turboquant.esm.read_fasta), "a file of proteins"),
])  # fmt: skip
def test_folders_and_devices_are_no_files(tmp_path, kind, what):
    places = ((tmp_path, "a folder"), (tmp_path / "x", "which is not there"), ("/dev/null", "which is no plain file"))
    for path, why in places[:2] if "proteins" in what else places:  # proteins may come from a pipe
        with pytest.raises(FileNotFoundError, match=f"`path` must be {what}, got '{path}', {why}"):
            kind.load(path)


def test_where_a_file_cannot_be_written(tmp_path):
    """Errors name the path that was given, not the temporary file beside it."""
    cache, nowhere = new("default"), tmp_path / "none" / "c"
    with pytest.raises(FileNotFoundError, match=f"`path` must be a file in a folder that is there, got '{nowhere}'$"):
        cache.save(nowhere)
    with pytest.raises(FileNotFoundError, match="`path` must be a file in a folder that is there, got ''$"):
        cache.save("")
    with pytest.raises(IsADirectoryError, match=f"`path` must be a file, got '{tmp_path}', a folder$"):
        cache.save(tmp_path)
    with pytest.raises(OSError, match=": '/proc/c'$"):
        cache.save("/proc/c")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="^.{,120}$"):
        TurboQuantCache.load(list(range(1000)))


def test_an_empty_cache(tmp_path):
    new("default").save(tmp_path / "c")
    cache = TurboQuantCache.load(tmp_path / "c")
    assert cache.get_seq_length() == 0 and cache.spec == turboquant.preset("default").settled()
    forward(cache, Stream().piece(0, 5))


def test_a_file_has_the_moments_it_was_made_with(tmp_path):
    """A file has all moments, also that of an empty cache. Loading it with other moments is refused."""
    cache, _ = filled(SPECS["wave and metric"])
    new(SPECS["wave and metric"]).save(tmp_path / "empty")
    cache.save(tmp_path / "c")
    for name in ("empty", "c"):
        found = TurboQuantCache.load(tmp_path / name, CONFIG, profile=profile_of(MOMENTS)).moments
        assert found.described() == MOMENTS.described()
        for key, array in MOMENTS.arrays().items():
            assert np.array_equal(found.arrays()[key], array) and found.arrays()[key].dtype == array.dtype
        other = Moments(MOMENTS.layers[::-1], MOMENTS.fingerprint, 2048)
        with pytest.raises(ValueError, match="`path` must be a cache file, .*: it was made with another `profile`"):
            TurboQuantCache.load(tmp_path / name, profile=profile_of(other))
    filled(PACKED)[0].save(tmp_path / "plain")
    with pytest.raises(ValueError, match="it was made without a `profile`"):
        TurboQuantCache.load(tmp_path / "plain", profile=profile_of(MOMENTS))


def test_shared_pages_are_written_once(tmp_path):
    cache, stream = filled(PACKED, batch=1)
    cache.save(tmp_path / "one")
    cache.batch_repeat_interleave(4)
    cache.save(tmp_path / "four")
    pages = cache.layers[0].storage.pages.shape[2] * 2
    assert (tmp_path / "four").stat().st_size - (tmp_path / "one").stat().st_size < pages
    other = TurboQuantCache.load(tmp_path / "four")
    piece = [tuple(x.repeat(4, 1, 1, 1) for x in layer) for layer in stream.piece(200, 280)]
    assert torch.equal(forward(other, piece), forward(cache, piece))


def test_layers_whose_pages_left_the_window(tmp_path):
    cache, stream = new(PACKED), Stream(tokens=700)
    forward(cache, stream.piece(0, 600), local_size=50)
    cache.save(tmp_path / "c")
    other = TurboQuantCache.load(tmp_path / "c")
    assert len(other.layers[0].storage.pages) == 2 and other.layers[0].storage.table.rows == [[-1, -1, -1, 0, 1]]
    got = forward(other, stream.piece(600, 640), local_size=50)
    assert torch.equal(got, forward(cache, stream.piece(600, 640), local_size=50))
    with pytest.raises(ValueError, match="the sliding window must be the one of earlier forwards, 50, got none"):
        forward(other, stream.piece(640, 641))


def test_a_prefix_serves_a_model_again(tmp_path):
    model = turboquant.patch(models.tiny(), "paper-mse-3")
    prompt, more = models.prompts(1, 150)["input_ids"], models.prompts(1, 9, seed=1)["input_ids"]
    with torch.no_grad():
        cache = model(prompt).past_key_values
        cache.save(tmp_path / "prefix", model)
        loaded = TurboQuantCache.load(tmp_path / "prefix", model)
        want = model(more, past_key_values=cache).logits
        assert torch.equal(model(more, past_key_values=loaded).logits, want)
    for other, says in [
        (models.tiny(seed=1), "this one has other weights"),
        (models.tiny(num_hidden_layers=4), "this one has layers 4 instead of 3"),
        (models.tiny("qwen3").config, "model_type 'qwen3' instead of 'llama'"),
    ]:
        with pytest.raises(ValueError, match=f"`path` must be a cache file.*{says}"):
            TurboQuantCache.load(tmp_path / "prefix", other)


def test_pages_that_were_made_ready_are_not_written(tmp_path):
    """Caches whose steps are replayed as CUDA graphs have such pages."""
    cache, stream = filled(PACKED)
    for layer in cache.layers:
        layer.storage.reserve(layer.storage.tokens + 512)
    cache.save(tmp_path / "x")
    other = TurboQuantCache.load(tmp_path / "x")
    same_tensors(filled(PACKED)[0], other)
    assert torch.equal(forward(cache, stream.piece(200, 201)), forward(other, stream.piece(200, 201)))


def test_save_takes_no_other_model(tmp_path):
    cache, _ = filled(PACKED)
    other = models.tiny(num_hidden_layers=len(cache.layers) + 1)
    with pytest.raises(ValueError, match="`model` must be the one that filled this cache, got one with layers "):
        cache.save(tmp_path / "x", other)
    with pytest.raises(ValueError, match="`model` must be the one that filled this cache, got one with layers "):
        cache.save(tmp_path / "x", other.config)
    with pytest.raises(TypeError, match="`model` must be a model, its configuration or None, got 'x'"):
        cache.save(tmp_path / "x", "x")
    with pytest.raises(TypeError, match="`model` must be a model, its configuration or None, got Linear"):
        cache.save(tmp_path / "x", torch.nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())
    cache.save(tmp_path / "x", CONFIG)
    TurboQuantCache.load(tmp_path / "x", CONFIG)
    with pytest.raises(TypeError, match="`model` must be a model, its configuration or None, got 'x'"):
        TurboQuantCache.load(tmp_path / "x", "x")


def test_a_file_that_others_may_not_read_stays_so(tmp_path):
    path = tmp_path / "x"
    path.touch(0o600)
    path.chmod(0o600)
    filled(PACKED)[0].save(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_cache_that_failed_is_not_saved(tmp_path):
    cache, _ = filled(PACKED)
    cache.layers[1].storage.damaged = True
    with pytest.raises(RuntimeError, match="save: an earlier call failed"):
        cache.save(tmp_path / "c")
    assert not os.listdir(tmp_path)


# ---- the format of docs/format.md, read by a program that shares no code with ours ----


@pytest.mark.parametrize("spec", [PACKED, PACKED.with_(sinks=3, window=40, **WAVE), bare(5, 2)], ids=str)
def test_an_independent_reader_finds_the_numbers(tmp_path, spec):
    """cache_file.py decodes the same keys and values as the operator, up to rounding."""
    cache, _ = filled(spec, dtype=torch.bfloat16)
    cache.save(tmp_path / "c")
    for stored, found in zip(models.storages(cache), independent_read(tmp_path / "c")):
        counts = torch.tensor(stored.packed(200, stored.padding), dtype=torch.int32)
        most = int(counts.max())
        k, v = torch.ops.turboquant.dequantize(
            stored.plan.words,
            *(stored.pages, stored.block_table, counts, most),
            sinks=spec.sinks,
            **stored.transforms,
        )
        for side, want in (("k", k), ("v", v)):
            for b, count in enumerate(counts.tolist()):
                got = found["packed_" + side][b]
                assert got.shape == (2, count, 32)
                np.testing.assert_allclose(got, want[b, :, :count].numpy(), rtol=2e-5, atol=2e-5)
        for name in ("sink_k", "window_v"):
            held = getattr(stored, name)
            assert (name in found) == (held is not None)
            if held is not None:
                np.testing.assert_array_equal(found[name], held.float().numpy())


def test_the_library_of_safetensors_reads_a_file(tmp_path):
    cache, _ = filled(SPECS["sinks and window"], dtype=torch.bfloat16)
    cache.save(tmp_path / "c")
    found = load_file(tmp_path / "c")
    for i, layer in enumerate(cache.layers):
        assert torch.equal(found[f"layers.{i}.pages"], layer.storage.table.packed()[0])
        for name in ("sink_k", "window_v"):
            assert torch.equal(found[f"layers.{i}.{name}"], getattr(layer.storage, name))


# ---- damage ----


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The bytes of a small valid file: 9 tokens of one KV head, with a sink and a window."""
    cache = new(bare(1, 1, sinks=1, window=2))
    stream = Stream(tokens=9, dim=8, kv_heads=1)
    forward(cache, stream.piece(0, 9))
    path = tmp_path_factory.mktemp("small") / "c"
    cache.save(path)
    return path.read_bytes()


def refuses(tmp_path, data, says="", model=None):
    path = tmp_path / "damaged"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"`path` must be a cache file, got .*damaged': .*{says}"):
        TurboQuantCache.load(path, model)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_is_watched(tmp_path, small, step):
    """A flipped bit in any byte is an error, and so is any truncation."""
    rng = random.Random(0)
    for at in range(0, len(small), step):
        data = bytearray(small)
        data[at] ^= 1 << rng.randrange(8)
        refuses(tmp_path, bytes(data))
    for size in range(0, len(small), 7 * step):
        refuses(tmp_path, small[:size])
    refuses(tmp_path, small + b"\0")


def test_files_of_others(tmp_path, small):
    for data in (b"", b"TQ", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(60), small[1:], os.urandom(5000)):
        refuses(tmp_path, data, "it is not one that turboquant wrote, or it is truncated")
    Codes.save(Quantizer(32, 3).quantize(np.ones((3, 32), np.float32)), tmp_path / "codes")
    refuses(tmp_path, (tmp_path / "codes").read_bytes(), "its format must be turboquant-cache-5, got '.*codes-2'")
    refuses(tmp_path, small.replace(b"cache-5", b"cache-4"), "its format must be turboquant-cache-5, got '.*cache-4'")
    refuses(tmp_path, small.replace(b"cache-5", b"cache-1"), "cache-1', which commit 14a37f9 of turboquant reads")
    turboquant.Index(8, 4).save(tmp_path / "index")
    refuses(tmp_path, (tmp_path / "index").read_bytes(), "its format must be turboquant-cache-5, got '.*index-6'")
    save_file({"layers.0.pages": torch.zeros(1)}, tmp_path / "weights")
    refuses(tmp_path, (tmp_path / "weights").read_bytes(), "it is not one that turboquant wrote")
    with pytest.raises(FileNotFoundError, match="`path` must be a cache file, got 'absent'"):
        TurboQuantCache.load("absent")


def forged(data, change):
    header, payload = split(data)
    change(header)
    return joined(header, payload)


def moved(entries, name, by):
    entries[name]["data_offsets"] = [at + by for at in entries[name]["data_offsets"]]


FORGED = {
    "no tensors": lambda h: h.update(tensors={}),
    "a tensor less": lambda h: h["tensors"].popitem(),
    "a tensor of others": lambda h: h["tensors"].update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "a larger tensor": lambda h: h["tensors"]["layers.0.pages"]["shape"].__setitem__(0, 2**40),
    "a shape of many numbers": lambda h: h["tensors"]["layers.0.pages"].update(shape=[2**62] * 1_000),
    "a shape of true": lambda h: h["tensors"]["layers.0.pages"]["shape"].__setitem__(0, True),
    "a place elsewhere": lambda h: moved(h["tensors"], "layers.0.sink_k", -64),
    "a place outside": lambda h: moved(h["tensors"], "layers.0.pages", 2**40),
    "a type of none": lambda h: h["tensors"]["layers.0.window_k"].update(dtype="F31"),
    "a type that is a list": lambda h: h["tensors"]["layers.0.window_k"].update(dtype=[]),
    "an entry that is a list": lambda h: h["tensors"].update({"layers.0.window_k": []}),
    "padding of another name": lambda h: h["tensors"].update(x=h["tensors"].popitem()[1]),
    "another dtype": lambda h: h.__setitem__("dtype", "F64"),
    "2^31 heads": lambda h: h["sizes"][0].__setitem__(0, 2**31),
    "65,536 heads": lambda h: h["sizes"][0].__setitem__(0, 2**16),
    "no heads": lambda h: h["sizes"][0].__setitem__(0, 0),
    "odd heads": lambda h: h["sizes"][0].__setitem__(1, 9),
    "2^31 - 1 positions": lambda h: h.__setitem__("positions", 2**31 - 1),
    "positions that are no number": lambda h: h.__setitem__("positions", "9"),
    "true positions": lambda h: h.__setitem__("positions", True),
    "negative padding": lambda h: h.__setitem__("padding", [-1]),
    "padding of another batch": lambda h: h.__setitem__("padding", [0] * 1000),
    "no padding": lambda h: h.__setitem__("padding", []),
    "more that a crop keeps than positions": lambda h: h.__setitem__("least", 10),
    "shifts of another batch": lambda h: h["shifts"].append(0),
    "a shift of 2^31": lambda h: h.__setitem__("shifts", [2**31]),
    "shifts that are no list": lambda h: h.__setitem__("shifts", 0),
    "a page that is not there": lambda h: h["rows"][0][0].__setitem__(0, 1),
    "a page below": lambda h: h["rows"][0][0].__setitem__(0, -2),
    "a page given back": lambda h: h["rows"][0][0].__setitem__(0, -1),
    "rows of fewer layers": lambda h: h["rows"].pop(),
    "a longer row": lambda h: h["rows"][0][0].append(0),
    "sizes of fewer layers": lambda h: h["sizes"].pop(),
    "sizes of three numbers": lambda h: h["sizes"][0].append(1),
    "1,000 layers": lambda h: h.update(kinds=[["full_attention", {}]] * 1_000),
    "10^12 layers": lambda h: (h.update(kinds=10**12), h["fingerprint"].__setitem__("layers", 10**12)),
    "a kind of no layer": lambda h: h["kinds"][0].__setitem__(0, "half_attention"),
    "many states": lambda h: h["kinds"][0][1].update(number_of_states=10**9),
    "a state of a layer without one": lambda h: h["states"].update({"states.0.conv.0": ["F32", [1, 2]]}),
    "states that are a list": lambda h: h.update(states=[]),
    "an unknown field of the spec": lambda h: h["spec"].__setitem__("bits", 3),
    "bits out of range": lambda h: h["spec"].__setitem__("key_bits", 99),
    "another spec": lambda h: h["spec"].__setitem__("window", 3),
    "a budget": lambda h: h["spec"].__setitem__("budget", 3.0),
    "a spec that is a list": lambda h: h.__setitem__("spec", []),
    "a calibration": lambda h: h.__setitem__("calibration", "00"),
    "a fingerprint that is a list": lambda h: h.__setitem__("fingerprint", []),
    "checksums that are no list": lambda h: h["crc32"].__setitem__("layers.0.pages", 3),
    "checksums of others": lambda h: h["crc32"].__setitem__("layers.0.pages", [3]),
    "checksums that are text": lambda h: h["crc32"].__setitem__("layers.0.pages", ["3"]),
    "a checksum less": lambda h: h["crc32"].popitem(),
    "a page's checksum more": lambda h: h["crc32"]["layers.0.pages"].append(3),
    "another byte format": lambda h: h.__setitem__("byte_format", 1),
}  # fmt: skip


CHANGED_MOMENTS = {
    "none": (lambda h: h.update(moments=None), "its spec needs `moments`"),
    "not wanted": (
        lambda h: (h["spec"].update(centre="none", metric="none"), h.update(widths=None)),
        "its spec needs no `moments`",
    ),
    "of fewer layers": (lambda h: h["moments"]["shapes"].pop(), "`moments` are not of its layers"),
    "of fewer kinds": (
        lambda h: h["moments"]["kinds"].pop(),
        "`layers` must be the 2 layers of its fingerprint, got 1",
    ),
    "of another shape": (lambda h: h["moments"]["shapes"][0].__setitem__(0, 1), "`moments.0.amplitudes` is not of"),
    "too large": (
        lambda h: h["moments"]["shapes"][0].__setitem__(0, 2**40),
        "`moments` must be in 0..65536, got 109951162",
    ),
    "of a number of shapes": (lambda h: h["moments"].update(shapes=7), "`moments` is no mapping"),
    "of another model": (lambda h: h["moments"]["fingerprint"].update(kv_heads=9), "`profile` must be of this model"),
    "of an unknown kind": (lambda h: h["moments"]["kinds"].__setitem__(0, "new"), "`kind` must be one of"),
    "a list": (lambda h: h.update(moments=[1]), "`moments` is no mapping"),
    "averaged, without the measured": (lambda h: h["moments"].update(averaged=True), "`moments.0.measured` is not of"),
}


@pytest.mark.parametrize("change, message", CHANGED_MOMENTS.values(), ids=CHANGED_MOMENTS)
def test_moments_that_a_file_cannot_have(tmp_path, change, message):
    filled(SPECS["wave and metric"])[0].save(tmp_path / "c")
    refuses(tmp_path, forged((tmp_path / "c").read_bytes(), change), message)


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_forged_headers(tmp_path, small, change):
    data = forged(small, change)
    tracemalloc.start()
    refuses(tmp_path, data)
    assert tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()


def test_the_forger_can_make_a_good_file(tmp_path, small):
    """A forged file without a change loads, so the refusals above are due to the changes."""
    (tmp_path / "c").write_bytes(forged(small, lambda header: None))
    assert TurboQuantCache.load(tmp_path / "c").get_seq_length() == 9


def test_headers_that_are_no_header(tmp_path, small):
    for text in (b"", b"[]", b"3", b"{", b"\xff" * 64, b"[" * 100_000, b"1" * 10_000, b'{"byte_format": NaN}'):
        refuses(tmp_path, len(text).to_bytes(8, "little") + text)
        refuses(tmp_path, wrapped(text.decode("latin-1")))
    for about in ([], {}, {"format": FORMAT}, {"format": FORMAT, "turboquant": 3, "crc32": 3}, {"format": []}):
        text = json.dumps({"__metadata__": about}).encode()
        refuses(tmp_path, len(text).to_bytes(8, "little") + text)


def test_numbers_forged_into_pages_are_only_wrong_numbers(tmp_path, small):
    """Files with random tensors and right checksums load, and attention over them does not crash."""
    rng = random.Random(1)
    for _ in range(20):
        header, payload = split(small)
        payload = bytearray(payload)
        for name in header["crc32"]:
            first, last = header["tensors"][name]["data_offsets"]
            payload[first:last] = rng.randbytes(last - first)
            header["crc32"][name] = [zlib.crc32(payload[first:last])]
        (tmp_path / "c").write_bytes(joined(header, payload))
        cache = TurboQuantCache.load(tmp_path / "c")
        try:
            forward(cache, Stream(tokens=20, dim=8, kv_heads=1).piece(9, 20))
        except ValueError as error:
            assert "layer" in str(error)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    cache, _ = filled(PACKED)
    cache.save(tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                cache.save(tmp_path / "c")
        assert os.listdir(tmp_path) == ["c"] and (tmp_path / "c").read_bytes() == before
