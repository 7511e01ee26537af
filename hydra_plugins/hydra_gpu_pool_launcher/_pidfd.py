"""A process as others know it, and know it again: by a pidfd, by its start time and name, by the boot it lives in."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from ._descriptors import wait_readable
from ._errors import ConfigurationError

_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434

_libc = ctypes.CDLL(None, use_errno=True)


def pidfd_open(pid: int) -> int:
    """A close-on-exec descriptor that becomes readable when the process ends, its other threads and children or not.

    By ctypes where Python has no ``os.pidfd_open`` although the kernel knows it (conda's, and older standalone builds).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd: int = _libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def find(pid: int, started: int) -> int | None:
    """A pidfd of the process that has this pid and was started then (``start_time``); None: it has ended.

    Where another user's processes are hidden in /proc, a process of this pid is taken for it.
    """
    try:
        pidfd = pidfd_open(pid)
    except ProcessLookupError:
        return None
    # In this order: of a pid that was given to another process before pidfd_open, the start time is another one.
    if start_time(pid) in {started, None} and not wait_readable([pidfd], 0):
        return pidfd
    os.close(pidfd)
    return None


def send_to(pidfd: int, signum: int) -> None:
    """Send a signal to the process of a pidfd, and never to one that has its pid by now. Raises OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, signum)
    elif _libc.syscall(_SYS_PIDFD_SEND_SIGNAL, pidfd, signum, None, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def require_pidfd() -> None:
    """Refuse, with the reason, a system on which a process's end cannot be waited for."""
    if sys.platform != "linux":
        raise ConfigurationError(f"gpu_pool needs Linux 5.4 or newer; this is {sys.platform}.")
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError as error:
        raise ConfigurationError(
            f"gpu_pool needs the system call pidfd_open, which is refused here ({error.strerror}): Linux 5.4 or newer "
            f"has it (this is {os.uname().release}), and a container's seccomp profile must allow it."
        ) from error
    if not os.path.lexists("/proc/self") or os.readlink("/proc/self") != str(os.getpid()):
        raise ConfigurationError(
            "gpu_pool needs to find its processes in /proc, which here is missing or shows another PID namespace; mount"
            " the right one (unshare --mount-proc)."
        )


def name_of(pid: int) -> str | None:
    """The name of a process; None: it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot, by which a pid is known to be its own; None: gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None


def boot_id() -> str:
    """Which of its lives this machine, or virtual machine, is in; "" where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
