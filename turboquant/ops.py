"""Typed functions over the registered operators: attention over a packed KV cache in plain tensors.

    packed = ops.pack(k, v, bits=4, sinks=4, window=128)   # quantise whole sequences
    out = ops.attend(q, packed)                            # attention straight from the packed bytes
    out, lse = ops.attend(q, packed, return_lse=True)

    pack           whole sequences into a `PackedKV`
    append         new tokens into a `PackedKV`, in place
    attend         attention of queries over it
    append_attend  both in one call: a decoding step of one layer
    schedule       how a step's attention is divided among a GPU's thread blocks, once for all layers of a plan
    attend_kernel  the name of the kernel that `attend` runs
    dequantize     the tokens of a `PackedKV` back into floats, for debugging
    quantize       whole sequences into pages alone
    transforms     rotations, centres, steps, wave and metric of a layer, as `pack` takes them
    recode         pages into fewer bits
    rotate         vectors into and out of the rotated space of a plan
    merge          partial attention results over disjoint tokens into one

Importing this module also registers the operators themselves, ``torch.ops.turboquant.*``, which take every tensor as a
separate argument. `turboquant.operators` describes their arguments, devices, errors and threads; all of that holds here
too. Tensors are [batch, heads, tokens, head_dim], as in `torch.nn.functional.scaled_dot_product_attention`, in float32,
float16 or bfloat16. All functions are for inference: a tensor that requires grad is an error while grad mode is on. All
but `pack` can be traced by ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from threading import get_ident
from typing import Any, Literal, overload

from . import _core, operators  # noqa: F401  registers torch.ops.turboquant, or says why it cannot

# isort: split
import torch
from torch import Tensor

from .arguments import BOUNDS, quoted
from .operator_docs import describe
from .plan import Plan
from .transforms import Transforms
from .transforms import transforms as joined

__all__ = ["PackedKV", "Schedule", "append", "append_attend", "attend", "attend_kernel", "dequantize", "merge",
           "pack", "quantize", "recode", "rotate", "schedule", "transforms"]  # fmt: skip

_append = torch.ops.turboquant.append.default
_attend = torch.ops.turboquant.attend.default
_attend_kernel = torch.ops.turboquant.attend_kernel.default
_schedule = torch.ops.turboquant.schedule.default
_append_attend = torch.ops.turboquant.append_attend.default
_dequantize = torch.ops.turboquant.dequantize.default
_merge = torch.ops.turboquant.merge.default
_quantize = torch.ops.turboquant.quantize.default
_recode = torch.ops.turboquant.recode.default
_rotate = torch.ops.turboquant.rotate.default


@dataclass(frozen=True, eq=False)
class Schedule:
    """How the work of a step is shared among a GPU's thread blocks; `schedule` makes one.

    table: int32 [rows, 4] on the device, at the same address as long as the schedule lives. [0, 4] means equally many
        thread blocks for each sequence.
    """

    table: Tensor


@dataclass(eq=False, repr=False)
class PackedKV:
    """The keys and values of one layer, [ sinks | packed pages | window ]: what `attend` reads and `append` writes.
    `pack` makes one.

    pages: uint8 [n_pages, kv_heads, record_bytes], zeroed before the first token.
    block_table: int32 [batch, max_pages]; page j of sequence b is ``pages[block_table[b, j]]``.
    lengths: int32 [batch], stored tokens of each sequence, sinks and window included. `append` writes to it.
    plan: how the pages store them, a `turboquant.Plan`.
    tokens: the largest number in `lengths` or more, known without asking the device; ``len(packed)``.
    transforms: what `transforms` makes: by name, those tensors among key_numbers, value_numbers, key_turns and rotation
        that the plan takes.
    sink_k, sink_v: [batch, kv_heads, sinks, head_dim], the first tokens, exact. None: no sinks.
    window_k, window_v: [batch, kv_heads, window, head_dim], the last tokens, exact, a ring: position p is row
        ``p % window``. None: no window.

    All tensors are on one device. The constructor copies nothing and checks no tensor; each call checks what it gets.
    Any number of threads may read a `PackedKV` at the same time. While a thread appends, no other may use it: a second
    append at the same time is a RuntimeError, and changes nothing.
    """

    pages: Tensor
    block_table: Tensor
    lengths: Tensor
    plan: Plan
    tokens: int
    transforms: dict[str, Tensor] = field(default_factory=dict)
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None
    window_k: Tensor | None = None
    window_v: Tensor | None = None

    @property
    def sinks(self) -> int:
        """How many sinks there are."""
        return 0 if self.sink_k is None else self.sink_k.shape[2]

    @property
    def window(self) -> int:
        """How many tokens the window has."""
        return 0 if self.window_k is None else self.window_k.shape[2]

    @property
    def capacity(self) -> int:
        """How many tokens of one sequence there is room for: sinks, pages of the block table, and window."""
        return self.sinks + self.block_table.shape[1] * self.plan.page_tokens + self.window

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors: pages, block table, lengths, sinks, window and transforms."""
        return sum(t.nbytes for t in (self.pages, self.block_table, self.lengths, *self.arguments().values()))

    def arguments(self) -> dict[str, Tensor]:
        """Sinks, window and transforms as keyword arguments of the operators `append`, `attend` and `append_attend`."""
        return {**self.exact(), **self.transforms}

    def exact(self) -> dict[str, Tensor]:
        """Those of sink_k, sink_v, window_k and window_v that are not None."""
        tensors = {"sink_k": self.sink_k, "sink_v": self.sink_v, "window_k": self.window_k, "window_v": self.window_v}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return self.tokens

    def __repr__(self) -> str:
        key, value = _width(self.plan.key_bits), _width(self.plan.value_bits)
        return (
            f"PackedKV(batch={self.block_table.shape[0]}, kv_heads={self.pages.shape[1]}, tokens={self.tokens}, "
            f"capacity={self.capacity}, sinks={self.sinks}, window={self.window}, head_dim={self.plan.head_dim}, "
            f"key_bits={key}, value_bits={value}, nbytes={self.nbytes}, device={str(self.pages.device)!r})"
        )


