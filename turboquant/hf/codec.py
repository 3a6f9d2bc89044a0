"""Packed keys and values as bytes, for a disk, host memory or another machine. Attention reads them as they are.

    codec = turboquant.Codec(model, "default")          # the plan of each layer; the same on both machines
    data = codec.encode(keys, values)                   # one [kv_heads, tokens, head_dim] a layer, on any device
    keys, values = codec.decode(data, dtype=torch.bfloat16, device="cuda")
    layers = codec.packed(data, device="cuda")          # one ops.PackedKV a layer, for ops.attend
    first = codec.cut(data, 0, codec.boundary(10))      # the first ten pages, not decoded
    data = codec.join([first, codec.cut(data, codec.boundary(10), None)])

A prompt may be encoded in parts that begin at page boundaries: `encode(.., start=codec.boundary(n))`. The parts join
without being decoded. The first `sinks` tokens of a sequence stay exact. No window is stored: its tokens are packed.

The bytes are a file of safetensors (`files`): pages and sinks of each layer, and a header with the digest of all that
the bytes depend on: byte format, plans, rotations, wave and metric. Bytes of another digest are refused. Sizes are
checked against the length of the data before memory is asked for. Checksums and the digest guard against mistakes and
damage, not against forgery: whoever can write the bytes can change what a model reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..arguments import BOUNDS, bounded, integer_in
from ..files import Tensor as Place
from ..files import array_bytes, crc32, header_of, layout, read_header
from ..kvcache.transforms import layer_transforms, random_rotation
from ..models.identity import layer_sizes
from ..plan import FORMAT_VERSION, PAGE_TOKENS, Plan
from ..spec import CacheSpec
from .cache import TurboQuantCache
from .persistence import DTYPES, NAMES, tensor_bytes

if TYPE_CHECKING:
    import os

    from ..measured import Profile

__all__ = ["FORMAT", "Codec"]

FORMAT = "turboquant-codec-1"


@dataclass(frozen=True)
class _Layer:
    """How one layer is packed. index: its rank among the layers that have keys."""

    index: int
    spec: CacheSpec
    plan: Plan
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Part:
    """Tokens of a sequence, from `start` on: the pages of each layer, and sinks where start is 0."""

    start: int
    tokens: int
    dtype: torch.dtype
    pages: list[Tensor]  # uint8 [pages, kv_heads, record_bytes]
    sinks: list[tuple[Tensor, Tensor]]  # [kv_heads, sinks, head_dim]; empty where there are none


class Codec:
    """See the module.

    model    a model of transformers, or its configuration if a profile is given or nothing is measured
    spec     as in `turboquant.patch`; None: what the model was patched with, or the default
    profile  as in `turboquant.patch`

    Raises what `TurboQuantCache` raises, and NotImplementedError for a model whose layers keep states or latents,
    or keys and values of different sizes, and for a spec whose rotations are found in the prompt or whose `sinks`
    differ by layer.
    """

    def __init__(
        self,
        model: Any,
        spec: CacheSpec | str | None = None,
        *,
        profile: Profile | str | os.PathLike[str] | None = None,
    ) -> None:
        cache = TurboQuantCache(model, spec, profile=profile)
        if len(cache.packed_layers) != len(cache.layers):
            raise NotImplementedError(
                "Codec: a model whose layers keep states is not supported: use TurboQuantCache.save"
            )
        if not all(layer.storage.has_values for layer in cache.packed_layers):
            raise NotImplementedError(
                "Codec: a model whose cache has latents, or keys and values of different sizes, is not supported"
            )
        if any(layer.spec.outliers == "prompt" for layer in cache.packed_layers):
            raise NotImplementedError(
                'Codec: outliers="prompt" is not supported: its rotations are found in the prompt'
            )
        sinks = [layer.spec.sinks for layer in cache.packed_layers]
        if len({*sinks}) > 1:
            raise NotImplementedError(f"Codec: `sinks` must be the same in all layers, got {sinks}: leave it out of "
                                      "`overrides`")  # fmt: skip
        self.spec = cache.spec
        self._shared = cache._shared
        sizes = layer_sizes(cache.fingerprint)
        self._layers = [
            _Layer(i, one.spec, one.storage.plan_for(kv_heads, head_dim), kv_heads, head_dim)
            for i, (one, (kv_heads, head_dim)) in enumerate(zip(cache.packed_layers, sizes, strict=True))
        ]

    def __repr__(self) -> str:
        return f"Codec({len(self._layers)} layers, {self.spec!r}, digest {self.digest[:8]}..)"

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that stay exact."""
        return self._layers[0].spec.sinks

    def boundary(self, page: int) -> int:
        """Position at which page `page` begins, where `start`, `cut` and `join` may divide a sequence; 0 for page 0."""
        page = bounded("codec: `page`", page)
        return self.sinks + page * PAGE_TOKENS if page else 0

    def nbytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of pages and sinks of a sequence of this many tokens; headers and padding are left out."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"nbytes: `dtype` must be float32, float16 or bfloat16, got {dtype}")
        part = self._shape(0, bounded("codec: `tokens`", tokens), dtype)
        return sum(place.nbytes for place in part.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, of what the bytes depend on: byte format, the plan and spec of each layer, KV
        heads, sinks, and all that was measured. Matrices follow from these, but their last bits differ by CPU."""
        shared = self._shared
        digest = hashlib.sha256(repr((FORMAT, FORMAT_VERSION, self.sinks)).encode())
        for layer in self._layers:
            digest.update(repr((layer.plan.words, layer.kv_heads, layer.spec.to_dict())).encode())
        measured = None if shared.moments is None else shared.moments.without_costs()
        for one in (measured, shared.calibration):
            for name, array in sorted(({} if one is None else one.arrays()).items()):
                digest.update(repr((name, array.dtype.str, array.shape)).encode())
                digest.update(array_bytes(array))
        return digest.hexdigest()

    # ---- plain tokens ----

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor], start: int = 0) -> bytes:
        """Encodes keys after RoPE and values of consecutive tokens as bytes.

        keys, values  [kv_heads, tokens, head_dim] of each layer, or one tensor with layers in front; float32, float16
                      or bfloat16, on one device
        start         position of the first token: 0 or a `boundary`

        Raises ValueError for other shapes and dtypes, for numbers that are not finite (CPU), and for another `start`;
        TypeError for what is no tensor.
        """
        start = self._starting("encode", start)
        tokens, dtype = self._check_sides(keys, values)
        part = _Part(start, tokens, dtype, [], [])
        for layer, k, v in zip(self._layers, keys, values):
            exact = self._exact(start, part.tokens)
            if exact:
                part.sinks.append((k[:, :exact], v[:, :exact]))
                if k.device.type == "cpu" and not all(torch.isfinite(x).all() for x in part.sinks[-1]):
                    raise ValueError(f"encode: `keys[{layer.index}]` and `values[{layer.index}]` must be finite")
            later = self._transforms(layer, start + exact, k.device)
            part.pages.append(ops.quantize(layer.plan, k[None, :, exact:], v[None, :, exact:], transforms=later))
        return self._bytes(part)

    def _check_sides(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[int, torch.dtype]:
        """Checks the arguments of `encode`, and returns (tokens, dtype)."""
        sides = {"keys": keys, "values": values}
        for name, layers in sides.items():
            if not isinstance(layers, (Sequence, Tensor)):
                raise TypeError(f"encode: `{name}` must be a tensor for each layer, got {type(layers).__name__}")
            if len(layers) != len(self._layers):
                raise ValueError(f"encode: `{name}` must have {len(self._layers)} layers, got {len(layers)}")
            for i, x in enumerate(layers):
                if not isinstance(x, Tensor):
                    raise TypeError(f"encode: `{name}[{i}]` must be a tensor, got {type(x).__name__}")
        first = keys[0]
        tokens = bounded("codec: `tokens`", int(first.shape[1])) if first.dim() == 3 else 0
        if first.dtype not in NAMES or first.dtype == torch.uint8:
            raise ValueError(f"encode: `keys[0]` must be float32, float16 or bfloat16, got {first.dtype}")
        for name, layers in sides.items():
            for i, (layer, x) in enumerate(zip(self._layers, layers)):
                wanted = (layer.kv_heads, tokens or "tokens", layer.head_dim)
                if tuple(x.shape) != wanted:
                    text = ", ".join(map(str, wanted))
                    raise ValueError(f"encode: `{name}[{i}]` must be [{text}], got {list(x.shape)}")
                if x.dtype != first.dtype or x.device != first.device:
                    raise ValueError(f"encode: `{name}[{i}]` must be {first.dtype} on {first.device} as `keys[0]` is, "
                                     f"got {x.dtype} on {x.device}")  # fmt: skip
                if x.requires_grad:
                    raise ValueError(f"encode: `{name}[{i}]` must not require a gradient: bytes have none. Run the "
                                     "model under torch.no_grad(), or call detach()")  # fmt: skip
        return tokens, first.dtype

    def decode(
        self, data: bytes | bytearray | memoryview, *, dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Returns (keys, values), for each layer [kv_heads, tokens, head_dim]. A dtype of None means that of what was
        encoded. Raises ValueError for data that are damaged, truncated, or of another digest."""
        part = self._read(data)
        both = [ops.dequantize(one, dtype or part.dtype) for one in self._layers_of(part, torch.device(device))]
        return [k[0] for k, _ in both], [v[0] for _, v in both]

    # ---- packed tokens ----

    def packed(self, data: bytes | bytearray | memoryview, device: torch.device | str = "cpu") -> list[ops.PackedKV]:
        """Returns an `ops.PackedKV` of one sequence for each layer, which `ops.attend` reads without anything decoded.
        Its positions count from the first token of `data`. Raises what `decode` raises."""
        return self._layers_of(self._read(data), torch.device(device))

    def _layers_of(self, part: _Part, device: torch.device) -> list[ops.PackedKV]:
        layers = []
        for layer, pages in zip(self._layers, part.pages):
            exact = {}
            if part.sinks:
                for name, x in zip(("sink_k", "sink_v"), part.sinks[layer.index]):
                    rows = torch.zeros((1, layer.kv_heads, self.sinks, layer.head_dim), dtype=x.dtype, device=device)
                    rows[0, :, : x.shape[1]] = x
                    exact[name] = rows
            layers.append(
                ops.PackedKV(
                    pages=pages.to(device),
                    block_table=torch.arange(len(pages), dtype=torch.int32, device=device)[None],
                    lengths=torch.tensor([part.tokens], dtype=torch.int32, device=device),
                    plan=layer.plan,
                    tokens=part.tokens,
                    transforms=self._transforms(layer, part.start, device),
                    **exact,
                )
            )
        return layers

    def span(self, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Returns (first position, position behind the last token) of encoded data. Its tensors are not read."""
        start, tokens, *_ = self._header(data)
        return start, start + tokens

    def cut(self, data: bytes | bytearray | memoryview, start: int, end: int | None) -> bytes:
        """Returns the tokens from start up to, but not including, end as encoded data. An end of None is that of the
        data. Raises ValueError where start or end is neither a `boundary` nor an end of the data."""
        start = self._starting("cut", start)
        part = self._read(data)
        last = part.start + part.tokens
        end = last if end is None else last if end == last else self._starting("cut", end, "end")
        if not part.start <= start < end <= last:
            raise ValueError(f"cut: `start` and `end` must be in {part.start}..{last}, the one before the other, got "
                             f"{start} and {end}")  # fmt: skip
        first, behind = self._pages(part.start, start), self._pages(part.start, end)
        sinks = part.sinks if start == 0 else []
        return self._bytes(replace(part, start=start, tokens=end - start, sinks=sinks,
                                   pages=[pages[first:behind] for pages in part.pages]))  # fmt: skip

    def join(self, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
        """Joins encoded data of consecutive tokens. Raises ValueError where a part does not begin where the one before
        it ends, or begins within a page."""
        read = [self._read(data) for data in parts]
        if not read:
            raise ValueError("join: `parts` must be at least one, got none")
        for i, (one, other) in enumerate(pairwise(read)):
            end = one.start + one.tokens
            if other.start != end or other.dtype != read[0].dtype:
                raise ValueError(f"join: `parts[{i + 1}]` must begin at token {end} and be of {read[0].dtype}, got "
                                 f"{other.start} and {other.dtype}")  # fmt: skip
        pages = [torch.cat(list(of_layer)) for of_layer in zip(*(one.pages for one in read))]
        return self._bytes(replace(read[0], tokens=sum(one.tokens for one in read), pages=pages))

    # ---- places ----

    def _starting(self, call: str, start: Any, name: str = "start") -> int:
        """Returns `start`, or raises ValueError if it is neither 0 nor a boundary."""
        at = integer_in(start, f"{call}: `{name}`", *BOUNDS["codec: `start`"])
        if at and (at <= self.sinks or (at - self.sinks) % PAGE_TOKENS):
            raise ValueError(f"{call}: `{name}` must be 0 or {self.sinks} + n * {PAGE_TOKENS} with n above 0, got {at}")
        return at

    def _exact(self, start: int, tokens: int) -> int:
        """How many of the tokens are sinks."""
        return min(self.sinks, tokens) if start == 0 else 0

    def _pages(self, start: int, end: int) -> int:
        """Pages that hold the packed ones of the tokens from start up to end."""
        return -(-(end - start - self._exact(start, end - start)) // PAGE_TOKENS)

    def _transforms(self, layer: _Layer, start: int, device: torch.device) -> dict[str, Tensor]:
        """The transforms of a layer for calls that count positions from `start` on. Those of a prompt's later parts are
        not kept, because each page may have its own."""
        shared = self._shared
        parts = layer_transforms(layer.spec, layer.index, layer.head_dim, device, shared.calibration, shared.moments,
                                later=-start, keep=start in (0, self.sinks))  # fmt: skip
        rotation = random_rotation(layer.spec, layer.head_dim, device)
        return parts if rotation is None else {**parts, "rotation": rotation}

    def _shape(self, start: int, tokens: int, dtype: torch.dtype) -> dict[str, Place]:
        """The tensors of the data, in order."""
        exact, pages = self._exact(start, tokens), self._pages(start, start + tokens)
        places: dict[str, Place] = {}
        for layer in self._layers:
            if exact:
                for side in ("k", "v"):
                    shape = (layer.kv_heads, exact, layer.head_dim)
                    places[f"{layer.index}.sink_{side}"] = Place(NAMES[dtype], shape)
            places[f"{layer.index}.pages"] = Place("U8", (pages, layer.kv_heads, layer.plan.record_bytes))
        return places

    # ---- bytes ----

    def _bytes(self, part: _Part) -> bytes:
        places = self._shape(part.start, part.tokens, part.dtype)
        views: dict[str, memoryview] = {}
        for i, pages in enumerate(part.pages):
            if part.sinks:
                views |= {f"{i}.sink_{side}": tensor_bytes(x) for side, x in zip("kv", part.sinks[i])}
            views[f"{i}.pages"] = tensor_bytes(pages)
        meta = {"digest": self.digest, "start": part.start, "tokens": part.tokens, "dtype": NAMES[part.dtype],
                "crc32": {name: crc32([data]) for name, data in views.items()}}  # fmt: skip
        placed = layout(places)
        return b"".join([header_of(FORMAT, meta, placed), *(views.get(n, bytes(p.nbytes)) for n, p in placed.items())])

    def _header(self, data: bytes | bytearray | memoryview) -> tuple[int, int, torch.dtype, dict[str, Place], Any, int]:
        """Checks a header. Returns (start, tokens, dtype, tensors' places, checksums, byte where the tensors begin)."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"`data` must be bytes that a Codec made, got {type(data).__name__}")
        try:
            meta, file_tensors, begin = read_header(BytesIO(memoryview(data).cast("B")), FORMAT)
            if meta.get("digest") != self.digest:
                raise ValueError(f"its digest must be {self.digest[:12]}.., of this spec, profile and shape of model, "
                                 f"got {str(meta.get('digest'))[:12]}..")  # fmt: skip
            start, tokens = self._starting("codec", meta.get("start")), bounded("codec: `tokens`", meta.get("tokens"))
            if meta.get("dtype") not in ("F32", "F16", "BF16"):
                raise ValueError(f"its `dtype` must be F32, F16 or BF16, got {meta.get('dtype')!r:.80}")
            dtype, sums = DTYPES[meta["dtype"]], meta.get("crc32")
            wanted = {n: p for n, p in layout(self._shape(start, tokens, dtype)).items() if not n.startswith("pad.")}
            if wanted != file_tensors:
                raise ValueError("its tensors must be those of its tokens")
            if not isinstance(sums, dict) or sums.keys() != wanted.keys():
                raise ValueError("its checksums must be of its tensors")
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"`data` must be bytes that this Codec made: {error}") from None
        return start, tokens, dtype, wanted, sums, begin

    def _read(self, data: bytes | bytearray | memoryview) -> _Part:
        """Reads `data`. Raises ValueError, naming `data`, for anything that `_bytes` of an equal codec did not make."""
        start, tokens, dtype, places, sums, begin = self._header(data)
        view, tensors = memoryview(data).cast("B"), {}
        for name, place in places.items():
            part = view[begin + place.start : begin + place.start + place.nbytes]
            if crc32([part]) != sums[name]:
                raise ValueError(f"`data` must be bytes that this Codec made: `{name}` is damaged")
            flat = torch.empty(place.nbytes, dtype=torch.uint8)  # aligned as the operators want it
            flat.numpy()[:] = np.frombuffer(part, np.uint8)
            tensors[name] = flat.view(DTYPES[place.dtype]).view(place.shape)
        layers = range(len(self._layers))
        sinks = [(tensors[f"{i}.sink_k"], tensors[f"{i}.sink_v"]) for i in layers] if "0.sink_k" in tensors else []
        return _Part(start, tokens, dtype, [tensors[f"{i}.pages"] for i in layers], sinks)
