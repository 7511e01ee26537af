"""The calls to the operating system that concern one process: fork, pidfd, signals, descriptors, standard streams.

Nothing here knows of jobs, GPUs or files.
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
import stat
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ._model import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_IONBF = 2

_libc = ctypes.CDLL(None, use_errno=True)

_NOTHING = contextlib.nullcontext()

Handler = Callable[[int, FrameType | None], Any]
"""A signal handler written in Python."""

Action = Handler | int
"""What is done about a signal: a handler, signal.SIG_DFL or signal.SIG_IGN."""


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


def become_subreaper() -> None:
    """Orphans below this process become its children, not those of init (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; at once if that was before this call."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """No signal any more for what ``die_with_parent`` asked for."""
    _prctl(_PR_SET_PDEATHSIG, 0)


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
            run_and_exit(lambda: main(frozenset(mask)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """End this process with what ``main`` returns, and run nothing else; 70 where it raises, with the traceback.

    An interrupt ends it by its signal, as it does any interpreter.
    """
    code = 70
    try:
        code = main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal_self(signal.SIGINT)
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def answer_of_fork(question: Callable[[], bool]) -> bool:
    """What a fork of this process, made for it and gone, answers. Blocks until it does."""
    pid = fork(lambda _: int(question()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


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


def execute(command: Sequence[str], keep: Iterable[int], environ: Mapping[str, str]) -> NoReturn:
    """Become another program, which has these descriptors and those that are inheritable. Raises OSError."""
    for fd in keep:
        os.set_inheritable(fd, True)
    os.execve(command[0], [*command], dict(environ))


def raise_descriptor_limit() -> None:
    """As many descriptors as the hard limit allows: one for each job is needed, and the soft one is often 1024."""
    _raise_limit(resource.RLIMIT_NOFILE)


def raise_file_size_limit() -> None:
    """Files as large as the hard limit allows."""
    _raise_limit(resource.RLIMIT_FSIZE)


@contextlib.contextmanager
def files_of_any_size() -> Iterator[None]:
    """The same while this lasts: a file in memory counts, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    raise_file_size_limit()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def children_of_our_own() -> Iterator[None]:
    """While this lasts, nobody but us learns of the ends of children: a handler would take their exit status."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def note(text: str) -> None:
    """A line in this process's log, if it takes one: the disk may be full, the user may have closed it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr)


def _raise_limit(which: int) -> None:
    _, hard = resource.getrlimit(which)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(which, (hard, hard))


def set_name(name: str) -> None:
    """The name of this process, 15 bytes of it, as ``name_of`` and ps(1) see it."""
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()), 0, 0, 0)


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


_IN_MODIFY, _IN_CLOSE_WRITE, _IN_MOVED, _IN_CREATE, _IN_DELETE = 0x2, 0x8, 0xC0, 0x100, 0x200

GROWN = _IN_MODIFY | _IN_MOVED | _IN_CREATE
"""A file grows, comes or is renamed."""

LET_GO = _IN_CLOSE_WRITE | _IN_DELETE
"""A file that was open for writing is closed, or one is removed."""


class Changes:
    """A descriptor that becomes readable when something happens to a file of one of the directories (inotify(7)).

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
        if self.fd >= 0:
            os.close(self.fd)

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


def send_signal(pid: int, signum: int) -> None:
    """To a process that is known to live: the parent of one that dies with it, say."""
    os.kill(pid, signum)


def is_refusal(error: OSError) -> bool:
    """True where the system refuses to start a process for now, and may allow it later."""
    return error.errno in {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


def is_of_the_disk(error: OSError) -> bool:
    """True where a file cannot be written for a reason that a person may take away: full, read-only, not there."""
    return error.errno in _OF_THE_DISK


def reap(pid: int) -> None:
    """Take the exit status of a child that has ended; somebody else may have done so."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def signal_self(signum: int) -> None:
    """Send this process a signal: where its action is the default one, this does not return."""
    os.kill(os.getpid(), signum)
