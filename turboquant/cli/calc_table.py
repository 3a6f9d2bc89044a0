"""Sizes of models and speeds of GPUs, for ``turboquant calc``: data alone."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GPUS", "ITEM_BYTES", "MODELS", "TIMED", "TIMED_BYTES", "TIMES", "Row"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number, by the dtype of a model


class Row(NamedTuple):
    """The sizes that a model's cache depends on, from `source`, a file on the Hugging Face hub."""

    source: str
    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0  # of the layers in `pattern` that have one
    pattern: str = "f"  # repeated over the layers: f full, s sliding, c chunked, n no keys and values, m latent
    shared: int = 0  # how many of the last layers read the keys and values of earlier ones
    full: tuple[int, int] | None = None  # (kv_heads, head_dim) of the full layers, if they differ


# Latent layers (m) store one vector for each token: kv_lora_rank + qk_rope_head_dim numbers, here head_dim.
MODELS = {
    "llama-3-8b": Row("meta-llama/Meta-Llama-3-8B config.json", 32, 8, 128),
    "llama-3-70b": Row("meta-llama/Meta-Llama-3-70B config.json", 80, 8, 128),
    "llama-3.1-8b": Row("meta-llama/Llama-3.1-8B config.json", 32, 8, 128),
    "llama-3.1-70b": Row("meta-llama/Llama-3.1-70B config.json", 80, 8, 128),
    "llama-3.1-405b": Row("meta-llama/Llama-3.1-405B config.json", 126, 8, 128),
    "llama-3.2-1b": Row("meta-llama/Llama-3.2-1B config.json", 16, 8, 64),
    "llama-3.2-3b": Row("meta-llama/Llama-3.2-3B config.json", 28, 8, 128),
    "llama-4-scout": Row("meta-llama/Llama-4-Scout-17B-16E-Instruct config.json", 48, 8, 128, 8192, "cccf"),
    "gemma-2-2b": Row("google/gemma-2-2b config.json", 26, 4, 256, 4096, "sf"),
    "gemma-2-9b": Row("google/gemma-2-9b config.json", 42, 8, 256, 4096, "sf"),
    "gemma-2-27b": Row("google/gemma-2-27b config.json", 46, 16, 128, 4096, "sf"),
    "gemma-3-1b": Row("google/gemma-3-1b-it config.json", 26, 1, 256, 512, "sssssf"),
    "gemma-3-4b": Row("google/gemma-3-4b-it config.json", 34, 4, 256, 1024, "sssssf"),
    "gemma-3-12b": Row("google/gemma-3-12b-it config.json", 48, 8, 256, 1024, "sssssf"),
    "gemma-3-27b": Row("google/gemma-3-27b-it config.json", 62, 16, 128, 1024, "sssssf"),
    "gemma-3n-e4b": Row("google/gemma-3n-E4B config.json", 35, 2, 256, 512, "ssssf", shared=15),
    "gemma-4-26b-a4b": Row("google/gemma-4-26B-A4B config.json", 30, 8, 256, 1024, "sssssf", full=(2, 512)),
    "qwen2.5-7b": Row("Qwen/Qwen2.5-7B config.json", 28, 4, 128),
    "qwen2.5-32b": Row("Qwen/Qwen2.5-32B config.json", 64, 8, 128),
    "qwen2.5-72b": Row("Qwen/Qwen2.5-72B config.json", 80, 8, 128),
    "qwen3-0.6b": Row("Qwen/Qwen3-0.6B config.json", 28, 8, 128),
    "qwen3-4b": Row("Qwen/Qwen3-4B config.json", 36, 8, 128),
    "qwen3-8b": Row("Qwen/Qwen3-8B config.json", 36, 8, 128),
    "qwen3-14b": Row("Qwen/Qwen3-14B config.json", 40, 8, 128),
    "qwen3-32b": Row("Qwen/Qwen3-32B config.json", 64, 8, 128),
    "qwen3-30b-a3b": Row("Qwen/Qwen3-30B-A3B config.json", 48, 4, 128),
    "qwen3-235b-a22b": Row("Qwen/Qwen3-235B-A22B config.json", 94, 4, 128),
    "qwen3.5-27b": Row("Qwen/Qwen3.5-27B config.json", 64, 4, 256, pattern="nnnf"),
    "mistral-7b-v0.1": Row("mistralai/Mistral-7B-v0.1 config.json", 32, 8, 128, 4096, "s"),
    "mistral-7b-v0.3": Row("mistralai/Mistral-7B-v0.3 config.json", 32, 8, 128),
    "mistral-large-2411": Row("mistralai/Mistral-Large-Instruct-2411 config.json", 88, 8, 128),
    "mixtral-8x7b": Row("mistralai/Mixtral-8x7B-v0.1 config.json", 32, 8, 128),
    "mixtral-8x22b": Row("mistralai/Mixtral-8x22B-v0.1 config.json", 56, 8, 128),
    "phi-4": Row("microsoft/phi-4 config.json", 40, 10, 128),
    "olmo-2-7b": Row("allenai/OLMo-2-1124-7B config.json", 32, 32, 128),
    "smollm2-135m": Row("HuggingFaceTB/SmolLM2-135M config.json", 30, 3, 64),
    "smollm2-1.7b": Row("HuggingFaceTB/SmolLM2-1.7B config.json", 24, 32, 64),
    "gpt-oss-20b": Row("openai/gpt-oss-20b config.json", 24, 8, 64, 128, "sf"),
    "gpt-oss-120b": Row("openai/gpt-oss-120b config.json", 36, 8, 64, 128, "sf"),
    "deepseek-v2-lite": Row("deepseek-ai/DeepSeek-V2-Lite config.json", 27, 1, 512 + 64, pattern="m"),
    "deepseek-v3": Row("deepseek-ai/DeepSeek-V3 config.json", 61, 1, 512 + 64, pattern="m"),
    "kimi-k2": Row("moonshotai/Kimi-K2-Instruct config.json", 61, 1, 512 + 64, pattern="m"),
}

