"""Times the measuring of a model: processor seconds of one thread for moments, and for the costs of errors, in turns.

    python benchmarks/measure.py smollm2 --out benchmarks/results/CPU

Needs `make real-models`. Nothing is read from or written to the cache folder.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from timing import RESULTS, Report
from transformers import AutoModelForCausalLM, AutoTokenizer

from turboquant.measuring.moments import measure_model

_BUILT = Path(__file__).resolve().parent.parent / "build/real-models"
REAL_MODELS = Path(os.environ.get("TURBOQUANT_REAL_MODELS", _BUILT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["smollm2", "gemma3"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(REAL_MODELS / args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(REAL_MODELS / args.model)
    report = Report(f"measure_{args.model}", "cpu")
    for i in range(args.rounds):
        start = time.process_time()
        moments = measure_model(model, tokenizer, read=False, write=False, costs=False)
        middle = time.process_time()
        measure_model(model, tokenizer, read=False, write=False, before=moments)
        first, second = middle - start, time.process_time() - middle
        metrics = {"moments_s": round(first, 1), "costs_s": round(second, 1), "ratio": round(second / first, 2)}
        report.add("measure", {"model": args.model, "round": i}, metrics)
        print(metrics, flush=True)
    report.save(args.out)


if __name__ == "__main__":
    main()
