"""Indexes in several files that are searched as one, here or by an executor's workers. A manifest names the files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import existing_file, file_name, write_whole
from .index import Index
from .inputs import Floats, Ids, id_array

__all__ = ["search_shards", "verify_shards", "write_manifest"]

FORMAT = "turboquant-shards-1"
_ALIKE = "shards must have one transform: fill copies of one index, trained or not"


@dataclass(frozen=True)
class _Shard:
    """The absolute path of an index's file, and the checksums that a manifest has for it."""

    path: str
    checksum: str | None = None
    transform: str | None = None

    def check(self, opened: _Opened) -> None:
        """ValueError unless the opened file is the one that the manifest names."""
        if self.checksum not in (None, opened.checksum):
            raise ValueError(f"{self.path!r} must be the file that the manifest names, its checksum differs")
        if self.transform not in (None, opened.transform):
            raise ValueError(f"{_ALIKE}; {self.path!r} has another than the manifest names")


@dataclass(frozen=True)
class _Opened:
    index: Index
    checksum: str
    transform: str


def _open(path: str) -> _Opened:
    index = Index.load(path)
    return _Opened(index, _checksum(index), _transform_checksum(index))


def _checksum(index: Index) -> str:
    """SHA-256 of the header of an index's file, which holds the CRC-32 of each array and so stands for the file."""
    assert index._loaded is not None
    meta, arrays = index._loaded
    shapes = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
    return hashlib.sha256(json.dumps([meta, shapes], sort_keys=True).encode()).hexdigest()


