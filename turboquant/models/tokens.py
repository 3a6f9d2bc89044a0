"""Token ids as a model takes them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_vocabulary", "token_ids", "vocabulary"]

_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}


def token_ids(ids: Any, wants: str) -> torch.Tensor:
    """Converts a tensor of two dimensions and any integer dtype to int64, the only dtype that all operations of a model
    take. Raises TypeError for another object, with the text `wants` and what was given."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{wants}, got {type(ids).__name__}")
    if ids.dim() != 2 or ids.dtype not in _INTEGERS:
        raise TypeError(f"{wants}, got {str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}")
    return ids.long()


def check_vocabulary(ids: torch.Tensor, model: Any, argument: str) -> None:
    """Raises ValueError unless all ids are in the vocabulary of the model. On CUDA, one outside would make every later
    call of the process fail."""
    if not ids.numel():
        return
    known, least, most = vocabulary(model), int(ids.min()), int(ids.max())
    if least < 0 or most >= known:
        raise ValueError(f"`{argument}` must be token ids in 0..{known - 1}, got {least if least < 0 else most}")


def vocabulary(model: Any) -> int:
    """How many tokens a model has embeddings for."""
    embedding = model.get_input_embeddings()
    count: int = getattr(embedding, "num_embeddings", None) or model.config.get_text_config().vocab_size
    return count
