"""The adapter to LangChain, with its standard tests. make test-adapters installs what this needs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed: make test-adapters")
pytest.importorskip("langchain_tests", reason="langchain-tests is not installed: make test-adapters")

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests.vectorstores import EMBEDDING_SIZE, VectorStoreIntegrationTests

from turboquant import Index
from turboquant.langchain import TurboQuantVectorStore

WORDS = "one two three four five six seven eight nine ten red green blue black white".split()


class Bags(Embeddings):
    """A text is the sum of its words' vectors, so that neighbours are known."""

    def __init__(self, dim: int = 64) -> None:
        self.rows = dict(zip(WORDS, np.random.default_rng(0).standard_normal((len(WORDS), dim))))

    def embed_documents(self, texts):
        if "refuse" in texts:
            raise ConnectionError("no embeddings today")
        zero = np.zeros(len(self.rows["one"]))
        return [sum((self.rows[w] for w in text.split() if w in self.rows), zero).tolist() for text in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


class Standard(VectorStoreIntegrationTests):
    bits, metric = 4, "cosine"

    @pytest.fixture
    def vectorstore(self):
        return TurboQuantVectorStore(self.get_embeddings(), Index(EMBEDDING_SIZE, bits=self.bits, metric=self.metric))


class TestStandardCosine(Standard):
    pass


class TestStandardL2(Standard):
    bits, metric = 3, "l2"


@pytest.fixture(params=["cosine", "ip", "l2"])
def store(request):
    made = TurboQuantVectorStore(Bags(), Index(64, bits=4, metric=request.param))
    texts = [f"{a} {b}" for a in WORDS[:10] for b in WORDS[10:]]
    made.add_texts(texts, [{"number": i // 5, "colour": t.split()[1]} for i, t in enumerate(texts)], ids=texts)
    return made


def test_search(store):
    assert [d.page_content for d in store.similarity_search("three blue", k=1)] == ["three blue"]
    by_vector = store.similarity_search_by_vector(store.embeddings.embed_query("three blue"), k=3)
    assert by_vector == store.similarity_search("three blue", k=3)
    assert by_vector[0] == Document(
        id="three blue", page_content="three blue", metadata={"number": 2, "colour": "blue"}
    )
    scores = [score for _, score in store.similarity_search_with_score("three blue", k=50)]
    assert len(scores) == 50 and scores == sorted(scores, reverse=store.documents.index.metric != "l2")
    relevance = [score for _, score in store.similarity_search_with_relevance_scores("three blue", k=50)]
    assert relevance == sorted(relevance, reverse=True) and 0 <= relevance[-1] < relevance[0] <= 1
    assert relevance[0] > {"cosine": 0.98, "ip": 0.99, "l2": 0.1}[store.documents.index.metric]


def test_filters(store):
    red = store.similarity_search("three blue", k=50, filter={"colour": "red"})
    assert len(red) == 10 and {d.metadata["colour"] for d in red} == {"red"}
    early = {"field": "number", "operator": "<", "value": 2}
    few = {"operator": "AND", "conditions": [early, {"field": "colour", "operator": "in", "value": ["red", "blue"]}]}
    found = {d.id for d in store.similarity_search("ten", k=50, filter=few)}
    assert found == {"one red", "one blue", "two red", "two blue"}
    assert [d.id for d in store.similarity_search("one", k=9, filter=lambda d: d.id == "six red")] == ["six red"]
    assert store.similarity_search("one", k=9, filter={"colour": "pink"}) == []
    store.add_texts(["one"], [{"field": "physics", "conditions": "dry"}], ids=["new"])
    for metadata in ({"field": "physics"}, {"conditions": "dry"}):
        assert [d.id for d in store.similarity_search("one", k=50, filter=metadata)] == ["new"]
    assert {d.metadata["colour"] for d in store.max_marginal_relevance_search("ten", k=5, filter={"number": 9})} == set(
        WORDS[10:]
    )


def test_options_of_the_search_are_passed_on(store):
    plain = store.similarity_search("three blue", k=3)
    retriever = store.as_retriever(search_kwargs={"k": 3, "sigmas": 8, "threads": 1})
    assert retriever.invoke("three blue") == plain
    for search in (store.similarity_search, store.similarity_search_with_score, store.max_marginal_relevance_search):
        with pytest.raises(ValueError, match="`probe` needs lists"):
            search("three blue", k=3, probe=2)
        with pytest.raises(TypeError, match="options must be of sigmas, probe, factor, threads, got fetch"):
            search("three blue", k=3, fetch=2)


def test_mmr_differs_from_search(store):
    """The nearest is first; with little weight on the query, the next shares no word with it."""
    query = "one red"
    plain = [d.id for d in store.similarity_search(query, k=3)]
    assert store.max_marginal_relevance_search(query, k=1, lambda_mult=1)[0].id == plain[0]
    diverse = [d.id for d in store.max_marginal_relevance_search(query, k=3, fetch_k=50, lambda_mult=0.1)]
    assert diverse[0] == plain[0] and not set(diverse[1].split()) & set(query.split())
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 10})
    assert len(retriever.invoke(query)) == 2


def test_files(store, tmp_path):
    store.delete(["one red"])
    store.save(tmp_path / "store.safetensors")
    again = TurboQuantVectorStore.load(tmp_path / "store.safetensors", store.embeddings)
    for filter in (None, {"colour": "red"}):
        found = again.similarity_search_with_score("one red", k=5, filter=filter)
        assert found == store.similarity_search_with_score("one red", k=5, filter=filter)
    again.add_texts(["one red"], ids=["new"])
    again.delete(["two red"])
    again.save(tmp_path / "store.safetensors")
    third = TurboQuantVectorStore.load(tmp_path / "store.safetensors", store.embeddings)
    assert third.similarity_search("one red", k=1)[0].id == "new" and third.get_by_ids(["two red"]) == []
    assert len(third.documents) == 49


def test_from_texts():
    made = TurboQuantVectorStore.from_texts(["one", "two"], Bags(), [{"a": 1}, {"a": 2}], ids=["x", "y"])
    assert repr(made.documents.index).startswith("<Index: 2 vectors of 64 numbers, 4 bits, cosine, ")
    assert made.similarity_search("two", k=1) == [Document(id="y", page_content="two", metadata={"a": 2})]
    assert TurboQuantVectorStore.from_texts([], Bags()).similarity_search("two") == []
    own = TurboQuantVectorStore.from_documents([Document("ten", id="z")], Bags(), index=Index(64, 2, "l2"))
    assert own.get_by_ids(["z"])[0].page_content == "ten" and own.documents.index.bits == 2
    assert own.delete() and own.documents.matching(None) == [] and len(own.documents.index) == 0


BAD = {
    "metadatas": (lambda s: s.add_texts(["one", "two"], [{}]), ValueError, "`metadatas` must be 2, one a text, got 1"),
    "ids": (lambda s: s.add_texts(["one", "two"], ids=["a"]), ValueError, "`ids` must be 2, one a text, got 1"),
    "an id": (lambda s: s.add_texts(["one", "two"], ids=["a", 0]), TypeError, "id` must be a str, got 0"),
    "embedding": (lambda s: s.add_texts(["one", "refuse"], ids=["one red", "x"]), ConnectionError, "no embeddings"),
    "zero": (
        lambda s: s.add_texts(["one", "none"], ids=["one red", "x"]),
        ValueError,
        r"`vectors\[1\]` must not be zero",
    ),
    "width": (
        lambda s: setattr(s, "_embedding", Bags(32)) or s.add_texts(["one"]),
        ValueError,
        "must be of shape \\[64\\]",
    ),
    "query": (lambda s: s.similarity_search_by_vector([1.0]), ValueError, r"`queries` must be of shape"),
    "k": (lambda s: s.similarity_search("one", k=0), ValueError, "`k`"),
    "filter": (lambda s: s.similarity_search("one", filter=3), TypeError, "`filter` must be a dict, got 3"),
    "operator": (
        lambda s: s.similarity_search("one", filter={"field": "a", "operator": "~", "value": 1}),
        ValueError,
        "'operator' must be one of",
    ),
    "option": (lambda s: s.similarity_search("one", fliter={}), TypeError, "fliter"),
    "removed ids": (lambda s: s.delete("one red"), TypeError, "`ids` must be a list of str"),
    "index": (
        lambda s: TurboQuantVectorStore(Bags(), s.documents.index),
        ValueError,
        "`index` must be empty, it has 50 vectors",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_changes_nothing(case):
    call, error, message = case
    store = TurboQuantVectorStore(Bags(), Index(64, bits=4, metric="cosine"))
    texts = [f"{a} {b}" for a in WORDS[:10] for b in WORDS[10:]]
    store.add_texts(texts, ids=texts)
    before = store.similarity_search_with_score("one red", k=50)
    with pytest.raises(error, match=message):
        call(store)
    store._embedding = Bags()
    assert store.similarity_search_with_score("one red", k=50) == before and len(store.documents) == 50


def test_writers_and_readers_lose_nothing(store):
    """Two writers replace, add and delete while readers search: each search has all it asks for."""
    failed = []

    def write(name):
        for i in range(30):
            store.add_texts(["one red", "two green"], ids=[f"{name} {i}", f"{name} gone"])
            store.delete([f"{name} gone"])
            store.add_texts(["three blue"], ids=["three blue"])

    def read():
        for _ in range(60):
            found = [d.id for d in store.similarity_search("three blue", k=50)]
            if len(set(found)) != 50 or found[0] != "three blue":
                failed.append(found)

    def guarded(work, *args):
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=job) for job in ((write, "a"), (write, "b"), (read,), (read,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(store.documents) == len(store.documents.index) == 50 + 60
    assert len(store.get_by_ids([f"{name} {i}" for name in "ab" for i in range(30)])) == 60
