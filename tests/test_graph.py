"""Decoding steps as CUDA graphs: the same text as without, whatever happens to the cache in between."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import causal_types  # noqa: E402
from models import prompts, tiny  # noqa: E402
from specs import WAVE, bare  # noqa: E402

import turboquant  # noqa: E402
from turboquant.hf.attention import attention  # noqa: E402
from turboquant.hf.graph import DecodeGraph  # noqa: E402
from turboquant.models.names import CACHE  # noqa: E402

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
PLAIN = bare(key_bits=4, value_bits=4)
SPEC = PLAIN.with_(sinks=4, window=32, **WAVE)


def generated(model: Any, **inputs: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=40, min_new_tokens=40, do_sample=False)


def prompt(batch: int, tokens: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 90, (batch, tokens), generator=generator)


def test_a_cache_on_the_cpu_is_never_replayed() -> None:
    model = turboquant.patch(tiny(), SPEC, cuda_graphs=True)
    ids = prompt(1, 50)
    with_graphs = generated(model, input_ids=ids)
    turboquant.patch(model, SPEC)
    assert "forward" not in model.__dict__
    assert torch.equal(with_graphs, generated(model, input_ids=ids))


def test_every_step_after_the_prompt_is_for_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` passes them to `DecodeGraph.step`. That is replaced here, so that no GPU is needed."""
    steps = []

    def step(self: DecodeGraph, ids: Any, positions: Any = None) -> Any:
        steps.append(tuple(ids.shape))
        return self._forward(
            input_ids=ids, position_ids=positions, past_key_values=self._cache(), use_cache=True
        ).logits

    monkeypatch.setattr(DecodeGraph, "takes", staticmethod(lambda cache, ids: ids.shape[1] == 1))
    monkeypatch.setattr(DecodeGraph, "step", step)
    model = turboquant.patch(tiny(), SPEC, cuda_graphs=True)
    text = generated(model, input_ids=prompt(2, 50))
    assert steps == [(2, 1)] * 39
    assert torch.equal(text, generated(turboquant.patch(model, SPEC), input_ids=prompt(2, 50)))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The positions of the steps that the graph gets. These run as plain forwards, so that no GPU is needed."""
    seen: list[Any] = []

    def run(self: DecodeGraph, cache: Any, ids: Any, positions: Any) -> Any:
        seen.append(positions.flatten().tolist())
        return self._forward(input_ids=ids, position_ids=positions, use_cache=True, **{CACHE: cache}).logits

    for name in ("_run", "_record", "_replay"):
        monkeypatch.setattr(DecodeGraph, name, run)
    monkeypatch.setattr(DecodeGraph, "takes", staticmethod(lambda cache, ids: ids.shape[1] == 1))
    return seen


@pytest.mark.parametrize("kind", ["llama", "opt", "roberta"])
@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=["wave", "no wave"])
def test_positions_of_steps_without_position_ids(kind: str, spec: Any, seen: list[Any]) -> None:
    """They are those that the model itself chooses: the number of stored tokens, or what a mask or padding ids say."""

    def logits() -> Any:
        cache = turboquant.TurboQuantCache(model)
        with torch.no_grad():
            parts = [model(input_ids=ids[:, a:b], attention_mask=mask[:, :b], use_cache=True, **{CACHE: cache}).logits
                     for a, b in ((0, 50), (50, 51), (51, 52))]  # fmt: skip
        return torch.cat(parts, 1)[mask.bool()]

    model = causal_types.tiny(kind)
    ids, mask = prompts(2, 52, (0, 9)).values()
    turboquant.patch(model, spec)
    want = logits()
    turboquant.patch(model, spec, cuda_graphs=True)
    torch.testing.assert_close(logits(), want, rtol=0, atol=1e-5)
    assert seen == ([[50, 50], [51, 51]] if kind == "llama" else [])


MASKS = {  # (mask of a step after 20 tokens, error, message)
    "custom": (torch.ones(2, 1, 1, 21, dtype=torch.bool), NotImplementedError, r"\(2, 1, 1, 21\): custom masks"),
    "of too few positions": (torch.ones(2, 20), ValueError, r"must cover the 20 stored positions .* got \(2, 20\)"),
    "of the new token": (torch.ones(2, 1), ValueError, r"must cover the 20 stored positions .* got \(2, 1\)"),
}


@pytest.mark.parametrize("mask, error, message", MASKS.values(), ids=MASKS)
def test_masks_of_steps_are_checked_as_without_graphs(mask: Any, error: Any, message: str, seen: list[Any]) -> None:
    for graphs in (False, True):
        model = turboquant.patch(tiny(), PLAIN, cuda_graphs=graphs)
        cache, ids = turboquant.TurboQuantCache(model), prompt(2, 21)
        with torch.no_grad():
            model(input_ids=ids[:, :20], **{CACHE: cache})
            with pytest.raises(error, match=message):
                model(input_ids=ids[:, 20:], attention_mask=mask, **{CACHE: cache})
            assert seen == [] and cache.get_seq_length() == 20
            model(input_ids=ids[:, 20:], attention_mask=torch.ones(2, 21), **{CACHE: cache})
    assert seen == [[20, 20]]


@pytest.mark.parametrize("kind, field", [("llama", "output_hidden_states"), ("mixtral", "output_router_logits")])
def test_outputs_that_the_configuration_asks_for(kind: str, field: str, seen: list[Any]) -> None:
    model = turboquant.patch(tiny(kind, **{field: True}), PLAIN, cuda_graphs=True)
    cache, ids = turboquant.TurboQuantCache(model), prompt(1, 21)
    with torch.no_grad():
        model(input_ids=ids[:, :20], use_cache=True, **{field: False, CACHE: cache})
        out = model(input_ids=ids[:, 20:], use_cache=True, **{CACHE: cache})
    assert out[field.removeprefix("output_")] is not None and seen == []


def test_a_mask_is_read_where_a_sequence_is_padding_alone(seen: list[Any]) -> None:
    model, (ids, mask) = turboquant.patch(tiny(), PLAIN, cuda_graphs=True), prompts(2, 22, (0, 21)).values()
    cache = turboquant.TurboQuantCache(model)
    with torch.no_grad():
        for a, b in ((0, 20), (20, 21), (21, 22)):
            model(input_ids=ids[:, a:b], attention_mask=mask[:, :b], **{CACHE: cache})
    assert cache.padding == (0, 21) and seen == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_unpatch_and_copies_take_the_graphs_along(copied: Any) -> None:
    model = turboquant.patch(tiny(), SPEC, cuda_graphs=True)
    other = copied(model)
    assert type(other.forward) is type(model.forward) and other.forward.__self__ is other
    assert inspect.signature(other.forward) == inspect.signature(tiny().forward)
    assert torch.equal(generated(other, input_ids=prompt(1, 50)), generated(model, input_ids=prompt(1, 50)))
    turboquant.unpatch(model)
    assert "forward" not in model.__dict__


def test_a_replaced_forward_is_refused() -> None:
    model = tiny()
    model.forward = model.forward
    with pytest.raises(NotImplementedError, match="cuda_graphs"):
        turboquant.patch(model, SPEC, cuda_graphs=True)
    assert not hasattr(model, "_turboquant")


def test_steps_need_a_filled_cache() -> None:
    model = turboquant.patch(tiny(), SPEC)
    cache = turboquant.TurboQuantCache(model, SPEC)
    with pytest.raises(ValueError, match="`ids` must be int64"):
        DecodeGraph(cache, model.forward).step(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("moves", [False, True])
def test_a_step_is_recorded_anew_when_a_weight_has_moved(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording and replaying are replaced here, so that no GPU is needed."""
    done = []
    for name in ("run", "record", "replay"):
        monkeypatch.setattr(DecodeGraph, f"_{name}", lambda *_, name=name: done.append(name))
    monkeypatch.setattr(DecodeGraph, "takes", staticmethod(lambda cache, ids: True))
    model = turboquant.patch(tiny(), SPEC)
    cache = turboquant.TurboQuantCache(model, SPEC)
    with torch.no_grad():
        model(input_ids=prompt(1, 20), past_key_values=cache)
    graph, token = DecodeGraph(cache, model.forward, model.parameters()), prompt(1, 1)
    graph.step(token)
    graph._graph = object()  # type: ignore[assignment]
    if moves:
        weight = next(model.parameters())
        weight.data = weight.data.clone()
    graph.step(token)
    assert done == ["run", "run" if moves else "replay"]


