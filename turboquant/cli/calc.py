"""``turboquant calc``: bytes of a model's cache, tokens that fit into a memory, and an estimate of a decoding step.

No cache is made (`sizes`), and torch is not needed, unless the model is a folder or a file, which transformers reads.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import BOUNDS, bounded
from ..named_specs import named_or_bits
from ..plot import check_picture, lines
from ..sizes import (
    Model,
    bytes_of,
    full_bytes,
    layer_of,
    layers_of,
    no_decoder,
    not_packed,
    packed_parts,
    refused,
    runs,
    tokens_that_fit,
)
from ..spec import CacheSpec
from ..tables import table
from .calc_table import GPUS, ITEM_BYTES, MODELS, TIMED, TIMED_BYTES, TIMES, Row

__all__ = ["FULL", "bytes_read", "calc", "decode_seconds", "read_model", "timed_as"]

FULL = {"fp32": 4, "bf16": 2, "fp8": 1}  # bytes of a number in the caches that packed ones are compared with
DEFAULT_TOKENS = 32768

_LETTERS = {"f": "full", "s": "sliding", "c": "chunked", "n": "none", "m": "latent"}


# ---- models ----


def read_model(name: str) -> Model:
    """Returns a model of the table, by its short name or its name on the hub, or the model of a folder or config.json.

    ValueError for anything else; ImportError for a folder or file if transformers is missing.
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
        layers.append(layer_of(kind, kv_heads, head_dim, row.window, i >= row.layers - row.shared))
    return Model(name, row.source, tuple(layers), refused(layers))


def _from_file(path: str) -> Model:
    """Returns the decoder of a configuration. `turboquant.patch` decides whether it can be packed."""
    from transformers import AutoConfig

    from ..models.families import family_of

    try:
        file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
        _check_integers(json.loads(file.read_text(encoding="utf-8")))
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"MODEL must be a folder with a config.json, or such a file, got {path!r}: {said}") from None
    if getattr(config, "is_encoder_decoder", False) or family_of(config).proteins:
        raise no_decoder(config, path)
    text = config.get_text_config(decoder=True)
    layers = layers_of(text, path)
    return Model(Path(path).resolve().name, path, layers, _refused_by_patch(text) or refused(layers))


