"""``torch.ops.turboquant.*``: importing this module loads the operators; they are torch's own from then on.
`turboquant.ops` has typed functions over them, for a cache in one object.

    rotate         vectors into and out of the rotated space of a plan
    append         new tokens of one layer into its cache: sinks, window and packed pages
    attend         attention of queries over that cache, straight from the packed bytes
    schedule       how a step's attention is divided among a GPU's thread blocks, once for all layers
    append_attend  both in one call: a decode step of one layer
    quantize       whole sequences into fresh pages
    dequantize     packed tokens back into floats, for debugging
    merge          partial attention results over disjoint tokens into one
    append_kernel, attend_kernel  the name of the kernel that `append` and `attend` run for the same arguments

``print(torch.ops.turboquant.attend.__doc__)`` shows an operator's documentation. Operators run on the CPU and, in a
build with CUDA, on CUDA, with one schema. Both write the same bytes (with a rotation matrix a few codes may differ:
turboquant.h, "ROUNDING"). They work under `torch.compile(fullgraph=True)`, `torch.export` and `torch.inference_mode`.
They have no gradient: a tensor that requires grad, or has a tangent, is an error while grad mode is on, and so is one
that `torch.func` differentiates. `torch.vmap` calls those that write to nothing once for each element.

Arguments that several operators share (contracts and the byte format: ``csrc/include/turboquant.h``):

    plan         the words of a `turboquant.Plan`; the first argument of every operator but `merge`.
    floats       float32, float16 or bfloat16, the same in all of one call. Their layout is [batch, heads, tokens,
                 head_dim], as in `torch.nn.functional.scaled_dot_product_attention`. k, v, q, fresh_k and fresh_v are
                 dense in the last dimension; their other strides are free (a transposed [batch, tokens, heads,
                 head_dim] is fine; on CUDA strides of q and fresh_* are multiples of 4). All other tensors are
                 contiguous, except x of `rotate` and both of `merge`.
    pages        uint8 [n_pages, kv_heads, record_bytes], zeroed when made; `Plan.record_bytes`.
    block_table  int32 [batch, max_pages]: page j of sequence b is pages[block_table[b, j]].
    sink_*       [batch, kv_heads, sinks, head_dim], the first tokens, exact. None or empty: no sinks.
    window_*     [batch, kv_heads, window, head_dim], the last tokens, exact, a ring: position p is row p % window.
                 None or empty: no window.
    transforms   float32; the vector that is coded is z = R (x - centre) / step:
                 *_rotation [head_dim, head_dim] or [kv_heads or 1, head_dim, head_dim], of plans with a dense rotation;
                 *_centre [kv_heads, head_dim];  *_steps [kv_heads, groups].
                 The rows of a sketch follow those of key_rotation; a table is passed in *_steps (turboquant.h).
                 Plans with a wave or a metric also take key_turns int32 [wave_pairs, 3] and key_moments float32
                 [kv_heads, n], which `LayerMoments.transforms` makes. On CUDA key_moments is aligned to 16 bytes, and
                 only `turboquant.ops.pack` checks the numbers in both.

Errors: TypeError for a tensor of another dtype; ValueError for anything else about an argument, such as "attend:
`block_table[3]` must be in 0..n_pages - 1, got 8"; MemoryError; RuntimeError for the machine (CUDA, an instruction
set, memory that torch could not get). They have the fields `argument` ("block_table", or None) and `got` (8.0, or None
if it was no number). A failed call has changed nothing. On CUDA the contents of tensors are not checked, because that
would mean waiting for the device: lengths are clamped, and a page index out of range reads no page. Its tokens weigh
nothing in `attend`, decode to 0 in `dequantize`, and are not stored by `append`.

Threads on a CPU: the smaller of `torch.get_num_threads()` and `turboquant._core.num_threads()`. Operators and `_core`
share one core: what `_core.set_num_threads` and `_core.set_isa` choose holds for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("turboquant.ops needs PyTorch: pip install 'turboquant-attention[torch]'") from error

from torch import Tensor

from turboquant import _core

from .findings import OLDEST


def _load() -> None:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST["torch"]:
        raise ImportError(f"turboquant.ops needs torch >= 2.10, this is {torch.__version__}: pip install -U torch")
    found = sorted(Path(__file__).parent.glob("_torch*.so"))
    if not found:
        how = "with torch installed, run: pip install --no-build-isolation --force-reinstall turboquant-attention"
        raise ImportError(f"turboquant was built without its torch operators (there is no turboquant/_torch.so); {how}")
    try:
        torch.ops.load_library(found[0])  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"{found[0].name} does not load into torch {torch.__version__} ({error}); build turboquant again beside it"
        ) from error


BACKWARD = (
    "without requires_grad (inference only: call under torch.no_grad() or detach it), got a tensor that requires grad"
)
FORWARD = "without a tangent (inference only: detach it), got a tensor of forward-mode differentiation"


# ---- fake kernels: shapes and dtypes without data, for torch.compile and torch.export; with the operators' texts ----
# rest: the keyword-only arguments; of tensors a fake kernel reads the device alone.


def _check(op: str, arguments: dict[str, Any]) -> None:
    """The checks of csrc/torch/checks.h that tracing can make: devices and gradients."""
    named = arguments | arguments.get("rest", {})
    tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
    like, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{op}: `{name}` must be on {first.device} like `{like}`, got {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: `{name}` must be {BACKWARD}")


def _rotate(plan: Sequence[int], x: Tensor, matrix: Tensor | None = None, inverse: bool = False) -> Tensor:
    """rotate(plan, x, matrix=None, inverse=False) -> Tensor

    ``R x`` (or ``R^T x`` if `inverse`) for every row of x, in float32, returned in x's dtype, contiguous.

    x: [..., head_dim] float32, float16 or bfloat16, any strides.
    matrix: [head_dim, head_dim] float32, for plans with a dense rotation; None: the plan's Hadamard, or none.
    """
    _check("rotate", locals())
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _append(
    plan: Sequence[int],
    k: Tensor,
    v: Tensor | None,
    lengths: Tensor,
    pages: Tensor,
    block_table: Tensor,
    **rest: object,
) -> None:
    """append(plan, k, v, lengths, pages, block_table, *, sink_k=None, sink_v=None, window_k=None, window_v=None,
    ..transforms, flag=None) -> None

    Stores new tokens of one layer, in place. The first `sinks` and last `window` positions stay exact. Other new
    tokens, and those that leave the window, are quantised into pages, each token once.

    k, v: [batch, kv_heads, tokens, head_dim], after RoPE; v is None for a plan without values.
    lengths: int32 [batch], tokens of each sequence after this append. Token i has position
    ``lengths[b] - tokens + i``; a negative position is padding and is skipped, so that left-padded batches store none.
    pages, sink_*, window_*: written. block_table: every page that is written belongs to one sequence only.
    flag: int64 [1] on CUDA, set once if k or v has a number that is not finite or above 16384 in magnitude, which is
    stored as 0 or as the limit: ``1 + position + (sequence << 32) + (v << 62)``. On the CPU that is a ValueError.
    transforms, and the rest: see `turboquant.operators`.
    """
    _check("append", locals())


def _attend(
    plan: Sequence[int],
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    **rest: object,
) -> tuple[Tensor, Tensor]:
    """attend(plan, q, pages, block_table, lengths, *, starts=None, sink_k=None, sink_v=None, window_k=None,
    window_v=None, fresh_k=None, fresh_v=None, ..transforms, softmax_scale=None, causal=True, sliding_window=0,
    softcap=0.0, schedule=None) -> (out, lse)

    Attention over sinks, packed tokens and window in one softmax; nothing is decoded to memory.

    q: [batch, query_heads, query_tokens, head_dim]; query head h reads KV head ``h // (query_heads // kv_heads)``.
    Query i stands at position ``p = lengths[b] - query_tokens + i`` and sees positions ``starts[b] .. p``; if
    `sliding_window` is not 0, only those above ``p - sliding_window``; with ``causal=False``, every stored position
    from starts on.
    lengths: int32 [batch], stored tokens, the queries' own included: append first, then attend.
    starts: int32 [batch], the first position to see; None: 0. Left padding that `append` skipped needs none.
    fresh_k, fresh_v: [batch, kv_heads, query_tokens, head_dim]. For several queries over a cache with a window: the new
    tokens, with window_* as they were *before* these were appended. None otherwise.
    softmax_scale: None: ``head_dim ** -0.5``.
    softcap: logits become ``softcap * tanh(logit / softcap)``; 0: as they are.
    schedule: int32 [rows, 4] that `schedule` wrote. [0, 4]: every sequence gets equally many thread blocks, which is up
    to 1.4 times as fast (1.8 times at head_dim 64) if all are about equally long, and slow if they are not. None: the
    call divides its work itself, with the same results as a written schedule, bit for bit. A CPU ignores it.

    out: like q, contiguous; 0 where nothing was seen.  lse: float32 [batch, query_heads, query_tokens], the natural
    logarithm of the softmax's denominator, -inf where nothing was seen.
    """
    _check("attend", locals())
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


def _schedule(
    plan: Sequence[int],
    schedule: Tensor,
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    **rest: object,
) -> None:
    """schedule(plan, schedule, q, pages, block_table, lengths, *, starts=None, sinks=0, window=0, causal=True,
    sliding_window=0) -> None

    Divides the pages of all sequences into equal pieces of work, once for the `attend` of every layer of a step. The
    device does so from `lengths`, while the host goes on; a CUDA graph may hold it. Of q, pages and block_table only
    the sizes are read. The schedule holds for layers with the same sizes, bytes of a page and numbers; a call that
    differs in a size divides its work itself. `attend` takes lengths and starts as they were when the schedule was
    made.

    schedule: int32 [rows, 4], written; rows at least ``turboquant.ops.schedule_rows(batch, device)``. On a CPU nothing
    is written.
    """
    _check("schedule", locals())


def _append_attend(
    plan: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    pages: Tensor,
    block_table: Tensor,
    **rest: object,
) -> Tensor:
    """append_attend(plan, q, k, v, lengths, pages, block_table, *, sink_k=None, sink_v=None, window_k=None,
    window_v=None, ..transforms, flag=None, softmax_scale=None, sliding_window=0, softcap=0.0,
    schedule=None) -> out

    ``append(k, v, ..)``, then ``attend(q, ..)[0]`` from the queries of the same tokens, in one call: a decode step of
    one layer. Results are the same bit for bit. For a plan with values. With several tokens over a window, `attend`
    gets k and v as fresh_k and fresh_v, and a copy of the window that the call makes before.

    q: [batch, query_heads, tokens, head_dim];  k, v: [batch, kv_heads, tokens, head_dim].
    out: like q, contiguous.
    An error whose field `stored` is true came after `append` was done; any other has changed nothing.
    """
    _check("append_attend", locals())
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _quantize(
    plan: Sequence[int],
    k: Tensor,
    v: Tensor | None,
    **rest: object,
) -> Tensor:
    """quantize(plan, k, v, *, ..transforms) -> pages

    Whole sequences, every token packed: k, v [batch, kv_heads, tokens, head_dim] into uint8 pages
    [batch * n, kv_heads, record_bytes], ``n = ceil(tokens / page_tokens)``, sequence b in pages b * n to b * n + n - 1:
    what `append` writes with ``block_table = torch.arange(batch * n, dtype=torch.int32).view(batch, n)``.
    v is None for a plan without values. On CUDA it waits for the device; `append` does not.
    """
    _check("quantize", locals())
    batch, kv_heads, tokens, _ = k.shape
    info = _core.plan_info(plan)
    pages = batch * (-(-tokens // info["page_tokens"]))
    return torch.empty((pages, kv_heads, info["record_bytes"]), dtype=torch.uint8, device=k.device)


def _dequantize(
    plan: Sequence[int],
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_tokens: int,
    **rest: object,
) -> tuple[Tensor, Tensor]:
    """dequantize(plan, pages, block_table, lengths, max_tokens, *, ..transforms, sinks=0) -> (k, v)

    The first ``lengths[b]`` packed tokens of each sequence as float32 [batch, kv_heads, max_tokens, head_dim], zeros
    behind them; v is [batch, kv_heads, 0, head_dim] for a plan without values. `attend` needs none of it.
    lengths: int32 [batch], at most max_tokens, which is at most ``max_pages * page_tokens``.
    sinks: the position of the first packed token, for a wave.
    """
    info = _core.plan_info(plan)
    has_values = any(info["value_bits"])
    shape = (block_table.shape[0], pages.shape[1], max_tokens, info["head_dim"])
    k = torch.empty(shape, dtype=torch.float32, device=pages.device)
    return k, torch.empty(shape if has_values else (*shape[:2], 0, shape[3]), dtype=torch.float32, device=pages.device)


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """merge(outs, lses) -> (out, lse)

    One result from partial ones over disjoint tokens: ``lse = log(sum_i exp(lses[i]))``,
    ``out = sum_i exp(lses[i] - lse) * outs[i]``, in float32.

    outs: [parts, ..., head_dim] float32, float16 or bfloat16;  lses: [parts, ...] float32; any strides.
    out: [..., head_dim] in the dtype of outs;  lse: [...] float32.
    """
    _check("merge", locals())
    lse = torch.empty(outs.shape[1:-1], dtype=torch.float32, device=outs.device)
    return torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device), lse


KERNEL_TEXT = """{0}_kernel(the arguments of {0}) -> str

