"""Draws the figures of docs/performance.md and docs/vectors.md from the results beside this file.

python benchmarks/plots.py

docs/attend_roofline.svg   time of one attend against the packed bytes it reads, with the card's read speed
docs/attend_context.svg    time against context at batch 1, packed and bf16
docs/cpu_context.svg       the same on one CPU thread
docs/index_bytes.svg       recall of vector indexes against the bytes of a vector
docs/index_time.svg        their recall against the time of a query
docs/index_dial.svg        recall against time for widths of a search's bound
docs/whole_model.svg       tokens that fit and tokens a second of a whole model, presets beside bfloat16 and fp8
docs/serving_GPU.svg       a decode step of vLLM against requests, with fp8's cache and with ours, where it was measured
docs/second_turn.svg       a forward of a chat's next message against its tokens, beside transformers' cache
docs/whole_model_steps.svg  tokens a second of the whole model, for every batch and context of its table
docs/quality.svg           divergence of two real models against bits, our widths and other formats
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

matplotlib.rcParams["svg.hashsalt"] = "turboquant"  # otherwise names inside the file are random
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


PEERS = {  # marker, colour, where a label stands
    "turbovec": ("^", "#ff7f0e", (-4, 2)),
    "rabitqlib": ("v", "#9467bd", (4, 3)),
    "FAISS": ("s", "#7f7f7f", (4, -7)),
    "ScaNN": ("D", "#8c564b", (4, -7)),
    "usearch": ("P", "#e377c2", (4, -8)),
    "hnswlib": ("X", "#17becf", (4, 3)),
}
TRAINING = {"untrained": "#1f77b4", "mean": "#2ca02c", "axes": "#d62728"}


def points(text: str) -> tuple[str, str]:
    """Splits an index's name in the results into (the index and its version, what it is)."""
    name, _, kind = text.partition(", ")
    return name, kind.replace("bits", "b").replace(", calibrated", " cal.").replace(
        " dimensions, re-ranked in bf16", "+bf16"
    )


def spread(figure: Any, labels: list[Any], places: list[tuple[float, float]]) -> None:
    """Moves labels up or down, each as little as keeps it off the labels before it and off the markers at `places`."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    transform = figure.axes[0].transData.transform
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in (transform(place) for place in places)]
    for label in labels:
        x, y = label.xyann
        for step in sorted(range(-30, 31), key=abs):
            label.xyann = (x, y + step)
            box = label.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def index_figure(name: str, x: str, metrics: list[str]) -> None:
    """Draws recall against metrics[0] with filled markers and, if there is one, against metrics[1] with hollow ones."""
    figure, ax = plt.subplots(figsize=(8.6, 4.4))
    ax.set(xlabel=x, ylabel="share of the true 10 that are among the 10 found", xscale="log", ylim=(0.74, 1.008))
    ax.grid(True, which="both", linewidth=0.3)
    results = [(*points(r["params"]["index"]), r["metrics"]) for r in rows("zen3-2core", "index")]
    for training, colour in TRAINING.items():
        own = [(k, m) for index, k, m in results if index.startswith("turboquant") and k.endswith(training)]
        for metric, fill, style in zip(metrics, (colour, "none"), ("-", ":")):
            line = [(m[metric], m["recall"]) for _, m in own]
            label = f"turboquant, {training}, 2 to 4 bits" if style == "-" else None
            ax.plot(*zip(*line), style, marker="o", color=colour, markerfacecolor=fill, markersize=5, label=label)
    labels, places = [], [point for line in ax.lines for point in zip(*line.get_data())]
    for peer, (marker, colour, offset) in PEERS.items():
        own = [(index, k, m) for index, k, m in results if index.startswith(peer)]
        if not own:  # not installed when that was measured
            continue
        for metric, fill in zip(metrics, (colour, "none")):
            label = own[0][0] if fill != "none" else None
            some = [(m[metric], m["recall"]) for _, _, m in own]
            places += some
            ax.scatter(*zip(*some), marker=marker, s=26, edgecolor=colour, facecolor=fill, label=label)
        for _, kind, m in own:
            at, side = (m[metrics[0]], m["recall"]), "right" if offset[0] < 0 else "left"
            labels.append(ax.annotate(kind, at, offset, textcoords="offset points", fontsize=5.5, ha=side))
    ax.set_xlim(0.8 * ax.get_xlim()[0], 1.6 * ax.get_xlim()[1])  # room for the labels of the outermost
    ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    spread(figure, labels, places)
    figure.savefig(DOCS / name, metadata={"Date": None})
    plt.close(figure)


DIAL_DATA = {  # where it was measured, and the title
    "minilm": ("zen4-2core", "MiniLM, 134k x 384, Zen 4"),
    "smollm2": ("zen3-2core", "SmolLM2-135M, 48k x 576, Zen 3"),
    "gemma3": ("zen3-2core", "Gemma 3 270M, 100k x 640, Zen 3"),
}
DIAL_BITS = {"2": "v", "3": "s", "4": "o"}


def dial() -> None:
    """Draws recall against time for widths of the bound, from 0 to the index's own."""
    figure, panels = plt.subplots(1, len(DIAL_DATA), figsize=(5.4 * len(DIAL_DATA), 4.4), constrained_layout=True)
    for ax, (data, (machine, title)) in zip(panels, DIAL_DATA.items(), strict=True):
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows(machine, "index_dial"):
            if row["params"]["data"] == data:
                found.setdefault(row["params"]["index"], []).append(row["metrics"])
        for name, own in found.items():
            label = f"{name}, {own[0]['bytes']:.0f} B"
            line = [(m["batch_cpu_ms"], m["recall"]) for m in own]
            if ours := [kind for kind in TRAINING if name.endswith(kind)]:
                style = {"color": TRAINING[ours[0]], "marker": DIAL_BITS[name.split(", ")[1][0]]}
            else:
                style = {"marker": "^" if name.startswith("turbovec") else "P", "linestyle": "none"}
            ax.plot(*zip(*line), markersize=4, label=label, **style)
        ax.set(title=title, xlabel="ms a query in batches, one thread")
        times = [m["batch_cpu_ms"] for own in found.values() for m in own]
        if max(times) > 3 * min(times):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_formatter("{x:g}")
        ax.grid(alpha=0.3, which="both")
        ax.legend(frameon=False, fontsize=6, loc="lower right")
    panels[0].set_ylabel("share of the true 10 that are among the 10 found")
    figure.savefig(DOCS / "index_dial.svg", metadata={"Date": None})
    plt.close(figure)


