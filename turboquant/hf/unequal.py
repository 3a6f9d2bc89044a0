"""A cache layer whose values are narrower or wider than its keys (MiMo V2: keys of 192 channels, values of 128).

A page stores keys and values of one size. So key and value of each token and KV head are joined and cut into pieces
(`kvcache.pieces`). What a forward may see is decoded for the time of the call, and PyTorch's own attention reads it:
that saves memory and no time. With prefill="packed" all queries of a forward see the window of its last token.
"""

from __future__ import annotations

import torch

from ..kvcache.again import Seen
from ..kvcache.pieces import PieceStorage
from ..kvcache.shared import Common
from ..kvcache.sliding import attention_behind_window, visible_past
from ..models.attention import Call, MaskRequest, own_attention
from ..spec import CacheSpec
from .layer import PackedLayer

__all__ = ["UnequalLayer"]


class UnequalLayer(PackedLayer):
    """One layer with keys and values of different sizes. size: channels of the pieces that they are cut into."""

    storage: PieceStorage

    def __init__(self, index: int, spec: CacheSpec, shared: Common, size: int) -> None:
        super().__init__(index, spec, shared)
        self.size = size
        self.storage = PieceStorage(index, spec, shared, unequal=True)

    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """`PackedLayer._prepare` for keys and values [batch, kv_heads, tokens, channels] that differ in channels."""
        key, value = key_states, value_states
        right = key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3] and key.dtype == value.dtype
        if not right or key.shape[3] % self.size or value.shape[3] % self.size:
            shapes = f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
            raise ValueError(f"layer {self.index}: keys and values must be [batch, kv_heads, tokens, channels] in "
                             f"one dtype, with channels in multiples of {self.size}, got {shapes}")  # fmt: skip
        pieces = self._pieces(key, value)
        super()._prepare(pieces, pieces[..., :0])

    def _pieces(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns [batch, kv_heads * pieces, tokens, size]: the pieces of a key, then those of its value."""
        batch, heads, tokens, _ = key.shape
        joined = torch.cat((key, value), -1).view(batch, heads, tokens, -1, self.size)
        return joined.transpose(2, 3).reshape(batch, -1, tokens, self.size)

    def _scale(self, scaling: float | None) -> float:
        if scaling is None:
            raise NotImplementedError("keys and values of different sizes need the model to give `scaling`")
        return scaling

    def _attend_in_front(
        self, call: Call, left: Call, padding: tuple[int, ...], sliding: int, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, Seen | None]:
        """Does what `PackedLayer._attend_in_front` does, with decoded tokens."""
        stored, key, value = self.storage, left.key, left.value
        before, new = stored.tokens, key.shape[2]
        if any(a > b for a, b in zip(padding, stored.padding) if b < before):
            self._check_padding_behind(call.mask, sliding)
        if type(call.mask) is MaskRequest and not call.mask.causal:
            raise NotImplementedError("an attention pattern other than causal is not supported with keys and values of "
                                      "different sizes")  # fmt: skip
        lengths = self._shared.lengths(before + new, padding, stored.device)
        pieces = self._pieces(key, value)
        nothing, exact, window = pieces[..., :0], self.spec.prefill == "exact", sliding or before + new
        if self._is_exact_prefill(return_lse):
            out, _ = own_attention(call)
            stored.store(pieces, pieces, nothing, lengths, padding, sliding, None)
            return out, None, None
        if exact:
            past = visible_past(stored, lengths, pieces, nothing, padding, window)
        stored.store(pieces, pieces, nothing, lengths, padding, sliding, None, keep=not exact)
        if not exact:  # the new tokens are read as they are stored
            past = visible_past(stored, lengths, pieces[:, :, :0], nothing[:, :, :0], padding, window + new)
            key, value = key[:, :, :0], value[:, :, :0]
        out, lse = attention_behind_window(
            left.query, (*self._sides(past[0], *(x.shape for x in (key, value))), past[2]), key, value, before, lengths,
            window, self._scale(call.scaling), left.options.get("softcap") or 0.0, return_lse
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), lse, None

    def _sides(self, pieces: torch.Tensor, key: torch.Size, value: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Reverses `_pieces`: keys and values [batch, kv_heads, any, channels] in the shapes `key` and `value`."""
        batch, heads, tokens, _ = pieces.shape
        joined = pieces.view(batch, key[1], heads // key[1], tokens, self.size)
        joined = joined.transpose(2, 3).reshape(batch, key[1], tokens, key[3] + value[3])
        return joined[..., : key[3]], joined[..., key[3] :]
