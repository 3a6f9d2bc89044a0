"""`esm.embed` gives what transformers gives for each protein alone, long ones in windows, and can be resumed."""

from __future__ import annotations

import csv
import json
import os
import re
from itertools import pairwise

import numpy as np
import pytest
from esm_models import protein, tiny_esm, torch
from hypothesis import given, settings
from hypothesis import strategies as st

import turboquant
from turboquant import Codes, Quantizer, esm
from turboquant.cli import main
from turboquant.esm import embedding
from turboquant.esm.windows import sizes, windows
from turboquant.models.esm import tokenise

LENGTHS = (5, 62, 30, 1, 17, 61, 30)
LONG = (200, 63, 140)


@pytest.fixture(scope="module")
def model():
    """An ESM-2 model of 3 layers, for up to 62 residues."""
    return tiny_esm(max_position_embeddings=66)


@pytest.fixture(scope="module")
def sequences():
    return [protein(n, i) for i, n in enumerate(LENGTHS)]


def alone(model, sequence):
    """Hidden states [layers + 1, residues, width] of one protein, by transformers."""
    base = getattr(model, "esm", model)
    with torch.no_grad():
        ids = torch.tensor([tokenise(sequence, model.config)])
        out = base(input_ids=ids, output_hidden_states=True)
    return torch.stack([*out.hidden_states[:-1], out.last_hidden_state])[:, 0, 1:-1].float().numpy()


# ---- windows ----


@given(length=st.integers(1, 4000), window=st.integers(2, 300), share=st.floats(0, 0.5))
def test_windows_keep_each_residue_once(length, window, share):
    overlap = int(window * share)
    found = windows(length, window, overlap)
    assert [w.first for w in found] == [0, *(w.last for w in found[:-1])] and found[-1].last == length
    assert found[0].start == 0 and found[-1].stop == length
    for w in found:
        assert w.stop - w.start == min(length, window) and w.start <= w.first < w.last <= w.stop
    for before, after in pairwise(found):
        assert before.stop - after.start >= overlap
        deeper = (before.stop - 1 - before.last) - (before.last - after.start)  # where `after` takes over
        assert abs(deeper) <= 1
    if len(found) > 1:  # fewer windows would not reach the end
        assert (len(found) - 1) * (window - overlap) + overlap < length


def test_sizes_of_windows(model):
    assert (
        sizes(model.config) == (62, 15) and sizes(model.config, 20) == (20, 5) and sizes(model.config, 20, 0) == (20, 0)
    )
    for window, overlap, message in (
        (63, None, "`window` must be in 2..62, which the model has positions for, got 63"),
        (1, None, "`window` must be in 2..62"),
        (20, 11, "`overlap` must be in 0..10, half of the window, got 11"),
        (20, -1, "`overlap` must be in 0..10"),
    ):
        with pytest.raises(ValueError, match=message):
            esm.embed(model, ["MK"], window=window, overlap=overlap)


# ---- numbers ----


@pytest.mark.parametrize("kind", ["EsmForMaskedLM", "EsmModel", "patched", "training"])
def test_each_protein_is_as_if_it_were_alone(kind, sequences):
    """All layers are right for every kind and state of the model, and the model is left as it was."""
    model = tiny_esm("EsmModel" if kind == "EsmModel" else "EsmForMaskedLM", max_position_embeddings=66)
    want = [alone(model, sequence) for sequence in sequences]
    if kind == "patched":
        turboquant.patch(model, "esm-default")
    before = alone(model, sequences[1])
    model.train(kind == "training")
    found = esm.embed(model, sequences, layers=(0, 2, -1, 1), residues="float16")
    assert found.layers == (0, 1, 2, 3) and found.names == tuple("0123456")
    for i, states in enumerate(want):
        for layer in range(4):
            np.testing.assert_allclose(found.means(layer)[i], states[layer].mean(0), atol=2e-5)
            np.testing.assert_allclose(found.residues(i, layer), states[layer], atol=1e-4, rtol=2**-11)
    np.testing.assert_array_equal(found.means(), found.means(3))
    assert model.training == (kind == "training")
    np.testing.assert_array_equal(alone(model.eval(), sequences[1]), before)


