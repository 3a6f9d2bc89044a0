"""Distributions of the next token: how far one is from another, and drawing from one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DrawnTokens", "token_divergence"]


def token_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each next-token distribution from the reference's, in nats: float32 [batch,
    tokens] of two tensors of logits [batch, tokens, vocabulary]. It works in slices, to save memory."""
    out = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    for at in _slices(logits):
        want = torch.log_softmax(reference[at].to(logits.device).float(), -1)
        got = torch.log_softmax(logits[at].float(), -1)
        out[at] = (want.exp() * (want - got)).sum(-1)
    return out


class DrawnTokens(torch.autograd.Function):
    """Returns log p(y) [batch, tokens] for logits [batch, tokens, vocabulary], with y the token at which the cumulative
    distribution reaches a level, [batch, tokens, 1]. In slices: torch.log_softmax would hold several tensors as large
    as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(levels.shape, dtype=torch.int64, device=logits.device)
        scores = torch.empty(levels.shape, dtype=torch.float32, device=logits.device)
        for at in _slices(logits):
            log_p = logits[at].float().log_softmax(-1)
            # torch.multinomial takes seconds for a large vocabulary
            below = log_p.exp().cumsum(-1) < levels[at]
            drawn[at] = below.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
            scores[at] = log_p.gather(-1, drawn[at])
        ctx.save_for_backward(logits, drawn)
        return scores[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, drawn = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for at in _slices(logits):
            one = logits[at].float().softmax(-1).neg_()
            one.scatter_add_(-1, drawn[at], torch.ones_like(drawn[at], dtype=one.dtype))
            gradient[at] = one * gradients[0][at][..., None]
        return gradient, None


def _slices(logits: torch.Tensor) -> list[tuple[int, slice]]:
    """Indices of at most 256 tokens of one sequence each, which together cover logits [batch, tokens, vocabulary]."""
    return [(b, slice(start, start + 256)) for b in range(len(logits)) for start in range(0, logits.shape[1], 256)]
