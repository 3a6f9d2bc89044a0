"""`measure`: a forward over about 2,048 tokens shows where a model's keys lie and where its queries look. Forward and
backward passes over short texts show what errors cost (`costs`).

The tap sees keys and queries after RoPE, which is undone with the angles that `rotary` found. Two means are kept for
each layer and KV head: of the keys, and of the outer products of the queries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import _core
from ..files import cache_folder
from ..measured.moments import RANDOM_IDS, LayerMoments, Moments
from ..measured.profile import FORMAT, Profile
from ..models.families import SINKS, family_of
from ..models.identity import describe, fingerprint, weight_sums
from ..models.kinds import packed_indices, sources_of
from ..models.placement import device_of, on_all_ranks
from ..models.routing import text_config
from ..models.texts import LEAST, TOKENS, cost_texts
from ..models.wrappers import checked_base_model
from ..progress import Progress, log
from .costs import with_costs
from .metric import averaged_over_positions, chosen_pairs, metric_of, turn_back
from .rotary import Rotary, probe
from .tap import tapped

__all__ = ["measure_model", "measure_with_text", "positions_of"]


def measure_model(
    model: Any,
    tokenizer: Any = None,
    text: str | None = None,
    read: bool = True,
    write: bool = True,
    costs: bool = True,
    before: Moments | None = None,
) -> Moments:
    """Measures moments as `measure` does.

    read, write  whether a file of the cache folder may be read, or written
    costs        whether costs are measured, where no file has them; never for ESM-2
    before       moments of these weights without costs: costs alone are measured
    """
    base = checked_base_model(model)
    family, name = family_of(base), type(base).__name__
    family.check(base, "measured")
    limit = positions_of(base)
    if limit < LEAST:
        raise NotImplementedError(f"{name} cannot be measured: it has {limit} positions, {LEAST} are needed")
    drawn = family.sample(base, tokenizer, text, limit)
    ids, source = drawn
    mark = fingerprint(base)
    folder = cache_folder()
    file = None if folder is None else folder / f"profile-{_digest(base, ids)}.safetensors"
    costs = costs and not family.proteins
    earlier = before or (_kept(file, mark) if read and file is not None else None)
    everywhere = on_all_ranks(base, earlier is not None)
    if earlier is not None and everywhere:
        if not costs or earlier.costs is not None:
            return earlier
        moments = earlier  # costs are tried again: what was in the way, such as too little memory, may be gone
        log.info("%s runs forward and backward over short texts, to measure what errors cost", name)
    else:
        where = f", kept in {folder}" if write and folder is not None else ""
        seen = f"{sum(map(torch.numel, ids)):,}"
        also = ", and backward over some of them" if costs else ""
        log.info("%s runs over %s tokens%s, to measure its moments%s", name, seen, also, where)
        parts = _weighted(ids, 1.0)
        moments = Moments(_measured(base, parts, limit), mark, sum(map(_counted, ids)), source)
    if costs:
        moments = with_costs(dataclasses.replace(moments, no_costs=""), base, cost_texts(base, tokenizer, drawn))
        if moments.no_costs and source != RANDOM_IDS:
            log.info("all layers of %s get the same widths: %s", name, moments.no_costs)
    if write and file is not None and not (earlier is not None and earlier.no_costs == moments.no_costs != ""):
        _keep(file, moments)
    return moments


def measure_with_text(model: Any, windows: Sequence[torch.Tensor], tokenizer: Any = None, source: str = "") -> Moments:
    """Moments of windows of a text, each [1, tokens], or of proteins, averaged with those of `measure`: moments of one
    text alone would serve other kinds of text worse. Nothing is kept in a file. Raises what `measure` raises."""
    base = checked_base_model(model)
    limit = positions_of(base)
    family = family_of(base)
    ids, _ = family.sample(base, None if family.proteins else tokenizer, None, limit)
    parts = [*_weighted(ids, 0.5), *_weighted(windows, 0.5)]
    return Moments(_measured(base, parts, limit), fingerprint(base), sum(_counted(part) for part, _ in parts), source)


def positions_of(model: Any) -> int:
    """How many positions of a model may be used to measure it."""
    most = getattr(text_config(model), "max_position_embeddings", None) or TOKENS + 1
    learned = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    before = getattr(next(learned, None), "padding_idx", None)  # RoBERTa counts positions from behind its padding token
    return int(most if before is None else most - before - 1)


def _counted(ids: torch.Tensor) -> int:
    return ids.shape[1] - SINKS


def _weighted(ids: Sequence[torch.Tensor], share: float) -> list[tuple[torch.Tensor, float]]:
    """Each part with its weight, in proportion to its tokens; weights sum to `share`. Empty parts are left out."""
    parts = [one for one in ids if _counted(one) > 0]
    total = sum(map(_counted, parts))
    return [(one, share * _counted(one) / total) for one in parts]


# ---- the forward ----


def _measured(model: Any, parts: Sequence[tuple[torch.Tensor, float]], limit: int) -> tuple[LayerMoments, ...]:
    """Moments of each layer. parts: token ids [1, tokens], each with its weight; weights sum to 1."""
    body = model.base_model  # without the head
    device = device_of(body)
    cuda = {p.device.index for p in model.parameters() if p.device.type == "cuda"} | (
        {device.index or 0} if device.type == "cuda" else set()
    )

    def run(**inputs: torch.Tensor) -> None:
        options = {"use_cache": False} if "use_cache" in inspect.signature(body.forward).parameters else {}
        try:
            body(**{key: x.to(device) for key, x in inputs.items()}, **options)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotImplementedError(
                f"{type(model).__name__} cannot be measured: its forward of token ids failed "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). turboquant.Profile.load reads one"
            ) from error

    sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # means of each attention, in the order of calls
    means: list[tuple[torch.Tensor, torch.Tensor]] = []  # their weighted sums over the parts so far
    slots: list[Any] = []
    with torch.random.fork_rng(sorted(cuda)), tapped(model) as tap:
        sources = sources_of(text_config(model))
        own = packed_indices(text_config(model))
        layers = len(own) + sum(source != i for i, source in enumerate(sources))
        if family_of(model).proteins:
            known = Rotary.of_esm(model.config.hidden_size // model.config.num_attention_heads)
            rotaries: list[Rotary | None] = [known] * layers
        else:
            rotaries = probe(tap, body, parts[0][0], run, limit)
        if len(rotaries) != layers:
            raise NotImplementedError(f"{type(model).__name__} cannot be measured: the attention of {len(rotaries)} of "
                                      f"its {layers} layers goes through AttentionInterface")  # fmt: skip

        def hook(
            module: torch.nn.Module, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> None:
            shown.add()
            rotary = rotaries[len(sums)] or Rotary.none()
            sums.append(_sums(query[0, :, SINKS:], key[0, :, SINKS:], rotary))
            slots.append(getattr(module, "layer_idx", None))

        tap.hook = hook
        with Progress("moments", len(parts) * layers, "layers") as shown:
            for ids, weight in parts:
                sums.clear()
                slots.clear()
                run(input_ids=ids)
                part = [(weight * mean, weight * moment) for mean, moment in sums]
                means = [(m + a, s + b) for (m, s), (a, b) in zip(means, part)] if means else part
        tap.hook = None
    order = range(layers)
    if None not in slots and len({*slots}) == layers:  # models may call a module several times, in the order of layers
        order = np.argsort(slots).tolist()
    if len(own) == layers:
        return tuple(_layer(i, rotaries[call], *means[call]) for i, call in enumerate(order))
    readers = [[call for call in order if sources[slots[call]] == i] for i in own]  # each layer's own call, then others
    moments = [torch.stack([means[call][1] for call in calls]).mean(0) for calls in readers]
    return tuple(
        _layer(i, rotaries[calls[0]], means[calls[0]][0], moment)
        for i, (calls, moment) in enumerate(zip(readers, moments))
    )


def _sums(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean of the keys [kv_heads, head_dim], second moment of the queries [kv_heads, head_dim, head_dim]), both before
    RoPE, of query [heads, tokens, head_dim] and key [kv_heads, tokens, head_dim], whose first position is SINKS."""
    positions = torch.arange(SINKS, SINKS + key.shape[1], device=key.device)
    mean = turn_back(key, rotary, positions).mean(1)
    rows = turn_back(query, rotary, positions).reshape(len(key), -1, key.shape[-1])
    return mean, rows.mT @ rows / rows.shape[1]


