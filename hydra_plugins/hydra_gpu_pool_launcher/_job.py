"""A job's own process, from the fork to its exit: all of this runs in the child, in its only thread.

In this order: what makes the process one that can be found and ended; what it sees (its log, its environment, its GPU);
what it must not share with the app (random numbers, exit hooks); and only then user code.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from . import _carry, _interpreter, _process
from ._files import SweepFiles
from ._model import ConfigurationError, Job, JobCrashedError, JobError
from ._result import Body, Result, described, save

UNSAVED = signal.SIGUSR1
"""To the supervisor, from a job that cannot save its result and waits."""

SAVING = "gpu_pool saves"
"""The name of its process then: it has finished, and its time is not its own any more."""

_BY_HAND = (signal.SIGTERM, signal.SIGINT)

_TRY_AGAIN_S = 1.0

_OOM_SCORE = 300
"""Added to the job's score: when memory runs out, the kernel takes a job rather than the sweep or the desktop."""

_inherited_streams: list[object] = []  # never finalized: they would flush the app's buffers, or close descriptors


@dataclass(frozen=True)
class Assignment:
    """What the process of one try is told. ``environ``: the whole environment, the visible devices included.

    ``visibility``: the variables in it that show the devices.
    """

    job: Job
    files: SweepFiles
    environ: Mapping[str, str]
    cwd: str
    threads: int
    random_before_fork: Any
    visibility: tuple[str, ...] = ()


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
    received = _process.Received()
    _be_a_leader(supervisor, mask, handlers)
    _use_log(log, close)
    _see(assignment)
    return _run_to_the_end(assignment, body, received, _interpreter.forget_exit_hooks())


def become_fresh(
    assignment: Assignment,
    carried: int,
    *,
    supervisor: int,
    log: int,
    close: Iterable[int],
    mask: frozenset[int],
    handlers: Mapping[int, _process.Action],
) -> NoReturn:
    """``main`` as far as a fork can do it; then this process becomes a fresh interpreter, see ``main_of_fresh``.

    The environment is the new program's from its first instruction: an import may ask for the devices.
    """
    # What the supervisor ignores in place of a handler of the app would be ignored in the new program, too.
    actions = {signum: signal.SIG_DFL if callable(action) else action for signum, action in handlers.items()}
    signal.set_wakeup_fd(-1)  # the supervisor's
    _be_a_leader(supervisor, mask, actions)
    _use_log(log, close)
    _process.raise_oom_score(_OOM_SCORE)
    limits = _interpreter.limit_threads(assignment.threads, assignment.environ)
    _carry.become_fresh(carried, assignment, (), {**assignment.environ, **limits})


def main_of_fresh(assignment: Assignment, body_class: type[Body], load: Callable[[], Body]) -> int:
    """The rest of ``main``, in the fresh interpreter. ``load`` imports the app, and gives the body.

    What the import registered for the exit is this job's own; it seeded its random numbers, or nobody did.
    """
    received = _process.Received()  # from here on: an interrupt during the import is one, too
    _use_standard_streams()
    body: Body
    try:
        body = load()
        _require_unchanged(assignment)
        if _interpreter.limit_threads(assignment.threads, assignment.environ):
            _interpreter.apply_threads(assignment.threads)
    except BaseException as error:
        why = str(error) if isinstance(error, ConfigurationError) else described(error)
        not_run = JobError(assignment.job.num, assignment.job.overrides, f"was not run: {why}")
        body = _NotLoaded(body_class, not_run)  # type: ignore[assignment] # its methods are the class's static ones
    _use_default_handlers({})
    received.listen()
    return _run_to_the_end(assignment, body, received, _interpreter.OfTheApp([], None))


def _require_unchanged(assignment: Assignment) -> None:
    for name in assignment.visibility:
        if os.environ.get(name) != assignment.environ.get(name):
            raise ConfigurationError(
                f"The app sets {name}={os.environ.get(name)!r} when it is imported, over what start_method: spawn has "
                f"set for this job ({assignment.environ.get(name)!r}); set it outside of the app, or use "
                "hydra.launcher.gpus."
            )


