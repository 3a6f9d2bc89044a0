"""TurboQuantCache(memory_limit=): the limit holds, layers fall to fewer bits, cheapest first, and no token is lost."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from models import prompts, storages, tiny  # noqa: E402
from specs import WAVE, bare  # noqa: E402

import turboquant  # noqa: E402
from turboquant import TurboQuantCache, ops  # noqa: E402
from turboquant.kvcache import pages, storage  # noqa: E402
from turboquant.measured.choice import added_cost  # noqa: E402

SPEC = bare(4, 4, sinks=2, window=8)


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny()
    turboquant.patch(made, SPEC)
    return made


@torch.no_grad()
def read(model: Any, cache: Any, tokens: int, chunk: int = 64, seed: int = 0) -> Any:
    """Reads a text in chunks and returns the logits of the last chunk."""
    ids = prompts(1, tokens, seed=seed)["input_ids"]
    for part in ids.split(chunk, 1):
        logits = model(part, past_key_values=cache).logits
    return logits


def widths(cache: Any) -> list[tuple[Any, Any]]:
    return [(stored.spec.key_bits, stored.spec.value_bits) for stored in storages(cache)]


def full(model: Any, tokens: int) -> int:
    cache = TurboQuantCache(model)
    read(model, cache, tokens)
    return cache.nbytes


def test_it_is_never_exceeded_and_layers_fall_one_side_at_a_time(model: Any) -> None:
    limit = int(full(model, 1600) * 0.9)
    cache, sizes = TurboQuantCache(model, memory_limit=limit), list[int]()
    seen = [widths(cache)]
    ids = prompts(1, 1600)["input_ids"]
    with torch.no_grad():
        for part in ids.split(64, 1):
            model(part, past_key_values=cache)
            sizes.append(cache.nbytes)
            seen.append(widths(cache))
    assert max(sizes) <= limit and cache.get_seq_length() == 1600
    assert seen[0] == [(4, 4)] * len(seen[0]) and min(map(min, seen[-1])) < 4
    for before, after in pairwise(seen):
        assert all(a >= b for one, other in zip(before, after) for a, b in zip(one, other)), "widths never rise"
    for stored in storages(cache):
        assert stored.plan == stored.plan_for(stored.kv_heads, stored.head_dim)
        assert stored.pages.shape[-1] == stored.plan.record_bytes
    assert f"memory limit {limit:,} bytes: keys of" in str(cache.report())
    assert f"memory_limit={limit}" in repr(cache)


def test_the_copies_of_its_own_work_are_within_the_limit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While pages grow or are recoded, the old and the new ones together are within the limit."""
    limit = int(full(model, 1600) * 0.9)
    cache, most = TurboQuantCache(model, memory_limit=limit), dict[str, int]()
    grow, recode = pages.PagePool._grow, storage._recode

    def grown(pool: Any, by: int) -> None:
        before = pool.storage.nbytes
        grow(pool, by)
        most["grown"] = max(most.get("grown", 0), cache.nbytes + before)

    def recoded(*args: Any) -> Any:
        made = recode(*args)
        most["recoded"] = max(most.get("recoded", 0), cache.nbytes + made.nbytes)
        return made

    monkeypatch.setattr(pages.PagePool, "_grow", grown)
    monkeypatch.setattr(storage, "_recode", recoded)
    read(model, cache, 1600)
    assert len(most) == 2 and max(most.values()) <= limit
    assert max(most.values()) > limit * 0.9, "the room that is kept free is used"


def test_pages_are_those_that_recode_makes(model: Any) -> None:
    cache, plain = TurboQuantCache(model, memory_limit=2**40), TurboQuantCache(model)
    read(model, cache, 500)
    read(model, plain, 500)
    for one, other in zip(storages(cache), storages(plain)):
        one.fall(3, 2)
        want = ops.recode(other.plan, other.pages, one.plan)
        assert torch.equal(one.pages, want)


def test_what_is_full_says_so_and_keeps_its_tokens(model: Any) -> None:
    limit = int(full(model, 700) * 0.8)
    cache = TurboQuantCache(model, memory_limit=limit)
    with pytest.raises(MemoryError, match=r"do not fit into `memory_limit`: \d+ need [\d,]+ bytes") as caught:
        read(model, cache, 4000)
    held = cache.get_seq_length()
    assert f"the limit is {limit:,}" in str(caught.value) and f"The {held} tokens stored are kept" in str(caught.value)
    assert cache.nbytes <= limit and {stored.tokens for stored in storages(cache)} == {held} and held > 700
    before = [stored.pages.clone() for stored in storages(cache)], widths(cache)
    with pytest.raises(MemoryError), torch.no_grad():
        model(prompts(1, 900)["input_ids"], past_key_values=cache)
    assert widths(cache) == before[1]
    assert all(torch.equal(a, stored.pages) for a, stored in zip(before[0], storages(cache)))
    again = TurboQuantCache(model, memory_limit=limit)
    read(model, again, held)
    with torch.no_grad():
        token = torch.tensor([[5]])
        a, b = (model(token, past_key_values=x).logits for x in (cache, again))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_prompt_is_packed_at_its_final_widths(model: Any) -> None:
    limit = int(full(model, 1000) * 0.9)
    cache = TurboQuantCache(model, memory_limit=limit)
    read(model, cache, 1000, chunk=1000)
    assert cache.nbytes <= limit and min(map(min, widths(cache))) < 4
    overrides = {i: {"key_bits": k, "value_bits": v} for i, (k, v) in enumerate(widths(cache))}
    want = TurboQuantCache(model, SPEC.with_(overrides=overrides, tries=SPEC.settled().tries, variance_term=False))
    read(model, want, 1000, chunk=1000)
    assert all(torch.equal(a.pages, b.pages) for a, b in zip(storages(cache), storages(want)))


