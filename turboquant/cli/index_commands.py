"""`turboquant index build | search | info | verify`: an index of the vectors in a .npy file, or of the means in a file
of `turboquant esm-embed`, with the names of the proteins. NumPy only."""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..arguments import BOUNDS, STANDARD_OUTPUT, check_output, standard_output
from ..progress import Progress, log

if TYPE_CHECKING:
    from ..index import Index

_TOGETHER = 1024  # how many queries are searched before their results are written
_ROWS = 16_384  # how many vectors are added before progress is shown: a segment


# ---- files of vectors ----


def mapped(path: str, name: str) -> tuple[Any, tuple[str, ...] | None]:
    """Returns the vectors of a .npy file or the means of a file of embeddings, [n, dim], and the names of the latter or
    None. Files are mapped: numbers are read when they are used. name: what users call the file."""
    import numpy as np

    from ..esm.embeddings import Embeddings  # which needs no torch

    wanted = f"{name} must be a .npy file of numbers, [n, dim], or one of esm-embed"
    if not os.path.isfile(path):
        raise ValueError(f"{wanted}, got {path!r}, {'a folder' if os.path.isdir(path) else 'which is no file'}")
    try:
        with open(path, "rb") as file:
            if file.read(6) != b"\x93NUMPY":
                embeddings = Embeddings.load(path)
                return embeddings.means(), embeddings.names
        x = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # also for objects
        why = str(error).rpartition(f"{path!r}: ")[2]  # the reason alone of an error of `Embeddings.load`
        raise ValueError(f"{wanted}, got {path!r}: {why}") from None
    if x.ndim != 2 or not len(x) or x.dtype.kind not in "biuf":
        raise ValueError(f"{wanted}, got {path!r} of {x.dtype}, {list(x.shape)}")
    return x, None


