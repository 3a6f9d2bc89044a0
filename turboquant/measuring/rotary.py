"""How a model turns its keys: pairs of channels, and the angle of each pair per position, found by asking the model.

A forward of a few tokens shows which rotary embedding each layer is given. Each embedding is then called again, in
float32, at position 0 and at powers of two, and the model's own function applies it to unit vectors. Powers of two are
exact: float32 holds their products with a frequency exactly, and each doubling halves the error of the angle.

The result is then checked against the model: the same tokens, once from position 0 and once from `SHIFT`, must give
keys that differ by the rotation alone. This also finds layers without rotation.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .tap import Tap

__all__ = ["TURN", "Rotary", "probe"]

TURN = 2 * np.pi
FURTHEST = 2**20
SHIFT, TOKENS = 32, 8
_CLOSE = 0.1  # tolerance, as a fraction of a key's norm; in bfloat16 a rotated key is off by 0.01
_EXACT = 2e-3  # tolerance in radians at every position tried: half a unit of 2^-32 turns is 0.0008 at 2^20
_CHANGING = ("dynamic", "longrope")  # their angles change when a sequence is longer than the trained length


@dataclass(frozen=True, eq=False)
class Rotary:
    """pairs [n, 2] int64 channels that turn together; increments [n] uint32: 2^-32 turns per position."""

    pairs: np.ndarray
    increments: np.ndarray

    @classmethod
    def none(cls) -> Rotary:
        return cls(np.zeros((0, 2), np.int64), np.zeros(0, np.uint32))

    @classmethod
    def of_esm(cls, head_dim: int) -> Rotary:
        """ESM-2's rotation: channels i and i + head_dim / 2 turn by 10,000^(-2 i / head_dim) radians a position."""
        first = np.arange(head_dim // 2)
        angles = 10000.0 ** (-2 * first / head_dim)
        return cls(np.stack([first, first + head_dim // 2], 1), np.round(angles / TURN * 2**32).astype(np.uint32))

    def turned(self, x: np.ndarray, by: int) -> np.ndarray:
        """x [.., head_dim], turned by `by` positions."""
        phase = by * self.increments.astype(np.int64) % 2**32
        cos, sin = np.cos(phase * (TURN / 2**32)), np.sin(phase * (TURN / 2**32))
        out, a, b = x.astype(np.float64), x[..., self.pairs[:, 0]], x[..., self.pairs[:, 1]]
        out[..., self.pairs[:, 0]], out[..., self.pairs[:, 1]] = a * cos - b * sin, a * sin + b * cos
        return out


class _Call(NamedTuple):
    """One call of a rotary embedding."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: tuple[torch.Tensor, ...]


def probe(
    tap: Tap, body: torch.nn.Module, ids: torch.Tensor, run: Callable[..., Any], limit: int
) -> list[Rotary | None]:
    """How each attention turns its keys, in the order of calls; None where that could not be found.

    body   the model, tapped.  ids  [1, tokens], of which a few are used.
    run    run(input_ids=.., position_ids=..) is a forward.  limit  positions that the model has.
    """
    tokens = min(TOKENS, ids.shape[1])
    shift = min(SHIFT, limit - tokens)
    seen: list[tuple[torch.nn.Module, np.ndarray]] = []

    def hook(module: torch.nn.Module, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        seen.append((module, key.detach().to("cpu", torch.float64).numpy()))

    tap.hook = hook
    try:
        if shift < 1 or "position_ids" not in inspect.signature(body.forward).parameters:
            run(input_ids=ids[:, :tokens])
            return [None] * len(seen)
        with _recorded(body) as (calls, embeddings):
            steps = torch.arange(tokens, device=ids.device)
            positions = torch.stack([steps, steps + shift])
            run(input_ids=ids[:, :tokens].expand(2, -1).contiguous(), position_ids=positions)
    finally:
        tap.hook = None
    rotaries = []
    tried: dict[tuple[Any, ...], Rotary | None] = {}
    for module, keys in seen:
        call = _call_of(module, embeddings.get(id(module)), calls)
        candidates = [Rotary.none()]
        if call is not None:
            which = id(call.output[0]), type(module), keys.shape[-1]
            if which not in tried:
                tried[which] = _probed(call, module, keys.shape[-1])
            candidates += [rotary] if (rotary := tried[which]) is not None else []
        rotaries.append(_confirmed(candidates, keys, shift))
    return rotaries


def _confirmed(candidates: Sequence[Rotary], keys: np.ndarray, shift: int) -> Rotary | None:
    """The candidate that takes keys[0] to keys[1], [2, kv_heads, tokens, head_dim]."""

    def error(rotary: Rotary) -> float:
        off = np.linalg.norm(rotary.turned(keys[0], shift) - keys[1], axis=-1)
        return float(np.median(off / np.maximum(np.linalg.norm(keys[1], axis=-1), 1e-30)))

    errors = [error(rotary) for rotary in candidates]
    best = int(np.argmin(errors))
    return candidates[best] if errors[best] <= _CLOSE else None


@contextmanager
def _recorded(body: torch.nn.Module) -> Iterator[tuple[list[_Call], dict[int, tuple[torch.Tensor, ...]]]]:
    """Records each call of a rotary embedding, and the embedding that each module is given; not those of other threads,
    which may be using the model."""
    own = threading.get_ident()
    calls: list[_Call] = []
    embeddings: dict[int, tuple[torch.Tensor, ...]] = {}

    def called(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == own and (tensors := _tensors(output)) is not None:
            calls.append(_Call(module, args, kwargs, tensors))

    def entered(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != own:
            return
        names = inspect.signature(type(module).forward).parameters
        passed = dict(zip([name for name in names if name != "self"], args)) | kwargs
        if (tensors := _tensors(passed.get("position_embeddings"))) is not None:
            embeddings[id(module)] = tensors

    with ExitStack() as stack:
        for part in body.modules():
            if "rotary" in type(part).__name__.lower():
                stack.callback(part.register_forward_hook(called, with_kwargs=True).remove)
            if "position_embeddings" in inspect.signature(type(part).forward).parameters:
                stack.callback(part.register_forward_pre_hook(entered, with_kwargs=True).remove)
        yield calls, embeddings


def _tensors(output: Any) -> tuple[torch.Tensor, ...] | None:
    tensors = (output,) if isinstance(output, torch.Tensor) else output
    return tensors if isinstance(tensors, tuple) and all(isinstance(x, torch.Tensor) for x in tensors) else None


def _call_of(module: torch.nn.Module, embedding: tuple[torch.Tensor, ...] | None, calls: list[_Call]) -> _Call | None:
    """The call whose output a layer was given, or a call of the layer's own embedding. Outputs are compared by value,
    because a layer may have a copy on another device."""
    if embedding is None:
        inside = set(module.modules())
        return next((call for call in calls if call.module in inside), None)

    def same(call: _Call) -> bool:
        return len(call.output) == len(embedding) and all(
            a.shape == b.shape and torch.equal(a, b.to(a.device)) for a, b in zip(call.output, embedding)
        )

    return next((call for call in calls if same(call)), None)


def _probed(call: _Call, module: torch.nn.Module, head_dim: int) -> Rotary | None:
    """Pairs and increments of an embedding, as the attention module applies it."""
    positions = [0] + [2**i for i in range(FURTHEST.bit_length()) if 2**i <= _furthest(call.module)]
    embedding = _embedding_at(call, positions)
    if embedding is None:
        return None
    for turns in _applied(module, embedding, head_dim, len(positions)):
        rotary = _from_turns(turns, positions)
        if rotary is not None:
            return rotary
    return None


def _furthest(module: torch.nn.Module) -> int:
    if not any(kind in str(getattr(module, "rope_type", "")) for kind in _CHANGING):
        return FURTHEST
    config = getattr(module, "config", None)
    trained = getattr(config, "original_max_position_embeddings", None) or getattr(module, "original_max_seq_len", None)
    longest: Any = trained or getattr(config, "max_position_embeddings", 2048)
    return int(longest) - 1


def _embedding_at(call: _Call, positions: list[int]) -> tuple[torch.Tensor, ...] | None:
    """The module's output for these positions in float32; its state is restored."""
    asked = False

    def changed(x: Any) -> Any:
        nonlocal asked
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_floating_point():
            return torch.zeros(1, len(positions), 1, dtype=torch.float32, device=x.device)
        asked = True
        return torch.tensor([positions], device=x.device)

    args = tuple(changed(x) for x in call.args)
    kwargs = {name: changed(x) for name, x in call.kwargs.items()}
    if not asked:
        return None
    state = dict(vars(call.module)) | {"_buffers": dict(call.module._buffers)}
    try:
        return _tensors(call.module(*args, **kwargs))
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None  # its signature is another one
    finally:
        for name in vars(call.module).keys() - state.keys():
            delattr(call.module, name)
        vars(call.module).update(state)


def _applied(
    module: torch.nn.Module, embedding: tuple[torch.Tensor, ...], head_dim: int, positions: int
) -> Iterator[np.ndarray]:
    """Yields [positions, channels, channels]: unit vectors, as columns, turned by the functions of the module's file,
    for each number of channels that might turn. If attention splits a head, only its first channels turn."""
    scope = inspect.unwrap(type(module).forward).__globals__
    functions = [
        f for name, f in scope.items() if name.startswith("apply_rotary") and callable(f) and "vision" not in name
    ]
    width = embedding[0].shape[-1]
    for function in functions:
        names = list(inspect.signature(inspect.unwrap(function)).parameters)
        heads = next((i for i, name in enumerate(names) if name in ("cos", "freqs_cis", "position_embeddings")), 2)
        for channels in sorted({head_dim, width, 2 * width}, reverse=True):
            if channels > head_dim:
                continue
            eye = torch.eye(channels, device=embedding[0].device)
            for head_first in (True, False):
                # [1, heads, tokens, channels] or [1, tokens, heads, channels]: a head for each unit vector
                x = eye[None, :, None].expand(1, channels, positions, channels)
                x = x if head_first else x.transpose(1, 2)
                try:
                    out = function(*[x.contiguous()] * heads, *embedding)
                except (TypeError, ValueError, RuntimeError, IndexError):
                    continue  # of another shape
                out = out[-1] if isinstance(out, tuple) else out
                if isinstance(out, torch.Tensor) and out.shape == x.shape:
                    out = out if head_first else out.transpose(1, 2)
                    yield out[0].permute(1, 2, 0).to("cpu", torch.float64).numpy()


def _from_turns(turns: np.ndarray, positions: list[int]) -> Rotary | None:
    """Pairs and increments of matrices [positions, channels, channels], the first of which is position 0; None if they
    are not rotations of pairs by an angle that grows with the position."""
    first = turns[0]  # channels may be moved, and scaled
    used = np.abs(first) > 1e-6
    if not ((used.sum(0) == 1).all() and (used.sum(1) == 1).all()):
        return None
    relative = turns @ np.linalg.inv(first)
    channels = len(first)
    most = np.abs(relative).max(0) * (1 - np.eye(channels))
    partner = most.argmax(1)
    pairs = [(i, int(partner[i])) for i in range(channels) if most[i].max() > 1e-5 and i < partner[i]]
    increments = []
    for a, b in pairs:
        increment = _increment(np.arctan2(relative[1:, b, a], relative[1:, a, a]), positions[1:])
        if increment is None:
            return None
        increments.append(increment)
    rotary = Rotary(np.array(pairs, np.int64).reshape(-1, 2), np.array(increments, np.uint32))
    for matrix, position in zip(relative, positions):
        if np.abs(rotary.turned(np.eye(channels), position).T - matrix).max() > _EXACT:
            return None
    return rotary


def _increment(angles: np.ndarray, positions: list[int]) -> int | None:
    """2^-32 turns per position, from the angles at 1, 2, 4, ..., each known up to whole turns."""
    angle = float(angles[0])
    for measured, position in zip(angles[1:], positions[1:]):
        turns = round((position * angle - measured) / TURN)
        refined = (measured + TURN * turns) / position
        if abs(refined - angle) * position > 0.3:
            return None
        angle = refined
    return round(angle / TURN * 2**32) % 2**32
