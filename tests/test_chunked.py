"""Chunked attention (Llama 4): a text is cut into chunks, and a token sees those of its own chunk up to itself."""

from __future__ import annotations

from typing import Any

import pytest
from causal_types import VERSION
from hybrids import IDS, PADDED, PIECES, run
from models import torch, transformers
from specs import bare
from transformers import DynamicCache

import turboquant
from turboquant import TurboQuantCache
from turboquant.models import names

pytestmark = pytest.mark.skipif(VERSION < (5, 20), reason="older transformers has no cache layers with chunks")

CHUNK = 8
HOLDS_ALL, PACKED = bare(4, 4, sinks=2, window=256), bare(5, 5)


def made(chunk: int = CHUNK) -> Any:
    config = transformers.Llama4TextConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        intermediate_size_mlp=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_chunk_size=chunk,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        num_local_experts=2,
        initializer_range=0.15,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.Llama4ForCausalLM(config).eval()


@pytest.mark.parametrize("pieces", [PIECES, [(i, i + 1) for i in range(40)], ((0, 7), (7, 9), (9, 40))])
@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_exact_with_left_padding_and_close_when_packed(pieces: Any, prefill: Any) -> None:
    model = made()
    want = run(model, DynamicCache(config=model.config), pieces)
    got = run(turboquant.patch(model, HOLDS_ALL, prefill=prefill), TurboQuantCache(model), pieces)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
    for spec in (PACKED, PACKED.with_(window=3, sinks=1)):
        got = run(turboquant.patch(model, spec, prefill=prefill), TurboQuantCache(model), pieces)
        assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.94


def test_padding_longer_than_a_chunk_in_a_packed_prefill() -> None:
    """Tokens are stored chunk by chunk. In one sequence the first chunks are all padding."""
    model, mask = made(), PADDED.clone()
    mask[1, :19] = 0
    want = run(model, DynamicCache(config=model.config), PIECES, mask)
    got = run(turboquant.patch(model, HOLDS_ALL, prefill="packed"), TurboQuantCache(model), PIECES, mask)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


def test_a_chunk_hides_what_is_before_it() -> None:
    """Without chunks the logits differ, so the tests above can fail."""
    model = made()
    want = run(model, DynamicCache(config=model.config))
    model = made(chunk=512)
    assert (run(model, DynamicCache(config=model.config)) - want).abs().max() > 0.1


def test_generate() -> None:
    model = made()
    prompt = dict(input_ids=IDS, attention_mask=PADDED)
    options = dict(max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    want = [model.generate(**prompt, **options, num_beams=n).sequences for n in (1, 3)]
    turboquant.patch(model, HOLDS_ALL)
    for n, text in zip((1, 3), want):
        got = model.generate(**prompt, **options, num_beams=n)
        assert type(got[names.CACHE]) is TurboQuantCache and torch.equal(got.sequences, text)


@pytest.mark.parametrize("prefill", ["exact", "packed"])
def test_pages_before_the_chunk_are_freed(prefill: Any) -> None:
    model = made(chunk=128)
    cache = TurboQuantCache(turboquant.patch(model, PACKED, prefill=prefill))
    ids = torch.randint(2, 90, (1, 700), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for piece in (ids[:, :500], ids[:, 500:690], ids[:, 690:691]):
            model(piece, **{names.CACHE: cache})
    assert [len(layer.storage.pages) for layer in cache.packed_layers] == [3, 3, 3, 6]


def test_forks_and_files(tmp_path: Any) -> None:
    model = made()
    cache = TurboQuantCache(turboquant.patch(model, PACKED))
    run(model, cache, PIECES[:3])
    cache.save(tmp_path / "c", model)
    fork, other = cache.fork(), TurboQuantCache.load(tmp_path / "c", model)
    want = run(model, cache, PIECES[3:])
    assert torch.equal(run(model, fork, PIECES[3:]), want) and torch.equal(run(model, other, PIECES[3:]), want)
