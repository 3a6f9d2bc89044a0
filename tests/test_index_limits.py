"""Bad input to an index raises a clear error and changes nothing. Adding vectors takes bounded memory."""

from __future__ import annotations

import json
import tracemalloc
import zlib

import numpy as np
import pytest

import turboquant
from turboquant.index import storage, training

DIM = 48
BAD = [  # (name, whether it is for cosine only, call, error, words of its message)
    ("width", 0, lambda i, x: i.add(x[:, 1:]), ValueError, r"`x` must be of shape \[n, 48\] or \[48\], got \[5, 47\]"),
    ("dimensions", 0, lambda i, x: i.add(x[None]), ValueError, r"`x` must be of shape .* got \[1, 5, 48\]"),
    (
        "type",
        0,
        lambda i, x: i.add(x.astype(complex)),
        TypeError,
        "`x` must be an array or lists of numbers, got ndarray of complex128",
    ),
    ("text", 0, lambda i, x: i.add(["a"]), TypeError, "`x` must be an array or lists of numbers, got list of <U1"),
    ("none", 0, lambda i, x: i.add(None), TypeError, "`x` must be an array or lists of numbers, got NoneType"),
    ("uneven list", 0, lambda i, x: i.add([[1, 2], [3]]), ValueError, r"`x` must be of shape \[n, 48\] or \[48\]: "),
    ("nan", 0, lambda i, x: i.add(changed(x, np.nan)), ValueError, r"`x\[4, 7\]` must be finite .* got nan"),
    ("inf", 0, lambda i, x: i.add(changed(x, np.inf)), ValueError, r"`x\[4, 7\]` must be finite .* got inf"),
    (
        "large",
        0,
        lambda i, x: i.add(np.where(np.arange(48) == 3, 1e300, x.astype(float))),
        ValueError,
        r"`x\[0, 3\]` must be finite in float32, got 1e\+300",
    ),
    ("zero", 1, lambda i, x: i.add(x * np.arange(5)[:, None].astype("f")), ValueError, r"`x\[0\]` must not be zero"),
    ("same ids", 0, lambda i, x: i.add(x, [9, 8, 7, 8, 6]), ValueError, "`ids` must differ, got 8 more than once"),
    ("old ids", 0, lambda i, x: i.add(x, [950, 801, 952, 953, 954]), ValueError, "`ids` must be new, got 801"),
    ("few ids", 0, lambda i, x: i.add(x, [900]), ValueError, "`ids` must be 5 ids, one a vector, got 1"),
    (
        "negative ids",
        0,
        lambda i, x: i.add(x, [900, -1, 902, 903, 904]),
        ValueError,
        r"`ids` must be in 0..2\^63 - 1, got -1",
    ),
    ("large ids", 0, lambda i, x: i.add(x, np.full(5, 2**63, np.uint64)), ValueError, r"`ids` must be in 0..2\^63 - 1"),
    ("float ids", 0, lambda i, x: i.add(x, np.arange(5.0)), TypeError, "`ids` must be integers .* got float64"),
    ("unknown id", 0, lambda i, x: i.remove([801, 77_777]), ValueError, "77777"),
    ("train again", 0, lambda i, x: i.train(x), ValueError, "must be empty, it has 900 vectors"),
    ("k", 0, lambda i, x: i.search(x, 0), ValueError, "`k` must be in 1"),
    ("k of a float", 0, lambda i, x: i.search(x, 2.0), TypeError, "`k` must be an integer, got 2.0"),
    ("threads", 0, lambda i, x: i.search(x, 1, threads=-1), ValueError, "`threads` must be in 0..256, got -1"),
    (
        "mask",
        0,
        lambda i, x: i.search(x, 1, np.ones(899, bool)),
        ValueError,
        "`filter` must be a mask of 900, .* got .899.",
    ),
    ("query width", 0, lambda i, x: i.search(x[:, 2:], 1), ValueError, r"`queries` must be of shape .* got \[5, 46\]"),
    ("query nan", 0, lambda i, x: i.search(changed(x, np.nan), 1), ValueError, r"`queries\[4, 7\]` must be finite"),
    ("query zero", 1, lambda i, x: i.search(x * 0, 1), ValueError, r"`queries\[0\]` must not be zero"),
    ("range", 0, lambda i, x: i.range_search(x, np.nan), ValueError, "`threshold` must be a number, got nan"),
    ("range of text", 0, lambda i, x: i.range_search(x, "1"), TypeError, "`threshold` must be a number, got '1'"),
    ("range of a list", 0, lambda i, x: i.range_search(x, [1, 2]), TypeError, "`threshold` must be a number, got .1"),
    (
        "masked",
        0,
        lambda i, x: i.add(np.ma.masked_less(x, 0)),
        ValueError,
        "`x` must have no masked entries, got [1-9][0-9]* of them",
    ),
    ("masked ids", 0, lambda i, x: i.remove(np.ma.array([1, 2], mask=[0, 1])), ValueError, "`ids` must have no masked"),
    ("filter of floats", 0, lambda i, x: i.search(x, 1, [1.5]), TypeError, "`filter` must be integers .* got float64"),
    ("filter, a set", 0, lambda i, x: i.search(x, 1, {1, 2}), TypeError, "`filter` must be integers .* got set"),
    ("k of an array", 0, lambda i, x: i.search(x, x), TypeError, r"`k` must be an integer, got ndarray"),
    ("reconstruct", 0, lambda i, x: i.reconstruct([3, 77_777]), ValueError, "77777"),
]


