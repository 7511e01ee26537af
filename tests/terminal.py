"""A terminal of 80 x 24 for the apps of tests: a pseudoterminal, and pyte, which shows what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Iterator
from typing import Any

import pyte
from support import LIMIT_S

from hydra_plugins.hydra_gpu_pool_launcher import _descriptors


class Terminal:
    """``popen``: arguments for Popen by which it becomes the app's controlling terminal. ``raw``: all that was sent."""

    def __init__(self) -> None:
        self._master, self.slave = os.openpty()
        self.raw = b""
        self._screen = pyte.HistoryScreen(80, 24, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self._resize_kernel(80, 24)

    def popen(self, **environ: str) -> dict[str, Any]:
        env = {name: value for name, value in os.environ.items() if name not in {"CI", "NO_COLOR", "COLUMNS", "LINES"}}
        return {
            **dict.fromkeys(("stdin", "stdout", "stderr"), self.slave),
            "start_new_session": True,
            "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            "env": {**env, "TERM": "xterm-256color", **environ},
        }

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without the blanks at the ends of lines and of the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n").split("\n")

    @property
    def all_lines(self) -> list[str]:
        """The same, and before it what has gone out of it at its top."""
        above = ["".join(row[x].data for x in range(self._screen.columns)) for row in self._screen.history.top]
        return [line.rstrip() for line in above] + self.lines

    def rows(self) -> list[list[pyte.screens.Char]]:
        """The same with their colours, the blanks at their ends included."""
        return [[self._screen.buffer[y][x] for x in range(self._screen.columns)] for y in range(len(self.lines))]

    def colour(self, text: str) -> str:
        """Of the first character of the first line that has this text."""
        y = next(i for i, line in enumerate(self.lines) if text in line)
        return str(self._screen.buffer[y][self.lines[y].index(text)].fg)

    @property
    def cursor(self) -> tuple[int, int]:
        """Line and column."""
        return self._screen.cursor.y, self._screen.cursor.x

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def until(self, seen: Callable[[], bool]) -> None:
        """Block until the screen is like that; fails when it never is."""
        while not seen():
            assert _descriptors.wait_readable([self._master], LIMIT_S), "\n".join(["nothing more comes:", *self.lines])
            self._feed()

    def until_drawn(self, seen: Callable[[], bool]) -> None:
        """The same of a table that is there as a whole: the clearing of what is below it comes last."""
        self.until(lambda: self.raw.endswith(b"\x1b[J") and seen())

    def until_quiet(self) -> None:
        """All that has been sent so far, by apps that have ended."""
        while _descriptors.wait_readable([self._master], 0):
            self._feed()

    def _feed(self) -> None:
        got = os.read(self._master, 1 << 16)
        self.raw += got
        self._stream.feed(got)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._resize_kernel(columns, lines)

    def _resize_kernel(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def close(self) -> None:
        for fd in (self.slave, self._master):
            os.close(fd)


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    it = Terminal()
    yield it
    it.close()
