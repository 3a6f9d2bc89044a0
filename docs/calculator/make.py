"""Writes the calculator, a page of the docs: python docs/calculator/make.py FOLDER

FOLDER gets calculator.html, the part that docs/calculator.md includes, and index.html, the same as a page of its own.
Both hold all they need and ask no server. The numbers are those of `turboquant.cli.calc`, which the command prints too:
bytes of a page and of an exact token for each model and spec. calculator.js multiplies them by what a reader chooses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from turboquant import sizes
from turboquant.cli import calc
from turboquant.cli.calc_table import GPUS, ITEM_BYTES, MODELS, TIMED, TIMED_BYTES, TIMES
from turboquant.named_specs import OTHERS, OURS, named_or_bits
from turboquant.plan import PAGE_TOKENS
from turboquant.spec import CacheSpec

__all__ = ["numbers", "write"]

HERE = Path(__file__).parent
BITS = ("8", "6", "5", "4", "3.5", "3", "2.5", "2", "1")
SPECS = {"bits, as in the preset default": BITS, "presets": tuple(OURS), "presets of other schemes": tuple(OTHERS)}
DTYPE = "bfloat16"  # of sinks and window


def numbers() -> dict[str, Any]:
    """Returns the numbers that the page multiplies."""
    return {
        "models": {name: _model(calc.read_model(name)) for name in MODELS},
        "groups": SPECS,
        "specs": {name: _spec(named_or_bits(name, "--spec")) for names in SPECS.values() for name in names},
        "full": calc.FULL,
        "gpus": {name: {"speed": speed, "measured": name in TIMES, "times": TIMES.get(name, TIMES["h100"]),
                        "scale": 1.0 if name in TIMES else GPUS["h100"] / speed} for name, speed in GPUS.items()},
        "timed": {column: [size * tokens for tokens in TIMED] for column, size in TIMED_BYTES.items()},
        "page": PAGE_TOKENS,
        "most": sizes.MOST_TOKENS,
        "units": sizes.UNITS,
    }  # fmt: skip


def _spec(spec: CacheSpec) -> dict[str, Any]:
    try:
        column: str | None = calc.timed_as(spec)
    except NotImplementedError:
        column = None
    return {"sinks": spec.sinks, "window": spec.window, "column": column}


def _model(model: sizes.Model) -> dict[str, Any]:
    """unfit: why a spec has no packed cache, where others have.
    layers: [how many, numbers that attention reads of a token, those that are stored, window]."""
    layers = [(one, model.layers.count(one)) for one in dict.fromkeys(model.layers) if one.kind != "none"]
    specs = {name: named_or_bits(name, "--spec") for some in SPECS.values() for name in some}
    unfit = {name: why for name, spec in specs.items() if (why := sizes.not_packed(model, spec))}
    return {
        "about": str(model),
        "refused": model.refused,
        "unfit": {} if model.refused else unfit,
        "layers": [(count, one.reads(1), one.stores(1), one.window) for one, count in layers],
        "packed": {name: _packed(model, spec) for name, spec in specs.items() if name not in unfit},
    }


def _packed(model: sizes.Model, spec: CacheSpec) -> dict[str, Any]:
    """once: bytes that do not depend on what is stored. sequence: bytes for each sequence, without its tokens.
    layers: [how many, bytes of a page, bytes of an exact token, window]."""
    once = sum(sizes.packed_parts(model, spec, 0, 0).values())
    sequence = sum(sizes.packed_parts(model, spec, 1, 0).values()) - once
    item = ITEM_BYTES[DTYPE]
    layers = [(count, PAGE_TOKENS * per_token, item * one.stores(1), one.window)
              for one, _, per_token, count in sizes.runs(model, spec)]  # fmt: skip
    return {"once": once, "sequence": sequence, "layers": layers}


def write(folder: Path) -> None:
    """Writes calculator.html and index.html."""
    folder.mkdir(parents=True, exist_ok=True)
    part = (HERE / "page.html").read_text(encoding="utf-8")
    data = json.dumps(numbers(), separators=(",", ":")).replace("</", "<\\/")
    script = (HERE / "calculator.js").read_text(encoding="utf-8")
    part = part.replace("@data@", data).replace("@script@", script)
    (folder / "calculator.html").write_text(part, encoding="utf-8")
    whole = (HERE / "whole.html").read_text(encoding="utf-8").replace("@part@", part)
    (folder / "index.html").write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
