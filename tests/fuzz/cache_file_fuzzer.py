"""Mutations of cache files, with checksums made to fit: `TurboQuantCache.load` must refuse each, or read wrong numbers.

A refusal is a ValueError that begins as it should; anything else that is raised is a finding, and so is a cache whose
next forward does not end in an answer or a clear error.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from specs import bare
from test_cache import CONFIG, Stream, forward
from test_persistence import joined, split

from turboquant import TurboQuantCache

SPECS = (
    bare(1, 1, sinks=1, window=2, centre="prompt"),
    bare(3, 2, prefill="packed"),
    bare(4, 4, rotation="dense", overrides={1: {"window": 4, "key_bits": 5}}),
)
ODD: tuple[Any, ...] = (0, 1, -1, 2, 7, 128, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, 1e300, True, None, "", "x", "eden",
                        [], [0], [[]], {}, {"layers": 2}, [-1], "F16", "hadamard")  # fmt: skip


def seeds(folder: Path) -> list[bytes]:
    made = []
    for i, spec in enumerate(SPECS):
        for local_size in (None, 20):
            cache, stream = TurboQuantCache(CONFIG, spec), Stream(batch=2, tokens=300, dim=16, kv_heads=1)
            forward(cache, stream.piece(0, 290), local_size=local_size)
            cache.save(folder / f"{i}")
            made.append((folder / f"{i}").read_bytes())
    return made


def moved(header: Any, rng: random.Random) -> Any:
    """One place of the header, deep or not, given another value; or a key or element lost or doubled."""
    node = header
    while isinstance(node, (dict, list)) and node:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        what = rng.random()
        if what < 0.1:
            del node[key]
        elif what < 0.2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        elif what < 0.4 and type(node[key]) is int:
            node[key] += rng.choice((-1, 1, 128, -128, 2**20))
        else:
            node[key] = copy.deepcopy(rng.choice(ODD))
        break
    return header


def mutate(data: bytes, rng: random.Random) -> bytes:
    how = rng.randrange(4)
    if how == 0:  # bytes, whatever the checksums say
        out = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            out[rng.randrange(len(out))] = rng.randrange(256)
        return bytes(out[: rng.randrange(len(out) + 1)] if rng.random() < 0.3 else out)
    header, payload = split(data)
    if how == 1:  # numbers of the tensors, with checksums made to fit
        name = rng.choice(list(header["crc32"]))
        first, last = header["tensors"][name]["data_offsets"]
        payload = payload[:first] + rng.randbytes(last - first) + payload[last:]
        units = len(header["crc32"][name])
        size = (last - first) // max(units, 1)
        header["crc32"][name] = [zlib.crc32(payload[first + i * size :][:size]) for i in range(units)]
        return joined(header, payload)
    for _ in range(rng.randint(1, 3)):
        header = moved(header, rng)
    if how == 3:
        payload = payload[: rng.randrange(len(payload) + 1)] + bytes(rng.randrange(200))
    return joined(header, payload) if isinstance(header.get("tensors"), dict) else data


def check(path: Path) -> None:
    try:
        cache = TurboQuantCache.load(path)
    except ValueError as error:
        assert str(error).startswith("`path` must be a cache file, got "), error
        return
    if cache.get_seq_length() not in (0, 290):  # an edited length may be far beyond what can be attended to
        return
    stream = Stream(batch=2, tokens=292, dim=16, kv_heads=1)
    try:
        forward(cache, stream.piece(cache.get_seq_length(), cache.get_seq_length() + 2))
    except (ValueError, RuntimeError) as error:
        assert "layer" in str(error) or "window" in str(error), error


def fuzz(seconds: float, seed: int = 0, most: int = 10**9) -> int:
    """Inputs tried."""
    rng, count, end = random.Random(seed), 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        originals = seeds(Path(folder))
        while time.monotonic() < end and count < most:
            data = mutate(rng.choice(originals), rng)
            path.write_bytes(data)
            try:
                check(path)
            except BaseException:
                print(f"seed {seed}, input {count}")
                raise
            count += 1
    return count
