"""Which folder may include or import which, and which files may be in the repository.

Each check is a function of a folder. The second half of this file plants each fault in a small tree and tests that the
check finds it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# ---- rings: the folders of csrc, and what each may include ----

LIBC = (
    "assert.h errno.h float.h inttypes.h limits.h math.h pthread.h sched.h stdalign.h stdatomic.h stdbool.h stddef.h "
    "stdint.h stdlib.h string.h time.h unistd.h cpuid.h sys/auxv.h sys/syscall.h asm/hwcap.h"
).split()
CXX_STD = (
    "algorithm array atomic climits cmath cstddef cstdint cstdlib cstring exception functional initializer_list limits "
    "map memory mutex new numeric optional shared_mutex span sstream stdexcept string string_view tuple type_traits "
    "utility vector"
).split()
INTRINSICS = ["immintrin.h", "x86intrin.h", "arm_neon.h", "arm_acle.h"]
CUDA = "cuda.h cuda_*.h cooperative_groups.h cooperative_groups/* mma.h math_constants.h cuda/*".split()
TORCH = "torch/csrc/stable/* torch/csrc/inductor/aoti_torch/c/* torch/headeronly/*".split()


@dataclass(frozen=True)
class Ring:
    ours: list[str]  # patterns of files under csrc that it may include, beside its own folder
    system: list[str]  # patterns of headers from outside the repository


RINGS = {
    "include": Ring([], ["stddef.h", "stdint.h"]),
    "core": Ring(["include/*"], LIBC),
    "kernels": Ring(["include/*", "core/kernels.h", "core/scan_kernels.h"], LIBC + INTRINSICS),
    "cuda": Ring(["include/*", "core/plan_kind.h"], [*LIBC, "stdio.h", *CXX_STD, *CUDA]),  # stdio.h for snprintf
    "python": Ring(["include/*"], [*LIBC, "stdio.h", "Python.h", "structmember.h", "numpy/*.h"]),
    "torch": Ring(["include/*"], [*LIBC, "cstdio", *CXX_STD, *TORCH, "dlfcn.h"]),
}
# Folders of csrc/cuda/attend, and which of the others each may include; all may include the files beside them.
CHOICE = ["choose/cut.h", "choose/cost.h"]
ATTEND = {"choose": [], "rows": [], "loop": ["rows"], "split": ["rows", "loop", *CHOICE],
          "fused": ["rows", "loop", *CHOICE], "chunk": CHOICE}  # fmt: skip
CODE = {".c", ".h", ".cpp", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)

# The floors of the package, the lowest first: a folder may import those before it, also in functions. "ground" are the
# modules outside any folder, "front" is `turboquant/__init__.py`, whose names users import.
FLOORS = (
    "ground index measured models kvcache measuring esm hf evaluation calibration patching vllm front cli __main__"
).split()
# Floors and packages that a folder may not import, though its floor or `TORCH_FLOORS` would allow some of them.
MAY_NOT_IMPORT = {
    "kvcache": ["models", "index", "transformers"],
    "index": ["torch"],
    "measured": ["torch", "index"],
    "vllm": ["esm", "hf", "evaluation", "calibration", "patching", "measuring", "index"],
    **{floor: ["index"] for floor in "models measuring esm hf evaluation calibration patching".split()},
}
BUILT = ["turboquant._core"]  # below all floors
MOST_IN_A_CIRCLE = 3  # files that import one another, TYPE_CHECKING and functions included

# What may import torch and transformers when it is imported. All other modules may do so inside a function only.
TORCH_FLOORS = "models kvcache measuring esm hf evaluation calibration patching".split()
TORCH_MODULES = [
    f"turboquant.{name}"
    for name in (
        "operators operator_docs ops cli.chat cli.demo cli.diagnosis cli.esm_commands "
        "vllm.batch vllm.device_rows vllm.ragged vllm.steps vllm.layers vllm.backend vllm.gpu vllm.by_spec "
        "vllm.by_shape vllm.choose"
    ).split()
] + [f"turboquant.{floor}{rest}" for floor in TORCH_FLOORS for rest in ("", ".*")]
NEEDS_TORCH = {"torch", "transformers", "safetensors", "tokenizers"}

ADAPTERS = {"langchain": "langchain_core", "haystack": "haystack", "llama_index": "llama_index"}

TOP_LEVEL = set(
    "csrc turboquant turboquant_attention.py demo tests benchmarks examples docs pyproject.toml setup.py Makefile "
    "MANIFEST.in README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE SECURITY.md".split()
)
MAX_LINES = 800
# Generated or data: read by programs only.
NOT_READ_BY_PEOPLE = [
    "turboquant/data/*",
    "demo/turboquant_demo/*",
    "tests/golden/*",
    "tests/data/*",
    "benchmarks/results/*",
    "*_tables.h",
    "docs/*.svg",
]
# Paths that exist on one machine only. The pattern is written in two parts so that it does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/~$})\]*-])/(?:" + "home|root|opt|mnt|scratch|work|Users" + r")/[\w.]")


# ---- the checks ----


def strip_comments(text: str) -> str:
    """C with comments replaced by spaces. Strings and line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return token if token[0] in "\"'" else re.sub(r"[^\n]", " ", token)

    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', blank, text, flags=re.DOTALL)


