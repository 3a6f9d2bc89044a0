"""Moments of ESM-2 models, compared with those of the model's own projections on the proteins of the package."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from esm_models import protein, tiny_esm, torch
from specs import WAVE, bare

import turboquant
from turboquant import esm
from turboquant.measured import Moments
from turboquant.measuring.moments import measure_model
from turboquant.models.esm import tokenise
from turboquant.models.families import SINKS

PROTEINS = ROOT / "turboquant" / "data" / "moments" / "proteins.fasta"
SPEC = bare(3, 3, **WAVE, sinks=2)


def crc64(sequence: str) -> str:
    """The CRC-64 that UniProt gives (ISO 3309, polynomial x^64 + x^4 + x^3 + x + 1)."""
    value = 0
    for byte in sequence.encode():
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xD800000000000000 if value & 1 else 0)
    return f"{value:016X}"


def test_the_proteins_are_those_of_uniprot() -> None:
    """Each has the length and the checksum of its entry."""
    headers = [line for line in PROTEINS.read_text().splitlines() if line.startswith(">")]
    proteins = esm.read_fasta(PROTEINS)
    assert len(proteins) == len(headers) == 9 and sum(len(one.sequence) for one in proteins) == 2028
    for header, one in zip(headers, proteins):
        found = re.fullmatch(
            r">([A-Z0-9]{6}) \w+, .*, (\d+) residues, sequence version \d+, CRC64 ([0-9A-F]{16})", header
        )
        assert found is not None and found[1] == one.name and int(found[2]) == len(one.sequence)
        assert crc64(one.sequence) == found[3] and set(one.sequence) <= set(esm.AMINO_ACIDS)


def projected(model: Any, name: str) -> list[list[torch.Tensor]]:
    """[heads, tokens, head_dim] by layer and protein: a projection, before RoPE and without the first tokens."""
    modules = [layer.attention.self for layer in model.base_model.encoder.layer]
    found: list[list[torch.Tensor]] = [[] for _ in modules]

    def keep(layer: int, module: Any, out: torch.Tensor) -> None:
        shape = (-1, module.num_attention_heads, module.attention_head_size)
        found[layer].append(out[0].double().view(shape).transpose(0, 1)[:, SINKS:])

    handles = [
        getattr(module, name).register_forward_hook(lambda _, args, out, i=i, m=module: keep(i, m, out))
        for i, module in enumerate(modules)
    ]
    with torch.no_grad():
        for one in esm.read_fasta(PROTEINS):
            model(input_ids=torch.tensor([tokenise(one.sequence, model.config)]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("kind", ["EsmForMaskedLM", "EsmModel"])
def test_the_wave_is_the_mean_key_before_rope(kind: str, head_dim: int) -> None:
    model = tiny_esm(kind, head_dim=head_dim).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    moments = turboquant.measure(model)
    assert model.training and all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert moments.source == "the proteins of the package" and moments.tokens == 2028 + 9 * (2 - SINKS)
    for layer, keys in zip(moments.layers, projected(model.eval(), "key")):
        mean = torch.cat(keys, 1).mean(1).numpy()
        assert layer.kind == "wave" and not layer.centre.any()
        held = np.zeros_like(mean)
        for pair, amplitude in zip(layer.pairs, layer.amplitudes.swapaxes(0, 1)):
            held[:, pair] += amplitude
            assert pair[1] == pair[0] + head_dim // 2
        np.testing.assert_allclose(held[held != 0], mean[held != 0], rtol=1e-3, atol=1e-4 * np.abs(mean).max())
        assert np.square(held).sum() >= 0.99 * np.square(mean).sum()


def test_a_patched_model_is_measured_alike_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs, plain = tiny_esm(), [], measure_model
    monkeypatch.setattr(
        "turboquant.measuring.moments.measure_model", lambda *args, **how: runs.append(args) or plain(*args, **how)
    )
    turboquant.patch(model)
    turboquant.patch(model, SPEC)
    cache = esm.ContextCache(model)
    esm.evaluate(model, [protein(30)], {"a": "esm-default", "b": SPEC, "c": bare(4, 4)})
    assert len(runs) == 1
    again = plain(model)
    for one, other in zip(cache._packed[0].moments.layers, again.layers):
        assert np.array_equal(one.amplitudes, other.amplitudes) and np.array_equal(one.scale, other.scale)


def test_moments_that_are_given(tmp_path: Any) -> None:
    model = tiny_esm()
    moments = turboquant.measure(model)
    moments.save(tmp_path / "moments")
    for given in (moments, tmp_path / "moments"):
        turboquant.patch(model, SPEC, profile=given)
        held = model.esm.encoder.layer[0].attention.self._turboquant.moments
        assert isinstance(held, Moments) and esm.ContextCache(model, SPEC)._packed[0].moments is held
    cache = esm.ContextCache(turboquant.unpatch(model), SPEC, profile=moments)
    assert cache._packed[2].moments is moments.moments
    cache.encode([protein(40)])
    same = copy.deepcopy(cache).decode([["W"]], [[3]]).hidden[0]
    assert torch.equal(same, cache.decode([["W"]], [[3]]).hidden[0])


def test_what_is_refused() -> None:
    model, other = tiny_esm(), turboquant.measure(tiny_esm(heads=4))
    for what in (lambda: turboquant.patch(model, SPEC, profile=other),
                 lambda: esm.ContextCache(model, SPEC, profile=other)):  # fmt: skip
        with pytest.raises(ValueError, match="`profile` must be of this model"):
            what()
    with pytest.raises(ValueError, match="`profile` must be of this model, .* other weights"):
        turboquant.patch(model, SPEC, profile=turboquant.measure(tiny_esm(seed=1)))
    with pytest.raises(ValueError, match="`profile` must be None for a spec"):
        turboquant.patch(model, bare(4, 4), profile=turboquant.measure(model))
    with pytest.raises(NotImplementedError, match="`tokenizer` is for decoders"):
        turboquant.patch(model, tokenizer=str)
    for name, given in (("text", "MKT"), ("tokenizer", str)):
        with pytest.raises(ValueError, match=f"`{name}` must be None for an ESM-2 model"):
            turboquant.measure(model, **{name: given})
    assert not hasattr(model.esm, "_turboquant")


def test_a_wave_moves_with_its_tokens() -> None:
    """If packed tokens are read at later positions than they were stored at, the wave is shifted by the difference."""
    layer = turboquant.measure(tiny_esm()).layers[1]
    positions = np.arange(50)
    for by in (1, 7, 300):
        np.testing.assert_allclose(layer.later(by).centre_at(positions + by), layer.centre_at(positions), atol=2e-5)
    assert layer.later(0) is layer
