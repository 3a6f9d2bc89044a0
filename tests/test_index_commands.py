"""`turboquant index` builds and finds what the library does, and names the files that it cannot read."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from slow_index import rows

import turboquant
from turboquant.cli import index_commands, main
from turboquant.index import training
from turboquant.index.documents import Document, Documents


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with vectors.npy [2000, 64] and queries.npy [7, 64]."""
    monkeypatch.chdir(tmp_path)
    np.save("vectors.npy", rows(2000))
    np.save("queries.npy", rows(7, seed=1))
    return tmp_path


def fails(capsys, *arguments):
    """Runs a command that must end with status 2, and returns what it says."""
    with pytest.raises(SystemExit, match="^2$"):
        main(["index", *arguments])
    return capsys.readouterr().err


def found(text, queries, k):
    """Returns the ids and scores that CSV text has."""
    ids, scores = np.full((queries, k), -1), np.full((queries, k), np.nan, np.float32)
    lines = list(csv.reader(text.splitlines()))
    assert lines[0] == ["query", "rank", "id", "score"]
    for query, rank, row, score in lines[1:]:
        ids[int(query), int(rank)], scores[int(query), int(rank)] = int(row), float(score)
    return ids, scores


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "int8", "fortran"])
def test_build_makes_the_file_that_the_library_makes(here, kind, monkeypatch, capsys, caplog):
    """The bytes are equal though vectors are read in parts that are no multiple of a segment, trained or not."""
    x = (rows(2000) * (20 if kind == "int8" else 1)).astype("float32" if kind == "fortran" else kind)
    np.save("vectors.npy", np.asfortranarray(x) if kind == "fortran" else x)
    monkeypatch.setattr(index_commands, "_ROWS", 700)
    for flag in ([], ["--train"], ["--refine", "int8"]):
        command = ["index", "build", "vectors.npy", "--bits", "2", "--metric", "l2", "--seed", "5", *flag, "-o", "x"]
        assert main(command) == 0
        index = turboquant.Index(64, 2, "l2", seed=5, refine="int8" if "int8" in flag else None)
        if flag == ["--train"]:
            index.train(x)
        index.add(x)
        index.save("y")
        assert (here / "x").read_bytes() == (here / "y").read_bytes()
    assert f"x: {index!r}, {os.path.getsize('x'):,} bytes" in capsys.readouterr().out
    assert "training on 2,000 of 2,000 vectors" in caplog.text


def test_defaults(here):
    assert main(["index", "build", "vectors.npy", "--out", "x"]) == 0
    index = turboquant.Index.load("x")
    assert (index.bits, index.metric, index.is_trained) == (3, "ip", False) and index.ids.tolist() == list(range(2000))


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_search_writes_what_the_library_finds(here, metric, monkeypatch, capsys):
    monkeypatch.setattr(index_commands, "_TOGETHER", 3)
    main(["index", "build", "vectors.npy", "--metric", metric, "--bits", "1", "--out", "x"])
    capsys.readouterr()
    x, queries = rows(2000), rows(7, seed=1)
    index = turboquant.Index.load("x")
    for flags, options in (
        ([], {}),
        (["--refine", "vectors.npy"], {"refine": x}),
        (["--refine", "vectors.npy", "--factor", "40", "--threads", "1"], {"refine": x, "factor": 40}),
    ):
        scores, ids = index.search(queries, 5, **options)
        assert main(["index", "search", "x", "queries.npy", "-k", "5", *flags]) == 0
        text = capsys.readouterr().out
        got, its = found(text, 7, 5)
        assert np.array_equal(got, ids)
        np.testing.assert_allclose(its, scores, rtol=1e-6)
        assert main(["index", "search", "x", "queries.npy", "-k", "5", *flags, "--csv", "found.csv"]) == 0
        assert (here / "found.csv").read_text().splitlines() == text.splitlines()
    assert sorted(os.listdir()) == ["found.csv", "queries.npy", "vectors.npy", "x"]


