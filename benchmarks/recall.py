"""Measures whether a passkey, a number somewhere in a long real text, is found again, by length and depth.

    python benchmarks/recall.py --real smollm2 --device cuda --dtype bfloat16 --out benchmarks/results/h200
    python benchmarks/recall.py --real gemma3 --lengths 1024 4096 16384 32768 --device cuda --dtype bfloat16

A sentence with a random number of five digits stands at some depth of WikiText-2's test text (0: its start), and the
text ends with a question and the beginning of its answer. The first forward reads all but the question. Then the
question is asked and the model goes on, each time by its likeliest token, so that the question and every digit read
what the cache holds of the text. A number is found if all its digits are right.

Our specs are presets, sinks and window included, or as paired.py names them; fp8 is simulated from the question on, as
baselines.py says. Each spec is compared with the last one on the same texts: how many more numbers it finds, and the
standard error of that, the square root of how many numbers only one of the two finds.
The question is plain text, not a turn of a chat: SmolLM2-135M-Instruct and Gemma 3 270M both go on with it.
Weights are de-quantised 4-bit weights (`make real-models`). File: recall_real_<model>.json, with a calibration
recall_calibrated_<model>.json; benchmarks/presets.py shows them on docs/presets.md. With --no-baselines
recall_paired_<model>.json.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from baselines import BASELINES, simulated
from paired import spec_of
from presets import passkey_table
from quality import REAL_MODELS
from texts import text_of
from timing import RESULTS, Report, commit
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import turboquant
from turboquant.evaluation.decoder import _ready
from turboquant.models.names import CACHE, cache_argument

FULL, FP8 = "full cache", "fp8 e4m3"
SPECS = ["near-lossless", "default", "compact", "tiny"]  # 5, 4, 3 and 2 bits
DEPTHS = [0.0, 0.2, 0.4, 0.6, 0.8]
PASSKEY = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = 8  # tokens that are generated: five digits, and a space where a tokenizer has one for itself


@dataclass(frozen=True)
class Prompts:
    """context   token ids [prompts, tokens], int64: texts with a passkey, of one length
    question  token ids [prompts, tokens], int64, the same for all
    keys      the numbers to find"""

    context: torch.Tensor
    question: torch.Tensor
    keys: tuple[str, ...]


def prompts(tokenizer: Any, text: Sequence[int], length: int, depth: float, count: int) -> Prompts:
    """Passkeys at a depth (0: start, 1: end) of texts from random places; `length` tokens with question and answer.
    `text`: token ids. The same numbers and places on every call."""
    draw = random.Random(f"{length} {depth}")
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("text")["input_ids"] else []
    question = _ids(tokenizer, QUESTION)
    contexts, keys = [], []
    for _ in range(count):
        key = str(draw.randrange(10_000, 100_000))
        passkey = _ids(tokenizer, PASSKEY.format(key=key))
        hay = length - len(begin) - len(passkey) - len(question) - ANSWER
        if not 0 < hay <= len(text):
            raise ValueError(f"`length` must leave 1..{len(text)} tokens to the text, got {length}, which leaves {hay}")
        start = draw.randrange(len(text) - hay + 1)
        at = start + round(depth * hay)
        contexts.append([*begin, *text[start:at], *passkey, *text[at : start + hay]])
        keys.append(key)
    return Prompts(torch.tensor(contexts), torch.tensor([question] * count), tuple(keys))


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def answers(
    model: Any, tokenizer: Any, asked: Prompts, cache: Any, reading: AbstractContextManager[Any] | None = None
) -> list[str]:
    """Returns what the model says to each prompt. cache: an empty one;  reading: entered before the question."""
    options = {"use_cache": True, "logits_to_keep": 1, cache_argument(model.forward) or CACHE: cache}
    said = []
    with torch.no_grad():
        model(input_ids=asked.context.to(model.device), **options)
        with reading or nullcontext():
            ids = asked.question.to(model.device)
            for _ in range(ANSWER):
                ids = model(input_ids=ids, **options).logits[:, -1:].argmax(-1)
                said.append(ids)
    decoded: list[str] = tokenizer.batch_decode(torch.cat(said, 1))
    return decoded


Way = Callable[[Prompts], list[str]]


@contextmanager
def plain_ways(model: Any, tokenizer: Any) -> Iterator[dict[str, Way]]:
    """Yields ways with the model's own cache, and with fp8."""

    def full(asked: Prompts) -> list[str]:
        return answers(model, tokenizer, asked, DynamicCache(config=model.config))

    def fp8(asked: Prompts) -> list[str]:
        cache = DynamicCache(config=model.config)
        return answers(model, tokenizer, asked, cache, simulated(model, BASELINES[FP8], sinks=0))

    yield {FULL: full, FP8: fp8}


