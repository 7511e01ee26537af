"""Signals to the process of a job that are meant for its ranks: heard, and put where a wait for the ranks sees them."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from . import _descriptors
from ._descriptors import Descriptor
from ._verdict import BY_HAND

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What is sent to the job's process goes to each of its ranks, which decide what becomes of it."""

LOOK = 0
"""What a rank writes to the pipe when it has left what it has to say: no number of a signal."""


class ToldError(Exception):
    """A signal to the job's process, while it has no ranks to pass it on to."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class GoneError(Exception):
    """A rank ended while its process waited for something else."""


class Signals:
    """The signals that are sent to this process, as numbers in a pipe, while this is entered. By the main thread.

    ``lifelines``: see ``pause``.
    """

    def __init__(self) -> None:
        self.lifelines: tuple[int, ...] = ()
        self._before: dict[int, Any] = {}
        self._unheard: list[int] = []

    def __enter__(self) -> Signals:
        self.fd, self._write = _descriptors.hidden_pipe()
        for signum in _FORWARDED:
            self._before[signum] = signal.signal(signum, self._hear)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, action in self.before().items():
            signal.signal(signum, action)
        for fd in self.descriptors():
            os.close(fd)

    def descriptors(self) -> tuple[int, int]:
        """Both ends of the pipe."""
        return self.fd, self._write

    @property
    def bell(self) -> Descriptor:
        """The end that a rank has, to write ``LOOK`` to."""
        return Descriptor.of(self._write)

    def before(self) -> dict[int, Any]:
        """What was done about these signals so far, and is in a rank."""
        return {signum: signal.SIG_DFL if action is None else action for signum, action in self._before.items()}

    def _hear(self, signum: int, _: object) -> None:
        with contextlib.suppress(BlockingIOError):  # so many that nobody has read
            os.write(self._write, bytes([signum]))

    def heard(self) -> list[int]:
        """Which came since this was asked last."""
        heard, self._unheard = self._unheard, []
        with contextlib.suppress(BlockingIOError):
            heard += os.read(self.fd, 64)
        return [number for number in heard if number in {LOOK, *_FORWARDED}]

    def pause(self, seconds: float) -> None:
        """Block for so long. Raises ToldError where somebody asks for the end; other signals are kept.

        Raises GoneError where one of the ``lifelines``, descriptors, is readable.
        """
        readable = _descriptors.wait_readable([self.fd, *self.lifelines], seconds)
        if self.fd in readable:
            heard = self.heard()
            self._unheard = [number for number in heard if number not in BY_HAND | {LOOK}]
            for signum in heard:
                if signum in BY_HAND:
                    raise ToldError(signum)
        if set(readable) - {self.fd}:
            raise GoneError
