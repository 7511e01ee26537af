"""The signals that come to this process: their handlers, and which of them have come."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from ._descriptors import hidden_pipe, identity, wait_readable

Handler = Callable[[int, FrameType | None], Any]
"""A signal handler written in Python."""

Action = Handler | int
"""What is done about a signal: a handler, signal.SIG_DFL or signal.SIG_IGN."""


@contextlib.contextmanager
def children_of_our_own() -> Iterator[None]:
    """While this lasts, nobody but us learns of the ends of children: a handler would take their exit status."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def silence_handlers(needed: Collection[int]) -> dict[int, Action]:
    """Ignore each signal for which there is a handler in Python, user code that is, and give those handlers.

    And the action for each of the ``needed`` ones, whatever it is, since this process is about to set its own.
    """
    found: dict[int, Action] = {}
    for signum in signal.valid_signals():
        handler = signal.getsignal(signum)
        if callable(handler):
            found[signum] = handler
            signal.signal(signum, signal.SIG_IGN)
        elif signum in needed:
            found[signum] = signal.SIG_DFL if handler is None else handler
    return found


def wakeup_pipe() -> tuple[int, int]:
    """The two ends of a pipe that becomes readable, with the number of the signal, when a handled signal arrives."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read, write


class Received:
    """The signals that have come to this process since this was made, where there is a handler in Python for them.

    Seen through Python's wakeup descriptor, to which its own C handler writes: whatever handlers the user sets, and
    takes away again, they are seen. Not where asyncio's add_signal_handler takes the descriptor for itself.
    """

    def __init__(self) -> None:
        self._read, self._write = hidden_pipe()
        self._pipe = identity(self._read)
        self.listen()
        os.register_at_fork(after_in_child=self._deafen)

    def descriptors(self) -> tuple[int, int]:
        """Of the pipe, for a fork that is told of its own signals in another one."""
        return self._read, self._write

    def listen(self) -> None:
        """Once more: an import may have taken the descriptor for itself."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def close(self) -> set[int]:
        """The numbers of the signals; nothing is listened to any more. Of more than 65,536 signals the first ones.

        Empty where the user has closed the pipe, whose descriptors may be of something else by now.
        """
        self._deafen()
        ours = [fd for fd in (self._read, self._write) if identity(fd) == self._pipe is not None]
        found = set(os.read(self._read, 1 << 16) if self._read in ours and wait_readable([self._read], 0) else b"")
        for fd in ours:
            os.close(fd)
        return found

    def _deafen(self) -> None:
        """Also in a fork, which has the handlers: what is sent to a data loader's worker, to end it, is not for us."""
        with contextlib.suppress(ValueError):  # this is not the main thread
            found = signal.set_wakeup_fd(-1)
            if found not in {-1, self._write}:
                signal.set_wakeup_fd(found)
