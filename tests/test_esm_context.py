"""ContextCache: decoding, exact and from packed bytes, and errors, which change nothing."""

from __future__ import annotations

import copy
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
from esm_models import LETTERS, protein, tiny_esm, torch
from profiles import calibrate, profile_of
from specs import WAVE, bare

import turboquant
from turboquant import esm
from turboquant.esm import EXACT, ContextCache
from turboquant.esm.attention import plain_attention
from turboquant.models.esm import attentions, tokenise

PROTEINS = [protein(40, 0), protein(7, 1), protein(131, 2), protein(126, 3)]


def ids_of(model, sequence):
    return torch.tensor([tokenise(sequence, model.config)])


def full(model, sequence):
    with torch.no_grad():
        return model(ids_of(model, sequence)).logits[0, 1:-1]


def test_encode_is_the_exact_pass():
    for model in (tiny_esm(), turboquant.patch(tiny_esm(), bare(1, 1)), tiny_esm(token_dropout=False)):
        cache = ContextCache(model, bare(2, 2))
        said = cache.encode(PROTEINS, batch_size=3)
        turboquant.unpatch(model)
        assert cache.lengths == [40, 7, 131, 126]
        for got, sequence in zip(said.logits, PROTEINS):
            assert torch.allclose(got, full(model, sequence), atol=1e-4)


def test_many_proteins_are_sorted_at_once(monkeypatch):
    proteins = [("MK", "M", "MKV")[i % 3] for i in range(60_000)]

    def stopped(base, modules, packed, tokens, row_of):
        assert [tokens[row] for row in row_of] == [tokenise(p, model.config) for p in proteins]
        raise KeyboardInterrupt

    model = tiny_esm()
    cache = ContextCache(model, bare(2, 2))
    monkeypatch.setattr("turboquant.esm.context.empty", stopped)
    before = time.process_time()
    with pytest.raises(KeyboardInterrupt):
        cache.encode(proteins)
    assert time.process_time() - before < 5  # a search in a list for each takes several times as long


def test_masked_residues_in_what_is_read():
    """The share of masked residues scales the other embeddings (token dropout)."""
    model = tiny_esm()
    masked = list(PROTEINS[0])
    masked[3] = masked[9] = masked[10] = "<mask>"
    said = ContextCache(model, EXACT).encode([masked, PROTEINS[1]])
    assert torch.allclose(said.logits[0], full(model, masked), atol=1e-4)


def test_all_residues_anew_are_a_full_pass():
    """If all residues are decoded anew, only the two end tokens of the stored protein are read. In a model of one layer
    these do not depend on the old residues."""
    model = tiny_esm(num_hidden_layers=1)
    other = [protein(len(p), 9 + i) for i, p in enumerate(PROTEINS)]
    for spec in (EXACT, bare(3, 3, sinks=1)):
        cache = ContextCache(model, spec)
        cache.encode(PROTEINS)
        said = cache.decode(other, [range(len(p)) for p in other], batch_size=3)
        for got, sequence in zip(said.logits, other):
            want = full(model, sequence)
            assert torch.allclose(got, want, atol=1e-3) == (spec == EXACT)
            assert (got - want).norm() < 0.2 * want.norm()


def replaced(model, sequence, letters, positions):
    """The oracle, by SDPA: logits of the changed residues in a full pass over the changed protein, in which all other
    residues have the keys and values of the unchanged protein in every layer. `letters` may continue the protein."""
    old = tokenise(sequence, model.config)
    new = old[:-1]
    for letter, p in zip(letters, positions):
        token = tokenise([letter], model.config)[1]
        new[p + 1 : p + 2] = [token]
    new += [2]
    grown = len(new) > len(old)
    fresh = [p + 1 for p in positions] + ([len(new) - 1] if grown else [])
    kept = []

    class Record:
        def attend(self, call):
            kept.append((call.key, call.value))
            return plain_attention(call)

    class Replay:
        layer = 0

        def attend(self, call):
            k, v = kept[self.layer]
            self.layer += 1
            k, v = (torch.cat([x, x[:, :, -1:].expand(-1, -1, len(new) - len(old), -1)], 2).clone() for x in (k, v))
            k[:, :, fresh], v[:, :, fresh] = call.key[:, :, fresh], call.value[:, :, fresh]
            return plain_attention(replace(call, key=k, value=v))

    from turboquant.models.esm import dropout_factor, embed
    from turboquant.models.routing import routed

    with torch.no_grad(), routed(model.esm, "turboquant_esm"):
        ids = torch.tensor([old])
        factor = dropout_factor(ids, torch.ones_like(ids, dtype=torch.bool))
        model.esm(inputs_embeds=embed(model.esm, ids, factor), turboquant_context=Record())
        states = model.esm(inputs_embeds=embed(model.esm, torch.tensor([new]), factor), turboquant_context=Replay())
        return model.lm_head(states.last_hidden_state[0, [p + 1 for p in positions]])


