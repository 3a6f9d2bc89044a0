"""`TurboQuantVectorStore`: a vector store for LangChain. Needs langchain-core."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from .index import Index, documents
from .index.documents import Documents
from .index.filters import equal_to, is_filter

__all__ = ["TurboQuantVectorStore"]

Filter = dict[str, Any] | Callable[[Document], bool] | None


class TurboQuantVectorStore(VectorStore):
    """Documents whose embeddings a `turboquant.Index`, `.documents.index`, keeps and searches.

    embedding: embeds texts and queries. index: an empty index of the embedding's dimension; it may be trained.

    filter: a dict of metadata that must be equal; a filter of `turboquant.index.filters`, which is a dict with
        "operator" and "field" or "conditions"; or a function of Document.
    Scores are those of the index: with l2 they are squared distances, and less is better. Adding a document with an id
    that is there replaces it. If embedding or anything else fails, nothing is changed.
    """

    def __init__(self, embedding: Embeddings, index: Index) -> None:
        self._embedding = embedding
        self.documents = Documents(index)  # change its index through the store alone

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    # ---- changes ----

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: Sequence[str | None] | None = None,
    ) -> list[str]:
        """Embed and add texts. Returns their ids, which are new where none are given."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        for name, argument in (("metadatas", metadatas), ("ids", ids)):
            if argument is not None and len(argument) != len(texts):
                raise ValueError(f"add_texts: `{name}` must be {len(texts)}, one a text, got {len(argument)}")
        names = [str(uuid.uuid4()) if name in (None, "") else name for name in ids or [None] * len(texts)]
        new = [
            documents.Document(name, text, metadata or {})
            for name, text, metadata in zip(names, texts, metadatas or [{}] * len(texts), strict=True)
        ]
        self.documents.add(new, self._embedding.embed_documents(texts) if texts else [])
        return names

    def delete(self, ids: list[str] | None = None) -> bool:
        """Delete documents by id, or all. Unknown ids are ignored."""
        _ = self.documents.remove_matching(None) if ids is None else self.documents.remove(ids)
        return True

    # ---- looking up ----

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return [_document(document) for document in self.documents.get(ids)]

    # options, also of a retriever's search_kwargs: sigmas, probe, factor and threads of `Index.search`

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter = None, **options: Any
    ) -> list[tuple[Document, float]]:
        hits = self.documents.search(embedding, k, _filter(filter), **options)
        return [(_document(hit), score) for hit, score in hits]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, **kwargs)]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, filter: Filter = None,
        **options: Any
    ) -> list[Document]:  # fmt: skip
        hits = [hit for hit, _ in self.documents.search(embedding, fetch_k, _filter(filter), vectors=True, **options)]
        rows = [hit.vector for hit in hits]
        chosen = maximal_marginal_relevance(np.array(embedding, np.float32), rows, lambda_mult, k) if rows else []
        return [_document(hits[i]) for i in chosen]

    def max_marginal_relevance_search(self, query: str, k: int = 4, *args: Any, **kwargs: Any) -> list[Document]:
        return self.max_marginal_relevance_search_by_vector(self._embedding.embed_query(query), k, *args, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.documents.relevance

    # ---- making and files ----

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        index: Index | None = None,
        **kwargs: Any,  # ids, as in add_texts
    ) -> TurboQuantVectorStore:
        """Make a store of texts. index: by default one with 4 bits and cosine."""
        if index is None:
            index = Index(len(embedding.embed_query(texts[0] if texts else "")), bits=4, metric="cosine")
        store = cls(embedding, index)
        store.add_texts(texts, metadatas, **kwargs)
        return store

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write documents and index to one file, whole or not at all. Metadata must be what JSON can hold."""
        self.documents.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], embedding: Embeddings) -> TurboQuantVectorStore:
        """Read what `save` wrote."""
        store = cls.__new__(cls)
        store._embedding, store.documents = embedding, Documents.load(path)
        return store


def _document(document: documents.Document) -> Document:
    return Document(id=document.id, page_content=document.text or "", metadata=document.metadata)


def _filter(filter: Filter) -> Any:
    """Returns a store's filter as `Documents` takes it."""
    if callable(filter):
        return lambda document: filter(_document(document))
    if isinstance(filter, dict) and not is_filter(filter):
        return equal_to(filter)
    return filter
