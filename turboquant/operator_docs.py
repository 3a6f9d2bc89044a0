"""The documentation of ``torch.ops.turboquant.*``: signatures from the schemas, texts from turboquant.ops."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["describe"]

# Operators for which turboquant.ops has no function, or one that does more.
_TEXTS = {
    "attend_workspace": """Bytes of `workspace` that `attend.out` needs for these arguments, and for any that differ
by a smaller batch or fewer tokens, queries, max_query_len or pages a sequence: for memory that is set aside before the
first batch is known. Nothing runs, and only sizes are read. q may be a view such as
``torch.empty(head_dim).expand(tokens, heads, head_dim)``. It cannot be traced.""",
    "dequantize": """The first ``lengths[b]`` packed tokens of each sequence as floats [batch, kv_heads,
max_tokens, head_dim], zeros behind them; v is [batch, kv_heads, 0, head_dim] for a plan without values.""",
    **{
        f"{name}_kernel": f"""The name of the kernel that `{name}` would run for these arguments on their device;
nothing runs. On a GPU it depends on the plan, the sizes, dtypes and alignment, not on what the tensors hold; "" where
there is nothing to do. csrc/cuda/README.md lists the names of CUDA kernels. It cannot be traced."""
        for name in ("append", "attend")
    },
}

# Arguments that functions of turboquant.ops do not have or that differ there, by name or by operator.name.
_ARGUMENTS = """
plan: the words of a `turboquant.Plan`.
schedule: int32 [rows, 4] that `schedule` wrote. [0, 4]: every sequence gets equally many thread blocks, which is up to
    1.4 times as fast (1.8 times at head_dim 64) if all are about equally long, and slow if they are not. None: the call
    divides its work itself, with the same results as a written schedule, bit for bit. A CPU ignores it.
schedule.schedule: int32 [rows, 4], written; rows at least ``turboquant.ops.schedule_rows(batch, device)``. On a CPU
    nothing is written. A CUDA graph may hold the call. Of q, pages and block_table only the sizes are read.
fresh_k, fresh_v: [batch, kv_heads, query_tokens, head_dim]. For several queries over a cache with a window: the new
    tokens, with window_* as they were *before* these were appended. None otherwise.
lengths: int32 [batch], stored tokens of each sequence, those of the queries included.
append.lengths, append_attend.lengths, append_kernel.lengths: int32 [batch], tokens of each sequence after this append.
    Token i has position ``lengths[b] - tokens + i``; a negative position is padding and is skipped, so that left-padded
    batches store none.
dequantize.lengths: int32 [batch], packed tokens of each sequence, at most max_tokens.
max_tokens: at most ``max_pages * page_tokens``.
sinks, window: how many there are.
dtype: of the result, float32 (None), float16 or bfloat16; see `turboquant.ops.dequantize`.
dequantize.sinks: the position of the first packed token, for a wave.
key_numbers, value_numbers, key_turns, rotation: the transforms that the plan takes; see `turboquant.operators`.
lse: float32 [batch, query_heads, tokens], written if given: the second result of `attend`. Of `attend.out` with any
    strides, and [tokens, query_heads] in a ragged batch.
query_start_loc: int32 [batch + 1]: the batch is ragged. q, k, v and out are [tokens, heads, head_dim], lse is
    [tokens, query_heads], and those of sequence b are rows ``query_start_loc[b]`` up to ``query_start_loc[b + 1]``,
    ascending. They are its last tokens. A sequence without any, or of length 0, is padding: block table and rows of
    the first are not read. Rows that no sequence has are not read; `attend.out` does not write them, `attend` returns
    0 (lse -inf). Not with fresh_k; with a ring in window_k at most one query a sequence.
max_query_len: the most tokens of a sequence in a ragged batch, on the host. On CUDA `attend` cuts its work as if every
    sequence had so many: single tokens beside a long chunk are faster in a call of their own.
sink_rows: int32 [batch]: exact tokens are by index ("Exact tokens by index" in turboquant.h). Every token has a place
    in the pages, and packed index is position. sink_k and sink_v are [rows, kv_heads, sinks, head_dim]; the first
    `sinks` tokens of sequence b are read from row ``sink_rows[b]`` instead of the page, and `append` writes them to
    both. -1: no row.
