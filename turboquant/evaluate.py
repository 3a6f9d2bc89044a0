"""`evaluate`: what a spec costs in quality and what it holds in bytes, measured on text through the packed path itself.

The model runs twice over each window: alone, and with a `TurboQuantCache` from whose packed bytes every query reads
every key and value, its own token's included (the spec's `prefill` is "packed" here, whatever it says). Divergence is
that of the next token's distribution from the model's own. Nothing is simulated: what is measured is what is stored.

Unless asked for, no token stays exact: `sinks` and `window` are 0, because a window of 128 hides most of what a scheme
does to short texts. `str` of a result, and the table of `turboquant eval`, say which it was.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from .cache import TurboQuantCache, checked_config
from .calibration import Calibration, layer_specs
from .calibration.measure import checked_seed, fingerprint, token_divergence, token_ids
from .names import CACHE, cache_argument
from .patch import patch, unpatch
from .placement import device_of
from .presets import resolve
from .spec import CacheSpec

__all__ = [
    "Evaluation",
    "Recall",
    "evaluate",
    "evaluate_all",
    "markdown",
    "recall",
    "recall_all",
    "recall_table",
    "text_windows",
]

PREFILLS = ("packed", "chunked", "decode")
_PER_TOKEN = ("pages", "sinks", "window")  # parts of a cache that grow with it, or hold its tokens

AnyCalibration = Calibration | str | os.PathLike[str] | None


@dataclass(frozen=True)
class Evaluation:
    """What was measured for one spec. Divergences are Kullback-Leibler, of the next token's distribution, in nats.

    spec            as evaluated: with the sinks and window that it was run with
    prefill         how tokens were fed: "packed" (one forward), "chunked" or "decode" (one by one)
    windows, length   how many texts of how many tokens
    kl_divergence, kl_divergence_p99, kl_divergence_max   over tokens: mean, 99th percentile, largest
    perplexity, reference_perplexity   of the text, with the packed cache and without
    top1_agreement  share of tokens after which both call the same one likeliest, 0..1
    bytes_per_token  measured on the cache: pages, sinks and window over the tokens held; all layers and heads
    effective_bits  the same per number
    fixed_bytes     what the cache holds beside: tables, lengths, centres, rotations, calibration
    """

    spec: CacheSpec
    prefill: str
    windows: int
    length: int
    kl_divergence: float
    kl_divergence_p99: float
    kl_divergence_max: float
    perplexity: float
    reference_perplexity: float
    top1_agreement: float
    bytes_per_token: float
    effective_bits: float
    fixed_bytes: int

    def metrics(self) -> dict[str, float]:
        """The numbers by name, as `turboquant eval --json` and benchmarks write them."""
        names = ("kl_divergence", "kl_divergence_p99", "kl_divergence_max", "perplexity", "reference_perplexity",
                 "top1_agreement", "effective_bits", "bytes_per_token", "fixed_bytes")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def exact(self) -> str:
        """Which tokens were not packed, in words."""
        kept = [f"{n} {what}" for n, what in ((self.spec.sinks, "sinks"), (self.spec.window, "window")) if n]
        if self.spec.overrides:
            kept.append("overrides by layer")
        return f"exact: {', '.join(kept)}" if kept else "everything packed"

    def __str__(self) -> str:
        return (
            f"KL divergence {self.kl_divergence:.5f} (99 %: {self.kl_divergence_p99:.4f}, max "
            f"{self.kl_divergence_max:.3f}), perplexity {self.perplexity:.3f} (full cache "
            f"{self.reference_perplexity:.3f}), top-1 agreement {self.top1_agreement:.4f}, "
            f"{self.effective_bits:.3f} bits per number; {self.windows} x {self.length} tokens, "
            f"{self.exact}, prefill {self.prefill}"
        )


def evaluate(
    model: Any,
    windows: torch.Tensor,
    spec: CacheSpec | str,
    *,
    calibration: AnyCalibration = None,
    prefill: str = "packed",
    sinks: int | None = 0,
    window: int | None = 0,
    chunk: int = 128,
    batch: int = 1,
    progress: bool = False,
) -> Evaluation:
    """Quality and bytes of one spec; see `Evaluation`.

    model    as `turboquant.patch` takes it, patched or not; it is left as it was. float32 measures the cache alone.
    windows  token ids [windows, tokens] of any integer dtype, each a text of its own (`text_windows`); at least 2
             tokens.
    spec     a CacheSpec or the name of a preset;  calibration  for a spec that uses one.
    prefill  "packed": one forward; "chunked": `chunk` tokens at a time; "decode": one by one. They agree to rounding: a
             cache whose centre comes from the prompt gets its first `centre_tokens` in one forward in all three.
    sinks, window   replace those of the spec; None: the spec's own.
    batch    windows that run together.

    Raises what `turboquant.patch` and `TurboQuantCache` raise, and ValueError or TypeError that names the argument: all
    before anything is run.
    """
    given = {"spec": spec}
    found = evaluate_all(model, windows, given, calibration=calibration, prefill=prefill, sinks=sinks, window=window,
                         chunk=chunk, batch=batch, progress=progress)  # fmt: skip
    return found["spec"]


def evaluate_all(
    model: Any,
    windows: torch.Tensor,
    specs: Mapping[str, CacheSpec | str],
    *,
    calibration: AnyCalibration = None,
    prefill: str = "packed",
    sinks: int | None = 0,
    window: int | None = 0,
    chunk: int = 128,
    batch: int = 1,
    progress: bool = False,
) -> dict[str, Evaluation]:
    """`evaluate` for several specs by any name; the model alone runs once for all. Those that use no calibration get
    none."""
    if prefill not in PREFILLS:
        raise ValueError(f"`prefill` must be one of {', '.join(PREFILLS)}, got {prefill!r}")
    for name, number in (("chunk", chunk), ("batch", batch)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}")
    windows = _checked(windows)
    changed = {name: value for name, value in (("sinks", sinks), ("window", window)) if value is not None}
    chosen = {name: resolve(spec).with_(prefill="packed", **changed) for name, spec in specs.items()}
    with _ready(model, chosen, calibration) as caches:
        tallies = {name: _Tally() for name in chosen}
        steps = [(start, name) for start in range(0, len(windows), batch) for name in ("", *chosen)]
        reference = None
        for start, name in _shown(steps, progress):
            ids = windows[start : start + batch].to(device_of(model))
            if not name:
                reference = None  # the one of the last windows goes before another is made
                reference = model(input_ids=ids, use_cache=False).logits
                continue
            cache = caches(name)
            logits = _run(model, ids, cache, _pieces(chosen[name], prefill, ids.shape[1], chunk))
            tallies[name].add(ids, reference, logits, cache)
    count, length = windows.shape
    return {name: tallies[name].result(spec, prefill, count, length) for name, spec in chosen.items()}


def _checked(windows: Any) -> torch.Tensor:
    ids = token_ids(windows, "`windows` must be token ids [windows, tokens]")
    if ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"`windows` must hold at least one window of two tokens, got shape {tuple(ids.shape)}")
    return ids


@contextmanager
def _ready(model: Any, specs: Mapping[str, CacheSpec], calibration: AnyCalibration) -> Iterator[Any]:
    """The model patched, in eval mode and without gradients, and as it was afterwards; yields name -> new cache."""
    found = None if calibration is None else Calibration.of(calibration)
    text = checked_config(model.config)
    used: dict[str, Calibration | None] = {}
    for name, spec in specs.items():
        each = [spec.for_layer(i, text.num_hidden_layers) for i in range(text.num_hidden_layers)]
        used[name] = found if any(s.calibrated for s in each) else None
        layer_specs(spec, used[name], text.num_hidden_layers)
    if found is not None:
        found.check(fingerprint(model))

    def new_cache(name: str) -> TurboQuantCache:
        cache = TurboQuantCache(model, specs[name], used[name])
        cache.compared_with = model._turboquant.spec  # one patched model serves all specs: no warning
        return cache

    was_patched, was_training = hasattr(model, "_turboquant"), model.training
    try:
        if not was_patched:
            for name, spec in specs.items():
                patch(model, spec, used[name])
        model.eval()
        with torch.no_grad():
            yield new_cache
    finally:
        model.train(was_training)
        if not was_patched:
            unpatch(model)


def _shown(steps: Sequence[Any], progress: bool) -> Iterator[Any]:
    if not progress:
        return iter(steps)
    from tqdm import tqdm

    return iter(tqdm(steps, unit="run", desc="evaluate"))


def _pieces(spec: CacheSpec, prefill: str, tokens: int, chunk: int) -> list[tuple[int, int]]:
    """(start, stop) of each forward."""
    size = {"packed": tokens, "chunked": chunk, "decode": 1}[prefill]
    each = [{"centre": spec.centre, "outliers": spec.outliers}, *(dict(changed) for _, changed in spec.overrides)]
    asks = any("prompt" in (fields.get("centre"), fields.get("outliers")) for fields in each)
    first = min(tokens, max(size, spec.centre_tokens if asks else 1))
    return [(0, first), *((start, min(start + size, tokens)) for start in range(first, tokens, size))]


def _run(model: Any, ids: torch.Tensor, cache: TurboQuantCache, pieces: list[tuple[int, int]]) -> torch.Tensor:
    """Logits [batch, tokens, vocabulary] of ids fed in pieces to an empty cache."""
    name = cache_argument(model.forward) or CACHE
    parts = [model(input_ids=ids[:, a:b], use_cache=True, **{name: cache}).logits for a, b in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _Tally:
    """Sums over windows."""

    def __init__(self) -> None:
        self.divergences: list[np.ndarray] = []
        self.losses: list[tuple[float, float]] = []
        self.same = self.tokens = self.targets = self.numbers = self.moving = self.fixed = 0

    def add(self, ids: torch.Tensor, reference: Any, logits: torch.Tensor, cache: TurboQuantCache) -> None:
        reference = reference.to(logits.device)
        self.divergences.append(token_divergence(reference, logits).cpu().double().numpy().reshape(-1))
        self.losses.append((_loss(reference, ids), _loss(logits, ids)))
        self.targets += ids.shape[0] * (ids.shape[1] - 1)
        self.same += int((reference.argmax(-1) == logits.argmax(-1)).sum())
        report = cache.report()
        moving = sum(size for part, size in report.parts.items() if part in _PER_TOKEN)
        self.moving += moving
        self.fixed = max(self.fixed, cache.nbytes - moving)
        self.tokens += report.layers[0].tokens
        self.numbers += report.numbers

    def result(self, spec: CacheSpec, prefill: str, windows: int, length: int) -> Evaluation:
        divergence = np.concatenate(self.divergences)
        plain, packed = (sum(loss[i] for loss in self.losses) / self.targets for i in range(2))
        return Evaluation(
            spec=spec,
            prefill=prefill,
            windows=windows,
            length=length,
            kl_divergence=float(divergence.mean()),
            kl_divergence_p99=float(np.quantile(divergence, 0.99)),
            kl_divergence_max=float(divergence.max()),
            perplexity=math.exp(packed),
            reference_perplexity=math.exp(plain),
            top1_agreement=self.same / len(divergence),
            bytes_per_token=self.moving / self.tokens,
            effective_bits=8 * self.moving / self.numbers,
            fixed_bytes=self.fixed,
        )


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Sum over tokens of the negative log-likelihood of the next one, nats; a window at a time, for the memory."""
    total = 0.0
    for row, text in zip(logits, ids.to(logits.device)):
        total += float(torch.nn.functional.cross_entropy(row[:-1].float(), text[1:], reduction="sum"))
    return total


