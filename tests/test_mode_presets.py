"""Presets of other published schemes in a model: chosen by name, they generate from packed bytes, with outliers from a
prompt and tables from a calibration."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from conftest import ROOT, shared_file
from models import prompts, tiny
from profiles import calibrate, profile_of
from profiles import load as load_calibration
from specs import bare
from streams import Stream, forward, new

import turboquant
from turboquant import TurboQuantCache
from turboquant.matrices import side_matrix, split_rotation
from turboquant.measured.axes import singular_axes
from turboquant.measured.kmeans import kmeans_table

torch = pytest.importorskip("torch")

DEMO = ROOT / "demo" / "turboquant_demo"
BLOCKED = [name for name, spec in turboquant.presets().items() if spec.blocked]


@pytest.fixture(scope="module")
def demo():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    text = (DEMO / "a_christmas_carol.txt").read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"][:400]).view(2, 200)


@pytest.mark.parametrize("name", BLOCKED)
def test_generates_from_packed_bytes(name, demo, ids):
    """`generate` on the shipped model with a padded batch of two holds the bytes of the format and no other history."""
    spec = turboquant.preset(name).with_(sinks=2, window=8)
    calibration = DEMO / "profile.safetensors" if spec.calibrated else None
    turboquant.patch(demo, spec, profile=profile_of(calibration))
    try:
        cache = TurboQuantCache(demo.config, spec, profile=profile_of(calibration))
        mask = torch.ones_like(ids)
        mask[0, :40] = 0
        out = demo.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False
        )
    finally:
        turboquant.unpatch(demo)
    assert out.shape == (2, 212) and cache.get_seq_length() == 211
    report, config = cache.report(), demo.config
    tokens = 2 * 211 - 40
    pages = sum(-(-(n - 2 - 8) // 128) for n in (171, 211))
    head_dim = config.head_dim
    assert report.parts["pages"] == 128 * pages * spec.bytes_per_token(
        head_dim, config.num_key_value_heads, config.num_hidden_layers
    )
    assert report.layers[0].tokens == tokens
    spare = {"pages", "block_table", "sinks", "window", "rotation", "transforms", "lengths", "centre", "token ids"}
    assert set(report.parts) <= spare  # nothing else is held: no full-precision history


@pytest.mark.parametrize("name", ["skainet-safe-lowbit", "mlx-v2-4-rotated", "paper-mse-3.5", "turboesm"])
def test_a_step_reads_what_was_packed(name, demo, ids):
    """Decoding token by token gives the last logits of one forward with packed prefill, to 5 %. They are not the exact
    ones."""
    spec = turboquant.preset(name).with_(prefill="packed")
    calibration = DEMO / "profile.safetensors" if spec.calibrated else None
    turboquant.patch(demo, spec, profile=profile_of(calibration))
    try:
        with torch.no_grad():
            cache = TurboQuantCache(demo.config, spec, profile=profile_of(calibration))
            whole = demo(ids[:1], past_key_values=cache).logits[0, -1]
            cache = TurboQuantCache(demo.config, spec, profile=profile_of(calibration))
            demo(ids[:1, :150], past_key_values=cache)
            for i in range(150, 200):
                one = demo(ids[:1, i : i + 1], past_key_values=cache).logits[0, -1]
            exact = demo(ids[:1], use_cache=False).logits[0, -1]
    finally:
        turboquant.unpatch(demo)
    assert (one - whole).abs().max() < 0.05 * (whole - whole.mean()).abs().max()
    assert (whole - exact).abs().max() > 1e-4  # it is quantised


@pytest.mark.parametrize("name", ["paper-mse-2.5", "paper-prod-3", "turboesm"])
def test_files_and_forks_go_on_alike(name, demo, ids, tmp_path):
    spec = turboquant.preset(name)
    calibration = DEMO / "profile.safetensors" if spec.calibrated else None
    turboquant.patch(demo, spec, profile=profile_of(calibration))
    try:
        with torch.no_grad():
            cache = TurboQuantCache(demo.config, spec, profile=profile_of(calibration))
            demo(ids[:, :160], past_key_values=cache)
            fork = cache.fork()
            cache.save(tmp_path / "cache")
            loaded = TurboQuantCache.load(tmp_path / "cache", demo, profile=profile_of(calibration))
            want, *others = (demo(ids[:, 160:170], past_key_values=c).logits for c in (cache, fork, loaded))
    finally:
        turboquant.unpatch(demo)
    assert all(torch.equal(other, want) for other in others)


def test_outliers_of_the_prompt_and_of_a_calibration_are_the_loud_channels(rng):
    spec = bare(2.5, 3, outliers="prompt", seed=3)
    magnitude = np.ones((2, 128))
    magnitude[0, [5, 70]] = 9
    magnitude[1, 100:] = 9
    first = split_rotation(spec, "key", magnitude)
    np.testing.assert_allclose(first @ first.swapaxes(1, 2), np.broadcast_to(np.eye(128), (2, 128, 128)), atol=1e-5)
    used = np.abs(first[:, :64]).max(1) > 0  # channels of the first part
    assert used[0, [5, 70]].all() and used[1, 100:].all() and used.sum(1).tolist() == [64, 64]
    assert side_matrix(spec, "value", 128) is None
    both = side_matrix(spec.with_(sketch="gaussian/4"), "key", 128, first)
    assert both.shape == (2, 160, 128) and np.array_equal(both[:, :128], first)


def test_outliers_of_the_prompt_are_found_behind_a_piece_of_padding_alone():
    stream, found = Stream(batch=2, tokens=60, dim=64), []
    mask = (torch.arange(60) >= 20).expand(2, -1)
    for pieces in ((0, 60), (0, 16, 18, 60)):
        cache = new(bare(2.5, 2.5, outliers="prompt", prefill="packed"))
        for start, stop in pairwise(pieces):
            forward(cache, stream.piece(start, stop), mask[:, :stop])
        found.append([layer.storage.transforms["rotation"] for layer in cache.layers])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_split_by_magnitude_beats_a_fixed_one_on_real_outliers():
    """Some channels of these keys are 6 to 13 times the median. Splitting by magnitude leaves less error than a fixed
    split."""
    from turboquant import ops

    keys = np.load(shared_file("data/kv_outlier_channels.npz"))["k_post"][:, 2].astype(np.float32)  # [8, 512, 4, 32]
    x = np.ascontiguousarray(keys.transpose(0, 2, 1, 3).reshape(8, 2, 2, 512, 32).transpose(0, 1, 3, 2, 4)).reshape(
        8, 2, 512, 64
    )
    error = {}
    for kind in ("none", "prompt"):
        spec = bare(2.5, 2.5, scale="norm", outliers=kind)
        plan = spec.plan(64)
        given = {}
        if kind == "prompt":
            rotation = split_rotation(spec, "key", np.square(x[:, :, :128]).sum((0, 2)))
            given = ops.transforms(**{f"{side}_rotation": torch.from_numpy(rotation) for side in ("key", "value")})
        k = torch.from_numpy(x)
        decoded = ops.dequantize(ops.pack(k, k, plan, transforms=given))[0]
        error[kind] = float((decoded - k).square().sum() / k.square().sum())
    print(error)
    assert error["prompt"] < 0.8 * error["none"]


def test_kmeans_finds_the_levels_of_a_normal_law(rng):
    """k-means on normal samples finds the 8 Lloyd-Max levels. The last column is the mean distance to them."""
    x = rng.standard_normal(400_000)
    table = kmeans_table(x)
    want = np.array([0.2451, 0.7560, 1.3439, 2.1520])
    np.testing.assert_allclose(table[:8], np.concatenate([-want[::-1], want]), atol=0.02)
    distance = np.abs(x[:, None] - table[:8].astype(np.float64)).min(1)
    assert table[8] == pytest.approx(distance.mean(), rel=1e-6)
    assert np.array_equal(kmeans_table(rng.permutation(x)[::-1]), table)
    assert np.isfinite(kmeans_table(np.zeros(10))).all()


def test_singular_axes_are_those_of_the_vectors(rng):
    x = rng.standard_normal((500, 16)) * np.linspace(1, 4, 16) + 3
    mean, covariance = x.mean(0), np.cov(x.T, bias=True)
    found = singular_axes(mean, covariance)
    right = np.linalg.svd(x, full_matrices=False)[2]
    np.testing.assert_allclose(np.abs((found.astype(np.float64) * right).sum(1)), 1, atol=1e-5)


@pytest.fixture(scope="module")
def model():
    return tiny(head_dim=64)


@pytest.fixture(scope="module")
def calibration(model):
    return calibrate(model, [prompts(2, 160)["input_ids"]], sensitivity_batches=1)


def test_a_calibration_keeps_its_tables(model, calibration, tmp_path):
    assert calibration.tables.shape == (3, 2, 2, 9)
    assert (np.diff(calibration.tables[..., :8], axis=-1) >= 0).all() and (calibration.tables[..., 8] > 0).all()
    profile_of(calibration).save(tmp_path / "c")
    again = load_calibration(tmp_path / "c")
    np.testing.assert_array_equal(again.tables, calibration.tables)
    import dataclasses

    older = dataclasses.replace(calibration, tables=None)
    profile_of(older).save(tmp_path / "older")
    assert load_calibration(tmp_path / "older").tables is None
    ids = prompts(1, 40)["input_ids"]
    turboquant.patch(model, "turboesm", profile=tmp_path / "older")
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="must have tables of levels .* calibrate again"):
            model(ids)
    finally:
        turboquant.unpatch(model)


def test_table_keys_are_coded_by_their_own_axes_and_levels(model, calibration):
    """Layer 0 of TurboESM, computed here: K Vh^T goes to the nearest level, plus or minus the mean distance to the
    levels. V goes to the nearest level."""
    spec = turboquant.preset("turboesm").with_(prefill="packed")
    cache = TurboQuantCache(model.config, spec, profile=profile_of(calibration))
    captured = {}
    layer = cache.layers[0]
    update = type(layer).update

    def keep(self, key, value, *rest, **more):
        captured.setdefault("kv", (key.clone(), value.clone()))
        return update(self, key, value, *rest, **more)

    turboquant.patch(model, spec, profile=profile_of(calibration))
    try:
        with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(layer), "update", keep)
            model(prompts(1, 60)["input_ids"], past_key_values=cache)
    finally:
        turboquant.unpatch(model)
    k, v = (x.double().numpy()[0] for x in captured["kv"])
    counts = torch.tensor([60], dtype=torch.int32)
    given = layer.storage.transforms
    got_k, got_v = (x.numpy()[0] for x in torch.ops.turboquant.dequantize(
        layer.storage.plan.words, layer.storage.pages, layer.storage.block_table, counts, 60, **given))  # fmt: skip
    axes = calibration.singular_axes(0)[0].astype(np.float64)
    for head in range(2):
        levels, left = calibration.tables[0, 0, head, :8].astype(np.float64), float(calibration.tables[0, 0, head, 8])
        z = k[head] @ axes[head].T
        near = levels[np.abs(z[..., None] - levels).argmin(-1)]
        np.testing.assert_allclose(got_k[head], (near + np.where(z >= near, left, -left)) @ axes[head], atol=1e-4)
        levels = calibration.tables[0, 1, head, :8].astype(np.float64)
        np.testing.assert_allclose(got_v[head], levels[np.abs(v[head][..., None] - levels).argmin(-1)], atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", BLOCKED)
def test_a_model_on_cuda_reads_what_it_packed_there(name, model, calibration):
    """A prompt and steps of one token on CUDA give the CPU's logits, apart from codes that rounding changes."""
    spec, ids = turboquant.preset(name).with_(prefill="packed", sinks=2, window=8), prompts(2, 60)["input_ids"]
    logits = {}
    try:
        for device in ("cpu", "cuda"):
            turboquant.patch(model.to(device), spec, profile=profile_of(calibration if spec.calibrated else None))
            with torch.no_grad():
                cache = TurboQuantCache(
                    model.config, spec, profile=profile_of(calibration if spec.calibrated else None)
                )
                parts = [model(ids[:, :50].to(device), past_key_values=cache).logits]
                parts += [model(ids[:, i : i + 1].to(device), past_key_values=cache).logits for i in range(50, 60)]
            logits[device] = torch.cat(parts, 1).cpu()
            turboquant.unpatch(model)
    finally:
        model.to("cpu")
    spread = logits["cpu"].std()
    assert (logits["cuda"] - logits["cpu"]).abs().mean() < 0.02 * spread