QUALITY_MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
OURS = ("default-5", "default", "default-3", "default-2")  # quality.py's names of 5, 4, 3 and 2 bits
FORMATS = {
    "fp8 e4m3": "o",
    "NVFP4": "s",
    "q4_0": "^",
    "q4_0 after Hadamard": "v",
    "int4 per token and head": "D",
    "KIVI, 4 bits, groups of 32": "P",
    "KIVI, 2 bits, groups of 32": "X",
    "TurboQuant mse, 4 bits, 2 + 2 layers exact": "*",
}


def quality() -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.8), sharey=True, constrained_layout=True)
    for ax, (model, called) in zip(panels, QUALITY_MODELS.items(), strict=True):
        found = {
            row["params"]["spec"]: row["metrics"]
            for row in rows("h100", f"real_{model}")
            if (row["params"]["text"], row["params"]["length"], row["params"]["exact"])
            == ("wikitext2", 2048, "4 sinks")
            and row["params"]["windows"] > 4  # other rows are of other texts, prompts and moments
        }
        packed = {row["params"]["spec"]: row["metrics"] for row in rows("h200", f"real_{model}_packed")}
        ours = [packed[name] for name in OURS]
        ax.plot([m["effective_bits"] for m in ours], [m["kl_divergence"] for m in ours], "o-", label="TurboQuant")
        for name, marker in FORMATS.items():
            one = found[name]
            ax.plot(one["effective_bits"], one["kl_divergence"], marker, label=name, linestyle="none")
        ax.set(title=called, xlabel="bits of a number, scales included", yscale="log")
        ax.grid(alpha=0.3)
    panels[0].set_ylabel("KL divergence, nats a token")
    figure.legend(
        *panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    figure.savefig(DOCS / "quality.svg", metadata={"Date": None})


def whole_model() -> None:
    """Draws, for a Llama of the 8B shape in bfloat16, how many tokens fit beside the weights of a card, and tokens a
    second of a batch of 16 with 32,768 tokens each. fp8 has half of bfloat16's bytes; transformers has no fp8 cache."""
    steps = {
        one["params"]["cache"]: one["metrics"]
        for one in rows("h200", "generate")
        if (one["params"].get("batch"), one["params"].get("tokens")) == (16, 32768)
    }
    presets = ("default", "compact", "tiny")
    each = {"bfloat16": steps["bf16"]["cache_bytes"], "fp8": steps["bf16"]["cache_bytes"] // 2}
    each |= {name: steps[name]["cache_bytes"] for name in presets}
    weights = steps["bf16"]["peak_bytes"] - steps["bf16"]["cache_bytes"]
    fit = {name: (141e9 - weights) / (nbytes / (16 * 32768)) / 1e6 for name, nbytes in each.items()}
    best = {"bfloat16": max(steps["bf16"]["tokens_per_s"], steps["bf16 graph"]["tokens_per_s"])}
    best |= {name: steps[f"{name} graph"]["tokens_per_s"] for name in presets}
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), constrained_layout=True)
    for ax, shown, title, form in (
        (panels[0], fit, "millions of tokens that fit, 141 GB", "{:.2f}"),
        (panels[1], best, "tokens a second, 16 x 32,768 tokens", "{:,.0f}"),
    ):
        colours = [COLOURS["4"] if name in presets else "#999999" for name in shown]
        bars = ax.barh(list(shown), list(shown.values()), color=colours)
        ax.bar_label(bars, [form.format(value) for value in shown.values()], padding=3, fontsize=9)
        ax.set(title=title, xlim=(0, 1.15 * max(shown.values())))
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "whole_model.svg", metadata={"Date": None})
    plt.close(figure)


