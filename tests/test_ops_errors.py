"""torch.ops.turboquant.*: arguments that only torch can get wrong, fields of errors, threads, and imports that fail.

refusals.py has what every binding refuses.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from ops_cases import GRAD

torch = pytest.importorskip("torch", reason="torch is not installed")
from ops_cases import DENSE, KEYS_ONLY, PLAN, needs_cuda, samples, tq  # noqa: E402
from torch import Tensor  # noqa: E402

from turboquant import ops  # noqa: E402

# The operator, the arguments that are replaced in its sample "full", how, and the message.
REFUSED: dict[str, tuple[str, str | tuple[str, ...], Callable[[Any], Any], str]] = {
    "q with a strided last dimension": (
        "attend",
        "q",
        lambda q: q.repeat(1, 1, 1, 2)[..., ::2],
        "`q` must be dense in its last dimension, got strides [1920, 480, 160, 2]",
    ),
    "requires_grad": ("attend", "q", lambda q: q.clone().requires_grad_(), f"`q` must be {GRAD}"),
    "not a leaf": ("attend", "q", lambda q: q.clone().requires_grad_() * 2, f"`q` must be {GRAD}"),
    "sinks that require grad": ("append", "sink_k", lambda x: x.requires_grad_(), f"`sink_k` must be {GRAD}"),
    "a start past the end": ("attend", "starts", lambda x: x + 1000, "`starts[0]` must be "),
    "meta pages": ("append", "pages", lambda x: x.to("meta"), "`pages` must be on cpu like `k`, got meta"),
    "no values": ("append", "v", lambda x: None, "`v` must be given, because the plan has values, got None"),
    "half values": ("append", "v", Tensor.half, "`v` must be float32 [2, 2, 30, 64], got float16 [2, 2, 30, 64]"),
    "append_attend, q of another batch": (
        "append_attend",
        "q",
        lambda q: q[:1],
        "`k` must be float32 [1, *, 1, 64], got float32 [2, 2, 1, 64]",
    ),
    "append_attend, half keys": (
        "append_attend",
        "k",
        Tensor.half,
        "`k` must be float32 [2, *, 1, 64], got float16 [2, 2, 1, 64]",
    ),
    "append_attend, an infinite scale": (
        "append_attend",
        "softmax_scale",
        lambda _: float("inf"),
        "`softmax_scale` must be ",
    ),
    "append_attend, lengths past the table": ("append_attend", "lengths", lambda x: x + 10**6, "`lengths[0]` must be "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, rng: np.random.Generator) -> None:
    op, changed, change, message = REFUSED[name]
    _, args, kwargs = samples(rng, "cpu")[f"{op}, full"]
    names = [a.name for a in getattr(tq, op).default._schema.arguments]
    arguments = dict(zip(names, args)) | kwargs
    for each in (changed,) if isinstance(changed, str) else changed:
        arguments[each] = change(arguments.get(each))
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor) and x.device.type == "cpu"}
    before = {key: x.detach().clone() for key, x in tensors.items()}
    with pytest.raises(TypeError if "half" in name else ValueError) as caught:
        getattr(tq, op)(**arguments)
    assert str(caught.value).startswith(f"{op}: {message}"), str(caught.value)
    for key, x in tensors.items():
        assert torch.equal(x.detach().nan_to_num(), before[key].nan_to_num()), f"{key} changed"


REFUSED_ELSEWHERE: dict[str, tuple[Callable[[], Any], str]] = {
    "values for a plan without": (
        lambda: tq.quantize(KEYS_ONLY.words, torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 4, 64)),
        "quantize: `v` must be absent, because the plan has no values, got a tensor",
    ),
    "rotate another head_dim": (
        lambda: tq.rotate(PLAN.words, torch.zeros(3, 80)),
        "rotate: `x` must be of head_dim 64, the plan's, in its last dimension, got [3, 80]",
    ),
    "rotate a number": (lambda: tq.rotate(PLAN.words, torch.tensor(1.0)), "rotate: `x` must be of head_dim 64"),
    "rotate with a matrix of half": (
        lambda: tq.rotate(DENSE.words, torch.zeros(3, 40), torch.eye(40).half()),
        "rotate: `matrix` must be float32 [40, 40], got float16 [40, 40]",
    ),
    "decode fewer than none": (
        lambda: tq.dequantize(PLAN.words, *decoding(), -1),
        "dequantize: `max_tokens` must be at least 0, got -1",
    ),
    "merge half lses": (
        lambda: tq.merge(torch.zeros(2, 3, 8), torch.zeros(2, 3).half()),
        "merge: `lses` must be float32 [2, 3], `outs` without its last dimension, got float16 [2, 3]",
    ),
}


def decoding(lengths: int = 40, page: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    pages = torch.zeros(1, 2, PLAN.record_bytes, dtype=torch.uint8)
    return pages, torch.tensor([[page]], dtype=torch.int32), torch.tensor([lengths], dtype=torch.int32)


@pytest.mark.parametrize("name", REFUSED_ELSEWHERE)
def test_refusals_elsewhere(name: str) -> None:
    call, message = REFUSED_ELSEWHERE[name]
    with pytest.raises(TypeError if "half" in name else ValueError) as caught:
        call()
    assert str(caught.value).startswith(message), str(caught.value)


def test_errors_have_fields() -> None:
    """`stored` says whether append_attend stored the tokens. Here it does, in the second page, and cannot read the
    first."""
    q, k = torch.zeros(1, 2, 1, 64), torch.ones(1, 2, 1, 64)
    pages = torch.zeros(1, 2, PLAN.record_bytes, dtype=torch.uint8)
    table, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[99, 0]], [PLAN.page_tokens + 1]))
    with pytest.raises(ValueError, match=r"append_attend: stored the tokens; `block_table\[0\]` must be ") as caught:
        tq.append_attend(PLAN.words, q, k, k, lengths, pages, table)
    error: Any = caught.value
    assert (error.argument, error.got, error.stored) == ("block_table", 99, True) and pages.any()
    for argument, got, call in (
        ("block_table", 99, lambda: tq.append(PLAN.words, k, k, lengths, pages, table.flip(1).contiguous())),
        ("plan", 4, lambda: tq.rotate((4, *PLAN.words[1:]), k)),
        ("v", None, lambda: tq.append(PLAN.words, k, k.half(), lengths, pages, table)),
    ):
        with pytest.raises((ValueError, TypeError)) as refused:
            call()
        assert (refused.value.argument, refused.value.got, refused.value.stored) == (argument, got, False)  # type: ignore


def test_gradients_are_refused_while_tracing() -> None:
    torch._dynamo.reset()
    x = torch.zeros(2, 64, requires_grad=True)
    with pytest.raises(Exception, match="rotate: `x` must be without requires_grad"):
        torch.compile(lambda x: tq.rotate(PLAN.words, x), fullgraph=True, backend="aot_eager")(x)
    with torch.no_grad():
        assert not tq.rotate(PLAN.words, x).requires_grad


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_devices_are_not_mixed(device: str, rng: np.random.Generator) -> None:
    _, args, kwargs = samples(rng, "cpu")["append, full"]
    before = args[4].clone()
    with pytest.raises(ValueError, match="append: `pages` must be on cpu like `k`, got cuda:0"):
        tq.append(*args[:4], args[4].to(device), *args[5:], **kwargs)
    with pytest.raises(ValueError, match="append: `pages` must be on cuda:0 like `k`, got cpu"):
        tq.append(args[0], args[1].to(device), args[2].to(device), *args[3:], **kwargs)
    assert torch.equal(args[4], before)


# ---- threads, and errors of `import turboquant.ops` ----

COUNT_THREADS = """
import os, sys, torch
from turboquant import Plan, ops
torch.set_num_threads(int(sys.argv[1]))
words = Plan(64, 4, 4).words
k = torch.zeros(8, 8, 64, 64)
before = len(os.listdir("/proc/self/task"))
torch.ops.turboquant.quantize(words, k, k)
print(len(os.listdir("/proc/self/task")) - before + 1)
"""


@pytest.mark.parametrize(("torch_threads", "ours", "used"), [(1, "", 1), (3, "1", 1), (3, "2", 2), (2, "3", 2)])
def test_threads(torch_threads: int, ours: str, used: int) -> None:
    done = forks.python(COUNT_THREADS, [str(torch_threads)], TURBOQUANT_NUM_THREADS=ours)
    assert (done.returncode, done.stdout.strip()) == (0, str(used)), done.stderr


def test_an_unknown_isa_is_the_machines_fault() -> None:
    code = (
        "import torch\nfrom turboquant import Plan, ops\nk = torch.zeros(1, 1, 4, 64)\n"
        "try:\n    torch.ops.turboquant.quantize(Plan(64, 4, 4).words, k, k)\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    done = forks.python(code, TURBOQUANT_ISA="sse9")
    assert done.stdout.startswith("quantize: `TURBOQUANT_ISA` must be "), done.stdout + done.stderr
    assert done.stdout.strip().endswith("got sse9")


IMPORTS = {
    "no torch": ("sys.modules['torch'] = None", None, "turboquant.ops needs PyTorch: pip install"),
    "old torch": (
        "import torch; torch.__version__ = '2.9.1'",
        None,
        "turboquant.ops needs torch >= 2.10, this is 2.9.1",
    ),
    "no library": ("", None, "turboquant was built without its torch operators (there is no turboquant/_torch.so)"),
    "foreign library": ("", b"\x7fELF nothing", "_torch.so does not load into torch "),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_import_errors(name: str, tmp_path: Path) -> None:
    prelude, library, message = IMPORTS[name]
    package = tmp_path / "turboquant"
    package.mkdir()
    for module in ("ops", "operators", "plan", "oldest"):
        shutil.copy(Path(ops.__file__).with_name(f"{module}.py"), package / f"{module}.py")
    for stub in ("__init__.py", "_core.py"):
        (package / stub).touch()
    if library:
        (package / "_torch.so").write_bytes(library)
    ask = "try:\n    import turboquant.ops\nexcept ImportError as error:\n    print(error)"
    done = forks.python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{prelude}\n{ask}")
    assert message in done.stdout, done.stdout + done.stderr
