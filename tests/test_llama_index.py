"""The adapter to LlamaIndex. make test-adapters installs what this needs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed: make test-adapters")

import fsspec
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import (
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQuery, VectorStoreQueryMode

from turboquant import Index
from turboquant.llama_index import TurboQuantVectorStore

DIM = 32
X = np.random.default_rng(0).standard_normal((40, DIM))


def node(i, **more):
    """Node i is of document "doc <i % 2>"."""
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc {i % 2}")}
    own = dict(id_=str(i), text=f"text {i}", metadata={"n": i, "tags": ["odd" if i % 2 else "even"]})
    return TextNode(**own | more, relationships=source, embedding=X[i].tolist())


@pytest.fixture(params=["cosine", "ip", "l2"])
def store(request):
    made = TurboQuantVectorStore(Index(DIM, bits=4, metric=request.param))
    assert made.add([node(i) for i in range(20)]) == list(map(str, range(20)))
    return made


def query(store, i, k=20, **more):
    return store.query(VectorStoreQuery(query_embedding=X[i].tolist(), similarity_top_k=k, **more))


def test_query(store):
    found = query(store, 7)
    assert found.ids[0] == "7" and len(found.ids) == 20 and found.ids == [n.node_id for n in found.nodes]
    assert found.similarities == sorted(found.similarities, reverse=True)
    want = node(7)
    want.embedding = None
    assert found.nodes[0] == want
    assert query(store, 7, 3).ids == found.ids[:3]
    assert set(query(store, 7, node_ids=["3", "4", "?"]).ids) == {"3", "4"}
    assert query(store, 7, node_ids=[], doc_ids=[]) == found  # as LlamaIndex's retriever asks
    assert set(query(store, 7, doc_ids=["doc 1"]).ids) == set(map(str, range(1, 20, 2)))


def test_options_of_the_search_are_passed_on(store):
    wanted = VectorStoreQuery(query_embedding=X[3].tolist(), similarity_top_k=5)
    assert store.query(wanted, threads=1, sigmas=8).ids == store.query(wanted).ids
    for options, words in (
        ({"probe": 1}, "`probe` needs lists"),
        ({"factor": 2}, "`factor` needs `refine`"),
        ({"sigmas": -1}, "`sigmas` must be at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            store.query(wanted, **options)


def test_mmr(store):
    plain = query(store, 7, 5)
    assert query(store, 7, 1, mode=VectorStoreQueryMode.MMR, mmr_threshold=1.0).ids == plain.ids[:1]
    diverse = store.query(
        VectorStoreQuery(X[7].tolist(), similarity_top_k=5, mode=VectorStoreQueryMode.MMR, mmr_threshold=0.1),
        mmr_prefetch_k=20,
    )
    assert diverse.ids[0] == "7" and diverse.ids != plain.ids and len(set(diverse.ids)) == 5
    odd = MetadataFilters(filters=[MetadataFilter(key="n", value=2, operator="<")])
    assert set(query(store, 7, 5, mode="mmr", filters=odd).ids) == {"0", "1"}
    assert query(TurboQuantVectorStore(Index(DIM)), 7, mode="mmr").ids == []


FILTERS = {
    "==": (lambda n: n == 3, [("n", 3, "==")], "and"),
    "!=": (lambda n: n != 3, [("n", 3, "!=")], "and"),
    ">": (lambda n: n > 3, [("n", 3, ">")], "and"),
    "<=": (lambda n: n <= 3, [("n", 3, "<=")], "and"),
    "in": (lambda n: n in (3, 5), [("n", [3, 5], "in")], "and"),
    "nin": (lambda n: n not in (3, 5), [("n", [3, 5], "nin")], "and"),
    "any": (lambda n: n % 2, [("tags", ["odd", "x"], "any")], "and"),
    "all": (lambda n: n % 2, [("tags", ["odd"], "all")], "and"),
    "contains": (lambda n: n % 2 == 0, [("tags", "even", "contains")], "and"),
    "is_empty": (lambda n: True, [("none", None, "is_empty")], "and"),
    "and": (lambda n: 3 < n < 9, [("n", 3, ">"), ("n", 9, "<")], "and"),
    "or": (lambda n: n < 3 or n > 9, [("n", 3, "<"), ("n", 9, ">")], "or"),
    "not": (lambda n: 3 <= n <= 9, [("n", 3, "<"), ("n", 9, ">")], "not"),
    "none": (lambda n: True, [], "or"),
}


@pytest.mark.parametrize("case", FILTERS.values(), ids=FILTERS)
def test_filters(case):
    wanted, conditions, condition = case
    made = TurboQuantVectorStore(Index(DIM))
    made.add([node(i) for i in range(20)])
    filters = MetadataFilters(
        filters=[MetadataFilter(key=key, value=value, operator=name) for key, value, name in conditions],
        condition=condition,
    )
    ids = [str(i) for i in range(20) if wanted(i)]
    assert [n.node_id for n in made.get_nodes(filters=filters)] == ids
    assert set(query(made, 7, filters=filters).ids) == set(ids)
    nested = MetadataFilters(filters=[filters, MetadataFilter(key="n", value=10, operator="<")])
    assert [n.node_id for n in made.get_nodes(filters=nested)] == [i for i in ids if int(i) < 10]
    made.delete_nodes(filters=filters)
    assert [n.node_id for n in made.get_nodes()] == [str(i) for i in range(20) if str(i) not in ids]


def test_get_delete_and_clear(store):
    assert [n.text for n in store.get_nodes(["5", "3", "?"])] == ["text 3", "text 5"]
    store.delete("doc 1")
    assert [n.node_id for n in store.get_nodes()] == list(map(str, range(0, 20, 2))) and len(store.client) == 10
    store.delete("doc 1")
    store.delete_nodes(["0", "1", "2"])
    store.delete_nodes([])
    assert len(store.get_nodes()) == 8
    store.delete_nodes(["4", "6"], MetadataFilters(filters=[MetadataFilter(key="n", value=5, operator=">")]))
    assert {n.node_id for n in store.get_nodes()} == {"4", "8", "10", "12", "14", "16", "18"}
    store.add([node(4, text="other")])
    assert store.get_nodes(["4"])[0].text == "other" and len(store.client) == 7
    store.clear()
    assert store.get_nodes() == [] and len(store.client) == 0 and query(store, 0).ids == []


def test_files_and_kinds_of_nodes(store, tmp_path):
    kinds = [
        IndexNode(id_="index", text="an index", index_id="i"),
        ImageNode(id_="image", text="a picture", image="aGk="),
        Node(id_="node", text_resource=MediaResource(text="some text", mimetype="text/x")),
        Node(id_="sound", audio_resource=MediaResource(path="a.wav")),
    ]
    for i, each in enumerate(kinds):
        each.embedding = X[20 + i].tolist()
    store.add(kinds)
    for each in kinds:
        each.embedding = None
    path = str(tmp_path / "new folder" / "store.json")
    store.persist(path, fs=fsspec.filesystem("file"))
    again = TurboQuantVectorStore.from_persist_path(path)
    assert again.get_nodes() == store.get_nodes() and query(again, 7) == query(store, 7)
    assert again.get_nodes(["index", "image", "node", "sound"]) == kinds and again.client.metric == store.client.metric
    again.add([node(30)])
    again.delete_nodes(["3"])
    again.persist(path)
    assert len(TurboQuantVectorStore.from_persist_path(path).get_nodes()) == 24
    with pytest.raises(ValueError, match="persist: `fs` must be the local file system"):
        store.persist(path, fs=fsspec.filesystem("memory"))


async def test_an_index_over_the_store(tmp_path):
    store = TurboQuantVectorStore(Index(8, bits=4, metric="cosine"))
    context = StorageContext.from_defaults(vector_store=store)
    nodes = [TextNode(id_=str(i), text=f"text {i}", metadata={"n": i}) for i in range(4)]
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=MockEmbedding(embed_dim=8))
    one = MetadataFilters(filters=[MetadataFilter(key="n", value=2)])
    assert [found.node.text for found in index.as_retriever(filters=one).retrieve("any")] == ["text 2"]
    assert [found.node.text for found in await index.as_retriever(filters=one).aretrieve("any")] == ["text 2"]
    index.delete_nodes(["2"])
    assert index.as_retriever(filters=one).retrieve("any") == []


BAD = {
    "no embedding": (lambda s: s.add([node(3, text="new"), TextNode(text="x")]), ValueError, "embedding not set"),
    "width": (lambda s: s.add([TextNode(text="x", embedding=[1.0])]), ValueError, r"\[32\], got \[1\]"),
    "zero": (
        lambda s: s.add([node(3, text="new"), TextNode(text="x", embedding=[0.0] * DIM)]),
        ValueError,
        r"s\[1\]` must",
    ),
    "nothing": (lambda s: s.delete_nodes(), ValueError, "`node_ids` or `filters` must be given; `clear` removes all"),
    "data": (
        lambda s: s.add(
            [node(3, text="new"), Node(audio_resource=MediaResource(data=b"aGk="), embedding=X[0].tolist())]
        ),
        ValueError,
        "add: LlamaIndex does not write all of node '.*', such as data in memory",
    ),
    "mode": (lambda s: query(s, 0, mode=VectorStoreQueryMode.HYBRID), ValueError, "must be default or mmr, got hybrid"),
    "query": (lambda s: s.query(VectorStoreQuery()), ValueError, "`query_embedding` must be given"),
    "k": (lambda s: query(s, 0, 0), ValueError, "`k`"),
    "filter": (
        lambda s: s.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="n", value="x", operator=">")])),
        ValueError,
        "must be a number or a date",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_changes_nothing(case):
    call, error, message = case
    made = TurboQuantVectorStore(Index(DIM, metric="cosine"))
    made.add([node(i) for i in range(20)])
    before = made.get_nodes(), query(made, 7)
    with pytest.raises(error, match=message):
        call(made)
    assert (made.get_nodes(), query(made, 7)) == before


def test_writers_and_readers_lose_nothing(store):
    failed = []

    def guarded(work, *args):
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)

    def write(name):
        for i in range(20):
            store.add([node(20 + i % 20, id_=f"{name} {i}", metadata={}), node(3)])
            store.add([node(5, id_=f"{name} gone", metadata={})])
            store.delete_nodes([f"{name} gone"])

    def read():
        among = MetadataFilters(filters=[MetadataFilter(key="n", value=20, operator="<")])
        for _ in range(40):
            assert set(query(store, 3, filters=among).ids) == set(map(str, range(20)))

    threads = [threading.Thread(target=guarded, args=job) for job in ((write, "a"), (write, "b"), (read,), (read,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(store.get_nodes()) == len(store.client) == 60
