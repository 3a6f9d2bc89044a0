"""`TurboQuantVectorStore`: a vector store for LlamaIndex. Needs llama-index-core."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores import types
from llama_index.core.vector_stores.types import BasePydanticVectorStore, MetadataFilters
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from .index import Index
from .index.documents import OPTIONS, Document, Documents
from .index.filters import matching

__all__ = ["TurboQuantVectorStore"]


class TurboQuantVectorStore(BasePydanticVectorStore):
    """Nodes whose embeddings a `turboquant.Index` keeps and searches.

    index: an empty index of the embeddings' dimension; it may be trained. `client` returns it, for reading only.

    Adding a node with an id that is there replaces it. Filters are those of LlamaIndex, also nested; NOT means that
    none of its conditions holds. Similarities are the cosine, the product, or with l2 1 / (1 + distance). If anything
    fails, nothing is changed.
    """

    stores_text: bool = True
    _documents: Documents = PrivateAttr()

    def __init__(self, index: Index) -> None:
        super().__init__(stores_text=True)
        self._documents = Documents(index)

    @classmethod
    def class_name(cls) -> str:
        return "TurboQuantVectorStore"

    @property
    def client(self) -> Index:
        return self._documents.index

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes with embeddings. Returns their ids."""
        self._documents.add([_stored(node) for node in nodes], [node.get_embedding() for node in nodes])
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove the nodes of a document."""
        self._documents.remove_matching(lambda document: document.more["ref_doc_id"] == ref_doc_id)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Remove the nodes with these ids that match."""
        if node_ids is None and filters is None:
            raise ValueError("delete_nodes: `node_ids` or `filters` must be given; `clear` removes all nodes")
        self._documents.remove_matching(_test(node_ids, filters))

    def clear(self) -> None:
        self._documents.remove_matching(None)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes with these ids that match, or all, in the order in which they were added."""
        return [_node(document) for document in self._documents.matching(_test(node_ids, filters))]

    def query(self, query: types.VectorStoreQuery, **kwargs: Any) -> types.VectorStoreQueryResult:
        """The nodes with the best embeddings. Modes: DEFAULT, and MMR among mmr_prefetch_k nodes, or among
        mmr_prefetch_factor (4) times similarity_top_k nodes. If ids of nodes or documents are None or empty, they
        exclude none. kwargs may also have sigmas, probe, factor and threads of `Index.search`."""
        mmr = query.mode == types.VectorStoreQueryMode.MMR
        if not mmr and query.mode != types.VectorStoreQueryMode.DEFAULT:
            raise ValueError(f"query: `mode` must be default or mmr, got {query.mode.value}")
        if query.query_embedding is None:
            raise ValueError("query: `query_embedding` must be given")
        k = query.similarity_top_k
        fetched = max(k, kwargs.get("mmr_prefetch_k") or k * int(kwargs.get("mmr_prefetch_factor", 4))) if mmr else k
        test = _test(query.node_ids or None, query.filters, query.doc_ids or None)
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        results = self._documents.search(query.query_embedding, fetched, test, vectors=mmr, **options)
        pairs = [(self._documents.similarity(score), document) for document, score in results]
        if mmr and results:
            rows = [document.vector for document, _ in results]
            weight = kwargs.get("mmr_threshold", query.mmr_threshold)
            chosen = get_top_k_mmr_embeddings(query.query_embedding, rows, similarity_top_k=k, mmr_threshold=weight)
            pairs = [(float(score), results[i][0]) for score, i in zip(*chosen)]
        nodes, similarities = [_node(document) for _, document in pairs], [score for score, _ in pairs]
        return types.VectorStoreQueryResult(nodes, similarities, [node.node_id for node in nodes])

    # ---- files ----

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Write nodes and index to one file of this machine, whole or not at all."""
        if fs is not None and "file" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
            raise ValueError(f"persist: `fs` must be the local file system, got {fs!r:.80}")
        os.makedirs(os.path.dirname(persist_path) or ".", exist_ok=True)
        self._documents.save(persist_path)

    @classmethod
    def from_persist_path(cls, persist_path: str) -> TurboQuantVectorStore:
        """Read what `persist` wrote."""
        documents = Documents.load(persist_path)
        store = cls(Index(documents.index.d))
        store._documents = documents
        return store


def _stored(node: BaseNode) -> Document:
    """Returns a node as a document, with all but its text in `more`. ValueError if something would be lost."""
    has_text = isinstance(node, TextNode)
    fields = node_to_metadata_dict(node, remove_text=has_text)
    more = {key: fields[key] for key in ("_node_content", "_node_type")} | {"ref_doc_id": node.ref_doc_id}
    stored = Document(node.node_id, node.text if has_text else None, node.metadata, more)
    if not has_text and _node(stored) != node.model_copy(update={"embedding": None}):
        raise ValueError(f"add: LlamaIndex does not write all of node {node.node_id!r}, such as data in memory")
    return stored


def _node(document: Document) -> BaseNode:
    return metadata_dict_to_node(document.more, text=document.text)


def _test(
    node_ids: list[str] | None, filters: MetadataFilters | None, doc_ids: list[str] | None = None
) -> Callable[[Document], bool] | None:
    """Returns a test of whether a node has one of the ids, is of one of the documents and matches, each if given."""
    tests: list[Callable[[Document], bool]] = [] if filters is None else [matching(_filter(filters))]
    nodes, parents = frozenset(node_ids or ()), frozenset(doc_ids or ())
    if node_ids is not None:
        tests.append(lambda document: document.id in nodes)
    if doc_ids is not None:
        tests.append(lambda document: document.more["ref_doc_id"] in parents)
    return (lambda document: all(test(document) for test in tests)) if tests else None


def _filter(filters: Any) -> dict[str, Any]:
    """Returns LlamaIndex's filter in the grammar of `turboquant.index.filters`."""
    if not isinstance(filters, MetadataFilters):
        name = filters.operator.value
        return {"field": f"meta.{filters.key}", "operator": {"nin": "not in"}.get(name, name), "value": filters.value}
    conditions = [_filter(each) for each in filters.filters]
    if filters.condition == types.FilterCondition.NOT:
        return {"operator": "NOT", "conditions": [{"operator": "OR", "conditions": conditions}]}
    either = filters.condition == types.FilterCondition.OR and conditions
    return {"operator": "OR" if either else "AND", "conditions": conditions}
