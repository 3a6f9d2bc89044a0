"""Builds the native parts; everything else about the package is in pyproject.toml.

    turboquant/libturboquant.so    the C core; the other two load it from beside them, so a process has it once
    turboquant/_core.abi3.so       its functions for CPython (limited API, 3.11 and newer) and NumPy; no torch
    turboquant/_torch.so           its functions (and CUDA) under LibTorch's stable ABI; no Python, one file for
                                   any torch >= 2.10

The compile commands are written to build/<variant>/build.ninja, and ninja runs what changed.

    TURBOQUANT_TORCH=auto|0|1    _torch: if torch is found (default), never, or fail without it
    TURBOQUANT_CUDA=auto|0|1     CUDA in _torch: if nvcc is found (default), never, or fail without it
    TURBOQUANT_CUDA_ARCHS        "80+PTX 90a" by default: machine code for 8.x and 9.0, PTX for every later GPU
    TURBOQUANT_GLIBC=2.28        links for this glibc and newer ones, whatever the machine has, with zig (pip install
                                 ziglang); a wheel gets the tag manylinux_2_28 (make wheel)
    TURBOQUANT_MACHINE=aarch64   builds for that machine: CC and CXX must compile for it, CPPFLAGS name its headers of
                                 Python and NumPy; without CUDA, and with TURBOQUANT_GLIBC (make wheel-aarch64)
    TURBOQUANT_SANITIZE=1        ASan and UBSan, -O1 -g1 (make sanitize runs the tests that way)
    CC, CXX, NVCC or CUDA_HOME, CPPFLAGS, CFLAGS, CXXFLAGS, LDFLAGS    as usual
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

try:
    import setuptools
    from setuptools import Command, Extension, setup
    from setuptools.command.build_ext import build_ext
except ImportError:
    raise SystemExit("turboquant: no setuptools. Run: pip install 'setuptools>=77' 'numpy>=2' ninja") from None

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")  # relative to ROOT, where ninja runs: build.ninja has no machine's paths but those of its tools
HEADER = ROOT / CSRC / "include" / "turboquant.h"

# One row per instruction set: file name in csrc/kernels, machines, flags. A row also holds for <name>_<anything>.c, and
# the longest name wins. Everything outside this table is compiled for the baseline CPU of the machine.
X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
X86_VNNI = "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512vnni"
ISA_UNITS: list[tuple[str, tuple[str, ...], str]] = [
    ("scalar", X86 + ARM, ""),
    ("avx2", X86, "-mavx2 -mfma -mf16c"),
    ("avx2_vnni", X86, "-mavx2 -mfma -mf16c -mavxvnni"),
    ("avx512", X86, "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"),
    ("avx512_vnni", X86, X86_VNNI),
    ("avx512_amx", X86, X86_VNNI + " -mamx-tile -mamx-int8"),
    ("neon", ARM, "-march=armv8-a"),
    ("neon_dot", ARM, "-march=armv8.2-a+dotprod"),
]

# CUDA files that are compiled several times, with a part of their kernels each, and how often. Each compilation has a
# TQ_SHARD, from 0 on. The files assert the number.
SHARDS = {"attend/instances.cu": 8, "append/prefill.cu": 4}

OLDEST_TORCH = (2, 10)
OPERATORS = "turboquant"  # the namespace of the operators in torch.ops
TORCH_DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
WARNINGS = ["-Wall", "-Wextra"]
# Free-threaded builds have no limited API.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
BESIDE = ["-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN"]  # to find libturboquant.so, which lies in the same folder


def fail(message: str) -> SystemExit:
    return SystemExit(f"turboquant: {message}")


def say(message: str) -> None:
    print(f"turboquant: {message}", file=sys.stderr)


# ---- what the machine has ----


def switch(name: str) -> str:
    """Returns an environment switch: 'auto', '0' or '1'."""
    value = os.environ.get(name, "").strip().lower() or "auto"
    if value not in ("auto", "0", "1"):
        raise fail(f"{name} must be auto, 0 or 1, got {value!r}")
    return value


def words(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def machine() -> str:
    """Returns the machine to build for, as `uname -m` calls it."""
    named = os.environ.get("TURBOQUANT_MACHINE")
    if not named:
        return platform.machine()
    if named not in ("x86_64", "aarch64"):
        raise fail(f"TURBOQUANT_MACHINE must be x86_64 or aarch64, got {named!r}")
    if not (os.environ.get("TURBOQUANT_GLIBC") and os.environ.get("CC") and os.environ.get("CXX")):
        raise fail(f"TURBOQUANT_MACHINE={named} needs TURBOQUANT_GLIBC, CC and CXX (see make wheel-aarch64)")
    return named


def compiler(variable: str, names: Iterable[str], install: str) -> str:
    chosen = os.environ.get(variable)
    if chosen:
        if not shutil.which(shlex.split(chosen)[0]):
            raise fail(f"{variable} is {chosen!r}, which is not on the PATH")
        return chosen
    for name in names:
        if shutil.which(name):
            return name
    raise fail(f"no compiler ({', '.join(names)}) on the PATH. Install {install}")


def find_nvcc() -> str | None:
    named = os.environ.get("NVCC")
    if not named and os.environ.get("CUDA_HOME"):
        named = str(Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc")
    return shutil.which(named or "nvcc")


def find_torch() -> tuple[Path, tuple[int, ...]] | None:
    """Finds the folder and version of the torch that will load _torch.so, without importing it.

    An isolated build (plain `pip install .`) has a path of its own. What counts is the environment behind it, which the
    same interpreter sees without the variables of the isolation.
    """
    code = "from importlib.util import find_spec as f; s = f('torch'); print(s.origin if s else '')"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    spec = find_spec("torch")
    origin = spec.origin if spec else None
    if not origin:
        origin = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip()
    if not origin:
        return None
    folder = Path(origin).parent
    found = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
    return folder, tuple(map(int, found.groups())) if found else (0,)


def torch_to_build_with() -> tuple[Path | None, str]:
    """Returns the torch folder, or None and why _torch is left out."""
    wanted = switch("TURBOQUANT_TORCH")
    if wanted == "0":
        return None, "TURBOQUANT_TORCH=0"
    found = find_torch()
    if found and found[1] >= OLDEST_TORCH:
        return found[0], ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    why = f"torch {'.'.join(map(str, found[1]))} is older than {oldest}" if found else "torch is not installed"
    if wanted == "1":
        raise fail(f"TURBOQUANT_TORCH=1, but {why}. Install torch>={oldest}, then build with --no-build-isolation")
    return None, f"{why}; once it is there, run the install again"


def nvcc_to_build_with() -> str | None:
    """Returns nvcc, or None to leave CUDA out. Prints a note if that is because there is no nvcc."""
    wanted = switch("TURBOQUANT_CUDA")
    sources = list((ROOT / CSRC / "cuda").rglob("*.cu"))
    nvcc = find_nvcc()
    if wanted == "0" or (wanted == "auto" and not sources):
        return None
    if machine() != platform.machine():
        raise fail("CUDA kernels are compiled for this machine only: TURBOQUANT_MACHINE needs TURBOQUANT_CUDA=0")
    if nvcc and sources:
        return nvcc
    if wanted == "1":
        raise fail("TURBOQUANT_CUDA=1, but nvcc was not found. Install the CUDA toolkit and put nvcc on the PATH")
    say("nvcc is not on the PATH, so the CUDA kernels are left out. To have them, install a wheel, or install the CUDA "
        "toolkit, put nvcc on the PATH and run this again")  # fmt: skip
    return None


def require_headers() -> list[str]:
    """Returns flags for the headers of CPython and NumPy, or fails and says what to install."""
    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").exists():
        raise fail("Python.h was not found. Install python3-dev (Debian, Ubuntu) or python3-devel (Fedora)")
    try:
        import numpy
    except ImportError:
        raise fail("NumPy was not found. Run: pip install 'numpy>=2' setuptools ninja") from None
    if int(numpy.__version__.split(".")[0]) < 2:
        raise fail(f"NumPy {numpy.__version__} is too old to build against. Run: pip install 'numpy>=2'")
    return ["-isystem", python, "-isystem", numpy.get_include()]


def find_ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        pass
    found = shutil.which("ninja") or shutil.which("ninja-build")
    if not found:
        raise fail("ninja was not found. Run: pip install ninja")
    return found


def isa_flags(stem: str) -> list[str] | None:
    """Returns the flags of csrc/kernels/<stem>.c, or None if it is for another kind of machine."""
    rows = [row for row in ISA_UNITS if stem == row[0] or stem.startswith(row[0] + "_")]
    if not rows:
        raise fail(f"csrc/kernels/{stem}.c has no row in ISA_UNITS of setup.py")
    _, machines, flags = max(rows, key=lambda row: len(row[0]))
    return flags.split() if machine() in machines else None


def cuda_archs() -> list[str]:
    """Returns TURBOQUANT_CUDA_ARCHS, checked."""
    archs = []
    for arch in re.split(r"[\s,;]+", os.environ.get("TURBOQUANT_CUDA_ARCHS", "").strip() or "80+PTX 90a"):
        if not re.fullmatch(r"\d{2,3}[af]?(\+PTX)?", arch):
            raise fail(f"TURBOQUANT_CUDA_ARCHS must be a list like '80+PTX 90a', got {arch!r}")
        # The kernels for 9.0 use instructions that only sm_90a has, and PTX for it runs on no other device.
        archs.append("90a" if arch.startswith("90") else arch)
    return archs


def cuda_arch_flags() -> list[str]:
    """Returns -gencode flags for cuda_archs()."""
    flags = []
    for arch in cuda_archs():
        number, ptx = arch.removesuffix("+PTX"), arch.endswith("+PTX")
        code = f"[sm_{number},compute_{number}]" if ptx else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def toolkit(nvcc: str) -> str:
    """Returns the version of the CUDA toolkit, such as 13.0."""
    found = re.search(r"release (\d+\.\d+)", asked(nvcc, "--version"))
    return found[1] if found else "unknown"


def oldest_glibc() -> str | None:
    """Returns the glibc that TURBOQUANT_GLIBC names, or None to build for that of this machine."""
    glibc = os.environ.get("TURBOQUANT_GLIBC")
    if glibc and not re.fullmatch(r"2\.\d+", glibc):
        raise fail(f"TURBOQUANT_GLIBC must be a version like 2.28, got {glibc!r}")
    return glibc or None


def glibc_linker() -> str | None:
    """Returns the command that links for an older glibc, or None to link with the compiler."""
    glibc = oldest_glibc()
    if not glibc:
        return None
    if not find_spec("ziglang"):
        raise fail(f"TURBOQUANT_GLIBC={glibc}, but zig was not found. Run: pip install ziglang")
    return f"{sys.executable} -m ziglang cc -target {machine()}-linux-gnu.{glibc} -s"


def wheel_tags() -> dict[str, str]:
    """Returns options of bdist_wheel: any CPython from 3.11 on, and the oldest glibc if it is not this machine's."""
    tags = {"py_limited_api": "cp311"} if LIMITED_API else {}
    if glibc := oldest_glibc():
        tags["plat_name"] = f"manylinux_{glibc.replace('.', '_')}_{machine()}"
    return tags


