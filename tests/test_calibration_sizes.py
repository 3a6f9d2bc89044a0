"""Calibration of models whose layers differ in KV heads or head_dim, or read keys of other layers, as in Gemma 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_types import VERSION
from models import prompts, torch
from profiles import made_calibration, profile_of
from specs import bare
from test_shared_keys import made

import turboquant
from turboquant import Profile, TurboQuantCache
from turboquant.measured import Calibration, layer_specs
from turboquant.measured.calibration import layered
from turboquant.models import names

SIZES = [(2, 16), (2, 32)] * 3  # KV heads and channels of each layer
HEADS = [(2, 16), (1, 32)] * 3
KINDS: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "two head_dims": ("gemma 4", dict(num_kv_shared_layers=0), SIZES),
    "two numbers of KV heads": ("gemma 4, keys made as values are", dict(global_head_dim=16), [(2, 16), (1, 16)] * 3),
    "both": ("gemma 4, keys made as values are", {}, HEADS),
    "keys of earlier layers": ("gemma 4", {}, SIZES[:4]),
    "keys of earlier layers, gemma 3n": ("gemma 3n", {}, [(2, 16)] * 4),
}
NEW = pytest.mark.skipif(VERSION < (5, 20), reason="older transformers has no Gemma 4")


def ids_of(*seeds: int, tokens: int = 160) -> list[torch.Tensor]:
    return [prompts(2, tokens, seed=seed)["input_ids"] for seed in seeds]


def differing(rng: np.random.Generator, sizes: list[tuple[int, int]] = HEADS, **fields: Any) -> Calibration:
    """A calibration of random numbers whose layers have these sizes."""
    each = [made_calibration(rng, 1, heads, channels) for heads, channels in sizes]
    names = ("centre", "covariance", "axes", "variance", "sensitivity")
    arrays = {name: layered([getattr(one, name)[0] for one in each]) for name in names}
    return Calibration(**arrays, fingerprint={"layers": len(sizes)}, tokens=1000, **fields)


@pytest.fixture(scope="module", params=KINDS)
def found(request: pytest.FixtureRequest) -> tuple[Any, Profile, list[tuple[int, int]]]:
    """A model, its profile with trials, and the sizes of its layers."""
    kind, fields, sizes = KINDS[request.param]
    model = made(kind, **fields)
    profile = turboquant.calibrate(model, ids_of(1, 2), held_out=ids_of(3, tokens=200), averages=[3])
    return model, profile, sizes


# ---- bits ----


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("average", [1, 2, 2.6, 3.5, 5])
@pytest.mark.parametrize("sizes", [HEADS, [(4, 64), (1, 96), (4, 64), (1, 96), (4, 64)]])
def test_layers_of_each_size_keep_to_the_average(
    sizes: list[tuple[int, int]], average: float, group: int, rng: np.random.Generator
) -> None:
    one = differing(rng, sizes)
    bits = one.bits(average, group)
    assert [x.shape for x in bits] == [(2, -(-channels // group)) for _, channels in sizes]
    for layers in one.alike():
        here = np.stack([bits[i] for i in layers])
        assert average - 1 / here.size < here.mean() <= average
    spec = bare(budget=average, group=group)
    each = layer_specs(spec, one, len(sizes))
    stored = sum(s.plan(channels).record_bytes * heads // 128 for s, (heads, channels) in zip(each, sizes))
    padded = [heads * -(-channels // group) * group for heads, channels in sizes]
    scales = 4 * sum(heads for heads, _ in sizes)
    assert stored <= average * 2 * sum(padded) / 8 + scales < stored + sum(heads * group / 8 for heads, _ in sizes)
    assert one.average_of_bytes(average * 2 * sum(padded) / 8 + scales, group) == pytest.approx(average)


def test_bits_of_a_size_are_those_of_its_layers_alone(rng: np.random.Generator) -> None:
    """Bits of one size do not depend on what errors of another one cost."""
    one = differing(rng)
    layers = [0, 2, 4]
    arrays = {name: np.stack([getattr(one, name)[i] for i in layers])
              for name in ("centre", "covariance", "axes", "variance", "sensitivity")}  # fmt: skip
    alone = Calibration(**arrays, fingerprint={"layers": 3}, tokens=1000)
    for group in (32, 16):
        np.testing.assert_array_equal(np.stack([one.bits(2.5, group)[i] for i in layers]), alone.bits(2.5, group))


def test_what_it_refuses_to_hold(rng: np.random.Generator) -> None:
    one = differing(rng)
    arrays = {name: getattr(one, name) for name in ("centre", "covariance", "axes", "variance", "sensitivity")}
    swapped = arrays["variance"][::-1]
    with pytest.raises(
        ValueError, match=r"`variance` must have shape \[\(2, 2, 16\), \(2, 1, 32\), .*, got \[\(2, 1, "
    ):
        Calibration(**{**arrays, "variance": swapped}, fingerprint={}, tokens=1)
    with pytest.raises(ValueError, match="`sensitivity` must not be negative"):
        negative = (*arrays["sensitivity"][:-1], -arrays["sensitivity"][-1])
        Calibration(**{**arrays, "sensitivity": negative}, fingerprint={}, tokens=1)
    with pytest.raises(ValueError, match=r"`centre` must be \[layers, 2, kv_heads, head_dim\], got shape \[\(2, 16\)"):
        Calibration(**{**arrays, "centre": tuple(x[0] for x in arrays["centre"])}, fingerprint={}, tokens=1)
    with pytest.raises(ValueError, match=r"`average` must be in 1\.\.5 bits for heads of 16 channels, got 0.9"):
        one.bits(0.9)
    with pytest.raises(ValueError, match="`bytes_per_token` must be at least 108 for this model, got 100"):
        one.average_of_bytes(100)
    assert repr(one).startswith("Calibration(layers=6, kv_heads=2/1, head_dim=16/32, tokens=1000")


# ---- a model ----


@NEW
def test_each_layer_is_measured_in_its_own_size(found: Any) -> None:
    model, profile, sizes = found
    one = profile.calibration
    assert one.sizes == sizes and [x.shape for x in one.covariance] == [(2, h, c, c) for h, c in sizes]
    assert [x.shape for x in one.tables] == [(2, h, 9) for h, _ in sizes]
    keys: dict[int, torch.Tensor] = {}
    hidden: list[Any] = []
    from turboquant.measuring import passes
    from turboquant.measuring.tap import tapped

    with tapped(model) as tap:
        tap.hook = lambda _, layer, query, key, value: keys.update({layer: key}) or hidden.append(layer)
        rows = []
        for ids in ids_of(1, 2):
            passes.forward(model, {"input_ids": ids})
            rows.append([keys[i][:, :, 4:].transpose(0, 1).flatten(1, 2).double() for i in range(len(sizes))])
    for i, (heads, _) in enumerate(sizes):
        vectors = torch.cat([row[i] for row in rows], 1).numpy()
        np.testing.assert_allclose(one.centre[i][0], vectors.mean(1), atol=1e-4)
        for head in range(heads):
            np.testing.assert_allclose(one.covariance[i][0, head], np.cov(vectors[head].T, bias=True), atol=1e-3)


@NEW
@pytest.mark.parametrize("method", ["axes", "widths", "moments+widths"])
def test_a_cache_stores_what_the_calibration_says(method: str, found: Any) -> None:
    model, profile, sizes = found
    one = profile.calibration
    spec = bare(budget=3, method=method, prefill="packed")
    specs = layer_specs(spec, one, len(sizes))
    ids = ids_of(7, tokens=300)[0]
    with torch.no_grad():
        want = model(ids).logits
        turboquant.patch(model, spec.with_(budget=5), profile=profile)
        logits = model(ids, **{names.CACHE: TurboQuantCache(model)}).logits
        cache = TurboQuantCache(turboquant.patch(model, spec, profile=profile))
        model(ids, **{names.CACHE: cache})
    turboquant.unpatch(model)
    assert torch.nn.functional.cosine_similarity(logits.flatten(), want.flatten(), 0) > 0.94
    for i, (layer, (heads, channels)) in enumerate(zip(cache.packed_layers, sizes)):
        held = layer.storage
        assert (held.kv_heads, held.head_dim) == (heads, channels)
        assert (held.spec.key_bits, held.spec.value_bits) == (specs[i].key_bits, specs[i].value_bits)
        if method == "axes":
            bits = [held.spec.key_bits, held.spec.value_bits]
            for side, name in enumerate(("key", "value")):
                assert bits[side] == tuple(one.bits(3)[i][side])
                table = held.transforms[f"{name}_numbers"][:, :channels]
                np.testing.assert_array_equal(table.numpy(), one.centre[i][side])
            rotation, _ = one.merged(i, 1, held.spec.value_bits)
            np.testing.assert_array_equal(held.transforms["rotation"][:, -channels:].numpy(), rotation)
    for shape in {*sizes}:
        widths = [b for s, size in zip(specs, sizes) if size == shape
                  for b in np.ravel([s.key_bits, s.value_bits])]  # fmt: skip
        assert np.mean(widths) <= 3
    if method == "axes":
        full = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"][:2]
        for i in full:
            plan = specs[i].plan(sizes[i][1])
            assert cache.packed_layers[i].storage.pages.shape[1:] == (sizes[i][0], plan.record_bytes)


@NEW
def test_files_and_a_generation(found: Any, tmp_path: Path) -> None:
    model, profile, sizes = found
    profile.save(tmp_path / "one")
    other = Profile.load(tmp_path / "one")
    first, again = profile.calibration.arrays(), other.calibration.arrays()
    assert {*first} == {*again} and (f"centre.{len(sizes) - 1}" in first) == (len({*sizes}) > 1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert other.calibration.described() == profile.calibration.described()
    prompt = ids_of(8, tokens=40)[0]
    texts = []
    for one in (profile, tmp_path / "one"):
        turboquant.patch(model, "calibrated-3", profile=one)
        got = model.generate(prompt, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        assert type(got[names.CACHE]) is TurboQuantCache
        texts.append(got.sequences)
        got[names.CACHE].save(tmp_path / "cache", model)
        read = TurboQuantCache.load(tmp_path / "cache", model)
        with torch.no_grad():
            after = [model(prompt[:, :1], **{names.CACHE: held}).logits for held in (got[names.CACHE], read)]
        assert torch.equal(*after)
        turboquant.unpatch(model)
    assert torch.equal(*texts)


@NEW
def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turboquant.calibration import calibrate as module

    kind, fields, _ = KINDS["both"]
    model, batches = made(kind, **fields), ids_of(1, 2)
    want = turboquant.calibrate(model, batches).calibration
    with monkeypatch.context() as patched:
        patched.setattr(module, "_measure_costs", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            turboquant.calibrate(model, batches, checkpoint=tmp_path / "part")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_measure_tables", lambda *args: pytest.fail("tables were found before"))
        got = turboquant.calibrate(model, batches, checkpoint=tmp_path / "part").calibration
    for name, array in want.arrays().items():
        np.testing.assert_array_equal(array, got.arrays()[name])


@NEW
def test_an_error_counts_in_all_layers_that_read_it() -> None:
    from turboquant.measuring import passes
    from turboquant.measuring.tap import tapped

    model, batch = made(), {"input_ids": ids_of(4)[0]}
    with tapped(model) as tap:
        each = {(layer, side): gradient for layer, side, _, gradient in passes.gradients(model, tap, batch, 5)}
    assert [*each] == [(layer, side) for layer in range(4) for side in range(2)]

    def plain(layers: tuple[int, ...], side: int) -> torch.Tensor:
        leaves: list[torch.Tensor] = []

        def hook(module: Any, call: int, query: Any, *both: torch.Tensor) -> Any:
            if module.layer_idx not in layers:
                return None
            if not leaves:
                leaves.append(torch.zeros_like(both[side], requires_grad=True))
            return tuple(x + leaves[0] if i == side else x for i, x in enumerate(both))

        with tapped(model) as tap, torch.enable_grad():
            tap.hook = hook
            score = passes._score(model, passes.forward(model, batch), None, 5)
            return torch.autograd.grad(score, leaves)[0]

    for layers in ((1,), (2, 4), (3, 5)):
        for side in range(2):
            want = plain(layers, side)
            torch.testing.assert_close(each[layers[0], side], want, rtol=0, atol=1e-5 * float(want.abs().max()))
            alone = plain(layers[:1], side)
            assert len(layers) == 1 or float((alone - want).abs().max()) > 0.1 * float(want.abs().max())


@NEW
def test_costs_of_shared_keys_choose_widths() -> None:
    from turboquant.measuring.costs import with_costs

    model = made()
    profile = turboquant.measure(model)
    with_some = with_costs(profile.moments.without_costs(), model, [ids[:1] for ids in ids_of(1, 2, tokens=300)])
    assert with_some.no_costs == "" and with_some.costs is not None
    assert with_some.costs.shape == (4, 2) and (with_some.costs[[1, 3]] > 0).all()
    turboquant.patch(model, "default", profile=Profile(with_some))
    assert len({(s.key_bits, s.value_bits) for s in (x.spec for x in TurboQuantCache(model).packed_layers)}) > 1


@NEW
def test_what_is_refused(rng: np.random.Generator) -> None:
    kind, fields, sizes = KINDS["both"]
    model = made(kind, **fields)
    with pytest.raises(ValueError, match=r"more tokens than a head has channels \(32\), got 24"):
        turboquant.calibrate(model, [prompts(1, 28)["input_ids"]])
    from turboquant.models.identity import fingerprint

    swapped = differing(rng, sizes[::-1])
    object.__setattr__(swapped, "fingerprint", fingerprint(model))
    turboquant.patch(model, bare(budget=3, method="axes"), profile=profile_of(swapped))
    with pytest.raises(ValueError, match="layer 0: keys must have the 1 KV heads of 32 channels of the calibration"):
        model(prompts(1, 28)["input_ids"], **{names.CACHE: TurboQuantCache(model)})
