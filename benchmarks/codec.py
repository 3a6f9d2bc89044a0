"""How long `turboquant.Codec` takes beside plain copies of the same keys and values, on one device.

    python benchmarks/codec.py --json benchmarks/results/MACHINE/codec.json

A Llama of the 8B shape (32 layers, 8 KV heads, 128 channels) in bfloat16, random numbers, no weights. The first row is
the plain tensors as bytes, also from the device to the host. "read_s" of the others is `Codec.packed`: bytes to what
attention reads.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from turboquant import CacheSpec, Codec

SPECS = {bits: CacheSpec(bits, bits, centre="none", metric="none", sinks=4, window=0) for bits in (4, 3, 2)}


def seconds(call, device: str, runs: int) -> float:
    """The least of some runs."""
    best = float("inf")
    for _ in range(runs):
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = LlamaConfig(num_hidden_layers=args.layers, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    torch.manual_seed(0)
    keys, values = (torch.randn(args.layers, 8, args.tokens, 128, dtype=torch.bfloat16, device=args.device)
                    for _ in range(2))  # fmt: skip
    plain = keys.nbytes + values.nbytes

    def copied() -> bytes:
        return b"".join(x.cpu().view(torch.uint8).numpy().tobytes() for x in (keys, values))

    def read(data: bytes) -> None:
        torch.frombuffer(bytearray(data), dtype=torch.bfloat16).to(args.device)

    data = copied()
    rows = [{"what": "plain bfloat16", "bytes": plain, "write_s": seconds(copied, args.device, args.runs),
             "read_s": seconds(lambda: read(data), args.device, args.runs)}]  # fmt: skip
    for bits, spec in SPECS.items():
        codec = Codec(config, spec)
        data = codec.encode(keys, values)
        rows.append({
            "what": f"{bits} bits", "bytes": len(data),
            "write_s": seconds(lambda: codec.encode(keys, values), args.device, args.runs),  # noqa: B023
            "read_s": seconds(lambda: codec.packed(data, args.device), args.device, args.runs),  # noqa: B023
            "decode_s": seconds(lambda: codec.decode(data, device=args.device), args.device, args.runs),  # noqa: B023
        })  # fmt: skip
    for row in rows:
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items())
        )
    if args.json:
        device = torch.cuda.get_device_name() if args.device != "cpu" else f"{os.cpu_count()} cores"
        about = {"device": device, "tokens": args.tokens, "layers": args.layers}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