def _transform_checksum(index: Index) -> str:
    """SHA-256 of all that the codes and scores of a vector depend on."""
    t = index._contents.transform
    mean = None if t.mean is None else np.ldexp(t.mean.astype(np.float64), t.exponent)
    digest = hashlib.sha256(json.dumps([index.d, index.metric, t.seed]).encode())
    lists = None if t.lists is None else t.lists.divided(-t.exponent)
    arrays: dict[str, NDArray[Any] | None] = {
        "bits": t.bits,
        "lead": t.lead,
        "steps": t.steps,
        "mean": mean,
        "matrix": t.matrix,
    }
    if lists is not None:
        arrays |= {"directions": lists.directions, "lengths": lists.lengths}
    if t.fine is not None:
        own = t.fine.mean
        arrays |= {
            "fine.bits": t.fine.bits,
            "fine.mean": None if own is None else np.ldexp(own.astype(np.float64), t.exponent),
        }
    for name, array in arrays.items():
        if array is not None:
            digest.update(f"{name} {array.nbytes} ".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# ---- search ----

# The files that this process has opened, by path, each with the numbers by which a replaced file is noticed. If two
# threads open the same file, one of the two is kept.
_OPENED: dict[str, tuple[tuple[int, ...], _Opened]] = {}


def _opened(path: str) -> _Opened:
    """Returns a mapped file, the one of an earlier search if the file has not been replaced."""
    about = os.stat(existing_file(path, "a file of an index"))
    identity = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
    known = _OPENED.get(path)
    if known is None or known[0] != identity:
        known = _OPENED[path] = identity, _open(path)
    return known[1]


def _search_one(shard: _Shard, queries: Any, k: int, options: dict[str, Any]) -> tuple[str, str, Floats, Ids]:
    """Searches one shard; workers run this. Returns (checksum of the transform, metric, scores, ids)."""
    opened = _opened(shard.path)
    shard.check(opened)
    try:
        results = opened.index.search(queries, k, **options)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{shard.path!r}: {str(error).removeprefix('search: ')}") from None
    return opened.transform, opened.index.metric, *results


def search_shards(
    paths: Any,
    queries: Any,
    k: int,
    executor: Any = None,
    *,
    filter: Any = None,
    threads: int = 0,
    sigmas: float | None = None,
    probe: int | None = None,
) -> tuple[Floats, Ids]:
    """The k best vectors for each query in several files of indexes: (scores, ids) as `Index.search` returns them,
    merged by score, then id. Each process maps a file once, and again after it was replaced.

    paths: the path of a manifest (`write_manifest`), or a list of paths of files that `Index.save` wrote. Their indexes
        must have one transform: fill copies of one index, trained or not. Ids must differ between files; only
        `write_manifest` and `verify_shards` check that.
    queries, k, threads, sigmas, probe: as in `Index.search`, for each file. `queries` is sent to each worker.
    executor: an object with `submit` as the executors of `concurrent.futures` have it, such as a process pool, or
        Dask's `client.get_executor()`. Workers open the files by their absolute paths. None: search here, in turn.
    filter: ids to search among, whichever files they are in; a mask is not allowed.

    The bound of a search compares rows of the same file only, so at the same `sigmas` a few results may differ from
    those of one index of all rows. With `sigmas=math.inf` they are the same.

    Raises ValueError or TypeError for wrong arguments, a damaged file, and files that the manifest does not name or
    whose transforms differ; FileNotFoundError for one that is not there.
    """
    shards = _read_manifest(paths) if isinstance(paths, str | bytes | os.PathLike) else _listed("paths", paths)
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(f"search_shards: `executor` must be one as in concurrent.futures, got {executor!r:.80}")
    among = None if filter is None else id_array("search_shards", filter, "filter")
    options = {"filter": among, "threads": threads, "sigmas": sigmas, "probe": probe}
    if executor is None:
        results = [_search_one(shard, queries, k, options) for shard in shards]
    else:
        futures = [executor.submit(_search_one, shard, queries, k, options) for shard in shards]
        try:
            results = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()  # no effect on one that has run
    transforms, metrics, scores, ids = zip(*results, strict=True)
    for shard, transform in zip(shards, transforms, strict=True):
        if transform != transforms[0]:
            raise ValueError(f"search_shards: {_ALIKE}; {shard.path!r} has another than {shards[0].path!r}")
    return _merged(np.concatenate(scores, axis=-1), np.concatenate(ids, axis=-1), k, metrics[0])


def _merged(scores: Floats, ids: Ids, k: int, metric: str) -> tuple[Floats, Ids]:
    """Returns the k best along the last axis. Entries without a vector have id -1 and a score worse than any."""
    order = np.lexsort((ids, scores if metric == "l2" else -scores), axis=-1)[..., :k]
    return np.take_along_axis(scores, order, axis=-1), np.take_along_axis(ids, order, axis=-1)


# ---- manifests ----


def write_manifest(path: str | os.PathLike[str], shards: Iterable[str | os.PathLike[str]]) -> None:
    """Write the JSON file that names files of indexes for `search_shards`, whole or not at all: the paths relative to
    its own folder, the checksum of each file, and that of their transform.

    Every byte of the files is checked. ValueError if a file is damaged, if transforms differ, or if two files have the
    same id; FileNotFoundError if a file is missing. Then nothing is written.
    """
    listed = _listed("shards", shards)
    folder = os.path.dirname(os.path.abspath(file_name(path)))
    opened = _checked(listed)
    entries = [
        {"file": os.path.relpath(shard.path, folder), "checksum": one.checksum}
        for shard, one in zip(listed, opened, strict=True)
    ]
    text = json.dumps({"format": FORMAT, "transform": opened[0].transform, "shards": entries}, indent=1)
    write_whole(path, [text.encode() + b"\n"])


def verify_shards(path: str | os.PathLike[str]) -> None:
    """Check every byte of the files of a manifest as `write_manifest` does, and that they are the files that it names.
    Raises the same errors."""
    _checked(_read_manifest(path))


def _checked(shards: list[_Shard]) -> list[_Opened]:
    opened = []
    for shard in shards:
        one = _open(shard.path)
        shard.check(one)
        try:
            one.index.verify()
        except ValueError as error:
            raise ValueError(f"{shard.path!r}: {error}") from None
        opened.append(one)
        if one.transform != opened[0].transform:
            raise ValueError(f"{_ALIKE}; {shard.path!r} has another than {shards[0].path!r}")
    _check_ids(shards, opened)
    return opened


def _check_ids(shards: list[_Shard], opened: list[_Opened]) -> None:
    """ValueError if two files have the same id. Only files whose ranges of ids overlap are compared."""
    own = [one.index.ids for one in opened]
    ranges = sorted((int(ids.min()), int(ids.max()), i) for i, ids in enumerate(own) if len(ids))
    for at, (_, last, i) in enumerate(ranges):
        for low, _, j in ranges[at + 1 :]:
            if low > last:
                break
            if len(both := np.intersect1d(own[i], own[j])):
                raise ValueError(
                    f"shards must have different ids, got {both[0]} in {shards[i].path!r} and {shards[j].path!r}"
                )


def _listed(argument: str, paths: Any) -> list[_Shard]:
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        raise TypeError(f"`{argument}` must be a list of paths, got {paths!r:.80}")
    listed = [_Shard(os.path.abspath(file_name(path, f"{argument}[{i}]"))) for i, path in enumerate(paths)]
    if not listed:
        raise ValueError(f"`{argument}` must name at least one file")
    return listed


def _read_manifest(path: Any) -> list[_Shard]:
    name = existing_file(path, "a manifest of shards")
    folder = os.path.dirname(os.path.abspath(name))
    try:
        with open(name, "rb") as file:
            said = json.loads(file.read())
        if said["format"] != FORMAT:
            raise ValueError(f"its format must be {FORMAT}, got {said['format']!r:.80}")
        transform, entries = said["transform"], [(entry["file"], entry["checksum"]) for entry in said["shards"]]
        if not entries or not all(isinstance(text, str) for entry in entries for text in (transform, *entry)):
            raise TypeError
    except (KeyError, TypeError, RecursionError, UnicodeError, json.JSONDecodeError):
        why = "it is not one that turboquant wrote; files of indexes go into a list"
        raise ValueError(f"`path` must be a manifest of shards, got {name!r}: {why}") from None
    except ValueError as error:
        raise ValueError(f"`path` must be a manifest of shards, got {name!r}: {error}") from None
    return [_Shard(os.path.join(folder, file), checksum, transform) for file, checksum in entries]
