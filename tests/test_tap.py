"""The tap: hooks that replace keys and values, and queries that see some tokens as they were."""

from __future__ import annotations

import pytest
from models import prompts, tiny

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from turboquant.measuring.tap import tapped  # noqa: E402

SINKS, WINDOW, TOKENS = 2, 5, 24


def logits(model, hook=None, exact=None, tile=0):
    with tapped(model) as tap, torch.no_grad():
        tap.hook, tap.exact, tap.tile = hook, exact, tile
        return model(prompts(1, TOKENS)["input_ids"], use_cache=False).logits[0]


@pytest.mark.parametrize("kind", ["llama", "mistral, sliding", "gemma2, soft-cap and sliding", "gemma3, alternating"])
def test_exact_tokens_are_seen_as_they_were(kind):
    model = tiny(kind)
    plain = logits(model)

    def other(module, layer, query, key, value):
        return torch.randn_like(key), torch.randn_like(value)

    def same(module, layer, query, key, value):
        return key, value

    torch.testing.assert_close(logits(model, same, (SINKS, WINDOW)), plain)
    torch.testing.assert_close(logits(model, other, (TOKENS, 0)), plain)
    torch.testing.assert_close(logits(model, other, (SINKS, TOKENS)), plain)
    found = logits(model, other, (SINKS, WINDOW))
    near = SINKS + WINDOW  # queries that see nothing but sinks and window
    torch.testing.assert_close(found[:near], plain[:near])
    assert ((found[near:] - plain[near:]).norm(dim=-1) > 0.01 * plain[near:].norm(dim=-1)).all()


def test_tokens_of_a_tile_are_seen_as_they_were():
    model = tiny()
    plain = logits(model)

    def other(module, layer, query, key, value):
        return torch.randn_like(key), torch.randn_like(value)

    torch.testing.assert_close(logits(model, other, (0, 0), TOKENS), plain)
    found = logits(model, other, (0, 0), 8)
    torch.testing.assert_close(found[:8], plain[:8])
    assert ((found[8:] - plain[8:]).norm(dim=-1) > 0.01 * plain[8:].norm(dim=-1)).all()
    torch.testing.assert_close(logits(model, other, (16, 0), 8), plain)


class ProductDtypes(TorchDispatchMode):
    """Keeps the dtypes of matrix products that reach the kernels of torch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("mm", "matmul", "linear", "flash_attention_for_cpu_backward")):
            self.found.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_products_of_float16_are_in_float32_on_a_cpu(dtype):
    """torch has no fast ones of float16 there: measuring SmolLM2 took six minutes instead of one."""
    model = tiny(dtype=dtype)
    plain = model(prompts(1, TOKENS)["input_ids"], use_cache=False).logits
    with ProductDtypes() as seen, tapped(model), torch.enable_grad():
        got = model(prompts(1, TOKENS)["input_ids"], use_cache=False).logits
        (gradient,) = torch.autograd.grad(got.float().square().sum(), [model.model.embed_tokens.weight])
    products = len(list(filter(lambda name: "proj" in name, dict(model.named_modules())))) + 1
    assert {*seen.found} == {torch.float32 if dtype == torch.float16 else dtype} and len(seen.found) > 2 * products
    assert got.dtype == gradient.dtype == dtype and gradient.isfinite().all()
    torch.testing.assert_close(got, plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["llama", "gemma2, soft-cap and sliding"])
def test_products_in_inference_mode_are_in_float32_too(kind):
    """There `linear` and `matmul` reach the kernels whole."""
    model = tiny(kind, dtype=torch.float16)
    with torch.inference_mode(), ProductDtypes() as seen, tapped(model):
        model(prompts(1, TOKENS)["input_ids"], use_cache=False)
    assert {*seen.found} == {torch.float32}
