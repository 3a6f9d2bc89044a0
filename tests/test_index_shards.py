"""`search_shards` finds what one index finds, with any executor. Files that a manifest does not name are refused."""

from __future__ import annotations

import json
import math
import os
import pickle
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_index import METRICS, exact, recall, rows

import turboquant
from turboquant import search_shards, verify_shards, write_manifest
from turboquant.index import shards


def filled(folder, x, cuts, base, ids=None):
    """Saves copies of `base`, each with the rows between two cuts, and returns their paths."""
    ids = np.arange(len(x)) if ids is None else ids
    paths = []
    for i, (low, high) in enumerate(zip([0, *cuts], [*cuts, len(x)], strict=True)):
        one = base.copy()
        one.add(x[low:high], ids=ids[low:high])
        paths.append(folder / f"{i}.safetensors")
        one.save(paths[-1])
    return paths


def whole(x, base, ids=None):
    index = base.copy()
    index.add(x, ids=ids)
    return index


def trained(metric="ip", dim=64, bits=3, seed=0, refine=None):
    index = turboquant.Index(dim, bits, metric, seed, refine=refine)
    index.train(rows(500, dim, seed=9) + np.float32(0.2))
    assert index.training["chosen"] != "none"
    return index


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """(folder, vectors, an index of all, files of three parts of it, their manifest)."""
    folder = tmp_path_factory.mktemp("shards")
    x, base = rows(3000), trained("cosine")
    paths = filled(folder, x, [700, 1900], base)
    write_manifest(folder / "all.json", paths)
    return folder, x, whole(x, base), paths, folder / "all.json"


@pytest.mark.parametrize("metric", METRICS)
def test_all_bits_of_shards_give_what_one_index_gives(metric, tmp_path):
    """Scores and ids are equal however rows are divided: ids mixed, an empty shard, fewer rows than k, one query."""
    x, queries, base = rows(900), rows(20, seed=1), trained(metric)
    ids = np.random.default_rng(0).permutation(5000)[:900]
    paths = filled(tmp_path, x, [3, 3, 400], base, ids)
    index = whole(x, base, ids)
    for given_queries, k in ((queries, 10), (queries[0], 7), (queries[:2], 1000), (queries[:0], 3)):
        want = index.search(given_queries, k, sigmas=math.inf)
        got = search_shards(paths, given_queries, k, sigmas=math.inf)
        assert all(map(np.array_equal, got, want)) and [a.dtype for a in got] == [a.dtype for a in want]
    some = [*ids[::7].tolist(), 6000]
    want = index.search(queries, 10, filter=some, sigmas=math.inf)
    assert all(map(np.array_equal, search_shards(paths, queries, 10, filter=some, sigmas=math.inf), want))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_division_is_one_index(data, tmp_path_factory):
    """Rows repeat, so that scores tie across shards, and large ones make an index divide its vectors."""
    n, metric = data.draw(st.integers(1, 200)), data.draw(st.sampled_from(METRICS))
    x = rows(8, 24, seed=3)[np.random.default_rng(n).integers(0, 8, n)]
    x[: data.draw(st.integers(0, n))] *= np.float32(2.0 ** data.draw(st.sampled_from([0, 60])))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    base = turboquant.Index(24, data.draw(st.sampled_from([1, 3, 8])), metric)
    paths = filled(tmp_path_factory.mktemp("shards"), x, cuts, base)
    k = data.draw(st.integers(1, 30))
    want = whole(x, base).search(x[:5], k, sigmas=math.inf)
    scores, ids = search_shards(paths, x[:5], k, sigmas=math.inf)
    np.testing.assert_array_equal(ids, want[1])
    np.testing.assert_array_equal(scores, want[0])


def test_bounds_of_shards_miss_hardly_more(three):
    """Each shard has its own limit, which is looser: other rows are scored, and recall hardly changes."""
    _, x, index, paths, _ = three
    queries = rows(200, seed=5)
    (scores, ids), (_, want) = search_shards(paths, queries, 10), index.search(queries, 10)
    assert np.mean([len(np.intersect1d(a, b)) for a, b in zip(ids, want, strict=True)]) > 9.8
    every = exact(queries, x, "cosine")
    assert recall(ids, every) >= recall(want, every) - 0.01
    assert (np.diff(scores, axis=1) <= 0).all()


class Queue:
    """An executor that is not of concurrent.futures. It runs a task when its result is asked for."""

    def __init__(self):
        self.cancelled = 0

    def submit(self, task, *arguments):
        queue, future = self, Future()
        future.result = lambda: pickle.loads(pickle.dumps(task))(*pickle.loads(pickle.dumps(arguments)))

        def cancel():
            queue.cancelled += 1
            return False

        future.cancel = cancel
        return future


def test_executors(three):
    """Results are the same with threads, spawned processes, any object that has `submit`, and with relative paths."""
    _, _, _, paths, manifest = three
    queries = rows(30, seed=2)
    want = search_shards(paths, queries, 10)
    with ThreadPoolExecutor(3) as threads, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        for executor in (threads, processes, Queue()):
            for named in (paths, manifest, [os.path.relpath(path) for path in paths]):
                got = search_shards(named, queries, 10, executor, threads=1)
                assert all(map(np.array_equal, got, want))


