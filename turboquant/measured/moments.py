"""`Moments`: what `turboquant.measure` found about a model, as arrays.

For a key k at position p of its sequence, in one KV head:

    c_p = centre + sum over pairs i of (a_i, b_i) turned by the angle 2 pi * (p * increment_i mod 2^32) / 2^32
    y   = A (k - c_p)       A = S (I + W diag(e) W^T) S       S = diag(scale), W^T = directions, e = stretch

and a query q becomes A^-1 q with A^-1 = S^-1 (I + W diag(1 / (1 + e) - 1) W^T) S^-1, so that <A^-1 q, y> + <q, c_p> is
<q, k>. Turning (a, b) by an angle t gives (a cos t - b sin t, a sin t + b cos t), in the two channels of the pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..arguments import bounded
from ..fingerprints import differences
from ..plan import MAX_RANK, PAIR_MULTIPLE

__all__ = ["PROTEINS", "RANDOM_IDS", "LayerMoments", "Moments", "array_shapes"]

PROTEINS = "the proteins of the package"
RANDOM_IDS = "random token ids"  # `Moments.source` without text

Centre = Literal["wave", "constant", "not probed"]
F32 = NDArray[np.float32]


def array_shapes(heads: int, channels: int, pairs: int, rank: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of each array of a layer."""
    return {
        "pairs": ((pairs, 2), np.int32),
        "increments": ((pairs,), np.uint32),
        "amplitudes": ((heads, pairs, 2), np.float32),
        "centre": ((heads, channels), np.float32),
        "scale": ((heads, channels), np.float32),
        "directions": ((heads, rank, channels), np.float32),
        "stretch": ((heads, rank), np.float32),
    }


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Moments of one layer. Two are equal if they are the same object.

    kind        "wave": keys turn with their position.  "constant": they do not.  "not probed": how they turn could not
                be found, so the centre is constant, which costs quality.
    pairs       [pairs, 2] int32: the two channels of each pair of the wave. Their number is a multiple of 8, 0 for a
                constant centre; pairs of amplitude 0 are padding. No channel is in two of the other pairs.
    increments  [pairs] uint32: how far a pair turns in one position, in units of 2^-32 turns.
    amplitudes  [kv_heads, pairs, 2] float32: the mean of the keys before they are turned, with the attention scaling of
                the rotary embedding; at most 16384.
    centre      [kv_heads, head_dim] float32: the mean in channels that do not turn, 0 in all others; at most 16384.
    scale       [kv_heads, head_dim] float32, in 2^-10..2^10: S.
    directions  [kv_heads, rank, head_dim] float32, orthonormal rows: W^T; a rank of 0 to 4.
    stretch     [kv_heads, rank] float32, in 2^-10 - 1..2^10: e.

    Raises ValueError that names what is wrong.
    """

    kind: Centre
    pairs: NDArray[np.int32]
    increments: NDArray[np.uint32]
    amplitudes: F32
    centre: F32
    scale: F32
    directions: F32
    stretch: F32

    def __post_init__(self) -> None:
        if self.kind not in get_args(Centre):
            raise ValueError(f"`kind` must be one of {', '.join(map(repr, get_args(Centre)))}, got {self.kind!r}")
        if self.centre.ndim != 2 or 0 in self.centre.shape:
            raise ValueError(f"`centre` must be [kv_heads, head_dim], got shape {self.centre.shape}")
        heads, channels = self.centre.shape
        pairs, rank = (x.shape[at] if x.ndim > at else -1 for x, at in ((self.pairs, 0), (self.stretch, 1)))
        most = -(-channels // 2 // PAIR_MULTIPLE) * PAIR_MULTIPLE
        if pairs % PAIR_MULTIPLE or pairs > most or (pairs > 0) != (self.kind == "wave"):
            raise ValueError(f"`pairs` must be a multiple of {PAIR_MULTIPLE}, 0 without a wave, got {self.pairs.shape} "
                             f"for {channels} channels and kind {self.kind!r}")  # fmt: skip
        if not 0 <= rank <= min(MAX_RANK, channels):
            raise ValueError(f"`stretch` must be [kv_heads, 0..{MAX_RANK}], got shape {self.stretch.shape}")
        for name, (shape, dtype) in array_shapes(heads, channels, pairs, rank).items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                wanted = f"{np.dtype(dtype).name} {list(shape)}"
                raise ValueError(f"`{name}` must be {wanted}, got {array.dtype} {list(array.shape)}")
            if not np.isfinite(array).all():
                raise ValueError(f"`{name}` must be finite")
        self._check_values()

    def _check_values(self) -> None:
        channels = self.centre.shape[1]
        ranges = {
            "amplitudes": (-_core.MAX_INPUT, _core.MAX_INPUT),
            "centre": (-_core.MAX_INPUT, _core.MAX_INPUT),
            "scale": (2.0**-10, 2.0**10),
            "stretch": (2.0**-10 - 1, 2.0**10),
        }
        for name, (least, most) in ranges.items():
            array = getattr(self, name)
            if outside := array[(array < least) | (array > most)].tolist():
                raise ValueError(f"`{name}` must be in {least:g}..{most:g}, got {outside[0]:g}")
        gram = self.directions.astype(np.float64) @ self.directions.astype(np.float64).swapaxes(-1, -2)
        if gram.size and np.abs(gram - np.eye(gram.shape[-1])).max() > 1e-4:
            raise ValueError("`directions` must have orthonormal rows")
        if self.pairs.size and (self.pairs.min() < 0 or self.pairs.max() >= channels):
            raise ValueError(f"`pairs` must hold channels in 0..{channels - 1}, got {self.pairs.tolist()}")
        turned = self.pairs[self.amplitudes.any((0, 2))].ravel()
        if len(set(turned.tolist())) != turned.size:
            raise ValueError(f"`pairs` must have each channel in one pair, got {self.pairs.tolist()}")

    def transforms(self, wave: bool, metric: bool) -> dict[str, NDArray[Any]]:
        """Returns arguments of `turboquant.transforms.transforms` for a plan with this wave, this metric, or both:
        those that it takes of key_turns int32 [pairs, 3], key_moments float32 [kv_heads, n] and key_centre float32
        [kv_heads, head_dim]."""
        heads = len(self.centre)
        arrays: dict[str, NDArray[Any]] = {}
        if wave and self.centre.any():
            arrays["key_centre"] = self.centre
        if wave and len(self.pairs):
            arrays["key_turns"] = np.column_stack([self.pairs, self.increments.view(np.int32)])
        parts = [self.amplitudes.reshape(heads, -1)] if wave else []
        if metric:
            padded = np.pad(self.stretch, ((0, 0), (0, MAX_RANK - self.rank)))
            parts += [self.scale, self.directions.reshape(heads, -1), padded]
        moments = np.concatenate(parts, 1) if parts else np.zeros((heads, 0), np.float32)
        return arrays | ({"key_moments": np.ascontiguousarray(moments)} if moments.size else {})

    @property
    def rank(self) -> int:
        """Rank of the metric."""
        return int(self.stretch.shape[1])

    @property
    def sizes(self) -> tuple[int, int]:
        """(pairs of the wave, rank of the metric), as `CacheSpec.plan` takes them."""
        return len(self.pairs), self.rank

    def later(self, by: int) -> LayerMoments:
        """Moments whose centre at position p + by is the centre of these at position p."""
        if not by or not len(self.pairs):
            return self
        angle = (by * self.increments.astype(np.int64) % 2**32) * (2 * np.pi / 2**32)
        a, b = self.amplitudes[..., 0].astype(np.float64), self.amplitudes[..., 1].astype(np.float64)
        turned = [a * np.cos(angle) + b * np.sin(angle), b * np.cos(angle) - a * np.sin(angle)]
        return replace(self, amplitudes=np.stack(turned, -1).astype(np.float32))

    def averaged(self, shifts: NDArray[np.integer], weights: NDArray[np.floating]) -> LayerMoments:
        """Moments for tokens that lie `shifts` positions later than they are counted, each shift with its weight: the
        mean of their centres. Weights sum to 1."""
        if not len(self.pairs):
            return self
        amplitudes = sum(weight * self.later(-int(shift)).amplitudes for shift, weight in zip(shifts, weights))
        return replace(self, amplitudes=np.asarray(amplitudes, np.float32))

    def centre_at(self, positions: NDArray[np.integer]) -> NDArray[np.float64]:
        """c_p of each position, [kv_heads, positions, head_dim] float64."""
        phase = positions.astype(np.uint64)[:, None] * self.increments & np.uint64(0xFFFFFFFF)
        angle = phase * (2 * np.pi / 2**32)
        a, b = (self.amplitudes[:, None, :, i].astype(np.float64) for i in range(2))
        turned = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        out = np.repeat(self.centre.astype(np.float64)[:, None], len(positions), 1)
        for i, pair in enumerate(self.pairs):  # padding pairs repeat channels
            for side in range(2):
                out[..., pair[side]] += turned[side][..., i]
        return out

    def metric(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(A, A^-1), [kv_heads, head_dim, head_dim] float64."""
        scale, rows, e = (x.astype(np.float64) for x in (self.scale, self.directions, self.stretch))
        eye = np.eye(scale.shape[-1])
        outer, columns = scale[:, :, None] * scale[:, None, :], rows.swapaxes(-1, -2)
        there = eye + columns * e[:, None] @ rows
        back = eye + columns * (1 / (1 + e) - 1)[:, None] @ rows
        return there * outer, back / outer

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)


