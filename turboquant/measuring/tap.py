"""The tap: an attention function that shows the queries, keys and values of every layer to a hook while a model runs.

`calibrate` and `measure` use it. The hook may replace keys and values, which is how errors are added to them; queries
may still see some tokens as they were (`Tap.exact`). One thread at a time has a tap; forwards of the same model in
other threads go past it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.attention import Call, MaskRequest, own_attention, request_mask
from ..models.routing import TAP, evaluating, routed_configs, set_name, tap_lock
from .half import float16_in_float32

__all__ = ["Tap", "tapped"]

# (attention module, layer in the order of calls, query, key, value) -> None, or the key and value to go on with
Hook = Callable[
    [torch.nn.Module, int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None
]


class Tap:
    """The attention function that shows each layer to a hook.

    exact   (sinks, window), as of a CacheSpec: how many of the first and of the last tokens, its own among them, each
            query sees as they are. It sees the others as the hook replaces them. None: it sees all as replaced
    tile    tokens of a tile: a query also sees the tokens of its own tile as they are; 0: no tiles
    """

    def __init__(self) -> None:
        self.exact: tuple[int, int] | None = None
        self.tile = 0
        self.order: dict[int, int] = {}  # layers, numbered in the order of calls, by id of the attention module
        self.hook: Hook | None = None
        self.thread = threading.get_ident()
        self._again: int | None = None  # autograd's thread, while a layer runs again in it

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """Marks that a layer of this tap's forward runs again in a backward pass: on GPUs that is in another thread."""
        self._again = threading.get_ident()
        try:
            yield
        finally:
            self._again = None

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if threading.get_ident() not in (self.thread, self._again):
            attend = getattr(type(key), "attention", own_attention)  # new keys of a packed cache have one
            past: tuple[torch.Tensor, torch.Tensor | None]
            past = attend(Call(module, query, key, value, attention_mask, scaling, dropout, options))
            return past
        layer = self.order.setdefault(id(module), len(self.order))
        if self.hook is not None and (replaced := self.hook(module, layer, query, key, value)) is not None:
            if self.exact is not None:
                attention_mask = _either(attention_mask, query.shape[2], key, *self.exact, self.tile)
                replaced = torch.cat((key, replaced[0]), 2), torch.cat((value, replaced[1]), 2)
            key, value = replaced
        return own_attention(Call(module, query, key, value, attention_mask, scaling, dropout, options))


def _either(mask: Any, queries: int, key: torch.Tensor, sinks: int, window: int, tile: int) -> torch.Tensor:
    """Returns the model's mask for the tokens of key [batch, kv_heads, tokens, head_dim] and the same tokens replaced,
    for the last `queries` tokens: bool [.., queries, 2 * tokens]. A query sees each token that it saw, once: sinks, its
    window and its tile among the first half, others in the second."""
    at = torch.arange(key.shape[2], device=key.device)
    own = at[-queries:, None]
    back = own - at
    pattern = mask.of_kind("sdpa") if isinstance(mask, MaskRequest) else mask
    seen = (back >= 0)[None, None] if pattern is None else pattern.to(key.device)
    exact = (back < window) | (at < sinks)
    if tile:
        exact |= own // tile == at // tile
    return torch.cat((seen & exact, seen & ~exact), -1)


@contextmanager
def tapped(model: Any) -> Iterator[Tap]:
    """Routes the model's attention through a tap, in evaluation mode and without gradients. Afterwards the attention
    and the mode of each module are what they were."""
    tap = Tap()
    with tap_lock:
        before = [(config, config._attn_implementation) for config in routed_configs(model)]
        AttentionInterface.register(TAP, tap.attention)
        AttentionMaskInterface.register(TAP, request_mask)
        try:
            for config, _ in before:
                set_name(config, TAP)
            with evaluating(model), float16_in_float32(model):
                yield tap
        finally:
            for config, name in before:
                set_name(config, name)