def check_names(names: Sequence[str], what: str) -> None:
    """Raises ValueError if two names are the same."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: proteins must be named differently up to the first blank, got two {name!r}")
        seen.add(name)


def _loaded(path: str) -> Index:
    from ..files import path_called
    from ..index import Index

    with path_called("INDEX"):
        return Index.load(path)


# ---- commands ----


def build(chosen: argparse.Namespace) -> int:
    """Fill an index with the vectors of a file. Ids are row numbers."""
    from ..index import Index

    check_output(chosen.out, "--out", {"VECTORS": chosen.vectors}, moved=True)
    x, names = mapped(chosen.vectors, "VECTORS")
    if names is not None:
        check_names(names, chosen.vectors)
    _check_build(chosen, *x.shape)
    index = Index(x.shape[1], chosen.bits, chosen.metric, chosen.seed, chosen.lists, chosen.refine)
    fill(index, x, chosen.out, chosen.vectors, chosen.train or chosen.lists > 0, names)
    return 0


def _check_build(chosen: argparse.Namespace, n: int, dim: int) -> None:
    most = BOUNDS["Index: `dim`"][1]
    if not 1 <= dim <= most:
        raise ValueError(f"VECTORS must have 1..{most} numbers a row, got {dim}")
    if (chosen.train or chosen.lists) and n < max(2, chosen.lists):
        option = f"--lists {chosen.lists}" if chosen.lists else "--train"
        raise ValueError(f"VECTORS must have at least {max(2, chosen.lists)} vectors with {option}, got {n}")


def fill(index: Index, x: Any, out: str, path: str, train: bool, names: Sequence[str] | None = None) -> None:
    """Train an empty index if wanted, fill it and save it, with the names as documents. path: what errors call x."""
    from ..index import inputs
    from ..index.documents import Document, Documents

    if train:
        _train(index, x, path)
    documents = None if names is None else Documents(index)
    with Progress("index build", len(x), "vectors") as progress:
        for at in range(0, len(x), _ROWS):
            part = inputs.as_float32(x[at : at + _ROWS])
            try:
                if documents is None or names is None:
                    index.add(part)
                else:
                    documents.add([Document(name, None, {}) for name in names[at : at + len(part)]], list(part))
            except ValueError:
                inputs.check("add", path, part, index.metric, at)  # names the row of the file
                raise
            progress.add(len(part))
    (index if documents is None else documents).save(out)
    print(f"{out}: {index!r}, {os.path.getsize(out):,} bytes")


def _train(index: Index, x: Any, path: str) -> None:
    import numpy as np

    from ..index import inputs, training
    from ..index.lists import PER_LIST

    step = -(-len(x) // max(training.JUDGES, PER_LIST * index.lists))
    sample = inputs.as_float32(x[::step])
    log.info("index build: training on %s of %s vectors", f"{len(sample):,}", f"{len(x):,}")
    try:
        index.train(sample)
    except ValueError:
        inputs.check("train", path, sample, index.metric, np.arange(0, len(x), step))
        raise


def search(chosen: argparse.Namespace) -> int:
    """Search an index for the vectors of a file. Writes CSV, a line for each vector that was found."""
    from ..files import path_called
    from ..index.documents import ids_by_number

    read = {"INDEX": chosen.index, "QUERIES": chosen.queries, "--refine": chosen.refine}
    if chosen.csv not in STANDARD_OUTPUT:
        check_output(chosen.csv, "--csv", read, moved=True)
    queries, names = mapped(chosen.queries, "QUERIES")
    vectors = None if chosen.refine is None else mapped(chosen.refine, "--refine")[0]
    index = _loaded(chosen.index)
    _check_search(chosen, index, queries, vectors)
    with path_called("INDEX"):
        ids = ids_by_number(index)
    options = {"threads": chosen.threads, "refine": vectors, "factor": chosen.factor, "probe": chosen.probe}
    rows = _neighbours(index, queries, names, ids, chosen.k, options, shown=chosen.csv not in STANDARD_OUTPUT)
    if chosen.csv in STANDARD_OUTPUT:
        csv.writer(standard_output()).writerows(rows)
        return 0
    unfinished = f"{chosen.csv}.part"
    try:
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        os.replace(unfinished, chosen.csv)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise
    return 0


def _check_search(chosen: argparse.Namespace, index: Index, queries: Any, vectors: Any) -> None:
    if chosen.factor is not None and vectors is None and index.refine is None:
        raise ValueError(f"--factor must be given with --refine only: INDEX keeps no more bits, got {chosen.factor}")
    if chosen.probe is not None and not 1 <= chosen.probe <= index.lists:
        within = f"in 1..{index.lists}, the lists of INDEX" if index.lists else "left out: INDEX has no lists"
        raise ValueError(f"--probe must be {within}, got {chosen.probe}")
    for name, x in (("QUERIES", queries), ("--refine", vectors)):
        if x is not None and x.shape[1] != index.d:
            raise ValueError(f"{name} must have {index.d} numbers a row, as INDEX has, got {x.shape[1]}")


def _neighbours(
    index: Index,
    queries: Any,
    names: Sequence[str] | None,
    ids: dict[int, str],
    k: int,
    options: dict[str, Any],
    shown: bool,
) -> Iterator[tuple[Any, ...]]:
    """Yields rows of CSV. names, ids: names of queries and of vectors, if they have any."""
    with Progress("index search", len(queries), "queries", shown) as progress:
        for at in range(0, len(queries), _TOGETHER):
            scores, neighbours = index.search(queries[at : at + _TOGETHER], k, **options)
            if not at:  # after the first search, which checks the arguments
                yield "query", "rank", "id", "score"
            for i, (own, its) in enumerate(zip(scores.tolist(), neighbours.tolist(), strict=True), at):
                for rank, (score, number) in enumerate(zip(own, its, strict=True)):
                    if number >= 0:
                        yield i if names is None else names[i], rank, ids.get(number, number), f"{score:.7g}"
            progress.add(len(scores))


def info(chosen: argparse.Namespace) -> int:
    """Print what is in an index."""
    index = _loaded(chosen.index)
    n = len(index)
    a_vector = f", {(index.nbytes - index.fixed_nbytes) / n:,.1f} a vector" if n else ""
    bound = f"{index.sigmas:g} standard deviations" if index.sigmas < float("inf") else "none: searches read all bits"
    rows = {
        "vectors": f"{n:,} of {index.d} numbers",
        "metric": index.metric,
        "bits": f"{index.bits} a number",
        "bytes": f"{index.nbytes:,}, of which {index.fixed_nbytes:,} whatever the number of vectors{a_vector}",
        "bound": bound,
        **({"lists": f"{index.lists:,}"} if index.lists else {}),
        **({"refine": f"{index.refine}, of what a search finds"} if index.refine else {}),
        **_training(index.training),
    }
    for name, text in rows.items():
        print(f"{name:10}{text}")
    for name, share in (index.training or {}).get("recall", {}).items():
        print(f"{'':10}{share:.4f}  {name}")
    return 0


def _training(trained: dict[str, Any] | None) -> dict[str, str]:
    """Returns lines on what training chose, and on what the recall of its candidates means."""
    if trained is None:
        return {"training": "none"}
    chosen = trained["chosen"]
    if chosen == "axes":
        widths = trained["widths"]
        counts = ", ".join(f"{widths.count(width)} of {width}" for width in sorted(set(widths), reverse=True))
        chosen += f", widths of groups of 32 in bits: {counts}; power {trained['power']:g}"
        chosen += ", rotated together" if trained["together"] else ""
    rows = {"training": chosen}
    if trained["recall"]:
        rows["recall"] = f"of the 10 nearest of {trained['queries']:,} rows of the sample, by what was tried"
    return rows


def verify(chosen: argparse.Namespace) -> int:
    """Check every byte of indexes against their checksums."""
    for path in chosen.index:
        index = _loaded(path)
        try:
            index.verify()
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        print(f"{path}: sound, {len(index):,} vectors, {os.path.getsize(path):,} bytes")
    return 0


# ---- their arguments ----


def add_parser(commands: Any) -> None:
    group = commands.add_parser("index", help="build and search an index of vectors")
    actions = group.add_subparsers(dest="action", required=True, metavar="{build,search,info,verify}")
    _add_build(actions)
    _add_search(actions)
    one = actions.add_parser("info", help="vectors, bytes, the bound of searches, and what training chose",
                             epilog="example: turboquant index info vectors.safetensors")  # fmt: skip
    one.add_argument("index", metavar="INDEX", help="a file of an index; it is mapped, and its vectors are not read")
    one.set_defaults(run=info, command="index info")
    one = actions.add_parser("verify", help="check every byte; exit status 2 for a damaged file",
                             epilog="example: turboquant index verify vectors.safetensors")  # fmt: skip
    one.add_argument("index", metavar="INDEX", nargs="+", help="files of indexes")
    one.set_defaults(run=verify, command="index verify")


def _add_build(actions: Any) -> None:
    one = actions.add_parser(
        "build",
        help="fill an index with vectors",
        description="Fill an index with the vectors of a file. It cannot be resumed: the file of the index is written "
        "at the end, whole or not at all.",
        epilog="example: turboquant index build vectors.npy --bits 3 --metric cosine --train --out vectors.safetensors",
    )
    one.add_argument("vectors", metavar="VECTORS", help="a .npy file of numbers, [n, dim], which is mapped; rows, from "
                     "0 on, are the ids; or means of esm-embed, with the names of their proteins")  # fmt: skip
    one.add_argument("--out", "-o", metavar="FILE", required=True, help="the index")
    one.add_argument("--bits", type=int, default=3, help="of a number (default 3)")
    one.add_argument("--metric", choices=("ip", "cosine", "l2"), default="ip", help="inner product (the default), "
                     "cosine, or squared distance")  # fmt: skip
    one.add_argument("--train", action="store_true", help="first learn a mean, axes and widths from up to 100,000 of "
                     "the vectors, spread evenly; what does not help is not kept")  # fmt: skip
    one.add_argument("--lists", type=int, metavar="N", default=0, help="divide the vectors into N lists around centres "
                     "that are learnt first (needs faiss-cpu or scikit-learn), for search --probe")  # fmt: skip
    one.add_argument("--refine", choices=("int8",), help="keep each vector in 8 bits a number too, by which search "
                     "ranks what it finds")  # fmt: skip
    one.add_argument("--seed", type=int, metavar="N", default=0, help="of the random rotation (default 0)")
    one.set_defaults(run=build, command="index build")


def _add_search(actions: Any) -> None:
    one = actions.add_parser(
        "search",
        help="find the best vectors of each query, as CSV",
        description="Find the best vectors of each query. Writes CSV: query and id are rows of their files, from 0 on, "
        "or names of proteins; rank counts from 0, best first.",
        epilog="example: turboquant index search vectors.safetensors queries.npy -k 10 --refine vectors.npy",
    )
    one.add_argument("index", metavar="INDEX", help="a file of an index, which is mapped")
    one.add_argument("queries", metavar="QUERIES", help="a .npy file of numbers, [n, dim], or one of esm-embed")
    one.add_argument("-k", type=int, metavar="N", default=10, help="vectors to find for each query (default 10)")
    one.add_argument("--refine", metavar="VECTORS", help="the .npy file that the index was built from: what is found "
                     "is sorted by exact scores")  # fmt: skip
    one.add_argument("--factor", type=int, metavar="N", help="with --refine, or where INDEX was built with it, how "
                     "many times k vectors are ranked (default 10 at 1 bit, 3 at 2 bits, otherwise 2)")  # fmt: skip
    one.add_argument("--probe", type=int, metavar="N", help="of an index with lists, how many of them each query reads "
                     "(default: all)")  # fmt: skip
    one.add_argument("--threads", type=int, metavar="N", default=0, help="at most (default: one a core)")
    one.add_argument("--csv", metavar="FILE", default="-", help="FILE.part while it runs (default: standard output)")
    one.set_defaults(run=search, command="index search")
