"""Operators on CUDA do not wait for the host: CUDA graphs with growing lengths, compiled steps, streams, devices."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

from turboquant import ops  # noqa: E402
from turboquant.plan import Plan  # noqa: E402

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
tq = torch.ops.turboquant
KV_HEADS, GROUP = 2, 4
PLAN = Plan(64, 4, 3)


class Decoder:
    """One layer's cache of 300 and 120 tokens, which steps of one token extend in place, with room for more."""

    def __init__(self, device: str = "cuda", room: int = 1024, plan: Plan = PLAN) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, tokens: int) -> Any:
            return torch.randn(2, heads, tokens, plan.head_dim, generator=generator).to(device, torch.bfloat16)

        k, v = draw(KV_HEADS, 300), draw(KV_HEADS, 300)
        packed = ops.pack(k, v, plan, max_tokens=room)
        self.pages, self.table, self.lengths, self.plan = (
            packed.pages,
            packed.block_table,
            packed.lengths,
            packed.plan.words,
        )
        self.lengths[1] = 120
        self.steps = [(draw(KV_HEADS * GROUP, 1), draw(KV_HEADS, 1), draw(KV_HEADS, 1)) for _ in range(6)]

    def step(self, q: Any, k: Any, v: Any) -> Any:
        self.lengths.add_(1)
        tq.append(self.plan, k, v, self.lengths, self.pages, self.table)
        return tq.attend(self.plan, q, self.pages, self.table, self.lengths)[0]


def want(device: str = "cuda") -> tuple[list[Any], Any]:
    plain = Decoder(device)
    return [plain.step(*one) for one in plain.steps], plain.pages


def test_a_graph_follows_the_lengths() -> None:
    decoder = Decoder()
    static = [x.clone() for x in decoder.steps[0]]
    before = decoder.lengths.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder.step(*static)
    assert torch.equal(decoder.lengths, before)  # capturing ran nothing
    outs, pages = want()
    for one, expected in zip(decoder.steps, outs):
        for to, x in zip(static, one):
            to.copy_(x)
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(decoder.pages, pages)


@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_cuts_the_work_anew(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph writes a schedule and uses it in two calls. Each replay divides the work by the new lengths."""
    hopper = torch.cuda.get_device_capability()[0] == 9
    if fused and not hopper:
        pytest.skip("of compute capability 9.x alone")
    path = "hopper" if fused else "hopper-line" if hopper else "portable"
    monkeypatch.setenv("TURBOQUANT_CUDA_PATH", path)  # kernels that read schedules
    decoder, plain = (Decoder(room=100_000, plan=Plan(128, 4, 4)) if fused else Decoder() for _ in range(2))
    schedule = torch.zeros((ops.schedule_rows(2, decoder.pages.device), 4), dtype=torch.int32, device="cuda")
    static = [x.clone() for x in decoder.steps[0]]
    attend = [decoder.plan, static[0], decoder.pages, decoder.table, decoder.lengths]
    name = tq.attend_kernel(*attend, schedule=schedule)
    assert name.endswith("_ragged") if fused else name.startswith("attend_split_")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.lengths.add_(1)
        tq.append(decoder.plan, *static[1:], decoder.lengths, decoder.pages, decoder.table)
        tq.schedule(decoder.plan, schedule, *attend[1:])
        outs = [tq.attend(*attend, schedule=schedule)[0] for _ in range(2)]
    for one in decoder.steps:
        for to, x in zip(static, one):
            to.copy_(x)
        graph.replay()
        expected = plain.step(*one)
        assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected)
    assert schedule[0, 0] != 0


def test_a_schedule_for_a_kernel_that_reads_none_is_of_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("all kernels of plain plans read schedules here")
    decoder = Decoder()
    q = decoder.steps[0][0]
    call = [q, decoder.pages, decoder.table, decoder.lengths]
    schedule = torch.zeros((ops.schedule_rows(2, decoder.pages.device), 4), dtype=torch.int32, device="cuda")
    monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "hopper-line")
    tq.schedule(decoder.plan, schedule, *call)
    assert schedule[0, 0] != 0
    monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "hopper")
    assert tq.attend_kernel(decoder.plan, *call).startswith("attend_fused_")
    decoder.lengths.sub_(100)
    tq.schedule(decoder.plan, schedule, *call)
    assert schedule[0, 0] == 0
    monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "hopper-line")
    want, _ = tq.attend(decoder.plan, *call)
    assert torch.equal(tq.attend(decoder.plan, *call, schedule=schedule)[0], want)


def test_schedules_too_small_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "portable")
    decoder = Decoder()
    call = [decoder.steps[0][0], decoder.pages, decoder.table, decoder.lengths]
    small = torch.zeros((ops.schedule_rows(2, decoder.pages.device) - 1, 4), dtype=torch.int32, device="cuda")
    for refused in (
        lambda: tq.schedule(decoder.plan, small, *call),
        lambda: tq.attend(decoder.plan, *call, schedule=small),
    ):
        with pytest.raises(ValueError, match=r"`schedule` must be of at least TQ_SCHEDULE_ROWS"):
            refused()


def test_a_compiled_step_follows_the_lengths() -> None:
    decoder = Decoder()
    for x in (decoder.pages, decoder.table, decoder.lengths):
        torch._dynamo.mark_static_address(x)
    compiled = torch.compile(decoder.step, mode="reduce-overhead", fullgraph=True)
    outs, pages = want()
    with torch.no_grad():
        for one, expected in zip(decoder.steps, outs):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*one).clone(), expected)
    assert torch.equal(decoder.pages, pages)


def test_calls_go_to_the_current_stream() -> None:
    outs, pages = want()
    decoder = Decoder()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # calls on another stream would run before this ends
        ours = [decoder.step(*one) for one in decoder.steps]
    assert not stream.query()
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(ours, outs, strict=True))
    assert torch.equal(decoder.pages, pages)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")
def test_a_call_runs_on_the_device_of_its_tensors() -> None:
    outs, pages = want()
    decoder = Decoder("cuda:1")
    ours = [decoder.step(*one) for one in decoder.steps]
    assert torch.cuda.current_device() == 0
    assert all(a.device.index == 1 and torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, outs, strict=True))
    assert torch.equal(decoder.pages.cpu(), pages.cpu())
