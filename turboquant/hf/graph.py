"""Decoding steps as one CUDA graph, so that a step takes the time of its kernels, without Python between them.

A step of a patched model reads nothing back from the device, and the cache's tensors keep their addresses from step to
step, so a recorded step can be replayed: lengths grow on the device, and the host's counts are updated here. Whatever
moves a tensor (new pages, `crop`, other beams, a model that was moved or cast) is detected before a replay, and the
step is recorded again. Other changes of a forward, such as switching adapters, are not detected.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import torch

from ..kvcache.storage import LayerStorage
from ..models.identity import describe
from ..models.names import CACHE, NAMES, cache_argument, given_cache, outputs_with
from .cache import TurboQuantCache

__all__ = ["DecodeGraph", "ForwardWithGraphs"]

AHEAD = 512  # positions to reserve at once; then the step is recorded again, some milliseconds per layer

# Arguments of a forward that a replay follows, or that do not change its logits.
_FOLLOWED = {"input_ids", "position_ids", *NAMES}
_HARMLESS = {"attention_mask", "cache_position", "use_cache", "return_dict", "logits_to_keep"}
_OUTPUTS = ("output_hidden_states", "output_router_logits")  # fields of a configuration that ask for further outputs


def _storages(cache: TurboQuantCache) -> list[LayerStorage]:
    return [layer.storage for layer in cache.packed_layers]


def _is_unread(mask: Any, cache: TurboQuantCache) -> bool:
    """Whether a forward of one token on a GPU accepts an `attention_mask` and does not read it."""
    first = _storages(cache)[0]
    shape = (len(first.padding), first.tokens + 1)
    return mask is None or (getattr(mask, "shape", ()) == shape and max(first.padding) < first.tokens)


class DecodeGraph:
    """Steps of one token on a cache, replayed as a CUDA graph.

    cache     a TurboQuantCache on one CUDA device that holds tokens (after the prompt), without sliding windows and
              without a memory limit, with which steps run one by one
    forward   the `forward` of a patched model
    weights   the model's parameters: a step is recorded again when the address of one changes

    When something has changed, the next step runs as usual, the one after it is recorded, and later ones are replayed.
    Room for `AHEAD` positions is made at once. Other forwards may use the cache between steps.
    """

    def __init__(
        self, cache: TurboQuantCache, forward: Callable[..., Any], weights: Iterable[torch.Tensor] = ()
    ) -> None:
        self._cache, self._forward, self._weights = weakref.ref(cache), forward, list(weights)
        self._argument = cache_argument(forward) or CACHE
        self._addresses: list[int] = []  # of the weights in the last step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens: list[int] = []  # of each layer after the last step
        self._places: list[torch.Tensor | None] = []  # the tensors that the last step used
        self._ids = self._positions = self._logits = torch.empty(0)

    @staticmethod
    def takes(cache: TurboQuantCache, ids: torch.Tensor) -> bool:
        """Whether a step on ids [batch, tokens] can be replayed."""
        sequences, device = ids.shape[0], ids.device
        return (
            ids.is_cuda
            and cache.memory_limit is None
            and ids.shape[1] == 1
            and not torch.is_grad_enabled()
            and all(
                stored.tokens
                and stored.is_on(device)
                and not stored.sliding_window
                and not stored.record_past
                and len(stored.padding) == sequences
                for stored in _storages(cache)
            )
        )

    def step(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Runs one more token of each sequence, stores its keys and values, and returns logits [batch, 1, vocabulary].

        ids         int64 [batch, 1] on the model's device
        positions   int64 [batch, 1]; None: as many as are stored, padding included, as models with a rotary embedding
                    count
        Raises ValueError for ids of another shape, dtype or device, a cache that is empty or has sliding windows, and
        while gradients are on.
        """
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the cache of this graph no longer exists")
        if ids.dtype != torch.int64 or ids.dim() != 2 or not self.takes(cache, ids):
            raise ValueError(
                "`ids` must be int64 [batch, 1] on the CUDA device of a cache that holds tokens of as many sequences "
                "and has neither sliding windows nor a memory limit, under torch.no_grad(); "
                f"got {tuple(ids.shape)} {ids.dtype} on {ids.device}"
            )
        stored, addresses = _storages(cache)[0], [weight.data_ptr() for weight in self._weights]
        steady = addresses == self._addresses and self._is_as_left(cache) and stored.tokens < stored.ready
        if positions is None:
            positions = torch.full(ids.shape, stored.tokens, device=ids.device)
        if not steady:
            self._graph = None
            for stored in _storages(cache):
                stored.reserve(stored.tokens + AHEAD)
            logits = self._run(cache, ids, positions)
        elif self._graph is None:
            logits = self._record(cache, ids, positions)
        else:
            logits = self._replay(cache, ids, positions)
        self._tokens, self._places = [stored.tokens for stored in _storages(cache)], self._places_of(cache)
        self._addresses = addresses
        return logits

    def _run(self, cache: TurboQuantCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self._forward(input_ids=ids, position_ids=positions, use_cache=True, **{self._argument: cache})
        logits: torch.Tensor = out.logits
        return logits

    def _record(self, cache: TurboQuantCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._ids, self._positions = ids.clone(), positions.expand(*positions.shape[:-2], *ids.shape).clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._run(cache, self._ids, self._positions)
        self._graph.replay()  # recording counted the token, but ran nothing
        return self._logits.clone()

    def _replay(self, cache: TurboQuantCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self._graph is not None
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._graph.replay()
        for stored in _storages(cache):
            stored.tokens += 1
        cache.replayed(ids.device)
        return self._logits.clone()

    def _is_as_left(self, cache: TurboQuantCache) -> bool:
        return self._tokens == [stored.tokens for stored in _storages(cache)] and all(
            a is b for a, b in zip(self._places, self._places_of(cache), strict=True)
        )

    @staticmethod
    def _places_of(cache: TurboQuantCache) -> list[torch.Tensor | None]:
        places = [cache.lengths_on(_storages(cache)[0].device)]
        for stored in _storages(cache):
            places += [stored.block_table, stored.pages, stored.sink_k, stored.window_k]
        return places


class ForwardWithGraphs:
    """The `forward` of a model that replays decoding steps on a TurboQuantCache; all other calls are as before. Without
    `position_ids` only models with a rotary embedding replay: others may take positions from the mask or the ids.

    Like a bound method it has a `__self__`, the model. Unlike one it survives a pickle of the model; graphs are not
    copied.
    """

    def __init__(self, model: Any) -> None:
        self.__self__ = model
        self.__signature__ = inspect.signature(partial(type(model).forward, model))
        self._defaults = {name: p.default for name, p in self.__signature__.parameters.items()}
        self._graphs: weakref.WeakKeyDictionary[TurboQuantCache, DecodeGraph] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__self__,)

    @cached_property
    def _has_rotary_embedding(self) -> bool:
        return {*describe(self.__self__.config)["rope"]} != {"rope_type"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self.__self__).forward, self.__self__)
        cache = given_cache(kwargs)
        if args or not isinstance(cache, TurboQuantCache) or not self._can_replay(cache, kwargs):
            return forward(*args, **kwargs)
        graph = self._graphs.get(cache)
        if graph is None:
            graph = self._graphs[cache] = DecodeGraph(cache, forward, self.__self__.parameters())
        logits = graph.step(kwargs["input_ids"], kwargs.get("position_ids"))
        return outputs_with(logits, cache)

    def _can_replay(self, cache: TurboQuantCache, kwargs: dict[str, Any]) -> bool:
        """Whether a forward with these arguments is a step that a replay gives the outputs of."""
        ids = kwargs.get("input_ids")
        arguments = {name for name, x in kwargs.items() if x is not None and x is not self._defaults.get(name)}
        plain = arguments <= _FOLLOWED | _HARMLESS and kwargs.get("return_dict") is not False
        plain = plain and not any(getattr(self.__self__.config, name, False) for name in _OUTPUTS)
        if not plain or ids is None or not DecodeGraph.takes(cache, ids):
            return False
        counts = "position_ids" in arguments or self._has_rotary_embedding
        return counts and _is_unread(kwargs.get("attention_mask"), cache)
