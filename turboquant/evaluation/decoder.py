"""`evaluate` measures the quality and the bytes of a spec on text, through the packed path.

The model runs twice over each window: alone, and with a `TurboQuantCache`. With the cache every query reads stored keys
and values, also those of its own token (`prefill="packed"`, whatever the spec says). Divergence is that of the next
token's distribution from the model's own.

Then both continue the first half of each window greedily, and the tokens until the texts differ are counted. Here every
field of the spec holds, `prefill` too.

A spec is measured with its sinks and its window. A window of 128 exact tokens hides most effects on short texts:
``everything_packed=True`` measures without it. `str` of a result and the table of `turboquant eval` say which it was.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ..arguments import bounded, quoted
from ..hf.cache import TurboQuantCache
from ..hf.notices import quiet
from ..hf.patching import llama
from ..hf.refusals import checked_config
from ..measured import Profile, used_by
from ..models.identity import fingerprint
from ..models.kinds import kinds_of, packed_indices
from ..models.names import CACHE, cache_argument
from ..models.outputs import token_divergence
from ..models.placement import device_of
from ..models.routing import evaluating
from ..models.tokens import check_vocabulary, token_ids
from ..models.wrappers import checked_base_model
from ..named_specs import resolve
from ..progress import Progress, steps
from ..spec import CacheSpec
from ..tables import html, measures, table

__all__ = ["Evaluation", "FreeRunning", "divergence_from", "evaluate", "evaluate_all", "markdown", "text_windows"]

PREFILLS = ("packed", "chunked", "decode")
GENERATED = 1024  # the default of `generate`: the most tokens of a free-running text
AGREEMENTS = (64, 256, 1024)  # results say how many texts agree in this many first tokens
_PER_TOKEN = ("pages", "sinks", "window")  # parts of a cache that hold its tokens

AnyProfile = Profile | str | os.PathLike[str] | None


@dataclass(frozen=True)
class FreeRunning:
    """Greedy texts after the same prompts, with the full cache and with the packed one. They go on after an end token.

    prompt_tokens   tokens of each prompt: the first half of a window
    tokens          the most that are generated for each: as many as asked for, or as the model has positions
    equal           for each prompt, how many tokens the texts share before they part; `tokens` if they never did
    """

    prompt_tokens: int
    tokens: int
    equal: tuple[int, ...]

    @property
    def median(self) -> float:
        """Tokens until the texts part, median over prompts. Those that never part count as `tokens`."""
        return float(np.median(self.equal))

    def share(self, tokens: int) -> float | None:
        """Share of prompts whose first `tokens` tokens are all equal, 0..1. None: fewer were generated."""
        return None if tokens > self.tokens else sum(n >= tokens for n in self.equal) / len(self.equal)

    def metrics(self) -> dict[str, float]:
        """The numbers by name."""
        shares = {f"equal_{n}": self.share(n) for n in AGREEMENTS}
        return {"tokens_until_parted": self.median, **{name: x for name, x in shares.items() if x is not None}}

    def __str__(self) -> str:
        shares = [f"{x:.2f} of {n:,} tokens" for n in AGREEMENTS if (x := self.share(n)) is not None]
        alike = f", share of equal texts {', '.join(shares)}" if shares else ""
        return f"greedy texts part after {self.median:g} of {self.tokens:,} tokens (median){alike}"


@dataclass(frozen=True)
class Evaluation:
    """The results of one spec. Divergences are Kullback-Leibler, of the next token's distribution, in nats.

    spec            as evaluated: with the sinks and window that it was run with
    prefill         how tokens were fed: "packed" (one forward), "chunked" or "decode" (one by one)
    windows, length   how many texts of how many tokens
    kl_divergence, kl_divergence_p99, kl_divergence_p999, kl_divergence_max   over tokens: mean, 99th and 99.9th
                    percentile, largest
    perplexity, reference_perplexity   of the text, with the packed cache and without
    top1_agreement  share of tokens after which both have the same likeliest next token, 0..1
    bytes_per_token  measured on the cache: bytes of pages, sinks and window for each token, in all layers and heads
    effective_bits  bits per number, from the same bytes
    fixed_bytes     the cache's other bytes: tables, lengths, moments, rotations, calibration
    free_running    results of greedy texts; None if none was generated
    """

    spec: CacheSpec
    prefill: str
    windows: int
    length: int
    kl_divergence: float
    kl_divergence_p99: float
    kl_divergence_p999: float
    kl_divergence_max: float
    perplexity: float
    reference_perplexity: float
    top1_agreement: float
    bytes_per_token: float
    effective_bits: float
    fixed_bytes: int
    free_running: FreeRunning | None = None

    def metrics(self) -> dict[str, float]:
        """The numbers by name, as `turboquant eval --json` and benchmarks write them."""
        names = ("kl_divergence", "kl_divergence_p99", "kl_divergence_p999", "kl_divergence_max", "perplexity",
                 "reference_perplexity", "top1_agreement", "effective_bits", "bytes_per_token",
                 "fixed_bytes")  # fmt: skip
        free = {} if self.free_running is None else self.free_running.metrics()
        return {name: getattr(self, name) for name in names} | free

    def _repr_html_(self) -> str:
        about = f"{self.windows} x {self.length} tokens, {self.exact}, prefill {self.prefill}; {self.spec}"
        return html(measures(self.metrics()), notes=[about])

    @property
    def exact(self) -> str:
        """Which tokens were not packed, in words."""
        exact = [f"{n} {what}" for n, what in ((self.spec.sinks, "sinks"), (self.spec.window, "window")) if n]
        if self.spec.overrides:
            exact.append("overrides by layer")
        return f"exact: {', '.join(exact)}" if exact else "everything packed"

    def __str__(self) -> str:
        free = "" if self.free_running is None else f"{self.free_running}, "
        return (
            f"KL divergence {self.kl_divergence:.5f} (99 %: {self.kl_divergence_p99:.4f}, 99.9 %: "
            f"{self.kl_divergence_p999:.4f}, max {self.kl_divergence_max:.3f}), perplexity {self.perplexity:.3f} "
            f"(full cache {self.reference_perplexity:.3f}), top-1 agreement {self.top1_agreement:.4f}, {free}"
            f"{self.effective_bits:.3f} bits per number; {self.windows} x {self.length} tokens, "
            f"{self.exact}, prefill {self.prefill}"
        )


def evaluate(
    model: Any,
    windows: torch.Tensor,
    spec: CacheSpec | str,
    *,
    profile: AnyProfile = None,
    prefill: str = "packed",
    everything_packed: bool = False,
    generate: int = GENERATED,
    chunk: int = 128,
    batch: int = 1,
    progress: bool = False,
) -> Evaluation:
    """Measures quality and bytes of one spec; see `Evaluation`.

    model    as `turboquant.patch` takes it, patched or not; it is left as it was. In float32 only the cache errs.
    windows  token ids [windows, tokens] of any integer dtype, each a separate text (`text_windows`); at least 2 tokens.
    spec     a CacheSpec or the name of a preset;  profile  of the model, for a spec that uses one.
    prefill  "packed": one forward; "chunked": `chunk` tokens at a time; "decode": one by one. Results agree up to
             rounding: with `outliers="prompt"` all three run the first `outlier_tokens` tokens in one forward.
    everything_packed   without the spec's window, in any layer: all tokens but the sinks are packed.
    generate  the most tokens of each free-running text; 0: none. Generation stops when all texts of a batch have
             parted.
    batch    windows that run together.

    Before anything is run, raises what `turboquant.patch` and `TurboQuantCache` raise, and ValueError or TypeError that
    names the argument.
    """
    specs = {"spec": spec}
    results = evaluate_all(model, windows, specs, profile=profile, prefill=prefill, chunk=chunk, batch=batch,
                         everything_packed=everything_packed, generate=generate, progress=progress)  # fmt: skip
    return results["spec"]


def evaluate_all(
    model: Any,
    windows: torch.Tensor,
    specs: Mapping[str, CacheSpec | str],
    *,
    profile: AnyProfile = None,
    prefill: str = "packed",
    everything_packed: bool = False,
    generate: int = GENERATED,
    chunk: int = 128,
    batch: int = 1,
    progress: bool = False,
) -> dict[str, Evaluation]:
    """`evaluate` for several specs, under any names. The model alone runs once for all of them. Specs that use no
    profile get none."""
    if prefill not in PREFILLS:
        raise ValueError(f"`prefill` must be one of {', '.join(PREFILLS)}, got {prefill!r}")
    chunk, batch = bounded("evaluate: `chunk`", chunk), bounded("evaluate: `batch`", batch)
    generate = bounded("evaluate: `generate`", generate)
    checked_base_model(model)
    windows = _checked(windows, model)
    chosen = _chosen(specs, everything_packed)
    free: dict[str, FreeRunning] = {}
    with _ready(model, chosen, profile) as caches:
        tallies = {name: _Tally() for name in chosen}
        runs = [(start, name) for start in range(0, len(windows), batch) for name in (None, *chosen)]
        reference = None
        for start, name in steps(runs, "evaluate", "runs", progress):
            ids = windows[start : start + batch].to(device_of(model))
            if name is None:
                reference = None  # frees that of the last windows before the next is made
                reference = model(input_ids=ids, use_cache=False).logits
                continue
            cache = caches(name, "packed")
            logits = _run(model, ids, cache, _pieces(chosen[name], prefill, ids.shape[1], chunk))
            tallies[name].add(ids, reference, logits, cache)
        del reference
        if generate:
            free = _free_running(model, windows, chosen, caches, generate, batch, progress)
    measured = {name: spec.with_(prefill="packed") for name, spec in chosen.items()}
    return {name: tallies[name].result(spec, prefill, windows, free.get(name)) for name, spec in measured.items()}


def divergence_from(model: Any, ids: torch.Tensor, spec: CacheSpec | str, profile: Profile, start: int) -> float:
    """Returns the mean divergence of the next token after token `start` of a text and after each later one, as
    `evaluate` measures it. If the model can, it computes no other logits.  ids: [1, tokens]."""
    keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    asked: dict[str, Any] = {"logits_to_keep": ids.shape[1] - start} if keep else {}
    ids = ids.to(device_of(model))

    def logits(**cache: Any) -> torch.Tensor:
        at_ends: torch.Tensor = model(input_ids=ids, **asked, **cache).logits
        return at_ends[:, start - ids.shape[1] :]

    with _ready(model, {"": resolve(spec)}, profile) as caches:
        reference = logits(use_cache=False)
        packed = logits(use_cache=True, **{cache_argument(model.forward) or CACHE: caches("", "packed")})
        return float(token_divergence(reference, packed).double().mean())


def _chosen(specs: Mapping[str, CacheSpec | str], everything_packed: bool) -> dict[str, CacheSpec]:
    if not isinstance(specs, Mapping):
        raise TypeError(f"`specs` must be a mapping of names to specs, got {quoted(specs)}")
    chosen = {name: resolve(spec) for name, spec in specs.items()}
    return {name: _without_window(spec) if everything_packed else spec for name, spec in chosen.items()}


def _without_window(spec: CacheSpec) -> CacheSpec:
    layers = {layer: {**dict(fields), "window": 0} for layer, fields in spec.overrides}
    return spec.with_(window=0, **({"overrides": layers} if layers else {}))


def _checked(windows: Any, model: Any) -> torch.Tensor:
    ids = token_ids(windows, "`windows` must be token ids [windows, tokens]")
    if ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"`windows` must hold at least one window of two tokens, got shape {tuple(ids.shape)}")
    check_vocabulary(ids, model, "windows")
    return ids


@contextmanager
def _ready(model: Any, specs: Mapping[str, CacheSpec], profile: AnyProfile) -> Iterator[Any]:
    """Patches the model, in eval mode and without gradients, and restores it. Yields a function that makes a new cache
    for the spec of a name, with another `prefill` if one is given."""
    loaded = None if profile is None else Profile.of(profile)
    text = checked_config(model.config)
    used: dict[str, Profile | None] = {}
    for name, spec in specs.items():
        packed, count = packed_indices(text), len(kinds_of(text))
        each = [spec.for_layer(i, count) for i in packed]
        used[name] = loaded if any(one.calibrated or one.measured for one in each) else None
        used_by(spec, used[name], count, packed)
    if loaded is not None:
        loaded.check(fingerprint(model))

    def new_cache(name: str, prefill: str | None = None) -> TurboQuantCache:
        spec = specs[name] if prefill is None else specs[name].with_(prefill=prefill)
        return TurboQuantCache(model, spec, profile=used[name])

    was_patched = hasattr(model, "_turboquant")
    try:
        if not was_patched:
            for name, spec in specs.items():
                llama.patch(model, spec, used[name], cuda_graphs=False, tokenizer=None)
        with evaluating(model), quiet(model):
            yield new_cache
    finally:
        if not was_patched:
            llama.unpatch(model)


def _pieces(spec: CacheSpec, prefill: str, tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each forward."""
    size = {"packed": tokens, "chunked": chunk, "decode": 1}[prefill]
    each = (spec, *(spec.with_(overrides=(), **dict(changed)) for _, changed in spec.overrides))
    asked = (one.outlier_tokens for one in each if one.outliers == "prompt")
    first = min(tokens, max(size, *asked, 1))
    return [(0, first), *((start, min(start + size, tokens)) for start in range(first, tokens, size))]


