"""What a group of ranks failed of, from what each of them says and what the kernel says. Pure, as ``_verdict`` is."""

from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ._body import NOTHING_MORE, Elsewhere
from ._errors import JobCancelledError, JobCrashedError, JobError
from ._exceptions import safe_text
from ._model import Exit, Job, Report, Status
from ._verdict import BY_HAND, LOST_AFTER_S, ended, signal_name

SEEN_LATE_S = 1.0
"""By how much a rank may be gone, or gone from its group, before that is seen: its connections break first, and the
errors that the others then raise must not be taken for the cause."""

_MISSES_A_RANK = re.compile(
    r"connection (was )?(likely )?(closed|reset)|broken pipe|remote process exit|communicator was aborted",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say in one rank when another one is gone."""


@dataclass(frozen=True)
class Said:
    """What a rank has left. ``at``: when its function ended, in seconds of the machine's monotonic clock.

    ``payload``: the exception, pickled, or, of rank 0, the value; ``told``: the signals by which somebody had asked it
    to end before its function did.
    """

    at: float
    report: Report
    payload: bytes
    told: tuple[int, ...] = ()


@dataclass(frozen=True)
class End:
    """How one rank ended. ``seen``: when that was seen, on the same clock; ``exit``: None: it does not die.

    ``stopped``: it had been told to end, since another one had failed.
    """

    rank: int
    seen: float
    exit: Exit | None
    said: Said | None
    stopped: bool = False

    @property
    def failed(self) -> bool:
        """It did not end as it should, and not because we had told it to."""
        if self.said is None:
            return not self.stopped
        return self.said.report.status is not Status.COMPLETED or bool(self.said.told and not self.stopped)

    @property
    def misses_another(self) -> bool:
        """All that it says is that another rank is gone: of what, that one may still have to say.

        It may have left its process group in a ``finally``, on the way of its own exception to us.
        """
        if self.said is None or self.said.told:
            return False
        kind, text = self.said.report.error_type or "", self.said.report.error_text or ""
        return (kind == "RuntimeError" or kind.startswith("torch.distributed.")) and bool(_MISSES_A_RANK.search(text))

    @property
    def at(self) -> float:
        """When it failed, by its own clock where it has told; what it says of another one, after that one's own word.

        SIGABRT is not antedated: it is how NCCL ends a rank that misses another one.
        """
        if self.said is not None:
            return self.said.at + (SEEN_LATE_S if self.misses_another else 0.0)
        aborted = self.exit is not None and self.exit.signal == signal.SIGABRT
        return self.seen if aborted else self.seen - SEEN_LATE_S


@dataclass(frozen=True)
class Failure:
    """What a group failed of: the job's error, and what only another process could know of it.

    ``rank``: whose it was; None: of none on this machine. ``at``: when, on the monotonic clock. ``final``: the group is
    not to be started again.
    """

    rank: int | None
    error: Exception
    elsewhere: Elsewhere = NOTHING_MORE
    final: bool = False
    at: float = 0.0


def first_failure(job: Job, ends: Sequence[End], forwarded: Collection[int] = ()) -> Failure | None:
    """The earliest of the failures, from which the others followed; None where all ranks ended as they should.

    ``forwarded``: the signals that were sent to the job's process, and went on to its ranks.
    """
    failed = [end for end in ends if end.failed]
    if not failed:
        return None
    first = min(failed, key=lambda end: end.at)
    return replace(_failure(job, first, forwarded), at=first.at)


def _failure(job: Job, end: End, forwarded: Collection[int]) -> Failure:
    signum = _by_hand(end)
    if signum is not None:
        whom = "its process" if signum in forwarded else f"its rank {end.rank}"
        why = f"was cancelled: {signal_name(signum)} was sent to {whom}"
        return Failure(end.rank, JobCancelledError(job.num, job.overrides, why), final=True)
    if end.said is None:
        how = f"did not die within {LOST_AFTER_S:g} s of SIGKILL" if end.exit is None else ended(end.exit)
        crash = JobCrashedError(job.num, job.overrides, f"lost its rank {end.rank}, which {how}")
        return Failure(end.rank, crash, Elsewhere(crashed=True))
    report = end.said.report
    error: Exception
    try:
        error = pickle.loads(end.said.payload)
    except Exception:  # the rank itself could load it
        error = JobError(job.num, job.overrides, f"raised {report.error_type}: {report.error_text}")
    place = f"rank {end.rank}"
    traceback = f"In {place}:\n\n{report.traceback}"
    return Failure(end.rank, error, Elsewhere(place, traceback, out_of_memory=report.out_of_memory))


def describe(failure: Failure) -> str:
    """A clause that says whose failure it was, and what."""
    error, whose = failure.error, failure.elsewhere.place or "the group"
    what = error.why if isinstance(error, JobError) else f"raised {type(error).__name__}: {safe_text(error)}"
    return f"{whose} {what}"


def _by_hand(end: End) -> int | None:
    """The signal by which somebody, and not we, asked this rank to end."""
    if end.stopped:
        return None
    if end.said is not None:
        return end.said.told[0] if end.said.told else None
    return end.exit.signal if end.exit is not None and end.exit.signal in BY_HAND else None
