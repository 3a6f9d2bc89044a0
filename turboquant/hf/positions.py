"""Where a model places the tokens of a forward. The wave of keys follows the model's positions, as far as those of each
sequence are shifted by one number from what the cache counts (`kvcache.tensors`): in left-padded batches without
`position_ids`, where a caller passes shifted ones, and behind an image in models with M-RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..models.attention import MaskRequest

if TYPE_CHECKING:
    from .cache import TurboQuantCache

__all__ = ["follow", "padding_mask"]


def padding_mask(mask: Any) -> torch.Tensor | None:
    """Finds the padding mask [batch, positions], which is True for real tokens, in what a decoder gets as
    `attention_mask`: such a tensor, a request for a mask, or one for each kind of layer. None if there is none."""
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    if type(mask) is MaskRequest:
        return mask.padding_mask
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def follow(cache: TurboQuantCache, new: int, positions: torch.Tensor | None, mask: torch.Tensor | None) -> int:
    """Turns the wave to the positions of a cache's first forward, by the shift of each sequence's last token, behind
    which the text goes on. If other tokens of a sequence have another shift, the wave becomes the mean of what it would
    be at all of them, half of it that of the last token: fast pairs of channels then have little wave left, slow ones
    nearly all. Later forwards do not turn it.

    new         tokens of each sequence in the forward
    positions   int64 [batch or 1, new], or [axes, batch, new] with M-RoPE; None: the model counts from the first
                position of the cache, padding included
    mask        [batch, stored and new], 0 for padding, or None
    Returns by how many positions at most a token is off from where its wave is turned. Reads the device, but not for
    one token behind others on a GPU.
    """
    stored, padding, shifts = cache.get_seq_length(), cache.padding, cache.shifts
    if positions is None and stored:
        return max((abs(pad - shift) for pad, shift in zip(padding, shifts)), default=0)
    if positions is None:
        if mask is None:
            cache.turn(())
            return 0
        positions = torch.arange(new)[None]
    elif positions.shape[-1] != new or (stored and new == 1 and positions.device.type != "cpu"):
        return 0
    at, real = torch.arange(stored, stored + new)[None], torch.ones((1, new), dtype=torch.bool)
    if mask is not None and mask.shape[1] == stored + new:
        shown = mask.cpu() != 0
        at, real = shown.long().cumsum(1)[:, stored:] - 1, shown[:, stored:]
    elif stored:
        at = at - torch.tensor(padding)[:, None]
    off = positions.cpu() - at
    if stored:
        return int(((off - torch.tensor(shifts)[:, None]) * real).abs().max())
    off = off.view(-1, *off.shape[-2:])
    real = real.expand(off.shape[1:])
    ends = (real * torch.arange(1, new + 1)).argmax(1, keepdim=True)
    last = off[0].gather(1, ends)[:, 0] * real.any(1)
    distances, counts = torch.unique((off - last[:, None])[:, real], return_counts=True)
    weights = counts / (2 * counts.sum()) + 0.5 * (distances == 0)
    cache.turn(last.tolist(), (distances.numpy(), weights.numpy()) if distances.any() else None)
    return int(distances.abs().max()) if len(distances) else 0
