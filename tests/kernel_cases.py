"""Shapes and the attention kernel that runs for each on an H100 or H200. test_dispatch.py asserts them without a GPU,
test_kernel_names.py with one."""

from __future__ import annotations

from dataclasses import dataclass

import turboquant
from turboquant.plan import Side


@dataclass(frozen=True)
class Case:
    """One call of `attend`: a step of `query_tokens` tokens over `tokens` packed ones, queries in bf16."""

    plan: turboquant.Plan
    batch: int
    tokens: int
    group: int
    name: str
    kv_heads: int = 8
    query_tokens: int = 1
    even: bool = True

    @property
    def max_pages(self) -> int:
        return -(-self.tokens // self.plan.page_tokens)

    def __str__(self) -> str:
        return self.name


P = turboquant.Plan
MIXED, MIXED_256 = P(128, 4, 3), P(256, 4, 3)
WAVE, TERM = {"wave_pairs": 64, "metric": 4}, {"variance_term": True}
DENSE = P(128, Side(3, rotation="dense"), Side(3, rotation="dense"))

CASES = [
    Case(P(128, 3, 3), 1, 8192, 4, "attend_fused_3bit_d128_4x64"),
    Case(P(128, 2, 2), 1, 8192, 4, "attend_fused_2bit_d128_4x128"),
    Case(P(128, 4, 4), 1, 32768, 4, "attend_fused_4bit_d128_4x64"),
    Case(P(128, 4, 4), 64, 4096, 4, "attend_fused_4bit_d128_4x64"),
    Case(P(128, 3, 3), 64, 4096, 4, "attend_fused_3bit_d128_4x64"),
    Case(P(128, 2, 2), 16, 32768, 4, "attend_fused_2bit_d128_4x128"),
    Case(P(128, 3, 3), 64, 4096, 4, "attend_fused_3bit_d128_4x64_ragged", even=False),
    Case(P(128, 3, 3), 16, 32768, 4, "attend_fused_3bit_d128_4x64_ragged", even=False),
    Case(P(128, 2, 2), 16, 32768, 4, "attend_fused_2bit_d128_4x128_ragged", even=False),
    Case(P(128, 3, 3), 64, 4096, 16, "attend_many_rows_3bit_d128_16x128", even=False),
    Case(P(128, 3, 3), 4, 4096, 8, "attend_fused_3bit_d128_8x128"),
    Case(P(64, 4, 4), 16, 8192, 4, "attend_fused_4bit_d64_4x64"),
    Case(P(64, 3, 3), 150, 1024, 4, "attend_fused_3bit_d64_4x128"),
    Case(P(64, 3, 3), 150, 4096, 8, "attend_split_any_d128_8x128"),
    Case(P(64, 4, 4), 1, 131072, 1, "attend_fused_4bit_d64_4x64"),
    Case(P(96, 3, 3), 4, 8192, 4, "attend_fused_any_d128_4x128"),
    Case(P(80, 2, 2), 16, 8192, 1, "attend_fused_any_d128_4x128"),
    Case(P(256, 4, 4), 4, 8192, 4, "attend_split_4bit_d256_4x64"),
    Case(P(256, 2, 2), 1, 1024, 8, "attend_split_2bit_d256_8x64", kv_heads=1),
    Case(P(512, 4, 4), 1, 32768, 8, "attend_split_any_d512_4x64", kv_heads=4),
    Case(P(320, 2, 5, wave_pairs=160, metric=4), 16, 4096, 4, "attend_split_any_d512_4x64", query_tokens=5),
    Case(MIXED, 1, 8192, 4, "attend_fused_any_d128_4x64"),
    Case(MIXED, 64, 4096, 4, "attend_fused_any_d128_4x128"),
    Case(MIXED_256, 4, 8192, 8, "attend_split_any_d256_8x64"),
    Case(P(128, 3, 3), 1, 32768, 4, "attend_fused_many_rows_3bit_d128_32x128", query_tokens=16),
    Case(P(128, 4, 4), 8, 8192, 4, "attend_fused_many_rows_4bit_d128_16x128", query_tokens=4),
    Case(P(128, 2, 2), 1, 32768, 4, "attend_many_rows_2bit_d128_32x128", query_tokens=512),
    Case(MIXED, 1, 32768, 4, "attend_many_rows_any_d128_32x128", query_tokens=512),
    Case(DENSE, 1, 8192, 4, "attend_split_3bit_d128_4x128"),
    Case(P(128, 3, 3, group=16), 4, 8192, 4, "attend_split_tile16_d256_4x64"),
    Case(P(128, 3, 3, page_tokens=64), 1, 8192, 4, "attend_split_any_d128_4x64", query_tokens=512),
    Case(P(128, 3, 3, **WAVE), 1, 8192, 4, "attend_fused_3bit_d128_4x128_wave"),
    Case(P(128, 2, 2, **WAVE), 16, 32768, 4, "attend_fused_2bit_d128_4x128_wave"),
    Case(P(128, 4, 4, **WAVE), 16, 32768, 4, "attend_fused_4bit_d128_4x128_wave"),
    Case(P(128, 4, 4, **WAVE), 64, 4096, 4, "attend_fused_4bit_d128_4x128_wave"),
    Case(P(128, 4, 4, metric=0), 1, 2048, 4, "attend_fused_4bit_d128_4x64_wave"),
    Case(P(128, 3, 3, **WAVE), 4, 4096, 8, "attend_fused_3bit_d128_8x64_wave"),
    Case(P(128, 3, 3, **WAVE), 64, 4096, 4, "attend_fused_3bit_d128_4x128_wave_ragged", even=False),
    Case(P(128, 3, 3, **WAVE), 16, 32768, 4, "attend_fused_3bit_d128_4x128_wave_ragged", even=False),
    Case(P(128, 3, 3, **WAVE), 8, 16384, 4, "attend_fused_3bit_d128_4x128_wave_ragged", even=False),
    Case(P(128, 3, 3, **WAVE), 1, 2048, 4, "attend_fused_many_rows_any_d128_16x128_wave", query_tokens=16),
    Case(P(64, 4, 4, wave_pairs=32), 16, 8192, 4, "attend_fused_4bit_d64_4x128_wave"),
    Case(P(80, 2, 2, wave_pairs=40), 16, 8192, 1, "attend_fused_any_d128_4x64_wave"),
    Case(P(256, 4, 4, wave_pairs=128), 4, 8192, 4, "attend_split_4bit_d256_4x64"),
    Case(P(128, 4, 3, **WAVE), 16, 32768, 4, "attend_fused_sides_d128_4x128_wave"),
    Case(P(128, 5, 5, **WAVE), 64, 4096, 4, "attend_fused_sides_d128_4x128_wave"),
    Case(P(128, 1, 2, **WAVE), 1, 8192, 4, "attend_fused_sides_d128_4x64_wave"),
    Case(P(128, 3, 2, **WAVE), 8, 16384, 8, "attend_fused_sides_d128_8x64_wave"),
    Case(P(64, 3, 2, wave_pairs=32), 16, 8192, 4, "attend_fused_sides_d64_4x128_wave"),
    Case(P(128, 6, 6, **WAVE), 1, 8192, 4, "attend_fused_any_d128_4x64_wave"),
    Case(P(128, 4, [4, 3, 3, 3], **WAVE), 1, 8192, 4, "attend_fused_any_d128_4x64_wave"),
    Case(P(128, 4, 3, **WAVE), 256, 2048, 4, "attend_split_any_d128_4x128", even=False),
    Case(P(128, 4, 3, **WAVE), 8, 16384, 4, "attend_fused_sides_d128_4x128_wave_ragged", even=False),
    Case(P(128, 3, 3, **WAVE), 1, 32768, 4, "attend_many_rows_3bit_d128_32x128", query_tokens=512),
    Case(P(128, 4, 4, **TERM), 1, 8192, 4, "attend_fused_4bit_d128_4x128_wave"),
    Case(P(128, 4, 3, **TERM), 1, 8192, 4, "attend_fused_sides_d128_4x64_wave"),
    Case(P(128, 3, 3, **TERM), 64, 4096, 4, "attend_fused_3bit_d128_4x128_wave_ragged", even=False),
    Case(P(128, 3, 3, **TERM), 16, 32768, 4, "attend_fused_3bit_d128_4x128_wave_ragged", even=False),
    Case(P(128, 3, 3, **TERM), 1, 32768, 4, "attend_fused_many_rows_3bit_d128_32x128", query_tokens=16),
    Case(P(64, 3, 3, **TERM), 4, 4096, 8, "attend_fused_any_d128_8x64_wave"),
    Case(P(128, 4, 4, **WAVE, **TERM), 16, 32768, 4, "attend_fused_4bit_d128_4x128_wave"),
]
