"""The life of one process: its fork, what it may do and which signals it gets, its end.

Nothing here, nor in the rooms of the system below, knows of jobs, GPUs or files of a sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)

_NOTHING = contextlib.nullcontext()


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


def raise_oom_score(by: int) -> None:
    """Make this process, and what it starts, a likelier choice of the kernel's out-of-memory killer."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = min(int(file.read()) + by, 1000)
        file.seek(0)
        file.write(str(score))


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


def _raise_limit(which: int) -> None:
    _, hard = resource.getrlimit(which)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(which, (hard, hard))


def set_name(name: str) -> None:
    """The name of this process, 15 bytes of it, as ``name_of`` and ps(1) see it."""
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()), 0, 0, 0)


def send_signal(pid: int, signum: int) -> None:
    """To a process that is known to live: the parent of one that dies with it, say."""
    os.kill(pid, signum)


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
