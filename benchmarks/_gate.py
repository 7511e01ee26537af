"""A gate for the jobs of a sweep: each says that it is there, and all go on when they are told to.

In the app, which finds the two pipes in its environment: write a byte to BENCH_HERE; then open BENCH_GO to read, which
blocks until somebody has opened it to write, or wait until something can be read there.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _place import Place

LIMIT_S = 120
"""Fails a hang."""


@dataclass
class Gate:
    here: int
    go: Path
    terminal: int | None = None  # is read while this process waits, and at its other end a program that writes
    said: bytes = b""  # what was read there

    def wait(self, jobs: int) -> None:
        """Block until so many are there. Raises TimeoutError with what was said instead."""
        deadline = time.monotonic() + LIMIT_S
        while jobs > 0:
            if self._wait(deadline - time.monotonic()):
                jobs -= len(os.read(self.here, jobs))
            elif time.monotonic() >= deadline:
                raise TimeoutError(f"{jobs} jobs have not begun:\n{self.said.decode(errors='replace')[-5000:]}")

    def rest(self, seconds: float) -> None:
        """Do nothing but read the terminal."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float) -> bool:
        """True where a job has something to say."""
        watched = [self.here] if self.terminal is None else [self.here, self.terminal]
        ready = select.select(watched, [], [], max(0.0, seconds))[0]
        if self.terminal in ready:
            assert self.terminal is not None
            self.said += os.read(self.terminal, 1 << 16)
        return self.here in ready

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Until this is left, which is to be when all have gone through."""
        fd = os.open(self.go, os.O_RDWR)
        try:
            os.write(fd, b".")  # nobody takes it: it is there for all
            yield
        finally:
            os.close(fd)


@contextlib.contextmanager
def gate(at: Place, terminal: int | None = None) -> Iterator[Gate]:
    """For one sweep in this place."""
    here, go = at.directory / "here", at.directory / "go"
    at.environ.update(BENCH_HERE=str(here), BENCH_GO=str(go))
    for path in (here, go):
        os.mkfifo(path)
    read = os.open(here, os.O_RDWR)
    try:
        yield Gate(read, go, terminal)
    finally:
        os.close(read)
        for path in (here, go):
            path.unlink()
