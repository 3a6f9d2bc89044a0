"""Simulates what a variance term in attention gains: the study behind docs/how.md, "The variance term".

    python benchmarks/variance_term.py --real smollm2 --windows 1 --length 1024 --bits 3 2 --out FILE.json

The logit of a packed key is right on average over the rotation's signs, and its exponential is too large: noise of
variance v makes it exp(v / 2) times as large. With y = A (k - c_p) and y' what is decoded, EDEN's scale makes <y, y'>
equal |y|^2, so the error's square is e2 = |y'|^2 - |y|^2, and a logit has the variance (scale |A^-1 q|)^2 e2 / d. The
term subtracts alpha / 2 of that from the logits of packed tokens. "exact" takes e2 itself, which a cache does not
store; "K s^2" takes a constant of (bits, channels, tries) times the squared scale, which it does.

Keys and values are rounded here, in float32, as a cache of the default method rounds them; their scales stay float32.
Where there is a window, layers share bits as the presets' do, unless --uniform is given.
Columns: bits, exact tokens, e2, alpha, and the mean KL divergence of the next token in nats.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quality import load_real
from texts import real_windows, text_of
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import turboquant
from turboquant import CacheSpec, Plan, Profile, _core
from turboquant.measured import shared_widths, used_by
from turboquant.models.attention import request_mask
from turboquant.models.kinds import kinds_of
from turboquant.models.outputs import token_divergence
from turboquant.models.routing import routed_configs, set_name

NAME = "variance_term_study"
SLICE = 256  # tokens whose logits are held together
TRIES = {0: [1.0], 3: [1.0, 0.9, 1.125]}  # factors of turboquant.h
EXACT = {"4 sinks, window 128": (4, 128), "4 sinks": (4, 0), "none": (0, 0)}


class Row(NamedTuple):
    bits: int
    exact: str
    e2: str  # "none", "exact" or "K s^2"
    alpha: float


@functools.cache
def levels(bits: int, channels: int) -> torch.Tensor:
    book = _core.codebook(0, channels, bits)
    return torch.tensor(sorted(float(level) * float(book["step"]) for level in book["levels"]))


@functools.cache
def rotation(channels: int) -> torch.Tensor:
    """Returns R, [channels, channels]: x @ R is the rotated x."""
    return torch.from_numpy(_core.rotate(Plan(channels, 4).words, torch.eye(channels).numpy()))


class Widths(NamedTuple):
    """Widths and tries of one layer."""

    key_bits: int
    value_bits: int
    tries: int


def rounded(y: torch.Tensor, bits: int, tries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y decoded, its scale [..]) for y [.., channels]."""
    channels = y.shape[-1]
    u = y.float() @ rotation(channels)
    u = u / u.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    book = levels(bits, channels)
    edges = (book[1:] + book[:-1]) / 2
    best, kept = torch.full(u.shape[:-1], -1.0), torch.zeros_like(u)
    for factor in TRIES[tries]:
        tried = book[torch.bucketize(u * factor, edges)]
        cosine = (u * tried).sum(-1) / tried.square().sum(-1).sqrt()
        better = cosine > best
        best, kept = torch.where(better, cosine, best), torch.where(better[..., None], tried, kept)
    norm = y.float().square().sum(-1).sqrt()
    scale = norm * math.sqrt(channels) / (u * kept).sum(-1)
    return (scale[..., None] * kept) @ rotation(channels).mT, scale


@functools.cache
def constant(bits: int, channels: int, tries: int) -> float:
    """Returns K, the mean of e2 / s^2 over Gaussian vectors."""
    y = torch.randn(20000, channels, generator=torch.Generator().manual_seed(0))
    decoded, scale = rounded(y, bits, tries)
    return float(((decoded.square().sum(-1) - y.square().sum(-1)) / scale.square()).mean())


