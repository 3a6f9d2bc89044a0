"""Measures what `TurboQuantCache(memory_limit=)` costs: the divergence of caches whose pages fell to fewer bits, beside
that of caches packed at the same final widths from the start.

    python benchmarks/memory_limit.py --real smollm2 --json benchmarks/results/MACHINE/memory_limit_smollm2.json

A text goes through a cache in pieces of 128 tokens, so that pages fall while it is read. The second half of the text is
then read in one forward, and its logits are compared with the full cache's: KL in nats a token. Limits are shares of
the bytes that the first half takes without a limit.

--order costs lets those pages fall whose errors cost least for the bytes that they free. --order layers does not know
the costs: the widest fall first, values before keys, the first layer before the last.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quality import load_real
from texts import real_windows, text_of

import turboquant
from turboquant import CacheSpec, TurboQuantCache

PIECE = 128


def cache_of(
    model: Any, ids: torch.Tensor, limit: int | None, specs: Sequence[CacheSpec] = (), order: str = "costs"
) -> TurboQuantCache:
    """Returns a cache that has read ids [1, tokens]. specs: those of the layers from the start. order: as --order."""
    cache = TurboQuantCache(model, memory_limit=limit)
    if order == "layers":
        cache._shared.limit.costs = [[1.0, 1.0] for _ in cache.packed_layers]
    elif limit is not None and (cache.moments is None or cache.moments.costs is None):
        raise SystemExit("the moments of this model have no costs: there is no order by them")
    for layer, spec in zip(cache.packed_layers, specs):
        layer.storage.spec = spec
    for piece in ids.split(PIECE, 1):
        model(piece, past_key_values=cache)
    return cache


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default="smollm2", help="a model of make real-models")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.95, 0.9, 0.85, 0.8])
    parser.add_argument("--order", nargs="+", choices=("costs", "layers"), default=["costs"], help="of falls")
    parser.add_argument("--uniform", action="store_true", help="begin with one width, not with a width for each side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_real(args.real, "cpu")
    windows = real_windows(text_of("wikitext2"), tokenizer, args.windows, args.tokens)
    half, rows = args.tokens // 2, []
    full = [model(ids[None], use_cache=False).logits[0, half:].log_softmax(-1) for ids in windows]
    turboquant.patch(model, "default")
    TurboQuantCache(model)  # measures costs, which a spec with one width does not ask for
    if args.uniform:
        turboquant.unpatch(model)
        turboquant.patch(model, CacheSpec(uniform=True))
    for share, order in itertools.product(args.shares, args.order):
        fell, packed, bits = [], [], []
        for ids, want in zip(windows, full, strict=True):
            first, second = ids[None, :half], ids[None, half:]
            limit = int(share * cache_of(model, first, None).nbytes)
            one = cache_of(model, first, limit, order=order)
            specs = [layer.spec for layer in one.packed_layers]
            bits.append(sum(spec.key_bits + spec.value_bits for spec in specs) / (2 * len(specs)))
            one._shared.limit = None  # the second half is read at these widths
            for cache, out in ((one, fell), (cache_of(model, first, None, specs), packed)):
                logs = model(second, past_key_values=cache).logits[0].log_softmax(-1)
                out.append(float((want.exp() * (want - logs)).sum(-1).mean()))
        mean = [sum(each) / len(each) for each in (bits, fell, packed)]
        row = {"share": share, "order": order, "bits": mean[0], "fell": mean[1], "packed": mean[2]}
        rows.append({**row, "ratio": mean[1] / mean[2]})
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        about = {"model": args.real, "windows": args.windows, "tokens": args.tokens, "uniform": args.uniform}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
