"""What is installed on this machine, and what cannot work, for ``turboquant info`` and ``turboquant doctor``."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path

import turboquant

from ..oldest import OLDEST
from ..vllm.versions import TESTED, untested

__all__ = ["Finding", "cuda_findings", "device_code", "installed", "library", "machine"]

DISTRIBUTION = "turboquant-attention"


@dataclass(frozen=True)
class Finding:
    """A fact, what to do about it if anything, and whether something cannot work because of it."""

    name: str
    fact: str
    advice: str = ""
    fails: bool = False


def installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def machine(for_models: bool = False) -> Iterator[Finding]:
    """Yields findings on versions, other packages of this name, instruction set, threads, operators, CUDA and vLLM.

    for_models: whether a missing or old package that models need is a failure. Without models NumPy is enough.
    """
    libc = " ".join(platform.libc_ver()).strip() or "an unknown libc"
    yield from _core_findings()
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {libc}")
    for name in OLDEST:
        yield _version_of(name, for_models or name == "numpy")
    yield from _other_owners(packages_distributions().get("turboquant", []))
    yield from _machine_findings()
    yield from _torch_findings(for_models)
    yield from vllm_findings({name: installed(name) for name in TESTED}, os.environ.get("VLLM_PLUGINS"))


def _core_findings() -> Iterator[Finding]:
    try:
        from .. import _core
    except ImportError as error:
        how = f"install it again: pip install --force-reinstall {DISTRIBUTION}"
        yield Finding("turboquant", f"{turboquant.__version__}, but its C core does not load: {error}", how, True)
        return
    yield Finding("turboquant", f"{turboquant.__version__}, byte format {_core.FORMAT_VERSION}")


def _version_of(name: str, needed: bool) -> Finding:
    version, oldest = installed(name), OLDEST[name]
    least = ".".join(map(str, oldest))
    if version == "not installed":
        needs = {"torch": "models and operators need it", "transformers": "models need it"}
        how = f"{needs[name]}: pip install '{DISTRIBUTION}[hf]'" if name in needs else f"pip install '{name}>={least}'"
        return Finding(name, version, how, needed)
    if _number(version) < oldest:
        return Finding(name, version, f"it is too old: pip install -U '{name}>={least}'", needed)
    return Finding(name, version)


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _other_owners(owners: Iterable[str]) -> Iterator[Finding]:
    """Warns of other distributions that install a package `turboquant`: their files and ours mix in one folder."""
    others = sorted({owner for owner in owners if re.sub(r"[-_.]+", "-", owner).lower() != DISTRIBUTION})
    if others:
        names = " ".join(others)
        how = f"pip uninstall {names} {DISTRIBUTION}, then pip install {DISTRIBUTION}"
        yield Finding("package name", f"turboquant is also a package of {', '.join(others)}", how, True)


# ---- the core ----


def _machine_findings() -> Iterator[Finding]:
    try:
        from .. import _core
    except ImportError:
        return  # said above
    used, available, threads = _core.isa(), ", ".join(_core.isa_available()), _core.num_threads()
    if used == "none":
        wrong = os.environ.get("TURBOQUANT_ISA")
        yield Finding("instruction set", f"none: TURBOQUANT_ISA must be one of {available}, got {wrong!r}",
                      "unset TURBOQUANT_ISA", True)  # fmt: skip
    else:
        yield Finding("instruction set", f"{used}, of {available} (TURBOQUANT_ISA)",
                      "plain C: attention on this CPU is slow" if used == "scalar" else "")  # fmt: skip
    if not threads:
        wrong = os.environ.get("TURBOQUANT_NUM_THREADS")
        yield Finding("threads", f"none: TURBOQUANT_NUM_THREADS must be an integer in 1..256, got {wrong!r}",
                      "unset TURBOQUANT_NUM_THREADS", True)  # fmt: skip
    else:
        yield Finding("threads", f"{threads} at most (TURBOQUANT_NUM_THREADS)")


# ---- torch and CUDA ----


def library() -> Path | None:
    """Returns the file of the torch operators, or None if they were not built."""
    return next(Path(turboquant.__file__).parent.glob("_torch*.so"), None)


def device_code(file: Path) -> bool:
    """Whether a library was linked with CUDA kernels, which lie in a section of this name."""
    return b".nv_fatbin" in file.read_bytes()


def _built_for(file: Path) -> str:
    """Returns toolkit and architectures of the kernels, such as "13.0: 80+PTX 90a". torch must have been imported."""
    ask = ctypes.CDLL(str(file)).tq_torch_cuda_build
    ask.restype = ctypes.c_char_p
    said: bytes = ask()
    return said.decode()


def _torch_findings(needed: bool) -> Iterator[Finding]:
    built = library()
    try:
        import torch
    except ImportError as error:
        fact = f"{'built, but' if built else 'not built;'} torch cannot be imported: {error}"
        how = f"models and operators need it: pip install '{DISTRIBUTION}[hf]'"
        yield Finding("torch operators", fact, how, needed)
        yield Finding("CUDA", "no torch")
        return
    device = _device(torch)
    if not built:
        how = f"with torch installed, run: pip install --no-build-isolation --force-reinstall {DISTRIBUTION}"
        yield Finding("torch operators", "not built", how, needed)
        yield Finding("CUDA", f"not built; {device}")
        return
    try:
        from .. import ops as _ops  # noqa: F401
    except ImportError as error:
        how = f"install it again: pip install --no-deps --force-reinstall {DISTRIBUTION}"
        yield Finding("torch operators", f"do not load: {error}", how, needed)
        yield Finding("CUDA", device)
        return
    yield Finding("torch operators", "loaded")
    gpus = []
    if torch.version.cuda is not None and torch.cuda.is_available():
        count = range(torch.cuda.device_count())
        gpus = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in count]
    yield from cuda_findings(_built_for(built), device, _driver(torch), gpus)


def vllm_findings(versions: Mapping[str, str], allowed: str | None) -> Iterator[Finding]:
    """Says whether vLLM will load `turboquant.vllm`. versions: of each distribution of vLLM. allowed: VLLM_PLUGINS."""
    present = {name: version for name, version in versions.items() if version != "not installed"}
    if not present:
        yield Finding("vLLM", "not installed")
        return
    fact = ", ".join(f"{name} {version}" for name, version in present.items())
    if not any(one.name == "turboquant" for one in entry_points(group="vllm.general_plugins")):
        yield Finding("vLLM", f"{fact}; the plug-in is not registered", f"install it again: pip install {DISTRIBUTION}")
    elif allowed is not None and "turboquant" not in allowed.split(","):
        yield Finding("vLLM", f"{fact}; VLLM_PLUGINS leaves the plug-in out", "add turboquant to VLLM_PLUGINS")
    else:
        advice = "; ".join(said for name, version in present.items() if (said := untested(name, version)))
        yield Finding("vLLM", f"{fact}; the plug-in is active where an engine asks for it", advice)


def _device(torch: object) -> str:
    cuda = torch.version.cuda  # type: ignore[attr-defined]
    if cuda is None:
        return "torch without CUDA"
    if not torch.cuda.is_available():  # type: ignore[attr-defined]
        return f"torch with CUDA {cuda}, but no device"
    return f"torch with CUDA {cuda}, {torch.cuda.get_device_name()}"  # type: ignore[attr-defined]


def _driver(torch: object) -> tuple[int, int] | None:
    """Returns the CUDA version that the GPU's driver supports; None without a driver, or with a torch without CUDA."""
    try:
        number = int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None
    return (number // 1000, number % 1000 // 10) if number else None


def cuda_findings(
    build: str, device: str, driver: tuple[int, int] | None, gpus: list[tuple[str, tuple[int, int]]]
) -> Iterator[Finding]:
    """Yields findings on a build ("13.0: 80+PTX 90a", or ""), on torch's CUDA and device, on a driver and on GPUs."""
    toolkit, _, archs = build.partition(": ")
    if not build:
        how = "tensors on the CPU work; for GPUs install a wheel, or put nvcc on the PATH and build again"
        has_gpu = bool(gpus) or Path("/dev/nvidia0").exists()
        yield Finding("CUDA", f"not built; {device}", how if has_gpu else "")
        return
    fact = f"built with CUDA {toolkit} for {archs}; {device}"
    if driver is not None and driver[0] < _number(toolkit)[0]:
        how = f"update the GPU's driver to one for CUDA {_number(toolkit)[0]}; tensors on the CPU work"
        yield Finding("CUDA", f"{fact}; the driver is for CUDA {driver[0]}.{driver[1]}", how, bool(gpus))
    elif not gpus and Path("/dev/nvidia0").exists():
        how = "torch does not see this machine's GPU: install torch with CUDA, or update the driver"
        yield Finding("CUDA", fact, f"{how}; tensors on the CPU work")
    else:
        yield Finding("CUDA", fact)
    for name, capability in gpus:
        at = ".".join(map(str, capability))
        if capability < (8, 0):
            yield Finding("GPU", f"{name}, {at}", "compute capability 8.0 or newer is needed; use the CPU", True)
        elif not any(_runs(arch, capability) for arch in archs.split()):
            number = at.replace(".", "")
            yield Finding("GPU", f"{name}, {at}, for which this build has no code",
                          f"build with TURBOQUANT_CUDA_ARCHS={number}, or install the wheel", True)  # fmt: skip
        else:
            yield Finding("GPU", f"{name}, {at}")


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether kernels for `arch`, such as "80", "90a" or "120+PTX", run on a device of this compute capability."""
    digits = re.match(r"\d+", arch)
    assert digits, arch
    major, minor = int(digits[0][:-1]), int(digits[0][-1])
    if arch.endswith("+PTX") and (major, minor) <= capability:
        return True
    return capability == (major, minor) if "a" in arch else capability[0] == major and capability[1] >= minor
