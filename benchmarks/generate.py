"""Times a whole model with bf16 and packed caches: a Llama of the 8B shape, random weights, on a GPU, or a real one.

    python benchmarks/generate.py [--case BATCH,TOKENS ...] [--compile] [--out benchmarks/results/h200]
    python benchmarks/generate.py --section turns [--history TOKENS ...] [--new TOKENS ...] [--model FOLDER]
                                  [--device cpu]
    python benchmarks/generate.py --section widths [--case BATCH,TOKENS ...]

Section decode measures decoding speed and memory on a GPU. The prompt is not computed: caches are filled with random
keys and values, and the attention of the prompt is left out, since only decoding is timed.

    bf16           transformers' DynamicCache with SDPA, one forward a token, as `generate` has it by default
    bf16 graph     transformers' StaticCache with room for 64 tokens more, its step recorded as a CUDA graph; up to 32k
                   tokens, where its masked attention already takes five times as long as DynamicCache's
    bf16 compiled  the same cache, the step compiled by torch.compile(mode="reduce-overhead") (--compile)
    quanto 4       transformers' QuantizedCache, where optimum-quanto is installed; up to 32,768 tokens in all
    default, ..    packed by a preset: default (4 bits), compact (3), tiny (2), one forward a token
    default graph  packed, patch(model, "default", cuda_graphs=True)

Section widths does the same for "default uniform graph", whose layers have one width, and "default widths graph",
whose layers have the widths that `default` gives SmolLM2. SmolLM2 has 30 layers, so its first two come twice. The mean
is 4 bits in both. The file is generate_widths.json.

Section turns is a chat of one sequence: a first prompt of --history random tokens, then --new tokens on top of it. The
caches take turns. `full` is DynamicCache in the model's dtype; "default" is the preset; "default, one call" is the same
without `kvcache.chunk`, so that one `attend` reads stored and new tokens. `logits_error` is the error of the last
token's logits, relative to those of `full`, in the 2-norm. It means something for real models only (SmolLM2: 0.003):
with random weights, layers amplify every difference (0.7 to 0.9). The file is generate_turns.json.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from timing import RESULTS, Report
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

import turboquant
from turboquant.hf.attention import attention
from turboquant.kvcache import attend
from turboquant.models.names import CACHE

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
STEPS, WARM = 12, 5
PRESETS = ("default", "compact", "tiny")  # 4, 3 and 2 bits
# Bits of keys and of values by layer, as `default` gives them to SmolLM2, whose first two layers come twice.
WIDTHS = "34 54 34 54 54 54 54 54 54 54 54 54 54 53 33 33 44 44 33 54 55 33 54 43 43 54 54 43 43 33 44 43".split()
CASES = ["1,4096", "1,32768", "1,131072", "8,4096", "8,32768", "8,131072", "32,4096", "16,32768", "32,32768"]


def fill(model: Any, cache: Any, batch: int, tokens: int) -> None:
    """Fills every layer with random keys and values of `tokens` tokens, by the calls that a prefill makes."""
    shape = (batch, CONFIG.num_key_value_heads, tokens, CONFIG.head_dim)
    k = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        if not isinstance(cache, turboquant.TurboQuantCache):
            cache.update(k.clone(), k.clone(), i)
            continue
        keys, values = cache.update(k, k, i)
        query = k[:, :1].expand(-1, CONFIG.num_attention_heads, -1, -1)
        with patch("turboquant.hf.layer.own_attention", lambda call: (call.query, None)):
            attention(layer.self_attn, query, keys, values, None, scaling=CONFIG.head_dim**-0.5)


def stepper(model: Any, cache: Any, ids: torch.Tensor, name: str) -> Callable[[], Any]:
    """Returns a function that runs a decoding step: compiled or as a CUDA graph, if the cache's name says so."""

    def step() -> Any:
        return model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits

    if name == "bf16 compiled":
        return torch.compile(step, mode="reduce-overhead")
    if name != "bf16 graph":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # it fills the cache
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(_: Any = ids) -> None:  # the graph reads the ids where they are
        graph.replay()

    return replay