COPIES = {  # protein, letters, positions
    "one": (0, ["W"], [3]),
    "masked": (1, ["<mask>"], [6]),
    "first and last": (2, ["W", "K"], [130, 0]),
    "neighbours": (3, ["A", "C", "<mask>", "D"], [4, 5, 6, 90]),
    "continued": (0, ["A", "C", "D"], [40, 41, 42]),
    "changed and continued": (1, ["W", "K"], [7, 2]),
    "the same again": (0, ["G"], [3]),
}


@pytest.mark.parametrize("heads, head_dim", [(2, 16), (3, 24), (1, 64)])
def test_decode_in_batches_is_replacement(heads, head_dim):
    """Unquantised decoding is compared with an oracle that replaces keys and values in full passes."""
    model = tiny_esm(heads=heads, head_dim=head_dim)
    cache = ContextCache(model, EXACT)
    cache.encode(PROTEINS)
    which, letters, positions = zip(*COPIES.values())
    for batch_size in (1, 3, 64):
        said = cache.decode(letters, positions, which, batch_size=batch_size)
        for name, got in zip(COPIES, said.logits):
            protein, residues, at = COPIES[name]
            want = replaced(model, PROTEINS[protein], residues, at)
            assert (got - want).abs().max() < 2e-3 * want.abs().max(), name


MIXED = bare(3, 3, **WAVE, sinks=2, overrides={1: {"centre": "none", "sinks": 0}})


@pytest.mark.parametrize("spec", [EXACT, bare(3, 3, sinks=3), bare(4, 4, **WAVE), MIXED],
                         ids=["exact", "sinks", "centred", "layers that differ"])  # fmt: skip
def test_copies_of_one_protein_read_together_what_they_share(spec):
    """A batch of copies, which share ranges of tokens, gives the same as batches of one copy."""
    model = tiny_esm(heads=3, head_dim=24)
    cache = ContextCache(model, spec)
    cache.encode(PROTEINS)
    for positions in ([[5], [1], [9, 3]], [[0], [130]], [[60], [61, 62, 64], [90]], [[131, 132], [100]], [[2], [2]]):
        letters = [["<mask>"] * len(at) for at in positions]
        together = cache.decode(letters, positions, [2] * len(positions))
        for got, at, residues in zip(together.logits, positions, letters):
            alone = cache.decode([residues], [at], [2]).logits[0]
            assert (got - alone).abs().max() < 1e-3 * alone.abs().max()


def test_layers_that_need_different_numbers_of_pages():
    """129 tokens take two pages, or one page in a layer where two of them are sinks."""
    cache = ContextCache(tiny_esm(head_dim=32, initializer_range=0.1), MIXED)
    exact = ContextCache(cache.model, EXACT)
    for one in (cache, exact):
        one.encode([protein(127), protein(20)])
    for at in (0, 60, 126):
        got, want = (one.decode(["W", "W"], [[at], [3]]).logits for one in (cache, exact))
        assert all((a - b).norm() < 0.2 * b.norm() for a, b in zip(got, want))


