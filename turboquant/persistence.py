"""Caches in files: what `TurboQuantCache.save` and `load` do. `docs/format.md` defines the file for other programs.

    prologue   32 bytes: magic, version, sizes, a checksum of itself and the header
    header     JSON: the spec, the model's fingerprint, lengths, rows of page indices, and a list of sections
    sections   the tensors as they are in memory, little-endian, each from a multiple of 64 bytes on

Nothing that a file claims is believed: the header must be the one that `save` would write for what it says, sizes are
held against the file's own before anything is allocated, and every page and tensor has a checksum. The checksums find
damage; they do not stop somebody who makes them fit. Such a file can hold wrong numbers, and nothing worse.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _core
from .calibration import Calibration, layer_specs
from .calibration.data import differences
from .calibration.measure import describe, fingerprint
from .exact import exact_rows, laid_out
from .files import write_whole
from .modes import is_split
from .pages import RELEASED, PagePool, PageTable, outside_autograd
from .placement import device_of
from .plan import FORMAT_VERSION, PAGE_TOKENS
from .spec import CacheSpec

if TYPE_CHECKING:
    from .cache import TurboQuantCache
    from .layer import PackedLayer

__all__ = ["MAGIC", "VERSION", "calibration_mark", "load", "save"]

MAGIC = b"TQCACHE\0"
VERSION = 1
_PROLOGUE = struct.Struct("<8sIIQQ")  # magic, version, bytes of header and file, checksum of those and the header
_ALIGNMENT = 64
_MOST_HEADER_BYTES = 1 << 28
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_EXACT = ("sink_k", "sink_v", "window_k", "window_v")


def _checksum(data: Any) -> str:
    return f"{_core.checksum(data):016x}"


def _checksums(data: memoryview, units: int) -> list[str]:
    size = len(data) // units if units else 0
    return [_checksum(data[i * size : (i + 1) * size]) for i in range(units)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Section:
    """A tensor in the file. units: how many parts of it have a checksum of their own: its pages, or 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    units: int

    @property
    def nbytes(self) -> int:
        size = torch.finfo(_DTYPES[self.dtype]).bits // 8 if self.dtype != "uint8" else 1
        for extent in self.shape:
            size *= extent
        return size

    def described(self, checksums: list[str]) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "offset": self.offset,
                "checksums": checksums}  # fmt: skip


def _sections(
    specs: list[CacheSpec],
    positions: int,
    dtype: str,
    batch: int,
    kv_heads: int,
    head_dim: int,
    pages: list[int],
    start: int,
) -> Iterator[_Section]:
    """What a cache of these sizes has in its file, in order; `pages` of each layer, from byte `start` on."""

    def section(name: str, kind: str, shape: tuple[int, ...], units: int = 1) -> _Section:
        nonlocal start
        made = _Section(name, kind, shape, start, units)
        start = _aligned(start + made.nbytes)
        return made

    for i, (spec, n_pages) in enumerate(zip(specs, pages)):
        record_bytes = PAGE_TOKENS * spec.bytes_per_token(head_dim)
        yield section(f"layers.{i}.pages", "uint8", (n_pages, kv_heads, record_bytes), n_pages)
        for name in _EXACT:
            if rows := exact_rows(spec, positions)[name.startswith("window")]:
                yield section(f"layers.{i}.{name}", dtype, (batch, kv_heads, rows, head_dim))
        if spec.centre == "prompt":
            yield section(f"layers.{i}.centre", "float32", (batch, kv_heads, head_dim))
        for side in ("key", "value") if spec.outliers == "prompt" else ():
            if is_split(spec, side):
                rows = head_dim + (spec.sketch_rows(head_dim) if side == "key" else 0)
                yield section(f"layers.{i}.{side}_rotation", "float32", (kv_heads, rows, head_dim))


# ---- writing ----


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def calibration_mark(calibration: Calibration | None) -> str | None:
    """A checksum of what a calibration does to keys and values."""
    if calibration is None:
        return None
    arrays = (
        calibration.centre,
        calibration.covariance,
        calibration.axes,
        calibration.variance,
        calibration.sensitivity,
        calibration.tables,
    )
    sums = b"".join(
        _core.checksum(np.ascontiguousarray(array)).to_bytes(8, "little") for array in arrays if array is not None
    )
    return _checksum(sums + calibration.seed.to_bytes(8, "little"))


