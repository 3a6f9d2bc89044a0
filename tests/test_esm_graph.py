"""Replayed decoding steps of a ContextCache give the results of plain steps, for any inputs to one recording."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from esm_models import protein, tiny_esm, torch
from specs import WAVE, bare
from torch.utils._python_dispatch import TorchDispatchMode

from turboquant import CacheSpec
from turboquant.esm import EXACT, ContextCache
from turboquant.esm import graph as graph_module
from turboquant.esm.graph import KEPT, StepGraphs

PROTEINS = [protein(40, 0), protein(7, 1), protein(131, 2), protein(127, 3)]
SPECS = {
    "packed": bare(3, 3),
    "sinks, centred": bare(4, 4, **WAVE, sinks=3),
    "layers that differ": bare(3, 3, **WAVE, sinks=2, overrides={1: {"centre": "none", "sinks": 0}}),
    "exact": EXACT,
}
# Decoding steps by name; those of one name have the same shape.
STEPS: dict[str, list[dict[str, Any]]] = {
    "two proteins": [
        dict(residues=["W", "A"], positions=[[3], [5]], proteins=[0, 2]),
        dict(residues=["C", "K"], positions=[[120], [5]], proteins=[2, 1]),
        dict(residues=["<mask>".split(), "A"], positions=[[39], [6]], proteins=[0, 3]),
        dict(residues=["D", "E"], positions=[[1], [126]], proteins=[1, 3]),
    ],
    "copies of one": [
        dict(residues=["W", "A", "C"], positions=[[50], [60], [70]], proteins=[2, 2, 2]),
        dict(residues=["W", "A", "C"], positions=[[20], [10], [30]], proteins=[0, 0, 0]),
        dict(residues=["D", "D", "D"], positions=[[100], [110], [90]], proteins=[3, 3, 3]),
    ],
    "several residues, continued": [
        dict(residues=["WW", "A"], positions=[[3, 8], [131]], proteins=[0, 2]),
        dict(residues=["A", "KE"], positions=[[127], [5, 30]], proteins=[3, 0]),
        dict(residues=["CD", "KE"], positions=[[1, 3], [5, 30]], proteins=[1, 0]),
    ],
}


class Device:
    """Imitates CUDA graphs on the CPU: a replay runs the step again on the tensors that it was recorded with, and
    writes into the results of the recording, as the kernels of a graph do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded = self.replayed = 0
        monkeypatch.setattr(StepGraphs, "_record", lambda graphs, *arguments: self.record(*arguments))

    def record(self, step: Callable[..., Any], shape: Any, numbers: torch.Tensor) -> Any:
        self.recorded += 1
        own = numbers.clone()
        results = step(shape, own)

        def replay() -> None:
            self.replayed += 1
            for kept, new in zip(results, step(shape, own)):
                kept.copy_(new)

        return graph_module._Recorded(replay, own, results)


def caches(spec: CacheSpec, device: str = "cpu") -> tuple[ContextCache, ContextCache]:
    """Returns a cache that replays steps (on a CPU, through a `Device`) and one that does not."""
    model = tiny_esm(heads=3, head_dim=24).to(device)
    replaying, plain = ContextCache(model, spec, cuda_graphs=True), ContextCache(model, spec)
    for cache in (replaying, plain):
        cache.encode(PROTEINS)
    if device == "cpu":
        assert replaying._graphs is None  # there is nothing to record with
        replaying._graphs = StepGraphs()
    return replaying, plain


def compare(replaying: ContextCache, plain: ContextCache, tolerance: float) -> None:
    """Shapes alternate, and all results are compared at the end: no step may change the results of another."""
    said = []
    for i in range(8):
        for steps in STEPS.values():
            step = steps[i % len(steps)]
            said.append((replaying.decode(**step), plain.decode(**step)))
    for got, want in said:
        for a, b in zip([*got.hidden, *got.logits], [*want.hidden, *want.logits], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_recording_serves_all_steps_of_its_shape(spec: CacheSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    device, (replaying, plain) = Device(monkeypatch), caches(spec)
    compare(replaying, plain, tolerance=1e-5)
    assert device.recorded == len(STEPS) <= KEPT and device.replayed == 7 * len(STEPS)
    replaying.encode(PROTEINS[:1])
    assert replaying._graphs is None  # recordings for the other proteins are dropped


def test_copies_record_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    replaying, _ = caches(SPECS["packed"])
    step = STEPS["two proteins"][0]
    for _ in range(2):
        want = replaying.decode(**step).hidden
    assert any(replaying._graphs._seen.values())
    for other in (copy.deepcopy(replaying), pickle.loads(pickle.dumps(replaying)), copy.copy(replaying)):
        assert other._graphs is None and other._cuda_graphs
        assert all(map(torch.equal, other.decode(**step).hidden, want))
    assert any(replaying._graphs._seen.values())


def test_few_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device, (replaying, plain) = Device(monkeypatch), caches(SPECS["packed"])
    for copies in (1, 2, 3, 4, 5, 2, 3, 4, 5, 1, 5):
        step = dict(residues=["W"] * copies, positions=[[7 + i] for i in range(copies)], proteins=[0] * copies)
        assert torch.allclose(torch.cat(replaying.decode(**step).hidden), torch.cat(plain.decode(**step).hidden))
    assert device.recorded == 4  # 2, 3, 4 and 5 copies; one copy was forgotten in between
    assert len(replaying._graphs._seen) == KEPT


class NoReadBack(TorchDispatchMode):
    """Refuses what cannot be recorded in a CUDA graph: reading from the device, and tensors made of host data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_step_looks_at_no_number(spec: CacheSpec) -> None:
    _, plain = caches(spec)
    for steps in STEPS.values():  # the first step of a size makes its moments
        plain.decode(**steps[0])
    seen = []
    step = plain._step

    def watched(shape: Any, numbers: torch.Tensor) -> Any:
        with NoReadBack():
            seen.append(shape)
            return step(shape, numbers)

    plain._step = watched  # type: ignore[method-assign]
    for steps in STEPS.values():
        plain.decode(**steps[0])
    assert len(set(seen)) == len(STEPS)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReadBack():
        torch.ones(1).item()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_cuda_graphs_say_what_plain_steps_say(inference: bool, spec: CacheSpec) -> None:
    replaying, plain = caches(spec, "cuda")
    with torch.inference_mode(inference):
        compare(replaying, plain, tolerance=1e-4)
    compare(replaying, plain, tolerance=1e-4)
    assert all(replaying._graphs._seen.values()) and len(replaying._graphs._seen) == len(STEPS)
    twin = copy.deepcopy(replaying)
    compare(twin, plain, tolerance=1e-4)
    assert all(twin._graphs._seen.values())
    replaying.encode(PROTEINS[:1])  # other proteins: no old recording may be replayed
    plain.encode(PROTEINS[:1])
    for at in (3, 4, 5):
        got, want = (cache.decode(["W"], [[at]]).logits[0] for cache in (replaying, plain))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