def text_windows(text: str, tokenizer: Any, windows: int, length: int) -> torch.Tensor:
    """Token ids [windows, length], int64 on the CPU: windows spaced evenly over the whole text, without overlap.

    ValueError if the text has fewer tokens than that; the message says how many windows it has.
    """
    for name, number, least in (("windows", windows, 1), ("length", length, 2)):
        if number < least:
            raise ValueError(f"`{name}` must be at least {least}, got {number}")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < windows * length:
        raise ValueError(f"`text` must have {windows} x {length} tokens, got {len(ids)}: "
                         f"{len(ids) // length} windows of that length")  # fmt: skip
    starts = [i * (len(ids) - length) // max(windows - 1, 1) for i in range(windows)]
    return torch.tensor([ids[start : start + length] for start in starts], dtype=torch.int64, device="cpu")


def markdown(found: Mapping[str, Evaluation]) -> str:
    """A table of results, and below it how they were measured."""
    head = ("spec", "KL divergence", "99 %", "max", "perplexity", "top-1 agreement", "bits", "bytes per token")
    rows = [head, ("---", *["---:"] * (len(head) - 1))]
    for name, e in found.items():
        rows.append((name, f"{e.kl_divergence:.5f}", f"{e.kl_divergence_p99:.4f}", f"{e.kl_divergence_max:.3f}",
                     f"{e.perplexity:.3f}", f"{e.top1_agreement:.4f}", f"{e.effective_bits:.3f}",
                     f"{e.bytes_per_token:,.0f}"))  # fmt: skip
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = dict.fromkeys(f"{e.windows} x {e.length} tokens, {e.exact}, prefill {e.prefill}; perplexity with the full "
                          f"cache {e.reference_perplexity:.3f}" for e in found.values())  # fmt: skip
    return "\n".join([*lines, "", *(f"{note}." for note in notes)])


# ---- recall: a needle in a haystack ----


@dataclass(frozen=True)
class Recall:
    """How well a passage is copied from where it stood. Of the tokens to copy, over all windows:

    accuracy, reference_accuracy   share whose right one is called likeliest, with the packed cache and without
    log_likelihood, reference_log_likelihood   mean, nats per token
    unplanted_accuracy, unplanted_log_likelihood   without the packed cache and without the passage in the text: what
            the model can guess. Where the reference is no better, it cannot copy, and nothing was measured.
    """

    length: int
    depth: float
    accuracy: float
    log_likelihood: float
    reference_accuracy: float
    reference_log_likelihood: float
    unplanted_accuracy: float
    unplanted_log_likelihood: float


def recall(
    model: Any,
    windows: torch.Tensor,
    spec: CacheSpec | str,
    *,
    calibration: AnyCalibration = None,
    lengths: Sequence[int] = (512, 1024, 2048),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    needle: int = 32,
    cue: int = 16,
    sinks: int | None = 0,
    window: int | None = 0,
    batch: int = 1,
    seed: int = 0,
) -> list[Recall]:
    """Needle in a haystack, for any model: a passage of another window is put into text at a depth (0: the start, 1:
    the end), the text closes with the passage's first `cue` tokens, and the model has to go on with the rest of it.
    That is copying, which small models have learnt as well; how well they do it without packing is in the result.

    windows  token ids [windows, tokens >= the largest length], the haystacks, at least two.
    lengths  tokens of a whole sequence.
    needle, cue   tokens of the passage, and of these how many are shown at the end.
    seed     0..2**63 - 1, of where passages start.
    Others as in `evaluate`.  Returns one result per length and depth.
    """
    given = {"spec": spec}
    found = recall_all(model, windows, given, calibration=calibration, lengths=lengths, depths=depths, needle=needle,
                       cue=cue, sinks=sinks, window=window, batch=batch, seed=seed)  # fmt: skip
    return found["spec"]


def recall_all(
    model: Any,
    windows: torch.Tensor,
    specs: Mapping[str, CacheSpec | str],
    *,
    calibration: AnyCalibration = None,
    lengths: Sequence[int] = (512, 1024, 2048),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    needle: int = 32,
    cue: int = 16,
    sinks: int | None = 0,
    window: int | None = 0,
    batch: int = 1,
    seed: int = 0,
) -> dict[str, list[Recall]]:
    """`recall` for several specs by any name; the model alone runs once for all."""
    windows = _checked(windows).cpu()
    if len(windows) < 2:
        raise ValueError("`windows` must hold at least two windows, passages come from another one: got 1")
    if not 1 <= cue < needle:
        raise ValueError(f"`cue` must be in 1..{needle - 1}, got {cue}")
    for length in lengths:
        if not 3 * needle <= length <= windows.shape[1]:
            raise ValueError(
                f"`lengths` must be in {3 * needle}..{windows.shape[1]}, what `windows` hold, got {length}"
            )
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"`depths` must be in 0..1, got {list(depths)}")
    if batch < 1:
        raise ValueError(f"`batch` must be at least 1, got {batch}")
    changed = {name: value for name, value in (("sinks", sinks), ("window", window)) if value is not None}
    chosen = {name: resolve(spec).with_(prefill="packed", **changed) for name, spec in specs.items()}
    needles, device = _needles(windows, needle, checked_seed(seed)), device_of(model)
    scores: dict[tuple[str, int, float], list[tuple[float, ...]]] = {
        (name, length, depth): [] for name in chosen for length in lengths for depth in depths
    }
    with _ready(model, chosen, calibration) as caches:
        for length, start in ((length, start) for length in lengths for start in range(0, len(windows), batch)):
            rows = slice(start, start + batch)
            text, passages, asked = windows[rows], needles[rows], needles[rows, cue:]
            ids = _haystacks(text, passages, length, None).to(device)
            guessed = _copied(model(input_ids=ids, use_cache=False).logits, asked)
            for depth in depths:
                ids = _haystacks(text, passages, length, depth).to(device)
                plain = _copied(model(input_ids=ids, use_cache=False).logits, asked)
                for name in chosen:
                    packed = _copied(_run(model, ids, caches(name), [(0, length)]), asked)
                    scores[name, length, depth] += zip(*packed, *plain, *guessed)
    results: dict[str, list[Recall]] = {name: [] for name in chosen}
    for (name, length, depth), each in scores.items():
        results[name].append(Recall(length, depth, *(sum(column) / len(each) for column in zip(*each))))
    return results