def _run(model: Any, ids: torch.Tensor, cache: TurboQuantCache, pieces: list[tuple[int, int]]) -> torch.Tensor:
    """Runs ids in pieces over an empty cache. Returns logits [batch, tokens, vocabulary]."""
    name = cache_argument(model.forward) or CACHE
    parts = [model(input_ids=ids[:, a:b], use_cache=True, **{name: cache}).logits for a, b in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


# ---- free-running texts ----


def _free_running(
    model: Any,
    windows: torch.Tensor,
    specs: Mapping[str, CacheSpec],
    caches: Callable[[str], TurboQuantCache],
    tokens: int,
    batch: int,
    progress: bool,
) -> dict[str, FreeRunning]:
    """Returns by spec how long greedy texts equal those of the full cache; {} if the model has no positions left."""
    prompts = windows[:, : windows.shape[1] // 2].to(device_of(model))
    text = model.config.get_text_config(decoder=True)
    tokens = min(tokens, getattr(text, "max_position_embeddings", 2**31) - prompts.shape[1])
    if tokens < 1:
        return {}
    equal: dict[str, list[int]] = {name: [] for name in specs}
    with Progress("generate", len(prompts) * len(specs), "texts", progress) as shown:
        for start in range(0, len(prompts), batch):
            ids = prompts[start : start + batch]
            full = _greedy(model, ids, DynamicCache(config=model.config))
            for name in specs:
                full, again = tee(full)  # each token is computed once, when the first of them reads it
                equal[name] += _until_parted(again, _greedy(model, ids, caches(name)), len(ids), tokens)
                shown.add(len(ids))
    return {name: FreeRunning(prompts.shape[1], tokens, tuple(each)) for name, each in equal.items()}


def _greedy(model: Any, ids: torch.Tensor, cache: Any) -> Iterator[torch.Tensor]:
    """Yields without end the likeliest next token of each row, [batch] on the CPU."""
    name = cache_argument(model.forward) or CACHE
    while True:
        ids = model(input_ids=ids, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1).to(ids.device)
        yield ids[:, 0].cpu()


def _until_parted(full: Iterable[torch.Tensor], packed: Iterable[torch.Tensor], rows: int, tokens: int) -> list[int]:
    """Returns for each row how many tokens are equal before the first that differs, at most `tokens`."""
    together, equal = torch.ones(rows, dtype=torch.bool, device="cpu"), [0] * rows
    for one, other in islice(zip(full, packed), tokens):
        together &= one == other
        if not together.any():
            break
        equal = [n + int(alike) for n, alike in zip(equal, together)]
    return equal


class _Tally:
    """The sums of one spec over windows."""

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

    def result(self, spec: CacheSpec, prefill: str, windows: torch.Tensor, free: FreeRunning | None) -> Evaluation:
        divergence = np.concatenate(self.divergences)
        plain, packed = (sum(loss[i] for loss in self.losses) / self.targets for i in range(2))
        return Evaluation(
            spec=spec,
            prefill=prefill,
            windows=windows.shape[0],
            length=windows.shape[1],
            kl_divergence=float(divergence.mean()),
            kl_divergence_p99=float(np.quantile(divergence, 0.99)),
            kl_divergence_p999=float(np.quantile(divergence, 0.999)),
            kl_divergence_max=float(divergence.max()),
            perplexity=math.exp(packed),
            reference_perplexity=math.exp(plain),
            top1_agreement=self.same / len(divergence),
            bytes_per_token=self.moving / self.tokens,
            effective_bits=8 * self.moving / self.numbers,
            fixed_bytes=self.fixed,
            free_running=free,
        )


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Returns the sum of next tokens' negative log-likelihoods, nats. One window at a time saves memory."""
    total = 0.0
    for row, text in zip(logits, ids.to(logits.device)):
        total += float(torch.nn.functional.cross_entropy(row[:-1].float(), text[1:], reduction="sum"))
    return total


def text_windows(text: str, tokenizer: Any, windows: int, length: int) -> torch.Tensor:
    """Token ids [windows, length], int64 on the CPU: windows spaced evenly over the whole text, without overlap. If the
    tokenizer begins texts with BOS, BOS replaces the first token of each window.

    ValueError if the text has fewer tokens than that; the message says how many windows it has.
    """
    if not isinstance(text, str):
        raise TypeError(f"`text` must be a str, got {type(text).__name__}")
    windows, length = bounded("text_windows: `windows`", windows), bounded("text_windows: `length`", length)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < windows * length:
        raise ValueError(f"`text` must have {windows} x {length} tokens, got {len(ids)}: "
                         f"{len(ids) // length} windows of that length")  # fmt: skip
    rows = torch.tensor(spaced(ids, windows, length), dtype=torch.int64, device="cpu")
    if (first := leading_token(tokenizer)) is not None:
        rows[:, 0] = first
    return rows


def spaced(ids: Sequence[int], windows: int, length: int) -> list[Sequence[int]]:
    """Returns `windows` windows of `ids`, spaced evenly from its start to its end."""
    starts = [i * (len(ids) - length) // max(windows - 1, 1) for i in range(windows)]
    return [ids[start : start + length] for start in starts]


def leading_token(tokenizer: Any) -> int | None:
    """Returns BOS if the tokenizer begins texts with it, otherwise None."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and list(tokenizer("a")["input_ids"][:1]) == [bos] else None


def markdown(results: Mapping[str, Evaluation]) -> str:
    """Returns a table of results, and below it how they were measured."""
    head = ["spec", "KL divergence", "99 %", "99.9 %", "max", "perplexity", "top-1 agreement"]
    free = [e.free_running for e in results.values() if e.free_running is not None]
    if free:
        head += ["texts part after", *(f"equal {n:,}" for n in AGREEMENTS)]
    head += ["bits", "bytes per token"]
    rows = [head]
    for name, e in results.items():
        row = [name, f"{e.kl_divergence:.5f}", f"{e.kl_divergence_p99:.4f}", f"{e.kl_divergence_p999:.4f}",
               f"{e.kl_divergence_max:.3f}", f"{e.perplexity:.3f}", f"{e.top1_agreement:.4f}"]  # fmt: skip
        if free:
            row += _free_cells(e.free_running)
        rows.append([*row, f"{e.effective_bits:.3f}", f"{e.bytes_per_token:,.0f}"])
    notes = dict.fromkeys(f"{e.windows} x {e.length} tokens, {e.exact}, prefill {e.prefill}; perplexity with the full "
                          f"cache {e.reference_perplexity:.3f}" for e in results.values())  # fmt: skip
    for one in free[:1]:
        notes[f"Greedy texts of {one.tokens:,} tokens after prompts of {one.prompt_tokens:,}: when they part from the "
              "full cache's (median, in tokens), and the share whose first tokens are all equal"] = None  # fmt: skip
    return "\n".join([table(rows, markdown=True), "", *(f"{note}." for note in notes)])


def _free_cells(free: FreeRunning | None) -> list[str]:
    if free is None:
        return ["-"] * (1 + len(AGREEMENTS))
    shares = [free.share(n) for n in AGREEMENTS]
    return [f"{free.median:g}", *("-" if x is None else f"{x:.2f}" for x in shares)]
