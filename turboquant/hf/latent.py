"""A cache layer of latent attention (MLA: DeepSeek, Kimi, GLM 4 MoE Lite, Mistral 4, MiniCPM3, ..).

These models give their cache a latent and a rotary part of each token, and expand what the cache returns to keys and
values of all heads in every step. `update` returns all tokens, decoded for the time of the step. `absorbed.attention`
expands them only where that is less work than to attend to them as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kvcache.pieces import LatentStorage
from ..kvcache.shared import Common
from ..models.attention import refuse_transforms, without_gradient
from ..spec import CacheSpec
from .absorbed import Latents
from .layer import NO_GRADIENT, PackedLayer, autocast

__all__ = ["LatentLayer"]


class LatentLayer(PackedLayer):
    """One layer with latents. head_dim: channels of the heads that they are cut into."""

    storage: LatentStorage

    def __init__(self, index: int, spec: CacheSpec, shared: Common, head_dim: int) -> None:
        super().__init__(index, spec, shared)
        self.head_dim = head_dim
        self.storage = LatentStorage(index, spec, shared)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the latents [batch, 1, tokens, rank] and rotary parts [batch, 1, tokens, channels] of a forward, and
        returns those of all tokens: the new ones as they are, unless prefill="packed", and the others decoded. Latents
        come as `Latents`, which only this package's attention function accepts.

        Raises what `PackedLayer.update` raises. A failure leaves the cache as it was.
        """
        latent, rotary = autocast(key_states, value_states)
        before = self.storage.tokens
        try:
            self._check(latent, rotary)
            refuse_transforms(NO_GRADIENT, latent, rotary)
            with torch.no_grad():
                joined = self._stored(torch.cat((latent.detach(), rotary.detach()), -1))
        except Exception as error:
            self._shared.undo(before)
            if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("layer "):
                error.args = (f"layer {self.index}: {error.args[0]}", *error.args[1:])
            raise
        if torch.is_grad_enabled() and (latent.requires_grad or rotary.requires_grad):
            joined = without_gradient(joined, NO_GRADIENT, latent, rotary)
        rank = latent.shape[-1]
        return Latents.of(joined, rank), joined[..., rank:]

    def _check(self, latent: torch.Tensor, rotary: torch.Tensor) -> None:
        right = latent.dim() == rotary.dim() == 4 and latent.shape[1] == rotary.shape[1] == 1
        if not right or latent.shape[:3] != rotary.shape[:3] or latent.dtype != rotary.dtype:
            shapes = f"{tuple(latent.shape)} {latent.dtype} and {tuple(rotary.shape)} {rotary.dtype}"
            raise ValueError(
                f"latents and rotary parts must be [batch, 1, tokens, channels] in one dtype, got {shapes}"
            )
        first = self._shared.layers[0]
        after = self.storage.tokens + latent.shape[2]
        others = {layer.tokens for layer in self._shared.layers} if first is self.storage else {self.storage.tokens}
        if len(others) > 1 or (first is not self.storage and first.tokens != after):
            self._shared.undo(min(layer.tokens for layer in self._shared.layers))
            raise RuntimeError("an earlier forward was cut off: all layers are back where it began; try again, or call "
                               "cache.reset()")  # fmt: skip

    def _stored(self, joined: torch.Tensor) -> torch.Tensor:
        """Stores joined, [batch, 1, tokens, channels], and returns the same of all tokens."""
        batch, _, new, channels = joined.shape
        heads = joined.view(batch, new, -1, self.head_dim).transpose(1, 2)
        nothing = heads[..., :0]
        self._prepare(heads, nothing)
        stored, exact = self.storage, self.spec.prefill == "exact"
        stored.begin()
        parts = [*stored.history(), heads] if exact else []
        padding = (0,) * batch
        lengths = self._shared.lengths(stored.tokens + new, padding, stored.device)
        stored.store(heads, heads, nothing, lengths, padding, 0, None)
        parts = parts or stored.history()
        whole = heads.new_empty(batch, sum(part.shape[2] for part in parts), *heads.shape[1::2])
        torch.cat([part.transpose(1, 2) for part in parts], 1, out=whole)
        return whole.view(batch, 1, -1, channels)
