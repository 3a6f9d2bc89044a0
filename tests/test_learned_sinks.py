"""Attention with learned sinks (gpt-oss): a logit for each head, beside those of the tokens, whose value is zero."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from causal_types import EXACT, TYPES, tiny
from hybrids import HOLDS_ALL, IDS, PACKED, run
from models import torch
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache

NAMES = [name for name in ("flint", "gpt_oss", "granite_swa", "granitemoe_swa") if name in TYPES and name in EXACT]


def made(name: str) -> Any:
    model = tiny(name)
    for part in model.modules():
        if getattr(part, "sliding_window", None):
            part.sliding_window = 9
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 9
    for part in model.modules():
        if isinstance(getattr(part, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(part.sinks, mean=2.0)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [HOLDS_ALL, HOLDS_ALL.with_(prefill="packed"), PACKED, PACKED.with_(prefill="packed")])
def test_sinks_take_their_share(name, spec):
    model = made(name)
    want = run(model, DynamicCache(config=model.config))
    got = run(model, TurboQuantCache(turboquant.patch(model, spec)))
    if spec.window:
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    else:
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94


def test_a_prefill_needs_no_square_of_the_prompt(monkeypatch):
    """transformers' function for sinks is not called: it computes all weights at once, 128 GiB for 32,768 tokens."""
    model = made("gpt_oss")
    ids = IDS[:, :20]
    want = model(ids, use_cache=False).logits
    turboquant.patch(model, PACKED)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "eager_attention_forward", lambda *args, **kwargs: pytest.fail("all weights at once"))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=True).logits, want, rtol=0, atol=5e-5)
