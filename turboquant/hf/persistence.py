"""Caches in files: what `TurboQuantCache.save` and `load` do. `docs/format.md` defines the file for other programs.

A file is safetensors (`files`): the moments of the model, if the spec has a wave or a metric, the layers' tensors and
states as they are in memory, and a header that says the spec, the model's fingerprint, the kinds of its layers,
lengths, rows of page indices, and a checksum of every page and tensor.

No claim of a file is trusted. Before anything is allocated, its tensors must be those that `save` would write for its
header, and must fill the file. The checksums find damage, but not a forgery: a forged file can hold wrong numbers, and
nothing worse.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..arguments import bounded, quoted
from ..files import Tensor, array_bytes, crc32, existing_file, layout, read_header, tensor, write_tensors
from ..fingerprints import differences
from ..kvcache.exact import exact_rows, laid_out
from ..kvcache.pages import RELEASED, PagePool, PageTable, outside_autograd
from ..matrices import is_split
from ..measured import Calibration, Moments, Profile, layer_specs
from ..measured.moments import array_shapes
from ..models.identity import changed_weights, describe, weight_sums
from ..models.kinds import has_keys, is_known
from ..models.placement import device_of
from ..models.routing import decoder_of
from ..plan import FORMAT_VERSION, PAGE_TOKENS
from ..spec import CacheSpec
from .states import StateLayer

if TYPE_CHECKING:
    from ..kvcache.storage import LayerStorage
    from .cache import TurboQuantCache
    from .layer import PackedLayer

__all__ = ["DTYPES", "FORMAT", "NAMES", "calibration_mark", "load", "moments_mark", "save", "tensor_bytes"]

FORMAT = "turboquant-cache-5"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EXACT = ("sink_k", "sink_v", "window_k", "window_v")


def _tensors(
    specs: list[CacheSpec], positions: int, dtype: str, batch: int, sizes: list[list[int]], pages: list[int]
) -> dict[str, Tensor]:
    """The tensors in the file of a cache of these sizes, in order. sizes: KV heads and head_dim of each layer; pages:
    how many pages each has."""
    tensors: dict[str, Tensor] = {}
    for i, (spec, (kv_heads, head_dim), n_pages) in enumerate(zip(specs, sizes, pages)):
        record_bytes = PAGE_TOKENS * spec.bytes_per_token(head_dim)
        tensors[f"layers.{i}.pages"] = Tensor("U8", (n_pages, kv_heads, record_bytes))
        for name in _EXACT:
            if rows := exact_rows(spec, positions)[name.startswith("window")]:
                tensors[f"layers.{i}.{name}"] = Tensor(dtype, (batch, kv_heads, rows, head_dim))
        for side in ("key", "value") if spec.outliers == "prompt" else ():
            if is_split(spec, side):
                rows = head_dim + (spec.sketch_rows(head_dim) if side == "key" else 0)
                tensors[f"layers.{i}.{side}_rotation"] = Tensor("F32", (kv_heads, rows, head_dim))
    return tensors


def _moments_tensors(described: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of moments in a file, in order. described: `moments` of its header."""
    tensors = {}
    for i, sizes in enumerate(described["shapes"]):
        for name, (shape, dtype) in array_shapes(*sizes).items():
            tensors[f"moments.{i}.{name}"] = tensor(np.broadcast_to(np.zeros((), dtype), shape))
    if described.get("averaged"):
        for i in range(len(described["shapes"])):
            tensors[f"moments.{i}.measured"] = tensors[f"moments.{i}.amplitudes"]
    return tensors


def _states(layers: list[Any]) -> dict[str, torch.Tensor]:
    """The states of a cache's layers, in order, by name; without inputs of convolutions that only `crop` needs."""
    tensors = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, StateLayer):
            for j, x in layer.conv_states.items():
                if x is not None:
                    tensors[f"states.{i}.conv.{j}"] = x[..., -layer.conv_kernel_size[j] :]
            tensors |= {f"states.{i}.recurrent.{j}": x for j, x in layer.recurrent_states.items() if x is not None}
    return tensors


def _units(name: str, tensor: Tensor) -> int:
    """How many parts of a tensor have a checksum of their own: its pages, or 1."""
    return tensor.shape[0] if name.endswith(".pages") else 1


