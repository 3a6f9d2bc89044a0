"""Times a layer of latent attention with the sizes of DeepSeek V3 (128 heads, latents of 512 and 64 channels, float32)
over packed latents: a forward that absorbs `kv_b_proj` where that is cheaper, and one that expands all latents.

    python benchmarks/latent.py --json benchmarks/results/MACHINE/latent.json

The weights are random and the model's other parts small. Both ways run in turns, and their results are compared first.
`peak_mib` is the most that a forward adds to the resident memory of the process (Linux).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import Report

import turboquant
from turboquant import CacheSpec, TurboQuantCache
from turboquant.hf import absorbed

WAYS = {"absorbed": absorbed.is_cheaper, "expanded": lambda *counts: False}
RANK, ROTARY = 512, 64


def model_of_one_layer() -> Any:
    config = transformers.DeepseekV3Config(vocab_size=128, hidden_size=512, intermediate_size=512, num_hidden_layers=1,
                                           q_lora_rank=256, eos_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(config).eval()


def resident(field: str) -> int:
    """Returns resident bytes of this process: VmRSS are those now, VmHWM the most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def forward(model: Any, cache: TurboQuantCache, way: str, new: int) -> tuple[torch.Tensor, float, int]:
    """Returns logits, seconds and peak bytes of a forward of `new` tokens, which the cache forgets afterwards."""
    absorbed.is_cheaper = WAYS[way]  # type: ignore[assignment]
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.perf_counter()
    logits = model(torch.arange(5, 5 + new)[None], past_key_values=cache).logits
    seconds = time.perf_counter() - began
    peak = resident("VmHWM") - before
    cache.crop(-new)
    return logits, seconds, peak


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--new", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = CacheSpec(4, 4, centre="none", metric="none", sinks=0, window=0)
    model, report = turboquant.patch(model_of_one_layer(), spec), Report("latent", "cpu")
    for tokens in args.tokens:
        cache = TurboQuantCache(model)
        random = (torch.randn(1, 1, tokens, size) for size in (RANK, ROTARY))
        cache.update(*random, 0)
        for new in args.new:
            first = {way: forward(model, cache, way, new)[0] for way in WAYS}
            torch.testing.assert_close(first["absorbed"], first["expanded"], rtol=0, atol=1e-4)
            runs: dict[str, list[Any]] = {way: [] for way in WAYS}
            for _ in range(args.repeats):
                for way, own in runs.items():
                    own.append(forward(model, cache, way, new)[1:])
            for way, own in runs.items():
                times, peaks = zip(*own)
                metrics = {"ms": round(statistics.median(times) * 1e3, 2), "peak_mib": round(max(peaks) / 2**20, 1)}
                report.add("latent", {"tokens": tokens, "new": new, "way": way, "bits": 4}, metrics)
                print(tokens, new, way, metrics, flush=True)
    if args.json:
        report.name = args.json.stem
        report.save(args.json.parent)


if __name__ == "__main__":
    main()
