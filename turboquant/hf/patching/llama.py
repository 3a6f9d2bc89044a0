"""Patching decoders: Llama, Mistral, Qwen2, Qwen3 and all others that use transformers' AttentionInterface in the same
way, also inside models that read images or sound.

What changes in a model: the attention that its configuration names, methods of generation (`_METHODS`), one forward
pre-hook or two, and `expand_kv` of attention with latents. Nothing is patched in a class or in transformers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from ...fingerprints import differences
from ...kvcache.pieces import pieces_spec
from ...measured import Calibration, Moments, Profile, used_by
from ...measuring.used import moments_for
from ...models.identity import Identity, describe, fingerprint
from ...models.kinds import has_state, kinds_of, packed_indices, piece_size, unequal_size
from ...models.names import CACHE, NAMES, cache_argument, given_cache, renamed
from ...models.routing import Previous, attention_modules, check_route, decoder_of, restore, route, text_config
from ...models.wrappers import refuse_prefix
from ...spec import CacheSpec
from .. import absorbed, notices
from ..attention import NAME
from ..cache import TurboQuantCache
from ..graph import ForwardWithGraphs
from ..persistence import calibration_mark, moments_mark
from ..positions import follow, padding_mask
from ..refusals import check_model, head_dims_of
from . import continuation

__all__ = ["check", "patch", "unpatch"]

_METHOD = "_prepare_cache_for_generation"
_EXPAND = "expand_kv"  # of attention modules with latents
_INPUTS = ("input_ids", "inputs_embeds")


@dataclass
class _Patch:
    """The state of a patched model, in model._turboquant."""

    described: dict[str, Any]  # the model's configuration (`models.identity.describe`), as last seen
    spec: CacheSpec
    profile: Profile | None  # the one that was given
    calibration: Calibration | None  # what the spec takes from it
    moments: Moments | None  # None: measured when the first cache is made
    tokenizer: Any  # to measure with
    identity: Identity | None  # of the weights, when it was patched with a profile
    previous: Previous
    cache_name: str  # of the argument of forward that takes a cache
    cache_position: int  # place of that argument
    cuda_graphs: bool  # whether model.forward is a `ForwardWithGraphs`
    handles: list[Any]  # of the hooks of forward
    said: set[str]  # what `notices` has warned of since the last `patch`


def patch(
    model: Any, spec: CacheSpec, profile: Profile | None = None, cuda_graphs: bool = False, tokenizer: Any = None
) -> None:
    """See `turboquant.patch`. model: a transformers.PreTrainedModel."""
    calibration, moments = check(model, spec, profile)
    state = getattr(model, "_turboquant", None)
    if cuda_graphs and "forward" in model.__dict__ and not (state and state.cuda_graphs):
        raise NotImplementedError(
            f"{type(model).__name__}: `cuda_graphs` needs a model on one device whose `forward` nobody has replaced "
            "(as device_map does)"
        )
    kinds = kinds_of(text_config(model))
    special = any(has_state(kind) or {"is_shared", "latent", "unequal"} & {*arguments} for kind, arguments in kinds)
    if cuda_graphs and (special or decoder_of(model) is not model):
        raise NotImplementedError(
            f"{type(model).__name__}: `cuda_graphs` is for text models without recurrent states, shared keys and "
            "latents, whose keys and values have one size"
        )
    if state is None:
        _prepare(model, spec)
        state = model._turboquant
    elif text_config(model)._attn_implementation != NAME:
        state.previous = route(model, NAME)
    state.spec, state.tokenizer = spec, tokenizer
    state.profile, state.calibration, state.moments = profile, calibration, moments
    state.said = set()
    state.identity = None if profile is None else Identity.of(model)
    if cuda_graphs and not state.cuda_graphs:
        model.forward = ForwardWithGraphs(model)
    elif state.cuda_graphs and not cuda_graphs:
        del model.forward
    state.cuda_graphs = cuda_graphs


def _prepare(model: Any, spec: CacheSpec) -> None:
    arguments = list(inspect.signature(model.forward).parameters)
    handles = [model.register_forward_pre_hook(_give_cache, with_kwargs=True)]
    if any(has_state(kind) for kind, _ in kinds_of(text_config(model))):
        handles.append(model.register_forward_hook(_ended, with_kwargs=True))
    decoder = decoder_of(model)
    follows = partial(_follow, model, list(inspect.signature(decoder.forward).parameters))
    handles.append(decoder.register_forward_pre_hook(follows, with_kwargs=True))
    previous = route(model, NAME)
    name = cache_argument(model.forward) or CACHE
    at = arguments.index(name)
    described = describe(model.config)
    model._turboquant = _Patch(described, spec, None, None, None, None, None, previous, name, at, False, handles, set())
    for method, ours in _METHODS.items():
        if hasattr(model, method):
            setattr(model, method, partial(ours, model))  # pickle would make a bound method the class's
    for module in attention_modules(model):
        if hasattr(module, _EXPAND):
            setattr(module, _EXPAND, partial(absorbed.pass_on, module))


def unpatch(model: Any) -> None:
    """See `turboquant.unpatch`."""
    state = getattr(model, "_turboquant", None)
    if state is None:
        return
    restore(model)
    for handle in state.handles:
        handle.remove()
    if state.cuda_graphs:
        del model.forward
    del model._turboquant
    for method in _METHODS:
        model.__dict__.pop(method, None)
    for module in attention_modules(model):
        module.__dict__.pop(_EXPAND, None)


def check(model: Any, spec: CacheSpec, profile: Profile | None) -> tuple[Calibration | None, Moments | None]:
    """Returns what the spec takes from a profile. Raises what `patch` raises for a model that cannot be packed in this
    way. Without a profile, weights may be on the meta device."""
    text = check_model(model)
    if profile is not None and profile.calibration is not None:
        profile.check(fingerprint(model))
    specs, calibration, moments = used_by(spec, profile, len(kinds_of(text)), packed_indices(text))
    if piece_size(text):
        specs = [pieces_spec(one, unequal_size(text) > 0) for one in specs]
    if moments is not None:
        moments_for(model, specs, moments)  # first: it says in words how configurations differ
    if profile is not None and profile.calibration is None:
        profile.check(fingerprint(model))
    for i, one in enumerate(specs):
        for head_dim in head_dims_of(model, text, i):
            one.plan(head_dim)
    return calibration, moments


def _new_cache(model: Any) -> TurboQuantCache:
    check_route(model, NAME)
    return TurboQuantCache(model)


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Makes the cache for `generate`: ours, unless one is given, none is wanted, or another kind is named."""
    kind = getattr(generation_config, "cache_implementation", None)
    cache = given_cache(model_kwargs)
    wanted = cache is None and generation_config.use_cache is not False
    makes_one = wanted and kind is None
    if wanted and not makes_one:
        notices.named_cache(self, self._turboquant, kind)
    if makes_one:
        cache = model_kwargs[CACHE] = _new_cache(self)
    assisted = any(argument == GenerationMode.ASSISTED_GENERATION for argument in (*args, *kwargs.values()))
    if isinstance(cache, TurboQuantCache):
        refuse_prefix(self)
    if isinstance(cache, TurboQuantCache) and (assisted or getattr(generation_config, "is_assistant", False)):
        cache.activate_past_recording()  # transformers 4.57 leaves that to the cache
    if makes_one:
        return None
    return getattr(type(self), _METHOD)(self, generation_config, model_kwargs, *args, **kwargs)