def c_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "csrc").rglob("*") if path.suffix in CODE)


def include_faults(root: Path) -> Iterator[str]:
    csrc = root / "csrc"
    for path in c_files(root):
        name = path.relative_to(csrc).as_posix()
        folder = name.partition("/")[0]
        ring = RINGS.get(folder)
        if ring is None or folder == name:
            yield f"csrc/{name}: belongs to no ring"
            continue
        # The compiler looks beside the file, then in the -I folders of its ring.
        places = [csrc / "include"] + ([csrc] if folder in ("core", "kernels", "cuda") else [])
        text = strip_comments(path.read_text())
        for match in INCLUDE.finditer(text):
            line = text.count("\n", 0, match.start(match.lastindex or 0)) + 1
            wanted = match[1] or match[2]
            beside = [path.parent] if match[2] else []
            found = next((p for base in beside + places if (p := (base / wanted).resolve()).is_file()), None)
            if found is None:
                allowed = ring.system
            elif not found.is_relative_to(csrc.resolve()):
                allowed = []
            else:
                allowed, wanted = [*ring.ours, f"{folder}/*"], found.relative_to(csrc.resolve()).as_posix()
            if not any(fnmatch(wanted, pattern) for pattern in allowed):
                yield f"csrc/{name}:{line}: {folder}/ may not include {wanted}"


def attend_faults(root: Path) -> Iterator[str]:
    """Finds includes that `ATTEND` does not allow: no strategy of attention on CUDA includes another."""
    folder = root / "csrc/cuda/attend"
    for path in (path for path in c_files(root) if path.is_relative_to(folder) and path.parent != folder):
        floor = path.parent.relative_to(folder).as_posix()
        allowed = (floor, *ATTEND.get(floor, []))
        for name in re.findall(r'#include "cuda/attend/(\w+/.+)"', path.read_text()):
            if floor not in ATTEND or not name.startswith(allowed):
                yield f"{path.relative_to(root).as_posix()}: {floor}/ may not include {name}"


def library_faults(root: Path) -> Iterator[str]:
    """The library reports errors in its status alone. It neither prints nor ends the process."""
    call = re.compile(r"(?<![\w.>])(v?f?printf|puts|fputs|putchar|perror|abort|exit|_exit|quick_exit)\s*\(")
    for path in c_files(root):
        name = path.relative_to(root).as_posix()
        if name.startswith(("csrc/core/", "csrc/kernels/", "csrc/cuda/", "csrc/include/")):
            text = strip_comments(path.read_text())
            for match in call.finditer(text):
                yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: calls {match[1]}"


def top_imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of what importing the module imports: nothing in functions or under TYPE_CHECKING."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(nodes: list[ast.stmt]) -> Iterator[tuple[int, str]]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse)
            elif isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join(parent + ([node.module] if node.module else []))
                yield node.lineno, base
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                    inner = getattr(node, field, [])
                    for one in inner:
                        yield from walk([one] if isinstance(one, ast.stmt) else one.body)

    yield from walk(ast.parse(path.read_text()).body)