@torch.inference_mode()
def decode(model: Any, cache: Any, batch: int, tokens: int, name: str) -> dict[str, Any]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fill(model, cache, batch, tokens)
    if name.startswith("quanto"):
        held = torch.cuda.memory_allocated() - before
    else:
        held = cache.nbytes if hasattr(cache, "nbytes") else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    step = stepper(model, cache, torch.ones(batch, 1, dtype=torch.long, device="cuda"), name)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WARM + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    took = sorted(times[WARM:])[STEPS // 2]
    peak = torch.cuda.max_memory_allocated()
    return {
        "tokens_per_s": round(batch / took, 1),
        "ms_per_step": round(took * 1e3, 3),
        "cache_bytes": held,
        "peak_bytes": peak,
    }


def cache_of(model: Any, name: str, tokens: int) -> Any:
    """Prepares the model for a cache of that name, and returns the cache."""
    turboquant.unpatch(model)
    if name == "bf16":
        return DynamicCache(config=CONFIG)
    if name.startswith("quanto"):
        return QuantizedCache("quanto", CONFIG, nbits=int(name.split()[1]))
    if name.startswith("bf16"):
        return StaticCache(config=CONFIG, max_cache_len=tokens + 64)
    preset, *how = name.split()
    spec = turboquant.preset(preset)
    if {"uniform", "widths"} & set(how):
        layers = {i: {"key_bits": int(key), "value_bits": int(value)} for i, (key, value) in enumerate(WIDTHS)}
        spec = spec.with_(uniform=True, overrides=layers if "widths" in how else {})
    turboquant.patch(model, spec, cuda_graphs="graph" in how)
    return turboquant.TurboQuantCache(model)


TURN_CACHES = {"full": None, "default": attend.IN_PARTS_FROM, "default, one call": {"cpu": 1 << 30, "cuda": 1 << 30}}


def forward_ms(model: Any, cache: Any, ids: torch.Tensor, name: str) -> tuple[float, torch.Tensor]:
    """Returns the milliseconds of a forward of ids on a cache of `TURN_CACHES`, and the logits of the last token."""

    def wait() -> None:
        if ids.is_cuda:
            torch.cuda.synchronize()

    if name == "full":
        turboquant.unpatch(model)
    else:
        turboquant.patch(model, "default")
    with patch.object(attend, "IN_PARTS_FROM", TURN_CACHES[name] or {}):
        wait()
        start = time.perf_counter()
        logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
        wait()
    return (time.perf_counter() - start) * 1e3, logits[0, -1].float()


@torch.inference_mode()
def turns(model: Any, history: int, news: Sequence[int], repeats: int, report: Report) -> None:
    """Adds rows of the prompt and of each turn over it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, history + max(news)), generator=generator).to(model.device)
    caches: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in ("full", "default")}
    for _ in range(max(2, repeats // 2)):
        for name, found in times.items():
            caches.pop(name, None)
            new = DynamicCache(config=model.config) if name == "full" else turboquant.TurboQuantCache(model, "default")
            found.append(forward_ms(model, new, ids[:, :history], name)[0])
            caches[name] = new
    add_turn(report, {"history": 0, "new": history}, {name: found[1:] for name, found in times.items()}, {})
    for tokens in news:
        times, logits = {name: [] for name in TURN_CACHES}, {}
        for _ in range(repeats + 1):
            for name, found in times.items():
                cache = caches["full"] if name == "full" else copy.deepcopy(caches["default"])  # shares no pages
                took, logits[name] = forward_ms(model, cache, ids[:, history : history + tokens], name)
                found.append(took)
                if name == "full":
                    cache.crop(-tokens)
        params = {"history": history, "new": tokens}
        add_turn(report, params, {name: found[1:] for name, found in times.items()}, logits)


def add_turn(
    report: Report, params: dict[str, int], times: dict[str, list[float]], logits: dict[str, torch.Tensor]
) -> None:
    full = median(times["full"])
    for name, found in times.items():
        metrics = {"ms": round(median(found), 3), "least_ms": round(min(found), 3)}
        if name != "full":
            metrics["x_full"] = round(median(found) / full, 3)
            metrics["x_full_least"] = round(min(found) / min(times["full"]), 3)
            if logits:
                metrics["logits_error"] = round(
                    float((logits[name] - logits["full"]).norm() / logits["full"].norm()), 5
                )
        report.add("turns", {**params, "cache": name}, metrics)
        print(params, name, metrics, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=("decode", "turns", "widths"), default="decode")
    parser.add_argument("--case", nargs="+", default=CASES)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--history", nargs="+", type=int, default=[4096, 32768, 100000])
    parser.add_argument("--new", nargs="+", type=int, default=[64, 512, 2048])
    parser.add_argument("--parts-from", type=int, help="new tokens from which on `default` uses `kvcache.chunk`")
    parser.add_argument("--repeats", type=int, default=10, help="forwards of each turn")
    parser.add_argument(
        "--model", help="folder of a model in the Hugging Face format instead of the 8B shape, for turns"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of turns; float32 on a CPU")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: torch's choice")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    if args.section == "turns":
        return turns_main(args)
    report = Report("generate" if args.section == "decode" else "generate_widths", "cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)  # slower than flash here: it plans anew for every length
    model = the_model()
    names = ["bf16", "bf16 graph", *(["bf16 compiled"] if args.compile else [])]
    names += ["quanto 4"] if find_spec("optimum") and find_spec("optimum.quanto") else []
    names += [f"{preset}{graph}" for preset in PRESETS for graph in ("", " graph")]
    if args.section == "widths":
        names = ["default uniform graph", "default widths graph"]
    for case in args.case:
        batch, tokens = map(int, case.split(","))
        for name in names:
            if (name == "bf16 graph" and tokens > 32768) or (name.startswith("quanto") and batch * tokens > 32768):
                continue
            torch.cuda.empty_cache()
            cache = cache_of(model, name, tokens)
            try:
                metrics = decode(model, cache, batch, tokens, name)
            except torch.cuda.OutOfMemoryError:
                metrics = {"tokens_per_s": None, "out_of_memory": True}
            del cache
            report.add(args.section, {"batch": batch, "tokens": tokens, "cache": name}, metrics)
            print(case, name, metrics, flush=True)
    print(report.save(args.out))


def the_model() -> Any:
    with torch.device("cuda"):
        return LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()


def turns_main(args: argparse.Namespace) -> None:
    report = Report("generate_turns", args.device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if args.model:
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    else:
        model = the_model()
    if args.parts_from:
        TURN_CACHES["default"] = {args.device: args.parts_from}
    for history in args.history:
        turns(model, history, args.new, args.repeats, report)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