def _refuse_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        f"{type(self).__name__}: continuous batching (`generate_batch`) keeps keys and values in pages of its own, "
        "which are not packed; call `generate` with a padded batch, or turboquant.unpatch(model) first"
    )


_METHODS: dict[str, Callable[..., Any]] = {
    _METHOD: _prepare_cache_for_generation,
    continuation.METHOD: continuation.generate,
    "generate_batch": _refuse_continuous_batching,
    "init_continuous_batching": _refuse_continuous_batching,
    "continuous_batching_context_manager": _refuse_continuous_batching,
}


def _compare(model: Any, cache: TurboQuantCache, state: _Patch) -> None:
    """Raises ValueError for a cache of a model of another configuration. Warns, once, if a cache quantises in another
    way than its model was patched to."""
    if cache.fingerprint != state.described and differences(cache.fingerprint, state.described):
        state.described = describe(model.config)  # it may have changed since
        if differs := differences(cache.fingerprint, state.described):
            which = ", ".join(differs)
            raise ValueError(
                f"`{state.cache_name}` must be a cache of this model, got one of another: this one has {which}"
            )
    if cache.compared_with is state.spec or "spec" in state.said:
        return
    cache.compared_with = state.spec
    theirs = cache.calibration
    if cache.spec.settled() != state.spec.settled():
        what = f"spec, {cache.spec} instead of {state.spec}"
    elif (theirs is not state.calibration and calibration_mark(theirs) != calibration_mark(state.calibration)) or (
        state.moments is not None
        and moments_mark(cache.measured_moments or cache.moments) != moments_mark(state.moments)
    ):
        what = "profile"
    else:
        return
    how = "the cache keeps its own; TurboQuantCache(model) has the model's"
    warnings.warn(f"this TurboQuantCache has another {what} than the model was patched with: {how}", stacklevel=2)


