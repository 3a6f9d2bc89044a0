"""Weights that change after the first cache: moments are measured anew, or, if they were given, a warning says so."""

from __future__ import annotations

import copy
import time

import models
import pytest
import torch
from adapters import Adapted, adapted

import turboquant
from turboquant import TurboQuantCache
from turboquant.measuring import used as module
from turboquant.models import identity
from turboquant.models.identity import Identity

pytestmark = pytest.mark.filterwarnings("ignore:the model is measured on random token ids")


def moments(model):
    return TurboQuantCache(model)._shared.moments


def same(a, b):
    return all((x.amplitudes == y.amplitudes).all() and (x.scale == y.scale).all() for x, y in zip(a.layers, b.layers))


@pytest.fixture(scope="module")
def other():
    return models.tiny(seed=1).state_dict()


def trained(model, other, parameters=None):
    parameters = [*(model.parameters() if parameters is None else parameters)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(parameters, lr=0.02).step()


@torch.no_grad()
def written(model, other):
    """Changes numbers of a long tensor between those of which `Identity` takes a sum."""
    weight = model.model.layers[0].mlp.up_proj.weight.view(-1)
    assert len(weight) > identity._WHOLE and not {*range(1000, 1400)} & {*identity._places(len(weight))}
    weight[1000:1400] += 1


def biased(model, other):
    model.model.layers[1].self_attn.k_proj.bias.data.view(2, -1)[:, 3] = 5.0


def copied(model, other):
    for name, p in model.named_parameters():
        p.data.copy_(other[name])


CHANGES = {
    "an optimiser's step": trained,
    "load_state_dict": lambda model, other: model.load_state_dict(other),
    "load_state_dict, assigned": lambda model, other: model.load_state_dict(copy.deepcopy(other), assign=True),
    "data.copy_": copied,
    "a module replaced": lambda model, other: setattr(model.model.layers[0].self_attn, "k_proj", models.tiny(seed=2)
                                                      .model.layers[0].self_attn.k_proj),
    "a few numbers, in place": written,
    "the data of a bias": biased,
    # Only half of them, since a metric does not change if all queries become longer.
    "the last layer's queries": lambda model, other: (
        model.model.layers[-1].self_attn.q_proj.weight.data[::2].mul_(1.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_moments_are_those_of_the_weights_now(change, other, caplog):
    kind, size = ("qwen2" if change is biased else "llama"), ({"intermediate_size": 512} if change is written else {})
    model = turboquant.patch(models.tiny(kind, **size), "default")
    before = moments(model)
    caplog.clear()  # a line before they are measured
    assert moments(model) is before and not caplog.messages
    change(model, other)
    after = moments(model)
    assert not same(before, after) and same(after, turboquant.measure(model))
    said, run, _ = caplog.messages  # the last one is of `measure`
    assert said.startswith("weights of ") and said.endswith("measured anew") and "runs over" in run
    assert moments(model) is after and len(caplog.messages) == 3


def test_what_changes_no_moments(caplog):
    model = turboquant.patch(models.tiny(tie_word_embeddings=False), "default")
    before = moments(model)
    caplog.clear()
    trained(model, None, [model.lm_head.weight, model.model.norm.weight, model.model.layers[-1].mlp.up_proj.weight])
    assert moments(model) is before
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    assert moments(model) is before
    turboquant.patch(turboquant.unpatch(model), "default")
    model.train().eval().requires_grad_(False)
    assert moments(model) is before
    assert not caplog.messages


def test_adapters_that_are_switched_and_merged(caplog, monkeypatch):
    """Moments of adapters that were used before are still known."""
    measured = []
    measure = module._measure
    monkeypatch.setattr(module, "_measure", lambda *a, **k: measured.append(1) or measure(*a, **k))
    model, layer = adapted(models.tiny(), name="k_proj")
    turboquant.patch(model, "default")
    active = moments(model)
    layer.disable_adapters = True
    off = moments(model)
    assert not same(active, off) and len(measured) == 2
    layer.disable_adapters = False
    assert moments(model) is active and len(measured) == 2
    layer.scaling["mine"] = 0.5
    assert not same(moments(model), active) and len(measured) == 3
    layer.scaling["mine"] = 2.0
    layer.merge()
    merged = moments(model)
    assert len(measured) == 4 and abs(merged.layers[1].amplitudes - active.layers[1].amplitudes).max() < 1e-3
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapted(attention.k_proj)
    assert not same(moments(model), merged) and len(measured) == 5
    assert sum("measured anew" in line for line in caplog.messages) == 4


def test_moments_that_were_given_are_warned_of_once():
    model = models.tiny()
    turboquant.patch(model, "default", profile=turboquant.measure(model))
    given = moments(model)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    with pytest.warns(UserWarning, match=r"changed since it was patched \(layers.0.self_attn.k_proj.weight\)") as said:
        assert moments(model) is given
    assert len(said) == 1 and moments(model) is given


def test_esm_2_in_the_next_forward(caplog):
    from esm_models import protein, tiny_esm

    from turboquant.models.esm import tokenise

    model = tiny_esm(head_dim=32)
    ids = torch.tensor([tokenise(protein(60), model.config)])
    turboquant.patch(model, "esm-default")
    with torch.no_grad():
        model(input_ids=ids)
        for layer in model.esm.encoder.layer:
            layer.attention.self.key.bias.data.add_(3)
        got = model(input_ids=ids).logits
        assert any("measured anew" in line for line in caplog.messages)
        want = turboquant.patch(copy.deepcopy(turboquant.unpatch(model)), "esm-default")(input_ids=ids).logits
    assert torch.equal(got, want)


def test_a_look_takes_no_longer_than_a_few_walks_over_the_weights():
    """A look takes about 1 ms on a quiet machine for a model of SmolLM2's size (272 weights, 135 million numbers), a
    fifteenth of a new identity. The weights are never written, so they take no RAM."""
    shape = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, head_dim=64)
    with torch.device("meta"):
        model = models.tiny(**shape, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    model.load_state_dict({n: torch.empty_like(t, device="cpu") for n, t in model.state_dict().items()}, assign=True)
    model.tie_weights()
    known = Identity.of(model)

    def least(call):
        times = []
        for _ in range(30):
            start = time.thread_time()
            assert call()
            times.append(time.thread_time() - start)
        return min(times)

    look = least(lambda: known.holds(model))
    assert look < 5 * least(lambda: [weight._version for weight in model.parameters()])
    assert look < least(lambda: Identity.of(model)) / 4
