"""Connects the attention of a transformers model to a TurboQuantCache: an attention function, a mask function, and keys
that know their layer.

`TurboQuantCache.update` returns the new keys as `FreshKeys`, a tensor that remembers its cache layer. The model passes
it to the attention function that its configuration names; if that is "turboquant", `attention` below finds the layer in
it. No global state is involved, so threads may run patched models side by side. Any other use of these keys is an
error.

Masks are only made if needed: the mask function returns a `MaskRequest` with the model's arguments. A packed layer
takes the left padding from it, once per forward; attention without a packed cache has transformers make the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .notices import foreign_keys

if TYPE_CHECKING:
    from ..kvcache.again import Seen
    from .layer import PackedLayer

__all__ = [
    "NAME",
    "FreshKeys",
    "MaskRequest",
    "attention",
    "own_attention",
    "refuse_transforms",
    "request_mask",
    "without_gradient",
]

# The name in transformers' two registries, which look for "flash", "flex" and "sdpa" inside names: keep them out of it.
NAME = "turboquant"


_CHANGED = (
    "the model's attention changed during this forward, by turboquant.unpatch or set_attn_implementation in another "
    "thread: run the forward again, with a new cache"
)


class MaskRequest:
    """The arguments that a model called its mask function with, standing in for the mask during one forward.

    padding_mask   [batch, positions so far] bool, True for real tokens, or None: no padding
    local_size     sliding window in positions, 0: none
    positions      columns of the mask: the stored ones of the cache's first layer of this kind, and the new ones
    causal         False where the model changes the pattern, as by images whose tokens all see each other. Only `made`
                   has that pattern
    last           how many of the last queries it is for; 0: all. Models ask for that with mask[:, :, -last:, :]
    """

    ndim = 4  # of the tensor it stands for: models ask whether a mask is [batch, positions]
    __slots__ = ("_arguments", "_made", "_padding", "causal", "last", "local_size", "padding_mask", "positions")

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.padding_mask: torch.Tensor | None = arguments.get("attention_mask")
        self.local_size = int(arguments.get("local_size") or 0)
        self.positions = int(arguments["kv_length"])
        self.causal = bool(arguments.get("allow_is_causal_skip", True))
        self._arguments = arguments
        self._made: dict[str, torch.Tensor | None] = {}
        self._padding: tuple[int, ...] | None = None
        self.last = 0

    def __getattr__(self, name: str) -> Any:
        """Another attention function than ours asks for something of the tensor."""
        raise AttributeError(f"`{name}` of an attention mask: {_CHANGED}")

    def __getitem__(self, where: Any) -> MaskRequest:
        whole = slice(None)
        rows = where[2] if isinstance(where, tuple) and len(where) == 4 else None
        others = rows is not None and where[0] == where[1] == where[3] == whole
        if not others or not isinstance(rows, slice) or rows.stop is not None or (rows.start or 0) > 0:
            raise RuntimeError(_CHANGED)
        part = MaskRequest(self._arguments)
        part._padding, part.last = self._padding, -(rows.start or 0)
        return part

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RuntimeError(_CHANGED)

    def made(self, kind: str) -> torch.Tensor | None:
        """The mask as transformers makes it for its attention `kind`: "sdpa" or "eager"."""
        if kind not in self._made:
            more = {} if self.last <= 1 else {"allow_is_causal_skip": False}  # of fewer queries SDPA's own is not right
            made = AttentionMaskInterface()[kind](**self._arguments | more)
            self._made[kind] = made[:, :, -self.last :] if made is not None and self.last else made
        return self._made[kind]

    def contiguous(self) -> torch.Tensor | None:
        """The tensor: `generate` calls this on masks that it makes ahead, for caches of fixed size (never ours)."""
        return self.made("sdpa")

    def padding(self, before: int, tokens: int, known: tuple[int, ...]) -> tuple[int, ...]:
        """Masked positions of each sequence, with those of this forward: they are not stored. In the first forward
        (`before` is 0) and in later ones they are in front of a sequence's new tokens.

        before, tokens   positions of each sequence before this forward, and new ones
        known            masked positions so far; those of an empty cache are unknown: zeros, as many as sequences

        Checked once per forward, but not in a step of one token on a GPU. Raises ValueError for masked positions behind
        new tokens, and where others of the stored positions are masked than were padding, by their number.
        """
        if self._padding is None:
            self._padding = self._found(tokens, known) if before == 0 else self._confirmed(before, tokens, known)
        return self._padding

    def _found(self, tokens: int, known: tuple[int, ...]) -> tuple[int, ...]:
        mask = self.padding_mask
        if mask is None:
            return known
        if mask.shape != (len(known), tokens):
            raise ValueError(f"`attention_mask` must have shape {(len(known), tokens)}, got {tuple(mask.shape)}")
        ends = (mask[:, :-1] > mask[:, 1:]).any(1)  # a real token before a masked one
        *padding, bad = torch.cat([(~mask).sum(1), ends.sum().view(1)]).tolist()
        if bad:
            raise ValueError("`attention_mask` must be left padding only, got masked positions after real ones in "
                             f"{bad} of {len(padding)} sequences: set `tokenizer.padding_side = \"left\"`")  # fmt: skip
        return tuple(padding)

    def _confirmed(self, before: int, tokens: int, known: tuple[int, ...]) -> tuple[int, ...]:
        mask, after = self.padding_mask, before + tokens
        if mask is None:
            return known
        if mask.shape != (len(known), after):
            raise ValueError(f"`attention_mask` must cover the {before} stored positions and the {tokens} new ones, "
                             f"shape {(len(known), after)}, got {tuple(mask.shape)}")  # fmt: skip
        if tokens == 1 and mask.device.type != "cpu" and all(pad < before for pad in known):
            return known  # reading the mask would wait for the device in every step
        masked, new = ~mask, mask[:, before:]
        ends = (new[:, :-1] > new[:, 1:]).any(1)  # a real token before a masked one
        stored, every, bad = torch.stack([masked[:, :before].sum(1), masked.sum(1), ends.long()]).tolist()
        if tuple(stored) != known or any(bad):
            raise ValueError(
                f"`attention_mask` must mask as many stored positions of each sequence as were padding, {list(known)}, "
                f"and new ones only in front of its new tokens, got {stored} and padding behind new tokens in "
                f"{sum(bad)} of {len(bad)} sequences"
            )
        return tuple(every)


def request_mask(**arguments: Any) -> MaskRequest:
    """The mask function: a model calls it once per forward and kind of mask; keywords differ between versions."""
    given = arguments.get("attention_mask")
    if isinstance(given, MaskRequest):  # made ahead by `generate` (transformers 4.57, caches of fixed size)
        return given
    return MaskRequest(arguments)


_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in "shape dtype device ndim layout requires_grad is_cuda".split()),
    *(
        getattr(torch.Tensor, name)
        for name in "size dim stride numel element_size is_floating_point get_device __len__".split()
    ),
    # What torch.compile asks of every tensor that comes out of a function that it does not trace.
    *(
        getattr(torch.Tensor, name).__get__
        for name in "is_nested is_sparse is_quantized is_mkldnn is_leaf grad _base".split()
    ),
    *(getattr(torch.Tensor, name) for name in "is_neg is_conj _is_view storage_offset untyped_storage".split()),
}


class FreshKeys(torch.Tensor):
    """New keys of a packed layer in this forward, [batch, kv_heads, tokens, head_dim], not stored yet.

    Only shape, dtype and device can be read. Every other operation raises RuntimeError: a model that computes with
    these keys does not use the attention function of this package and would ignore the stored tokens. A model whose
    later layers read these keys gives them to its attention again, in the same forward, and may move them to the
    device of such a layer: they stay where they are, and its queries come to them.
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
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and args[0].seen is not None:
            return args[0]
        name = getattr(func, "__name__", repr(func))
        raise RuntimeError(
            f"`{name}` was called on keys that are kept in a TurboQuantCache: this model does not attend through it. "
            "Call turboquant.patch(model) first; if it is patched, its attention bypasses the AttentionInterface."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FreshKeys(layer={self.layer.index})"


def own_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskRequest | None,
    scaling: float | None,
    dropout: float,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's attention without this package: SDPA, or its eager function for what SDPA does not support: a
    soft-cap, learned sinks, or if weights are wanted."""
    eager = options.get("softcap") is not None or options.get("s_aux") is not None or options.get("output_attentions")
    kind = "eager" if eager else "sdpa"
    if isinstance(attention_mask, MaskRequest):
        attention_mask = attention_mask.made(kind)
    if attention_mask is not None:
        attention_mask = attention_mask.to(
            query.device
        )  # a model that is spread over devices makes one mask, on the first
        if kind == "eager" and attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
                ~attention_mask, torch.finfo(query.dtype).min
            )
    if kind == "sdpa":
        run = sdpa_attention_forward
    else:
        run = sys.modules[type(module).__module__].eager_attention_forward
    out, weights = run(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    return out, weights


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, why: str, *given: torch.Tensor) -> torch.Tensor:
        ctx.why = why
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ctx.why)


def without_gradient(out: torch.Tensor, why: str, *given: torch.Tensor) -> torch.Tensor:
    """`out` as a result of the tensors `given`. A backward pass through it raises RuntimeError with the text `why`:
    packed keys and values have no gradient."""
    return _NoGradient.apply(out, why, *given)  # type: ignore[no-any-return,no-untyped-call]


def refuse_transforms(why: str, *given: torch.Tensor) -> None:
    """RuntimeError with the text `why` for tensors that a transform of torch.func or forward-mode differentiation
    follows: its result would lack what packed keys and values contribute."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None and any(map(functorch.is_functorch_wrapped_tensor, given)):
        raise RuntimeError(f"{why} (it was called inside a transform of torch.func)")
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in given):  # type: ignore[no-untyped-call]
        raise RuntimeError(f"{why} (it was called inside forward_ad.dual_level)")


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
            tokens alone if key is `FreshKeys`: its layer then stores them and attends to all stored tokens
    returns [batch, tokens, query_heads, head_dim], dense, in the dtype of query, and no weights

    A model compiled by torch.compile calls it, and `TurboQuantCache.update`, between its graphs.
    """
    if type(key) is not FreshKeys:
        if key.shape[2] > query.shape[2] and not hasattr(module, "expand_kv"):  # latents were decoded for it
            foreign_keys(module)
        return own_attention(module, query, key, value, attention_mask, scaling, dropout, options)
    keys, key.keys = key.keys, None
    sinks = options.pop("s_aux", None)
    if keys is not None:
        arguments = module, query, keys, value, attention_mask, scaling, dropout, options
        out, lse, key.seen = key.layer.attend(*arguments, return_lse=sinks is not None)
    elif key.seen is not None:
        out, lse = key.layer.attend_again(
            module, query, key.seen, attention_mask, scaling, dropout, options, return_lse=sinks is not None
        )
    else:
        raise NotImplementedError(f"layer {key.layer.index}: its keys and values were given to attention twice")
    if sinks is not None and lse is not None:
        out = out * _share_beside(sinks, lse).to(out.dtype)
    return out, None


def _share_beside(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The share of a softmax that its tokens have beside a learned sink, [batch, tokens, heads, 1]: a sink is a logit
    [heads] whose value is zero. lse float32 [batch, heads, tokens], of the tokens alone."""
    return torch.sigmoid(lse - sinks.float().view(1, -1, 1)).transpose(1, 2).unsqueeze(-1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(
    NAME, request_mask
)  # always both: without this one there is neither causality nor padding
