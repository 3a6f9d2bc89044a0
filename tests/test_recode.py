"""torch.ops.turboquant.recode: bytes against the reference on every instruction set, the error compared with that of
vectors packed anew, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import reference as ref
from reference_recode import recode as reference_recode

torch = pytest.importorskip("torch", reason="torch is not installed")

from turboquant import _core, ops  # noqa: E402
from turboquant.plan import Plan, Scale  # noqa: E402

needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
BACKENDS = [*_core.isa_available(), pytest.param("cuda", marks=needs_cuda)]
PLANS: dict[str, tuple[ref.Plan, ref.Plan]] = {
    f"{a} to {b} bits": (ref.plan(128, a, a), ref.plan(128, b, b)) for a in range(1, 7) for b in range(1, a)
} | {
    "keys alone": (ref.plan(64, 4, 4), ref.plan(64, 3, 4)),
    "no values": (ref.plan(64, 4), ref.plan(64, 2)),
    "sphere, padding": (ref.plan(72, 4, 5, codebook=ref.SPHERE), ref.plan(72, 3, 3, codebook=ref.SPHERE)),
    "mixed": (ref.plan(136, (5, 4, 0, 4, 3), (6, 4, 4, 0, 2)), ref.plan(136, (3, 3, 0, 3, 3), (4, 2, 3, 0, 1))),
    "wave, metric and tries": (
        ref.plan(96, 5, 4, wave_pairs=48, metric=5, tries=3),
        ref.plan(96, 4, 2, wave_pairs=48, metric=5),
    ),
    "to a variance term": (ref.plan(64, 4, 4), ref.plan(64, 2, 3, variance_term=True)),
    "512 channels": (ref.plan(512, 4, 4), ref.plan(512, 3, 2)),
    "small pages": (ref.plan(64, 4, 3, page_tokens=32), ref.plan(64, 2, 2, page_tokens=32)),
}


@pytest.fixture(params=BACKENDS)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    _core.set_isa(request.param)
    yield "cpu"
    _core.set_isa(None)


def random_pages(rng: np.random.Generator, p: ref.Plan) -> np.ndarray:
    """[2, 2] records of any codes and scales, some of them 0; the last tokens of the last page are not used."""
    pages = np.zeros((2, 2, p.record_bytes), np.uint8)
    for page, head in np.ndindex(2, 2):
        for side in ("key", "value"):
            if not any(p.bits(side)):
                continue
            tokens = np.arange(p.page_tokens if page == 0 else p.page_tokens - 29)
            codes = np.zeros((len(tokens), p.group * p.groups), np.uint8)
            for channels, book in p.books(side):
                codes[:, channels] = rng.integers(0, 2**book.bits, codes[:, channels].shape)
            scales = np.exp(rng.normal(size=len(tokens))).astype(np.float16)
            scales[:2] = 1e-6, 65000
            scales[rng.random(len(tokens)) < (0.02 if page else 0)] = 0
            codes[scales == 0] = 0
            ref.pack(p, side, pages[page, head], tokens, codes, scales)
    return pages


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_bytes_are_those_of_the_reference(
    device: str, plans: tuple[ref.Plan, ref.Plan], rng: np.random.Generator
) -> None:
    p, target = plans
    pages = random_pages(rng, p)
    given = torch.from_numpy(pages).clone().to(device)
    found = torch.ops.turboquant.recode(p.words, given, target.words).cpu().numpy()
    assert found.shape == (2, 2, target.record_bytes)
    np.testing.assert_array_equal(found, reference_recode(p, target, pages))
    np.testing.assert_array_equal(given.cpu().numpy(), pages)


def test_threads_share_records(rng: np.random.Generator) -> None:
    """Bytes are the same with three threads, for which there are enough records."""
    p, target = PLANS["4 to 3 bits"]
    pages = np.tile(random_pages(rng, p), (40, 1, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = torch.ops.turboquant.recode(p.words, torch.from_numpy(pages).clone(), target.words).numpy()
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(found, np.tile(reference_recode(p, target, pages[:2]), (40, 1, 1)))


PATHS = {(4, 3): 1.08, (4, 2): 1.06, (4, 3, 2): 1.06, (3, 2): 1.05, (5, 4): 1.24, (5, 3): 1.12}


@pytest.mark.parametrize("tries", [0, 3])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_error_is_close_to_that_of_vectors_packed_anew(path: tuple[int, ...], tries: int) -> None:
    """The noise of recoded Gaussian vectors is compared with that of the same vectors encoded at the last width."""
    torch.manual_seed(1)
    x = torch.randn(1, 4, 1024, 64)
    plans = {bits: Plan(64, bits, bits, tries=tries) for bits in path}
    pages = ops.quantize(plans[path[0]], x, -x)
    for a, b in pairwise(path):
        pages = ops.recode(plans[a], pages, plans[b])
    last = plans[path[-1]]
    table, lengths = torch.arange(8, dtype=torch.int32)[None], torch.tensor([1024], dtype=torch.int32)

    def noise(made: torch.Tensor) -> list[float]:
        both = ops.dequantize(ops.PackedKV(pages=made, block_table=table, lengths=lengths, plan=last, tokens=1024))
        return [float(((y - z).square().sum(-1) / y.square().sum(-1)).mean()) for y, z in zip((x, -x), both)]

    ratios = np.array(noise(pages)) / np.array(noise(ops.quantize(last, x, -x)))
    assert (ratios < PATHS[path]).all()
    assert (ratios > 0.99).all(), "recoding cannot be better than the vectors themselves"


def test_the_same_widths_keep_every_byte(device: str, rng: np.random.Generator) -> None:
    p = ref.plan(64, 4, 3)
    pages = torch.from_numpy(random_pages(rng, p)).clone().to(device)
    assert torch.equal(torch.ops.turboquant.recode(p.words, pages, p.words), pages)


GOOD = Plan(64, 4, 4)
REFUSED = {
    "more bits": (GOOD, Plan(64, 4, 5), "`target[0]` must be 1 to as many bits as the plan of the pages has, got 5"),
    "other seed": (GOOD, Plan(64, 3, 3, seed=7), "`target` must be like the plan of the pages in all but bits, tries"),
    "other head_dim": (GOOD, Plan(96, 3, 3), "`target` must be like the plan of the pages in all but bits, tries"),
    "other scale": (
        Plan(64, 4, 4, scale=Scale.NORM),
        Plan(64, 3, 3, scale=Scale.NORM),
        "`plan` must be plain, with groups of 32 channels and EDEN scales (got: its scale), got 1",
    ),
    "groups of 16": (Plan(64, 4, 4, group=16), Plan(64, 3, 3, group=16), "`plan` must be plain, with groups of 32"),
    "8 bits": (Plan(64, 8, 4), Plan(64, 3, 3), "`plan[0]` must be at most 6 bits a group, got 8"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals(case: tuple[Plan, Plan, str]) -> None:
    plan, target, text = case
    pages = torch.zeros(1, 2, plan.record_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=re.escape("recode: " + text)):
        ops.recode(plan, pages, target)


def test_refusals_of_arguments() -> None:
    pages = torch.zeros(1, 2, GOOD.record_bytes, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"recode: `target` must be a turboquant.Plan, got 3"):
        ops.recode(GOOD, pages, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"recode: `target` must be the words of a turboquant.Plan, got none: words"):
        torch.ops.turboquant.recode(GOOD.words, pages, [1, *Plan(64, 3, 3).words[1:]])
    with pytest.raises(ValueError, match=r"recode: `pages` must be uint8 \[\*, \*, "):
        ops.recode(GOOD, pages[..., :-64].contiguous(), Plan(64, 3, 3))
    with pytest.raises(TypeError, match=r"recode: `pages` must be uint8"):
        ops.recode(GOOD, pages.int(), Plan(64, 3, 3))
    with pytest.raises(ValueError, match=r"recode: `pages` must be contiguous"):
        ops.recode(GOOD, pages.repeat(2, 1, 1).transpose(0, 1), Plan(64, 3, 3))
    assert ops.recode(GOOD, pages[:0], Plan(64, 3, 3)).shape == (0, 2, Plan(64, 3, 3).record_bytes)


def test_torch_traces_it() -> None:
    p, target = PLANS["4 to 3 bits"]
    pages = torch.zeros(2, 2, p.record_bytes, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.turboquant.recode.default, (p.words, pages, target.words))
