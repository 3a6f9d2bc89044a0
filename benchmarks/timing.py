"""What all benchmarks share: how a call is timed, what a machine is called, and the JSON that results are kept in.

A result file is {"machine": {..}, "commit": "..", "rows": [{"bench", "params", "metrics"}]}; times are medians in
microseconds with the 10th and 90th percentile beside them. Inputs take turns, so that no call finds its own in a cache.
On CUDA, calls are timed after a rest, in a CUDA graph of at least 1 ms: gaps between Python's launches do not count,
and the start of the graph, about 7 us, is less than 1 %.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
REST_SECONDS = 0.2
# A graph takes at least this long, but not much longer, or the GPU lowers its clocks.
GRAPH_MICROSECONDS = 1000


def machine(device: str) -> dict[str, Any]:
    """Returns what the figures were measured on."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    out: dict[str, Any] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        out |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}
    return out


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def commit() -> str:
    """Returns the commit measured, with a plus if the tree had changes; "unknown" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if dirty else "")


@dataclass
class Report:
    """Rows of one benchmark; `save` writes them and prints nothing."""

    name: str
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, bench: str, params: dict[str, Any], metrics: dict[str, Any]) -> None:
        self.rows.append({"bench": bench, "params": params, "metrics": metrics})

    def save(self, folder: str | os.PathLike[str]) -> Path:
        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"machine": machine(self.device), "commit": commit(), "rows": self.rows}, indent=1) + "\n"
        )
        return path


def microseconds(calls: Sequence[Callable[[], Any]], device: str, repeats: int = 30) -> dict[str, float]:
    """Times one call: median, percentiles. `calls` do the same work on inputs that together exceed any cache."""
    times = _cuda_times(calls, repeats) if device == "cuda" else _cpu_times(calls, repeats)
    low, *_, high = statistics.quantiles(times, n=10)
    return {"us": round(statistics.median(times), 3), "us_p10": round(low, 3), "us_p90": round(high, 3)}


def _cpu_times(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    for call in calls:
        call()
    times = []
    for i in range(max(repeats, 10)):
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _cuda_times(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    torch.cuda.synchronize()  # another stream made the inputs
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    rounds = 1
    while True:
        graph = _graph(list(calls) * rounds, stream)
        _graph_microseconds(graph)
        us = _graph_microseconds(graph)
        if us >= GRAPH_MICROSECONDS:
            break
        del graph  # and its memory
        rounds = max(rounds + 1, math.ceil(rounds * GRAPH_MICROSECONDS / us))
    time.sleep(REST_SECONDS)  # a GPU near its power limit lowers its clocks, also for what runs next
    times = [_graph_microseconds(graph) / (rounds * len(calls)) for _ in range(repeats + 3)]
    return times[3:]


def _graph(calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return graph


def _graph_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1e3
