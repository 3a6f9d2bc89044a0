"""Fuzzes `Index.load` with mutated index files, most with checksums made to fit.

Each file must be refused, or read with wrong numbers. A refusal is a ValueError that names the file; anything else is a
finding. What was loaded can be described, searched, changed and saved again, or says clearly why not. Needs no torch,
so it runs under sanitizers too.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import zlib
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np

from fuzz.mutations import bytes_changed, fuzz_files, moved
from turboquant import Index
from turboquant.cli.index_commands import info
from turboquant.index.lists import Lists
from turboquant.index.transform import Transform

DIM = 40
QUERIES = np.random.default_rng(1).standard_normal((2, DIM)).astype(np.float32)


def seeds(folder: Path) -> list[bytes]:
    made = []
    x = np.random.default_rng(0).standard_normal((150, DIM)).astype(np.float32)
    kinds = [(1, "ip", None), (3, "l2", False), (4, "cosine", True), (2, "cosine", "lists"), (3, "l2", "lists")]
    for i, (bits, metric, training) in enumerate(kinds):
        index = Index(DIM, bits, metric, lists=5 if training == "lists" else 0, refine="int8" if bits != 2 else None)
        if training == "lists":
            index._contents = replace(index._contents, transform=with_lists(index))
        elif training is not None:
            index.train(x / (1 + np.arange(DIM, dtype=np.float32)), axes=training)
        for rows, ids in ((x[:0], None), (x, None), (x[:20], range(1000, 1020))):
            index.add(rows, ids)
            index.save(folder / f"{i}")
            made.append((folder / f"{i}").read_bytes())
    return made


def with_lists(index: Index) -> Transform:
    """Returns a transform with lists as `train` makes it, without k-means."""
    directions = np.linalg.qr(np.random.default_rng(3).standard_normal((DIM, index.lists)))[0].T.astype(np.float32)
    lengths = None if index.metric == "l2" else np.full(index.lists, 0.5, np.float32)
    lists = Lists(np.ascontiguousarray(directions), lengths)
    return replace(index._contents.transform, lists=lists, training={"chosen": "lists", "queries": 0, "recall": {}})


def split(data: bytes) -> tuple[dict, bytes]:
    """Returns the header, with its own text parsed too, and the tensors."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"]["turboquant"] = json.loads(header["__metadata__"]["turboquant"])
    return header, data[start:]


def joined(header: dict, payload: bytes) -> bytes:
    """Returns the file with a checksum of the header's text that fits."""
    about = header.get("__metadata__")
    if isinstance(about, dict) and "turboquant" in about:
        about["turboquant"] = json.dumps(about["turboquant"])
        about["crc32"] = f"{zlib.crc32(about['turboquant'].encode()):08x}"
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + payload


def mutate(data: bytes, rng: random.Random) -> bytes:
    how = rng.randrange(4)
    if how == 0:
        return bytes_changed(data, rng)
    header, payload = split(data)
    if how == 1:  # numbers of the tensors
        name = rng.choice([name for name in header if name != "__metadata__"])
        first, last = header[name]["data_offsets"]
        new = np.frombuffer(rng.randbytes(last - first), np.uint8)
        if header[name]["dtype"] == "F32" and rng.random() < 0.5:
            new = np.full((last - first) // 4, rng.choice([np.nan, np.inf, -np.inf, -1, 0, 3e38]), np.float32)
        if rng.random() < 0.7 and name in (sums := header["__metadata__"]["turboquant"]["crc32"]):
            sums[name] = zlib.crc32(new.tobytes())
        return joined(header, payload[:first] + new.tobytes() + payload[last:])
    for _ in range(rng.randint(1, 3)):
        header = moved(header, rng)
    if how == 3:
        payload = payload[: rng.randrange(len(payload) + 1)] + bytes(rng.randrange(200))
    return joined(header, payload)


def check(path: Path) -> None:
    for mapped in (True, False):
        try:
            index = Index.load(path, mmap=mapped)
        except ValueError as error:
            assert str(error).startswith(f"`path` must be a file of an index, got {str(path)!r}: "), error
            index = None
            continue
        with redirect_stdout(io.StringIO()):
            info(argparse.Namespace(index=str(path)))
        assert repr(index)
        try:
            index.verify()
        except ValueError as error:
            assert str(error).startswith(("its bytes must be", "the file must be sound")), error
        queries = np.resize(QUERIES, (2, index.d))
        scores, ids = index.search(queries, 3)
        assert scores.shape == ids.shape == (2, 3)
        index.search(queries, 3, filter=[0, 1, 1005])
        if index.lists:
            index.search(queries, 3, probe=1)
        index.range_search(queries, 0.1)
    if index is None:
        return
    try:
        index.reconstruct(index.ids[:2])
        index.add(queries)
        index.remove(index.ids[-1:])
    except ValueError as error:
        assert "`ids`" in str(error) or "`x[" in str(error), error
    index.save(path)
    Index.load(path).verify()


def fuzz(seconds: float, seed: int = 0, most: int = 10**9) -> int:
    """Tries inputs for so many seconds; returns how many."""
    return fuzz_files(seeds, mutate, check, seconds, seed, most)