def _new_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens of each sequence in a forward; 0 where they are not found."""
    inputs = args[0] if args else next((kwargs[name] for name in _INPUTS if kwargs.get(name) is not None), None)
    return int(inputs.shape[1]) if isinstance(inputs, torch.Tensor) and inputs.dim() > 1 else 0


def _give_cache(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gives a forward a cache if it has none and wants one, or would make its own and needs no gradient."""
    state = getattr(model, "_turboquant", None)
    if state is None:  # another thread has just called `unpatch`
        return None
    at = state.cache_position
    passed = next((x for x in args[at : at + 1] if x is not None), given_cache(kwargs))
    ids = args[0] if args else kwargs.get("input_ids")
    if isinstance(passed, TurboQuantCache):
        continuation.remember_first(passed, ids)
        _compare(model, passed, state)
        passed.was_read()
        passed.begin()
    elif passed is not None and "cache" not in state.said:
        notices.foreign_cache(model, state, type(passed).__name__)
    if passed is not None:
        by_name = renamed(kwargs, state.cache_name)
        return None if by_name is kwargs else (args, by_name)
    if model.training:
        return None
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(text_config(model), "use_cache", False) and not torch.is_grad_enabled()
    if not use_cache:
        return None
    cache = _new_cache(model)
    cache.begin()
    continuation.remember_first(cache, ids)
    if not torch.compiler.is_compiling() and _new_tokens(args, kwargs) > 1 and cache.spec.prefill == "exact":
        cache.unread = notices.Unread(model, state, cache.packed_layers[-1].storage)
    if len(args) > at:
        return (*args[:at], cache, *args[at + 1 :]), kwargs
    others = {name: x for name, x in kwargs.items() if name not in NAMES}  # drops a name with None: both together raise
    return args, {**others, state.cache_name: cache}


def _follow(
    model: Any, names_of_arguments: list[str], decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Follows the text decoder's positions. If it is a part of `model`, only here are those of image tokens known."""
    arguments = {**dict(zip(names_of_arguments, args)), **kwargs}
    state, cache = getattr(model, "_turboquant", None), given_cache(arguments)
    if state is None or not isinstance(cache, TurboQuantCache) or not cache.waves:
        return
    if not cache.get_seq_length() or not ("positions" in state.said or torch.compiler.is_compiling()):
        _turn(model, state, cache, arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _turn(model: Any, state: _Patch, cache: TurboQuantCache, arguments: dict[str, Any]) -> None:
    positions, new, first = arguments.get("position_ids"), _new_tokens((), arguments), not cache.get_seq_length()
    images = getattr(positions, "ndim", 0) == 3
    if positions is not None and images:
        positions = positions[-3:]  # some models put another count in front
    off = follow(cache, new, positions, padding_mask(arguments.get("attention_mask"))) if new else 0
    if not (images and first):
        notices.positions_off(model, state, off, images)


def _ended(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Notes that a forward has ended without an error. Only for models with recurrent states."""
    at = model._turboquant.cache_position
    cache = next((x for x in args[at : at + 1] if x is not None), given_cache(kwargs))
    if isinstance(cache, TurboQuantCache):
        cache.at_work = False
