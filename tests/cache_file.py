"""A slow reader of cache files in NumPy, written from docs/format.md and the comment at the head of turboquant.h.

It uses nothing of the package. That it decodes what `TurboQuantCache.save` wrote shows that docs/format.md says enough
for another implementation. It reads Hadamard rotations only, and takes them and the codebooks from tests/reference.py.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import reference

FORMAT = "turboquant-cache-5"
DTYPES = {"U8": "<u1", "I32": "<i4", "U32": "<u4", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MOMENTS = ("pairs", "increments", "amplitudes", "centre", "scale", "directions", "stretch")


def tensors_of(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    about = entries.pop("__metadata__")
    assert about["format"] == FORMAT
    assert about["crc32"] == f"{zlib.crc32(about['turboquant'].encode()):08x}"
    header, tensors, at = json.loads(about["turboquant"]), {}, 0
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        assert first == at
        array = np.frombuffer(data[start + first : start + last], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        at = last
        if name.startswith("pad."):
            assert not array.any() and len(array) < 64
            continue
        assert (start + first) % 64 == 0
        parts = array if name.endswith("pages") else [array]
        assert [zlib.crc32(part.tobytes()) for part in parts] == header["crc32"][name]
        if entry["dtype"] == "BF16":
            array = (array.astype("<u4") << 16).view("<f4")
        tensors[name] = array
    assert start + at == len(data)
    return header, tensors


def code(words: np.ndarray, bits: int, r: int, n: int) -> int:
    """Returns c(r, n) of a lane from its words (turboquant.h, "Bits of the words of a lane"), for 1 to 5 bits."""
    assert 1 <= bits <= 5
    w = [int(word) for word in words]
    if bits == 5:
        return code(words[:4], 4, r, n) | code(words[4:], 1, r, n) << 4
    if bits == 4:
        return w[r] >> 4 * n & 15
    if bits == 3:
        return w[r] >> 4 * n & 7 if r < 3 else sum((w[i] >> (4 * n + 3) & 1) << i for i in range(3))
    if bits == 2:
        return w[n // 4] >> (8 * (n % 4) + 2 * r) & 3
    return w[0] >> (8 * (n % 4) + r + 4 * (n // 4)) & 1


def tile(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [32 rows, 32 columns] of one tile, which is stored as `words`, uint32 [bits, 32]."""
    out = np.zeros((32, 32), np.int64)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(4):
            for n in range(8):
                column = 4 * t + n if n < 4 else 16 + 4 * t + n - 4
                out[g + 8 * r, column] = code(words[:, lane], bits, r, n)
    return out


def decode(record: np.ndarray, head_dim: int, spec: dict[str, Any], side: str) -> np.ndarray:
    """Decoded keys or values [128, head_dim] of one record, for one bit width of 1 to 5 per side and groups of 32."""
    groups = -(-head_dim // 32)
    sizes = {name: 128 * spec[f"{name}_bits"] * groups for name in ("key", "value")}  # bytes of one token tile
    start = 0 if side == "key" else 4 * sizes["key"]
    bits = spec[f"{side}_bits"]
    book = reference.codebook(reference.NORMAL, head_dim, bits)
    levels = book.levels * np.float64(book.step)
    scales_at = 4 * (sizes["key"] + sizes["value"]) + (256 if side == "value" else 0)
    scales = record[scales_at : scales_at + 256].view("<f2").astype(np.float64)
    out = np.zeros((128, 32 * groups))
    for i in range(4):
        for group in range(groups):
            at = start + i * sizes[side] + 128 * bits * group
            codes = tile(record[at : at + 128 * bits].view("<u4").reshape(bits, 32), bits)
            vectors = levels[codes if side == "key" else codes.T]  # [token or column, channel]
            for token in range(32):
                column = 4 * (token % 8) + token // 8
                row = token if side == "key" else column
                out[32 * i + token, 32 * group : 32 * group + 32] = vectors[row] * scales[32 * i + column]
    return reference.hadamard(spec["seed"], out[:, :head_dim].astype(np.float32), inverse=True)


def moved_back(y: np.ndarray, first: int, moments: dict[str, np.ndarray]) -> np.ndarray:
    """Returns keys [kv_heads, tokens, head_dim] from their decoded residuals `y`: undoes the metric and adds the centre
    at positions `first`, `first` + 1, ... (docs/moments.md). For specs with a wave and a metric."""
    scale, rows, e = (moments[name].astype(np.float64) for name in ("scale", "directions", "stretch"))
    z = y / scale[:, None]
    z = z + (z @ rows.swapaxes(1, 2) * (1 / (1 + e) - 1)[:, None]) @ rows
    out = z / scale[:, None] + moments["centre"][:, None]
    angle = np.arange(first, first + y.shape[1])[:, None] * (moments["increments"] * (2 * np.pi / 2**32))
    for (i, j), a, turn in zip(moments["pairs"], moments["amplitudes"].swapaxes(0, 1).astype(np.float64), angle.T):
        out[:, :, i] += a[:, :1] * np.cos(turn) - a[:, 1:] * np.sin(turn)
        out[:, :, j] += a[:, :1] * np.sin(turn) + a[:, 1:] * np.cos(turn)
    return out


def read(path: Path) -> list[dict[str, Any]]:
    """For each layer: packed_k and packed_v, a [kv_heads, tokens, head_dim] for each sequence; sinks and window."""
    header, tensors = tensors_of(path)
    out = []
    for i, (kv_heads, head_dim) in enumerate(header["sizes"]):
        spec, pages = header["spec"], tensors[f"layers.{i}.pages"]
        if header["widths"] is not None:
            spec = spec | dict(zip(("key_bits", "value_bits"), header["widths"][i]))
        layer: dict[str, Any] = {"packed_k": [], "packed_v": []}
        for b, row in enumerate(header["rows"][i]):
            tokens = max(0, header["positions"] - header["padding"][b] - spec["sinks"] - spec["window"])
            for side in ("key", "value"):
                heads = [np.concatenate([np.zeros((0, head_dim)),
                         *(decode(pages[p][h], head_dim, spec, side) for p in row)])[:tokens]
                         for h in range(kv_heads)]  # fmt: skip
                vectors = np.stack(heads)
                if side == "key" and header["moments"] is not None:
                    moments = {name: tensors[f"moments.{i}.{name}"] for name in MOMENTS}
                    vectors = moved_back(vectors, spec["sinks"] + header["shifts"][b], moments)
                layer[f"packed_{side[0]}"].append(vectors)
        for name in ("sink_k", "sink_v", "window_k", "window_v"):
            if f"layers.{i}.{name}" in tensors:
                layer[name] = tensors[f"layers.{i}.{name}"]
        out.append(layer)
    return out


def split(data):
    """Returns (header, bytes of the tensors). The header has the entries of the tensors as "tensors"."""
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    return json.loads(entries.pop("__metadata__")["turboquant"]) | {"tensors": entries}, data[start:]


def joined(header, payload):
    """Returns a file with this header and payload, and with the right checksum of the header."""
    header = dict(header)
    entries = header.pop("tensors")
    return wrapped(json.dumps(header), entries, payload)


def wrapped(text, entries=None, payload=b""):
    about = {"format": FORMAT, "turboquant": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    header = json.dumps({"__metadata__": about, **(entries or {})}).encode()
    header += b" " * (-(len(header) + 8) % 64)
    return len(header).to_bytes(8, "little") + header + payload