def test_a_process_maps_each_file_once_and_anew_where_it_was_replaced(tmp_path, monkeypatch):
    x, base = rows(200), trained()
    paths = filled(tmp_path, x, [100], base)
    opened = []
    monkeypatch.setattr(shards, "_open", lambda path, real=shards._open: (opened.append(path), real(path))[1])
    for _ in range(3):
        search_shards(paths, x[:2], 5)
    assert opened == list(map(str, paths))
    whole(x[100:150], base, np.arange(100, 150)).save(paths[1])
    scores, ids = search_shards(paths, x[:2], 200)
    assert opened[2:] == [str(paths[1])] and (ids >= 0).sum() == 300
    assert sorted(ids[0][ids[0] >= 0].tolist()) == list(range(150)) and np.isneginf(scores[ids < 0]).all()


# ---- manifests ----


def test_a_manifest_names_files_from_its_own_folder(three, tmp_path, monkeypatch):
    _, _, _, paths, manifest = three
    said = json.loads(manifest.read_text())
    assert [entry["file"] for entry in said["shards"]] == [path.name for path in paths]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in (*paths, manifest):
        (moved / path.name).write_bytes(path.read_bytes())
    queries = rows(4, seed=3)
    want = search_shards(manifest, queries, 3)
    monkeypatch.chdir(tmp_path)
    assert all(map(np.array_equal, search_shards("elsewhere/all.json", queries, 3), want))
    verify_shards("elsewhere/all.json")
    write_manifest(tmp_path / "outside.json", [moved / "2.safetensors"])
    assert search_shards("outside.json", queries, 1)[1].min() >= 1900


def test_copies_that_training_or_large_vectors_made_are_alike(tmp_path):
    """An index that divides its large vectors has the same transform as one that does not."""
    base, x = trained("l2"), rows(40)
    paths = filled(tmp_path, np.concatenate([x, np.ldexp(x, 60)]), [40], base)
    write_manifest(tmp_path / "m.json", paths)
    assert search_shards(tmp_path / "m.json", x[:1], 1)[1].tolist() == [[0]]


OTHERS = {
    "another sample": lambda: _trained_on(rows(500, seed=4)),
    "untrained": lambda: turboquant.Index(64, 3, "cosine"),
    "refined": lambda: trained("cosine", refine="int8"),
    "another width": lambda: turboquant.Index(64, 4, "cosine"),
    "another seed": lambda: trained("cosine", seed=1),
    "another metric": lambda: trained("ip"),
    "unequal lengths": lambda: trained("cosine", dim=32),
}


def _trained_on(sample):
    index = turboquant.Index(64, 3, "cosine")
    index.train(sample)
    return index


@pytest.mark.parametrize("other", OTHERS)
def test_shards_of_another_transform_are_refused(three, other, tmp_path):
    _, _, _, paths, manifest = three
    index = OTHERS[other]()
    index.add(rows(50, index.d), ids=np.arange(5000, 5050))
    index.save(tmp_path / "other.safetensors")
    queries = rows(3, seed=1)
    with pytest.raises(ValueError, match=r"one transform|must be of shape \[n, 32\]") as caught:
        search_shards([*paths, tmp_path / "other.safetensors"], queries, 3)
    assert "other.safetensors" in str(caught.value)
    with pytest.raises(ValueError, match="one transform: .*other.safetensors"):
        write_manifest(tmp_path / "m.json", [*paths, tmp_path / "other.safetensors"])
    assert os.listdir(tmp_path) == ["other.safetensors"]
    said = json.loads(manifest.read_text())
    said["shards"] = [{"file": str(paths[0]), "checksum": said["shards"][0]["checksum"]},
                      {"file": "other.safetensors", "checksum": shards._checksum(turboquant.Index.load(tmp_path / "other.safetensors"))}]  # fmt: skip  # noqa: E501
    (tmp_path / "forged.json").write_text(json.dumps(said))
    for look in (verify_shards, lambda path: search_shards(path, queries, 3)):
        with pytest.raises(
            ValueError, match="one transform: .*other.safetensors.* has another than the manifest names"
        ):
            look(tmp_path / "forged.json")


