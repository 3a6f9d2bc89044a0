"""What the library prints by itself: lines of the logger `turboquant`, and the progress of what takes long.

    logging.getLogger("turboquant").setLevel(logging.WARNING)     no line and no progress

Lines go to the handlers of the root logger, or to standard error if a program has configured none.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from typing import Self, TypeVar

__all__ = ["Progress", "clock", "log", "steps"]

log = logging.getLogger("turboquant")

_FIRST, _LATER = 2.0, 30.0  # seconds until the first line of a log, and between later ones
_REDRAWN = 0.1  # seconds between two drawings of a line
_Item = TypeVar("_Item")


class _Stderr(logging.Handler):
    """Writes to standard error, unless the root logger has handlers: they get every record too."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            _erase()
            print(f"turboquant: {record.getMessage()}", file=sys.stderr)


log.addHandler(_Stderr(logging.INFO))
if log.level == logging.NOTSET:  # a program may have set one before
    log.setLevel(logging.INFO)

_drawn = 0  # characters of the progress line that is on the screen, 0: none is


def _redraws() -> bool:
    """Whether a line on standard error can be overwritten: in a terminal or a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")


def _erase() -> None:
    global _drawn
    if _drawn:
        print(f"\r{' ' * _drawn}\r", end="", file=sys.stderr, flush=True)
        _drawn = 0


def clock(seconds: float) -> str:
    """Returns a time such as 1:05 or 1:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Shows progress, as a context manager: a line that is redrawn in a terminal or a notebook, and otherwise a line of
    the logger after 2 seconds and then every 30 seconds. What ends within 2 seconds leaves no line behind.

    what    what is done, such as "calibrate"
    total   how many units there are;  unit   their name in the plural
    shown   False: nothing is shown
    """

    def __init__(self, what: str, total: float, unit: str, shown: bool = True) -> None:
        self.what, self.total, self.unit, self.shown = what, total, unit, shown
        self.before = self.done = 0.0
        self.started = time.monotonic()
        self.redraws = shown and _redraws()
        self.next = self.started + (0 if self.redraws else _FIRST)

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.shown:
            return
        _erase()
        if kind is None and (gone := time.monotonic() - self.started) >= _FIRST:
            log.info("%s: %s %s in %s", self.what, f"{self.done:,.0f}", self.unit, clock(gone))

    def skip(self, amount: float) -> None:
        """Counts what an earlier run has done."""
        self.before += amount
        self.add(amount)

    def add(self, amount: float = 1) -> None:
        """Counts more as done."""
        self.done += amount
        self._show()

    def line(self) -> str:
        """Returns how much is done, how long it took and how much longer it will take at that pace."""
        gone, here = time.monotonic() - self.started, self.done - self.before
        count = f"{self.done:,.0f} of {self.total:,.0f} {self.unit}"
        left = f", {clock(gone * (self.total - self.done) / here)} left" if here > 0 else ""
        return f"{self.what}: {self.done / max(self.total, 1e-9):4.0%}, {count}, {clock(gone)}{left}"

    def _show(self) -> None:
        global _drawn
        now = time.monotonic()
        if not self.shown or now < self.next or not log.isEnabledFor(logging.INFO):
            return
        if not self.redraws:
            self.next = now + _LATER
            log.info("%s", self.line())
            return
        self.next = now + _REDRAWN
        text = self.line()[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text.ljust(_drawn)}", end="", file=sys.stderr, flush=True)
        _drawn = max(_drawn, len(text))


def steps(items: Collection[_Item], what: str, unit: str, shown: bool = True) -> Iterator[_Item]:
    """Yields the items, and shows the progress through them."""
    with Progress(what, len(items), unit, shown) as one:
        for item in items:
            yield item
            one.add()