def test_reset_gives_the_widths_back(model: Any) -> None:
    cache = TurboQuantCache(model, memory_limit=int(full(model, 1000) * 0.8))
    read(model, cache, 1000)
    assert cache.fell
    cache.reset()
    assert not cache.fell
    read(model, cache, 1000)
    assert cache.fell
    cache._shared.undo(0)  # as after a first forward that failed
    assert not cache.fell
    read(model, cache, 100)
    assert widths(cache) == [(4, 4)] * len(storages(cache))


def test_pages_of_forks_are_not_recoded(model: Any) -> None:
    limit = int(full(model, 1000) * 1.05)
    cache = TurboQuantCache(model, memory_limit=limit)
    read(model, cache, 700)
    fork = cache.fork()
    assert fork.memory_limit == limit and not fork.fell
    with pytest.raises(MemoryError, match="drop its forks"):
        read(model, fork, 2000)
    assert not fork.fell and cache.get_seq_length() == 700
    del cache
    read(model, fork, 128)
    assert fork.fell and fork.nbytes <= limit


def test_crop_and_selection(model: Any) -> None:
    cache = TurboQuantCache(model, memory_limit=int(full(model, 1000) * 0.9))
    read(model, cache, 1000)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(NotImplementedError, match="1 sequences to 2 with a `memory_limit` is not supported"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(NotImplementedError, match="assisted decoding with a `memory_limit`"):
        cache.activate_past_recording()
    with pytest.raises(NotImplementedError, match="join: caches with a `memory_limit`"):
        TurboQuantCache.join([cache, cache])


def test_files(model: Any, tmp_path: Any) -> None:
    cache = TurboQuantCache(model, memory_limit=int(full(model, 1000) * 0.9))
    read(model, cache, 100)
    cache.save(tmp_path / "before.tqc")
    assert TurboQuantCache.load(tmp_path / "before.tqc", model).memory_limit is None
    read(model, cache, 900)
    with pytest.raises(NotImplementedError, match="save: pages fell to fewer bits than the spec says"):
        cache.save(tmp_path / "after.tqc")


def test_files_of_specs_that_share_bits_have_the_widths(tmp_path: Any) -> None:
    made = tiny()
    spec = bare(4, 4, sinks=2, window=8, **WAVE)
    turboquant.patch(made, spec)
    cache = TurboQuantCache(made, memory_limit=int(full(made, 1000) * 0.85))
    read(made, cache, 1000)
    assert cache.fell
    cache.save(tmp_path / "fell.tqc", made)
    again = TurboQuantCache.load(tmp_path / "fell.tqc", made)
    assert widths(again) == widths(cache)
    assert all(torch.equal(a.pages[: len(b.pages)], b.pages) for a, b in zip(storages(cache), storages(again)))
    with torch.no_grad():
        a, b = (made(torch.tensor([[5]]), past_key_values=x).logits for x in (cache, again))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_layers_that_cost_least_fall_first() -> None:
    """What fell costs no more per bit than what would fall next."""
    made = tiny()
    turboquant.patch(made, bare(5, 4, sinks=2, window=8, **WAVE))
    cache = TurboQuantCache(made, memory_limit=int(full(made, 1000) * 1.2))
    limit = cache._shared.limit
    limit.costs = [[1.0, 0.1], [0.03, 2.0], [0.2, 0.05]]  # measured on random ids, this model has none
    begin = widths(cache)
    read(made, cache, 1000)
    fallen, left = list[float](), list[float]()
    for stored, before, after, costs in zip(storages(cache), begin, widths(cache), limit.costs):
        for side in (0, 1):
            assert after[side] in (before[side], 3, 2)
            for bits, to in ((before[side], 3), (3, 2)):
                cost = added_cost(costs[side], bits, to, stored.spec.tries, stored.head_dim) / (bits - to)
                if after[side] <= to:
                    fallen.append(cost)
                elif bits == after[side]:
                    left.append(cost)
    assert fallen and left and max(fallen) <= min(left)


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a word": (SPEC, "much", ValueError, "`memory_limit` must be a size above 0 such as 40GB or 512MiB, got 'much'"),
    "nothing": (SPEC, 0, ValueError, "`memory_limit` must be a size above 0"),
    "a float": (SPEC, 1e9, TypeError, "`memory_limit` must be a size such as '8 GiB' or a number of bytes"),
    "split widths": (bare((4, 3), 4), "1 GiB", ValueError, "`memory_limit` needs one whole width for all channels"),
    "another scale": (bare(4, 4, scale="norm"), "1 GiB", ValueError, "`memory_limit` needs one whole width"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refusals(case: tuple[Any, Any, type[Exception], str], model: Any) -> None:
    spec, limit, error, text = case
    with pytest.raises(error, match=re.escape(text)):
        TurboQuantCache(tiny(head_dim=64) if "split" in text else model, spec, memory_limit=limit)
