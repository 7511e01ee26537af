"""One start of a group of ranks, in the process of its job: they are forked, watched and ended together."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from . import _descriptors, _interpreter, _nodes, _process, _signals, _streams
from ._body import Elsewhere
from ._descriptors import Unnamed
from ._errors import JobCancelledError, JobCrashedError
from ._failure import SEEN_LATE_S, End, Failure, Said, describe, first_failure
from ._family import Family, children
from ._forward import LOOK, GoneError, ToldError
from ._launch import Launch, start_rank
from ._model import Exit
from ._nodes import UNSAID, NodeError, Nodes, Verdict
from ._torchrun import master_environ
from ._verdict import BY_HAND, LOST_AFTER_S, signal_name


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one start find each other: host and port of its store; on all nodes the same ``run_id``."""

    master: tuple[str, int]
    run_id: str


class Rendezvous(Protocol):
    """What opens the stores of a group."""

    def meet(self, start: int) -> Meeting:
        """Open the one of this start, from 0, and wait for the other nodes. Raises NodeError, ToldError."""

    @property
    def nodes(self) -> Nodes | None:
        """What the machines of the job have to tell each other, once they have met; None: there is one."""

    def give_up(self, start: int, why: str) -> None:
        """Tell the others that this node ends; never raises NodeError."""


@dataclass
class _Member:
    """A rank that was started. ``seen``: when it was seen to have ended; ``gone``: so is all of its tree."""

    report: Unnamed
    seen: float | None = None
    gone: bool = False
    exit: Exit | None = None
    stopped: bool = False
    said: Said | None = None
    abandon_at: float = math.inf  # from a SIGKILL, or its own death, on: some of its tree may not die