def cudart_static(nvcc: str) -> Path:
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
    if top:
        for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
            if (file := Path(top[1]) / folder / "libcudart_static.a").exists():
                return file.resolve()
    raise fail(f"libcudart_static.a was not found beside {nvcc}")


def asked(tool: str, question: str) -> str:
    return subprocess.run([*shlex.split(tool), question], capture_output=True, text=True, check=True).stdout.strip()


# ---- what to compile ----


class Ninja:
    """Writes build.ninja. Command lines are part of what ninja compares: a changed flag rebuilds."""

    RULES = """\
ninja_required_version = 1.8
rule compile
  command = $tool $flags -MD -MF $out.d -c $in -o $out
  description = $what $in
  deps = gcc
  depfile = $out.d
rule link
  command = $tool -shared -o $out $in $flags
  description = LINK $out
rule program
  command = $tool -o $out $in $flags
  description = LINK $out
"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = [f"builddir = {self.path(folder)}\n{self.RULES}"]

    def edge(
        self, rule: str, output: Path, inputs: Iterable[Path], tool: str, flags: Iterable[str], what: str = ""
    ) -> Path:
        line = shlex.join(flags).replace("$", "$$")
        self.text.append(
            f"build {self.path(output)}: {rule} {' '.join(map(self.path, inputs))}\n"
            f"  tool = {tool.replace('$', '$$')}\n  flags = {line}\n  what = {what}\n"
        )
        return output

    def compile(self, source: Path, tool: str, flags: Iterable[str], variant: str = "") -> Path:
        inside = source.relative_to(CSRC) if source.is_relative_to(CSRC) else source
        output = self.folder / inside.with_suffix(f"{source.suffix}{variant}.o")
        return self.edge("compile", output, [source], tool, flags, source.suffix[1:].upper())

    def link(self, output: str, objects: Iterable[Path], tool: str, flags: Iterable[str]) -> Path:
        return self.edge("link", self.folder / output, objects, tool, flags)

    def alias(self, name: str, targets: Iterable[Path]) -> None:
        self.text.append(f"build {name}: phony {' '.join(map(self.path, targets))}\n")

    @staticmethod
    def path(path: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", path.as_posix())

    def run(self, targets: Iterable[str], jobs: int) -> None:
        (ROOT / self.folder).mkdir(parents=True, exist_ok=True)
        file = ROOT / self.folder / "build.ninja"
        text = "".join(self.text)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        command = [find_ninja(), "-f", self.path(self.folder / "build.ninja"), "-j", str(jobs), *targets]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise fail("the build failed; the compiler's own words are above (with pip, add -v to see them)")


def sources(folder: str, suffix: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in sorted((ROOT / CSRC / folder).rglob("*" + suffix))]


def core_objects(build: Ninja, cc: str, common: list[str]) -> list[Path]:
    """Compiles core/ and kernels/. TQ_HAVE_<NAME> tells dispatch.c that a file of kernels is there."""
    c = [*common, "-std=c11", "-Icsrc/include", "-Icsrc"]
    units = [(path, flags) for path in sources("kernels", ".c") if (flags := isa_flags(path.stem)) is not None]
    c += [f"-DTQ_HAVE_{path.stem.upper()}" for path, _ in units]
    objects = [build.compile(path, cc, c) for path in sources("core", ".c")]
    return objects + [build.compile(path, cc, c + flags) for path, flags in units]


def link_library(build: Ninja, cc: str, objects: list[Path], linker: list[str], strict: bool) -> Path:
    """Links libturboquant.so: the core, which exports what is TQ_API."""
    linker = [*linker, "-Wl,-soname,libturboquant.so", *(["-Wl,-z,defs"] if strict else [])]
    # zig's own __cpu_model is not laid out as gcc's __builtin_cpu_supports expects it.
    linker += [asked(cc, "-print-libgcc-file-name")] if glibc_linker() else []
    return build.link("libturboquant.so", objects, glibc_linker() or cc, [*linker, "-pthread", "-lm"])


def compile_cuda(build: Ninja, nvcc: str, extra: Iterable[str] = ()) -> list[Path]:
    host = [f"-ccbin={os.environ['CXX']}"] if os.environ.get("CXX") else []
    flags = [*host, "-O3", "-std=c++17", *cuda_arch_flags(), "-Icsrc", "-Icsrc/include", *extra]
    flags += ["-Xfatbin=-compress-all", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    objects = []
    for path in sources("cuda", ".cu"):
        shards = SHARDS.get(path.relative_to(CSRC / "cuda").as_posix(), 0)
        for i in range(shards):
            objects.append(build.compile(path, nvcc, [*flags, f"-DTQ_SHARD={i}", f"-DTQ_SHARDS={shards}"], f".{i}"))
        if not shards:
            objects.append(build.compile(path, nvcc, flags))
    return objects


def link_core(build: Ninja, cc: str, common: list[str], linker: list[str], library: Path) -> None:
    flags = [*common, "-std=c11", "-Icsrc/include", *require_headers()]
    flags += ["-DPy_LIMITED_API=0x030B0000"] if LIMITED_API else []
    objects = [build.compile(path, cc, flags) for path in sources("python", ".c")]
    build.link("_core.so", [*objects, library], glibc_linker() or cc, [*linker, *BESIDE, "-pthread", "-lm"])


def libtorch_stubs(build: Ninja, torch: Path) -> list[Path]:
    """Builds libraries to link with in place of another machine's libtorch, which is not here.

    They have its names, and the functions of its stable C ABI without code. That ABI is the same on every machine, so
    the functions are those that this machine's libtorch exports; -z defs refuses everything else.
    """
    cc = os.environ["CC"]
    said = asked("nm -D --defined-only", str(torch / "lib" / "libtorch_cpu.so"))
    names = sorted(set(re.findall(r" T ((?:aoti_)?torch_\w+)$", said, re.MULTILINE)))
    source = build.folder / "libtorch.c"
    (ROOT / build.folder).mkdir(parents=True, exist_ok=True)
    (ROOT / source).write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    stub = build.compile(source, cc, ["-fPIC"])
    return [build.link(n, [stub], cc, ["-nostdlib", f"-Wl,-soname,{n}"]) for n in ("libtorch.so", "libtorch_cpu.so")]


def link_torch(
    build: Ninja,
    torch: Path,
    nvcc: str | None,
    common: list[str],
    linker: list[str],
    core: list[Path],
    strict: bool,
    operators: str = OPERATORS,
) -> None:
    """Links _torch.so: operators and CUDA. If the operators have a namespace of their own, <operators>.so.

    core: libturboquant.so, or the objects that it is made of, because a process loads only one library of that name.

    The library needs libtorch.so and libtorch_cpu.so and is loaded after `import torch`, so it contains no path to
    them. One file serves torch with and without CUDA. What only libtorch_cuda.so has (the current stream; libtorch.so
    brings it along where it exists) must be declared weak, and -z defs refuses any other unknown symbol here instead of
    at a user's import.
    """
    cxx = compiler("CXX", ("c++", "g++", "clang++"), "g++ (Debian, Ubuntu: build-essential), or set TURBOQUANT_TORCH=0")
    flags = [*common, *words("CXXFLAGS"), "-std=c++20", "-Icsrc/include", *TORCH_DEFINES]
    flags += ["-isystem", str(torch / "include")]
    if nvcc:
        flags += [f'-DTURBOQUANT_WITH_CUDA="{toolkit(nvcc)}: {" ".join(cuda_archs())}"', "-DUSE_CUDA"]
    flags += ["-include", "csrc/torch/old_libstdcxx.h"] if oldest_glibc() else []
    own = operators != OPERATORS
    flags += [f"-DTQ_OPERATORS={operators}"] if own else []
    objects = [build.compile(path, cxx, flags, f".{operators}" if own else "") for path in sources("torch", ".cpp")]
    output = f"{operators}.so" if own else "_torch.so"
    stubs = libtorch_stubs(build, torch) if machine() != platform.machine() else []
    objects += stubs
    folder = build.folder if stubs else torch / "lib"
    linker = [*linker, *BESIDE, f"-L{folder}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    linker += ["-Wl,-z,defs"] if strict else []
    cuda = compile_cuda(build, nvcc) if nvcc else []
    if cuda:
        build.alias("cuda", cuda)
    if zig := glibc_linker():
        runtime = [asked(cxx, f"-print-file-name={name}") for name in ("libstdc++.so.6", "libgcc_s.so.1")]
        runtime += [str(cudart_static(nvcc)), "-lrt", "-ldl"] if nvcc else []
        linker = [*linker, "-Wl,--as-needed", *runtime, "-pthread", "-lm"]
        linker += [asked(cxx, "-print-libgcc-file-name")] if own else []  # as for libturboquant.so
        build.link(output, [*objects, *cuda, *core], zig, linker)
        return
    if not nvcc:
        build.link(output, [*objects, *core], cxx, [*linker, "-pthread", "-lm"])
        return
    # nvcc knows where its own static runtime lies, so it links. It has its own spelling for options of the linker.
    host = [f"-ccbin={os.environ['CXX']}"] if os.environ.get("CXX") else []
    linker = [flag.replace("-Wl,", "-Xlinker=") if flag.startswith("-Wl,") else flag for flag in linker]
    linker = [flag if flag.startswith(("-X", "-L", "-l")) else f"-Xcompiler={flag}" for flag in linker]
    linker = [*host, "--cudart=static", "--no-device-link", *linker, "-Xcompiler=-pthread", "-lm"]
    build.link(output, [*objects, *cuda, *core], nvcc, linker)


def write_ninja(torch: Path | None, operators: str = OPERATORS) -> Ninja:
    """Makes the graph of everything to build or, if the operators have a namespace of their own, of them alone."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        here = sys.platform if sys.platform != "linux" else "another libc, such as Alpine's musl"
        raise fail(f"only Linux with glibc is supported so far, this is {here}. Use Debian, Ubuntu or Fedora, or WSL")
    sanitize = os.environ.get("TURBOQUANT_SANITIZE", "0") not in ("", "0")
    variant = "sanitize" if sanitize else "wheel" if oldest_glibc() else "release"
    abi = sysconfig.get_config_var("SOABI").replace(platform.machine(), machine())
    build = Ninja(Path("build") / f"{variant}-{abi}")
    cc = compiler("CC", ("cc", "gcc", "clang"), "gcc (Debian, Ubuntu: build-essential; Fedora: gcc)")
    common = ["-O3", "-DNDEBUG"]
    linker = ["-Wl,-Bsymbolic", *words("LDFLAGS")]
    if sanitize:
        checks = ["-fsanitize=address,undefined,float-cast-overflow"]
        checks += ["-fno-sanitize-recover=undefined,float-cast-overflow"]
        common = ["-O1", "-g1", "-fno-omit-frame-pointer", *checks]
        # Checks are calls, not inlined code: compiles twice as fast.
        common += ["--param=asan-instrumentation-with-call-threshold=0"]
        linker += checks
    common += [*words("CPPFLAGS"), "-fPIC", "-fvisibility=hidden", "-pthread", *WARNINGS]
    # No contraction: the code of a number must not depend on whether a compiler fuses a product and a sum.
    common += ["-ffp-contract=off"]
    c = [*words("CFLAGS"), *common, "-Werror=implicit"]
    core = core_objects(build, cc, c)
    if operators != OPERATORS:
        assert torch
        link_torch(build, torch, nvcc_to_build_with(), common, linker, core, True, operators)
        return build
    library = link_library(build, cc, core, linker, strict=not sanitize)
    link_core(build, cc, c, linker, library)
    if torch:
        link_torch(build, torch, nvcc_to_build_with(), common, linker, [library], strict=not sanitize)
    return build


