"""Compares the divergence of several specs on the same tokens, to tell a difference from noise.

    python benchmarks/paired.py --real gemma3 --windows 6
    python benchmarks/paired.py --real smollm2 --texts source FOLDER --windows 4

Each token has a divergence from the full cache (KL, nats) for each spec. The other specs are compared with the last
one, by the ratio of the means, and by their difference with a standard error, which comes from the differences over
blocks of 128 tokens. One token of the vocabulary can make up much of a mean. Rows name the one with the largest share
of the divergence that is measured after it; figures with "_without" leave out its places.

Specs: a preset as it is; "NAME, no term": without its variance term; "NAME, searched": also with one width in all
layers; "NAME, plain": also without the search of scales. Texts and windows are those of quality.py; models run in
float32. With --every N only every Nth token counts, and blocks have 128 / N tokens: for models with a large vocabulary.
File: paired_<model>.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quality import load_real, others
from texts import real_windows, text_of
from timing import RESULTS, Report, commit
from tqdm import tqdm

import turboquant
from turboquant import CacheSpec
from turboquant.evaluation.decoder import _ready
from turboquant.models.names import CACHE, cache_argument
from turboquant.models.outputs import token_divergence

BLOCK = 128
SLICE = 256  # tokens whose logits are held together
F32 = NDArray[np.float32]


def spec_of(name: str) -> CacheSpec:
    preset, _, kind = name.partition(", ")
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        "no term": {"variance_term": False},
        "searched": {"uniform": True, "variance_term": False},
        "plain": {"uniform": True, "tries": 0, "variance_term": False},
    }
    if kind not in kinds:
        raise SystemExit(
            f"`--specs` must have names such as 'default', 'default, searched' or 'default, plain', got {name!r}"
        )
    return turboquant.preset(preset).with_(**kinds[kind])


@torch.inference_mode()
def divergences(model: Any, windows: torch.Tensor, specs: dict[str, CacheSpec], every: int) -> dict[str, F32]:
    """Returns [windows, tokens / every] for each spec. Logits are made in slices of tokens, from hidden states."""
    found: dict[str, list[F32]] = {name: [] for name in specs}
    body, head = model.base_model, model.get_output_embeddings()
    option = cache_argument(model.forward) or CACHE
    with _ready(model, specs, None) as caches:
        for ids in tqdm(windows.split(1), unit="window", disable=None):
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state[:, ::every].split(SLICE, 1)
            packed = {
                name: body(input_ids=ids, use_cache=True, **{option: caches(name, "packed")}).last_hidden_state
                for name in specs
            }
            parts = {name: one[:, ::every].split(SLICE, 1) for name, one in packed.items()}
            for i, part in enumerate(hidden):
                reference = head(part)
                for name in specs:
                    found[name].append(token_divergence(reference, head(parts[name][i]))[0].cpu().numpy())
    return {name: np.concatenate(each).reshape(len(windows), -1) for name, each in found.items()}


def compared(each: dict[str, F32], ids: NDArray[np.int64], block: int) -> tuple[int, dict[str, dict[str, float]]]:
    """Returns the token that makes up most of the divergence of all specs, and the metrics of each spec beside the last
    one. each: [windows, tokens] by spec;  ids: the token at each place, after which divergence is measured."""
    kinds, which = np.unique(ids, return_inverse=True)
    sums = np.bincount(which.ravel(), np.sum(list(each.values()), 0).ravel())
    worst = int(kinds[sums.argmax()])
    rows: dict[str, dict[str, float]] = {name: {} for name in each}
    for end, counted in (("", np.ones_like(ids, bool)), ("_without", ids != worst)):
        base = list(each.values())[-1].astype(np.float64) * counted
        for name, one in each.items():
            kl = one.astype(np.float64) * counted
            blocks = (kl - base).ravel()[: base.size // block * block].reshape(-1, block).mean(1)
            rows[name] |= {
                f"kl_divergence{end}": kl.sum() / counted.sum(),
                f"ratio{end}": kl.sum() / base.sum(),
                f"difference{end}": (kl - base).sum() / counted.sum(),
                f"standard_error{end}": blocks.std(ddof=1) / len(blocks) ** 0.5 * ids.size / counted.sum(),
            }
    for name, one in each.items():
        rows[name] |= {
            "kl_divergence_p99": float(np.quantile(one, 0.99)),
            "share_of_worst_token": float(one[ids == worst].sum() / one.sum()),
        }
    return worst, {name: {key: float(f"{x:.4g}") for key, x in row.items()} for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", choices=("smollm2", "gemma3"), required=True)
    parser.add_argument("--texts", nargs="+", default=["wikitext2"], help="wikitext2, source, or folders of files")
    parser.add_argument("--specs", nargs="+", default=["default", "default, searched", "default, plain"])
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--every", type=int, default=1, help="which tokens count")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=Path, help="a folder for the divergences of all tokens, as .npz")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    model, tokenizer = load_real(args.real, args.device)
    specs = {name: spec_of(name) for name in args.specs}
    report = Report(f"paired_{args.real}", args.device)
    for text in args.texts:
        windows = real_windows(text_of(text), tokenizer, args.windows, args.length)
        each = divergences(model, windows.to(args.device), specs, args.every)
        if args.tokens is not None:
            np.savez(args.tokens / f"{args.real}_{Path(text).name}.npz", ids=windows.numpy(), **each)
        worst, rows = compared(each, windows[:, :: args.every].numpy(), BLOCK // args.every)
        for name, metrics in rows.items():
            params = {
                "spec": name,
                "model": args.real,
                "text": Path(text).name,
                "windows": len(windows),
                "length": args.length,
                "every": args.every,
                "worst_token": tokenizer.convert_ids_to_tokens(worst),
                "dtype": "float32",
                "commit": commit(),
            }
            report.add("paired", params, metrics)
            print(json.dumps({**params, **metrics}, ensure_ascii=False), flush=True)
        measured = report.rows
        report.rows = others(Path(args.out) / f"{report.name}.json", measured) + measured
        report.save(args.out)


if __name__ == "__main__":
    main()
