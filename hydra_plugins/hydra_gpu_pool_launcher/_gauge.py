"""Which GPUs take another job now, by their free memory. Pure; a part of the schedule, which asks it before a start.

Two things close a device. With ``min_free``: less than that is free, as measured in this very step. And, for a bounded
time, that a job has just ended there, whose memory the driver may not have given back yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ._events import Command, Look, Measured, Scarce

YOUNG_S = 60.0
"""From its start, a job counts as if it held ``min_free``: it may still load what it will work on."""

LOOK_S = 1.0
"""From one look to the next, where too little is free: nothing tells when a neighbour ends."""

IN_VAIN_S = 300.0
"""For so long, a device is left to others on which not even their leaving has made enough memory free."""

RETURN_LOOK_S = 0.25
"""The same where the memory of an ended job comes back."""

_AS_BEFORE = 0.05
"""Of all memory, which may be missing from what was free before a job although that job's is back."""


@dataclass(frozen=True)
class _Job:
    """A job of ours. ``before``: what was free right before it, by device, where no other job of ours was there."""

    devices: frozenset[int]
    started: float
    before: dict[int, int]


@dataclass(frozen=True)
class _Return:
    """A job has ended at ``since``, and its memory may still come back. ``before``: as in ``_Job``.

    ``free``: as the last look had it, which was asked for at ``at``; None: there was none since.
    """

    since: float
    before: int | None
    free: int | None = None
    at: float = 0.0


