"""What a wave and a metric are worth on real models, simulated: the C core quantises keys and values and decodes them,
and the wave and the metric are applied around it in NumPy, float64.

    python benchmarks/moments.py smollm2 --out benchmarks/results/cpu

Needs `make real-models` and the shared texts. WikiText-2 test is tokenised without special tokens and cut into windows
of 2,048. 8 of them (SmolLM2) or 6 (Gemma, whose first token is replaced by BOS) are used, spread evenly from 30 % of
the windows on. The first 4 tokens are exact; everything else is packed, the query's own token too. Figures are KL
divergence from the full cache in nats a token; `floor` is what the method must reach. The weights are de-quantised
4-bit weights.
Rows are saved after each window; they replace those of the same model, method and width in moments.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import RESULTS, Report
from transformers import AutoModelForCausalLM, AutoTokenizer

import turboquant
from turboquant.measuring.tap import tapped
from turboquant.models.outputs import token_divergence

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("TURBOQUANT_SHARED", ROOT.parent / "shared"))
REAL_MODELS = Path(os.environ.get("TURBOQUANT_REAL_MODELS", ROOT / "build" / "real-models"))

LENGTH, SINKS, FIRST_MEAN = 2048, 4, 1024
WINDOWS = {"smollm2": 8, "gemma3": 6}
FLOORS = {"smollm2": {4: 0.0125, 3: 0.050, 2: 0.235}, "gemma3": {4: 0.0240, 3: 0.095, 2: 0.49}}
METHODS = ("moments", "moments of random ids", "mean of the prompt", "no centre")

Keys = Callable[[int, np.ndarray], np.ndarray]  # (layer, keys [kv_heads, tokens, head_dim]) -> what is decoded


def windows(model: str, tokenizer: Any, count: int, only: int | None) -> torch.Tensor:
    """[count, LENGTH], or the first `only` of those that are spread evenly."""
    text = (SHARED / "data" / "wikitext2_test.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    every = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    chosen = every[np.linspace(0.3 * len(every), len(every) - 1, count).round().astype(int)].clone()
    if model == "gemma3":
        chosen[:, 0] = tokenizer.bos_token_id
    return chosen if only is None else chosen[:: max(1, count // only)][:only]


class Rounded:
    """The C quantiser, for the heads of a layer together."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.made: dict[int, turboquant.Quantizer] = {}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        dim = x.shape[-1]
        if dim not in self.made:
            self.made[dim] = turboquant.Quantizer(dim, self.bits)
        rows = np.ascontiguousarray(x.reshape(-1, dim), np.float32)
        return self.made[dim].dequantize(self.made[dim].quantize(rows)).reshape(x.shape)


def with_moments(moments: turboquant.Profile, rounded: Rounded) -> Keys:
    prepared = []
    for layer in moments.layers:
        prepared.append((layer.centre_at(np.arange(SINKS, LENGTH)), *layer.metric()))

    def keys(layer: int, x: np.ndarray) -> np.ndarray:
        centre, there, back = prepared[layer]
        return rounded((x - centre) @ there) @ back + centre

    return keys


def with_mean(rounded: Rounded, tokens: int) -> Keys:
    def keys(layer: int, x: np.ndarray) -> np.ndarray:
        centre = x[:, :tokens].mean(1, keepdims=True) if tokens else 0
        return rounded(x - centre) + centre

    return keys


def states_of(model: Any, ids: torch.Tensor, keys: Keys | None, rounded: Rounded | None) -> torch.Tensor:
    """Last hidden states of one window [1, LENGTH], with decoded keys and values, or as they are."""

    def hook(
        module: torch.nn.Module, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if keys is None or rounded is None:
            return None
        decoded = keys(layer, key[0, :, SINKS:].double().numpy()), rounded(value[0, :, SINKS:].double().numpy())
        out = key.clone(), value.clone()
        for x, rows in zip(out, decoded):
            x[0, :, SINKS:] = torch.from_numpy(rows).to(x.dtype)
        return out

    with tapped(model) as tap:
        tap.hook = hook
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def divergences(model: Any, ids: torch.Tensor, decoders: Sequence[tuple[Keys, Rounded]]) -> list[float]:
    """Of each decoder, the mean over the tokens of one window; logits are made of a few tokens at a time."""
    reference = states_of(model, ids, None, None)
    states = [states_of(model, ids, *decoder) for decoder in decoders]
    totals = [0.0] * len(states)
    for start in range(0, LENGTH, 256):
        at = slice(None), slice(start, start + 256)
        with torch.no_grad():
            want = model.lm_head(reference[at])
            for i, each in enumerate(states):
                totals[i] += float(token_divergence(want, model.lm_head(each[at])).double().sum())
    return [total / LENGTH for total in totals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=WINDOWS)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:1])
    parser.add_argument("--windows", type=int, help="of those, to save time")
    parser.add_argument("--out", type=Path, default=RESULTS / "local")
    args = parser.parse_args()
    folder = REAL_MODELS / args.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = windows(args.model, tokenizer, WINDOWS[args.model], args.windows)

    decoders: dict[tuple[str, int], tuple[Keys, Rounded]] = {}
    for method in args.methods:
        if method == "moments of random ids":
            model.name_or_path = model.config._name_or_path = ""
        moments = turboquant.measure(model, tokenizer if method == "moments" else None)
        for bits in args.bits:
            rounded = Rounded(bits)
            if method.startswith("moments"):
                decoders[method, bits] = with_moments(moments, rounded), rounded
            else:
                decoders[method, bits] = with_mean(rounded, FIRST_MEAN if method.startswith("mean") else 0), rounded
    found: dict[tuple[str, int], list[float]] = {key: [] for key in decoders}
    for i, window in enumerate(ids.split(1)):
        start = time.perf_counter()
        for key, one in zip(found, divergences(model, window, list(decoders.values()))):
            found[key].append(one)
        print(f"window {i + 1} of {len(ids)}, {time.perf_counter() - start:.0f} s")
        for (method, bits), each in found.items():
            print(f"    {method}, {bits} bits: {np.mean(each):.5f}", flush=True)
        save(args.out, args.model, found)


def save(folder: Path, model: str, found: dict[tuple[str, int], list[float]]) -> None:
    """Rows of `found` replace those of the same model, method and width in the file."""
    report = Report("moments", "cpu")
    for (method, bits), each in found.items():
        params = {"model": model, "method": method, "bits": bits, "length": LENGTH, "sinks": SINKS, "simulated": True}
        metrics: dict[str, Any] = {"kl_divergence": float(f"{np.mean(each):.5g}")}
        if method == "moments":
            metrics |= {"floor": FLOORS[model][bits], "reached": bool(np.mean(each) <= FLOORS[model][bits])}
        report.add("moments", params, metrics | {"of_windows": [float(f"{x:.5g}") for x in each]})
    file = folder / "moments.json"
    new = [row["params"] for row in report.rows]
    held = json.loads(file.read_text())["rows"] if file.exists() else []
    report.rows = [row for row in held if row["params"] not in new] + report.rows
    report.save(folder)


if __name__ == "__main__":
    main()
