"""`calibrate`: measures a model's keys and values on a few sequences, then tries the methods of a budget (`trial`).

There are two passes over the sequences, both in constant memory. The first adds up the vectors and their outer products
(float64) per layer, side and KV head, for centres and covariances. The second, over `sensitivity_batches` of the
batches, does the same with gradients, to find what errors cost (`measuring.passes`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch

from ..arguments import bounded, quoted
from ..measured.axes import plan_axes, singular_axes, variance_along
from ..measured.calibration import Calibration, layered
from ..measured.kmeans import kmeans_table
from ..measured.profile import Profile
from ..measuring import passes
from ..measuring.passes import Batch, count_tokens, counted_mask, gradients, of_tokens, real_mask
from ..measuring.tap import Tap, tapped
from ..models.families import family_of
from ..models.identity import fingerprint, layer_sizes
from ..models.routing import evaluating, text_config
from ..models.tokens import check_vocabulary, token_ids, vocabulary
from ..progress import Progress, clock, log
from ..spec import LEAST_AVERAGE, MOST_SIDE_BITS
from .unfinished import Unfinished

__all__ = ["calibrate", "checked_averages"]

AVERAGES = (4.0, 3.5, 3.0, 2.5, 2.0)  # bits of a code at which methods are tried by default


def _measure_costs(model: Any, tap: Tap, batches: Sequence[Batch], run: Unfinished, shown: Progress, seed: int) -> None:
    skip = family_of(model).skipped
    sums = run.gradients
    shown.skip(_numbers(batches[: sums.batches]))
    for i, batch in enumerate(batches[sums.batches :], sums.batches):
        real = counted_mask(batch, skip)
        for layer, side, _, gradient in gradients(model, tap, batch, seed + i):
            if (layer, side) == (0, 1):
                sums.add(layer, side, of_tokens(gradient, batch["input_ids"], real), None)
            else:
                sums.add(layer, side, gradient, real)
        sums.tokens += count_tokens(batch, skip)
        sums.batches += 1
        run.save()
        shown.add(_numbers([batch]))


# ---- tables of levels ----


def _measure_tables(model: Any, tap: Tap, batch: Batch, axes: Sequence[np.ndarray], progress: bool) -> list[np.ndarray]:
    """Returns the tables of each layer, [2, kv_heads, 9], from one batch: K-means of keys along their singular axes
    [kv_heads, head_dim, head_dim], and of plain values."""
    tables: dict[tuple[int, int], np.ndarray] = {}
    real, read = real_mask(batch), passes.layer_read(model)

    def hook(module: torch.nn.Module, call: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if ((layer := read(module, call)), 0) in tables:
            return  # another layer reads them again
        for side, x in enumerate((key, value)):
            rows = x.transpose(1, 2)[real.to(x.device)] if real is not None else x.transpose(1, 2).flatten(0, 1)
            heads = rows.transpose(0, 1).float().cpu().numpy()  # [kv_heads, tokens, head_dim]
            if side == 0:
                heads = heads @ axes[layer].swapaxes(-1, -2)
            tables[layer, side] = np.stack([kmeans_table(head) for head in heads])
        shown.add()

    tap.hook = hook
    with Progress("calibrate, tables of levels", len(axes), "layers", progress) as shown:
        passes.forward(model, batch)
    tap.hook = None
    return [np.stack([tables[layer, side] for side in range(2)]) for layer in range(len(axes))]


# ---- calibrate ----


def calibrate(
    model: Any,
    batches: Sequence[Batch | torch.Tensor] | None = None,
    *,
    held_out: Sequence[Batch | torch.Tensor] | None = None,
    averages: Sequence[float] = AVERAGES,
    tokenizer: Any = None,
    sensitivity_batches: int = 4,
    seed: int = 0,
    source: str = "",
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Profile:
    """A calibrated profile: measures a model on a text, and tries on another text which method diverges least for each
    average of bits.

    model    a causal language model of transformers whose attention goes through AttentionInterface,
             or an ESM-2 model (`turboquant.esm.protein_batches` makes batches); patched or not; float32, float16 or
             bfloat16; on any device, spread over several, or with weights that a `device_map` offloads. It is left as
             it was.
    batches  token ids [batch, tokens] of any integer dtype, or mappings with `input_ids` and perhaps `attention_mask`,
             as the model takes them. Use text like the cache will see, but not what it will be tested on; tens of
             thousands of tokens are plenty. Padding is not counted; batches of padding alone are left out. None: the
             text of the package, prose, source code, German and Japanese. The costs of errors are measured on it, and
             the methods "none" and "widths" are tried on the same text, since there is no other.
    held_out  text that nothing is learned from, without padding. Methods (`choice`) are tried on it through the packed
             path, everything packed but the first 4 tokens, and again with the last 128 exact too, if a text here and
             one in `batches` are longer than that. The best one of each average is kept in `trials`; a spec with a
             budget needs that. None: nothing is tried, and a budget has to name its method, "axes".
    averages   bits of a code, 2..6, at which methods are tried.
    tokenizer  of the model, as `turboquant.measure` takes it.
    sensitivity_batches  how many of the first batches measure sensitivities, by a forward and a backward pass each; a
             batch needs the memory of a training step without the optimiser, main memory if weights are offloaded.
    seed     0..2**63 - 1, for the Hadamard signs inside groups and the samples of sensitivities. The same model,
             batches and seed give the same calibration.
    source   which text it was, in words; kept in the file. Without batches it is "the text of the package".
    progress   how far each phase is, on stderr.
    checkpoint  a file that keeps what was found after every batch, so that an interrupted calibration goes on where it
             was. It is not removed at the end: remove it once the result is saved.

    Raises TypeError for arguments of another kind, ValueError if there are fewer tokens than channels, for tokens that
    are not in the model's vocabulary and for a checkpoint that is damaged or of another run, NotImplementedError for a
    model without a head or whose attention bypasses AttentionInterface: all before anything is measured.
    """
    from ..models.texts import PACKAGE, check_tokenizer, found_tokenizer

    seed = bounded("`seed`", seed)
    if not isinstance(source, str):
        raise TypeError(f"`source` must be a str, got {quoted(source)}")
    mark, family = _checked_model(model), family_of(model)
    check_tokenizer(tokenizer)
    why = ""
    if tokenizer is None and not family.proteins and (batches is None or held_out is not None):
        tokenizer, why = found_tokenizer(model)  # once, because all that follows reads the text of the package
    if batches is None:
        every, source = _text_of_the_package(model, tokenizer, why, held_out), PACKAGE
    else:
        every = _checked("batches", batches, model)
    counted = [batch for batch in every if count_tokens(batch, family.skipped)]
    tokens = sum(count_tokens(batch, family.skipped) for batch in counted)
    tests = _checked_held_out(model, held_out)
    averages = checked_averages(averages)
    channels = max(channels for _, channels in layer_sizes(mark))
    if tokens <= channels:
        wants = f"`batches` must hold more tokens than a head has channels ({channels})"
        raise ValueError(f"{wants}, got {tokens}: more text")
    probes = counted[: bounded("calibrate: `sensitivity_batches`", sensitivity_batches)]
    run = Unfinished(_identity(mark, [counted, tests], len(probes), seed), checkpoint)
    if progress:
        log.info("%s", _announced(model, counted, probes, tests, len(averages), 0 if batches is None else tokens))
    calibration = _learned(model, mark, counted, probes, run, seed, source, progress)
    if batches is not None and not tests:
        from ..measuring.moments import measure_model

        return Profile(run.measured("model", lambda: measure_model(model, tokenizer)), calibration)
    from .trial import tried, with_moments

    own = ([], []) if batches is None else (counted, probes)
    calibration = with_moments(calibration, model, tokenizer, *own, tests, run, progress)
    calibration = tried(calibration, model, tokenizer, tests, averages, run, progress)
    return Profile(calibration.moments["model"], calibration)


def _announced(
    model: Any, batches: Sequence[Batch], probes: Sequence[Batch], tests: Sequence[Batch], averages: int, own: int
) -> str:
    """Says how long a calibration will take, judged by one forward, and about how much memory. own: tokens of a text
    that is not the package's, 0 if there is none."""
    from ..models.texts import OF_A_KIND, TOKENS

    some = {name: x[:1, :256] for name, x in batches[0].items()}
    for _ in range(2):  # the first one may compile, or read weights from a disk
        started = time.monotonic()
        with evaluating(model):
            passes.forward(model, some)
    pace = some["input_ids"].numel() / (time.monotonic() - started)
    kinds, windows = (0, 1) if family_of(model).proteins else (4 * OF_A_KIND, 2)
    tried = _numbers(tests) + kinds
    specs = averages * (2 if not own else 3) + (3 if own else 0)  # methods at all averages, and more at one
    of_phases = {
        "keys and values, moments": _numbers(batches) + TOKENS + own + batches[0]["input_ids"].numel(),
        "gradients": 4 * _numbers(probes),  # forward, forward again and backward
        "costs of sides": 4 * windows * (_numbers(probes) * bool(own) + kinds) if tests or not own else 0,
        "trials": windows * tried * (1 + specs) if tests or not own else 0,
    }
    text = text_config(model)
    size = max(parameter.element_size() for parameter in model.parameters())
    most = max(_numbers([batch]) for batch in (*probes, *tests))
    layers = len(text.layer_types) if getattr(text, "layer_types", None) else text.num_hidden_layers
    numbers = most * (3 * vocabulary(model) + (2 * layers + 60) * text.hidden_size)  # logits, layers' inputs, one layer
    return (f"calibrate: {sum(of_phases.values()):,} tokens in about {clock(sum(of_phases.values()) / pace)} "
            f"({pace:,.0f} a second), with about {size * numbers / 2**30:.1f} GiB beside the model")  # fmt: skip


