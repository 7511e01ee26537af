"""What main makes of a job's end: what the job left, or the error that stands in for it."""

from __future__ import annotations

import contextlib
import logging
import signal
from dataclasses import dataclass
from typing import Any

from . import _returns
from ._errors import JOB_ERRORS, JobError, JobLostError, RemoteTraceback
from ._files import SweepFiles
from ._model import Cause, Exit, Job, Status
from ._returns import DamagedReturnError
from ._say import say
from ._verdict import Stopped, judge


@dataclass(frozen=True)
class Settled:
    """What a job left to main: the payload of its Result, or the error that stands in for one.

    ``failed``: the payload is, or has, an exception of the task; ``traceback``: that exception's, as text.
    """

    payload: Any = None
    error: JobError | None = None
    failed: bool = False
    traceback: str | None = None


def settle(job: Job, files: SweepFiles, end: dict[str, Any] | None) -> Settled:
    """What became of a job, from ``Supervisor.run``'s event, or from its files where there is none.

    Runs in main, and loads the job's pickle: the code that this runs may raise, which is the job's error then.
    """
    report = _returns.load_report(files, job.num)
    if report is not None and report.overrides not in (None, job.overrides):
        report = None  # of another job that had this number, and whose result nobody was left to clear
    if end is not None and end["event"] == "stop":
        outcome = judge(Stopped(Cause(end["cause"]), end["why"]), Exit(None, signal.SIGKILL, 0, 0), None)
        return Settled(error=_error(job, outcome.error_type, outcome.error_text))
    if end is not None and not end["by_itself"] and (report is None or end["cause"] != Cause.CRASH.value):
        return Settled(error=_error(job, end["error_type"], end["error_text"]))
    if report is None:
        why = f"was lost: the supervisor was killed, or failed (see {files.supervisor_log})"
        if end is not None and end["by_itself"]:
            why = f"was lost: it had ended, and {files.outcome(job.num)} is not there any more, or is damaged"
        return Settled(error=JobLostError(job.num, job.overrides, why))
    if report.status is Status.CANCELLED:
        return Settled(error=_error(job, report.error_type, report.error_text))
    try:
        payload = _returns.load_return(files, job.num)
        return Settled(payload, failed=report.status is Status.FAILED, traceback=report.traceback)
    except DamagedReturnError as error:
        found: JobError = JobLostError(job.num, job.overrides, f"was lost: {error}")
    except (Exception, SystemExit) as error:
        why = f"returned what the main process cannot load ({type(error).__name__}: {error})"
        if end is not None and end["cause"] == Cause.RESUMED.value:
            why += f"; it completed in an earlier sweep: to have it run again, remove {files.outcome(job.num)}"
        found = JobError(job.num, job.overrides, why)
    with contextlib.suppress(Exception):  # of a logging handler of the app's: it is no reason to lose the others
        say(f"{found}; see {files.returned(job.num)}", logging.ERROR)  # its own line says COMPLETED
    return Settled(error=found)


def _error(job: Job, name: str | None, why: str | None) -> JobError:
    return JOB_ERRORS[name or "JobError"](job.num, job.overrides, why or "")


def with_remote_traceback(error: BaseException, text: str | None) -> BaseException:
    """The error, with the traceback from the job's process as its cause: pickle drops the one it had."""
    if text is not None and error.__cause__ is None:
        # Not by assignment: the exception's class may refuse it, as a frozen dataclass does.
        BaseException.__setattr__(error, "__cause__", RemoteTraceback(text))
    return error
