"""Times decoding of real models on a CPU, with transformers' own cache and with packed ones, by context.

    python benchmarks/cpu_generate.py MODEL [MODEL ...] [--threads N ...] [--out benchmarks/results/<machine>]

A prompt of random tokens is forwarded, then single tokens are decoded. The caches take turns, so that a busy machine
is busy for all of them. There are no sinks and no window: every token is packed.

    decode     tokens/s with the model in float32: `full` is DynamicCache with SDPA
    overhead   microseconds that a layer spends in the cache's update and the attention function together, over 8 to 108
               tokens. The kernels have little to do there, so this is Python and the operators. In a step of the model,
               whose weights push their code out of the CPU's caches, and alone: one layer's again and again
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from timing import RESULTS, Report
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import AttentionInterface

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf.attention import NAME, attention
from turboquant.models.names import CACHE

CONTEXTS = (512, 1024, 2048, 4000)
STEPS = 32


def cache_of(model: Any, name: str) -> Any:
    """Prepares the model for a cache of that name, and returns the cache."""
    turboquant.unpatch(model)
    if name == "full":
        return DynamicCache(config=model.config)
    spec = turboquant.CacheSpec(int(name), int(name), centre="none", metric="none", sinks=0, window=0)
    turboquant.patch(model, spec)
    return TurboQuantCache(model.config, spec)


def step(model: Any, cache: Any, token: torch.Tensor) -> float:
    """Returns the seconds of one decoding step."""
    start = time.perf_counter()
    model(input_ids=token, **{CACHE: cache})
    return time.perf_counter() - start


@torch.inference_mode()
def decode(model: Any, tokens: int) -> dict[str, dict[str, float]]:
    """Returns, by cache, the speed right after `tokens` tokens."""
    prompt, token = torch.randint(0, model.config.vocab_size, (1, tokens)), torch.tensor([[1]])
    times: dict[str, list[float]] = {name: [] for name in ("full", "4", "3", "2")}
    caches = {}
    for name in times:
        caches[name] = cache_of(model, name)
        model(input_ids=prompt, **{CACHE: caches[name]})
    for _ in range(STEPS // 8):
        for name in times:
            turboquant.unpatch(model)
            if name != "full":
                turboquant.patch(model, caches[name].spec)
            step(model, caches[name], token)
            times[name] += [step(model, caches[name], token) for _ in range(8)]
    per_s = {name: 1 / statistics.median(t) for name, t in times.items()}
    return {
        name: {
            "tokens_per_s": round(x, 1),
            "x_full": round(x / per_s["full"], 3),
            "bytes": getattr(caches[name], "nbytes", 2 * model.config.num_hidden_layers * kv_bytes(model, tokens)),
        }
        for name, x in per_s.items()
    }


def kv_bytes(model: Any, tokens: int) -> int:
    config = model.config
    return int(tokens * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)


@torch.inference_mode()
def overhead(model: Any) -> dict[str, float]:
    """Returns the time that a layer's update and attention take when there are few tokens."""
    cache = cache_of(model, "4")
    model(input_ids=torch.ones(1, 8, dtype=torch.long), **{CACHE: cache})
    spent = 0.0

    def timed(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            out = call(*args, **kwargs)
            spent += time.perf_counter() - start
            return out

        return run

    token, times = torch.tensor([[1]]), []
    AttentionInterface.register(NAME, timed(attention))
    try:
        with patch.object(TurboQuantCache, "update", timed(TurboQuantCache.update)):
            for _ in range(100):
                spent = 0.0
                model(input_ids=token, **{CACHE: cache})
                times.append(spent / model.config.num_hidden_layers * 1e6)
    finally:
        AttentionInterface.register(NAME, attention)
    cache, module = cache_of(model, "4"), model.model.layers[0].self_attn
    model(input_ids=torch.ones(1, 8, dtype=torch.long), **{CACHE: cache})
    config = model.config
    q, k = (torch.randn(1, n, 1, module.head_dim) for n in (config.num_attention_heads, config.num_key_value_heads))
    alone = []
    for _ in range(100):
        start = time.perf_counter()
        fresh, v = cache.update(k, k, 0)
        attention(module, q, fresh, v, None, module.scaling)
        alone.append((time.perf_counter() - start) * 1e6)
    return {
        "us_per_layer_in_step": round(statistics.median(times), 1),
        "us_per_layer_alone": round(statistics.median(alone), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders of models in the Hugging Face format")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", default=RESULTS / "local", help="folder for cpu_generate.json")
    args = parser.parse_args()
    report = Report("cpu_generate", "cpu")
    torch.manual_seed(0)
    for path in args.models:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for threads in args.threads:
            torch.set_num_threads(threads)
            params = {"model": path.name, "threads": threads}
            report.add("overhead", params, overhead(model))
            print(report.rows[-1], flush=True)
            for tokens in (t for t in CONTEXTS if t + 2 * STEPS <= model.config.max_position_embeddings):
                for name, metrics in decode(model, tokens).items():
                    report.add("decode", {**params, "tokens": tokens, "cache": name}, metrics)
                    print(report.rows[-1], flush=True)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
