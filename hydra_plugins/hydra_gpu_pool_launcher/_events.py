"""What the schedule is told, and what it wants done: events in, commands out. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._model import Cause, Exit, Job, Outcome, Report, Slot

# --- events: what the world tells the schedule ---


@dataclass(frozen=True)
class Submitted:
    """New jobs, in the order in which they are to start."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class StartRefused:
    """The job could not be started; ``for_now``: it may be later (too many processes, too little memory)."""

    num: int
    why: str
    for_now: bool


@dataclass(frozen=True)
class Taken:
    """The job was not started: other sweeps have these slots, or have waited longer for them.

    Some of them are its own; others may be among them that could be had as little.
    """

    num: int
    slots: frozenset[Slot]


@dataclass(frozen=True)
class Freed:
    """Another sweep may have let go of a slot."""


@dataclass(frozen=True)
class Ending:
    """The job's own process is gone; what it left behind is being ended."""

    num: int


@dataclass(frozen=True)
class Gone:
    """The job's whole tree is gone and reaped."""

    num: int
    exit: Exit
    report: Report | None


@dataclass(frozen=True)
class Returned:
    """The answer to Interrupt or Kill where the job's own outcome was on disk before it: that outcome counts."""

    num: int


@dataclass(frozen=True)
class Saving:
    """The answer to Interrupt where the job has finished, and waits for a disk that does not take its result."""

    num: int


@dataclass(frozen=True)
class Abandoned:
    """The answer to Abandon, with what the job had to say before it got stuck."""

    num: int
    report: Report | None


@dataclass(frozen=True)
class Stop:
    """Everything is to end: politely with ``signum`` first, or at once where ``signum`` is SIGKILL."""

    why: str
    signum: int


CANCELLED_BY_HAND = "somebody cancelled it by hand"
"""Why, of a job that is stopped alone because somebody has asked for it."""


@dataclass(frozen=True)
class Cancel:
    """One job is to end, whether it runs or waits; the others go on."""

    num: int
    why: str


@dataclass(frozen=True)
class Held:
    """Nothing may start for now: it could not be recorded."""


@dataclass(frozen=True)
class Released:
    """Jobs may start again."""


@dataclass(frozen=True)
class Measured:
    """The answer to Look: the devices' free memory, in bytes, by their positions in ``Layout.devices``.

    A device without an entry, or with None: nobody can say. ``used``: what the processes of a job hold of a device, by
    the job's number and the device, as far as that is known. ``of_others``: devices of which other sweeps have a slot.
    """

    free: Mapping[int, int | None]
    used: Mapping[tuple[int, int], int] = field(default_factory=dict)
    of_others: frozenset[int] = frozenset()


Event = (
    Submitted
    | StartRefused
    | Taken
    | Freed
    | Returned
    | Saving
    | Ending
    | Gone
    | Abandoned
    | Stop
    | Cancel
    | Held
    | Released
    | Measured
)


# --- commands: what the schedule wants done, in this order ---


@dataclass(frozen=True)
class Start:
    """Fork try number ``attempt`` (from 1) of the job onto these slots: one of each of its devices.

    ``alone``: onto all of them, and no other sweep has one of these devices meanwhile.
    """

    job: Job
    attempt: int
    slots: tuple[Slot, ...]
    alone: bool = False


@dataclass(frozen=True)
class Interrupt:
    """Journal why, then send the signal to the job's process. Answered by Returned where it had ended by itself."""

    num: int
    why: str
    signum: int
    cause: Cause = Cause.CANCELLED


@dataclass(frozen=True)
class Kill:
    """SIGKILL to all that the job started, journalled like Interrupt where that did not come before."""

    num: int
    why: str


@dataclass(frozen=True)
class Abandon:
    """Wait no longer for this job's processes: they cannot be killed. Answered by Abandoned."""

    num: int


@dataclass(frozen=True)
class End:
    """The job is over: journal it."""

    job: Job
    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class Retry:
    """The try is over, and the job will have another one: journal how this one ended."""

    job: Job
    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class Look:
    """Ask the driver for the devices' memory. Answered by Measured, always, and in a bounded time."""


@dataclass(frozen=True)
class Scarce:
    """Tell that a device, with so many bytes free, has too little for a job to start; None: nobody can say how many."""

    device: int
    free: int | None


Command = Start | Interrupt | Kill | Abandon | End | Retry | Look | Scarce


# --- and what it waits for ---


@dataclass(frozen=True)
class Waiting:
    """What jobs wait for that other sweeps have, or may take meanwhile. Devices go by their positions in the layout.

    ``slots``: those that the next job would take. ``drained``: devices whose memory it waits for, which others' jobs
    hold. ``alone``: those that a job is to have as a whole. ``told``: slots that a person is told of.
    """

    slots: frozenset[Slot] = frozenset()
    drained: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()
    told: frozenset[Slot] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.slots or self.drained or self.alone)
