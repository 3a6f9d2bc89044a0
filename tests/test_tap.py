"""The tap: hooks that replace keys and values, and queries that see some tokens as they were."""

from __future__ import annotations

import pytest
from models import prompts, tiny

torch = pytest.importorskip("torch")

from turboquant.measuring.tap import tapped  # noqa: E402

SINKS, WINDOW, TOKENS = 2, 5, 24


def logits(model, hook=None, exact=None, tile=0):
    with tapped(model) as tap, torch.no_grad():
        tap.hook, tap.exact, tap.tile = hook, exact, tile
        return model(prompts(1, TOKENS)["input_ids"], use_cache=False).logits[0]


@pytest.mark.parametrize("kind", ["llama", "mistral, sliding", "gemma2, soft-cap and sliding", "gemma3, alternating"])
def test_exact_tokens_are_seen_as_they_were(kind):
    model = tiny(kind)
    plain = logits(model)

    def other(module, layer, query, key, value):
        return torch.randn_like(key), torch.randn_like(value)

    def same(module, layer, query, key, value):
        return key, value

    torch.testing.assert_close(logits(model, same, (SINKS, WINDOW)), plain)
    torch.testing.assert_close(logits(model, other, (TOKENS, 0)), plain)
    torch.testing.assert_close(logits(model, other, (SINKS, TOKENS)), plain)
    found = logits(model, other, (SINKS, WINDOW))
    near = SINKS + WINDOW  # queries that see nothing but sinks and window
    torch.testing.assert_close(found[:near], plain[:near])
    assert ((found[near:] - plain[near:]).norm(dim=-1) > 0.01 * plain[near:].norm(dim=-1)).all()


def test_tokens_of_a_tile_are_seen_as_they_were():
    model = tiny()
    plain = logits(model)

    def other(module, layer, query, key, value):
        return torch.randn_like(key), torch.randn_like(value)

    torch.testing.assert_close(logits(model, other, (0, 0), TOKENS), plain)
    found = logits(model, other, (0, 0), 8)
    torch.testing.assert_close(found[:8], plain[:8])
    assert ((found[8:] - plain[8:]).norm(dim=-1) > 0.01 * plain[8:].norm(dim=-1)).all()
    torch.testing.assert_close(logits(model, other, (16, 0), 8), plain)