def _width(bits: tuple[int, ...]) -> str:
    """Returns bits as text: "4", or "(2, 4)" for groups of different widths."""
    return str(bits[0]) if len(set(bits)) == 1 else str(bits)


def _check(op: str, packed: object = None, **tensors: object) -> None:
    """Raises TypeError for arguments that are no tensor or no PackedKV. The operators check the rest."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: `{name}` must be a tensor, got {type(value).__name__}")
    if packed is not None:
        if not isinstance(packed, PackedKV):
            raise TypeError(f"{op}: `packed` must be a PackedKV, as `pack` returns it, got {type(packed).__name__}")
        for name in ("pages", "block_table", "lengths"):
            if not isinstance(tensor := getattr(packed, name), Tensor):
                raise TypeError(f"{op}: `packed.{name}` must be a tensor, got {type(tensor).__name__}")
        for name in ("sink_k", "sink_v", "window_k", "window_v"):
            if not isinstance(tensor := getattr(packed, name), (Tensor, type(None))):
                raise TypeError(f"{op}: `packed.{name}` must be a tensor or None, got {type(tensor).__name__}")
        if not isinstance(packed.transforms, dict):
            raise TypeError(f"{op}: `packed.transforms` must be a dict, got {type(packed.transforms).__name__}")
        _check_plan(op, packed.plan)
        _check_sizes(op, packed, tensors)


def _check_sizes(op: str, packed: PackedKV, tensors: dict[str, Any]) -> None:
    """Raises ValueError if queries or keys have another number of sequences or KV heads than `packed`. The operators'
    errors would name the block table or the pages, which the caller did not pass. They check everything else."""
    for name, at, tensor, what in (
        ("q", 0, packed.block_table, "sequences"),
        ("k", 0, packed.block_table, "sequences"),
        ("k", 1, packed.pages, "KV heads"),
    ):
        argument = tensors.get(name)
        if argument is None or argument.dim() != 4 or tensor.dim() <= at:
            continue
        if argument.shape[at] != tensor.shape[at]:
            raise ValueError(
                f"{op}: `{name}` must be of {tensor.shape[at]} {what}, as `packed` is, got {tuple(argument.shape)}"
            )
    heads = packed.pages.shape[1] if packed.pages.dim() > 1 else 0
    argument = tensors.get("q")
    if argument is not None and argument.dim() == 4 and heads and argument.shape[1] % heads:
        raise ValueError(
            f"{op}: `q` must be of a multiple of {heads} heads, the KV heads of `packed`, got {argument.shape[1]} heads"
        )


# Options that are not tensors: their types, and the words of errors for these.
_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "causal": ((bool,), "True or False"),
    "inverse": ((bool,), "True or False"),
    "return_lse": ((bool,), "True or False"),
    "dtype": ((torch.dtype,), "a torch.dtype"),
    "max_tokens": ((Integral,), "an integer"),
    "sinks": ((Integral,), "an integer"),
    "window": ((Integral,), "an integer"),
    "sliding_window": ((Integral,), "an integer"),
    "softcap": ((Real,), "a number"),
    "softmax_scale": ((Real, type(None)), "a number or None"),
    "schedule": ((Schedule, type(None)), "a Schedule or None"),
    "out": ((Schedule, type(None)), "a Schedule or None"),
}


def _checked(op: str, **options: object) -> dict[str, Any]:
    """Returns the options as an operator takes them. TypeError, which names the option, for one of a wrong type, and
    ValueError for an integer out of its bounds. The operators check other values."""
    for name, value in options.items():
        types, wanted = _OPTIONS.get(name, ((Tensor, type(None)), "a tensor or None"))
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError(f"{op}: `{name}` must be {wanted}, got {type(value).__name__}")
        low, high = BOUNDS.get(f"{op}: `{name}`", (value, value))
        if isinstance(value, Integral) and not low <= value <= high:  # type: ignore[operator]
            raise ValueError(f"{op}: `{name}` must be in {low}..{high}, got {value}")
    schedule = options.get("schedule")
    return options | {"schedule": schedule.table} if isinstance(schedule, Schedule) else options


def _check_plan(op: str, plan: object, name: str = "plan") -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"{op}: `{name}` must be a turboquant.Plan, got {quoted(plan)}")


def _given(op: str, transforms: object) -> dict[str, Tensor]:
    """Checks the argument `transforms` and returns a copy, empty for None."""
    if not isinstance(transforms, dict | None):
        raise TypeError(f"{op}: `transforms` must be a dict or None, got {type(transforms).__name__}")
    for name, x in (transforms or {}).items():
        if name not in Transforms.__annotations__:
            raise TypeError(f"{op}: `transforms` must be what ops.transforms makes, got {name!r} in it")
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: `transforms[{name!r}]` must be a tensor, got {type(x).__name__}")
    return dict(transforms or {})


def transforms(**parts: Tensor | None) -> dict[str, Tensor]:
    """The transforms of a layer's vectors as `pack`, `quantize` and the operators take them: those of key_numbers,
    value_numbers, key_turns and rotation that are needed. The vector that is coded is z = R (x - centre) / step.

    key_rotation, value_rotation: float32 [rows, head_dim] or [kv_heads or 1, rows, head_dim]: R of plans with a dense
        rotation, [head_dim, head_dim]; the rows of a sketch follow it.
    key_centre, value_centre: float32 [kv_heads, head_dim].
    key_steps, value_steps: float32 [kv_heads, groups], or a plan's table of levels.
    key_turns, key_moments: int32 [wave_pairs, 3] and float32 [kv_heads, n]: the wave and the metric, from
        `LayerMoments.transforms`.

    The result is on the device of the arguments. CUDA waits for it.
    """
    tensors = {name: x for name, x in parts.items() if x is not None}
    _check("transforms", **tensors)
    device = next((x.device for x in tensors.values()), None)
    arrays = joined(**{name: x.detach().cpu().numpy() for name, x in tensors.items()})
    return {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}


def _check_shape(op: str, k: Tensor) -> None:
    if k.dim() != 4:
        raise ValueError(f"{op}: `k` must be [batch, kv_heads, tokens, head_dim], got {tuple(k.shape)}")


def _after(op: str, packed: PackedKV, k: Tensor) -> tuple[int, Tensor]:
    """Returns the length of the longest sequence and all lengths once the tokens of k are stored. ValueError if the
    block table is too small for them: on CUDA the operator cannot see that and would drop tokens. ValueError also if
    PyTorch would refuse to write the lengths, because that would only show after the tokens are stored."""
    _check_shape(op, k)
    lengths = packed.lengths
    if not lengths.is_contiguous():
        raise ValueError(f"{op}: `packed.lengths` must be contiguous, got strides {lengths.stride()}")
    if not torch.compiler.is_compiling() and lengths.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{op}: `packed.lengths` must not be of inference mode outside it, got an inference tensor")
    tokens = packed.tokens + k.shape[2]
    if tokens > packed.capacity:
        raise ValueError(
            f"{op}: `packed` must have room for {tokens} tokens (pack with max_tokens), got one for {packed.capacity}"
        )
    return tokens, lengths + k.shape[2]


def _begin(op: str, packed: PackedKV) -> dict[str, Any]:
    """Notes this thread as the writer. RuntimeError while another thread appends: operators release the GIL, so both
    would store to the same places. Returns the dict from which the caller removes "_writer" at the end."""
    if torch.compiler.is_compiling():
        return {}
    fields, thread = packed.__dict__, get_ident()
    if fields.setdefault("_writer", thread) != thread:
        raise RuntimeError(f"{op}: another thread appends to `packed`: let one thread at a time append, or take a lock")
    return fields


def pack(
    k: Tensor,
    v: Tensor | None,
    plan: Plan | None = None,
    *,
    bits: int | None = None,
    max_tokens: int = 0,
    sinks: int = 0,
    window: int = 0,
    transforms: dict[str, Tensor] | None = None,
) -> PackedKV:
    """Packs whole sequences: their first `sinks` and last `window` tokens stay exact, all others are quantised.

    k, v: [batch, kv_heads, tokens, head_dim], keys after RoPE; v is None for a plan without values.
    plan: how the pages store them; or
    bits: instead of a plan, bits of each channel of keys and values, 1 to 6 or 8, with a Hadamard rotation.
    max_tokens: make room for at least this many tokens of each sequence, those of k included, for `append`.
    sinks, window: how many of the first and of the last tokens stay exact, also of those that `append` adds.
    transforms: what `transforms` makes; the `PackedKV` keeps it. None: the plan's own rotation alone.

    Raises TypeError unless exactly one of plan and bits is given, ValueError for numbers that are not finite or above
    16384 in magnitude (on CUDA they are stored as 0 or as the limit), and what `torch.ops.turboquant.append` raises.
    """
    _check("pack", k=k)
    _check_shape("pack", k)
    if (plan is None) == (bits is None):
        raise TypeError(f"pack: `plan` must be given, or else `bits`, got {'neither' if plan is None else 'both'}")
    if plan is None:
        assert bits is not None
        try:
            plan = Plan(k.shape[3], bits, None if v is None else bits)
        except (TypeError, ValueError) as error:
            raise type(error)("pack: " + str(error).replace("`key_bits", "`bits")) from None
    _check_plan("pack", plan)
    shared = _given("pack", transforms)
    sizes = {"max_tokens": max_tokens, "sinks": sinks, "window": window}
    _checked("pack", v=v, **sizes)
    _check_transforms(plan, k, v, shared)
    batch, kv_heads, tokens, _ = k.shape
    n_pages = -(-max(0, max(tokens, max_tokens) - sinks - window) // plan.page_tokens)
    with torch.inference_mode(False):  # so that `append` can also write to it outside inference mode
        exact = {
            f"{part}_{side}": torch.zeros((batch, kv_heads, rows, k.shape[3]), dtype=k.dtype, device=k.device)
            for part, rows in (("sink", sinks), ("window", window))
            for side, x in (("k", k), ("v", v))
            if rows and x is not None
        }
        packed = PackedKV(
            pages=torch.zeros((batch * n_pages, kv_heads, plan.record_bytes), dtype=torch.uint8, device=k.device),
            block_table=torch.arange(batch * n_pages, dtype=torch.int32, device=k.device).view(batch, n_pages),
            lengths=torch.full((batch,), tokens, dtype=torch.int32, device=k.device),
            plan=plan,
            tokens=tokens,
            transforms=shared,
            **exact,
        )
    try:
        _append(plan.words, k, v, packed.lengths, packed.pages, packed.block_table, **packed.arguments())
    except (TypeError, ValueError) as error:  # the operator names itself, but the arguments are those of `pack`
        raise type(error)(str(error).replace("append: ", "pack: ", 1)) from None
    return packed


def _check_transforms(plan: Plan, k: Tensor, v: Tensor | None, transforms: dict[str, Tensor]) -> None:
    """Checks the numbers of transforms once. Operators do not check matrices, which may be large, and on CUDA they
    check no numbers, because they would have to wait for the device."""
    numbers = transforms.get("key_numbers")
    if plan.key_moments and numbers is not None:
        none = torch.empty((0, k.shape[1], 1, k.shape[3]))
        on_cpu = {name: x.cpu() for name, x in transforms.items()}
        _quantize(plan.words, none, None if v is None else none, **on_cpu)
    for name, x in transforms.items():
        if x.is_floating_point() and not x.isfinite().all():
            bad = x[~x.isfinite()][0].item()
            raise ValueError(f"pack: `transforms[{name!r}]` must have finite numbers only, got {bad}")


def append(packed: PackedKV, k: Tensor, v: Tensor | None, *, flag: Tensor | None = None) -> None:
    """Stores new tokens of one layer behind those of each sequence, in place. The first `sinks` and the last `window`
    positions stay exact. Other new tokens, and those that leave the window, are quantised into pages, each token once.
    Every page that is written must belong to one sequence only.

    k, v: [batch, kv_heads, tokens, head_dim], keys after RoPE; v is None for a plan without values.
    flag: int64 [1] on CUDA, set once to ``1 + position + (sequence << 32) + (v << 62)`` if k or v has a number that is
        not finite or above 16384 in magnitude, which is stored as 0 or as the limit. On the CPU that is a ValueError.

    Raises ValueError if ``len(packed) + tokens`` is above ``packed.capacity``, RuntimeError while another thread
    appends to it. A failed call has changed nothing.
    """
    _check("append", packed, k=k)
    _checked("append", v=v, flag=flag)
    fields = _begin("append", packed)
    try:
        tokens, lengths = _after("append", packed, k)
        _append(packed.plan.words, k, v, lengths, packed.pages, packed.block_table, flag=flag, **packed.arguments())
        packed.lengths.copy_(lengths)
        packed.tokens = tokens
    finally:
        fields.pop("_writer", None)


@overload
def attend(
    q: Tensor,
    packed: PackedKV,
    *,
    starts: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    schedule: Schedule | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    packed: PackedKV,
    *,
    starts: Tensor | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    schedule: Schedule | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    packed: PackedKV,
    *,
    starts: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    softcap: float = 0.0,
    schedule: Schedule | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sinks, packed tokens and window in one softmax; nothing is decoded to memory.

    q: [batch, query_heads, query_tokens, head_dim]; query head h reads KV head ``h // (query_heads // kv_heads)``.
        The queries are those of the last query_tokens tokens of each sequence: append first, then attend.
    starts: int32 [batch], the first position to see; None: 0. Left padding that `append` skipped needs no starts.
    softmax_scale: None: ``head_dim ** -0.5``.
    causal: query i sees no token after its own; False: all queries see every token from starts on.
    sliding_window: a query at position p sees only positions above ``p - sliding_window``; 0: all. Causal only.
    softcap: logits become ``softcap * tanh(logit / softcap)``; 0: they stay as they are.
    schedule: from `schedule`, for the lengths of this step; None: the call divides its work itself, for any lengths.
    return_lse: return ``(out, lse)``, as `merge` needs it; False: out alone.

    Returns out, like q and contiguous, 0 where nothing was seen, and lse, float32 [batch, query_heads, query_tokens],
    the natural logarithm of the softmax's denominator, -inf where nothing was seen.
    """
    _check("attend", packed, q=q)
    options = _checked(
        "attend",
        starts=starts,
        softmax_scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        schedule=schedule,
    )
    _checked("attend", return_lse=return_lse)
    out, lse = _attend(
        packed.plan.words, q, packed.pages, packed.block_table, packed.lengths, **options, **packed.arguments()
    )
    return (out, lse) if return_lse else out


