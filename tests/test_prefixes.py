"""One prefix and many requests: padding between a shared prefix and questions of different lengths, and forks of a
prefix put together into a batch. Each sequence gives what it gives alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers")
import models  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import turboquant  # noqa: E402
from turboquant import CacheSpec, TurboQuantCache  # noqa: E402

EXACT = CacheSpec(sinks=4, window=400, centre="none", metric="none")
PACKED = CacheSpec(key_bits=4, value_bits=4, sinks=2, window=3, centre="none", metric="none")
ALL_PACKED = PACKED.with_(sinks=0, window=0)
PREFIX = 140  # more than a page
LENGTHS = (5, 12, 1, 30)


def patched(spec: CacheSpec, kind: str = "llama") -> Any:
    model = models.tiny(kind)
    turboquant.patch(model, spec)
    return model


def tokens(count: int, seed: int) -> Any:
    return torch.randint(1, 96, (1, count), generator=torch.Generator().manual_seed(seed))


PROMPT = tokens(PREFIX, 0)
QUESTIONS = [tokens(n, 1 + n) for n in LENGTHS]


def prefixed(model: Any, cache: Any) -> Any:
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    return cache


def padded(questions: Any = QUESTIONS) -> tuple[Any, Any]:
    """(token ids, mask) of questions, padded on the left."""
    most = max(q.shape[1] for q in questions)
    ids = torch.cat([torch.nn.functional.pad(q, (most - q.shape[1], 0)) for q in questions])
    lengths = torch.tensor([q.shape[1] for q in questions])
    return ids, (torch.arange(most) >= most - lengths[:, None]).long()


def batch(model: Any, cache: Any, new: int = 6) -> Any:
    """Returns the new tokens and logits of all questions after the prefix, as a batch with padding between them."""
    cache.batch_repeat_interleave(len(QUESTIONS))
    ids, mask = padded()
    ids = torch.cat([PROMPT.expand(len(QUESTIONS), -1), ids], 1)
    mask = torch.cat([torch.ones(len(QUESTIONS), PREFIX, dtype=torch.long), mask], 1)
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences[:, -new:], torch.stack(out.logits, 1)


def alone(model: Any, cache: Any, new: int = 6) -> Any:
    """Returns the same from forks of the prefix, one question at a time."""
    outs = [
        model.generate(
            torch.cat([PROMPT, q], 1), past_key_values=cache.fork(), max_new_tokens=new, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )
        for q in QUESTIONS
    ]  # fmt: skip
    return torch.cat([o.sequences[:, -new:] for o in outs]), torch.cat([torch.stack(o.logits, 1) for o in outs])


def test_padding_between_as_a_dynamic_cache_has_it() -> None:
    plain = models.tiny()
    text, logits = batch(plain, prefixed(plain, DynamicCache(config=plain.config)))
    model = patched(EXACT)
    got, found = batch(model, prefixed(model, TurboQuantCache(model)))
    assert torch.equal(got, text)
    torch.testing.assert_close(found, logits, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "spec", [PACKED, ALL_PACKED, PACKED.with_(prefill="packed")], ids=["window", "none", "prefill"]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_padding_between_is_each_text_alone(spec: CacheSpec, kind: str) -> None:
    model = patched(spec, kind)
    cache = prefixed(model, TurboQuantCache(model))
    text, logits = alone(model, cache)
    shared = cache.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as one about `position_ids`
        got, found = batch(model, shared)
    assert torch.equal(got, text)
    torch.testing.assert_close(found, logits, rtol=0, atol=2e-5)
    assert shared.packed_layers[0].storage.padding == tuple(max(LENGTHS) - n for n in LENGTHS)
    table = shared.packed_layers[0].storage.table
    assert table is not None and len({row[0] for row in table.rows}) == 1  # the prefix's first page is there once


def test_with_the_default_preset() -> None:
    """With a wave, which is turned by each sequence's own positions, and a metric."""
    model = models.tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turboquant.patch(model, "default")
        cache = prefixed(model, TurboQuantCache(model, CacheSpec(sinks=2, window=3)))
    text, logits = alone(model, cache)
    got, found = batch(model, cache)
    assert torch.equal(got, text)
    # In a batch a matrix product may round otherwise, and a key near the edge of two codes then gets the other one: in
    # one sequence at most. A wrong position would show in each that is padded.
    off = (found - logits).abs().flatten(1).amax(1)
    assert int((off > 2e-5).sum()) <= 1 and float(off.max()) < 0.02, off


