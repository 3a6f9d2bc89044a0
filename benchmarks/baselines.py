"""Simulates quantised caches that people use: the model's own attention reads de-quantised keys (after RoPE) and
values. No packed bytes are made or read here, so this says what a format costs in quality, and nothing about its speed.

All tokens but the first `sinks` are quantised, also each query's own, unless a format is measured with its own exact
tokens. Bits are what a number takes, scales and zero points included.
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
from turboquant.evaluation.decoder import FreeRunning, _greedy, _loss, _until_parted
from turboquant.measuring.tap import tapped
from turboquant.models.outputs import token_divergence
from turboquant.models.texts import sample

__all__ = ["BASELINES", "Baseline", "measured", "simulated"]

Tensor = torch.Tensor
ReadBack = Callable[[Tensor], Tensor]
FP8_LARGEST, FP4 = 448.0, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Baseline:
    """keys, values   return what is read back for [batch, kv_heads, tokens, head_dim] float32
    bits   returns the bits of a number for a head_dim;  exact_layers   so many first and last layers keep 16 bits
    exact   (sinks, window, tile): the format itself keeps the first and the last tokens in 16 bits, and those of a tile
            that is not full; None: the first `sinks` of a call
    learn   returns (keys, values) of each layer of a model, for a format that is fitted to one"""

    keys: ReadBack
    values: ReadBack
    bits: Callable[[int], float]
    exact_layers: int = 0
    exact: tuple[int, int, int] | None = None
    learn: Callable[[Any], list[tuple[ReadBack, ReadBack]]] | None = None

    def of_layers(self, model: Any) -> list[tuple[ReadBack, ReadBack]]:
        """Returns (keys, values) of each layer."""
        if self.learn is not None:
            return self.learn(model)
        return [(self.keys, self.values)] * model.config.get_text_config(decoder=True).num_hidden_layers

    def mean_bits(self, head_dim: int, layers: int, tokens: int = 0) -> float:
        """Returns the mean over layers. tokens: the text's, if exact ones count; a last tile counts as half full."""
        layer = self.bits(head_dim)
        if tokens and self.exact is not None:
            sinks, window, tile = self.exact
            share = min(1.0, (sinks + window + tile / 2) / tokens)
            layer += share * (16 - layer)
        exact = 2 * self.exact_layers
        return ((layers - exact) * layer + exact * 16) / layers

    def exact_tokens(self, sinks: int) -> str:
        """Returns the exact tokens in the words of `real` in quality.py."""
        if self.exact is None:
            return f"{sinks} sinks"
        sinks, window, tile = self.exact
        parts = ((window, f"window {window}"), (tile, f"tile of {tile}"))
        return ", ".join([f"{sinks} sinks", *(words for count, words in parts if count)])


@contextmanager
def simulated(
    model: Any, baseline: Baseline, sinks: int, each: list[tuple[ReadBack, ReadBack]] | None = None
) -> Iterator[None]:
    """Makes the model's forwards read keys and values as `baseline` gives them back, except its own exact tokens, or
    the first `sinks`. each: what `Baseline.of_layers` returned, if known."""
    each = baseline.of_layers(model) if each is None else each
    layers = len(each)
    kept = {*range(baseline.exact_layers), *range(layers - baseline.exact_layers, layers)}
    first = sinks if baseline.exact is None else baseline.exact[0]

    def hook(module: torch.nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in kept:
            return key, value
        keys, values = each[layer]
        return _behind(first, key, keys), _behind(first, value, values)

    with tapped(model) as tap:
        tap.hook = hook
        if baseline.exact is not None:
            tap.exact, tap.tile = baseline.exact[:2], baseline.exact[2]
        yield


def _behind(sinks: int, x: Tensor, change: ReadBack) -> Tensor:
    if x.shape[2] <= sinks:
        return x
    return torch.cat([x[:, :, :sinks], change(x[:, :, sinks:].float()).to(x.dtype)], 2)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).float()


