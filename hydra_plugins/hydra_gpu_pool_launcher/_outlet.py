"""A pipe, a terminal or a socket that is given what it takes now, and not waited for: its reader may stall for hours.

``less`` that nobody scrolls, Ctrl-S, a stalled ssh: where main then waited in write(2), no Ctrl-C would end that
(Python calls the handler and goes on with the write, PEP 475), and results.csv not be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterable

MOST = 1 << 24
"""Bytes that wait, and one text more."""

_AT_ONCE = 1 << 16

_BY_BYTES = 256
"""Of those that are sent one by one, so many would be sent twice where a signal handler raises meanwhile."""


def left_out(size: int) -> str:
    """The line in the place of what was too much to wait."""
    return f"… {size:,} bytes are left out here: too much was waiting for a reader"


class Outlet:
    """What is not taken now waits here for ``push``. Any thread may write.

    With ``MOST`` waiting, what comes is left out until all that waits is taken; then a line says how much it was.

    It is opened anew, with O_NONBLOCK: set on the descriptor that is there, the flag would be shared with the shell
    and with whoever else has it (libuv opens terminals anew for the same reason). A socket, which cannot be, is told
    with each message not to wait. A terminal where that is refused, after su say, is asked before each byte: it is
    writable with room for a few, and nobody can tell for how many.
    """

    def __init__(self, fd: int) -> None:
        self._waiting = bytearray()
        self._left_out = 0
        self._lock = threading.RLock()
        self._pushing = False
        try:
            opened = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            send: Callable[[bytes], int] = self._write
        except OSError:
            opened = os.dup(fd)
            send = self._write_by_bytes
        self.fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)  # beyond the standard ones, if those were closed
        os.close(opened)
        self._socket: socket.socket | None = None
        # With a default timeout, Python would set O_NONBLOCK on what is shared.
        if stat.S_ISSOCK(os.fstat(self.fd).st_mode) and socket.getdefaulttimeout() is None:
            self._socket = socket.socket(fileno=self.fd)
            send = self._send
        self._take = send

    def write(self, content: bytes) -> None:
        """Raises OSError where nobody can ever read it, of what was written before as well."""
        with self._lock:
            if self._left_out or len(self._waiting) >= MOST:
                self._left_out += len(content)
            else:
                self._waiting += content
            self.push()

    def push(self) -> bool:
        """Hand on what waits, as far as it is taken now. True: nothing waits any more. Raises as ``write``."""
        with self._lock:
            if self._pushing:  # a signal handler of the app prints in the middle of it: bytes would be sent twice
                return False
            self._pushing = True
            try:
                while self._waiting:
                    if not (sent := self._take(bytes(self._waiting[:_AT_ONCE]))):
                        break
                    del self._waiting[:sent]
                    if self._left_out and not self._waiting:
                        size, self._left_out = self._left_out, 0
                        self._waiting += f"{left_out(size)}\n".encode()
            except BlockingIOError:
                pass
            except OSError:
                self._waiting.clear()
                self._left_out = 0
                raise
            finally:
                self._pushing = False
            return not self._waiting

    def _write(self, content: bytes) -> int:
        return os.write(self.fd, content)

    def _send(self, content: bytes) -> int:
        assert self._socket is not None
        return self._socket.send(content, socket.MSG_DONTWAIT)

    def _write_by_bytes(self, content: bytes) -> int:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        sent = 0
        with contextlib.suppress(BlockingIOError):  # where somebody else has set O_NONBLOCK
            while sent < min(len(content), _BY_BYTES) and poll.poll(0):
                sent += os.write(self.fd, content[sent : sent + 1])
        return sent

    def close(self) -> None:
        """What still waits is lost."""
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self.fd)


def can_stall(fd: int) -> bool:
    """True of what may have a reader that takes nothing."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def writable(fds: Iterable[int], timeout_s: float | None) -> bool:
    """Block until one of the descriptors takes something, or has lost its reader; False: the time is over."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if timeout_s is None else math.ceil(1000 * max(timeout_s, 0))))
