"""Bad arguments raise an error that names the argument, what it must be and what it was, and change nothing.

Every binding runs one table (refusals.py): NumPy, torch on a CPU, torch on CUDA.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import (
    NUMPY_ALONE,
    OPERATIONS,
    Arguments,
    append_arguments,
    attend_arguments,
    floats,
    snapshot,
)

from turboquant import _core

try:
    import torch

    from turboquant import ops  # noqa: F401  makes torch.ops.turboquant
except ImportError:
    torch = None  # type: ignore[assignment]
CUDA = torch is not None and torch.cuda.is_available()


def on_device(x: np.ndarray, moved: dict[int, Any]) -> Any:
    """Returns the array on the GPU, at the same offset in a copy of all its memory. So wrong strides, wrong alignment
    and overlap stay as they are.

    moved: the copies so far, by the address of the memory.
    """
    owner, dtype = x, torch.from_numpy(np.zeros(1, x.dtype)).dtype
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = owner.ctypes.data
    if start not in moved:
        moved[start] = torch.zeros(start % 64 + owner.nbytes, dtype=torch.uint8, device="cuda")
        moved[start][start % 64 :] = torch.from_numpy(owner.ravel("K").view(np.uint8)).cuda()
    offset = start % 64 + x.ctypes.data - start
    if offset % x.itemsize:
        pytest.skip("torch has no tensors that are not aligned to their elements")
    memory = moved[start][: len(moved[start]) // x.itemsize * x.itemsize].view(dtype)
    return memory.as_strided(x.shape, [step // x.itemsize for step in x.strides], offset // x.itemsize)


def tensor_of(x: Any, kind: str, device: str, moved: dict[int, Any]) -> Any:
    """An argument as an operator takes it; TypeError for what torch's own parser refuses, or torch cannot hold."""
    if isinstance(x, np.ndarray):
        if not x.flags.writeable or not x.dtype.isnative or min((*x.strides, 0)) < 0:
            raise TypeError(f"no such tensor: {x.dtype}, {x.strides}")
        return torch.from_numpy(x) if device == "cpu" else on_device(x, moved)
    if isinstance(x, list) or (x is None and not kind.startswith("Optional")):
        raise TypeError(f"not for {kind}: {x!r}")
    if kind == "List[int]" and not (isinstance(x, tuple) and all(type(w) is int and abs(w) < 2**63 for w in x)):
        raise TypeError(f"no plan for torch: {x!r}")
    if isinstance(x, str) or (kind == "int" and type(x) is not int) or (kind.endswith("Tensor]") or kind == "Tensor"):
        raise TypeError(f"not for {kind}: {x!r}")
    return x


def torch_arguments(op: str, arguments: Arguments, device: str) -> Arguments:
    kinds = {a.name: str(a.type) for a in getattr(torch.ops.turboquant, op).default._schema.arguments}
    if unknown := set(arguments) - set(kinds) - {"out"}:
        raise TypeError(f"no arguments of the operator: {unknown}")
    moved: dict[int, Any] = {}
    return {name: tensor_of(x, kinds[name], device, moved) for name, x in arguments.items() if name in kinds}


def rows_of(binding: str) -> list[Any]:
    """The rows of the table that a binding can get. Torch has no `out` and no lists of numbers, and operators on CUDA
    do not check what tensors hold."""
    found = []
    for op, (make, faults) in OPERATIONS.items():
        for what, (exception, name, fault) in faults.items():
            if binding != "numpy":
                if op == "dot" or (op, what) in NUMPY_ALONE or what.startswith("out:"):
                    continue
                if binding == "cuda" and "[" in name and not name.startswith("plan"):
                    continue
                arguments = make()
                try:
                    torch_arguments(op, arguments | fault(arguments), "cpu")
                except TypeError:
                    continue
            marks = []
            if binding == "cuda":
                marks = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="there is no CUDA device")]
            found.append(
                pytest.param(binding, op, make, exception, name, fault, id=f"{binding}, {op}, {what}", marks=marks)
            )
    return found


ALL = [row for binding in ("numpy", *(("cpu", "cuda") if torch else ())) for row in rows_of(binding)]


@pytest.mark.parametrize("binding, op, make, exception, name, fault", ALL)
def test_faults(
    binding: str, op: str, make: Callable[[], Arguments], exception: type[Exception], name: str, fault: Callable
) -> None:
    arguments = make()
    arguments |= fault(arguments)
    before = snapshot(arguments)
    given, call = arguments, getattr(_core, op)
    if binding != "numpy":
        given, call = torch_arguments(op, arguments, binding), getattr(torch.ops.turboquant, op)
    with pytest.raises(exception) as caught:
        call(**given)
    assert type(caught.value) is exception, caught.value
    names = name.split("|")
    pattern = "|".join(rf"^{op}: `{re.escape(n)}` must be .+, got .+" for n in names)
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert caught.value.argument in [n.removeprefix("len(").rstrip(")").partition("[")[0] for n in names]
    assert snapshot(arguments) == before
    for key, x in given.items():
        if binding == "cuda" and isinstance(x, torch.Tensor):
            assert x.cpu().numpy().tobytes() == before[key], key


def test_every_binding_runs_most_of_the_table() -> None:
    count = {binding: sum(row.values[0] == binding for row in ALL) for binding in ("numpy", "cpu", "cuda")}
    assert count["numpy"] > 200
    if torch is not None:
        assert count["cpu"] > 150 and count["cuda"] > 100


