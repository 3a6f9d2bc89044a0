"""``turboquant calc``: bytes of a model's cache, tokens that fit into a memory, and an estimate of a decoding step.

Sizes follow from shapes alone, by the rules of `kvcache.storage`: no cache is made and torch is not needed, unless the
model is a folder or a file, which transformers reads.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

from .arguments import BOUNDS, bounded
from .calc_table import GPUS, ITEM_BYTES, MODELS, TIMED, TIMED_BYTES, TIMES, Row
from .modes import is_split
from .named_specs import named, of_bits
from .plan import MAX_HEAD_DIM, MAX_RANK, PAGE_TOKENS, PAIR_MULTIPLE, Plan
from .spec import CacheSpec
from .tables import table

__all__ = ["FULL", "MOST_TOKENS", "UNITS", "Layer", "Model", "bytes_read", "calc", "decode_seconds", "full_bytes",
           "packed_parts", "read_model", "runs", "spec_named", "timed_as", "tokens_that_fit"]  # fmt: skip

MOST_TOKENS = 2**31 - 1  # of a sequence
FULL = {"fp32": 4, "bf16": 2, "fp8": 1}  # what packed caches are compared with
UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
          **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}}  # fmt: skip
_SIDES = ("key", "value")
_EXACT_ROWS = 16  # the fewest rows that sinks and window have (`kvcache.exact`)

_LETTERS = {"f": "full", "s": "sliding", "c": "chunked", "n": "none", "m": "latent"}
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
    """kind: one of `_WORDS`. window: of a sliding or chunked layer, in tokens. shared: it reads what an earlier layer
    of its kind stores. A latent layer stores one vector of `head_dim` numbers for each token."""

    kind: str
    kv_heads: int
    head_dim: int
    window: int = 0
    shared: bool = False

    def reads(self, tokens: int) -> int:
        """How many numbers attention over one sequence of `tokens` tokens reads, without packing."""
        vectors = 1 if self.kind == "latent" else 2 * self.kv_heads
        return vectors * self.head_dim * min(tokens, self.window or tokens)

    def stores(self, tokens: int) -> int:
        return 0 if self.shared else self.reads(tokens)

    def __str__(self) -> str:
        words = _WORDS[self.kind].format(window=self.window, head_dim=self.head_dim)
        return words + (" that share the keys and values of earlier ones" if self.shared else "")


@dataclass(frozen=True)
class Model:
    """refused: why the bytes of a packed cache are not counted; "": they are."""

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


# ---- models ----


def read_model(name: str) -> Model:
    """A model of the table, by its short name or its name on the hub, or the model of a folder or config.json.

    ValueError for anything else; ImportError for a folder or file without transformers.
    """
    if os.path.exists(name):
        return _from_file(name)
    known = {row.source.partition(" ")[0].lower(): key for key, row in MODELS.items()}
    short = {hub.partition("/")[2]: key for hub, key in known.items()}
    key = {**short, **known, **{key: key for key in MODELS}}.get(name.lower())
    if key is None:
        near = difflib.get_close_matches(name.lower().rpartition("/")[2], [*MODELS, *short], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(dict.fromkeys(short.get(one, one) for one in near))}? " if near else ""
        raise ValueError(f"MODEL must be a folder, a config.json or a model of the table, got {name!r}: {hint}"
                         "`turboquant calc` without a model lists the table")  # fmt: skip
    return _from_row(key, MODELS[key])


def _from_row(name: str, row: Row) -> Model:
    layers = []
    for i, letter in enumerate(islice(cycle(row.pattern), row.layers)):
        kind = _LETTERS[letter]
        kv_heads, head_dim = row.full if row.full and kind == "full" else (row.kv_heads, row.head_dim)
        layers.append(_layer(kind, kv_heads, head_dim, row.window, i >= row.layers - row.shared))
    return Model(name, row.source, tuple(layers), refused(layers))


def _layer(kind: str, kv_heads: int, head_dim: int, window: int, shared: bool) -> Layer:
    if kind == "none":
        return Layer(kind, 0, 0)
    return Layer(kind, kv_heads, head_dim, window if kind in ("sliding", "chunked") else 0, shared)


def refused(layers: Sequence[Layer]) -> str:
    """Why the bytes are not counted: sizes that differ by layer, or heads that are too wide."""
    kinds = {one.kind for one in layers}
    if "latent" in kinds:
        return "its attention is latent"
    if "chunked" in kinds:
        return "some of its layers attend in chunks"
    if any(one.shared for one in layers):
        return "some of its layers share keys and values"
    sizes = {(one.kv_heads, one.head_dim) for one in layers if one.kind != "none"}
    if len(sizes) > 1:
        return "its layers have different heads"
    widest = max(head_dim for _, head_dim in sizes)
    return f"its head_dim is {widest}, at most {MAX_HEAD_DIM} can be packed" if widest > MAX_HEAD_DIM else ""


def _from_file(path: str) -> Model:
    """The decoder of a configuration; `turboquant.patch` says whether it can be packed."""
    from transformers import AutoConfig

    try:
        file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
        _check_integers(json.loads(file.read_text(encoding="utf-8")))
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"MODEL must be a folder with a config.json, or such a file, got {path!r}: {said}") from None
    if getattr(config, "is_encoder_decoder", False) or config.model_type == "esm":
        raise _no_decoder(config, path)
    text = config.get_text_config(decoder=True)
    layers = layers_of(text, path)
    return Model(Path(path).resolve().name, path, layers, _refused_by_patch(text) or refused(layers))


def _check_integers(config: Any) -> None:
    """Checks the integers of a parsed config.json that transformers and calc make lists and sums of, at any depth."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            _check_integers(value)
        elif f"config.json: `{name}`" in BOUNDS and not isinstance(value, list | None):
            bounded(f"config.json: `{name}`", value)


