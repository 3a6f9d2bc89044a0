"""patch and unpatch of ESM-2: bidirectional attention over packed bytes, and nothing else changed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from conftest import shared_file
from esm_models import protein, tiny_esm, torch, transformers
from profiles import calibrate, profile_of
from specs import WAVE, bare

import turboquant
from turboquant import esm
from turboquant.esm import attention as attention_module
from turboquant.esm.attention import NAME
from turboquant.models.esm import ALPHABET, attentions, padded, tokenise

EXACT = bare(sinks=2**20)  # every token stays exact, so outputs must be the model's own
LENGTHS = (40, 7, 131, 128)


def batch(model, lengths=LENGTHS, side="right"):
    ids, real = padded([tokenise(protein(n, i), model.config) for i, n in enumerate(lengths)], "cpu")
    if side == "left":
        pad = ~real.flip(1)
        ids = torch.full_like(ids, 1).masked_scatter(~pad, ids[real])
        real = ~pad
    return dict(input_ids=ids, attention_mask=real.long())


def state(model):
    found = model.config._attn_implementation, [m.layer_idx for m in attentions(model)]
    hooks = len(model.base_model._forward_pre_hooks)
    return found, hooks, [sorted(vars(m)) for m in (model, model.base_model, *attentions(model))]


@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 128])  # ESM-2 of 8M, 35M, 150M, 650M and 3B, 15B
@pytest.mark.parametrize("side", ["right", "left"])
def test_equals_the_model_where_nothing_is_quantised(head_dim, side):
    model = tiny_esm(head_dim=head_dim)
    inputs = batch(model, side=side)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        turboquant.patch(model, EXACT)
        got = model(**inputs).logits
        turboquant.unpatch(model)
        want = model(**inputs).logits
    assert (got - want)[real].abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("residues", [1022, 4094])
def test_long_proteins(residues):
    """As long as the proteins that ESM-2 was trained on, and longer, beside a short one."""
    model = tiny_esm(head_dim=32, num_hidden_layers=2, max_position_embeddings=4100)
    inputs = batch(model, (residues, 40))
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits[real]
        errors = []
        for spec in (EXACT, bare(5, 5, **WAVE), bare(2, 2)):
            turboquant.patch(model, spec)
            errors.append(float((model(**inputs).logits[real] - want).norm() / want.norm()))
    assert errors[0] < 1e-4 < errors[1] < errors[2] < 1


@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 128])
def test_more_bits_are_nearer(head_dim):
    model = tiny_esm(head_dim=head_dim)
    inputs = batch(model)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits[real]
        errors = []
        for bits in (2, 3, 4, 5):
            turboquant.patch(model, bare(bits, bits))
            errors.append((model(**inputs).logits[real] - want).square().mean().item())
    assert errors == sorted(errors, reverse=True) and 0 < 4 * errors[3] < errors[0]


def oracle(model, inputs, spec):
    """A full pass in which keys and values are decoded to floats and SDPA attends to them, without `attend`."""
    from turboquant.esm.attention import plain_attention

    class Decoded:
        def attend(self, call):
            key, value = call.key, call.value
            plan, tokens = spec.plan(key.shape[-1]).words, key.shape[2]
            pages = torch.ops.turboquant.quantize(plan, key, value)
            count = pages.shape[0] // key.shape[0]
            table = torch.arange(pages.shape[0], dtype=torch.int32).view(-1, count)
            lengths = torch.full((key.shape[0],), tokens, dtype=torch.int32)
            k, v = torch.ops.turboquant.dequantize(plan, pages, table, lengths, tokens)
            return plain_attention(replace(call, key=k, value=v))

    return model(**inputs, turboquant_context=Decoded()).logits


@pytest.mark.parametrize("spec", [bare(3, 3), bare(4, 2, scale="norm"), bare((4, 1), (8, 2), group=16)],
                         ids=["eden", "norm", "groups of 16"])  # fmt: skip
def test_what_is_attended_to_is_what_was_packed(spec):
    model = tiny_esm(head_dim=32)
    inputs = batch(model)
    real = inputs["attention_mask"].bool()
    turboquant.patch(model, spec)
    with torch.no_grad():
        got, want = model(**inputs).logits, oracle(model, inputs, spec)
        turboquant.unpatch(model)
        plain = model(**inputs).logits
    away = (want - plain)[real].norm()
    assert (got - want)[real].norm() < 0.02 * away  # a key near a threshold may fall to its other side by rounding


@pytest.mark.parametrize("spec", [bare(3, 3, **WAVE), bare(3, 3, sinks=5),
                                  bare(3, 3, rotation="dense")], ids=["centred", "sinks", "dense"])  # fmt: skip
def test_padding_changes_nothing(spec):
    model = tiny_esm(head_dim=32, num_hidden_layers=1)  # one layer: rounding that moves a code is not carried on
    with torch.no_grad():
        plain = model(**batch(model)).logits
        turboquant.patch(model, spec)
        together = model(**batch(model)).logits
        for i, n in enumerate(LENGTHS):
            alone = model(torch.tensor([tokenise(protein(n, i), model.config)])).logits[0]
            assert (together[i, : n + 2] - alone).norm() < 0.1 * (plain[i, : n + 2] - alone).norm()


def test_modes_of_others():
    """The preset of TurboESM and one with a sketch use the same operators, and are less exact than 5 bits."""
    model = tiny_esm(head_dim=32, initializer_range=0.1)
    inputs = batch(model)
    real = inputs["attention_mask"].bool()
    found = calibrate(model, esm.protein_batches(model, [protein(90, i) for i in range(6)]))
    with torch.no_grad():
        want = model(**inputs).logits[real]
        errors = []
        for spec, calibration in ((bare(5, 5), None), ("turboesm", found), ("paper-prod-3", None)):
            turboquant.patch(model, spec, profile=profile_of(calibration))
            errors.append((model(**inputs).logits[real] - want).norm() / want.norm())
        cache = esm.ContextCache(model, "turboesm", profile=profile_of(found))
        cache.encode([protein(30)])
        assert torch.isfinite(cache.decode(["W"], [[3]]).logits[0]).all()
    assert 0 < errors[0] < min(errors[1:]) and max(errors) < 0.5
    with pytest.raises(NotImplementedError, match="outliers='prompt' is for decoders"):
        turboquant.patch(model, bare(2.5, 2.5, outliers="prompt"))


def test_all_kinds_of_models():
    ids = torch.tensor([tokenise(protein(30), tiny_esm().config)])
    for kind in ("EsmModel", "EsmForMaskedLM", "EsmForSequenceClassification", "EsmForTokenClassification"):
        model = tiny_esm(kind)
        before = state(model)
        with torch.no_grad():
            want = model(ids)[0]
            got = turboquant.patch(model, EXACT)(ids)[0]
            coarse = turboquant.patch(model, bare(1, 1))(ids)[0]
        assert torch.allclose(got, want, atol=1e-4) and not torch.allclose(coarse, want, atol=1e-3)
        assert [m.layer_idx for m in attentions(model)] == [0, 1, 2] and model.config._attn_implementation == NAME
        turboquant.unpatch(model)
        assert state(model) == before


def test_twice_inner_and_two_models():
    model, other = tiny_esm(), tiny_esm(seed=1)
    ids = torch.tensor([tokenise(protein(30), model.config)])
    before = state(model)
    with torch.no_grad():
        plain, others = model(ids).logits, other(ids).logits
        turboquant.patch(model, bare(1, 1))
        coarse = model(ids).logits
        turboquant.patch(model, EXACT)
        turboquant.patch(other, bare(1, 1))
        assert torch.allclose(model(ids).logits, plain, atol=1e-4)
        assert not torch.allclose(other(ids).logits, others, atol=1e-3)
        turboquant.unpatch(other)
        assert torch.equal(other(ids).logits, others)
        turboquant.patch(model.esm, bare(1, 1))  # the model within is the same model
        assert torch.equal(model(ids).logits, coarse)
        twin = copy.deepcopy(model)
        turboquant.unpatch(model.esm)
        assert state(model) == before and torch.equal(model(ids).logits, plain)
        assert torch.equal(twin(ids).logits, coarse)
        turboquant.unpatch(twin)
        assert not twin.esm._forward_pre_hooks and torch.equal(twin(ids).logits, plain)
        assert not turboquant.is_patched(model)
        turboquant.unpatch(model)  # not patched any more: nothing happens
        assert state(model) == before


def test_models_that_share_a_configuration():
    model = tiny_esm()
    other = type(model)(model.config).eval()
    before = model.config._attn_implementation
    turboquant.patch(model, EXACT)
    turboquant.patch(other, EXACT)
    turboquant.unpatch(model)
    assert other.config._attn_implementation == NAME
    turboquant.unpatch(other)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_after_patching(dtype):
    model = turboquant.patch(tiny_esm(head_dim=32, initializer_range=0.1), bare(5, 5, rotation="dense"))
    ids = torch.tensor([tokenise(protein(60), model.config)])
    with torch.no_grad():
        want = model(ids).logits
        got = model.to(dtype)(ids).logits
    assert got.dtype == dtype
    assert torch.cosine_similarity(got.float(), want, dim=-1).min() > 0.98


def test_inference_only():
    model = turboquant.patch(tiny_esm(), bare(3, 3))
    ids = torch.tensor([tokenise(protein(30), model.config)])
    loss = model(ids, labels=ids).loss  # a forward alone is fine
    with pytest.raises(RuntimeError, match="inference only"):
        loss.backward()
    turboquant.unpatch(model)
    model(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("trained", [".key.", ".value."])
def test_no_gradient_where_keys_or_values_alone_are_trained(trained):
    model = tiny_esm()
    ids = torch.tensor([tokenise(protein(30), model.config)])
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained in name or name.startswith("lm_head"))
    model(ids, labels=ids).loss.backward()
    assert attentions(model)[0].get_submodule(trained.strip(".")).weight.grad.abs().sum() > 0
    turboquant.patch(model, bare(3, 3))
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="inference only"):
        loss.backward()


def test_padding_is_sorted_out_once_for_all_layers(monkeypatch):
    model = turboquant.patch(tiny_esm(), bare(3, 3, overrides={1: {"sinks": 2}}))
    inputs, passes = batch(model), []
    found = attention_module._real
    monkeypatch.setattr(attention_module, "_real", lambda *given: passes.append(1) or found(*given))
    with torch.no_grad():
        first, second = model(**inputs).logits, model(**inputs).logits
    assert len(passes) == 2 and torch.equal(first, second)


@pytest.mark.slow
def test_a_patched_model_is_calibrated_as_without_a_patch():
    model = tiny_esm(head_dim=16)
    batches = [batch(model, (60, 40))]
    plain = calibrate(model, batches, sensitivity_batches=1)
    patched = calibrate(turboquant.patch(model, bare(2, 2)), batches, sensitivity_batches=1)
    assert (patched.covariance == plain.covariance).all() and (patched.sensitivity == plain.sensitivity).all()
    assert model.config._attn_implementation == NAME


def test_compile():
    model = turboquant.patch(tiny_esm(), bare(3, 3, **WAVE))
    inputs = batch(model)
    with torch.no_grad():
        want = model.esm(**inputs).last_hidden_state
        got = torch.compile(model.esm, backend="aot_eager")(**inputs).last_hidden_state
    assert torch.allclose(got, want, atol=1e-4)


def test_attention_weights_are_refused():
    model = turboquant.patch(tiny_esm(), bare(3, 3))
    inputs = batch(model)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attention weights|output_attentions"):
        model.predict_contacts(inputs["input_ids"], inputs["attention_mask"])


def test_masks_that_differ_between_queries():
    model = turboquant.patch(tiny_esm(), bare(3, 3))
    mask = torch.ones(1, 32, 32).tril()
    if int(transformers.__version__.split(".")[0]) >= 5:
        mask = mask[:, None]  # transformers 5 takes a ready-made mask with a dimension for heads
    with torch.no_grad(), pytest.raises(NotImplementedError, match="`attention_mask` must be"):
        model.esm(inputs_embeds=torch.zeros(1, 32, 32), attention_mask=mask)


REFUSED = {
    "absolute positions": dict(position_embedding_type="absolute"),
    "ESM-1b": dict(position_embedding_type="absolute", emb_layer_norm_before=True),
    "decoder": dict(is_decoder=True),
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_other_models_are_refused(fields):
    model = tiny_esm(**fields)
    before = state(model)
    with pytest.raises(NotImplementedError, match="EsmForMaskedLM cannot be used as an ESM-2 model: .*"):
        turboquant.patch(model)
    assert state(model) == before


def test_attention_that_was_changed_since_is_noticed_and_taken_back():
    model, ids = tiny_esm(), torch.randint(4, 24, (1, 40))
    with torch.no_grad():
        plain = model(ids).logits
        packed = turboquant.patch(model, bare(1, 1))(ids).logits
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match=r"attention is 'sdpa' since .* call turboquant.patch\(model\) again"):
            model(ids)
        assert torch.equal(turboquant.patch(model, bare(1, 1))(ids).logits, packed)
        assert not torch.equal(packed, plain)
        torch.testing.assert_close(turboquant.unpatch(model)(ids).logits, plain)


def test_an_encoder_takes_no_cache_of_a_decoder():
    model, ids = tiny_esm(), torch.full((1, 8), 5)
    for call in (
        lambda: turboquant.TurboQuantCache(model, "default"),
        lambda: turboquant.TurboQuantCache(model.config, bare(4, 4)),
        lambda: turboquant.evaluate(model, ids, "default", generate=0),
    ):
        with pytest.raises(NotImplementedError, match="ESM-2 is an encoder, .*: use turboquant.esm.ContextCache"):
            call()


def test_wrong_arguments_leave_the_model_alone():
    model = tiny_esm()
    before = state(model)
    for error, message, arguments in [
        (ValueError, "`head_dim` .*got 12", (tiny_esm(head_dim=12),)),
        (ValueError, "`overrides` must name layers", (model, bare(overrides={7: {"sinks": 1}}))),
        (ValueError, "`profile` must be", (model, "calibrated-3")),
    ]:
        with pytest.raises(error, match=message):
            turboquant.patch(*arguments)
    with pytest.raises(NotImplementedError, match="`cuda_graphs` is for decoders"):
        turboquant.patch(model, cuda_graphs=True)
    assert state(model) == before


def test_alphabet_is_that_of_the_model():
    vocabulary = shared_file("models/esm-reference/vocab.txt").read_text().split()
    assert tuple(vocabulary) == ALPHABET
