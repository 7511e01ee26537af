"""Which slots are free, which of them others have, and which a job is to have. No clock, no system."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ._model import Layout, Slot


@dataclass
class Slots:
    """The slots of a layout: each is free, or taken, or retired, which is taken for ever.

    ``others``: those of the free ones that are another sweep's, as far as we have found out.
    """

    layout: Layout
    _free: set[Slot] = field(init=False)
    _retired: set[Slot] = field(default_factory=set)
    others: set[Slot] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free = set(self.layout.slots)

    def take(self, slots: Iterable[Slot]) -> None:
        """These are free, and a job gets them."""
        self._free.difference_update(slots)

    def release(self, slots: Iterable[Slot]) -> None:
        """The job that had them is gone."""
        self._free.update(slots)

    def retire(self, slots: Iterable[Slot]) -> None:
        """The job that had them is not to be had: nobody gets them any more."""
        self._retired.update(slots)

    @property
    def with_room(self) -> set[int]:
        """The devices on which a slot is free."""
        return {slot.device for slot in self._ours}

    @property
    def free(self) -> frozenset[Slot]:
        """All that no job of ours has."""
        return frozenset(self._free)

    @property
    def _ours(self) -> set[Slot]:
        return self._free - self.others

    def all_of(self, devices: Collection[int]) -> tuple[Slot, ...] | None:
        """All usable slots of these devices; None where one is not free, or where there is no device."""
        slots = tuple(s for s in self.layout.slots if s.device in devices and s not in self._retired)
        return slots if devices and self._ours.issuperset(slots) else None

    def emptiest(self, closed: Collection[int] = (), begun: Collection[int] = ()) -> tuple[int, ...]:
        """As many devices as a job takes, those that will be wholly free soonest; () where too few are usable.

        ``closed``: devices on which no job may start for now, and which are left to others where there is a choice.
        ``begun``: those of which slots are kept free already, in vain if another one as empty were taken instead.
        """
        key = self._emptiness(closed)
        devices = sorted(self._usable(), key=lambda device: (key(device), device not in begun, device))
        return tuple(sorted(devices[: self.layout.devices_per_job]))

    def as_empty(self, closed: Collection[int] = ()) -> frozenset[int]:
        """Those, and all others that may be wholly free just as soon: nobody can say whose jobs will end first."""
        key, chosen = self._emptiness(closed), self.emptiest(closed)
        worst = max(map(key, chosen), default=None)
        return frozenset(device for device in self._usable() if worst is not None and key(device) <= worst)

    def _usable(self) -> set[int]:
        """The devices of which a slot is left; none where that is too few for a job."""
        usable = {slot.device for slot in self.layout.slots if slot not in self._retired}
        return usable if len(usable) >= self.layout.devices_per_job else set()

    def _emptiness(self, closed: Collection[int]) -> Callable[[int], tuple[int, bool, int]]:
        retired, load = Counter(s.device for s in self._retired), self._load()
        return lambda device: (retired[device], device in closed, load[device])

    def _load(self) -> Counter[int]:
        ours = self._ours
        return Counter(slot.device for slot in self.layout.slots if slot not in ours)

    def place(self, barred: Collection[int]) -> tuple[Slot, ...] | None:
        """The lowest free slot on each of the least loaded devices; None where too few devices have one."""
        lowest: dict[int, Slot] = {}
        ours = self._ours
        for slot in self.layout.slots:
            if slot in ours and slot.device not in lowest and slot.device not in barred:
                lowest[slot.device] = slot
        if len(lowest) < self.layout.devices_per_job:
            return None
        load = self._load()
        chosen = sorted(lowest, key=lambda device: (load[device], device))[: self.layout.devices_per_job]
        return tuple(lowest[device] for device in sorted(chosen))
