"""Main's way to a terminal, or to whoever reads its pipe: it is given what it takes now, and not waited for.

A reader may stall for hours: ``less`` that nobody scrolls, Ctrl-S, a stalled ssh. Where main then waited in write(2),
no Ctrl-C would end that (Python calls the handler and goes on with the write, PEP 475), and results.csv not be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import math
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TextIO, cast

_AT_ONCE = 1 << 16

_SURE = 256
"""Bytes that a terminal or a socket takes whole when poll(2) says that it takes any."""


class Sink(Protocol):
    """Where text goes."""

    def write(self, text: str) -> None:
        """Raises OSError where nobody can ever read it."""

    def push(self) -> bool:
        """Hand on what waits, as far as it is taken now. True: nothing waits any more. Raises as ``write``."""


class Outlet:
    """A pipe, terminal or socket: what it does not take now waits here for ``push``. Any thread may write.

    It is opened anew, with O_NONBLOCK: set on the descriptor that is there, the flag would be shared with the shell
    and with whoever else has it (libuv opens terminals anew for the same reason). Where that is refused (after su, say,
    or for a socket), it is asked before each few bytes.
    """

    def __init__(self, fd: int) -> None:
        self._waiting = bytearray()
        self._lock = threading.RLock()
        self._pushing = False
        self._asks = False
        try:
            opened = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            opened, self._asks = os.dup(fd), True
        self.fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # beyond the standard ones, if those were closed
        os.close(opened)

    def write(self, content: bytes) -> None:
        """Raises OSError where nobody can ever read it, of what was written before as well."""
        with self._lock:
            self._waiting += content
            self.push()

    def push(self) -> bool:
        """See ``Sink``."""
        with self._lock:
            if self._pushing:  # a signal handler of the app prints in the middle of it: bytes would be sent twice
                return False
            self._pushing = True
            try:
                while self._waiting and (not self._asks or writable([self.fd], 0)):
                    sent = os.write(self.fd, bytes(self._waiting[: _SURE if self._asks else _AT_ONCE]))
                    del self._waiting[:sent]
            except BlockingIOError:
                pass
            except OSError:
                self._waiting.clear()
                raise
            finally:
                self._pushing = False
            return not self._waiting

    def close(self) -> None:
        """What still waits is lost."""
        os.close(self.fd)


def writable(fds: Iterable[int], timeout_s: float | None) -> bool:
    """Block until one of the descriptors takes something, or has lost its reader; False: the time is over."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if timeout_s is None else math.ceil(1000 * max(timeout_s, 0))))


