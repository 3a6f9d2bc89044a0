"""Token ids, padding and forwards of the tests of models with states or shared keys."""

from __future__ import annotations

from typing import Any

from models import torch
from specs import bare

import turboquant
from turboquant import TurboQuantCache
from turboquant.models import names

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(5, 5)
IDS = torch.randint(2, 90, (2, 40), generator=torch.Generator().manual_seed(3))
PIECES = ((0, 20), (20, 21), (21, 22), (22, 27), (27, 40))
PADDED = torch.ones(2, 40, dtype=torch.long)
PADDED[1, :5] = 0


def run(model: Any, cache: Any, pieces: Any = PIECES, mask: torch.Tensor = PADDED) -> torch.Tensor:
    """Logits of all tokens, fed in pieces."""
    ids = IDS[: len(mask)]
    with torch.no_grad():
        parts = [
            model(ids[:, a:b], attention_mask=mask[:, :b], use_cache=True, **{names.CACHE: cache}).logits
            for a, b in pieces
        ]
    return torch.cat(parts, 1)[mask[:, pieces[0][0] : pieces[-1][1]].bool()]


def check_generate(model: Any, spec: Any = HOLDS_ALL, ids: torch.Tensor = IDS, mask: torch.Tensor = PADDED) -> None:
    """Patches the model with a spec that keeps all tokens exact. Checks that `generate` makes a TurboQuantCache and the
    text that it makes without a patch, with 1 and with 3 beams."""
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    options |= dict(input_ids=ids, attention_mask=mask)
    want = [model.generate(**options, num_beams=n).sequences for n in (1, 3)]
    turboquant.patch(model, spec)
    for n, text in zip((1, 3), want):
        got = model.generate(**options, num_beams=n)
        assert type(got[names.CACHE]) is TurboQuantCache and torch.equal(got.sequences, text)
