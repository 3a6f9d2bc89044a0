"""Messages of the library: lines of a logger, and progress in terminals, notebooks and logs."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr

import pytest

from turboquant import progress
from turboquant.progress import Progress, clock, steps


class Screen(io.StringIO):
    """A terminal that keeps what its lines show."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown


class Time:
    """A clock that is moved by hand."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


@contextmanager
def terminal():
    """Standard error is a terminal of 60 columns, and the root logger has no handlers."""
    size, root = os.terminal_size((60, 24)), logging.getLogger()
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(Screen()) as screen:
        patched.setattr(progress.shutil, "get_terminal_size", lambda: size)
        patched.setattr(root, "handlers", [])
        yield screen


def test_a_terminal_has_one_line_that_is_redrawn(time):
    with terminal() as screen:
        with Progress("scan", 8, "batches") as one:
            assert screen.lines() == ["scan:   0%, 0 of 8 batches, 0:00"]
            time.now += 65
            one.add(2)
            assert screen.lines() == ["scan:  25%, 2 of 8 batches, 1:05, 3:15 left"]
            one.what = "a name that is much longer than the terminal has room for, and goes on"
            time.now += 1
            one.add()
            assert screen.lines() == [one.line()[:59].rstrip()]
            one.what = "scan"
            time.now += 0.01  # too early to draw
            one.add()
            assert screen.lines()[0].startswith("a name")
            progress.log.info("something else")  # does not mix with the line
            assert screen.lines() == ["turboquant: something else", ""]
            time.now += 1
            one.add()
        assert screen.lines() == ["turboquant: something else", "turboquant: scan: 5 batches in 1:07", ""]


def test_what_is_quick_leaves_nothing_behind(time):
    with terminal() as screen:
        assert list(steps([3, 4], "scan", "batches")) == [3, 4]
        assert screen.lines() == [""] and screen.getvalue()
        with Progress("scan", 1, "batches", shown=False):
            time.now += 10
        assert screen.lines() == [""]


def test_a_log_has_a_line_now_and_then(time, caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress("scan", 1000, "batches") as one:
        for _ in range(1000):
            time.now += 0.125
            one.add()
    assert not sys.stderr.getvalue()  # pytest's handlers of the root logger have them
    times = [re.findall(r"\d:\d\d", line)[0] for line in caplog.messages[:-1]]
    assert times == ["0:02", "0:32", "1:02", "1:32", "2:02"]
    assert caplog.messages[0] == "scan:   2%, 16 of 1,000 batches, 0:02, 2:03 left"
    assert caplog.messages[-1] == "scan: 1,000 batches in 2:05"
    caplog.clear()
    for _ in steps(range(10), "scan", "batches"):
        time.now += 0.19
    assert not caplog.messages


def test_a_notebook_is_redrawn(time, monkeypatch):
    kind = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream", "isatty": lambda self: False})
    monkeypatch.setattr(sys, "stderr", kind())
    with Progress("scan", 2, "batches"):
        assert sys.stderr.getvalue() == "\rscan:   0%, 0 of 2 batches, 0:00"


def test_what_an_earlier_run_did_does_not_count_for_the_pace(time):
    with terminal() as screen, Progress("calibrate", 100, "tokens") as one:
        one.skip(80)
        time.now += 10
        one.add(10)
        assert screen.lines() == ["calibrate:  90%, 90 of 100 tokens, 0:10, 0:10 left"]


def test_an_error_ends_it_without_a_summary(time):
    with terminal() as screen:
        with pytest.raises(KeyError), Progress("scan", 2, "batches"):
            time.now += 10
            raise KeyError
        assert screen.lines() == [""]


def test_it_can_be_silenced(time, caplog):
    with terminal() as screen, caplog.at_level(logging.WARNING, "turboquant"):
        with Progress("scan", 2, "batches"):
            progress.log.info("something")
            time.now += 10
        assert not screen.getvalue()


@pytest.mark.parametrize(
    ("setup", "wants"),
    [
        ("pass", "turboquant: said\n"),
        ("logging.basicConfig(format='mine: %(message)s')", "mine: said\n"),
        ("logging.getLogger('turboquant').setLevel(logging.WARNING)", ""),
    ],
    ids=["no handlers", "handlers of the root", "silenced before"],
)
def test_a_program_chooses_where_lines_go(setup, wants):
    code = f"import logging\n{setup}\nfrom turboquant.progress import log\nlog.info('said')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, wants)


def test_a_clock():
    assert [clock(s) for s in (0, 59.6, 65, 3599, 3600, 86400)] == ["0:00", "1:00", "1:05", "59:59", "1:00:00",
                                                                    "24:00:00"]  # fmt: skip
