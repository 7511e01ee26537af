"""All calls to the operating system that concern processes: fork, pidfd, process groups, subreaper, waiting.

Nothing here knows of jobs, GPUs or files. A ``Family`` is a set of child processes, the *leaders*, each with its whole
tree; it is used by one single-threaded process, which is a child subreaper. So is each leader: while it runs, what
daemonizes below it hangs on the leader, and when the leader dies, on us. So everything is found again, whatever session
or process group it went to.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ._model import ConfigurationError, Exit

_SYS_PIDFD_OPEN = 434
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IONBF = 2

_libc = ctypes.CDLL(None, use_errno=True)

_NOTHING = contextlib.nullcontext()

Handler = Callable[[int, FrameType | None], Any]
"""A signal handler written in Python."""


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


def become_subreaper() -> None:
    """Orphans below this process become its children, not those of init (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; at once if that was before this call."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


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


def raise_oom_score(by: int) -> None:
    """Make this process, and what it starts, a likelier choice of the kernel's out-of-memory killer."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = min(int(file.read()) + by, 1000)
        file.seek(0)
        file.write(str(score))


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


def fork(main: Callable[[frozenset[int]], int], around: contextlib.AbstractContextManager[None] = _NOTHING) -> int:
    """The pid of a child that runs ``main`` and exits with what it returns.

    ``around``: entered before the fork and left after it, in both processes, without a signal in between.

    All signals are blocked in the child, since one that came right after the fork would be lost: ``main`` gets the
    caller's mask, and sets it when its handlers are in place. An exception that it lets out is printed to its stderr,
    exit code 70. Raises OSError (EAGAIN, ENOMEM) where the system refuses.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with around, warnings.catch_warnings():
            # Python 3.12 warns where other threads exist; whether that is safe here is decided before, and better.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run_and_exit(main, mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run_and_exit(main: Callable[[frozenset[int]], int], mask: Iterable[int]) -> None:
    code = 70
    try:
        code = main(frozenset(mask))
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def children() -> set[int]:
    """The pids of the children of this single-threaded process, zombies included.

    The kernel may leave some out when one of them ends during the reading (proc(5)): read until two readings agree.
    """
    before = _children()
    while (now := _children()) != before:
        before = now
    return now


def _children() -> set[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return {int(pid) for pid in file.read().split()}
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == os.getpid()}


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass
class _Leader:
    pid: int
    pidfd: int


@dataclass
class _Ended:
    """A leader that is gone. ``exit``: None until it could be reaped; ``remnants``: what of its tree is left to end."""

    pid: int
    exit: Exit | None
    remnants: set[int] = field(default_factory=set)


_WATCHED_AT_ONCE = 16
"""Remnants with a pidfd. There may be more of them than there are descriptors, and one that ends is enough to go on."""


@dataclass
class Family:
    """The leaders that this process started, by key, and whatever of their trees fell to this process.

    ``wait`` is the one place that blocks. Every child of this process that is not a running leader is taken for a
    remnant of an ended one, and killed: nothing else here may start processes.
    """

    _leaders: dict[int, _Leader] = field(default_factory=dict)
    _ended: dict[int, _Ended] = field(default_factory=dict)
    _watched: dict[int, int] = field(default_factory=dict)  # some of the remnants: pidfd by pid
    _abandoned: set[int] = field(default_factory=set)

    def descriptors(self) -> list[int]:
        """The descriptors that are ours and that a child must close."""
        return [*(leader.pidfd for leader in self._leaders.values()), *self._watched.values()]

    def start(self, key: int, main: Callable[[frozenset[int]], int]) -> int:
        """Fork a leader, see ``fork``; its pid. The child must make itself a session leader and a subreaper."""
        os.close(os.open(os.devnull, os.O_RDONLY))  # raises, before the fork, where none is left for the pidfd
        pid = fork(main)
        self._leaders[key] = _Leader(pid, pidfd_open(pid))
        return pid

    def signal(self, key: int, signum: int) -> None:
        """To the leader alone: what it started is its own to end, politely."""
        if key in self._leaders:
            with contextlib.suppress(PermissionError):  # it has become another user, as sudo does
                os.kill(self._leaders[key].pid, signum)  # it is our child and not reaped: the pid is its own

    def kill(self, key: int) -> None:
        """SIGKILL to the leader and its process group. What left the group falls to us when the leader is gone."""
        if key in self._leaders:
            _kill(self._leaders[key].pid)

    def abandon(self, key: int) -> None:
        """Wait no longer for this leader, nor for what is left of it."""
        if key in self._leaders:
            leader = self._leaders.pop(key)
            os.close(leader.pidfd)
            self._abandoned.add(leader.pid)
        elif key in self._ended:
            ended = self._ended.pop(key)
            self._abandoned |= ended.remnants if ended.exit is not None else ended.remnants | {ended.pid}
            for pid in ended.remnants & self._watched.keys():
                os.close(self._watched.pop(pid))

    def wait(self, timeout: float | None, watch: Iterable[int] = ()) -> tuple[dict[int, Exit | None], list[int]]:
        """Block until something ends, a watched descriptor is readable, or ``timeout`` seconds have passed.

        Gives the keys that made a step (None: the leader is gone, something of it is left; an Exit: all of its tree is
        gone) and the watched descriptors that are readable.
        """
        leaders = {leader.pidfd: key for key, leader in self._leaders.items()}
        remnants = {pidfd: pid for pid, pidfd in self._watched.items()}
        if (
            self._ended and not remnants
        ):  # what is left cannot be reaped yet, or there is no descriptor for it: look again
            timeout = 0.1 if timeout is None else min(timeout, 0.1)
        ready = wait_readable([*leaders, *remnants, *watch], timeout)
        steps: dict[int, Exit | None] = {}
        for key in (leaders[fd] for fd in ready if fd in leaders):
            leader = self._leaders.pop(key)
            os.close(leader.pidfd)
            self._ended[key] = _Ended(leader.pid, None)
            steps[key] = None
        gone = {remnants[fd] for fd in ready if fd in remnants}
        for pid in gone:  # where it cannot be reaped yet, its pidfd would wake us without end
            os.close(self._watched.pop(pid))
        if self._ended:
            self._clear(steps.keys() | {key for key, ended in self._ended.items() if ended.remnants & gone})
            for key, ended in list(self._ended.items()):
                if ended.exit is not None and not ended.remnants:
                    steps[key] = ended.exit
                    del self._ended[key]
        return steps, [fd for fd in ready if fd not in leaders and fd in watch]

    def _remnants(self) -> set[int]:
        return set().union(*(ended.remnants for ended in self._ended.values()))

    def _clear(self, heirs: set[int]) -> None:
        """End what ended leaders left behind, and reap what of it is gone.

        ``heirs``: the keys to which a child that is new to us belongs: those whose leader, or whose remnant, is gone
        just now.
        """
        for ended in self._ended.values():
            if ended.exit is None:
                ended.exit = _reap_leader(ended.pid)
        while True:
            known = {leader.pid for leader in self._leaders.values()} | self._remnants() | self._abandoned
            known |= {ended.pid for ended in self._ended.values() if ended.exit is None}
            for pid in children() - known:
                _kill(pid)
                for key in heirs or self._ended:
                    self._ended[key].remnants.add(pid)
            reaped = {pid for pid in self._remnants() | self._abandoned if _reaped(pid)}
            self._abandoned -= reaped
            heirs = {key for key, ended in self._ended.items() if ended.remnants & reaped}
            for ended in self._ended.values():
                ended.remnants -= reaped
            for pid in reaped & self._watched.keys():
                os.close(self._watched.pop(pid))
            if not reaped:  # whoever is reaped may have left children of its own, to us
                break
        for pid in sorted(self._remnants() - self._watched.keys())[: _WATCHED_AT_ONCE - len(self._watched)]:
            with contextlib.suppress(OSError):  # no descriptor is left: then without
                spare = os.open(os.devnull, os.O_RDONLY)  # the last one is for other work
                try:
                    pidfd = pidfd_open(pid)
                finally:
                    os.close(spare)
                if wait_readable([pidfd], 0):  # gone, and cannot be reaped yet
                    os.close(pidfd)
                else:
                    self._watched[pid] = pidfd


def _kill(pid: int) -> None:
    """SIGKILL to a child that is not reaped, and to the process group that it leads, if it does."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no such group, or one of another user by now
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _reap_leader(pid: int) -> Exit | None:
    """How a leader that is gone ended. Its group is killed first: while the zombie holds the pid, the number is its.

    None where it cannot be reaped: a debugger that traces it has to do so first.
    """
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        return None
    _kill(pid)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return Exit(
        code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mb=usage.ru_maxrss * 1024 / 1e6,
    )


def kill_children(spare: int) -> None:
    """SIGKILL to the children of this process but one, and to what they lead."""
    for pid in children() - {spare}:
        _kill(pid)


def end_all_children(within_s: float) -> None:
    """SIGKILL and reap every child of this process, and what falls to it meanwhile, for so many seconds at most.

    Never raises: nobody is left to do it.
    """
    deadline = time.monotonic() + within_s
    while pids := children():
        for pid in pids:
            _kill(pid)
        with contextlib.suppress(OSError):
            pidfd = pidfd_open(min(pids))
            wait_readable([pidfd], min(0.1, deadline - time.monotonic()))  # it may be one that does not die
            os.close(pidfd)
        if not {pid for pid in pids if _reaped(pid)} and time.monotonic() >= deadline:
            return


def raise_descriptor_limit() -> None:
    """As many descriptors as the hard limit allows: one for each job is needed, and the soft one is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wait_readable(fds: Iterable[int], timeout: float | None = None) -> list[int]:
    """Block until one of the descriptors is readable or ``timeout`` seconds have passed; which ones are readable.

    A Python signal handler may run meanwhile. With poll(2), since select(2) fails beyond descriptor 1023 and an epoll
    object is a descriptor of its own.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    longest_s = 86400.0 * 20  # poll(2) counts milliseconds in 31 bits
    return [fd for fd, _ in poll.poll(None if timeout is None else math.ceil(1000 * min(max(timeout, 0), longest_s)))]


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


def silence_handlers() -> dict[int, Handler]:
    """Ignore each signal for which there is a handler in Python, user code that is, and give those handlers."""
    found: dict[int, Handler] = {}
    for signum in signal.valid_signals():
        handler = signal.getsignal(signum)
        if callable(handler):
            found[signum] = handler
            signal.signal(signum, signal.SIG_IGN)
    return found


def wakeup_pipe() -> tuple[int, int]:
    """The two ends of a pipe that becomes readable, with the number of the signal, when a handled signal arrives."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read, write


def is_refusal(error: OSError) -> bool:
    """True where the system refuses to start a process for now, and may allow it later."""
    return error.errno in {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


def reap(pid: int) -> None:
    """Take the exit status of a child that has ended; somebody else may have done so."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def signal_self(signum: int) -> None:
    """Send this process a signal: where its action is the default one, this does not return."""
    os.kill(os.getpid(), signum)
