"""``turboquant info --kernels``: which kernels run for a shape, on this machine's GPU or CPU or on a named GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..tables import table
from .findings import library

if TYPE_CHECKING:
    import torch

    from ..plan import Plan

__all__ = ["print_kernels"]

SHAPES = ("1,8,4,8192,128", "16,8,4,32768,128", "64,8,4,4096,128", "1,8,4,8192,64")
PROMPT_TOKENS = 128  # enough tokens for the kernel of prompts


def print_kernels(shapes: Sequence[str], device_name: str, gpu: str | None = None, moments: bool = False) -> int:
    """Prints for each shape, or for usual ones, at 4, 3 and 2 bits which kernels run for a decoding step and for a
    prompt. gpu: a name in csrc/cuda/attend/choose/gpus.h, in place of the device. moments: whether plans have a wave
    and a metric."""
    import torch

    from ..plan import Plan

    shapes = shapes or SHAPES
    sizes, device = [_sizes(shape) for shape in shapes], torch.device(device_name)
    here = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rows = [("shape", "bits", "attention of a step", "a token appended", "a prompt appended")]
    for shape, (batch, kv_heads, heads_per_kv, tokens, head_dim) in zip(shapes, sizes, strict=True):
        for bits in (4, 3, 2):
            plan = Plan(head_dim, bits, bits)
            if moments:
                plan = Plan(head_dim, bits, bits, wave_pairs=head_dim // 16 * 8, metric=4)
            if gpu:
                rows.append((shape, str(bits), *_kernels_on(gpu, batch, kv_heads, heads_per_kv, tokens, plan)))
            else:
                rows.append((shape, str(bits), *_kernels(batch, kv_heads, heads_per_kv, tokens, plan, device)))
    print(f"{gpu or here}, bfloat16, sequences of equal length, no exact tokens")
    print(table(rows, left=(0, 2, 3, 4)))
    return 0


def _sizes(shape: str) -> list[int]:
    numbers = shape.split(",")
    if len(numbers) != 5 or not all(number.isdecimal() and 0 < int(number) < 1 << 31 for number in numbers):
        raise ValueError(
            f"--kernels must be batch,kv_heads,heads_per_kv,tokens,head_dim, whole and positive, got {shape!r}"
        )
    return [int(number) for number in numbers]


def _kernels_on(
    gpu: str, batch: int, kv_heads: int, heads_per_kv: int, tokens: int, plan: Plan
) -> tuple[str, str, str]:
    """Returns what `_kernels` returns, for a GPU that this machine need not have."""
    if not (built := library()):
        raise NotImplementedError("--gpu needs the torch operators, which were not built")
    words, names = plan.words, ctypes.create_string_buffer(3 * 64)
    sizes = (ctypes.c_int32 * 5)(batch, kv_heads, heads_per_kv, tokens, min(tokens, PROMPT_TOKENS))
    ask = ctypes.CDLL(str(built)).tq_torch_kernels_on
    ask.restype = ctypes.c_char_p
    words_array = (ctypes.c_int64 * len(words))(*words)
    wrong: bytes = ask(gpu.encode(), words_array, ctypes.c_size_t(len(words)), sizes, names)
    if wrong:
        raise ValueError(f"--gpu {gpu}: {wrong.decode()}")
    attend, token, prompt = (names.raw[i : i + 64].split(b"\0")[0].decode() for i in (0, 64, 128))
    return attend, token, prompt


def _kernels(
    batch: int, kv_heads: int, heads_per_kv: int, tokens: int, plan: Plan, device: torch.device
) -> tuple[str, str, str]:
    """Returns the names of the kernels for attention, one appended token and an appended prompt. They depend on sizes
    alone, so all entries of the block table can be the same page."""
    import torch

    from .. import ops

    def vectors(heads: int, tokens: int) -> torch.Tensor:
        one = torch.empty(1, 1, tokens, plan.head_dim, dtype=torch.bfloat16, device=device)
        return one.expand(batch, heads, -1, -1)

    pages = torch.zeros((1, kv_heads, plan.record_bytes), dtype=torch.uint8, device=device)
    table = torch.zeros((batch, -(-tokens // plan.page_tokens)), dtype=torch.int32, device=device)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    equal = ops.Schedule(torch.empty((0, 4), dtype=torch.int32, device=device))
    transforms = {}
    if plan.metric is not None:
        numbers = 2 * plan.wave_pairs + (1 + plan.metric) * plan.head_dim + 4
        transforms["key_turns"] = torch.zeros((plan.wave_pairs, 3), dtype=torch.int32, device=device)
        transforms["key_numbers"] = torch.zeros((kv_heads, numbers), device=device)
    packed = ops.PackedKV(pages, table, lengths, plan, tokens, transforms)
    attend = ops.attend_kernel(vectors(kv_heads * heads_per_kv, 1), packed, schedule=equal)
    new = (vectors(kv_heads, count) for count in (1, min(tokens, PROMPT_TOKENS)))
    append = torch.ops.turboquant.append_kernel
    token, prompt = (append(plan.words, x, x, lengths, pages, table, **transforms) for x in new)
    return attend, token, prompt
