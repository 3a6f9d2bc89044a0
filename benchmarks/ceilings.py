"""Measures memory bandwidth: a copy and a read of a buffer larger than any cache, in bytes read and written per second.

python benchmarks/ceilings.py [--device cuda]

Each is the fastest of several operations that do the same, since the obvious one need not be the fastest: in a CUDA
graph a copy is a node for the copy engines, which an elementwise kernel beats by half.
"""

from __future__ import annotations

import argparse

import torch
from timing import RESULTS, Report, microseconds


def ceilings(device: str) -> dict[str, float | str]:
    """Returns {"copy_tbps", "copy_by", "read_tbps", "read_by"}: terabytes per second, and the fastest operations."""
    numbers = 2**28 if device == "cuda" else 2**25
    x = torch.randn(numbers, device=device)
    y = torch.empty_like(x)
    wide, wide_to = x.view(torch.float64), y.view(torch.float64)
    copies = {
        "copy_": lambda: y.copy_(x),
        "neg": lambda: torch.neg(x, out=y),
        "neg float64": lambda: torch.neg(wide, out=wide_to),
    }
    reads = {"sum": x.sum, "amax": x.amax, "dot": lambda: torch.dot(x, x), "sum float64": wide.sum}
    copy = {name: microseconds([call], device, 20)["us"] for name, call in copies.items()}
    read = {name: microseconds([call], device, 20)["us"] for name, call in reads.items()}
    copy_by, read_by = min(copy, key=copy.__getitem__), min(read, key=read.__getitem__)
    return {
        "copy_tbps": round(2 * x.nbytes / copy[copy_by] / 1e6, 3),
        "copy_by": copy_by,
        "read_tbps": round(x.nbytes / read[read_by] / 1e6, 3),
        "read_by": read_by,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=RESULTS / "local", help="folder for ceilings.json")
    args = parser.parse_args()
    report = Report("ceilings", args.device)
    report.add("ceilings", {}, ceilings(args.device))
    print(report.save(args.out), report.rows[0]["metrics"])


if __name__ == "__main__":
    main()
