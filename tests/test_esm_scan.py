"""Masked marginals: the exact scan against its definition, the shared one against decoding by hand, errors."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from conftest import shared_file
from esm_models import protein, tiny_esm, torch, transformers
from specs import WAVE, bare

import turboquant
from turboquant.esm import (
    AMINO_ACIDS,
    EXACT,
    ContextCache,
    evaluate,
    heat_map,
    joint_marginals,
    masked_marginals,
    protein_batches,
    read_fasta,
    wild_type_marginals,
)
from turboquant.models.esm import ALPHABET, MASK, tokenise

SEQUENCE = protein(33)


def by_definition(model, sequence, positions):
    ids = torch.tensor([tokenise(sequence, model.config)])
    rows = []
    for p in positions:
        masked = ids.clone()
        masked[0, p + 1] = MASK
        with torch.no_grad():
            log_p = model(masked).logits[0, p + 1].double().log_softmax(-1)
        rows.append([log_p[ALPHABET.index(a)] - log_p[ids[0, p + 1]] for a in AMINO_ACIDS])
    return np.array(rows)


def test_exact_scan():
    for model in (tiny_esm(), turboquant.patch(tiny_esm(), bare(1, 1))):
        scan = masked_marginals(model, SEQUENCE, shared_context=False, batch_size=5)
        turboquant.unpatch(model)
        assert scan.sequence == SEQUENCE and scan.positions == tuple(range(33)) and scan.scores.shape == (33, 20)
        np.testing.assert_allclose(scan.scores, by_definition(model, SEQUENCE, range(33)), atol=2e-4)
        wild = [AMINO_ACIDS.index(letter) for letter in SEQUENCE]
        assert (scan.scores[np.arange(33), wild] == 0).all()


@pytest.mark.parametrize("positions", [None, [30, 0, 7]])
def test_wild_type_marginals(positions):
    """One pass of the protein as it is, by the model's own attention, patched or not."""
    ids = torch.tensor([tokenise(SEQUENCE, tiny_esm().config)])
    at = list(range(33)) if positions is None else positions
    with torch.no_grad():
        log_p = tiny_esm()(ids).logits[0, 1:-1][at].double().log_softmax(-1)
    want = log_p[:, [ALPHABET.index(a) for a in AMINO_ACIDS]]
    for model in (tiny_esm(), turboquant.patch(tiny_esm(), bare(1, 1))):
        scan = wild_type_marginals(model, SEQUENCE, positions)
        assert scan.sequence == SEQUENCE and scan.positions == tuple(at)
        np.testing.assert_allclose(scan.log_probabilities, want, atol=1e-4)
        np.testing.assert_allclose(scan.wild_type, log_p.gather(1, ids[0, 1:-1][at][:, None])[:, 0], atol=1e-4)
    assert np.abs(scan.scores - by_definition(tiny_esm(), SEQUENCE, at)).max() > 1e-3  # masked marginals differ


def test_shared_scan_is_exact_at_one_layer():
    """Keys and values of layer 0 do not depend on what is masked elsewhere if there is no token dropout."""
    model = tiny_esm(num_hidden_layers=1, token_dropout=False)
    scan = masked_marginals(model, SEQUENCE, [4, 0, 32], spec=EXACT)
    np.testing.assert_allclose(scan.scores, by_definition(model, SEQUENCE, [4, 0, 32]), atol=2e-3)


def test_shared_scan_is_decoding():
    model = tiny_esm()
    cache = ContextCache(model, bare(3, 3))
    cache.encode([protein(9, 5), SEQUENCE])
    scan = masked_marginals(model, SEQUENCE, [7, 30, 2], context=cache, batch_size=2)
    again = masked_marginals(model, SEQUENCE, [7, 30, 2], spec=bare(3, 3))
    np.testing.assert_allclose(scan.scores, again.scores, atol=1e-3)
    logits = torch.cat(cache.decode([["<mask>"]] * 3, [[7], [30], [2]], [1] * 3).logits).log_softmax(-1)
    np.testing.assert_allclose(scan.log_probabilities, logits[:, [ALPHABET.index(a) for a in AMINO_ACIDS]], atol=1e-5)


def test_lone_masks_are_finite():
    """A lone <mask> as a sequence of its own would have token dropout divide 0 by 0."""
    scan = masked_marginals(tiny_esm(), "W", spec=bare(4, 4))
    assert np.isfinite(scan.log_probabilities).all()