def test_half_precision(sequences):
    model = tiny_esm(max_position_embeddings=66).bfloat16()
    found = esm.embed(model, sequences)
    assert found.means().dtype == np.float32
    for i, sequence in enumerate(sequences):
        np.testing.assert_allclose(found.means()[i], alone(model, sequence)[-1].mean(0), atol=0.02)


def test_masked_residues_are_read_as_such(model):
    given_letters = ["M", "<mask>", "K", "A"]
    found = esm.embed(model, [given_letters, "MKKA"], residues="float16")
    np.testing.assert_allclose(found.residues(0), alone(model, given_letters)[-1], atol=1e-5, rtol=2**-11)


@pytest.mark.parametrize("window, overlap", [(None, None), (30, 0), (30, 15)])
def test_long_proteins_by_windows(model, window, overlap):
    """Each residue comes from the window in which it is farther from the ends. This is computed by hand here."""
    sequences = [protein(n, 9 + n) for n in LONG]
    found = esm.embed(model, sequences, layers=(1, 3), residues="float16", window=window, overlap=overlap)
    for i, sequence in enumerate(sequences):
        want = np.full((4, len(sequence), 32), np.nan, np.float32)
        depth = np.full(len(sequence), -1.0)
        for w in windows(len(sequence), *sizes(model.config, window, overlap)):
            states = alone(model, sequence[w.start : w.stop])
            for at in range(w.start, w.stop):
                left = np.inf if w.start == 0 else at - w.start
                right = np.inf if w.stop == len(sequence) else w.stop - 1 - at
                if min(left, right) > depth[at] or (min(left, right) == depth[at] and w.first <= at < w.last):
                    depth[at], want[:, at] = min(left, right), states[:, at - w.start]
        for layer in (1, 3):
            np.testing.assert_allclose(found.residues(i, layer), want[layer], atol=1e-5, rtol=2**-11)
            np.testing.assert_allclose(found.means(layer)[i], want[layer].mean(0), atol=2e-6)


def test_packed_residues(model, sequences, tmp_path):
    """Each protein has its own codes, which Quantizer reads and which decode close to the exact numbers."""
    everything = [*sequences, protein(140, 3)]
    exact = esm.embed(model, everything, residues="float16", layers=(2, 3))
    packed = esm.embed(model, everything, residues="4bit", layers=(2, 3), out=tmp_path / "packed")
    quantizer = Quantizer(32, 4)
    for i in range(len(everything)):
        for layer in (2, 3):
            codes, x = packed.codes(i, layer), exact.residues(i, layer)
            assert isinstance(codes, Codes) and len(codes) == len(everything[i])
            np.testing.assert_array_equal(packed.residues(i, layer), quantizer.dequantize(codes))
            np.testing.assert_allclose(
                quantizer.dot(x[:1].copy(), codes)[0], quantizer.dequantize(codes) @ x[0], rtol=1e-3, atol=1e-3 * 32
            )
            error = np.linalg.norm(packed.residues(i, layer) - x, axis=1) / np.linalg.norm(x, axis=1)
            assert error.mean() < 0.15 and error.max() < 0.25
    np.testing.assert_array_equal(packed.means(), exact.means())
    with pytest.raises(ValueError, match="`residues` were not kept as float16"):
        packed._array_of("residues", None)
    with pytest.raises(ValueError, match="`residues` were not kept as 4bit"):
        exact.codes(0)
    with pytest.raises(ValueError, match="were not kept"):
        esm.embed(model, ["MK"]).residues(0)


def test_memory_bounds_the_tokens_of_a_batch(model, monkeypatch):
    """Batches hold at most as many tokens as memory allows, of sequences of similar length, the longest first."""
    sizes_seen = []
    real = embedding.padded
    monkeypatch.setattr(embedding, "padded", lambda *a: (sizes_seen.append([len(t) for t in a[0]]), real(*a))[1])
    sequences = [protein(n, n) for n in [*range(3, 63), 400]]
    whole = esm.embed(model, sequences)
    assert len(sizes_seen) == 1
    sizes_seen.clear()
    monkeypatch.setattr(embedding, "_MEMORY", (0, 32 * (24 * 4 + 8) * 200))
    np.testing.assert_allclose(esm.embed(model, sequences).means(), whole.means(), atol=2e-6)
    assert len(sizes_seen) > 5 and all(len(batch) * max(batch) <= 200 for batch in sizes_seen)
    flat = [n for batch in sizes_seen for n in batch]
    assert flat == sorted(flat, reverse=True)
    assert sum(len(b) * max(b) for b in sizes_seen) < 1.1 * sum(flat)