def test_a_second_turn_with_padding() -> None:
    model = patched(PACKED)
    cache = prefixed(model, TurboQuantCache(model))
    forks = [cache.fork() for _ in QUESTIONS]
    cache.batch_repeat_interleave(len(QUESTIONS))
    mask = torch.ones(len(QUESTIONS), PREFIX, dtype=torch.long)
    for turn in (QUESTIONS, QUESTIONS[::-1]):
        ids, more = padded(turn)
        mask = torch.cat([mask, more], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            got = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
            want = torch.cat([model(q, past_key_values=f).logits[:, -1] for q, f in zip(turn, forks)])
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert cache.get_seq_length() == PREFIX + 2 * max(LENGTHS)


@pytest.mark.parametrize("spec", [EXACT, PACKED, ALL_PACKED], ids=["exact", "window", "none"])
@pytest.mark.parametrize("kind", ["llama", "mistral, sliding"])
@pytest.mark.parametrize("forked", [True, False])
def test_joined_is_each_alone(spec: CacheSpec, kind: str, forked: bool) -> None:
    model = patched(spec, kind)
    cache = prefixed(model, TurboQuantCache(model))
    text, logits = alone(model, cache)
    parts = [cache.fork() if forked else prefixed(model, TurboQuantCache(model)) for _ in QUESTIONS]
    with torch.no_grad():
        for part, question in zip(parts, QUESTIONS):
            if question.shape[1] > 1:
                model(question[:, :-1], past_key_values=part)
    joined = TurboQuantCache.join(parts)
    most = PREFIX + max(LENGTHS)
    mask = (torch.arange(most) >= torch.tensor([[max(LENGTHS) - n] for n in LENGTHS])).long()
    ids = torch.cat(
        [torch.nn.functional.pad(torch.cat([PROMPT, q], 1), (max(LENGTHS) - q.shape[1], 0)) for q in QUESTIONS]
    )
    out = model.generate(
        ids, attention_mask=mask, past_key_values=joined, max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences[:, -6:], text)
    torch.testing.assert_close(torch.stack(out.logits, 1), logits, rtol=0, atol=2e-5)
    for part, question in zip(parts, QUESTIONS):  # the parts keep their tokens
        assert part.get_seq_length() == PREFIX + question.shape[1] - 1
    if forked and spec is ALL_PACKED and kind == "llama":
        table = joined.packed_layers[0].storage.table
        assert table is not None and len({row[0] for row in table.rows}) == 1


@pytest.mark.parametrize("spec", ["default", PACKED], ids=["default", "packed"])
def test_a_prefix_from_a_file_is_joined_with_the_one_in_memory(spec: Any, tmp_path: Any) -> None:
    model = patched(spec)
    cache = prefixed(model, TurboQuantCache(model))
    cache.save(tmp_path / "prefix", model)
    other = TurboQuantCache.load(tmp_path / "prefix", model)
    for parts in ([cache, other], [other, cache]):
        joined = TurboQuantCache.join(parts)
        with torch.no_grad():
            one, two = model(QUESTIONS[0].expand(2, -1), past_key_values=joined).logits
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_what_cannot_be() -> None:
    model = patched(PACKED)
    cache = prefixed(model, TurboQuantCache(model))
    cache.batch_repeat_interleave(2)
    ids, more = padded(QUESTIONS[:2])
    whole = torch.ones(2, PREFIX, dtype=torch.long)

    def forward(mask: Any, given: Any = ids) -> Any:
        with torch.no_grad():
            return model(given, attention_mask=mask, past_key_values=cache)

    hole = torch.ones_like(more)
    hole[:, 1] = 0
    for bad, why in (
        (torch.cat([whole, hole], 1), "got masked ones between tokens in 2 of 2 sequences"),
        (torch.cat([whole.clone().fill_(0), more], 1), "as many stored positions of each sequence as were padding"),
    ):
        with pytest.raises(ValueError, match=why):
            forward(bad)
    assert cache.get_seq_length() == PREFIX
    forward(torch.cat([whole, more], 1))
    with pytest.raises(NotImplementedError, match="up to position 152 there is padding between tokens or behind"):
        cache.crop(-1)
    forward(torch.cat([whole, more, torch.ones(2, 1, dtype=torch.long)], 1), ids[:, :1])
    with pytest.raises(NotImplementedError, match="position 152"):
        cache.crop(151)

    sliding = patched(PACKED, "mistral, sliding")
    cache = prefixed(sliding, TurboQuantCache(sliding))
    cache.batch_repeat_interleave(2)
    known = pytest.raises(NotImplementedError, match=r"not supported with a sliding window: .* TurboQuantCache\.join")
    with known, torch.no_grad():
        sliding(ids, attention_mask=torch.cat([whole, more], 1), past_key_values=cache)
    assert cache.get_seq_length() == PREFIX


def test_a_crop_across_padding_is_refused_of_files_and_joined_caches_too(tmp_path: Any) -> None:
    model, between, ids, mask = asked_twice(PACKED)
    behind = TurboQuantCache(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=between)
        model(ids, attention_mask=mask[:, PREFIX:].flip(1), past_key_values=behind)
    shorter = prefixed(model, TurboQuantCache(model))
    for i, cache in enumerate((between, behind)):
        cache.save(tmp_path / str(i), model)
        loaded = TurboQuantCache.load(tmp_path / str(i), model)
        for one in (cache, cache.fork(), loaded, TurboQuantCache.join([shorter, cache])):
            with pytest.raises(NotImplementedError, match="there is padding between tokens or behind them"):
                one.crop(-1)


def asked_twice(spec: CacheSpec) -> tuple[Any, Any, Any, Any]:
    """(model, its cache with the prefix twice, two questions, the mask with both)."""
    model = patched(spec)
    cache = prefixed(model, TurboQuantCache(model))
    cache.batch_repeat_interleave(2)
    ids, more = padded(QUESTIONS[:2])
    return model, cache, ids, torch.cat([torch.ones(2, PREFIX, dtype=torch.long), more], 1)


def test_a_failure_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, ids, mask = asked_twice(ALL_PACKED)
    want = model(ids, attention_mask=mask, past_key_values=cache.fork()).logits
    with monkeypatch.context() as patch:
        patch.setattr(cache.packed_layers[2].storage, "reserve_pages", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="layer 2"):
            model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == PREFIX and cache.packed_layers[0].storage.padding == (0, 0)
    torch.testing.assert_close(model(ids, attention_mask=mask, past_key_values=cache).logits, want, rtol=0, atol=0)


def test_a_failure_in_the_middle_of_a_layer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences hold the new tokens then, and others do not."""
    from turboquant.kvcache import rows

    model, cache, ids, mask = asked_twice(PACKED)
    calls, right = [0], rows._append_attend

    def failing(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return right(*args, **options) if calls[0] != 6 else 1 / 0

    monkeypatch.setattr(rows, "_append_attend", failing)
    with pytest.raises(ZeroDivisionError, match="layer 2"):
        model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"layer .: an earlier call failed after it had changed the cache"):
        model(ids, attention_mask=mask, past_key_values=cache)


def test_join_refuses() -> None:
    model = patched(PACKED)
    cache = prefixed(model, TurboQuantCache(model))
    with pytest.raises(TypeError, match="join: `caches` must be a list of TurboQuantCaches, got TurboQuantCache"):
        TurboQuantCache.join(cache)
    with pytest.raises(TypeError, match="`caches` must be TurboQuantCaches, at least one, got none"):
        TurboQuantCache.join([])
    with pytest.raises(TypeError, match="got DynamicCache"):
        TurboQuantCache.join([DynamicCache()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"`caches\[1\]` must hold tokens"):
        TurboQuantCache.join([cache, TurboQuantCache(model)])
    other = prefixed(patched(ALL_PACKED), TurboQuantCache(model.config, ALL_PACKED))
    with pytest.raises(ValueError, match=r"`caches\[1\]` must be of the model and spec of the first"):
        TurboQuantCache.join([cache, other])
    half = patched(PACKED).half()
    with pytest.raises(ValueError, match=r"`caches\[1\]` must be like the first in layer 0"):
        TurboQuantCache.join([cache, prefixed(half, TurboQuantCache(half))])