def module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_faults(root: Path) -> Iterator[str]:
    for path in sorted((root / "turboquant").rglob("*.py")):
        module = module_name(path, root)
        if any(fnmatch(module, pattern) for pattern in TORCH_MODULES):
            continue
        for line, name in dict.fromkeys(top_imports(path, module)):
            heavy = name.partition(".")[0] in NEEDS_TORCH
            if heavy or any(fnmatch(name, pattern) for pattern in TORCH_MODULES):
                yield f"{path.relative_to(root)}:{line}: imports {name} on import, and is to work without torch"


@cache
def all_imports(path: Path, module: str) -> list[tuple[int, str]]:
    """(line, absolute name) of everything imported anywhere in a module."""
    return list(_all_imports(path, module))


def _all_imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(parent + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def modules_of(root: Path) -> dict[str, Path]:
    return {module_name(path, root): path for path in sorted((root / "turboquant").rglob("*.py"))}


def floor_of(name: str, modules: Mapping[str, Path]) -> str:
    """The floor of a module, or of what is imported from it."""
    part = name.split(".")[1] if "." in name else ""
    if part in FLOORS or part in ADAPTERS or any(module.startswith(f"turboquant.{part}.") for module in modules):
        return part
    return "ground" if f"turboquant.{part}" in modules else "front"


def of_package(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, name) of all that a module imports of the package. `from a import b` gives a.b, a module or not."""
    every = all_imports(path, module)
    for line, name in every:
        inner = any(at == line and other.startswith(f"{name}.") for at, other in every)
        if name.partition(".")[0] == "turboquant" and not inner and name not in BUILT:
            yield line, name


def floor_faults(root: Path) -> Iterator[str]:
    modules = modules_of(root)
    for module, path in modules.items():
        floor, where = floor_of(module, modules), path.relative_to(root)
        if floor in ADAPTERS:  # above all: `adapter_faults`
            continue
        if floor not in FLOORS:
            yield f"{where}: {floor}/ has no floor"
            continue
        for line, name in of_package(path, module):
            theirs = floor_of(name, modules)
            if theirs in FLOORS and FLOORS.index(theirs) > FLOORS.index(floor):
                yield f"{where}:{line}: {floor} may not import {name}, which stands above it"
        for line, name in all_imports(path, module):
            if any(f"{name}.".startswith((f"{x}.", f"turboquant.{x}.")) for x in MAY_NOT_IMPORT.get(floor, ())):
                yield f"{where}:{line}: {floor} may not import {name}"


def circles(arrows: dict[str, set[str]]) -> Iterator[list[str]]:
    """Modules that import one another, directly or through others (strongly connected components, after Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(arrows[module]):
            if other not in number:
                yield from visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            circle = path[path.index(module) :]
            del path[path.index(module) :]
            if len(circle) > 1:
                yield sorted(circle)

    for module in arrows:
        if module not in number:
            yield from visit(module)


def circle_faults(root: Path) -> Iterator[str]:
    modules = modules_of(root)
    arrows = {}
    for module, path in modules.items():
        names = (name for _, name in of_package(path, module))
        arrows[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & {*modules} - {
            module
        }
    for circle in circles(arrows):
        if len(circle) > MOST_IN_A_CIRCLE:
            yield f"{modules[circle[0]].relative_to(root)}: {len(circle)} files import one another: {', '.join(circle)}"


def adapter_faults(root: Path) -> Iterator[str]:
    """Finds imports of the adapters to other packages, and imports of those packages outside the adapters."""
    modules = [f"turboquant.{name}" for name in ADAPTERS]
    for path in sorted((root / "turboquant").rglob("*.py")):
        if (module := module_name(path, root)) in modules:
            continue
        for line, name in all_imports(path, module):
            if name.partition(".")[0] in ADAPTERS.values() or any(f"{name}.".startswith(f"{m}.") for m in modules):
                yield f"{path.relative_to(root)}:{line}: {module} may not import {name}"


def tree(root: Path) -> list[str]:
    """Files that git tracks or would add."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if listed.returncode == 0:
            return [name for name in listed.stdout.splitlines() if (root / name).is_file()]
    made = re.compile(r"(^|/)(build|dist|__pycache__|[^/]*\.egg-info|\.(git|venv|hypothesis|\w+_cache))/|\.so$")
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(name for name in names if not made.search(name))


def read(root: Path, name: str) -> str | None:
    """The text of a file, or None if it is no text."""
    data = (root / name).read_bytes()
    return None if b"\0" in data[:8192] else data.decode(errors="replace")


def top_level_faults(root: Path) -> Iterator[str]:
    for name in sorted({name.partition("/")[0] for name in tree(root)}):
        if name not in TOP_LEVEL and not name.startswith("."):
            yield f"{name}: has no place at the top level"


def length_faults(root: Path) -> Iterator[str]:
    for name in tree(root):
        if name == "LICENSE" or any(fnmatch(name, pattern) for pattern in NOT_READ_BY_PEOPLE):
            continue
        text = read(root, name)
        if text is not None and (lines := text.count("\n")) > MAX_LINES:
            yield f"{name}: {lines} lines, more than {MAX_LINES}"


def path_faults(root: Path) -> Iterator[str]:
    for name in tree(root):
        if fnmatch(name, "turboquant/data/*"):
            continue
        for number, line in enumerate((read(root, name) or "").splitlines(), 1):
            if match := MACHINE_PATH.search(line):
                yield f"{name}:{number}: {line[match.start() :].split()[0]} is a path of one machine"


def module_name_faults(root: Path) -> Iterator[str]:
    """pytest cannot load two test modules of one name, in whichever folders they are."""
    first: dict[str, str] = {}
    for name in tree(root):
        if fnmatch(name, "tests/*test_*.py"):
            other = first.setdefault(Path(name).name, name)
            if other != name:
                yield f"{name}: has the name of {other}"


CHECKS = [
    include_faults,
    attend_faults,
    library_faults,
    import_faults,
    floor_faults,
    circle_faults,
    adapter_faults,
    top_level_faults,
    length_faults,
    path_faults,
    module_name_faults,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removesuffix("_faults"))
def test_tree(check):
    assert not (faults := list(check(ROOT))), "\n".join(faults)


def test_import_without_torch():
    """`import turboquant` and quantising work where torch and transformers cannot be imported."""
    pytest.importorskip("turboquant._core")
    code = (
        "import sys\n"
        f"for name in {sorted(NEEDS_TORCH)}: sys.modules[name] = None\n"
        "import turboquant, turboquant._core\n"
        "turboquant.Quantizer, turboquant.CacheSpec, turboquant.preset('default')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_modules_of_the_tests_load_without_torch(tmp_path):
    """No test module fails to load where torch is not installed, as in `make sanitize-core`."""
    for package in Path(pytest.__file__).parents[1].iterdir():
        if package.suffix != ".pth" and not package.name.startswith(("torch", "transformers", "safetensors")):
            (tmp_path / package.name).symlink_to(package)
    command = [sys.executable, "-S", "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_hub_kernel_exports_all_operators_by_their_names():
    """Its modules are not imported by the quick tests: they need a build of their own."""
    names = {}
    for node in ast.parse((ROOT / "csrc" / "hub" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            assert isinstance(node.value, ast.Tuple)
            names |= dict(zip(map(ast.unparse, node.targets[0].elts), map(ast.unparse, node.value.elts), strict=True))
        elif isinstance(node, ast.Assign):
            exported = set(ast.literal_eval(node.value))  # __all__
    operators = set(re.findall(r'm\.def\("(\w+)', (ROOT / "csrc" / "torch" / "ops.cpp").read_text()))
    assert operators and names == {name: f"_operators.{name}" for name in operators}
    assert exported == operators | {"Plan", "Side"}


def test_version_is_written_once():
    """The version is TQ_VERSION in turboquant.h, where setup.py reads it. `turboquant.__version__` is the same."""
    turboquant = pytest.importorskip("turboquant")
    pytest.importorskip("turboquant._core")
    written = re.search(r'^#define TQ_VERSION "(.+)"', (ROOT / "csrc/include/turboquant.h").read_text(), re.MULTILINE)
    assert written and turboquant.__version__ == written[1]


# ---- tests of the checks: one fault at a time in a small tree without faults ----

SOUND = {
    "csrc/include/turboquant.h": "#include <stdint.h>\n",
    "csrc/core/kernels.h": '#include "turboquant.h"\n',
    "csrc/core/internal.h": "#include <stddef.h>\n",
    "csrc/core/plan_kind.h": "#include <stdint.h>\n",
    "csrc/core/plan.c": '#include "internal.h"\n#include <math.h>\n/* #include <stdio.h> prints: printf("x") */\n',
    "csrc/kernels/avx2.c": '#include "core/kernels.h"\n#include <immintrin.h>\n',
    "csrc/cuda/attend/pages.cuh": "#include <cuda_fp16.h>\n",
    "csrc/cuda/attend/attend.cu": '#include "cuda/attend/pages.cuh"\n#include "core/plan_kind.h"\n',
    "csrc/python/module.c": '#include <Python.h>\n#include <numpy/arrayobject.h>\n#include "turboquant.h"\n',
    "csrc/torch/ops.cpp": '#include <torch/csrc/stable/library.h>\n#include <vector>\n#include "turboquant.h"\n',
    "turboquant/__init__.py": "from .plan import x\ndef f():\n    from . import ops\n    import torch\n",
    "turboquant/plan.py": "from typing import TYPE_CHECKING\nimport numpy\nif TYPE_CHECKING:\n    import torch\n",
    "turboquant/ops.py": "import torch\nfrom .plan import x\n",
    "turboquant/hf/patching/llama.py": "import transformers\n",
    "turboquant/langchain.py": "from langchain_core.documents import x\nfrom .index import y\n",
    "turboquant/kvcache/pages.py": "import torch\nfrom ..plan import x\n",
    "turboquant/kvcache/b.py": "from . import c\n",
    "turboquant/kvcache/c.py": "from ..kvcache.d import x\n",
    "turboquant/kvcache/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n",
    "turboquant/kvcache/a.py": "",
    "tests/test_x.py": "",
    ".ci/run": "echo https://example.org/home/page ./work/x {dir}/opt/y\n",
}

PLANTED = {  # file, its content, the check that must find it
    "header with libm": ("csrc/include/other.h", "#include <math.h>\n", include_faults),
    "header with core": ("csrc/include/other.h", '#include "../core/kernels.h"\n', include_faults),
    "core with stdio": ("csrc/core/bad.c", "#include <stdio.h>\n", include_faults),
    "core with intrinsics": ("csrc/core/bad.c", "#  include <immintrin.h>\n", include_faults),
    "core with a kernel": ("csrc/core/bad.c", '#include "kernels/avx2.c"\n', include_faults),
    "core with python": ("csrc/core/bad.c", "int x;\n#include <Python.h>\n", include_faults),
    "kernel with core's inside": ("csrc/kernels/bad.c", '#include "core/internal.h"\n', include_faults),
    "kernel with core's inside, by path": ("csrc/kernels/bad.c", '#include "../core/internal.h"\n', include_faults),
    "cuda with torch": ("csrc/cuda/bad.cu", "#include <torch/csrc/stable/tensor.h>\n", include_faults),
    "cuda with core": ("csrc/cuda/tile/bad.cuh", '#include "core/kernels.h"\n', include_faults),
    "python with core": ("csrc/python/bad.c", '#include "../core/kernels.h"\n', include_faults),
    "python with torch": ("csrc/python/bad.c", '#include "../torch/ops.cpp"\n', include_faults),
    "torch with python": ("csrc/torch/bad.cpp", "#include <Python.h>\n", include_faults),
    "torch with unstable torch": ("csrc/torch/bad.cpp", "#include <torch/extension.h>\n", include_faults),
    "torch with the python binding": ("csrc/torch/bad.cpp", '#include "../python/module.c"\n', include_faults),
    "outside csrc": ("csrc/core/bad.c", '#include "../../turboquant/plan.py"\n', include_faults),
    "no ring": ("csrc/extra/bad.c", "int x;\n", include_faults),
    "rows with a loop": ("csrc/cuda/attend/rows/bad.cuh", '#include "cuda/attend/loop/warp.cuh"\n', attend_faults),
    "a strategy with another": ("csrc/cuda/attend/split/x.cu", '#include "cuda/attend/fused/cut.cuh"\n', attend_faults),
    "core that prints": ("csrc/core/bad.c", 'void f(void)\n{\n    printf("x");\n}\n', library_faults),
    "core that ends": ("csrc/core/bad.c", "void f(void) { abort (); }\n", library_faults),
    "package with torch": ("turboquant/bad.py", "import torch.nn\n", import_faults),
    "package with torch in a try": (
        "turboquant/bad.py",
        "try:\n    from torch import nn\nexcept E:\n    x = 0\n",
        import_faults,
    ),
    "package with torch in a handler": (
        "turboquant/bad.py",
        "try:\n    x = 0\nexcept E:\n    import torch\n",
        import_faults,
    ),
    "package with torch in a class": ("turboquant/bad.py", "class A:\n    import torch\n", import_faults),
    "package with transformers": ("turboquant/sub/bad.py", "from transformers import Cache\n", import_faults),
    "package with ops": ("turboquant/bad.py", "from . import ops\n", import_faults),
    "package with ops, absolute": ("turboquant/bad.py", "from turboquant.ops import y\n", import_faults),
    "package with ops, from below": ("turboquant/sub/bad.py", "from ..hf.patching.llama import y\n", import_faults),
    "packed cache with transformers": ("turboquant/kvcache/bad.py", "import transformers\n", floor_faults),
    "packed cache with a model's cache": ("turboquant/kvcache/bad.py", "from ..hf.cache import x\n", floor_faults),
    "packed cache with it, in a function": (
        "turboquant/kvcache/bad.py",
        "def f():\n    from ..hf import cache\n",
        floor_faults,
    ),
    "quantiser with the cache": ("turboquant/plan.py", "def f():\n    from .kvcache import pages\n", floor_faults),
    "lower folder with a higher one": (
        "turboquant/kvcache/bad.py",
        "from ..hf.patching.llama import x\n",
        floor_faults,
    ),
    "lower folder with a higher one, for its types": (
        "turboquant/models/bad.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..kvcache import pages\n",
        floor_faults,
    ),
    "folder with the names of users": ("turboquant/hf/bad.py", "from .. import __version__\n", floor_faults),
    "folder without a floor": ("turboquant/extra/bad.py", "x = 0\n", floor_faults),
    "circle of four, in a function": (
        "turboquant/kvcache/a.py",
        "def f():\n    from .b import x\n",
        circle_faults,
    ),
    "index with torch": ("turboquant/index/bad.py", "def f():\n    import torch\n", floor_faults),
    "index with an adapter": ("turboquant/index/bad.py", "def f():\n    from ..langchain import x\n", adapter_faults),
    "package with another's package": ("turboquant/bad.py", "import llama_index.core\n", adapter_faults),
    "stray file": ("notes.txt", "x\n", top_level_faults),
    "stray folder": ("scripts/x.py", "x\n", top_level_faults),
    "long file": ("tests/test_long.py", "x = 1\n" * (MAX_LINES + 1), length_faults),
    "somebody's home": ("docs/x.md", "run " + "/".join(["", "home", "me", "x"]) + "\n", path_faults),
    "two test modules of one name": ("tests/vllm/test_x.py", "", module_name_faults),
    "somebody's folder": ("Makefile", "X = '" + "/".join(["", "opt", "x"]) + "'\n", path_faults),
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sound_tree_passes(tmp_path, check):
    plant(tmp_path, SOUND)
    assert list(check(tmp_path)) == []


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_planted_fault_is_found(tmp_path, fault):
    name, text, check = fault
    plant(tmp_path, SOUND | {name: text})
    found = list(check(tmp_path))
    where = name.partition("/")[0] if check is top_level_faults else name
    assert found and all(line.startswith(where) for line in found), found


@pytest.mark.parametrize("name", ["langchain", "haystack", "llama_index"])
def test_adapters_are_short(name):
    """Each has at most 150 lines: what they share is in `turboquant.index.documents` and `.filters`."""
    assert len((ROOT / "turboquant" / f"{name}.py").read_text().splitlines()) <= 150