# ---- files ----


@pytest.mark.parametrize("residues", ["none", "float16", "4bit"])
def test_files(model, sequences, residues, tmp_path):
    names = [f"p\u00e9{i}" for i in range(len(sequences))]
    made = esm.embed(model, sequences, names=names, layers=(1, -1), residues=residues)
    kept = esm.embed(model, sequences, names=names, layers=(1, -1), residues=residues, out=tmp_path / "e")
    assert os.listdir(tmp_path) == ["e"]
    for one in (kept, esm.Embeddings.load(tmp_path / "e")):
        assert one.names == made.names == tuple(names) and one.layers == made.layers and repr(one) == repr(made)
        assert np.array_equal(one.lengths, LENGTHS) and len(one) == 7
        for layer in (None, 1, 3):
            assert np.array_equal(one.means(layer), made.means(layer))
            for i in range(7 if residues != "none" else 0):
                assert np.array_equal(one.residues(i, layer), made.residues(i, layer))
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "e")
    assert np.array_equal(tensors["mean.3"], made.means()) and bytes(tensors["names"]).decode().split("\n") == names
    if residues == "float16":
        assert np.array_equal(tensors["residues.1"][5:67].astype(np.float32), made.residues(1, 1))


class Stop(Exception):
    pass


def stopping(monkeypatch, after):
    """Makes `embed` stop after `after` steps. Returns a list that gets the proteins of each step that runs."""
    done, real = [], embedding._write

    def write(held, job, step, *rest):
        if len(done) == after:
            raise Stop
        done.append(step)
        real(held, job, step, *rest)

    monkeypatch.setattr(embedding, "_write", write)
    return done


@pytest.mark.parametrize("residues", ["none", "4bit"])
def test_an_interrupted_run_goes_on(model, residues, tmp_path, monkeypatch):
    sequences = [protein(n, n) for n in [*range(3, 63), 400]]
    options = dict(residues=residues, layers=(1, 3))
    monkeypatch.setattr(embedding, "_MEMORY", (0, 32 * (24 * 4 + 16) * 200))
    esm.embed(model, sequences, out=tmp_path / "whole", **options)
    monkeypatch.setattr(embedding, "_SAVED", 0.0)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        first = stopping(patch, 4)
        esm.embed(model, sequences, out=tmp_path / "e", **options)
    assert sorted(os.listdir(tmp_path)) == ["e.part", "e.part.json", "whole"]
    assert json.loads((tmp_path / "e.part.json").read_text())["done"] == 4
    for other in (
        dict(sequences=[*sequences[:-1], protein(400, 1)]),
        dict(layers=(1, 2)),
        dict(names=[f"n{i}" for i in range(61)]),
        dict(window=40),
        dict(model=tiny_esm(max_position_embeddings=66, seed=1)),
    ):
        with pytest.raises(ValueError, match="must be of this run"):
            esm.embed(**{**dict(model=model, sequences=sequences, out=tmp_path / "e"), **options, **other})
    with monkeypatch.context() as patch:
        rest = stopping(patch, 1000)
        esm.embed(model, sequences, out=tmp_path / "e", **options)
    assert sorted(i for step in first + rest for i in step) == list(range(61)) and len(first) == 4
    assert (tmp_path / "e").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["e", "whole"]


