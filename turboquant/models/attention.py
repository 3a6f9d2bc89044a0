"""The attention of a model without this package, the masks that it asks for, and results without a gradient."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

__all__ = ["Call", "MaskRequest", "own_attention", "refuse_transforms", "request_mask", "without_gradient"]

_CHANGED = (
    "the model's attention changed during this forward, by turboquant.unpatch or set_attn_implementation in another "
    "thread: run the forward again, with a new cache"
)


class MaskRequest:
    """The arguments that a model called its mask function with, standing in for the mask during one forward.

    padding_mask   [batch, positions so far] bool, True for real tokens, or None: no padding
    local_size     sliding window in positions, 0: none
    positions      columns of the mask: the stored ones of the cache's first layer of this kind, and the new ones
    causal         False where the model changes the pattern, as by images whose tokens all see each other. Only
                   the mask of `of_kind` has that pattern
    behind         how many new positions of each sequence are padding behind its tokens, found by `padding`; (): none
    last           how many of the last queries it is for; 0: all. Models ask for that with mask[:, :, -last:, :]
    """

    ndim = 4  # of the tensor it stands for: models ask whether a mask is [batch, positions]

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.padding_mask: torch.Tensor | None = arguments.get("attention_mask")
        self.local_size = int(arguments.get("local_size") or 0)
        self.positions = int(arguments["kv_length"])
        self.causal = bool(arguments.get("allow_is_causal_skip", True))
        self._arguments = arguments
        self._masks: dict[str, torch.Tensor | None] = {}
        self._padding: tuple[int, ...] | None = None
        self.behind: tuple[int, ...] = ()
        self.last = 0

    def __getattr__(self, name: str) -> Any:
        """Raises, because only another attention function than ours asks for something of the tensor."""
        raise AttributeError(f"`{name}` of an attention mask: {_CHANGED}")

    def __getitem__(self, where: Any) -> MaskRequest:
        whole = slice(None)
        rows = where[2] if isinstance(where, tuple) and len(where) == 4 else None
        others = rows is not None and where[0] == where[1] == where[3] == whole
        if not others or not isinstance(rows, slice) or rows.stop is not None or (rows.start or 0) > 0:
            raise RuntimeError(_CHANGED)
        part = MaskRequest(self._arguments)
        part._padding, part.behind, part.last = self._padding, self.behind, -(rows.start or 0)
        return part

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RuntimeError(_CHANGED)

    def of_kind(self, kind: str) -> torch.Tensor | None:
        """The mask as transformers makes it for its attention `kind`: "sdpa" or "eager"."""
        if kind not in self._masks:
            more = {} if self.last <= 1 else {"allow_is_causal_skip": False}  # SDPA's own is wrong for fewer queries
            mask = AttentionMaskInterface()[kind](**self._arguments | more)
            self._masks[kind] = mask[:, :, -self.last :] if mask is not None and self.last else mask
        return self._masks[kind]

    def contiguous(self) -> torch.Tensor | None:
        """Returns the tensor: `generate` calls this on masks made ahead, for caches of fixed size (never ours)."""
        return self.of_kind("sdpa")

    def padding(self, before: int, tokens: int, known: tuple[int, ...]) -> tuple[int, ...]:
        """How many positions of each sequence are masked, those of this forward included. Masked positions are not
        stored. They lie in front of a sequence's new tokens, or `behind` them.

        before, tokens   positions of each sequence before this forward, and new ones
        known            masked positions of each sequence so far; zeros for an empty cache, of which they are unknown

        Reads the mask once per forward, but not in a step of one token on a GPU. Raises ValueError for masked positions
        between new tokens, and if another number of stored positions is masked than were padding.
        """
        if self._padding is None:
            self._padding = self._masked_positions(before, tokens, known)
        return self._padding

    def _masked_positions(self, before: int, tokens: int, known: tuple[int, ...]) -> tuple[int, ...]:
        mask, after = self.padding_mask, before + tokens
        if mask is None:
            return known
        if mask.shape != (len(known), after):
            raise ValueError(f"`attention_mask` must cover the {before} stored positions and the {tokens} new ones, "
                             f"shape {(len(known), after)}, got {tuple(mask.shape)}")  # fmt: skip
        if before and tokens == 1 and mask.device.type != "cpu" and all(pad < before for pad in known):
            return known  # reading the mask would wait for the device in every step
        new = mask[:, before:]
        runs = (new[:, 1:] & ~new[:, :-1]).sum(1) + new[:, 0]  # runs of real tokens
        behind = (~new).flip(1).long().cumprod(1).sum(1) * (runs > 0)
        counts = (~mask[:, :before]).sum(1), (~mask).sum(1), behind, runs
        stored, padding, ends, n_runs = torch.stack(counts).tolist()
        if broken := sum(n > 1 for n in n_runs):
            raise ValueError("`attention_mask` must mask positions in front of the new tokens of a sequence or behind "
                             f"them, got masked ones between tokens in {broken} of {len(known)} sequences")  # fmt: skip
        if before and tuple(stored) != known:
            raise ValueError("`attention_mask` must mask as many stored positions of each sequence as were padding, "
                             f"{list(known)}, got {stored}")  # fmt: skip
        self.behind = tuple(ends) if any(ends) else ()
        return tuple(padding)


def request_mask(**arguments: Any) -> MaskRequest:
    """The mask function: a model calls it once per forward and kind of mask; keywords differ between versions."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, MaskRequest):  # made ahead by `generate` (transformers 4.57, caches of fixed size)
        return mask
    return MaskRequest(arguments)