@pytest.mark.cuda
@NEEDS_CUDA
@pytest.mark.parametrize("batch", [1, 3])
def test_the_text_is_that_of_plain_steps(batch: int) -> None:
    model = turboquant.patch(tiny().cuda(), SPEC)
    ids = prompt(batch, 120).cuda()
    mask = torch.ones_like(ids)
    mask[0, :17] = 0  # padding on the left
    plain = generated(model, input_ids=ids, attention_mask=mask)
    turboquant.patch(model, SPEC, cuda_graphs=True)
    assert torch.equal(generated(model, input_ids=ids, attention_mask=mask), plain)


@pytest.mark.cuda
@NEEDS_CUDA
def test_replays_notice_what_moves_the_cache() -> None:
    """After growth into new pages, a crop, a reorder and a fork, replays have the logits of plain steps."""
    model = turboquant.patch(tiny().cuda(), bare(key_bits=4, value_bits=4, sinks=0, window=0))
    config, spec = model.config, model._turboquant.spec
    ids = prompt(2, 200).cuda()

    def run(step: Any, cache: Any) -> list[Any]:
        logits = []
        model(input_ids=ids[:, :100], past_key_values=cache)
        for i in range(100, 110):
            logits.append(step(cache, ids[:, i : i + 1]))
        cache.crop(104)
        for i in range(104, 108):
            logits.append(step(cache, ids[:, i : i + 1]))
        cache.reorder_cache(torch.tensor([1, 0], device="cuda"))
        fork = cache.fork()
        for i in range(108, 114):
            logits.append(step(cache, ids[:, i : i + 1]))
        logits.append(step(fork, ids[:, 150:151]))
        return logits

    graphs: dict[Any, DecodeGraph] = {}

    def replayed(cache: Any, token: Any) -> Any:
        return graphs.setdefault(cache, DecodeGraph(cache, model.forward)).step(token)

    def plain(cache: Any, token: Any) -> Any:
        return model(input_ids=token, past_key_values=cache).logits

    with torch.no_grad():
        ours = run(replayed, turboquant.TurboQuantCache(config, spec))
        want = run(plain, turboquant.TurboQuantCache(config, spec))
    for a, b in zip(ours, want, strict=True):  # reserved room changes how work is split: equal up to rounding
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * float(b.abs().max()))