def test_packed_context_is_near_the_exact_one():
    model = tiny_esm(head_dim=32, initializer_range=0.1)
    which, letters, positions = zip(*COPIES.values())
    exact = ContextCache(model, EXACT)
    exact.encode(PROTEINS)
    want = torch.cat(exact.decode(letters, positions, which).logits)
    errors = []
    for spec in (bare(2, 2), bare(4, 4, **WAVE), bare(5, 5, sinks=3)):
        cache = ContextCache(model, spec)
        cache.encode(PROTEINS)
        errors.append(float((torch.cat(cache.decode(letters, positions, which).logits) - want).norm() / want.norm()))
    assert 0.5 > errors[0] > errors[1] > errors[2] > 1e-4


def test_bytes_are_counted():
    model = tiny_esm(head_dim=32)
    cache = ContextCache(model, bare(3, 3))
    assert cache.nbytes == 0
    cache.encode(PROTEINS)
    tokens = sum(len(p) + 2 for p in PROTEINS)
    record = 128 * 2 * (3 * 4 + 2)
    pages = 1 + 1 + 2 + 1
    assert cache.bytes_per_token == pages * record * 2 * 3 / tokens
    assert cache.effective_bits == pytest.approx(8 * pages * record / (tokens * 2 * 32))
    assert cache.nbytes == pages * record * 2 * 3 + 4 * (4 * 2 + 4 + 4)
    exact = ContextCache(model, EXACT)
    exact.encode(PROTEINS)
    assert exact.effective_bits == pytest.approx(32 * 4 * 133 / tokens)


@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 128])  # ESM-2 of 8M, 35M, 150M, 650M and 3B, 15B
def test_long_proteins_and_short_ones_of_every_shape(head_dim):
    """Whole pages and parts of one, in one batch of changes, against full-precision decoding."""
    model = tiny_esm(heads=1, head_dim=head_dim, num_hidden_layers=2, max_position_embeddings=2100)
    proteins, at = [protein(2000), protein(5), protein(300)], [[1999, 3], [4], [150]]
    letters = [["W", "<mask>"], ["K"], ["<mask>"]]
    said = []
    for spec in (EXACT, bare(5, 5, **WAVE), bare(2, 2)):
        cache = ContextCache(model, spec)
        cache.encode(proteins, batch_size=2)
        said.append(torch.cat(cache.decode(letters, at).logits))
    errors = [float((x - said[0]).norm() / said[0].norm()) for x in said[1:]]
    assert 0 < 2 * errors[0] < errors[1] < 1
    want = [replaced(model, *case) for case in zip(proteins, letters, at)]
    assert (said[0] - torch.cat(want)).abs().max() < 2e-3 * said[0].abs().max()


def test_decoding_leaves_the_context_alone():
    cache = ContextCache(tiny_esm(), bare(3, 3))
    cache.encode(PROTEINS)
    before = [t.clone() for t in cache._store.tensors()]
    first = cache.decode(["W"], [[3]], [2]).logits[0]
    assert all(map(torch.equal, before, cache._store.tensors()))
    assert torch.equal(cache.decode(["W"], [[3]], [2]).logits[0], first)


def test_other_kinds_of_models_and_nothing_to_decode():
    cache = ContextCache(tiny_esm("EsmModel"), bare(3, 3))
    said = cache.encode(PROTEINS[:2])
    assert said.logits is None and [h.shape for h in said.hidden] == [(40, 32), (7, 32)]
    assert cache.decode(["WK"], [[3, 1]]).hidden[0].shape == (2, 32)
    assert cache.decode([], []).hidden == []


def test_a_model_in_half():
    model = tiny_esm(head_dim=32, initializer_range=0.1)
    want = ContextCache(model, EXACT)
    want.encode(PROTEINS)
    want = want.decode(["W"], [[3]], [2]).logits[0]
    cache = ContextCache(model.half(), bare(5, 5, sinks=2))
    cache.encode(PROTEINS)
    got = cache.decode(["W"], [[3]], [2]).logits[0]
    assert got.dtype == torch.float16 and torch.cosine_similarity(got.float(), want).item() > 0.98


def test_inference_mode():
    with torch.inference_mode():
        cache = ContextCache(tiny_esm(), bare(3, 3, **WAVE))
        cache.encode(PROTEINS)
        inside = cache.decode(["W"], [[3]], [2]).logits[0]
    assert torch.equal(cache.decode(["W"], [[3]], [2]).logits[0], inside)


