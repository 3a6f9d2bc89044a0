"""``torch.ops.turboquant.*``: the operators behind `turboquant.ops`. Importing that registers them with torch. They
take each tensor of a `turboquant.ops.PackedKV` as a separate argument.

``print(torch.ops.turboquant.attend.__doc__)`` shows an operator's documentation. Operators run on the CPU and, in a
build with CUDA, on CUDA, with the same schema. Both write the same bytes; with a rotation matrix a few codes may differ
(docs/rounding.md). They work under `torch.compile(fullgraph=True)`, `torch.export` and `torch.inference_mode`.
They have no gradient: a tensor is an error if it requires grad while grad mode is on, if it has a tangent
(`forward_ad`) outside inference mode, or if `torch.func` differentiates it. `torch.vmap` calls operators that do not
write to their arguments once for each element.

Tensors (contracts and the byte format: ``csrc/include/turboquant.h``):

    floats       float32, float16 or bfloat16, the same in all of one call. Their layout is [batch, heads, tokens,
                 head_dim], as in `torch.nn.functional.scaled_dot_product_attention`. k, v, q, fresh_k and fresh_v are
                 dense in the last dimension; their other strides are free (a transposed [batch, tokens, heads,
                 head_dim] is fine; on CUDA strides of q and fresh_* are multiples of 4). There may be gaps between
                 pages: their stride is any multiple of 64 bytes that is no less than a page, so a view of an engine's
                 memory will do. All other tensors are contiguous, except x of `rotate` and both of `merge`.
    transforms   the vector that is coded is z = R (x - centre) / step. `turboquant.ops.transforms` makes the arguments,
                 or leaves out those that a plan does not take:
                 key_numbers, value_numbers  float32 [kv_heads, columns]: centre, steps, and for keys moments;
                 key_turns  int32 [wave_pairs, 3], for plans with a wave;
                 rotation  float32 [kv_heads or 1, rows, head_dim], for plans with a dense rotation or a Gaussian
                 sketch: the rows of the keys, then those of the values.
                 turboquant.h, tq_transform, has their layout. On CUDA key_numbers is aligned to 16 bytes, and only
                 `turboquant.ops.pack` checks the numbers of a wave and a metric.

Errors: TypeError for a tensor of another dtype; ValueError for anything else about an argument, such as "attend:
`block_table[3]` must be in 0..n_pages - 1, got 8"; MemoryError; RuntimeError for the machine (CUDA, an instruction
set, memory that torch could not get). They have the fields `argument` ("block_table", or None) and `got` (8.0, or None
if it was no number). A failed call has changed nothing. On CUDA the contents of tensors are not checked, because that
would mean waiting for the device: lengths are clamped, and a page index out of range reads no page. Its tokens have no
weight in `attend`, decode to 0 in `dequantize`, and are not stored by `append`.

Threads on a CPU: the smaller of `torch.get_num_threads()` and `turboquant._core.num_threads()`. Operators and `_core`
share one core: what `_core.set_num_threads` and `_core.set_isa` choose holds for both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("turboquant.ops needs PyTorch: pip install 'turboquant-attention[torch]'") from error

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad

from . import _core
from .oldest import OLDEST


def _load() -> None:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST["torch"]:
        raise ImportError(f"turboquant.ops needs torch >= 2.10, this is {torch.__version__}: pip install -U torch")
    files = sorted(Path(__file__).parent.glob("_torch*.so"))
    if not files:
        how = "with torch installed, run: pip install --no-build-isolation --force-reinstall turboquant-attention"
        raise ImportError(f"turboquant was built without its torch operators (there is no turboquant/_torch.so); {how}")
    try:
        torch.ops.load_library(files[0])  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"{files[0].name} does not load into torch {torch.__version__} ({error}); build turboquant again beside it"
        ) from error


BACKWARD = (
    "without requires_grad (inference only: call under torch.no_grad() or detach it), got a tensor that requires grad"
)
FORWARD = "without a tangent (inference only: detach it), got a tensor of forward-mode differentiation"


# ---- fake kernels: shapes and dtypes without data, for torch.compile and torch.export ----


def _check(op: str, arguments: dict[str, Any]) -> None:
    """Makes those checks of csrc/torch/checks.h that are possible while tracing: devices and gradients."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    like, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{op}: `{name}` must be on {first.device} like `{like}`, got {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: `{name}` must be {BACKWARD}")


