"""The wave follows the positions that a model gives its tokens where each sequence has one shift: left padding without
`position_ids`, shifted `position_ids`. In a Llama-like model a shift of a whole text changes no logit."""

from __future__ import annotations

import warnings
from typing import Any

import models
import pytest
from models import prompts, torch
from specs import bare

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf.persistence import moments_mark
from turboquant.kvcache import attend, decoded
from turboquant.models import names

TOKENS, PADDING = 90, (0, 23)
WAVE = bare(3, 8, centre="wave", prefill="packed")
INPUTS = prompts(2, TOKENS, PADDING)
IDS, MASK = INPUTS["input_ids"], INPUTS["attention_mask"]
COUNTED = (MASK.cumsum(1) - 1).clamp(min=0)

SHIFTED: dict[str, dict[str, Any]] = {
    "padding counted": {},
    "one shift for all": dict(position_ids=COUNTED + 700),
    "one shift a row": dict(position_ids=COUNTED + torch.tensor([[40], [1000]])),
    "padding and a shift": dict(position_ids=torch.arange(TOKENS)[None] + 333),
    "before 0": dict(position_ids=COUNTED - 50),
}


def with_large_means(kind: str, **fields: Any) -> Any:
    """A model whose keys have a mean of several times their deviation, which turns with the position."""
    model = models.tiny(kind, num_hidden_layers=2, **fields)
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        attention = layer.self_attn
        mean = torch.randn(attention.k_proj.out_features, generator=generator)
        attention.k_proj.bias = torch.nn.Parameter(40 * attention.k_proj.weight.detach().std() * mean)
        attention.q_proj.weight.data *= 0.2
    return model


def pieces(positions: Any, mask: Any = MASK) -> Any:
    """The forwards of a text, in pieces."""
    for start, stop in ((0, 60), (60, 84), (84, 85), (85, TOKENS)):
        given = {} if positions is None else dict(position_ids=positions[:, start:stop])
        yield dict(input_ids=IDS[:, start:stop], attention_mask=mask[:, :stop], **given)


def forward(model: Any, cache: Any, given: Any) -> Any:
    with torch.no_grad():
        return model(**given, use_cache=True, **{names.CACHE: cache}).logits


def run(model: Any, cache: Any, position_ids: Any = None) -> Any:
    """Logits of all tokens."""
    return torch.cat([forward(model, cache, given) for given in pieces(position_ids)], 1)


def divergence(got: Any, want: Any) -> float:
    got, want = (x[MASK.bool()].log_softmax(-1) for x in (got, want))
    return float((want.exp() * (want - got)).sum(-1).mean())


@pytest.fixture(scope="module", params=["qwen2", "mistral, sliding"])
def waving(request: Any) -> Any:
    """(model, profile, logits of the text): positions do not change them."""
    model = with_large_means(request.param)
    with torch.no_grad():
        want = model(**INPUTS, position_ids=COUNTED, use_cache=False).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = turboquant.measure(model)
    assert {layer.kind for layer in profile.layers} == {"wave"}
    return turboquant.patch(model, WAVE, profile=profile), profile, want


@pytest.mark.parametrize("way", ["attend", "decoded", "attend, sinks apart"])
def test_a_shift_costs_nothing(waving: Any, way: str, monkeypatch: Any) -> None:
    model, profile, want = waving
    spec = bare(3, 8, centre="wave", sinks=4) if way == "attend, sinks apart" else WAVE
    turboquant.patch(model, spec, profile=profile, prefill="packed" if way == "attend" else "exact")
    if way == "attend, sinks apart":  # as if `attend` had a kernel that takes no exact tokens
        monkeypatch.setattr(attend, "reads_packed_chunks", lambda stored, query: True)
        monkeypatch.setitem(attend.IN_PARTS_FROM, "cpu", 2)
    if way == "decoded":
        monkeypatch.setitem(decoded.LEAST_TOKENS, "cpu", 1)
        monkeypatch.setattr(decoded, "LEAST_ROWS", (1, 1))
    counted = divergence(run(model, TurboQuantCache(model), COUNTED), want)
    for given in SHIFTED.values():
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            followed = divergence(run(model, TurboQuantCache(model), **given), want)
        cache = TurboQuantCache(model)
        cache.turn = lambda *_: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ignored = divergence(run(model, cache, **given), want)
        assert followed < 1.4 * counted and ignored > 3 * followed


