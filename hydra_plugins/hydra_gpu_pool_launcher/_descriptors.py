"""Open files by their numbers: known again, out of the way of others, waited for, written to."""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import select
import socket
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._streams import beyond_standard

if TYPE_CHECKING:
    from typing_extensions import Self

_libc = ctypes.CDLL(None, use_errno=True)


def unnamed_file(content: bytes = b"") -> int:
    """A descriptor of a file that is gone with its last descriptor; close-on-exec."""
    if hasattr(os, "memfd_create"):
        fd = beyond_standard(os.memfd_create("gpu_pool"))
    else:  # as os.pidfd_open
        with tempfile.TemporaryFile() as file:
            fd = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]
    return fd


@dataclass(frozen=True)
class Descriptor:
    """A descriptor that a child is given, and knows again: the user may have closed it there, and reused its number."""

    fd: int
    file: tuple[int, int]

    @classmethod
    def of(cls, fd: int) -> Self:
        """The open one of this number."""
        file = identity(fd)
        assert file is not None
        return cls(fd, file)

    def write(self, content: bytes) -> bool:
        """False, and nothing is written, where neither this process nor its parent has it any more. Raises OSError.

        The parent, which gave it to us, has it under the same number.
        """
        fd = self.fd
        if identity(fd) != self.file:
            fd = os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if identity(fd) != self.file:
                return False
            left = memoryview(content)
            while left:
                left = left[os.write(fd, left) :]
            return True
        finally:
            if fd != self.fd:
                os.close(fd)


class Unnamed(Descriptor):
    """A file that is gone with its last descriptor, for what a child has to say: written there once, read here."""

    @classmethod
    def made(cls) -> Unnamed:
        """A new one, close-on-exec. Raises OSError."""
        return cls.of(_out_of_the_way(unnamed_file()))

    def read(self) -> bytes:
        """All that is in it. Not while it is written: both sides share one offset."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)


def wait_readable(fds: Iterable[int], timeout: float | None = None, writable: Iterable[int] = ()) -> list[int]:
    """Block until one of the descriptors is readable or ``timeout`` seconds have passed; which ones are readable.

    Or writable, or without a reader, of those to be ``writable``.

    A Python signal handler may run meanwhile. With poll(2), since select(2) fails beyond descriptor 1023 and an epoll
    object is a descriptor of its own.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    for fd in writable:
        poll.register(fd, select.POLLOUT)
    longest_s = 86400.0 * 20  # poll(2) counts milliseconds in 31 bits
    return [fd for fd, _ in poll.poll(None if timeout is None else math.ceil(1000 * min(max(timeout, 0), longest_s)))]


def pipe_behind(fd: int) -> int | None:
    """The descriptor, where it writes to a pipe: ``wait_readable`` has it once nobody is left to read from that."""
    try:
        return fd if stat.S_ISFIFO(os.fstat(fd).st_mode) else None
    except OSError:
        return None


def send(fd: int, data: bytes) -> int:
    """How much of the data a socket took. Raises OSError; no SIGPIPE, which an app may have at its deadly default."""
    sent: int = _libc.send(fd, data, ctypes.c_size_t(len(data)), socket.MSG_NOSIGNAL)
    if sent < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sent


def wait_writable(fd: int, unless_readable: int) -> bool:
    """Block until the descriptor takes bytes again (True), or the other one is readable (False)."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.register(unless_readable, select.POLLIN)
    return unless_readable not in dict(poll.poll())


def hidden_pipe() -> tuple[int, int]:
    """The two ends of a pipe that does not block, at numbers that code which closes "all" of the small ones spares."""
    read, write = map(_out_of_the_way, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
    return read, write


def descriptors() -> dict[int, tuple[int, int]]:
    """The open descriptors of this process, and what each of them is of."""
    found = {fd: identity(fd) for fd in map(int, os.listdir("/proc/self/fd"))}  # with its own, which is closed by now
    return {fd: file for fd, file in found.items() if file is not None}


_OUT_OF_THE_WAY = 1000


def _out_of_the_way(fd: int) -> int:
    """The descriptor, at a number that code which closes "all" of the small ones does not meet, nor gives to a file."""
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    except OSError:  # so many are not allowed here
        return fd
    os.close(fd)
    return moved


def identity(fd: int) -> tuple[int, int] | None:
    """Which file the descriptor is of: device and inode; None: it is not open."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
