"""Models whose layers are on several devices, or offloaded to main memory or disk, are calibrated, measured and patched
like models on one device."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ROOT
from models import prompts, tiny
from profiles import calibrate, profile_of

import turboquant
from turboquant import TurboQuantCache
from turboquant.models.identity import fingerprint
from turboquant.models.placement import device_of, is_offloaded, loaded

torch = pytest.importorskip("torch")
hooks = pytest.importorskip("accelerate.hooks")

DEMO = ROOT / "demo" / "turboquant_demo"
AXES = turboquant.CacheSpec(budget=3, method="axes")  # which needs no text to try methods on
ARRAYS = ("centre", "covariance", "axes", "variance", "sensitivity")
ON_DISK = {
    "two layers": ("model.layers.2", "model.layers.3"),
    "embeddings": ("model.embed_tokens", "lm_head"),
    "all weights": ("model.embed_tokens", "lm_head", "model.norm", *(f"model.layers.{i}" for i in range(4))),
}


def demo(**options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, **options).eval()


def trainable(model):
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad}


@pytest.mark.parametrize("on_disk", ON_DISK.values(), ids=ON_DISK)
def test_a_model_that_a_device_map_spread_out(on_disk, tmp_path):
    """Weights in memory and on disk, with accelerate's hooks, give the same calibration, figures and text. A cache
    loads for the model, and calibration freezes no weights that were trainable."""
    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    where = {part: "disk" if part in on_disk else "cpu" for part in parts}
    whole, spread = demo(), demo(device_map=where, offload_folder=tmp_path)
    spread.model.layers[1].mlp.requires_grad_(False)
    spread.model.layers[3].mlp.requires_grad_(False)
    assert is_offloaded(spread) and not is_offloaded(whole)
    assert device_of(spread) == device_of(spread.model.layers[3]) == torch.device("cpu")
    ids = torch.arange(200).view(1, 200) * 7 % 4000
    before = trainable(spread)
    a, b = (calibrate(model, [ids], sensitivity_batches=1) for model in (whole, spread))
    assert trainable(spread) >= before and not any(".3.mlp" in name or ".1.mlp" in name for name in trainable(spread))
    assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS) and a.fingerprint == b.fingerprint
    options = dict(everything_packed=True, generate=4)
    found = [turboquant.evaluate(m, ids, AXES, profile=profile_of(a), **options) for m in (whole, spread)]
    divergence = [one.kl_divergence for one in found]
    assert divergence[0] == divergence[1] > 0
    out = [turboquant.patch(m, AXES, profile=profile_of(a)).generate(ids, max_new_tokens=4) for m in (whole, spread)]
    assert torch.equal(*out)
    cache = TurboQuantCache(whole.config, AXES, profile=profile_of(a))
    with torch.no_grad():
        whole(ids, past_key_values=cache)
    cache.save(tmp_path / "cache", whole)
    assert {
        t.device.type for _, t in TurboQuantCache.load(tmp_path / "cache", spread, profile=profile_of(a)).tensors()
    } == {"cpu"}


def test_weights_that_are_nowhere():
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(ValueError, match="`model` must have its weights loaded, got LlamaForCausalLM with none"):
        device_of(model)
    with pytest.raises(
        ValueError, match=r"`model` must have its weights loaded, got lm_head\.weight on the meta device"
    ):
        loaded(model, "lm_head.weight", model.lm_head.weight)
    with pytest.raises(ValueError, match="`model` must have its weights loaded"):
        calibrate(model, [prompts(1, 100)["input_ids"]])


def spread_over(devices):
    """A model with layer i on devices[i] and the rest on the first device. Each layer computes on its own."""
    model = tiny(num_hidden_layers=len(devices)).to(devices[0])
    for layer, device in zip(model.model.layers, devices):
        align = hooks.AlignDevicesHook(device, io_same_device=True, skip_keys="past_key_values")
        hooks.add_hook_to_module(layer.to(device), align)
    return model


def cuda(count):
    found = torch.cuda.device_count()
    return [pytest.mark.cuda, pytest.mark.skipif(found < count, reason=f"there are {found} CUDA devices, not {count}")]


@pytest.mark.parametrize(
    "first, second",
    [
        pytest.param("cpu", "cpu", id="hooks alone"),
        pytest.param("cuda:0", "cpu", id="a GPU and the CPU", marks=cuda(1)),
        pytest.param("cuda:0", "cuda:1", id="two GPUs", marks=cuda(2)),
    ],
)
def test_layers_on_two_devices(first, second, tmp_path):
    """Keys, values and gradients are summed on the device of their layer. Results are those of one device."""
    whole, spread = tiny(num_hidden_layers=4), spread_over([first, second, first, second])
    assert {w.device for w in spread.model.layers[1].parameters()} == {torch.device(second)}
    batches = [prompts(2, 300, (0, 40), seed=s) for s in range(3)]
    found = [
        calibrate(model, batches, source="random tokens", checkpoint=tmp_path / f"part{i}")
        for i, model in enumerate((whole, spread))
    ]
    for name in ("centre", "covariance"):
        np.testing.assert_allclose(getattr(found[1], name), getattr(found[0], name), rtol=1e-2, atol=1e-3, err_msg=name)
    # A probability that differs in its last digits may draw another token: one of 1,680.
    np.testing.assert_allclose(found[1].sensitivity.sum(-1), found[0].sensitivity.sum(-1), rtol=0.1)
    assert fingerprint(spread) == found[0].fingerprint and trainable(spread) == trainable(whole)
    ids, spec = prompts(2, 200, seed=9)["input_ids"], turboquant.CacheSpec(budget=3, method="axes")
    options = dict(everything_packed=True, generate=4)
    results = [turboquant.evaluate(m, ids, spec, profile=profile_of(found[0]), **options) for m in (whole, spread)]
    divergence = [one.kl_divergence for one in results]
    assert divergence[1] == pytest.approx(divergence[0], rel=0.05) and divergence[0] > 0
    cache = TurboQuantCache(spread.config, spec, profile=profile_of(found[0]))
    turboquant.patch(spread, spec, profile=profile_of(found[0]))
    with torch.no_grad():
        spread(ids.to(first), past_key_values=cache)
    assert [str(layer.storage.pages.device) for layer in cache.layers] == [first, second, first, second]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_offloaded_weights_stay_off_the_device(tmp_path):
    """The backward pass of calibration does not gather the weights of all layers on a GPU that cannot hold them."""
    from transformers import AutoModelForCausalLM

    layers = 48  # 620 MB of weights, 13 MB a layer; activations of 2,048 tokens take 250 MB
    tiny(num_hidden_layers=layers, hidden_size=256, intermediate_size=4096).save_pretrained(tmp_path)
    where = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    where |= {f"model.layers.{i}": "cpu" for i in range(layers)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map=where).eval()
    weights = sum(w.numel() * 4 for w in model.parameters())
    assert is_offloaded(model) and device_of(model.model.layers[3]) == torch.device("cuda:0")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = calibrate(model, [prompts(1, 150)], sensitivity_batches=1)
    assert torch.cuda.max_memory_allocated() - before < 0.6 * weights
    assert (found.sensitivity.sum(-1) > 0).all()
