"""Small ESM-2 models with random weights, and proteins for them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="4.57")

LETTERS = "LAGVSERTIDPKQNFYMHWC"


def tiny_esm(kind: str = "EsmForMaskedLM", head_dim: int = 16, heads: int = 2, seed: int = 0, **changes: Any) -> Any:
    """An ESM-2 model in eval mode, the same on every call, whose attention is far from uniform."""
    fields = dict(vocab_size=33, hidden_size=heads * head_dim, num_attention_heads=heads, num_hidden_layers=3,
                  intermediate_size=64, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary",
                  token_dropout=True, max_position_embeddings=1026, initializer_range=1.7 * (heads * head_dim) ** -0.5,
                  emb_layer_norm_before=False)  # fmt: skip
    torch.manual_seed(seed)
    return getattr(transformers, kind)(transformers.EsmConfig(**{**fields, **changes})).eval()


def protein(length: int, seed: int = 0) -> str:
    generator = torch.Generator().manual_seed(seed)
    return "".join(LETTERS[i] for i in torch.randint(20, (length,), generator=generator))
