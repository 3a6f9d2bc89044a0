"""Quality against bytes, as an SVG: docs/quality.svg, from the rows that docs/presets.md shows.

python benchmarks/quality_plot.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from presets import ROOT, results


def plot(rows: list[dict[str, Any]], path: Path) -> Path:
    """Every spec of these rows with everything packed: a point each, a line through each family."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    packed = [r for r in rows if r["params"]["exact"] == "everything packed"]
    families: dict[str, list[dict[str, Any]]] = {}
    for row in packed:
        families.setdefault(_family(row["params"]["spec"]), []).append(row)
    plt.rcParams["svg.hashsalt"] = "turboquant"  # the same file for the same numbers
    figure, axes = plt.subplots(figsize=(7.5, 5))
    for i, (family, members) in enumerate(sorted(families.items())):
        points = sorted(map(_point, members))
        style = dict(marker="osD^v"[i // 10 % 5], color=f"C{i % 10}", markersize=4.5, linewidth=1.2)
        axes.plot(*zip(*points), label=family, **style)
    axes.set(
        xlabel="bits per number, every byte of a page counted", ylabel="KL divergence, nats per token", yscale="log"
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _point(row: dict[str, Any]) -> tuple[float, float]:
    return row["metrics"]["effective_bits"], row["metrics"]["kl_divergence"]


def _family(spec: str) -> str:
    """A preset's name without its bits."""
    if spec.startswith("skainet"):
        return "skainet"
    return re.sub(r"(-\d[\d.]*)+$", "", spec.split(",")[0])


if __name__ == "__main__":
    print(plot([row for (_, text, _), row in results().items() if text == "books"], ROOT / "docs" / "quality.svg"))
