"""The GPUs' memory as the supervisor knows it: what is free, what each job holds, and who holds the rest."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ._cards import Gpu, Instance
from ._events import Measured
from ._family import Family, parent
from ._model import Device
from ._monitor import Answer, Monitor
from ._tail import one_line

SAMPLE_S = 1.0
"""Between two looks at what the jobs hold."""

_MOST_HOLDERS = 4
"""That are named; there may be hundreds."""

_CHANGED = 0.05
_CHANGED_BYTES = 100 * 10**6
"""What a job holds is told anew when it has changed by more than this share, and by more than so much."""

Told = Mapping[int, Gpu | Instance]
"""What the driver says of each device, by its position in the layout."""


def by_device(devices: Sequence[Device], gpus: Sequence[Gpu]) -> Told:
    """Of each device that the driver knows. Pure."""
    known: dict[str, Gpu | Instance] = {}
    for gpu in gpus:
        known[gpu.uuid] = gpu
        known.update({instance.uuid: instance for instance in gpu.instances})
    return {place: known[device.key] for place, device in enumerate(devices) if device.key in known}


def used_by(
    jobs: Mapping[int, Collection[int]], told: Told, owner: Callable[[int], int | None]
) -> dict[tuple[int, int], int]:
    """Bytes that each job holds of each of its devices, by (job, device), where that can be told. Pure.

    ``jobs``: the devices of each; ``owner``: the job whose process this pid is.
    """
    found = {}
    for num, devices in jobs.items():
        for device in devices:
            processes = told[device].processes if device in told else None
            amounts = None if processes is None else [used for pid, used in processes if owner(pid) == num]
            if amounts is not None and None not in amounts:
                found[num, device] = sum(amount for amount in amounts if amount is not None)
    return found


def scarcity(device: Device, least: int, told: Gpu | Instance | None, holders: Sequence[str], fault: str | None) -> str:
    """A line: how much of the device is free, of what a start needs (``least``), and who holds the rest. Pure."""
    name = f"GPU {device.label}" if device.label.isdigit() else device.label  # a name has the word in itself
    needed = f"min_free_gpu_mem_gb={least / 1e9:g}"
    if told is None or told.free_bytes is None:
        why = f" ({fault})" if fault else ""
        return f"{name} gets no job, since nobody can say what is free on it{why}, and {needed} asks for that"
    total = "" if told.total_bytes is None else f" of {told.total_bytes / 1e9:.1f}"
    line = f"{name} has {told.free_bytes / 1e9:.1f} GB free{total}, and gets no job until it is {needed}"
    if holders:
        more = [f"{len(holders) - _MOST_HOLDERS} more"] if len(holders) > _MOST_HOLDERS else []
        line += f"; held by {', '.join([*holders[:_MOST_HOLDERS], *more])}"
    return line


@dataclass
class _Seen:
    """What a try has been seen with, in bytes. ``told``: as the journal has it, since ``at``."""

    devices: frozenset[int]
    peak: int | None = None
    told: int = 0
    at: float = float("-inf")


@dataclass(eq=False)
class Memory:
    """Asks the monitor, for the schedule and once a second while jobs run. Nothing here blocks.

    ``monitor``: None where there is no driver to be asked. ``pids``: its process ids are ours, not those of another pid
    namespace. ``tell``: is told the number of a job, and the MB that it holds now.
    """

    devices: Sequence[Device]
    family: Family
    monitor: Monitor | None
    pids: bool
    least: int | None
    tell: Callable[[int, float], object]
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _told: Told = field(default_factory=dict)
    _fault: str | None = None
    _looked: float | None = None  # when somebody asked for a look that is not answered yet
    _next: float = float("-inf")
    _measured: Measured | None = None

    def descriptors(self) -> list[int]:
        """See ``Monitor.descriptors``."""
        return [] if self.monitor is None else self.monitor.descriptors()

    @property
    def deadline(self) -> float | None:
        """When ``step`` is due at the latest; None: not before something is readable."""
        if self.monitor is None:
            return None
        sample = self._next if self.family.leaders() else None
        return min((due for due in (sample, self.monitor.deadline) if due is not None), default=None)

    def look(self, now: float) -> None:
        """Answered by a Measured of ``step``, always."""
        if self.monitor is None:
            self._measured = Measured({})
            return
        self._looked = now
        self._take(self.monitor.ask(now), now)

    def step(self, now: float) -> list[Measured]:
        """Hear what there is to hear, ask what is due; the answer to ``look``, where that is there."""
        if self.monitor is not None:
            self._take(self.monitor.hear(now), now)
            if now >= self._next and self.family.leaders():
                self._next = now + SAMPLE_S
                self._take(self.monitor.ask(now), now)
        measured, self._measured = self._measured, None
        return [] if measured is None else [measured]

    def started(self, num: int, devices: Collection[int]) -> None:
        """A try of this job runs on these devices."""
        self._seen[num] = _Seen(frozenset(devices))

    def gpu_mb(self, num: int) -> float | None:
        """See ``World.gpu_mb``."""
        peak = self._seen[num].peak if num in self._seen else None
        return None if peak is None else peak / 1e6

    def scarcity(self, device: int) -> str:
        """See ``World.scarcity``."""
        told = self._told.get(device)
        return scarcity(self.devices[device], self.least or 0, told, self._holders(told), self._fault)

    def _take(self, answer: Answer | None, now: float) -> None:
        if answer is None:
            return
        self._told, self._fault = by_device(self.devices, answer.gpus), answer.fault
        used = self._sample(now)
        if self._looked is not None and answer.asked >= self._looked:
            self._looked = None
            free = {device: told.free_bytes for device, told in self._told.items()}
            self._measured = Measured(free, used)

    def _sample(self, now: float) -> dict[tuple[int, int], int]:
        if not self.pids:
            return {}
        leaders = self.family.leaders()
        by_pid = {pid: num for num, pid in leaders.items()}
        jobs = {num: self._seen[num].devices for num in leaders if num in self._seen}
        used = used_by(jobs, self._told, lambda pid: _owner(pid, by_pid))
        for num, devices in jobs.items():
            if all((num, device) in used for device in devices):
                self._note(num, sum(used[num, device] for device in devices), now)
        return used

    def _note(self, num: int, held: int, now: float) -> None:
        seen = self._seen[num]
        seen.peak = max(held, seen.peak or 0)
        if abs(held - seen.told) > max(_CHANGED_BYTES, _CHANGED * seen.told) and now >= seen.at + SAMPLE_S:
            seen.told, seen.at = held, now
            self.tell(num, held / 1e6)

    def _holders(self, told: Gpu | Instance | None) -> list[str]:
        """Who holds memory of a device, those with most of it first."""
        processes = () if told is None or told.processes is None else told.processes
        by_pid = {pid: num for num, pid in self.family.leaders().items()}
        held = sorted(processes, key=lambda one: -(one[1] or 0))
        return [f"{self._who(pid, by_pid)}{'' if used is None else f' {used / 1e9:.1f} GB'}" for pid, used in held]

    def _who(self, pid: int, by_pid: Mapping[int, int]) -> str:
        if not self.pids:
            return f"process {pid} of the host"
        num = _owner(pid, by_pid)
        about = [] if num is None else [f"job {num}"]
        return f"process {pid}{_in_brackets([*about, *_command_and_user(pid)])}"


def _in_brackets(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def _owner(pid: int, leaders: Mapping[int, int]) -> int | None:
    """The job in whose tree this process is: what leaves the tree hangs on its leader while that runs."""
    above: int | None = pid
    while above is not None and above > 1:
        if above in leaders:
            return leaders[above]
        above = parent(above)
    return None


def _command_and_user(pid: int) -> list[str]:
    """As far as this user may know them."""
    words = []
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = one_line(file.read(4096).replace(b"\0", b" ").decode(errors="replace")).strip()
        words += [command if len(command) <= 60 else f"{command[:59]}…"] if command else []
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            uid = next(int(line.split()[1]) for line in file if line.startswith("Uid:"))
        words.append(pwd.getpwuid(uid).pw_name)
    except (OSError, KeyError, StopIteration):
        pass
    return words
