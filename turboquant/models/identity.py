"""What a model is: its configuration, its active adapters, and a sample of every weight that its queries, keys and
values depend on.

    describe       the configuration
    fingerprint    `describe` and a few numbers of the sample, for files: it survives another dtype
    weight_sums    a CRC-32 of the sample of each weight, by name: exact
    Identity       the weights of a model in this process; it tells cheaply whether they are still the same

The keys of the last layer depend on the embeddings, on all layers below, and on the last layer's weights up to its key
and value projections. A tensor of up to 16384 numbers counts whole, a longer one with 16 runs of 4 numbers, spread over
it: training and merged adapters change nearly all numbers of a tensor. The bytes are compared as they are stored, so
that CPU and GPU, whole and offloaded models agree; a model in another dtype is another one.
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from .kinds import kinds_of, latent_size, packed_indices, unequal_size
from .placement import loaded, weight_of
from .routing import decoder_of, text_config
from .wrappers import base_model

__all__ = ["Identity", "active_adapters", "changed_weights", "describe", "fingerprint", "layer_sizes",
           "weight_sums"]  # fmt: skip

_WHOLE = 2**14  # numbers of a tensor that counts whole, at most
_RUNS, _RUN = 16, 4  # few runs: each is a page to fetch where weights are mapped from a file
_TOLD_TENSORS, _TOLD_NUMBERS = 8, 16  # tensors in a fingerprint, and numbers of each

# Parts of names: of weights in the last layer that its queries, keys and values do not depend on; of weights that its
# queries alone depend on; and of modules after that layer. Weights with other names count.
_BEHIND_QUERIES = ("o_proj", "mlp", "post_", "feedforward", "ffn", "feed_forward", "experts")
_OF_QUERIES = ("q_proj", "q_norm")
_BEHIND_LAYERS = ("norm.", "final_layernorm.", "ln_f.", "final_norm.", "emb_layer_norm_after.")
_BEHIND_ALL = ("pooler.", "contact_head.")  # of ESM-2
_word = ctypes.c_uint64.from_address
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def describe(config: Any) -> dict[str, Any]:
    """The part of a fingerprint that comes from the configuration: type, numbers of layers and KV heads, channels of a
    head, rotary embedding, and, if it says so, which layers have none. The same in transformers 4.57 and 5."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    if getattr(text, "rope_theta", None) is not None:
        rope.setdefault("rope_theta", text.rope_theta)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    without = {"no_rope_layers": list(exceptions)} if (exceptions := getattr(text, "no_rope_layers", None)) else {}
    return {
        **without,
        "model_type": text.model_type,
        "layers": len(packed_indices(text)),
        **_sizes(text),
        "rope": {name: float(x) if isinstance(x, int) else x for name, x in sorted(rope.items())},
    }


