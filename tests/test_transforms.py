"""The arrays of a layer's transforms (`turboquant.transforms`, `turboquant.ops.transforms`)."""

from __future__ import annotations

import numpy as np
import pytest

from turboquant import Plan, _core
from turboquant.transforms import transforms


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_a_row_is_centre_steps_moments(rng: np.random.Generator) -> None:
    centre, steps, moments = rows(rng, 3, 64), rows(rng, 3, 2), rows(rng, 3, 148)
    made = transforms(key_centre=centre, key_steps=steps, key_moments=moments, value_steps=steps)
    assert made.keys() == {"key_numbers", "value_numbers"}
    key, value = made["key_numbers"], made["value_numbers"]
    assert key.shape == (3, 64 + 4 + 148) and value.shape == (3, 4)
    np.testing.assert_array_equal(key[:, :66], np.concatenate([centre, steps], 1))
    np.testing.assert_array_equal(key[:, 68:], moments)
    np.testing.assert_array_equal(value[:, :2], steps)
    assert transforms() == {}


def test_one_rotation_serves_all_heads_until_a_side_has_more(rng: np.random.Generator) -> None:
    one, each = rows(rng, 64, 64), rows(rng, 3, 80, 64)
    assert transforms(key_rotation=one)["rotation"].shape == (1, 64, 64)
    shared = transforms(key_rotation=one, value_rotation=one[None])["rotation"]
    assert shared.shape == (1, 128, 64) and (shared[0, :64] == shared[0, 64:]).all()
    both = transforms(key_rotation=each, value_rotation=one)["rotation"]
    assert both.shape == (3, 144, 64) and both.flags.c_contiguous
    np.testing.assert_array_equal(both[:, :80], each)
    np.testing.assert_array_equal(both[2, 80:], one)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("dim", [8, 64, 72])
def test_the_core_finds_the_parts_by_the_number_of_columns(
    dim: int, stepped: bool, centred: bool, rng: np.random.Generator
) -> None:
    """A centre of 7 is subtracted from keys and added back to decoded ones, with steps of 1 and without steps."""
    plan, k = Plan(dim, 4), rows(rng, 1, 2, 20, dim)
    decoded = []
    for centre in (np.zeros((2, dim), np.float32), np.full((2, dim), 7, np.float32)) if centred else (None, None):
        given = transforms(key_centre=centre, key_steps=np.ones((2, -(-dim // 32)), np.float32) if stepped else None)
        pages, table = _core.new_pages(plan.words, 1, 2), np.zeros((1, 1), np.int32)
        x = k if centre is None else k + centre[None, :, None]
        _core.append(plan.words, x, None, np.array([20], np.int32), pages, table, **given)
        decoded.append(_core.dequantize(plan.words, pages, table, np.array([20], np.int32), 20, **given)[0])
    shift = 7 if centred else 0
    np.testing.assert_allclose(decoded[1], decoded[0] + shift, atol=1e-2 if centred else 0)
    assert np.abs(decoded[0] - k).mean() < 0.2


@pytest.mark.parametrize("columns", [1, 3, 7, 60, 65, 67, 69, 132])
def test_other_numbers_of_columns_are_refused(columns: int, rng: np.random.Generator) -> None:
    plan, k = Plan(64, 4), rows(rng, 1, 2, 5, 64)
    pages, table = _core.new_pages(plan.words, 1, 2), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=f"`key_numbers` must be as wide as its parts: .*, got {columns}$"):
        _core.append(plan.words, k, None, np.array([5], np.int32), pages, table, key_numbers=rows(rng, 2, columns))


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    from turboquant import ops

    centre = torch.arange(128.0).view(2, 64)
    made = ops.transforms(key_centre=centre, value_rotation=torch.eye(64), key_turns=None)
    assert made.keys() == {"key_numbers", "rotation"} and torch.equal(made["key_numbers"], centre)
    assert made["rotation"].shape == (1, 64, 64)
    with pytest.raises(TypeError, match="transforms: `key_centre` must be a tensor, got list"):
        ops.transforms(key_centre=[1.0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'centre'"):
        ops.transforms(centre=centre)
    k = torch.zeros(1, 2, 3, 64)
    with pytest.raises(TypeError, match="pack: `transforms` must be what ops.transforms makes, got 'key_centre' in it"):
        ops.pack(k, k, bits=4, transforms={"key_centre": centre})
    with pytest.raises(TypeError, match="pack: `transforms` must be a dict or None, got Tensor"):
        ops.pack(k, k, bits=4, transforms=centre)