def unpickled(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled, copy.copy])
@pytest.mark.parametrize("spec", [bare(3, 3), MIXED], ids=["packed", "layers that differ"])
@pytest.mark.parametrize("patched", [False, True])
def test_copies_decode_to_the_same_numbers(copied, spec, patched):
    model = turboquant.patch(tiny_esm(), bare(1, 1)) if patched else tiny_esm()
    cache = ContextCache(model, spec)
    early = copied(cache)  # a copy of an empty cache
    cache.encode(PROTEINS)
    early.encode(PROTEINS)
    which, letters, positions = zip(*COPIES.values())
    want = cache.decode(letters, positions, which)
    for other in (early, copied(cache), copied(copied(cache))):
        assert (other.model is model) == (copied is copy.copy)
        got = other.decode(letters, positions, which)
        assert all(map(torch.equal, [*got.hidden, *got.logits], [*want.hidden, *want.logits]))
        assert (other.lengths, other.nbytes) == (cache.lengths, cache.nbytes)
        said = other.encode(PROTEINS[:1])
        assert torch.equal(said.logits[0], cache.encode(PROTEINS[:1]).logits[0])
        cache.encode(PROTEINS)


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
def test_copies_watch_the_weights_of_their_own_model(copied):
    model = tiny_esm()
    cache = ContextCache(model, bare(3, 3))
    cache.encode(PROTEINS)
    model.cache = cache  # a copy of the model then has a copy of the cache, made before the model's own is complete
    other = copied(model).cache
    with torch.inference_mode():
        frozen = copied(cache)
    with torch.no_grad():
        attentions(model)[1].key.weight.mul_(2)
    late = copied(cache)
    for stale in (cache, late, copied(late)):
        with pytest.raises(RuntimeError, match="weights, dtype or device changed"):
            stale.decode(["W"], [[3]])
    assert torch.equal(other.decode(["W"], [[3]]).logits[0], frozen.decode(["W"], [[3]]).logits[0])
    with torch.no_grad():
        attentions(other.model)[1].key.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights, dtype or device changed"):
        other.decode(["W"], [[3]])
    late.encode(PROTEINS)
    cache.encode(PROTEINS)
    assert torch.equal(late.decode(["W"], [[3]]).logits[0], cache.decode(["W"], [[3]]).logits[0])


WRONG = {
    "a letter": (dict(residues=["J"], positions=[[1]]), ValueError, r"`residues\[0\]\[0\]` must be .*got 'J'"),
    "outside": (dict(residues=["A"], positions=[[-1]]), IndexError, r"`positions\[0\]` must be in 0\.\.39"),
    "a gap": (dict(residues=["AA"], positions=[[40, 42]]), IndexError, r"continue it from 40, got 42"),
    "twice": (dict(residues=["AA"], positions=[[4, 4]]), ValueError, "each position once"),
    "too few": (dict(residues=["AA"], positions=[[4]]), ValueError, "one entry per residue, 2, got 1"),
    "no protein": (dict(residues=["A"], positions=[[4]], proteins=[4]), IndexError, r"must be in 0\.\.3.*got 4"),
    "half a place": (dict(residues=["A"], positions=[[0.5]]), TypeError, r"`positions\[0\]\[0\]` must be .*got 0\.5"),
    "a flag for a place": (dict(residues=["AA"], positions=[[0, True]]), TypeError, r"must be an integer, got True"),
    "a letter for a place": (dict(residues=["AA"], positions=[[0, "1"]]), TypeError, r"must be an integer, got '1'"),
    "half a protein": (dict(residues=["A"], positions=[[0]], proteins=[1.0]), TypeError, r"`proteins\[0\]` must be"),
    "copies": (dict(residues=["A", "A"], positions=[[4]]), ValueError, "one entry per copy, got 2, 1 and 2"),
    "one residue for a list": (dict(residues=3, positions=[[4]]), TypeError, "`residues` must be a list .*got 3"),
    "one place for a list": (dict(residues=["A"], positions=4), TypeError, "`positions` must be a list .*got 4"),
    "one place of a copy": (dict(residues=["A"], positions=[4]), TypeError, r"`positions\[0\]` must be a list .*got 4"),
    "one protein": (dict(residues=["A"], positions=[[4]], proteins=0), TypeError, "`proteins` must be a list .*got 0"),
    "half a batch": (
        dict(residues=["A"], positions=[[4]], batch_size=0.5),
        TypeError,
        "`batch_size` must be an integer, got 0.5",
    ),
    "batch": (dict(residues=["A"], positions=[[4]], batch_size=0), ValueError, "`batch_size`"),
}


