"""The command line: ``turboquant info`` and ``turboquant demo``, also as ``python -m turboquant``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import turboquant


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _operators() -> tuple[str, str]:
    """What there is of the torch operators, and of CUDA, in words."""
    built = next(Path(__file__).parent.glob("_torch*.so"), None)
    try:
        import torch
    except ImportError as error:
        return f"{'built, but' if built else 'not built;'} torch cannot be imported: {error}", "no torch"
    if torch.version.cuda is None:
        device = "torch without CUDA"
    elif not torch.cuda.is_available():
        device = f"torch with CUDA {torch.version.cuda}, but no device"
    else:
        device = f"torch with CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}"
    if not built:
        return "not built", f"not built; {device}"
    try:
        from . import ops as _ops  # noqa: F401
    except ImportError as error:
        return f"do not load: {error}", device
    return "loaded", f"{'built' if _has_device_code(built) else 'not built'}; {device}"


def _has_device_code(library: Path) -> bool:
    """Whether a library was linked with CUDA kernels: they lie in a section of this name."""
    return b".nv_fatbin" in library.read_bytes()


def info() -> int:
    """Print versions, instruction set, threads, CUDA build and device."""
    from . import _core

    operators, cuda = _operators()
    rows = {
        "turboquant": f"{turboquant.__version__}, byte format {_core.FORMAT_VERSION}",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "numpy": _installed("numpy"),
        "torch": _installed("torch"),
        "transformers": _installed("transformers"),
        "instruction set": f"{_core.isa()}, of {', '.join(_core.isa_available())} (TURBOQUANT_ISA)",
        "threads": f"{_core.num_threads()} at most (TURBOQUANT_NUM_THREADS)",
        "torch operators": operators,
        "CUDA": cuda,
    }
    for name, value in rows.items():
        print(f"{name:16} {value}")
    return 0


def demo(arguments: Sequence[str]) -> int:
    """Run the demonstration, which has options of its own."""
    try:
        from .demo import main as run
    except ImportError as error:
        print(f"turboquant demo: {error}; it needs: pip install 'turboquant-attention[hf,cli]'", file=sys.stderr)
        return 1
    return int(run(list(arguments)) or 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="turboquant", description="KV-cache quantisation and attention on packed bytes."
    )
    parser.add_argument("--version", action="version", version=turboquant.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,demo}")
    commands.add_parser("info", help="versions, instruction set, threads, CUDA build and device")
    # No help of its own: `demo --help` is answered by the demo.
    commands.add_parser("demo", help="a passage continued through packed caches of 4, 3 and 2 bits", add_help=False)
    chosen, rest = parser.parse_known_args(given)
    if chosen.command == "demo":
        return demo(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return info()
