"""Checks whether the prompt of a `generate` call continues what its cache holds.

`generate` expects the whole conversation in `input_ids` and skips as many tokens as the cache holds, without comparing
them. If they differ from the stored ones, the generated text fits neither prompt.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...models.names import CACHE, given_cache, renamed
from ..cache import TurboQuantCache

__all__ = ["METHOD", "generate", "remember_first"]

METHOD = "generate"


def remember_first(cache: TurboQuantCache, ids: Any) -> None:
    """Keeps ids [batch, tokens], the input of a forward, as the first tokens of an empty cache, in place of those of a
    forward that failed. Other inputs than ids are unknown tokens."""
    if not cache.get_seq_length():
        cache.known_ids = ids.to(torch.int32) if isinstance(ids, torch.Tensor) else None


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The `generate` of a patched model: checks the prompt against the given cache, then calls that of its class."""
    kwargs = renamed(kwargs, CACHE)
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    cache = given_cache(kwargs)
    if isinstance(cache, TurboQuantCache) and isinstance(ids, torch.Tensor) and ids.dim() == 2:
        check(cache, ids)
        cache.known_ids = ids.to(torch.int32)
    out = getattr(type(model), METHOD)(model, *args, **kwargs)
    texts = out if isinstance(out, torch.Tensor) else out["sequences"]
    used = cache if isinstance(out, torch.Tensor) else given_cache(out)
    # known_ids: None after beams were reordered; of another length with several texts for each prompt.
    if isinstance(used, TurboQuantCache) and used.known_ids is not None and len(used.known_ids) == len(texts):
        used.known_ids = texts.to(torch.int32) if isinstance(ids, torch.Tensor) else None
    return out


def check(cache: TurboQuantCache, ids: torch.Tensor) -> None:
    """Checks ids [batch, tokens] against a filled cache. Raises ValueError if they are no longer than what it holds,
    and warns if they begin with other tokens. Reads the device once."""
    stored, known = cache.get_seq_length(), cache.known_ids
    if not stored:
        return
    if ids.shape[1] <= stored:
        raise ValueError(
            f"`input_ids` must be the whole text so far, longer than the {stored} positions that the cache holds, got "
            f"{ids.shape[1]} tokens"
        )
    if known is not None and len(known) == len(ids):
        length = min(stored, known.shape[1])
        others = (ids[:, :length] != known[:, :length].to(ids.device)).any(0).nonzero()
        if len(others):
            _warn(
                f"must begin with the {stored} tokens that the cache holds, got others from position {int(others[0])}"
                " on"
            )


def _warn(what: str) -> None:
    how = "`generate` expects the whole conversation; use a new cache, or crop this one to where the texts part"
    warnings.warn(f"`input_ids` {what}: {how}", stacklevel=4)