def changed(x, number):
    x = x.copy()
    x[4, 7] = number
    return x


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_bad_input_changes_nothing(metric, tmp_path):
    x = np.random.default_rng(0).standard_normal((900, DIM)).astype(np.float32)
    index = turboquant.Index(DIM, 3, metric)
    index.train(x)
    index.add(x[:800])
    index.add(x[800:], ids=np.arange(800, 900) + 1)
    index.save(tmp_path / "before")
    before, found = (tmp_path / "before").read_bytes(), index.search(x[:4], 7)
    for name, cosine_only, call, error, words in BAD:
        if cosine_only and metric != "cosine":
            continue
        with pytest.raises(error, match=words):
            call(index, x[:5])
        index.save(tmp_path / "after")
        assert (tmp_path / "after").read_bytes() == before, name
        assert all((a == b).all() for a, b in zip(index.search(x[:4], 7), found, strict=True)), name


def resealed(data, change):
    """Returns the file with its header changed, and with a checksum that fits the new header."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    about = header["__metadata__"]
    meta = json.loads(about["turboquant"])
    change(header, meta)
    about["turboquant"] = json.dumps(meta)
    about["crc32"] = f"{zlib.crc32(about['turboquant'].encode()):08x}"
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + data[start:]


def rename_format(header, meta):
    header["__metadata__"]["format"] = "turboquant-index-9"


def longer(header, meta):
    header["codes"]["data_offsets"][1] += 64


def other_rows(header, meta):
    header["scales"]["shape"] = [99]


FILES = {
    "cut off": lambda data: data[:-1],
    "cut off in the header": lambda data: data[:100],
    "nothing": lambda data: b"",
    "another version": lambda data: resealed(data, rename_format),
    "sizes beyond the file": lambda data: resealed(data, longer),
    "sizes that differ": lambda data: resealed(data, other_rows),
    "a dimension that differs": lambda data: resealed(data, lambda header, meta: meta.update(dim=96)),
    "ids beyond the next": lambda data: resealed(data, lambda header, meta: meta.update(next_id=3)),
}


def test_the_row_of_a_large_sample_is_named(monkeypatch):
    """An error names the row of the whole sample, though training reads only every third row here."""
    monkeypatch.setattr(training, "JUDGES", 100)
    x = np.ones((250, 8))
    x[9, 5] = np.nan
    with pytest.raises(ValueError, match=r"train: `sample\[9, 5\]` must be finite in float32, got nan"):
        turboquant.Index(8).train(x)
    x[9] = 0
    with pytest.raises(ValueError, match=r"train: `sample\[9\]` must not be zero with cosine"):
        turboquant.Index(8, metric="cosine").train(x)


@pytest.mark.parametrize("how", FILES)
def test_bad_files_are_refused(how, tmp_path):
    index = turboquant.Index(DIM, 3)
    index.add(np.random.default_rng(0).standard_normal((100, DIM)).astype(np.float32))
    index.save(tmp_path / "good")
    turboquant.Index.load(tmp_path / "good")
    (tmp_path / "bad").write_bytes(FILES[how]((tmp_path / "good").read_bytes()))
    for mapped in (True, False):
        with pytest.raises(ValueError, match=r"`path` must be a file of an index, got '.*bad': .{10}"):
            turboquant.Index.load(tmp_path / "bad", mmap=mapped)


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n", [3 * storage.ROWS + storage.ROWS // 3, 5 * storage.ROWS - 1])
def test_adding_takes_one_segment_beside_index_and_array(n, dtype, own_ids):
    """Adding allocates about one segment beside the index, the array and the ids that it returns. Given ids are also
    sorted once, and float16 is converted to float32 one segment at a time."""
    x = np.random.default_rng(0).standard_normal((n, DIM), np.float32).astype(dtype)
    ids = np.random.default_rng(1).permutation(n) if own_ids else None
    turboquant.Index(DIM, 4, "l2").add(x[:1])  # the first call imports modules, which are no part of what is measured
    index = turboquant.Index(DIM, 4, "l2")
    tracemalloc.start()
    try:
        for part in (np.s_[: storage.ROWS // 4], np.s_[storage.ROWS // 4 :]):
            held, before = tracemalloc.get_traced_memory()[0], index.nbytes
            tracemalloc.reset_peak()
            index.add(x[part], None if ids is None else ids[part])
            beyond = tracemalloc.get_traced_memory()[1] - held - (index.nbytes - before)
            row = (index.nbytes - index.fixed_nbytes) / len(index) + (8 if ids is None else 0)  # room for ids
            allowed = storage.ROWS * row + 8 * len(x[part]) + 100_000
            if dtype == np.float16:
                allowed += storage.ROWS * DIM * 4
            if own_ids:
                allowed += 9 * len(x[part]) + 80 * storage.ROWS
            assert beyond < allowed
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [1, 3, storage.ROWS])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_largest_id(n, mapped, tmp_path):
    """Consecutive ids may end with 2^63 - 1. More rows than half a segment have no list of ids."""
    x = np.random.default_rng(0).standard_normal((n, 8)).astype(np.float32)
    index = turboquant.Index(8)
    first = 2**63 - n
    index.add(x[:1], ids=[first - 1])
    index.remove([first - 1])
    index.add(x)
    index.save(tmp_path / "index")
    loaded = turboquant.Index.load(tmp_path / "index", mmap=mapped)
    for one in (index, loaded):
        assert (one.ids == first + np.arange(n)).all()
        assert set(one.search(x[:1], n)[1][0]) == set(one.ids)


@pytest.mark.parametrize("tiny", [1e-24, 1e-40])
@pytest.mark.parametrize("axes", [False, True])
def test_a_tiny_row_of_a_sample_counts_like_others_with_cosine(axes, tiny):
    """The square of such a row's length is 0 in float32, and dividing by it would make the index's mean infinite."""
    x = np.random.default_rng(0).standard_normal((300, DIM)).astype(np.float32)
    small = x.copy()
    small[7] *= np.float32(tiny)
    found = []
    for sample in (x, small):
        index = turboquant.Index(DIM, 3, "cosine")
        index.train(sample, axes)
        index.add(x)
        found.append(index.search(x[:9], 5))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=0.02)
    assert np.isfinite(found[1][0]).all() and (found[1][1][:, 0] == np.arange(9)).all()


def test_a_sample_of_denormals():
    x = np.random.default_rng(0).standard_normal((100, DIM)).astype(np.float32)
    index = turboquant.Index(DIM, 3, "l2")
    index.train(x[:, :1] * x[0] * np.float32(1e-43))  # one axis: the others would have steps of 0
    index.add(x)
    assert (index.search(x[:9], 1)[1][:, 0] == np.arange(9)).all()


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_tiny_vectors_are_found_as_zeros(metric, bits):
    """Vectors whose rms is below 2^-126 are stored as zeros: 1 / rms of smaller ones is infinite in float32."""
    x = np.random.default_rng(0).standard_normal((100, DIM)).astype(np.float32)
    tiny = [0, 1, 2, 3]
    x[tiny] = x[tiny] * np.float32([[0], [1e-45], [1e-43], [2e-39]])
    index = turboquant.Index(DIM, bits, metric)
    index.add(x)
    assert (index.reconstruct(tiny) == 0).all()
    scores, ids = index.search(x[50], 100)
    assert sorted(ids) == list(range(100)) and np.isfinite(scores).all()
    expected = 0 if metric == "ip" else np.square(x[50], dtype=np.float64).sum()
    np.testing.assert_allclose(scores[np.isin(ids, tiny)], expected, rtol=1e-6)