class Study:
    """The attention function, with keys and values rounded as `row` says."""

    def __init__(self, model: Any, tokenizer: Any, uniform: bool) -> None:
        self.model, self.uniform, self.row = model, uniform, None
        self.moments = turboquant.measure(model, tokenizer).moments
        self.widths = functools.cache(self._widths)

    def _widths(self, bits: int, window: int) -> list[Widths]:
        """Returns the widths of each layer for an average number of bits."""
        spec, kinds = CacheSpec(bits, bits, window=window, uniform=self.uniform), kinds_of(self.model.config)
        specs, _, moments = used_by(spec, Profile(self.moments), len(kinds))
        specs = shared_widths(spec, specs, moments, [kind for kind, _ in kinds])
        return [Widths(one.key_bits, one.value_bits, one.tries) for one in specs]  # type: ignore[arg-type]

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        heads, tokens, channels = key.shape[1:]
        scaling = channels**-0.5 if scaling is None else scaling
        q = query[0].unflatten(0, (heads, -1))  # [kv_heads, group, tokens, channels]
        mask = attention_mask.of_kind("sdpa")
        at = torch.arange(tokens)
        seen = (at[:, None] >= at)[None, None] if mask is None else mask
        logits = (q @ key[0].unsqueeze(1).mT * scaling).masked_fill(~seen[0], -math.inf)
        if self.row is None:
            out = logits.softmax(-1) @ value[0].unsqueeze(1)
            return out.flatten(0, 1).transpose(0, 1)[None], None
        sinks, window = EXACT[self.row.exact]
        layer = self.moments.layers[module.layer_idx]
        there, back = (torch.from_numpy(a).float() for a in layer.metric())
        centre = torch.from_numpy(layer.centre_at(at.numpy())).float()
        y = (key[0] - centre) @ there
        bits = self.widths(self.row.bits, window)[module.layer_idx]
        decoded, scale = rounded(y, bits.key_bits, bits.tries)
        turned = q @ back.unsqueeze(1)  # A is symmetric
        packed = (turned @ decoded.unsqueeze(1).mT + q @ centre.unsqueeze(1).mT) * scaling
        if self.row.e2 != "none":
            e2 = decoded.square().sum(-1) - y.square().sum(-1)
            e2 = e2 if self.row.e2 == "exact" else constant(bits.key_bits, channels, bits.tries) * scale.square()
            r = (scaling * turned).square().sum(-1) / (2 * channels)
            packed = packed - self.row.alpha * r[..., None] * e2[:, None, None]
        is_exact = (at[:, None] - at < window) | (at < sinks)
        logits = torch.where(is_exact, logits, packed).masked_fill(~seen[0], -math.inf)
        weights = logits.softmax(-1)
        values = rounded(value[0], bits.value_bits, bits.tries)[0]
        out = (weights * is_exact) @ value[0].unsqueeze(1) + (weights * ~is_exact) @ values.unsqueeze(1)
        return out.flatten(0, 1).transpose(0, 1)[None], None


def rows(bits: list[int], exact: list[str], alphas: list[float]) -> list[Row]:
    terms = [("none", 0.0), ("exact", 1.0), *(("K s^2", alpha) for alpha in alphas)]
    return [Row(b, where, *term) for where in exact for b in bits for term in terms]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--text", default="wikitext2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--exact", nargs="+", choices=EXACT, default=list(EXACT))
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--every", type=int, default=1, help="which tokens count")
    parser.add_argument("--uniform", action="store_true", help="one width in all layers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_real(args.real, "cpu")
    study = Study(model, tokenizer, args.uniform)
    windows = real_windows(text_of(args.text), tokenizer, args.windows, args.length)
    AttentionInterface.register(NAME, study.attention)
    AttentionMaskInterface.register(NAME, request_mask)
    for config in routed_configs(model):
        set_name(config, NAME)
    found: dict[Row, list[float]] = {row: [] for row in rows(args.bits, args.exact, args.alphas)}
    head = model.get_output_embeddings()

    def hidden(ids: torch.Tensor, row: Row | None) -> torch.Tensor:
        study.row = row
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :: args.every]

    for ids in windows.split(1):
        reference = hidden(ids, None)
        for row in found:
            changed, sums = hidden(ids, row), 0.0
            for want, got in zip(reference.split(SLICE, 1), changed.split(SLICE, 1)):
                sums += float(token_divergence(head(want), head(got)).sum())
            found[row].append(sums / reference.shape[1])
            print(*row, f"{found[row][-1]:.5f}", sep="\t", flush=True)
        made = [{**row._asdict(), "kl": each} for row, each in found.items()]
        if args.out is not None:
            told = {
                "model": args.real,
                "text": args.text,
                "windows": args.windows,
                "length": args.length,
                "every": args.every,
            }
            args.out.write_text(json.dumps({**told, "rows": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
