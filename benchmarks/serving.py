"""Measures quality in vLLM's engine on a CPU: blocks, NLL, log-probabilities of packed caches beside vLLM's own.

    build/vllm-venv/bin/python benchmarks/serving.py             `make test-vllm` has made the environment
    build/vllm-venv/bin/python benchmarks/serving.py --chunks    one chunk against chunks of 100 tokens

SmolLM2-135M (`make real-models`) in bfloat16, 1 GiB of cache, windows of 1,024 tokens of WikiText-2's test text, each
in one chunk. Every query reads what is packed. Prints the rows of docs/serving.md; `--out` is the folder of results.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from texts import real_windows, text_of
from timing import Report
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from turboquant.cli import main as turboquant

ROOT = Path(__file__).resolve().parents[1]
MODEL = Path(os.environ.get("TURBOQUANT_REAL_MODELS", ROOT / "build" / "real-models")) / "smollm2"
LENGTH = 1024
EIGHT = {"key_bits": 8, "value_bits": 8}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "8 bits": EIGHT,
    "default": {},
    "default, no sinks": {"sinks": 0},
    "default, profile null": {"profile": None},
    "compact": {"spec": "compact"},
    "tiny": {"spec": "tiny"},
}
CHUNKED: dict[str, dict[str, Any] | None] = {"stock": None, "8 bits": EIGHT, "default": {}}


def log_probs(settings: dict[str, Any] | None, texts: list[list[int]], **options: Any) -> tuple[NDArray[Any], int]:
    """Returns the log-probabilities of all tokens of `texts` but each first one, and how many blocks the cache has."""
    given: dict[str, Any] = {"max_num_batched_tokens": LENGTH, "dtype": "bfloat16"}
    if settings is not None:
        given["additional_config"] = {"turboquant": settings}
    llm = LLM(model=str(MODEL), max_model_len=LENGTH + 1, max_num_seqs=8, enforce_eager=True, seed=0,
              enable_prefix_caching=False, **given | options)  # fmt: skip
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    found = []
    for ids in texts:  # one at a time: two would share a chunk
        one = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
                           use_tqdm=False)[0]  # fmt: skip
        found.append([seen[token].logprob for seen, token in zip(one.prompt_logprobs[1:], ids[1:], strict=True)])
    del llm
    gc.collect()
    return np.array(found), blocks


def quality(texts: list[list[int]], report: Report) -> None:
    stock = None
    for name, settings in SETTINGS.items():
        given, blocks = log_probs(settings, texts)
        metrics = {"blocks": blocks, "nll": round(float(-given.mean()), 4)}
        if stock is None:
            stock = given
        else:
            metrics["nll_above"] = round(float(stock.mean() - given.mean()), 4)
            metrics["d_log_p"] = round(float(abs(given - stock).mean()), 4)
        report.add("vllm quality", {"settings": name, "windows": len(texts), "tokens": LENGTH}, metrics)
        print(f"{name}: {metrics}", flush=True)


def chunks(texts: list[list[int]], report: Report) -> None:
    for dtype in ("bfloat16", "float32"):
        for name, settings in CHUNKED.items():
            whole, _ = log_probs(settings, texts, dtype=dtype)
            parts, _ = log_probs(settings, texts, dtype=dtype, max_num_batched_tokens=100)
            off = abs(parts - whole)
            metrics = {"d_log_p": round(float(off.mean()), 5), "worst": round(float(off.max()), 4),
                       "nll_above": round(float(whole.mean() - parts.mean()), 5)}  # fmt: skip
            params = {"settings": name, "dtype": dtype, "windows": len(texts), "tokens": LENGTH}
            report.add("vllm chunks of 100", params, metrics)
            print(f"{name}, {dtype}: {metrics}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TURBOQUANT_CACHE"] = cache
        turboquant(["measure", str(MODEL)])
        texts = real_windows(text_of("wikitext2"), AutoTokenizer.from_pretrained(MODEL), args.windows, LENGTH).tolist()
        report = Report("vllm_chunks" if args.chunks else "vllm", "cpu")
        (chunks if args.chunks else quality)(texts, report)
        if args.out is not None:
            report.save(args.out)


if __name__ == "__main__":
    main()
