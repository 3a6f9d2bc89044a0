"""How an engine's layers are packed: specs, a profile, the heads of this rank, and rows of exact tokens."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..kvcache.transforms import layer_transforms, random_rotation
from ..measured.profile import Profile, used_by
from ..models.checkpoint import digest_of, profile_file
from ..models.identity import describe
from ..plan import Plan
from ..spec import CacheSpec
from .ragged import Exact
from .refusals import check_engine, check_exact
from .rows import PAGE, ROWS_PER_REQUEST
from .settings import FIND, RING, Settings

__all__ = ["Engine", "Layer", "engine_of", "find_profile", "log"]

log = logging.getLogger("vllm.turboquant")  # below vLLM's own logger, which has the handlers


def find_profile(settings: Settings, model: str, revision: str | None, dummy: bool) -> Profile | None:
    """Returns the profile of a checkpoint, from the file that the settings name or the one that `turboquant measure`
    keeps. None if the settings say so. ValueError, which names the command to run, if there is no profile or it is of
    another checkpoint.

    model, revision   a folder, or a name on the hub whose files are in its cache
    dummy             whether the weights are random instead of a checkpoint's (load_format="dummy")
    """
    if settings.profile is None:
        return None
    make = f"`turboquant measure {model}` makes it"
    if settings.profile != FIND:
        profile = Profile.of(settings.profile)
        if profile.checkpoint and not dummy and (own := digest_of(model, revision)) and own != profile.checkpoint:
            raise ValueError(f'"profile" of turboquant must be of the model {model!r}, got one of another checkpoint: '
                             f"{settings.profile!r}; {make}")  # fmt: skip
        return profile
    if dummy:
        raise ValueError('"profile" of turboquant must name a file for load_format="dummy", which has no checkpoint')
    digest = digest_of(model, revision)
    if not digest:
        raise ValueError(f'"profile" of turboquant must name a file: {model!r} has no safetensors files to find one '
                         f"by; `turboquant measure {model} -o FILE` makes it")  # fmt: skip
    file = profile_file(digest)
    if file is None or not file.is_file():
        where = "TURBOQUANT_CACHE is empty" if file is None else f"there is no {str(file)!r}"
        raise ValueError(f"turboquant has no profile of the model {model!r}: {where}; {make}, or \"profile\": null "
                         "packs without wave and metric, which costs quality")  # fmt: skip
    return Profile.load(file)


@dataclass(frozen=True)
class Layer:
    """One layer on this rank. sinks, tails: rows of exact tokens, or None."""

    plan: Plan
    transforms: dict[str, torch.Tensor]
    kv_heads: int
    sinks: Exact | None
    tails: Exact | None

    @property
    def exact_bytes(self) -> int:
        """Bytes of all rows of exact tokens."""
        return sum(one.k.nbytes + one.v.nbytes for one in (self.sinks, self.tails) if one is not None)

    @property
    def token_bytes(self) -> int:
        """Bytes of a packed token, all KV heads of this rank."""
        return self.kv_heads * self.plan.record_bytes // PAGE


@dataclass(eq=False)
class Engine:
    """The part of an engine that is in this process.

    rows     how many rows of exact tokens each layer has
    numbers  layers that have keys: index in the model -> place in the profile
    """

    settings: Settings
    config: Any
    rows: int
    rank: int
    ranks: int
    numbers: dict[int, int]
    layers: dict[str, Layer] = field(default_factory=dict)
    _profile: Profile | None = None
    _specs: list[CacheSpec] | None = None
    _of_profile: tuple[Any, Any] = (None, None)
    said: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, config: Any) -> Engine:
        """Returns the engine of a `VllmConfig`. ValueError for what that may not have."""
        options = (config.additional_config or {}).get("turboquant")
        if options is None:
            raise ValueError("--attention-backend CUSTOM is turboquant's here and needs --additional-config "
                             "'{\"turboquant\": {}}', or leave it out")  # fmt: skip
        settings = Settings.of(options)
        check_engine(config)
        check_exact(settings.exact[1], getattr(getattr(config, "device_config", None), "device_type", "cpu"))
        parallel = config.parallel_config
        text = config.model_config.hf_text_config
        from ..models.kinds import packed_indices

        numbers = {layer: i for i, layer in enumerate(packed_indices(text))}
        engine = cls(settings, config, ROWS_PER_REQUEST * config.scheduler_config.max_num_seqs,
                     parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size, numbers)  # fmt: skip
        if os.path.isdir(config.model_config.model):
            engine.find()  # so that errors come before weights are read
        return engine

    def find(self) -> None:
        """Finds the profile, once."""
        if self._specs is not None:
            return
        model, load = self.config.model_config, self.config.load_config
        dummy = str(getattr(load.load_format, "value", load.load_format)) == "dummy"
        profile = find_profile(self.settings, model.model, model.revision, dummy)
        if profile is not None:
            try:
                profile.check(describe(model.hf_text_config))
            except ValueError as error:
                raise ValueError(f"{error}; `turboquant measure {model.model}` makes one of this model") from None
        else:
            self.say('"profile" of turboquant is null: keys are packed without wave and metric, which costs quality; '
                     f"`turboquant measure {model.model}` makes a profile")  # fmt: skip
        n_layers = max(self.numbers) + 1
        each = [self.settings.spec.for_layer(i, n_layers) for i in range(n_layers)]
        its_profile = profile if any(one.measured or one.calibrated for one in each) else None
        self._specs, *rest = used_by(self.settings.spec, its_profile, n_layers, list(self.numbers))
        self._of_profile, self._profile = (rest[0], rest[1]), profile
        if getattr(self.config, "lora_config", None) is not None:
            self.say("adapters run with the profile of the base model")

    def say(self, what: str) -> None:
        """Logs a sentence once."""
        if what not in self.said and self.rank == 0:
            log.warning("turboquant: %s", what)
        self.said.add(what)

    def prepare(self, name: str, index: int, head_dim: int, kv_heads: int, dtype: torch.dtype, device: Any) -> Layer:
        """Prepares this rank's heads of the layer called `name`, which has this index in the model. When vLLM
        has loaded weights again, does so again in the same tensors, which CUDA graphs and tables of rows know."""
        self.find()
        assert self._specs is not None
        if index not in self.numbers:
            raise ValueError(f"turboquant: the layer {name!r} must be one of the {len(self.numbers)} layers with keys "
                             "that the model's configuration has")  # fmt: skip
        place = self.numbers[index]
        spec, (calibration, moments) = self._specs[place], self._of_profile
        if moments is not None and moments.layers[place].centre.shape[1] != head_dim:
            raise ValueError(f"\"profile\" of turboquant must have heads of {head_dim} channels in layer {index}, got "
                             f"{moments.layers[place].centre.shape[1]}")  # fmt: skip
        sizes = moments.layers[place].sizes if moments is not None and spec.measured else ()
        transforms = dict(layer_transforms(spec, place, head_dim, device, calibration, moments))
        if (matrix := random_rotation(spec, head_dim, device)) is not None:
            transforms["rotation"] = matrix
        transforms = self._own(transforms, kv_heads)
        if (earlier := self.layers.get(name)) is not None:
            for key, x in transforms.items():
                earlier.transforms[key].copy_(x)
            return earlier
        sinks, window = self.settings.exact
        layer = Layer(spec.plan(head_dim, *sizes), transforms, kv_heads,
                     self._rows(kv_heads, sinks, head_dim, dtype, device),
                     self._rows(kv_heads, RING if window else 0, head_dim, dtype, device))  # fmt: skip
        self._take(layer.exact_bytes)
        self.layers[name] = layer
        return layer

    def _own(self, transforms: dict[str, torch.Tensor], kv_heads: int) -> dict[str, torch.Tensor]:
        """Returns the transforms of this rank's heads. With more ranks than heads, several ranks have the same head."""
        own = {}
        for key, x in transforms.items():
            if key == "key_turns" or len(x) in (1, kv_heads):
                own[key] = x
                continue
            first = self.rank * len(x) // self.ranks
            own[key] = x[first : first + kv_heads].contiguous()
        return own

    def _rows(self, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype, device: Any) -> Exact | None:
        if not tokens:
            return None
        # Written at once, so that they are there when the engine measures its memory.
        k, v = (torch.zeros(self.rows, kv_heads, tokens, head_dim, dtype=dtype, device=device) for _ in range(2))
        return Exact(k.fill_(0), v.fill_(0))

    def _take(self, nbytes: int) -> None:
        """Takes the bytes of exact rows from the cache's memory if that is set in bytes. Otherwise the engine measures
        later how much memory is left."""
        cache = self.config.cache_config
        limit = getattr(cache, "kv_cache_memory_bytes", None)
        if limit is None or not nbytes:
            return
        if limit <= nbytes:
            raise ValueError(f"turboquant: the memory of the cache must be larger than its rows of exact tokens, "
                             f"{self.rows} rows: lower --max-num-seqs, or \"sinks\" and \"window\"")  # fmt: skip
        cache.kv_cache_memory_bytes = limit - nbytes

    def summary(self, blocks: int, block_size: int) -> str:
        """Returns the line for the log that says what was built."""
        layers = [*self.layers.values()]
        packed = sum(layer.token_bytes for layer in layers)
        plain = sum(2 * layer.kv_heads * layer.plan.head_dim * 2 for layer in layers)
        sinks, window = self.settings.exact
        source = "none" if self._profile is None else f"{self._profile.tokens:,} tokens"
        exact = sum(layer.exact_bytes for layer in layers)
        fit = f"{blocks:,} blocks of {block_size} tokens = {blocks * block_size:,} tokens"
        return (f"turboquant: spec {self.settings.name}, {16 * packed / plain:.2f} bits a number, {len(layers)} "
                f"layers; {fit}, {plain / packed:.2f} times those of bfloat16; {sinks} exact sinks, window {window}: "
                f"{exact:,} bytes of exact rows; profile: {source}")  # fmt: skip


_engines = WeakValueDictionary[int, Engine]()  # its layers and builders keep an engine, and it keeps its config


def engine_of(config: Any) -> Engine:
    """Returns the engine of a `VllmConfig`, the same for its copies, which share their compilation_config."""
    shared = config.compilation_config
    engine = _engines.get(id(shared))
    if engine is None or engine.config.compilation_config is not shared:
        engine = _engines[id(shared)] = Engine.of(config)
    return engine