def _sizes(text: Any) -> dict[str, Any]:
    """kv_heads and head_dim: numbers, or lists with one for each layer that has keys where they differ."""
    if rank := getattr(text, "kv_lora_rank", None):  # latents, cut into heads
        size = latent_size(text) or 8
        return {"kv_heads": (rank + text.qk_rope_head_dim) // size, "head_dim": size}
    if size := unequal_size(text):  # keys and values, cut into heads; MiMo's sliding layers have twice as many
        pieces = text.num_key_value_heads * (text.head_dim + text.v_head_dim) // size
        each = [pieces * (1 + (kind == "sliding_attention")) for kind, _ in kinds_of(text)]
        if len({*each}) == 1:
            return {"kv_heads": each[0], "head_dim": size}
        return {"kv_heads": each, "head_dim": [size] * len(each)}
    varying = {*(getattr(text, "per_layer_attributes", None) or ())} & {"head_dim", "num_key_value_heads"}
    layers = [text.per_layer_config[i] for i in packed_indices(text)] if varying else [text]
    kv_heads = [getattr(one, "num_key_value_heads", None) or one.num_attention_heads for one in layers]
    head_dims = [getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads for one in layers]
    if len({*zip(kv_heads, head_dims)}) == 1:
        return {"kv_heads": kv_heads[0], "head_dim": head_dims[0]}
    return {"kv_heads": kv_heads, "head_dim": head_dims}


def layer_sizes(described: dict[str, Any]) -> list[tuple[int, int]]:
    """(KV heads, head_dim) of each layer that has keys, of what `describe` returned."""
    kv_heads, head_dims = described["kv_heads"], described["head_dim"]
    if isinstance(head_dims, list):
        return list(zip(kv_heads, head_dims, strict=True))
    return [(kv_heads, head_dims)] * described["layers"]


def fingerprint(model: Any) -> dict[str, Any]:
    """Identifies a model in a file: `describe`, and a few numbers of some weights, to six digits. Models that differ in
    their heads alone have the same."""
    decoder = base_model(model).base_model
    named = sorted((n, t) for n, t in _weights(decoder, queries=True) if t.is_floating_point() and t.numel())
    told: list[float] = []
    for i in sorted({round(x) for x in np.linspace(0, len(named) - 1, _TOLD_TENSORS)}):
        flat = loaded(decoder, *named[i]).detach().reshape(-1)
        where = torch.linspace(0, flat.numel() - 1, _TOLD_NUMBERS, dtype=torch.float64, device="cpu").long()
        told += [float(f"{x:.6g}") for x in flat[where.to(flat.device)].to("cpu", torch.float64).tolist()]
    return {**describe(decoder.config), "weights": told}


def weight_sums(model: Any, queries: bool = False) -> dict[str, str]:
    """CRC-32 of the sample of each weight, 8 hexadecimal digits, by name. model: one of transformers, or a PeftModel.

    queries   also of weights that only the queries of the last layer depend on
    Active adapters and tuned prompts count; merged adapters are part of the weights. Raises ValueError for weights that
    are on the meta device and not offloaded.
    """
    decoder = base_model(model).base_model
    where = _places_of_layers(decoder)
    sums = {
        f"{name}.scaling": f"{zlib.crc32(told.encode()):08x}"
        for name, told in active_adapters(decoder).items()
        if _matters(f"{name}.", queries, *where)
    }
    for name, tensor in _weights(decoder, queries):
        sums[_plain(name)] = f"{_sum_of(weight_of(decoder, name, tensor)):08x}"
    for name, tensor in _tuned_prompt(model):
        sums[name] = f"{_sum_of(tensor):08x}"
    return sums


def changed_weights(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of what differs."""
    return [name for name in {**was, **now} if was.get(name) != now.get(name)]


@dataclass(frozen=True, eq=False)
class Identity:
    """The weights of a model at one time.

    sums       `weight_sums`, those of queries included
    versions   of each weight: which object it is, and how often it was written to
    glance     what `holds` compares
    sharded    whether each rank sees a part of the weights alone
    """

    sums: dict[str, str]
    versions: dict[str, tuple[int, int]]
    glance: tuple[list[Any], list[Any]]
    sharded: bool

    @classmethod
    def of(cls, model: Any) -> Identity:
        decoder = base_model(model).base_model
        glance = _glance(model)  # first: a later change is noticed
        versions = {_plain(name): (id(tensor), _version(tensor)) for name, tensor in _weights(decoder, queries=True)}
        sharded = any(hasattr(weight, "to_local") for weight in decoder.parameters())
        return cls(weight_sums(model, queries=True), versions, glance, sharded)

    @property
    def digest(self) -> str:
        """SHA-256 of `sums`, in hexadecimal digits."""
        return hashlib.sha256(repr(self.sums).encode()).hexdigest()

    def holds(self, model: Any) -> bool:
        """Whether all weights and adapters are surely the same, in 0.5 ms for 270 weights. If not, `Identity.of` and
        `changes` tell whether that matters."""
        return _glance(model) == self.glance

    def changes(self, now: Identity) -> list[str]:
        """Names of what has changed since. A weight that was written to counts even if its sample is the same. A weight
        that another tensor has replaced, as on a move to another device, counts by its sample alone."""
        written = [
            name
            for name, (of, version) in now.versions.items()
            if name in self.versions and self.versions[name][0] == of and self.versions[name][1] != version
        ]
        return [*dict.fromkeys([*changed_weights(self.sums, now.sums), *written])]


# ---- which weights ----


def _weights(decoder: Any, queries: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, weight) of all that keys and values depend on, and with `queries` also what queries depend on."""
    where = _places_of_layers(decoder)
    idle = tuple(_idle_adapters(decoder))
    for name, tensor in decoder.state_dict(keep_vars=True).items():
        counts = not f"{name}.".startswith(idle) and _matters(name, queries, *where)
        if isinstance(tensor, torch.Tensor) and counts:
            yield name, tensor


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


def _matters(name: str, queries: bool, decoder: str, layers: str, last: str) -> bool:
    if name.startswith(last):
        words = _BEHIND_QUERIES if queries else (*_BEHIND_QUERIES, *_OF_QUERIES)
        return not any(word in name for word in words)
    behind = (*_BEHIND_ALL, *(decoder + part for part in _BEHIND_LAYERS))
    return name.startswith(layers) or not name.startswith(behind)


# ---- adapters of peft, found by their attributes: peft need not be installed ----


def _used_adapters(module: Any) -> set[str] | None:
    """The adapters that a module computes with; None for a module that can have none."""
    if not hasattr(type(module), "adapter_layer_names") or not hasattr(module, "active_adapters"):
        return None
    return set() if module.disable_adapters else {*module.active_adapters} - {*module.merged_adapters}


def _idle_adapters(decoder: Any) -> Iterator[str]:
    """Prefixes of names of weights that no forward uses: adapters that are off, or merged into the weights."""
    for name, module in decoder.named_modules():
        if (used := _used_adapters(module)) is not None:
            for part in module.adapter_layer_names:
                yield from (f"{name}.{part}.{key}." for key in getattr(module, part, ()) if key not in used)


def _tuned_prompt(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that make the embeddings which a PeftModel puts in front of a prompt."""
    encoders, name = getattr(model, "prompt_encoder", None), getattr(model, "active_adapter", None)
    if isinstance(encoders, torch.nn.ModuleDict) and isinstance(name, str) and name in encoders:
        yield from encoders[name].state_dict(prefix=f"prompt_encoder.{name}.").items()


def active_adapters(model: Any) -> dict[str, str]:
    """The names and scalings of adapters, as text, by the name of the module that computes with them."""
    return {name: _told(module, used) for name, module in model.named_modules() if (used := _used_adapters(module))}


def _told(module: Any, used: set[str]) -> str:
    scaling = getattr(module, "scaling", {})
    return repr([(key, scaling.get(key)) for key in sorted(used)])


# ---- the sample of a weight ----


@lru_cache(maxsize=256)
def _places(numbers: int) -> tuple[int, ...]:
    """Where the runs of a long tensor begin: evenly spaced, and seldom in the same columns of a matrix."""
    step = (numbers - _RUN) // (_RUNS - 1)
    return tuple(i * step for i in range(_RUNS))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a weight: this rank's part of a sharded one, and what a quantised one is made of."""
    if type(tensor) in _PLAIN:
        yield tensor
    elif hasattr(tensor, "to_local"):
        yield from _parts(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, part))
    else:
        yield tensor


def _sample(part: torch.Tensor) -> torch.Tensor:
    flat = part.detach().reshape(-1)
    if flat.numel() <= _WHOLE:
        return flat
    return flat.as_strided((_RUNS, _RUN), (_places(flat.numel())[1], 1)).reshape(-1)


def _bytes(flat: torch.Tensor) -> bytes:
    """The bytes of a dense tensor [numbers] of any dtype."""
    return flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""


@torch.no_grad()
def _sum_of(tensor: torch.Tensor) -> int:
    """CRC-32 of type, shape and sample."""
    value = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for part in _parts(tensor):
        value = zlib.crc32(f"{part.dtype} {list(part.shape)}".encode() + _bytes(_sample(part).contiguous()), value)
    return value


# ---- a look that is cheap enough for every cache ----


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return 0


def _read(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reads some of the sample of a dense tensor in main memory, without torch: its operations take microseconds."""
    numbers, start = tensor.numel(), tensor.data_ptr()
    if numbers <= _WHOLE:
        return (ctypes.string_at(start, numbers * tensor.itemsize),)
    size, places = tensor.itemsize, _places(numbers)
    return (_word(start + places[5] * size).value, _word(start + places[10] * size).value)


@torch.no_grad()
def _glance(model: Any) -> tuple[list[Any], list[Any]]:
    """Which weights there are, how often each was written to, and the sample of each. The sample is needed because
    writes through `Tensor.data` are not counted; it may miss a write to a few numbers. Weights that are offloaded
    cannot be written to."""
    marks: list[Any] = []
    read: list[Any] = []
    others: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    left, seen = [model], {None}
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        left.extend(module._modules.values())
        if hasattr(type(module), "adapter_layer_names") and (used := _used_adapters(module)):
            marks.append(_told(module, used))
        weights = module._parameters
        if module._buffers:
            passing = module._non_persistent_buffers_set
            weights = {**weights, **{name: t for name, t in module._buffers.items() if name not in passing}}
        for weight in weights.values():
            if weight is None:
                continue
            marks += (id(weight), _version(weight))
            if type(weight) in _PLAIN and weight.is_cpu and weight.is_contiguous():
                read += _read(weight)
            elif not weight.is_meta:
                for part in _parts(weight):
                    others.setdefault((part.device, part.dtype), []).append(_sample(part))
    for samples in others.values():
        read.append(_bytes(torch.cat(samples)))
    return marks, read
