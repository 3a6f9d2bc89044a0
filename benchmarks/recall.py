"""Needle in a haystack, everything packed: can a passage be copied from where it stood, by depth and length?

    python benchmarks/recall.py --device cuda --batch 4 --out benchmarks/results/h200

`turboquant.hf.evaluation.recall_all` is the harness. A small model copies no more than it learnt to: rows hold its own
figures beside the packed ones, and those of a text without the passage, which are a guess. Text and calibration are
those of benchmarks/quality.py. File: recall_<model>_<text>.json.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from quality import EXTRAS, SHARED, TEXTS, calibrated, held_out, load
from timing import RESULTS, Report, commit

import turboquant
from turboquant.hf.evaluation import recall_all, recall_table, text_windows

SPECS = ["default", "default-3", "default-2", "calibrated-4", "calibrated-3", "calibrated-2", "paper-mse-4",
         "paper-mse-3", "paper-mse-2"]  # fmt: skip
NEEDLE, CUE = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="reference", help="a folder of the shared models")
    parser.add_argument("--text", choices=TEXTS, default="books")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()

    every = {**turboquant.presets(), **EXTRAS}
    specs = {name: every[name].with_(sinks=0, window=0) for name in args.specs}
    model, tokenizer = load(SHARED / "models" / args.model, args.device)
    windows = text_windows(held_out(args.text), tokenizer, args.windows, max(args.lengths))
    needs = any(spec.calibrated for spec in specs.values())
    calibration = calibrated(model, tokenizer, 32768, 2048, args.batch) if needs else None
    start = time.perf_counter()
    found = recall_all(model, windows, specs, calibration=calibration, lengths=args.lengths, depths=args.depths,
                       needle=NEEDLE, cue=CUE, batch=args.batch)  # fmt: skip
    print(f"{time.perf_counter() - start:.1f} s")
    report = Report(f"recall_{args.model}_{args.text}", torch.device(args.device).type)
    for name, results in found.items():
        print(f"\n{name}\n\n{recall_table(results)}")
        shared: dict[str, Any] = {
            "spec": name,
            "exact": "everything packed",
            "model": args.model,
            "text": args.text,
            "windows": args.windows,
            "needle": NEEDLE,
            "cue": CUE,
            "dtype": "float32",
            "calibrated_on": calibration.source if calibration is not None and specs[name].calibrated else None,
            "commit": commit(),
        }
        for one in results:
            metrics = {key: round(x, 5) for key, x in vars(one).items() if key not in ("length", "depth")}
            report.add("recall", {**shared, "length": one.length, "depth": one.depth}, metrics)
    print(report.save(args.out))


if __name__ == "__main__":
    main()
