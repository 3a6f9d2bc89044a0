"""``turboquant demo``: a small model continues a passage, from a full-precision cache and from packed ones.

The model is a Llama of 4 million parameters (4 layers, 4 query and 2 KV heads of 64 channels), trained for this project
on public-domain books. The passage is from a book that it was not trained on. The table shows, all measured in the same
run:

    bytes, x    bytes of the cache after the text, with exact tokens and unused room, and how many times smaller that
                is than the same tokens in bfloat16, the dtype of the model and of the full cache
    KL, top-1   over the passage, with every query reading stored keys and values, also of its own token
                (`prefill="packed"`): the Kullback-Leibler divergence of the next token's distribution from that with
                full precision, in nats per token, and how often the likeliest token is the same
    tokens/s    of the generated text, after its first token
"""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, LlamaForCausalLM
from transformers import logging as transformers_logging
from transformers.generation.streamers import BaseStreamer

import turboquant

from ..hf.cache import TurboQuantCache
from ..hf.notices import quiet
from ..models.names import CACHE
from ..named_specs import preset
from ..progress import Progress
from ..spec import CacheSpec
from ..tables import table

__all__ = ["demo"]

PASSAGE = "a_christmas_carol.txt"  # its first line says where it is from


def folder() -> Path:
    """Returns the folder of the demo's files: in a clone beside the package, else in turboquant-attention-demo.

    ImportError, which says what to install, if there is none.
    """
    beside = Path(__file__).resolve().parents[2] / "demo" / "turboquant_demo"
    if beside.is_dir():
        return beside
    package = find_spec("turboquant_demo")
    if package is None or package.origin is None:
        raise ImportError("the model of the demo is not installed. Run: pip install 'turboquant-attention[demo]'")
    return Path(package.origin).parent


@dataclass(frozen=True)
class _Row:
    name: str
    spec: CacheSpec | None  # None: the model's own cache
    show_text: bool = False


def _rows() -> list[_Row]:
    usual = preset("default")
    bare = usual.with_(sinks=0, window=0)
    rows = [_Row("full precision", None, True)]
    rows += [_Row(f"{b} bits", usual.with_(key_bits=b, value_bits=b), True) for b in (4, 3, 2)]
    rows += [_Row(f"{b} bits, all packed", bare.with_(key_bits=b, value_bits=b)) for b in (4, 3, 2)]
    return rows


_Measured = tuple[_Row, torch.Tensor, list[str]]  # a row, its new tokens, its cells


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Shows each token that `generate` makes as progress, and notes its time."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the first one is the prompt
        self.shown.add()

    def end(self) -> None:
        pass

    @property
    def tokens_per_second(self) -> float:
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def _cache_bytes(cache: Any) -> int:
    if isinstance(cache, TurboQuantCache):
        return cache.nbytes
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _log_probabilities(model: Any, ids: torch.Tensor, spec: CacheSpec | None) -> torch.Tensor:
    """Returns log-probabilities of the next token at each of ids [1, tokens]: [tokens, vocabulary], float32."""
    if spec is None:
        logits = model(ids, use_cache=False).logits
    else:
        logits = model(ids, **{CACHE: TurboQuantCache(model, spec.with_(prefill="packed"))}).logits
    result: torch.Tensor = logits[0].float().log_softmax(-1)
    return result


def _measure(model: Any, ids: torch.Tensor, prompt: int, tokens: int, seed: int) -> list[_Measured]:
    """Measures all rows. ids: [1, all tokens of the passage]."""
    full_bytes_per_token, measured, want = 0.0, [], None
    rows = _rows()
    some = ids[:, :64]
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model)):  # warm up
        model.generate(some, attention_mask=torch.ones_like(some), max_new_tokens=8, **{CACHE: cache})
    with Progress("demo", len(rows) * (tokens + 2), "tokens") as shown:
        for row in rows:
            shown.what = row.name
            got = _log_probabilities(model, ids, row.spec)
            shown.add()
            want = got if want is None else want
            divergence = (want.exp() * (want - got)).sum(-1).mean().item()
            same = (want.argmax(-1) == got.argmax(-1)).float().mean().item()
            cache = DynamicCache(config=model.config) if row.spec is None else TurboQuantCache(model, row.spec)
            torch.manual_seed(seed)
            clock = _Clock(shown)
            text = model.generate(
                ids[:, :prompt],
                attention_mask=torch.ones_like(ids[:, :prompt]),
                **{CACHE: cache},
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                temperature=0.7,
                top_k=20,
                streamer=clock,
            )
            nbytes, stored = _cache_bytes(cache), cache.get_seq_length()
            if row.spec is None:
                full_bytes_per_token = nbytes / stored
            cells = [f"{nbytes:,}", f"{full_bytes_per_token * stored / nbytes:.2f}"]
            cells += ["-", "-"] if row.spec is None else [f"{divergence:.4f}", f"{100 * same:.1f} %"]
            measured.append((row, text[0, prompt:], [*cells, f"{clock.tokens_per_second:.0f}"]))
    return measured


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, initial_indent="    ", subsequent_indent="    ")


def _print_table(measured: list[_Measured]) -> None:
    lines = [["cache", "bytes", "x smaller", "KL/token", "top-1", "tokens/s"]]
    lines += [[row.name, *cells] for row, _, cells in measured]
    print(f"\n{table(lines)}")


def demo(prompt: int, tokens: int, seed: int) -> int:
    """Runs the demo with a prompt of so many tokens, and prints its results. tokens: to generate for each row."""
    files = folder()
    source, passage = (files / PASSAGE).read_text(encoding="utf-8").split("\n\n", 1)
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(passage).ids])
    if prompt > ids.shape[1]:
        raise ValueError(f"--prompt-tokens must be in 2..{ids.shape[1]}, what the passage has, got {prompt}")

    transformers_logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(files, dtype=torch.bfloat16).eval()
    turboquant.patch(model)
    started = time.perf_counter()
    with torch.inference_mode(), quiet(model):
        measured = _measure(model, ids, prompt, tokens, seed)

    ending = tokenizer.decode(ids[0, max(0, prompt - 60) : prompt].tolist())
    print(f"{source}\nThe end of the prompt of {prompt} tokens:\n{_paragraph('... ' + ending)}")
    for row, text, _ in measured:
        if row.show_text:
            print(f"\n{row.name}:\n{_paragraph(tokenizer.decode(text.tolist()))}")
    _print_table(measured)
    usual = preset("default")
    print(
        "\nThe model is small, 4 million parameters, and so is its English. All texts are sampled with the same random "
        "numbers.\nEvery packed row: wave and metric, Hadamard rotation, EDEN scale. 4, 3 and 2 bits keep the first "
        f'{usual.sinks} and the last {usual.window} tokens exact; "all packed" keeps none.\nKL divergence and top-1 '
        f"agreement: {ids.shape[1]} tokens of the passage. {time.perf_counter() - started:.0f} s in all."
    )
    return 0
