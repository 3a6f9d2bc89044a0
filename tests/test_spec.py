"""CacheSpec: what it accepts, what it refuses and with which message, and that its sizes are those of the byte
format."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
from specs import bare

from turboquant import CacheSpec, preset, presets
from turboquant.named_specs import OTHERS, OURS, resolve

core = pytest.importorskip("turboquant._core")

REFUSED = {  # fields, what the message must contain: the field, what it was, what it should be
    "bits 0": (dict(key_bits=0), "`key_bits` must be in 1..6 or 8, got 0"),
    "bits 9": (dict(value_bits=9), "`value_bits` must be in 1..6 or 8, got 9"),
    "bits of a group": (dict(key_bits=(4, 7)), r"`key_bits\[1\]` must be in 0\.\.6 or 8, got 7"),
    "no bits in any group": (dict(value_bits=(0, 0)), "`value_bits` must give bits to at least one group"),
    "groups that differ": (dict(key_bits=(4, 2), value_bits=(4, 2, 2)), "same number of groups, got 2 and 3"),
    "rotation": (dict(rotation="hadamrd"), "`rotation` must be one of auto, hadamard, dense, none, .*got 'hadamrd'"),
    "codebook": (dict(codebook="beta"), "`codebook` must be one of normal, sphere, uniform"),
    "thirds": (dict(key_bits=3.3), "`key_bits` must be whole or a number of quarters between 1 and 6, got 3.3"),
    "group": (dict(group=8), "`group` must be 32 or 16 channels, got 8"),
    "blocks of groups of 16": (dict(group=16, key_block=32), "`group` must be 32 with blocks, tables, sketches"),
    "1 bit on both sides of 0": (dict(value_bits=1, value_levels="absmax"), "`value_bits` must be at least 2"),
    "a table of 4 bits": (dict(key_levels="table"), "`key_bits` must be 3 where `key_levels` are a table, got 4"),
    "affine split": (
        dict(key_bits=2.5, key_levels="affine"),
        "`key_bits` must be one integer where `key_levels` are affine",
    ),
    "block": (dict(key_block=48), "`key_block` must be 0 or a multiple of 32 channels, got 48"),
    "blocks and outliers": (
        dict(key_bits=2.5, key_block=32, outliers="prompt"),
        "`key_block` must be 0 with a table, and with outliers",
    ),
    "outliers of whole bits": (dict(outliers="prompt"), "`outliers` must be 'none' where no side has a fractional"),
    "outliers along principal axes": (
        dict(key_bits=2.5, outliers="prompt", rotation="svd"),
        "`outliers` must be 'none'",
    ),
    "a scale that nothing has": (
        dict(key_levels="affine", value_levels="absmax", scale="norm"),
        "`scale` must be left alone where no side has the levels of a codebook, got 'norm'",
    ),
    "a sketch of a calibrated plan": (dict(rotation="calibrated", sketch="gaussian"), "`rotation` must be other than"),
    "a sketch of a budget": (dict(budget=3, sketch="gaussian"), "`budget` must be None with blocks, tables, sketches"),
    "sketch": (dict(sketch="jl"), "`sketch` must be one of none, gaussian, gaussian/4, sign, got 'jl'"),
    "no bits in a group, and a sketch": (
        dict(key_bits=(3, 0), value_bits=(3, 3), sketch="gaussian"),
        "above 0 in every group",
    ),
    "scale": (dict(scale="max"), "`scale` must be one of eden, norm, norm_corrected, least_squares"),
    "centre": (dict(centre="mean"), "`centre` must be one of auto, none, calibrated, wave, got 'mean'"),
    "prefill": (dict(prefill="fast"), "`prefill` must be one of exact, packed"),
    "outlier_tokens": (dict(outlier_tokens=0), r"`outlier_tokens` must be in 1\.\.\d+, got 0"),
    "tries": (dict(tries=4), "`tries` must be 0, 3, 5, 7 or 'auto', got 4"),
    "tries of another scale": (dict(tries=3, scale="norm"), "`tries` must be 0 or 'auto' with blocks"),
    "variance term of another scale": (
        dict(variance_term=True, scale="norm"),
        "`variance_term` must be False with several",
    ),
    "variance term of axes": (
        dict(variance_term=True, budget=3, method="axes"),
        "`variance_term` must be False with several widths of keys, calibrated axes",
    ),
    "variance term of two widths": (
        dict(variance_term=True, key_bits=2.5),
        "`variance_term` must be False with several",
    ),
    "sinks": (dict(sinks=-1), r"`sinks` must be in 0\.\.\d+, got -1"),
    "window": (dict(window=-5), r"`window` must be in 0\.\.\d+, got -5"),
    "seed": (dict(seed=2**63), r"`seed` must be in 0\.\.\d+, got 9223372036854775808"),
    "override of an unknown field": (
        dict(overrides={0: {"bits": 3}}),
        r"`overrides\[0\]` must name fields among .*got 'bits'",
    ),
    "override of the whole cache": (dict(overrides={1: {"prefill": "exact"}}), r"`overrides\[1\]` .*got 'prefill'"),
    "override with a bad value": (dict(overrides={-1: {"window": -1}}), r"`overrides\[-1\]`: `window` must be in"),
}
WRONG_TYPES = {
    "bits": dict(key_bits="4"),
    "bits, a list of a half": dict(key_bits=[3.5]),
    "bits, bool": dict(value_bits=True),
    "bits, a set, which has no order": dict(key_bits={4, 2}),
    "bits, an array of one float": dict(key_bits=np.array(4.5)),
    "scale": dict(scale=1),
    "sinks": dict(sinks=1.0),
    "overrides": dict(overrides=3),
    "overrides of a layer": dict(overrides={0: 3}),
    "variance_term": dict(variance_term=1),
}


@pytest.mark.parametrize("fields, message", REFUSED.values(), ids=REFUSED)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        bare(**fields)


@pytest.mark.parametrize("fields", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_types_are_named(fields):
    with pytest.raises(TypeError, match=f"`{next(iter(fields))}"):
        bare(**fields)


def test_other_names_are_no_fields_and_no_layers():
    for name, near in (("bits", "key_bits or value_bits"), ("windw", "window")):
        for make in (CacheSpec, CacheSpec(4).with_):
            with pytest.raises(TypeError, match=f"`{name}` must be a field: did you mean {near}.* there are "):
                make(**{name: 3})
    with pytest.raises(TypeError, match="`layer` in `overrides` must be an integer, got '0'"):
        CacheSpec(overrides={"0": {"key_bits": 3}})
    with pytest.raises(TypeError, match="`xyz` must be a field: there are key_bits, "):
        CacheSpec(xyz=3)


def test_it_is_a_value():
    a, b = bare(3, (2, 4), sinks=4), bare(key_bits=3, value_bits=[2, 4], sinks=4)
    assert a == b and hash(a) == hash(b) and pickle.loads(pickle.dumps(a)) == a
    assert a.with_(window=8) == bare(3, (2, 4), sinks=4, window=8) != a
    with pytest.raises(AttributeError):
        a.sinks = 1
    with pytest.raises(ValueError, match="sinks"):
        a.with_(sinks=-1)


def test_overrides_apply_to_their_layers():
    spec = bare(4, 4, overrides={0: {"key_bits": 5, "window": 16}, -1: {"value_bits": (2, 3)}})
    assert spec.for_layer(0, 6) == bare(5, 4, window=16).settled()
    assert spec.for_layer(3, 6) == bare(4, 4).settled()
    assert spec.for_layer(5, 6) == bare(4, (2, 3)).settled()
    assert hash(spec) == hash(spec.with_(seed=0)) and spec.with_(seed=1).for_layer(0, 6).key_bits == 5
    for layer in (-1, 6):
        with pytest.raises(ValueError, match=f"`layer` must be in 0..5, got {layer}"):
            spec.for_layer(layer, 6)
    with pytest.raises(ValueError, match="`overrides` must name layers in -2..1 of this model, got 2"):
        bare(overrides={2: {"sinks": 1}}).for_layer(0, 2)
    with pytest.raises(ValueError, match="layer 1 as 1 and -1"):
        bare(overrides={1: {"sinks": 1}, -1: {"sinks": 2}}).for_layer(0, 2)


@pytest.mark.parametrize("head_dim", [8, 24, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("bits", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (4, 2), (3, 5)])
def test_bytes_are_those_of_the_format(bits, head_dim):
    spec = bare(*bits)
    assert 128 * spec.bytes_per_token(head_dim) == spec.plan(head_dim).record_bytes
    assert spec.bytes_per_token(head_dim, kv_heads=3, n_layers=5) == 15 * spec.bytes_per_token(head_dim)
    assert spec.effective_bits(head_dim) == 8 * spec.bytes_per_token(head_dim) / (2 * head_dim)


@pytest.mark.parametrize("spec", [bare(), bare(budget=3.0), bare(overrides={0: {"key_bits": 5}})])
def test_sizes_are_checked(spec):
    for name, wrong in {"head_dim": ("128", 128.0), "kv_heads": ("8", 2.5), "n_layers": (None, True)}.items():
        for value in wrong:
            with pytest.raises(TypeError, match=f"`{name}` must be an integer, got {value!r}"):
                spec.bytes_per_token(**{"head_dim": 128, name: value})
    for name in ("kv_heads", "n_layers"):
        for value in (0, -8):
            with pytest.raises(ValueError, match=f"`{name}` must be in 1..32768, got {value}"):
                spec.bytes_per_token(**{"head_dim": 128, name: value})
    with pytest.raises(ValueError, match="`n_layers` must be in"):
        spec.effective_bits(128, n_layers=0)


def test_bytes_of_mixed_groups_and_overrides():
    spec = bare((5, 3, 0, 2), (4, 0, 0, 0))
    assert 128 * spec.bytes_per_token(128) == spec.plan(128).record_bytes
    spec = bare(4, 4, overrides={0: {"key_bits": 2}})
    assert spec.bytes_per_token(64, 2, 3) == 2 * (3 * (32 + 2 + 32 + 2) - 16)
    assert bare(4, 4).effective_bits(128) == 4.125 and bare(4, 4).effective_bits(64) == 4.25
    assert bare(4, 4).effective_bits(40) == pytest.approx(8 * 2 * (32 + 2) / 80)  # 40 channels are padded to 64


EFFECTIVE = {  # bits per number at 128 channels, counted by hand: codes, signs, 16 bits for each number per token
    "paper-mse-3.5": (64 * 4 + 64 * 3 + 32) / 128,
    "paper-mse-2.5": (64 * 3 + 64 * 2 + 32) / 128,
    "paper-prod-3": (2 + 1 + 32 / 128 + 3 + 16 / 128) / 2,
    "turboesm": (3 + 1 + 3) / 2,
    "mlx-v2-4-lean": 4 + 32 / 64,
    "mlx-v2-3-rotated-qjl": (3 + 32 / 64 + 1 + 16 / 128 + 3 + 32 / 64) / 2,
    "mlx-v3-3.25": (32 * 4 + 96 * 3 + 16) / 128,
    "mlx-v3-2.75": (96 * 3 + 32 * 2 + 16) / 128,
    "skainet-safe-lowbit": (8.5 + 4.5) / 2,
    "skainet-experimental-max": 3.5,
    "polarquant-3-2": (3 + 1 / 4 + 32 / 128 + 2 + 16 / 128) / 2,
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_effective_bits_of_the_field(name):
    spec = preset(name)
    assert spec.effective_bits(128) == EFFECTIVE[name]
    assert 128 * spec.bytes_per_token(128, 3, 5) == 15 * spec.plan(128).record_bytes


def test_which_presets_have_plain_plans():
    fast = {name for name, spec in presets().items() if spec.budget is None and spec.plan(128).is_plain}
    assert fast == {
        *("default", "near-lossless", "compact", "tiny"),
        "esm-default",
        *(f"paper-mse-{b}" for b in (4, 3, 2)),
        *(f"mlx-v3-{b}" for b in (4, 3.5, 3.25, 3, 2.75, 2.5, 2)),
    }
    assert preset("mlx-v3-3.25").plan(128).key_bits == (4, 3, 3, 3)
    assert preset("mlx-v3-2.75").plan(64).value_bits == (3, 2)  # whole groups: a half is the nearest to three quarters
    with pytest.raises(ValueError, match="`value_bits` must be whole for heads of at most 32 channels, got 2.5 for 32"):
        preset("mlx-v3-2.5").plan(32)


def test_boundary_layers():
    spec = bare(3, 3, overrides={1: {"window": 8}}).with_boundary(2, key_bits=5, value_bits=4)
    layers = [spec.for_layer(i, 6) for i in range(6)]
    assert [s.key_bits for s in layers] == [5, 5, 3, 3, 5, 5] and [s.value_bits for s in layers] == [4, 4, 3, 3, 4, 4]
    assert [s.window for s in layers] == [0, 8, 0, 0, 0, 0]
    assert spec.with_boundary(0) == spec
    with pytest.raises(ValueError, match="layer 1 as 1 and -2"):
        spec.for_layer(0, 3)  # of three layers the first two and the last two overlap
    with pytest.raises(ValueError, match="`layers` must be in 0"):
        spec.with_boundary(-1)
    with pytest.raises(ValueError, match=r"`overrides\[-2\]`: `key_bits`"):
        spec.with_boundary(2, key_bits=9)
    with pytest.raises(ValueError, match="a field must be given for 2 layers, such as key_bits=5, got none"):
        spec.with_boundary(2)


def test_layers_are_integers_of_the_model():
    spec = bare(overrides={0: {"key_bits": 5}})
    assert spec.for_layer(np.int64(0), 2).key_bits == 5
    for given, error, message in (
        ((0.0, 2), TypeError, "`layer` must be an integer, got 0.0"),
        ((True, 2), TypeError, "`layer` must be an integer, got True"),
        ((2, 2), ValueError, r"`layer` must be in 0\.\.1, got 2"),
        ((0, None), TypeError, "`n_layers` must be an integer, got None"),
        ((0, 0), ValueError, "`n_layers` must be in 1"),
    ):
        with pytest.raises(error, match=message):
            spec.for_layer(*given)
    with pytest.raises(TypeError, match="`head_dim` must be an integer, got '128'"):
        spec.plan("128")


@pytest.mark.parametrize("head_dim", [0, 12, 520])
def test_plan_refuses_a_head_dim(head_dim):
    with pytest.raises(ValueError, match=f"`head_dim` .*got {head_dim}"):
        bare().plan(head_dim)


def test_plan_refuses_groups_of_another_head_dim():
    with pytest.raises(ValueError, match="key_bits"):
        bare((4, 4), 4).plan(128)


def test_presets():
    default = preset("default")
    done = default.settled()
    assert (done.key_bits, done.value_bits, done.rotation, done.scale) == (4, 4, "hadamard", "eden")
    assert (done.centre, done.metric, done.sinks, done.window) == ("wave", "query", 4, 128)
    assert default.prefill == "exact"
    for bits in (4, 3, 2):
        paper = preset(f"paper-mse-{bits}")
        assert (paper.key_bits, paper.value_bits, paper.scale, paper.centre) == (bits, bits, "norm", "none")
        assert paper.sinks == paper.window == 0
    assert all(preset(name) == spec == resolve(name) for name, spec in presets().items())
    presets().clear()
    assert "default" in presets()


def test_unknown_presets():
    with pytest.raises(ValueError, match="got 'defalt': did you mean 'default'"):
        preset("defalt")
    with pytest.raises(ValueError, match="got 'xyz': `turboquant presets` lists them"):
        preset("xyz")
    with pytest.raises(ValueError, match="did you mean .*'skainet-balanced'"):
        preset("SKaiNET-balance")
    for wrong in ({"key_bits": 4}, True, None):
        with pytest.raises(TypeError, match="must be a CacheSpec, the name of a preset or a number of bits, got"):
            resolve(wrong)
    with pytest.raises(ValueError, match="`spec` must be a preset, got 'xyz'"):
        resolve("xyz")
    assert preset("calibrated-3.3") == CacheSpec(budget=3.3)
    with pytest.raises(
        ValueError, match="must be a preset, such as calibrated-N with an N in 2..6, got .calibrated-1.5"
    ):
        preset("calibrated-1.5")


def test_a_number_of_bits_is_a_spec():
    assert resolve(3) == resolve(3.0) == CacheSpec(3, 3) and resolve(2.5) == CacheSpec(2.5, 2.5)
    for wrong in (0, 7, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`spec` must be a preset or a number of bits, got "):
            resolve(wrong)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (CacheSpec(), "CacheSpec()  # 4 bits on average"),
        (CacheSpec(8), "CacheSpec(key_bits=8)  # keys 8 bits, values 4"),
        (CacheSpec(3, 3, sinks=0), "CacheSpec(key_bits=3, value_bits=3, sinks=0)"),
        (CacheSpec(budget=2.5), "CacheSpec(budget=2.5)"),
        (
            CacheSpec(overrides={0: {"key_bits": 2, "value_bits": 2}}),
            "CacheSpec(overrides=((0, (('key_bits', 2), ('value_bits', 2))),))",
        ),
        (CacheSpec(overrides={0: {"sinks": 2}}), "CacheSpec(overrides=((0, (('sinks', 2),)),))  # 4 bits on average"),
    ],
    ids=["default", "keys", "both", "budget", "overridden bits", "other overrides"],
)
def test_what_a_spec_prints_says_its_bits(spec, said):
    assert repr(spec) == said and eval(said) == spec
    assert f"{spec}" == said.partition("  #")[0]


def test_the_command_presets(capsys):
    from turboquant.cli import main

    assert main(["presets"]) == 0
    head, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["preset", "codes", "bits"] and [line.split()[0] for line in lines] == [*presets()]
    assert re.split(r" {2,}", lines[0]) == [
        "default",
        "4 bits on average",
        "4.125",
        "first 4, last 128",
        "moments, measured by itself",
    ]
    assert re.split(r" {2,}", next(x for x in lines if x.startswith("calibrated-3 "))) == [
        "calibrated-3", "3 bits on average", "3.125", "first 4, last 128", "turboquant calibrate"]  # fmt: skip
    assert re.split(r" {2,}", next(x for x in lines if x.startswith("paper-mse-4 "))) == [
        "paper-mse-4", "4 bits", "4.125", "none", "nothing"]  # fmt: skip


def test_fields_that_are_not_named_are_those_of_the_preset_default():
    assert CacheSpec() == preset("default")
    assert CacheSpec(4, 3, window=64) == CacheSpec(4).with_(value_bits=3, window=64)
    spec = CacheSpec(3, window=0, overrides={0: {"key_bits": 5}})
    assert (spec.centre, spec.metric, spec.sinks, spec.window) == ("auto", "auto", 4, 0)
    assert spec.for_layer(0, 2) == CacheSpec(
        5, 4, "hadamard", centre="wave", metric="query", window=0, tries=3, variance_term=False
    )  # fmt: skip


def test_tries():
    """Presets above 2 bits try 3 scales; those of papers, and plans that cannot have tries, none."""
    from turboquant.named_specs import OTHERS

    found = {
        name: preset(name).for_layer(0, 2).plan(64).words[17]
        for name in ("default", "near-lossless", "compact", "tiny")
    }
    assert found == {"default": 3, "near-lossless": 3, "compact": 3, "tiny": 0}
    assert not any(spec.settled().tries for spec in OTHERS.values())
    mixed = CacheSpec(2, 2, overrides={1: {"value_bits": 3}})
    assert [mixed.for_layer(i, 2).plan(64).words[17] for i in range(2)] == [0, 3]
    assert CacheSpec(2, 2, tries=7).plan(64).words[17] == 7 and CacheSpec(tries=0).plan(64).words[17] == 0


def test_variance_term():
    """The variance term is a word of each layer's plan, whatever its widths."""
    spec = CacheSpec(2, (3, 4), variance_term=True, overrides={1: {"key_bits": 4}, 2: {"variance_term": False}})
    assert [spec.for_layer(i, 3).plan(64).words[18] for i in range(3)] == [1, 1, 0]
    shared = CacheSpec(3, 3, variance_term=True)
    assert shared.with_widths(shared, 4, 2).plan(64).words[18] == 1
    found = {name for name, spec in presets().items() if spec.settled().variance_term}
    assert found == {"compact", "tiny", "calibrated-2", "calibrated-2.5", "calibrated-3"}
    for without in (dict(sinks=0), dict(window=0), dict(scale="norm"), dict(codebook="sphere"), dict(key_bits=4)):
        assert not preset("tiny").with_(**without).settled().variance_term
    compact = preset("compact")
    assert compact.with_widths(compact, 5, 3).variance_term  # its average width decides


