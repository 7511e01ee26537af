"""The loop of the supervisor: wait, ask the schedule, carry out.

The world, which forks, kills, reads and writes, is behind an interface, so that the loop and the schedule can be played
against a scripted one, whose future is written down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ._errors import ConfigurationError
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
    Look,
    Measured,
    Released,
    Retry,
    Returned,
    Saving,
    Scarce,
    Start,
    StartRefused,
    Stop,
    Submitted,
    Taken,
)
from ._files import is_of_the_disk
from ._model import Cause, Exit
from ._process import is_refusal
from ._requests import Close, Request
from ._schedule import Schedule
from ._system import Died, Happening, World

LOOK_AGAIN_S = 1.0
"""Between two looks at a disk that cannot be written: nothing tells when it can."""


@dataclass
class _Running:
    started: float
    ended: float | None = None
    exit: Exit | None = None
    stop_recorded: bool = False


@dataclass
class Pool:
    """Serves requests until it is told to close, or to stop for good.

    A request while another is under way does not happen: main waits for the end of each.
    """

    schedule: Schedule
    world: World
    _running: dict[int, _Running] = field(default_factory=dict)
    _launching: bool = False
    _closing: bool = False
    _held: bool = False  # nothing is started
    _warned: bool = False  # and a person knows
    _told: set[int] = field(default_factory=set)  # devices of which it was said, in this launch, that others have them

    def serve(self) -> None:
        """Block until there is nothing left to do and nothing can come any more."""
        while not (self._closing and self.schedule.idle):
            happened = self.world.wait(self._deadline())
            for event in happened:
                self._take(event)
            self._look_at_the_disk()
            self._carry_out(self.schedule.tick(self.world.now()))
            self._line_up()
            if self._launching and self.schedule.idle:
                self._launching = False
                self.world.record("done", stopped=self.schedule.stopped)
                if self._held and self.schedule.stopped is not None:  # whoever stopped it does not wait for the disk
                    self.world.leave()
            self.world.ring()

    def _deadline(self) -> float | None:
        deadlines = [self.schedule.deadline, self.world.now() + LOOK_AGAIN_S if self._held else None]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _look_at_the_disk(self) -> None:
        why = self.world.blocked()
        if why is not None:
            self._hold(why)
        elif self._held:
            self._held = False
            self._tell(Released())

    def _line_up(self) -> None:
        """Wait for what others have, and what is wanted, if anything is."""
        waiting = self.schedule.waiting(self.world.now())
        while self.world.wait_for(waiting):
            self._tell(Freed())
            waiting = self.schedule.waiting(self.world.now())
        for device in sorted({slot.device for slot in waiting.told} - self._told):
            self._told.add(device)
            name = self.schedule.layout.devices[device].label
            gpu = f"GPU {name}" if name.isdigit() else name  # a name has the word in itself
            holders = self.world.holders([slot for slot in waiting.told if slot.device == device])
            self.world.record("waiting", device=name, why=f"a job waits for a slot on {gpu}, which {holders}")

    def _hold(self, why: str) -> None:
        """Start nothing that cannot be recorded, and say so, once: what runs goes on, and ends as ever."""
        if not self._warned:
            self._warned = True
            self.world.warn(f"{why}: no job is started until that is mended; those that run go on")
        if not self._held:
            self._held = True
            self._tell(Held())

    def _take(self, event: Happening) -> None:
        match event:
            case Close():
                self._closing = True
            case Request():
                self._launch(event)
            case Stop() | Cancel() | Measured() | Freed():
                self._tell(event)
            case Ending(num):
                self._running[num].ended = self.world.now()
                self._tell(event)
            case Died(num, exit_):
                running = self._running[num]
                running.exit = exit_
                if running.ended is None:
                    running.ended = self.world.now()
                self.world.release(num)
                self._tell(Gone(num, exit_, self.world.report(num)))

    def _launch(self, request: Request) -> None:
        try:
            earlier = self.world.open(request)
        except ConfigurationError as error:
            self.world.refuse(str(error))
            return
        self._launching = True
        self._told.clear()
        if earlier is not None:
            self.world.record("resumed", **earlier.facts())
        for job in request.jobs:
            self.world.record("queued", job=job.num, overrides=job.overrides)
        kept = {} if earlier is None else earlier.kept
        for job in request.jobs:
            if job.num in kept:
                self._end("end", End(job, 0, kept[job.num].outcome), kept[job.num].facts)
        self._tell(Submitted(tuple(job for job in request.jobs if job.num not in kept)))

    def _tell(self, event: Event) -> None:
        self._carry_out(self.schedule.handle(event, self.world.now()))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        """Each command, in order, and then what follows from the answers to them, one after the other."""
        answers: deque[Event] = deque()
        while True:
            # No recursion: of a thousand slots, each may be another sweep's.
            new = [answer for command in commands for answer in self._do(command)]
            answers.extendleft(reversed(new))
            if not answers:
                return
            commands = self.schedule.handle(answers.popleft(), self.world.now())

    def _do(self, command: Command) -> Sequence[Event]:
        match command:
            case Start():
                return self._start(command)
            case Interrupt(num) | Kill(num) if num not in self._running:
                return []  # its start was refused in this same step
            case Interrupt(num, why, signum, cause):
                if not self.world.saving(num):
                    return self._interrupt(num, why, signum, cause)
                if cause is Cause.TIMEOUT:
                    return [Saving(num)]
                return [*self._interrupt(num, why, signum, cause), Saving(num)]
            case Kill(num, why):
                answer = self._before_signal(num, why, Cause.CANCELLED)
                self.world.kill(num)
                return answer
            case Abandon(num):
                self.world.abandon(num)
                return [Abandoned(num, self.world.report(num))]
            case End():
                self._end("end", command)
                return []
            case Retry():
                self._end("retry", command)
                return []
            case Look():
                self.world.look()
                return []
            case Scarce(device):
                why = self.world.scarcity(device)
                self.world.record("waiting", device=self.schedule.layout.devices[device].label, why=why)
                return []

    def _start(self, start: Start) -> Sequence[Event]:
        num, now = start.job.num, self.world.now()
        why = None if self._held else self.world.blocked()
        if why is not None:
            self._hold(why)
        if self._held:
            return [StartRefused(num, "nothing can be recorded", for_now=True)]
        taken = self.world.lease(start)
        if taken:
            return [Taken(num, taken)]
        try:
            pid = self.world.start(start)
        except OSError as error:
            self.world.release(num)
            if is_of_the_disk(error):
                self._hold(f"The sweep's files cannot be written ({error})")
                return [StartRefused(num, str(error), for_now=True)]
            return [StartRefused(num, str(error), is_refusal(error))]
        if self._warned:
            self._warned = False
            self.world.warn("the sweep's files can be written again: the sweep goes on")
        self._running[num] = _Running(now)
        labels = [self.schedule.layout.label(slot) for slot in start.slots]
        self.world.record("start", job=num, attempt=start.attempt, pid=pid, slots=labels)
        return []

    def _interrupt(self, num: int, why: str, signum: int, cause: Cause) -> Sequence[Event]:
        answer = self._before_signal(num, why, cause)
        self.world.signal(num, signum)
        return answer

    def _before_signal(self, num: int, why: str, cause: Cause) -> Sequence[Event]:
        """The decision is on record before the job can know of it, unless the job was faster: then its word counts.

        Once it is on record it stands: what a job saves between Interrupt and Kill comes too late.
        """
        running = self._running[num]
        if running.stop_recorded:
            return []
        if self.world.report(num) is not None:
            return [Returned(num)]
        running.stop_recorded = True
        self.world.record("stop", job=num, cause=cause.value, why=why)
        return []

    def _end(
        self, event: str, end: End | Retry, of_an_earlier_sweep: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        outcome, running = end.outcome, self._running.pop(end.job.num, None)
        facts: dict[str, Any] = {**of_an_earlier_sweep}
        if running is not None:
            ended = self.world.now() if running.ended is None else running.ended
            facts["seconds"] = round(ended - running.started, 3)
            if running.exit is not None:
                facts["cpu_s"], facts["peak_mb"] = round(running.exit.cpu_s, 3), round(running.exit.peak_mb, 1)
            gpu_mb = self.world.gpu_mb(end.job.num)
            if gpu_mb is not None:
                facts["gpu_mb"] = round(gpu_mb, 1)
            if running.stop_recorded and not outcome.by_itself:
                self.world.set_aside(end.job.num)
        self.world.record(
            event,
            job=end.job.num,
            attempt=end.attempt,
            status=outcome.status.value,
            cause=outcome.cause.value,
            error_type=outcome.error_type,
            error_text=outcome.error_text,
            value=outcome.value,
            by_itself=outcome.by_itself,
            **facts,
        )
