"""Events in, commands out: which job starts when and where, when it is stopped, and how it ended.

Every policy is here, and nothing else is: no clock (the time comes with each event, in seconds of any monotonic clock),
no process, no file. A job goes through these phases, and no other way:

    QUEUED ──Start──▶ RUNNING ──Stop──▶ STOPPING ──grace over──▶ KILLED ──bound over──▶ ABANDONED ──▶ OVER
       │                 └─────────────────┴─its process is gone────┴───▶ ENDING ──bound over───┘      ▲
       └──Stop──▶ OVER                                                      └──its tree is gone────────┘
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from dataclasses import dataclass, field

from ._model import (
    Abandon,
    Abandoned,
    Cause,
    Command,
    End,
    Ending,
    Event,
    Exit,
    Gone,
    GpuPoolError,
    Interrupt,
    Job,
    Kill,
    Layout,
    Outcome,
    Report,
    Returned,
    Slot,
    Start,
    StartRefused,
    Status,
    Stop,
    Submitted,
)

LOST_AFTER_S = 10.0
"""From SIGKILL (or from the death of a job's own process) to giving up on what is still there. A process that the
kernel holds in an uninterruptible sleep does not die of SIGKILL, and nothing may wait for it for ever."""

_BY_HAND = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_HINTS: dict[int, str] = {
    signal.SIGKILL: "; perhaps the machine ran out of memory (see dmesg)",
    signal.SIGBUS: "; perhaps the shared memory is full (see df -h /dev/shm)",
}


class IllegalEventError(GpuPoolError):
    """An event that cannot be, such as the end of a job that does not run: a fault of gpu_pool itself."""


class Phase(enum.Enum):
    """Where a job that has been started, and is not over, stands."""

    RUNNING = "running"
    STOPPING = "stopping"
    KILLED = "killed"
    ENDING = "ending"
    ABANDONED = "abandoned"


@dataclass
class _Try:
    """A job on its slots. ``deadline``: when the phase is over at the latest; None: no limit."""

    job: Job
    attempt: int
    slots: tuple[Slot, ...]
    phase: Phase = Phase.RUNNING
    deadline: float | None = None
    stopped: str | None = None  # why we stopped it


@dataclass
class Schedule:
    """The state of a pool, and its only judge.

    ``handle`` takes what happened and answers with what to do, in this order. ``deadline`` is when it must be called
    again at the latest (by ``tick``) if nothing happens before.
    """

    layout: Layout
    kill_grace_s: float
    _queue: deque[Job] = field(default_factory=deque)
    _running: dict[int, _Try] = field(default_factory=dict)
    _free: set[Slot] = field(init=False)
    _stopped: Stop | None = None
    _turn: dict[int, int] = field(default_factory=dict)  # by job: its place in the order of submission

    def __post_init__(self) -> None:
        self._free = set(self.layout.slots)

    @property
    def idle(self) -> bool:
        """True when every job that was submitted is over."""
        return not self._queue and not self._running

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due at the latest; None: not before the next event."""
        return min((t.deadline for t in self._running.values() if t.deadline is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """What follows from the event. Raises IllegalEventError where it cannot have happened."""
        match event:
            case Submitted(jobs):
                self._queue.extend(jobs)
                self._turn.update((job.num, turn) for turn, job in enumerate(jobs, len(self._turn)))
                if self._stopped is not None:
                    return self._cancel_queue(self._stopped.why)
                return self._start()
            case StartRefused():
                return self._refused(event)
            case Returned(num):
                self._expect(num, event, Phase.STOPPING, Phase.KILLED).stopped = None
                return []
            case Ending(num):
                attempt = self._expect(num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED)
                attempt.phase, attempt.deadline = Phase.ENDING, now + LOST_AFTER_S
                return []
            case Gone(num, exit_, report):
                attempt = self._expect(num, event, Phase.RUNNING, Phase.STOPPING, Phase.KILLED, Phase.ENDING)
                self._free.update(attempt.slots)
                return [self._over(attempt, judge(attempt.stopped, exit_, report)), *self._start()]
            case Abandoned(num, report):
                return self._abandoned(self._expect(num, event, Phase.ABANDONED), report)
            case Stop():
                return self._stop(event, now)

    def tick(self, now: float) -> list[Command]:
        """What is due now: grace that is over, processes that are not to be had."""
        commands: list[Command] = []
        for attempt in [t for t in self._running.values() if t.deadline is not None and t.deadline <= now]:
            if attempt.phase is Phase.STOPPING:
                commands.append(self._kill(attempt, "did not end within kill_grace_s", now))
            else:
                attempt.phase, attempt.deadline = Phase.ABANDONED, None
                commands.append(Abandon(attempt.job.num))
        return commands

    def _expect(self, num: int, event: Event, *phases: Phase) -> _Try:
        attempt = self._running.get(num)
        if attempt is None or attempt.phase not in phases:
            phase = "not running" if attempt is None else attempt.phase.value
            raise IllegalEventError(f"{type(event).__name__} for job {num}, which is {phase}")
        return attempt

    def _start(self) -> list[Command]:
        commands: list[Command] = []
        while self._queue and self._stopped is None:
            slots = self._place()
            if slots is None:
                break
            job = self._queue.popleft()
            self._free.difference_update(slots)
            self._running[job.num] = _Try(job, 1, slots)
            commands.append(Start(job, 1, slots))
        if not self._running:  # and there is no room: every slot that a job could have is retired
            commands += [End(job, 0, _lost("was never started: no usable slot is left")) for job in self._queue]
            self._queue.clear()
        return commands

    def _place(self) -> tuple[Slot, ...] | None:
        """The lowest free slot on each of the least loaded devices; None where too few devices have one."""
        load = [0] * len(self.layout.devices)
        lowest: dict[int, Slot] = {}
        for slot in self.layout.slots:
            if slot not in self._free:
                load[slot.device] += 1
            elif slot.device not in lowest:
                lowest[slot.device] = slot
        if len(lowest) < self.layout.devices_per_job:
            return None
        chosen = sorted(lowest, key=lambda device: (load[device], device))[: self.layout.devices_per_job]
        return tuple(lowest[device] for device in sorted(chosen))

    def _refused(self, event: StartRefused) -> list[Command]:
        """Tried again when a job ends: until then, no slot is worth a try. Where none runs, nothing would ever end."""
        attempt = self._expect(event.num, event, Phase.RUNNING)
        del self._running[event.num]
        self._free.update(attempt.slots)
        if event.for_now and self._running:
            self._requeue(attempt.job)
            return []
        why = f"could not be started: {event.why}"
        if event.for_now:
            why += "; and no other job runs whose end would make room"
        return [End(attempt.job, attempt.attempt, _lost(why)), *self._start()]

    def _requeue(self, job: Job) -> None:
        """In front of all that was submitted later: in one step, several may be refused."""
        before = sum(self._turn[other.num] < self._turn[job.num] for other in self._queue)
        self._queue.insert(before, job)

    def _stop(self, stop: Stop, now: float) -> list[Command]:
        """Idempotent: a later polite stop changes nothing, SIGKILL hastens what is under way."""
        self._stopped = self._stopped or stop
        commands = self._cancel_queue(stop.why)
        for attempt in self._running.values():
            if stop.signum == signal.SIGKILL and attempt.phase in {Phase.RUNNING, Phase.STOPPING}:
                commands.append(self._kill(attempt, stop.why, now))
            elif attempt.phase is Phase.RUNNING:
                attempt.phase, attempt.deadline, attempt.stopped = Phase.STOPPING, now + self.kill_grace_s, stop.why
                commands.append(Interrupt(attempt.job.num, stop.why, stop.signum))
        return commands

    def _kill(self, attempt: _Try, why: str, now: float) -> Command:
        if attempt.phase is Phase.RUNNING:
            attempt.stopped = why
        attempt.phase, attempt.deadline = Phase.KILLED, now + LOST_AFTER_S
        return Kill(attempt.job.num, why)

    def _abandoned(self, attempt: _Try, report: Report | None) -> list[Command]:
        """Its slots stay taken for good: whatever cannot be killed still holds its GPU."""
        return [self._over(attempt, judge(attempt.stopped, None, report)), *self._start()]

    def _over(self, attempt: _Try, outcome: Outcome) -> Command:
        del self._running[attempt.job.num]
        return End(attempt.job, attempt.attempt, outcome)

    def _cancel_queue(self, why: str) -> list[Command]:
        commands: list[Command] = [End(job, 0, _cancelled(f"{why}; it was not started")) for job in self._queue]
        self._queue.clear()
        return commands


def judge(stopped: str | None, exit_: Exit | None, report: Report | None) -> Outcome:
    """How a try ended: by what it says itself, unless we had stopped it, else by what the kernel says.

    ``stopped`` is why we stopped it; None where we did not, or only after its own outcome was on disk. ``exit_`` is
    None where the kernel never told, since the process could not be killed.
    """
    if stopped is not None and exit_ is not None:
        return _cancelled(stopped)
    if stopped is None and report is not None:
        cause = Cause.RETURNED if report.status is Status.COMPLETED else Cause.ERROR
        return Outcome(report.status, cause, report.error_type, report.error_text, report.value, by_itself=True)
    if exit_ is None:
        before = "" if stopped is None else f"was stopped ({stopped}), but "
        return _lost(f"{before}left a process that did not die within {LOST_AFTER_S:g} s of SIGKILL")
    if exit_.signal in _BY_HAND:
        return _cancelled(f"{_signal_name(exit_.signal)} was sent to its process")
    if exit_.signal is not None:
        why = f"was ended by {_signal_name(exit_.signal)}{_HINTS.get(exit_.signal, '')}"
    else:
        why = f"ended with exit code {exit_.code} and without a result"
    return Outcome(Status.FAILED, Cause.CRASH, "JobCrashedError", why)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _cancelled(why: str) -> Outcome:
    return Outcome(Status.CANCELLED, Cause.CANCELLED, "JobCancelledError", f"was cancelled: {why}")


def _lost(why: str) -> Outcome:
    return Outcome(Status.FAILED, Cause.LOST, "JobLostError", why)
