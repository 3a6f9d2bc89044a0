"""The families of models (`family_of`): what a model of each reads, what its output is, and what cannot be measured.

A decoder reads text and predicts the next token. ESM-2 reads proteins, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from . import esm
from .kinds import latent_size, unequal_size
from .outputs import DrawnTokens
from .routing import text_config, uses_interface
from .texts import Sample, kinds, protein_sample, sample

__all__ = ["SINKS", "Decoder", "Esm", "Family", "family_of"]

SINKS = 4  # first tokens of a decoder's text, which are unlike all others: not counted, and kept exact in trials

_Refusal = tuple[Callable[[Any], bool], str]

_NOT_MEASURED: tuple[_Refusal, ...] = (
    (lambda model: not uses_interface(model), "its attention bypasses AttentionInterface"),
    (lambda model: latent_size(text_config(model)) > 0, "its cache has latents, which have no wave and no metric"),
    (lambda model: unequal_size(text_config(model)) > 0,
     "its keys and values have different sizes, and are packed without a wave and a metric"),
)  # fmt: skip
_NOT_CALIBRATED: tuple[_Refusal, ...] = (
    (lambda model: model.get_output_embeddings() is None, "it has no head, which gives the next token's logits"),
)  # fmt: skip


class Decoder:
    """A causal language model."""

    proteins = False
    skipped = SINKS  # first tokens of a sequence that are not counted

    def auto_class(self, config: Any) -> Any:
        """The class of transformers that makes a model of a configuration."""
        text = type(config) in AutoModelForCausalLM._model_mapping
        return AutoModelForCausalLM if text else getattr(transformers, "AutoModelForMultimodalLM", AutoModelForCausalLM)

    def check(self, model: Any, done: str) -> None:
        """Raises NotImplementedError for a model that cannot be `done`: "measured" or "calibrated"."""
        for refused, why in _NOT_MEASURED + (_NOT_CALIBRATED if done == "calibrated" else ()):
            if refused(model):
                raise NotImplementedError(f"{type(model).__name__} cannot be {done}: {why}")

    def sample(self, model: Any, tokenizer: Any, text: str | None, limit: int) -> Sample:
        """What the model is measured on: `texts.sample`."""
        return sample(model, tokenizer, text, limit)

    def kinds(self, model: Any, tokenizer: Any) -> list[torch.Tensor]:
        """Tokens of each kind of text of the package, perhaps none: `texts.kinds`."""
        return kinds(model, tokenizer)

    def forward(self, model: Any, inputs: Mapping[str, torch.Tensor], padded: bool) -> torch.Tensor:
        """Returns the output that errors change, [batch, tokens, ...], for inputs on the model's device: the logits."""
        if padded and "position_ids" not in inputs:  # as `generate` numbers the tokens of padded batches
            inputs = {**inputs, "position_ids": (inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)}
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
        return logits

    def scores(self, output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Returns a random number for each token, [batch, tokens]: log p(y), y drawn from p. Its gradient g has E[g
        g^T] / 2 = the quadratic form of the divergence that a change of the output costs."""
        levels = torch.rand((*output.shape[:2], 1), generator=generator, dtype=torch.float32, device="cpu")
        scores: torch.Tensor = DrawnTokens.apply(output, levels.to(output.device))  # type: ignore[no-untyped-call]
        return scores


class Esm(Decoder):
    """ESM-2."""

    proteins = True
    skipped = 0

    def auto_class(self, config: Any) -> Any:
        return AutoModelForMaskedLM

    def check(self, model: Any, done: str) -> None:
        esm.checked_model(model)

    def sample(self, model: Any, tokenizer: Any, text: str | None, limit: int) -> Sample:
        return protein_sample(model, tokenizer, text)

    def kinds(self, model: Any, tokenizer: Any) -> list[torch.Tensor]:
        return []

    def forward(self, model: Any, inputs: Mapping[str, torch.Tensor], padded: bool) -> torch.Tensor:
        """The last hidden states, whose divergence is 1 minus their cosine."""
        states: torch.Tensor = model.base_model(**inputs).last_hidden_state
        return states

    def scores(self, output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Returns <r, h> / |h| with r ~ N(0, 1) orthogonal to h, because 1 - cos(h, h + e) is half the squared norm of
        e's part orthogonal to h, over |h|^2."""
        fixed = output.detach().float()
        length = fixed.norm(dim=-1, keepdim=True)
        # Always on the CPU and in float32, to draw the same numbers whatever torch's defaults.
        random = torch.randn(fixed.shape, generator=generator, dtype=torch.float32, device="cpu").to(fixed.device)
        across = random - (random * fixed).sum(-1, keepdim=True) / length.square() * fixed
        scores: torch.Tensor = (output.float() * across / length).sum(-1)
        return scores


Family = Decoder
_ESM, _DECODER = Esm(), Decoder()


def family_of(model: Any) -> Family:
    """The family of a model or of its configuration."""
    return _ESM if getattr(getattr(model, "config", model), "model_type", None) == "esm" else _DECODER
