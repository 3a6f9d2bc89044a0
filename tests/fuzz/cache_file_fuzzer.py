"""Mutations of cache files, with checksums made to fit: `TurboQuantCache.load` must refuse each, or read wrong numbers.

A refusal is a ValueError that begins as it should; anything else that is raised is a finding, and so is a cache whose
next forward does not end in an answer or a clear error.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from specs import bare
from test_cache import CONFIG, Stream, forward

from turboquant import TurboQuantCache, _core
from turboquant.persistence import MAGIC

SPECS = (
    bare(1, 1, sinks=1, window=2, centre="prompt"),
    bare(3, 2, prefill="packed"),
    bare(4, 4, rotation="dense", overrides={1: {"window": 4, "key_bits": 5}}),
)
ODD: tuple[Any, ...] = (0, 1, -1, 2, 7, 128, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, 1e300, True, None, "", "x", "eden",
                        [], [0], [[]], {}, {"layers": 2}, [-1], "float16", "hadamard")  # fmt: skip


def seeds(folder: Path) -> list[bytes]:
    made = []
    for i, spec in enumerate(SPECS):
        for local_size in (None, 20):
            cache, stream = TurboQuantCache(CONFIG, spec), Stream(batch=2, tokens=300, dim=16, kv_heads=1)
            forward(cache, stream.piece(0, 290), local_size=local_size)
            cache.save(folder / f"{i}")
            made.append((folder / f"{i}").read_bytes())
    return made


def split(data: bytes) -> tuple[Any, bytes]:
    size = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[32 : 32 + size]), data[32 + size :]


def join(header: Any, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    text = text.ljust((len(text) + 95) // 64 * 64 - 32)
    opening = MAGIC + struct.pack("<IIQ", 1, len(text), 32 + len(text) + len(payload))
    return opening + _core.checksum(opening + text).to_bytes(8, "little") + text + payload


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
        start = len(data) - len(payload)
        section = rng.choice(header["sections"])
        size = torch.empty(section["shape"], dtype=getattr(torch, section["dtype"])).nbytes
        at = section["offset"] - start
        payload = payload[:at] + rng.randbytes(size) + payload[at + size :]
        units = len(section["checksums"])
        parts = [payload[at + i * size // units : at + (i + 1) * size // units] for i in range(units)]
        section["checksums"] = [f"{_core.checksum(part):016x}" for part in parts]
        text = json.dumps(header, sort_keys=True).encode()  # as long as it was: sections stay where they are
        text = text.ljust(start - 32)
        opening = data[:24]
        return opening + _core.checksum(opening + text).to_bytes(8, "little") + text + payload
    for _ in range(rng.randint(1, 3)):
        header = moved(header, rng)
    if how == 3:
        payload = payload[: rng.randrange(len(payload) + 1)] + bytes(rng.randrange(200))
    return join(header, payload)


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
