"""Draws the figures of docs/performance.md from the results beside this file.

python benchmarks/plots.py

docs/attend_roofline.svg   time of one attend against the packed bytes it reads, with the card's read speed
docs/attend_context.svg    time against context at batch 1, packed and bf16
docs/cpu_context.svg       the same on one CPU thread
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent
DOCS = ROOT.parent / "docs"
COLOURS = {"4": "#1f77b4", "3": "#2ca02c", "2": "#d62728"}
BITS = {"4": "4 bits", "3": "3 bits", "2": "2 bits"}


def rows(machine: str, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "results" / machine / f"{name}.json").read_text())["rows"]
    return found


def axes(x: str, y: str) -> tuple[Any, Any]:
    figure, ax = plt.subplots(figsize=(6.4, 3.8))
    ax.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
    ax.grid(True, which="major", linewidth=0.4)
    return figure, ax


def save(figure: Any, ax: Any, name: str) -> None:
    ax.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata={"Date": None})  # the same bytes from the same results
    plt.close(figure)


def roofline() -> None:
    figure, ax = axes("packed bytes read (MB)", "time of one attend (µs)")
    results = rows("h200", "attend")
    ceiling = next(r for r in results if r["bench"] == "ceilings")["metrics"]["read_tbps"]
    for bits, label in BITS.items():
        of = [r["metrics"] for r in results if r["bench"] == "attend" and r["params"]["bits"] == bits]
        ax.scatter([m["bytes"] / 1e6 for m in of], [m["us"] for m in of], s=18, color=COLOURS[bits], label=label)
    ends = [1, 700]
    ax.plot(ends, [mb / ceiling for mb in ends], color="black", linewidth=0.8, label=f"read speed, {ceiling:.2f} TB/s")
    save(figure, ax, "attend_roofline.svg")


def context() -> None:
    figure, ax = axes("tokens (batch 1, 8 KV heads, group 4)", "time of one attend (µs)")
    of = [r for r in rows("h200", "attend") if r["bench"] == "attend" and r["params"]["batch"] == 1]
    for bits, label in BITS.items():
        line = sorted((r["params"]["tokens"], r["metrics"]["us"]) for r in of if r["params"]["bits"] == bits)
        ax.plot(*zip(*line), marker="o", markersize=3, color=COLOURS[bits], label=label)
    best = {r["params"]["tokens"]: min(r["metrics"][f"{b}_us"] for b in ("cudnn", "flash")) for r in of}
    ax.plot(*zip(*sorted(best.items())), marker="s", markersize=3, color="black", label="bf16, cuDNN or flash SDPA")
    save(figure, ax, "attend_context.svg")


def cpu() -> None:
    figure, ax = axes("tokens (batch 1, 8 KV heads, group 4, one thread)", "time of one attend (ms)")
    of = [r for r in rows("zen4-2core", "cpu_attend") if r["params"].get("group") == 4 and r["params"]["threads"] == 1]
    of = [r for r in of if r["params"]["head_dim"] == 128]
    for bits, label in BITS.items():
        ours = (r for r in of if r["bench"] == "attend" and r["params"]["bits"] == int(bits))
        line = sorted((r["params"]["tokens"], r["metrics"]["us"] / 1e3) for r in ours)
        ax.plot(*zip(*line), marker="o", markersize=3, color=COLOURS[bits], label=label)
    forms = {"torch grouped": "-", "torch enable_gqa": "--", "torch repeated": ":"}
    for bench, style in forms.items():
        line = sorted((r["params"]["tokens"], r["metrics"]["us"] / 1e3) for r in of if r["bench"] == bench)
        label = "bf16 SDPA, " + bench.removeprefix("torch ").replace("grouped", "heads as query rows")
        ax.plot(*zip(*line), linestyle=style, marker="s", markersize=3, color="black", label=label)
    for bench, style in {"ggml q4_0": "--", "ggml f16": ":"}.items():
        line = sorted((r["params"]["tokens"], r["metrics"]["us"] / 1e3) for r in of if r["bench"] == bench)
        ax.plot(*zip(*line), linestyle=style, marker="^", markersize=3, color="grey", label=bench)
    save(figure, ax, "cpu_context.svg")


def main() -> None:
    plt.rcParams |= {"svg.hashsalt": "turboquant", "font.size": 9}
    roofline()
    context()
    cpu()


if __name__ == "__main__":
    main()