@dataclass
class Gauge:
    """What is known of the devices' memory. They go by their positions in the layout, memory is in bytes.

    ``min_free``: None where any amount will do. ``settle_s``: how long memory is given to come back; 0 where nobody can
    be asked for it. ``totals``: of each device, where known. ``due``: when to see again whether a job can start; None:
    there is no need, or a look is under way.
    """

    min_free: int | None = None
    settle_s: float = 0.0
    totals: Sequence[int | None] = ()
    due: float | None = None
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _returns: dict[int, _Return] = field(default_factory=dict)
    _asked: float | None = None  # when the look that is under way was asked for
    _measured: Measured | None = None  # in this step
    _told: dict[int, bool] = field(default_factory=dict)  # of scarcity, since there was none; True: of how much is free
    _behind: dict[int, bool] = field(default_factory=dict)  # True: the others are gone, and their memory comes back
    _vain: dict[int, tuple[int, float]] = field(default_factory=dict)  # what was free without them; until when
    _unknown: set[int] = field(default_factory=set)  # devices of which nobody could say what is free

    @property
    def behind(self) -> frozenset[int]:
        """The devices whose memory jobs of other sweeps hold, or held until now, and none of ours."""
        return frozenset(self._behind)

    @property
    def in_vain(self) -> frozenset[int]:
        """The devices that no other sweep's leaving opens for a job: who has their memory is none, or not known."""
        return frozenset(self._vain) | self._unknown

    @property
    def looking(self) -> bool:
        """A look is under way."""
        return self._asked is not None

    # --- what happens ---

    def started(self, num: int, devices: Collection[int], now: float) -> None:
        """The job has these devices from now on."""
        free = {} if self._measured is None else self._measured.free
        alone = {device for device in devices if not self._shared(device)}
        before = {device: there for device in alone if (there := free.get(device)) is not None}
        self._jobs[num] = _Job(frozenset(devices), now, before)
        for device in devices:
            self._told.pop(device, None)
            self._behind.pop(device, None)

    def ended(self, num: int, now: float) -> None:
        """The job is gone, and its memory comes back."""
        job = self._jobs.pop(num)
        for device in job.devices if self.settle_s else ():
            self._returns[device] = _Return(now, None if self._shared(device) else job.before.get(device))

    def dropped(self, num: int) -> None:
        """The job was not started after all; or nobody waits for it any more, nor for what it holds."""
        del self._jobs[num]

    def take(self, measured: Measured, now: float) -> None:
        """The answer to a look. It holds until ``forget``, which comes at the end of this step."""
        asked, self._asked = self._asked, None
        self._measured = measured
        for device, coming in list(self._returns.items()):
            free = measured.free.get(device)
            if free is None or now >= coming.since + self.settle_s:
                del self._returns[device]
            elif asked is None or asked < coming.since:
                pass  # it may have been measured before the job had ended
            elif coming.before is not None and free >= coming.before - self._slack(device, coming.before):
                del self._returns[device]
            elif coming.free is None:
                self._returns[device] = _Return(coming.since, coming.before, free, asked)
            elif asked >= coming.at + RETURN_LOOK_S:  # else nothing can be said of whether it rises
                if free > coming.free:
                    self._returns[device] = _Return(coming.since, coming.before, free, asked)
                else:
                    del self._returns[device]
        if self.min_free is not None:
            self._unknown.clear()
            for device in {*range(len(self.totals)), *measured.free, *self._behind}:
                self._see_whose(device, measured.free.get(device), device in measured.of_others, asked or now, now)

    def _see_whose(self, device: int, free: int | None, of_others: bool, asked: float, now: float) -> None:
        """Others that go on, job by job, would hold the memory for ever if nobody knew that we wait for it.

        But they are not to stand still for us in vain: what something else holds does not come free when they leave.
        """
        lacks = not self._shared(device) and self._lacks(device, now)
        if free is None:
            self._unknown.add(device)
        if free is None or not lacks:
            self._behind.pop(device, None)
            self._vain.pop(device, None)
            return
        before, until = self._vain.get(device, (free, now))
        if now >= until or free > before + self._slack(device, before):
            self._vain.pop(device, None)
        if device in self._vain:
            self._behind.pop(device, None)
        elif of_others:
            self._behind[device] = False
        elif self._behind.get(device) is False and self.settle_s:
            self._behind[device] = True
            self._returns.setdefault(device, _Return(now, None, free, asked))
        elif device not in self._returns:
            self._behind.pop(device, None)
            self._vain[device] = (free, now + IN_VAIN_S)

    def forget(self) -> None:
        """What was measured is not known any more: another process may have taken it."""
        self._measured = None

    # --- what follows ---

    def closed(self, devices: Collection[int], now: float) -> set[int]:
        """Those of the devices on which no job may start now."""
        return {device for device in devices if self._comes_back(device, now) or self._lacks(device, now)}

    def ask(self, now: float) -> list[Command]:
        """What to do where nothing but memory keeps a job from its start: look, or wait until it is time to."""
        if self._measured is not None:
            self.due = now + (RETURN_LOOK_S if self._returns else LOOK_S)
            return []
        ends = [coming.since + self.settle_s for coming in self._returns.values()]
        self.due = min((end for end in ends if end > now), default=None)  # whether the driver answers or not
        if self._asked is not None:
            return []
        self._asked = now
        return [Look()]

    def scarce(self, devices: Collection[int]) -> list[Command]:
        """Of these devices, on which jobs could start but for memory: those of which nobody was told yet."""
        if self.min_free is None or self._measured is None:
            return []
        free = {device: self._measured.free.get(device) for device in devices if device not in self._returns}
        lacking = {device: there for device, there in free.items() if there is None or there < self.min_free}
        told = {device: there is not None for device, there in lacking.items()}
        new = [device for device in sorted(lacking) if self._told.get(device) is not told[device]]
        self._told = {device: known for device, known in self._told.items() if device not in free} | told
        return [Scarce(device, lacking[device]) for device in new]

    def _comes_back(self, device: int, now: float) -> bool:
        return device in self._returns and now < self._returns[device].since + self.settle_s

    def _lacks(self, device: int, now: float) -> bool:
        if self.min_free is None:
            return False
        free = None if self._measured is None else self._measured.free.get(device)
        return free is None or free - self._still_to_take(device, now) < self.min_free

    def _still_to_take(self, device: int, now: float) -> int:
        """By young jobs. What one of them is known to have taken is missing from what is free already."""
        assert self.min_free is not None
        used = {} if self._measured is None else self._measured.used
        young = [num for num, job in self._jobs.items() if device in job.devices and now < job.started + YOUNG_S]
        return sum(max(0, self.min_free - used.get((num, device), 0)) for num in young)

    def _shared(self, device: int) -> bool:
        return any(device in job.devices for job in self._jobs.values())

    def _slack(self, device: int, before: int) -> float:
        total = self.totals[device] if device < len(self.totals) else None
        return _AS_BEFORE * (before if total is None else total)
