"""A process for user code, from its fork on: a session leader with its own streams, signals, environment and devices.

What the process of a job and that of a rank have in common; all of it runs there, in its only thread. In this order:
what makes the process one that can be found and ended; what it sees (its log, its environment, its GPUs); what it must
not share with the process that it is a copy of (random numbers, exit hooks); and only then user code.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from . import _carry, _exit_hooks, _interpreter, _process, _signals, _streams, _threads
from ._caps import LIMITS
from ._errors import ConfigurationError, JobCrashedError, JobError
from ._exceptions import described
from ._files import SweepFiles
from ._model import Job
from ._tail import one_line

T = TypeVar("T")

_BY_HAND = (signal.SIGTERM, signal.SIGINT)

_LONGEST_TITLE = 200

_inherited_streams: list[object] = []  # never finalized: they would flush the app's buffers, or close descriptors


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What such a process is told. ``environ``: the whole environment, the visible devices included.

    ``visibility``: the variables in it that show the devices. ``random_before_fork``: ``_interpreter.random_state()``
    of the process that this one is a copy of, or that process's own. ``threads``: None where the user chose them.
    ``oom_score``: added to the process's score, so that the kernel takes it, when memory runs out, rather than the
    sweep or the desktop.
    """

    job: Job
    files: SweepFiles
    environ: Mapping[str, str]
    cwd: str
    threads: int | None
    random_before_fork: Any
    visibility: tuple[str, ...] = ()
    oom_score: int = 0

    @property
    def name(self) -> str:
        """Of the process, before the job's overrides: its number."""
        return str(self.job.num)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where it comes from. ``log``: descriptor of its log; ``close``: those of its parent that are not its own.

    ``mask``, ``handlers``: of signals, those of the app.
    """

    parent: int
    log: int
    close: Iterable[int]
    mask: frozenset[int]
    handlers: Mapping[int, _signals.Action]


def enter(assignment: Assignment, origin: Origin) -> tuple[_signals.Received, _exit_hooks.OfTheApp]:
    """Make this fork such a process: the signals that it gets from here on, and what is not its own to end."""
    received = _signals.Received()
    _lead(origin, origin.handlers)
    _use_log(origin)
    _set_title(assignment)  # before the environment is changed: the library finds the command's place in memory by it
    _see(assignment)
    return received, _exit_hooks.forget_exit_hooks()


def become_fresh(assignment: Assignment, origin: Origin, carried: int, keep: Iterable[int] = ()) -> NoReturn:
    """``enter`` as far as a fork can do it; then this process becomes a fresh interpreter, see ``enter_fresh``.

    ``carried``, ``keep``: descriptors, see ``_carry.become_fresh``. The environment is the new program's from its first
    instruction: an import may ask for the devices.
    """
    # What the supervisor ignores in place of a handler of the app would be ignored in the new program, too.
    actions = {signum: signal.SIG_DFL if callable(action) else action for signum, action in origin.handlers.items()}
    signal.set_wakeup_fd(-1)  # the parent's
    _lead(origin, actions)
    _use_log(origin)
    _process.raise_oom_score(assignment.oom_score)
    limits = _threads.variables(assignment.threads, assignment.environ)
    _carry.become_fresh(carried, assignment, keep, {**assignment.environ, **limits})


def enter_fresh(assignment: Assignment, load: Callable[[], T]) -> tuple[_signals.Received, T | JobError]:
    """The rest of ``enter``, in the fresh interpreter. ``load`` imports the app; what it gives, or why it does not.

    What the import registered for the exit is this process's own; it seeded its random numbers, or nobody did.
    """
    received = _signals.Received()  # from here on: an interrupt during the import is one, too
    _use_standard_streams()
    _set_title(assignment)
    loaded: T | JobError
    try:
        loaded = load()
        _require_unchanged(assignment)
        if assignment.threads is not None and _threads.variables(assignment.threads, assignment.environ):
            _threads.apply(assignment.threads)
    except BaseException as error:
        why = str(error) if isinstance(error, ConfigurationError) else described(error)
        loaded = JobError(assignment.job.num, assignment.job.overrides, f"was not run: {why}")
    _use_default_handlers({})
    received.listen()
    return received, loaded


def _require_unchanged(assignment: Assignment) -> None:
    for name in assignment.visibility:
        if name in LIMITS:
            continue  # the app may well know better
        if os.environ.get(name) != assignment.environ.get(name):
            raise ConfigurationError(
                f"The app sets {name}={os.environ.get(name)!r} when it is imported, over what start_method: spawn has "
                f"set for this job ({assignment.environ.get(name)!r}); set it outside of the app, or use "
                "hydra.launcher.gpus."
            )


def _set_title(assignment: Assignment) -> None:
    title = f"gpu_pool {assignment.name} {' '.join(assignment.job.overrides)}"
    _interpreter.set_title(one_line(title)[:_LONGEST_TITLE])


def call(job: Job, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The function's value. Raises an Exception, never anything that would end the process.

    ``sys.exit()`` and ``sys.exit(0)`` are a normal end, without a value.
    """
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return None
        raise JobCrashedError(job.num, job.overrides, f"called sys.exit({error.code!r})") from error
    except BaseException as error:
        raise JobError(job.num, job.overrides, f"raised {described(error)}") from error