def _checksums(data: memoryview, units: int) -> list[int]:
    size = len(data) // units if units else 0
    return [zlib.crc32(data[i * size : (i + 1) * size]) for i in range(units)]


# ---- writing ----


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def calibration_mark(calibration: Calibration | None) -> str | None:
    """A checksum of the arrays of a calibration that affect keys and values."""
    if calibration is None:
        return None
    sums = {name: crc32([array_bytes(array)]) for name, array in calibration.arrays().items()}
    tried = calibration.described()["trials"]
    return f"{zlib.crc32(json.dumps([sums, calibration.seed, tried]).encode()):08x}"


def moments_mark(moments: Moments | None) -> str | None:
    """A checksum of moments."""
    if moments is None:
        return None
    return f"{crc32(array_bytes(array) for array in moments.without_costs().arrays().values()):08x}"


def _mark(model: Any) -> dict[str, Any]:
    """Makes the fingerprint that a file gets, from a model or its configuration."""
    config = getattr(model, "config", model)
    if not hasattr(config, "num_hidden_layers") and not hasattr(config, "get_text_config"):
        raise TypeError(f"`model` must be a model, its configuration or None, got {model!r:.80}")
    mark = describe(config)
    return {**mark, "weights": weight_sums(model)} if hasattr(model, "state_dict") else mark


def _differences(was: dict[str, Any], mark: dict[str, Any]) -> list[str]:
    """How a model's mark differs from an earlier one; empty if it is the same model."""
    described = ({name: x for name, x in one.items() if name != "weights"} for one in (was, mark))
    differing = differences(*described)
    if differing or "weights" not in was or "weights" not in mark:
        return differing
    _want(isinstance(was["weights"], dict), "`weights` is no mapping")
    changed = changed_weights(was["weights"], mark["weights"])
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return [f"other weights ({changed[0]:.200}{more})"] if changed else []


def save(cache: TurboQuantCache, path: str | os.PathLike[str], model: Any = None) -> None:
    """See `TurboQuantCache.save`."""
    layers: list[LayerStorage] = [layer.storage for layer in cache.packed_layers]
    if not all(layer.has_values for layer in layers):
        raise NotImplementedError(
            "save: a cache of latents, or of keys and values of different sizes, cannot be written to a file"
        )
    if cache.at_work or any(layer.damaged or layer.tokens != layers[0].tokens for layer in layers):
        raise RuntimeError("save: an earlier call failed after it had changed the cache: call cache.reset()")
    moments, measured = cache.moments, cache.measured_moments
    moments = None if moments is None else moments.without_costs()
    mark = cache.fingerprint
    if model is not None:
        mark = _mark(model)
        if differs := _differences(cache.fingerprint, mark):
            raise ValueError(f"`model` must be the one that filled this cache, got one with {', '.join(differs)}")
    if cache.spec.shared_bits is None and cache.fell:
        raise NotImplementedError(
            "save: pages fell to fewer bits than the spec says, and files of a spec with the same widths in all layers "
            "have no place for that: use uniform=False, or a higher memory_limit"
        )
    described: dict[str, Any] = {
        "byte_format": FORMAT_VERSION,
        "spec": cache.spec.settled().to_dict(),  # "auto" may mean something else to the version that reads it
        "fingerprint": mark,
        "widths": None if cache.spec.shared_bits is None else _widths(cache),
        "calibration": calibration_mark(cache.calibration),
        "moments": None if moments is None else moments.described() | ({} if measured is None else {"averaged": True}),
        "kinds": [[kind, options] for kind, options in cache.kinds],
        "positions": layers[0].tokens,
        "padding": list(layers[0].padding),
        "shifts": list(layers[0].shifts),
    }
    tensors: dict[str, Tensor] = {}
    parts: list[memoryview] = []
    if moments is not None:
        tensors |= _moments_tensors(described["moments"])
        parts += [array_bytes(array) for array in moments.arrays().values()]
        parts += [array_bytes(layer.amplitudes) for layer in (() if measured is None else measured.layers)]
    if layers[0].tokens:
        first = layers[0]
        sizes = [[layer.kv_heads, layer.head_dim] for layer in layers]
        described |= {"dtype": NAMES[first.dtype], "sizes": sizes, "least": first.least, "rows": [],
                      "released": [layer.released for layer in layers],
                      "sliding_windows": [layer.sliding_window for layer in layers]}  # fmt: skip
        pages = []
        for layer in layers:
            assert layer.table is not None
            packed, rows = layer.table.packed(layer.packed(layer.tokens, layer.padding))
            described["rows"].append(rows)
            pages.append(len(packed))
            others = (*_exact_tensors(layer), *layer.split.values())
            parts += [tensor_bytes(tensor) for tensor in (packed, *others) if tensor is not None]
        specs = [layer.spec for layer in layers]
        tensors |= _tensors(specs, first.tokens, described["dtype"], len(first.padding), sizes, pages)
        states = _states(cache.layers)
        described["states"] = {name: [NAMES[x.dtype], list(x.shape)] for name, x in states.items()}
        tensors |= {name: Tensor(dtype, tuple(shape)) for name, (dtype, shape) in described["states"].items()}
        parts += map(tensor_bytes, states.values())
    by_name = dict(zip(tensors, parts, strict=True))
    described["crc32"] = {name: _checksums(by_name[name], _units(name, packed)) for name, packed in tensors.items()}
    write_tensors(path, FORMAT, described, tensors, {name: [part] for name, part in by_name.items()})


