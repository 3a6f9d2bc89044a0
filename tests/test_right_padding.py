"""Batches padded on the right, as programs that score texts make them: each sequence is as it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from causal_types import VERSION
from causal_types import tiny as tiny_type
from models import prompts, tiny
from specs import WAVE, bare
from transformers import DynamicCache

import turboquant
from turboquant import CacheSpec, TurboQuantCache
from turboquant.models import names

LENGTHS, LONGEST = (60, 41, 7), 60
IDS = prompts(3, LONGEST)["input_ids"]
MASK = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
MORE = prompts(3, 5, seed=1)["input_ids"]
MORE_MASK = (torch.arange(5) < torch.tensor([[5], [3], [4]])).long()
PACKED, HOLDS_ALL = bare(4, 4), bare(4, 4, window=128)


def forward(model: Any, cache: Any, ids: Any, mask: Any = None) -> Any:
    given = {} if mask is None else dict(attention_mask=mask)
    if mask is not None:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, **given, use_cache=True, **{names.CACHE: cache}).logits


@pytest.mark.parametrize("spec", [PACKED, PACKED.with_(sinks=2, window=5, **WAVE)], ids=["bare", "wave"])
@pytest.mark.parametrize("prefill", ["exact", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral, sliding", "gemma2, soft-cap and sliding"])
def test_each_sequence_is_as_alone(kind: str, prefill: str, spec: CacheSpec) -> None:
    """Logits are those of each sequence alone, in one forward and in a second one, which is padded again."""
    model = tiny(kind)
    turboquant.patch(model, spec.with_(prefill=prefill))
    cache = TurboQuantCache(model)
    got = forward(model, cache, IDS, MASK)
    again = None if "sliding" in kind else forward(model, cache, MORE, torch.cat([MASK, MORE_MASK], 1))
    for b, length in enumerate(LENGTHS):
        alone = TurboQuantCache(model)
        want = forward(model, alone, IDS[b : b + 1, :length])
        torch.testing.assert_close(got[b, :length], want[0], rtol=0, atol=5e-4)
        if again is not None:
            real = int(MORE_MASK[b].sum())
            want = forward(model, alone, MORE[b : b + 1, :real])
            torch.testing.assert_close(again[b, :real], want[0], rtol=0, atol=5e-4)


# Types that older transformers do not have, or that `patch` refuses there.
LATER = pytest.mark.skipif(VERSION < (5, 20), reason="the type is packed with transformers 5.20 and newer")
TYPES = [
    *("llama", "gpt_oss", "gpt2"),
    *(pytest.param(name, marks=LATER) for name in ("llama4_text", "gemma4_text", "qwen3_5_text", "deepseek_v3")),
]


@pytest.mark.parametrize("name", TYPES)
def test_as_a_cache_of_transformers(name: str) -> None:
    """Right padding in the first forward, then one token at a time."""
    model = tiny_type(name)
    found = []
    for patched in (False, True):
        if patched:
            turboquant.patch(model, HOLDS_ALL)
        cache = TurboQuantCache(model) if patched else DynamicCache(config=model.config)
        parts, mask = [forward(model, cache, IDS, MASK)[MASK.bool()]], MASK
        for i in range(0 if name == "llama4_text" else 3):  # Llama 4 in transformers counts padding into later chunks
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            parts.append(forward(model, cache, MORE[:, i : i + 1], mask)[:, 0])
        found.append(torch.cat(parts))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=5e-5)


@LATER
def test_shared_keys_of_a_packed_first_forward() -> None:
    model = turboquant.patch(tiny_type("gemma4_text"), HOLDS_ALL, prefill="packed")
    cache = TurboQuantCache(model)
    with pytest.raises(NotImplementedError, match="behind a sequence's tokens is not supported with keys that later"):
        forward(model, cache, IDS, MASK)
    assert cache.get_seq_length() == 0


def test_behind_a_sliding_window() -> None:
    sliding = turboquant.patch(tiny("mistral, sliding"), PACKED)
    cache = TurboQuantCache(sliding)
    forward(sliding, cache, IDS, MASK)
    with pytest.raises(NotImplementedError, match="or behind these, is not supported with a sliding window"):
        forward(sliding, cache, MORE, torch.cat([MASK, MORE_MASK], 1))
