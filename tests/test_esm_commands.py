"""Proteins on the command line: files, evaluation against its definitions, calibration, scans, bad inputs."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import lzma
import math
import os
import subprocess
import sys
import threading
import warnings
from functools import partial

import numpy as np
import pytest
from conftest import ROOT, shared_file
from esm_models import protein, tiny_esm, torch, transformers
from profiles import calibrate, profile_of
from specs import WAVE, bare

import turboquant
from turboquant import esm
from turboquant.cli import esm_commands as commands
from turboquant.cli import main
from turboquant.esm import masked_marginals, protein_batches, read_fasta, wild_type_marginals
from turboquant.models.esm import MASK, padded, tokenise
from turboquant.models.fasta import read_entries


@pytest.fixture(scope="module")
def model():
    return tiny_esm(head_dim=32)


@pytest.fixture(scope="module")
def sequences():
    return [protein(n, i) for i, n in enumerate((60, 21, 130, 45, 80))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of 66 positions, for up to 62 residues, two files of proteins, the calibration of another
    model ("other") and the configuration of a Llama ("llama")."""
    where = tmp_path_factory.mktemp("esm")
    tiny_esm(max_position_embeddings=66).save_pretrained(where / "model")
    other = tiny_esm(head_dim=32)
    batches = protein_batches(other, [protein(60, i) for i in range(4)])
    profile_of(calibrate(other, batches, sensitivity_batches=1)).save(where / "other")
    transformers.LlamaConfig().save_pretrained(where / "llama")
    for name, lengths in (("train", [30] * 8 + [63]), ("test", (12, 20))):
        lines = [f">{name}{i} of {n}\n{protein(n, i)}\n" for i, n in enumerate(lengths)]
        (where / f"{name}.fasta").write_text("".join(lines))
    return where


