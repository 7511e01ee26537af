"""The standard streams, as the kernel, C and Python have them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys

_IONBF = 2

_libc = ctypes.CDLL(None, use_errno=True)


def flush_c_streams() -> None:
    """What C code has printed leaves its buffers: os._exit does not flush them, and a fork copies them."""
    _libc.fflush(None)


def flush_streams() -> None:
    """What Python and C code has printed leaves its buffers, where the streams are still open."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c_streams()


def unbuffer_c_streams() -> None:
    """What C code prints from here on is not kept in buffers, which would be lost when the process is killed."""
    flush_c_streams()
    for name in ("stdout", "stderr"):
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, name), None, _IONBF, ctypes.c_size_t(0))


def beyond_standard(fd: int) -> int:
    """The descriptor, moved where its number is one of 0 to 2: redirecting a standard stream would close it there.

    A process that was started without standard streams gets these numbers for whatever it opens first.
    """
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def fill_standard() -> None:
    """Open /dev/null as each standard stream that is not there, so that nothing else is given its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def redirect(source: int, *targets: int) -> None:
    """Make the targets, which other programs may inherit, refer to the file of ``source``, which is closed."""
    for target in targets:
        os.dup2(source, target, inheritable=True)
    if source not in targets:
        os.close(source)


def note(text: str) -> None:
    """A line in this process's log, if it takes one: the disk may be full, the user may have closed it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr)