SERVED = {"fp8": ("black", "fp8"), "bf16": ("grey", "bfloat16"), "ours4-sinks": (COLOURS["4"], "4 bits"),
          "ours3-sinks": (COLOURS["3"], "3 bits"), "ours2-sinks": (COLOURS["2"], "2 bits")}  # fmt: skip


def serving(machine: str) -> None:
    """Draws the milliseconds of a decode step at two contexts."""
    results = rows(machine, "vllm")
    figure, both = plt.subplots(1, 2, figsize=(7.4, 3.4), sharex=True)
    for ax, context in zip(both, (8192, 32768)):
        ax.set(xlabel="requests", xscale="log", title=f"{context:,} tokens each", yscale="log")
        ax.grid(True, which="both", linewidth=0.3)
        ax.set_xticks([16, 32, 64], ["16", "32", "64"])
        ax.set_yticks([7, 10, 15, 20, 30], ["7", "10", "15", "20", "30"])
        ax.minorticks_off()
        for cache, (colour, label) in SERVED.items():
            of = {"cache": cache, "context": context}
            line = [(r["params"]["batch"], r["metrics"]["ms"]) for r in results
                    if r["bench"] == "tpot" and of.items() <= r["params"].items() and r["metrics"]["ms"]]  # fmt: skip
            if line:
                ax.plot(*zip(*line), marker="o", markersize=3, color=colour, label=label)
    both[0].set_ylabel("time of a decode step (ms)")
    save(figure, both[0], f"serving_{machine}.svg")


def second_turn() -> None:
    """Draws the milliseconds of a forward of new tokens over stored ones: the fastest of the runs."""
    results = [r for r in rows("h200", "generate_turns") if r["params"]["history"]]
    histories = sorted({r["params"]["history"] for r in results})
    figure, both = plt.subplots(1, len(histories), figsize=(7.4, 3.4), sharex=True, sharey=True)
    for ax, history in zip(both, histories):
        ax.set(xlabel="new tokens", xscale="log", yscale="log", title=f"over {history:,} stored tokens")
        ax.grid(True, which="both", linewidth=0.3)
        for cache, colour, label in (
            ("full", "#999999", "bf16, DynamicCache"),
            ("default", COLOURS["4"], "default, 4 bits"),
        ):
            line = [(r["params"]["new"], r["metrics"]["least_ms"]) for r in results
                    if r["params"]["cache"] == cache and r["params"]["history"] == history]  # fmt: skip
            ax.plot(*zip(*line), marker="o", markersize=3, color=colour, label=label)
        ax.set_xticks([new for new, _ in line], [f"{new:,}" for new, _ in line])
        ax.set_yticks([20, 50, 100, 200, 400], ["20", "50", "100", "200", "400"])
        ax.minorticks_off()
    both[0].set_ylabel("time of a forward (ms)")
    save(figure, both[0], "second_turn.svg")


def whole_model_steps() -> None:
    """Draws each cache with or without a CUDA graph, whichever is faster. There is no point where memory ran out."""
    best: dict[tuple[int, int], dict[str, float]] = {}
    for one in rows("h200", "generate"):
        params, speed = one["params"], one["metrics"].get("tokens_per_s")
        if "batch" in params and speed is not None:
            cell = best.setdefault((params["batch"], params["tokens"]), {})
            name = params["cache"].removesuffix(" graph")
            cell[name] = max(speed, cell.get(name, 0))
    places = sorted(best)
    figure, ax = plt.subplots(figsize=(9, 3.4), constrained_layout=True)
    for i, (name, colour) in enumerate(zip(("bf16", "default", "compact", "tiny"), ("#999999", *COLOURS.values()))):
        at = [j + 0.15 * (i - 1.5) for j, place in enumerate(places) if name in best[place]]
        ax.plot(at, [best[place][name] for place in places if name in best[place]], "o", color=colour, label=name)
    ax.set(yscale="log", xlabel="sequences x tokens of each", ylabel="tokens a second", xticks=range(len(places)))
    ax.set_xticklabels([f"{batch} x\n{tokens:,}" for batch, tokens in places])
    ax.grid(axis="y", linewidth=0.3)
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(DOCS / "whole_model_steps.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    quality()
    whole_model()
    whole_model_steps()
    second_turn()
    for machine in ("h100", "h200"):
        if (ROOT / "results" / machine / "vllm.json").exists():
            serving(machine)
    plt.rcParams |= {"svg.hashsalt": "turboquant", "font.size": 9}
    roofline()
    context()
    cpu()
    index_figure("index_bytes.svg", "bytes of a vector", ["bytes"])
    index_figure(
        "index_time.svg", "ms a query, one thread: batches filled, single hollow", ["batch_cpu_ms", "single_cpu_ms"]
    )
    dial()


if __name__ == "__main__":
    main()
