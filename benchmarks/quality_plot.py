"""Quality against bytes, as an SVG.

python benchmarks/quality_plot.py benchmarks/results/cpu/quality_reference_books_4x1024.json docs/quality.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def plot(rows: list[dict[str, Any]], path: Path) -> Path:
    """Every spec of a result file with everything packed: a point each, a line through each family."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        params, metrics = row["params"], row["metrics"]
        if row["bench"] == "quality" and params["exact"] == "everything packed":
            point = metrics["effective_bits"], metrics["kl_divergence"]
            families.setdefault(_family(params["spec"]), []).append(point)
    plt.rcParams["svg.hashsalt"] = "turboquant"  # the same file for the same numbers
    figure, axes = plt.subplots(figsize=(7.5, 5))
    for i, (family, points) in enumerate(sorted(families.items())):
        style = dict(marker="osD^v"[i // 10 % 5], color=f"C{i % 10}", markersize=4.5, linewidth=1.2)
        axes.plot(*zip(*sorted(points)), label=family, **style)
    axes.set(
        xlabel="bits per number, every byte of a page counted", ylabel="KL divergence, nats per token", yscale="log"
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _family(spec: str) -> str:
    """A preset's name without its bits."""
    if spec.startswith("skainet"):
        return "skainet"
    return re.sub(r"(-\d[\d.]*)+$", "", spec.split(",")[0])


if __name__ == "__main__":
    print(plot(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2])))