def _learned(
    model: Any,
    mark: dict[str, Any],
    batches: Sequence[Batch],
    probes: Sequence[Batch],
    run: Unfinished,
    seed: int,
    source: str,
    progress: bool,
) -> Calibration:
    """Runs both passes, and returns what they found."""
    layers = mark["layers"]
    with tapped(model) as tap:
        with _progress("keys and values", batches, progress) as shown:
            _measure_moments(model, tap, batches, run, shown, layers)
        means, seconds = run.keys_and_values.means(layers)
        covariances = [second - mean[..., :, None] * mean[..., None, :] for mean, second in zip(means, seconds)]
        singular = [singular_axes(mean[0], covariance[0]) for mean, covariance in zip(means, covariances)]
        tables = run.by_layer("tables", lambda: _measure_tables(model, tap, batches[0], singular, progress), layers)
        with _progress("what errors cost", probes, progress) as shown:
            _measure_costs(model, tap, probes, run, shown, seed)
    costs = [second / 2 for second in run.gradients.means(layers)[1]]
    axes = [plan_axes(covariance, cost) for covariance, cost in zip(covariances, costs)]
    parts: dict[str, list[np.ndarray]] = {
        "centre": means,
        "covariance": covariances,
        "axes": axes,
        "variance": [variance_along(one, covariance) for one, covariance in zip(axes, covariances)],
        "sensitivity": [variance_along(one, cost) for one, cost in zip(axes, costs)],
        "tables": tables,
    }
    arrays = {name: layered([x.astype(np.float32) for x in of_layers]) for name, of_layers in parts.items()}
    return Calibration(**arrays, fingerprint=mark, tokens=run.keys_and_values.tokens, seed=seed, source=source)