def test_a_run_that_ended_before_its_first_note_begins_anew(model, sequences, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stopping(patch, 0)
        esm.embed(model, sequences, out=tmp_path / "e")
    assert sorted(os.listdir(tmp_path)) == ["e.part", "e.part.json"]
    with pytest.raises(ValueError, match="must be of this run"):
        esm.embed(model, sequences, layers=(1,), out=tmp_path / "e")
    assert np.array_equal(esm.embed(model, sequences, out=tmp_path / "e").means(), esm.embed(model, sequences).means())
    for text in ("{", "[" * 100_000):
        (tmp_path / "e.part.json").write_text(text)
        with pytest.raises(ValueError, match="must be of this run"):
            esm.embed(model, sequences, out=tmp_path / "e")


def test_another_file_is_not_overwritten(model, sequences, tmp_path):
    (tmp_path / "e.part").write_text("mine")
    with pytest.raises(ValueError, match="e.part' must be of this run .*, and .*e.part.json' must say so: remove them"):
        esm.embed(model, sequences, out=tmp_path / "e")
    assert os.listdir(tmp_path) == ["e.part"] and (tmp_path / "e.part").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="`out` must be a file in a folder that is there"):
        esm.embed(model, sequences, out=tmp_path / "none" / "e")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_files_are_refused_or_only_wrong(data, model, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "embeddings"
    if not file.exists():
        esm.embed(model, ["MKV", "AC"], residues="float16", out=file)
    text = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(text), 700) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    other = file.with_name("mutated")
    other.write_bytes(text)
    try:
        found = esm.Embeddings.load(other)
    except ValueError as error:
        assert "must be a file of embeddings" in str(error)
        return
    for i in range(len(found)):
        assert found.residues(i).shape == (found.lengths[i], 32)


def test_bad_arguments(model, tmp_path):
    for options, kind, message in (
        (dict(sequences=[]), ValueError, "`sequences` must be a list of at least one protein"),
        (dict(sequences="MKV"), ValueError, "`sequences` must be a list"),
        (dict(sequences=["MK", ""]), ValueError, r"`sequences\[1\]` must have at least one residue"),
        (dict(sequences=["MK", "M" * 70 + "J"]), ValueError, r"`sequences\[1\]\[70\]` must be a letter"),
        (dict(sequences=["MK", 3]), TypeError, r"`sequences\[1\]` must be a string or a list"),
        (dict(names=["a"]), ValueError, "`names` must have one name for each of 2 proteins, got 1"),
        (dict(names=["a", "b\nc"]), ValueError, r"`names\[1\]` must be a text of one line"),
        (dict(sequences=["MK", [["A"]]]), ValueError, r"`sequences\[1\]\[0\]` must be a letter .*, got \['A'\]"),
        (dict(names=3), TypeError, "`names` must be a list of texts, got 3"),
        (dict(layers=3), TypeError, "`layers` must be a list of integers, got 3"),
        (dict(layers=None), TypeError, "`layers` must be a list of integers, got None"),
        (dict(layers=[]), ValueError, "`layers` must name at least one layer"),
        (dict(layers=[3, -1]), ValueError, "`layers` must name .* each once"),
        (dict(layers=[4]), ValueError, r"`layers\[0\]` must be in -4..3, got 4"),
        (dict(layers=[0.5]), TypeError, r"`layers\[0\]` must be an integer"),
        (dict(residues="float32"), ValueError, "`residues` must be none, float16 or 4bit"),
        (dict(memory=5), ValueError, "embed: `memory` must be in 1048576"),
        (dict(out=3), TypeError, "`out` must be a str or a path"),
        (dict(out=""), FileNotFoundError, "`out` must be a file in a folder that is there, got ''"),
        (dict(out=str(tmp_path)), IsADirectoryError, f"`out` must be a file, got '{tmp_path}', a folder"),
        (dict(model=torch.nn.Linear(2, 2)), TypeError, "`model` must be a transformers model"),
    ):
        with pytest.raises(kind, match=message):
            esm.embed(**{**dict(model=model, sequences=["MK", "AC"]), **options})
    assert not [*tmp_path.parent.glob(f"{tmp_path.name}.part*")]  # a folder is refused before proteins are read
    with pytest.raises(FileNotFoundError, match="a file of embeddings"):
        esm.Embeddings.load(tmp_path / "none")
    found = esm.embed(model, ["MK", "AC"], residues="float16")
    with pytest.raises(ValueError, match=r"`layer` must be one of \[3\], got 1"):
        found.means(1)
    with pytest.raises(ValueError, match="`protein` must be in 0..1, got 2"):
        found.residues(2)


