"""Tensors that a cache layer hands to this package's attention function through a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Carried"]

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


class Carried(torch.Tensor):
    """Only shape, dtype and device can be read. Every other operation raises RuntimeError: a model that computes with
    such a tensor does not use the attention function of this package and would ignore the stored tokens."""

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
        name = getattr(func, "__name__", repr(func))
        raise RuntimeError(
            f"`{name}` was called on keys that are kept in a TurboQuantCache: this model does not attend through it. "
            "Call turboquant.patch(model) first; if it is patched, its attention bypasses the AttentionInterface."
        )