_ARRAYS = tuple(field.name for field in fields(LayerMoments) if field.name != "kind")
_DESCRIBED = ("fingerprint", "tokens", "source")


@dataclass(frozen=True, eq=False)
class Moments:
    """What was measured on one model (`turboquant.measure`); two are equal if they are the same object.

    layers       one `LayerMoments` for each layer of the model, in order.
    fingerprint  of the model (`models.identity.fingerprint`): its type and shape, rotary embedding, a few weights.
    tokens       how many tokens were counted.
    source       which tokens they were, in words.
    costs        float32 [layers, 2 (keys, values)]: the divergence of the next token in nats if each error of a packed
                 vector were as large as what is quantised, with the exact tokens of the presets
                 (`measuring.costs.side_costs`). None: not measured.
    no_costs     why there are no costs, in words; "" where there are, and in moments of a text of a calibration.
    divergence   of the next token with the preset compact, mean in nats, on the text that was measured
                 (`evaluation.forecast`): what budgets forecast from. None: not measured. It needs costs.

    Raises ValueError that names what is wrong.
    """

    layers: tuple[LayerMoments, ...]
    fingerprint: dict[str, Any]
    tokens: int
    source: str = ""
    costs: F32 | None = None
    no_costs: str = ""
    divergence: float | None = None

    def __post_init__(self) -> None:
        if not self.layers or not all(isinstance(layer, LayerMoments) for layer in self.layers):
            raise ValueError(f"`layers` must be LayerMoments, at least one, got {self.layers!r}")
        if not isinstance(self.fingerprint, dict):
            raise ValueError(f"`fingerprint` must be a mapping, got {self.fingerprint!r}")
        if self.fingerprint.get("layers", len(self.layers)) != len(self.layers):
            wanted = f"the {self.fingerprint['layers']} layers of its fingerprint"
            raise ValueError(f"`layers` must be {wanted}, got {len(self.layers)}")
        bounded("Moments: `tokens`", self.tokens)
        if self.divergence is not None and not (isinstance(self.divergence, float) and 0 < self.divergence < np.inf):
            raise ValueError(f"`divergence` must be a finite float above 0, or None, got {self.divergence!r}")
        if self.costs is None:
            if self.divergence is not None:
                raise ValueError(f"`divergence` must be None without costs, got {self.divergence!r}")
            return
        if self.costs.shape != (len(self.layers), 2) or self.costs.dtype != np.float32:
            raise ValueError(f"`costs` must be float32 [{len(self.layers)}, 2], got {self.costs.dtype} "
                             f"{list(self.costs.shape)}")  # fmt: skip
        if not (np.isfinite(self.costs).all() and self.costs.min() >= 0):
            raise ValueError("`costs` must be finite and not negative")

    def __repr__(self) -> str:
        shapes = sorted({layer.centre.shape for layer in self.layers})
        pairs = sorted({len(layer.pairs) for layer in self.layers})
        parts = [
            f"layers={len(self.layers)}",
            f"kv_heads={_range(sorted({heads for heads, _ in shapes}))}",
            f"head_dim={_range(sorted({channels for _, channels in shapes}))}",
            f"pairs={_range(pairs)}",
            f"tokens={self.tokens}",
            f"source={self.source!r}",
            f"nbytes={self.nbytes}",
        ]
        parts += [f"not_probed={list(self.not_probed)}"] if self.not_probed else []
        parts += [f"no_costs={self.no_costs!r}"] if self.no_costs else []
        return f"Moments({', '.join(parts)})"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def averaged(self, shifts: NDArray[np.integer], weights: NDArray[np.floating]) -> Moments:
        """See `LayerMoments.averaged`."""
        return replace(self, layers=tuple(layer.averaged(shifts, weights) for layer in self.layers))

    @property
    def not_probed(self) -> tuple[int, ...]:
        """Layers whose keys turn in a way that could not be found: they have a constant centre."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "not probed")

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Raises ValueError, naming what differs, unless `fingerprint` is of the model that this was measured on."""
        if differs := differences(self.fingerprint, fingerprint):
            raise ValueError(f"`profile` must be of this model, got one of another: this one has {', '.join(differs)}")

    def described(self) -> dict[str, Any]:
        """All but the arrays, as JSON holds it."""
        return {
            **{name: getattr(self, name) for name in _DESCRIBED},
            "kinds": [layer.kind for layer in self.layers],
            "shapes": [[*layer.centre.shape, len(layer.pairs), layer.rank] for layer in self.layers],
            **({"no_costs": self.no_costs} if self.no_costs else {}),
            **({} if self.divergence is None else {"divergence": self.divergence}),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of layer i under "i.NAME", and costs, where there are any, under "costs"."""
        arrays = {f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(self.layers) for name in _ARRAYS}
        return arrays if self.costs is None else {**arrays, "costs": self.costs}

    def without_costs(self) -> Moments:
        """The same without costs and divergence: what decides how vectors are stored once widths are known."""
        return replace(self, costs=None, no_costs="", divergence=None)

    @classmethod
    def of_arrays(cls, described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Moments:
        """What `described` and `arrays` were made of. Raises KeyError, TypeError or ValueError for other contents."""
        layers = (
            LayerMoments(kind, **{key: arrays[f"{i}.{key}"] for key in _ARRAYS})
            for i, kind in enumerate(described["kinds"])
        )
        told = {key: described[key] for key in _DESCRIBED}
        told |= {"no_costs": str(described.get("no_costs", "")), "divergence": described.get("divergence")}
        return cls(tuple(layers), **told, costs=arrays.get("costs"))


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}"
