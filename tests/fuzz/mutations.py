"""What the fuzzers of files in Python share."""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (0, 1, -1, 2, 7, 128, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, 1e300, True, None, "", "x", "eden",
                        [], [0], [[]], {}, {"layers": 2}, [-1], "F16", "hadamard")  # fmt: skip


def bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """Changes some bytes, whatever the checksums say, and sometimes cuts off the end."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out[: rng.randrange(len(out) + 1)] if rng.random() < 0.3 else out)


def moved(header: Any, rng: random.Random) -> Any:
    """Changes a value of the header, at any depth, or drops a key or element, or doubles an element."""
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


def fuzz_files(
    seeds: Callable[[Path], list[bytes]],
    mutate: Callable[[bytes, random.Random], bytes],
    check: Callable[[Path], None],
    seconds: float,
    seed: int,
    most: int,
) -> int:
    """Hands mutated files to `check`, which raises on a finding. Returns how many inputs were tried."""
    rng, count, end = random.Random(seed), 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        originals = seeds(Path(folder))
        while time.monotonic() < end and count < most:
            path.write_bytes(mutate(rng.choice(originals), rng))
            try:
                check(path)
            except BaseException:
                print(f"seed {seed}, input {count}")
                raise
            count += 1
    return count
