"""Matrix products of float16 on a CPU, computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["float16_in_float32"]

_aten = torch.ops.aten
_PRODUCTS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,  # this and matmul come whole in inference mode
    _aten.matmul.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class _InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype != torch.float16 or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        wide = tree_map_only(torch.Tensor, torch.Tensor.float, args)
        return tree_map_only(torch.Tensor, torch.Tensor.half, func(*wide, **kwargs))


def float16_in_float32(model: Any) -> AbstractContextManager[Any]:
    """Computes the matrix products of a float16 model's passes in float32 where it is on a CPU, and rounds the results:
    torch has no fast ones of float16 there, and some of a backward pass take a hundred times as long. Takes memory for
    one weight in float32 at a time. For other models does nothing."""
    halves = any(weight.dtype == torch.float16 and weight.device.type == "cpu" for weight in model.parameters())
    return _InFloat32() if halves else nullcontext()  # type: ignore[no-untyped-call]
