"""A Hypothesis state machine makes the same changes to an index and to a slow one (slow_index.py), in any order."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slow_index import SlowIndex, list_values, rotated_back

import turboquant
from turboquant.index import lists, storage
from turboquant.index.contents import Contents

DIM = 40


def rows(seed, n):
    """Rows whose variance falls from channel to channel, with a mean that is not 0."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, DIM)) / np.sqrt(1 + np.arange(DIM)) + 0.1).astype(np.float32)


class Index(RuleBasedStateMachine):
    @initialize(
        bits=st.sampled_from([1, 2, 3, 4, 6, 8]),
        metric=st.sampled_from(["ip", "cosine", "l2"]),
        training=st.sampled_from([None, False, True, "lists"]),
    )
    def begin(self, bits, metric, training):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(storage, "ROWS", 64)  # so that there are several segments
        self.folder = tempfile.TemporaryDirectory()
        self.patch.setattr(lists, "_clustered", lambda x, n, *_: x[:n])
        self.lists = 7 if training == "lists" else 0
        self.index = turboquant.Index(DIM, bits, metric, lists=self.lists)
        if self.lists:
            self.index.train(rows(0, 200))
        elif training is not None:
            self.index.train(rows(0, 200), axes=training)
        self.slow = SlowIndex(self.index)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()
            self.folder.cleanup()

    # ---- changes ----

    @rule(seed=st.integers(1, 50), n=st.integers(0, 90))
    def add(self, seed, n):
        x = rows(seed, n)
        self.index.add(x)
        self.slow.add(x)

    @rule(seed=st.integers(1, 50), ids=st.sets(st.integers(0, 300) | st.just(2**62), max_size=30), data=st.data())
    def add_with_ids(self, seed, ids, data):
        there = ids & set(self.slow.rows)
        ids = data.draw(st.permutations(sorted(ids)))
        x = rows(seed, len(ids))
        if there:
            with pytest.raises(ValueError, match="`ids` must be new"):
                self.index.add(x, ids)
            ids = [i for i in ids if i not in there]
            x = x[: len(ids)]
        self.index.add(x, ids)
        self.slow.add(x, ids)

    @precondition(lambda self: self.slow.rows)
    @rule(data=st.data(), many=st.booleans())
    def remove(self, data, many):
        known = list(self.slow.rows)
        some = data.draw(st.sets(st.sampled_from(known), max_size=len(known) if many else 3))
        with pytest.raises(ValueError, match="299999"):
            self.index.remove([*some, 299999])
        self.index.remove(list(some))
        self.slow.remove(some)

    @rule()
    def compact(self):
        self.index.compact()

    @rule(bad=st.sampled_from(["nan", "width", "ids"]))
    def add_refused(self, bad):
        x = rows(7, 70)
        x[69, 3] = np.nan if bad == "nan" else 1
        with pytest.raises(ValueError):
            self.index.add(x[:, :-1] if bad == "width" else x, ids=[1] if bad == "ids" else None)

    # ---- files, copies and pickles ----

    @rule()
    def save_and_load(self):
        path = Path(self.folder.name) / "index"
        self.index.save(path)
        mapped = turboquant.Index.load(path)
        mapped.verify()
        with pytest.raises(ValueError, match="mmap=False"):
            mapped.add(rows(1, 1))
        before, after = (one.search(rows(3, 2), 7) for one in (self.index, mapped))
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        self.index = turboquant.Index.load(path, mmap=False)

    @rule()
    def copy_of_mapped(self):
        path = Path(self.folder.name) / "mapped"
        self.index.save(path)
        self.index = turboquant.Index.load(path).copy()

    @rule()
    def pickled(self):
        self.index = pickle.loads(pickle.dumps(self.index))

    @rule(seed=st.integers(1, 50))
    def copy_is_apart(self, seed):
        copy = self.index.copy()
        copy.add(rows(seed, 20))
        copy.remove(copy.ids[::3])

    # ---- reading ----

    def near(self, scores, expected):
        wanted = np.array([expected[i] for i in scores])
        largest = max(1, np.abs(wanted).max(initial=0))
        assert np.abs(np.array(list(scores.values())) - wanted).max(initial=0) < 5e-4 * largest

    @rule(seed=st.integers(60, 99), more=st.integers(0, 3))
    def search_all(self, seed, more):
        """A search for as many results as there are vectors, or more, misses none."""
        query = rows(seed, 1)[0]
        k = len(self.slow.rows) + more
        if not k:
            return
        scores, ids = self.index.search(query, k)
        assert set(ids[: k - more]) == set(self.slow.rows) and (ids[k - more :] == -1).all()
        assert (scores[k - more :] == (np.inf if self.index.metric == "l2" else -np.inf)).all()
        self.near(dict(zip(ids[: k - more], scores, strict=False)), self.slow.scores(query))
        worse = np.diff(scores[: k - more]) * (-1 if self.index.metric == "l2" else 1)
        assert (worse <= 0).all() and (np.diff(ids[: k - more])[worse == 0] > 0).all()
        lims, found, who = self.index.range_search(query, scores[max(0, k - more - 1)])
        if k > more:
            assert lims.tolist() == [0, k - more] and (who == ids[: k - more]).all()
            assert (found == scores[: k - more]).all()

    @precondition(lambda self: self.slow.rows)
    @rule(seed=st.integers(60, 99), k=st.integers(1, 12), data=st.data(), masked=st.booleans())
    def search_some(self, seed, k, data, masked):
        query, known = rows(seed, 1)[0], list(self.slow.rows)
        allowed = data.draw(st.none() | st.sets(st.sampled_from(known)))
        filter = None if allowed is None else [*allowed, 299999]
        if masked and allowed is not None:
            filter = np.isin(self.index.ids, list(allowed))
        scores, ids = self.index.search(query, k, filter)
        n = min(k, len(known if allowed is None else allowed))
        assert (
            (ids[:n] >= 0).all()
            and (ids[n:] == -1).all()
            and set(ids[:n]) <= set(known if allowed is None else allowed)
        )
        self.near(dict(zip(ids[:n], scores, strict=False)), self.slow.scores(query))
        # The bound from leading bits may miss some of the best, more of them with few bits. It finds at least half.
        best = self.slow.search(query, k, allowed)[1]
        assert 2 * len(set(best) & set(ids[:n].tolist())) >= n
        # The results are those of an index that got the same vectors in one call.
        other = turboquant.Index(DIM, self.index.bits, self.index.metric, lists=self.lists)
        other._contents = Contents(self.slow.transform)
        other.add(np.array([vector for _, _, vector in self.slow.rows.values()]), known)
        again = other.search(query, k, None if allowed is None else list(allowed))
        assert all((a == b).all() for a, b in zip(again, (scores, ids), strict=True))

    @precondition(lambda self: self.slow.rows and self.lists)
    @rule(seed=st.integers(60, 99), k=st.integers(1, 30), probe=st.integers(1, 7), data=st.data())
    def search_lists(self, seed, k, probe, data):
        """A search reads all of the tail, and of the lists with allowed rows those nearest to the query."""
        query, known = rows(seed, 1)[0], list(self.slow.rows)
        allowed = data.draw(st.none() | st.sets(st.sampled_from(known), min_size=1))
        among = set(known if allowed is None else allowed)
        tail = [s.all_ids for s in self.index._contents.segments if not isinstance(s, lists.Sorted)]
        tail = among & set(np.concatenate([np.zeros(0, np.int64), *tail]).tolist())
        stored = self.index._contents.stored
        if len(among) > stored // 50:
            there = {self.slow.lists[i] for i in among - tail}
            values = list_values(self.slow.transform, self.index.metric, self.slow._prepared(query[None]))[0]
            near = sorted(there, key=lambda own: -values[own])[:probe]
            among = tail | {i for i in among if self.slow.lists[i] in near}
        scores, ids = self.index.search(
            query, k, None if allowed is None else list(allowed), sigmas=np.inf, probe=probe
        )
        expected, n = self.slow.scores(query), min(k, len(among))
        assert set(ids[:n].tolist()) <= among and (ids[n:] == -1).all()
        self.near(dict(zip(ids[:n].tolist(), scores, strict=False)), expected)
        best = self.slow.search(query, k, among)[0]
        assert np.allclose(scores[:n], best, atol=5e-4 * max(1, np.abs(best).max(initial=0)))
        few, narrow = self.index.search(query, k, None if allowed is None else list(allowed), probe=probe)
        assert set(narrow[:n].tolist()) <= among and (few[narrow < 0] == few[-1]).all()

    @precondition(lambda self: self.slow.rows)
    @rule(data=st.data())
    def reconstruct(self, data):
        one = data.draw(st.sampled_from(list(self.slow.rows)))
        t = self.slow.transform
        wanted = rotated_back(t, self.slow.rows[one][0].astype(np.float32)[None])[0] + self.slow.centre(one)
        assert np.allclose(self.index.reconstruct(one), wanted, atol=1e-4)
        with pytest.raises(ValueError, match="299999"):
            self.index.reconstruct([one, 299999])

    @invariant()
    def holds_the_same(self):
        if hasattr(self, "slow"):
            if self.lists:  # `compact` sorts them
                assert sorted(self.index.ids.tolist()) == sorted(self.slow.rows)
            else:
                assert self.index.ids.tolist() == list(self.slow.rows)
            assert len(self.index) == self.index.ntotal == len(self.slow.rows) and 299999 not in self.index
            if self.slow.rows:
                assert next(iter(self.slow.rows)) in self.index


TestIndex = Index.TestCase
TestIndex.settings = settings(stateful_step_count=40, max_examples=max(100, settings().max_examples))
