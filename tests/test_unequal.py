"""MiMo V2: keys of 192 and values of 128 channels, with learned sinks and twice the KV heads in its sliding layers."""

from __future__ import annotations

from typing import Any

import pytest
from causal_types import EXACT, TYPES, tiny
from hybrids import HOLDS_ALL, IDS, PACKED, PADDED, PIECES, check_generate, run
from models import torch
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf.unequal import UnequalLayer
from turboquant.models import names

pytestmark = pytest.mark.skipif("mimo_v2_flash" not in TYPES, reason="this transformers has no MiMo V2")

SPECS = {
    "packed": PACKED,
    "sinks and window": PACKED.with_(sinks=3, window=6),
    "packed prefill": PACKED.with_(prefill="packed"),
    "packed prefill, sinks and window": PACKED.with_(prefill="packed", sinks=3, window=6),
}


def made(spec: Any = None, **fields: Any) -> Any:
    """A small model whose learned sinks matter, patched if there is a spec."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(EXACT, "mimo_v2_flash", {**EXACT["mimo_v2_flash"], **fields})
        model = tiny("mimo_v2_flash")
    for layer in model.model.layers:
        if layer.self_attn.sinks is not None:
            torch.nn.init.normal_(layer.self_attn.sinks, generator=torch.Generator().manual_seed(1))
    return model if spec is None else turboquant.patch(model, spec)


@pytest.mark.parametrize("prefill", ["exact", "packed"])
@pytest.mark.parametrize("sizes", [(192, 128), (48, 32), (16, 24)])
def test_exact_while_sinks_and_window_hold_all(sizes: tuple[int, int], prefill: Any) -> None:
    fields = dict(head_dim=sizes[0], v_head_dim=sizes[1])
    model = made(**fields)
    want = run(model, DynamicCache(config=model.config))
    got = run(turboquant.patch(model, HOLDS_ALL, prefill=prefill), TurboQuantCache(model))
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_close_when_packed(spec: Any) -> None:
    model = made()
    want = run(model, DynamicCache(config=model.config))
    got = run(turboquant.patch(model, spec), TurboQuantCache(model))
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94
    assert (got - want).abs().max() > 1e-3  # something is packed


@pytest.mark.parametrize("spec", [HOLDS_ALL, *SPECS.values()], ids=["holds all", *SPECS])
def test_padding_and_pieces_do_not_matter(spec: Any) -> None:
    """Padding in front changes nothing. If queries read packed tokens, sizes of pieces change nothing either."""
    model = made(spec)

    def read(rows: slice, first: int, pieces: Any) -> torch.Tensor:
        cache, mask = TurboQuantCache(model), PADDED[rows, first:]
        places = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            parts = [
                model(
                    IDS[rows, first:][:, a:b],
                    attention_mask=mask[:, :b],
                    position_ids=places[:, a:b],
                    use_cache=True,
                    **{names.CACHE: cache},
                ).logits
                for a, b in pieces
            ]
        return torch.cat(parts, 1)[-1, 5 - first :]

    both = read(slice(2), 0, PIECES)
    alone = read(slice(1, 2), 5, [(max(a - 5, 0), b - 5) for a, b in PIECES])
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-4)
    if spec.prefill == "packed" and not spec.window:  # the window of a forward is that of its last token
        one_by_one = read(slice(2), 0, [*PIECES[:3], *((i, i + 1) for i in range(22, 40))])
        torch.testing.assert_close(one_by_one, both, rtol=0, atol=1e-4)


def test_generate() -> None:
    model = made()
    model.generation_config.eos_token_id = None
    check_generate(model)


def test_what_is_held() -> None:
    """The default preset keeps its exact tokens and bits; nothing is measured."""
    model = made("default")
    cache = TurboQuantCache(model)
    run(model, cache)
    assert all(type(layer) is UnequalLayer and not layer.storage.spec.measured for layer in cache.packed_layers)
    model = made(PACKED, head_dim=192, v_head_dim=128)
    cache = TurboQuantCache(model)
    run(model, cache)
    report, text = cache.report(), model.config
    for layer, held, kind in zip(cache.packed_layers, report.layers, text.layer_types, strict=True):
        kv_heads = text.num_key_value_heads * (1 + (kind == "sliding_attention"))
        stored = layer.storage
        assert held.numbers == (2 * 40 - 5) * kv_heads * (192 + 128)
        assert stored.plan.record_bytes * 2 * 5 * kv_heads == held.parts["pages"]  # one page of 128 tokens a text
        assert {name for name, _ in stored.by_part()} == {"pages", "block_table"}
    bits = 8 * cache.packed_layers[0].storage.plan.record_bytes / (128 * 64)
    assert 5 < bits <= 5.5 and report.nbytes == cache.nbytes


@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_sliding_layers_free_pages(prefill: Any) -> None:
    ids = torch.randint(2, 90, (1, 700), generator=torch.Generator().manual_seed(4))
    model = made(sliding_window=20)
    patched = turboquant.patch(made(sliding_window=20), PACKED, prefill=prefill)
    cache, own = TurboQuantCache(patched), DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in ids.split((500, 1, 197, 1, 1), 1):
            got = patched(piece, use_cache=True, **{names.CACHE: cache}).logits
            want = model(piece, use_cache=True, **{names.CACHE: own}).logits
            assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94
    for layer, kind in zip(cache.packed_layers, model.config.layer_types, strict=True):
        pages = 6 if kind == "full_attention" else 2
        assert layer.storage.pages.shape[0] <= pages and bool(layer.storage.released) == (pages == 2)


def test_crop_fork_join_and_sequences() -> None:
    model = made(PACKED.with_(sinks=2))
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:3])
    fork = cache.fork()
    want = run(model, fork, PIECES[3:])
    run(model, cache, PIECES[3:4])
    cache.crop(-5)
    assert torch.equal(run(model, cache, PIECES[3:]), want)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    for one in (cache, fork):
        one.crop(-1)
    a, b = (run(model, one, ((39, 40),)) for one in (cache, fork))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    whole = torch.ones(1, 40, dtype=torch.long)
    single = TurboQuantCache(model)
    run(model, single, ((0, 30),), whole)
    other = single.fork()
    run(model, single, ((30, 35),), whole)
    run(model, other, ((30, 39),), whole)
    joined = TurboQuantCache.join([single, other])
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :4] = 0
    places = torch.tensor([[35], [39]])
    with torch.no_grad():
        got = model(
            IDS[:, 39:], attention_mask=mask, position_ids=places, use_cache=True, **{names.CACHE: joined}
        ).logits
        want = [model(IDS[i : i + 1, 39:], use_cache=True, **{names.CACHE: one}).logits
                for i, one in enumerate((single, other))]  # fmt: skip
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["mimo_v2_flash", "deepseek_v3"])
def test_crop_behind_a_window_that_is_recorded(name: str) -> None:
    """A crop brings tokens back that had left the window, as assisted decoding needs it."""
    model = turboquant.patch(tiny(name), PACKED.with_(sinks=2, window=4))
    cache, other = TurboQuantCache(model), TurboQuantCache(model)
    for one in (cache, other):
        run(model, one, PIECES[:3])
    cache.activate_past_recording()
    run(model, cache, PIECES[3:4])
    cache.crop(-4)
    run(model, cache, ((23, 25),))
    run(model, other, ((22, 23),))
    run(model, other, ((23, 25),))
    cache.crop(-1)
    other.activate_past_recording()
    with pytest.raises(NotImplementedError, match="call cache.activate_past_recording"):
        other.crop(-1)
    fresh = TurboQuantCache(model)
    for pieces in (PIECES[:3], ((22, 23),), ((23, 24),)):
        run(model, fresh, pieces)
    a, b = (run(model, one, ((24, 40),)) for one in (cache, fresh))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_assisted_decoding() -> None:
    model = made(turboquant.CacheSpec())
    model.generation_config.eos_token_id = None
    options = dict(max_new_tokens=30, do_sample=False, pad_token_id=0)
    want = model.generate(IDS[:1], **options)
    with pytest.MonkeyPatch.context() as patched:
        crops = []
        own = UnequalLayer.crop
        patched.setattr(UnequalLayer, "crop", lambda layer, n: (crops.append(n), own(layer, n)))
        got = model.generate(IDS[:1], **options, prompt_lookup_num_tokens=3)
    assert torch.equal(got, want) and crops


def test_a_failed_forward_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(PACKED)
    cache, other = TurboQuantCache(model), TurboQuantCache(model)
    run(model, cache, PIECES[:1])
    run(model, other, PIECES[:1])
    fail: Any = lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no room"))  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(cache.packed_layers[-1].storage, "store", fail)
        with pytest.raises(MemoryError, match="layer 1: no room"):
            run(model, cache, PIECES[1:2])
    assert torch.equal(run(model, cache, PIECES[1:]), run(model, other, PIECES[1:]))


def test_what_is_refused(tmp_path: Any) -> None:
    model = made()
    for spec in ("paper-prod-3", bare(4, 3), bare(4, 4, rotation="dense")):
        with pytest.raises(NotImplementedError, match="keys and values of different sizes take specs of one number"):
            turboquant.patch(model, spec)
    with pytest.raises(NotImplementedError, match="cannot be measured: its keys and values have different sizes"):
        turboquant.measure(model)
    with pytest.raises(NotImplementedError, match="`cuda_graphs` is for text models"):
        turboquant.patch(model, PACKED, cuda_graphs=True)
    with pytest.raises(NotImplementedError, match="`memory_limit` is for models"):
        TurboQuantCache(model, PACKED, memory_limit="1 GiB")
    with pytest.raises(NotImplementedError, match="Codec: a model whose cache has"):
        turboquant.Codec(model, PACKED)
    cache = TurboQuantCache(model, PACKED)
    with pytest.raises(NotImplementedError, match="save: a cache of latents, or of keys and values of different"):
        cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match="layer 0: keys and values must be"):
        cache.update(torch.zeros(1, 2, 3, 48), torch.zeros(1, 2, 4, 32), 0)