The name of the kernel that ``{0}`` would run for these arguments on their device; nothing runs. On a GPU it depends on
the plan, the sizes, dtypes and alignment, not on what the tensors hold; "" where there is nothing to do.
csrc/cuda/README.md lists the names of CUDA kernels. It cannot be traced.
"""


def _register() -> None:
    for name in ("append", "attend"):
        getattr(torch.ops.turboquant, f"{name}_kernel").__doc__ = KERNEL_TEXT.format(name)
        _refuse_transforms(f"{name}_kernel")
    for kernel in (_rotate, _append, _attend, _schedule, _append_attend, _quantize, _dequantize, _merge):
        name = kernel.__name__[1:]
        torch.library.register_fake(f"turboquant::{name}", kernel)
        getattr(torch.ops.turboquant, name).__doc__ = kernel.__doc__
        _refuse_transforms(name)


# ---- torch.func: transforms wrap tensors, so that the kernels could not see what is differentiated ----

_LIBRARY = torch.library.Library("turboquant", "IMPL")  # type: ignore[no-untyped-call]  # holds for as long as it lives
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()  # dispatch keys, outside transforms


def _has_tangent(x: Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None  # type: ignore[no-untyped-call]


def _refuse_transforms(name: str) -> None:
    """Registers what runs between a transform of torch.func and the one below it, or the kernel. Outside transforms
    operators do not meet it."""
    operator = getattr(torch.ops.turboquant, name).default
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
                raise ValueError(f"{name}: `{argument}` must be {BACKWARD}")
            if kind == TransformType.Jvp and _has_tangent(x):
                raise ValueError(f"{name}: `{argument}` must be {FORWARD}")
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
_register()
