"""Quantised caches that people use, simulated: the model's own attention reads de-quantised keys (after RoPE) and
values. No packed bytes are made or read here: this says what a format costs in quality, and nothing of its speed.

Every token is quantised but the first `sinks`, each query's own among them. Bits are what a number takes with its
scales and zero points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache

from turboquant import Quantizer
from turboquant.calibration.measure import token_divergence
from turboquant.hf.evaluation import FreeRunning, _greedy, _loss, _until_parted
from turboquant.hf.tap import tapped

__all__ = ["BASELINES", "Baseline", "measured", "simulated"]

Tensor = torch.Tensor
FP8_LARGEST, FP4 = 448.0, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Baseline:
    """keys, values   what is read back for [batch, kv_heads, tokens, head_dim] float32
    bits   of a number, of heads of so many channels;  exact_layers   first and last so many stay in 16 bits"""

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    bits: Callable[[int], float]
    exact_layers: int = 0

    def mean_bits(self, head_dim: int, layers: int) -> float:
        exact = 2 * self.exact_layers
        return ((layers - exact) * self.bits(head_dim) + exact * 16) / layers


@contextmanager
def simulated(model: Any, baseline: Baseline, sinks: int) -> Iterator[None]:
    """The model's forwards read keys and values as `baseline` gives them back, but for the first `sinks` tokens."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    kept = {*range(baseline.exact_layers), *range(layers - baseline.exact_layers, layers)}

    def hook(module: torch.nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in kept:
            return key, value
        return _behind(sinks, key, baseline.keys), _behind(sinks, value, baseline.values)

    with tapped(model) as tap:
        tap.hook = hook
        yield


def _behind(sinks: int, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([x[:, :, :sinks], change(x[:, :, sinks:].float()).to(x.dtype)], 2)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).float()


def _nvfp4(x: Tensor) -> Tensor:
    """Blocks of 16 numbers of e2m1, a scale in e4m3 to each, and one in float32 to the tensor."""
    blocks = x.unflatten(-1, (-1, 16))
    whole = (x.abs().amax() / (FP8_LARGEST * FP4[-1])).clamp_min(torch.finfo(x.dtype).tiny)
    scale = _fp8(blocks.abs().amax(-1, keepdim=True) / (FP4[-1] * whole)) * whole
    levels = torch.tensor(FP4, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    magnitude = (blocks.abs() / scale.where(scale > 0, torch.ones_like(scale))).clamp_max(FP4[-1])
    return (levels[torch.bucketize(magnitude.contiguous(), middles)] * blocks.sign() * scale).flatten(-2)


def _q4_0(x: Tensor) -> Tensor:
    """ggml's: blocks of 32 numbers, and in fp16 an eighth of that of largest magnitude, negated."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    codes = (blocks / scale.where(scale != 0, torch.ones_like(scale)) + 8.5).floor().clamp(0, 15)
    return ((codes - 8) * scale).flatten(-2)


def _rotated(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """After random signs and a Walsh-Hadamard transform over head_dim, a power of two."""

    def rotated(x: Tensor) -> Tensor:
        matrix = torch.ones(1, 1)
        while len(matrix) < x.shape[-1]:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        signs = torch.randint(2, (len(matrix), 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        matrix = (signs * matrix / math.sqrt(len(matrix))).to(x.device)
        return change(x @ matrix) @ matrix.T

    return rotated


def _affine(x: Tensor, bits: int, dim: int) -> Tensor:
    """Codes of `bits` from the smallest to the largest number along `dim`; both of them, as scale and zero, in fp16."""
    low, high = x.amin(dim, keepdim=True).half().float(), x.amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float()
    codes = ((x - low) / scale.where(scale > 0, torch.ones_like(scale))).round().clamp(0, 2**bits - 1)
    return codes * scale + low


def _int4(x: Tensor) -> Tensor:
    return _affine(x, 4, -1)


def _kivi(bits: int) -> Baseline:
    """KIVI (arXiv 2402.02750): keys in groups of 32 tokens of one channel, values in groups of 32 channels of a token.
    What is left of the last 32 tokens is a group of its own; KIVI itself would keep it, and a window, exact."""

    def keys(x: Tensor) -> Tensor:
        return torch.cat([_affine(group, bits, 2) for group in x.split(32, 2)], 2)

    def values(x: Tensor) -> Tensor:
        return _affine(x.unflatten(-1, (-1, 32)), bits, -1).flatten(-2)

    return Baseline(keys, values, lambda _: bits + 2 * 16 / 32)


def _mse(bits: int, exact_layers: int) -> Baseline:
    """TurboQuant mse (arXiv 2504.19874, Algorithm 1), by this package's Quantizer: a norm in 16 bits to each vector."""

    def read_back(x: Tensor) -> Tensor:
        quantizer = Quantizer(x.shape[-1], bits, scale="norm")
        rows = x.reshape(-1, x.shape[-1]).cpu().contiguous().numpy()
        decoded = quantizer.dequantize(quantizer.quantize(rows))
        return torch.from_numpy(decoded).view(x.shape).to(x.device)

    return Baseline(read_back, read_back, lambda head_dim: bits + 16 / head_dim, exact_layers)


def _same(change: Callable[[Tensor], Tensor], bits: Callable[[int], float]) -> Baseline:
    return Baseline(change, change, bits)


BASELINES: dict[str, Baseline] = {
    "fp8 e4m3": _same(_fp8, lambda _: 8.0),
    "NVFP4": _same(_nvfp4, lambda _: 4 + 8 / 16),
    "q4_0": _same(_q4_0, lambda _: 4 + 16 / 32),
    "q4_0 after Hadamard": _same(_rotated(_q4_0), lambda _: 4 + 16 / 32),
    "int4 per token and head": _same(_int4, lambda head_dim: 4 + 2 * 16 / head_dim),
    "KIVI, 4 bits, groups of 32": _kivi(4),
    "KIVI, 2 bits, groups of 32": _kivi(2),
    **{f"TurboQuant mse, {b} bits, 2 + 2 layers exact": _mse(b, 2) for b in (4, 3, 2)},
}


def measured(
    model: Any, windows: Tensor, baselines: Mapping[str, Baseline], sinks: int, generate: int
) -> dict[str, dict[str, float]]:
    """The metrics of `turboquant.evaluate`, by name, for each baseline. windows: token ids [windows, tokens]."""
    divergences: dict[str, list[np.ndarray]] = {name: [] for name in baselines}
    equal: dict[str, list[int]] = {name: [] for name in baselines}
    losses, same, plain = dict.fromkeys(baselines, 0.0), dict.fromkeys(baselines, 0), 0.0
    half = windows.shape[1] // 2
    with tqdm(total=len(windows) * (1 + len(baselines)), unit="run") as bar, torch.no_grad():
        for ids in windows.split(1):
            reference = model(input_ids=ids, use_cache=False).logits
            plain += _loss(reference, ids)
            prompt = ids[:, :half]
            full = list(islice(_greedy(model, prompt, DynamicCache(config=model.config)), generate))
            bar.update()
            for name, baseline in baselines.items():
                with simulated(model, baseline, sinks):
                    logits = model(input_ids=ids, use_cache=False).logits
                    packed = _greedy(model, prompt, DynamicCache(config=model.config))
                    equal[name] += _until_parted(full, packed, 1, generate)
                divergences[name].append(token_divergence(reference, logits).cpu().double().numpy().reshape(-1))
                losses[name] += _loss(logits, ids)
                same[name] += int((reference.argmax(-1) == logits.argmax(-1)).sum())
                bar.update()
    text, targets = model.config.get_text_config(decoder=True), len(windows) * (windows.shape[1] - 1)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    found = {}
    for name, baseline in baselines.items():
        divergence = np.concatenate(divergences[name])
        found[name] = {
            "kl_divergence": float(divergence.mean()),
            "kl_divergence_p99": float(np.quantile(divergence, 0.99)),
            "kl_divergence_p999": float(np.quantile(divergence, 0.999)),
            "kl_divergence_max": float(divergence.max()),
            "perplexity": math.exp(losses[name] / targets),
            "reference_perplexity": math.exp(plain / targets),
            "top1_agreement": same[name] / divergence.size,
            "effective_bits": baseline.mean_bits(head_dim, text.num_hidden_layers),
            **(FreeRunning(half, generate, tuple(equal[name])).metrics() if generate else {}),
        }
    return found