def _mark(model: Any) -> dict[str, Any]:
    """What a file says of a model, or of its configuration."""
    if hasattr(model, "state_dict"):
        return fingerprint(model)
    if not hasattr(model, "num_hidden_layers") and not hasattr(model, "get_text_config"):
        raise TypeError(f"`model` must be a model, its configuration or None, got {model!r:.80}")
    return describe(model)


def save(cache: TurboQuantCache, path: str | os.PathLike[str], model: Any = None) -> None:
    """See `TurboQuantCache.save`."""
    layers: list[PackedLayer] = cache.layers
    if any(layer.damaged or layer.tokens != layers[0].tokens for layer in layers):
        raise RuntimeError("save: an earlier call failed after it had changed the cache: call cache.reset()")
    mark = cache.fingerprint
    if model is not None:
        mark = _mark(model)
        if differs := differences(cache.fingerprint, mark):
            raise ValueError(f"`model` must be the one that filled this cache, got one with {', '.join(differs)}")
    described: dict[str, Any] = {
        "byte_format": FORMAT_VERSION,
        "spec": cache.spec.to_dict(),
        "fingerprint": mark,
        "calibration": calibration_mark(cache._shared.calibration),
        "n_layers": len(layers),
        "positions": layers[0].tokens,
        "padding": list(layers[0].padding),
    }
    parts: list[memoryview] = []
    sums: list[list[str]] = []
    pages: list[int] = []
    if layers[0].tokens:
        first = layers[0]
        described |= {"dtype": _NAMES[first.dtype], "kv_heads": first.kv_heads, "head_dim": first.head_dim,
                      "rows": [], "released": [layer._released for layer in layers],
                      "sliding_windows": [layer.sliding_window for layer in layers]}  # fmt: skip
        for layer in layers:
            assert layer.table is not None
            held, rows = layer.table.packed(layer._packed(layer.tokens, layer.padding))
            described["rows"].append(rows)
            pages.append(len(held))
            parts.append(_bytes(held))
            sums.append(_checksums(parts[-1], len(held)))
            for tensor in (*_exact_tensors(layer), layer.centre, *layer.split.values()):
                if tensor is not None:
                    parts.append(_bytes(tensor))
                    sums.append(_checksums(parts[-1], 1))
    specs = [layer.spec for layer in layers]
    write_whole(path, _file(described, specs, pages, parts, sums))


def _exact_tensors(layer: PackedLayer) -> Iterator[torch.Tensor]:
    """Sinks and window with as many rows as the file has."""
    sinks, window = exact_rows(layer.spec, layer.tokens)
    if layer.sink_k is not None and layer.sink_v is not None:
        yield from (held[:, :, :sinks] for held in (layer.sink_k, layer.sink_v))
    if window and layer.window_k is not None and layer.window_v is not None:
        yield from (laid_out(held, window, layer.spec.sinks) for held in (layer.window_k, layer.window_v))


def _file(
    described: dict[str, Any], specs: list[CacheSpec], pages: list[int], parts: list[memoryview], sums: list[list[str]]
) -> Iterator[bytes | memoryview]:
    def header(start: int) -> tuple[bytes, list[_Section]]:
        sections = []
        if pages:
            shape = (len(described["padding"]), described["kv_heads"], described["head_dim"])
            sizes = (described["positions"], described["dtype"], *shape)
            sections = list(_sections(specs, *sizes, pages, start))
        whole = described | {"sections": [s.described(c) for s, c in zip(sections, sums, strict=True)]}
        text = json.dumps(whole, sort_keys=True, allow_nan=False).encode()
        return text, sections

    size = 0  # offsets are part of the header, whose size they depend on: longer numbers, until it fits
    while True:
        start = _aligned(_PROLOGUE.size + size)
        text, sections = header(start)
        if _PROLOGUE.size + len(text) <= start:
            break
        size = len(text)
    text = text.ljust(start - _PROLOGUE.size)
    end = sections[-1].offset + sections[-1].nbytes if sections else start
    opening = _PROLOGUE.pack(MAGIC, VERSION, len(text), end, 0)[:-8]
    yield opening + _core.checksum(opening + text).to_bytes(8, "little") + text
    at = start
    for section, part in zip(sections, parts, strict=True):
        yield bytes(section.offset - at)
        yield part
        at = section.offset + section.nbytes


# ---- reading ----


class _Refused(ValueError):
    pass


def _want(right: bool, what: str) -> None:
    if not right:
        raise _Refused(what)


