"""`TurboQuantDocumentStore` and `TurboQuantEmbeddingRetriever`: a document store for Haystack. Needs haystack-ai."""

from __future__ import annotations

import os
from asyncio import to_thread
from functools import wraps
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy, FilterPolicy, apply_filter_policy
from haystack.errors import FilterError

from .index import Index, documents
from .index.filters import matching

__all__ = ["TurboQuantDocumentStore", "TurboQuantEmbeddingRetriever"]

_EXISTING: dict[Any, Any] = {DuplicatePolicy.SKIP: "skip", DuplicatePolicy.OVERWRITE: "replace"}
Filters = dict[str, Any] | None
Options = dict[str, Any] | None


class TurboQuantDocumentStore:
    """Documents whose embeddings a `turboquant.Index`, `.documents.index`, keeps and searches.

    dim, bits, metric, refine: of the index. path: a file that `save` writes; if it exists, its documents are read.
    return_embedding: whether documents come with embeddings decoded from their codes; with cosine they have length 1.
    """

    def __init__(
        self, dim: int, bits: int = 4, metric: str = "cosine", path: str | None = None, return_embedding: bool = False,
        refine: str | None = None
    ) -> None:  # fmt: skip
        self._path, self._return_embedding = path, return_embedding
        self._init = dict(
            dim=dim, bits=bits, metric=metric, refine=refine, path=path, return_embedding=return_embedding
        )
        self.documents = documents.Documents(Index(dim, bits, metric, refine=refine))
        if path is not None and os.path.exists(path):
            self.documents = documents.Documents.load(path)
        if ((got := self.documents.index).d, got.bits, got.metric, got.refine) != (dim, bits, metric, refine):
            raise ValueError(f"`path` must be of {dim=}, {bits=}, {metric=} and {refine=}, got {got!r} in {path!r}")

    def to_dict(self) -> dict[str, Any]:
        return default_to_dict(self, **self._init)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TurboQuantDocumentStore:
        return default_from_dict(cls, data)  # type: ignore[no-any-return]

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write documents and index to one file, by default the store's `path`, whole or not at all."""
        if (target := path or self._path) is None:
            raise ValueError("save: `path` must be given, because the store has none")
        self.documents.save(target)

    def count_documents(self) -> int:
        return len(self.documents)

    def filter_documents(self, filters: Filters = None) -> list[Document]:
        return [_document(document) for document in self.documents.matching(_filter(filters), self._return_embedding)]

    def write_documents(self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE) -> int:
        """Write documents, with or without embeddings. Returns how many. NONE is FAIL: an error if an id is there."""
        if not isinstance(documents, list) or not all(isinstance(each, Document) for each in documents):
            raise ValueError(f"write_documents: `documents` must be a list of Document, got {documents!r:.80}")
        new, vectors = list(map(_stored, documents)), [each.embedding for each in documents]
        try:
            return self.documents.add(new, vectors, _EXISTING.get(policy, "fail"))
        except KeyError as error:
            raise DuplicateDocumentError(f"document {error} is there already") from None

    def delete_documents(self, document_ids: list[str]) -> None:
        self.documents.remove(document_ids)

    def delete_all_documents(self) -> None:
        self.documents.remove_matching(None)

    def delete_by_filter(self, filters: dict[str, Any]) -> int:
        return self.documents.remove_matching(_filter(filters))

    def update_by_filter(self, filters: dict[str, Any], meta: dict[str, Any]) -> int:
        return self.documents.update(_filter(filters), meta)

    def embedding_retrieval(
        self, query_embedding: list[float], filters: Filters = None, top_k: int = 10, scale_score: bool = False,
        search_kwargs: Options = None
    ) -> list[Document]:  # fmt: skip
        """The documents whose embeddings are best. Their score is the cosine, the product, or with l2 1 / (1 +
        distance), and with scale_score in 0..1. search_kwargs: sigmas, probe, factor and threads of `Index.search`."""
        scaled = self.documents.relevance if scale_score else self.documents.similarity
        hits = self.documents.search(query_embedding, top_k, _filter(filters), self._return_embedding,
                                     **search_kwargs or {})  # fmt: skip
        return [_document(hit, scaled(score)) for hit, score in hits]


def _in_thread(method: Any) -> Any:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await to_thread(method, *args, **kwargs)

    return wraps(method)(run)


for _name in [name for name in vars(TurboQuantDocumentStore) if name.endswith(("documents", "filter", "retrieval"))]:
    setattr(TurboQuantDocumentStore, f"{_name}_async", _in_thread(getattr(TurboQuantDocumentStore, _name)))


@component
class TurboQuantEmbeddingRetriever:
    """Retrieves the documents of a `TurboQuantDocumentStore` whose embeddings are nearest to a query's. filters, top_k:
    defaults of calls; FilterPolicy.MERGE joins filters by Haystack's rules. search_kwargs: of `embedding_retrieval`."""

    def __init__(
        self, document_store: TurboQuantDocumentStore, filters: Filters = None, top_k: int = 10,
        scale_score: bool = False, filter_policy: str | FilterPolicy = FilterPolicy.REPLACE,
        search_kwargs: Options = None
    ) -> None:  # fmt: skip
        if not isinstance(document_store, TurboQuantDocumentStore):
            raise TypeError(f"`document_store` must be a TurboQuantDocumentStore, got {document_store!r:.80}")
        self.document_store, self.filters, self.top_k, self.scale_score = document_store, filters, top_k, scale_score
        self.filter_policy, self.search_kwargs = FilterPolicy.from_str(str(filter_policy)).value, search_kwargs

    @component.output_types(documents=list[Document])
    def run(self, query_embedding: list[float], filters: Filters = None, top_k: int | None = None) -> dict[str, Any]:
        both = apply_filter_policy(FilterPolicy(self.filter_policy), self.filters, filters)
        own = both, self.top_k if top_k is None else top_k, self.scale_score, self.search_kwargs
        return {"documents": self.document_store.embedding_retrieval(query_embedding, *own)}

    run_async = component.output_types(documents=list[Document])(_in_thread(run))


def _stored(document: Document) -> documents.Document:
    more = {key: value.to_dict() for key in ("blob", "sparse_embedding") if (value := getattr(document, key))}
    return documents.Document(document.id, document.content, document.meta, more or None)


def _document(document: documents.Document, score: float | None = None) -> Document:
    own = dict(id=document.id, content=document.text, meta=document.metadata, score=score,
               embedding=None if document.vector is None else document.vector.tolist())  # fmt: skip
    return Document.from_dict((document.more or {}) | own)


def _filter(filters: Filters) -> Any:
    try:
        return matching(filters) if filters else None
    except (TypeError, ValueError) as error:
        raise FilterError(str(error)) from None