@contextmanager
def packed_ways(
    model: Any,
    tokenizer: Any,
    specs: Mapping[str, turboquant.CacheSpec],
    profile: turboquant.Profile | None = None,
) -> Iterator[dict[str, Way]]:
    """Yields ways with our caches; the model is patched meanwhile."""
    with _ready(model, specs, profile) as new_cache:

        def way(name: str) -> Way:
            return lambda asked: answers(model, tokenizer, asked, new_cache(name))

        yield {name: way(name) for name in specs}


def measure(
    model: Any,
    tokenizer: Any,
    specs: Mapping[str, turboquant.CacheSpec],
    lengths: Sequence[int],
    depths: Sequence[float],
    keys: int,
    batch: int,
    profile: turboquant.Profile | None = None,
    baselines: bool = True,
) -> dict[tuple[str, int, float], list[bool]]:
    """Returns (name, length, depth) -> whether each key was found."""
    text = _ids(tokenizer, text_of("wikitext2"))
    each = {(n, d): prompts(tokenizer, text, n, d, keys) for n in lengths for d in depths}
    results: dict[tuple[str, int, float], list[bool]] = {}
    groups = [*([plain_ways(model, tokenizer)] if baselines else []), packed_ways(model, tokenizer, specs, profile)]
    for group in groups:
        with group as ways:
            for name, (length, depth) in tqdm([(w, at) for w in ways for at in each], unit="run", disable=None):
                results[name, length, depth] = []
                for some in _batches(each[length, depth], batch):
                    hits = [said.strip().startswith(key) for said, key in zip(ways[name](some), some.keys)]
                    results[name, length, depth] += hits
    return results


def compared(results: Mapping[tuple[str, int, float], Sequence[bool]], specs: Sequence[str]) -> Iterator[str]:
    """Yields a line for each spec but the last, with which it is compared."""
    every = {spec: [hit for (name, *_), hits in results.items() if name == spec for hit in hits] for spec in specs}
    *names, base = specs
    for name in names:
        more = [int(a) - int(b) for a, b in zip(every[name], every[base])]
        error = sum(map(abs, more)) ** 0.5
        yield f"{name} finds {sum(every[name])} of {len(more)} numbers, {sum(more):+d} +- {error:.1f} of {base}"


def _batches(asked: Prompts, batch: int) -> Iterator[Prompts]:
    for start in range(0, len(asked.keys), batch):
        rows = slice(start, start + batch)
        yield Prompts(asked.context[rows], asked.question[rows], asked.keys[rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", choices=("smollm2", "gemma3"), required=True, help="a model of `make real-models`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    parser.add_argument("--specs", nargs="+", default=SPECS, help="presets, or as paired.py")
    parser.add_argument("--no-baselines", action="store_true", help="neither the full cache nor fp8")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS)
    parser.add_argument("--keys", type=int, default=10, help="at each length and depth")
    parser.add_argument("--batch", type=int, default=10, help="keys that run together")
    parser.add_argument("--profile", help="a file, for calibrated presets")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    folder = REAL_MODELS / args.real
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval().to(args.device)
    specs = {name: spec_of(name) for name in args.specs}
    found = turboquant.Profile.load(args.profile) if args.profile else None
    start = time.perf_counter()
    results = measure(model, tokenizer, specs, args.lengths, args.depths, args.keys, args.batch, found,
                      not args.no_baselines)  # fmt: skip
    print(f"{time.perf_counter() - start:.1f} s")
    source = found.calibration.source if found is not None and found.calibration is not None else None
    kind = "paired" if args.no_baselines else "real" if found is None else "calibrated"
    report = Report(f"recall_{kind}_{args.real}", torch.device(args.device).type)
    for (name, length, depth), hits in results.items():
        exact = f"{specs[name].sinks} sinks, window {specs[name].window}" if name in specs else ""
        params = {"cache": name, "simulated": name == FP8, "exact": exact, "model": args.real, "text": "wikitext2",
                  "length": length, "depth": depth, "keys": len(hits), "dtype": args.dtype,
                  "calibrated_on": source if name in specs and specs[name].calibrated else None,
                  "commit": commit()}  # fmt: skip
        report.add("recall-real", params, {"found": sum(hits), "hits": "".join(str(int(hit)) for hit in hits)})
    print(*passkey_table(report.rows), *compared(results, args.specs), report.save(args.out), sep="\n")


if __name__ == "__main__":
    main()
