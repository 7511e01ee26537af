"""The pool for plain Python, without a Hydra app: ``GpuPool(gpus=[0, 1], per_gpu=2).map(train, kwargs_list)``."""

from __future__ import annotations

import os
import reprlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _reimport, _torchrun
from ._body import Call, PlainBody, Result
from ._display import display
from ._environ import environ_for_jobs
from ._errors import ConfigurationError, JobCancelledError
from ._files import SweepFiles
from ._model import Job, Status
from ._pidfd import require_pidfd
from ._requests import Request
from ._settings import checked, shown
from ._settled import settle, with_remote_traceback
from ._sweep import choose_slots, start_supervisor, working_directory

_temporary: list[tempfile.TemporaryDirectory[str]] = []  # kept for the outcomes' logs, which outlive their pool


@dataclass(frozen=True)
class JobOutcome:
    """How one call ended.

    ``value``: what the function returned, None unless COMPLETED. ``error``: what it raised, or a JobError where its
    process did not live to say. ``seconds``: from its fork to its end, None where it never started. ``log``: the path
    of its stdout and stderr.
    """

    status: Status
    value: Any
    error: BaseException | None
    seconds: float | None
    log: str


class GpuPool:
    """Runs calls of a function side by side on this machine's GPUs, each in a process of its own.

    The keyword arguments are the keys of ``hydra/launcher=gpu_pool``, with the same defaults. ``dir``: where logs and
    results of the latest ``map`` are kept; by default each map has a temporary directory of its own, which is removed
    when this process exits. Raises ConfigurationError.
    """

    def __init__(self, *, dir: str | os.PathLike[str] | None = None, **config: Any) -> None:  # noqa: A002
        require_pidfd()
        self._settings = checked(config, prefix="")
        if self._settings.resume:
            raise ConfigurationError(
                "resume=true: only with Hydra, since the arguments of two calls cannot be compared as overrides can; "
                "leave it at false."
            )
        # At the top of a module that is imported again, a pool is only there: nobody maps with it.
        self._layout = None if _reimport.under_way() else choose_slots(self._settings)
        self._dir = None if dir is None else os.path.abspath(dir)

    def _directory(self) -> str:
        if self._dir is not None:
            return self._dir
        _temporary.append(tempfile.TemporaryDirectory(prefix="gpu_pool-"))
        return os.path.abspath(_temporary[-1].name)

    def map(self, function: Callable[..., Any], kwargs_list: Iterable[Mapping[str, Any]]) -> list[JobOutcome]:
        """Call ``function(**kwargs)`` for each of the list, and block until each has ended; one outcome each, in order.

        Where jobs are forked, neither the function nor its arguments are pickled; what it returns is. Raises for no
        call: a failed one is an outcome with its error. Raises ConfigurationError where no job can be started.
        """
        _reimport.refuse_sweep()
        _torchrun.refuse_rank()
        calls = _checked_calls(function, kwargs_list)
        jobs = tuple(
            Job(num, tuple(f"{name}={reprlib.repr(value)}" for name, value in kwargs.items()))
            for num, kwargs in enumerate(calls)
        )
        if not jobs:
            return []
        files = SweepFiles(self._directory())
        named = {f"kwargs_list[{i}]": kwargs for i, kwargs in enumerate(calls)}
        supervisor = start_supervisor(
            _CallBody(function, named), self._layout or choose_slots(self._settings), self._settings
        )
        try:
            command = tuple(sys.orig_argv)
            request = Request(jobs, files, environ_for_jobs(), working_directory(), fresh=True, command=command)
            ends = supervisor.run(request, display(self._settings, jobs, files))
            return [_outcome(job, files, ends.get(job.num)) for job in jobs]  # while the directory is still ours
        finally:
            supervisor.close()


def _checked_calls(function: object, kwargs_list: object) -> list[dict[str, Any]]:
    if not callable(function):
        raise ConfigurationError(f"function={shown(function)}: expected something that can be called.")
    if isinstance(kwargs_list, (str, Mapping)) or not isinstance(kwargs_list, Iterable):
        raise ConfigurationError(f"kwargs_list={shown(kwargs_list)}: expected a list with a dict for each call.")
    calls = []
    for i, kwargs in enumerate(kwargs_list):
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise ConfigurationError(f"kwargs_list[{i}]={shown(kwargs)}: expected a dict of keyword arguments.")
        calls.append(dict(kwargs))
    return calls


_FUNCTION = "The function"


class _CallBody(PlainBody):
    """What a job's process runs: the call of its number. ``calls``: "kwargs_list[0]" and so on."""

    def __init__(self, function: Callable[..., Any], calls: Mapping[str, Mapping[str, Any]]) -> None:
        self.function = function
        self._calls = calls

    def run(self, job: Job, call: Call) -> Result:
        value = call(self.function, **self._calls[f"kwargs_list[{job.num}]"])
        return Result(payload=value, value=value)

    def parts(self) -> dict[str, object]:
        return {_FUNCTION: self.function, **self._calls}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> _CallBody:
        return cls(parts[_FUNCTION], parts)

    def settle(self, *arguments: object) -> None:
        pass

    def begin_another_launch(self) -> None:
        pass

    def renewed(self) -> dict[str, object]:
        return {}

    def begin_rank(self, rank: int) -> None:
        pass


def _outcome(job: Job, files: SweepFiles, end: Mapping[str, Any] | None) -> JobOutcome:
    settled = settle(job, files, dict(end) if end is not None else None)
    log_path, seconds = files.output(job.num), end.get("seconds") if end is not None else None
    if settled.error is not None:
        cancelled = isinstance(settled.error, JobCancelledError)
        return JobOutcome(Status.CANCELLED if cancelled else Status.FAILED, None, settled.error, seconds, log_path)
    if settled.failed:
        return JobOutcome(
            Status.FAILED, None, with_remote_traceback(settled.payload, settled.traceback), seconds, log_path
        )
    return JobOutcome(Status.COMPLETED, settled.payload, None, seconds, log_path)
