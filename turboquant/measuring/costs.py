"""What errors of each layer's keys and values cost, for widths by layer and side: measured with the moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..measured.moments import Moments
from ..models.families import SINKS, family_of
from ..models.placement import is_offloaded
from ..progress import steps
from ..spec import CacheSpec
from .passes import gradients, of_tokens
from .tap import tapped

__all__ = ["side_costs", "with_costs"]

F64 = NDArray[np.float64]


def side_costs(model: Any, ids: torch.Tensor, moments: Moments, seed: int, window: int = 0) -> F64:
    """Returns [layers, 2]: what errors of a side cost, in nats per token, if each is as large as the quantised vector.

    ids [1, tokens];  window  last tokens that a query sees exactly.

    Quantised are y = A (k - c_p) for keys, and v itself for values. The error spreads evenly over all channels, and
    that of y is multiplied by A^-1. So a token costs |A^-1 g|^2 |y|^2 / (2 head_dim), or |g|^2 |v|^2 / (2 head_dim),
    with g as of `passes.gradients`. Both factors are unusual for the same tokens, those that many others look at, so
    the mean of products is not the product of means.
    """
    skip, costs = family_of(model).skipped, np.zeros((len(moments.layers), 2))
    layers = set()
    positions = np.arange(skip, ids.shape[1])
    with tapped(model) as tap:
        for layer, side, x, gradient in gradients(model, tap, {"input_ids": ids}, seed, window):
            x, gradient = x[:, :, skip:].double(), gradient[:, :, skip:].double()
            if side == 0:
                there, back = (torch.from_numpy(a).to(x.device) for a in moments.layers[layer].metric())
                centre = torch.from_numpy(moments.layers[layer].centre_at(positions)).to(x.device)
                x, gradient = (x - centre) @ there, gradient @ back
            rows = gradient * x.norm(dim=-1, keepdim=True)
            if (layer, side) == (0, 1):
                rows = of_tokens(rows, ids[:, skip:], None)
            layers.add(layer)
            costs[layer, side] = float(rows.square().sum()) / (2 * x.shape[-1])
    if len(layers) != len(costs):
        raise NotImplementedError(f"the attention of {len(layers)} of its {len(costs)} layers goes through "
                                  "AttentionInterface")  # fmt: skip
    return costs / max(len(positions), 1)


def with_costs(moments: Moments, model: Any, texts: Sequence[torch.Tensor]) -> Moments:
    """Returns `moments` with costs on texts, each [1, tokens], with the exact tokens of the presets; or with the reason
    why the model has none, and then all layers have the same widths.

    Each text contributes the shares of its sides in its costs, with equal weight: a text with one token that costs as
    much as thousands counts no more than another. The sum of all costs is the geometric mean of the texts' sums.
    """
    window = CacheSpec().window
    long = [ids for ids in texts if ids.shape[1] > SINKS + window]
    short = "" if long else f"its texts have fewer than {SINKS + window + 1} tokens" if texts else "it has no text"
    if why := short or _refused(model):
        return replace(moments, no_costs=why)
    try:
        with torch.inference_mode(False):
            shown = enumerate(steps(long, "costs of errors", "texts"))
            each = np.stack([side_costs(model, ids, moments, i, window) for i, ids in shown])
    except Exception as error:  # of any type: the code that fails is the model's
        said = str(error).strip().partition("\n")[0].partition(". ")[0]
        return replace(moments, no_costs=f"its backward pass failed ({type(error).__name__}: {said:.200})")
    totals = each.sum((1, 2))
    if not (np.isfinite(totals).all() and totals.min() > 0):
        return replace(moments, no_costs="its gradients are 0 or not finite")
    shares = (each / totals[:, None, None]).mean(0)
    return replace(moments, costs=(shares * np.exp(np.log(totals).mean())).astype(np.float32))


def _refused(model: Any) -> str:
    """Why no costs can be measured; "" if they can, as far as is known before."""
    if model.get_output_embeddings() is None:
        return "it has no head, which gives the next token's logits"
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        return "its weights are quantised"
    devices = {weight.device for weight in model.parameters()}
    if is_offloaded(model) or len(devices) > 1 or any(hasattr(p, "device_mesh") for p in model.parameters()):
        return "its weights are not on one device"
    if any(weight.is_inference() for weight in model.parameters()):
        return "its weights were made in inference mode"
    return ""
