"""The table of CUDA attention kernels (csrc/cuda/attend/choose/) and the choice between them, without a GPU. Both
are host code, which is compiled with tests/cuda/dispatch_table.cpp and without CUDA."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_cases import CASES, Case

import turboquant
from turboquant.plan import Side

ROOT = Path(__file__).parents[1]
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
LIBRARY = Path(turboquant.__file__).parent / "libturboquant.so"
SOURCES = ["choose/choose.cu", "arguments.cu", "fused/cut.cu", "split/cut.cu", "chunk/cut.cu"]
BF16 = 2

pytestmark = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")
Run = Callable[..., list[list[str]]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs the program and returns the words of each line that it prints."""
    program = tmp_path_factory.mktemp("dispatch") / "dispatch_table"
    sources = [ROOT / "tests/cuda/dispatch_table.cpp", *(ROOT / "csrc/cuda/attend" / name for name in SOURCES)]
    flags = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    link = ["-x", "none", str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}", "-o", str(program)]
    subprocess.run([str(CXX), *flags, "-x", "c++", *map(str, sources), *link], check=True)

    def run(*arguments: str, lines: list[str] | None = None) -> list[list[str]]:
        text = "\n".join(lines or [])
        done = subprocess.run([str(program), *arguments], input=text, capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    return run


def line(
    plan: turboquant.Plan,
    batch: int,
    query_tokens: int,
    query_heads: int,
    kv_heads: int,
    max_pages: int,
    *,
    window: int = 0,
    sliding_window: int = 0,
    dtype: int = BF16,
    even: bool = True,
    hopper: int = True,
    processors: int = 132,
    causal: bool = True,
) -> str:
    numbers = [
        processors,
        hopper,
        7 if hopper == 1 else 0,
        batch,
        query_tokens,
        query_heads,
        kv_heads,
        max_pages,
        0,
        window,
    ]
    numbers += [sliding_window, causal, dtype, even, *plan.words]
    return " ".join(str(int(number)) for number in numbers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_for_a_shape(case: Case, table: Run) -> None:
    heads = case.group * case.kv_heads
    text = line(case.plan, case.batch, case.query_tokens, heads, case.kv_heads, case.max_pages, even=case.even)
    assert table(lines=[text])[0][0] == case.name


def test_names_differ_and_no_case_has_two_rows(table: Run) -> None:
    kernels = table("rows")
    names = [name for _, name in kernels]
    assert len(set(names)) == len(names) > 20
    assert table("overlaps") == []


def test_gpus_by_name(table: Run) -> None:
    """Errors name all GPUs. On an h100 or h200 the choice is that for its numbers. Other GPUs get portable kernels."""
    *known, told = [" ".join(words) for words in table("gpus")]
    assert told == f"{', '.join(known[:-1])} or {known[-1]}"
    plan = turboquant.Plan(128, 3, 3)
    lines = [line(plan, batch, 1, 32, 8, pages) for batch, pages in ((1, 64), (16, 256), (64, 32))]
    chosen = {gpu: [words[0] for words in table(gpu, lines=lines)] for gpu in known}
    assert chosen["h100"] == chosen["h200"] == [words[0] for words in table(lines=lines)]
    assert all(name.endswith("_portable") for gpu in known for name in chosen[gpu] if gpu not in ("h100", "h200"))


def all_plans() -> list[turboquant.Plan]:
    plans = []
    for dim in (32, 64, 80, 128, 192, 256, 320, 512):
        groups, pairs = -(-dim // 32), min(dim // 16 * 8, 128)
        plans += [turboquant.Plan(dim, bits, bits) for bits in (1, 2, 3, 4, 5)]
        plans += [turboquant.Plan(dim, bits, bits, page_tokens=64) for bits in (2, 3, 4)]
        plans.append(turboquant.Plan(dim, 4, 3))
        plans.append(turboquant.Plan(dim, [4] + [3] * (groups - 1), 2))
        plans += [turboquant.Plan(dim, 3, 3, group=16)] if dim <= 256 else []
        plans.append(turboquant.Plan(dim, Side(3, rotation="dense"), Side(3, rotation="dense")))
        plans += [turboquant.Plan(dim, bits, bits, wave_pairs=pairs, metric=4) for bits in (1, 2, 3, 4, 4)]
        plans += [turboquant.Plan(dim, *bits, wave_pairs=pairs, metric=4) for bits in ((4, 3), (2, 6))]
    return plans


def test_every_kernel_is_chosen_for_some_call(table: Run) -> None:
    rng = random.Random(2)
    plans = all_plans()
    lines = [
        line(
            rng.choice(plans),
            rng.choice((1, 2, 3, 8, 16, 33, 64, 140, 150, 256)),
            rng.choice((1, 1, 1, 4, 16, 64)),
            heads * rng.choice((1, 4, 7, 8, 16, 32)),
            heads,
            rng.choice((1, 2, 3, 5, 8, 16, 25, 40, 64, 200, 500)),
            dtype=rng.choice((0, BF16, BF16)),
            even=rng.random() < 0.6,
            hopper=rng.random() < 0.85,
        )
        for heads in rng.choices((1, 2, 8, 8, 8, 32), k=60_000)
    ]
    found = {words[0] for words in table(lines=lines)}
    listed = {name for _, name in table("rows")}
    assert found - {"refused:"} == listed, sorted(listed ^ found)


def test_waves_of_wide_heads_where_shared_memory_is_short(table: Run) -> None:
    """For 512 channels, 100 KB of shared memory hold a wave of 64 pairs, as Gemma 4 has, and of 192, but not of 224."""
    lines = [line(turboquant.Plan(512, 4, 4, wave_pairs=pairs, metric=4), 1, 1, 32, 4, 64) for pairs in (64, 192, 224)]
    *fits, refused = table("l4", lines=lines)
    assert [words[0] for words in fits] == ["attend_split_any_d512_4x64_portable"] * 2
    assert refused == ["refused:", "device"]
    assert all(words[0] == "attend_split_any_d512_4x64" for words in table("h100", lines=lines))


@pytest.mark.parametrize(
    "bits,batch,max_pages,warps", [(4, 16, 256, 16), (4, 32, 256, 6), (3, 16, 256, 12), (2, 32, 256, 6), (2, 64, 32, 6)]
)
def test_exact_tokens_cost_no_warps(bits: int, batch: int, max_pages: int, warps: int, table: Run) -> None:
    """For large caches with a wave, whose tables leave little shared memory for the sums of exact tokens."""
    plan = turboquant.Plan(128, bits, bits, wave_pairs=64, metric=4)
    lines = [line(plan, batch, 1, 32, 8, max_pages, window=window) for window in (0, 33, 132)]
    assert [int(words[2]) // 32 for words in table(lines=lines)] == [warps] * 3


@pytest.mark.parametrize("bits", [(4, 4), (5, 4), (3, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("batch", [16, 40, 128])
def test_exact_tokens_of_lengths_that_differ_run_in_the_kernel_of_the_pages(
    batch: int, bits: tuple[int, int], table: Run
) -> None:
    """With a wave. SPLIT attends to them in a kernel of its own."""
    plan = turboquant.Plan(128, *bits, wave_pairs=64, metric=4)
    lines = [line(plan, batch, 1, 32, 8, 128, window=window, even=False) for window in (4, 132)]
    assert all("fused" in words[0] for words in table(lines=lines))


@pytest.mark.parametrize("rotation", ["hadamard", "dense"])
@pytest.mark.parametrize("head_dim,page_tokens", [(128, 128), (128, 64), (96, 32), (320, 128), (512, 64)])
def test_blocks_around_split_have_whole_tiles(head_dim: int, page_tokens: int, rotation: str, table: Run) -> None:
    """The rows of a block of `prepare` or `combine` divide the rows of a tile. Otherwise rows would be left out."""
    side = Side(3, rotation=rotation)
    plan = turboquant.Plan(head_dim, side, side, page_tokens=page_tokens)
    lines = [
        line(plan, batch, tokens, group, 1, 16, hopper=hopper, even=False)
        for hopper in (0, 1, 2)
        for batch in (1, 64, 512)
        for group in (1, 4, 5)
        for tokens in range(1, 35)
    ]
    for asked, (name, *numbers) in zip(lines, table(lines=lines), strict=True):
        rows, prepared, combined = map(int, numbers[-3:])
        if "split" in name or ("_many_rows" in name and "fused" not in name):
            assert rows % prepared == 0 and rows % combined == 0, (asked, name)


@pytest.mark.parametrize("hopper,most", [(1, 232448), (0, 166912), (2, 101376)])
def test_launches_fit_the_device(hopper: int, most: int, table: Run) -> None:
    rng = random.Random(0)
    plans = all_plans()
    lines = [
        line(
            rng.choice(plans),
            rng.choice((1, 2, 7, 64, 300)),
            rng.choice((1, 1, 3, 64)),
            8 * rng.choice((1, 4, 7, 16)),
            8,
            rng.choice((1, 5, 64, 300)),
            window=rng.choice((0, 128)),
            sliding_window=rng.choice((0, 500)),
            dtype=rng.choice((0, 1, 2)),
            even=rng.random() < 0.5,
            hopper=hopper,
        )
        for _ in range(5000)
    ]
    for text, words in zip(lines, table(lines=lines), strict=True):
        name, blocks, threads, shared, sharing, cluster = words[0], *map(int, words[1:6])
        assert blocks > 0 and 0 < threads <= 1024 and threads % 32 == 0 and 0 < shared <= most, (text, words)
        assert ("fused" in name) == (sharing > 0) and (not sharing or sharing % cluster == 0), (text, words)


def test_the_way_that_costs_least_runs(table: Run) -> None:
    """TURBOQUANT_CUDA_PATH=hopper-N runs way N of a call. Each of them fits the device."""
    rng, plans, others = random.Random(1), all_plans(), 0
    for _ in range(300):
        plan, heads, window = rng.choice(plans), rng.choice((1, 8, 8, 32)), rng.choice((0, 0, 128))
        sizes = rng.choice((1, 2, 7, 54, 300)), rng.choice((1, 1, 3, 16)), heads * rng.choice((1, 4, 8)), heads
        text = line(plan, *sizes, rng.choice((1, 5, 64, 300)), window=window, even=rng.random() < 0.5)
        *ways, end = table("ways", lines=[text])
        (chosen,) = table(lines=[text])
        assert ways and not end
        costs = [int(words[6]) for words in ways]
        assert chosen == ways[costs.index(min(costs))] and costs[0] > 0, (text, ways, chosen)
        others += min(costs) != costs[0]
        for name, *numbers in ways:
            blocks, threads, shared, sharing, cluster, *_ = map(int, numbers)
            assert blocks > 0 and 0 < threads <= 1024 and 0 < shared <= 232448, (text, name, numbers)
            assert ("fused" in name) == (sharing > 0) and (not sharing or sharing % cluster == 0), (text, name, numbers)
    assert others > 30


def test_many_queries_that_see_all_packed_tokens(table: Run) -> None:
    """CHUNK takes calls that are not causal where it costs least, unless the wave needs too much memory."""
    plain, wave = turboquant.Plan(128, 4, 4), turboquant.Plan(128, 4, 4, wave_pairs=64)
    calls = [
        ("fused_many_rows", plain, dict(batch=1, query_tokens=8, max_pages=256)),
        ("fused_many_rows", plain, dict(batch=1, query_tokens=32, max_pages=64)),
        ("chunk_d128_128x128", plain, dict(batch=1, query_tokens=32, max_pages=256)),
        ("chunk_d128_128x128", plain, dict(batch=1, query_tokens=64, max_pages=8)),
        ("many_rows", plain, dict(batch=16, query_tokens=8, max_pages=256)),
        ("chunk_d128_64x128", plain, dict(batch=16, query_tokens=16, max_pages=256)),
        ("many_rows", plain, dict(batch=1, query_tokens=64, max_pages=8, causal=True)),
        ("many_rows", plain, dict(batch=1, query_tokens=64, max_pages=8, window=128)),
        ("split", plain, dict(batch=1, query_tokens=64, max_pages=8, hopper=0)),
        ("chunk_d128_128x128_wave", wave, dict(batch=1, query_tokens=512, max_pages=455)),
        ("many_rows", wave, dict(batch=1, query_tokens=512, max_pages=456)),
        ("chunk_d64_128x128", turboquant.Plan(64, 5, 3), dict(batch=1, query_tokens=64, max_pages=8)),
        ("split", turboquant.Plan(64, 6, 3), dict(batch=1, query_tokens=64, max_pages=8)),
        ("split", turboquant.Plan(256, 4, 4), dict(batch=1, query_tokens=64, max_pages=8)),
    ]
    usual = {"query_heads": 32, "kv_heads": 8, "causal": False, "even": False}
    lines = [line(plan, **usual | how) for _, plan, how in calls]
    for (name, *_), (found, *_) in zip(calls, table(lines=lines), strict=True):
        assert found.startswith(f"attend_{name}"), (name, found)