@contextlib.contextmanager
def undisturbed(received: _signals.Received) -> Iterator[list[int]]:
    """What was asked of this process so far, and still is: signals that would tear the saving of a result apart.

    Frees the descriptors of ``received``: the user's may be used up, and the files of a result need one.
    """
    told = sorted(received.close().intersection(_BY_HAND))
    before = {signum: signal.signal(signum, lambda signum, _: told.append(signum)) for signum in _BY_HAND}
    try:
        yield told
    finally:
        for signum, action in before.items():
            signal.signal(signum, signal.SIG_DFL if action is None else action)


def end(error: Exception | None, of_the_app: _exit_hooks.OfTheApp, *, printed: bool = False) -> int:
    """What an interpreter does when it ends, with this error or without; the exit code of the process.

    ``printed``: the error stands in the log already.
    """
    if error is not None and not (printed and sys.excepthook is sys.__excepthook__):
        _call_excepthook(error)
    _exit_hooks.run_exit_hooks(of_the_app)
    _streams.flush_streams()
    return 0 if error is None else 1


def _call_excepthook(error: Exception) -> None:
    """As the interpreter does at an uncaught exception; the hook is the user's, and what it raises changes nothing."""
    with contextlib.suppress(Exception):  # the job's own streams
        _begin_a_line()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        traceback.print_exc()


def _begin_a_line() -> None:
    """Where the last of the log is a progress bar, which has ended none: a traceback would go on in it."""
    _streams.flush_streams()
    with open("/proc/self/fd/2", "rb", buffering=0, opener=_without_waiting) as log:
        found = os.fstat(log.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size and os.pread(log.fileno(), 1, found.st_size - 1) != b"\n":
            os.write(2, b"\n")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _lead(origin: Origin, handlers: Mapping[int, _signals.Action]) -> None:
    """A session of its own, so that a signal to "its" group meets nobody else; then signals as in a new process.

    The app's handlers for what ends processes are for main, and not for it; those for other signals are as they were.
    """
    os.setsid()
    _process.die_with_parent(origin.parent)
    _process.become_subreaper()
    _use_default_handlers(handlers)
    signal.pthread_sigmask(signal.SIG_SETMASK, origin.mask)


def _use_default_handlers(handlers: Mapping[int, _signals.Action]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)


def _use_log(origin: Origin) -> None:
    """Standard streams for a process without a terminal, unbuffered: whatever was printed is there, however it dies.

    Closes the parent's descriptors and no other: those of the app are in use, and the number of a closed one is given
    to the user's next file.
    """
    for fd in origin.close:
        os.close(fd)
    _streams.redirect(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    _streams.redirect(origin.log, 1, 2)
    _use_standard_streams()


def _use_standard_streams() -> None:
    """Python's and C's own on descriptors 0 to 2, and a traceback there of what no handler sees."""
    _streams.unbuffer_c_streams()
    _inherited_streams.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _unbuffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(2)  # type: ignore[misc]
    _interpreter.enable_faulthandler()
    _interpreter.refuse_breakpoint()


def _unbuffered(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _see(assignment: Assignment) -> None:
    """The environment, with the visible devices, before anything can ask for it; then threads and random numbers."""
    for name in os.environ.keys() - assignment.environ.keys():
        del os.environ[name]
    os.environ.update(assignment.environ)
    limits = _threads.variables(assignment.threads, os.environ)
    if assignment.threads is not None and limits:
        os.environ.update(limits)
        _threads.apply(assignment.threads)
    _interpreter.settle_random(assignment.random_before_fork)
    _process.raise_oom_score(assignment.oom_score)
