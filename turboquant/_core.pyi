"""The C core over NumPy arrays. csrc/include/turboquant.h has the contracts; this file adds what Python needs.

Nothing is copied to make an array fit: another dtype is a TypeError; another shape, memory order or alignment, or a
read-only output, is a ValueError. Messages are such as "append: `block_table[3]` must be in 0..7, got 8"; code can read
the exception's fields `argument` ("block_table") and `got` (8.0, None if it was no number). A failed call has written
nothing. Also raises MemoryError, and RuntimeError for an instruction set that the machine does not have. The GIL is
released while the core runs; do not change an array that a call in another thread is using.

plan         any sequence of integers, the `words` of a `turboquant.Plan`.
floats       float32 or float16; bfloat16 is a uint16 array of its bits together with dtype="bfloat16". All arrays of
             the model's dtype (k, v, q, sinks, window, fresh, out) of one call have the same one. dtype=None: that of
             k or q. k, v, q, fresh_k and fresh_v are dense in the last dimension, with any other strides; all other
             arrays are C-contiguous.
k, v         [batch, kv_heads, tokens, head_dim] floats; v is None if the plan has no values.
q, out       [batch, query_heads, query_tokens, head_dim] floats;  lse  [batch, query_heads, query_tokens] float32.
sink_*       [batch, kv_heads, sinks, head_dim] floats, None: no sinks;  window_*  likewise [.., window, ..], a ring.
fresh_*      [batch, kv_heads, query_tokens, head_dim] floats, None: see tq_attend_params.
pages        uint8 [n_pages, kv_heads, record_bytes], 64-byte aligned: `new_pages` makes such arrays, zeroed.
block_table  int32 [batch, max_pages];  lengths, starts  int32 [batch].
transforms   `turboquant.transforms` makes them, or leaves out what a plan does not take:
             key_numbers, value_numbers  float32 [kv_heads, columns]: centre, steps and moments (turboquant.h,
             tq_transform);  key_turns  int32 [wave_pairs, 3], of a wave;  rotation  float32 [kv_heads or 1, rows,
             head_dim]: plan_info's key_matrix_rows, then its value_matrix_rows.
threads      how many to use at most; 0: num_threads().
"""

from collections.abc import Sequence
from typing import Any, Final, TypedDict

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[Any]  # float32, float16, or uint16 with dtype="bfloat16"

class CodebookTables(TypedDict):
    bits: int
    n_levels: int
    step: float  # a decoded number is levels[code] * step
    levels: NDArray[np.int8]  # [n_levels], by code
    thresholds: NDArray[np.float32]  # [n_levels - 1], ascending
    code_of_rank: NDArray[np.uint8]  # [n_levels]

class PlanInfo(TypedDict):
    is_plain: int
    head_dim: int
    groups: int
    group_channels: int
    tile_tokens: int
    page_tokens: int
    rotation: int
    codebook: int
    scale: int
    seed: int
    record_bytes: int  # one page of one KV head
    key_bits: tuple[int, ...]  # by group
    value_bits: tuple[int, ...]
    key_tile_bytes: int  # tile_tokens tokens, all groups
    value_tile_bytes: int
    key_tile_offsets: tuple[int, ...]  # bytes from the first group's tile to each
    value_tile_offsets: tuple[int, ...]
    key_codes_offset: int  # bytes from a record's start
    value_codes_offset: int
    key_scales_offset: int
    value_scales_offset: int
    key_coded_channels: int
    value_coded_channels: int
    key_scales: int  # binary16 numbers of a token
    value_scales: int
    key_matrix_rows: int  # rows of the rotation, head_dim if it is dense, and of a Gaussian sketch
    value_matrix_rows: int
    key_step_columns: int  # numbers of a head's steps: groups, or the entries of a table
    value_step_columns: int
    key_moments: int  # numbers of a head's moments, 0 without a wave and a metric
    variance: float  # K of the variance term, 0 without one

__version__: Final[str]
FORMAT_VERSION: Final[int]
MAX_INPUT: Final[float]  # largest magnitude accepted in keys, values and vectors
SCHEDULE_ROWS: Final[int]  # rows of a schedule for each multiprocessor; there is one more for each sequence