def _empty(like: Tensor, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(like.shape if shape is None else shape, dtype=dtype or like.dtype, device=like.device)


def _pages(a: dict[str, Any]) -> Tensor:
    batch, kv_heads, tokens, _ = a["k"].shape
    info = _core.plan_info(a["plan"])
    pages = batch * (-(-tokens // info["page_tokens"]))
    return _empty(a["k"], (pages, kv_heads, info["record_bytes"]), torch.uint8)


def _decoded(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    info, pages = _core.plan_info(a["plan"]), a["pages"]
    batch, kv_heads, tokens = a["block_table"].shape[0], pages.shape[1], a["max_tokens"]
    k, v = ((batch, kv_heads, n, info["head_dim"]) for n in (tokens, tokens if any(info["value_bits"]) else 0))
    dtype = a.get("dtype") or torch.float32
    return _empty(pages, k, dtype), _empty(pages, v, dtype)


def _recoded(a: dict[str, Any]) -> Tensor:
    pages = a["pages"]
    return _empty(pages, (*pages.shape[:2], _core.plan_info(a["target"])["record_bytes"]))


# What each operator returns, from its arguments by name.
_RESULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rotate": lambda a: _empty(a["x"]),
    "append": lambda a: None,
    "attend": lambda a: (_empty(a["q"]), _empty(a["q"], a["q"].shape[:-1], torch.float32)),
    "attend.out": lambda a: None,
    "schedule": lambda a: None,
    "append_attend": lambda a: _empty(a["q"]),
    "quantize": _pages,
    "dequantize": _decoded,
    "recode": _recoded,
    "merge": lambda a: (_empty(a["outs"], a["outs"].shape[1:]), _empty(a["lses"], a["outs"].shape[1:-1])),
}


def _operator(name: str) -> Any:
    """Returns the operator of a name such as "attend", or of a name and an overload such as "attend.out"."""
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.turboquant, name), overload or "default")


def _register(name: str, result: Callable[[dict[str, Any]], Any]) -> None:
    names = [argument.name for argument in _operator(name)._schema.arguments]

    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args)) | kwargs
        _check(name.partition(".")[0], arguments)
        return result(arguments)

    torch.library.register_fake(f"turboquant::{name}", fake)


# ---- derivatives that the kernels cannot see: tangents while grad mode is off, and gradients under a Python dispatch
# mode of torch, such as FlopCounterMode, which runs behind autograd ----


def _refuse_derivatives(operator: Any, args: tuple[Any, ...], rest: dict[str, Any]) -> None:
    schema = operator._schema
    for name, x in (dict(zip((argument.name for argument in schema.arguments), args)) | rest).items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        op = schema.name.removeprefix("turboquant::")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: `{name}` must be {BACKWARD}")
        if forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled() and _has_tangent(x):
            raise ValueError(f"{op}: `{name}` must be {FORWARD}")


def _is_hidden() -> bool:
    """Whether a derivative may be hidden from the kernels. Inside transforms of torch.func another check sees it."""
    hidden = forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0
    return hidden and torch._C._functorch.peek_interpreter_stack() is None


class _Checked(OpOverload):
    def __call__(self, /, *args: Any, **rest: Any) -> Any:
        if _is_hidden():
            _refuse_derivatives(self, args, rest)
        return self._op(*args, **rest)


class _CheckedPacket(OpOverloadPacket):
    def __call__(self, /, *args: Any, **rest: Any) -> Any:
        if _is_hidden():
            _refuse_derivatives(self.default, args, rest)
        return self._op(*args, **rest)


def _check_derivatives(name: str) -> None:
    packet = getattr(torch.ops.turboquant, name.partition(".")[0])
    packet.__class__, _operator(name).__class__ = _CheckedPacket, _Checked


# ---- torch.func: transforms wrap tensors, so that the kernels could not see what is differentiated ----

_LIBRARY = torch.library.Library("turboquant", "IMPL")  # type: ignore[no-untyped-call]  # registers as long as it lives
with torch.inference_mode(False):  # which excludes autograd, and may be where this is imported
    _EXCLUDED = torch._C._dispatch_tls_local_exclude_set()  # dispatch keys, outside transforms


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x, level=0).tangent is not None  # type: ignore[no-untyped-call]


def _refuse_transforms(name: str) -> None:
    """Registers a function that runs between a transform of torch.func and the one below it, or the kernel. Calls
    outside transforms do not run it."""
    operator, called = _operator(name), name.partition(".")[0]
    parameters = [argument.name for argument in operator._schema.arguments]

    def below(*args: Any, **rest: Any) -> Any:
        from torch._C import DispatchKey
        from torch._C._functorch import TransformType, _unwrap_for_grad, maybe_get_level
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        transform = retrieve_current_functorch_interpreter()
        kind, level = transform.key(), transform.level()

        def taken(argument: str, x: Any) -> Any:
            if kind not in (TransformType.Grad, TransformType.Jvp) or not isinstance(x, Tensor):
                return x
            if maybe_get_level(x) != level:
                return x
            if kind == TransformType.Grad and x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{called}: `{argument}` must be {BACKWARD}")
            if kind == TransformType.Jvp and _has_tangent(x):
                raise ValueError(f"{called}: `{argument}` must be {FORWARD}")
            return _unwrap_for_grad(x, level)

        args = tuple(taken(*pair) for pair in zip(parameters, args))
        rest = {argument: taken(argument, x) for argument, x in rest.items()}
        with transform.lower():
            included = torch._C._dispatch_tls_local_include_set()
            for key in (DispatchKey.FuncTorchVmapMode, DispatchKey.Functionalize):
                included = included.remove(key)
            with torch._C._ForceDispatchKeyGuard(included, _EXCLUDED):
                return operator(*args, **rest)

    _LIBRARY.impl(name, below, "FuncTorchDynamicLayerBackMode")  # type: ignore[no-untyped-call]


_load()
for _name, _result in _RESULTS.items():
    _register(_name, _result)
for _name in (*_RESULTS, "append_kernel", "attend_kernel", "attend_workspace"):
    _refuse_transforms(_name)
    _check_derivatives(_name)
