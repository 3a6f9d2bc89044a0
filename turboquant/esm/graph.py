"""Decoding steps of a ContextCache as CUDA graphs: no Python runs between the kernels of a step.

A step is a function of its shape, one tensor of numbers (`reading`), the store and the weights. The host reads none of
these tensors, so a recorded step can be replayed with other numbers of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kvcache.pages import outside_autograd
from .reading import Shape

__all__ = ["KEPT", "StepGraphs"]

KEPT = 4  # how many shapes' graphs are kept: each holds memory for all that its step computes

Step = Callable[[Shape, torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass
class _Recorded:
    """A step that can be replayed. It reads `numbers` and writes `results`."""

    replay: Callable[[], None]
    numbers: torch.Tensor
    results: tuple[torch.Tensor, ...]


class StepGraphs:
    """Replays the steps of one store. The first step of a shape runs as usual, which also warms up its kernels. The
    second is recorded; it and all later ones are replayed. The KEPT shapes used last are kept."""

    def __init__(self) -> None:
        self._seen: dict[Shape, _Recorded | None] = {}  # the shape used last comes last

    def run(self, step: Step, shape: Shape, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns `step(shape, numbers)` as tensors that no later step overwrites. `step` must always be the same."""
        if shape not in self._seen:
            results = step(shape, numbers)
            self._keep(shape, None)
            return results
        recorded = self._seen.pop(shape) or self._record(step, shape, numbers)
        self._keep(shape, recorded)
        recorded.numbers.copy_(numbers)
        recorded.replay()
        return tuple(result.clone() for result in recorded.results)

    def _keep(self, shape: Shape, recorded: _Recorded | None) -> None:
        self._seen[shape] = recorded
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]

    @staticmethod
    @outside_autograd
    def _record(step: Step, shape: Shape, numbers: torch.Tensor) -> _Recorded:
        graph, own = torch.cuda.CUDAGraph(), numbers.clone()
        with torch.cuda.graph(graph):
            results = step(shape, own)
        return _Recorded(graph.replay, own, results)