def copies(spec):
    yield pickle.loads(pickle.dumps(spec))
    yield copy.copy(spec)
    yield copy.deepcopy(spec)
    yield spec.with_()
    yield dataclasses.replace(spec)
    yield eval(repr(spec))
    yield CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))


EVERY = [
    CacheSpec(),
    CacheSpec(centre="wave", metric="query"),
    CacheSpec(2.5, sinks=0, overrides={-1: {"key_bits": (2, 3)}}),
    CacheSpec(budget=3, window=1),
    CacheSpec(budget=3, method="axes"),
    CacheSpec(overrides={0: {"rotation": "calibrated"}, -1: {"centre": "none"}}),
    CacheSpec(rotation="calibrated", overrides={1: {"rotation": "hadamard"}}),
]


def changed(spec, fields):
    try:
        return spec.with_(**fields)
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("spec", EVERY, ids=repr)
def test_equal_specs_do_the_same(spec):
    """A spec is its fields: whatever is done to a copy, the outcome is that of the original."""
    changes = [dict(rotation="calibrated"), dict(budget=3), dict(budget=None, method="chosen"), dict(key_bits=3)]
    for same in copies(spec):
        assert same == spec and hash(same) == hash(spec) and repr(same) == repr(spec)
        for change in changes:
            assert changed(same, change) == changed(spec, change)
    assert spec.with_().__dict__.keys() == {field.name for field in dataclasses.fields(spec)}