def _layer(index: int, rotary: Rotary | None, mean: torch.Tensor, moment: torch.Tensor) -> LayerMoments:
    known = rotary or Rotary.none()
    mean, moment = mean.cpu(), moment.cpu()  # LAPACK is as quick here as cuSOLVER, and is loaded already
    if not (torch.isfinite(mean).all() and torch.isfinite(moment).all()):
        raise ValueError(f"`model` must give finite keys and queries, got others in layer {index}")
    pairs, increments, amplitudes, centre = chosen_pairs(mean.numpy(), known)
    metric = metric_of(averaged_over_positions(moment, known))
    arrays = [np.ascontiguousarray(x.numpy(), np.float32) for x in metric]
    kind = "not probed" if rotary is None else "wave" if len(pairs) else "constant"
    return LayerMoments(kind, pairs, increments, amplitudes, centre, *arrays)  # type: ignore[arg-type]


# ---- the cache folder ----


def _digest(model: Any, ids: tuple[torch.Tensor, ...]) -> str:
    """Digest of this version, the configuration, the ids, the active adapters and a sample of every weight."""
    known = [FORMAT, _core.__version__, describe(model.config), weight_sums(model, queries=True)]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for one in ids:
        digest.update(one.numpy().tobytes())
    return digest.hexdigest()[:32]


def _kept(file: Path, mark: dict[str, Any]) -> Moments | None:
    try:
        moments = Profile.load(file).moments
        moments.check(mark)
    except (OSError, ValueError):
        return None  # missing or damaged: measured and written again
    return moments


def _keep(file: Path, moments: Moments) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        Profile(moments).save(file)
    except OSError as error:
        warnings.warn(
            f"the moments of the model could not be kept in {str(file.parent)!r} ({error.strerror or error}): they are "
            "measured again next time. TURBOQUANT_CACHE names another folder, or none if it is empty",
            stacklevel=4,
        )