def test_files_that_a_manifest_does_not_name_are_refused(tmp_path):
    """A shard that was saved again, damaged or deleted is refused, and so are two shards with the same id."""
    x, base = rows(300), trained()
    paths = filled(tmp_path, x, [150], base)
    manifest = tmp_path / "m.json"
    write_manifest(manifest, paths)
    before, good = manifest.read_bytes(), paths[1].read_bytes()

    whole(x[151:], base, np.arange(151, 300)).save(paths[1])
    for look in (verify_shards, lambda path: search_shards(path, x[:1], 3)):
        with pytest.raises(ValueError, match=r"1\.safetensors' must be the file that the manifest names"):
            look(manifest)

    paths[1].write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    with pytest.raises(ValueError, match=r"1\.safetensors': its bytes must be .*, got others in "):
        verify_shards(manifest)
    with pytest.raises(ValueError, match=r"1\.safetensors': its bytes must be .*, got others in "):
        write_manifest(manifest, paths)

    paths[1].write_bytes(good[:500])
    with pytest.raises(ValueError, match="must be a file of an index"):
        search_shards(manifest, x[:1], 3)
    paths[1].unlink()
    for look in (verify_shards, lambda path: search_shards(path, x[:1], 3)):
        with pytest.raises(FileNotFoundError, match=r"1\.safetensors', which is not there"):
            look(manifest)

    whole(x[149:], base, np.arange(149, 300)).save(paths[1])
    with pytest.raises(ValueError, match=r"different ids, got 149 in .*0\.safetensors' and .*1\.safetensors'"):
        write_manifest(manifest, paths)
    assert manifest.read_bytes() == before


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_manifests_are_refused_or_say_the_same(data, three, tmp_path_factory):
    folder, _, _, _, manifest = three
    text = bytearray(manifest.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    file = folder / "mutated.json"
    file.write_bytes(text)
    queries = rows(2, seed=3)
    try:
        scores, ids = search_shards(file, queries, 3)
    except (ValueError, FileNotFoundError):
        return
    whole_manifest = search_shards(manifest, queries, 3)
    assert np.array_equal(ids, whole_manifest[1]) and np.array_equal(scores, whole_manifest[0])


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b"null", b"[" * 100_000, b"\xff", b'{"format": "turboquant-shards-9"}',
     b'{"format": "turboquant-shards-1", "transform": "", "shards": []}',
     b'{"format": "turboquant-shards-1", "transform": null, "shards": [{"file": "a", "checksum": "b"}]}',
     b'{"format": "turboquant-shards-1", "transform": "", "shards": [{"file": 3, "checksum": "b"}]}',
     b'{"format": "turboquant-shards-1", "transform": "", "shards": {"file": "a"}}'],
    ids=lambda text: text.decode("latin-1")[:60],
)  # fmt: skip
def test_bad_manifests(text, tmp_path):
    (tmp_path / "m.json").write_bytes(text)
    for look in (verify_shards, lambda path: search_shards(path, [[0.0]], 3)):
        with pytest.raises(ValueError, match="`path` must be a manifest of shards, got .*m.json"):
            look(tmp_path / "m.json")


def test_bad_arguments(three):
    folder, _, _, paths, manifest = three
    q = rows(2)
    for call, kind, message in (
        (lambda: search_shards(5, q, 3), TypeError, "`paths` must be a list of paths, got 5"),
        (lambda: search_shards([5], q, 3), TypeError, r"`paths\[0\]` must be a str or a path, got 5"),
        (lambda: search_shards([], q, 3), ValueError, "`paths` must name at least one file"),
        (lambda: search_shards(str(paths[0]), q, 3), ValueError, "manifest of shards.*files of indexes go into a list"),
        (lambda: search_shards(folder, q, 3), FileNotFoundError, "manifest of shards, .* a folder"),
        (lambda: search_shards([manifest], q, 3), ValueError, "must be a file of an index"),
        (lambda: search_shards(paths, q, 0), ValueError, "`k` must be in"),
        (lambda: search_shards(paths, q, 3, filter=[True]), TypeError, "search_shards: `filter` must be integers"),
        (lambda: search_shards(paths, q, 3, filter=[-1]), ValueError, "search_shards: `filter` must be in 0"),
        (lambda: search_shards(paths, q, 3, threads=-1), ValueError, "`threads` must be in"),
        (lambda: search_shards(paths, q, 3, sigmas=-1), ValueError, "`sigmas` must be at least 0"),
        (lambda: search_shards(paths, q[:, :5], 3), ValueError, r"0\.safetensors': .*`queries` must be of shape"),
        (lambda: search_shards(paths, [[1.0], [1.0, 2.0]], 3), ValueError, "`queries` must be of shape"),
        (lambda: search_shards(paths, q, 3, executor=3), TypeError, "`executor` must be one as in concurrent.futures"),
        (lambda: write_manifest(folder / "n.json", paths[0]), TypeError, "`shards` must be a list of paths"),
        (lambda: write_manifest(folder / "n.json", []), ValueError, "`shards` must name at least one file"),
        (lambda: write_manifest(3, paths), TypeError, "`path` must be a str or a path"),
        (lambda: write_manifest(folder, paths), IsADirectoryError, "`path` must be a file"),
        (lambda: write_manifest(folder / "n.json", [*paths, paths[0]]), ValueError, "different ids, got 0"),
        (lambda: verify_shards(folder / "n.json"), FileNotFoundError, "manifest of shards, .* not there"),
    ):
        with pytest.raises(kind, match=message):
            call()
    assert not (folder / "n.json").exists()


def test_a_failure_cancels_the_others(three, tmp_path):
    queue = Queue()
    with pytest.raises(FileNotFoundError):
        search_shards([tmp_path / "none", *three[3]], rows(1), 3, queue)
    assert queue.cancelled == 4