@pytest.mark.cuda
@NEEDS_CUDA
def test_replays_notice_weights_that_moved() -> None:
    model = turboquant.patch(tiny().cuda(), SPEC)
    ids = prompt(1, 120).cuda()
    cache, other = (turboquant.TurboQuantCache(model, SPEC) for _ in range(2))
    graph = DecodeGraph(cache, model.forward, model.parameters())
    with torch.no_grad():
        for each in (cache, other):
            model(input_ids=ids[:, :100], past_key_values=each)
        for i in range(100, 110):
            if i == 105:  # the third step and later ones were replays
                assert graph._graph is not None
                model.lm_head.weight.data = 2 * model.lm_head.weight.data
            got = graph.step(ids[:, i : i + 1])
            want = model(input_ids=ids[:, i : i + 1], past_key_values=other).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-3 * float(want.abs().max()))


@pytest.mark.cuda
@NEEDS_CUDA
def test_check_names_what_was_not_finite() -> None:
    model = turboquant.patch(tiny().cuda(), SPEC)
    cache = turboquant.TurboQuantCache(model, SPEC)
    k = torch.randn(2, model.config.num_key_value_heads, 20, model.config.head_dim, device="cuda")
    with torch.no_grad():
        model(input_ids=prompt(2, 20).cuda(), past_key_values=cache)
    cache.check()
    held = cache.layers[1].storage
    k[1, 0, 3, 5] = float("nan")
    torch.ops.turboquant.append(
        held.plan.words, k, torch.zeros_like(k), torch.full((2,), 20, dtype=torch.int32, device="cuda"), held.pages,
        held.block_table, flag=held.flag, **held.arguments(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="layer 1: the key of position 3 of sequence 1 "):
        cache.check()


@pytest.mark.cuda
@NEEDS_CUDA
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_number_of_a_prompt_is_named_and_stays_alone(bad: float) -> None:
    """All other keys and values are stored as they would be without it."""
    spec = bare(sinks=4, window=16)
    config = tiny(head_dim=64).config
    k = torch.randn(1, config.num_key_value_heads, 200, 64, device="cuda", dtype=torch.bfloat16)
    caches = []
    for number in (0.0, bad):
        k[0, 0, 33, 5] = number
        cache = turboquant.TurboQuantCache(config, spec)
        for i in range(len(cache.layers)):
            keys, values = cache.update(k, k, i)
            query = torch.zeros(1, config.num_attention_heads, 200, 64, device="cuda", dtype=torch.bfloat16)
            module = SimpleNamespace(layer_idx=i, is_causal=True, num_key_value_groups=query.shape[1] // k.shape[1])
            attention(module, query, keys, values, None, scaling=0.125)
        caches.append(cache)
    whole, broken = caches
    whole.check()
    assert all(torch.equal(a.storage.pages, b.storage.pages) for a, b in zip(whole.layers, broken.layers))
    with pytest.raises(ValueError, match="layer 0: the (key|value) of position 33 of sequence 0 "):
        broken.check()