def _check_integers(config: Any) -> None:
    """Checks the integers of a parsed config.json, at any depth, that transformers and calc compute sizes from."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            _check_integers(value)
        elif f"config.json: `{name}`" in BOUNDS and not isinstance(value, list | None):
            bounded(f"config.json: `{name}`", value)


def _refused_by_patch(text: Any) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    from ..patching import check

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
        check(model, "default")
    except (NotImplementedError, ValueError, KeyError, RuntimeError, ImportError) as error:
        return str(error).strip().partition("\n")[0].partition("cannot be patched: ")[2] or str(error)
    return ""


# ---- time ----


def decode_seconds(
    model: Model, spec: CacheSpec | int, batch: int, tokens: int, gpu: str, item_bytes: int = 2
) -> float:
    """Estimates the time of attention in all layers of one decoding step. The rest of the step is not counted.

    spec   a CacheSpec, or the bytes of a number of an unpacked cache
    A call takes as long as a measured call over as many bytes on this GPU. Between two measurements the time is
    interpolated; above the largest the bandwidth of that one counts; below the smallest its time. A GPU that was not
    measured counts as an H100 with the bytes scaled by the ratio of bandwidths. NotImplementedError for a spec whose
    kernels were not timed.
    """
    column = "bf16" if isinstance(spec, int) else timed_as(spec)
    times = TIMES.get(gpu, TIMES["h100"])[column]
    scale = 1.0 if gpu in TIMES else GPUS["h100"] / GPUS[gpu]
    points = [TIMED_BYTES[column] * timed for timed in TIMED]
    reads = _reads(model, spec, batch, tokens, item_bytes)
    return 1e-6 * sum(count * _line(points, times, scale * read) for read, count in reads)


def bytes_read(model: Model, spec: CacheSpec | int, batch: int, tokens: int, item_bytes: int = 2) -> float:
    """Returns the bytes that attention reads in all layers of one decoding step. Arguments as in `decode_seconds`."""
    return sum(count * read for read, count in _reads(model, spec, batch, tokens, item_bytes))


def _reads(
    model: Model, spec: CacheSpec | int, batch: int, tokens: int, item_bytes: int
) -> Iterator[tuple[float, int]]:
    """Yields (bytes that a layer's attention reads, how many such layers there are)."""
    if isinstance(spec, int):
        layers = Counter(one for one in model.layers if one.kind != "none")
        yield from ((spec * batch * one.reads(tokens), same) for one, same in layers.items())
        return
    for one, layer_spec, per_token, same in runs(model, spec):
        seen = min(tokens, one.window or tokens)
        exact = min(seen, layer_spec.sinks + layer_spec.window)
        yield batch * (exact * 2 * one.kv_heads * one.head_dim * item_bytes + (seen - exact) * per_token), same


def timed_as(spec: CacheSpec) -> str:
    """Returns the column of TIMES whose kernel is nearest to that of a spec. NotImplementedError if none is.

    "mixed" was timed for groups of channels with different widths. Keys of one width and values of another count as
    their mean: they take at most 18 % longer (benchmarks/results/h200/attend_widths.json). A budget above 3 bits counts
    as mixed too: it gives many sides 5 bits, which take longer than their bytes say.
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
    """Interpolates (points, times) at a place: constant before the first point, proportional beyond the last."""
    if at >= points[-1]:
        return times[-1] * at / points[-1]
    return float(np.interp(at, points, times))


# ---- the command ----


def calc(chosen: argparse.Namespace) -> int:
    """Print a model's bytes. Returns 1 if its packed cache is not counted, else 0."""
    if chosen.model is None:
        for name, row in MODELS.items():
            print(_from_row(name, row))
        return 0
    specs = {name: named_or_bits(name, "--spec") for name in chosen.spec.split(",")}
    asked = chosen.tokens
    chosen.tokens = DEFAULT_TOKENS if asked is None else asked
    memory = None if chosen.memory is None else bytes_of(chosen.memory, "--memory")
    gpu = chosen.gpu.lower()
    if gpu not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, got {chosen.gpu!r}")
    model = read_model(chosen.model)
    if chosen.plot:
        check_picture(chosen.plot, "--plot")
    budget = chosen.profile is not None or chosen.quality is not None
    bits = _budget(model, chosen, asked, memory) if budget and not model.refused else ""
    print(model)
    sequences = f"{chosen.batch:,} sequence{'s' * (chosen.batch > 1)} of {chosen.tokens:,} tokens"
    print(f"{sequences}, sinks and window in {chosen.dtype}\n")
    unfit = {name: why for name, spec in specs.items() if (why := not_packed(model, spec))}
    specs = {name: spec for name, spec in specs.items() if name not in unfit}
    _print_table(model, specs, chosen, memory, gpu)
    if chosen.plot:
        _plot(model, specs, chosen)
    if bits:
        print(f"\n{bits}")
    for why in dict.fromkeys(unfit.values()):
        names = ", ".join(name for name in unfit if unfit[name] == why)
        print(f"\nIts cache packed by {names} is not counted: {why}.")
    return 1 if unfit else 0


def _budget(model: Model, chosen: argparse.Namespace, tokens: int | None, memory: int | None) -> str:
    """Returns a line with the bits that two of --tokens, --memory and --quality choose."""
    from ..measured import Profile
    from ..measured.budget import solve

    if chosen.profile is None:
        raise ValueError("--profile must be a file of `turboquant measure` where --quality is given, got none")
    limits = {"--tokens": tokens, "--memory": chosen.memory, "--quality": chosen.quality}
    if sum(value is not None for value in limits.values()) != 2:
        named = ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None) or "none"
        raise ValueError(f"two of --tokens, --memory and --quality must be given with --profile, got {named}")
    profile = Profile.of(chosen.profile)
    packed = [one for one in model.layers if one.kind != "none"]
    if len(profile.layers) != len(packed):
        raise ValueError(f"--profile must be of this model, which has {len(packed)} layers with keys, got one of "
                         f"{len(profile.layers)}")  # fmt: skip
    for i, (one, measured) in enumerate(zip(packed, profile.moments.layers)):
        if measured.centre.shape != (one.kv_heads, one.head_dim):
            shape = f"{measured.centre.shape[0]} of {measured.centre.shape[1]}"
            raise ValueError(f"--profile must be of this model, whose layer {i} has {one.kv_heads} KV heads of "
                             f"{one.head_dim} channels, got one with {shape}")  # fmt: skip
    try:
        chosen_bits = solve(model, CacheSpec(), profile.moments, tokens=tokens, quality=chosen.quality,
                            memory=None if memory is None else memory // chosen.batch,
                            item_bytes=ITEM_BYTES[chosen.dtype])  # fmt: skip
    except ValueError as error:
        said = str(error).replace("`memory`", "--memory").replace("`quality`", "--quality")
        raise ValueError(f"{said} (for each of {chosen.batch} sequences)") from None
    return f"Bits by layer and side for each sequence: {chosen_bits}."