def test_fewer_vectors_than_k(here, capsys):
    np.save("few.npy", rows(3))
    main(["index", "build", "few.npy", "--out", "x"])
    capsys.readouterr()
    assert main(["index", "search", "x", "queries.npy"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 7 * 3


def test_info(here, capsys):
    for flags, wanted in (
        (["--metric", "cosine"], ["metric    cosine", "bits      3 a number", "training  none"]),
        (
            ["--bits", "2", "--train"],
            ["metric    ip", "bits      2 a number", "recall    of the 10 nearest of 200 rows"],
        ),
    ):
        main(["index", "build", "vectors.npy", *flags, "--out", "x"])
        capsys.readouterr()
        assert main(["index", "info", "x"]) == 0
        said = capsys.readouterr().out
        index = turboquant.Index.load("x")
        a_vector = (index.nbytes - index.fixed_nbytes) / 2000
        for line in (
            *wanted,
            "vectors   2,000 of 64 numbers",
            f"bytes     {index.nbytes:,}, of which {index.fixed_nbytes:,} whatever",
            f"{a_vector:,.1f} a vector",
            f"bound     {index.sigmas:g} standard deviations",
        ):
            assert line in said
    chosen = index.training
    assert f"training  {chosen['chosen']}" in said and chosen["chosen"] == "axes"
    assert f"{chosen['widths'].count(max(chosen['widths']))} of {max(chosen['widths'])}" in said
    for name, share in chosen["recall"].items():
        assert f"          {share:.4f}  {name}\n" in said


def test_an_index_that_refines(here, capsys):
    """A search of it takes --factor, or --refine with other vectors."""
    main(["index", "build", "vectors.npy", "--bits", "1", "--refine", "int8", "--out", "x"])
    index, x, queries = turboquant.Index.load("x"), np.load("vectors.npy"), np.load("queries.npy")
    capsys.readouterr()
    for more, options in (([], {}), (["--factor", "40"], {"factor": 40}), (["--refine", "vectors.npy"], {"refine": x})):
        main(["index", "search", "x", "queries.npy", "-k", "5", *more])
        assert (found(capsys.readouterr().out, 7, 5)[0] == index.search(queries, 5, **options)[1]).all()
    main(["index", "info", "x"])
    assert "refine    int8, of what a search finds\n" in capsys.readouterr().out


def test_info_says_that_there_is_no_bound(here, capsys):
    np.save("one.npy", np.eye(16, dtype=np.float32))
    main(["index", "build", "one.npy", "--out", "x"])
    assert main(["index", "info", "x"]) == 0
    assert turboquant.Index.load("x").sigmas == np.inf
    assert "bound     none: searches read all bits" in capsys.readouterr().out


def test_verify(here, capsys):
    main(["index", "build", "vectors.npy", "--out", "x"])
    main(["index", "build", "queries.npy", "--out", "y"])
    capsys.readouterr()
    assert main(["index", "verify", "x", "y"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"x: sound, 2,000 vectors, {os.path.getsize('x'):,} bytes",
                    f"y: sound, 7 vectors, {os.path.getsize('y'):,} bytes"]  # fmt: skip
    good = (here / "y").read_bytes()
    (here / "y").write_bytes(good[:-70] + bytes([good[-70] ^ 4]) + good[-69:])
    assert "index verify: 'y': its bytes must be those that were saved, got others in " in fails(
        capsys, "verify", "x", "y"
    )
    (here / "y").write_bytes(good[:-1])
    assert "`INDEX`" not in (said := fails(capsys, "verify", "y")) and "INDEX must be a file of an index" in said


def test_progress(here, monkeypatch, caplog):
    clock = iter(np.arange(0, 1000, 0.5).tolist())
    monkeypatch.setattr(index_commands, "_ROWS", 100)
    monkeypatch.setattr("turboquant.progress.time.monotonic", lambda: next(clock))
    main(["index", "build", "vectors.npy", "--out", "x"])
    assert caplog.messages[0].startswith("index build:  15%, 300 of 2,000 vectors, 0:02")
    assert caplog.messages[-1].startswith("index build: 2,000 vectors in")


def zipped(path):
    with open(path, "wb") as file:
        np.savez(file, a=rows(3))


def truncated(path):
    np.save(path, rows(9))
    os.truncate(path, 300)


NO_NPY = "it is not one that turboquant wrote"
BAD_FILES = {
    "missing": (lambda path: None, "which is no file"),
    "a folder": (os.mkdir, "a folder"),
    "empty": (lambda path: Path(path).touch(), NO_NPY),
    "text": (lambda path: Path(path).write_text("1,2,3"), NO_NPY),
    "several arrays": (zipped, NO_NPY),
    "truncated": (truncated, "mmap length"),
    "no header": (lambda path: Path(path).write_bytes(b"\x93NUMPY\x01"), "bad.npy"),
    "objects": (lambda path: np.save(path, np.array([{}], dtype=object)), "bad.npy"),
    "complex": (lambda path: np.save(path, rows(3) + 1j), "of complex64, [3, 64]"),
    "one dimension": (lambda path: np.save(path, rows(3)[0]), "of float32, [64]"),
    "no rows": (lambda path: np.save(path, rows(3)[:0]), "of float32, [0, 64]"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_of_vectors(here, kind, capsys):
    make, message = BAD_FILES[kind]
    make("bad.npy")
    main(["index", "build", "vectors.npy", "--out", "x"])
    before = (here / "x").read_bytes()
    assert "`path`" not in fails(capsys, "build", "bad.npy", "--out", "x")
    for name, command in (("VECTORS", ["build", "bad.npy", "--out", "x"]), ("QUERIES", ["search", "x", "bad.npy"]),
                          ("--refine", ["search", "x", "queries.npy", "--refine", "bad.npy"])):  # fmt: skip
        said = fails(capsys, *command)
        assert (
            f"{name} must be a .npy file of numbers, [n, dim], or one of esm-embed, got 'bad.npy'" in said
            and message in said
        )
    assert (here / "x").read_bytes() == before


def test_bad_numbers_are_named_by_their_row_of_the_file(here, monkeypatch, capsys):
    monkeypatch.setattr(index_commands, "_ROWS", 100)
    monkeypatch.setattr(training, "JUDGES", 700)  # every third row is in the sample
    x = rows(2000)
    x[1503, 7] = np.nan
    np.save("vectors.npy", x)
    for flags in ([], ["--train"]):
        said = fails(capsys, "build", "vectors.npy", "--out", "x", *flags)
        assert "index build: `vectors.npy[1503, 7]` must be finite in float32, got nan" in said
    x[1503] = 0
    np.save("vectors.npy", x)
    said = fails(capsys, "build", "vectors.npy", "--out", "x", "--metric", "cosine")
    assert "`vectors.npy[1503]` must not be zero with cosine" in said
    assert sorted(os.listdir()) == ["queries.npy", "vectors.npy"]


def test_bad_arguments(here, capsys):
    main(["index", "build", "vectors.npy", "--out", "x"])
    np.save("narrow.npy", rows(3, 32))
    np.save("one.npy", rows(1))
    np.save("wide.npy", np.zeros((2, 4097), np.float32))
    before = {name: (here / name).read_bytes() for name in os.listdir()}
    for command, message in (
        (["build", "vectors.npy"], "--out"),
        (["build", "vectors.npy", "--out", "vectors.npy"], "--out must be another file than VECTORS"),
        (["build", "vectors.npy", "--out", "/dev/stdout"], "--out must be a file that can be replaced"),
        (["build", "vectors.npy", "--out", "none/x"], "--out must be a file in a folder"),
        (
            ["build", "vectors.npy", "--out", "y", "--bits", "7"],
            "index build: --bits must be one of 1, 2, 3, 4, 5, 6, 8, got 7",
        ),
        (["build", "vectors.npy", "--out", "y", "--seed", "-1"], "--seed must be in"),
        (
            ["build", "vectors.npy", "--out", "y", "--lists", "30000"],
            "VECTORS must have at least 30000 vectors with --lists",
        ),
        (["build", "one.npy", "--out", "y", "--train"], "VECTORS must have at least 2 vectors with --train, got 1"),
        (["build", "one.npy", "--out", "y", "--lists", "1"], "at least 2 vectors with --lists 1, got 1"),
        (["build", "wide.npy", "--out", "y"], "VECTORS must have 1..4096 numbers a row, got 4097"),
        (["search", "none", "queries.npy"], "INDEX must be a file of an index, got 'none', which is not there"),
        (["search", "vectors.npy", "queries.npy"], "INDEX must be a file of an index, got 'vectors.npy'"),
        (["search", "x", "narrow.npy"], "QUERIES must have 64 numbers a row, as INDEX has, got 32"),
        (["search", "x", "queries.npy", "--refine", "narrow.npy"], "--refine must have 64 numbers a row"),
        (
            ["search", "x", "queries.npy", "--refine", "queries.npy"],
            "index search: --refine must have a row for every id",
        ),
        (["search", "x", "queries.npy", "-k", "0"], "-k must be in 1..1048576, got 0"),
        (["search", "x", "queries.npy", "--threads", "-1"], "--threads must be in"),
        (["search", "x", "queries.npy", "--factor", "3", "--csv", "new.csv"], "--factor must be given with --refine"),
        (["search", "x", "queries.npy", "--probe", "1"], "--probe must be left out: INDEX has no lists, got 1"),
        (["search", "x", "queries.npy", "--csv", "x"], "--csv must be another file than INDEX"),
        (["search", "x", "queries.npy", "--csv", "queries.npy"], "--csv must be another file than QUERIES"),
        (["info", "none"], "INDEX must be a file of an index"),
        (["verify"], "INDEX"),
        ([], "required: {build,search,info,verify}"),
    ):
        assert message in fails(capsys, *command)
    assert before == {name: (here / name).read_bytes() for name in os.listdir()}


def test_a_reader_that_leaves_early_and_no_torch(here):
    """A search whose reader closes the pipe ends with status 141, in a process that cannot import torch or tqdm."""
    main(["index", "build", "vectors.npy", "--out", "x"])
    code = (
        "import sys; sys.modules.update(torch=None, tqdm=None, transformers=None); import turboquant.cli as c; "
        "sys.exit(c.main(['index', 'search', 'x', 'vectors.npy', '-k', '100']))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert run.stdout.readline().strip() == b"query,rank,id,score"
    run.stdout.close()
    assert run.wait() == 141


def test_ids_of_documents_are_printed(here, capsys):
    """A search of a file of an adapter prints the ids of its documents. A damaged table is an error."""
    documents = Documents(turboquant.Index(64, 4))
    documents.add([Document(f"d{i}", None, {}) for i in range(2000)], list(rows(2000)))
    documents.save("x")
    want = documents.index.search(rows(7, seed=1), 3)[1]
    assert main(["index", "search", "x", "queries.npy", "-k", "3"]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [line["id"] for line in lines] == [f"d{i}" for i in want.ravel()]
    for damaged in (b"[[1]]", b'[["a", "", {}, null, 0], ["b", "", {}, null, 0]]'):
        documents.index._save("x", {"documents": [np.frombuffer(damaged, np.uint8)]})
        said = fails(capsys, "search", "x", "queries.npy")
        assert "INDEX must be a file of an index, got one whose documents are damaged" in said
