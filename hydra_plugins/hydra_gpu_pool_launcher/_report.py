"""What a sweep leaves for people and their tools: results.csv and sweep.html, written as its jobs end. In main."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from ._again import resume_command
from ._facts import fault
from ._files import SweepFiles, open_file
from ._journal import JournalReader
from ._model import Layout
from ._page import page, to_be_told
from ._results import Cell, results
from ._tail import CONTROLS
from ._view import View

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_FORMULA = "=+-@\t"
_CONTROL = re.compile(CONTROLS)

_RESULTS_EVERY_S = 1.0
_PAGE_EVERY_S = 30.0

_TAIL_BYTES = 16 << 10
_SEARCHED_BYTES = 64 << 10
"""Of the log of what failed: the threads of a process that is killed, as Python prints them, may fill as much."""


def write_results(files: SweepFiles, view: View, *, over: bool = False) -> None:
    """Write results.csv, whole or not at all. ``over``: see ``_results.results``. Raises OSError."""
    table = results(view, over=over)
    _replace(files, files.results, as_csv([[column.name for column in table.columns], *table.rows]))


def write_page(files: SweepFiles, view: View, *, over: bool = False) -> None:
    """Write sweep.html, whole or not at all; of logs, the last lines of what failed are read. Raises OSError."""
    tails = {
        num: tail for num in to_be_told(view, over=over) if (tail := read_tail(files.output(num), _SEARCHED_BYTES))
    }
    again = None
    if (over or view.done) and view.launch is not None and not view.all_completed():
        again = resume_command(view.launch, files)
    text = page(view, tails, time.time(), name=_shown(files.sweep_dir), over=over, again=again)
    _replace(files, files.page, text.encode("utf-8", "backslashreplace"))


def as_csv(rows: Iterable[Iterable[Cell]]) -> bytes:
    """Rows as RFC 4180 has them, in UTF-8; see ``_text`` for what becomes of the cells."""
    out = io.StringIO(newline="")
    csv.writer(out).writerows([_text(cell) for cell in row] for row in rows)
    return out.getvalue().encode("utf-8", "backslashreplace")  # a lone surrogate, from a file name say


def _text(cell: Cell) -> str:
    """A cell as pandas, among others, reads it back: a number as a number, nothing as nothing.

    An integer that 64 bits do not hold is written as a float, since it would make its whole column text. A text that a
    spreadsheet would take for a formula gets an apostrophe before it. Control characters are spelled out: somebody will
    look at this file in a terminal.
    """
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell)
    if isinstance(cell, int) and not -(2**63) <= cell < 2**63:
        return f"{Decimal(cell):.16e}"
    if isinstance(cell, (int, float)):
        return repr(cell)
    text = _CONTROL.sub(_spelled, cell)
    return f"'{text}" if text[:1] and text[0] in _FORMULA and not _NUMBER.fullmatch(text) else text


def _spelled(control: re.Match[str]) -> str:
    code = ord(control[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def read_tail(path: str, most: int = _TAIL_BYTES) -> str | None:
    """The last of a log, at most so many bytes of it; None where it cannot be read, or is no file."""
    try:
        with open(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most))
            text = file.read(most).decode("utf-8", "replace")
    except OSError:
        return None
    return text if size <= most else text.partition("\n")[2] or text


def _shown(path: str) -> str:
    """The sweep's directory, as its user calls it."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return path
    return path if relative.startswith(os.pardir) else relative


def _replace(files: SweepFiles, path: str, content: bytes) -> None:
    """Put it in the place of what is there, in one step. It is not forced to disk: the journal has all that is in it.

    It is written in gpu_pool's own directory, where nobody else can have put a link in its way.
    """
    aside = os.path.join(files.root, f"{os.path.basename(path)}.{os.getpid()}.new")  # another process may write its own
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(fd, "wb") as file:
            file.write(content)
        os.rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def recorded(files: SweepFiles) -> View:
    """The sweep as its journal has it so far, earlier launches included. Raises OSError."""
    view = View()
    with contextlib.closing(JournalReader(files.journal)) as journal:
        view.take(event for event in journal.new() if fault(event) is None)
    return view


@dataclass
class Turn:
    """When a file is to be written: as soon as there is news, but no sooner than ``every_s`` after the last time."""

    every_s: float
    _news: bool = False
    _last: float = -math.inf

    def news(self) -> None:
        """There is something that the file does not have."""
        self._news = True

    def wait_s(self, now: float) -> float | None:
        """Seconds until it is time; 0.0: it is; None: there is no news."""
        return max(0.0, self._last + self.every_s - now) if self._news else None

    def taken(self, now: float) -> None:
        """It is being written."""
        self._news, self._last = False, now


@dataclass
class _Written:
    """One of the two files: when it is due, and how it is written."""

    name: str
    turn: Turn
    events: frozenset[str]
    write: Callable[..., None]


@dataclass
class Reports:
    """A Display that keeps the two files: results.csv, at most once a second as jobs end; sweep.html, every 30 seconds.

    Both are whole, and of the whole sweep, after ``summary``. Where one could not be written even then, ``say`` is told
    so, once. What comes too soon after a write is written by a ``tick``.
    """

    files: SweepFiles
    say: Callable[[str, int], None]
    clock: Callable[[], float] = time.monotonic
    view: View = field(default_factory=View)

    def __post_init__(self) -> None:
        ends = frozenset({"end"})
        self._written = (
            _Written("results.csv", Turn(_RESULTS_EVERY_S), ends, write_results),
            _Written("sweep.html", Turn(_PAGE_EVERY_S), ends | {"start", "retry"}, write_page),
        )

    def begin(self, layout: Layout) -> None:  # noqa: ARG002
        """Read what earlier launches of the same sweep have left: a sweeper that works in batches has many."""
        with contextlib.suppress(OSError):
            self.view = recorded(self.files)

    def show(self, event: dict[str, Any]) -> None:
        """One event of the journal, also if ``begin`` has read it already: each launch says again which jobs it has."""
        self.view.take([event])
        for each in self._written:
            if event.get("event") in each.events:
                each.turn.news()
        self.tick()

    def tick(self) -> float | None:
        """Write what is due; in how many seconds something else will be, None: only after another event."""
        for each in self._written:
            if each.turn.wait_s(self.clock()) == 0.0:
                self._write(each)
        now = self.clock()
        waits = [wait for each in self._written if (wait := each.turn.wait_s(now)) is not None]
        return min(waits, default=None)

    def stuck(self) -> list[int]:
        """None: files are written at once."""
        return []

    def close(self) -> None:
        """There is nothing to let go of."""

    def deliver(self, patience_s: float | None = None) -> None:
        """There is nothing more to say than ``summary`` has written."""

    def summary(self) -> None:
        """Write both, as the last word on this launch."""
        for each in self._written:
            self._write(each, over=True)

    def _write(self, each: _Written, over: bool = False) -> None:
        """What does not succeed is tried again, at the end once more, and only then worth a line."""
        each.turn.taken(self.clock())
        try:
            each.write(self.files, self.view, over=over)
        except Exception as error:  # neither a full disk nor a fault of ours is worth a sweep
            each.turn.news()
            if over:
                why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                path = os.path.join(_shown(self.files.sweep_dir), each.name)
                self.say(f"{path} could not be written ({why}); `gpu-pool report` writes it again", logging.WARNING)
