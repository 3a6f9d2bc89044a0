"""Latent attention (MLA): latents and rotary parts are packed. The model expands the decoded ones with its own code."""

from __future__ import annotations

from typing import Any

import pytest
from causal_types import EXACT, TYPES, VERSION, tiny
from hybrids import PIECES, check_generate, run
from models import torch
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.hf import absorbed
from turboquant.hf.latent import LatentLayer

NAMES = """
    axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 sarvam_mla youtu
    """.split()
QUICK = ("deepseek_v3", "minicpm3")
TRIED = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES if n in TYPES and n in EXACT]
pytestmark = pytest.mark.skipif(VERSION < (5, 20), reason="older transformers caches expanded keys and values")

HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(6, 6)


def made(name: str = "deepseek_v3", spec: Any = PACKED) -> Any:
    return turboquant.patch(tiny(name), spec)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_exact_while_the_window_holds_all_and_close_when_packed(name: str, prefill: Any) -> None:
    model = tiny(name)
    want = run(model, DynamicCache(config=model.config))
    got = run(turboquant.patch(model, HOLDS_ALL, prefill=prefill), TurboQuantCache(model))
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    for spec in (PACKED, PACKED.with_(sinks=3, window=6)):
        got = run(turboquant.patch(model, spec, prefill=prefill), TurboQuantCache(model))
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94
        assert (got - want).abs().max() > 1e-3  # something is packed


@pytest.mark.parametrize("name", TRIED)
def test_generate(name: str) -> None:
    check_generate(tiny(name), HOLDS_ALL)


def test_what_is_held() -> None:
    """The default preset keeps its exact tokens and bits; latents have no wave and metric, so nothing is measured."""
    model = made(spec="default")
    cache = TurboQuantCache(model)
    run(model, cache)
    layers = cache.packed_layers
    assert all(type(layer) is LatentLayer and not layer.storage.spec.measured for layer in layers)
    cache = TurboQuantCache(made())
    run(model, cache)
    stored, text = cache.packed_layers[0].storage, model.config
    assert stored.kv_heads * stored.head_dim == text.kv_lora_rank + text.qk_rope_head_dim
    report = cache.report()
    assert report.layers[0].numbers == 2 * 40 * (text.kv_lora_rank + text.qk_rope_head_dim)
    assert {name for name, _ in stored.by_part()} == {"pages", "block_table"}


def test_crop_fork_and_sequences() -> None:
    model = made(spec=PACKED.with_(sinks=2))
    cache = TurboQuantCache(model)
    run(model, cache, PIECES[:3])
    fork = cache.fork()
    want = run(model, fork, PIECES[3:])
    run(model, cache, PIECES[3:4])
    cache.crop(-5)
    assert torch.equal(run(model, cache, PIECES[3:]), want)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    a, b = (run(model, one, ((39, 40),)) for one in (cache, fork))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_failed_forward_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    cache, other = TurboQuantCache(model), TurboQuantCache(model)
    run(model, cache, PIECES[:1])
    run(model, other, PIECES[:1])
    fail: Any = lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no room"))  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(cache.packed_layers[-1].storage, "store", fail)
        with pytest.raises(MemoryError, match="layer 1: no room"):
            run(model, cache, PIECES[1:2])
    with monkeypatch.context() as patched:  # fails after the first layer has stored its tokens
        patched.setattr(model.model.layers[0].mlp, "forward", fail)
        with pytest.raises(MemoryError, match="no room"):
            run(model, cache, PIECES[1:2])
    with pytest.raises(RuntimeError, match="an earlier forward was cut off: all layers are back"):
        run(model, cache, PIECES[1:2])
    assert torch.equal(run(model, cache, PIECES[1:]), run(model, other, PIECES[1:]))


