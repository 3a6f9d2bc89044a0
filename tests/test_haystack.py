"""The adapter to Haystack, with its standard tests. make test-adapters installs what this needs."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("haystack", reason="haystack-ai is not installed: make test-adapters")

from haystack import Document, Pipeline
from haystack.dataclasses import ByteStream, SparseEmbedding
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy, FilterPolicy
from haystack.errors import FilterError
from haystack.testing import document_store_async as twins
from haystack.testing.document_store import DocumentStoreBaseExtendedTests

from turboquant.haystack import TurboQuantDocumentStore, TurboQuantEmbeddingRetriever

DIM = 32
X = np.random.default_rng(0).standard_normal((40, DIM))


class TestStandard(
    DocumentStoreBaseExtendedTests,
    twins.DeleteAllAsyncTest,
    twins.CountDocumentsAsyncTest,
    twins.DeleteByFilterAsyncTest,
    twins.UpdateByFilterAsyncTest,
    twins.WriteDocumentsAsyncTest,
    twins.DeleteDocumentsAsyncTest,
    twins.FilterDocumentsAsyncTest,
):
    @pytest.fixture(params=[(4, "cosine"), (3, "l2")], ids=str)
    def document_store(self, request):
        bits, metric = request.param
        return TurboQuantDocumentStore(768, bits=bits, metric=metric)

    @staticmethod
    def assert_documents_are_equal(received, expected):
        """Embeddings are not returned: the store has no full-precision copy."""
        assert received == [replace(document, embedding=None) for document in expected]

    def test_write_documents(self, document_store):
        document = Document(content="test doc")
        assert document_store.write_documents([document]) == 1
        with pytest.raises(DuplicateDocumentError, match=document.id):
            document_store.write_documents([document])

    async def test_write_documents_async(self, document_store):
        document = Document(content="test doc")
        assert await document_store.write_documents_async([document]) == 1
        with pytest.raises(DuplicateDocumentError, match=document.id):
            await document_store.write_documents_async([document])


def documents():
    return [Document(id=str(i), content=f"text {i}", meta={"n": i}, embedding=X[i].tolist()) for i in range(20)]


@pytest.fixture(params=["cosine", "ip", "l2"])
def store(request):
    made = TurboQuantDocumentStore(DIM, metric=request.param)
    assert made.write_documents(documents()) == 20
    return made


def test_retriever(store):
    retriever = TurboQuantEmbeddingRetriever(store, top_k=3)
    found = retriever.run(X[7].tolist())["documents"]
    assert found[0].id == "7" and len(found) == 3 and found[0].embedding is None
    scores = [d.score for d in store.embedding_retrieval(X[7].tolist(), top_k=20)]
    assert scores == sorted(scores, reverse=True) and scores[:3] == [d.score for d in found]
    scaled = [d.score for d in store.embedding_retrieval(X[7].tolist(), top_k=20, scale_score=True)]
    assert scaled == sorted(scaled, reverse=True) and 0 <= scaled[-1] < scaled[0] <= 1
    small = {"field": "meta.n", "operator": "<", "value": 5}
    assert {d.id for d in retriever.run(X[7].tolist(), small, top_k=9)["documents"]} == set("01234")


def test_options_of_the_search_are_passed_on(store):
    plain = TurboQuantEmbeddingRetriever(store, top_k=3).run(X[7].tolist())
    retriever = TurboQuantEmbeddingRetriever(store, top_k=3, search_kwargs={"sigmas": 8, "threads": 1})
    assert retriever.run(X[7].tolist()) == plain
    with pytest.raises(ValueError, match="`probe` needs lists"):
        TurboQuantEmbeddingRetriever(store, search_kwargs={"probe": 2}).run(X[7].tolist())
    with pytest.raises(TypeError, match="options must be of sigmas, probe, factor, threads, got fetch"):
        store.embedding_retrieval(X[7].tolist(), search_kwargs={"fetch": 1})


def test_filter_policies(store):
    own = {"field": "meta.n", "operator": "<", "value": 10}
    given = {"field": "id", "operator": "in", "value": ["8", "12"]}
    for policy, ids in ((FilterPolicy.REPLACE, {8, 12}), ("replace", {8, 12}), ("merge", {8})):
        retriever = TurboQuantEmbeddingRetriever(store, filters=own, top_k=20, filter_policy=policy)
        assert {int(d.id) for d in retriever.run(X[0].tolist(), filters=given)["documents"]} == ids
        assert {int(d.id) for d in retriever.run(X[0].tolist())["documents"]} == set(range(10))


async def test_coroutines(store):
    plain = TurboQuantEmbeddingRetriever(store).run(X[7].tolist())
    assert await TurboQuantEmbeddingRetriever(store).run_async(X[7].tolist()) == plain
    assert await store.embedding_retrieval_async(X[7].tolist(), top_k=10) == plain["documents"]


def test_embeddings_come_from_their_codes():
    store = TurboQuantDocumentStore(DIM, bits=8, metric="l2", return_embedding=True)
    store.write_documents([*documents(), Document(id="none", content="no embedding")])
    for found in (store.filter_documents()[7], store.embedding_retrieval(X[7].tolist(), top_k=1)[0]):
        assert found.id == "7" and 0 < np.abs(np.array(found.embedding) - X[7]).max() < 0.05
    assert store.filter_documents()[-1].embedding is None


def test_pipeline_and_files(store, tmp_path):
    """A pipeline that is written and read again has the documents, if the store has a file."""
    path, metric = str(tmp_path / "store.safetensors"), store.documents.index.metric
    odd = Document(id="odd", content=None, blob=ByteStream(b"\x00\xff", {"a": 1}, "image/png"),
                   sparse_embedding=SparseEmbedding([1, 5], [0.5, 2.0]))  # fmt: skip
    store.write_documents([odd])
    with pytest.raises(ValueError, match="save: `path` must be given"):
        store.save()
    store.save(path)
    again = TurboQuantDocumentStore(DIM, metric=metric, path=path)
    assert again.filter_documents() == store.filter_documents() and again.filter_documents()[-1] == odd
    pipeline = Pipeline()
    retriever = TurboQuantEmbeddingRetriever(again, top_k=4, filter_policy="merge", scale_score=True)
    pipeline.add_component("retriever", retriever)
    read = Pipeline.loads(pipeline.dumps(), allowed_modules=["turboquant.haystack"])
    given = {"retriever": {"query_embedding": X[3].tolist()}}
    assert read.run(given) == pipeline.run(given) and len(read.run(given)["retriever"]["documents"]) == 4
    assert read.get_component("retriever").filter_policy == "merge"
    again.delete_documents(["3"])
    again.save()
    assert TurboQuantDocumentStore.from_dict(again.to_dict()).count_documents() == 20
    for wrong in ({"bits": 2}, {"dim": 64}, {"metric": "cosine" if metric != "cosine" else "ip"}):
        with pytest.raises(ValueError, match="`path` must be of dim"):
            TurboQuantDocumentStore(**{"dim": DIM, "metric": metric, "path": path} | wrong)


BAD = {
    "width": (lambda s: s.write_documents([Document(id="x", embedding=[1.0])]), ValueError, r"\[32\], got \[1\]"),
    "zero": (
        lambda s: s.write_documents(
            [Document(id="1"), Document(id="2", embedding=[0.0] * DIM)], DuplicatePolicy.OVERWRITE
        ),
        ValueError,
        r"`vectors\[1\]` must not be zero",
    ),
    "duplicate": (lambda s: s.write_documents([Document(id="x"), Document(id="3")]), DuplicateDocumentError, "'3'"),
    "no document": (lambda s: s.write_documents([{}]), ValueError, "must be a list of Document"),
    "filter": (lambda s: s.delete_by_filter({"field": "n", "operator": "~", "value": 1}), FilterError, "'operator'"),
    "query": (lambda s: s.embedding_retrieval([1.0]), ValueError, "must be of shape"),
    "top_k": (lambda s: s.embedding_retrieval(X[0].tolist(), top_k=0), ValueError, "`k`"),
    "store": (lambda s: TurboQuantEmbeddingRetriever(3), TypeError, "must be a TurboQuantDocumentStore, got 3"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_changes_nothing(case):
    call, error, message = case
    made = TurboQuantDocumentStore(DIM)
    made.write_documents(documents())
    before = made.filter_documents(), made.embedding_retrieval(X[0].tolist(), top_k=20)
    with pytest.raises(error, match=message):
        call(made)
    assert (made.filter_documents(), made.embedding_retrieval(X[0].tolist(), top_k=20)) == before


def test_writers_and_readers_lose_nothing(store):
    failed = []

    def guarded(work, *args):
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)

    def write(name):
        for i in range(30):
            store.write_documents([Document(id=f"{name} {i}", embedding=X[20 + i % 20].tolist())])
            store.write_documents([documents()[3]], DuplicatePolicy.OVERWRITE)
            store.update_by_filter({"field": "id", "operator": "==", "value": f"{name} {i}"}, {"seen": True})

    def read():
        for _ in range(60):
            among = {"field": "n", "operator": "<", "value": 20}
            assert {d.id for d in store.embedding_retrieval(X[3].tolist(), among, top_k=20)} == set(map(str, range(20)))

    threads = [threading.Thread(target=guarded, args=job) for job in ((write, "a"), (write, "b"), (read,), (read,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and store.count_documents() == len(store.documents.index) == 80
    assert len(store.filter_documents({"field": "seen", "operator": "==", "value": True})) == 60