def test_shifts_go_with_their_sequences(waving: Any, tmp_path: Any) -> None:
    model, profile, _ = waving
    turboquant.patch(model, WAVE, profile=profile)
    positions = COUNTED + torch.tensor([[40], [1000]])
    *first, last = pieces(positions)

    def rows(given: Any, which: list[int]) -> Any:
        return {name: tensor[which] for name, tensor in given.items()}

    cache = TurboQuantCache(model)
    alone = [TurboQuantCache(model) for _ in PADDING]
    for given in first:
        forward(model, cache, given)
        for b, one in enumerate(alone):
            forward(model, one, rows(given, [b]))
    assert cache.shifts == (40, 1000) and [one.shifts for one in alone] == [(40,), (1000,)]
    cache.save(tmp_path / "cache.safetensors")
    loaded, swapped, joined = (
        TurboQuantCache.load(tmp_path / "cache.safetensors", model), cache.fork(), TurboQuantCache.join(alone)
    )  # fmt: skip
    swapped.batch_select_indices([1, 0])
    want = forward(model, cache.fork(), last)
    torch.testing.assert_close(forward(model, loaded, last), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(forward(model, joined, last), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(forward(model, swapped, rows(last, [1, 0])), want[[1, 0]], rtol=0, atol=2e-5)
    assert swapped.shifts == (1000, 40) and loaded.shifts == joined.shifts == (40, 1000)
    cache.reset()
    forward(model, cache, next(pieces(COUNTED)))
    assert cache.shifts == (0, 0)


def test_a_file_has_the_averaged_wave_and_the_measured_one(waving: Any, tmp_path: Any) -> None:
    model, profile, _ = waving
    turboquant.patch(model, WAVE, profile=profile)
    jumping = COUNTED + 300 * (COUNTED > 30)
    first, *later = pieces(jumping)
    cache, path = TurboQuantCache(model), tmp_path / "c.safetensors"
    with pytest.warns(UserWarning, match="jump by up to 300 inside a sequence"):
        forward(model, cache, first)
    cache.save(path, model)
    loaded = TurboQuantCache.load(path, model, profile=profile)
    loaded.save(tmp_path / "again", model)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for given in later:
            assert torch.equal(forward(model, loaded, given), forward(model, cache, given))
    for one in (cache, loaded):
        one.reset()
        assert moments_mark(one.moments) == moments_mark(profile.moments) and one.measured_moments is None


def test_padding_behind_a_shifted_prefix() -> None:
    model = with_large_means("qwen2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turboquant.patch(model, WAVE, profile=turboquant.measure(model))
    prefix, cache = IDS[:1, :50], TurboQuantCache(model)
    with torch.no_grad():
        model(prefix, position_ids=torch.arange(300, 350)[None], use_cache=True, **{names.CACHE: cache})
        forks = [cache.fork() for _ in range(2)]
        cache.batch_repeat_interleave(2)
        questions, mask = IDS[:, 50:70], torch.ones((2, 70), dtype=torch.long)
        mask[1, 50:57] = 0
        positions = 300 + (mask.cumsum(1) - 1)[:, 50:]
        got = model(questions, attention_mask=mask, position_ids=positions, use_cache=True, **{names.CACHE: cache})
        for b, (fork, first) in enumerate(zip(forks, (0, 7))):
            at = torch.arange(350, 370 - first)[None]
            want = model(questions[b : b + 1, first:], position_ids=at, use_cache=True, **{names.CACHE: fork}).logits
            torch.testing.assert_close(got.logits[b : b + 1, first:], want, rtol=0, atol=2e-5)
