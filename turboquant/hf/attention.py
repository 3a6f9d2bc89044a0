"""Connects the attention of a transformers model to a TurboQuantCache: an attention function, a mask function, and keys
that know their layer.

`TurboQuantCache.update` returns the new keys as `FreshKeys`, a tensor that remembers its cache layer. The model passes
it to the attention function that its configuration names; if that is "turboquant", `attention` below finds the layer in
it. No global state is involved, so threads may run patched models side by side. Any other use of these keys is an
error.

Masks are only made if needed: the mask function returns a `models.attention.MaskRequest` with the model's arguments. A
packed layer takes the left padding from it, once per forward; attention without a packed cache has transformers make
the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.attention import Call, MaskRequest, own_attention, request_mask
from . import absorbed
from .absorbed import Latents
from .carried import Carried
from .notices import foreign_keys

if TYPE_CHECKING:
    from ..kvcache.again import Seen
    from .layer import PackedLayer

__all__ = ["NAME", "FreshKeys", "attention"]

# The name in transformers' two registries. They look for "flash", "flex" and "sdpa" inside names: it must have none.
NAME = "turboquant"


class FreshKeys(Carried):
    """New keys of a packed layer in this forward, [batch, kv_heads, tokens, head_dim], not stored yet.

    A model whose later layers read these keys gives them to its attention again, in the same forward, and may move them
    to the device of such a layer. Moving does nothing: the keys stay where they are, and the queries are moved instead.
    """

    layer: PackedLayer
    keys: torch.Tensor | None  # the same numbers, as a plain tensor; None once they are stored
    seen: Seen | None  # what later layers need to read them again; None: no layer does

    @classmethod
    def of(cls, keys: torch.Tensor, layer: PackedLayer) -> FreshKeys:
        fresh: FreshKeys = keys.as_subclass(cls)
        fresh.layer, fresh.keys, fresh.seen = layer, keys, None
        return fresh

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.to and args[0].seen is not None:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    @staticmethod
    def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends to all stored tokens in a call whose keys are `FreshKeys`. Returns what `own_attention` does."""
        fresh: Any = call.key
        keys, fresh.keys = fresh.keys, None
        learned = call.options.pop("s_aux", None)
        if keys is not None:
            call.key = keys
            out, lse, fresh.seen = fresh.layer.attend(call, return_lse=learned is not None)
        elif fresh.seen is not None:
            out, lse = fresh.layer.attend_again(call, fresh.seen, return_lse=learned is not None)
        else:
            raise NotImplementedError(f"layer {fresh.layer.index}: its keys and values were given to attention twice")
        if learned is not None and lse is not None:
            out = out * _share_beside(learned, lse).to(out.dtype)
        return out, None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FreshKeys(layer={self.layer.index})"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskRequest | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function "turboquant".

    query   [batch, query_heads, tokens, head_dim];  key, value  [batch, kv_heads, positions, head_dim], or the new
            tokens alone if key is `FreshKeys`: its layer then stores them and attends to all stored tokens. If key is
            `Latents`, it has all tokens, and value is their rotary parts
    returns [batch, tokens, query_heads, head_dim], dense, in the dtype of query, and no weights

    A model compiled by torch.compile calls it, and `TurboQuantCache.update`, between its graphs.
    """
    call = Call(module, query, key, value, attention_mask, scaling, dropout, options)
    if type(key) is FreshKeys:
        return FreshKeys.attention(call)
    if type(key) is Latents:
        return absorbed.attention(call)
    if key.shape[2] > query.shape[2]:
        foreign_keys(module)
    return own_attention(call)


def _share_beside(learned: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The share of a softmax that tokens have beside a learned sink, [batch, tokens, heads, 1]. learned [heads]: the
    sinks, logits whose value is zero. lse float32 [batch, heads, tokens], of the tokens alone."""
    return torch.sigmoid(lse - learned.float().view(1, -1, 1)).transpose(1, 2).unsqueeze(-1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(
    NAME, request_mask
)  # always both: without this one there is neither causality nor padding
