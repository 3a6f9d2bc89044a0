"""`turboquant.Index` agrees with a slow index in NumPy: codes by definition, scores in float64, search by sorting."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from slow_index import encode, levels_of

import turboquant
from turboquant import _core
from turboquant.plan import Plan, Rotation, Side

INDEX = turboquant.Index
RNG = np.random.default_rng


def clustered(n, dim, seed=0):
    """Rows with a mean and a few strong directions, as embeddings have."""
    rng = RNG(seed)
    scales = 1 / np.sqrt(1 + np.arange(dim))
    return (rng.standard_normal((n, dim)) * scales @ np.linalg.qr(rng.standard_normal((dim, dim)))[0] + 0.05).astype(
        np.float32
    )


def slow_search(index, queries):
    """Returns all ids and their scores in float64, from the vectors of `reconstruct` and the stored offsets for the
    mean."""
    ids = index.ids
    decoded = index.reconstruct(ids).astype(np.float64)
    extra = np.zeros(len(ids))
    mean = index._contents.transform.mean
    stored = (
        {i: s for seg in index._contents.segments for i, s in zip(seg.all_ids, seg.offsets, strict=True)}
        if mean is not None
        else {}
    )
    if mean is not None:
        mean = mean.astype(np.float64)
        extra = np.array([stored[i] for i in ids]) - (decoded - mean) @ mean
    return ids, queries.astype(np.float64) @ decoded.T + extra


@pytest.mark.parametrize("dim, numbers", [(1, 8), (8, 8), (9, 16), (50, 56), (100, 104), (300, 304), (384, 384)])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_bytes_of_a_vector(dim, numbers, bits):
    """Dimensions are rounded up to a multiple of 8; a scale has 4 bytes."""
    index = INDEX(dim, bits)
    index.add(clustered(64 * 400, dim))  # whole blocks
    assert (index.nbytes - index.fixed_nbytes) / len(index) == numbers * bits / 8 + 4


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("trained", [None, False, True])
@pytest.mark.parametrize("dim", [72, 84, 88, 96])
def test_search_is_nearly_the_full_sort(bits, trained, dim):
    x = clustered(700, dim)
    index = INDEX(dim, bits)
    if trained is not None:
        index.train(x[:300], axes=trained)
    index.add(x)
    scores, ids = index.search(x[:9], 12)
    known, slow = slow_search(index, x[:9])
    # Scores are those of the decoded vectors, up to float32 and the rounding of queries to fixed point.
    got = np.take_along_axis(slow, ids, axis=1)
    assert np.abs(got - scores).max() < 2e-4 * np.abs(slow).max()
    best = np.argsort(-slow, axis=1)[:, :12]  # the bound from leading bits may miss a few of these
    assert np.mean([len(np.intersect1d(a, b)) for a, b in zip(ids, best, strict=True)]) > 11.8
    assert (np.diff(scores, axis=1) <= 0).all()
    assert list(known) == list(range(700))


def plain_space(bits, lead, steps, dim=None, metric=0, mean=None):
    """The arguments of a space without a rotation, as `_core` takes them."""
    dim = dim or 32 * len(bits)
    plan = Plan(-(-dim // 8) * 8, Side(1, Rotation.NONE)).words
    return plan, dim, metric, bits, lead, steps, mean, None, 2.5


def bits_of(packed, width):
    """Unpacks fields as turboquant_index.h draws them: bytes [n, 4 width] to codes [n, 32], or [n, width] to [n, 8]."""
    shifts = width * np.arange(8 // width)[:, None]
    return (packed[:, None, :] >> shifts & ((1 << width) - 1)).reshape(len(packed), -1)


@pytest.mark.parametrize("last", [32, 24, 16, 8])
@pytest.mark.parametrize("lead", [[1, 0, 1, 1, 1, 1, 1, 1], [2, 0, 5, 3, 0, 1, 4, 6], [0, 0, 0, 6, 0, 2, 0, 3]])
def test_rows_by_definition(lead, last):
    """`index_encode` writes the codes, EDEN scales and byte layout that NumPy computes by definition."""
    rng = RNG(3)
    bits, lead = np.array([3, 0, 5, 8, 1, 2, 4, 6], np.uint8), np.array(lead, np.uint8)
    steps = np.array([2, 1, 0.5, 0.25, 1, 3, 0.1, 0.7], np.float32)
    dim, order = 224 + last, rng.permutation(8)
    bits, lead, steps = bits[order], lead[order], steps[order]
    bytes_a_bit = np.array([4] * 7 + [last // 8])
    z = rng.standard_normal((70, dim)).astype(np.float32) * np.repeat(steps, 32)[:dim]
    codes, signs, scales, offsets = _core.index_encode(plain_space(bits, lead, steps, dim), z)
    planes = lead @ bytes_a_bit
    assert codes.shape == (70, bits @ bytes_a_bit - planes) and signs.shape == (2, planes, 64) and offsets is None
    assert not signs[1, :, 6:].any()
    levels, expected = encode(bits, lead, steps, z)
    words, wanted = scales.view(np.int32), expected.astype(np.float32).view(np.int32)
    nearest = (wanted + 256 - (words & 511) & ~511) | words & 511  # the nearest floats whose lowest 9 bits are classes
    assert np.allclose(scales, expected, rtol=2**-15) and (words == nearest).mean() > 0.95
    leading = np.ascontiguousarray(signs.transpose(0, 2, 1).reshape(128, -1)[:70])
    step = np.repeat(steps, 32)[:dim]
    decoded = _core.index_decode(dim, bits, lead, steps, codes, leading, scales)
    assert np.allclose(decoded, levels * step * scales[:, None], rtol=1e-5)
    at, plane = 0, 0
    starts = [*range(0, 224, 32), *(range(224, dim, 8) if last < 32 else [224])]
    for first, end in zip(starts, [*starts[1:], dim], strict=True):
        b, own, n = int(bits[first // 32]), int(lead[first // 32]), (end - first) // 8
        shift, code = 0, np.zeros((70, end - first), int)
        for width in (8, 4, 2, 1):
            if (b - own) & width:
                code |= bits_of(codes[:, at : at + n * width], width).astype(int) << shift
                at, shift = at + n * width, shift + width
        for left in range(own, 0, -2):
            width = min(left, 2)
            code |= bits_of(leading[:, plane : plane + n * width], width).astype(int) << (b - own + left - width)
            plane += n * width
        its = levels[:, first:end]  # codes are ranks
        assert (code == (its * 32 + 128 if b == 8 else np.searchsorted(np.unique(its), its) + code.min())).all()


def test_offsets_by_definition():
    x, mean = clustered(70, 40), clustered(1, 40, seed=5)[0]
    bits, steps = np.array([4, 4], np.uint8), np.ones(2, np.float32)
    lead, wide = np.ones(2, np.uint8), x.astype(np.float64)
    unit = (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    about_mean = ((wide - mean) ** 2).sum(1) / 2
    for metric, expected in ((0, (wide - mean) @ mean), (1, (unit - mean) @ mean), (2, -about_mean)):
        _, _, _, offsets = _core.index_encode(plain_space(bits, lead, steps, 40, metric, mean), x)
        assert np.allclose(offsets, expected, rtol=1e-6, atol=1e-9)


def test_errors_of_leading_bits():
    """The error of a level falls with every leading bit that is known. At 1 and 2 bits it is 0 once all are known."""
    for bits in (1, 2, 3, 4, 5, 6, 8):
        errors = [_core.index_lead_error(bits, lead) for lead in range(min(bits, 6) + 1)]
        assert (np.diff(errors) < 0).all()
        u = RNG(0).standard_normal(400_000).astype(np.float32)
        levels = levels_of(u, bits)
        assert abs(errors[0] - np.mean(levels**2)) < 0.01  # no bit is known
        kept, mean = np.mean(levels * u), np.sqrt(2 / np.pi)
        assert abs(errors[1] - ((kept / mean) ** 2 - 2 * kept / mean * np.mean(np.abs(levels)) + errors[0])) < 0.01
        if bits <= 2:
            assert errors[bits] < 1e-12 and errors[-1] < errors[0] / 100
    with pytest.raises(ValueError, match="`lead`"):
        _core.index_lead_error(3, 4)


def test_same_on_every_isa_thread_count_and_chunking():
    x = clustered(3000, 100)
    results = []
    for isa in _core.isa_available():
        _core.set_isa(isa)
        try:
            for threads, chunk in ((1, 3000), (2, 77)):
                index = INDEX(100, 3)
                for at in range(0, 3000, chunk):
                    index.add(x[at : at + chunk])
                results.append(index.search(x[:7], 20, threads=threads))
        finally:
            _core.set_isa(None)
    for scores, ids in results[1:]:
        assert (scores == results[0][0]).all() and (ids == results[0][1]).all()


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("dim", [1, 31, 100, 384])
def test_trained_codes_and_results_are_those_of_every_isa(dim, metric, tmp_path):
    """Given the same axes, every instruction set writes the same bytes: the rotation by axes adds products in one
    order. Only training may learn other axes on another machine."""
    x = clustered(1500, dim)
    index = INDEX(dim, 4, metric)
    index.train(x)
    index.save(tmp_path / "empty")
    files, results = [], []
    for isa in _core.isa_available():
        _core.set_isa(isa)
        try:
            own = INDEX.load(tmp_path / "empty", mmap=False)
            own.add(x)
            own.save(tmp_path / isa)
            files.append((tmp_path / isa).read_bytes())
            results.append((*own.search(x[:9], 20), *own.range_search(x[:2], own.search(x[0], 9)[0][-1])))
        finally:
            _core.set_isa(None)
    assert len(set(files)) == 1
    assert all((a == b).all() for other in results[1:] for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("trained", [None, True])
def test_shortlist_loses_next_to_nothing(trained):
    x = clustered(6000, 128)
    index = INDEX(128, 3)
    if trained:
        index.train(x[:2000])
    index.add(x)
    rows, space = index._contents.rows(None), index._space(index._contents)
    every = _core.index_scores_of(space, x[:100], rows, None)
    full = np.argsort(-every, axis=1, kind="stable")[:, :10]
    scores, ids = index.search(x[:100], 10)
    assert (scores == np.take_along_axis(every, ids, 1)).all()
    truth = np.argsort(-(x[:100] @ x.T), axis=1)[:, :10]
    right = [np.mean([len(np.intersect1d(a, b)) for a, b in zip(own, truth, strict=True)]) for own in (ids, full)]
    assert right[0] >= right[1] - 0.05
    same = np.mean([len(np.intersect1d(a, b)) for a, b in zip(ids, full, strict=True)])
    assert same >= (9.97 if trained is None else 9.9)
    few = np.arange(0, 6000, 97)  # so few that the search scores all of them
    found = index.search(x[:100], 5, filter=few)[1]
    assert (found == few[np.argsort(-every[:, few], axis=1, kind="stable")[:, :5]]).all()


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_queries_together_find_what_each_finds_alone(metric):
    x, queries = clustered(1500, 96), clustered(150, 96, seed=4)
    index = INDEX(96, 3, metric)
    index.train(x)
    index.add(x)
    assert index._contents.transform.matrix is not None
    each = [index.search(query, 10) for query in queries]
    for threads in (1, 3):
        for n in (1, 5, 64, 65, 150):
            scores, ids = index.search(queries[:n], 10, threads=threads)
            assert all((scores[i] == each[i][0]).all() and (ids[i] == each[i][1]).all() for i in range(n))
    queries[101, 3] = np.nan
    with pytest.raises(ValueError, match=r"`queries\[101, 3\]`"):
        index.search(queries, 10)


def test_adding_one_by_one_is_adding_together():
    x = clustered(300, 40)
    one, all_at_once = INDEX(40, 3, "l2"), INDEX(40, 3, "l2")
    for i in range(200):
        one.add(x[i])
    copy = one.copy()
    one.add(x[200:], ids=np.arange(500, 600))
    copy.add(x[:50])
    all_at_once.add(x[:200])
    assert one.nbytes < 2 * INDEX.copy(all_at_once).nbytes + 800
    for a, b in zip(copy.search(x[:9], 5, filter=np.arange(200)), all_at_once.search(x[:9], 5), strict=True):
        assert (a == b).all()
    assert one.search(x[250], 1)[1][0] == 550 and len(one) == 300 and len(copy) == 250
    one.remove([3, 520])
    one.compact()
    assert one.search(x[250], 1)[1][0] == 550 and 520 not in one


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_metrics_find_the_true_neighbours(metric):
    x = clustered(800, 64)
    index = INDEX(64, 8, metric)
    index.train(x[:400], axes=False)
    index.add(x)
    q = clustered(20, 64, seed=9)
    wide, rows = q.astype(float), x.astype(float)
    if metric == "cosine":
        wide, rows = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (wide, rows))
    exact = wide @ rows.T if metric != "l2" else ((wide[:, None] - rows) ** 2).sum(2)
    scores, ids = index.search(q, 10)
    order = np.argsort(exact if metric == "l2" else -exact, axis=1)[:, :10]
    assert np.mean([len(np.intersect1d(a, b)) for a, b in zip(ids, order, strict=True)]) > 9
    assert np.allclose(scores, np.take_along_axis(exact, ids, 1), atol=0.03 * np.abs(exact).max())
    lims, found, who = index.range_search(q, float(scores[0, 4]))
    assert set(ids[0, :5]) <= set(who[: lims[1]]) and (np.diff(lims) >= 0).all()
    assert (found[: lims[1]][:5] == scores[0, :5]).all()


def test_axes_help_and_are_refused_where_they_do_not():
    x = clustered(3000, 128)
    found = []
    for axes in (False, True):
        index = INDEX(128, 2)
        index.train(x[:1000], axes=axes)
        index.add(x[:2800])
        truth = np.argsort(-(x[2800:] @ x[:2800].T), axis=1)[:, :10]
        found.append(
            np.mean([len(np.intersect1d(a, b)) for a, b in zip(index.search(x[2800:], 10)[1], truth, strict=True)])
        )
        assert index.nbytes - index.fixed_nbytes <= 2800 * 8 + 2816 * 128 * 2 / 8  # leading bits in blocks of 64
    assert found[1] > found[0] + 0.5


def test_ids_filters_and_removal():
    x = clustered(500, 40)
    index = INDEX(40, 4)
    index.add(x[:200])
    index.add(x[200:400], ids=np.arange(1000, 1200, dtype=np.uint64))
    index.add(x[400:])
    assert index.ids[-1] == 1299 and index.ntotal == len(index) == 500 and 1000 in index and 999 not in index
    _, all_ids = index.search(x[0], 500)
    wanted = [3, 1001, 1250, 77777]
    ids = index.search(x[0], 5, filter=wanted)[1]
    assert ids.tolist() == [i for i in all_ids if i in wanted] + [-1, -1]
    mask = np.isin(index.ids, wanted)
    assert (index.search(x[0], 5, filter=mask)[1] == ids).all()
    index.remove([1001, 3])
    assert index.search(x[0], 500)[1].tolist() == [i for i in all_ids if i not in (3, 1001)] + [-1, -1]
    with pytest.raises(ValueError, match="1001"):
        index.remove([5, 1001])
    assert 5 in index
    index.remove(index.ids[:300])
    assert sum(map(len, index._contents.segments)) == len(index) == 198
    index.add(x[:1])
    assert index.ids[-1] == 1300


def test_save_load_and_damage(tmp_path):
    x = clustered(300, 33)
    index = INDEX(33, 3, "l2")
    index.train(x)
    index.add(x)
    index.remove([7])
    path = tmp_path / "index.safetensors"
    index.save(path)
    for other in (INDEX.load(path), INDEX.load(path, mmap=False), pickle.loads(pickle.dumps(index)), index.copy()):
        other.verify()
        assert all((a == b).all() for a, b in zip(other.search(x[:5], 8), index.search(x[:5], 8), strict=True))
    with pytest.raises(ValueError, match="mmap=False"):
        INDEX.load(path).add(x)
    changed = INDEX.load(path, mmap=False)
    changed.add(x[:2])
    assert changed.ids[-1] == 301
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    codes = start + json.loads(data[8:start])["codes"]["data_offsets"][0]
    for at, text in ((data.index(b"next_id") + 12, "header is damaged"), (codes, "got others in codes")):
        spoilt = bytearray(data)
        spoilt[at] ^= 1
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match=text):
            INDEX.load(path).verify()
        with pytest.raises(ValueError, match=text):
            INDEX.load(path, mmap=False)


def test_refusals():
    index = INDEX(8, 4, "cosine")
    x = np.ones((2, 8), np.float32)
    for call, error, text in [
        (lambda: INDEX(0), ValueError, "`dim`"),
        (lambda: INDEX(8, 7), ValueError, "`bits`"),
        (lambda: INDEX(8, 3, "dot"), ValueError, "`metric`"),
        (lambda: index.add(x[:, :7]), ValueError, "`x`"),
        (lambda: index.add(x.astype(complex)), TypeError, "`x`"),
        (lambda: index.add(x * 0), ValueError, "zero"),
        (lambda: index.add(x * np.nan), ValueError, "finite"),
        (lambda: index.add(x, ids=[1, 1]), ValueError, "differ"),
        (lambda: index.add(x, ids=[1]), ValueError, "`ids`"),
        (lambda: index.add(x, ids=[-1, 1]), ValueError, "`ids`"),
        (lambda: index.search(x, 0), ValueError, "`k`"),
        (lambda: index.search(x, 1, filter=np.ones(3, bool)), ValueError, "`filter`"),
        (lambda: index.reconstruct([4]), ValueError, "`ids`"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert len(index) == 0
    scores, ids = index.search(x, 2)
    assert (ids == -1).all() and (scores == -np.inf).all()
    assert (INDEX(8, 4, "l2").search(x, 2)[0] == np.inf).all()


def test_child_searches_though_another_thread_held_the_lock():
    index = INDEX(8, 4)
    index.add(np.eye(8, dtype=np.float32))
    held, go = threading.Event(), threading.Event()

    def hold():
        with index._lock:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(index.search(np.eye(8, dtype=np.float32)[3], 1)[1][0] != 3)
        finally:
            os._exit(code)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_searches_see_whole_states_while_another_thread_changes_the_index():
    """Every search sees the index between two changes, and no later search sees an earlier state."""
    x = clustered(900, 48)
    changes = [lambda i, at=at: i.add(x[at : at + 30]) for at in range(0, 900, 30)]
    for step in range(20):
        changes.insert(2 * step + 3, lambda i, step=step: i.remove(i.ids[step : step + 5]))
    changes.append(lambda i: i.compact())
    plain, index, query = INDEX(48, 3), INDEX(48, 3), x[700]
    states = [plain.search(query, 9)[1].tolist()]
    for change in changes:
        change(plain)
        states.append(plain.search(query, 9)[1].tolist())
    seen, done = [[], []], threading.Event()

    def search(mine):
        while not done.is_set():
            mine.append(index.search(query, 9)[1].tolist())
        mine.append(index.search(query, 9)[1].tolist())

    threads = [threading.Thread(target=search, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for change in changes:
        change(index)
    done.set()
    for thread in threads:
        thread.join()
    for mine in seen:
        at = 0
        for result in mine:
            at = states.index(result, at)
        assert mine[-1] == states[-1]


def test_changes_wait_for_one_another():
    index, x = INDEX(16, 4), clustered(400, 16)
    threads = [threading.Thread(target=lambda: [index.add(x[i : i + 7]) for i in range(0, 399, 7)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.ids.tolist() == list(range(3 * 399))
    alone = INDEX(16, 4)
    alone.add(x[:399])
    scores, _ = index.search(x[5], 30)  # each row is stored three times
    assert (scores.reshape(10, 3) == alone.search(x[5], 10)[0][:, None]).all()


def test_a_search_is_not_kept_waiting_by_a_change():
    index = INDEX(16, 4)
    index.add(clustered(100, 16))
    with index._lock:
        found = []
        thread = threading.Thread(target=lambda: found.append(index.search(np.ones(16, np.float32), 3)))
        thread.start()
        thread.join(60)
        assert found


SENTENCES = Path(__file__).parent / "data" / "sentences.npy"


@pytest.mark.parametrize(
    "bits, untrained, mean, axes",
    [(1, 0.65, 0.70, 0.81), (2, 0.81, 0.825, 0.90), (3, 0.885, 0.89, 0.935), (4, 0.93, 0.935, 0.955)],
)
def test_recall_on_sentences(bits, untrained, mean, axes):
    """Recall at 10 reaches a floor on average over four rotations, with embeddings of real sentences (tests/data): 100
    are queries, 700 are in the index."""
    x = np.load(SENTENCES).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    queries, x = x[:100], x[100:]
    truth = np.argsort(-(queries @ x.T), axis=1)[:, :10]
    for training, floor in ((None, untrained), (False, mean), (True, axes)):
        recalls = []
        for seed in range(4):
            index = turboquant.Index(384, bits, seed=seed)
            if training is not None:
                index.train(x, axes=training)
            index.add(x)
            found = index.search(queries, 10)[1]
            recalls.append(np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(found, truth, strict=True)]))
        assert np.mean(recalls) >= floor, recalls
