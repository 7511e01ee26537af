"""The lower end of a terminal: some lines that are drawn again and again there, while others go by above them.

rich's Live does as much, but its cursor stays hidden when the process is killed, it breaks long lines (a path is no
path any more then), and it draws over other text once the terminal has another width or a shell has written between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO, cast

from ._tail import plain

_KEPT = 500
"""Lines above the drawn ones that can be shown again, when the terminal's size has changed."""

_HELD = 1 << 16
"""Characters of a line that has not ended, and so is not shown yet."""


def is_terminal(stream: Any) -> bool:
    """True where the stream ends in a terminal whose cursor can be moved."""
    try:
        return bool(stream.isatty()) and stream.fileno() >= 0 and os.environ.get("TERM", "") not in {"", "dumb"}
    except Exception:  # closed, or none at all (pythonw), or a notebook's, or whatever the app has put there
        return False


class Screen:
    """Draws on a terminal, in main; what Python code of this process prints to it meanwhile goes above what is drawn.

    The cursor stands below the drawn lines, and is never hidden: however this process ends, there is nothing to
    restore. Any thread may print; one thread draws. All methods raise OSError where the terminal is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._fd = stream.fileno()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._size = self.size()
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self._captured: list[_Above] = []
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
            if self._lines and self._in_front():
                begin, self._lines = self._begin(), []
                self._write(begin + "\x1b[J")

    def above(self, text: str) -> None:
        """Whole lines, written as they are."""
        with self._lock:
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
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    # --- what others print ---

    def capture(self) -> None:
        """From here on, what is printed goes above: sys.stdout, sys.stderr, and handlers of logging that have them."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream) and os.fstat(stream.fileno()).st_rdev == os.fstat(self._fd).st_rdev:
                above = _Above(self, stream, name)
                self._captured.append(above)
                setattr(sys, name, above)
                for handler in _stream_handlers():
                    if handler.stream is stream:
                        handler.setStream(cast(TextIO, above))
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCONT) == signal.SIG_DFL:
            signal.signal(signal.SIGCONT, self._on_continued)
            self._handles = True

    def release(self) -> None:
        """Erase, and give the streams back. What is printed from here on is printed as ever."""
        if self._handles:
            self._handles = False
            with contextlib.suppress(ValueError):  # another thread now, which cannot
                signal.signal(signal.SIGCONT, signal.SIG_DFL)
        captured, self._captured = self._captured, []
        try:
            self.erase()
        finally:
            self._lines = []
            for above in captured:
                above.release()

    def _on_continued(self, *_: object) -> None:
        self._continued = True

    @property
    def is_of_this_process(self) -> bool:
        """False in a fork of it, which prints as if there were no screen."""
        return os.getpid() == self._pid


class _Above:
    """In place of a standard stream: whole lines go above the screen's, the rest of a line waits for its end."""

    def __init__(self, screen: Screen, stream: TextIO, name: str) -> None:
        self._screen = screen
        self._stream = stream
        self._name = name
        self._held = ""
        self._released = False

    def write(self, text: str) -> int:
        if self._released or not self._screen.is_of_this_process:
            return self._stream.write(text)
        lines, end, self._held = (self._held + text).rpartition("\n")
        self._held = self._held[-_HELD:]  # a progress bar, which ends no line
        if end:
            self._screen.above(lines)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def release(self) -> None:
        self._released = True
        for handler in _stream_handlers():
            if handler.stream is self:
                handler.setStream(self._stream)
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)
        if self._held:
            held, self._held = self._held, ""
            self._stream.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.root, *list(logging.Logger.manager.loggerDict.values())]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", [])]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
