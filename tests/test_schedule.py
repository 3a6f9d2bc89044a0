"""If sequences differ in length on a GPU, each step writes one schedule for all layers of the same plan and sizes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import models  # noqa: F401  skips without torch and transformers
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import turboquant
from turboquant.kvcache import shared as common
from turboquant.plan import Plan
from turboquant.spec import CacheSpec

PLAN = CacheSpec().plan(128)
PADDING = (0, 900)  # of two sequences of 1,000 positions


def scheduled(
    shared: common.Common,
    after: int,
    padding: tuple[int, ...] = PADDING,
    *,
    heads: int = 2,
    pages: int = 9,
    sliding_window: int = 0,
    device: str = "meta",
    plan: Plan = PLAN,
) -> torch.Tensor | None:
    """The schedule of a layer of `heads` KV heads; on the meta device, because only shapes matter."""
    query, held, table, lengths = (
        torch.empty(shape, device=device)
        for shape in ((2, 8, 1, 128), (20, heads, plan.record_bytes), (2, pages), (2,))
    )
    layer: Any = SimpleNamespace(plan=plan, pages=held, block_table=table, sinks=4, window=128)
    return shared.schedule(layer, query, lengths, after, padding, sliding_window)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    tables: list[torch.Tensor] = []
    operator = common._write_schedule

    def spy(words: object, schedule: torch.Tensor, query: torch.Tensor, *rest: object, **options: object) -> None:
        tables.append(schedule)
        if query.is_cuda:
            operator(words, schedule, query, *rest, **options)

    monkeypatch.setattr(common, "_write_schedule", spy)
    return tables


def test_layers_that_agree_share_a_schedule(written: list[torch.Tensor]) -> None:
    shared = common.Common(None)

    schedule = partial(scheduled, shared)
    first = schedule(1000)
    assert first is not None and schedule(1000) is first and len(written) == 1
    other, sliding = schedule(1000, heads=3), schedule(1000, sliding_window=512)
    assert len({id(table) for table in (first, other, sliding)}) == 3 and len(written) == 3
    assert schedule(1001) is first and written[-1] is first and len(written) == 4  # the next step, in the same tensor
    assert schedule(1001, pages=10) is first and len(written) == 5  # a table that has grown


def test_layers_of_other_plans_have_schedules_of_their_own(written: list[torch.Tensor]) -> None:
    """Keys of 4 bits and values of 2 take as many bytes as 3 and 3, but their kernel divides the work differently."""
    shared = common.Common(None)
    one, other = (scheduled(shared, 1000, plan=Plan(128, *widths)) for widths in ((3, 3), (4, 2)))
    assert one is not other and len(written) == 2


def test_a_replayed_step_leaves_no_schedule_that_is_taken_for_another(written: list[torch.Tensor]) -> None:
    shared, device = common.Common(None), torch.device("cpu")
    shared.lengths(1000, PADDING, device)
    scheduled(shared, 1000)
    shared.replayed(device)  # its graph has written the schedule of 1,001 positions
    scheduled(shared, 1000)
    assert len(written) == 2 and written[0] is written[1]
    shared.lengths(1000, (0, 800), device)
    assert not shared._schedules


def test_equal_sequences_need_none(written: list[torch.Tensor]) -> None:
    shared = common.Common(None)
    equal = scheduled(shared, 1000, (0, 100))
    assert equal is not None and equal.shape == (0, 4)
    assert scheduled(shared, 1000, device="cpu") is None and not written


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_a_ragged_batch_says_what_it_says_without_schedules(
    graphs: bool, written: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=512, intermediate_size=256, num_hidden_layers=3,
                         num_attention_heads=8, num_key_value_heads=2, head_dim=128,
                         pad_token_id=0, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).cuda().half().eval()
    ids = torch.randint(1, 128, (3, 1500), device="cuda")
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 1300, 700)):
        mask[row, :padding] = 0
        ids[row, :padding] = 0
    spec = CacheSpec(centre="none", metric="none", window=0)  # so that it can be cropped
    turboquant.patch(model, spec, cuda_graphs=graphs)
    monkeypatch.setenv("TURBOQUANT_CUDA_PATH", "hopper-line")  # kernels that read schedules

    def text() -> torch.Tensor:
        cache = turboquant.TurboQuantCache(model)
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=24, do_sample=False)
        cache.crop(1510)  # the graph wrote its last schedule for later positions
        with torch.no_grad():
            more = model(out[:, 1510:1511], attention_mask=torch.cat([mask, mask[:, -11:]], 1), past_key_values=cache)
        return torch.cat([out.float().flatten(), more.logits.float().flatten()])

    with_schedules = text()
    steps = len(written)
    assert 0 < steps <= 26  # one for all three layers
    monkeypatch.setattr(common.Common, "schedule", lambda *arguments: None)
    assert torch.equal(text(), with_schedules) and len(written) == steps
