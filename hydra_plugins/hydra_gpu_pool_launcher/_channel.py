"""What reaches the supervisor from outside (requests, signals, the ends of main and guard), and how it answers main."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _descriptors
from ._events import Stop
from ._requests import Close, from_line
from ._system import Happening

_MOMENT_S = 0.2
"""Between the end of main's channel and that of main itself: a process closes its files before it is gone."""


@dataclass
class Channel:
    """The supervisor's end. Nothing here waits for main, which may be suspended; only for its end, for a moment.

    ``main``, ``wakeup``: descriptors, of the channel and of the pipe on which signals are seen. ``lifelines``: those
    that are readable once what is said of them is true. ``told_by_signal``: what follows from a signal; whatever other
    one comes through the pipe is a stop.
    """

    main: int
    wakeup: tuple[int, int]
    lifelines: Mapping[int, str]
    told_by_signal: Mapping[int, Callable[[], Sequence[Happening]]]
    _unread: bytes = b""
    _over: set[int] = field(default_factory=set)  # those that have told all they can

    @property
    def descriptors(self) -> set[int]:
        """All that is ours."""
        return {self.main, *self.wakeup, *self.lifelines}

    @property
    def watched(self) -> set[int]:
        """Those to be waited for."""
        return {self.main, self.wakeup[0], *self.lifelines} - self._over

    def hear(self, fd: int) -> Sequence[Happening]:
        """What happened, by one of ``watched`` that is readable."""
        if fd == self.main:
            return self._requests()
        if fd == self.wakeup[0]:
            return self._signals()
        self._over.add(fd)
        return [Stop(self.lifelines[fd], signal.SIGTERM), Close()]

    def _signals(self) -> Sequence[Happening]:
        numbers = set(os.read(self.wakeup[0], 64))
        events = [event for number, tell in self.told_by_signal.items() if number in numbers for event in tell()]
        if names := sorted(signal.Signals(number).name for number in numbers - self.told_by_signal.keys()):
            events += [Stop(f"{' and '.join(names)} to the supervisor", signal.SIGTERM), Close()]
        return events

    def _requests(self) -> Sequence[Happening]:
        try:
            got = os.read(self.main, 1 << 16)
        except ConnectionResetError:
            got = b""
        if not got:
            self._over.add(self.main)
            gone = _descriptors.wait_readable([*self.lifelines], _MOMENT_S)
            why = self.lifelines[gone[0]] if gone else "the main process has become another program"
            return [Stop(why, signal.SIGTERM), Close()]
        *lines, self._unread = (self._unread + got).split(b"\n")
        return [event for line in lines for event in from_line(line)]

    def tell(self, message: Mapping[str, Any]) -> None:
        """A line to main. It fits into the socket's buffer, which main has emptied before it asked."""
        self._send(json.dumps(message).encode() + b"\n")

    def ring(self) -> None:
        """Let main know that there is something new in the journal."""
        self._send(b"\n")

    def _send(self, line: bytes) -> None:
        """Where the buffer is full, main has enough to wake up for; where it is closed, nobody is there to."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            _descriptors.send(self.main, line)
