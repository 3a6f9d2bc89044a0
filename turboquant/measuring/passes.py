"""Forward and backward passes of a model over batches of tokens, and what its outputs tell.

A small error e moves a distribution p by a Kullback-Leibler divergence of e^T F e / 2. F is the Fisher information: the
mean of g g^T over gradients g of log p(y) for y drawn from p itself. One token y is drawn at each place; one backward
pass gives g for the keys and values of all layers. So F includes what queries, softmax, output projection and all later
layers do to an error, by direction. The output of a language model is the distribution of the next token; that of
ESM-2 is the last hidden states, whose divergence is 1 minus their cosine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as run_again
from transformers.modeling_layers import GradientCheckpointingLayer

from ..models.families import SINKS, family_of
from ..models.kinds import packed_indices, sources_of
from ..models.placement import device_of, is_offloaded
from ..models.routing import text_config
from .tap import Tap

__all__ = ["Batch", "count_tokens", "counted_mask", "forward", "gradients", "layer_read", "of_tokens",
           "real_mask"]  # fmt: skip

Batch = Mapping[str, torch.Tensor]


def counted_mask(batch: Batch, skip: int) -> torch.Tensor | None:
    """[batch, tokens] bool, the tokens that count: no padding, and not the first `skip` of a sequence; None: all."""
    real = real_mask(batch)
    if skip == 0:
        return real
    real = torch.ones_like(batch["input_ids"], dtype=torch.bool) if real is None else real
    return real & (real.cumsum(1) > skip)


def count_tokens(batch: Batch, skip: int) -> int:
    counted = counted_mask(batch, skip)
    return batch["input_ids"].numel() if counted is None else int(counted.sum())


def real_mask(batch: Batch) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Returns the output that errors change, [batch, tokens, ...]: see `Family.forward`."""
    device = device_of(model)
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    return family_of(model).forward(model, inputs, real_mask(batch) is not None)


def _score(model: Any, output: torch.Tensor, real: torch.Tensor | None, seed: int) -> torch.Tensor:
    """The sum of `Family.scores` over real tokens. output: of `forward`."""
    scores = family_of(model).scores(output, torch.Generator("cpu").manual_seed(seed))
    return scores.sum() if real is None else scores[real.to(scores.device)].sum()


def layer_read(model: Any) -> Callable[[torch.nn.Module, int], int]:
    """Returns a function of an attention module and its place in the order of calls. It says which layer's keys and
    values the module reads, counted among the layers that have some: its own, where layers share none."""
    sources = sources_of(text_config(model))
    if sources == list(range(len(sources))):
        return lambda module, call: call
    own = {layer: rank for rank, layer in enumerate(packed_indices(text_config(model)))}
    return lambda module, call: own[sources[module.layer_idx]]  # type: ignore[index]


def of_tokens(gradient: torch.Tensor, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Sums a gradient [batch, kv_heads, tokens, head_dim] over equal tokens of a sequence: [1, kv_heads, n, head_dim].
    Values of the first layer depend on the token alone. Equal tokens have equal values and equal errors, which do not
    average out."""
    sums = []
    for i, row in enumerate(ids.to(gradient.device)):
        which_real = slice(None) if real is None else real[i].to(gradient.device)
        kinds, which = row[which_real].unique(return_inverse=True)
        rows = gradient[i][:, which_real].double()
        sums.append(rows.new_zeros(len(rows), len(kinds), rows.shape[-1]).index_add_(1, which, rows))
    return torch.cat(sums, 1)[None]


def gradients(
    model: Any, tap: Tap, batch: Batch, seed: int, window: int = 0
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Yields (layer, side, keys or values, gradient of `_score` with respect to them) for all layers that have some, in
    order; tensors [batch, kv_heads, tokens, head_dim]. What several layers read has the same error in all of them.

    window   how many of the last tokens a query sees without errors; 0: errors are everywhere. With a window, the first
             SINKS tokens have none either.
    """
    tensors: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    read = layer_read(model)

    def hook(
        module: torch.nn.Module, call: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = read(module, call)
        for side, x in enumerate((key, value)):
            if (layer, side) not in tensors:  # else the layer runs again, in the backward pass, or another reads them
                tensors[layer, side] = x.detach(), torch.zeros_like(x, requires_grad=True)
        return key + tensors[layer, 0][1], value + tensors[layer, 1][1]

    # By name: hooks that offload weights make new parameters in each forward.
    trained = [name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad]
    tap.hook, tap.exact = hook, (SINKS, window) if window else None
    try:
        for name in trained:  # their gradients are not wanted: keep nothing for them
            model.get_parameter(name).requires_grad_(False)
        with torch.enable_grad(), _kept(model, tap):
            score = _score(model, forward(model, batch), real_mask(batch), seed)
            each = torch.autograd.grad(score, [errors for _, errors in tensors.values()])
    finally:
        tap.hook = tap.exact = None
        for name in trained:
            model.get_parameter(name).requires_grad_(True)
    for ((layer, side), (x, _)), gradient in zip(tensors.items(), each):
        yield layer, side, x, gradient


def _kept(model: Any, tap: Tap) -> AbstractContextManager[Any]:
    """Chooses what the backward pass gets of the forward pass: each layer's input, from which the layer runs again. If
    weights are offloaded, it gets all tensors, in main memory: weights are among them, and would not fit on their
    device together."""
    return torch.autograd.graph.save_on_cpu() if is_offloaded(model) else _layers_run_again(model, tap)


@contextmanager
def _layers_run_again(model: Any, tap: Tap) -> Iterator[None]:
    def call(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if threading.get_ident() != tap.thread:
            return run(*args, **options)  # another thread uses the model
        again = partial(run_again, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return again(run, *args, **options)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), tap.running_again()

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and "forward" not in vars(m)]
    try:
        for layer in layers:
            layer.forward = partial(call, layer.forward)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
