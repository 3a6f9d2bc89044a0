"""Mutants: their files, their scores as sums and masked together, and scans of proteins longer than the model."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from esm_models import protein, tiny_esm, torch

from turboquant.cli import main
from turboquant.esm import AMINO_ACIDS, ContextCache, joint_marginals, masked_marginals, wild_type_marginals
from turboquant.esm.mutants import read_mutants
from turboquant.esm.windows import sizes, windows
from turboquant.models.esm import ALPHABET, MASK, tokenise


@pytest.fixture(scope="module")
def model():
    """An ESM-2 model for up to 62 residues."""
    return tiny_esm(max_position_embeddings=66)


def log_p(model, sequence, masked):
    """float64 [residues, 33] by transformers, with some positions masked."""
    ids = torch.tensor([tokenise(sequence, model.config)])
    ids[0, [p + 1 for p in masked]] = MASK
    with torch.no_grad():
        return model(input_ids=ids).logits[0, 1:-1].double().log_softmax(-1).numpy()


TOKEN = {letter: ALPHABET.index(letter) for letter in AMINO_ACIDS}


def score(said, sequence, changes):
    """The sum of the scores of mutations, each (position, letter)."""
    return sum(said[p][TOKEN[letter]] - said[p][TOKEN[sequence[p]]] for p, letter in changes)


SETS = [(3,), (3, 17), (17, 3, 9), (0, 1, 2, 29), (3,)]


def test_joint_marginals_are_full_passes_with_several_masks(model):
    sequence = protein(30)
    found = joint_marginals(model, sequence, SETS, shared_context=False, batch_size=2)
    for at, scan in zip(SETS, found, strict=True):
        said = log_p(model, sequence, at)
        assert scan.positions == at and scan.sequence == sequence
        for row, p in enumerate(at):
            want = [score(said, sequence, [(p, letter)]) for letter in AMINO_ACIDS]
            np.testing.assert_allclose(scan.scores[row], want, atol=1e-4)
    alone = masked_marginals(model, sequence, [3], shared_context=False)
    np.testing.assert_allclose(found[0].scores, alone.scores, atol=1e-5)


def test_joint_marginals_of_a_context_are_its_decoding(model):
    sequence = protein(30)
    context = ContextCache(model)
    context.encode([sequence])
    found = joint_marginals(model, sequence, SETS, context=context, batch_size=3)
    for at, scan in zip(SETS, found, strict=True):
        said = context.decode([["<mask>"] * len(at)], [at], [0]).logits[0].double().log_softmax(-1).numpy()
        np.testing.assert_allclose(scan.log_probabilities, said[:, list(TOKEN.values())], atol=1e-4)
    np.testing.assert_allclose(found[0].scores, masked_marginals(model, sequence, [3]).scores, atol=1e-4)


def test_joint_marginals_refuse_bad_sets(model):
    context = ContextCache(model)
    context.encode(["MKTA"])
    for options, kind, message in (
        (dict(sets=3), TypeError, "`sets` must be a list of lists of positions, got 3"),
        (dict(sets=[[0], np.array(1)]), TypeError, r"`sets\[1\]` must be a list of integers, got array\(1\)"),
        (dict(sets=[[0], []]), ValueError, r"`sets\[1\]` must name at least one position"),
        (dict(sets=[[0, 1, 0]]), ValueError, r"`sets\[0\]` must name each position once, got \[0, 1, 0\]"),
        (dict(sets=[[0], [1, 4]]), IndexError, r"`sets\[1\]\[1\]` must be in 0..3, got 4"),
        (dict(sets=[[0.5]]), TypeError, r"`sets\[0\]\[0\]` must be an integer"),
        (dict(sets=[[0]], batch_size=0), ValueError, "`batch_size` must be in"),
        (dict(sets=[[0]], context=3), TypeError, "`context` must be a ContextCache"),
        (
            dict(sets=[[0]], context=context, shared_context=False),
            ValueError,
            "`context` must be None for an exact scan",
        ),
    ):
        with pytest.raises(kind, match=message):
            joint_marginals(model, "MKTA", **options)
    assert joint_marginals(model, "MKTA", []) == []


# ---- files ----


def test_read_mutants(tmp_path):
    file = tmp_path / "m.csv"
    file.write_text("\ufeffmutant,DMS_score\r\nM1A,0.5\r\n\r\nA4W:K2R,-1\r\n", encoding="utf-8")
    columns, mutants = read_mutants(str(file), "MKTA")
    assert columns == ["mutant", "DMS_score"]
    assert [(m.row, m.changes, m.positions) for m in mutants] == [
        (["M1A", "0.5"], ((0, "A"),), (0,)),
        (["A4W:K2R", "-1"], ((1, "R"), (3, "W")), (1, 3)),
    ]


BAD = {
    "": "must have one column `mutant`",
    "mutation\nM1A\n": "must have one column `mutant`",
    "mutant,mutant\nM1A,M1A\n": "must have one column `mutant`",
    "mutant,score\nM1A,1\n": "must have no column `score`, which is added",
    "mutant\n": "must have at least one mutant",
    "mutant\nM1A\nM1A,2\n": "row 3: must have 1 columns, got 2",
    "mutant\nM1A\nfoo\n": "row 3: a mutation must be like A12W",
    "mutant\nM1A:\n": "a mutation must be like A12W.*got ''",
    "mutant\nM1B\n": "a mutation must be like A12W, to one of",
    "mutant\nM0A\n": "'M0A' must be at 1..4",
    "mutant\nM5A\n": "'M5A' must be at 1..4",
    "mutant\nK1A\n": "'K1A' must replace 'M', which the protein has there",
    "mutant\nM1A:M1C\n": "must change each position once, got 'M1A:M1C'",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files_of_mutants(text, tmp_path):
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(ValueError, match=f"--mutants.*m.csv'?.*{BAD[text]}|--mutants.*{BAD[text]}.*m.csv"):
        read_mutants(str(tmp_path / "m.csv"), "MKTA")


# ---- the command ----


@pytest.fixture
def here(model, tmp_path, monkeypatch):
    """A folder with the model, a protein of 140 residues and mutants of it, some across windows."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    sequence = protein(140, 7)
    (tmp_path / "p.fasta").write_text(f">long\n{sequence}\n")
    rng = np.random.default_rng(0)
    changes = []
    for i in range(30):
        near = rng.integers(0, 100) + rng.choice(30, 1 + i % 3, replace=False)
        changes.append([(int(p), AMINO_ACIDS[rng.integers(20)]) for p in (near if i % 5 else rng.permutation(140)[:4])])
    text = "".join(":".join(f"{sequence[p]}{p + 1}{to}" for p, to in one) + f",{i}\n" for i, one in enumerate(changes))
    (tmp_path / "m.csv").write_text(f"mutant,DMS_score\n{text}")
    return sequence, changes


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


