"""The demo runs, and the numbers in its table agree with each other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import forks
import pytest

pytest.importorskip("turboquant._core")
import models  # noqa: F401  skips without torch and transformers

from turboquant.cli import main


@pytest.mark.usefixtures("kept_profiles")
def test_demo(capsys):
    assert main(["demo", "--prompt-tokens", "300", "--tokens", "5"]) == 0
    text, noise = capsys.readouterr()
    assert not noise  # progress lines go to the handlers of the root logger, which pytest adds
    assert text.startswith("A Christmas Carol, by Charles Dickens (1843)")
    rows = dict(re.findall(r"^(full precision|\d bits(?:, all packed)?) {2,}(.*)$", text, re.MULTILINE))
    assert list(rows) == [
        "full precision",
        *(f"{b} bits" for b in (4, 3, 2)),
        *(f"{b} bits, all packed" for b in (4, 3, 2)),
    ]
    cells = {name: line.replace("%", "").split() for name, line in rows.items()}
    full = 304 * 2 * 2 * 64 * 2 * 4  # tokens stored, keys and values, heads, channels, bytes of bfloat16, layers
    assert int(cells["full precision"][0].replace(",", "")) == full
    for name, (held, ratio, *_) in cells.items():
        assert full / int(held.replace(",", "")) == pytest.approx(float(ratio), abs=0.006), name
    divergence = [float(cells[f"{b} bits, all packed"][2]) for b in (4, 3, 2)]
    assert divergence == sorted(divergence) and 0.003 < divergence[0] < divergence[2] < 1
    assert all(float(cells[f"{b} bits"][2]) < d for b, d in zip((4, 3, 2), divergence))


def test_demo_refuses_what_the_passage_has_not():
    with pytest.raises(SystemExit):
        main(["demo", "--prompt-tokens", "100000"])


@pytest.mark.parametrize("seed", ["-1", str(2**63)])
def test_demo_refuses_seeds_out_of_range(seed, capsys):
    with pytest.raises(SystemExit) as left:
        main(["demo", "--seed", seed])
    assert left.value.code == 2 and f"--seed must be in 0..{2**63 - 1}, got {seed}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["calc", "info"])
def test_a_reader_that_leaves_early_ends_a_command_without_words(command):
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([sys.executable, "-m", "turboquant", command], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    def interrupted(chosen):
        raise KeyboardInterrupt  # not the signal: programs that a shell starts in the background ignore it

    monkeypatch.setattr("turboquant.cli.calc.calc", interrupted)
    assert main(["calc"]) == 130
    assert capsys.readouterr().err == "\nturboquant: calc: interrupted\n"


def test_ctrl_c_tells_how_a_calibration_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(chosen):
        (tmp_path / "it's.part").write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr("turboquant.cli.commands.calibrate", interrupted)
    command = ["calibrate", "model", "--bits", "3,2", "--out", str(tmp_path / "it's")]
    assert main(command) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(last.partition("To go on: ")[2]) == ["turboquant", *command]


def test_without_its_model_the_demo_says_what_to_install(tmp_path, monkeypatch, capsys):
    from turboquant.cli import demo

    monkeypatch.setattr(demo, "__file__", str(tmp_path / "turboquant" / "demo.py"))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SystemExit):
        main(["demo"])
    assert capsys.readouterr().err.endswith(
        "the model of the demo is not installed. Run: pip install 'turboquant-attention[demo]'\n"
    )


@pytest.mark.usefixtures("kept_profiles")
def test_commands_name_a_variable_that_is_wrong():
    """The message is that of the operators. test_machine.py and test_ops_errors.py test TURBOQUANT_ISA."""
    code = "from turboquant.cli import main; raise SystemExit(main(['demo']))"
    done = forks.python(code, TURBOQUANT_NUM_THREADS="3x")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "error: demo: append: `TURBOQUANT_NUM_THREADS` must be " in last
    assert "3x" in last
