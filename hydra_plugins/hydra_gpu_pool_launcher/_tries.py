"""The tries that run, a part of the schedule, which decides when they make a step. Pure. These steps, and no others:

    RUNNING ──stop, timeout──▶ STOPPING ──grace over──▶ KILLED ──bound over──▶ ABANDONED ──▶ over
       └─────────────────────────┴─its process is gone───┴───▶ ENDING ──bound over──┘         ▲
                                                                 └──its tree is gone──────────┘

A try whose whole tree is gone at once passes over ENDING.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ._errors import GpuPoolError
from ._events import Abandon, Event, Interrupt, Kill
from ._model import Cause, Slot
from ._queue import Entry
from ._verdict import LOST_AFTER_S, Stopped


class IllegalEventError(GpuPoolError):
    """An event that cannot be, such as the end of a job that does not run: a fault of gpu_pool itself."""


class Phase(enum.Enum):
    """Where a job that has been started, and is not over, stands."""

    RUNNING = "running"
    STOPPING = "stopping"
    KILLED = "killed"
    ENDING = "ending"
    ABANDONED = "abandoned"


@dataclass(eq=False)
class Try:
    """A job on its slots. ``deadline``: when the phase is over at the latest; None: no limit.

    ``stopped``: why, where we have stopped it. Times in seconds of the schedule's clock.
    """

    entry: Entry
    slots: tuple[Slot, ...]
    deadline: float | None
    phase: Phase = Phase.RUNNING
    stopped: Stopped | None = None

    @property
    def num(self) -> int:
        """Its job's."""
        return self.entry.job.num

    def interrupt(self, stopped: Stopped, signum: int, until: float) -> Interrupt:
        """Ask it to end, and give it time until then."""
        self.phase, self.deadline, self.stopped = Phase.STOPPING, until, stopped
        return Interrupt(self.num, stopped.why, signum, stopped.cause)

    def kill(self, why: str, now: float) -> Kill:
        """End it; ``why`` counts where nothing has stopped it before."""
        if self.phase is Phase.RUNNING:
            self.stopped = Stopped(Cause.CANCELLED, why)
        self.phase, self.deadline = Phase.KILLED, now + LOST_AFTER_S
        return Kill(self.num, why)

    def end(self, now: float) -> None:
        """Its process is gone, something of its tree may be left."""
        self.phase, self.deadline = Phase.ENDING, now + LOST_AFTER_S

    def abandon(self) -> Abandon:
        """Not even SIGKILL has ended it: it is waited for no longer."""
        self.phase, self.deadline = Phase.ABANDONED, None
        return Abandon(self.num)

    def save(self, until: float) -> None:
        """It had finished, but waits to save. A timeout gives it until then to do so and to exit.

        Whatever else stops it is told what is lost by it.
        """
        stopped = self.stopped
        if stopped is not None and stopped.cause is Cause.TIMEOUT:
            self.phase, self.deadline, self.stopped = Phase.RUNNING, until, None
        elif stopped is not None:
            why = f"{stopped.why}; it had finished, but its result could not be saved"
            self.stopped = Stopped(stopped.cause, why)


class Tries(dict[int, Try]):
    """Those that run, by job number."""

    def expect(self, num: int, event: Event, *phases: Phase) -> Try:
        """The job's try, which is in one of these phases. Raises IllegalEventError where it is not."""
        found = self.get(num)
        if found is None or found.phase not in phases:
            phase = "not running" if found is None else found.phase.value
            raise IllegalEventError(f"{type(event).__name__} for job {num}, which is {phase}")
        return found