def _nvfp4(x: Tensor) -> Tensor:
    """Rounds blocks of 16 numbers to e2m1, with an e4m3 scale for each block and a float32 scale for the tensor."""
    blocks = x.unflatten(-1, (-1, 16))
    whole = (x.abs().amax() / (FP8_LARGEST * FP4[-1])).clamp_min(torch.finfo(x.dtype).tiny)
    scale = _fp8(blocks.abs().amax(-1, keepdim=True) / (FP4[-1] * whole)) * whole
    levels = torch.tensor(FP4, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    magnitude = (blocks.abs() / scale.where(scale > 0, torch.ones_like(scale))).clamp_max(FP4[-1])
    return (levels[torch.bucketize(magnitude.contiguous(), middles)] * blocks.sign() * scale).flatten(-2)


def _q4_0(x: Tensor) -> Tensor:
    """Rounds as ggml does: a block of 32 has -1/8 of its number of largest magnitude as scale, in fp16."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    codes = (blocks / scale.where(scale != 0, torch.ones_like(scale)) + 8.5).floor().clamp(0, 15)
    return ((codes - 8) * scale).flatten(-2)


def _hadamard(channels: int) -> Tensor:
    """Returns [channels, channels], orthogonal and symmetric. channels: a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < channels:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(len(matrix))


def _turned(matrix: Tensor, change: ReadBack) -> ReadBack:
    """Returns `change` between products with an orthogonal matrix [head_dim, head_dim] and its inverse."""

    def turned(x: Tensor) -> Tensor:
        own = matrix.to(x.device)
        return change(x @ own) @ own.T

    return turned


def _rotated(change: ReadBack, seed: int | None = 0) -> ReadBack:
    """Returns `change` after random signs (seed None: none) and a Hadamard transform of head_dim, a power of two."""

    def rotated(x: Tensor) -> Tensor:
        matrix = _hadamard(x.shape[-1])
        if seed is not None:
            matrix = (
                torch.randint(2, (len(matrix), 1), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
            ) * matrix
        return _turned(matrix, change)(x)

    return rotated


def _affine(x: Tensor, bits: int, dim: int) -> Tensor:
    """Rounds to 2^bits levels from the smallest to the largest number along `dim`; scale and zero are in fp16."""
    low, high = x.amin(dim, keepdim=True).half().float(), x.amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float()
    codes = ((x - low) / scale.where(scale > 0, torch.ones_like(scale))).round().clamp(0, 2**bits - 1)
    return codes * scale + low


def _int4(x: Tensor) -> Tensor:
    return _affine(x, 4, -1)


def _kivi(bits: int) -> Baseline:
    """KIVI (arXiv 2402.02750): keys in groups of 32 tokens of one channel, values in groups of 32 channels of a token.
    Tokens behind the last full 32 are a group of their own; KIVI itself keeps them, and a window, exact."""

    def keys(x: Tensor) -> Tensor:
        return torch.cat([_affine(group, bits, 2) for group in x.split(32, 2)], 2)

    def values(x: Tensor) -> Tensor:
        return _affine(x.unflatten(-1, (-1, 32)), bits, -1).flatten(-2)

    return Baseline(keys, values, lambda _: bits + 2 * 16 / 32)


def _mse(bits: int, exact_layers: int) -> Baseline:
    """TurboQuant mse (arXiv 2504.19874, Algorithm 1), by this package's Quantizer; each vector has a 16-bit norm."""

    def read_back(x: Tensor) -> Tensor:
        quantizer = Quantizer(x.shape[-1], bits, scale="norm")
        rows = x.reshape(-1, x.shape[-1]).cpu().contiguous().numpy()
        decoded = quantizer.dequantize(quantizer.quantize(rows))
        return torch.from_numpy(decoded).view(x.shape).to(x.device)

    return Baseline(read_back, read_back, lambda head_dim: bits + 16 / head_dim, exact_layers)


def _kvarn(key_bits: int, value_bits: int, exact: tuple[int, int, int] | None = None) -> Baseline:
    """KVarN (arXiv 2606.03458, github.com/huawei-csl/KVarN). After a Hadamard transform tiles of 128 tokens are divided
    by a scale for each token and one for each channel, and rounded from the smallest to the largest number of each
    channel (keys) or token (values). Tokens behind the last full tile are a tile of their own; KVarN itself keeps them
    exact, and the first 128 tokens."""

    def read_back(bits: int, dim: int) -> ReadBack:
        def tiles(x: Tensor) -> Tensor:
            return torch.cat([_balanced(tile, bits, dim) for tile in x.split(128, 2)], 2)

        return _rotated(tiles, None)

    def bits(head_dim: int) -> float:
        token, channel = 16 / head_dim, 16 / 128  # bits that one fp16 for each token, or channel, adds to a number
        return (key_bits + value_bits + 3 * (token + channel)) / 2  # keys: 1 a token, 2 a channel; values: the reverse

    return Baseline(read_back(key_bits, 2), read_back(value_bits, 3), bits, exact=exact)


def _balanced(tile: Tensor, bits: int, dim: int) -> Tensor:
    """Returns a tile [batch, kv_heads, tokens, channels] as KVarN reads it back. Standard deviations of tokens and of
    channels are divided out in turn, 16 times, with its code's bounds. The scales of least imbalance stay, in fp16."""
    if tile.shape[2] < 2:
        return tile
    order = (5 - dim, dim)  # dimensions along which standard deviations are taken, in turn
    logs = [torch.zeros_like(tile.mean(over, keepdim=True)) for over in order]
    best, kept, now = _imbalance(tile), [log.exp() for log in logs], tile
    for _ in range(16):
        for i, over in enumerate(order):
            spread = now.std(over, keepdim=True).clamp(1e-3, 1e3)
            logs[i] = (logs[i] + spread.log()).clamp(-0.3, 10)
            now = tile / logs[0].exp() / logs[1].exp()
        found = _imbalance(now)
        kept = [torch.where(found <= best, log.exp(), one) for log, one in zip(logs, kept)]
        best = torch.minimum(found, best)
    scales = kept[0].half().float() * kept[1].half().float()
    return _affine(tile / scales, bits, dim) * scales


def _imbalance(tile: Tensor) -> Tensor:
    """Returns the largest standard deviation over the smallest, of tokens and of channels, added:
    [batch, kv_heads, 1, 1]."""
    spreads = (tile.std(over, keepdim=True).flatten(2) for over in (3, 2))
    ratios = (one.amax(-1) / one.amin(-1).clamp_min(1e-8) for one in spreads)
    return sum(ratios, torch.zeros(()))[..., None, None]


OSCAR_GROUP, OSCAR_KEYS, OSCAR_VALUES = 128, 0.96, 0.92  # channels of a group, shares of a token's numbers not clipped


def _oscar(exact: tuple[int, int, int] | None = None) -> Baseline:
    """OSCAR (arXiv 2605.17757, github.com/FutureMLS-Lab/OSCAR): 2 bits in groups of 128 channels of a token, after a
    rotation for each layer, with a token's largest numbers clipped. Its rotations are fitted to 30,000 tokens of a
    task, here to the package's 2,048. Scales and zero points have 16 bits here, 32 in its code."""

    def bits(head_dim: int) -> float:
        return 2 + 2 * 16 / min(OSCAR_GROUP, head_dim)

    keys, values = _clipped(OSCAR_KEYS), _clipped(OSCAR_VALUES)
    return Baseline(_rotated(keys, None), _rotated(values, None), bits, exact=exact, learn=_oscar_rotations)


def _clipped(share: float) -> ReadBack:
    def clipped(x: Tensor) -> Tensor:
        limit = x.abs().sort(-1).values[..., int(share * x.shape[-1])][..., None]
        groups = x.clamp(-limit, limit).unflatten(-1, (-1, min(OSCAR_GROUP, x.shape[-1])))
        return _affine(groups, 2, -1).flatten(-2)

    return clipped


def _oscar_rotations(model: Any) -> list[tuple[ReadBack, ReadBack]]:
    """Returns (keys, values) of each layer, rotated by U H P. U are the eigenvectors of a matrix, largest first, H is a
    Hadamard transform, P orders channels by their bit-reversed numbers. For keys the matrix is the second moment C of
    the queries, for values that of the values, in which a token counts by k^T C k. Both are means over KV heads."""
    found: list[tuple[ReadBack, ReadBack]] = []

    def hook(module: torch.nn.Module, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        q = query[0].float().unflatten(0, (key.shape[1], -1)).flatten(1, 2)  # [kv_heads, tokens of all its heads, ..]
        k, v = key[0].float(), value[0].float()
        seen = q.mT @ q
        weight = torch.einsum("htc,hcd,htd->ht", k, seen, k)
        matrices = (_mixed(seen.mean(0)), _mixed((v.mT @ (weight[..., None] * v)).mean(0)))
        found.append((_turned(matrices[0], _clipped(OSCAR_KEYS)), _turned(matrices[1], _clipped(OSCAR_VALUES))))

    ids = sample(model, None, None, 1 << 20).ids[0].to(model.device)
    with tapped(model) as tap:
        tap.hook = hook
        model.base_model(input_ids=ids, use_cache=False)
    return found


def _mixed(moment: Tensor) -> Tensor:
    """Returns U H P of `_oscar_rotations` for a second moment [channels, channels]."""
    size = len(moment)
    axes = torch.linalg.eigh(moment.double().cpu()).eigenvectors.flip(1).float()
    order = [int(f"{i:0{size.bit_length() - 1}b}"[::-1], 2) for i in range(size)]
    return (axes @ _hadamard(size))[:, order]


def _same(change: ReadBack, bits: Callable[[int], float]) -> Baseline:
    return Baseline(change, change, bits)


BASELINES: dict[str, Baseline] = {
    "fp8 e4m3": _same(_fp8, lambda _: 8.0),
    "NVFP4": _same(_nvfp4, lambda _: 4 + 8 / 16),
    "q4_0": _same(_q4_0, lambda _: 4 + 16 / 32),
    "q4_0 after Hadamard": _same(_rotated(_q4_0), lambda _: 4 + 16 / 32),
    "int4 per token and head": _same(_int4, lambda head_dim: 4 + 2 * 16 / head_dim),
    "KIVI, 4 bits, groups of 32": _kivi(4),
    "KIVI, 2 bits, groups of 32": _kivi(2),
    "KVarN, keys 4, values 2 bits": _kvarn(4, 2),
    "KVarN, keys 4, values 2 bits, its own exact tokens": _kvarn(4, 2, (128, 0, 128)),
    "OSCAR, 2 bits": _oscar(),
    "OSCAR, 2 bits, its own exact tokens": _oscar((64, 256, 0)),
    **{f"TurboQuant mse, {b} bits, 2 + 2 layers exact": _mse(b, 2) for b in (4, 3, 2)},
}


def measured(
    model: Any, windows: Tensor, baselines: Mapping[str, Baseline], sinks: int, generate: int
) -> dict[str, dict[str, float]]:
    """Returns the metrics of `turboquant.evaluate` by name, for each baseline. windows: ids [windows, tokens]."""
    divergences: dict[str, list[np.ndarray]] = {name: [] for name in baselines}
    equal: dict[str, list[int]] = {name: [] for name in baselines}
    losses, same, plain = dict.fromkeys(baselines, 0.0), dict.fromkeys(baselines, 0), 0.0
    half = windows.shape[1] // 2
    each = {name: baseline.of_layers(model) for name, baseline in baselines.items()}
    with tqdm(total=len(windows) * (1 + len(baselines)), unit="run") as bar, torch.no_grad():
        for ids in windows.split(1):
            reference = model(input_ids=ids, use_cache=False).logits
            plain += _loss(reference, ids)
            prompt = ids[:, :half]
            full = list(islice(_greedy(model, prompt, DynamicCache(config=model.config)), generate))
            bar.update()
            for name, baseline in baselines.items():
                with simulated(model, baseline, sinks, each[name]):
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
            "effective_bits": baseline.mean_bits(head_dim, text.num_hidden_layers, windows.shape[1]),
            **(FreeRunning(half, generate, tuple(equal[name])).metrics() if generate else {}),
        }
    return found
