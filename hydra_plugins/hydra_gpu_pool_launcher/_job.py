"""A job's own process: what it runs, once it is a process of its own, until its result is on disk and it exits."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from . import _ddp, _exit_hooks, _leader, _pidfd, _process, _signals, _stacks, _streams
from ._body import Body, Result
from ._carry import Carried, CarriedBody
from ._errors import JobError
from ._exceptions import described
from ._leader import Assignment, Origin
from ._model import Group, Job
from ._result import save

UNSAVED = signal.SIGUSR1
"""To the supervisor, from a job that cannot save its result and waits."""

SAVING = "gpu_pool saves"
"""The name of its process then: it has finished, and its time is not its own any more."""

_TRY_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Try(Assignment):
    """What the process of one try of a job is told. ``group``: where the job is to be a group of ranks."""

    group: Group | None = None
    oom_score: int = 300


def main(assignment: Try, body: CarriedBody, origin: Origin) -> int:
    """Run the job, in a fork of the supervisor; the exit code of its process."""
    received, of_the_app = _leader.enter(assignment, origin)
    return _run_to_the_end(assignment, body, received, of_the_app, None)


def main_of_fresh(assignment: Try, carried: Carried, load: Callable[[], CarriedBody]) -> int:
    """The same, in the fresh interpreter that ``_leader.become_fresh`` has started."""
    received, body = _leader.enter_fresh(assignment, load)
    if isinstance(body, JobError):
        body = _NotLoaded(carried.body_class, body)  # type: ignore[assignment] # its methods are the class's static ones
    assert not isinstance(body, JobError)
    return _run_to_the_end(assignment, body, received, _exit_hooks.OfTheApp([], None), carried)


class _NotLoaded:
    """The body of a job whose app could not be imported."""

    def __init__(self, body_class: type[Body], error: JobError) -> None:
        self._error = error
        self.failure = body_class.failure
        self.without_config = body_class.without_config

    def run(self, job: Job, call: object) -> Result:  # noqa: ARG002
        raise self._error


def _run_to_the_end(
    assignment: Try,
    body: CarriedBody,
    received: _signals.Received,
    of_the_app: _exit_hooks.OfTheApp,
    carried: Carried | None,
) -> int:
    job_process = os.getpid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not before: there is nothing yet that could catch it
    result = _run(assignment, body, received, of_the_app, carried)
    if os.getpid() == job_process:  # not so in a fork of the task's own that came back from it: it is not the job
        with _saving(received) as told:
            result = save(assignment.files, assignment.job, body, result, _Circumstances(told))
    return _leader.end(result.error, of_the_app, printed=result.elsewhere is not None)


@contextlib.contextmanager
def _saving(received: _signals.Received) -> Iterator[list[int]]:
    """What was asked of this process so far, and still is, while its result is saved."""
    _process.raise_file_size_limit()  # whatever the job has set for itself
    name = _pidfd.name_of(os.getpid())
    with _leader.undisturbed(received) as told:
        try:
            yield told
        finally:
            with contextlib.suppress(OSError):
                _streams.fill_standard()
            if _pidfd.name_of(os.getpid()) == SAVING:
                _process.set_name(name or "python")


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


def _run(
    assignment: Try,
    body: CarriedBody,
    received: _signals.Received,
    of_the_app: _exit_hooks.OfTheApp,
    carried: Carried | None,
) -> Result:
    job = assignment.job
    ranks: _ddp.CallInRanks | None = None
    try:
        os.chdir(assignment.cwd)
        if assignment.group is None:
            _stacks.tell_at_sigterm()
            return body.run(job, functools.partial(_leader.call, job))
        ranks = _ddp.CallInRanks(assignment, assignment.group, received, of_the_app, body, carried)
        result = body.run(job, ranks)
    except Exception as error:
        result = body.failure(job, error)
    except BaseException as error:  # from a callback or a resolver: the task function itself is run by ``call``
        result = body.failure(job, _as_exception(job, error))
    failure = None if ranks is None else ranks.failure
    return replace(result, elsewhere=failure.elsewhere) if failure and result.error is failure.error else result


def _as_exception(job: Job, error: BaseException) -> JobError:
    wrapped = JobError(job.num, job.overrides, f"raised {described(error)} outside of its task function")
    wrapped.__cause__ = error
    return wrapped
