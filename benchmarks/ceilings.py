"""What the memory can do: a copy and a read of a buffer larger than any cache, in bytes read and written per second.

python benchmarks/ceilings.py [--device cuda]
"""

from __future__ import annotations

import argparse

import torch
from timing import RESULTS, Report, microseconds


def ceilings(device: str) -> dict[str, float]:
    """{"copy_tbps", "read_tbps"} of this device, terabytes per second."""
    numbers = 2**30 if device == "cuda" else 2**27
    x = torch.randn(numbers // 4, device=device)
    y = torch.empty_like(x)
    copy = microseconds([lambda: y.copy_(x)], device, 20)["us"]
    read = microseconds([lambda: x.sum()], device, 20)["us"]
    return {"copy_tbps": round(2 * x.nbytes / copy / 1e6, 3), "read_tbps": round(x.nbytes / read / 1e6, 3)}


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
