"""torch.ops.turboquant.*: all that is refused, each with its message and nothing changed; threads; failing imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import FAR
from conftest import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed")
from test_ops import DENSE, KEYS_ONLY, PLAN, needs_cuda, ops, samples, tq  # noqa: E402
from torch import Tensor  # noqa: E402

GRAD = (
    "without requires_grad (inference only: call under torch.no_grad() or detach it), got a tensor that requires grad"
)
# The operator, the arguments that are replaced in its sample "full", the message.
REFUSED: dict[str, tuple[str, str | tuple[str, ...], Callable[[Any], Any], str]] = {
    "integer q": ("attend", "q", Tensor.int, "`q` must be float32, float16 or bfloat16, got int32"),
    "double q": ("attend", "q", Tensor.double, "`q` must be float32, float16 or bfloat16, got float64"),
    "q of three dimensions": (
        "attend",
        "q",
        lambda q: q[0],
        "`q` must be float32 [*, *, *, 80], got float32 [4, 3, 80]",
    ),
    "q of another head_dim": (
        "attend",
        "q",
        lambda q: q[..., :64],
        "`q` must be float32 [*, *, *, 80], got float32 [2, 4, 3, 64]",
    ),
    "q with a strided last dimension": (
        "attend",
        "q",
        lambda q: q.repeat(1, 1, 1, 2)[..., ::2],
        "`q` must be dense in its last dimension, got strides [1920, 480, 160, 2]",
    ),
    "heads that do not divide": ("attend", "q", lambda q: q[:, :3], "`query_heads` must be "),
    "requires_grad": ("attend", "q", lambda q: q.clone().requires_grad_(), f"`q` must be {GRAD}"),
    "not a leaf": ("attend", "q", lambda q: q.clone().requires_grad_() * 2, f"`q` must be {GRAD}"),
    "sinks that require grad": ("append", "sink_k", lambda x: x.requires_grad_(), f"`sink_k` must be {GRAD}"),
    "signed pages": ("attend", "pages", lambda x: x.view(torch.int8), "`pages` must be uint8 [*, *, "),
    "pages of another plan": ("attend", "pages", lambda x: x[..., :-64].contiguous(), "`pages` must be uint8 [*, *, "),
    "pages that are not contiguous": (
        "attend",
        "pages",
        lambda x: x.transpose(0, 1),
        "`pages` must be contiguous, got strides [",
    ),
    "pages off by a byte": (
        "attend",
        "pages",
        lambda x: torch.zeros(x.numel() + 1, dtype=torch.uint8)[1:].view(x.shape),
        "`pages` must be 64-byte aligned, got ",
    ),
    "a long block table": ("attend", "block_table", Tensor.long, "`block_table` must be int32 [2, *], got int64 [2, "),
    "a block table of another batch": (
        "attend",
        "block_table",
        lambda x: x[:1],
        "`block_table` must be int32 [2, *], got int32 [1, ",
    ),
    "a page outside": ("attend", "block_table", lambda x: torch.full_like(x, FAR), "`block_table[0]` must be "),
    "a negative page": ("append", "block_table", lambda x: torch.full_like(x, -1), "`block_table[0]` must be "),
    "negative lengths": ("attend", "lengths", lambda x: x - 1000, "`lengths[0]` must be "),
    "lengths past the table": ("append", "lengths", lambda x: x + 10**6, "`lengths[0]` must be "),
    "float lengths": ("append", "lengths", Tensor.float, "`lengths` must be int32 [2], got float32 [2]"),
    "a start past the end": ("attend", "starts", lambda x: x + 1000, "`starts[0]` must be "),
    "starts of another batch": ("attend", "starts", lambda x: x[:1], "`starts` must be int32 [2], got int32 [1]"),
    "fresh keys alone": (
        "attend",
        "fresh_v",
        lambda x: None,
        "`fresh_v` must be given if and only if `fresh_k` is, got None",
    ),
    "half fresh": (
        "attend",
        "fresh_k",
        Tensor.half,
        "`fresh_k` must be float32 [2, 2, 3, 80], got float16 [2, 2, 3, 80]",
    ),
    "sinks of another head": (
        "attend",
        "sink_k",
        lambda x: x[:, :1],
        "`sink_k` must be float32 [2, 2, *, 80], got float32 [2, 1, 4, 80]",
    ),
    "sink keys alone": ("append", "sink_v", lambda x: None, "`sink_v` must be a tensor like `sink_k`, got None"),
    "window values alone": (
        "append",
        "window_k",
        lambda x: None,
        "`window_v` must be None, like the keys or the plan's values, got a tensor",
    ),
    "a strided window": (
        "append",
        "window_v",
        lambda x: x.repeat(1, 1, 2, 1)[:, :, ::2],
        "`window_v` must be contiguous, got strides [",
    ),
    "meta pages": ("append", "pages", lambda x: x.to("meta"), "`pages` must be on cpu like `k`, got meta"),
    "no values": ("append", "v", lambda x: None, "`v` must be a tensor like `k`, got None"),
    "half values": ("append", "v", Tensor.half, "`v` must be float32 [2, 2, 30, 64], got float16 [2, 2, 30, 64]"),
    "fewer values": (
        "append",
        "v",
        lambda x: x[:, :, 1:],
        "`v` must be float32 [2, 2, 30, 64], got float32 [2, 2, 29, 64]",
    ),
    "NaN": ("append", "k", lambda x: x.index_fill(2, torch.tensor(29), torch.nan), "`k[1856]` must be finite "),
    "infinite": ("append", "v", lambda x: x / 0, "`v["),
    "too large": ("append", "k", lambda x: x * 1e6, "`k["),
    "a centre of another head_dim": (
        "append",
        "key_centre",
        lambda x: x[:, :-1],
        "`key_centre` must be float32 [2, 64], got float32 [2, 63]",
    ),
    "a centre of four dimensions": (
        "append",
        "key_centre",
        lambda x: x[None, None],
        "`key_centre` must be float32 [1, 2, 64], got float32 [1, 1, 2, 64]",
    ),
    "a half centre": ("append", "key_centre", Tensor.half, "`key_centre` must be float32 [2, 64], got float16 [2, 64]"),
    "a matrix without a dense plan": (
        "append",
        "key_rotation",
        lambda _: torch.eye(64),
        "`key_rotation` must be absent, because the plan's rotation is not dense, got a tensor",
    ),
    "a negative step": (
        "append",
        "value_steps",
        lambda _: torch.tensor([[1.0, 1], [1, -1]]),
        "`value_steps[3]` must be in 2^-40..2^40, got -1",
    ),
    "another version": ("append", "plan", lambda p: (4, *p[1:]), "`plan[0]` must be format version 1, 2 or 3, got 4"),
    "a short plan": ("append", "plan", lambda p: p[:-1], "`len(plan)` must be 7 + 2 * ceil(head_dim / 32), got 10"),
    "9 bits": ("append", "plan", lambda p: (*p[:-1], 9), "`plan[10]` must be "),
    "head_dim 12": ("append", "plan", lambda p: (p[0], 12, *p[2:]), "`head_dim` must be a multiple of 8"),
    "an infinite scale": ("attend", "softmax_scale", lambda _: float("inf"), "`softmax_scale` must be "),
    "a negative sliding window": ("attend", "sliding_window", lambda _: -1, "`sliding_window` must be "),
    "a huge sliding window": ("attend", "sliding_window", lambda _: 2**40, "`sliding_window` must be "),
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
    "append_attend, several tokens over a window": (
        "append_attend",
        ("q", "k", "v"),
        lambda x: x.repeat(1, 1, 2, 1),
        "`q` must be of one token, because there is a window, got 2 tokens",
    ),
    "fresh but not causal": (
        "attend",
        "causal",
        lambda _: False,
        "`fresh_k` must be None when attention is not causal, got a tensor",
    ),
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
    with pytest.raises(ValueError) as caught:
        getattr(tq, op)(**arguments)
    assert str(caught.value).startswith(f"{op}: {message}"), str(caught.value)
    for key, x in tensors.items():
        assert torch.equal(x.detach().nan_to_num(), before[key].nan_to_num()), f"{key} changed"


REFUSED_ELSEWHERE: dict[str, tuple[Callable[[], Any], str]] = {
    "attend without values": (
        lambda: tq.attend(
            KEYS_ONLY.words,
            torch.zeros(1, 2, 1, 64),
            torch.zeros(1, 2, KEYS_ONLY.record_bytes, dtype=torch.uint8),
            *(torch.zeros(shape, dtype=torch.int32) for shape in ((1, 1), (1,))),
        ),
        "attend: `plan` must be ",
    ),
    "values for a plan without": (
        lambda: tq.quantize(KEYS_ONLY.words, torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 4, 64)),
        "quantize: `v` must be None, because the plan has no values, got a tensor",
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
    "rotate without its matrix": (
        lambda: tq.rotate(DENSE.words, torch.zeros(3, 40)),
        "rotate: `matrix` must be given, because the plan's rotation is dense, got None",
    ),
    "rotate with a matrix for nothing": (
        lambda: tq.rotate(PLAN.words, torch.zeros(3, 64), torch.eye(64)),
        "rotate: `matrix` must be None, because the plan's rotation is not dense, got a tensor",
    ),
    "decode more than there is": (
        lambda: tq.dequantize(PLAN.words, *decoding(lengths=41), 40),
        "dequantize: `lengths[0]` must be in 0..max_tokens, got 41",
    ),
    "decode more than the table holds": (
        lambda: tq.dequantize(PLAN.words, *decoding(), 129),
        "dequantize: `max_tokens` must be at most max_pages * page_tokens, got 129",
    ),
    "decode fewer than none": (
        lambda: tq.dequantize(PLAN.words, *decoding(), -1),
        "dequantize: `max_tokens` must be at least 0, got -1",
    ),
    "decode a page outside": (
        lambda: tq.dequantize(PLAN.words, *decoding(page=1), 40),
        "dequantize: `block_table[0]` must be in 0..n_pages - 1, got 1",
    ),
    "merge without parts": (
        lambda: tq.merge(torch.zeros(8), torch.zeros(())),
        "merge: `outs` must be of at least two dimensions, [parts, ..., head_dim], got [8]",
    ),
    "merge other shapes": (
        lambda: tq.merge(torch.zeros(2, 3, 8), torch.zeros(2, 4)),
        "merge: `lses` must be float32 [2, 3], `outs` without its last dimension, got float32 [2, 4]",
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
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message), str(caught.value)


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
    with pytest.raises(ValueError, match="append: `lengths` must be on cuda:0 like `k`, got cpu"):
        tq.append(args[0], args[1].to(device), args[2].to(device), *args[3:], **kwargs)
    assert torch.equal(args[4], before)


# ---- threads, and what `import turboquant.ops` says where it cannot ----

COUNT_THREADS = """
import os, sys, torch
from turboquant import ops
torch.set_num_threads(int(sys.argv[1]))
words = (1, 64, 128, 1, 0, 0, 0, 4, 4, 4, 4)
k = torch.zeros(8, 8, 64, 64)
before = len(os.listdir("/proc/self/task"))
torch.ops.turboquant.quantize(words, k, k)
print(len(os.listdir("/proc/self/task")) - before + 1)
"""


@pytest.mark.parametrize(("torch_threads", "ours", "used"), [(1, "", 1), (3, "1", 1), (3, "2", 2), (2, "3", 2)])
def test_threads(torch_threads: int, ours: str, used: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TURBOQUANT_NUM_THREADS"}
    environment |= {"TURBOQUANT_NUM_THREADS": ours} if ours else {}
    command = [sys.executable, "-c", COUNT_THREADS, str(torch_threads)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(used)), done.stderr


def test_an_unknown_isa_is_the_machines_fault() -> None:
    code = (
        "import torch\nfrom turboquant import ops\nk = torch.zeros(1, 1, 4, 64)\n"
        "try:\n    torch.ops.turboquant.quantize((1, 64, 128, 1, 0, 0, 0, 4, 4, 4, 4), k, k)\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    environment = os.environ | {"TURBOQUANT_ISA": "sse9"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("quantize: `TURBOQUANT_ISA` must be "), done.stdout + done.stderr
    assert done.stdout.strip().endswith("got sse9")


IMPORTS = {
    "no torch": ("import sys; sys.modules['torch'] = None", None, "turboquant.ops needs PyTorch: pip install"),
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
    for module in ("ops", "operators", "plan"):
        shutil.copy(Path(ops.__file__).with_name(f"{module}.py"), package / f"{module}.py")
    for stub in ("__init__.py", "_core.py"):
        (package / stub).touch()
    if library:
        (package / "_torch.so").write_bytes(library)
    code = f"{prelude}\ntry:\n    import turboquant.ops\nexcept ImportError as error:\n    print(error)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert message in done.stdout, done.stdout + done.stderr