def _needles(windows: torch.Tensor, tokens: int, seed: int) -> torch.Tensor:
    """[windows, tokens]: for each window, all on the CPU, a passage of the next one, the same for all lengths and
    depths."""
    generator, most = torch.Generator("cpu").manual_seed(seed), windows.shape[1] - tokens
    starts = torch.randint(most + 1, (len(windows), 1), generator=generator, device="cpu")
    return windows.roll(-1, 0).gather(1, starts + torch.arange(tokens, device="cpu"))


def _haystacks(text: torch.Tensor, needles: torch.Tensor, length: int, depth: float | None) -> torch.Tensor:
    """[rows, length]: text that ends with the needle, which also stands at `depth`; None: nowhere else."""
    hay = length - needles.shape[1]
    if depth is None:
        return torch.cat([text[:, :hay], needles], 1)
    hay -= needles.shape[1]
    at = round(depth * hay)
    return torch.cat([text[:, :at], needles, text[:, at:hay], needles], 1)


def recall_table(found: Sequence[Recall]) -> str:
    """Accuracies as a Markdown table of depth (rows) by length (columns), each with that of the full cache after a
    slash, and with what the model guesses without the passage in brackets."""
    lengths, depths = sorted({one.length for one in found}), sorted({one.depth for one in found})
    at = {(one.depth, one.length): one for one in found}
    lines = [f"| depth | {' | '.join(f'{n:,} tokens' for n in lengths)} |", f"| ---: |{' ---: |' * len(lengths)}"]
    for depth in depths:
        cells = [f"{one.accuracy:.2f} / {one.reference_accuracy:.2f} ({one.unplanted_accuracy:.2f})"
                 if (one := at.get((depth, n))) else "-" for n in lengths]  # fmt: skip
        lines.append(f"| {depth:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _copied(logits: torch.Tensor, right: torch.Tensor) -> tuple[list[float], list[float]]:
    """Of each sequence's last tokens, which are `right` [rows, count]: share called likeliest, mean log-likelihood."""
    right = right.to(logits.device)
    log_p = torch.log_softmax(logits[:, -right.shape[1] - 1 : -1].float(), -1)
    hit = (log_p.argmax(-1) == right).double().mean(1)
    return hit.tolist(), log_p.gather(-1, right[..., None]).double().mean((1, 2)).tolist()


class _CallableModule(ModuleType):
    """`turboquant.evaluate` is this module once something has imported it, and may be called all the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> Evaluation:
        return evaluate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
