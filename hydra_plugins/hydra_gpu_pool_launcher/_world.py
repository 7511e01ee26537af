"""The supervisor's world as it is: processes, the journal, main at the other end of the channel.

All of this runs in the supervisor, for the loop of ``_pool``, which decides nothing about how a thing is done.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import (
    _files,
    _interpreter,
    _job,
    _leader,
    _pidfd,
    _returns,
    _signals,
    _threads,
)
from ._carry import CarriedBody
from ._channel import Channel
from ._events import Ending, Freed, Measured, Start, Waiting
from ._family import Family, children
from ._leader import Origin as OriginOfJob
from ._lease_files import Holder
from ._leases import Leases
from ._memory import Memory
from ._model import Group, Layout, Policy, Report, Slot
from ._monitor import Monitor
from ._records import Records
from ._requests import Request
from ._resume import Earlier
from ._system import Died, Happening

CANCEL = signal.SIGUSR2
"""To the supervisor, from whoever has asked for the end of a job, see ``_files.ask_to_cancel``."""


LISTEN_S = 1.0
"""From one look at what others have to the next, where nothing tells of what they let go of."""


@dataclass(frozen=True)
class App:
    """What the supervisor inherits by the fork: the app as it is, and how its jobs are to be run.

    ``devices``: the variables that show a job the devices of its slots, given the environment of the request.
    ``set_later``: the names of the variables that the body sets in each job's process, for the user.
    ``driver``: the command by which the driver is asked for the devices' memory; None: there is none, or no need.
    ``driver_knows_our_pids``: False in a container, to whose processes it gives other pids.
    """

    body: CarriedBody
    layout: Layout
    policy: Policy
    threads_per_job: int | None  # None: cores / jobs at once
    set_later: frozenset[str]
    cores: int
    group: Group | None  # where a job is one of ranks
    devices: Callable[[Sequence[Slot], Mapping[str, str]], dict[str, str]]
    leases: str | None  # the directory of the leases; None: the slots are not leased
    driver: tuple[str, ...] | None = None
    driver_knows_our_pids: bool = False


@dataclass(frozen=True)
class Origin:
    """What guard and supervisor need to know of the main process that forked them.

    ``inherited``: main's descriptors of its other supervisors, which are not theirs to keep.
    """

    main: int
    main_pidfd: int
    channel: int
    random_state: Any
    inherited: frozenset[int]


class SystemWorld:
    """The world as it is, for the loop of ``_pool``: processes, the journal, main at the other end of the channel."""

    def __init__(
        self,
        app: App,
        origin: Origin,
        wakeup: tuple[int, int],
        guard_pidfd: int,
        handlers_of_the_app: Mapping[int, _signals.Action],
        mask_of_the_app: frozenset[int],
        spawn: int | None,
        imported: str | None,
        leases: Leases | None,
    ) -> None:
        self._app = app
        self._mask_of_the_app = mask_of_the_app
        self._spawn = spawn
        self._imported = imported
        self._handlers_of_the_app = handlers_of_the_app
        self._origin = origin
        self._channel = Channel(
            origin.channel,
            wakeup,
            {origin.main_pidfd: "the main process is gone", guard_pidfd: "the guard process is gone"},
            {_job.UNSAVED: self._tell_of_unsaved, CANCEL: lambda: self._records.cancelled_by_hand()},
        )
        self._family = Family()
        if imported is not None:
            self._family.spare(children())  # what the app's import has started: a resource tracker, say
        self._records = Records(app.layout, origin.main, self.tell, imported)
        self._said_unsaved = False  # in this launch
        self._has_launched = False
        self._memory = Memory(
            devices=app.layout.devices,
            family=self._family,
            monitor=None if app.driver is None else Monitor(app.driver, self._family),
            pids=app.driver_knows_our_pids,
            least=app.policy.min_free,
            tell=self._tell_of_memory,
        )
        self._leases = leases
        self._said_unleased = False
        self._said_deaf = False

    def now(self) -> float:
        return time.monotonic()

    def wait(self, deadline: float | None) -> Sequence[Happening]:
        while True:
            measured = [self._with_others(one) for one in self._memory.step(time.monotonic())]
            listen = time.monotonic() + LISTEN_S if self._leases is not None and self._leases.deaf else None
            dues = [due for due in (deadline, self._memory.deadline, listen) if due is not None]
            timeout = 0.0 if measured else min(dues) - time.monotonic() if dues else None
            events = [*measured, *self._wait(timeout)]
            if listen is not None and time.monotonic() >= listen:
                self._tell_that_we_are_deaf()
                events.append(Freed())
            if events or (deadline is not None and time.monotonic() >= deadline):
                return events

    def _tell_that_we_are_deaf(self) -> None:
        if not self._said_deaf:
            self._said_deaf = True
            self.warn(
                "nothing tells when another sweep lets go of a slot, so gpu_pool looks once a second: inotify refuses "
                "to watch the leases; its limits are sysctl fs.inotify.max_user_instances and max_user_watches"
            )

    def _with_others(self, measured: Measured) -> Measured:
        if self._leases is None or self._app.policy.min_free is None:  # then nobody waits for their memory
            return measured
        return dataclasses.replace(measured, of_others=self._leases.of_others())

    def _wait(self, timeout: float | None) -> list[Happening]:
        """What happened to the jobs, or came from outside. What the driver has said is only looked at in ``wait``."""
        memory = self._memory.descriptors()
        bell = None if self._leases is None else self._leases.bell
        watch = {*self._channel.watched, *memory}
        steps, ready = self._family.wait(timeout, watch if bell is None else {*watch, bell})
        events: list[Happening] = [Ending(num) if exit_ is None else Died(num, exit_) for num, exit_ in steps.items()]
        for fd in ready:
            if fd in memory:
                pass
            elif fd == bell:
                assert self._leases is not None
                self._leases.heard()
                events.append(Freed())
            else:
                events += self._channel.hear(fd)
        return events

    def open(self, request: Request) -> Earlier | None:
        self._said_unsaved = False
        earlier = self._records.open(request)
        if self._has_launched:
            self._app.body.begin_another_launch()
        self._has_launched = True
        if self._spawn is None:
            _threads.apply_before(self._threads(request))
        return earlier

    def _threads(self, request: Request) -> int | None:
        """Those of each job of the launch; None where the user has chosen."""
        if _threads.are_chosen(request.environ, self._app.set_later):
            return None
        at_once = max(1, min(self._app.layout.jobs_at_once, len(request.jobs)))
        return self._app.threads_per_job or max(1, self._app.cores // at_once)

    def refuse(self, why: str) -> None:
        self.tell({"refused": why})

    def tell(self, message: dict[str, Any]) -> None:
        self._channel.tell(message)

    def ring(self) -> None:
        self._channel.ring()

    def record(self, event: str, **facts: Any) -> None:
        self._records.record(event, **facts)

    def blocked(self) -> str | None:
        return self._records.blocked()

    def _tell_of_unsaved(self) -> Sequence[Happening]:
        if self._records.request is not None and not self._said_unsaved:
            self._said_unsaved = True
            where = self._records.request.files.sweep_dir
            self.warn(f"a job cannot save its result in {where}, and waits until it can: free some space there")
        return ()

    def warn(self, text: str) -> None:
        self.tell({"warn": text})

    def leave(self) -> None:
        self.tell({"over": True})

    def lease(self, start: Start) -> frozenset[Slot]:
        if self._leases is None:
            return frozenset()
        taken = self._leases.take(start.job.num, start.slots, self._holder(), alone=start.alone)
        if self._leases.fault is not None and not self._said_unleased:
            self._said_unleased = True
            self.warn(self._leases.fault)
        return taken

    def release(self, num: int) -> None:
        if self._leases is not None:
            self._leases.release(num)

    def wait_for(self, waiting: Waiting) -> bool:
        return self._leases is not None and self._leases.wait_for(waiting, self._holder() if waiting else Holder())

    def holders(self, slots: Collection[Slot]) -> str:
        assert self._leases is not None
        return self._leases.holders(slots)

    def _holder(self) -> Holder:
        assert self._records.request is not None
        return Holder(self._origin.main, self._records.request.files.sweep_dir)

    def start(self, start: Start) -> int:
        assert self._records.request is not None
        request, app = self._records.request, self._app
        files, num = request.files, start.job.num
        self._memory.started(num, [slot.device for slot in start.slots])
        _files.make_job_dir(files, num)
        _returns.clear_result(files, num)
        _returns.set_aside_logs(files, num)
        output = _files.open_to_append(files.output(num))
        visibility = app.devices(start.slots, request.environ)
        assignment = _job.Try(
            job=start.job,
            files=files,
            environ={
                **request.environ,
                **visibility,
                "GPU_POOL_JOB_NUM": str(num),
            },
            cwd=request.cwd,
            threads=self._threads(request),
            random_before_fork=self._origin.random_state,
            visibility=tuple(visibility),
            group=app.group,
        )
        origin = OriginOfJob(
            parent=os.getpid(),
            log=output,
            close=self._descriptors(),
            mask=self._mask_of_the_app,
            handlers=self._handlers_of_the_app,
        )
        spawn = self._spawn
        try:
            if spawn is not None:
                return self._family.start(num, lambda _: _leader.become_fresh(assignment, origin, spawn))
            return self._family.start(
                num,
                lambda _: _job.main(assignment, app.body, origin),
                # Threads of the app's import may be about to log; main's are not here.
                None if self._imported is None else _interpreter.quiet_logging(),
            )
        finally:
            os.close(output)

    def _descriptors(self) -> set[int]:
        """All that is ours, for a job to close."""
        leases = set() if self._leases is None else self._leases.descriptors()
        others = (self._memory.descriptors(), self._records.descriptors(), self._family.descriptors(), leases)
        return self._channel.descriptors.union(*others)

    def signal(self, num: int, signum: int) -> None:
        self._family.signal(num, signum)

    def saving(self, num: int) -> bool:
        pid = self._family.leader(num)
        return pid is not None and _pidfd.name_of(pid) == _job.SAVING

    def kill(self, num: int) -> None:
        self._family.kill(num)

    def abandon(self, num: int) -> None:
        self._family.abandon(num)

    def report(self, num: int) -> Report | None:
        assert self._records.request is not None
        return _returns.load_report(self._records.request.files, num)

    def set_aside(self, num: int) -> None:
        assert self._records.request is not None
        try:
            _returns.set_aside_late(self._records.request.files, num)
        except OSError:  # its outcome stays there, and the journal, which knows better, is asked first
            traceback.print_exc()

    def look(self) -> None:
        self._memory.look(time.monotonic())

    def scarcity(self, device: int) -> str:
        return self._memory.scarcity(device)

    def gpu_mb(self, num: int) -> float | None:
        return self._memory.gpu_mb(num)

    def _tell_of_memory(self, num: int, gpu_mb: float) -> None:
        if self._records.blocked() is None:  # what is owed would grow, second by second
            self.record("memory", job=num, gpu_mb=round(gpu_mb, 1))
            self.ring()
