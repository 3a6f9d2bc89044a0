"""turboquant.plan: the words are what the core reads back, and what it would refuse is refused here, by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboquant import _core
from turboquant.plan import Codebook, Rotation, Scale, group_bits, member, plan_words


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    values = draw(st.booleans())
    dim = 8 * draw(st.integers(1, 32 if values else 512))
    groups = -(-dim // 32)
    bits = st.integers(1, 5) | st.lists(st.integers(0, 5), min_size=groups, max_size=groups)
    laws = Codebook if dim <= 256 else [Codebook.NORMAL]
    return dict(
        head_dim=dim,
        key_bits=draw(bits.filter(lambda b: isinstance(b, int) or any(b))),
        value_bits=draw(bits) if values else 0,
        rotation=draw(st.sampled_from(Rotation)),
        codebook=draw(st.sampled_from(laws)),
        scale=draw(st.sampled_from(Scale)),
        seed=draw(st.integers(0, 2**63 - 1)),
        page_tokens=draw(st.sampled_from([32, 64, 96, 128])),
    )


@given(given=arguments())
def test_the_core_reads_what_was_meant(given: dict[str, Any]) -> None:
    words = plan_words(**given)
    assert type(words) is tuple and {type(word) for word in words} == {int}
    info = _core.plan_info(words)
    for name in ("head_dim", "rotation", "codebook", "scale", "seed", "page_tokens"):
        assert info[name] == given[name]
    for side in ("key_bits", "value_bits"):
        bits = given[side]
        assert info[side] == (tuple(bits) if isinstance(bits, list) else (bits,) * info["groups"])
    coded = sum(info["key_bits"]) + sum(info["value_bits"])
    sides = 1 + any(info["value_bits"])
    assert info["record_bytes"] == info["page_tokens"] * (4 * coded + 2 * sides)


@given(given=arguments(), data=st.data())
def test_both_refuse_the_same(given: dict[str, Any], data: st.DataObject) -> None:
    """A word changed to anything: the core and `plan_words` agree on whether that is a plan."""
    words = list(plan_words(**given))
    groups = -(-words[1] // 32)
    i = data.draw(st.integers(2, len(words) - 1))
    words[i] = data.draw(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 6, 32, 48, 96, 160, 2**63 - 1, -(2**63)]))
    names = (None, "head_dim", "page_tokens", "rotation", "codebook", "scale", "seed")
    again = {name: word for name, word in zip(names, words) if name}
    try:
        for kind, name in ((Rotation, "rotation"), (Codebook, "codebook"), (Scale, "scale")):
            again[name] = kind(again[name])
        plan_words(**again, key_bits=words[7 : 7 + groups], value_bits=words[7 + groups :])
    except ValueError:
        with pytest.raises(ValueError, match="record_bytes: "):
            _core.record_bytes(words)
    else:
        _core.record_bytes(words)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (dict(head_dim=12), ValueError, "`head_dim` must be a multiple of 8 in 8..256 (8..4096 without values)"),
        (dict(head_dim=264), ValueError, "`head_dim` must be in 8..256 for a plan with values, got 264"),
        (dict(head_dim="64"), TypeError, "`head_dim` must be an integer, got '64'"),
        (dict(key_bits=9), ValueError, "`key_bits` must be in 0..5, got 9"),
        (dict(key_bits=0), ValueError, "`key_bits` must give at least one group bits, got 0"),
        (dict(key_bits=[0, 0]), ValueError, "`key_bits` must give at least one group bits, got [0, 0]"),
        (dict(value_bits=[4, -1]), ValueError, "`value_bits[1]` must be in 0..5, got -1"),
        (dict(value_bits=[4, 4.0]), TypeError, "`value_bits[1]` must be an integer, got 4.0"),
        (dict(value_bits=None), TypeError, "`value_bits` must be an integer, got None"),
        (dict(page_tokens=100), ValueError, "`page_tokens` must be 32, 64, 96 or 128, got 100"),
        (dict(rotation="haar"), ValueError, "`rotation` must be one of none, hadamard, dense, got 'haar'"),
        (dict(rotation=1), TypeError, "`rotation` must be one of none, hadamard, dense, got 1"),
        (dict(scale=Rotation.NONE), TypeError, "`scale` must be one of eden, norm, norm_corrected, least_"),
        (dict(group=16.0), TypeError, "`group` must be an integer, got 16.0"),
        (dict(group=8), ValueError, "`group` must be 32 or 16 channels, got 8"),
        (dict(group=16, page_tokens=96), ValueError, "`page_tokens` must be 64 or 128 with groups of 16, got 96"),
        (dict(group=16, key_bits=6), ValueError, "`key_bits` must be in 0..5 or 8, got 6"),
        (dict(group=16, key_bits=[4, 4]), ValueError, "`key_bits` must be an integer or one per group of 16 channels"),
        (dict(seed=2**63), ValueError, "`seed` must be in 0..2**63 - 1, got 9223372036854775808"),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        plan_words(**{"head_dim": 64, "key_bits": 4, "value_bits": 4, **changes})
    assert str(caught.value).startswith(says)


def test_names_and_members() -> None:
    assert member(Scale, "Norm_Corrected", "scale") is Scale.NORM_CORRECTED
    assert member(Scale, Scale.EDEN, "scale") is Scale.EDEN
    assert plan_words(64, 4, rotation="none", codebook="sphere", scale="norm")[3:6] == (0, 1, 1)
    assert group_bits(3, 40, "bits") == (3, 3)
    assert group_bits(range(2), 40, "bits") == (0, 1)