def _text_of_the_package(model: Any, tokenizer: Any, why: str, held_out: Any) -> list[Batch]:
    """Returns a batch for each kind of text. Raises ValueError for `held_out`, a model of proteins, and without a
    tokenizer, with the reason `why`."""
    from ..models.texts import kinds

    if held_out is not None:
        raise ValueError(f"`held_out` must be None without `batches`, got {type(held_out).__name__}")
    if family_of(model).proteins:
        raise ValueError("`batches` must be given for an ESM-2 model (turboquant.esm.protein_batches), got None")
    if tokenizer is None:
        raise ValueError(f"`batches` or `tokenizer` must be given: {why}")
    return [{"input_ids": ids} for ids in kinds(model, tokenizer)]


def _checked_held_out(model: Any, held_out: Sequence[Batch | torch.Tensor] | None) -> list[Batch]:
    if held_out is None:
        return []
    batches = _checked("held_out", held_out, model)
    if not batches:
        raise ValueError("`held_out` must hold at least one batch, or be None, got none")
    if not family_of(model).proteins and any(real_mask(batch) is not None for batch in batches):
        raise ValueError("`held_out` must have no padding, got an attention_mask with zeros")
    for i, batch in enumerate(batches):
        rows, tokens = batch["input_ids"].shape
        if rows < 1 or tokens < 2:
            raise ValueError(f"`held_out[{i}]` must hold at least one row of two tokens, got {rows} of {tokens}")
    return batches


