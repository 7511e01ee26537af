"""A job's own process, from the fork to its exit: all of this runs in the child, in its only thread.

In this order: what makes the process one that can be found and ended; what it sees (its log, its environment, its GPU);
what it must not share with the app (random numbers, exit hooks); and only then user code.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _interpreter, _process
from ._journal import SweepFiles
from ._model import Job, JobCrashedError, JobError
from ._result import Body, Result, described, save

UNSAVED = signal.SIGUSR1
"""To the supervisor, from a job that cannot save its result and waits."""

_BY_HAND = (signal.SIGTERM, signal.SIGINT)

_OOM_SCORE = 300
"""Added to the job's score: when memory runs out, the kernel takes a job rather than the sweep or the desktop."""

_inherited_streams: list[object] = []  # never finalized: they would flush the app's buffers, or close descriptors


@dataclass(frozen=True)
class Assignment:
    """What the process of one try is told. ``environ``: the whole environment, the visible devices included."""

    job: Job
    files: SweepFiles
    environ: Mapping[str, str]
    cwd: str
    threads: int
    random_before_fork: Any


def main(
    assignment: Assignment,
    body: Body,
    *,
    supervisor: int,
    log: int,
    close: Iterable[int],
    mask: frozenset[int],
    handlers: Mapping[int, _process.Action],
) -> int:
    """Run the job; the exit code of its process.

    ``log``: descriptor of its log; ``close``: the supervisor's own; ``mask``, ``handlers``: of signals, of the app.
    """
    received = _be_a_leader(supervisor, mask, handlers)
    _use_log(log, close)
    _see(assignment)
    of_the_app = _interpreter.forget_exit_hooks()
    job_process = os.getpid()
    result = _run(assignment, body)
    if os.getpid() == job_process:  # not so in a fork of the task's own that came back from it: it is not the job
        told = sorted(received.signals().intersection(_BY_HAND))
        stopped = f"{signal.Signals(told[0]).name} was sent to its process" if told else None
        result = save(
            assignment.files,
            assignment.job,
            body,
            result,
            stopped=stopped,
            unsaved=lambda: _process.send_signal(supervisor, UNSAVED),
        )
    if result.error is not None:
        _call_excepthook(result.error)
    _interpreter.run_exit_hooks(of_the_app)
    _process.flush_streams()
    return 0 if result.error is None else 1


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


def _call_excepthook(error: Exception) -> None:
    """As the interpreter does at an uncaught exception; the hook is the user's, and what it raises changes nothing."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        traceback.print_exc()


def _be_a_leader(supervisor: int, mask: frozenset[int], handlers: Mapping[int, _process.Action]) -> _process.Received:
    """A session of its own, so that a signal to "its" group meets nobody else; then signals as in a new process.

    The app's handlers for what ends processes are for main, and not for it; those for other signals are as they were.
    """
    os.setsid()
    _process.die_with_parent(supervisor)
    _process.become_subreaper()
    received = _process.Received()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return received


def _use_log(log: int, close: Iterable[int]) -> None:
    """Standard streams for a process without a terminal, unbuffered: whatever was printed is there, however it dies.

    Closes the supervisor's descriptors and no other: those of the app are in use, and the number of a closed one is
    given to the user's next file.
    """
    for fd in close:
        os.close(fd)
    _process.redirect(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    _process.redirect(log, 1, 2)
    _process.unbuffer_c_streams()
    _inherited_streams.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _unbuffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(2)  # type: ignore[misc]
    _interpreter.enable_faulthandler()


def _unbuffered(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _see(assignment: Assignment) -> None:
    """The environment, with the visible devices, before anything can ask for it; then threads and random numbers."""
    for name in os.environ.keys() - assignment.environ.keys():
        del os.environ[name]
    os.environ.update(assignment.environ)
    limits = _interpreter.limit_threads(assignment.threads, os.environ)
    if limits:
        os.environ.update(limits)
        _interpreter.apply_threads(assignment.threads)
    _interpreter.settle_random(assignment.random_before_fork)
    _process.raise_oom_score(_OOM_SCORE)


def _run(assignment: Assignment, body: Body) -> Result:
    job = assignment.job
    try:
        os.chdir(assignment.cwd)
        return body.run(job)
    except Exception as error:
        return body.failure(job, error)
    except BaseException as error:  # from a callback or a resolver: the task function itself is run by ``call``
        return body.failure(job, _as_exception(job, error))


def _as_exception(job: Job, error: BaseException) -> JobError:
    wrapped = JobError(job.num, job.overrides, f"raised {described(error)} outside of its task function")
    wrapped.__cause__ = error
    return wrapped