def test_numbers_that_float16_does_not_hold(sequences):
    model = tiny_esm(max_position_embeddings=66)
    with torch.no_grad():
        model.esm.encoder.emb_layer_norm_after.weight.mul_(1e6)
    with pytest.raises(ValueError, match="the residues of '1' must be finite in float16"):
        esm.embed(model, sequences, residues="float16")


# ---- the command ----


def test_command_and_nearest_proteins(model, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    proteins = {f"p{i}": protein(40 + i, i) for i in range(70)} | {"long": protein(300, 3)}
    text = "".join(f">{name} of them\n{letters}\n" for name, letters in proteins.items())
    (tmp_path / "p.fasta").write_text(text + ">odd\nMKTJ\n")
    near = {"a": proteins["p3"][:-1] + "W", "b": proteins["long"]}
    (tmp_path / "q.fasta").write_text("".join(f">{name}\n{letters}\n" for name, letters in near.items()))
    command = ["esm-embed", "p.fasta", "--model", "model", "--out", "p.safetensors", "--index", "p.index"]
    assert main([*command, "--layers", "2,3", "--residues", "4bit", "--memory", "1"]) == 0
    said = capsys.readouterr()
    (left_out,) = [one for one in caplog.messages if one.startswith("left out 1 of 72 proteins:\n")]
    assert "'J'" in left_out
    assert "<Embeddings: 71 proteins, layers [2, 3], means, packed residues>" in said.out
    found = esm.Embeddings.load("p.safetensors")
    want = esm.embed(model, list(proteins.values()))
    assert found.names == tuple(proteins)
    np.testing.assert_allclose(found.means(), want.means(), atol=2e-6)
    assert main(["esm-embed", "q.fasta", "--model", "model", "--out", "q.safetensors"]) == 0
    capsys.readouterr()
    refine = ["--refine", "p.safetensors"]
    assert main(["index", "search", "p.index", "q.safetensors", "-k", "2", *refine]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(r["query"], r["rank"]) for r in rows] == [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]
    assert rows[0]["id"] == "p3" and rows[2]["id"] == "long" and float(rows[2]["score"]) > 0.999
    index = turboquant.Index.load("p.index")
    assert (index.metric, index.bits, index.is_trained, len(index)) == ("cosine", 4, True, 71)
    assert main(["index", "build", "p.safetensors", "--metric", "cosine", "--bits", "4", "--train", "-o", "again"]) == 0
    assert (tmp_path / "again").read_bytes() == (tmp_path / "p.index").read_bytes()


def test_command_errors(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    (tmp_path / "p.fasta").write_text(">a\nMK\n>a\nMKV\n")
    good = ["esm-embed", "p.fasta", "--model", "model", "--out", "e"]
    for command, message in (
        ([*good, "--index", "x"], "--index: proteins must be named differently up to the first blank, got two 'a'"),
        ([*good, "--index", "e"], "--index must be another file than --out"),
        ([*good, "--out", "p.fasta"], "--out must be another file than FASTA"),
        ([*good, "--layers", "1,x"], "--layers must be integers between commas, got '1,x'"),
        ([*good, "--layers", "7"], "esm-embed: --layers must be in -4..3, got 7"),
        ([*good, "--window", "70"], "esm-embed: --window must be in 2..62"),
        ([*good, "--window=9", "--overlap=5"], "esm-embed: --overlap must be in 0..4"),
        ([*good, "--memory", "0"], "--memory must be in 1..1073741824, got 0"),
        ([*good, "--residues", "int8"], "--residues"),
        (["esm-embed", "none", "--model", "model", "--out", "e"], "the FASTA file must be a file of proteins"),
    ):
        with pytest.raises(SystemExit, match="^2$"):
            main(command)
        assert re.search(message, capsys.readouterr().err), command
        if "--layers" in command:  # the options of later commands are refused before weights are read
            (tmp_path / "model" / "model.safetensors").write_bytes(b"")
        assert sorted(os.listdir()) == ["model", "p.fasta"]
