"""``progress: live``: the sweep as a table that moves, below whatever else is printed. In main."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

from . import _tail
from ._files import SweepFiles
from ._printing import Streams
from ._screen import Screen, is_terminal
from ._seen import JobView, State
from ._table import Line, overview, rows
from ._view import View
from ._ways import beneath, is_plain

REFRESH_S = 0.25
"""Seconds between two looks at what changes without an event: times, and the jobs' last lines."""

_SHARE = 1 / 150
"""Of a core, that the table may take: where drawing it takes longer, it is drawn less often."""

_FAILED = 6
"""Rows of failed jobs, so that there is room above the table even when half of a large sweep has failed."""

_COLOURS = {State.FAILED: "31", State.STOPPING: "33", State.CANCELLED: "33"}


def terminal(progress: Literal["auto", "live", "log", "none"]) -> TextIO | None:
    """The stream to whose terminal the table goes; None: there is none, or nobody wants the table.

    With auto, that is stdout alone: where it goes into a pipe or a file, so do most lines, and a CI system shows a
    terminal to nobody. None as well where the app has put a stream of its own in the place of one that ends in
    a terminal: what is printed there would go through the table, and what went above the table would miss that stream.
    """
    terminals = [beneath(stream) for stream in (sys.stdout, sys.stderr) if is_terminal(stream)]
    if not all(map(is_plain, terminals)):
        return None
    if progress == "live":
        return next(iter(terminals), None)
    wanted = progress == "auto" and not os.environ.get("CI") and is_terminal(sys.stdout)
    return terminals[0] if wanted else None


@dataclass
class Live:
    """The table, from ``begin`` to ``close``, both of which may be called again. ``where``: what names the sweep.

    ``view``: of the whole sweep, to which ``take`` adds. ``streams``: what else is printed. The methods raise OSError
    where the terminal is gone.
    """

    stream: TextIO
    files: SweepFiles
    where: str
    view: View
    streams: Streams = field(default_factory=Streams)
    _screen: Screen | None = None
    _next: float = 0.0
    _last_lines: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    def begin(self) -> bool:
        """From here on, lines go by above it; False: they go by above that of another launch, and there is none."""
        if self._screen is None:
            screen = Screen(self.stream, self.streams)
            if not screen.capture():
                return False
            self._screen = screen
        return True

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the journal, which is seen at the next ``tick`` that draws."""
        self.view.take([event])

    def tick(self) -> float:
        """Draw the table where that is due; seconds until it is again."""
        now = time.monotonic()
        if self._screen is not None and now >= self._next:
            before = time.thread_time()
            columns, lines = self._screen.size()
            self._screen.draw(self.picture(time.time(), columns - 1, lines - 1))
            self._next = now + max(REFRESH_S, (time.thread_time() - before) / _SHARE)
        return max(0.0, self._next - now)

    def close(self) -> None:
        """Take the table away."""
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.release()

    def picture(self, now: float, width: int, height: int) -> list[str]:
        """The lines to be drawn, coloured, no wider and no more than that."""
        if not self.view.jobs:
            return []
        head = overview(self.view, now, self.where, width)
        gap = [Line("")] if height >= 10 else []  # to what goes by above
        room = min(height - len(head) - len(gap), 1 + len(self.view.running()) + _FAILED)
        table = rows(self.view, now, self._last_line, width, room) if room >= 3 else []
        coloured = [_coloured(line, is_header=i == 0) for i, line in enumerate(table)]
        return [line.text for line in gap] + [_coloured(line) for line in head][:height] + coloured

    def _last_line(self, job: JobView) -> str:
        """Read again only where the log has changed."""
        path = self.files.output(job.job.num)
        try:
            found = os.stat(path)
        except OSError:
            return ""
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        known = self._last_lines.get(job.job.num)
        if known is None or known[0] != state:
            known = self._last_lines[job.job.num] = (state, _tail.last_line(path))
        return known[1]


def _coloured(line: Line, *, is_header: bool = False) -> str:
    code = "2" if is_header else _COLOURS.get(line.state) if line.state is not None else None
    if code is None or os.environ.get("NO_COLOR"):
        return line.text
    return f"\x1b[{code}m{line.text}\x1b[0m"
