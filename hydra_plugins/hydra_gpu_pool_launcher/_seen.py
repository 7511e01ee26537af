"""What is known of a sweep's parts: where a job is, how a try of it went, who launched it. Values, for a ``View``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._model import Cause, Job


class State(str, enum.Enum):
    """Where a job is; equal to its name as text. The last three are a ``Status``, and final."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    __str__ = str.__str__

    @property
    def over(self) -> bool:
        """Nothing will change it any more."""
        return self in {State.COMPLETED, State.FAILED, State.CANCELLED}


@dataclass
class TryView:
    """One try. Times in seconds since the epoch; ``ended``, ``state`` and what follows them: None while it runs.

    ``state``: how it ended, also where the job was tried again after it. ``cpu_s``, ``peak_mb``: as in ``_model.Exit``.
    ``gpu_mb``: of GPU memory, in MB, what it holds while it runs, then the most that it was seen with; None: not known.
    ``took``: seconds, as the supervisor measured them: the journal's times are those of its lines, some later.
    """

    attempt: int
    pid: int
    slots: tuple[str, ...]
    started: float
    ended: float | None = None
    state: State | None = None
    cause: Cause | None = None
    error_type: str | None = None
    error_text: str | None = None
    cpu_s: float | None = None
    peak_mb: float | None = None
    gpu_mb: float | None = None
    took: float | None = None

    def seconds(self, now: float) -> float:
        """How long it took, or has taken so far."""
        if self.took is not None:
            return self.took
        return max(0.0, (now if self.ended is None else self.ended) - self.started)


@dataclass
class JobView:
    """One job. ``tries``: none where the latest launch that has it did not start it. ``stopping``: why, where it is.

    ``taken_over``: the tries of the launch in which it completed, where a resume has its result from there.

    ``cause``: of its end, or of the stop that is under way.
    ``seconds``, ``cpu_s``, ``peak_mb``, ``gpu_mb``: of its last try, as the journal has them; of a job that a resume
    has taken over, those of the sweep in which it completed.
    """

    job: Job
    state: State = State.QUEUED
    tries: list[TryView] = field(default_factory=list)
    stopping: str | None = None
    taken_over: Sequence[TryView] = ()
    cause: Cause | None = None
    error_type: str | None = None
    error_text: str | None = None
    value: Any = None
    seconds: float | None = None
    cpu_s: float | None = None
    peak_mb: float | None = None
    gpu_mb: float | None = None

    @property
    def known_tries(self) -> Sequence[TryView]:
        """Those that have led to what is said of it, be it in an earlier launch."""
        return self.tries or self.taken_over

    @property
    def running(self) -> TryView | None:
        """Its try that runs now."""
        return self.tries[-1] if self.tries and self.state in {State.RUNNING, State.STOPPING} else None


@dataclass(frozen=True)
class Launch:
    """Who runs the sweep, of the latest launch. ``started``: the supervisor's start time, in clock ticks since boot.

    ``command``: as main was started; ``given``: the overrides in it, None where no command goes on with the sweep.
    ``says_given``: False, where the journal is of a version that did not say so. ``host``, ``boot``: the machine, and
    which of its lives: a pid of another one says nothing here.
    """

    main: int
    supervisor: int
    started: int
    host: str
    boot: str
    command: tuple[str, ...]
    cwd: str
    slots: tuple[str, ...]
    given: tuple[str, ...] | None
    says_given: bool

    def is_by_the_main_of(self, other: Launch) -> bool:
        """A sweeper that works in batches launches each of them from the same process."""
        return (self.main, self.host, self.boot) == (other.main, other.host, other.boot)
