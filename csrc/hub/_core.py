"""Loads the library of this build, whose operators have a namespace of their own."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("OPERATORS_OF_THIS_BUILD.so")
torch.ops.load_library(_LIBRARY)

operators = torch.ops.OPERATORS_OF_THIS_BUILD

_plan_info = ctypes.CDLL(str(_LIBRARY)).tq_torch_plan_info
_plan_info.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64)]


def plan_info(words: Sequence[int]) -> dict[str, int]:
    """The bytes of one page of one KV head, and what `Plan` asks for. ValueError for words that are no plan."""
    info = (ctypes.c_int64 * 3)()
    if not _plan_info((ctypes.c_int64 * len(words))(*words), len(words), info):
        raise ValueError(f"`plan` must be one that turboquant.h allows, got {tuple(words)}")
    return dict(zip(("record_bytes", "is_plain", "key_moments"), info))


def record_bytes(words: Sequence[int]) -> int:
    """Bytes of one page of one KV head. ValueError for words that are no plan."""
    return plan_info(words)["record_bytes"]
