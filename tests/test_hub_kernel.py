"""The build of the operators for Hugging Face's `kernels`. Two versions of it and the package run in one process (make
test-hub-kernel)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("torch", minversion="2.10")
pytest.importorskip("kernels", reason="the package kernels is not installed (make test-hub-kernel)")
import kernels
import torch

from turboquant import Plan, ops

REPOSITORIES = [ROOT / "build" / name for name in ("hub-kernel", "hub-kernel-2")]
pytestmark = pytest.mark.skipif(not all(path.is_dir() for path in REPOSITORIES), reason="run make test-hub-kernel")


@pytest.fixture(scope="module")
def loaded():
    return [kernels.get_local_kernel(path) for path in REPOSITORIES]


def folder(kernel) -> Path:
    return Path(kernel.__file__).parent


def test_two_versions_and_the_package_give_the_same_numbers(loaded):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, 300, 64, generator=generator) for _ in range(2))
    q = torch.randn(2, 6, 1, 64, generator=generator)
    packed = ops.pack(k, v, Plan(64, 4, 3))
    want = ops.attend(q, packed, return_lse=True)
    for kernel in loaded:
        plan = kernel.Plan(64, 4, 3)
        assert plan.words == packed.plan.words and plan.record_bytes == packed.plan.record_bytes
        for given in ((64, 4, 3), (64, (4, 3), (3, 4)), (128, 4, 4, 128, 32, "normal", "eden", 0, 64, 4)):
            mine, theirs = kernel.Plan(*given), Plan(*given)
            assert (mine.is_plain, mine.key_moments) == (theirs.is_plain, theirs.key_moments)
        pages = kernel.quantize(plan.words, k, v)
        assert torch.equal(pages, packed.pages)
        out = kernel.attend(plan.words, q, pages, packed.block_table, packed.lengths)
        assert all(torch.equal(one, other) for one, other in zip(out, want, strict=True))
        with pytest.raises(ValueError, match="attend: `block_table"):
            kernel.attend(plan.words, q, pages, packed.block_table + 99, packed.lengths)
        with pytest.raises(ValueError, match="`plan` must be one that turboquant.h allows"):
            kernel.Plan(60, 4, 3)


def test_each_has_a_namespace_and_metadata_of_its_own(loaded):
    from kernels._rust import Digest, Metadata

    told = [Metadata.read_from_file(folder(kernel) / "metadata.json") for kernel in loaded]
    assert [one.version for one in told] == [1, 2] and len({one.id for one in told}) == 2
    assert all(one.id.startswith("turboquant_") and hasattr(torch.ops, one.id) for one in told)
    for kernel, one in zip(loaded, told, strict=True):
        assert one.id == kernel.__name__ and [*folder(kernel).glob("*.so")] == [folder(kernel) / f"{one.id}.so"]
        one.digest.validate(Digest.hash_variant(one.digest.algorithm, folder(kernel)))


def test_a_changed_file_does_not_have_its_digest(loaded, tmp_path):
    from kernels._rust import Digest, Metadata

    copy = shutil.copytree(folder(loaded[0]), tmp_path / "copy")
    (copy / "plan.py").write_text("")
    digest = Metadata.read_from_file(copy / "metadata.json").digest
    with pytest.raises(Exception, match=r"plan\.py"):
        digest.validate(Digest.hash_variant(digest.algorithm, copy))


def test_it_needs_neither_numpy_nor_the_package(loaded):
    code = (
        "import sys, importlib.util\n"
        "sys.modules['turboquant'] = None\n"
        "import torch\n"
        "for name in [name for name in sys.modules if name.startswith('numpy')]: del sys.modules[name]\n"
        "sys.modules['numpy'] = None\n"
        "spec = importlib.util.spec_from_file_location('kernel', sys.argv[1] + '/__init__.py')\n"
        "kernel = sys.modules['kernel'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(kernel)\n"
        "print(kernel.quantize(kernel.Plan(64, 4).words, torch.ones(1, 1, 3, 64), None).shape[-1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder(loaded[0]))], capture_output=True, text=True)
    assert done.stdout.split() == [str(loaded[0].Plan(64, 4).record_bytes)], done.stderr
    assert json.loads((folder(loaded[0]) / "metadata.json").read_text())["python-depends"] == []
