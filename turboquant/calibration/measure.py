"""`calibrate`: measures a model's keys and values on a few sequences, then tries the methods of a budget (`trial`).

There are two passes over the sequences, both in constant memory. The first adds up the vectors and their outer products
(float64) per layer, side and KV head, for centres and covariances. The second, over `sensitivity_batches` of the
batches, does the same with gradients, to find what errors cost. A small error e moves a distribution p by a
Kullback-Leibler divergence of e^T F e / 2. F is the Fisher information: the mean of g g^T over gradients g of log p(y)
for y drawn from p itself. One token y is drawn at each place; one backward pass gives g for the keys and values of all
layers. So F includes what queries, softmax, output projection and all later layers do to an error, by direction. The
output of a language model is the distribution of the next token; that of ESM-2 is the last hidden states, whose
divergence is 1 minus their cosine.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint as run_again
from transformers.modeling_layers import GradientCheckpointingLayer

from ..arguments import bounded
from ..hf.kinds import latent_size, sources_of
from ..hf.routing import evaluating, text_config, uses_interface
from ..hf.tap import Tap, tapped
from ..measured.profile import Profile
from ..models.identity import describe, fingerprint, layer_sizes
from ..models.placement import device_of, is_offloaded
from ..progress import Progress, clock, log
from ..spec import LEAST_AVERAGE, MOST_SIDE_BITS
from .axes import plan_axes, singular_axes, variance_along
from .data import Calibration
from .tables import kmeans_table
from .unfinished import Unfinished

__all__ = [
    "calibrate",
    "check_vocabulary",
    "gradients",
    "of_tokens",
    "skipped",
    "token_divergence",
    "token_ids",
    "vocabulary",
]

SINKS = 4
AVERAGES = (4.0, 3.5, 3.0, 2.5, 2.0)  # bits of a code at which methods are tried by default
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}

Batch = Mapping[str, torch.Tensor]


def _is_esm(model: Any) -> bool:
    return bool(model.config.model_type == "esm")


# ---- first pass: moments ----


def skipped(model: Any) -> int:
    """How many first tokens of a sequence are not counted: decoders keep them exact, and they are unlike all others."""
    return 0 if _is_esm(model) else SINKS


def _counted(batch: Batch, skip: int) -> torch.Tensor | None:
    """[batch, tokens] bool, the tokens that count: no padding, and not the first `skip` of a sequence; None: all."""
    real = _real(batch)
    if skip == 0:
        return real
    real = torch.ones_like(batch["input_ids"], dtype=torch.bool) if real is None else real
    return real & (real.cumsum(1) > skip)


def _count(batch: Batch, skip: int) -> int:
    counted = _counted(batch, skip)
    return batch["input_ids"].numel() if counted is None else int(counted.sum())


def _real(batch: Batch) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def _forward(model: Any, batch: Batch) -> torch.Tensor:
    """[batch, tokens, ...]: what `_divergence` compares."""
    device = device_of(model)
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    if _is_esm(model):
        states: torch.Tensor = model.base_model(**inputs).last_hidden_state
        return states
    if _real(batch) is not None and "position_ids" not in inputs:  # as `generate` numbers the tokens of padded batches
        inputs["position_ids"] = (inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def token_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each next-token distribution from the reference's, in nats: float32 [batch,
    tokens] of two tensors of logits [batch, tokens, vocabulary]. It works in slices, to save memory."""
    out = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    for at in _slices(logits):
        want = torch.log_softmax(reference[at].to(logits.device).float(), -1)
        got = torch.log_softmax(logits[at].float(), -1)
        out[at] = (want.exp() * (want - got)).sum(-1)
    return out


# ---- second pass: what errors cost ----


