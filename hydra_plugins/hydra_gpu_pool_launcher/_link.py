"""Main's link to its guard and supervisor: how they are forked, and the channel between them.

Main and supervisor share one socket pair. Main writes requests on it, one JSON line each; the supervisor writes
``ready`` once, ``refused`` in answer to a request, and else single newlines, the doorbell: there is something new in
the journal. It never blocks on main, which may be suspended for hours. That the other side is gone is told by a pidfd:
any fork of main may hold the socket open.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _descriptors, _interpreter, _pidfd, _process, _streams
from ._errors import ConfigurationError, GpuPoolError
from ._guard import Fresh, be_guard
from ._world import App, Origin


class SupervisorGoneError(GpuPoolError):
    """The supervisor ended before the work was done: somebody killed it, or it has a fault (see its log)."""


_open: set[int] = set()
"""The descriptors of all links of this process, for a guard to close: those of another supervisor are not its own."""

os.register_at_fork(after_in_child=_open.clear)  # a job's own pool would close what has these numbers by then


_unclosed: list[Link] = []
"""Links that nobody has any more: whoever waited for their ends was interrupted."""

os.register_at_fork(after_in_child=_unclosed.clear)


@dataclass
class Link:
    """The guard and the supervisor as main knows them: pids, pidfds, and main's end of the socket pair."""

    guard: int
    guard_pidfd: int
    channel: int
    supervisor_pidfd: int | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    _unsent: deque[bytes] = field(default_factory=deque)
    _sending: bool = False
    _unread: bytes = b""
    _messages: deque[dict[str, Any]] = field(default_factory=deque)

    @property
    def lifeline(self) -> int:
        """Readable when the supervisor is gone."""
        return self.guard_pidfd if self.supervisor_pidfd is None else self.supervisor_pidfd

    def wake(self) -> None:
        """Whoever has suspended guard or supervisor (SIGSTOP): main waits for their ends, and they go on for it."""
        for pid, pidfd in ((self.guard, self.guard_pidfd), (self.ready.get("pid"), self.supervisor_pidfd)):
            if pid is not None and pidfd is not None and not _descriptors.wait_readable([pidfd], 0):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    _process.send_signal(pid, signal.SIGCONT)

    def gone(self) -> bool:
        """True when the supervisor is."""
        return bool(_descriptors.wait_readable([self.lifeline], 0))

    def send(self, message: dict[str, Any]) -> None:
        """One line to the supervisor; nothing happens where it is gone.

        A signal handler may call this in the middle of another call, whose line must not be torn: its own then waits.
        """
        self._unsent.append(json.dumps(message).encode() + b"\n")
        while self._unsent and not self._sending:  # again: a handler may have come after the last look
            self._sending = True
            try:
                while self._unsent:
                    self._send_some()
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
            finally:
                self._sending = False

    def _send_some(self) -> None:
        line = self._unsent[0]
        try:
            sent = _descriptors.send(self.channel, line)
        except BlockingIOError:
            if not _descriptors.wait_writable(self.channel, unless_readable=self.lifeline):
                raise BrokenPipeError from None
            return
        if sent < len(line):
            self._unsent[0] = line[sent:]
        else:
            self._unsent.popleft()

    def drain(self) -> None:
        """Throw away what is left of doorbells: an answer that found the buffer full of them would be lost."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while os.read(self.channel, 1 << 16):
                pass
        self._unread = b""
        self._messages.clear()

    def message(self) -> dict[str, Any] | None:
        """The next of those that have come; None: no more. Does not block."""
        return self._messages.popleft() if self._messages else None

    def receive(self, timeout: float | None = None, unless_writable: Sequence[int] = ()) -> bool:
        """Block until something has come, a message or a doorbell; False: the other side is gone.

        ``timeout``: seconds after which to return True although nothing has come. ``unless_writable``: descriptors by
        which to do so as well.
        """
        while True:
            ready = _descriptors.wait_readable([self.channel, self.lifeline], timeout, unless_writable)
            if not {self.channel, self.lifeline}.intersection(ready):
                return True
            if self.channel in ready:
                try:
                    got = os.read(self.channel, 1 << 16)
                except ConnectionResetError:
                    got = b""
                *lines, self._unread = (self._unread + got).split(b"\n")
                for line in filter(None, lines):
                    with contextlib.suppress(ValueError):  # torn, since nobody had read for long
                        self._messages.append(json.loads(line))
                if lines:
                    return True
                if not got:
                    _descriptors.wait_readable([self.lifeline])
            if self.lifeline in ready:
                return False


def start(app: App, fresh: Fresh | None = None) -> Link:
    """Fork the guard, which forks the supervisor; returns when the latter serves, or has said why it does not.

    Raises ConfigurationError where the system refuses a process, or the supervisor says why it does not serve, and
    SupervisorGoneError where one ends at once.
    """
    _close_the_unclosed()
    try:
        ours, theirs = (_streams.beyond_standard(end.detach()) for end in socket.socketpair())
        # Taken here: the guard could only hope that the pid is still main's.
        main_pidfd = _streams.beyond_standard(_pidfd.pidfd_open(os.getpid()))
    except OSError as error:
        raise ConfigurationError(f"gpu_pool cannot start: {error.strerror} (see ulimit -n).") from error
    for end in (ours, theirs):
        os.set_blocking(end, False)
    origin = Origin(os.getpid(), main_pidfd, theirs, _interpreter.random_state(), frozenset({ours, *_open}))
    _streams.flush_streams()
    _interpreter.pause_openmp()
    try:
        guard = _process.fork(lambda mask: be_guard(app, origin, mask, fresh), around=_interpreter.quiet_logging())
    except OSError as error:
        os.close(ours)
        raise ConfigurationError(
            f"gpu_pool cannot start: the system refuses a new process ({error.strerror})."
        ) from error
    finally:
        os.close(theirs)
        os.close(main_pidfd)
    link = Link(guard, _pidfd.pidfd_open(guard), ours)
    _open.update({link.guard_pidfd, ours})
    ready = None
    try:
        while ready is None and link.receive():
            ready = link.message()
    except BaseException:  # Ctrl-C, say: nobody would have this link to close it
        close(link, os.getpid())
        raise
    if ready is None:
        close(link, os.getpid())
        raise SupervisorGoneError(
            "The supervisor ended while it started: killed by somebody, or by a fault of gpu_pool that it printed."
        )
    link.ready = ready
    if "refused" in ready:
        close(link, os.getpid())
        raise ConfigurationError(ready["refused"])
    if "pid" not in link.ready:
        return link  # it is gone, or about to be
    with contextlib.suppress(ProcessLookupError):  # gone again already: the guard's end will tell
        link.supervisor_pidfd = _pidfd.pidfd_open(link.ready["pid"])
        _open.add(link.supervisor_pidfd)
    return link


def close(link: Link, owner: int) -> None:
    """Ask the supervisor to end its jobs and itself, and wait for both. Only the process that forked it may."""
    if os.getpid() != owner:
        return
    link.wake()
    link.send({"close": True})
    _unclosed.append(link)
    _descriptors.wait_readable([link.guard_pidfd])
    _descriptors.wait_readable([link.lifeline])  # where the guard was killed, the supervisor ends later
    _let_go(link)


def _close_the_unclosed() -> None:
    for link in list(_unclosed):
        if _descriptors.wait_readable([link.guard_pidfd], 0) and link.gone():
            _let_go(link)


def _let_go(link: Link) -> None:
    _unclosed.remove(link)
    _process.reap(link.guard)
    for fd in {link.guard_pidfd, link.lifeline, link.channel}:
        _open.discard(fd)
        os.close(fd)