tail_rows: int32 [batch, 2], the same for the last tokens. window_k and window_v are [rows, kv_heads, slots,
    head_dim], slots at most page_tokens. Rows belong to pages: a token of page j of sequence b is in row
    ``tail_rows[b, j % 2]``, slot ``position % slots``. `append` writes the newest `slots` tokens of the last two
    pages. A page that is written without its row makes an old row of it stale.
window: with tail_rows, how many of a sequence's last tokens all its queries read from rows, at most slots; ``slots -
    window`` tokens may be taken back and appended again. 0 without tail_rows.
schedule.window: how many there are, or with tail_rows the window of `attend`.
ends: int32 [batch], in 0..lengths: queries see positions below alone. ``lengths`` less the sequence's queries: the
    past without the new tokens.
position_offset: int32 [batch], added to the positions of a wave alone, modulo 2^32; None: 0. Calls that read a token
    give the same as the one that stored it.
attend.out: [batch, query_heads, query_tokens, head_dim], or in a ragged batch [tokens, query_heads, head_dim], like
    q, dense in the last dimension, written; lse and workspace may be given too. On CUDA its other strides are multiples
    of 4.
workspace: uint8 of at least the bytes that `attend_workspace` returns, aligned to 256 bytes (64 on a CPU), whose
    contents are lost. None: memory of torch's allocator.
"""

_ENTRY = re.compile(r"((?:[\w.]+, )*[\w.]+): ")


def _schemas(name: str) -> list[Any]:
    """Returns the schemas of the operator and of its overloads, the default first."""
    packet = getattr(torch.ops.turboquant, name)
    return [getattr(packet, overload)._schema for overload in sorted(packet.overloads(), key=lambda x: x != "default")]


def _parts(text: str | None) -> tuple[str, dict[str, list[str]], str]:
    """Returns a docstring's text before its arguments, its lines on each argument, and its text on the result."""
    head: list[str] = []
    returned: list[str] = []
    arguments: dict[str, list[str]] = {}
    into = head
    for line in inspect.cleandoc(text or "").split("\n"):
        if entry := _ENTRY.match(line):
            into, line = [], line[entry.end() :]
            arguments |= dict.fromkeys(entry[1].split(", "), into)
        elif line.startswith("Returns "):
            into = returned
        elif into not in (head, returned) and not line.startswith(" "):
            into = []  # drops what is about neither an argument nor the result
        into.append(line)
    return "\n".join(head).strip(), arguments, "\n".join(returned).strip()


def _signature(schema: Any) -> str:
    """Returns a signature such as name(a, b, *, c=None) -> (out, lse)."""
    name = schema.name.partition("::")[2] + (f".{schema.overload_name}" if schema.overload_name else "")
    shown, starred = [], False
    for argument in schema.arguments:
        if argument.kwarg_only and not starred:
            shown.append("*")
            starred = True
        shown.append(argument.name + (f"={argument.default_value!r}" if argument.has_default_value() else ""))
    results = [result.name or str(result.type) for result in schema.returns]
    result = results[0] if len(results) == 1 else f"({', '.join(results)})" if results else "None"
    return "\n".join(textwrap.wrap(f"{name}({', '.join(shown)}) -> {result}", 120, subsequent_indent="    "))


def describe(functions: Iterable[Any], packed: type) -> None:
    """Sets the documentation of all operators from that of functions of the same names and of a class of tensors. An
    argument that a function does not explain gets the text of the last function that does."""
    parts = {function.__name__: _parts(function.__doc__) for function in functions}
    parts |= {name: _parts(text) for name, text in _TEXTS.items()}
    everywhere = _parts(packed.__doc__)[1] | _parts(_ARGUMENTS)[1]
    somewhere = {name: text for _, arguments, _ in parts.values() for name, text in arguments.items()}
    for operator, (head, own, returned) in parts.items():
        texts = somewhere | own | everywhere
        entries: dict[str, list[str]] = {}  # names by text
        schemas = _schemas(operator)
        for argument in {argument.name: argument for schema in schemas for argument in schema.arguments}.values():
            entry = texts.get(f"{operator}.{argument.name}", texts.get(argument.name, []))  # none with python -OO
            entries.setdefault("\n".join(entry), []).append(argument.name)
        listed = "\n".join(f"{', '.join(names)}: {text}" for text, names in entries.items())
        signatures = "\n".join(_signature(schema) for schema in schemas)
        text = "\n\n".join(part for part in (signatures, head, listed, returned) if part)
        getattr(torch.ops.turboquant, operator).__doc__ = text
