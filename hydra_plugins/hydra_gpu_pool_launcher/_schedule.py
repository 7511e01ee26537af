"""Events in, commands out: which job starts when and where, when it is stopped, and how it ended.

Every policy is here, and nothing else is: no clock (the time comes with each event, in seconds of any monotonic clock),
no process, no file. A job waits in the ``_queue``, its try goes through the phases of ``_tries``, and when that is
over, the job is over itself, or waits again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from ._events import (
    Abandoned,
    Cancel,
    Command,
    End,
    Ending,
    Event,
    Freed,
    Gone,
    Held,
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
from ._model import Cause, Exit, Layout, Outcome, Policy, Report, Slot, Status
from ._queue import Entry, Queue
from ._slots import Slots
from ._tries import Phase, Tries, Try
from ._verdict import Stopped, cancelled, judge, lost, told

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
    _queue: Queue = field(default_factory=Queue)
    _running: Tries = field(default_factory=Tries)
    _slots: Slots = field(init=False)
    _stopped: Stop | None = None
    _held: bool = False
    _not_before: float = float("-inf")  # the next start, for stagger_s
    _due: float | None = None  # when a start that only stagger_s delays can be made
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
        return not self._queue and not self._running

    @property
    def stopped(self) -> str | None:
        """Why nothing will be started any more; None where it may."""
        return None if self._stopped is None else self._stopped.why

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due at the latest; None: not before the next event."""
        deadlines = [self._due, self._again, self._gauge.due, *(attempt.deadline for attempt in self._running.values())]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """What follows from the event. Raises IllegalEventError where it cannot have happened."""
        match event:
            case Submitted(jobs):
                self._queue.submit(jobs)
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
                self._running.expect(num, event, Phase.STOPPING, Phase.KILLED).stopped = None
                return []
            case Saving(num):
                self._running.expect(num, event, Phase.STOPPING).save(now + (self.policy.timeout_s or 0))
                return []
            case Ending(num):
                self._running.expect(num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED).end(now)
                return []
            case Gone(num, exit_, report):
                attempt = self._running.expect(num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED, Phase.ENDING)
                self._slots.release(attempt.slots)
                self._gauge.ended(num, now)
                return [*self._over(attempt, exit_, report, now), *self._start(now)]
            case Abandoned(num, report):
                attempt = self._running.expect(num, event, Phase.ABANDONED)
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
                commands.append(attempt.kill("did not end within kill_grace_s", now))
            else:
                commands.append(attempt.abandon())
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
        first = self._queue.first_alone
        if first is None or (self._due is not None and not first.refused):
            return frozenset()
        wanted = self._slots.as_empty(self._closed) if self._slots.others else frozenset(self._reserved)
        return wanted - self._gauge.in_vain

    def _next_waits_for(self) -> tuple[frozenset[Slot], frozenset[int]]:
        """The slots that others have, and the devices whose memory they hold, of those that are not reserved."""
        reserved = frozenset(self._reserved if self._queue.first_alone is not None else ())
        if self._queue.first is None or self._due is not None:
            return frozenset(), frozenset()
        slots = self._wanted if self._gauge.looking else frozenset()  # then it is not known yet who has them
        if self._slots.others:
            # What needs several waits for those that are free as well: others would take them one by one.
            slots = frozenset(self._slots.free if self.layout.devices_per_job > 1 else self._slots.others)
        return (
            frozenset(slot for slot in slots if slot.device not in reserved),
            self._gauge.behind & self._slots.with_room - reserved,
        )

    # --- starting ---

    def _start(self, now: float) -> list[Command]:
        """Whatever has room. Where nothing runs and nothing ever will, the rest is lost."""
        commands: list[Command] = []
        self._due = self._gauge.due = None
        self._crowded = False
        while self._queue and self._stopped is None and not self._held:
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
            self._queue.remove(entry)
            self._slots.take(slots)
            limit = None if self.policy.timeout_s is None else now + self.policy.timeout_s
            self._running[entry.job.num] = Try(entry, slots, limit)
            self._gauge.started(entry.job.num, [slot.device for slot in slots], now)
            self._not_before = now + self.policy.stagger_s
            commands.append(Start(entry.job, entry.attempt, slots, entry.alone))
        return commands

    def _measured(self, event: Measured, now: float) -> list[Command]:
        """What has memory starts; of devices that only lack memory, a person is told."""
        self._gauge.take(event, now)
        commands = self._start(now)
        if self._queue and not self._held:
            commands += self._gauge.scarce(self._slots.with_room)
        self._gauge.forget()
        return commands

    def _next(self, closed: Collection[int] = ()) -> tuple[Entry, tuple[Slot, ...]] | None:
        """The job to start, and its slots. What needs whole devices comes first: others fill them up for ever.

        ``closed``: devices on which nothing may start for now.
        """
        alone, first = self._queue.first_alone, self._queue.first
        self._closed = closed
        self._reserved = self._slots.emptiest(closed, self._reserved) if alone is not None else ()
        if alone is not None:
            slots = self._slots.all_of(self._reserved)
            if slots is not None and not {*self._reserved} & {*closed}:
                return alone, slots
        placed = self._slots.place({*self._reserved, *closed}) if first is not None else None
        return None if first is None or placed is None else (first, placed)

    def _refused(self, event: StartRefused, now: float) -> list[Command]:
        """Tried again when a job ends: until then, no slot is worth a try. Where none runs, nothing would ever end."""
        entry, stopped = self._not_started(event)
        if stopped is not None:
            return self._end(entry, entry.attempt - 1, cancelled(f"{stopped.why}; {entry.undone}"), now)
        if event.for_now and (self._running or self._held):
            self._queue.put_back(entry)
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
            return self._end(entry, entry.attempt - 1, cancelled(f"{stopped.why}; {entry.undone}"), now)
        entry.refused = True
        self._queue.put_back(entry)
        self._slots.others |= event.slots
        return [] if self._crowded else self._start(now)

    def _freed(self, now: float) -> list[Command]:
        self._slots.others.clear()
        return [] if self._crowded else self._start(now)

    def _not_started(self, event: StartRefused | Taken) -> tuple[Entry, Stopped | None]:
        """The try is as if it had not been; and why it is not to be made again: by fail_fast, in the same step."""
        attempt = self._running.expect(event.num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED)
        del self._running[event.num]
        self._slots.release(attempt.slots)
        self._gauge.dropped(event.num)
        return attempt.entry, attempt.stopped

    # --- stopping ---

    def _stop(self, stop: Stop, now: float) -> list[Command]:
        """Idempotent: a later polite stop changes nothing, SIGKILL hastens what is under way."""
        self._stopped = self._stopped or stop
        commands = self._cancel_queue(stop.why)
        for attempt in self._running.values():
            if stop.signum == signal.SIGKILL and attempt.phase in {Phase.RUNNING, Phase.STOPPING}:
                commands.append(attempt.kill(stop.why, now))
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
        entry = self._queue.take(num)
        if entry is None:
            return []
        return [End(entry.job, entry.attempt - 1, cancelled(f"{why}; {entry.undone}")), *self._start(now)]

    def _interrupt(self, attempt: Try, stopped: Stopped, signum: int, now: float) -> Command:
        return attempt.interrupt(stopped, signum, now + self.policy.kill_grace_s)

    def _cancel_queue(self, why: str) -> list[Command]:
        return self._end_queue(lambda entry: cancelled(f"{why}; {entry.undone}"))

    # --- ending ---

    def _over(self, attempt: Try, exit_: Exit | None, report: Report | None, now: float) -> list[Command]:
        """The try is; the job as well, unless it may have another one."""
        entry, outcome = attempt.entry, judge(attempt.stopped, exit_, report)
        del self._running[entry.job.num]
        if (
            outcome.cause.value in self.policy.retry_on
            and entry.attempt <= self.policy.max_retries
            and self._stopped is None
        ):
            alone = outcome.cause is Cause.OOM and not self.layout.on_cpu
            self._queue.put_back(Entry(entry.job, entry.attempt + 1, alone or entry.alone, outcome))
            return [Retry(entry.job, entry.attempt, outcome)]
        return self._end(entry, entry.attempt, outcome, now)

    def _end(self, entry: Entry, attempt: int, outcome: Outcome, now: float) -> list[Command]:
        commands: list[Command] = [End(entry.job, attempt, outcome)]
        if self.policy.fail_fast and outcome.status is Status.FAILED and self._stopped is None:
            commands += self._stop(
                Stop(f"fail_fast, since {told(entry.job, outcome.error_type, outcome.error_text)}", signal.SIGTERM), now
            )
        return commands

    def _end_queue(self, outcome: Callable[[Entry], Outcome]) -> list[Command]:
        """All that waits, in the order of submission. ``attempt`` is the number of tries that there were: 0, mostly."""
        return [End(entry.job, entry.attempt - 1, outcome(entry)) for entry in self._queue.take_all()]