class BuildNative(build_ext):
    """setuptools names, copies and packs the libraries; ninja makes them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.torch, self.why = torch_to_build_with()
        if not self.torch:
            self.extensions = [ext for ext in self.extensions if not ext.name.endswith("._torch")]

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith(("_torch", "libturboquant")):  # it has no Python in it, so no Python version in its name
            return fullname.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        if not self.torch:
            say(f"building without the torch operators: {self.why}")
        build = write_ninja(self.torch)
        names = [ext.name.rpartition(".")[2] for ext in self.extensions]
        build.run([Ninja.path(build.folder / f"{name}.so") for name in names], self.parallel or os.cpu_count() or 1)
        for ext, name in zip(self.extensions, names, strict=True):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(ROOT / build.folder / f"{name}.so"), str(target))
        if not self.torch:  # one from an earlier build would be packed, or loaded with a newer core
            Path(self.get_ext_fullpath("turboquant._torch")).unlink(missing_ok=True)

    def copy_extensions_to_source(self) -> None:
        for other in (ROOT / "turboquant").glob("_core.*.so"):  # one of another ABI would be imported instead
            other.unlink()
        super().copy_extensions_to_source()


class BuildCuda(Command):
    """Compiles csrc/cuda alone, for the archs in TURBOQUANT_CUDA_ARCHS: needs nvcc, but neither a GPU nor torch."""

    description = "compile csrc/cuda, link nothing"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012 (setuptools' own form)
    folder = "cuda-check"

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def targets(self, build: Ninja, nvcc: str) -> list[Path]:
        return compile_cuda(build, nvcc)

    def run(self) -> None:
        nvcc = find_nvcc()
        if not nvcc:
            raise fail("nvcc was not found. Install the CUDA toolkit and put nvcc on the PATH")
        build = Ninja(Path("build") / self.folder)
        build.alias("all", self.targets(build, nvcc))
        build.run(["all"], os.cpu_count() or 1)


class BuildHarness(BuildCuda):
    """Builds the programs of tests/cuda into build/cuda-harness, with the core's scalar kernels as the reference."""

    description = "build the CUDA harnesses of tests/cuda"
    folder = "cuda-harness"
    defines: tuple[str, ...] = ()

    def targets(self, build: Ninja, nvcc: str) -> list[Path]:
        cc = compiler("CC", ("cc", "gcc", "clang"), "gcc (Debian, Ubuntu: build-essential)")
        core = sources("core", ".c") + [path for path in sources("kernels", ".c") if path.stem.startswith("scalar")]
        flags = ["-O2", "-std=gnu11", "-ffp-contract=off", "-Icsrc", "-Icsrc/include"]
        objects = [build.compile(path, cc, flags) for path in core]
        objects += compile_cuda(build, nvcc, ["-lineinfo", *self.defines])  # compute-sanitizer then names lines
        flags = ["-O2", "-std=c++17", "-lineinfo", *cuda_arch_flags(), "-Icsrc", "-Icsrc/include"]
        programs = []
        for path in sorted((ROOT / "tests" / "cuda").glob("*_harness.cu")):
            harness = build.compile(path.relative_to(ROOT), nvcc, flags)
            programs.append(build.folder / path.stem)
            build.edge("program", programs[-1], [harness, *objects], nvcc, ["-lpthread"])
        return programs


