"""A job's own process, from the fork to its exit: all of this runs in the child, in its only thread.

In this order: what makes the process one that can be found and ended; what it sees (its log, its environment, its GPU);
what it must not share with the app (random numbers, exit hooks); and only then user code.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from hydra.core.utils import JobReturn

from . import _interpreter, _process
from ._journal import SweepFiles, digest, save_return
from ._model import Job, JobCrashedError, JobError, Report, Status

_OOM_SCORE = 300
"""Added to the job's score: when memory runs out, the kernel takes a job rather than the sweep or the desktop."""

_LONGEST_VALUE = 10_000
"""Characters of JSON: a longer value is in the pickle alone, and does not swell the journal."""

_LONGEST_TEXT = 100_000
"""Characters of an error's text, and of its traceback, that are kept beside the pickle."""

_inherited_streams: list[object] = []  # never finalized: they would flush the app's buffers, or close descriptors


@dataclass(frozen=True)
class Result:
    """What became of a job: ``payload`` is what main gets back, ``value`` or ``error`` what the task made of it."""

    payload: object
    value: object = None
    error: Exception | None = None


class Body(Protocol):
    """What a job runs, inherited by the fork. Its methods run in the job's process."""

    def run(self, job: Job) -> Result:
        """Run it. An exception is as good as a Result that has it as its error."""

    def failure(self, job: Job, error: Exception, instead_of: Result | None = None) -> Result:
        """The Result of a job that has this error to give, in place of one that cannot be sent to main."""

    def without_config(self, result: Result) -> Result:
        """The same value or error, in a payload that has nothing else in it that might not pickle."""


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
    handlers: Mapping[int, _process.Handler],
) -> int:
    """Run the job; the exit code of its process.

    ``log``: descriptor of its log; ``close``: the supervisor's own; ``mask``, ``handlers``: of signals, of the app.
    """
    _be_a_leader(supervisor, mask, handlers)
    _use_log(log, close)
    _see(assignment)
    of_the_app = _interpreter.forget_exit_hooks()
    job_process = os.getpid()
    result = _run(assignment, body)
    if (
        os.getpid() == job_process
    ):  # else: a fork that the task made, which came back from it; the job is not its to end
        result = _save(assignment, body, result)
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
        raise JobError(job.num, job.overrides, f"raised {_described(error)}") from error


