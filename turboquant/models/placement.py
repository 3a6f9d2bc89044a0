"""Where the weights of a model are: on one device, on several, or, loaded with a `device_map`, in main memory or on
disk. Offloaded weights are on the meta device; accelerate's hooks bring each to its device for one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["device_of", "is_offloaded", "loaded", "on_all_ranks", "weight_of"]


def device_of(module: torch.nn.Module) -> torch.device:
    """The device on which a module's first weights are used, which is where its inputs go.

    Raises ValueError for a module without weights, or whose weights are on the meta device and in no hook.
    """
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if not weight.is_meta:
                return weight.device
            for hook in _hooks(part):
                if (device := getattr(hook, "execution_device", None)) is not None:
                    return torch.device(device)
    raise ValueError(f"`model` must have its weights loaded, got {type(module).__name__} with none")


def is_offloaded(model: torch.nn.Module) -> bool:
    """Whether some weights are on their device for the time of a forward only."""
    return any(weight.is_meta for weight in model.parameters())


def loaded(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of the weight `tensor` of this name, wherever it is: this rank's part of a sharded one, dequantised
    if torchao has quantised it. Raises ValueError if it is on the meta device and not offloaded."""
    whole = weight_of(model, name, tensor)
    local: Callable[[], torch.Tensor] | None = getattr(whole, "to_local", None)
    if local is not None:
        return local()
    quantised = type(whole).dequantize is not torch.Tensor.dequantize
    return whole.dequantize() if quantised else whole


def weight_of(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The weight `tensor` of this name, or the one that is offloaded in its place. Raises ValueError if it is on the
    meta device and not offloaded."""
    if not tensor.is_meta:
        return tensor
    path, _, leaf = name.rpartition(".")
    for hook in _hooks(model.get_submodule(path)):
        if (weights := getattr(hook, "weights_map", None)) is not None and leaf in weights:
            weight: torch.Tensor = weights[leaf]
            return weight
    raise ValueError(f"`model` must have its weights loaded, got {name} on the meta device")


def on_all_ranks(model: torch.nn.Module, here: bool) -> bool:
    """Whether `here` is true on every rank that has a part of a sharded model: all must call this. For a model that is
    not sharded, `here` itself."""
    for mesh in dict.fromkeys(p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")):
        for group in mesh.get_all_groups():
            flag = torch.tensor(int(here), device=mesh.device_type)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group)
            here = bool(flag)
    return here


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Accelerate's hooks of a module."""
    if (hook := getattr(module, "_hf_hook", None)) is not None:
        yield from getattr(hook, "hooks", [hook])