# Bytes per second that a GPU reads: measured for those in TIMES, for others 0.91 times the vendor's number, which is
# the share that the measured GPUs reach.
GPUS = {
    "h100": 3.043e12,
    "h200": 4.384e12,
    "a10": 0.91 * 0.600e12,
    "a100": 0.91 * 1.94e12,
    "b200": 0.91 * 8.0e12,
    "l4": 0.91 * 0.300e12,
    "l40s": 0.91 * 0.864e12,
}

# Microseconds of one attention call in a decoding step, by TIMED, the tokens of all sequences times KV heads. Packed in
# 2, 3 or 4 bits, or in several widths with a mean of 3 ("mixed"), or bfloat16 (the faster of cuDNN and FlashAttention).
# From benchmarks/results/h100/attend.json and h200/attend.json: heads of 128 channels with at most 8 queries each; the
# mean if several shapes have as many tokens.
TIMED = (16384, 32768, 65536, 262144, 1048576, 2097152, 4194304)
TIMED_BYTES = {"2": 68, "3": 100, "4": 132, "mixed": 100, "bf16": 512}  # of a token's key and value in one head
TIMES = {
    "h100": {
        "2": (4.6, 5.0, 6.0, 11.3, 29.4, 51.9, 97.6),
        "3": (5.1, 5.8, 7.7, 14.9, 41.9, 76.9, 145.5),
        "4": (5.2, 6.2, 8.2, 16.9, 52.5, 99.8, 188.7),
        "mixed": (6.5, 7.0, 8.8, 17.6, 46.2, 81.2, 152.6),
        "bf16": (9.3, 12.8, 18.9, 51.8, 181.5, 355.4, 695.5),
    },
    "h200": {
        "2": (5.1, 5.5, 6.0, 11.2, 24.8, 40.4, 70.3),
        "3": (5.4, 6.1, 7.8, 13.6, 33.0, 56.6, 101.0),
        "4": (5.6, 6.3, 8.3, 15.0, 40.7, 72.0, 132.5),
        "mixed": (6.7, 7.2, 8.8, 17.1, 42.4, 67.7, 116.3),
        "bf16": (8.6, 11.5, 15.4, 38.3, 128.8, 245.8, 478.8),
    },
}
