"""Read by mypy, never run, where torch is installed: like numpy_api.py."""

# ruff: noqa: F821

import torch

from turboquant import ops

k = torch.zeros(1, 1, 4, 64)
packed = ops.pack(k, k, bits=4)
reveal_type(packed)  # type: PackedKV
reveal_type(packed.transforms)  # type: dict[str, Tensor]
reveal_type(ops.attend(k, packed))  # type: Tensor
reveal_type(ops.attend(k, packed, return_lse=True))  # type: tuple[Tensor, Tensor]
reveal_type(ops.append_attend(k, k, k, packed))  # type: Tensor
ops.attend(packed, k)  # error: call-overload
ops.append(packed, k)  # error: call-arg
ops.pack(k, k, bits="4")  # error: arg-type
