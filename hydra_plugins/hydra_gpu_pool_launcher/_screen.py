"""The lower end of a terminal: some lines that are drawn again and again there, while others go by above them.

rich's Live does as much, but its cursor stays hidden when the process is killed, it breaks long lines (a path is no
path any more then), and it draws over other text once the terminal has another width or a shell has written between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

from ._outlet import MOST, left_out
from ._printing import Streams
from ._tail import plain

_KEPT = 500
"""Lines above the drawn ones that can be shown again, when the terminal's size has changed."""


def is_terminal(stream: Any) -> bool:
    """True where the stream ends in a terminal whose cursor can be moved."""
    try:
        return bool(stream.isatty()) and stream.fileno() >= 0 and os.environ.get("TERM", "") not in {"", "dumb"}
    except Exception:  # closed, or none at all (pythonw), or a notebook's, or whatever the app has put there
        return False


class Screen:
    """Draws on a terminal, in main; what Python code of this process prints to it meanwhile goes above what is drawn.

    The cursor stands below the drawn lines, and is never hidden: however this process ends, there is nothing to
    restore. Any thread may print; one thread draws. All methods raise OSError where the terminal is gone. None waits
    for a terminal that takes nothing now: then the lines that go above wait, and nothing is drawn but the newest.
    """

    def __init__(self, stream: TextIO, streams: Streams) -> None:
        self._stream = stream
        self._streams = streams
        self._outlet = streams.outlet(stream)
        self._fd = stream.fileno()
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._size = self.size()
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self._waiting: list[str] = []
        self._size_waiting = self._left_out = 0
        self._over = False
        self._continued = False
        self._handles = False

    def size(self) -> tuple[int, int]:
        """Columns and lines, of which one is the cursor's."""
        try:
            columns, lines = os.get_terminal_size(self._fd)
        except OSError:
            columns = lines = 0
        return (columns, lines) if columns and lines else (80, 24)

    def draw(self, lines: Sequence[str]) -> None:
        """These lines in place of those that were drawn, each narrower than the terminal, and fewer than it has."""
        with self._lock:
            self._tell()
            if not self._outlet.push():
                return
            if not self._in_front():
                self._lines = []  # the terminal is another program's for now, and the cursor where that one left it
                return
            begin = self._begin()
            if begin == self._up() and list(lines) == self._lines:
                return
            self._lines = list(lines)
            self._write(begin + self._drawn())

    def erase(self) -> None:
        """As if nothing had been drawn."""
        with self._lock:
            self._tell(at_once=False)
            if self._lines and self._in_front():
                begin, self._lines = self._begin(), []
                self._write(begin + "\x1b[J")

    def above(self, text: str) -> None:
        """Whole lines, written as they are. As much of them waits as in an outlet."""
        with self._lock:
            if self._left_out or self._size_waiting >= MOST:
                self._left_out += len(text) + 1
            else:
                self._waiting.append(text)
                self._size_waiting += len(text)
            self._tell(at_once=not self._over)

    def _tell(self, *, at_once: bool = True) -> None:
        """What is to go above; with ``at_once``, only where the terminal has taken what was sent before."""
        if not self._waiting or (at_once and not self._outlet.push()):
            return
        if self._left_out:
            self._waiting.append(left_out(self._left_out))
        text, self._waiting = "\n".join(self._waiting), []
        self._size_waiting = self._left_out = 0
        self._recent.extend(text.split("\n"))
        if not self._in_front():
            self._lines = []
        if not self._lines:
            self._write(f"{text}\n")
            return
        resized = self.size() != self._size
        begin = self._begin()
        if resized:  # the text is among the recent lines; what was drawn has another width than the terminal
            self._lines = []
            self._write(begin)
        else:
            self._write(f"{begin}\x1b[J{text}\n{self._drawn()}")

    def _drawn(self) -> str:
        return "".join(f"{line}\x1b[K\n" for line in self._lines) + "\x1b[J"

    def _up(self) -> str:
        return f"\r\x1b[{len(self._lines)}A" if self._lines else "\r"

    def _begin(self) -> str:
        """What takes the cursor to where the drawn lines begin.

        After a change of size nobody knows where that is: each terminal breaks lines anew in its own way. Then all is
        cleared, and the recent lines stand there again. When a shell has had the terminal, what was drawn is left to
        it.
        """
        continued, self._continued = self._continued, False
        size = self.size()
        if size == self._size:
            return "\r" if continued else self._up()
        self._size = size
        columns, room = size[0], size[1] - 1 - len(self._lines)
        shown: list[str] = []
        for line in reversed(self._recent):
            room -= max(1, -(-len(plain(line)) // columns))
            if room < 0:
                break
            shown.append(line)
        return "\x1b[H\x1b[2J" + "".join(f"{line}\n" for line in reversed(shown))

    def _in_front(self) -> bool:
        """False where this process is in the background of its shell: the terminal is not its own to draw on."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # it is not the controlling terminal
            return True

    def _write(self, text: str) -> None:
        self._outlet.write(text.encode(self._stream.encoding, "replace"))

    # --- what others print ---

    def capture(self) -> bool:
        """From here on, what is printed goes above: sys.stdout, sys.stderr, and handlers of logging that have them.

        False where it goes above what another launch draws: then nothing is to be drawn here.
        """
        if not self._streams.lead(self._is_of_it, self.above):
            return False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCONT) == signal.SIG_DFL:
            signal.signal(signal.SIGCONT, self._on_continued)
            self._handles = True
        return True

    def release(self) -> None:
        """Erase, and give the streams back. What is printed from here on is printed as ever."""
        if self._handles:
            self._handles = False
            with contextlib.suppress(ValueError):  # another thread now, which cannot
                signal.signal(signal.SIGCONT, signal.SIG_DFL)
        try:
            with self._lock:
                self._over = True  # else what a thread prints now might wait for a table that is not drawn again
                self.erase()
        finally:
            self._lines = []
            self._streams.lead_back()

    def _is_of_it(self, stream: TextIO) -> bool:
        return is_terminal(stream) and os.fstat(stream.fileno()).st_rdev == os.fstat(self._fd).st_rdev

    def _on_continued(self, *_: object) -> None:
        self._continued = True
