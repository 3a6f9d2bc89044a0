"""Each tensor allocation of a call fails in turn: the call raises an error that says so, and loses nothing silently.

A preloaded tests/c/no_memory.c makes the n-th allocation fail: workspaces and outputs of the operators, and tensors of
the caches. tests/test_out_of_memory.py builds that library, runs this file, and reads how many failures each case had.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from esm_models import protein, tiny_esm
from ops_cases import samples
from streams import DIM, PACKED, SHAPES, Stream, check, forward, module, new, same

from turboquant import CacheSpec, TurboQuantCache
from turboquant.esm import ContextCache
from turboquant.hf.attention import attention

fail_allocation = ctypes.CDLL(None).tq_test_fail_allocation
fail_allocation.argtypes = [ctypes.c_long]
fail_allocation.restype = ctypes.c_long


def failures(call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> Iterator[Any]:
    """Runs `call(prepare())` with its n-th allocation failing, for n = 1, 2, .. until the call succeeds. Yields what
    `prepare` made after each failure."""
    for n in count(1):
        argument = prepare()
        fail_allocation(n)
        try:
            call(argument)
        except RuntimeError as error:
            assert fail_allocation(0) == 0 and "memory" in str(error), error
            yield argument
        else:
            assert fail_allocation(0) > 0, f"tensor {n} was missing, and no error said so"
            return


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def operators() -> None:
    for name, (op, args, kwargs) in samples(np.random.default_rng(0), "cpu").items():
        given = tensors_of([*args, *kwargs.values()])
        before, seen = [x.clone() for x in given], 0
        other = copy.deepcopy((args, kwargs))
        for _ in failures(lambda _, op=op, args=args, kwargs=kwargs: op(*args, **kwargs)):
            assert all(map(torch.equal, given, before)), name
            seen += 1
        op(*other[0], **other[1])
        assert all(map(torch.equal, given, tensors_of([*other[0], *other[1].values()]))), name
        print(f"{name}: {seen}")


def caches() -> None:
    stream = Stream(batch=2, tokens=400)
    for name, fields in SHAPES.items():
        for start, stop in ((0, 200), (200, 201), (200, 300)):
            seen, lost = forwards(stream, PACKED.with_(**fields), start, stop)
            print(f"{name}, {start} to {stop}: {seen}, of which {lost} need a reset")


def forwards(stream: Stream, spec: CacheSpec, start: int, stop: int) -> tuple[int, int]:
    """Returns how many allocations of a forward failed, and after how many of these failures the cache needed a reset.

    Layers that had stored tokens when a later layer failed drop them again. Tokens that were pushed out of a window
    cannot be brought back: the cache then raises an error until it is reset.
    """
    base = new(spec)
    if start:
        forward(base, stream.piece(0, start))
    after, piece = copy.deepcopy(base), stream.piece(start, stop)
    want, seen, lost = forward(after, piece), 0, 0
    for victim in failures(lambda victim: step(victim, piece), lambda: copy.deepcopy(base)):
        seen += 1
        if any(layer.storage.damaged for layer in victim.layers):
            assert spec.window and start
            lost += 1
            refused(victim, piece)
            victim.reset()
            forward(victim, stream.piece(0, start))
        assert victim.get_seq_length() == start
        assert torch.equal(forward(victim, piece), want)
        same(victim, after)
        check(victim)
    return seen, lost


def step(victim: TurboQuantCache, piece: Any) -> None:
    """The cache's part of a forward. The test allocates no tensor of its own here, unlike in `forward`."""
    for i, (q, k, v) in enumerate(piece):
        fresh, value = victim.update(k, v, i)
        attention(module(), q, fresh, value, None, scaling=DIM**-0.5)


def refused(victim: TurboQuantCache, piece: Any) -> None:
    try:
        step(victim, piece)
    except RuntimeError as error:
        assert "call cache.reset()" in str(error)
    else:
        raise AssertionError("a cache that lost tokens went on")


def proteins() -> None:
    """A call that fails does not change the proteins that were stored before."""
    held = ContextCache(tiny_esm(), "esm-default")
    first, second = [protein(40), protein(150, 1)], [protein(50, 2)]
    edits = dict(residues=[["<mask>"], ["A", "C"]], positions=[[3], [0, 149]])
    held.encode(first)
    want = held.decode(**edits)
    for name, call in (("decode", lambda _: held.decode(**edits)), ("encode", lambda _: held.encode(second))):
        seen = 0
        for _ in failures(call):
            seen += 1
            assert held.lengths == [40, 150]
            assert all(map(torch.equal, held.decode(**edits).hidden, want.hidden))
        print(f"{name}: {seen}")
    assert held.lengths == [50]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        operators()
        caches()
        proteins()
