"""What a calibration has found so far, and the file that keeps it, so that an interrupted one goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..files import file_name, read_arrays, write_arrays
from ..measured.moments import Moments

__all__ = ["SecondMoments", "Unfinished"]

FORMAT = "turboquant-calibration-1"

F64 = NDArray[np.float64]


class SecondMoments:
    """Sums of vectors and of their outer products, float64, one entry per layer and side on that layer's device.

    what      what the vectors are, for error messages
    batches   how many batches are in the sums;  tokens  how many of their tokens
    """

    def __init__(self, what: str) -> None:
        self.what, self.tokens, self.batches = what, 0, 0
        self.sums: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, layer: int, side: int, x: torch.Tensor, real: torch.Tensor | None) -> None:
        """x [batch, kv_heads, tokens, head_dim]; real [batch, tokens] bool or None."""
        rows = x.transpose(0, 1).flatten(1, 2) if real is None else x.transpose(1, 2)[real.to(x.device)].transpose(0, 1)
        rows = rows.to(torch.float64)
        first, second = rows.sum(1), rows.mT @ rows
        if (layer, side) in self.sums:
            sums = self.sums[layer, side]
            first, second = sums[0].to(first.device) + first, sums[1].to(first.device) + second
        self.sums[layer, side] = first, second

    def means(self, layers: int) -> tuple[list[F64], list[F64]]:
        """Means of vectors, [2, kv_heads, head_dim], and outer products, [.., head_dim, head_dim], for each layer."""
        both: tuple[list[F64], list[F64]] = [], []
        for layer in range(layers):
            sides = [[t.cpu().numpy() for t in self.sums[layer, side]] for side in range(2)]
            if not all(np.isfinite(second).all() for _, second in sides):
                raise ValueError(f"`model` must give finite {self.what}, got others in layer {layer}")
            for means, sums in zip(both, zip(*sides)):
                means.append(np.stack(sums) / self.tokens)
        return both

    def arrays(self) -> dict[str, F64]:
        """The sums of layer i and side j under "i.j.first" and "i.j.second"."""
        return {f"{layer}.{side}.{name}": sums.cpu().numpy() for (layer, side), both in self.sums.items()
                for name, sums in zip(("first", "second"), both)}  # fmt: skip

    def take(self, counts: list[int], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `arrays` gave; counts: batches and tokens. Raises ValueError for other contents."""
        self.batches, self.tokens = counts
        for layer, side in {(int(name.split(".")[0]), int(name.split(".")[1])) for name in arrays}:
            first, second = (arrays[f"{layer}.{side}.{name}"] for name in ("first", "second"))
            if first.ndim != 2 or second.shape != (*first.shape, first.shape[1]) or first.dtype != second.dtype:
                raise ValueError(f"its sums of layer {layer} do not fit together")
            self.sums[layer, side] = torch.from_numpy(first), torch.from_numpy(second)
        if any(type(count) is not int or (count > 0) != bool(self.sums) for count in counts):
            raise ValueError(f"its counts must fit its sums, got {counts}")


class Unfinished:
    """What was found so far.

    keys_and_values, gradients   the sums of both passes
    moments     what `trial.with_moments` has measured, by name
    arrays      what else was computed, by name: tables, and costs of sides by window and text
    trials      losses that `trial.tried` has measured, by text, window, method and average
    """

    def __init__(self, identity: str, file: str | os.PathLike[str] | None) -> None:
        self.keys_and_values, self.gradients = SecondMoments("keys and values"), SecondMoments("gradients")
        self.moments: dict[str, Moments] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        self.trials: dict[str, float] = {}
        self.identity, self.file = identity, None
        if file is None:
            return
        self.file = Path(file_name(file, "checkpoint"))
        if self.file.is_dir() or not self.file.absolute().parent.is_dir():
            raise ValueError(f"`checkpoint` must be a file in a folder that is there, got {str(file)!r}")
        if self.file.exists():
            self._load(self.file)

    def array(self, name: str, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Returns an array that was computed before, or computes and keeps it."""
        if name not in self.arrays:
            self.arrays[name] = compute()
            self.save()
        return self.arrays[name]

    def by_layer(self, name: str, compute: Callable[[], list[NDArray[Any]]], layers: int) -> list[NDArray[Any]]:
        """Does the same for an array of each layer."""
        names = [f"{name}.{i}" for i in range(layers)]
        if any(one not in self.arrays for one in names):
            self.arrays.update(zip(names, compute(), strict=True))
            self.save()
        return [self.arrays[one] for one in names]

    def measured(self, name: str, measure: Callable[[], Moments]) -> Moments:
        """Returns moments that were measured before, or measures and keeps them."""
        if name not in self.moments:
            self.moments[name] = measure()
            self.save()
        return self.moments[name]

    def save(self) -> None:
        """Writes the file, whole or not at all, if there is to be one."""
        if self.file is None:
            return
        sums = {"keys_and_values": self.keys_and_values, "gradients": self.gradients}
        described = {
            "identity": self.identity,
            "counts": {name: [one.batches, one.tokens] for name, one in sums.items()},
            "moments": {name: one.described() for name, one in self.moments.items()},
            "trials": self.trials,
        }
        parts = {**{name: one.arrays() for name, one in sums.items()}, "arrays": self.arrays}
        parts |= {f"moments.{name}": one.arrays() for name, one in self.moments.items()}
        arrays = {f"{part}/{name}": array for part, arrays_of in parts.items() for name, array in arrays_of.items()}
        write_arrays(self.file, FORMAT, described, arrays)

    def _load(self, file: Path) -> None:
        try:
            described, arrays = read_arrays(file, FORMAT, "an unfinished calibration")
            if described["identity"] != self.identity:
                raise ValueError("it is of another run")
            parts: dict[str, dict[str, NDArray[Any]]] = {}
            for name, array in arrays.items():
                part, _, rest = name.partition("/")
                parts.setdefault(part, {})[rest] = array
            for name, one in (("keys_and_values", self.keys_and_values), ("gradients", self.gradients)):
                one.take(described["counts"][name], parts.get(name, {}))
            self.moments = {
                name: Moments.of_arrays(told, parts[f"moments.{name}"]) for name, told in described["moments"].items()
            }
            self.arrays = parts.get("arrays", {})
            self.trials = {str(name): float(loss) for name, loss in described["trials"].items()}
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            wants = "one of this model, these batches and this seed"
            raise ValueError(
                f"`checkpoint` must be {wants}, got {str(file)!r}: remove it to start again ({error})"
            ) from error