def test_what_is_refused(tmp_path: Any) -> None:
    model = tiny("deepseek_v3")
    for spec in ("paper-prod-3", bare(4, 4, rotation="dense"), bare(3.5, 3.5, outliers="prompt")):
        with pytest.raises(NotImplementedError, match="latent attention takes specs of one number of bits"):
            turboquant.patch(model, spec)
    with pytest.raises(NotImplementedError, match="`cuda_graphs` is for text models"):
        turboquant.patch(model, PACKED, cuda_graphs=True)
    cache = TurboQuantCache(model, PACKED)
    with pytest.raises(NotImplementedError, match="save: a cache of latents"):
        cache.save(tmp_path / "c")
    with pytest.raises(ValueError, match="layer 0: latents and rotary parts must be"):
        cache.update(torch.zeros(1, 1, 3, 64), torch.zeros(1, 2, 3, 8), 0)


def expansions(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Returns a list that records the number of tokens of each later expansion by the model's own code."""
    tokens: list[int] = []
    kind = type(next(module for module in model.modules() if hasattr(module, "kv_b_proj")))
    own = kind.expand_kv

    def counted(module: Any, latents: torch.Tensor, rotary: torch.Tensor) -> Any:
        tokens.append(latents.shape[2])
        return own(module, latents, rotary)

    monkeypatch.setattr(kind, "expand_kv", counted)
    return tokens


@pytest.mark.parametrize("name", TRIED)
def test_few_queries_absorb_the_expansion(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name, HOLDS_ALL)
    monkeypatch.setattr(absorbed, "_PIECE", 300)  # the queries of a forward are cut into pieces
    with monkeypatch.context() as patched:
        patched.setattr(absorbed, "is_cheaper", lambda *counts: False)
        want = run(model, TurboQuantCache(model))
    monkeypatch.setattr(absorbed, "is_cheaper", lambda new, tokens, *sizes: new < tokens)
    tokens = expansions(monkeypatch, model)
    got = run(model, TurboQuantCache(model))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert {*tokens} == {20}  # only the first piece is expanded: there are as many queries as tokens


def test_the_count_of_multiplications() -> None:
    sizes = dict(rank=512, rotary=64, key=128, value=128)  # DeepSeek V3
    for tokens in (1024, 131072):
        most = max(new for new in range(1, 1024) if absorbed.is_cheaper(new, tokens, **sizes))
        assert not absorbed.is_cheaper(most + 1, tokens, **sizes)
        # new (tokens (2 * 512 - 256) + 512 * 256) = tokens * 512 * 256
        assert most == tokens * 512 * 256 // (tokens * 768 + 512 * 256)
    assert absorbed.is_cheaper(1, 8, **sizes) and not absorbed.is_cheaper(1024, 1024, **sizes)


def test_what_is_no_plain_matrix_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter, a hook, or another expansion than the known one, the result is that of the model's code."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.mean(-1, keepdim=True)

    def adapt(attention: Any) -> None:
        adapted = Adapted(*attention.kv_b_proj.weight.shape[::-1], bias=False)
        adapted.weight = attention.kv_b_proj.weight
        attention.kv_b_proj = adapted

    def hook(attention: Any) -> None:
        attention.kv_b_proj.register_forward_hook(lambda module, args, out: out + args[0].mean(-1, keepdim=True))

    def replace(attention: Any) -> None:
        kind = type(attention)

        class Other(kind):  # type: ignore[misc,valid-type]
            def expand_kv(self, latents: torch.Tensor, rotary: torch.Tensor) -> Any:
                keys, values = super().expand_kv(latents, rotary)
                return keys, values.flip(-1)

        attention.__class__ = Other

    for change in (adapt, hook, replace):
        model = tiny("deepseek_v3")
        plain = run(model, DynamicCache(config=model.config))
        for layer in model.model.layers:
            change(layer.self_attn)
        want = run(model, DynamicCache(config=model.config))
        assert (want - plain).abs().max() > 0.01
        got = run(turboquant.patch(model, HOLDS_ALL), TurboQuantCache(model))
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


def test_a_model_that_is_not_patched_says_so() -> None:
    model = made()
    assert "expand_kv" in vars(model.model.layers[0].self_attn)
    cache = TurboQuantCache(model)
    turboquant.unpatch(model)
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)
    with pytest.raises(RuntimeError, match=r"Call turboquant.patch\(model\) first"):
        run(model, cache)
