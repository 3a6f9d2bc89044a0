"""Lists of an index: which list a row belongs to, what a search reads, files, and bad input. Rows of the sample replace
k-means, except in the test of k-means. test_index_states.py changes an index with lists in any order."""

from __future__ import annotations

import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
from slow_index import SlowIndex, list_values

import turboquant
from turboquant import _core
from turboquant.cli import main
from turboquant.files import write_arrays
from turboquant.index import lists, storage
from turboquant.index.documents import Document, Documents

DIM, LISTS = 44, 21
METRICS = ["ip", "cosine", "l2"]


@pytest.fixture
def few_means(monkeypatch):
    monkeypatch.setattr(lists, "_clustered", lambda x, n, *_: x[:n] * np.float32(1.5))


def rows(seed, n):
    """Rows around some centres."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((12, DIM))
    return (centres[rng.integers(0, 12, n)] + 0.6 * rng.standard_normal((n, DIM))).astype(np.float32)


def filled(metric="ip", n=1500, bits=3, tail=0):
    index = turboquant.Index(DIM, bits, metric, lists=LISTS)
    index.train(rows(0, 1200))
    index.add(rows(1, n))
    index.compact()
    if tail:
        index.add(rows(2, tail))
    return index


def same(one, other):
    return all((a == b).all() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("isa", _core.isa_available())
@pytest.mark.parametrize("metric", METRICS)
def test_lists_by_one_rule(few_means, metric, isa):
    """On every instruction set a row belongs to the list with the largest value in float64, equal rows to one list."""
    index = turboquant.Index(DIM, 3, metric, lists=LISTS)
    index.train(rows(0, 1200))
    slow = SlowIndex(index)
    x = rows(3, 333)
    x[200:] = x[:133]  # the same numbers give the same list wherever they are
    _core.set_isa(isa)
    try:
        got = _core.index_assign(index._space(index._contents), x)
    finally:
        _core.set_isa(None)
    values = list_values(slow.transform, metric, slow._prepared(x).astype(np.float32))
    assert np.isclose(values[np.arange(333), got], values.max(axis=1), rtol=1e-14).all()
    assert (got[200:] == got[:133]).all() and len(set(got.tolist())) > 5


def test_equal_values_belong_to_the_first_list(monkeypatch):
    monkeypatch.setattr(lists, "_clustered", lambda x, n, *_: np.repeat(x[: n // 3 + 1], 3, axis=0)[:n])
    index = filled()
    assert (index._contents.segments[0].lists_of(np.arange(1500)) % 3 == 0).all()


@pytest.mark.parametrize("isa", _core.isa_available())
@pytest.mark.parametrize("metric", METRICS)
def test_probed_lists_are_as_good_as_a_slow_scan_of_them(few_means, metric, isa):
    """A search finds the best rows of the nearest lists and of the tail, by all bits and with the bound, on every
    instruction set, with any number of threads and queries."""
    index, slow, queries = filled(metric, tail=100), None, rows(4, 9)
    slow = SlowIndex(index)
    slow.add(np.concatenate([rows(1, 1500), rows(2, 100)]))
    values = list_values(slow.transform, metric, slow._prepared(queries))
    there = {slow.lists[i] for i in range(1500)}
    _core.set_isa(isa)
    try:
        for probe in (1, 3, LISTS):
            scores, ids = index.search(queries, 20, sigmas=np.inf, probe=probe)
            assert same((scores, ids), index.search(queries, 20, threads=4, sigmas=np.inf, probe=probe))
            bounded = index.search(queries, 20, probe=probe, threads=1)
            assert same(bounded, index.search(queries, 20, probe=probe, threads=3))
            for i, query in enumerate(queries):
                near = sorted(there, key=lambda own: -values[i, own])[:probe]
                among = {j for j, own in slow.lists.items() if own in near or j >= 1500}
                assert set(ids[i].tolist()) <= among and set(bounded[1][i].tolist()) <= among
                best = slow.search(query, 20, among)[0]
                assert np.allclose(scores[i], best, atol=5e-4 * np.abs(best).max())
                assert same(index.search(query, 20, probe=probe), (bounded[0][i], bounded[1][i]))
            found = sum(len(set(a) & set(b)) for a, b in zip(ids.tolist(), bounded[1].tolist(), strict=True))
            assert found >= 0.95 * ids.size
    finally:
        _core.set_isa(None)


@pytest.mark.parametrize("isa", _core.isa_available())
@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_few_of_many_lists_are_found_as_if_all_had_their_values(monkeypatch, metric, isa):
    """If a search reads few lists, it rules most others out in float32. Many centres here are equal, or differ by less
    than float32 can tell. A tail, even one of removed rows, makes a search compute all values in float64."""

    def means(x, n, *_):
        noise = 2e-7 * np.random.default_rng(5).standard_normal((n, DIM)) * (np.arange(n) % 3 > 0)[:, None]
        return (np.repeat(x[: n // 10], 10, axis=0) * (1 + noise)).astype(np.float32)

    monkeypatch.setattr(lists, "_clustered", means)
    _core.set_isa(isa)
    try:
        index = turboquant.Index(DIM, 2, metric, lists=170)
        index.train(rows(0, 1200))
        index.add(np.repeat(index._contents.transform.lists.directions, 9, axis=0) + rows(1, 1530) / 10)
        index.compact()
        queries = rows(4, 75)
        found = [index.search(queries, 20, probe=probe, sigmas=np.inf) for probe in (1, 3, 5)]
        for probe, own in zip((1, 3, 5), found, strict=True):
            assert same(own, index.search(queries, 20, probe=probe, threads=3, sigmas=np.inf))
            for i in range(3):
                assert same(index.search(queries[i], 20, probe=probe, sigmas=np.inf), (own[0][i], own[1][i]))
        index.add(rows(2, 1), ids=[9999])
        index.remove([9999])
        for probe, own in zip((1, 3, 5), found, strict=True):
            assert same(own, index.search(queries, 20, probe=probe, sigmas=np.inf))
    finally:
        _core.set_isa(None)


def test_levels_give_the_same_bits(few_means):
    found = []
    for isa in _core.isa_available():
        _core.set_isa(isa)
        try:
            index = filled("l2", tail=70)
            found.append((index._contents.segments[0].offsets, *index.search(rows(4, 9), 10, probe=2)))
        finally:
            _core.set_isa(None)
    assert len(found) > 1 and all(same(found[0], other) for other in found)


@pytest.mark.parametrize("metric", METRICS)
def test_tail_and_sorted_rows_give_the_same_results(few_means, metric):
    index, queries = turboquant.Index(DIM, 4, metric, lists=LISTS), rows(4, 30)
    index.train(rows(0, 1200))
    for at in range(0, 1500, 300):
        index.add(rows(1, 1500)[at : at + 300])
    tail = index.search(queries, 10), index.range_search(queries, index.search(queries[0], 30)[0][-1])
    decoded = index.reconstruct([3, 700, 1400])
    assert same(index.search(queries, 10, probe=1), tail[0])  # every search reads all of the tail
    index.compact()
    assert isinstance(index._contents.segments[0], lists.Sorted) and len(index._contents.segments) == 1
    assert same(index.search(queries, 10), tail[0])
    assert same(index.range_search(queries, index.search(queries[0], 30)[0][-1]), tail[1])
    assert (index.reconstruct([3, 700, 1400]) == decoded).all()
    x = rows(1, 1500)[[3, 700, 1400]]
    x = x / np.linalg.norm(x, axis=1, keepdims=True) if metric == "cosine" else x
    assert np.square(decoded - x).sum() < 0.02 * np.square(x).sum()


def test_rows_of_a_list_lie_together_from_a_new_block_on(few_means):
    index = filled(n=1500)
    segment = index._contents.segments[0]
    of = segment.lists_of(np.arange(1500))
    assert (np.diff(of) >= 0).all() and (np.bincount(of, minlength=LISTS) == np.diff(segment.starts)).all()
    _, lanes = segment.places(segment.starts[:-1][np.diff(segment.starts) > 0])
    assert (lanes == 0).all() and len(segment.signs) == (-(-np.diff(segment.starts) // 64)).sum() > 1500 // 64 + 5
    for own in range(LISTS):
        assert (np.diff(segment.ids[segment.starts[own] : segment.starts[own + 1]]) > 0).all()


def test_lists_without_allowed_rows_are_skipped(few_means):
    index, query = filled(), rows(4, 1)[0]
    segment = index._contents.segments[0]
    values = list_values(index._contents.transform, "ip", query[None])[0]
    size = np.diff(segment.starts)
    far = [own for own in np.argsort(values).tolist() if size[own] > 40][:2]
    allowed = segment.ids[np.isin(segment.lists_of(np.arange(1500)), far)]
    scores, ids = index.search(query, 5, allowed, probe=1)
    nearer = max(far, key=lambda own: values[own])
    assert len(allowed) > 1500 // 50 and (ids >= 0).all()
    assert set(ids) <= set(segment.ids[segment.starts[nearer] : segment.starts[nearer + 1]])
    index.remove(np.setdiff1d(np.arange(1500), allowed)[:700])  # tombstones, no compaction yet
    assert same(index.search(query, 5, allowed, probe=1), (scores, ids))


def test_few_allowed_rows_are_all_scored(few_means):
    index, query = filled(), rows(4, 1)[0]
    allowed = np.arange(0, 1500, 60)
    assert same(index.search(query, 9, allowed, probe=1), index.search(query, 9, allowed))
    mask = np.isin(index.ids, allowed)
    assert same(index.search(query, 9, mask, probe=1), index.search(query, 9, allowed))


def test_more_lists_than_rows_with_them(few_means):
    index = filled(n=3)
    scores, ids = index.search(rows(4, 2), 5, probe=LISTS)
    assert (np.sort(ids, axis=1)[:, 2:] == [0, 1, 2]).all() and np.isneginf(scores[:, 3:]).all()
    index.remove([0, 1, 2])
    assert len(index) == 0 and (index.search(rows(4, 2), 5, probe=2)[1] == -1).all()


@pytest.mark.parametrize("metric", METRICS)
def test_files_copies_and_pickles(few_means, metric, tmp_path):
    index, queries = filled(metric, tail=50), rows(4, 9)
    index.remove([5, 1503])
    index.save(tmp_path / "index")
    index.compact()
    found = index.search(queries, 10, probe=3)
    mapped = turboquant.Index.load(tmp_path / "index")
    mapped.verify()
    assert mapped.lists == LISTS and "21 lists" in repr(mapped) and mapped.training["chosen"] == "lists"
    for other in (mapped, mapped.copy(), index.copy(), pickle.loads(pickle.dumps(index))):
        assert same(other.search(queries, 10, probe=3), found)
    changed = mapped.copy()
    changed.add(rows(5, 200))
    changed.remove([7])
    assert same(mapped.search(queries, 10, probe=3), found)
    changed.save(tmp_path / "changed")
    assert len(turboquant.Index.load(tmp_path / "changed")) == len(index) + 199
    assert index.nbytes == mapped.nbytes and index.fixed_nbytes > 4 * LISTS * DIM
    empty = turboquant.Index(DIM, 3, metric, lists=LISTS)
    empty.save(tmp_path / "empty")
    empty = turboquant.Index.load(tmp_path / "empty", mmap=False)
    assert empty.lists == LISTS and not empty.is_trained
    empty.train(rows(0, 1200))


def test_searches_go_on_over_what_they_began_with(few_means):
    index, queries = filled(tail=50), rows(4, 9)
    now = index._contents
    found = index.search(queries, 10, probe=2)
    index.add(rows(6, 500))
    index.remove(np.arange(0, 900))
    index._contents, later = now, index._contents
    assert same(index.search(queries, 10, probe=2), found)
    index._contents = later
    assert (index.search(queries, 10)[1] >= 900).all()


def test_large_numbers(few_means):
    x = rows(1, 900) * np.float32(1e30)
    for metric in ("ip", "l2"):
        index = turboquant.Index(DIM, 4, metric, lists=LISTS)
        index.train(x)
        index.add(x * np.float32(1e-6))
        index.add(x * np.float32(1e3))  # divided by more than the rows before
        index.compact()
        query = x[5] * np.float32(1e3)
        scores, ids = index.search(query, 5, probe=4)
        best = [905] if metric == "l2" else np.argsort(-(x[:900].astype(float) @ x[5].astype(float)))[:3] + 900
        assert set(best) <= set(ids) and np.isfinite(scores).all()


@pytest.mark.parametrize("metric", METRICS)
def test_refine_in_lists(few_means, metric):
    index, x, queries = filled(metric, bits=2), rows(1, 1500), rows(4, 9)
    scores, ids = index.search(queries, 5, refine=x, factor=20, probe=9)
    slow, everything = SlowIndex(index), index.search(queries, 100, probe=9)[1]
    for i, query in enumerate(slow._prepared(queries)):
        near = slow._prepared(x[everything[i]])
        exact = ((near - query) ** 2).sum(1) if metric == "l2" else near @ query
        order = np.argsort(exact if metric == "l2" else -exact)[:5]
        assert (ids[i] == everything[i][order]).all() and np.allclose(scores[i], exact[order], rtol=1e-5)


def test_documents_in_lists(few_means, tmp_path):
    index, x = turboquant.Index(DIM, 4, "cosine", lists=LISTS), rows(1, 200)
    table = Documents(index)
    with pytest.raises(ValueError, match=r"`train` must learn first"):
        table.add([Document("0", "text", {})], x[:1])
    assert not len(table) and not len(index)
    index.train(rows(0, 1200))
    table.add([Document(str(i), f"text {i}", {"third": i % 3}) for i in range(200)], x)
    index.compact()
    table.add([Document("7", "new", {"third": 0})], x[:1])  # replaces one that is sorted
    third = {"field": "third", "operator": "==", "value": 0}
    found = [d.id for d, _ in table.search(x[0], 3, third)]
    assert set(found[:2]) == {"0", "7"}
    table.save(tmp_path / "table")
    again = Documents.load(tmp_path / "table")
    assert again.index.lists == LISTS and len(again) == 200
    assert [d.id for d, _ in again.search(x[0], 3, third)] == found


def test_commands_and_shards(few_means, tmp_path, capsys):
    np.save(tmp_path / "x.npy", rows(1, 900))
    np.save(tmp_path / "q.npy", rows(4, 3))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    build = ["index", "build", str(tmp_path / "x.npy"), "--bits", "4", "--lists", "9", "--out", one]
    assert main(build) == main(["index", "info", one]) == 0
    assert "lists     9" in capsys.readouterr().out
    assert main(["index", "search", one, str(tmp_path / "q.npy"), "-k", "200", "--probe", "1"]) == 0
    index = turboquant.Index.load(one)
    found = index.search(rows(4, 3), 200, probe=1)[1]
    assert (found < 0).any() and (index.search(rows(4, 3), 200)[1] >= 0).all()  # a list has fewer rows
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [int(line.split(",")[2]) for line in lines] == found[found >= 0].tolist()
    other = index.copy()
    other.remove(np.arange(450))
    other.save(two)
    index = index.copy()
    index.remove(np.arange(450, 900))
    index.save(one)
    assert same(
        turboquant.search_shards([one, two], rows(4, 3), 2, probe=9), index_of(rows(1, 900)).search(rows(4, 3), 2)
    )
    apart = turboquant.Index(DIM, 4, lists=9)
    apart.train(rows(7, 100))
    apart.add(rows(7, 3), [1000, 1001, 1002])
    apart.save(two)
    with pytest.raises(ValueError, match="one transform"):
        turboquant.search_shards([one, two], rows(4, 3), 2)


def index_of(x):
    index = turboquant.Index(DIM, 4, lists=9)
    index.train(x)
    index.add(x)
    return index


BAD = [
    (lambda i, x: i.search(x, 1, probe=0), ValueError, r"search: `probe` must be in 1..21, got 0"),
    (lambda i, x: i.search(x, 1, probe=22), ValueError, r"search: `probe` must be in 1..21, got 22"),
    (lambda i, x: i.search(x, 1, probe=2.0), TypeError, r"search: `probe` must be an integer, got 2.0"),
    (lambda i, x: i.search(x, 1, refine=x, probe=22), ValueError, r"`probe` must be in 1..21, got 22"),
    (lambda i, x: i.add(x[:, :-1]), ValueError, "`x` must be of shape"),
    (lambda i, x: i.add(np.where(np.arange(DIM) == 7, np.nan, x)), ValueError, r"`x\[0, 7\]` must be finite"),
    (lambda i, x: i.train(x), ValueError, "must be empty, it has 1550 vectors"),
]


def test_bad_input_changes_nothing(few_means, tmp_path):
    index, x = filled(tail=50), rows(4, 30)
    before = index._contents, index.search(x, 5)
    for call, error, words in BAD:
        with pytest.raises(error, match=words):
            call(index, x)
        assert index._contents is before[0] and same(index.search(x, 5), before[1])
    with pytest.raises(ValueError, match=r"search: `probe` needs lists"):
        turboquant.Index(DIM).search(x, 1, probe=1)
    for wrong in (-1, 2**20 + 1):
        with pytest.raises(ValueError, match=r"Index: `lists` must be in 0..1048576"):
            turboquant.Index(DIM, lists=wrong)
    new = turboquant.Index(DIM, lists=LISTS)
    with pytest.raises(ValueError, match=r"`train` must learn first"):
        new.add(x)
    with pytest.raises(ValueError, match=r"`sample` must have a row for each of 21 lists, got 20 rows"):
        new.train(x[:20])
    with pytest.raises(ValueError, match=r"`recall` must be None with lists"):
        new.train(rows(0, 200), recall=0.9)
    assert not new.is_trained and len(new) == 0


def test_core_refuses_wrong_lists(few_means):
    index = filled()
    now = index._contents
    space, (segment,) = index._space(now), now.rows(None)
    x = rows(4, 5)
    for wrong, words in [
        (None, "`lists` must be "),
        (np.full(5, LISTS, np.int32), r"`lists` must be in 0..20, got 21"),
        (np.full(5, -1, np.int32), r"`lists` must be in 0..20, got -1"),
        (np.zeros(4, np.int32), "`lists` must be "),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            _core.index_encode(space, x, lists=wrong)
    starts = segment[7]
    for wrong in (starts[::-1].copy(), starts + 1, starts[:-1], np.where(starts == 1500, 1501, starts)):
        with pytest.raises((ValueError, TypeError), match="`lists` must "):
            _core.index_search(space, x, ((*segment[:7], wrong),), 3)
    with pytest.raises(TypeError, match="`segments` must be"):
        _core.index_search(space, x, (segment[:7],), 3)
    with pytest.raises(TypeError, match="`segments` must be"):
        _core.index_search(space[:9], x, (segment,), 3)
    with pytest.raises(ValueError, match="`n_lists` must be above 0"):
        _core.index_assign(space[:9], x)


@pytest.mark.parametrize("change", ["starts", "must ascend", "directions", "lengths", "mean", r"\[22, 44\]"])
def test_contradictory_files_are_refused(few_means, change, tmp_path):
    index = filled()
    index.save(tmp_path / "index")
    meta, arrays = storage.read(str(tmp_path / "index"), False)
    if change == "starts":
        arrays["starts"] = arrays["starts"][::-1].copy()
    elif change == "must ascend":
        arrays["starts"][1:4] = 2**63 - 1, -(2**63), -1  # differences overflow
    elif change == "mean":
        arrays["mean"] = np.zeros(DIM, np.float32)
    elif change.startswith("\\["):
        meta["lists"] = LISTS + 1
    elif change == "directions":
        arrays["directions"] = np.full((LISTS, DIM), np.nan, np.float32)
    else:
        del arrays["lengths"]
    del meta["crc32"]
    write_arrays(tmp_path / "index", storage.FORMAT, meta, arrays)
    with pytest.raises(ValueError, match=rf"`path` must be a file of an index, .*{change}"):
        turboquant.Index.load(tmp_path / "index")


@pytest.mark.parametrize("package", ["faiss", "sklearn", None])
@pytest.mark.parametrize("metric", METRICS)
def test_centres_are_those_of_k_means(package, metric, monkeypatch):
    if package is None:
        monkeypatch.setitem(__import__("sys").modules, "faiss", None)
        monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
        with pytest.raises(ImportError, match=r"lists need faiss-cpu .*turboquant-attention\[lists\]"):
            turboquant.Index(DIM, lists=4).train(rows(0, 100))
        return
    if package == "sklearn":
        monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    pytest.importorskip(package)
    index, x, queries = turboquant.Index(DIM, 3, metric, lists=24), rows(1, 4000), rows(4, 60)
    index.train(x)
    index.add(x)
    index.compact()
    flat = turboquant.Index(DIM, 3, metric)
    flat.train(x, axes=False)
    flat.add(x)
    exact = turboquant.Index(DIM, 8, metric)
    exact.add(x)
    truth = exact.search(queries, 10)[1].tolist()

    def recall(ids):
        return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids.tolist(), truth, strict=True)])

    assert recall(index.search(queries, 10)[1]) > recall(flat.search(queries, 10)[1]) + 0.02
    assert recall(index.search(queries, 10, probe=6)[1]) > recall(index.search(queries, 10)[1]) - 0.05


def test_a_query_needs_little_memory_with_many_lists_and_threads(few_means):
    """Each thread would have work, but one query is made by one thread."""
    index, many, x = turboquant.Index(8, 3, lists=1), 2**18, rows(3, 2**16)[:, :8].copy()
    index.train(x[:200])
    centres = np.zeros((many // 16, 8, 16), np.float32), np.ones(many, np.float32)
    space, of_rows = (*index._space(index._contents)[:9], centres), np.zeros(len(x), np.int32)
    codes = _core.index_encode(space, x, lists=of_rows)
    segment = (*codes, 0, None, _core.index_factors(codes[2], codes[3]), of_rows)
    alone = _core.index_search(space, x[7:8], (segment,), 1, threads=1)
    before, limits = _core.num_threads(), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _core.set_num_threads(64)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, limits[1]))
        assert same(_core.index_search(space, x[7:8], (segment,), 1), alone)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        _core.set_num_threads(before)