def layers_of(text: Any, path: str) -> tuple[Layer, ...]:
    """The layers of a transformers configuration."""
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise _no_decoder(text, path)
    each = list(text.per_layer_config) if getattr(text, "per_layer_attributes", None) else [text] * count
    layers = tuple(_layer_of(text, one, i, count, path) for i, one in enumerate(each))
    if all(one.kind == "none" for one in layers):
        raise _no_decoder(text, path)
    return layers


def _layer_of(text: Any, one: Any, i: int, count: int, path: str) -> Layer:
    """one: the configuration of layer i of `count`, text: that of all."""
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
        return _layer("latent", 1, one.kv_lora_rank + one.qk_rope_head_dim, 0, shared)
    if kind == "chunked":
        window = one.attention_chunk_size
    heads = getattr(one, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise _no_decoder(text, path)
    head_dim = getattr(one, "head_dim", None) or one.hidden_size // heads
    kv_heads = getattr(one, "num_key_value_heads", None) or heads
    if getattr(one, "v_head_dim", None) not in (None, head_dim):
        sizes = f"keys of {head_dim} and values of {one.v_head_dim} channels"
        raise ValueError(f"MODEL has layers that calc cannot count, with {sizes}: {path!r}")
    return _layer(kind, kv_heads, head_dim, window, shared)


def _no_decoder(text: Any, path: str) -> ValueError:
    return ValueError(f"MODEL must be a decoder with attention, got {path!r}, which is of type {text.model_type!r}")


def _refused_by_patch(text: Any) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    from .hf.patching import check

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
        check(model, "default")
    except (NotImplementedError, ValueError, KeyError, RuntimeError, ImportError) as error:
        return str(error).strip().partition("\n")[0].partition("cannot be patched: ")[2] or str(error)
    return ""


# ---- bytes ----


def full_bytes(model: Model, batch: int, tokens: int, item_bytes: int) -> int:
    """Bytes of keys and values of `batch` sequences of `tokens` tokens, unpacked. fp8 without scales."""
    return item_bytes * batch * sum(count * one.stores(tokens) for one, count in Counter(model.layers).items())


def packed_parts(model: Model, spec: CacheSpec, batch: int, tokens: int, item_bytes: int = 2) -> dict[str, int]:
    """`cache.nbytes`, by the parts of `cache.report()`, after a prompt of `tokens` tokens for each sequence, on a CPU.

    item_bytes: bytes of a number of the model's dtype. On CUDA a layer has 8 bytes more. A cache that has grown token
    by token holds up to 1/64 more pages. Two results are not exact: a model's wave may need fewer pairs than are
    counted, and with a budget and sliding windows every layer counts as the mean, because only a calibration knows
    which layers get more bits.
    NotImplementedError for a model whose packed cache is not counted.
    """
    if model.refused:
        raise NotImplementedError(f"the packed cache of {model.name} is not counted: {model.refused}")
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
    """(layer, its spec, bytes of a packed token, how many of these there are)."""
    count = len(model.layers)
    found: Counter[tuple[Layer, CacheSpec]]
    found = Counter((one, spec.for_layer(i, count)) for i, one in enumerate(model.layers) if one.kind != "none")
    each = []
    for (one, layer_spec), same in found.items():
        layers = 1 if spec.budget is None else found.total()
        each.append((one, layer_spec, layer_spec.bytes_per_token(one.head_dim, one.kv_heads, layers) / layers, same))
    return each


def _layer_parts(
    layer: Layer, spec: CacheSpec, per_token: float, batch: int, tokens: int, item_bytes: int
) -> Iterator[tuple[str, float]]:
    heads, channels = layer.kv_heads, layer.head_dim
    rows = _page_rows(layer, spec, tokens)
    pages = batch * rows
    if layer.window:  # pages that no query sees are freed once there are enough of them (`pages.PageTable.compact`)
        before = max(0, tokens - layer.window + 1 - PAGE_TOKENS) - spec.sinks
        free = batch * min(rows, max(0, before) // PAGE_TOKENS) if tokens > 1 else 0
        pages -= free if free > pages // 64 + batch else 0
    yield "pages", pages * PAGE_TOKENS * per_token
    yield "block_table", 4 * batch * rows
    for part, need, most in (("sinks", min(tokens, spec.sinks), spec.sinks),
                             ("window", min(max(0, tokens - spec.sinks), spec.window), spec.window)):  # fmt: skip
        held = min(most, max(need, _EXACT_ROWS)) if need else 0
        yield part, 2 * batch * heads * held * channels * item_bytes
    yield "transforms", _moments_bytes(spec, heads, channels)
    yield "transforms", 4 * heads * sum(_calibrated_numbers(spec, side, channels) for side in _SIDES)
    if _has_own_matrices(spec):
        yield "transforms", 4 * heads * channels * _matrix_rows(spec, channels)


def _page_rows(layer: Layer, spec: CacheSpec, tokens: int) -> int:
    """Pages of one sequence, those that fell out of a window included."""
    return -(-max(0, tokens - spec.sinks - spec.window) // PAGE_TOKENS)


def _moments_bytes(spec: CacheSpec, heads: int, channels: int) -> int:
    """Bytes of a layer's wave, with all its pairs, and of its metric (`kvcache.transforms`)."""
    pairs = PAIR_MULTIPLE * -(-channels // (2 * PAIR_MULTIPLE)) if spec.centre == "wave" else 0
    plan = Plan(channels, 1, wave_pairs=pairs, metric=MAX_RANK if spec.metric == "query" else None)
    return 4 * (3 * pairs + heads * plan.key_moments)


def _calibrated_numbers(spec: CacheSpec, side: str, channels: int) -> int:
    """How many float32 numbers of a KV head a side takes from a calibration, beside matrices."""
    numbers, steps = 0, 0
    if spec.rotation == "calibrated":
        steps = -(-channels // spec.group)
    if getattr(spec, f"{side}_levels") == "table":
        steps = 8 + (side == "key" and spec.sketch == "sign")
    if spec.centre == "calibrated":
        numbers += channels
    return numbers + steps + -steps % 4


def _has_own_matrices(spec: CacheSpec) -> bool:
    """Whether each layer and head has matrices of its own, for one side at least."""
    return any(is_split(spec, side) or spec.rotation_of(side) in ("svd", "calibrated") for side in _SIDES)


def _matrix_rows(spec: CacheSpec, channels: int) -> int:
    """Rows of the matrices of both sides."""
    kinds = ("dense", "svd", "calibrated")
    dense = [side for side in _SIDES if is_split(spec, side) or spec.rotation_of(side) in kinds]
    return len(dense) * channels + spec.sketch_rows(channels)


def _common_matrices(model: Model, spec: CacheSpec) -> Iterator[int]:
    """Bytes of the random matrices that all layers share (`kvcache.common`)."""
    seen = set()
    for one, layer_spec, _, _ in runs(model, spec):
        if not _has_own_matrices(layer_spec):
            rotations = tuple(layer_spec.rotation_of(side) for side in _SIDES)
            seen.add((layer_spec.seed, rotations, one.head_dim, _matrix_rows(layer_spec, one.head_dim)))
    yield from (4 * channels * rows for *_, channels, rows in seen)


def tokens_that_fit(size: Callable[[int], int], memory: int) -> int | None:
    """How many tokens of each sequence fit. size: the bytes for a number of tokens. None: no limit."""
    if size(1) > memory:
        return 0
    fits, too_many = 1, MOST_TOKENS
    if size(too_many) <= memory:
        return None
    while too_many - fits > 1:
        half = (fits + too_many) // 2
        fits, too_many = (half, too_many) if size(half) <= memory else (fits, half)
    return fits


# ---- time ----


def decode_seconds(
    model: Model, spec: CacheSpec | int, batch: int, tokens: int, gpu: str, item_bytes: int = 2
) -> float:
    """Estimate: attention of all layers in one decoding step, the rest of the step not counted.

    spec   a CacheSpec, or the bytes of a number of an unpacked cache
    A call takes as long as a measured call over as many bytes on this GPU: interpolated between two measurements, at
    the bandwidth of the largest one above it, and never less than the smallest one. A GPU that was not measured counts
    as an H100 with the bytes scaled by the ratio of bandwidths. NotImplementedError for a spec whose kernels were not
    timed.
    """
    column = "bf16" if isinstance(spec, int) else timed_as(spec)
    times = TIMES.get(gpu, TIMES["h100"])[column]
    scale = 1.0 if gpu in TIMES else GPUS["h100"] / GPUS[gpu]
    points = [TIMED_BYTES[column] * timed for timed in TIMED]
    reads = _reads(model, spec, batch, tokens, item_bytes)
    return 1e-6 * sum(count * _line(points, times, scale * read) for read, count in reads)


def bytes_read(model: Model, spec: CacheSpec | int, batch: int, tokens: int, item_bytes: int = 2) -> float:
    """Bytes that the attention of all layers reads in one decoding step; arguments are those of `decode_seconds`."""
    return sum(count * read for read, count in _reads(model, spec, batch, tokens, item_bytes))


def _reads(
    model: Model, spec: CacheSpec | int, batch: int, tokens: int, item_bytes: int
) -> Iterator[tuple[float, int]]:
    """(bytes that a layer's attention reads, how many such layers there are)."""
    if isinstance(spec, int):
        layers = Counter(one for one in model.layers if one.kind != "none")
        yield from ((spec * batch * one.reads(tokens), same) for one, same in layers.items())
        return
    for one, layer_spec, per_token, same in runs(model, spec):
        seen = min(tokens, one.window or tokens)
        exact = min(seen, layer_spec.sinks + layer_spec.window)
        yield batch * (exact * 2 * one.kv_heads * one.head_dim * item_bytes + (seen - exact) * per_token), same


def timed_as(spec: CacheSpec) -> str:
    """The column of TIMES whose kernel is nearest to that of a spec. NotImplementedError where none is.

    "mixed" was timed for groups of channels with different widths. Keys of one width and values of another count as
    their mean: they take at most 15 % longer (benchmarks/results/h200/attend_widths.json). A budget above 3 bits counts
    as mixed as well: it gives many sides 5 bits, which take longer than their bytes say.
    """
    bits = spec.settled().key_bits, spec.settled().value_bits
    if spec.blocked or (spec.budget is None and any(isinstance(b, int) and b > 5 for b in bits)):
        raise NotImplementedError("its kernels were not timed")
    if spec.budget is not None:
        mean = None if spec.method == "axes" or spec.budget > 3 else spec.budget
    else:
        mean = (bits[0] + bits[1]) / 2 if isinstance(bits[0], int) and isinstance(bits[1], int) else None
    return "mixed" if mean is None else str(min(4, max(2, ceil(mean))))


def _line(points: list[int], times: tuple[float, ...], at: float) -> float:
    """(points, times) interpolated at a place: constant before the first point, proportional beyond the last."""
    if at >= points[-1]:
        return times[-1] * at / points[-1]
    for i in range(1, len(points)):
        if at < points[i]:
            share = max(0.0, at - points[i - 1]) / (points[i] - points[i - 1])
            return times[i - 1] + share * (times[i] - times[i - 1])
    raise AssertionError


# ---- the command ----


def calc(chosen: argparse.Namespace) -> int:
    """Print a model's bytes. 1 if its packed cache is not counted, else 0."""
    if chosen.model is None:
        for name, row in MODELS.items():
            print(_from_row(name, row))
        return 0
    specs = {name: spec_named(name) for name in chosen.spec.split(",")}
    memory, gpu = _memory(chosen.memory), chosen.gpu.lower()
    if gpu not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, got {chosen.gpu!r}")
    model = read_model(chosen.model)
    print(model)
    sequences = f"{chosen.batch:,} sequence{'s' * (chosen.batch > 1)} of {chosen.context:,} tokens"
    print(f"{sequences}, sinks and window in {chosen.dtype}\n")
    _print_table(model, {} if model.refused else specs, chosen, memory, gpu)
    if model.refused:
        print(f"\nA packed cache of it is not counted: {model.refused}.")
    return 1 if model.refused else 0


def spec_named(name: str) -> CacheSpec:
    """A preset, or "default" with this number of bits. ValueError for any other name."""
    try:
        bits = float(name)
    except ValueError:
        return named(name, "--spec")
    return of_bits(bits, "--spec")


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B)", text.strip().upper())
    size = int(Decimal(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else 0
    if not size:
        raise ValueError(f"--memory must be a size above 0 such as 40GB or 512MiB, got {text!r}")
    return size


def _print_table(
    model: Model, specs: dict[str, CacheSpec], chosen: argparse.Namespace, memory: int | None, gpu: str
) -> None:
    batch, context, item_bytes = chosen.batch, chosen.context, ITEM_BYTES[chosen.dtype]
    bf16 = full_bytes(model, batch, context, 2)
    fit = [] if memory is None else [f"tokens in {chosen.memory.strip()}"]
    step = f"step, {gpu.upper()}{'' if gpu in TIMES else ' (guess)'}"
    rows = [["", "bytes", "GiB", "to bf16", *fit, step]]

    def line(name: str, size: Callable[[int], int], spec: CacheSpec | int) -> None:
        held = size(context)
        tokens = [] if memory is None else [_count(tokens_that_fit(size, memory))]
        try:
            seconds = decode_seconds(model, spec, batch, context, gpu, item_bytes)
            share = bytes_read(model, spec, batch, context, item_bytes) / seconds / GPUS[gpu]
            time = f"{1e3 * seconds:,.3f} ms, {share:4.0%}"
        except NotImplementedError:
            time = "not timed"
        rows.append([name, f"{held:,}", f"{held / 2**30:,.3f}", f"{bf16 / held:.2f}x", *tokens, time])

    for name, bytes_ in FULL.items():
        line(name, lambda n, bytes_=bytes_: full_bytes(model, batch, n, bytes_), bytes_)  # type: ignore[misc]
    for name, spec in specs.items():
        line(name, lambda n, spec=spec: sum(packed_parts(model, spec, batch, n, item_bytes).values()), spec)  # type: ignore[misc]
    how = "as measured" if gpu in TIMES else "a guess from an H100 and the bandwidths"
    print(table(rows))
    print("\nBytes are those of the cache alone. A step is an estimate without weights and the rest of the model:\n"
          f"attention of all layers, {how}, and its share of the {GPUS[gpu] / 1e12:.2f} TB/s that the GPU reads.\n"
          "fp32 and fp8 are timed as bf16 over their bytes.")  # fmt: skip


def _count(tokens: int | None) -> str:
    return "no limit" if tokens is None else f"{tokens:,}"