METHODS = ["masked-marginals", "wild-type-marginals", "shared-context"]


@pytest.mark.parametrize("method", METHODS)
def test_long_proteins_are_scanned_in_windows(here, model, method):
    sequence, _ = here
    assert main(["esm-scan", "p.fasta", "--model", "model", "--csv", "s.csv", "--method", method]) == 0
    rows = rows_of("s.csv")
    assert [int(row["position"]) for row in rows[::20]] == list(range(1, 141))
    got = np.array([float(row["score"]) for row in rows]).reshape(140, 20)
    for w in windows(140, *sizes(model.config)):
        letters, at = sequence[w.start : w.stop], [p - w.start for p in range(w.first, w.last)]
        if method == "wild-type-marginals":
            want = wild_type_marginals(model, letters, at)
        else:
            want = masked_marginals(model, letters, at, method == "shared-context")
        np.testing.assert_allclose(got[w.first : w.last], want.scores, atol=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_mutants_are_summed(here, model, method):
    _, changes = here
    main(["esm-scan", "p.fasta", "--model", "model", "--csv", "all.csv", "--method", method])
    by_change = {(int(r["position"]) - 1, r["mutation"]): float(r["score"]) for r in rows_of("all.csv")}
    command = ["esm-scan", "p.fasta", "--model", "model", "--mutants", "m.csv", "--csv", "s.csv", "--method", method]
    assert main(command) == 0
    rows = rows_of("s.csv")
    assert [row["DMS_score"] for row in rows] == [str(i) for i in range(30)]
    for row, change in zip(rows, changes, strict=True):
        assert float(row["score"]) == pytest.approx(sum(by_change[one] for one in change), abs=2e-3)


@pytest.mark.parametrize("method", ["masked-marginals", "shared-context"])
def test_mutants_masked_together(here, model, method):
    """Positions that the same window keeps are masked together, and windows are summed, computed by hand here."""
    sequence, changes = here
    command = ["esm-scan", "p.fasta", "--model", "model", "--mutants", "m.csv", "--joint", "--csv", "s.csv"]
    assert main([*command, "--method", method, "--batch", "4"]) == 0
    several = 0
    for row, change in zip(rows_of("s.csv"), changes, strict=True):
        want = 0.0
        for w in windows(140, *sizes(model.config)):
            mine = [(p - w.start, letter) for p, letter in sorted(change) if w.first <= p < w.last]
            several += len(mine) > 1
            if not mine:
                continue
            letters = sequence[w.start : w.stop]
            if method == "masked-marginals":
                want += score(log_p(model, letters, [p for p, _ in mine]), letters, mine)
            else:
                (scan,) = joint_marginals(model, letters, [[p for p, _ in mine]])
                want += sum(scan.scores[i, AMINO_ACIDS.index(letter)] for i, (_, letter) in enumerate(mine))
        assert float(row["score"]) == pytest.approx(want, abs=2e-3)
    assert several > 10


def test_heat_map_of_mutants(here, tmp_path):
    pytest.importorskip("matplotlib")
    command = ["esm-scan", "p.fasta", "--model", "model", "--mutants", "m.csv", "--csv", "s.csv", "--heatmap", "h.svg"]
    assert main([*command, "--method", "wild-type-marginals"]) == 0
    assert "<svg" in (tmp_path / "h.svg").read_text()


def test_command_errors(here, capsys, tmp_path):
    (tmp_path / "two.fasta").write_text(">a\nMK\n>b\nMK\n")
    (tmp_path / "bad.csv").write_text("mutant\nA1\n")
    for command, message in (
        (["p.fasta", "--joint"], "--joint must be given with --mutants only"),
        (["p.fasta", "--joint", "--mutants", "m.csv", "--method", "wild-type-marginals"], "with a --method that masks"),
        (["p.fasta", "--joint", "--mutants", "m.csv", "--heatmap", "x.svg"], "--joint must be given without --heatmap"),
        (
            ["two.fasta", "--mutants", "m.csv"],
            "--mutants needs a FASTA file with the one protein",
        ),
        (["p.fasta", "--mutants", "bad.csv"], "row 2: a mutation must be like A12W"),
        (["p.fasta", "--mutants", "none.csv"], "--mutants must be a CSV file, got 'none.csv'"),
        (["p.fasta", "--mutants", "m.csv", "--csv", "m.csv"], "--csv must be another file than --mutants"),
    ):
        with pytest.raises(SystemExit, match="^2$"):
            main(["esm-scan", "--csv", "s.csv", "--model", "model", *command])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "s.csv").exists()