def status_message(status: int) -> str: ...
def codebook(law: int, head_dim: int, bits: int) -> CodebookTables: ...
def random(seed: int, stream: int, block: int) -> NDArray[np.uint32]: ...
def haar(seed: int, head_dim: int) -> NDArray[np.float32]: ...
def gaussian(seed: int, rows: int, head_dim: int) -> NDArray[np.float32]: ...
def record_bytes(plan: Sequence[int]) -> int: ...
def plan_info(plan: Sequence[int]) -> PlanInfo: ...
def new_pages(plan: Sequence[int], n_pages: int, kv_heads: int) -> NDArray[np.uint8]: ...
def rotate(
    plan: Sequence[int], x: NDArray[np.float32], matrix: NDArray[np.float32] | None = None, inverse: bool = False
) -> NDArray[np.float32]: ...
def append(
    plan: Sequence[int],
    k: _Floats,
    v: _Floats | None,
    lengths: NDArray[np.int32],
    pages: NDArray[np.uint8],
    block_table: NDArray[np.int32],
    *,
    sink_k: _Floats | None = None,
    sink_v: _Floats | None = None,
    window_k: _Floats | None = None,
    window_v: _Floats | None = None,
    key_numbers: NDArray[np.float32] | None = None,
    value_numbers: NDArray[np.float32] | None = None,
    key_turns: NDArray[np.int32] | None = None,
    rotation: NDArray[np.float32] | None = None,
    dtype: str | None = None,
    threads: int = 0,
) -> None: ...
def attend(
    plan: Sequence[int],
    q: _Floats,
    pages: NDArray[np.uint8],
    block_table: NDArray[np.int32],
    lengths: NDArray[np.int32],
    *,
    starts: NDArray[np.int32] | None = None,
    sink_k: _Floats | None = None,
    sink_v: _Floats | None = None,
    window_k: _Floats | None = None,
    window_v: _Floats | None = None,
    fresh_k: _Floats | None = None,
    fresh_v: _Floats | None = None,
    key_numbers: NDArray[np.float32] | None = None,
    value_numbers: NDArray[np.float32] | None = None,
    key_turns: NDArray[np.int32] | None = None,
    rotation: NDArray[np.float32] | None = None,
    causal: bool = True,
    sliding_window: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dtype: str | None = None,
    out: _Floats | None = None,
    threads: int = 0,
) -> tuple[_Floats, NDArray[np.float32]]: ...
def merge(outs: NDArray[np.float32], lses: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
def dequantize(
    plan: Sequence[int],
    pages: NDArray[np.uint8],
    block_table: NDArray[np.int32],
    lengths: NDArray[np.int32],
    max_tokens: int,
    *,
    key_numbers: NDArray[np.float32] | None = None,
    value_numbers: NDArray[np.float32] | None = None,
    key_turns: NDArray[np.int32] | None = None,
    rotation: NDArray[np.float32] | None = None,
    sinks: int = 0,
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]: ...
def dot(
    plan: Sequence[int],
    queries: NDArray[np.float32],
    pages: NDArray[np.uint8],
    n: int,
    *,
    key_numbers: NDArray[np.float32] | None = None,
    rotation: NDArray[np.float32] | None = None,
    threads: int = 0,
) -> NDArray[np.float32]: ...

# ---- the vector index: csrc/include/turboquant_index.h ----

_Plain = tuple[
    Sequence[int],
    int,
    int,
    NDArray[np.uint8],
    NDArray[np.uint8],
    NDArray[np.float32],
    NDArray[np.float32] | None,
    NDArray[np.uint16] | None,
    float,
]
_Space = _Plain | tuple[*_Plain, tuple[NDArray[np.float32], NDArray[np.float32]]]
_Rows = tuple[
    NDArray[np.uint8],
    NDArray[np.uint8],
    NDArray[np.float32],
    NDArray[np.float32] | None,
    NDArray[np.int64] | int,
    NDArray[np.uint8] | None,
    NDArray[np.float32],
]
_Segment = _Rows | tuple[*_Rows, NDArray[np.int32] | NDArray[np.int64]]

def index_assign(space: _Space, x: NDArray[np.float32], threads: int = 0) -> NDArray[np.int32]: ...
def index_encode(
    space: _Space, x: NDArray[np.float32], threads: int = 0, lists: NDArray[np.int32] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]: ...
def index_step(bits: int) -> float: ...
def index_lead_error(bits: int, lead: int) -> float: ...
def index_decode(
    dim: int,
    bits: NDArray[np.uint8],
    lead: NDArray[np.uint8],
    steps: NDArray[np.float32],
    codes: NDArray[np.uint8],
    signs: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> NDArray[np.float32]: ...
def index_factors(
    scales: NDArray[np.float32], offsets: NDArray[np.float32] | None, starts: NDArray[np.int64] | None = None
) -> NDArray[np.float32]: ...
def index_search(
    space: _Space,
    queries: NDArray[np.float32],
    segments: tuple[_Segment, ...],
    k: int,
    threads: int = 0,
    probe: int = 2147483647,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...
def index_scores_of(
    space: _Space,
    queries: NDArray[np.float32],
    segments: tuple[_Segment, ...],
    rows: NDArray[np.int64] | None,
    threads: int = 0,
) -> NDArray[np.float32]: ...

# ---- instruction sets and threads ----

def isa() -> str: ...
def isa_available() -> tuple[str, ...]: ...
def set_isa(name: str | None) -> None: ...
def kernel_name(operation: str, plan: Sequence[int]) -> str: ...
def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...
