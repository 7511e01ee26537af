"""The loop of the supervisor: wait, ask the schedule, carry out.

The world, which forks, kills, reads and writes, is behind an interface, so that the loop and the schedule can be played
against a scripted one, whose future is written down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from ._journal import SweepFiles
from ._model import (
    Abandon,
    Abandoned,
    Command,
    ConfigurationError,
    End,
    Ending,
    Event,
    Exit,
    Gone,
    Interrupt,
    Job,
    Kill,
    Report,
    Returned,
    Start,
    StartRefused,
    Stop,
    Submitted,
)
from ._process import is_refusal
from ._resume import Earlier
from ._schedule import Schedule


@dataclass(frozen=True)
class Request:
    """What main asks for in one launch. The app itself is not in it: the supervisor was forked with it."""

    jobs: tuple[Job, ...]
    files: SweepFiles
    environ: Mapping[str, str]
    cwd: str
    fresh: bool  # the first launch of a sweep: what an earlier sweep left in the directory is moved aside
    resume: bool = False  # what completed in an earlier sweep is not run again


@dataclass(frozen=True)
class Close:
    """No request will come any more."""


@dataclass(frozen=True)
class Died:
    """The job's whole tree is gone and reaped."""

    num: int
    exit: Exit


class World(Protocol):
    """What the loop needs of the system. Only ``wait`` blocks."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""

    def wait(self, deadline: float | None) -> Sequence[Request | Close | Stop | Ending | Died]:
        """What happened; empty when the deadline passed before anything did."""

    def open(self, request: Request) -> Earlier | None:
        """Take the sweep directory and begin its journal; what is taken over from earlier sweeps, where that is asked.

        Raises ConfigurationError where it cannot be had.
        """

    def refuse(self, why: str) -> None:
        """Tell main that the request is not carried out."""

    def record(self, event: str, **facts: Any) -> None:
        """A line in the journal."""

    def ring(self) -> None:
        """Tell main that there is something new in the journal; never blocks."""

    def start(self, start: Start) -> int:
        """Fork the job; its pid. Raises OSError where the system refuses."""

    def signal(self, num: int, signum: int) -> None:
        """Send a signal to the job's process."""

    def kill(self, num: int) -> None:
        """SIGKILL to all of the job."""

    def abandon(self, num: int) -> None:
        """Wait no longer for what is left of the job."""

    def report(self, num: int) -> Report | None:
        """What the job has said of itself on disk."""

    def set_aside(self, num: int) -> None:
        """Take what a stopped job saved out of the place of results."""


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

    def serve(self) -> None:
        """Block until there is nothing left to do and nothing can come any more."""
        while not (self._closing and self.schedule.idle):
            happened = self.world.wait(self.schedule.deadline)
            for event in happened:
                self._take(event)
            self._carry_out(self.schedule.tick(self.world.now()))
            if self._launching and self.schedule.idle:
                self._launching = False
                self.world.record("done")
            self.world.ring()

    def _take(self, event: Request | Close | Stop | Ending | Died) -> None:
        match event:
            case Close():
                self._closing = True
            case Request():
                self._launch(event)
            case Stop():
                self._tell(event)
            case Ending(num):
                self._running[num].ended = self.world.now()
                self._tell(event)
            case Died(num, exit_):
                running = self._running[num]
                running.exit = exit_
                if running.ended is None:
                    running.ended = self.world.now()
                self._tell(Gone(num, exit_, self.world.report(num)))

    def _launch(self, request: Request) -> None:
        try:
            earlier = self.world.open(request)
        except ConfigurationError as error:
            self.world.refuse(str(error))
            return
        self._launching = True
        if earlier is not None:
            self.world.record("resumed", **earlier.facts())
        for job in request.jobs:
            self.world.record("queued", job=job.num, overrides=job.overrides)
        kept = {} if earlier is None else earlier.kept
        for job in request.jobs:
            if job.num in kept:
                self._end(End(job, 0, kept[job.num].outcome), kept[job.num].facts)
        self._tell(Submitted(tuple(job for job in request.jobs if job.num not in kept)))

    def _tell(self, event: Event) -> None:
        self._carry_out(self.schedule.handle(event, self.world.now()))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        """Each command, in order, and then what follows from the answers to them."""
        answers: deque[Event] = deque()
        for command in commands:
            answers.extend(self._do(command))
        while answers:
            self._tell(answers.popleft())

    def _do(self, command: Command) -> Sequence[Event]:
        match command:
            case Start():
                return self._start(command)
            case Interrupt(num, why, signum):
                answer = self._before_signal(num, why)
                self.world.signal(num, signum)
                return answer
            case Kill(num, why):
                answer = self._before_signal(num, why)
                self.world.kill(num)
                return answer
            case Abandon(num):
                self.world.abandon(num)
                return [Abandoned(num, self.world.report(num))]
            case End():
                self._end(command)
                return []

    def _start(self, start: Start) -> Sequence[Event]:
        num, now = start.job.num, self.world.now()
        try:
            pid = self.world.start(start)
        except OSError as error:
            return [StartRefused(num, str(error), is_refusal(error))]
        self._running[num] = _Running(now)
        labels = [self.schedule.layout.label(slot) for slot in start.slots]
        self.world.record("start", job=num, attempt=start.attempt, pid=pid, slots=labels)
        return []

    def _before_signal(self, num: int, why: str) -> Sequence[Event]:
        """The decision is on record before the job can know of it, unless the job was faster: then its word counts.

        Once it is on record it stands: what a job saves between Interrupt and Kill comes too late.
        """
        running = self._running[num]
        if running.stop_recorded:
            return []
        if self.world.report(num) is not None:
            return [Returned(num)]
        running.stop_recorded = True
        self.world.record("stop", job=num, why=why)
        return []

    def _end(self, end: End, of_an_earlier_sweep: Mapping[str, float] = MappingProxyType({})) -> None:
        outcome, running = end.outcome, self._running.pop(end.job.num, None)
        facts: dict[str, Any] = {**of_an_earlier_sweep}
        if running is not None:
            ended = self.world.now() if running.ended is None else running.ended
            facts["seconds"] = round(ended - running.started, 3)
            if running.exit is not None:
                facts["cpu_s"], facts["peak_mb"] = round(running.exit.cpu_s, 3), round(running.exit.peak_mb, 1)
            if running.stop_recorded and not outcome.by_itself:
                self.world.set_aside(end.job.num)
        self.world.record(
            "end",
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