@dataclass(slots=True)
class Call:
    """A call of an attention function, as a layer of a model makes it.

    query     [batch, query_heads, tokens, head_dim];  key, value  [batch, kv_heads, positions, head_dim]
    mask      what the mask function returned
    scaling   of the logits; None: head_dim ** -0.5
    options   the other keyword arguments
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any = None
    scaling: float | None = None
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


def own_attention(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the model's attention without this package: SDPA, or the model's eager function for what SDPA does not do (a
    soft-cap, learned sinks, weights as output). Returns [batch, tokens, query_heads, head_dim], and weights."""
    options, mask = call.options, call.mask
    eager = options.get("softcap") is not None or options.get("s_aux") is not None or options.get("output_attentions")
    if isinstance(mask, MaskRequest):
        mask = mask.of_kind("eager" if eager else "sdpa")
    if mask is not None:
        mask = mask.to(call.query.device)  # a model that is spread over devices makes one mask, on the first
        if eager and mask.dtype == torch.bool:
            least = torch.finfo(call.query.dtype).min
            mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, least)
    run = sys.modules[type(call.module).__module__].eager_attention_forward if eager else sdpa_attention_forward
    out, weights = run(call.module, call.query, call.key, call.value, mask, dropout=call.dropout, scaling=call.scaling,
                       **options)  # fmt: skip
    return out, weights


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, why: str, *sources: torch.Tensor) -> torch.Tensor:
        ctx.why = why
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ctx.why)


def without_gradient(out: torch.Tensor, why: str, *sources: torch.Tensor) -> torch.Tensor:
    """Returns `out` as a result of the tensors `sources`. A backward pass through it raises RuntimeError with the text
    `why`: packed keys and values have no gradient."""
    return _NoGradient.apply(out, why, *sources)  # type: ignore[no-any-return,no-untyped-call]


def refuse_transforms(why: str, *tensors: torch.Tensor) -> None:
    """Raises RuntimeError with the text `why` for tensors that a transform of torch.func or forward-mode
    differentiation follows: its result would lack what packed keys and values contribute."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is not None and any(map(functorch.is_functorch_wrapped_tensor, tensors)):
        raise RuntimeError(f"{why} (it was called inside a transform of torch.func)")
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise RuntimeError(f"{why} (it was called inside forward_ad.dual_level)")
