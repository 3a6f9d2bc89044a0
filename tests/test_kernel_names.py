"""The names of the kernels that operators run, on CPUs and on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import forks
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("turboquant.ops")

from kernel_cases import CASES, Case  # noqa: E402

import turboquant  # noqa: E402
from turboquant import _core, ops  # noqa: E402
from turboquant.cli import findings, main  # noqa: E402


def cuda(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    return pytest.mark.cuda(skip(test))


def packed_for(case: Case, device: str) -> tuple[torch.Tensor, ops.PackedKV]:
    """Queries and pages of a case."""
    plan = case.plan
    pages = torch.zeros(
        (case.batch * case.max_pages, case.kv_heads, plan.record_bytes), dtype=torch.uint8, device=device
    )
    table = torch.zeros((case.batch, case.max_pages), dtype=torch.int32, device=device)
    lengths = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    transforms = {}
    if plan.key.rotation.name == "DENSE":
        transforms["rotation"] = torch.eye(plan.head_dim, device=device).repeat(1, 2, 1)
    if plan.wave_pairs:
        transforms["key_turns"] = torch.zeros((plan.wave_pairs, 3), dtype=torch.int32, device=device)
    if plan.wave_pairs or plan.metric is not None:
        numbers = 2 * plan.wave_pairs + (0 if plan.metric is None else (1 + plan.metric) * plan.head_dim + 4)
        transforms["key_numbers"] = torch.ones((case.kv_heads, numbers), device=device)
    heads = case.group * case.kv_heads
    q = torch.zeros((case.batch, heads, case.query_tokens, plan.head_dim), dtype=torch.bfloat16, device=device)
    return q, ops.PackedKV(pages, table, lengths, plan, case.tokens, transforms)


def schedule_of(case: Case, q: torch.Tensor, packed: ops.PackedKV) -> ops.Schedule | None:
    return ops.schedule(q, packed, lengths=[case.tokens] * case.batch) if case.even else None


@cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_on_hopper(case: Case) -> None:
    if torch.cuda.get_device_properties().multi_processor_count != 132 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the names are those of an H100 or H200 with 132 multiprocessors")
    if case.batch * case.max_pages * case.kv_heads * case.plan.record_bytes > 8 << 30:
        pytest.skip("more than 8 GB of pages")
    q, packed = packed_for(case, "cuda")
    assert ops.attend_kernel(q, packed, schedule=schedule_of(case, q, packed)) == case.name


@cuda
def test_the_profiler_sees_the_kernels_that_are_named() -> None:
    """The profiler finds the CUDA function that belongs to the name `attend_kernel` returns."""
    functions = {"fused_many_rows": "attend_fused_many_rows_kernel", "many_rows": "attend_many_rows_kernel"}
    functions |= {"fused": "attend_fused_kernel", "split": "attend_kernel"}
    small = [case for case in CASES if case.batch * case.max_pages * case.kv_heads * case.plan.record_bytes < 1 << 28]
    of_each = {next((key for key in functions if case.name.startswith(f"attend_{key}_")), ""): case for case in small}
    assert {*of_each} >= {*functions}
    for case in of_each.values():
        q, packed = packed_for(case, "cuda")
        name = ops.attend_kernel(q, packed, schedule=schedule_of(case, q, packed))
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            ops.attend(q, packed, schedule=schedule_of(case, q, packed))
            torch.cuda.synchronize()
        strategy = next(key for key in functions if name.startswith(f"attend_{key}_"))
        ran = {event.key for event in profile.key_averages()}
        assert any(f"{functions[strategy]}<" in one for one in ran), (name, ran)


@cuda
def test_appending() -> None:
    plan = turboquant.Plan(128, 3, 3)
    for tokens, dtype, name in (
        (1, torch.bfloat16, "append_one_token"),
        (32, torch.bfloat16, "append_general"),
        (33, torch.bfloat16, "append_prefill"),
        (33, torch.float32, "append_general"),
    ):
        k = torch.zeros((2, 4, tokens, 128), dtype=dtype, device="cuda")
        packed = ops.pack(k, k, plan=plan)
        found = torch.ops.turboquant.append_kernel(plan.words, k, k, packed.lengths, packed.pages, packed.block_table)
        assert found == name


def test_on_a_cpu_it_is_the_kernel_of_the_core() -> None:
    k = torch.zeros((2, 4, 40, 64))
    packed = ops.pack(k, k, bits=3)
    q = torch.zeros((2, 8, 1, 64))
    assert ops.attend_kernel(q, packed) == _core.kernel_name("attend", packed.plan.words)
    name = torch.ops.turboquant.append_kernel(packed.plan.words, k, k, packed.lengths, packed.pages, packed.block_table)
    assert name == _core.kernel_name("append", packed.plan.words)


def test_the_command_names_the_kernels_of_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info", "--kernels", "2,2,3,200,96"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    plan = turboquant.Plan(96, 4, 4).words
    attend, append = _core.kernel_name("attend", plan), _core.kernel_name("append", plan)
    assert [line.split() for line in lines] == [["2,2,3,200,96", bits, attend, append, append] for bits in "432"]
    assert main(["info", "--moments", "--kernels", "2,2,3,200,96"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == lines
    for wrong in ("2,2,3,200", "2,2,3,200,x", "2,2,3,0,64", "2,2,3,200,4294967296"):
        with pytest.raises(SystemExit):
            main(["info", "--kernels", wrong])
        assert f"--kernels must be batch,kv_heads,heads_per_kv,tokens,head_dim, whole and positive, got '{wrong}'" in (
            capsys.readouterr().err
        )


def has_cuda_kernels() -> bool:
    built = findings.library()
    return built is not None and findings.device_code(built)


@pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA")
def test_the_command_names_the_kernels_of_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [
        case for case in CASES if case.even and case.query_tokens == 1 and case.plan == turboquant.Plan(128, 3, 3)
    ]
    for case in shapes:
        shape = f"{case.batch},{case.kv_heads},{case.group},{case.tokens},128"
        assert main(["info", "--gpu", "h100", "--kernels", shape]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "h100, bfloat16, sequences of equal length, no exact tokens"
        assert [shape, "3", case.name, "append_one_token", "append_prefill"] in [line.split() for line in lines]
    assert shapes
    assert main(["info", "--gpu", "h100", "--moments", "--kernels", "1,8,4,8192,128"]) == 0
    assert "attend_fused_3bit_d128_4x128_wave" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["info", "--gpu", "k80"])
    assert "--gpu k80: gpu must be a100, l4," in capsys.readouterr().err


@pytest.mark.skipif(has_cuda_kernels(), reason="built with CUDA")
def test_the_command_says_what_a_build_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["info", "--kernels", "--gpu", "h100"])
    lacks = "this build has no CUDA kernels to choose from: install a wheel, or build with nvcc on the PATH"
    assert capsys.readouterr().err.endswith(f"info: --gpu h100: {lacks}\n")


@cuda
def test_the_command_names_the_kernels_of_hopper(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("names are those of compute capability 9.0")
    assert main(["info", "--kernels", "1,8,4,8192,128"]) == 0
    names = {line.split()[1]: line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:]}
    (expected,) = {case.name for case in CASES if (case.plan, case.batch, case.tokens) == (CASES[0].plan, 1, 8192)
                   and case.group == 4 and case.kv_heads == 8 and case.query_tokens == 1}  # fmt: skip
    assert names["3"] == [expected, "append_one_token", "append_prefill"]


def test_no_name_where_the_environment_names_no_level() -> None:
    program = "from turboquant.cli import main; main(['info', '--kernels'])"
    done = forks.python(program, TURBOQUANT_ISA="avx1024", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "attend_kernel: `TURBOQUANT_ISA` must be one of: " in done.stderr
