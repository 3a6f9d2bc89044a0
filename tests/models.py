"""Small models with random weights, for tests of everything that goes through transformers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="4.57")

_SHAPE = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    initializer_range=0.15,  # large, so that attention is far from uniform and greedy tokens are far from ties
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, no groups": ("Llama", dict(num_key_value_heads=4, head_dim=24)),
    "mistral, sliding": ("Mistral", dict(sliding_window=11)),
    "qwen2": ("Qwen2", dict(hidden_size=128)),
    "qwen2, some layers sliding": (
        "Qwen2",
        dict(hidden_size=128, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", {}),
    "gemma2, soft-cap and sliding": (
        "Gemma2",
        dict(sliding_window=10, query_pre_attn_scalar=32, attn_logit_softcapping=20.0),
    ),
    "gemma3, alternating": (
        "Gemma3",
        dict(sliding_window=10, query_pre_attn_scalar=32, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "phi3, sliding": ("Phi3", dict(hidden_size=128, sliding_window=12)),
    "phi, partial rotary": ("Phi", dict(hidden_size=128, partial_rotary_factor=0.5)),
    "olmo2": ("Olmo2", dict(hidden_size=128)),
    "gpt-neox, partial rotary": ("GPTNeoX", dict(hidden_size=128, rotary_pct=0.25)),
    "mixtral": ("Mixtral", dict(num_local_experts=2, num_experts_per_tok=1)),
}


def tiny(kind: str = "llama", dtype: Any = None, seed: int = 0, **changes: Any) -> Any:
    """A causal language model of a kind above, in eval mode, the same on every call."""
    name, fields = KINDS[kind]
    fields = {**_SHAPE, **fields, **changes}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if "soft-cap" in kind:
        model.set_attn_implementation("eager")  # SDPA has no soft-cap, and transformers 4.57 drops it in silence there
    return model.to(dtype or torch.float32)


def with_key_biases(model: Any, first: float, last: float, middle: float) -> Any:
    """A Qwen2 model with the weights of a Llama model, and key biases of these norms in the first, last and other
    layers. As in Qwen2.5 they are in the slowest rotary channels, where they shift all scores of a query by nearly the
    same amount, so the model still predicts text well."""
    fields = model.config.to_dict()
    for name in ("model_type", "architectures", "layer_types", "use_sliding_window"):
        fields.pop(name, None)
    made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields, use_sliding_window=False)).eval()
    missing = made.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys and all(name.endswith(".bias") for name in missing.missing_keys)
    layers, make = made.model.layers, torch.Generator().manual_seed(0)
    for i, layer in enumerate(layers):
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.bias.data.zero_()
        bias = layer.self_attn.k_proj.bias.data.view(made.config.num_key_value_heads, -1)
        half = bias.shape[1] // 2
        bias[:, [*range(half - 3, half), *range(2 * half - 3, 2 * half)]] = torch.randn(len(bias), 6, generator=make)
        bias *= {0: first, len(layers) - 1: last}.get(i, middle) / bias.norm()
    return made


def prompts(batch: int, tokens: int, padding: tuple[int, ...] = (), seed: int = 0) -> dict[str, Any]:
    """input_ids and attention_mask [batch, tokens], with the first padding[b] tokens of sequence b masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 96, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for b, pad in enumerate(padding):
        ids[b, :pad], mask[b, :pad] = 0, 0
    return dict(input_ids=ids, attention_mask=mask)


def storages(cache: Any) -> list[Any]:
    """Returns the storage of each layer of a TurboQuantCache."""
    return [layer.storage for layer in cache.layers]
