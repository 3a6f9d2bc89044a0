"""Sizes of caches, from the shapes of a model's layers alone: bytes of a cache before it exists, and tokens that fit
into a memory.

They follow the rules of `kvcache.storage`. Torch is not needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from .arguments import quoted
from .matrices import is_split
from .plan import MAX_HEAD_DIM, MAX_RANK, PAGE_TOKENS, PAIR_MULTIPLE, Plan
from .spec import CacheSpec

__all__ = ["MOST_TOKENS", "UNITS", "Layer", "Model", "bytes_of", "full_bytes", "layer_of", "layers_of", "model_of",
           "no_decoder", "packed_parts", "refused", "runs", "tokens_that_fit"]  # fmt: skip

MOST_TOKENS = 2**31 - 1  # of a sequence
UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
          **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}}  # fmt: skip
_SIDES = ("key", "value")
_EXACT_ROWS = 16  # the fewest rows that sinks and window have (`kvcache.exact`)

_KINDS = {  # by the names of transformers
    **dict.fromkeys(("full_attention", "attention", "hybrid"), "full"),
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"), "none"),
}
_WORDS = {
    "full": "with full attention",
    "sliding": "with a window of {window:,} tokens",
    "chunked": "with chunks of {window:,} tokens",
    "latent": "with one latent vector of {head_dim} numbers for each token",
    "none": "without keys and values, whose state is not counted",
}


@dataclass(frozen=True)
class Layer:
    """kind: a key of `_WORDS`. window: of a sliding or chunked layer, in tokens. shared: whether it reads what an
    earlier layer of its kind stores. A latent layer stores one vector of `head_dim` numbers for each token."""

    kind: str
    kv_heads: int
    head_dim: int
    window: int = 0
    shared: bool = False

    def reads(self, tokens: int) -> int:
        """Returns how many numbers attention over one sequence of `tokens` tokens reads, unpacked."""
        vectors = 1 if self.kind == "latent" else 2 * self.kv_heads
        return vectors * self.head_dim * min(tokens, self.window or tokens)

    def stores(self, tokens: int) -> int:
        return 0 if self.shared else self.reads(tokens)

    def __str__(self) -> str:
        words = _WORDS[self.kind].format(window=self.window, head_dim=self.head_dim)
        return words + (" that share the keys and values of earlier ones" if self.shared else "")


@dataclass(frozen=True)
class Model:
    """refused: why the bytes of a packed cache are not counted, or "" if they are."""

    name: str
    source: str
    layers: tuple[Layer, ...]
    refused: str = ""

    def __str__(self) -> str:
        kinds, heads = Counter(self.layers), {_heads(one) for one in self.layers} - {""}
        several = len(heads) > 1
        words = [
            f"{count} {one}{f' ({_heads(one)})' * (several and bool(_heads(one)))}" for one, count in kinds.items()
        ]
        common = "" if several else "".join(f", {one}" for one in heads)
        return f"{self.name}: {len(self.layers)} layers{common}; {', '.join(words)} ({self.source})"


def _heads(layer: Layer) -> str:
    if layer.kind in ("latent", "none"):
        return ""
    return f"{layer.kv_heads} KV head{'s' * (layer.kv_heads > 1)} of {layer.head_dim} channels"


def layer_of(kind: str, kv_heads: int, head_dim: int, window: int, shared: bool) -> Layer:
    if kind == "none":
        return Layer(kind, 0, 0)
    return Layer(kind, kv_heads, head_dim, window if kind in ("sliding", "chunked") else 0, shared)


def refused(layers: Sequence[Layer]) -> str:
    """Returns why the bytes of a packed cache are not counted, kinds of layers or heads that are too wide, or ""."""
    kinds = {one.kind for one in layers}
    if "latent" in kinds:
        return "its attention is latent"
    if "chunked" in kinds:
        return "some of its layers attend in chunks"
    if any(one.shared for one in layers):
        return "some of its layers share keys and values"
    widest = max(one.head_dim for one in layers)
    return f"its head_dim is {widest}, at most {MAX_HEAD_DIM} can be packed" if widest > MAX_HEAD_DIM else ""


def model_of(config: Any) -> Model:
    """Returns the decoder of a transformers configuration that `turboquant.patch` takes."""
    layers = layers_of(config.get_text_config(decoder=True), type(config).__name__)
    return Model(config.model_type, "", layers, refused(layers))


def layers_of(text: Any, path: str) -> tuple[Layer, ...]:
    """Returns the layers of a transformers configuration."""
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise no_decoder(text, path)
    each = list(text.per_layer_config) if getattr(text, "per_layer_attributes", None) else [text] * count
    layers = tuple(_layer_of(text, one, i, count, path) for i, one in enumerate(each))
    if all(one.kind == "none" for one in layers):
        raise no_decoder(text, path)
    return layers


def _layer_of(text: Any, one: Any, i: int, count: int, path: str) -> Layer:
    """Returns layer i of `count`. one: its configuration. text: that of all layers."""
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    window = getattr(one, "sliding_window", None) or 0
    if types:
        kind = _KINDS.get(types[i], types[i])
    else:
        kind = "sliding" if window and getattr(text, "use_sliding_window", True) else "full"
    if kind not in _WORDS:
        raise ValueError(f"MODEL has layers of a kind that calc cannot count, {kind!r}: {path!r}")
    if kind == "none":
        return Layer(kind, 0, 0)
    shared = i >= count - (getattr(text, "num_kv_shared_layers", 0) or 0)
    if kind == "full" and getattr(one, "kv_lora_rank", None):
        return layer_of("latent", 1, one.kv_lora_rank + one.qk_rope_head_dim, 0, shared)
    if kind == "chunked":
        window = one.attention_chunk_size
    heads = getattr(one, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise no_decoder(text, path)
    head_dim = getattr(one, "head_dim", None) or one.hidden_size // heads
    kv_heads = getattr(one, "num_key_value_heads", None) or heads
    if getattr(one, "v_head_dim", None) not in (None, head_dim):
        sizes = f"keys of {head_dim} and values of {one.v_head_dim} channels"
        raise ValueError(f"MODEL has layers that calc cannot count, with {sizes}: {path!r}")
    return layer_of(kind, kv_heads, head_dim, window, shared)


def no_decoder(text: Any, path: str) -> ValueError:
    return ValueError(f"MODEL must be a decoder with attention, got {path!r}, which is of type {text.model_type!r}")


# ---- bytes ----


def full_bytes(model: Model, batch: int, tokens: int, item_bytes: int) -> int:
    """Returns the bytes of unpacked keys and values of `batch` sequences of `tokens` tokens, for fp8 without scales."""
    return item_bytes * batch * sum(count * one.stores(tokens) for one, count in Counter(model.layers).items())


def not_packed(model: Model, spec: CacheSpec) -> str:
    """Returns why a model's packed cache is not counted, `model.refused` or heads too wide for the spec, or ""."""
    if model.refused:
        return model.refused
    try:
        runs(model, spec)
    except ValueError as error:
        return str(error)
    return ""


