"""Philox4x32-10: published vectors, and the layout of our counter."""

import numpy as np
import pytest
import reference_random as draws
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core

# Random123, tests/kat_vectors: counter, key, result.
PUBLISHED = {
    "zeros": ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    "pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
}


@pytest.mark.parametrize("counter, key, result", PUBLISHED.values(), ids=PUBLISHED)
def test_published_vectors(counter: list[int], key: list[int], result: list[int]) -> None:
    block, stream, seed = (low | high << 32 for low, high in (counter[:2], counter[2:], key))
    assert draws.philox(counter, key) == result
    got = _core.random(seed, stream, block)
    assert got.dtype == np.uint32
    assert got.tolist() == result


words = st.integers(0, 2**64 - 1)


@given(words, words, words)
def test_matches_reference(seed: int, stream: int, block: int) -> None:
    assert _core.random(seed, stream, block).tolist() == draws.random(seed, stream, block)