def _print_table(
    model: Model, specs: dict[str, CacheSpec], chosen: argparse.Namespace, memory: int | None, gpu: str
) -> None:
    batch, tokens, item_bytes = chosen.batch, chosen.tokens, ITEM_BYTES[chosen.dtype]
    bf16 = full_bytes(model, batch, tokens, 2)
    fit = [] if memory is None else [f"tokens in {chosen.memory.strip()}"]
    step = f"step, {gpu.upper()}{'' if gpu in TIMES else ' (guess)'}"
    rows = [["", "bytes", "GiB", "to bf16", *fit, step]]

    def line(name: str, size: Callable[[int], int], spec: CacheSpec | int) -> None:
        nbytes = size(tokens)
        most = [] if memory is None else [_count(tokens_that_fit(size, memory))]
        try:
            seconds = decode_seconds(model, spec, batch, tokens, gpu, item_bytes)
            share = bytes_read(model, spec, batch, tokens, item_bytes) / seconds / GPUS[gpu]
            time = f"{1e3 * seconds:,.3f} ms, {share:4.0%}"
        except NotImplementedError:
            time = "not timed"
        rows.append([name, f"{nbytes:,}", f"{nbytes / 2**30:,.3f}", f"{bf16 / nbytes:.2f}x", *most, time])

    for name, bytes_ in FULL.items():
        line(name, lambda n, bytes_=bytes_: full_bytes(model, batch, n, bytes_), bytes_)  # type: ignore[misc]
    for name, spec in specs.items():
        line(name, lambda n, spec=spec: sum(packed_parts(model, spec, batch, n, item_bytes).values()), spec)  # type: ignore[misc]
    how = "as measured" if gpu in TIMES else "a guess from an H100 and the bandwidths"
    print(table(rows))
    print("\nBytes are those of the cache alone. A step is an estimate without weights and the rest of the model:\n"
          f"attention of all layers, {how}, and its share of the {GPUS[gpu] / 1e12:.2f} TB/s that the GPU reads.\n"
          "fp32 and fp8 are timed as bf16 over their bytes.")  # fmt: skip


def _plot(model: Model, specs: dict[str, CacheSpec], chosen: argparse.Namespace) -> None:
    """Plots GiB of the cache by tokens of each sequence, from a 64th of `--tokens` on."""
    at = sorted({max(1, chosen.tokens >> i) for i in range(7)})
    sizes = {name: [full_bytes(model, chosen.batch, n, bytes_) for n in at] for name, bytes_ in FULL.items()}
    sizes |= {name: [sum(packed_parts(model, spec, chosen.batch, n, ITEM_BYTES[chosen.dtype]).values()) for n in at]
              for name, spec in specs.items()}  # fmt: skip
    gib = {name: [size / 2**30 for size in each] for name, each in sizes.items()}
    lines(chosen.plot, at, gib, f"tokens of each of {chosen.batch:,} sequences", f"GiB, {model.name}")


def _count(tokens: int | None) -> str:
    return "no limit" if tokens is None else f"{tokens:,}"