def packed_parts(model: Model, spec: CacheSpec, batch: int, tokens: int, item_bytes: int = 2) -> dict[str, int]:
    """Returns `cache.nbytes` by the parts of `cache.report()`, on a CPU after a prompt of `tokens` tokens a sequence.

    item_bytes: bytes of a number of the model's dtype. On CUDA a layer has 8 bytes more. A cache that has grown token
    by token holds up to 1/64 more pages. Results are not exact in two cases: a model's wave may need fewer pairs than
    are counted; and with a budget and sliding windows every layer counts as the mean, because only a calibration knows
    which layers get more bits. NotImplementedError, with the reason, if `not_packed` has one.
    """
    if why := not_packed(model, spec):
        raise NotImplementedError(f"the packed cache of {model.name} is not counted: {why}")
    parts: Counter[str] = Counter()
    for one, layer_spec, per_token, count in runs(model, spec):
        for part, size in _layer_parts(one, layer_spec, per_token, batch, tokens, item_bytes):
            parts[part] += round(count * size)
    parts["lengths"] = 4 * batch
    parts["token ids"] = 4 * batch * tokens
    parts["rotation"] += sum(_common_matrices(model, spec))
    return {part: size for part, size in parts.items() if size}


@lru_cache(maxsize=64)
def runs(model: Model, spec: CacheSpec) -> list[tuple[Layer, CacheSpec, float, int]]:
    """Returns (layer, its spec, bytes of a packed token, how many equal layers there are) for each kind of layer."""
    count = len(model.layers)
    counts: Counter[tuple[Layer, CacheSpec]]
    counts = Counter((one, spec.for_layer(i, count)) for i, one in enumerate(model.layers) if one.kind != "none")
    each = []
    for (one, layer_spec), same in counts.items():
        layers = 1 if spec.budget is None else counts.total()
        each.append((one, layer_spec, layer_spec.bytes_per_token(one.head_dim, one.kv_heads, layers) / layers, same))
    return each


