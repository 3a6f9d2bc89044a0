"""The storage of a layer whose keys and values are not two vectors of one size: it has latents, or values that are
narrower or wider than keys. What is stored for a token and a KV head is cut into pieces of equal size, which are packed
as heads of keys without values."""

from __future__ import annotations

from typing import Any

from ..plan import Plan
from ..spec import AUTO, CacheSpec
from .shared import Common
from .storage import LayerStorage

__all__ = ["PieceStorage", "pieces_spec"]


def pieces_spec(spec: CacheSpec, unequal: bool = False) -> CacheSpec:
    """The spec of a layer with latents: the bits of keys, sinks and window, without a wave and a metric. unequal: the
    layer has keys and values of different sizes instead, which must have the same bits. Raises NotImplementedError for
    a spec whose keys are not plain."""
    off: dict[str, Any] = {"centre": "none", "metric": "none"}
    if spec.variance_term == AUTO:
        off["variance_term"] = False
    plain = spec.budget is None and spec.settled().with_(**off)
    if (
        not plain
        or not plain.plan(64).is_plain
        or plain.rotation not in ("hadamard", "none")
        or plain.outliers != "none"
        or plain.variance_term
        or (unequal and plain.plan(64).value != plain.plan(64).key)
    ):
        what, bits = "latent attention takes", "for keys"
        if unequal:
            what, bits = "keys and values of different sizes take", "for both"
        raise NotImplementedError(
            f"{what} specs of one number of bits {bits}, with Hadamard rotations and the levels of a codebook, and "
            f"without a variance term, got {spec}"
        )
    return plain.with_(value_bits=plain.key_bits)


class PieceStorage(LayerStorage):
    """Pieces, [batch, KV heads * pieces, tokens, channels of a piece]."""

    has_values = False

    def __init__(self, index: int, spec: CacheSpec, shared: Common, unequal: bool = False) -> None:
        super().__init__(index, pieces_spec(spec, unequal), shared)

    def plan_for(self, kv_heads: int, head_dim: int) -> Plan:
        plan = self.spec.plan(head_dim)
        return Plan(head_dim, plan.key, group=plan.group, codebook=plan.codebook, scale=plan.scale, seed=plan.seed,
                    tries=plan.tries)  # fmt: skip
