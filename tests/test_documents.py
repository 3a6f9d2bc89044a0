"""The table of documents that adapters share, and its filters. NumPy alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import datetime

import numpy as np
import pytest

from turboquant import Index
from turboquant.index.documents import Document, Documents
from turboquant.index.filters import equal_to, is_filter, matching

DIM = 32
X = np.random.default_rng(0).standard_normal((40, DIM)).astype(np.float32)


def table(metric="cosine"):
    """Documents "0".."19", of which every fifth has no vector."""
    made = Documents(Index(DIM, bits=4, metric=metric))
    vectors = [None if i % 5 == 4 else X[i] for i in range(20)]
    made.add(
        [Document(str(i), f"text {i}", {"number": i, "tags": ["even"] * (i % 2 == 0)}) for i in range(20)], vectors
    )
    return made


# ---- the index ----


def test_add_returns_the_ids():
    index = Index(DIM)
    assert index.add(X[:3]).tolist() == [0, 1, 2] and index.add(X[:0]).tolist() == []
    given = index.add(X[3:5], ids=[9, 7])
    assert given.tolist() == [9, 7] and given.dtype == np.int64
    given[:] = 0  # the array belongs to the caller
    assert index.add(X[5]).tolist() == [10] and index.ids.tolist() == [0, 1, 2, 9, 7, 10]
    last = Index(DIM)
    assert last.add(X[:1], ids=[2**63 - 2]).tolist() == [2**63 - 2] and last.add(X[:1]).tolist() == [2**63 - 1]
    assert last.add(X[:0]).tolist() == []


# ---- filters ----

DOCUMENT = Document(
    "a", "Some text", {"n": 3, "x": 2.5, "date": "2024-05-01", "tags": ["p", "q"], "in": {"side": 1}, "d.t": 5, "e": ""}
)
MATCHES = [
    ("n", "==", 3), ("n", "!=", 4), ("n", ">", 2), ("n", ">=", 3), ("n", "<", 3.5), ("n", "<=", 3), ("meta.n", "==", 3),
    ("x", ">", 2), ("in.side", "==", 1), ("meta.in.side", "<", 2), ("d.t", "==", 5), ("id", "==", "a"),
    ("content", "text_match", "text"), ("content", "text_match_insensitive", "some"), ("tags", "contains", "p"),
    ("tags", "any", ["q", "z"]), ("tags", "all", ["q", "p"]), ("n", "in", [1, 3]), ("n", "not in", [1]),
    ("none", "==", None), ("none", "!=", 1), ("none", "not in", [1]), ("none", "is_empty", None),
    ("e", "is_empty", None), ("date", ">", "2024-04-30T10:00:00"), ("date", "<", datetime(2024, 5, 2)),
    ("date", "<=", "2024-05-01"), ("date", "<", "2024-05-01T01:00:00+00:00"),
]  # fmt: skip
FAILS = [
    ("n", "==", 4), ("n", "!=", 3), ("n", ">", 3), ("n", ">=", 4), ("n", "<", 3), ("n", "<=", 2), ("none", ">", 1),
    ("n", ">", None), ("date", ">", 1), ("n", ">", "2024-01-01"), ("in.other", "==", 1), ("n.x", "==", 1),
    ("content", "text_match", "some"), ("tags", "contains", "z"), ("tags", "any", ["z"]), ("tags", "all", ["p", "z"]),
    ("n", "in", [1]), ("n", "not in", [3]), ("none", "contains", 1), ("n", "is_empty", None), ("n", "text_match", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("condition", "wanted"), [(c, True) for c in MATCHES] + [(c, False) for c in FAILS], ids=str)
def test_conditions(condition, wanted):
    filter = dict(zip(("field", "operator", "value"), condition))
    assert matching(filter)(DOCUMENT) is wanted
    assert matching({"operator": "NOT", "conditions": [filter]})(DOCUMENT) is not wanted
    for other in (True, False):
        both = [filter, {"field": "n", "operator": "==", "value": 3 if other else 4}]
        assert matching({"operator": "AND", "conditions": both})(DOCUMENT) is (wanted and other)
        assert matching({"operator": "OR", "conditions": both})(DOCUMENT) is (wanted or other)


def test_equal_to():
    assert matching(equal_to({"n": 3, "d.t": 5}))(DOCUMENT) and not matching(equal_to({"n": 3, "x": 0}))(DOCUMENT)
    assert matching(equal_to({}))(DOCUMENT)


def test_metadata_may_have_the_names_of_a_filter():
    assert is_filter({"field": "n", "operator": "==", "value": 3}) and is_filter({"operator": "OR", "conditions": []})
    assert is_filter({"field": "n", "operator": "~"})  # a wrong one, which `matching` refuses
    for metadata in ({"field": "physics"}, {"conditions": ["dry"]}, {"operator": "Ada"}, {"n": 3}, {}):
        document = Document("a", "", {"more": 1, **metadata})
        assert not is_filter(metadata) and matching(equal_to(metadata))(document)


BAD_FILTERS = [
    (3, TypeError, "must be a dict, got 3"),
    ({}, ValueError, "must have a 'field', or AND, OR or NOT as 'operator'"),
    ({"operator": "AND"}, ValueError, "a list of 'conditions' beside AND"),
    ({"operator": "XOR", "conditions": []}, ValueError, "AND, OR or NOT"),
    ({"operator": "OR", "conditions": [3]}, TypeError, "must be a dict, got 3"),
    ({"field": "n", "value": 1}, ValueError, "must have 'operator' beside 'field'"),
    ({"field": "n", "operator": "=="}, ValueError, "must have 'value' beside 'field'"),
    ({"field": 1, "operator": "==", "value": 1}, TypeError, "'field' must be a str"),
    ({"field": "n", "operator": [], "value": 1}, ValueError, r"'operator' must be one of ==, .*, got \[\]"),
    ({"field": "n", "operator": ">", "value": "1"}, ValueError, "must be a number or a date in ISO 8601, got '1'"),
    ({"field": "n", "operator": ">", "value": [1]}, ValueError, r"must be a number or a date in ISO 8601, got \[1\]"),
    ({"field": "n", "operator": "in", "value": (1,)}, TypeError, "must be a list here"),
    ({"field": "n", "operator": "text_match", "value": 1}, TypeError, "must be a str here"),
]


@pytest.mark.parametrize(("filter", "error", "message"), BAD_FILTERS, ids=lambda case: str(case)[:60])
def test_bad_filters(filter, error, message):
    made = table()
    for call in (made.matching, made.remove_matching, lambda f: made.search(X[0], 3, f), lambda f: made.update(f, {})):
        with pytest.raises(error, match=message):
            call(filter)
    assert len(made) == 20


# ---- documents ----


def test_search_is_the_index_search_among_documents():
    made = table()
    scores, ids = made.index.search(X[3], 16)
    found = made.search(X[3], 99)
    assert found[0][0].id == "3" and [score for _, score in found] == scores.tolist()
    assert [d.number for d, _ in found] == ids.tolist() and "4" not in [d.id for d, _ in found]
    even = made.search(X[3], 99, {"field": "tags", "operator": "contains", "value": "even"})
    assert [d.id for d, _ in even] == [d.id for d, _ in found if int(d.id) % 2 == 0]
    assert [d.id for d, _ in made.search(X[3], 2, lambda d: d.id in ("4", "5", "6", "7"))] == [
        d.id for d, _ in found if d.id in "5 6 7"
    ][:2]
    near = made.search(X[3], 1, vectors=True)[0][0].vector
    assert near @ X[3] / np.linalg.norm(near) / np.linalg.norm(X[3]) > 0.98
    assert made.search(X[3], 1)[0][0].vector is None


def test_what_is_given_and_returned_is_copied():
    made, metadata = Documents(Index(DIM)), {"a": [1]}
    made.add([Document("x", None, metadata)], [X[0]])
    metadata["a"].append(2)
    for found in (made.get(["x"])[0], made.matching(None)[0], made.search(X[0], 1)[0][0]):
        assert found.metadata == {"a": [1]}
        found.metadata["a"].append(3)


def test_replace_skip_and_fail():
    made = table()
    twice = [Document("3", "new", {}), Document("n", "first", {}), Document("n", "last", {})]
    with pytest.raises(KeyError, match="3"):
        made.add(twice, X[20:23], existing="fail")
    assert made.add(twice, X[20:23], existing="skip") == 1
    assert [d.text for d in made.get(["3", "n", "?"])] == ["text 3", "first"]
    assert made.add(twice, [X[20], None, X[22]]) == 2
    assert [d.text for d in made.get(["n", "3"])] == ["last", "new"] and len(made) == 21 and len(made.index) == 17
    assert made.search(X[20], 1)[0][0].id == "3" and made.search(X[22], 1)[0][0].id == "n"
    assert made.add([Document("3", "none", {})], [None]) == 1 and len(made.index) == 16
    assert made.search(X[20], 1)[0][0].id != "3"


def test_remove_and_update():
    made = table()
    assert made.remove(["1", "4", "1", "?"]) == 2 and len(made) == 18 and len(made.index) == 15
    assert made.update(equal_to({"number": 2}), {"number": -2, "b": [1]}) == 1
    assert (
        made.get(["2"])[0].metadata == {"number": -2, "tags": ["even"], "b": [1]}
        and made.search(X[2], 1)[0][0].id == "2"
    )
    assert [d.id for d in made.matching(equal_to({"b": [1]}))] == ["2"]
    assert made.remove_matching({"field": "number", "operator": ">", "value": 9}) == 10
    assert [d.id for d in made.matching(None)] == ["0", "2", "3", "5", "6", "7", "8", "9"]
    assert made.remove_matching(None) == 8 and len(made) == len(made.index) == 0 and made.search(X[0], 3) == []


BAD = {
    "fewer vectors": (lambda t: t.add([Document("0", "", {})] * 2, [X[0]]), ValueError, "of 2 documents, got 1"),
    "an id": (lambda t: t.add([Document("0", "", {}), Document(7, "", {})], X[:2]), TypeError,
              r"add: `documents\[1\].id` must be a str, got 7"),
    "a text": (lambda t: t.add([Document("0", b"", {})], X[:1]), TypeError,
               r"add: `documents\[0\].text` must be a str or None, got b''"),
    "metadata": (lambda t: t.add([Document("0", "", [])], X[:1]), TypeError,
                 r"add: `documents\[0\].metadata` must be a dict, got \[\]"),
    "a row": (lambda t: t.add([Document("0", "", {})], [X[0, :5]]), ValueError, r"`vectors\[0\]` must be of shape"),
    "ragged": (lambda t: t.add([Document("0", "", {})], [[[1], [2, 3]]]), ValueError, r"got \[2, -1\]"),
    "zero": (lambda t: t.add([Document("0", "", {}), Document("1", "", {})], [None, 0 * X[0]]), ValueError,
             r"`vectors\[1\]` must not be zero"),
    "nan": (lambda t: t.add([Document("0", "", {})], [np.nan * X[0]]), ValueError, r"`vectors\[0, 0\]` must be finite"),
    "ids": (lambda t: t.get("0"), TypeError, "get: `ids` must be a list of str, got '0'"),
    "numbers": (lambda t: t.remove([0]), TypeError, "remove: `ids` must be a list of str"),
    "two queries": (lambda t: t.search(X[:2], 1), ValueError, "`vector` must have one dimension, got 2"),
    "index": (lambda t: Documents(t.index), ValueError, "`index` must be empty, it has 16 vectors without documents"),
    "no index": (lambda t: Documents(3), TypeError, "`index` must be a turboquant.Index, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_changes_nothing(case):
    call, error, message = case
    made = table()
    before = made.matching(None), made.search(X[0], 20)
    with pytest.raises(error, match=message):
        call(made)
    assert (made.matching(None), made.search(X[0], 20)) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_fork_waits_for_changes(monkeypatch):
    """The child sees a change as a whole, and no lock is held that another thread had taken."""
    made, began, add = table(), threading.Event(), Index.add

    def slow(index, rows):
        ids = add(index, rows)
        began.set()
        time.sleep(0.2)
        return ids

    monkeypatch.setattr(Index, "add", slow)
    thread = threading.Thread(target=made.add, args=([Document("new", "", {})], X[30:31]))
    thread.start()
    began.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(120)  # a deadlock
        code = 1
        try:
            found = made.search(X[30], 1)[0][0].id
            code = int(found != "new" or made.remove(["new"]) != 1 or len(made) != 20)
        finally:
            os._exit(code)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert made.search(X[30], 1)[0][0].id == "new"


def test_a_vector_without_document_is_an_error():
    made = table()
    made.index.add(X[30:31])
    with pytest.raises(RuntimeError, match="vector 16 is of no document: change the index through its documents alone"):
        made.search(X[30], 1)


def test_a_read_beside_writers_tries_again():
    """The filter removes a document during the first and the second attempt of a search. The third attempt is right."""
    made = table()
    spoiled = iter(["3", "2"])

    def filter(document):
        if document.id == "19" or (name := document.id) not in ("2", "3"):
            return True
        if (gone := next(spoiled, None)) is not None:
            made.remove([gone])
        return bool(name)

    found = [d.id for d, _ in made.search(X[3], 99, filter)]
    assert sorted(found) == sorted(d.id for d in made.matching(None) if d.number >= 0) and len(found) == 14


# ---- files ----


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_files(metric, tmp_path):
    made = table(metric)
    made.remove(["2"])
    made.add([Document("ü", None, {"a": {"b": None}, "\ud800": "ж"}, more={"k": [1]})], [X[30]])
    path = tmp_path / "documents.safetensors"
    made.save(path)
    again = Documents.load(path)
    assert made.matching(None) == again.matching(None) and made.search(X[3], 20) == again.search(X[3], 20)
    assert Index.load(path).search(X[3], 1)[1] == made.search(X[3], 1)[0][0].number
    assert again.index.metric == metric
    for each in (made, again):  # both go on alike
        each.add([Document("more", "", {})], [X[31]])
        each.remove(["3"])
    assert made.matching(None) == again.matching(None) and made.search(X[31], 20) == again.search(X[31], 20)
    empty = Documents(Index(DIM, metric=metric))
    empty.save(path)
    assert len(Documents.load(path)) == 0 and len(made.search(X[3], 20)) == 16


@pytest.mark.parametrize("metadata", [{1: 2}, {"a": (1,)}, {"a": float("nan")}, {"a": {1}}], ids=str)
def test_metadata_that_json_does_not_hold(metadata, tmp_path):
    made, path = table(), tmp_path / "documents.safetensors"
    made.save(path)
    before = path.read_bytes()
    made.add([Document("odd", "", metadata)], [None])
    with pytest.raises(ValueError, match="the metadata of document 'odd' must be what JSON holds"):
        made.save(path)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_file(tmp_path, monkeypatch):
    made, path = table(), tmp_path / "documents.safetensors"
    made.save(path)
    before = path.read_bytes()
    made.remove(["3"])

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        made.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_files_that_are_refused(tmp_path):
    made, path = table(), tmp_path / "documents.safetensors"
    with pytest.raises(FileNotFoundError):
        Documents.load(path)
    made.index.save(path)
    with pytest.raises(ValueError, match="it has no documents, or they are damaged"):
        Documents.load(path)
    rows = [[d.id, d.text, d.metadata, d.more, d.number] for d in made.matching(None)]
    unequal = {
        "one less": rows[:-2],
        "a number twice": [*rows[:1], [*rows[1][:4], 0], *rows[2:]],
        "a number twice, and all vectors": [*rows, ["twin", "", {}, None, 0]],
        "a truth value as a number": [*rows[:1], [*rows[1][:4], True], *rows[2:]],
        "an id twice": [*rows, rows[4]],
        "a short row": [["x"]],
        "no rows": {"a": 1},
        "an empty row": [[]],
        "rows that are mappings": [{"0": 1}],
        "a number as an id": [[0, "", {}, None, -1]],
        "text as metadata": [["x", "", "", None, -1]],
        "a fraction as a number": [*rows[:1], [*rows[1][:4], 1.0], *rows[2:-2], *rows[-2:-1]],
        "no JSON": b"[",
        "no text": b"\xff\xfe\xfd",
        "very deep": b"[" * 200_000,
        "unhashable": [[["x"], "", {}, None, 0]],
    }
    for name, bad in unequal.items():
        text = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
        made.index._save(path, {"documents": [np.frombuffer(text, np.uint8)]})
        with pytest.raises(ValueError, match="`path` must be a file of documents"):
            Documents.load(path)
            pytest.fail(name)
    made.index._save(path, {"documents": [np.frombuffer(b"[      ]", np.uint8)]})
    path.write_bytes(path.read_bytes().replace(b'"U8", "shape": [8]', b'"I64", "shape": []'))
    with pytest.raises(ValueError, match="`path` must be a file of documents, .* must be those of its vectors"):
        Documents.load(path)
    made.save(path)
    data = bytearray(path.read_bytes())
    at = data.index(b'"text 7"') + 1
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"got others in documents"):
        Documents.load(path)


def test_options_reach_the_search():
    made = Documents(Index(8, 1, refine="int8"))
    x = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    made.add([Document(str(i), "", {}) for i in range(60)], list(x))
    for options in ({}, {"factor": 1}, {"factor": 5, "threads": 1}, {"sigmas": 1}):
        hits = made.search(x[0], 5, **options)
        scores, ids = made.index.search(x[0], 5, **options)
        assert [(hit.id, score) for hit, score in hits] == list(
            zip(map(str, ids.tolist()), scores.tolist(), strict=True)
        )
    with pytest.raises(ValueError, match="`probe` needs lists"):
        made.search(x[0], 5, probe=1)
    with pytest.raises(TypeError, match="options must be of sigmas, probe, factor, threads, got fetch, refine"):
        made.search(x[0], 5, refine=x, fetch=1)