@pytest.mark.parametrize("spec", EVERY, ids=repr)
def test_settled(spec):
    """`settled` changes no layer, and leaves "auto" only in the bits of a budget."""
    done = spec.settled()
    assert done.settled() == done and (done == spec) == (spec.to_dict() == done.to_dict())
    left = {name for name, value in done.to_dict().items() if value == "auto"}
    assert left == ({"key_bits", "value_bits"} if spec.budget else set())
    for layer in range(4):
        one = spec.for_layer(layer, 4)
        assert one == done.for_layer(layer, 4) == one.settled()
        assert (one.calibrated, one.measured, one.blocked) == (
            done.for_layer(layer, 4).calibrated,
            done.for_layer(layer, 4).measured,
            done.for_layer(layer, 4).blocked,
        )
    assert (done.calibrated, done.measured) == (spec.calibrated, spec.measured)


def test_auto_is_not_the_value_that_it_stands_for():
    auto, named = CacheSpec(), CacheSpec(centre="wave", metric="query")
    assert auto != named and auto.settled() == named.settled() and (auto.centre, named.centre) == ("auto", "wave")
    assert auto.with_(rotation="calibrated").settled().centre == "calibrated"
    with pytest.raises(ValueError, match="`metric` must be 'none' where `rotation` is 'calibrated'"):
        named.with_(rotation="calibrated")
    assert auto.plan(128) == named.plan(128) == auto.settled().plan(128)