def test_fasta(tmp_path):
    file = tmp_path / "a.fasta"
    file.write_text("\n>one of them\nMKV\nacd ef\n\n>\nWW*\n")
    assert read_fasta(file) == [("one", "MKVACDEF"), ("protein-2", "WW")]
    for text, message in (("", "at least one protein"), ("MKV\n", "a.fasta:1: must be a FASTA header"),
                          (">a\nM\n>b\n>c\nM\n", "a.fasta:3: 'b' must have a sequence")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_fasta(file)


def test_lines_of_fasta_end_at_line_feed_and_carriage_return(tmp_path):
    file = tmp_path / "a.fasta"
    file.write_bytes(b"\xef\xbb\xbf>a\r\nMK\r\n\r\n>b\rAC\rDE\n>c\tof\n WW\t*")
    assert read_fasta(file) == [("a", "MK"), ("b", "ACDE"), ("c", "WW")]
    for end in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029":
        file.write_text(f">p1 foo{end}GENE\nMKTAY\n>p2{end}GENE\nMK\n", encoding="utf-8")
        assert read_fasta(file) == [("p1", "MKTAY"), ("p2", "MK")]


@pytest.mark.parametrize("letter", [*"\u00df\ufb01\u0131\u017f\xe9\xa0\ufeff\x0b\x0c\x1c\x85\u2028\x00\x7f"])
def test_letters_of_fasta_are_ascii(letter, tmp_path):
    file = tmp_path / "a.fasta"
    for line in (f"MKT{letter}AY", f"MKT{letter}", letter):
        file.write_text(f">p1\nMK\n>p2 of two\nmkv\n{line}\n", encoding="utf-8")
        with pytest.raises(ValueError) as wrong:
            read_fasta(file)
        assert str(wrong.value) == f"{file}:5: the sequence of 'p2' must be in ASCII letters, got {letter!r}"


def test_proteins_of_a_pipe_are_read_once(model, tmp_path):
    """A pipe can be read only once, so what was read is passed on."""
    where, pipe = tmp_path / "s.csv", tmp_path / "pipe"
    os.mkfifo(pipe)
    text = f">a\n{protein(12)}\n>b\n{protein(40)}\n"
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    read = read_entries(pipe)
    writer.join()
    pipe.unlink()
    chosen = argparse.Namespace(fasta=str(pipe), csv=str(where), heatmap=None, profile=None, batch=8, mutants=None,
                                joint=False, method="shared-context", spec="esm-default")  # fmt: skip
    assert commands.scan(model, chosen, None, read) == 0
    assert len(where.read_text().splitlines()) == 1 + 52 * 20
    found = commands.evaluated(model, chosen.fasta, {"a": bare(3, 3)}, None, (None, 2), read)
    assert found["a"].residues == 52
    made = commands.calibrated(model, chosen.fasta, (None, 10**6), (3,), 0, str(tmp_path / "part"), read)
    assert made.calibration.tokens == 42 and made.calibration.source == "pipe, 2 proteins"


def test_evaluation_that_masks_nothing_runs_nothing(model, monkeypatch):
    monkeypatch.setattr(esm.quality, "_outputs", lambda *given: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="`mask_share` must mask at least one residue, got none"):
        esm.evaluate(model, ["M"], {"a": bare(3, 3)})


def test_evaluation_leaves_every_mode_as_it_was(model, sequences):
    part = model.base_model.encoder.layer[0].train()
    esm.evaluate(model, sequences[:1], {"a": bare(3, 3)})
    assert part.training and not model.training
    part.eval()


@pytest.mark.parametrize("fields, error, message", [
    (dict(sequences=None), TypeError, "`sequences` must be a list of at least one protein, got None"),
    (dict(sequences={"a": "MKV"}), TypeError, "`sequences` must be a list of at least one protein, got {'a': 'MKV'}"),
    (dict(sequences="MKV"), ValueError, "`sequences` must be a list of at least one protein, got 'MKV'"),
    (dict(sequences=[]), ValueError, "`sequences` must be a list of at least one protein, got \\[\\]"),
    (dict(mask_share="x"), TypeError, "`mask_share` must be a number, got 'x'"),
    (dict(mask_share=float("nan")), ValueError, "`mask_share` must be .* below 1, got nan"),
    (dict(seed=1.5), TypeError, "`seed` must be an integer, got 1.5"),
    (dict(seed=-1), ValueError, f"`seed` must be in 0..{2**63 - 1}, got -1"),
    (dict(batch_size=0), ValueError, "`batch_size` must be in 1..65536, got 0"),
])  # fmt: skip
def test_wrong_choices_of_proteins(model, fields, error, message):
    given = dict(sequences=["MKVMKVMKV"], mask_share=0.5) | fields
    with pytest.raises(error, match=message):
        esm.protein_batches(model, **given)
    with pytest.raises(error, match=message):
        esm.evaluate(model, **given, specs={"a": bare(3, 3)})


def test_a_calibration_that_no_spec_uses_is_checked(model):
    with pytest.raises(TypeError, match="`profile` must be a Profile or the path of a file, got 3"):
        esm.evaluate(model, ["MKVMKVMKV"], {"a": bare(3, 3)}, mask_share=0.5, profile=profile_of(3))


def test_a_heat_map_takes_a_scan_and_a_path(tmp_path):
    with pytest.raises(TypeError, match="`scan` must be a Scan, as masked_marginals returns it, got list"):
        esm.heat_map([], tmp_path / "h.svg")
    scan = esm.Scan("M", (0,), np.zeros((1, 20), np.float32), np.zeros(1, np.float32))
    with pytest.raises(TypeError, match="`path` must be a str or a path, got 3"):
        esm.heat_map(scan, 3)
    with pytest.raises(ValueError, match="`path` must end in .png, .svg or .pdf, got 'h.txt'"):
        esm.heat_map(scan, "h.txt")


def test_evaluation_is_what_it_says(model, sequences):
    spec = bare(2, 3, sinks=2)
    found = esm.evaluate(model, sequences, {"a": spec, "b": "default"}, batch_size=2, seed=3)
    again = esm.evaluate(model, sequences, {"a": spec}, batch_size=2, seed=3)["a"]
    a = found["a"]
    assert a == again and not hasattr(model.base_model, "_turboquant")
    cosines, kl, masked, losses = {}, 0.0, 0, [0.0, 0.0]
    masks = esm.quality._masked_batches(model, sequences, 0.15, 3, 2)
    with torch.no_grad():
        for batch in masks:
            for row, i in enumerate(batch.proteins):
                n = len(sequences[i])
                plain = torch.tensor([tokenise(sequences[i], model.config)])
                hidden = batch.masked[row, : n + 2]
                assert torch.equal(batch.masked_ids[row, : n + 2], plain[0].masked_fill(hidden, MASK))
                want = model.esm(plain).last_hidden_state[0], model(batch.masked_ids[row : row + 1, : n + 2]).logits[0]
                turboquant.patch(model, spec)
                got = model.esm(plain).last_hidden_state[0], model(batch.masked_ids[row : row + 1, : n + 2]).logits[0]
                turboquant.unpatch(model)
                for r, cosine in enumerate(torch.cosine_similarity(want[0], got[0], dim=-1)[1:-1].tolist()):
                    cosines[i, r] = cosine
                p, q = (x[1].double().log_softmax(-1)[hidden] for x in (want, got))
                kl += float((p.exp() * (p - q)).sum())
                for which, x in enumerate((p, q)):
                    losses[which] -= float(x.gather(1, plain[0, hidden][:, None]).sum())
                masked += int(hidden.sum())
    assert (a.proteins, a.residues, a.masked) == (5, 336, masked) and masked > 20
    assert a.final_cosine_mean == pytest.approx(sum(cosines.values()) / 336, abs=2e-3)
    assert a.final_cosine_min == pytest.approx(min(cosines.values()), abs=0.05)
    assert a.masked_kl_divergence == pytest.approx(kl / masked, rel=0.05)
    assert a.reference_perplexity == pytest.approx(math.exp(losses[0] / masked), rel=1e-4)
    assert a.masked_perplexity == pytest.approx(math.exp(losses[1] / masked), rel=0.02)
    cache = esm.ContextCache(model, spec)
    cache.encode(sequences)
    assert a.bytes_per_token == cache.bytes_per_token and a.effective_bits == pytest.approx(cache.effective_bits)
    assert a.packed_bits == pytest.approx(spec.effective_bits(32))
    assert found["b"].final_cosine_mean > a.final_cosine_mean


def test_calibration_is_for_every_head_of_an_encoder(model, sequences):
    before = model.config._attn_implementation
    found = calibrate(model, protein_batches(model, sequences), sensitivity_batches=1)
    assert model.config._attn_implementation == before and found.sensitivity.min() > 0
    inner = tiny_esm("EsmModel", head_dim=32)
    inner.load_state_dict(model.esm.state_dict(), strict=False)
    turboquant.patch(inner, bare(budget=3), profile=profile_of(found))
    turboquant.unpatch(inner)
    for other in (tiny_esm(head_dim=32, seed=1), tiny_esm(head_dim=64)):
        with pytest.raises(ValueError, match="`profile` must be of this model"):
            turboquant.patch(other, bare(budget=3), profile=profile_of(found))
    specs = {"p": bare(3, 3, tries=0), "c": bare(budget=3, tries=0)}
    results = esm.evaluate(model, sequences, specs, profile=profile_of(found))
    assert results["c"].masked_kl_divergence < results["p"].masked_kl_divergence


def test_groups_of_equal_bits_are_mixed_as_one():
    """Neighbouring groups of equal bits share a Hadamard rotation and a step. All rotations are orthogonal."""
    from turboquant.kvcache.transforms import layer_transforms

    big = tiny_esm(head_dim=64)
    found = calibrate(big, protein_batches(big, [protein(100, i) for i in range(4)]), sensitivity_batches=1)
    for bits, merged in (((4, 4), True), ((4, 3), False)):
        spec = bare(bits, 3, rotation="calibrated", centre="calibrated")
        made = layer_transforms(spec, 1, 64, torch.device("cpu"), found)
        steps, values = (made[f"{side}_numbers"].numpy()[:, 64:66] for side in ("key", "value"))  # behind the centre
        rotation = made["rotation"][:, :64].numpy()
        assert (steps[:, 0] == steps[:, 1]).all() == merged
        mixed = np.einsum("hij,hkj->hik", rotation, found.axes[1, 0])  # which axes each row combines
        assert (np.abs(mixed[:, :32, 32:]).max() > 0.1) == merged
        np.testing.assert_allclose(np.einsum("hij,hkj->hik", rotation, rotation), np.eye(64)[None].repeat(2, 0),
                                   atol=1e-5)  # fmt: skip
        assert (values[:, 0] == values[:, 1]).all()
        np.testing.assert_allclose(np.square(steps).sum(1), np.square(found.steps(1)[0]).sum(1), rtol=1e-5)


def test_keys_of_esm_get_a_bit_in_every_group():
    from turboquant.measured import allocate

    energy = np.array([[[8.0, 1e-9], [4.0, 1e-9]], [[2.0, 1e-9], [1.0, 1e-9]]])
    plain, whole = allocate(energy, 12), allocate(energy, 12, whole_keys=True)
    assert plain.sum() == whole.sum() == 12 and (plain[..., 1] == 0).all()
    assert (whole[:, 0, 1] == 1).all() and (whole[:, 1, 1] == 0).all()
    assert (allocate(energy, 4, whole_keys=True) == allocate(energy, 4)).all()  # too few bits for that


def test_command_lines(folder, monkeypatch, tmp_path, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    model, train, test = (str(folder / name) for name in ("model", "train.fasta", "test.fasta"))
    assert main(["calibrate", model, "--fasta", train, "--out", "c.safetensors", "--tokens", "200"]) == 0
    shown = capsys.readouterr()
    assert "1 of 9 proteins are left out, the first: `" in caplog.text
    assert "160 tokens, 3 layers" in shown.out and "| bits | none |" in shown.out
    options = ["--profile", "c.safetensors", "--proteins", "2", "--json", "q.json"]
    assert main(["eval", model, "--fasta", test, "--spec", "default,calibrated-3", *options]) == 0
    assert "| calibrated-3 |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    names = "final_cosine_mean final_cosine_min masked_kl_divergence masked_perplexity effective_bits bytes_per_token"
    assert [row["params"]["spec"] for row in rows] == ["default", "calibrated-3"]
    assert all(set(names.split()) <= set(row["metrics"]) and row["bench"] == "esm-quality" for row in rows)
    assert rows[1]["params"]["calibrated_on"] == "train.fasta, 7 proteins"


def test_scan_command(folder, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    model, test = str(folder / "model"), str(folder / "test.fasta")
    tiny = tiny_esm(max_position_embeddings=66)
    scans = {
        "shared-context": masked_marginals,
        "masked-marginals": partial(masked_marginals, shared_context=False),
        "wild-type-marginals": wild_type_marginals,
    }
    for method, by_hand in scans.items():
        extra = [] if method == "shared-context" else ["--method", method]
        assert main(["esm-scan", test, "--model", model, "--csv", "s.csv", "--heatmap", "h.svg", *extra]) == 0
        with open("s.csv") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == (12 + 20) * 20 and "<svg" in (tmp_path / "h-2.svg").read_text()
        want = by_hand(tiny, protein(12, 0)).scores
        got = torch.tensor([float(row["score"]) for row in rows if row["protein"] == "test0"]).view(12, 20)
        assert torch.allclose(got, torch.from_numpy(want), atol=1e-3)
        assert [rows[20][n] for n in ("position", "wild_type", "mutation")] == ["2", protein(12, 0)[1], "A"]


def test_a_scan_goes_on_past_what_the_model_cannot_read(folder, tmp_path, caplog, monkeypatch):
    """Proteins with letters of no amino acid, with a stop codon inside or without a sequence are left out and listed at
    the end. The others are scanned, a long one in windows. `eval` leaves out the long one too."""
    monkeypatch.chdir(tmp_path)
    odd = {
        "long": "M" * 63,
        "ambiguous": "MKTJAY",
        "stop": "MKT*AYI",
        "nothing": "*",
        "foreign": "MK\xe9",
        "dot": "M.K",
    }
    text = "".join(f">{name}\n{letters}\n" for name, letters in {"good": "MKTAYIAKQR", **odd, "last": "GGSH"}.items())
    (tmp_path / "p.fa").write_text(text, encoding="utf-8")
    model = str(folder / "model")
    assert main(["esm-scan", "p.fa", "--model", model, "--csv", "s.csv"]) == 0
    with open("s.csv") as file:
        assert [row["protein"] for row in csv.DictReader(file)] == (
            ["good"] * 200 + ["long"] * 63 * 20 + ["dot"] * 60 + ["last"] * 80
        )
    assert "1 of 4, good: 10 residues" in caplog.messages
    head, *said = caplog.messages[-1].splitlines()
    assert head == "left out 4 of 8 proteins:" and len(said) == 4
    for name, why in (("nothing", "must have a sequence"), ("foreign", "must be in ASCII"),
                      ("ambiguous", "got 'J'"), ("stop", "got '*'")):  # fmt: skip
        assert any(name in line and why in line for line in said), name
    assert main(["eval", model, "--fasta", "p.fa", "--spec", "default", "--proteins", "3"]) == 0
    assert "5 of 8 proteins are left out" in caplog.text


@pytest.mark.parametrize("stdout", ["-", "/dev/stdout"])
def test_scores_on_standard_output(stdout, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["esm-scan", str(folder / "test.fasta"), "--model", str(folder / "model"), "--csv"]
    assert main([*command, "s.csv"]) == 0 and capsys.readouterr().out == ""
    written = (tmp_path / "s.csv").read_text()
    assert main([*command, stdout]) == 0
    assert capsys.readouterr().out.splitlines() == written.splitlines() and os.listdir() == ["s.csv"]


def test_names_beyond_ascii_on_standard_output(folder, tmp_path):
    """Names are written in UTF-8, as in a file, even if the locale has only ASCII."""
    (tmp_path / "p.fasta").write_text(">prot\u00e9ine\nMKTAY\n", encoding="utf-8")
    command = ["esm-scan", str(tmp_path / "p.fasta"), "--model", str(folder / "model"), "--csv", "-"]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-m", "turboquant", *command], cwd=ROOT, env=os.environ | ascii_alone,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0 and "prot\u00e9ine,1,M,".encode() in done.stdout


def test_fasta_compressed_by_xz(tmp_path):
    file = tmp_path / "a.fa.xz"
    text = b">a\nMKV\n>b\nACDEF\n"
    file.write_bytes(lzma.compress(text[:8]) + lzma.compress(text[8:]))
    assert read_fasta(file) == [("a", "MKV"), ("b", "ACDEF")]
    whole = lzma.compress(text)
    for damaged in (whole[:-5], whole[:30] + bytes([whole[30] ^ 255]) + whole[31:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.fa\.xz: must be a whole xz file"):
            read_fasta(file)


def test_fasta_compressed_by_gzip(tmp_path):
    text = b"\xef\xbb\xbf>a\r\nMK\rAC\n>b\nWW*\n"
    file = tmp_path / "a.fa"  # the content decides, not the name
    file.write_bytes(gzip.compress(text[:12]) + gzip.compress(text[12:]))  # several members, as bgzip writes them
    assert read_fasta(file) == [("a", "MKAC"), ("b", "WW")]
    whole = gzip.compress(text)
    for damaged in (whole[:-5], whole[:12], whole[:-8] + bytes(8), whole[:10] + b"\xff" * 9 + whole[19:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.fa: must be a whole gzip file"):
            read_fasta(file)


def test_sequences_that_are_not_of_proteins_are_said(folder, tmp_path, caplog):
    file = tmp_path / "a.fa"
    for sequence in ("acgtacgtnnn", "ACGUACGUACGURACGUACGU"):
        file.write_text(f">p\nMKTAYIAKQR\n>d\n{sequence}\n")
        with pytest.warns(UserWarning, match="a.fa: 1 of 2 sequences look like DNA or RNA, the first 'd'"):
            assert len(read_fasta(file)) == 2
    file.write_text(">P1;CRAB\nalpha crystallin\nMKTAYI*\n")
    with pytest.warns(UserWarning, match="1 of 1 headers are those of a PIR file, the first 'P1;CRAB'"):
        read_fasta(file)
    assert main(["esm-scan", str(file), "--model", str(folder / "model"), "--csv", str(tmp_path / "s.csv")]) == 0
    assert "a.fa: 1 of 1 headers are those of a PIR file" in caplog.text
    file.write_text(">a\nGAGAGSGAGAGSGAGAGS\n>b\nACGT\n>P1\nMKTAYIAKQR\n")  # silk, a short peptide, not PIR
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_fasta(file)) == 3


def test_a_missing_matplotlib_has_one_command_that_installs_it(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["esm-scan", str(folder / "test.fasta"), "--model", str(folder / "model"), "--csv", str(tmp_path / "s")]
    with pytest.raises(SystemExit):
        main([*command, "--heatmap", str(tmp_path / "h.svg")])
    said = capsys.readouterr().err
    assert said.count("pip install") == 1 and "pip install 'turboquant-attention[plot]'" in said


def test_a_scan_that_fails_leaves_the_file_of_the_last(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.csv").write_text("old")
    real = commands.masked_marginals

    def full_at_the_second(model, sequence, *given, **options):
        if len(sequence) == 20:
            raise OSError("no space left")
        return real(model, sequence, *given, **options)

    monkeypatch.setattr(commands, "masked_marginals", full_at_the_second)
    with pytest.raises(SystemExit):
        main(["esm-scan", str(folder / "test.fasta"), "--model", str(folder / "model"), "--csv", "s.csv"])
    assert (tmp_path / "s.csv").read_text() == "old"
    assert len((tmp_path / "s.csv.part").read_text().splitlines()) == 1 + 12 * 20


BAD = {
    "letters": (["esm-scan", "WRONG", "--model", "MODEL", "--csv", "s.csv"], "must be a letter of the ESM-2 alphabet"),
    "a name twice": (["esm-scan", "TWICE", "--model", "MODEL", "--csv", "s.csv"],
                     "the FASTA file: proteins must be named differently up to the first blank, got two 'a'"),
    "all too long": (["eval", "MODEL", "--fasta", "LONG", "--spec", "default"], "at most 62 residues"),
    "no file": (["esm-scan", "none.fasta", "--model", "MODEL", "--csv", "s.csv"], "none.fasta"),
    "no model": (["esm-scan", "TEST", "--model", "./none", "--csv", "s.csv"], "MODEL must be a folder"),
    "csv in no folder": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "no/s.csv"], "--csv"),
    "a picture": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "s.csv", "--heatmap", "x.txt"], "--heatmap"),
    "no calibration": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "s.csv", "--spec", "calibrated-3"],
                       "--profile"),
    "no calibration file": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "s.csv", "--spec", "calibrated-3",
                             "--profile", "none"], "--profile must be a profile, got 'none'"),
    "a spec of no context": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "s.csv", "--method", "masked-marginals",
                              "--spec", "3"], "--spec must be given with --method shared-context only, got 3"),
    "too many": (["eval", "MODEL", "--fasta", "TEST", "--spec", "default", "--proteins", "3"],
                 "--proteins must be in 1..2"),
    "no tokens": (["calibrate", "MODEL", "--fasta", "TEST", "--out", "c", "--tokens", "0"],
                  "--tokens must be in 1..2147483647"),
    "letters of eval": (["eval", "MODEL", "--fasta", "WRONG", "--spec", "default"],
                        "wrong.fasta: b[1]` must be a letter"),
    "out is standard output": (["calibrate", "MODEL", "--fasta", "TEST", "--out", "-"], "--out must be a file"),
    "csv in a link to an open file": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "/dev/stderr"],
                                      "--csv must be a file"),
    "no proteins file": (["eval", "MODEL", "--fasta", "none", "--spec", "default"],
                         "the FASTA file must be a file of proteins, got 'none', which is not there"),
    "a batch": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "s.csv", "--batch", "0"],
                "--batch must be in 1..65536"),
    "a device": (["esm-scan", "TEST", "--model", "MODEL", "--csv", "s.csv", "--device", "gpu"],
                 "--device must be one"),
    "a decoder": (["esm-scan", "TEST", "--model", "LLAMA", "--csv", "s.csv"], "MODEL must be an ESM-2 model"),
    "text for proteins": (["eval", "MODEL", "--text", "TEST", "--spec", "default"], "which is of type 'esm'"),
    "a calibration of another shape": (
        ["eval", "MODEL", "--fasta", "TEST", "--spec", "calibrated-3", "--profile", "OTHER"],
        "must be of this model"),
    "a window": (["eval", "MODEL", "--fasta", "TEST", "--spec", "default", "--set", "window=8"], "--set window"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_bad_command_lines_write_nothing(arguments, message, folder, capsys, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (tmp_path / "wrong.fasta").write_text(">b\nMJ\n")
    (tmp_path / "long.fasta").write_text(f">a\n{protein(63)}\n")
    (tmp_path / "twice.fasta").write_text(">a wild type\nMKV\n>a variant\nMKI\n")
    named = {"MODEL": folder / "model", "TRAIN": folder / "train.fasta", "TEST": folder / "test.fasta",
             "WRONG": tmp_path / "wrong.fasta", "LONG": tmp_path / "long.fasta", "TWICE": tmp_path / "twice.fasta",
             "LLAMA": folder / "llama", "OTHER": folder / "other"}  # fmt: skip
    with pytest.raises(SystemExit) as left:
        main([str(named.get(a, a)) for a in arguments])
    assert left.value.code == 2 and message in capsys.readouterr().err and not list(work.iterdir())


def test_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import turboquant\n"
        "try: turboquant.esm.ContextCache\n"
        "except ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    wants = "turboquant's models need transformers: pip install 'turboquant-attention[hf]'"
    assert done.stdout.startswith(wants), done.stderr


def test_padded():
    ids, real = padded([[0, 5, 2], [0, 5, 6, 7, 2]], "cpu")
    assert ids.tolist() == [[0, 5, 2, 1, 1], [0, 5, 6, 7, 2]] and real.sum(1).tolist() == [3, 5]


@pytest.mark.slow
def test_quality_of_the_reference_model():
    """Near the figures of docs/esm-results.md, on fewer proteins."""
    import transformers

    folder = shared_file("models/esm-reference/config.json").parent
    model = transformers.EsmForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    held_out = [p.sequence for p in read_fasta(shared_file("data/proteins_val.fasta")) if len(p.sequence) < 300][:8]
    found = esm.evaluate(model, held_out, {"4": bare(4, 4, **WAVE), "2": bare(2, 2)})
    assert found["4"].final_cosine_mean > 0.998 and found["4"].masked_kl_divergence < 4e-4
    assert found["2"].final_cosine_mean < 0.995
