"""Changes of files, waited for: inotify(7)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

from ._descriptors import wait_readable

if TYPE_CHECKING:
    from typing_extensions import Self

_IN_MODIFY, _IN_CLOSE_WRITE, _IN_MOVED, _IN_CREATE, _IN_DELETE = 0x2, 0x8, 0xC0, 0x100, 0x200

GROWN = _IN_MODIFY | _IN_MOVED | _IN_CREATE
"""A file grows, comes or is renamed."""

LET_GO = _IN_CLOSE_WRITE | _IN_DELETE
"""A file that was open for writing is closed, or one is removed."""

_libc = ctypes.CDLL(None, use_errno=True)


class Changes:
    """A descriptor that becomes readable when something happens to a file of one of the directories.

    Where the system refuses to watch, or cannot, as over a network: it stays silent. So wait with a timeout as well.
    """

    def __init__(self, events: int = GROWN) -> None:
        self.fd: int = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._events = events
        self._watched: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more."""
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def blind(self) -> bool:
        """Nothing is watched: the system has refused to, for its limits on users (fs.inotify), say."""
        return self.fd < 0 or not self._watched

    def watch(self, directory: str) -> None:
        """From now on this one, too, if it is there; it may be called again and again."""
        if self.fd < 0 or directory in self._watched:
            return
        if _libc.inotify_add_watch(self.fd, os.fsencode(directory), self._events) >= 0:
            self._watched.add(directory)

    def wait(self, timeout: float, *others: int) -> list[int]:
        """Block until something has changed, or one of the other descriptors is readable: those of them that are."""
        ready = wait_readable([fd for fd in (self.fd, *others) if fd >= 0], timeout)
        if self.fd in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.fd, 1 << 16):
                    pass
        return [fd for fd in ready if fd != self.fd]
