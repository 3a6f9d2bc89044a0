"""A Hypothesis state machine changes an index that keeps its vectors in 8 bits, or not, and searches it in any order.
Its results are compared with a slow index of the 8 bits, and with exact scores of the vectors that a dict holds."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slow_index import SlowIndex, exact, rows

import turboquant
from turboquant.index import lists, storage

DIM, ROOM = 40, 200  # ids below ROOM have a row in the caller's array


class Refined(RuleBasedStateMachine):
    @initialize(
        bits=st.sampled_from([1, 2, 4]),
        metric=st.sampled_from(["ip", "cosine", "l2"]),
        refine=st.sampled_from([None, "int8"]),
        training=st.sampled_from([None, False, "lists"]),
    )
    def begin(self, bits, metric, refine, training):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(storage, "ROWS", 64)  # so that there are several segments
        self.patch.setattr(lists, "_clustered", lambda x, n, *_: x[:n])
        self.folder = tempfile.TemporaryDirectory()
        self.metric, self.there = metric, {}
        n_lists = 5 if training == "lists" else 0
        self.index = turboquant.Index(DIM, bits, metric, lists=n_lists, refine=refine)
        self.plain = turboquant.Index(DIM, bits, metric, lists=n_lists)  # the same codes without the 8 bits
        if training is not None:
            for index in (self.index, self.plain):
                index.train(rows(200, DIM), axes=False)
        self.slow = None
        if refine == "int8":
            self.slow = SlowIndex(turboquant.Index(DIM, bits, metric))
            self.slow.transform = self.index._contents.transform.fine

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()
            self.folder.cleanup()

    def changed(self, what, *arguments):
        for index in (self.index, self.plain):
            getattr(index, what)(*arguments)

    # ---- changes ----

    @rule(seed=st.integers(1, 50), ids=st.sets(st.integers(0, ROOM - 1), max_size=90), data=st.data())
    def add(self, seed, ids, data):
        ids = data.draw(st.permutations(sorted(ids - set(self.there))))
        x = rows(len(ids), DIM, seed)
        self.changed("add", x, ids)
        self.there |= dict(zip(ids, x, strict=True))
        if self.slow is not None:
            self.slow.add(x, ids)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), many=st.booleans())
    def remove(self, data, many):
        some = data.draw(st.sets(st.sampled_from(list(self.there)), max_size=len(self.there) if many else 3))
        self.changed("remove", list(some))
        for i in some:
            del self.there[i]
        if self.slow is not None:
            self.slow.remove(some)

    @rule()
    def compact(self):
        self.changed("compact")

    @rule(how=st.sampled_from(["load", "copy of mapped", "pickle"]))
    def written_and_read(self, how):
        path = Path(self.folder.name) / "index"
        self.index.save(path)
        if how == "load":
            self.index = turboquant.Index.load(path, mmap=False)
        else:
            self.index = (
                turboquant.Index.load(path).copy() if how != "pickle" else pickle.loads(pickle.dumps(self.index))
            )

    # ---- searches ----

    def ranked(self, found, near, scores, k):
        """Asserts that `found` are the best k of the ids `near` by `scores`, larger first, up to rounding."""
        own, ids = found
        sign = -1 if self.metric == "l2" else 1
        near = [i for i in near.tolist() if i >= 0]
        n = min(k, len(near))
        assert set(ids[:n].tolist()) <= set(near) and len(set(ids[:n].tolist())) == n
        assert (ids[n:] == -1).all() and (own[n:] == sign * -np.inf).all()
        wanted, size = sorted((scores[i] for i in near), reverse=True)[:n], max(1, *map(abs, scores.values()), 0)
        assert np.allclose(sign * own[:n], wanted, atol=5e-4 * size)
        assert np.allclose(sign * own[:n], [scores[i] for i in ids[:n].tolist()], atol=5e-4 * size)
        better = np.diff(sign * own[:n])
        assert (better <= 0).all() and (np.diff(ids[:n])[better == 0] > 0).all()

    @precondition(lambda self: self.there)
    @rule(seed=st.integers(60, 99), k=st.integers(1, 12), factor=st.integers(1, 30), data=st.data())
    def search(self, seed, k, factor, data):
        """A search ranks by the 8 bits that the index keeps, and by the caller's vectors."""
        query = rows(1, DIM, seed)[0]
        allowed = data.draw(st.none() | st.sets(st.sampled_from(list(self.there)), min_size=1).map(list))
        near = self.plain.search(query, min(k * factor, max(k, len(self.there))), allowed)[1]
        sign = -1 if self.metric == "l2" else 1
        if self.slow is not None:
            scores = {i: sign * v for i, v in self.slow.scores(query).items()}
            self.ranked(self.index.search(query, k, allowed, factor=factor), near, scores, k)
            near = self.index.search(query, min(k * factor, max(k, len(self.there))), allowed)[1]
        x = np.ones((ROOM, DIM), np.float32)
        x[list(self.there)] = list(self.there.values())
        every = dict(enumerate(exact(query[None], x, self.metric)[0].tolist()))
        self.ranked(self.index.search(query, k, allowed, refine=x, factor=factor), near, every, k)
        last = max(self.there)
        if (largest := int(near.max())) == last:
            with pytest.raises(
                ValueError, match=f"must have a row for every id, got {last} rows, but the id {largest}"
            ):
                self.index.search(query, k, allowed, refine=x[:last], factor=factor)

    @invariant()
    def holds_the_same(self):
        if hasattr(self, "plain"):
            assert sorted(self.index.ids.tolist()) == sorted(self.there)
            assert self.index.nbytes >= self.plain.nbytes or not self.there or self.slow is None


TestRefined = Refined.TestCase
TestRefined.settings = settings(stateful_step_count=30, max_examples=max(60, settings().max_examples))