def test_a_budget_sets_what_is_auto():
    assert CacheSpec(budget=3) == preset("default").with_(budget=3)
    assert CacheSpec(key_bits=4) != CacheSpec()
    with pytest.raises(ValueError, match="`key_bits` must be 'auto' where `budget` shares the bits, got 4"):
        CacheSpec(key_bits=4).with_(budget=3)
    with pytest.raises(ValueError, match="`rotation` must be 'auto' where `budget` .* got 'dense'"):
        CacheSpec(rotation="dense", budget=3)
    assert CacheSpec(budget=3).with_(budget=None, key_bits=3) == CacheSpec(3)


def test_axes_of_a_calibration_have_no_wave_and_no_metric_unless_they_are_named():
    for rotation, centre in (("calibrated", "calibrated"), ("svd", "none"), ("dense", "wave")):
        spec = CacheSpec(rotation=rotation)
        done = spec.settled()
        assert (done.centre, done.metric) == (centre, "query" if rotation == "dense" else "none")
        assert spec.measured == (rotation == "dense") and spec.with_(rotation="auto") == CacheSpec()
        assert CacheSpec(rotation=rotation, centre="none").settled().centre == "none"
    for name, spec in OURS.items():
        assert spec.measured == (spec.budget is None), name


def test_from_dict_takes_mappings():
    with pytest.raises(TypeError, match="`fields` must be a mapping, as `to_dict` returns it, got 'default'"):
        CacheSpec.from_dict("default")


def test_from_dict_wants_every_field():
    fields = CacheSpec().to_dict()
    with pytest.raises(ValueError, match="`fields` must have every field of a CacheSpec, got no sinks"):
        CacheSpec.from_dict({name: value for name, value in fields.items() if name != "sinks"})
    with pytest.raises(TypeError, match="CacheSpec: `named` must be a field"):
        CacheSpec.from_dict({**fields, "named": []})


def test_other_schemes_name_what_they_switch_off():
    for name, spec in OTHERS.items():
        assert (spec.centre, spec.metric, spec.sinks, spec.window) == ("none", "none", 0, 0), name
        assert "auto" not in (spec.key_bits, spec.value_bits), name
        assert (spec.prefill, spec.seed, spec.group, spec.budget, spec.overrides) == ("exact", 0, 32, None, ()), name
    assert not OURS.keys() & OTHERS.keys() and presets() == {**OURS, **OTHERS}
