"""Identifies the weights behind a model's keys and values: a CRC-32 of a sample of every tensor they depend on.

The keys of the last layer depend on the embeddings, on all layers below, and on the last layer's weights up to its key
and value projections. A tensor of up to 16384 numbers counts whole, a longer one with 16 runs of 4 numbers, spread over
it: training and merged adapters change nearly all numbers of a tensor. The bytes are compared as they are stored, so
that CPU and GPU, whole and offloaded models agree; a model in another dtype is another one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from .placement import loaded
from .routing import decoder_of, text_config

__all__ = ["active_adapters", "changed_weights", "weight_sums"]

_WHOLE = 2**14  # numbers of a tensor
_RUNS, _RUN = 16, 4  # few places: each is a page to fetch where weights are mapped from a file
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: multiples of it modulo 2^64 are spread evenly

# Parts of names of weights in the last layer that its keys and values do not depend on, and of modules after it.
# Weights with other names count.
_BEHIND_KEYS = ("q_proj", "q_norm", "o_proj", "mlp", "post_", "feedforward", "ffn", "feed_forward", "experts")
_BEHIND_LAYERS = ("norm.", "final_layernorm.", "ln_f.", "final_norm.")


def weight_sums(model: Any) -> dict[str, str]:
    """CRC-32, 8 hexadecimal digits, by name, for a decoder of transformers or the PeftModel around one.

    Active adapters and tuned prompts count; merged adapters are part of the weights. ValueError for weights that are on
    the meta device and not offloaded.
    """
    from .patching.wrappers import base_model

    decoder = base_model(model).base_model
    where = _places_of_layers(decoder)
    idle, sums = tuple(_idle_adapters(decoder)), _scalings(decoder)
    for name, tensor in decoder.state_dict().items():
        if isinstance(tensor, torch.Tensor) and not f"{name}.".startswith(idle) and _matters(name, *where):
            sums[_plain(name)] = f"{_sum_of(loaded(decoder, name, tensor)):08x}"
    for name, tensor in _tuned_prompt(model):
        sums[name] = f"{_sum_of(tensor):08x}"
    return sums


def changed_weights(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of what differs."""
    return [name for name in {**was, **now} if was.get(name) != now.get(name)]


def _plain(name: str) -> str:
    """The name that a weight has without an adapter around its module."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _places_of_layers(model: Any) -> tuple[str, str, str]:
    """Prefixes of names: (of the text decoder, of its list of layers, of its last layer)."""
    count = text_config(model).num_hidden_layers
    ours = {id(part) for part in decoder_of(model).modules()}
    lists = (
        name
        for name, part in model.named_modules()
        if id(part) in ours and isinstance(part, torch.nn.ModuleList) and len(part) == count
    )
    layers = next(lists, "")
    return layers.removesuffix(layers.rpartition(".")[2]), f"{layers}.", f"{layers}.{count - 1}."


def _matters(name: str, decoder: str, layers: str, last: str) -> bool:
    if name.startswith(last):
        return not any(word in name for word in _BEHIND_KEYS)
    return name.startswith(layers) or not name.startswith(tuple(decoder + part for part in _BEHIND_LAYERS))


# ---- adapters of peft, found by their attributes: peft need not be installed ----


def _adapted(decoder: Any) -> Iterator[tuple[str, Any, set[str]]]:
    """(name, module, adapters that it computes with) of modules with adapters."""
    for name, module in decoder.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            used = set() if module.disable_adapters else {*module.active_adapters} - {*module.merged_adapters}
            yield name, module, used


def _idle_adapters(decoder: Any) -> Iterator[str]:
    """Prefixes of names of weights that no forward uses: adapters that are off, or merged into the weights."""
    for name, module, used in _adapted(decoder):
        for part in module.adapter_layer_names:
            yield from (f"{name}.{part}.{key}." for key in getattr(module, part, ()) if key not in used)


def _tuned_prompt(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that make the embeddings which a PeftModel puts in front of a prompt."""
    encoders, name = getattr(model, "prompt_encoder", None), getattr(model, "active_adapter", None)
    if isinstance(encoders, torch.nn.ModuleDict) and isinstance(name, str) and name in encoders:
        yield from encoders[name].state_dict(prefix=f"prompt_encoder.{name}.").items()


def active_adapters(model: Any) -> dict[str, str]:
    """Of each module that computes with adapters, by its name: their names and scalings, as text."""
    found = {}
    for name, module, used in _adapted(model):
        if used:
            scaling = getattr(module, "scaling", {})
            found[name] = repr([(key, scaling.get(key)) for key in sorted(used)])
    return found


def _scalings(decoder: Any) -> dict[str, str]:
    where = _places_of_layers(decoder)
    active = active_adapters(decoder).items()
    return {f"{n}.scaling": f"{zlib.crc32(x.encode()):08x}" for n, x in active if _matters(f"{n}.", *where)}


# ---- one tensor ----


@lru_cache(maxsize=64)
def _places(numbers: int) -> torch.Tensor:
    starts = [(i * _GOLDEN % 2**64) * (numbers - _RUN) >> 64 for i in range(_RUNS)]
    return torch.tensor([start + i for start in starts for i in range(_RUN)], device="cpu")


@torch.no_grad()
def _sum_of(tensor: torch.Tensor, value: int = 0) -> int:
    """CRC-32 of type, shape and sample. A tensor made of others (quantised, or sharded) counts by its parts."""
    value = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), value)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            value = _sum_of(getattr(tensor, part), value)
        return value
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return value
    rows = flat.view(torch.uint8).view(flat.numel(), -1)  # bytes: not every dtype can be indexed
    if len(rows) > _WHOLE:
        rows = rows[_places(len(rows)).to(rows.device)]
    return zlib.crc32(rows.contiguous().cpu().numpy().data, value)