def about_equal(shortest: int, longest: int) -> bool:
    """Whether sequences of these lengths are about equally long, so that a `schedule` gives each equally many thread
    blocks."""
    return 8 * (longest - shortest) <= longest


def schedule_rows(batch: int, device: torch.device) -> int:
    """Returns how many rows a schedule's table has: a header, one for each team of warps, and one for each sequence."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    return _core.SCHEDULE_ROWS * processors + batch


def schedule(
    q: Tensor,
    packed: PackedKV,
    *,
    lengths: Sequence[int] | None = None,
    starts: Tensor | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    out: Schedule | None = None,
) -> Schedule:
    """Divides a step's attention among a GPU's thread blocks, once for all layers of a plan. Call it when
    ``packed.lengths`` are those of the step, and pass the result to every `attend` of these layers. The host does not
    wait for the device.

    q, packed: those of one layer. The schedule serves all layers with the same sizes and plan; a call that differs
        divides its work itself, slowly if it gives each sequence and head one thread block.
    lengths: those in ``packed.lengths``, if the host knows them. If they are about equal (the shortest is at least 7/8
        of the longest), each sequence gets equally many thread blocks, which is faster. Otherwise the device divides
        the work by the lengths; results are the same bit for bit as without a schedule.
    starts, causal, sliding_window: as in the calls of `attend`.
    out: a schedule of an earlier step with as many sequences, to overwrite and return, so that a CUDA graph with
        `schedule` and `attend` can be replayed. It is written for about equal lengths too. One with an empty table,
        which is for about equal lengths alone, cannot be overwritten and counts as None. None: a new one.

    `attend` uses lengths and starts as they were when the schedule was made. A CPU ignores schedules.
    """
    _check("schedule", packed, q=q)
    options = _checked("schedule", starts=starts, causal=causal, sliding_window=sliding_window)
    _checked("schedule", out=out)
    if lengths is not None:
        if not isinstance(lengths, Sequence) or not all(isinstance(n, Integral) for n in lengths):
            raise TypeError(f"schedule: `lengths` must be a list of integers, got {quoted(lengths)}")
        if len(lengths) != q.shape[0]:
            raise ValueError(f"schedule: `lengths` must have one for each of {q.shape[0]} sequences, got {lengths!r}")
    if out is None or not len(out.table):
        equal = lengths is not None and about_equal(min(lengths, default=0), max(lengths, default=0))
        rows = 0 if equal else schedule_rows(q.shape[0], q.device)
        out = Schedule(torch.zeros((rows, 4), dtype=torch.int32, device=q.device))
        if equal:
            return out
    _schedule(
        packed.plan.words,
        out.table,
        q,
        packed.pages,
        packed.block_table,
        packed.lengths,
        sinks=packed.sinks,
        window=packed.window,
        **options,
    )
    return out


def attend_kernel(
    q: Tensor, packed: PackedKV, *, causal: bool = True, sliding_window: int = 0, schedule: Schedule | None = None
) -> str:
    """The name of the kernel that `attend` would run for these arguments on their device; nothing runs.

    For example "attend_fused_3bit_d128_4x64" on an H200, or "attend_avx2" on a CPU. csrc/cuda/README.md lists the names
    of CUDA kernels.
    """
    _check("attend_kernel", packed, q=q)
    options = _checked("attend_kernel", causal=causal, sliding_window=sliding_window, schedule=schedule)
    name: str = _attend_kernel(
        packed.plan.words, q, packed.pages, packed.block_table, packed.lengths, **options, **packed.arguments()
    )
    return name


@overload
def append_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedKV,
    *,
    softmax_scale: float | None = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    schedule: Schedule | None = ...,
    flag: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def append_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedKV,
    *,
    softmax_scale: float | None = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    schedule: Schedule | None = ...,
    flag: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def append_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedKV,
    *,
    softmax_scale: float | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    schedule: Schedule | None = None,
    flag: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`append`, then `attend` from the queries of the same tokens, in one call: a decoding step of one layer. Results
    are the same bit for bit. With several tokens over a window, which `attend` alone refuses, each query still sees the
    window exact. For a plan with values. An error whose field `stored` is true came after the tokens were stored:
    `packed` has them, and `attend` is what is left to do. Any other has changed nothing.

    q: [batch, query_heads, tokens, head_dim].
    k, v: [batch, kv_heads, tokens, head_dim].
    The other arguments are as in `append` and `attend`.
    Returns out, like q and contiguous; with return_lse ``(out, lse)``, as `attend` does.
    """
    _check("append_attend", packed, q=q, k=k, v=v)
    options = _checked(
        "append_attend",
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        schedule=schedule,
        flag=flag,
    )
    _checked("append_attend", return_lse=return_lse)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    fields = _begin("append_attend", packed)
    try:
        tokens, lengths = _after("append_attend", packed, k)
        at = lengths, packed.pages, packed.block_table
        out: Tensor = _append_attend(packed.plan.words, q, k, v, *at, lse=lse, **options, **packed.arguments())
        packed.lengths.copy_(lengths)
        packed.tokens = tokens
    except Exception as error:
        if getattr(error, "stored", False):
            packed.lengths.copy_(lengths)
            packed.tokens = tokens
        raise
    finally:
        fields.pop("_writer", None)
    return out if lse is None else (out, lse)