@pytest.mark.parametrize("arguments, error, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_of_decode(arguments, error, message):
    cache = ContextCache(tiny_esm(), bare(3, 3))
    with pytest.raises(RuntimeError, match="call encode first"):
        cache.decode(["A"], [[0]])
    cache.encode(PROTEINS)
    with pytest.raises(error, match=message):
        cache.decode(**arguments)


def test_places_of_other_kinds_of_integers():
    cache = ContextCache(tiny_esm(), bare(3, 3))
    cache.encode(PROTEINS)
    want = cache.decode(["WA"], [[3, 5]], [2]).logits[0]
    for positions, proteins in ((np.array([[3, 5]]), np.array([2])), (torch.tensor([[3, 5]]), torch.tensor([2]))):
        assert torch.equal(cache.decode(["WA"], positions, proteins).logits[0], want)


@pytest.mark.parametrize(
    "proteins, message",
    [
        ([], "at least one protein"),
        ("MKV", "must be a list"),
        (None, "`proteins` must be a list of at least one protein, got None"),
        (torch.zeros(1, 3), "must be a list"),
        (["MKV", ""], r"`proteins\[1\]` must have at least one residue"),
        (["MKV", "mkv"], r"`proteins\[1\]\[0\]` must be a letter of the ESM-2 alphabet.*got 'm'"),
        ([LETTERS * 52], r"at most 1022 residues.*got 1040"),
    ],
)
def test_wrong_proteins_leave_what_was_stored(proteins, message):
    cache = ContextCache(tiny_esm(), bare(3, 3))
    cache.encode(PROTEINS)
    with pytest.raises(ValueError, match=message):
        cache.encode(proteins)
    assert cache.lengths == [40, 7, 131, 126]


def test_moments_are_of_the_weights_that_encode():
    model = tiny_esm()
    cache = ContextCache(model, bare(3, 3, **WAVE))
    cache.encode(PROTEINS)
    model.load_state_dict(tiny_esm(seed=1).state_dict())
    cache.encode(PROTEINS)
    fresh = ContextCache(model, cache.spec)
    fresh.encode(PROTEINS)
    assert torch.equal(cache.decode(["W"], [[3]]).logits[0], fresh.decode(["W"], [[3]]).logits[0])


def test_another_model_or_changed_weights():
    model = tiny_esm()
    cache = ContextCache(model, bare(3, 3))
    cache.encode(PROTEINS)
    with torch.no_grad():
        attentions(model)[1].key.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights, dtype or device changed"):
        cache.decode(["W"], [[3]])
    cache.encode(PROTEINS)
    attentions(model)[0].query = copy.deepcopy(attentions(model)[0].query)
    with pytest.raises(RuntimeError, match="weights, dtype or device changed"):
        cache.decode(["W"], [[3]])
    cache.encode(PROTEINS)
    model.half()
    with pytest.raises(RuntimeError, match="weights, dtype or device changed"):
        cache.decode(["W"], [[3]])
    with pytest.raises(ValueError, match="eval mode"):
        ContextCache(tiny_esm().train()).encode(PROTEINS)
    with pytest.raises(NotImplementedError, match="rotary"):
        ContextCache(tiny_esm(position_embedding_type="absolute"))
    with pytest.raises(ValueError, match="`profile` must be"):
        ContextCache(tiny_esm(), "calibrated-3")
    other = tiny_esm(head_dim=32)
    batches = esm.protein_batches(other, [protein(60, i) for i in range(4)])
    found = calibrate(other, batches, sensitivity_batches=1)
    with pytest.raises(ValueError, match="`profile` must be of this model"):
        ContextCache(tiny_esm(), "calibrated-3", profile=profile_of(found))