def _layer_parts(
    layer: Layer, spec: CacheSpec, per_token: float, batch: int, tokens: int, item_bytes: int
) -> Iterator[tuple[str, float]]:
    heads, channels = layer.kv_heads, layer.head_dim
    rows = _page_rows(spec, tokens)
    pages = batch * rows
    if layer.window:  # pages that no query sees are freed once there are enough of them (`pages.PageTable.compact`)
        before = max(0, tokens - layer.window + 1 - PAGE_TOKENS) - spec.sinks
        free = batch * min(rows, max(0, before) // PAGE_TOKENS) if tokens > 1 else 0
        pages -= free if free > pages // 64 + batch else 0
    yield "pages", pages * PAGE_TOKENS * per_token
    yield "block_table", 4 * batch * rows
    for part, need, most in (("sinks", min(tokens, spec.sinks), spec.sinks),
                             ("window", min(max(0, tokens - spec.sinks), spec.window), spec.window)):  # fmt: skip
        in_memory = min(most, max(need, _EXACT_ROWS)) if need else 0
        yield part, 2 * batch * heads * in_memory * channels * item_bytes
    yield "transforms", _moments_bytes(spec, heads, channels)
    yield "transforms", 4 * heads * sum(_calibrated_numbers(spec, side, channels) for side in _SIDES)
    if _has_own_matrices(spec):
        yield "transforms", 4 * heads * channels * _matrix_rows(spec, channels)


def _page_rows(spec: CacheSpec, tokens: int) -> int:
    """Returns the pages of one sequence, with those that a sliding window has left."""
    return -(-max(0, tokens - spec.sinks - spec.window) // PAGE_TOKENS)


def _moments_bytes(spec: CacheSpec, heads: int, channels: int) -> int:
    """Returns the bytes of a layer's wave, with all its pairs, and of its metric (`kvcache.transforms`)."""
    pairs = PAIR_MULTIPLE * -(-channels // (2 * PAIR_MULTIPLE)) if spec.centre == "wave" else 0
    plan = Plan(channels, 1, wave_pairs=pairs, metric=MAX_RANK if spec.metric == "query" else None)
    return 4 * (3 * pairs + heads * plan.key_moments)


def _calibrated_numbers(spec: CacheSpec, side: str, channels: int) -> int:
    """Returns how many float32 numbers a side takes from a calibration for each KV head, beside matrices."""
    numbers, steps = 0, 0
    if spec.rotation == "calibrated":
        steps = -(-channels // spec.group)
    if getattr(spec, f"{side}_levels") == "table":
        steps = 8 + (side == "key" and spec.sketch == "sign")
    if spec.centre == "calibrated":
        numbers += channels
    return numbers + steps + -steps % 4


def _has_own_matrices(spec: CacheSpec) -> bool:
    """Whether each layer and head has its own matrices, for at least one side."""
    return any(is_split(spec, side) or spec.rotation_of(side) in ("svd", "calibrated") for side in _SIDES)


def _matrix_rows(spec: CacheSpec, channels: int) -> int:
    """Returns the rows of the matrices of both sides."""
    kinds = ("dense", "svd", "calibrated")
    dense = [side for side in _SIDES if is_split(spec, side) or spec.rotation_of(side) in kinds]
    return len(dense) * channels + spec.sketch_rows(channels)


def _common_matrices(model: Model, spec: CacheSpec) -> Iterator[int]:
    """Yields the bytes of each random matrix that layers share (`kvcache.common`)."""
    seen = set()
    for one, layer_spec, _, _ in runs(model, spec):
        if not _has_own_matrices(layer_spec):
            rotations = tuple(layer_spec.rotation_of(side) for side in _SIDES)
            seen.add((layer_spec.seed, rotations, one.head_dim, _matrix_rows(layer_spec, one.head_dim)))
    yield from (4 * channels * rows for *_, channels, rows in seen)


def tokens_that_fit(size: Callable[[int], int], memory: int) -> int | None:
    """Returns how many tokens of each sequence fit, or None if there is no limit. size: bytes by number of tokens."""
    if size(1) > memory:
        return 0
    fits, too_many = 1, MOST_TOKENS
    if size(too_many) <= memory:
        return None
    while too_many - fits > 1:
        half = (fits + too_many) // 2
        fits, too_many = (half, too_many) if size(half) <= memory else (fits, half)
    return fits


def bytes_of(size: str | int, name: str) -> int:
    """Returns the bytes of a text such as "8 GiB" or "512MB", or of a number of bytes. ValueError, which calls it
    `name`, for any other text and for sizes that are not above 0; TypeError for any other object."""
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    elif isinstance(size, str):
        parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B)", size.strip().upper())
        nbytes = int(Decimal(parts[1]) * UNITS[parts[2]]) if parts and parts[2] in UNITS else 0
    else:
        raise TypeError(f"{name} must be a size such as '8 GiB' or a number of bytes, got {quoted(size)}")
    if nbytes < 1:
        raise ValueError(f"{name} must be a size above 0 such as 40GB or 512MiB, got {size!r}")
    return nbytes
