"""Times `turboquant.Codec` beside plain copies, FP8 and NVFP4 of the same keys and values, on one device.

    pip install torchao lmcache  # optional: rows of what is not installed are left out
    python benchmarks/codec.py --json benchmarks/results/MACHINE/codec.json

Keys and values are random numbers in bfloat16, of the shape of a Llama of 8B (32 layers, 8 KV heads, 128 channels).

- write_s: from tensors on the device to bytes on the host.
- read_s: from bytes to what attention reads, which is packed pages (`Codec.packed`), or bfloat16 for all others.
- decode_s: from bytes to bfloat16.
- error: the mean squared error of what comes back over the mean square of what went in.

FP8 is the serialiser of LMCache. NVFP4 is torchao's, which is made of torch's own functions on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig

from turboquant import CacheSpec, Codec

SPECS = {bits: CacheSpec(bits, bits, centre="none", metric="none", sinks=4, window=0) for bits in (4, 3, 2)}


def seconds(call, device: str, runs: int) -> float:
    """Returns the least time of some runs."""
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


def to_host(*tensors: torch.Tensor) -> bytes:
    return b"".join(x.contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in tensors)


def to_device(data: bytes, device: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


Format = tuple[str, Callable[[], bytes], Callable[[bytes], torch.Tensor]]  # name, write, read


def peers(x: torch.Tensor) -> Iterator[Format]:
    """Yields other ways to make bytes of `x` and to read them."""
    device = str(x.device)

    def read_plain(data: bytes) -> torch.Tensor:
        return to_device(data, device).view(torch.bfloat16).view(x.shape)

    yield "plain bfloat16", lambda: to_host(x), read_plain
    try:
        from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer
    except ImportError as error:
        print(f"FP8 is left out: {error}")
    else:

        def write_fp8() -> bytes:
            buffer = torch.empty(x.numel(), dtype=torch.uint8, device=device)
            Fp8QuantizationSerializer().serialize(SimpleNamespace(tensor=x), SimpleNamespace(tensor=buffer), None)
            return to_host(buffer)

        def read_fp8(data: bytes) -> torch.Tensor:
            out, source = torch.empty_like(x), SimpleNamespace(tensor=to_device(data, device))
            Fp8QuantizationDeserializer().deserialize(source, SimpleNamespace(tensor=out), None)
            return out

        yield "FP8 (LMCache)", write_fp8, read_fp8
    try:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    except ImportError as error:
        print(f"NVFP4 is left out: {error}")
    else:
        rows = x.view(-1, x.shape[-1])

        def write_nvfp4() -> bytes:
            packed = NVFP4Tensor.to_nvfp4(rows)
            return to_host(packed.qdata, packed.scale)

        def read_nvfp4(data: bytes) -> torch.Tensor:
            codes, scale = to_device(data, device).split([x.numel() // 2, x.numel() // 16])
            scale = scale.view(torch.float8_e4m3fn).view(len(rows), -1)
            packed = NVFP4Tensor(codes.view(len(rows), -1), scale, block_size=16, orig_dtype=torch.bfloat16)
            return packed.dequantize(torch.bfloat16).view(x.shape)

        yield "NVFP4 (torchao)", write_nvfp4, read_nvfp4


def error_of(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found.float() - x.float()).square().mean() / x.float().square().mean())


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
    both = torch.stack([keys, values])
    time_of = partial(seconds, device=args.device, runs=args.runs)
    rows = []
    for what, write, read in peers(both):
        data = write()
        rows.append({"what": what, "bytes": len(data), "error": error_of(read(data), both), "write_s": time_of(write),
                     "read_s": time_of(partial(read, data))})  # fmt: skip
    for bits, spec in SPECS.items():
        codec = Codec(config, spec)
        data = codec.encode(keys, values)
        decode = partial(codec.decode, data, dtype=torch.bfloat16, device=args.device)
        rows.append({"what": f"{bits} bits", "bytes": len(data),
                     "error": error_of(torch.stack([torch.stack(side) for side in decode()]), both),
                     "write_s": time_of(partial(codec.encode, keys, values)),
                     "read_s": time_of(partial(codec.packed, data, args.device)),
                     "decode_s": time_of(decode)})  # fmt: skip
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
