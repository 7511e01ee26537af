"""Events in, commands out: which job starts when and where, when it is stopped, and how it ended.

Every policy is here, and nothing else is: no clock (the time comes with each event, in seconds of any monotonic clock),
no process, no file. A try of a job goes through these phases, and no other way:

    QUEUED ──Start──▶ RUNNING ──Stop, timeout──▶ STOPPING ──grace over──▶ KILLED ──bound over──▶ ABANDONED ──▶ OVER
       │                 └─────────────────────────┴─its process is gone───┴───▶ ENDING ──bound over──┘      ▲
       └──Stop──▶ OVER                                                             └──its tree is gone───────┘

and a job whose try is OVER is over itself, or QUEUED again.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from collections.abc import Callable, Collection, MutableSequence
from dataclasses import dataclass, field, replace

from ._errors import GpuPoolError
from ._events import (
    Abandon,
    Abandoned,
    Cancel,
    Command,
    End,
    Ending,
    Event,
    Freed,
    Gone,
    Held,
    Interrupt,
    Kill,
    Measured,
    Released,
    Retry,
    Returned,
    Saving,
    Start,
    StartRefused,
    Stop,
    Submitted,
    Taken,
    Waiting,
)
from ._gauge import Gauge
from ._model import Cause, Exit, Job, Layout, Outcome, Policy, Report, Slot, Status
from ._slots import Slots
from ._verdict import LOST_AFTER_S, Stopped, cancelled, judge, lost, told


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
class _Entry:
    """A job that is not over, and its next try, or the one that runs.

    ``alone``: it takes all slots of its devices. ``failed``: how the try before ended. ``refused``: others had slots
    that it needs, so it is in line.
    """

    job: Job
    attempt: int = 1
    alone: bool = False
    failed: Outcome | None = None
    refused: bool = False


@dataclass(eq=False)
class _Try:
    """A job on its slots. ``deadline``: when the phase is over at the latest; None: no limit."""

    entry: _Entry
    slots: tuple[Slot, ...]
    deadline: float | None
    phase: Phase = Phase.RUNNING
    stopped: Stopped | None = None


_SOON_S, _AGAIN_S = 1.0, 30.0
"""From the first look at slots that others have to the next, and then from one to the next: where nothing tells of what
is let go of (a directory on a network), these find out."""


@dataclass
class Schedule:
    """The state of a pool, and its only judge.

    ``handle`` takes what happened and answers with what to do, in this order. ``deadline`` is when it must be called
    again at the latest (by ``tick``) if nothing happens before.
    """

    layout: Layout
    policy: Policy
    _queue: deque[_Entry] = field(default_factory=deque)
    _alone: list[_Entry] = field(default_factory=list)  # those of the waiting that need whole devices
    _running: dict[int, _Try] = field(default_factory=dict)
    _slots: Slots = field(init=False)
    _stopped: Stop | None = None
    _held: bool = False
    _not_before: float = float("-inf")  # the next start, for stagger_s
    _due: float | None = None  # when a start that only stagger_s delays can be made
    _turn: dict[int, int] = field(default_factory=dict)  # by job: its place in the order of submission
    _gauge: Gauge = field(init=False)
    _crowded: bool = False  # the system has refused a process since the last end of a job
    _reserved: tuple[int, ...] = ()  # the devices that the first of those that need whole ones is to have
    _closed: Collection[int] = ()  # and those that were closed for memory when they were chosen
    _wanted: frozenset[Slot] = frozenset()  # of others, by the next job
    _since: float | None = None  # when something of others was first found to be wanted
    _again: float | None = None  # when to see whether they still are

    def __post_init__(self) -> None:
        self._slots = Slots(self.layout)
        totals = [device.total_bytes for device in self.layout.devices]
        self._gauge = Gauge(self.policy.min_free, self.policy.settle_s, totals)

    @property
    def idle(self) -> bool:
        """True when every job that was submitted is over."""
        return not self._queue and not self._alone and not self._running

    @property
    def stopped(self) -> bool:
        """True when nothing will be started any more."""
        return self._stopped is not None

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due at the latest; None: not before the next event."""
        deadlines = [self._due, self._again, self._gauge.due, *(attempt.deadline for attempt in self._running.values())]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """What follows from the event. Raises IllegalEventError where it cannot have happened."""
        match event:
            case Submitted(jobs):
                self._queue.extend(map(_Entry, jobs))
                self._turn.update((job.num, turn) for turn, job in enumerate(jobs, len(self._turn)))
                if self._stopped is not None:
                    return self._cancel_queue(self._stopped.why)
                return self._start(now)
            case StartRefused():
                return self._refused(event, now)
            case Taken():
                return self._taken(event, now)
            case Freed():
                return self._freed(now)
            case Returned(num):
                self._expect(num, event, Phase.STOPPING, Phase.KILLED).stopped = None
                return []
            case Saving(num):
                return self._saving(self._expect(num, event, Phase.STOPPING), now)
            case Ending(num):
                attempt = self._expect(num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED)
                attempt.phase, attempt.deadline = Phase.ENDING, now + LOST_AFTER_S
                return []
            case Gone(num, exit_, report):
                attempt = self._expect(num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED, Phase.ENDING)
                self._slots.release(attempt.slots)
                self._gauge.ended(num, now)
                return [*self._over(attempt, exit_, report, now), *self._start(now)]
            case Abandoned(num, report):
                attempt = self._expect(num, event, Phase.ABANDONED)
                self._slots.retire(attempt.slots)  # whatever cannot be killed still holds its GPU
                self._gauge.dropped(num)
                return [*self._over(attempt, None, report, now), *self._start(now)]
            case Stop():
                return self._stop(event, now)
            case Cancel(num, why):
                return self._cancel(num, why, now)
            case Held():
                self._held = True
                return []
            case Released():
                self._held = False
                return self._start(now)
            case Measured():
                return self._measured(event, now)

    def tick(self, now: float) -> list[Command]:
        """What is due now: a try's time or grace that is over, processes that are not to be had, a delayed start."""
        commands: list[Command] = []
        for attempt in [t for t in self._running.values() if t.deadline is not None and t.deadline <= now]:
            if attempt.phase is Phase.RUNNING:
                why = f"took longer than timeout_min={(self.policy.timeout_s or 0) / 60:g}"
                commands.append(self._interrupt(attempt, Stopped(Cause.TIMEOUT, why), signal.SIGTERM, now))
            elif attempt.phase is Phase.STOPPING:
                commands.append(self._kill(attempt, "did not end within kill_grace_s", now))
            else:
                attempt.phase, attempt.deadline = Phase.ABANDONED, None
                commands.append(Abandon(attempt.entry.job.num))
        if any(due is not None and due <= now for due in (self._due, self._gauge.due)):
            commands += self._start(now)
        if self._again is not None and self._again <= now:
            self._again = now + _AGAIN_S
            commands += self._freed(now)
        return commands

    def waiting(self, now: float) -> Waiting:
        """What is waited for now. To be asked at the end of a step, when all commands have been carried out.

        A person is told of what takes longer than a moment.
        """
        waiting = Waiting()
        if self._stopped is None and not self._held and not self._crowded:
            waiting = Waiting(*self._next_waits_for(), self._waits_as_a_whole())
        self._wanted = waiting.slots
        if not waiting.slots and not waiting.drained and not (waiting.alone and self._slots.others):
            self._since = self._again = None
            return waiting
        if self._since is None:
            self._since, self._again = now, now + _SOON_S
        return replace(waiting, told=frozenset(self._slots.others)) if now >= self._since + _SOON_S else waiting

    def _waits_as_a_whole(self) -> frozenset[int]:
        """The devices that nobody else is to begin to use: none for a job that could not start on them all the same."""
        if not self._alone or (self._due is not None and not self._alone[0].refused):
            return frozenset()
        wanted = self._slots.as_empty(self._closed) if self._slots.others else frozenset(self._reserved)
        return wanted - self._gauge.in_vain

    def _next_waits_for(self) -> tuple[frozenset[Slot], frozenset[int]]:
        """The slots that others have, and the devices whose memory they hold, of those that are not reserved."""
        reserved = frozenset(self._reserved if self._alone else ())
        if not self._queue or self._due is not None:
            return frozenset(), frozenset()
        slots = self._wanted if self._gauge.looking else frozenset()  # then it is not known yet who has them
        if self._slots.others:
            # What needs several waits for those that are free as well: others would take them one by one.
            slots = frozenset(self._slots.free if self.layout.devices_per_job > 1 else self._slots.others)
        return (
            frozenset(slot for slot in slots if slot.device not in reserved),
            self._gauge.behind & self._slots.with_room - reserved,
        )

    def _expect(self, num: int, event: Event, *phases: Phase) -> _Try:
        attempt = self._running.get(num)
        if attempt is None or attempt.phase not in phases:
            phase = "not running" if attempt is None else attempt.phase.value
            raise IllegalEventError(f"{type(event).__name__} for job {num}, which is {phase}")
        return attempt

    # --- starting ---

    def _start(self, now: float) -> list[Command]:
        """Whatever has room. Where nothing runs and nothing ever will, the rest is lost."""
        commands: list[Command] = []
        self._due = self._gauge.due = None
        self._crowded = False
        while (self._queue or self._alone) and self._stopped is None and not self._held:
            found = self._next()
            if found is None and not self._slots.others:
                if not self._running:  # every slot that a job could have is retired
                    commands += self._end_queue(lambda _: lost("was never started: no usable slot is left"))
                break
            if now < self._not_before:
                self._due = self._not_before
                break
            if found is None:
                break
            found = self._next(self._gauge.closed(range(len(self.layout.devices)), now))
            if found is None:
                commands += self._gauge.ask(now)
                break
            entry, slots = found
            (self._alone if entry.alone else self._queue).remove(entry)
            self._slots.take(slots)
            limit = None if self.policy.timeout_s is None else now + self.policy.timeout_s
            self._running[entry.job.num] = _Try(entry, slots, limit)
            self._gauge.started(entry.job.num, [slot.device for slot in slots], now)
            self._not_before = now + self.policy.stagger_s
            commands.append(Start(entry.job, entry.attempt, slots, entry.alone))
        return commands

    def _measured(self, event: Measured, now: float) -> list[Command]:
        """What has memory starts; of devices that only lack memory, a person is told."""
        self._gauge.take(event, now)
        commands = self._start(now)
        if (self._queue or self._alone) and not self._held:
            commands += self._gauge.scarce(self._slots.with_room)
        self._gauge.forget()
        return commands

    def _next(self, closed: Collection[int] = ()) -> tuple[_Entry, tuple[Slot, ...]] | None:
        """The job to start, and its slots. What needs whole devices comes first: others fill them up for ever.

        ``closed``: devices on which nothing may start for now.
        """
        self._closed = closed
        self._reserved = self._slots.emptiest(closed, self._reserved) if self._alone else ()
        if self._alone:
            slots = self._slots.all_of(self._reserved)
            if slots is not None and not {*self._reserved} & {*closed}:
                return self._alone[0], slots
        placed = self._slots.place({*self._reserved, *closed}) if self._queue else None
        return None if placed is None else (self._queue[0], placed)

    def _refused(self, event: StartRefused, now: float) -> list[Command]:
        """Tried again when a job ends: until then, no slot is worth a try. Where none runs, nothing would ever end."""
        entry, stopped = self._not_started(event)
        if stopped is not None:
            return self._end(entry, entry.attempt - 1, cancelled(f"{stopped.why}; {_before(entry)}"), now)
        if event.for_now and (self._running or self._held):
            self._enqueue(entry)
            self._crowded = True
            return []
        why = f"could not be started: {event.why}"
        if event.for_now:
            why += "; and no other job runs whose end would make room"
        return [*self._end(entry, entry.attempt, lost(why), now), *self._start(now)]

    def _taken(self, event: Taken, now: float) -> list[Command]:
        """The job has its place in the queue again, and other slots are tried."""
        entry, stopped = self._not_started(event)
        self._not_before = now  # it was no start
        if stopped is not None:
            return self._end(entry, entry.attempt - 1, cancelled(f"{stopped.why}; {_before(entry)}"), now)
        entry.refused = True
        self._enqueue(entry)
        self._slots.others |= event.slots
        return [] if self._crowded else self._start(now)

    def _freed(self, now: float) -> list[Command]:
        self._slots.others.clear()
        return [] if self._crowded else self._start(now)

    def _not_started(self, event: StartRefused | Taken) -> tuple[_Entry, Stopped | None]:
        """The try is as if it had not been; and why it is not to be made again: by fail_fast, in the same step."""
        attempt = self._expect(event.num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED)
        del self._running[event.num]
        self._slots.release(attempt.slots)
        self._gauge.dropped(event.num)
        return attempt.entry, attempt.stopped

    def _enqueue(self, entry: _Entry) -> None:
        """In front of all that was submitted later: in one step, several may be refused."""
        queue: MutableSequence[_Entry] = self._alone if entry.alone else self._queue
        before = sum(self._turn[other.job.num] < self._turn[entry.job.num] for other in queue)
        queue.insert(before, entry)

    # --- stopping ---

    def _stop(self, stop: Stop, now: float) -> list[Command]:
        """Idempotent: a later polite stop changes nothing, SIGKILL hastens what is under way."""
        self._stopped = self._stopped or stop
        commands = self._cancel_queue(stop.why)
        for attempt in self._running.values():
            if stop.signum == signal.SIGKILL and attempt.phase in {Phase.RUNNING, Phase.STOPPING}:
                commands.append(self._kill(attempt, stop.why, now))
            elif attempt.phase is Phase.RUNNING:
                commands.append(self._interrupt(attempt, Stopped(Cause.CANCELLED, stop.why), stop.signum, now))
        return commands

    def _cancel(self, num: int, why: str, now: float) -> list[Command]:
        """What ends already, or has ended, does so as it would."""
        attempt = self._running.get(num)
        if attempt is not None:
            if attempt.phase is not Phase.RUNNING:
                return []
            return [self._interrupt(attempt, Stopped(Cause.CANCELLED, why), signal.SIGTERM, now)]
        for queue in (self._queue, self._alone):
            for entry in [entry for entry in queue if entry.job.num == num]:
                queue.remove(entry)
                return [End(entry.job, entry.attempt - 1, cancelled(f"{why}; {_before(entry)}")), *self._start(now)]
        return []

    def _interrupt(self, attempt: _Try, stopped: Stopped, signum: int, now: float) -> Command:
        attempt.phase, attempt.deadline = Phase.STOPPING, now + self.policy.kill_grace_s
        attempt.stopped = stopped
        return Interrupt(attempt.entry.job.num, stopped.why, signum, stopped.cause)

    def _saving(self, attempt: _Try, now: float) -> list[Command]:
        """It has as much time again, to save and to exit; whatever else stops it is told what is lost by it."""
        stopped = attempt.stopped
        if stopped is not None and stopped.cause is Cause.TIMEOUT:
            attempt.phase, attempt.stopped = Phase.RUNNING, None
            attempt.deadline = now + (self.policy.timeout_s or 0)
        elif stopped is not None:
            why = f"{stopped.why}; it had finished, but its result could not be saved"
            attempt.stopped = Stopped(stopped.cause, why)
        return []

    def _kill(self, attempt: _Try, why: str, now: float) -> Command:
        if attempt.phase is Phase.RUNNING:
            attempt.stopped = Stopped(Cause.CANCELLED, why)
        attempt.phase, attempt.deadline = Phase.KILLED, now + LOST_AFTER_S
        return Kill(attempt.entry.job.num, why)

    def _cancel_queue(self, why: str) -> list[Command]:
        return self._end_queue(lambda entry: cancelled(f"{why}; {_before(entry)}"))

    # --- ending ---

    def _over(self, attempt: _Try, exit_: Exit | None, report: Report | None, now: float) -> list[Command]:
        """The try is; the job as well, unless it may have another one."""
        entry, outcome = attempt.entry, judge(attempt.stopped, exit_, report)
        del self._running[entry.job.num]
        if (
            outcome.cause.value in self.policy.retry_on
            and entry.attempt <= self.policy.max_retries
            and self._stopped is None
        ):
            alone = outcome.cause is Cause.OOM and not self.layout.on_cpu
            self._enqueue(_Entry(entry.job, entry.attempt + 1, alone or entry.alone, outcome))
            return [Retry(entry.job, entry.attempt, outcome)]
        return self._end(entry, entry.attempt, outcome, now)

    def _end(self, entry: _Entry, attempt: int, outcome: Outcome, now: float) -> list[Command]:
        commands: list[Command] = [End(entry.job, attempt, outcome)]
        if self.policy.fail_fast and outcome.status is Status.FAILED and self._stopped is None:
            commands += self._stop(
                Stop(f"fail_fast, since {told(entry.job, outcome.error_type, outcome.error_text)}", signal.SIGTERM), now
            )
        return commands

    def _end_queue(self, outcome: Callable[[_Entry], Outcome]) -> list[Command]:
        """All that waits, in the order of submission. ``attempt`` is the number of tries that there were: 0, mostly."""
        waiting = sorted([*self._alone, *self._queue], key=lambda entry: self._turn[entry.job.num])
        self._alone.clear()
        self._queue.clear()
        return [End(entry.job, entry.attempt - 1, outcome(entry)) for entry in waiting]


def _before(entry: _Entry) -> str:
    """What was not done with a job that waited."""
    if entry.failed is None:
        return "it was not started"
    return f"it was not tried again, after {told(entry.job, entry.failed.error_type, entry.failed.error_text)}"