def checked_averages(averages: Sequence[float]) -> tuple[float, ...]:
    """Sorts averages from high to low, without duplicates. Raises TypeError for what is no list of numbers, ValueError
    for none, and for one that is not in 2..6."""
    numbers = list(averages) if isinstance(averages, Iterable) else [None]
    if not all(isinstance(average, Real) and not isinstance(average, bool) for average in numbers):
        raise TypeError(f"`averages` must be a list of numbers of bits, got {quoted(averages)}")
    chosen = tuple(sorted({float(average) for average in numbers}, reverse=True))
    if not chosen or not all(LEAST_AVERAGE <= average <= MOST_SIDE_BITS for average in chosen):
        wants = f"{LEAST_AVERAGE}..{MOST_SIDE_BITS} bits, at least one"
        raise ValueError(f"`averages` must be in {wants}, got {list(averages)}")
    return chosen


def _checked(name: str, batches: Any, model: Any) -> list[Batch]:
    """The batches of an argument as mappings, with int64 ids."""
    if not isinstance(batches, Iterable):
        raise TypeError(f"`{name}` must be a list of batches, got {quoted(batches)}")
    return [_checked_batch(f"{name}[{i}]", batch, model) for i, batch in enumerate(batches)]


def _checked_batch(name: str, batch: Any, model: Any) -> Batch:
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    inner = batch.get("input_ids") if isinstance(batch, Mapping) else None
    wants = f"`{name}` must be token ids [batch, tokens] or a mapping with such input_ids"
    ids = token_ids(batch if inner is None else inner, wants)
    check_vocabulary(ids, model, name)
    checked: dict[str, torch.Tensor] = {**batch, "input_ids": ids}
    mask = checked.get("attention_mask")
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError(f"`{name}` must have an attention_mask that is a tensor, got {type(mask).__name__}")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"`{name}` must have an attention_mask like its {tuple(ids.shape)} tokens, got {tuple(mask.shape)}"
        )
    return checked


def _checked_model(model: Any) -> dict[str, Any]:
    name = type(model).__name__
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise TypeError(f"`model` must be a transformers model, got {name}")
    family_of(model).check(model, "calibrated")
    return fingerprint(model)


def _identity(mark: dict[str, Any], texts: Sequence[Sequence[Batch]], probes: int, seed: int) -> str:
    digest = hashlib.sha256(repr((mark, probes, seed, [len(batches) for batches in texts])).encode())
    for batch in chain(*texts):
        for name in ("input_ids", "attention_mask"):
            if batch.get(name) is not None:
                digest.update(f"{name}{tuple(batch[name].shape)}".encode() + batch[name].cpu().long().numpy().tobytes())
    return digest.hexdigest()


def _progress(what: str, batches: Sequence[Batch], shown: bool) -> Progress:
    return Progress(f"calibrate, {what}", _numbers(batches), "tokens", shown)


def _numbers(batches: Sequence[Batch]) -> int:
    """Tokens of batches, padding included."""
    return sum(batch["input_ids"].numel() for batch in batches)


def _measure_moments(
    model: Any, tap: Tap, batches: Sequence[Batch], run: Unfinished, shown: Progress, layers: int
) -> None:
    sums, read = run.keys_and_values, passes.layer_read(model)
    shown.skip(_numbers(batches[: sums.batches]))
    for batch in batches[sums.batches :]:
        real, seen = counted_mask(batch, family_of(model).skipped), set[int]()

        def hook(
            module: torch.nn.Module,
            call: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            real: torch.Tensor | None = real,
            seen: set[int] = seen,
        ) -> None:
            if (layer := read(module, call)) in seen:
                return  # another layer reads them again
            seen.add(layer)
            sums.add(layer, 0, key, real)
            sums.add(layer, 1, value, real)

        tap.hook = hook
        passes.forward(model, batch)
        if len(seen) != layers:
            raise NotImplementedError(f"{type(model).__name__} cannot be calibrated: the attention of {len(seen)} "
                                      f"of its {layers} layers goes through AttentionInterface")  # fmt: skip
        sums.tokens += count_tokens(batch, family_of(model).skipped)
        sums.batches += 1
        run.save()
        shown.add(_numbers([batch]))
    tap.hook = None
