"""Copies of a cache that are made in one mode of autograd and go on in another."""

import copy
import pickle
from collections.abc import Callable

import models  # noqa: F401  skips without torch and transformers
import pytest
import torch
from streams import CONFIG, PACKED, Stream, close, forward

from turboquant import TurboQuantCache
from turboquant.kvcache.shared import _add

Copy = Callable[[TurboQuantCache], TurboQuantCache]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
@torch.no_grad()
def test_a_copy_that_was_made_in_inference_mode_goes_on_outside(copied: Copy) -> None:
    cache, stream = TurboQuantCache(CONFIG, PACKED), Stream()
    forward(cache, stream.piece(0, 150))
    with torch.inference_mode():
        other = copied(cache)
    fork = other.fork()  # shares the last page until it writes
    want = forward(cache, stream.piece(150, 160))
    close(forward(fork, stream.piece(150, 160)), want, 1e-6)
    close(forward(other, stream.piece(150, 160)), want, 1e-6)


@torch.no_grad()
def test_lengths_that_were_copied_in_inference_mode_grow_in_place() -> None:
    """A step on a GPU adds to the lengths in place."""
    with torch.inference_mode():
        lengths = torch.tensor([150], dtype=torch.int32)
    assert _add(lengths, 10) is lengths and lengths.tolist() == [160]
