"""``output: tee``: what the jobs print, line by line, each with its job's number before it. In main, from the logs.

The jobs write to files, and main follows these: none of them can ever wait for a terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ._files import SweepFiles, open_file
from ._model import Job
from ._printing import put
from ._tail import encodable, lines_seen

AT_ONCE = 1 << 19
"""Bytes that are read at a time, of all jobs together. Of a job that prints faster, the newest are shown."""

_LEAST = 1 << 15
"""Bytes of these that each job has."""

_LONGEST = 1 << 16
"""Bytes of a line; of a longer one, the end is shown. Of a progress bar that ends no line, that is its newest state."""


@dataclass
class _Log:
    """The log of one try, held open: it may be renamed for the next one."""

    fd: int
    identity: tuple[int, int]
    read: int = 0
    begun: bytes = b""  # a line that has not ended

    def lines(self, most: int) -> Iterator[str]:
        """Those that have ended since, and, where there is more than ``most`` bytes, a line that says so instead."""
        size = os.fstat(self.fd).st_size
        if size < self.read:  # somebody has cut it off
            self.read, self.begun = 0, b""
        missed = size - self.read - most
        if missed > 0:
            start = size - most
            beginning, newline, _ = os.pread(self.fd, most, start).partition(b"\n")
            start += len(beginning) + 1 if newline else 0
            yield f"… {start - self.read + len(self.begun):,} bytes are left out here: they are in the log"
            self.read, self.begun = start, b""
        got = os.pread(self.fd, size - self.read, self.read)
        self.read += len(got)
        *whole, begun = (self.begun + got).split(b"\n")
        for line in whole:
            yield from _lines(line)
        self.begun = begun[-_LONGEST:]

    def close(self, most: int) -> Iterator[str]:
        """The rest of it, the line included that has no end."""
        with contextlib.suppress(OSError):
            yield from self.lines(most)
        if self.begun:
            yield from _lines(self.begun)
        os.close(self.fd)


def _lines(line: bytes) -> list[str]:
    return lines_seen(line[-_LONGEST:].decode(errors="replace"))


@dataclass
class Tee:
    """Follows the logs of a launch's jobs; to be made before the launch, to know them from those of earlier ones."""

    jobs: Sequence[Job]
    files: SweepFiles
    _known: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    _logs: dict[int, list[_Log]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for job in self.jobs:
            self._known[job.num] = {identity for _, identity in self._found(job.num)}

    def started(self, num: int) -> None:
        """A try of this job has begun, whose log is followed from here on."""
        self._look(num)

    def ended(self, num: int) -> None:
        """A try of this job has ended: show all that it has printed, before anything else is said of it."""
        self._look(num)
        lines: list[str] = []
        for log in self._logs.pop(num, []):
            lines += log.close(AT_ONCE)
            if not log.read:  # the next try writes to the same file
                self._known[num].discard(log.identity)
        _print(num, lines)

    def poll(self) -> None:
        """Show what the running jobs have printed since."""
        most = max(_LEAST, AT_ONCE // max(1, len(self._logs)))
        for num, logs in self._logs.items():
            lines: list[str] = []
            for log in logs:
                with contextlib.suppress(OSError):
                    lines += log.lines(most)
            _print(num, lines)

    def close(self) -> None:
        """Show what is left of those whose end nobody was there to tell."""
        for num in list(self._logs):
            self.ended(num)

    def _look(self, num: int) -> None:
        """Open the logs of this job that are new: where several tries have ended since the last look, they are several.

        A log may be renamed between its being listed and its being opened: hence until there is nothing new.
        """
        looking = True
        while looking:
            looking = False
            for path, identity in self._found(num):
                if identity not in self._known[num]:
                    try:
                        fd = open_file(path)
                    except OSError:  # it is gone, or is no log
                        continue
                    opened = _identity(os.fstat(fd))
                    if opened in self._known[num]:
                        os.close(fd)
                        continue
                    looking = True
                    self._known[num].add(opened)
                    self._logs.setdefault(num, []).append(_Log(fd, opened))

    def _found(self, num: int) -> list[tuple[str, tuple[int, int]]]:
        """The job's logs, the oldest first: output.1.log, output.2.log, …, output.log."""
        directory = self.files.job_dir(num)
        newest = os.path.basename(self.files.output(num))
        stem, _, ending = newest.partition(".")
        names: list[tuple[float, str]] = []
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                number = name.removeprefix(f"{stem}.").removesuffix(f".{ending}")
                if name == newest:
                    names.append((float("inf"), name))
                elif number.isdigit() and name == f"{stem}.{number}.{ending}":
                    names.append((int(number), name))
        found = []
        for _, name in sorted(names):
            with contextlib.suppress(OSError):
                path = os.path.join(directory, name)
                found.append((path, _identity(os.lstat(path))))
        return found


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _print(num: int, lines: Sequence[str]) -> None:
    if lines:
        text = "".join(f"[{num}] {line}".rstrip() + "\n" for line in lines)
        put(sys.stdout, encodable(text, sys.stdout))