def dequantize(packed: PackedKV, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All tokens as floats, in order, for debugging: `attend` does not need it.

    dtype: of the result, float32, float16 or bfloat16. On CUDA the last two are several times as fast, and as exact as
        products of fp16 are (turboquant_cuda.h).

    Returns k, v: [batch, kv_heads, len(packed), head_dim], zeros behind the tokens of shorter sequences; v has no
    tokens for a plan without values.
    """
    _check("dequantize", packed)
    _checked("dequantize", dtype=dtype)
    sinks, window, lengths = packed.sinks, packed.window, packed.lengths
    most = max(0, packed.tokens - sinks - window)
    counts = (lengths - sinks - window).clamp_(min=0)
    k, v = _dequantize(
        packed.plan.words, packed.pages, packed.block_table, counts, most, sinks=sinks, dtype=dtype, **packed.transforms
    )
    if not sinks and not window:
        return k, v
    position, length = torch.arange(packed.tokens, device=lengths.device), lengths.view(-1, 1)
    recent = torch.where(position < length - window, window + position, sinks + position % max(window, 1))
    row, hidden = torch.where(position < sinks, position, recent), position >= length

    def ordered(*parts: Tensor | None) -> Tensor:
        """Joins sinks, window and packed tokens in the order of tokens."""
        exact = torch.cat([x.to(dtype) for x in parts if x is not None], 2)
        index = row[:, None, :, None].expand(-1, exact.shape[1], -1, exact.shape[3])
        return exact.gather(2, index).masked_fill_(hidden[:, None, :, None], 0)

    k = ordered(packed.sink_k, packed.window_k, k)
    return k, ordered(packed.sink_v, packed.window_v, v) if any(packed.plan.value_bits) else v


def quantize(plan: Plan, k: Tensor, v: Tensor | None, *, transforms: dict[str, Tensor] | None = None) -> Tensor:
    """Quantises every token of whole sequences into pages alone; `pack` also makes their block table.

    k, v: [batch, kv_heads, tokens, head_dim]; v is None for a plan without values.
    Returns uint8 [batch * n, kv_heads, record_bytes], ``n = ceil(tokens / page_tokens)``; sequence b has pages b * n to
    b * n + n - 1. On CUDA it waits for the device.
    """
    _check("quantize", k=k)
    _check_plan("quantize", plan)
    shared = _given("quantize", transforms)
    _checked("quantize", v=v)
    pages: Tensor = _quantize(plan.words, k, v, **shared)
    return pages


def recode(plan: Plan, pages: Tensor, target: Plan) -> Tensor:
    """Turns pages of one plan into pages of another with fewer bits, without the vectors. Two or more old codes become
    one new code, and every token gets a new scale; nothing is decoded or rotated. The error is up to 6 % (5 bits to 4:
    up to 20 %) above that of vectors packed at these bits from the start (docs/rounding.md).

    plan: of the pages: plain, EDEN scales, groups of 32 channels, at most 512 channels. Steps count as 1.
    pages: uint8 [n_pages, kv_heads, record_bytes], contiguous.
    target: like `plan` except for `tries` and for fewer bits in some groups of channels, at least 1.
    Returns uint8 [n_pages, kv_heads, record_bytes of `target`].
    """
    _check("recode", pages=pages)
    _check_plan("recode", plan)
    _check_plan("recode", target, "target")
    recoded: Tensor = _recode(plan.words, pages, target.words)
    return recoded


def rotate(plan: Plan, x: Tensor, matrix: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """Applies the rotation R of a plan to every row of x, in float32.

    x: [..., head_dim], any strides.
    matrix: float32 [head_dim, head_dim], for plans with a dense rotation; None: the plan's Hadamard, or none.
    inverse: ``R^T x`` instead of ``R x``.

    Returns a tensor like x, contiguous.
    """
    _check("rotate", x=x)
    _checked("rotate", matrix=matrix, inverse=inverse)
    _check_plan("rotate", plan)
    y: Tensor = _rotate(plan.words, x, matrix, inverse)
    return y


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial attention results over disjoint tokens to one: ``lse = log(sum_i exp(lses[i]))``,
    ``out = sum_i exp(lses[i] - lse) * outs[i]``, in float32.

    outs: [parts, ..., head_dim], any strides.
    lses: float32 [parts, ...], any strides.
    Returns out [..., head_dim] in the dtype of outs, and lse float32 [...].
    """
    _check("merge", outs=outs, lses=lses)
    out, lse = _merge(outs, lses)
    return out, lse


describe((rotate, schedule, quantize, recode, merge, append_attend, append, attend), PackedKV)