@pytest.mark.parametrize("op, make", [(op, make) for op, (make, _) in OPERATIONS.items()])
def test_without_faults(op: str, make: Callable[[], Arguments]) -> None:
    """The arguments in which faults are planted are good without them."""
    getattr(_core, op)(**make())


@pytest.mark.parametrize("op, make", [(op, make) for op, (make, _) in OPERATIONS.items()])
def test_unknown_and_missing_arguments(op: str, make: Callable[[], Arguments]) -> None:
    with pytest.raises(TypeError, match=r"bogus|keyword arguments"):
        getattr(_core, op)(**make(), bogus=1)
    with pytest.raises(TypeError, match=op):
        getattr(_core, op)()


def test_the_message_says_it_all() -> None:
    arguments = append_arguments()
    arguments["block_table"][1, 0] = 8
    with pytest.raises(ValueError) as caught:
        _core.append(**arguments)
    assert str(caught.value) == "append: `block_table[2]` must be in 0..n_pages - 1, got 8"
    arguments = append_arguments()
    arguments["v"][0, 1, 3, 2] = np.inf
    with pytest.raises(ValueError) as caught:
        _core.append(**arguments)
    where = (1 * 40 + 3) * 64 + 2
    assert str(caught.value) == f"append: `v[{where}]` must be finite and at most 16384 in magnitude, got inf"


def test_an_overflowed_window_needs_the_fresh_tokens() -> None:
    """Without them early queries of a chunk would silently miss what it pushed out of the window."""
    arguments = attend_arguments()
    del arguments["fresh_k"], arguments["fresh_v"]
    with pytest.raises(ValueError, match="`q` must be of one token a sequence: .* need append_attend .*, got 3"):
        _core.attend(**arguments)
    arguments["lengths"] = np.array([10, 9], np.int32)  # two sinks and a window of eight still hold everything
    assert np.isfinite(_core.attend(**arguments)[0]).all()
    arguments["lengths"] = np.array([11, 9], np.int32)
    with pytest.raises(ValueError, match="`q` must be of one token"):
        _core.attend(**arguments)


@pytest.mark.parametrize("name", ["key_numbers", "value_numbers"])
def test_centres_are_looked_at(name: str) -> None:
    centre = floats(2, 64)
    centre[1, 5] = np.inf
    with pytest.raises(
        ValueError, match=rf"`{name}\[{64 + 5}\]` must be a centre, finite and at most 16384 in magnitude, got inf"
    ):
        _core.append(**append_arguments(), **{name: centre})


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "largest", "next_one"),
    [("float32", 16384, 16384.002), ("float16", 16384, 16400), ("bfloat16", 0x4680, 0x4681)],
)
def test_the_largest_input_is_accepted(dtype: str, largest: float, next_one: float, sign: int) -> None:
    """bfloat16 numbers are given by their bits."""
    arguments = append_arguments()
    assert _core.MAX_INPUT == 16384
    kind = np.uint16 if dtype == "bfloat16" else dtype
    for name in ("k", "v", "sink_k", "sink_v", "window_k", "window_v"):
        arguments[name] = np.zeros(arguments[name].shape, kind)
    arguments["dtype"] = dtype

    def signed(x: float) -> float:
        return int(x) | (sign < 0) << 15 if dtype == "bfloat16" else sign * x

    arguments["k"][...] = signed(largest)
    _core.append(**arguments)
    arguments["k"][0, 1, 3, 2] = signed(next_one)
    with pytest.raises(ValueError, match="must be finite and at most 16384 in magnitude, got -?16"):
        _core.append(**arguments)


# ---- hostile numbers in arrays that are otherwise right ----

anything = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 80))


def outcome(op: str, arguments: Arguments) -> None:
    """The call works, or it raises a ValueError and changes nothing."""
    before = snapshot(arguments)
    try:
        getattr(_core, op)(**arguments)
    except ValueError as error:
        assert re.match(rf"{op}: `.*` must be", str(error))
        assert snapshot(arguments) == before


@given(st.lists(anything, min_size=4, max_size=4), st.lists(anything, min_size=2, max_size=2))
def test_hostile_tables_append(table: list[int], lengths: list[int]) -> None:
    arguments = append_arguments()
    if table[0] == table[1] or table[0] in table[2:]:
        table = [0, 1, 2, 3]  # no page may be written through two entries
    arguments |= dict(block_table=np.array(table, np.int32).reshape(2, 2), lengths=np.array(lengths, np.int32))
    outcome("append", arguments)


@given(
    st.lists(anything, min_size=4, max_size=4),
    st.lists(anything, min_size=2, max_size=2),
    st.lists(anything, min_size=2, max_size=2),
    st.one_of(st.just(0), anything),
    st.booleans(),
)
def test_hostile_tables_attend(
    table: list[int], lengths: list[int], starts: list[int], sliding: int, fresh: bool
) -> None:
    arguments = attend_arguments()
    arguments |= dict(block_table=np.array(table, np.int32).reshape(2, 2), lengths=np.array(lengths, np.int32))
    arguments |= dict(starts=np.array(starts, np.int32), sliding_window=sliding)
    if not fresh:
        arguments |= dict(fresh_k=None, fresh_v=None)
    outcome("attend", arguments)