@dataclass
class Ranks:
    """The ranks of one start, on this machine, from the first fork until all of their trees are gone."""

    launch: Launch
    start: int
    rendezvous: Rendezvous
    _family: Family = field(default_factory=Family)
    _members: dict[int, _Member] = field(default_factory=dict)  # by rank in the whole group
    _forwarded: set[int] = field(default_factory=set)
    _failing: bool = False
    _refused: Failure | None = None
    _lost: NodeError | None = None
    _fail_at: float = math.inf
    _kill_at: float = math.inf
    _look_at: float = math.inf
    _told: tuple[int, float] | None = None  # by whom to end, and when
    _gave_up: bool = False
    _gate: tuple[int, int] = field(default_factory=_descriptors.hidden_pipe)
    _orders: Unnamed = field(default_factory=Unnamed.made)

    @property
    def _nodes(self) -> Nodes | None:
        return self.rendezvous.nodes

    def run(self) -> tuple[bytes | None, Failure | None]:
        """Start them, and block until all are gone: the value of the group's rank 0, pickled, or why there is none."""
        self._family.spare(children())  # what the app's callbacks have started
        try:
            with _signals.children_of_our_own():
                self._fork_all()
                if not self._failing or self.launch.group.ddp.nnodes > 1:
                    self._meet()
                while not all(member.gone for member in self._members.values()):
                    self._wait()
            if self._fail_at != math.inf:  # nobody is left here to say of what
                self._fail()
            return self._outcome()
        finally:
            for rank in self._members:  # none runs any more, but for a fault of ours
                self._family.kill(rank)
            reports = (member.report.fd for member in self._members.values())
            for fd in (*self._gate, self._orders.fd, *reports):
                os.close(fd)

    # --- starting ---

    def _meet(self) -> None:
        """All ranks are there before there is a store, and wait until they are told where it is.

        torch's store has a thread. Whatever locks that holds in the C library while this process forks, for the name of
        a new connection say, would be held in the fork for ever.
        """
        signals, orders = self.launch.signals, self._orders
        signals.lifelines = tuple(self._family.descriptors())
        try:
            with self._noting_losses():
                meeting = self.rendezvous.meet(self.start)
                self._look_at = math.inf if self._nodes is None else time.monotonic()
                with _process.files_of_any_size():
                    orders.write(json.dumps(master_environ(meeting.master, meeting.run_id)).encode())
        except ToldError as error:
            self._forward(error.signum)
            self._give_up("it was cancelled")
        except GoneError:  # which rank, and how, is seen at once
            self._give_up("a rank ended before it began")
        finally:
            signals.lifelines = ()
        if self._lost is not None:
            self._fail()
        elif self._failing and self._nodes is not None:  # some rank could not be started
            with self._noting_losses():
                self._nodes.fail(self.start)
        elif not self._gave_up:
            os.write(self._gate[1], b"x")  # read by none of them: it can be read by all

    def _give_up(self, why: str) -> None:
        self._gave_up = True
        self.rendezvous.give_up(self.start, why)

    def _fork_all(self) -> None:
        _interpreter.pause_openmp()
        group, job = self.launch.group, self.launch.assignment.job
        for local in range(group.ranks):
            try:
                self._start(local)
            except OSError as error:
                why = f"could not start its rank {self.launch.rank(local)}: {error.strerror}"
                crash = JobCrashedError(job.num, job.overrides, why)
                self._refused = Failure(None, crash, Elsewhere(crashed=True), at=time.monotonic())
                self._fail()
                return

    def _start(self, local: int) -> None:
        others = [member.report.fd for member in self._members.values()]
        report = start_rank(self.launch, self.start, local, self._family, self._gate, self._orders, others)
        self._members[self.launch.rank(local)] = _Member(report)

    # --- watching ---

    def _wait(self) -> None:
        until = min(
            self._fail_at, self._kill_at, self._look_at, *(member.abandon_at for member in self._members.values())
        )
        timeout = None if until == math.inf else until - time.monotonic()
        steps, ready = self._family.wait(timeout, [self.launch.signals.fd])
        for rank, exit_ in steps.items():
            self._ended(rank, self._members[rank], exit_)
        if ready:
            self._hear()
        self._look_at_the_clock(time.monotonic())

    def _hear(self) -> None:
        for number in self.launch.signals.heard():
            if number == LOOK:
                self._look_for_words()
            else:
                self._forward(number)

    def _forward(self, signum: int) -> None:
        self._forwarded.add(signum)
        if signum in BY_HAND and self._told is None:
            self._told = signum, time.monotonic()
            self._tell_of(signum)
        if signum in {signal.SIGTERM, signal.SIGINT}:  # what some of them make of it, others may wait for without end
            self._kill_at = min(self._kill_at, time.monotonic() + self.launch.group.kill_grace_s)
        for rank, member in self._members.items():
            if member.seen is None:
                self._family.signal(rank, signum)

    def _tell_of(self, signum: int) -> None:
        """In the job's log: where a group hangs, who of it does."""
        alive = {rank: member.seen is None and member.said is None for rank, member in self._members.items()}
        running = ", ".join(str(rank) for rank, runs in alive.items() if runs) or "none"
        ended = ", ".join(str(rank) for rank, runs in alive.items() if not runs)
        before = f"; ended before: {ended}" if ended else ""
        _streams.note(f"gpu_pool: {signal_name(signum)}, passed on to the ranks that run: {running}{before}")

    def _look_for_words(self) -> None:
        """A rank has ended its function; its process may take its time to end, and the others wait for it."""
        for rank, member in self._members.items():
            member.said = member.said or self._said(member)
            if member.said is not None:
                self._judge(End(rank, 0.0, None, member.said, member.stopped))

    def _ended(self, rank: int, member: _Member, exit_: Exit | None) -> None:
        if member.seen is None:
            member.seen = time.monotonic()
            member.said = member.said or self._said(member)
        if exit_ is None:  # of its tree, something is left
            member.abandon_at = time.monotonic() + LOST_AFTER_S
        else:
            member.gone, member.exit, member.abandon_at = True, exit_, math.inf
        self._judge(End(rank, member.seen, member.exit, member.said, member.stopped))

    def _judge(self, end: End) -> None:
        """End the others where this one has failed; not at once where one of them is about to say of what."""
        if end.failed and end.misses_another:
            self._fail_at = min(self._fail_at, time.monotonic() + SEEN_LATE_S)
        elif end.failed:
            self._fail()

    def _said(self, member: _Member) -> Said | None:
        """What the rank has left. Signals that were sent to all of them are no reason not to wait for the others."""
        try:
            said: Said = pickle.loads(member.report.read())
        except Exception:  # nothing, or cut off by the rank's death
            return None
        return replace(said, told=tuple(signum for signum in said.told if signum not in self._forwarded))

    def _fail(self) -> None:
        """A rank has failed, here or on another node: the others would wait for it."""
        self._fail_at = math.inf
        if self._failing:
            return
        self._failing = True
        self._kill_at = min(self._kill_at, time.monotonic() + self.launch.group.kill_grace_s)
        for rank, member in self._members.items():
            if member.seen is None and member.said is None:
                member.stopped = True
                if not self._forwarded & BY_HAND:  # it knows; another signal would end it while it saves what it has
                    self._family.signal(rank, signal.SIGTERM)
        if self._nodes is not None and self._lost is None:
            with self._noting_losses():
                self._nodes.fail(self.start)

    def _look_at_the_clock(self, now: float) -> None:
        if now >= self._look_at and self._nodes is not None:
            self._look_at = now + _nodes.BEAT_S
            failing = False
            if self._lost is None:
                with self._noting_losses():
                    failing = self._nodes.look(self.start)
            if failing or self._lost is not None:
                self._fail()
        if now >= self._fail_at:
            self._fail()
        if now >= self._kill_at:
            self._kill_at = math.inf
            for rank, member in self._members.items():
                if member.seen is None:
                    member.abandon_at = now + LOST_AFTER_S
                    self._family.kill(rank)
        for rank, member in self._members.items():
            if now >= member.abandon_at:  # the supervisor finds what is left, and its slot is not used again
                self._family.abandon(rank)
                member.gone, member.seen, member.abandon_at = True, member.seen or now, math.inf

    @contextlib.contextmanager
    def _noting_losses(self) -> Iterator[None]:
        try:
            yield
        except NodeError as error:
            self._lost = error

    # --- the end ---

    def _outcome(self) -> tuple[bytes | None, Failure | None]:
        failure = self._refused or self._first_failure()
        if failure is not None and self._told is not None:  # to end, and not to begin again
            failure = self._after(failure, *self._told)
        first = self._members.get(0)
        payload = first.said.payload if first is not None and first.said is not None else None
        if self._lost is None and (self._nodes is None or self._gave_up):
            return payload, failure
        if self._lost is None and self._nodes is not None:
            with self._noting_losses():
                return self._settled(self._nodes, payload, failure)
        assert self._lost is not None
        if failure is not None and failure.elsewhere.crashed:
            return None, replace(failure, final=True)  # a death here does not follow from one there
        return None, self._of_another(self._lost.why, final=True)

    def _after(self, failure: Failure, signum: int, at: float) -> Failure:
        """What a rank fails of after it was told to end is that; what it had failed of before stays what it was."""
        if failure.at < at or isinstance(failure.error, JobCancelledError):
            return replace(failure, final=True)
        job = self.launch.assignment.job
        why = f"was cancelled: {signal_name(signum)} was sent to its process"
        return Failure(failure.rank, JobCancelledError(job.num, job.overrides, why), final=True, at=failure.at)

    def _first_failure(self) -> Failure | None:
        ends = [
            End(rank, member.seen or 0.0, member.exit, member.said, member.stopped)
            for rank, member in self._members.items()
        ]
        return first_failure(self.launch.assignment.job, ends, self._forwarded)

    def _settled(
        self, nodes: Nodes, payload: bytes | None, failure: Failure | None
    ) -> tuple[bytes | None, Failure | None]:
        if not self._failing:
            value = nodes.finish(self.start, payload)
            if value is not None:
                return value, None
        mine = None
        if failure is not None:
            at = time.time() - (time.monotonic() - failure.at)
            mine = Verdict(nodes.node, at, describe(failure), failure.final)
        cause = nodes.settle(self.start, mine)
        if failure is not None and (cause is None or cause.node == nodes.node):
            return None, failure
        if cause is None:
            return None, self._of_another(UNSAID, final=True)
        return None, self._of_another(cause.elsewhere, cause.final)

    def _of_another(self, why: str, final: bool) -> Failure:
        job = self.launch.assignment.job
        return Failure(None, JobCrashedError(job.num, job.overrides, why), Elsewhere(crashed=True), final=final)
