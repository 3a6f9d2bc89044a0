"""Fuzzes `TurboQuantCache.load` with mutated cache files, most with checksums made to fit.

Each file must be refused, or read with wrong numbers. A refusal is a ValueError that begins as it should. Anything else
that is raised is a finding, and so is a cache whose next forward does not end in an answer or a clear error.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

from cache_file import joined, split
from profiles import profile_of
from specs import WAVE, bare
from streams import CONFIG, MOMENTS, Stream, forward

from fuzz.mutations import bytes_changed, fuzz_files, moved
from turboquant import TurboQuantCache

SPECS = (
    bare(1, 1, sinks=1, window=2),
    bare(3, 2, prefill="packed"),
    bare(4, 4, rotation="dense", overrides={1: {"window": 4, "key_bits": 5}}),
    bare(3, 3, **WAVE),
)


def seeds(folder: Path) -> list[bytes]:
    made = []
    for i, spec in enumerate(SPECS):
        for local_size in (None, 20):
            moments, shape = (MOMENTS, {}) if spec.measured else (None, {"dim": 16, "kv_heads": 1})
            cache, stream = (
                TurboQuantCache(CONFIG, spec, profile=profile_of(moments)),
                Stream(batch=2, tokens=300, **shape),
            )
            forward(cache, stream.piece(0, 290), local_size=local_size)
            cache.save(folder / f"{i}")
            made.append((folder / f"{i}").read_bytes())
    return made


def mutate(data: bytes, rng: random.Random) -> bytes:
    how = rng.randrange(4)
    if how == 0:
        return bytes_changed(data, rng)
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
    shape = cache.layers[0].storage.shape
    stream = Stream(batch=2, tokens=292, **{"kv_heads": shape[1], "dim": shape[2]} if shape else {})
    try:
        forward(cache, stream.piece(cache.get_seq_length(), cache.get_seq_length() + 2))
    except (ValueError, RuntimeError) as error:
        assert "layer" in str(error) or "window" in str(error), error


def fuzz(seconds: float, seed: int = 0, most: int = 10**9) -> int:
    """Tries inputs for so many seconds; returns how many."""
    return fuzz_files(seeds, mutate, check, seconds, seed, most)
