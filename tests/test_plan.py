"""turboquant.Plan: the core reads a plan's words as they were meant, and what it refuses is refused by name."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboquant import Plan, _core
from turboquant.plan import Codebook, Levels, Rotation, Scale, Side, Sketch, group_bits, member


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that is not refused."""
    group, has_values = draw(st.sampled_from((32, 16))), draw(st.booleans())
    dim = 8 * draw(st.integers(1, 32 if has_values or group == 16 else 512))
    groups = -(-dim // group)
    plain, rotation = group == 16 or draw(st.booleans()), draw(st.sampled_from(Rotation))

    def side() -> Side:
        if plain:
            bits = draw(st.lists(st.sampled_from((*range(7), 8)), min_size=groups, max_size=groups).filter(any))
            return Side(bits, rotation)
        levels, sketch = draw(st.sampled_from(Levels)), draw(st.sampled_from(Sketch))
        widths = st.sampled_from({Levels.ABSMAX: (2, 5, 6, 8), Levels.TABLE: (1, 2, 5, 6)}.get(levels, (1, 2, 5, 6, 8)))
        codebook = levels == Levels.CODEBOOK
        bits = draw(st.lists(widths, min_size=groups, max_size=groups)) if codebook else draw(widths)
        blocks = 0 if levels == Levels.TABLE else 32 * draw(st.integers(0, 3))
        rows = draw(st.integers(1, dim)) if sketch == Sketch.GAUSSIAN else 0
        return Side(bits, draw(st.sampled_from(Rotation)), levels, blocks, sketch, rows)

    return Plan(
        dim,
        side(),
        side() if has_values else None,
        group=group,
        codebook=draw(st.sampled_from(Codebook if dim <= 256 else [Codebook.NORMAL, Codebook.UNIFORM])),
        scale=draw(st.sampled_from(Scale)),
        seed=draw(st.integers(0, 2**63 - 1)),
        page_tokens=draw(st.sampled_from([32, 64, 96, 128] if group == 32 else [64, 128])),
    )


@given(plan=plans())
def test_the_core_reads_what_was_meant(plan: Plan) -> None:
    assert type(plan.words) is tuple and {type(word) for word in plan.words} == {int}
    info = _core.plan_info(plan.words)
    for name in ("head_dim", "codebook", "scale", "seed", "page_tokens", "record_bytes", "groups", "key_bits"):
        assert info[name] == getattr(plan, name)  # type: ignore[literal-required]
    assert info["group_channels"] == plan.group and info["rotation"] == plan.key.rotation
    assert info["value_bits"] == plan.value_bits
    sides = [side for side in (plan.key, plan.value) if side]
    signs = sum({Sketch.GAUSSIAN: side.sketch_rows, Sketch.SIGN: plan.head_dim}.get(side.sketch, 0) for side in sides)
    coded = (sum(plan.key_bits) + sum(plan.value_bits)) * plan.group // 8
    numbers = info["key_scales"] + info["value_scales"]
    size = plan.record_bytes - plan.page_tokens * (coded + 2 * numbers)
    assert plan.page_tokens * signs // 8 <= size <= plan.page_tokens * (signs // 8 + 8)


@given(plan=plans())
def test_words_repr_and_fields_make_the_same_plan(plan: Plan) -> None:
    for again in (
        Plan.from_words(plan.words),
        Plan.from_words(list(plan.words)),
        eval(repr(plan), {"Plan": Plan, "Side": Side}),
        pickle.loads(pickle.dumps(plan)),
        dataclasses.replace(plan),
    ):
        assert again == plan and hash(again) == hash(plan) and again.words == plan.words
    other = dataclasses.replace(plan, seed=plan.seed ^ 1)
    assert other != plan and other.words != plan.words
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 3  # type: ignore[misc]


@given(plan=plans(), data=st.data())
def test_words_changed_to_anything_are_refused_or_a_plan_of_those_words(plan: Plan, data: st.DataObject) -> None:
    words = list(plan.words)
    i = data.draw(st.integers(0, len(words) - 1))
    words[i] = data.draw(st.sampled_from([-1, *range(33), 48, 96, 160, 2**63 - 1, -(2**63)]))
    try:
        changed = Plan.from_words(words)
    except ValueError:
        with pytest.raises(ValueError, match="^`"):
            _core.record_bytes(words)
    else:
        assert changed.words == tuple(words)


def test_sizes() -> None:
    plan = Plan(128, 4, 3)
    assert plan.record_bytes == 128 * (64 + 48 + 4)
    assert [plan.nbytes(n, 2) for n in (0, 1, 128, 129)] == [2 * plan.record_bytes * n for n in (0, 1, 1, 2)]
    for wrong in (None, "x", 1.5, []):
        with pytest.raises(TypeError, match="`tokens` must be an integer, got"):
            plan.nbytes(wrong)
        with pytest.raises(TypeError, match="`kv_heads` must be an integer, got"):
            plan.nbytes(5, wrong)
    with pytest.raises(ValueError, match="`tokens` and `kv_heads` must be at least 0, got 5 and -1"):
        plan.nbytes(5, -1)
    for wrong in (None, 3):
        with pytest.raises(TypeError, match=f"`words` must be a sequence of integers, got {wrong}"):
            Plan.from_words(wrong)


def test_bits_alone_are_a_side() -> None:
    assert Plan(64, 4) == Plan(64, Side((4, 4)), None) == Plan(64, Side(4, "hadamard"), 0)
    assert Plan(64, np.array(4), np.int64(3)) == Plan(64, 4, 3)
    assert Plan(64, Side(4, "dense"), 3) == Plan(64, Side(4, "dense"), Side(3, Rotation.DENSE))
    assert repr(Plan(64, (4, 2), seed=7)) == "Plan(64, key=Side((4, 2)), seed=7)"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (dict(head_dim=12), ValueError, "`head_dim` must be a multiple of 8 in 8..512 (8..4096 without values)"),
        (dict(head_dim=520), ValueError, "`head_dim` must be at most 512 in a plan with values, got 520"),
        (dict(head_dim=2**70), ValueError, "`head_dim` must fit in 64 bits, got 1180591620717411303424"),
        (dict(head_dim="64"), TypeError, "`head_dim` must be an integer, got '64'"),
        (dict(key=7), ValueError, "`key_bits` must be in 0..6 or 8, got 7"),
        (dict(key=9), ValueError, "`key_bits` must be in 0..6 or 8, got 9"),
        (dict(key=17), ValueError, "`key_bits` must be in 0..6 or 8, got 17"),
        (dict(key=0), ValueError, "`key_bits` must be more than 0 in at least one group, got 0"),
        (dict(key=None), TypeError, "`key` must be a Side or its bits, got None"),
        (dict(value=[4, -1]), ValueError, "`value_bits[1]` must be in 0..6 or 8, got -1"),
        (dict(value=[4, 4.0]), TypeError, "`value_bits[1]` must be an integer, got 4.0"),
        (dict(value=[4, 4, 4]), ValueError, "`value_bits` must be an integer or one per group, 2 of them, got 3"),
        (dict(value="4"), TypeError, "`value_bits` must be an integer or a sequence of integers, got '4'"),
        (dict(page_tokens=100), ValueError, "`page_tokens` must be 32, 64, 96 or 128, got 100"),
        (dict(key=Side(4, "haar")), ValueError, "`key_rotation` must be one of none, hadamard, dense, got 'haar'"),
        (dict(key=Side(4, 1)), TypeError, "`key_rotation` must be one of none, hadamard, dense, got 1"),
        (dict(scale=Rotation.NONE), TypeError, "`scale` must be one of eden, norm, norm_corrected, least_"),
        (dict(group=16.0), TypeError, "`group` must be an integer, got 16.0"),
        (dict(group=8), ValueError, "`group` must be 32 or 16 channels, got 8"),
        (dict(group=16, page_tokens=96), ValueError, "`page_tokens` must be 64 or 128 with tiles of 16 channels"),
        (dict(group=16, key=Side(4, blocks=32)), ValueError, "`group` must be 32 where there are blocks"),
        (dict(group=16, key=Side(4, "none")), None, ""),
        (dict(group=16, key=Side(4, "none"), value=Side(4)), ValueError, "`group` must be 32 where there are blocks"),
        (dict(key=Side(4, blocks=48)), ValueError, "`key_blocks` must be 0 or a multiple of 32 channels, got 48"),
        (dict(key=Side(4, blocks=(1,))), ValueError, "`key_bits[0]` must be the beginning of a block"),
        (dict(key=Side((0, 4), blocks=32)), ValueError, "`key_bits[0]` must be at least 1 where there are blocks"),
        (dict(key=Side((3, 4), levels="affine")), ValueError, "`key_bits[1]` must be the bits of the group before it"),
        (dict(key=Side(1, levels="absmax")), ValueError, "`key_bits[0]` must be at least 2 with absmax levels"),
        (dict(key=Side(8, levels="table")), ValueError, "`key_bits[0]` must be in 0..6 with a table, got 8"),
        (dict(key=Side(3, levels="table", blocks=32)), ValueError, "`key_bits[1]` must be without 16: a table has one"),
        (dict(key=Side(3, sketch="gaussian")), ValueError, "`key_sketch_rows` must be in 1..head_dim, got 0"),
        (dict(value=Side(3, sketch_rows=4)), ValueError, "`value_sketch_rows` must be 0 without a Gaussian sketch"),
        (dict(seed=2**63), ValueError, "`seed` must fit in 64 bits, got 9223372036854775808"),
        (dict(seed=-1), ValueError, "`seed` must be in 0..2^63 - 1, got -1"),
        (dict(wave_pairs=33), ValueError, "`wave_pairs` must be a multiple of 8 up to head_dim / 2"),
        (dict(metric=-1), ValueError, "`metric` must be a rank in 0..4, or None, got -1"),
        (dict(key=True), TypeError, "`key_bits` must be an integer, got True"),
        (dict(key={4, 2}), TypeError, "`key_bits` must be an integer or a sequence of integers, got {"),
        (dict(key=np.array(4.0)), TypeError, "`key_bits` must be an integer, got array(4.)"),
        (dict(metric=5), ValueError, "`metric` must be a rank in 0..4, or None, got 5"),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], error: type[Exception] | None, says: str) -> None:
    given = {"head_dim": 64, "key": 4, "value": 4, **changes}
    if error is None:
        assert Plan(**given).value == Side((4,) * 4, Rotation.NONE, Levels.CODEBOOK, (0,), Sketch.NONE)
        return
    with pytest.raises(error) as caught:
        Plan(**given)
    assert str(caught.value).startswith(says)


def test_names_and_members() -> None:
    assert member(Scale, "Norm_Corrected", "scale") is Scale.NORM_CORRECTED
    assert member(Scale, Scale.EDEN, "scale") is Scale.EDEN
    plan = Plan(64, Side(4, "none"), codebook="sphere", scale="norm")
    assert (plan.key.rotation, plan.codebook, plan.scale) == (0, 1, 1)
    assert group_bits(3, 2, "bits") == (3, 3)
    assert group_bits(range(2), 2, "bits") == (0, 1)