class _NotLoaded:
    """The body of a job whose app could not be imported."""

    def __init__(self, body_class: type[Body], error: JobError) -> None:
        self._error = error
        self.failure = body_class.failure
        self.without_config = body_class.without_config

    def run(self, job: Job) -> Result:  # noqa: ARG002
        raise self._error


def _run_to_the_end(
    assignment: Assignment, body: Body, received: _process.Received, of_the_app: _interpreter.OfTheApp
) -> int:
    job_process = os.getpid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not before: there is nothing yet that could catch it
    result = _run(assignment, body)
    if os.getpid() == job_process:  # not so in a fork of the task's own that came back from it: it is not the job
        with _undisturbed(received) as told:
            result = save(assignment.files, assignment.job, body, result, _Circumstances(told))
    if result.error is not None:
        _call_excepthook(result.error)
    _interpreter.run_exit_hooks(of_the_app)
    _process.flush_streams()
    return 0 if result.error is None else 1


@contextlib.contextmanager
def _undisturbed(received: _process.Received) -> Iterator[list[int]]:
    """What was asked of this process so far, and still is: signals that would tear the saving of the result apart.

    Frees the descriptors of ``received``: the user's may be used up, and the files of the result need one.
    """
    _process.raise_file_size_limit()  # whatever the job has set for itself
    name = _process.name_of(os.getpid())
    told = sorted(received.close().intersection(_BY_HAND))
    before = {signum: signal.signal(signum, lambda signum, _: told.append(signum)) for signum in _BY_HAND}
    try:
        yield told
    finally:
        with contextlib.suppress(OSError):
            _process.fill_standard()
        if _process.name_of(os.getpid()) == SAVING:
            _process.set_name(name or "python")
        for signum, action in before.items():
            signal.signal(signum, signal.SIG_DFL if action is None else action)


@dataclass(frozen=True)
class _Circumstances:
    """Of the saving of a result, see ``_result.save``."""

    told: list[int]

    def stopped(self) -> str | None:
        return f"{signal.Signals(self.told[0]).name} was sent to its process" if self.told else None

    def make_room(self) -> bool:
        """Give up standard input, for a descriptor; False: it is given up already."""
        try:
            os.close(0)
        except OSError:
            return False
        return True

    def wait(self, first: bool) -> None:
        """For a disk that can be written; whoever ends the process meanwhile does so without the result."""
        if first:
            _process.set_name(SAVING)
            _process.send_signal(os.getppid(), UNSAVED)
        elif self.told:
            signal.signal(self.told[0], signal.SIG_DFL)
            _process.signal_self(self.told[0])
        time.sleep(_TRY_AGAIN_S)


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


def _be_a_leader(supervisor: int, mask: frozenset[int], handlers: Mapping[int, _process.Action]) -> None:
    """A session of its own, so that a signal to "its" group meets nobody else; then signals as in a new process.

    The app's handlers for what ends processes are for main, and not for it; those for other signals are as they were.
    """
    os.setsid()
    _process.die_with_parent(supervisor)
    _process.become_subreaper()
    _use_default_handlers(handlers)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _use_default_handlers(handlers: Mapping[int, _process.Action]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)


def _use_log(log: int, close: Iterable[int]) -> None:
    """Standard streams for a process without a terminal, unbuffered: whatever was printed is there, however it dies.

    Closes the supervisor's descriptors and no other: those of the app are in use, and the number of a closed one is
    given to the user's next file.
    """
    for fd in close:
        os.close(fd)
    _process.redirect(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    _process.redirect(log, 1, 2)
    _use_standard_streams()


def _use_standard_streams() -> None:
    """Python's and C's own on descriptors 0 to 2, and a traceback there of what no handler sees."""
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
