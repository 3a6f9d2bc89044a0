"""Every causal language model type that the installed transformers has: patched and exact, or refused with a reason.
The tables are those of `causal_types`.
"""

from __future__ import annotations

import re
from typing import Any

import multimodal
import pytest
from causal_types import (
    EXACT,
    MAKE_PATTERNS,
    NOT_PROBED,
    NOT_RUN,
    REFUSED,
    TYPES,
    WITH_TOWERS,
    built,
    phrase_of_refusal,
    tiny,
)
from models import torch, transformers
from specs import bare

import turboquant
from turboquant.models.names import CACHE, cache_argument
from turboquant.patching import check

HOLDS_ALL = bare(4, 4, window=64)
PACKED = bare(5, 5, prefill="packed")


def run(model: Any) -> tuple[torch.Tensor, list[list[int]], type]:
    """Logits of a text in pieces with one cache, how `generate` goes on, and the class of cache that it makes."""
    ids, name, parts = torch.arange(5, 15)[None], cache_argument(model.forward), []
    assert name is not None
    patched = hasattr(model, "_turboquant")
    cache = turboquant.TurboQuantCache(model) if patched else transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in ids.split((5, 1, 1, 3), 1):
            parts.append(model(piece, use_cache=True, **{name: cache}).logits)
        made = model.generate(
            ids[:, :6], max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True
        )
    return torch.cat(parts, 1), made.sequences.tolist(), type(made[CACHE])


def test_every_type_is_in_the_table() -> None:
    for name in TYPES:
        phrase_of_refusal(name)


QUICK = {names.split()[0] for names in REFUSED.values()} | set(sorted(EXACT)[::5]) | {"qwen3_5"}
NAMES = [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow, pytest.mark.newest)) for n in sorted(TYPES)]


@pytest.mark.parametrize("name", NAMES)
def test_causal_type(name: str) -> None:
    phrase = phrase_of_refusal(name)
    if phrase is not None:
        model = built(name)
        with pytest.raises(
            NotImplementedError, match=f"^{re.escape(type(model).__name__)} cannot be patched: .*{phrase}"
        ):
            turboquant.patch(model)
        return
    if name in NOT_RUN:
        check(built(name))
        return
    model = multimodal.tiny(name, WITH_TOWERS[name]) if name in WITH_TOWERS else tiny(name)
    model.generation_config.eos_token_id = None
    want, text, _ = run(model)
    turboquant.patch(model, HOLDS_ALL)
    got, same, kind = run(model)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    assert same == text and kind is turboquant.TurboQuantCache
    turboquant.patch(model, PACKED if name not in MAKE_PATTERNS else PACKED.with_(prefill="exact"))
    packed, _, kind = run(model)
    assert torch.nn.functional.cosine_similarity(packed.flatten(), want.flatten(), 0) >= 0.94
    assert kind is turboquant.TurboQuantCache
    if getattr(model.config, "kv_lora_rank", None):
        with pytest.raises(NotImplementedError, match="cannot be measured: its cache has latents"):
            turboquant.measure(model)
        return
    if name == "mimo_v2_flash":
        with pytest.raises(NotImplementedError, match="cannot be measured: its keys and values have different sizes"):
            turboquant.measure(model)
        return
    assert bool(turboquant.measure(model).not_probed) == (name in NOT_PROBED)
