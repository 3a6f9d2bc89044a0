"""Loads the library of this build, whose operators have a namespace of their own."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("OPERATORS_OF_THIS_BUILD.so")
torch.ops.load_library(_LIBRARY)

operators = torch.ops.OPERATORS_OF_THIS_BUILD

_record_bytes = ctypes.CDLL(str(_LIBRARY)).tq_torch_record_bytes
_record_bytes.restype = ctypes.c_int64
_record_bytes.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t]


def record_bytes(words: Sequence[int]) -> int:
    """Bytes of one page of one KV head. ValueError for words that are no plan."""
    found = int(_record_bytes((ctypes.c_int64 * len(words))(*words), len(words)))
    if found < 0:
        raise ValueError(f"`plan` must be one that turboquant.h allows, got {tuple(words)}")
    return found