class BuildSanitize(BuildHarness):
    """Builds the harnesses for compute-sanitizer in build/cuda-sanitize. ARRIVALS in device/device.cuh differs."""

    description = "build the CUDA harnesses of tests/cuda for compute-sanitizer"
    folder = "cuda-sanitize"
    defines = ("-DTQ_EVERY_LANE_ARRIVES",)


class BuildHubKernel(Command):
    """Writes a build of the operators for the package `kernels` of Hugging Face into build/hub-kernel: the native code
    as one library, with a namespace of its own in torch.ops, so that several builds can be loaded at once. It is made
    of the objects of the wheel (make hub-kernel)."""

    description = "build the operators as a kernel for Hugging Face's hub"
    user_options = [  # noqa: RUF012
        ("kernel-version=", None, "the kernel's version on the hub, a number (default 1)"),
        ("folder=", None, "the repository that is written (default build/hub-kernel)"),
    ]
    FILES = ("plan.py", "arguments.py", "py.typed")  # of the package, copied unchanged

    def initialize_options(self) -> None:
        self.kernel_version, self.folder = "1", "build/hub-kernel"

    def finalize_options(self) -> None:
        if not re.fullmatch("[1-9][0-9]*", str(self.kernel_version)):
            raise fail(f"--kernel-version must be a number from 1, got {self.kernel_version!r}")

    def run(self) -> None:
        torch, why = torch_to_build_with()
        if not torch:
            raise fail(f"the kernel needs the operators: {why}")
        nvcc = nvcc_to_build_with()
        backend = f"cu{toolkit(nvcc).replace('.', '')}" if nvcc else "cpu"
        named = [arch.removesuffix("+PTX") for arch in cuda_archs()] if nvcc else []
        archs = [re.sub(r"^(\d+)(\d)", r"\1.\2", arch) for arch in named]
        name = f"{OPERATORS}_{backend}_{self.digest(backend, archs)}"
        build = write_ninja(torch, name)
        build.run([Ninja.path(build.folder / f"{name}.so")], os.cpu_count() or 1)
        abi = "".join(map(str, OLDEST_TORCH))
        folder = ROOT / self.folder / "build" / f"torch-stable-abi{abi}-{backend}-{machine()}-linux"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(ROOT / build.folder / f"{name}.so", folder)
        for file in self.FILES:
            shutil.copy(ROOT / "turboquant" / file, folder)
        for file in sorted((ROOT / CSRC / "hub").glob("*.py")):
            (folder / file.name).write_text(file.read_text().replace("OPERATORS_OF_THIS_BUILD", name))
        metadata = {
            "id": name,
            "name": "turboquant-attention",
            "version": int(self.kernel_version),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cuda", "archs": archs} if nvcc else {"type": "cpu"},
            "digest": {"algorithm": "sha256", "files": digests(folder)},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        print(folder)

    def digest(self, backend: str, archs: list[str]) -> str:
        """Returns a digest of everything that the build is made of."""
        files = [ROOT / "setup.py", *(ROOT / path for path in everything)] + [
            ROOT / "turboquant" / name for name in self.FILES
        ]
        told = [version(), self.kernel_version, backend, *archs, *(file.read_bytes().hex() for file in files)]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def digests(folder: Path) -> dict[str, str]:
    """Returns SHA-256 of each file of a folder in base64, by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in files}  # fmt: skip


def version() -> str:
    found = re.search(r'^#define TQ_VERSION "([^"]+)"', HEADER.read_text(), re.MULTILINE)
    if not found:
        raise fail(f"no TQ_VERSION in {HEADER.name}")
    return found[1]


if int(setuptools.__version__.split(".")[0]) < 77:
    raise fail(f"setuptools {setuptools.__version__} is too old to read pyproject.toml: pip install 'setuptools>=77'")
# Every file of csrc goes into a source distribution.
everything = sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).rglob("*") if path.is_file())
setup(
    version=version(),
    ext_modules=[
        Extension("turboquant.libturboquant", sources=[], depends=everything),
        Extension("turboquant._core", sources=[], py_limited_api=LIMITED_API),
        Extension("turboquant._torch", sources=[]),
    ],
    options={"bdist_wheel": wheel_tags()},
    cmdclass={
        "build_ext": BuildNative,
        "build_cuda": BuildCuda,
        "build_harness": BuildHarness,
        "build_sanitize": BuildSanitize,
        "build_hub_kernel": BuildHubKernel,
    },
)