def _widths(cache: TurboQuantCache) -> list[list[Any]]:
    """Bits of keys, bits of values and tries of each layer."""
    return [[layer.spec.key_bits, layer.spec.value_bits, layer.spec.tries] for layer in cache.packed_layers]


def _exact_tensors(layer: LayerStorage) -> Iterator[torch.Tensor]:
    """Sinks and window with as many rows as the file has."""
    sinks, window = exact_rows(layer.spec, layer.tokens)
    if layer.sink_k is not None and layer.sink_v is not None:
        yield from (rows[:, :, :sinks] for rows in (layer.sink_k, layer.sink_v))
    if window and layer.window_k is not None and layer.window_v is not None:
        yield from (laid_out(rows, window, layer.spec.sinks) for rows in (layer.window_k, layer.window_v))


# ---- reading ----


def _want(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)


def load(
    path: str | os.PathLike[str],
    model: Any = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> TurboQuantCache:
    """See `TurboQuantCache.load`."""
    name = existing_file(path, "a cache file")
    own_profile = None if profile is None else Profile.of(profile)
    mark = None if model is None else _mark(model)
    where = None if device is None else _device(device)
    try:
        with open(name, "rb") as file:
            reader = _Reader(file)
            calibration = None
            if reader.header["calibration"]:
                state = getattr(model, "_turboquant", None)
                calibration = getattr(state, "calibration", None) if own_profile is None else own_profile.calibration
            cache = reader.cache(model, mark, calibration, where)
            if own_profile is not None:
                own = cache.measured_moments or cache.moments
                if own is None and calibration is None:
                    raise ValueError("it was made without a `profile`")
                known = [own_profile.moments, *({} if calibration is None else calibration.moments).values()]
                if own is not None and moments_mark(own) not in map(moments_mark, known):
                    raise ValueError("it was made with another `profile`")
            return cache
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        why = f"its header lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"`path` must be a cache file, got {name!r}: {why}") from error


class _Reader:
    """One file, from its header to a cache."""

    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        self.header, self.tensors, self.start = read_header(file, FORMAT)
        _want(self.header["byte_format"] == FORMAT_VERSION, f"its byte format must be {FORMAT_VERSION}")

    def integers(self, name: str, length: int | None = None) -> list[int]:
        numbers = self.header[name]
        _want(isinstance(numbers, list) and length in (None, len(numbers)), f"`{name}` is no list of this cache")
        return [bounded(f"cache file: `{name}`", x) for x in numbers]

    def integer(self, name: str) -> int:
        return bounded(f"cache file: `{name}`", self.header[name])

    def cache(
        self, model: Any, mark: dict[str, Any] | None, calibration: Calibration | None, device: torch.device | None
    ) -> TurboQuantCache:
        from .cache import TurboQuantCache

        header = self.header
        _want(isinstance(header["fingerprint"], dict), "`fingerprint` is no mapping")
        if mark is not None:
            differs = _differences(header["fingerprint"], mark)
            _want(not differs, f"it is of another model: this one has {', '.join(differs)}")
        _want(header["calibration"] == calibration_mark(calibration), "it needs the `profile` it was made with")
        _want(isinstance(header["spec"], dict), "`spec` is no mapping")
        kinds = self.kinds()
        packed = [i for i, (kind, _) in enumerate(kinds) if has_keys(kind)]
        _want(len(packed) == header["fingerprint"].get("layers"), "`kinds` are not those of its fingerprint")
        cache = TurboQuantCache.__new__(TurboQuantCache)
        cache.spec = CacheSpec.from_dict(header["spec"])
        cache._set_up(
            calibration,
            {name: x for name, x in header["fingerprint"].items() if name != "weights"},
            self.specs(cache.spec, layer_specs(cache.spec, calibration, len(kinds), packed)),
            kinds=kinds,
        )
        self.fill(cache, _devices(model, len(kinds)) if device is None else [device] * len(kinds))
        return cache

    def specs(self, average: CacheSpec, each: list[CacheSpec]) -> list[CacheSpec]:
        """The spec of each layer, with its widths where layers share the bits of an average."""
        widths = self.header["widths"]
        _want((widths is None) == (average.shared_bits is None), "`widths` are not those of its spec")
        if widths is None:
            return each
        _want(isinstance(widths, list) and len(widths) == len(each), "`widths` are not of its layers")
        right = (isinstance(one, list) and len(one) == 3 and all(type(x) is int for x in one) for one in widths)
        _want(all(right), "`widths` must be bits of keys, bits of values and tries")
        return [one.with_(key_bits=key, value_bits=value, tries=tries, uniform=True)
                for one, (key, value, tries) in zip(each, widths)]  # fmt: skip

    def kinds(self) -> list[tuple[str, dict[str, Any]]]:
        """The kind of each layer, and arguments of its class."""
        kinds = self.header["kinds"]
        _want(isinstance(kinds, list) and 0 < len(kinds) <= 2**16, "`kinds` is out of range")
        for one in kinds:
            right = isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], dict)
            _want(right and is_known(one[0]), "`kinds` has one that this version or transformers does not know")
            known = all(type(x) is int and 0 < x < 2**31 for x in one[1].values())
            _want(known and one[1].get("number_of_states", 1) <= 2**8, "`kinds` is out of range")
        return [(kind, options) for kind, options in kinds]

    def fill(self, cache: TurboQuantCache, devices: list[torch.device]) -> None:
        """Reads the tensors into layers, after checking that the header agrees with itself and with them."""
        header, layers = self.header, cache.packed_layers
        specs = [layer.spec for layer in layers]
        wanted = self.moments_tensors(specs)
        if self.integer("positions"):
            wanted |= self.layers_tensors(layers)
            wanted |= self.states_tensors(cache.layers)
        wanted = {name: tensor for name, tensor in layout(wanted).items() if not name.startswith("pad.")}
        for name in {**wanted, **self.tensors}:
            _want(wanted.get(name) == self.tensors.get(name), f"`{name:.80}` is not of this cache")
        sums = header["crc32"]
        _want(isinstance(sums, dict) and sums.keys() == wanted.keys(), "`crc32` is not of this cache")
        tensors = {name: self.bytes_of(name, tensor, sums[name]) for name, tensor in wanted.items()}
        _want(not any(self.file.read()), "something is written behind its tensors")
        if header["moments"] is not None:
            self.fill_moments(cache, wanted, tensors)
        if header["positions"]:
            views = {
                name: tensor.view(DTYPES[wanted[name].dtype]).view(wanted[name].shape)
                for name, tensor in tensors.items()
            }
            self.fill_layers(layers, views, devices)
            self.fill_states(cache.layers, views, devices)

    def moments_tensors(self, specs: list[CacheSpec]) -> dict[str, Tensor]:
        """Tensors of the moments that the header describes."""
        described = self.header["moments"]
        needed = any(spec.measured for spec in specs)
        _want(needed == (described is not None), f"its spec needs {'' if needed else 'no '}`moments`")
        if described is None:
            return {}
        _want(isinstance(described, dict) and isinstance(described["shapes"], list), "`moments` is no mapping")
        shapes = described["shapes"]
        _want(len(shapes) == len(specs), "`moments` are not of its layers")
        for sizes in shapes:
            _want(isinstance(sizes, list) and len(sizes) == 4, "`moments` are of another shape")
            for x in sizes:
                bounded("cache file: `moments`", x)
        return _moments_tensors(described)

    def fill_moments(self, cache: TurboQuantCache, places: dict[str, Tensor], tensors: dict[str, torch.Tensor]) -> None:
        """Takes the moments out of `tensors`, and gives them to the cache."""
        arrays: dict[str, NDArray[Any]] = {}
        for name in [name for name in tensors if name.startswith("moments.")]:
            array = tensors.pop(name).numpy().view(places[name].numpy_dtype)
            arrays[name.removeprefix("moments.")] = array.reshape(places[name].shape)
        moments = Moments.of_arrays(self.header["moments"], arrays)
        moments.check(cache.fingerprint)
        cache.moments = moments
        if self.header["moments"].get("averaged"):
            layers = (replace(x, amplitudes=arrays[f"{i}.measured"]) for i, x in enumerate(moments.layers))
            cache.measured_moments = replace(moments, layers=tuple(layers))

    def layers_tensors(self, layers: list[PackedLayer]) -> dict[str, Tensor]:
        """Tensors of the layers, for a cache that holds tokens."""
        header, positions = self.header, self.integer("positions")
        padding = self.integers("padding")
        _want(max(padding, default=0) <= positions, "`padding` is more than `positions`")
        least = header.get("least", 0)  # files of versions that did not write it have none
        _want(type(least) is int and 0 <= least <= positions, "`least` is out of range")
        _want(header["dtype"] in list(DTYPES)[:3], "`dtype` is none of a model")
        sizes = header["sizes"]
        _want(isinstance(sizes, list) and len(sizes) == len(layers), "`sizes` are not of its layers")
        for one in sizes:
            _want(isinstance(one, list) and len(one) == 2, "`sizes` must be pairs")
            for name, x in zip(("kv_heads", "head_dim"), one):
                bounded(f"cache file: `{name}`", x)
        _want(len(padding) > 0, "`padding` is empty")
        shifts = header["shifts"]
        right = isinstance(shifts, list) and all(type(x) is int and abs(x) < 2**31 for x in shifts)
        _want(right and len(shifts) == len(padding), "`shifts` is no list of this batch")
        released = self.integers("released", len(layers))
        self.integers("sliding_windows", len(layers))
        pages = [self.check_rows(i, layer, padding, released[i]) for i, layer in enumerate(layers)]
        specs = [layer.spec for layer in layers]
        for spec, (_, head_dim) in zip(specs, sizes):
            spec.plan(head_dim)
        return _tensors(specs, positions, header["dtype"], len(padding), sizes, pages)

    def states_tensors(self, layers: list[Any]) -> dict[str, Tensor]:
        """Tensors of the states that the header describes: at most those that the layers may have, of this batch."""
        described = self.header["states"]
        _want(isinstance(described, dict), "`states` is no mapping")
        places = [
            f"states.{i}.{part}.{j}"
            for i, layer in enumerate(layers)
            if isinstance(layer, StateLayer)
            for part in ("conv", "recurrent")
            for j in range(layer.number_of_states)
        ]
        _want(list(described) == [name for name in places if name in described], "`states` are not of its layers")
        tensors = {}
        for name, entry in described.items():
            right = isinstance(entry, list) and len(entry) == 2 and entry[0] in list(DTYPES)[:3]
            right = right and isinstance(entry[1], list) and all(type(n) is int and 0 < n < 2**31 for n in entry[1])
            _want(
                right and 2 <= len(entry[1]) <= 6 and entry[1][0] == len(self.header["padding"]),
                f"`{name}` is out of range",
            )
            tensors[name] = Tensor(entry[0], tuple(entry[1]))
        return tensors

    def fill_states(self, layers: list[Any], tensors: dict[str, torch.Tensor], devices: list[torch.device]) -> None:
        """Puts the tensors of `states_tensors` into layers."""
        for name in self.header["states"]:
            _, i, part, j = name.split(".")
            layers[int(i)].fill(part, int(j), tensors.pop(name).to(devices[int(i)]))

    def fill_layers(
        self, layers: list[PackedLayer], tensors: dict[str, torch.Tensor], devices: list[torch.device]
    ) -> None:
        """Puts the tensors of `layers_tensors` into layers."""
        header, padding, dtype = self.header, self.header["padding"], DTYPES[self.header["dtype"]]
        for i, (layer, (kv_heads, head_dim)) in enumerate(zip(layers, header["sizes"])):
            device = devices[layer.index]
            like = torch.empty((len(padding), kv_heads, 0, head_dim), dtype=dtype, device=device)
            layer.lazy_initialization(like, like)
            stored = layer.storage
            stored.table = PageTable(PagePool(tensors.pop(f"layers.{i}.pages").to(device)), header["rows"][i])
            rows = {name: tensors.pop(f"layers.{i}.{name}", None) for name in _EXACT}
            stored.hold_exact({name: tensor.to(device) for name, tensor in rows.items() if tensor is not None})
            rotations = {side: tensors.pop(f"layers.{i}.{side}_rotation", None) for side in ("key", "value")}
            if split := {side: x.to(device) for side, x in rotations.items() if x is not None}:
                stored.hold_split(split)
            stored.tokens, stored.padding = header["positions"], tuple(padding)
            stored.least = header.get("least", 0)
            stored.hold_shifts(tuple(header["shifts"]))
            stored.released, stored.sliding_window = header["released"][i], header["sliding_windows"][i]

    def check_rows(self, i: int, layer: PackedLayer, padding: list[int], released: int) -> int:
        """Returns how many pages layer i has. Each must be in a row, and each row as long as its sequence needs."""
        rows = self.header["rows"]
        _want(isinstance(rows, list) and len(rows) > i and isinstance(rows[i], list), "`rows` is not of this cache")
        _want(len(rows[i]) == len(padding), f"`rows[{i}]` is not of this batch")
        used: set[int] = set()
        for row, pad, count in zip(rows[i], padding, layer.storage.packed(self.header["positions"], padding)):
            _want(isinstance(row, list) and len(row) == -(-count // PAGE_TOKENS), f"`rows[{i}]` is of another length")
            _want(all(type(page) is int and page >= RELEASED for page in row), f"`rows[{i}]` is out of range")
            gone = max(0, released - pad - layer.spec.sinks) // PAGE_TOKENS
            _want(all((page == RELEASED) <= (j < gone) for j, page in enumerate(row)), f"`rows[{i}]` has a hole")
            used.update(row)
        used.discard(RELEASED)
        _want(used == set(range(len(used))), f"`rows[{i}]` is out of range")
        return len(used)

    @outside_autograd
    def bytes_of(self, name: str, place: Tensor, sums: Any) -> torch.Tensor:
        """Reads the bytes of a tensor. Only zeros may lie between the tensor before it and this one."""
        gap = self.file.read(self.start + place.start - self.file.tell())
        _want(not any(gap), f"something is written before `{name}`")
        buffer = torch.empty(place.nbytes, dtype=torch.uint8, device="cpu")
        data = buffer.numpy().data
        _want(self.file.readinto(data) == place.nbytes, "it is truncated")
        computed = _checksums(data, _units(name, place))
        _want(isinstance(sums, list) and len(sums) == len(computed), f"`crc32` has not all of `{name}`")
        for i, (one, claimed) in enumerate(zip(computed, sums)):
            _want(one == claimed, f"`{name}` is damaged" if len(computed) == 1 else f"page {i} of `{name}` is damaged")
        return buffer


def _device(wanted: Any) -> torch.device:
    """The device called `wanted`. Raises ValueError for one that this torch does not have."""
    try:
        return torch.empty(0, device=wanted).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch without CUDA asserts
        said = str(error).partition("\n")[0]
        raise ValueError(f"`device` must be one that this torch can use, got {quoted(wanted)}: {said}") from None


def _devices(model: Any, n_layers: int) -> list[torch.device]:
    """The device of each layer: that of its attention's weights, or the CPU without a model."""
    devices = [torch.device("cpu")] * n_layers
    if hasattr(model, "modules"):
        for module in decoder_of(model).modules():
            i = getattr(module, "layer_idx", None)
            if isinstance(i, int) and i < n_layers and any(True for _ in module.parameters()):
                devices[i] = device_of(module)
    return devices
