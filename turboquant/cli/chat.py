"""``turboquant chat``: a conversation in the terminal on one packed cache. Prints its size after each answer."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import TextStreamer

from ..hf.cache import TurboQuantCache
from ..measured import Profile
from ..models.names import CACHE
from ..patching import patch
from ..spec import CacheSpec

__all__ = ["chat"]


class _Timed(TextStreamer):  # type: ignore[misc]
    """Prints words as they come, and notes the time of each token."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the first one is the prompt
        super().put(value)

    def pace(self) -> str:
        """Returns tokens a second as text. The first token waits for the prompt and does not count."""
        count = len(self.times) - 2
        return "" if count < 1 else f", {count / (self.times[-1] - self.times[1]):.1f} tokens a second"


class _Conversation:
    """The messages so far, and the cache that holds them."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []  # tokens of all turns so far
        self.cache = TurboQuantCache(model)

    def answer(self, text: str, tokens: int, sampling: dict[str, Any]) -> str:
        """Prints the answer to a message while it is made, and returns a line about the cache."""
        self.messages.append({"role": "user", "content": text})
        asked = self._with(text)
        if asked[: len(self.ids)] != self.ids:  # the template has changed earlier turns
            self.cache = TurboQuantCache(self.model)
        prompt = torch.tensor([asked], device=self.model.device)
        streamer = _Timed(self.tokenizer)
        ids = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **{CACHE: self.cache},
                                   max_new_tokens=tokens, streamer=streamer, **sampling)  # fmt: skip
        self.ids = ids[0].tolist()
        said = self.tokenizer.decode(self.ids[len(asked) :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": said})
        report = self.cache.report()
        return (f"[{len(self.ids):,} tokens: {report.nbytes:,} bytes held, {2 * report.numbers:,} in bfloat16, "
                f"{report.ratio_bf16:.2f}x{streamer.pace()}]")  # fmt: skip

    def _with(self, text: str) -> list[int]:
        """Returns the tokens of the conversation with a new message, as plain text if there is no chat template."""
        if getattr(self.tokenizer, "chat_template", None):
            ids = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.ids + self.tokenizer(text, add_special_tokens=not self.ids)["input_ids"]
        return [int(i) for i in ids]


def chat(
    model: Any, tokenizer: Any, spec: CacheSpec, profile: Profile | None, tokens: int, temperature: float, seed: int
) -> int:
    """Reads messages from standard input, one a line, until its end, and answers each with at most `tokens` tokens."""
    patch(model, spec, profile=profile, tokenizer=tokenizer)
    torch.manual_seed(seed)
    pad = {} if tokenizer.pad_token_id is None else {"pad_token_id": tokenizer.pad_token_id}
    sampling = {"do_sample": temperature > 0, **({"temperature": temperature} if temperature > 0 else {}), **pad}
    conversation = _Conversation(model, tokenizer)
    print("Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if text.strip():
            print(conversation.answer(text, tokens, sampling), file=sys.stderr)
