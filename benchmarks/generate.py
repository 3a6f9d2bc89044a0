"""End to end on a GPU: decoding speed and memory of a Llama of the 8B shape with random weights, bf16 cache and packed.

    python benchmarks/generate.py [--case BATCH,TOKENS ...] [--out benchmarks/results/h200]

The prompt is not computed: caches are filled with random keys and values, since only the speed of decoding is asked.
Both run the same model eagerly, one forward a token; the full cache is transformers' DynamicCache with SDPA, as
`generate` has it by default.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from timing import RESULTS, Report
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import turboquant
from turboquant.attention import attention

CONFIG = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
)
STEPS, WARM = 12, 4


def fill(model: Any, cache: Any, batch: int, tokens: int) -> None:
    """Random keys and values of `tokens` tokens in every layer, through the doors that a prefill uses."""
    shape = (batch, CONFIG.num_key_value_heads, tokens, CONFIG.head_dim)
    k = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        if isinstance(cache, DynamicCache):
            cache.update(k.clone(), k.clone(), i)
            continue
        keys, values = cache.update(k, k, i)
        query = torch.zeros(
            batch, CONFIG.num_attention_heads, tokens, CONFIG.head_dim, device="cuda", dtype=torch.bfloat16
        )
        attention(layer.self_attn, query, keys, values, None, scaling=CONFIG.head_dim**-0.5)


@torch.inference_mode()
def decode(model: Any, cache: Any, batch: int, tokens: int) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    fill(model, cache, batch, tokens)
    held = cache.nbytes if hasattr(cache, "nbytes") else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    ids = torch.ones(batch, 1, dtype=torch.long, device="cuda")
    times = []
    for _ in range(WARM + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    step = sorted(times[WARM:])[STEPS // 2]
    return {"tokens_per_s": round(batch / step, 1), "ms_per_step": round(step * 1e3, 3), "cache_bytes": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=["1,4096", "1,32768", "8,32768", "32,4096", "16,32768"])
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    report = Report("generate", "cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)  # slower than flash here: it plans anew for every length
    with torch.device("cuda"):
        model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()
    for case in args.case:
        batch, tokens = map(int, case.split(","))
        for name in ("bf16", "4", "3", "2"):
            torch.cuda.empty_cache()
            if name == "bf16":
                turboquant.unpatch(model)
                cache: Any = DynamicCache(config=CONFIG)
            else:
                spec = turboquant.CacheSpec(
                    key_bits=int(name), value_bits=int(name), centre="prompt", sinks=4, window=128
                )
                turboquant.patch(model, spec)
                cache = turboquant.TurboQuantCache(CONFIG, spec)
            try:
                metrics = decode(model, cache, batch, tokens)
            except torch.cuda.OutOfMemoryError:
                metrics = {"tokens_per_s": None, "out_of_memory": True}
            del cache
            report.add("decode", {"batch": batch, "tokens": tokens, "cache": name}, metrics)
            print(case, name, metrics, flush=True)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