def _score(model: Any, output: torch.Tensor, real: torch.Tensor | None, seed: int) -> torch.Tensor:
    """A random number, a sum over real tokens, whose gradient g has E[g g^T] / 2 = the quadratic form of the cost.

    output: of `_forward`. A language model: log p(y), y drawn from p. ESM-2: <r, h> / |h| with r ~ N(0, 1) orthogonal
    to h, because 1 - cos(h, h + e) is half the squared norm of e's part orthogonal to h, over |h|^2.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if _is_esm(model):
        fixed = output.detach().float()
        length = fixed.norm(dim=-1, keepdim=True)
        # Always on the CPU and in float32, to draw the same numbers whatever torch's defaults.
        random = torch.randn(fixed.shape, generator=generator, dtype=torch.float32, device="cpu").to(fixed.device)
        across = random - (random * fixed).sum(-1, keepdim=True) / length.square() * fixed
        scores = (output.float() * across / length).sum(-1)
    else:
        levels = torch.rand((*output.shape[:2], 1), generator=generator, dtype=torch.float32, device="cpu")
        scores = _DrawnTokens.apply(output, levels.to(output.device))  # type: ignore[no-untyped-call]
    total: torch.Tensor = scores.sum() if real is None else scores[real.to(scores.device)].sum()
    return total


class _DrawnTokens(torch.autograd.Function):
    """log p(y) [batch, tokens] of logits [batch, tokens, vocabulary], for the y at which the cumulated distribution
    reaches a level, [batch, tokens, 1]. In slices: torch.log_softmax would hold several tensors as large as the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(levels.shape, dtype=torch.int64, device=logits.device)
        scores = torch.empty(levels.shape, dtype=torch.float32, device=logits.device)
        for at in _slices(logits):
            log_p = logits[at].float().log_softmax(-1)
            # torch.multinomial takes seconds for a large vocabulary
            below = log_p.exp().cumsum(-1) < levels[at]
            drawn[at] = below.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
            scores[at] = log_p.gather(-1, drawn[at])
        ctx.save_for_backward(logits, drawn)
        return scores[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, drawn = ctx.saved_tensors
        found = torch.empty_like(logits)
        for at in _slices(logits):
            one = logits[at].float().softmax(-1).neg_()
            one.scatter_add_(-1, drawn[at], torch.ones_like(drawn[at], dtype=one.dtype))
            found[at] = one * gradients[0][at][..., None]
        return found, None


def _slices(logits: torch.Tensor) -> list[tuple[int, slice]]:
    """Places of 256 tokens of one sequence each, which together are all of logits [batch, tokens, vocabulary]."""
    return [(b, slice(start, start + 256)) for b in range(len(logits)) for start in range(0, logits.shape[1], 256)]


def of_tokens(gradient: torch.Tensor, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[1, kv_heads, n, head_dim] of a gradient [batch, kv_heads, tokens, head_dim]: summed over equal tokens of a
    sequence. Values of the first layer depend on the token alone. Equal tokens have equal values and equal errors,
    which do not average out."""
    sums = []
    for i, row in enumerate(ids.to(gradient.device)):
        kept = slice(None) if real is None else real[i].to(gradient.device)
        kinds, which = row[kept].unique(return_inverse=True)
        rows = gradient[i][:, kept].double()
        sums.append(rows.new_zeros(len(rows), len(kinds), rows.shape[-1]).index_add_(1, which, rows))
    return torch.cat(sums, 1)[None]


def gradients(
    model: Any, tap: Tap, batch: Batch, seed: int, window: int = 0
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """(layer, side, keys or values, gradient of `_score` with respect to them) of all layers, layer by layer; tensors
    [batch, kv_heads, tokens, head_dim].

    window   how many of the last tokens a query sees without errors; 0: errors are everywhere. With a window, the first
             SINKS tokens have none either.
    """
    held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(
        module: torch.nn.Module, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for side, x in enumerate((key, value)):
            if (layer, side) not in held:  # or the layer runs again, in the backward pass
                held[layer, side] = x.detach(), torch.zeros_like(x, requires_grad=True)
        return key + held[layer, 0][1], value + held[layer, 1][1]

    # By name: hooks that offload weights make new parameters in each forward.
    trained = [name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad]
    tap.hook, tap.exact = hook, (SINKS, window) if window else None
    try:
        for name in trained:  # their gradients are not wanted: keep nothing for them
            model.get_parameter(name).requires_grad_(False)
        with torch.enable_grad(), _kept(model):
            score = _score(model, _forward(model, batch), _real(batch), seed)
            found = torch.autograd.grad(score, [errors for _, errors in held.values()])
    finally:
        tap.hook = tap.exact = None
        for name in trained:
            model.get_parameter(name).requires_grad_(True)
    for ((layer, side), (x, _)), gradient in zip(held.items(), found):
        yield layer, side, x, gradient


def _measure_costs(model: Any, tap: Tap, batches: Sequence[Batch], run: Unfinished, shown: Progress, seed: int) -> None:
    skip = skipped(model)
    sums = run.gradients
    shown.skip(_numbers(batches[: sums.batches]))
    for i, batch in enumerate(batches[sums.batches :], sums.batches):
        real = _counted(batch, skip)
        for layer, side, _, gradient in gradients(model, tap, batch, seed + i):
            if (layer, side) == (0, 1):
                sums.add(layer, side, of_tokens(gradient, batch["input_ids"], real), None)
            else:
                sums.add(layer, side, gradient, real)
        sums.tokens += _count(batch, skip)
        sums.batches += 1
        run.save()
        shown.add(_numbers([batch]))


def _kept(model: Any) -> AbstractContextManager[Any]:
    """What the backward pass needs of the forward pass: each layer's input, from which the layer runs again. If weights
    are offloaded, all tensors, in main memory, because weights are among them and would not fit on their device
    together."""
    return torch.autograd.graph.save_on_cpu() if is_offloaded(model) else _layers_run_again(model)


@contextmanager
def _layers_run_again(model: Any) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and "forward" not in vars(m)]
    try:
        for layer in layers:
            layer.forward = partial(run_again, layer.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


# ---- tables of levels ----


def _measure_tables(model: Any, tap: Tap, batch: Batch, axes: np.ndarray, progress: bool) -> np.ndarray:
    """[layers, 2, kv_heads, 9] of one batch: K-means of keys along their singular axes [layers, kv_heads, head_dim,
    head_dim], and of plain values."""
    tables: dict[tuple[int, int], np.ndarray] = {}
    real = _real(batch)

    def hook(module: torch.nn.Module, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for side, x in enumerate((key, value)):
            rows = x.transpose(1, 2)[real.to(x.device)] if real is not None else x.transpose(1, 2).flatten(0, 1)
            heads = rows.transpose(0, 1).float().cpu().numpy()  # [kv_heads, tokens, head_dim]
            if side == 0:
                heads = heads @ axes[layer].swapaxes(-1, -2)
            tables[layer, side] = np.stack([kmeans_table(head) for head in heads])
        shown.add()

    tap.hook = hook
    with Progress("calibrate, tables of levels", len(axes), "layers", progress) as shown:
        _forward(model, batch)
    tap.hook = None
    return np.stack([np.stack([tables[layer, side] for side in range(2)]) for layer in range(len(axes))])


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
    model without a head or whose attention bypasses AttentionInterface: all before anything is
    measured.
    """
    from ..moments.text import PACKAGE, check_tokenizer, found_tokenizer

    seed = bounded("`seed`", seed)
    if not isinstance(source, str):
        raise TypeError(f"`source` must be a str, got {source!r}")
    mark = _checked_model(model)
    check_tokenizer(tokenizer)
    why = ""
    if tokenizer is None and not _is_esm(model) and (batches is None or held_out is not None):
        tokenizer, why = found_tokenizer(model)  # once, because all that follows reads the text of the package
    if batches is None:
        every, source = _text_of_the_package(model, tokenizer, why, held_out), PACKAGE
    else:
        every = _checked("batches", batches, model)
    given = [batch for batch in every if _count(batch, skipped(model))]
    tokens = sum(_count(batch, skipped(model)) for batch in given)
    tests = _checked_held_out(model, held_out)
    averages = checked_averages(averages)
    if tokens <= mark["head_dim"]:
        raise ValueError(
            f"`batches` must hold more tokens than a head has channels ({mark['head_dim']}), got {tokens}: more text"
        )
    probes = given[: bounded("calibrate: `sensitivity_batches`", sensitivity_batches)]
    run = Unfinished(_identity(mark, [given, tests], len(probes), seed), checkpoint)
    if progress:
        log.info("%s", _announced(model, given, probes, tests, len(averages), 0 if batches is None else tokens))
    found = _learned(model, mark, given, probes, run, seed, source, progress)
    if batches is not None and not tests:
        from ..moments.measure import measure_model

        return Profile(run.measured("model", lambda: measure_model(model, tokenizer)), found)
    from .trial import tried, with_moments

    own = ([], []) if batches is None else (given, probes)
    found = with_moments(found, model, tokenizer, *own, tests, run, progress)
    found = tried(found, model, tokenizer, tests, averages, run, progress)
    return Profile(found.moments["model"], found)


def _announced(
    model: Any, batches: Sequence[Batch], probes: Sequence[Batch], tests: Sequence[Batch], averages: int, own: int
) -> str:
    """How long a calibration will take, judged by one forward, and about how much memory. own: tokens of a text that is
    not the package's, 0 if there is none."""
    from ..moments.text import OF_A_KIND, TOKENS

    some = {name: x[:1, :256] for name, x in batches[0].items()}
    for _ in range(2):  # the first one may compile, or read weights from a disk
        started = time.monotonic()
        with evaluating(model):
            _forward(model, some)
    pace = some["input_ids"].numel() / (time.monotonic() - started)
    kinds = 0 if _is_esm(model) else 4 * OF_A_KIND
    windows = 1 if _is_esm(model) else 2
    tried = _numbers(tests) + kinds
    specs = averages * (2 if not own else 3) + (3 if own else 0)  # methods at all averages, and more at one
    passes = {
        "keys and values, moments": _numbers(batches) + TOKENS + own + batches[0]["input_ids"].numel(),
        "gradients": 4 * _numbers(probes),  # forward, forward again and backward
        "costs of sides": 4 * windows * (_numbers(probes) * bool(own) + kinds) if tests or not own else 0,
        "trials": windows * tried * (1 + specs) if tests or not own else 0,
    }
    text = text_config(model)
    size = max(parameter.element_size() for parameter in model.parameters())
    most = max(_numbers([batch]) for batch in (*probes, *tests))
    held = len(text.layer_types) if getattr(text, "layer_types", None) else text.num_hidden_layers
    numbers = most * (3 * vocabulary(model) + (2 * held + 60) * text.hidden_size)  # logits, layers' inputs, one layer
    return (f"calibrate: {sum(passes.values()):,} tokens in about {clock(sum(passes.values()) / pace)} "
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
    """The result of both passes."""
    layers = mark["layers"]
    with tapped(model) as tap:
        with _progress("keys and values", batches, progress) as shown:
            _measure_moments(model, tap, batches, run, shown, layers)
        mean, second = run.keys_and_values.means(layers)
        covariance = second - mean[..., :, None] * mean[..., None, :]
        singular = singular_axes(mean[:, 0], covariance[:, 0])
        tables = run.array("tables", lambda: _measure_tables(model, tap, batches[0], singular, progress))
        with _progress("what errors cost", probes, progress) as shown:
            _measure_costs(model, tap, probes, run, shown, seed)
    cost = run.gradients.means(layers)[1] / 2
    axes = plan_axes(covariance, cost)
    made = (mean, covariance, axes, variance_along(axes, covariance), variance_along(axes, cost), tables)
    parts: Any = dict(zip(("centre", "covariance", "axes", "variance", "sensitivity", "tables"), made))
    return Calibration(**{name: x.astype(np.float32) for name, x in parts.items()}, fingerprint=mark,
                       tokens=run.keys_and_values.tokens, seed=seed, source=source)  # fmt: skip


def _text_of_the_package(model: Any, tokenizer: Any, why: str, held_out: Any) -> list[Batch]:
    """A batch for each kind of text. ValueError for `held_out`, a model of proteins, and without a tokenizer, which
    says why."""
    from ..moments.text import kinds

    if held_out is not None:
        raise ValueError(f"`held_out` must be None without `batches`, got {type(held_out).__name__}")
    if _is_esm(model):
        raise ValueError("`batches` must be given for an ESM-2 model (turboquant.esm.protein_batches), got None")
    if tokenizer is None:
        raise ValueError(f"`batches` or `tokenizer` must be given: {why}")
    return [{"input_ids": ids} for ids in kinds(model, tokenizer)]


def _checked_held_out(model: Any, held_out: Sequence[Batch | torch.Tensor] | None) -> list[Batch]:
    if held_out is None:
        return []
    found = _checked("held_out", held_out, model)
    if not found:
        raise ValueError("`held_out` must hold at least one batch, or be None, got none")
    if not _is_esm(model) and any(_real(batch) is not None for batch in found):
        raise ValueError("`held_out` must have no padding, got an attention_mask with zeros")
    for i, batch in enumerate(found):
        rows, tokens = batch["input_ids"].shape
        if rows < 1 or tokens < 2:
            raise ValueError(f"`held_out[{i}]` must hold at least one row of two tokens, got {rows} of {tokens}")
    return found


def checked_averages(averages: Sequence[float]) -> tuple[float, ...]:
    """Sorted from high to low, without duplicates. TypeError for what is no list of numbers, ValueError for none, and
    for one that is not in 2..6."""
    given = list(averages) if isinstance(averages, Iterable) else [None]
    if not all(isinstance(average, Real) and not isinstance(average, bool) for average in given):
        raise TypeError(f"`averages` must be a list of numbers of bits, got {averages!r}")
    found = tuple(sorted({float(average) for average in given}, reverse=True))
    if not found or not all(LEAST_AVERAGE <= average <= MOST_SIDE_BITS for average in found):
        wants = f"{LEAST_AVERAGE}..{MOST_SIDE_BITS} bits, at least one"
        raise ValueError(f"`averages` must be in {wants}, got {list(averages)}")
    return found


def token_ids(given: Any, wants: str) -> torch.Tensor:
    """A tensor of two dimensions and any integer dtype as int64, the only dtype that all operations of a model take.
    TypeError for another object; it says what was wanted, `wants`, and what it was."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{wants}, got {type(given).__name__}")
    if given.dim() != 2 or given.dtype not in _INTEGERS:
        raise TypeError(f"{wants}, got {str(given.dtype).removeprefix('torch.')} {list(given.shape)}")
    return given.long()


def check_vocabulary(ids: torch.Tensor, model: Any, argument: str) -> None:
    """ValueError unless all ids are in the vocabulary of the model. On CUDA, one outside would make every later call
    of the process fail."""
    if not ids.numel():
        return
    known, least, most = vocabulary(model), int(ids.min()), int(ids.max())
    if least < 0 or most >= known:
        raise ValueError(f"`{argument}` must be token ids in 0..{known - 1}, got {least if least < 0 else most}")


def vocabulary(model: Any) -> int:
    """How many tokens a model has embeddings for."""
    embedding = model.get_input_embeddings()
    count: int = getattr(embedding, "num_embeddings", None) or model.config.get_text_config().vocab_size
    return count


def _checked(name: str, batches: Any, model: Any) -> list[Batch]:
    """The batches of an argument as mappings, with int64 ids."""
    if not isinstance(batches, Iterable):
        raise TypeError(f"`{name}` must be a list of batches, got {batches!r}")
    return [_checked_batch(f"{name}[{i}]", batch, model) for i, batch in enumerate(batches)]


def _checked_batch(name: str, batch: Any, model: Any) -> Batch:
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    held = batch.get("input_ids") if isinstance(batch, Mapping) else None
    wants = f"`{name}` must be token ids [batch, tokens] or a mapping with such input_ids"
    ids = token_ids(batch if held is None else held, wants)
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
    if _is_esm(model):
        from ..esm.model import checked_model

        checked_model(model)
        return fingerprint(model)
    if not uses_interface(model):
        raise NotImplementedError(f"{name} cannot be calibrated: its attention does not go through AttentionInterface")
    if model.get_output_embeddings() is None:
        raise NotImplementedError(f"{name} cannot be calibrated: it has no head, which gives the next token's logits")
    if len({*layer_sizes(describe(model.config))}) > 1:
        raise NotImplementedError(
            f"{name} cannot be calibrated: its layers have different head_dims or numbers of KV heads"
        )
    if latent_size(text_config(model)):
        raise NotImplementedError(f"{name} cannot be calibrated: its cache has latents")
    if any(source != i for i, source in enumerate(sources_of(text_config(model)))):
        raise NotImplementedError(f"{name} cannot be calibrated: its layers share keys and values")
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
    sums = run.keys_and_values
    shown.skip(_numbers(batches[: sums.batches]))
    for batch in batches[sums.batches :]:
        real = _counted(batch, skipped(model))

        def hook(
            module: torch.nn.Module,
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            real: torch.Tensor | None = real,
        ) -> None:
            sums.add(layer, 0, key, real)
            sums.add(layer, 1, value, real)

        tap.hook = hook
        _forward(model, batch)
        if len(tap.order) != layers:
            raise NotImplementedError(f"{type(model).__name__} cannot be calibrated: the attention of {len(tap.order)} "
                                      f"of its {layers} layers goes through AttentionInterface")  # fmt: skip
        sums.tokens += _count(batch, skipped(model))
        sums.batches += 1
        run.save()
        shown.add(_numbers([batch]))
    tap.hook = None