def load(
    path: str | os.PathLike[str],
    model: Any = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> TurboQuantCache:
    """See `TurboQuantCache.load`."""
    name = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"`path` must be a cache file, got {name!r}, which is not there")
    found = None if calibration is None else Calibration.of(calibration)
    mark = None if model is None else _mark(model)
    where = None if device is None else torch.device(device)
    try:
        with open(path, "rb") as file:
            reader = _Reader(file)
            if found is None and reader.header["calibration"]:
                found = getattr(getattr(model, "_turboquant", None), "calibration", None)
            return reader.cache(model, mark, found, where)
    except (_Refused, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        why = f"its header lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"`path` must be a cache file, got {name!r}: {why}") from error


class _Reader:
    """One file, from its prologue to a cache."""

    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        self.file_bytes = os.fstat(file.fileno()).st_size
        opening = file.read(_PROLOGUE.size)
        _want(opening[:8] == MAGIC, "it is not one that turboquant wrote")
        _want(len(opening) == _PROLOGUE.size, "it is truncated")
        _, version, header_bytes, file_bytes, checksum = _PROLOGUE.unpack(opening)
        _want(version == VERSION, f"its version must be {VERSION}, got {version}")
        _want(file_bytes == self.file_bytes, f"it must have {file_bytes} bytes, got {self.file_bytes}")
        _want(header_bytes <= min(self.file_bytes - _PROLOGUE.size, _MOST_HEADER_BYTES), "its header does not fit")
        text = file.read(header_bytes)
        _want(_core.checksum(opening[:-8] + text) == checksum, "its header is damaged")
        self.start = _PROLOGUE.size + header_bytes
        self.header: dict[str, Any] = json.loads(text)
        _want(isinstance(self.header, dict), "its header is no mapping")
        _want(self.header["byte_format"] == FORMAT_VERSION, f"its byte format must be {FORMAT_VERSION}")

    def integers(self, name: str, length: int | None = None, most: int = 2**31 - 1) -> list[int]:
        """A list of integers in 0..most."""
        given = self.header[name]
        right = isinstance(given, list) and all(type(x) is int and 0 <= x <= most for x in given)
        _want(right and length in (None, len(given)), f"`{name}` is out of range")
        return given  # type: ignore[no-any-return]

    def integer(self, name: str, most: int = 2**31 - 1) -> int:
        given = self.header[name]
        _want(type(given) is int and 0 <= given <= most, f"`{name}` is out of range")
        return given  # type: ignore[no-any-return]

    def cache(
        self,
        model: Any,
        mark: dict[str, Any] | None,
        calibration: Calibration | None,
        device: torch.device | None,
    ) -> TurboQuantCache:
        from .cache import TurboQuantCache

        header = self.header
        _want(isinstance(header["fingerprint"], dict), "`fingerprint` is no mapping")
        if mark is not None:
            differs = differences(header["fingerprint"], mark)
            _want(not differs, f"it is of another model: this one has {', '.join(differs)}")
        needs = "it needs the `calibration` it was made with" if header["calibration"] else "it has no `calibration`"
        _want(header["calibration"] == calibration_mark(calibration), needs)
        _want(isinstance(header["spec"], dict), "`spec` is no mapping")
        n_layers = self.integer("n_layers", 2**16)
        _want(n_layers == header["fingerprint"].get("layers"), "`n_layers` is not that of its fingerprint")
        cache = TurboQuantCache.__new__(TurboQuantCache)
        cache.spec = CacheSpec.from_dict(header["spec"])
        cache._set_up(
            calibration,
            {name: x for name, x in header["fingerprint"].items() if name != "weights"},
            layer_specs(cache.spec, calibration, n_layers),
        )
        if self.integer("positions"):
            devices = _devices(model, n_layers) if device is None else [device] * n_layers
            self.fill(cache.layers, devices)
        else:
            _want(header["sections"] == [] and self.file_bytes == self.start, "it holds more than an empty cache")
        return cache

    def fill(self, layers: list[PackedLayer], devices: list[torch.device]) -> None:
        """Sections into layers, once all that the header says of them agrees with itself and the file's size."""
        header, positions = self.header, self.integer("positions")
        padding = self.integers("padding", most=positions)
        _want(header["dtype"] in list(_DTYPES)[:3], "`dtype` is none of a model")
        kv_heads, head_dim = self.integer("kv_heads", 2**16), self.integer("head_dim", 256)
        _want(kv_heads > 0 and len(padding) > 0, "`kv_heads` or `padding` is empty")
        released = self.integers("released", len(layers))
        sliding = self.integers("sliding_windows", len(layers))
        pages = [self.check_rows(i, layer, padding, released[i]) for i, layer in enumerate(layers)]
        specs = [layer.spec for layer in layers]
        for spec in specs:
            spec.plan(head_dim)
        sizes = (positions, header["dtype"], len(padding), kv_heads, head_dim)
        sections = list(_sections(specs, *sizes, pages, self.start))
        end = sections[-1].offset + sections[-1].nbytes
        _want(end == self.file_bytes, f"it must have {end} bytes for what it says it holds, got {self.file_bytes}")
        listed = header["sections"]
        _want(isinstance(listed, list) and len(listed) == len(sections), "`sections` is not of this cache")
        sums: list[Any] = []
        for section, claim in zip(sections, listed):
            sums.append(claim["checksums"] if isinstance(claim, dict) else None)
            right = isinstance(sums[-1], list) and len(sums[-1]) == section.units
            _want(right and claim == section.described(sums[-1]), f"`{section.name}` is not of this cache")
        tensors = {section.name: self.tensor(section, sums[i]) for i, section in enumerate(sections)}
        for i, layer in enumerate(layers):
            shape, dtype = (len(padding), kv_heads, 0, head_dim), _DTYPES[header["dtype"]]
            layer.lazy_initialization(torch.empty(shape, dtype=dtype, device=devices[i]))
            layer.table = PageTable(PagePool(tensors.pop(f"layers.{i}.pages").to(devices[i])), header["rows"][i])
            held = {name: tensors.pop(f"layers.{i}.{name}", None) for name in (*_EXACT, "centre")}
            layer.hold_exact({name: found.to(devices[i]) for name, found in held.items() if found is not None})
            for side in ("key", "value"):
                if (rotation := tensors.pop(f"layers.{i}.{side}_rotation", None)) is not None:
                    layer.split[f"{side}_rotation"] = rotation.to(devices[i])
            layer.tokens, layer.padding = positions, tuple(padding)
            layer._released, layer.sliding_window = released[i], sliding[i]

    def check_rows(self, i: int, layer: PackedLayer, padding: list[int], released: int) -> int:
        """How many pages layer i has: each in a row, and each row as long as its sequence needs."""
        rows = self.header["rows"]
        _want(isinstance(rows, list) and len(rows) > i and isinstance(rows[i], list), "`rows` is not of this cache")
        _want(len(rows[i]) == len(padding), f"`rows[{i}]` is not of this batch")
        used: set[int] = set()
        for row, pad, count in zip(rows[i], padding, layer._packed(self.header["positions"], padding)):
            _want(isinstance(row, list) and len(row) == -(-count // PAGE_TOKENS), f"`rows[{i}]` is of another length")
            _want(all(type(page) is int and page >= RELEASED for page in row), f"`rows[{i}]` is out of range")
            gone = max(0, released - pad - layer.spec.sinks) // PAGE_TOKENS
            _want(all((page == RELEASED) <= (j < gone) for j, page in enumerate(row)), f"`rows[{i}]` has a hole")
            used.update(row)
        used.discard(RELEASED)
        _want(used == set(range(len(used))), f"`rows[{i}]` is out of range")
        return len(used)

    @outside_autograd
    def tensor(self, section: _Section, sums: list[str]) -> torch.Tensor:
        """The section, which begins after no more than zeros from where the last one ended."""
        gap = self.file.read(section.offset - self.file.tell())
        _want(not any(gap), f"something is written before `{section.name}`")
        held = torch.empty(section.nbytes, dtype=torch.uint8, device="cpu")
        data = held.numpy().data
        _want(self.file.readinto(data) == section.nbytes, "it is truncated")
        for i, (found, claimed) in enumerate(zip(_checksums(data, section.units), sums)):
            where = f"`{section.name}`" if section.units == 1 else f"page {i} of `{section.name}`"
            _want(found == claimed, f"{where} is damaged")
        return held.view(_DTYPES[section.dtype]).view(section.shape)


def _devices(model: Any, n_layers: int) -> list[torch.device]:
    """Where each layer of a model computes: with its attention's weights. The CPU for no model."""
    devices = [torch.device("cpu")] * n_layers
    if hasattr(model, "modules"):
        for module in model.modules():
            i = getattr(module, "layer_idx", None)
            if isinstance(i, int) and i < n_layers and any(True for _ in module.parameters()):
                devices[i] = device_of(module)
    return devices