def test_a_masked_residue_is_one_letter_of_the_sequence(tmp_path):
    letters, model = ["M", "<mask>", "K", "W"], tiny_esm()
    scans = [masked_marginals(model, letters, spec=bare(4, 4)), wild_type_marginals(model, letters)]
    for scan in (*scans, *joint_marginals(model, letters, [[0, 2]], False)):
        assert list(scan.sequence) == letters and scan.sequence[3] == "W"
    assert wild_type_marginals(model, ["M", "K"]).sequence == "MK"
    pytest.importorskip("matplotlib")
    heat_map(wild_type_marginals(model, letters, [3]), tmp_path / "masked.svg")
    assert "W4" in (tmp_path / "masked.svg").read_text()


@pytest.mark.parametrize("default", [torch.device("meta"), torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_defaults_of_torch_change_nothing(default):
    model, proteins = tiny_esm(), [SEQUENCE, protein(50, 1)]
    spec = bare(3, 3, **WAVE, sinks=2)

    def said():
        options = ({}, dict(spec=spec), dict(spec="paper-prod-3"), dict(shared_context=False))
        scans = [masked_marginals(model, SEQUENCE, [4, 0, 32], **chosen) for chosen in options]
        scans.append(wild_type_marginals(model, SEQUENCE, [4, 0, 32]))
        arrays = [array for scan in scans for array in (scan.log_probabilities, scan.wild_type)]
        batches = protein_batches(model, proteins, seed=3, batch_size=1)
        arrays += [tensor.numpy() for batch in batches for tensor in batch.values()]
        return arrays, evaluate(model, proteins, {"a": spec})

    want = said()
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        with default if isinstance(default, torch.device) else nullcontext():
            got = said()
    finally:
        torch.set_default_dtype(before)
    assert got[1] == want[1] and all(map(np.array_equal, got[0], want[0]))
    assert [array.dtype for array in got[0]] == [array.dtype for array in want[0]]


def test_errors():
    model, other = tiny_esm(), tiny_esm(seed=1)
    cache = ContextCache(other, bare(3, 3))
    cache.encode([SEQUENCE])
    mine = ContextCache(model, bare(3, 3))
    mine.encode([SEQUENCE])
    for error, message, arguments in [
        (ValueError, "at least one residue", dict(sequence="")),
        (ValueError, r"`sequence\[2\]` must be a letter", dict(sequence="MKJ")),
        (ValueError, "at least one position", dict(sequence="MK", positions=[])),
        (IndexError, r"`positions\[1\]` must be in 0\.\.1, got 2", dict(sequence="MK", positions=[0, 2])),
        (TypeError, r"`positions\[0\]` must be an integer, got 0\.5", dict(sequence="MK", positions=[0.5])),
        (ValueError, "`context` must be of this model", dict(sequence=SEQUENCE, context=cache)),
        (ValueError, "must have read this sequence", dict(sequence=SEQUENCE[1:], context=mine)),
        (ValueError, "`context` must be None", dict(sequence=SEQUENCE, context=mine, shared_context=False)),
        (ValueError, "`batch_size`", dict(sequence=SEQUENCE, batch_size=0)),
        (TypeError, "`batch_size` .* got 'a'", dict(sequence=SEQUENCE, batch_size="a")),
        (TypeError, "`context` must be a ContextCache or None, got 3", dict(sequence=SEQUENCE, context=3)),
    ]:
        with pytest.raises(error, match=message):
            masked_marginals(model, **arguments)
    with pytest.raises(IndexError, match=r"`positions\[1\]` must be in 0\.\.1, got 2"):
        wild_type_marginals(model, "MK", [0, 2])
    for scan in (masked_marginals, wild_type_marginals):
        with pytest.raises(NotImplementedError, match="no masked-language head"):
            scan(tiny_esm("EsmModel"), SEQUENCE)
        with pytest.raises(ValueError, match="eval mode"):
            scan(tiny_esm().train(), SEQUENCE)
    with pytest.raises(TypeError, match="`specs` must be a mapping of names to specs, got 'esm-default'"):
        evaluate(model, [SEQUENCE], "esm-default")
    for proteins in ("MKT", []):
        with pytest.raises(ValueError, match="`sequences` must be a list of at least one protein"):
            protein_batches(model, proteins)


@pytest.mark.slow
def test_the_two_scans_agree_on_held_out_proteins():
    scipy_stats = pytest.importorskip("scipy.stats")
    folder = shared_file("models/esm-reference/config.json").parent
    proteins = [p for p in read_fasta(shared_file("data/proteins_val.fasta")) if len(p.sequence) < 130][:2]
    model = transformers.EsmForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    for p in proteins:
        exact = masked_marginals(model, p.sequence, shared_context=False).scores
        shared = masked_marginals(model, p.sequence).scores
        assert scipy_stats.spearmanr(exact.ravel(), shared.ravel())[0] > 0.95