class _Through:
    """A stream that is more than its descriptor, such as one that also keeps a copy: it is written to as it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def push(self) -> bool:
        return True


class _ByOutlet:
    """A stream that is its descriptor and no more."""

    def __init__(self, outlet: Outlet, stream: TextIO) -> None:
        self._outlet = outlet
        self._encoding, self._errors = stream.encoding, stream.errors or "strict"

    def write(self, text: str) -> None:
        self._outlet.write(text.encode(self._encoding, self._errors))

    def push(self) -> bool:
        return self._outlet.push()


class Streams:
    """sys.stdout and sys.stderr, from ``capture`` to ``release``: nobody who prints to them waits for a reader.

    Only those that can stall, pipes, terminals and sockets, and that are nothing but their descriptors. Logging
    handlers that write to them are led the same way.
    """

    def __init__(self) -> None:
        self._outlets: dict[tuple[int, int], Outlet] = {}
        self._captured: list[_Captured] = []

    def sink(self, stream: TextIO) -> Sink:
        """Where this stream's text goes: streams of one file share an outlet, so that their lines are not torn."""
        if type(stream) is not io.TextIOWrapper:
            return _Through(stream)
        found = os.fstat(stream.fileno())
        file = (found.st_dev, found.st_ino)
        if file not in self._outlets:
            self._outlets[file] = Outlet(stream.fileno())
        return _ByOutlet(self._outlets[file], stream)

    def capture(self) -> None:
        """Raises nothing: a stream that is not what it seems to be stays as it is."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            with contextlib.suppress(OSError, ValueError):  # closed
                if type(stream) is io.TextIOWrapper and _can_stall(stream.fileno()):
                    self._captured.append(_Captured(stream, name, self.sink(stream)))

    def lead(self, of_it: Callable[[TextIO], bool], above: Callable[[str], None]) -> None:
        """Whole lines that are printed to those of the streams go ``above``, until ``lead_back``."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if of_it(stream):
                if not isinstance(stream, _Captured):
                    stream = _Captured(stream, name, self.sink(stream))
                    self._captured.append(stream)
                stream.above = above

    def lead_back(self) -> None:
        """Those lines, and what has no end yet, go where the rest goes."""
        for captured in self._captured:
            if captured.above is not None:
                captured.above = None
                captured.flush()

    @property
    def stuck(self) -> list[int]:
        """Hands on what waits, as far as it is taken now: the descriptors of those for which something waits still.

        What nobody can read any more waits for nobody.
        """
        found = []
        for outlet in self._outlets.values():
            with contextlib.suppress(OSError):
                found += [] if outlet.push() else [outlet.fd]
        return found

    def wait(self, deadline: float | None) -> bool:
        """Block until all is taken (True), or until then (False), a point on the monotonic clock.

        What a signal handler raises ends it.
        """
        while stuck := self.stuck:
            if not writable(stuck, None if deadline is None else deadline - time.monotonic()):
                return False
        return True

    def release(self, deadline: float | None = 0.0) -> None:
        """Give the streams back, once they have taken what waits, but no later than then: the rest of it is lost."""
        captured, self._captured = self._captured, []
        for each in captured:
            each.release()
        try:
            self.wait(deadline)
        finally:
            outlets, self._outlets = self._outlets, {}
            for outlet in outlets.values():
                outlet.close()


def _can_stall(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


_HELD = 1 << 16
"""Characters of a line that has not ended, and so is not shown yet."""


class _Captured:
    """In place of a standard stream: lines go to its sink when they have ended, or, where there is one, above a table.

    In a fork it prints as if it were not there.
    """

    def __init__(self, stream: TextIO, name: str, sink: Sink) -> None:
        self.above: Callable[[str], None] | None = None
        self._stream = stream
        self._name = name
        self._sink = sink
        self._pid = os.getpid()
        self._held = ""
        self._lock = threading.RLock()
        self._released = False
        setattr(sys, name, self)
        _relead(stream, self)

    def write(self, text: str) -> int:
        if self._released or os.getpid() != self._pid:
            return self._stream.write(text)
        with self._lock:
            lines, end, held = (self._held + text).rpartition("\n")
            self._held = held[-_HELD:]  # a progress bar, which ends no line
            if end and self.above is not None:
                self.above(lines)
            elif end:
                self._sink.write(f"{lines}\n")
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """A line that has no end waits for it, where it is to go above."""
        if self._released or os.getpid() != self._pid:
            self._stream.flush()
            return
        with self._lock:
            if self._held and self.above is None:
                held, self._held = self._held, ""
                self._sink.write(held)

    def release(self) -> None:
        self.above = None
        try:
            self.flush()
        except (OSError, ValueError):  # nobody reads it
            pass
        finally:
            self._released = True
            _relead(self, self._stream)
            if getattr(sys, self._name) is self:
                setattr(sys, self._name, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _relead(before: object, after: object) -> None:
    """Have the logging handlers that write to the one stream write to the other."""
    loggers = [logging.root, *list(logging.Logger.manager.loggerDict.values())]
    for handler in [handler for logger in loggers for handler in getattr(logger, "handlers", [])]:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            # Not by setStream, which flushes the one before: that would block where it is stuck.
            handler.acquire()
            handler.stream = cast(TextIO, after)
            handler.release()
