"""How a try of a job ended, judged from three witnesses: what we did to it, what the kernel says, what it says itself.

Pure, as the schedule is, which asks for it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ._errors import JOB_ERRORS
from ._model import Cause, Exit, Job, Outcome, Report, Status

LOST_AFTER_S = 10.0
"""From SIGKILL (or from the death of a job's own process) to giving up on what is still there. A process that the
kernel holds in an uninterruptible sleep does not die of SIGKILL, and nothing may wait for it for ever."""

BY_HAND = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals by which somebody asks a process to end."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "; perhaps the machine ran out of memory (see dmesg), or somebody sent it",
    signal.SIGBUS: "; perhaps the shared memory is full (see df -h /dev/shm)",
}


@dataclass(frozen=True)
class Stopped:
    """Why we stopped a job: ``cause`` is TIMEOUT or CANCELLED."""

    cause: Cause
    why: str


def judge(stopped: Stopped | None, exit_: Exit | None, report: Report | None) -> Outcome:
    """How a try ended: by what it says itself, unless we had stopped it, else by what the kernel says.

    ``stopped`` is why we stopped it; None where we did not, or only after its own outcome was on disk. ``exit_`` is
    None where the kernel never told, since the process could not be killed.
    """
    if stopped is not None and exit_ is not None:
        if stopped.cause is Cause.TIMEOUT:
            return Outcome(Status.FAILED, Cause.TIMEOUT, "JobTimeoutError", f"was stopped: it {stopped.why}")
        return cancelled(stopped.why)
    if stopped is None and report is not None:
        return _by_itself(report)
    if exit_ is None:
        before = "" if stopped is None else f"was stopped ({stopped.why}), but "
        return lost(f"{before}left a process that did not die within {LOST_AFTER_S:g} s of SIGKILL")
    if exit_.signal in BY_HAND:
        return cancelled(f"{signal_name(exit_.signal)} was sent to its process")
    return Outcome(Status.FAILED, Cause.CRASH, "JobCrashedError", ended(exit_))


def ended(exit_: Exit) -> str:
    """A clause of what the kernel says of the end of a process that has left no result."""
    if exit_.signal is not None:
        return f"was ended by {signal_name(exit_.signal)}{_HINTS.get(exit_.signal, '')}"
    return f"ended with exit code {exit_.code} and without a result"


def _by_itself(report: Report) -> Outcome:
    """Except that a job which was told to stop by somebody's signal, and says so, has no result to give."""
    if report.status is Status.CANCELLED:
        return Outcome(report.status, Cause.CANCELLED, report.error_type, report.error_text)
    failed = Cause.OOM if report.out_of_memory else Cause.CRASH if report.crashed else Cause.ERROR
    cause = Cause.RETURNED if report.status is Status.COMPLETED else failed
    return Outcome(report.status, cause, report.error_type, report.error_text, report.value, by_itself=True)


def told(job: Job, error_type: str | None, error_text: str | None) -> str:
    """A clause of one line: which job, and how it failed."""
    text = " ".join((error_text or "").split())
    text = text if len(text) <= 300 else f"{text[:299]}…"
    if error_type in JOB_ERRORS:
        return f"{job} {text}"
    return f"{job} raised {error_type}" + (f": {text}" if text else "")


def signal_name(signum: int) -> str:
    """As signal(7) has it."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def cancelled(why: str) -> Outcome:
    """The outcome of what somebody or something called off."""
    return Outcome(Status.CANCELLED, Cause.CANCELLED, "JobCancelledError", f"was cancelled: {why}")


def lost(why: str) -> Outcome:
    """The outcome of what nobody can know the end of."""
    return Outcome(Status.FAILED, Cause.LOST, "JobLostError", why)
