"""The documents of an index: a table of texts and metadata by id, searched, changed and saved with the vectors.

The adapters to LangChain, LlamaIndex and Haystack are thin layers over `Documents`.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import numpy as np

from . import inputs
from .filters import matching
from .index import Index
from .inputs import Floats

__all__ = ["Document", "Documents"]

OPTIONS = ("sigmas", "probe", "factor", "threads")  # options of `Index.search` that adapters pass on
_KINDS: dict[str, tuple[Any, str]] = {
    "id": (str, "a str"),
    "text": (str | None, "a str or None"),
    "metadata": (dict, "a dict"),
}
_TRIES = 3  # a read that writers disturbed this often takes their lock
Filter = dict[str, Any] | Callable[[Any], bool] | None
Result = TypeVar("Result")

_ALL: WeakSet[Documents] = WeakSet()
_LOCKED: list[Any] = []  # locks that a fork has taken


def _lock_all() -> None:
    """Waits for changes before a fork: threads that make them do not survive it."""
    for documents in sorted(_ALL, key=id):
        documents._lock.acquire()
        _LOCKED.append(documents._lock)


def _unlock_all() -> None:
    while _LOCKED:
        _LOCKED.pop().release()


os.register_at_fork(before=_lock_all, after_in_parent=_unlock_all, after_in_child=_unlock_all)


@dataclass(frozen=True)
class Document:
    id: str
    text: str | None
    metadata: dict[str, Any]
    more: Any = None  # other data of an adapter
    number: int = -1  # the id of its vector in the index; -1: it has none
    vector: Floats | None = None  # its vector decoded from the codes, in results that ask for it; never stored


class Documents:
    """Documents and the index of their vectors, which nothing else may change.

    Writers wait for one another. A read sees all of a change or nothing of it. It waits for writers only after three
    tries during each of which they changed something. A fork waits for them too, and the child can use the documents.
    What is given and returned is copied. Wrong arguments raise ValueError or TypeError, and then nothing is changed.
    """

    def __init__(self, index: Index) -> None:
        if not isinstance(index, Index):
            raise TypeError(f"`index` must be a turboquant.Index, got {index!r:.80}")
        if len(index):
            raise ValueError(f"`index` must be empty, it has {len(index)} vectors without documents")
        self.index = index
        self._by_id: dict[str, Document] = {}
        self._by_number: dict[int, Document] = {}
        self._changes = 0  # odd while a change is being made
        self._lock = RLock()  # for changes
        _ALL.add(self)

    def __len__(self) -> int:
        return len(self._by_id)

    # ---- changes ----

    def add(
        self,
        documents: Sequence[Document],
        vectors: Sequence[Any],
        existing: Literal["replace", "skip", "fail"] = "replace",
    ) -> int:
        """Add documents, and a vector or None for each. Returns how many were written. existing: what to do about an id
        that is there already or that several of the documents have. "replace": the last document counts; "skip": the
        first; "fail": KeyError with the id."""
        if len(vectors) != len(documents):
            raise ValueError(f"add: there must be a vector for each of {len(documents)} documents, got {len(vectors)}")
        for i, document in enumerate(documents):
            for name, (kind, wanted) in _KINDS.items():
                if not isinstance(value := getattr(document, name), kind):
                    raise TypeError(f"add: `documents[{i}].{name}` must be {wanted}, got {value!r:.80}")
        with self._lock:
            chosen: dict[str, int] = {}
            for i, document in enumerate(documents):
                if document.id in self._by_id or document.id in chosen:
                    if existing == "fail":
                        raise KeyError(document.id)
                    if existing == "skip":
                        continue
                chosen[document.id] = i
            with_vector = [i for i in chosen.values() if vectors[i] is not None]
            rows = self._rows(vectors, with_vector)
            new = {key: replace(documents[i], metadata=copy.deepcopy(documents[i].metadata), number=-1, vector=None)
                   for key, i in chosen.items()}  # fmt: skip
            old = [self._by_id[key] for key in chosen if key in self._by_id]
            with self._change():
                numbers = self.index.add(rows)
                for i, number in zip(with_vector, numbers.tolist(), strict=True):
                    new[documents[i].id] = replace(new[documents[i].id], number=number)
                self._forget(old)
                self._by_id.update(new)
                self._by_number.update((document.number, document) for document in new.values() if document.number >= 0)
            return len(new)

    def _rows(self, vectors: Sequence[Any], which: list[int]) -> Floats:
        """Returns some of the vectors as float32 [n, dim], checked so that the index will take them."""
        if not which:
            return np.empty((0, self.index.d), np.float32)
        for i in which:
            try:
                shape = list(np.shape(vectors[i]))
            except ValueError:  # lists of unequal lengths
                shape = [len(vectors[i]), -1]
            if shape != [self.index.d]:
                raise ValueError(f"add: `vectors[{i}]` must be of shape [{self.index.d}], got {shape}")
        matrix = inputs.vectors("add", "vectors", [vectors[i] for i in which], self.index.d)
        rows = inputs.as_float32(matrix)
        inputs.check("add", "vectors", rows, self.index.metric, np.array(which), matrix)
        return rows

    def remove(self, ids: Sequence[str]) -> int:
        """Remove documents by id and return how many were removed. Unknown ids are ignored."""
        wanted = _id_list("remove", ids)
        with self._lock:
            return self._remove([self._by_id[i] for i in wanted if i in self._by_id])

    def remove_matching(self, filter: Filter) -> int:
        """Remove the documents that match; returns how many."""
        with self._lock:
            return self._remove(self._selected(filter))

    def _remove(self, documents: list[Document]) -> int:
        with self._change():
            self._forget(documents)
            for document in documents:
                del self._by_id[document.id]
        return len(documents)

    def update(self, filter: Filter, metadata: dict[str, Any]) -> int:
        """Set some of the metadata of the documents that match; returns how many."""
        with self._lock:
            documents = self._selected(filter)
            new = [replace(d, metadata={**d.metadata, **copy.deepcopy(metadata)}) for d in documents]
            with self._change():
                self._by_id.update((document.id, document) for document in new)
                self._by_number.update((document.number, document) for document in new if document.number >= 0)
            return len(new)

    def _forget(self, documents: list[Document]) -> None:
        """Remove the vectors of documents."""
        numbers = [document.number for document in documents if document.number >= 0]
        if numbers:
            self.index.remove(numbers)
        for number in numbers:
            del self._by_number[number]

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Marks the time in which the index and the tables change, one after the other. The caller holds the lock."""
        self._changes += 1
        try:
            yield
        finally:
            self._changes += 1

    # ---- looking up ----

    def _read(self, look: Callable[[], Result]) -> Result:
        """Returns what `look` finds while nothing changes."""
        for _ in range(_TRIES):
            before = self._changes
            if before % 2 == 0:
                try:
                    result = look()
                    if self._changes == before:
                        return result
                except Exception:
                    if self._changes == before:
                        raise
        with self._lock:
            return look()

    def _selected(self, filter: Filter) -> list[Document]:
        test = _test(filter)
        return [document for document in list(self._by_id.values()) if test is None or test(document)]

    def _copies(self, documents: list[Document], vectors: bool) -> list[Document]:
        """Returns the copies that callers get, with or without vectors."""
        rows = [document.number for document in documents if vectors and document.number >= 0]
        decoded = dict(zip(rows, self.index.reconstruct(rows), strict=True)) if rows else {}
        return [replace(d, metadata=copy.deepcopy(d.metadata), vector=decoded.get(d.number)) for d in documents]

    def get(self, ids: Sequence[str], vectors: bool = False) -> list[Document]:
        """The documents with these ids, in this order; unknown ids are ignored. vectors: whether they get their decoded
        vectors."""
        wanted = _id_list("get", ids)
        return self._read(lambda: self._copies([self._by_id[i] for i in wanted if i in self._by_id], vectors))

    def matching(self, filter: Filter, vectors: bool = False) -> list[Document]:
        """The documents that match a filter (`filters`) or for which a function of `Document` is true, or all if it is
        None, in the order in which they were added."""
        return self._read(lambda: self._copies(self._selected(filter), vectors))

    def search(
        self, vector: Any, k: int, filter: Filter = None, vectors: bool = False, **options: Any
    ) -> list[tuple[Document, float]]:
        """The k documents with the best vectors and their scores, best first; fewer where fewer match. options: sigmas,
        probe, factor and threads of `Index.search`."""
        if unknown := options.keys() - set(OPTIONS):
            raise TypeError(f"search: options must be of {', '.join(OPTIONS)}, got {', '.join(sorted(unknown))}")
        if np.ndim(vector) != 1:
            raise ValueError(f"search: `vector` must have one dimension, got {np.ndim(vector)}")
        test = _test(filter)

        def look() -> list[tuple[Document, float]]:
            among = None
            if test is not None:
                among = [number for number, document in list(self._by_number.items()) if test(document)]
            scores, ids = self.index.search(vector, k, filter=among, **options)
            documents = [self._of_number(number) for number in ids[ids >= 0].tolist()]
            return list(zip(self._copies(documents, vectors), scores.tolist(), strict=False))

        return self._read(look)

    def _of_number(self, number: int) -> Document:
        try:
            return self._by_number[number]
        except KeyError:
            raise RuntimeError(
                f"vector {number} is of no document: change the index through its documents alone"
            ) from None

    def similarity(self, score: float) -> float:
        """A score that is larger for better vectors with every metric: with l2 it is 1 / (1 + distance)."""
        return 1 / (1 + math.sqrt(max(score, 0))) if self.index.metric == "l2" else score

    def relevance(self, score: float) -> float:
        """A score in 0..1, larger for better vectors: (1 + cosine) / 2, 1 / (1 + exp(-product)), 1 / (1 + distance)."""
        if self.index.metric == "ip":
            return 1 / (1 + math.exp(-score)) if score > -700 else 0.0
        return min(max((1 + score) / 2, 0.0), 1.0) if self.index.metric == "cosine" else self.similarity(score)

    # ---- files ----

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write documents and index to one file, whole or not at all. `Index.load` reads it too, without the documents.
        ValueError for metadata that JSON would change."""
        with self._lock:
            rows = [[d.id, d.text, d.metadata, d.more, d.number] for d in self._by_id.values()]
            text = _json(rows)
            self.index._save(path, {"documents": [np.frombuffer(text, np.uint8)]})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Documents:
        """Read what `save` wrote. The file is mapped and every byte checked. The loaded documents can be changed.
        FileNotFoundError if there is no file, ValueError if it is damaged or has no documents."""
        loaded = Index.load(path)
        try:
            loaded.verify()
            assert loaded._loaded is not None
            rows = _rows_in(loaded._loaded[1].get("documents", b"null"))
            self = cls(Index(loaded.d, loaded.bits, loaded.metric))
            self.index = loaded.copy()
            self._by_id = {row[0]: Document(*row) for row in rows}
            self._by_number = {d.number: d for d in self._by_id.values() if d.number >= 0}
            if len(self._by_id) != len(rows) or sorted(self._by_number) != sorted(loaded.ids.tolist()):
                raise ValueError("its documents must be those of its vectors")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"`path` must be a file of documents, got {os.fspath(path)!r}: {error}") from None
        return self


def ids_by_number(index: Index) -> dict[int, str]:
    """Returns the ids of documents by the ids of their vectors, for a loaded index whose file may have documents.
    ValueError if they are damaged."""
    assert index._loaded is not None
    data = index._loaded[1].get("documents")
    try:
        rows = [] if data is None else _rows_in(data)
    except (ValueError, RecursionError):
        raise ValueError("`path` must be a file of an index, got one whose documents are damaged") from None
    return {row[4]: row[0] for row in rows}


def _rows_in(data: Any) -> list[list[Any]]:
    """Returns the rows of a file's documents. ValueError or RecursionError if they are damaged."""
    rows = json.loads(memoryview(data).tobytes())
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise ValueError("it has no documents, or they are damaged")
    numbers = [row[4] for row in rows if row[4] >= 0]
    if len(set(numbers)) != len(numbers):
        raise ValueError("each of its documents must have a vector of its own")
    return rows


def _is_row(row: Any) -> bool:
    """Whether a row of a file has the five fields of a document."""
    kinds = (*(kind for kind, _ in _KINDS.values()), object, int)
    return isinstance(row, list) and len(row) == 5 and all(map(isinstance, row, kinds)) and not isinstance(row[4], bool)


def _test(filter: Filter) -> Callable[[Any], bool] | None:
    return filter if filter is None or callable(filter) else matching(filter)


def _id_list(op: str, ids: Sequence[str]) -> list[str]:
    if isinstance(ids, str) or not all(isinstance(i, str) for i in ids):
        raise TypeError(f"{op}: `ids` must be a list of str, got {ids!r:.80}")
    return list(dict.fromkeys(ids))


def _json(rows: list[list[Any]]) -> bytes:
    """Returns documents as JSON. ValueError for what JSON would change, such as tuples and keys that are no str."""
    for row in rows:
        try:
            same = json.loads(json.dumps(row, allow_nan=False)) == row
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(f"save: the metadata of document {row[0]!r} must be what JSON holds, got {row[2]!r:.200}")
    return json.dumps(rows, allow_nan=False, ensure_ascii=False).encode("utf-8", "surrogatepass")