def _call_excepthook(error: Exception) -> None:
    """As the interpreter does at an uncaught exception; the hook is the user's, and what it raises changes nothing."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        traceback.print_exc()


def _be_a_leader(supervisor: int, mask: frozenset[int], handlers: Mapping[int, _process.Handler]) -> None:
    """A session of its own, so that a signal to "its" group meets nobody else; then signals as in a new process.

    The app's handlers for what ends processes are for main, and not for it; those for other signals are as they were.
    """
    os.setsid()
    _process.die_with_parent(supervisor)
    _process.become_subreaper()
    signal.set_wakeup_fd(-1)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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


def _save(assignment: Assignment, body: Body, result: Result) -> Result:
    """Write the result to disk; gives what was written, which may have less in it than the job had to give.

    Whatever the user's exception or value does when it is looked at, something is written, unless the disk refuses.
    """
    job = assignment.job
    try:
        return _write(assignment, body, result)
    except OSError:
        raise
    except BaseException as error:
        traceback.print_exc()
        what = "value" if result.error is None else f"exception of type {type(result.error).__name__}"
        why = f"ended with a {what} that cannot even be looked at ({type(error).__name__})"
        return _write(assignment, body, body.failure(job, JobError(job.num, job.overrides, why)))


def _write(assignment: Assignment, body: Body, result: Result) -> Result:
    job = assignment.job
    text = _traceback_text(result.error)
    result, payload = _sendable(job, body, result)
    report = Report(
        status=Status.COMPLETED if result.error is None else Status.FAILED,
        error_type=None if result.error is None else _type_name(result.error),
        error_text=None if result.error is None else _error_text(result.error)[:_LONGEST_TEXT],
        value=_json_value(result.value),
        sha256=digest(payload),
        traceback=(text or _traceback_text(result.error) or "")[-_LONGEST_TEXT:] or None,
    )
    save_return(assignment.files, job.num, payload, report)
    return result


def _sendable(job: Job, body: Body, result: Result) -> tuple[Result, bytes]:
    """The result, or the most of it that main can load, and its bytes."""
    try:
        return result, _pickled(result.payload)
    except Exception as error:
        failure = body.failure(job, _unpicklable(job, result, error), result)
    for poorer in (body.without_config(result), failure):
        try:
            return poorer, _pickled(poorer.payload)
        except Exception:
            continue
    failure = body.without_config(failure)
    return failure, _pickled(failure.payload)


def _as_exception(job: Job, error: BaseException) -> JobError:
    wrapped = JobError(job.num, job.overrides, f"raised {_described(error)} outside of its task function")
    wrapped.__cause__ = error
    return wrapped


def _unpicklable(job: Job, result: Result, error: Exception) -> JobError:
    """What is said of a result that cannot travel. The error that it replaces goes along as its cause."""
    if result.error is not None:
        wrapped = JobError(job.num, job.overrides, f"raised {_described(result.error)}")
        wrapped.__cause__ = result.error
        return wrapped
    return JobError(
        job.num,
        job.overrides,
        f"returned a value of type {_type_name(result.value)} that cannot be sent to the main process "
        f"({_described(error)}); return numbers, strings, lists, dicts or arrays, and save the rest to a file",
    )


class _Pickler(pickle.Pickler):
    """Plain pickle, with two exceptions.

    A tensor on a GPU is sent as one on the CPU: to load it, main would have to initialise CUDA. A JobReturn is taken
    apart here, since Hydra 1.4's own way pickles exceptions of ``__main__`` by value, as other classes than the app's.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        # Made now, since the task may have registered more with copyreg.
        self.dispatch_table = {**copyreg.dispatch_table, JobReturn: lambda ret: (_job_return, (vars(ret),))}

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _job_return(attributes: dict[str, Any]) -> JobReturn:
    ret = JobReturn()
    vars(ret).update(attributes)
    return ret


def _pickled(payload: object) -> bytes:
    """The bytes, loaded once to see that they can be: exceptions with a constructor of their own often cannot."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(payload)
    pickle.loads(buffer.getvalue())
    return buffer.getvalue()


def _json_value(value: Any) -> Any:
    """The value where JSON can say it, else None: what else there is is in the pickle."""
    try:
        plain = _as_json(value)
        return plain if len(json.dumps(plain)) <= _LONGEST_VALUE else None
    except Exception:  # a list in itself, an integer of 5000 digits, an object whose methods raise
        return None


def _as_json(value: Any) -> Any:
    """numpy's and torch's scalars as numbers, tuples as lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _as_json(value.item())
    if isinstance(value, (list, tuple, dict)) and len(value) > _LONGEST_VALUE:
        return None
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return None


def _traceback_text(error: BaseException | None) -> str | None:
    """The traceback from the user's first frame on; that frame is also what sys.excepthook will begin with."""
    if error is None:
        return None
    link: BaseException | None = error
    while link is not None:
        BaseException.with_traceback(link, _from_user_code(link))  # not by assignment, which its class may refuse
        link = link.__cause__
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _from_user_code(error: BaseException) -> TracebackType | None:
    """Its traceback without the frames of Hydra and gpu_pool that come first; what has no others keeps them.

    Except an error of gpu_pool's own: it says all there is to say, and its frames are nobody's business.
    """
    ours = tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in ("hydra", __package__ or ""))
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(ours):
        tb = tb.tb_next
    return tb if tb is not None or isinstance(error, JobError) else error.__traceback__


def _type_name(value: object) -> str:
    cls = type(value)
    return (
        cls.__qualname__
        if cls.__module__ == "builtins" or issubclass(cls, JobError)
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def _error_text(error: BaseException) -> str:
    return error.why if isinstance(error, JobError) else _safe_text(error)


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"(its text cannot be had: {type(broken).__name__})"


def _described(error: BaseException) -> str:
    text = _safe_text(error)
    return f"{_type_name(error)}: {text}" if text else _type_name(error)
