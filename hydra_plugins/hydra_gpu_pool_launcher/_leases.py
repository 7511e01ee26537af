"""Leases: which slot of which GPU is whose, among all sweeps of one user on this machine.

A directory has a file for each slot, ``<device>.<number>``. Whoever has a job there has locked it with flock(2): so it
is free when all that had it open are gone, whatever has killed them. The content of a file says whose lease it is, for
others to show. How a sweep waits for one: see ``_line``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterable

from ._events import Waiting
from ._lease_directory import Opened, content_of_lease, device_of, file_name, is_a_slot, name_of
from ._lease_files import Holder, content_of, overwrite, ring, same_file, told, whole
from ._line import Line, Wait
from ._model import Layout, Slot

_NOT_ANY_MORE = "slots are not leased any more, and other sweeps may use the same ones"


class Leases:
    """The leases of one supervisor, and its places in the line. Nothing here blocks.

    ``fault``: a sentence, where locking has failed: everything can be had from then on, whoever else has it.
    """

    def __init__(self, opened: Opened, layout: Layout) -> None:
        self._opened = opened
        self._layout = layout
        self._line = Line(opened.directory)
        self._slots = {name_of(layout, slot): slot for slot in layout.slots}
        self._held: dict[int, list[str]] = {}
        self._refused: dict[str, str] = {}  # what could not be had when it was last tried, and why
        self.fault: str | None = None

    @property
    def bell(self) -> int | None:
        """Readable when something was let go of, while we wait. ``heard`` makes it silent again."""
        return self._line.bell

    @property
    def deaf(self) -> bool:
        """See ``Line``."""
        return self._line.deaf

    def heard(self) -> None:
        self._line.heard()

    def descriptors(self) -> set[int]:
        """All that a job must close: what is locked stays locked as long as any process has it."""
        return self._opened.descriptors() | self._line.descriptors()

    def take(self, key: int, slots: Collection[Slot], holder: Holder, *, alone: bool = False) -> frozenset[Slot]:
        """Lease all of these slots, for ``key``, and give nothing; or none.

        Then it gives what cannot be had: some of these, and all others of the layout that others have, or have waited
        longer for. ``alone``: their devices as a whole: no other sweep has a slot there, and none gets one before
        ``release``. Whoever takes something has waited: the next time, others will have been there before.
        """
        names = [name_of(self._layout, slot) for slot in slots]
        self._look_for_the_files(names)
        if self.fault is not None:
            return frozenset()
        wait = Wait.ALONE if alone else Wait.NEXT
        refused = self._claim(key, names, holder, wait)
        if not refused:
            return frozenset()
        # All at once: to find out one by one takes a try each, and a look at the whole line.
        self._refused = refused | self._of_others() | self._before(self._slots, wait)
        return frozenset(slot for name, slot in self._slots.items() if name in self._refused)

    def _claim(self, key: int, names: list[str], holder: Holder, wait: Wait) -> dict[str, str]:
        """Lease them, and the devices as a whole; or what cannot be had, and why.

        Two sweeps must not pass each other by: (1) each looks what others have, and wait for; (2) says so in the files,
        by a lock, and by a ticket for a device as a whole; and (3) looks again. So the later one sees the other.
        """
        devices = {whole(device_of(name)) for name in names} if wait is Wait.ALONE else {}
        refused = self._in_the_way(names, wait) or self._lock(names, holder)
        if refused:
            return refused
        self._held[key] = names
        if devices:
            self._line.stand_also(wait, devices, holder)
        refused = self._in_the_way(names, wait)
        if refused:
            self._unlock(self._held.pop(key))
        elif devices:
            self._line.keep(key, devices, holder)
        else:
            self._line.leave(wait)
        return refused

    def _in_the_way(self, names: Collection[str], wait: Wait) -> dict[str, str]:
        """Those of the names for which others wait longer; and, of devices to be had as a whole, that others have.

        All of a device where what they have there is none of ours: they count more slots than we do.
        """
        refused = self._before(names, wait)
        others = self._of_others() if wait is Wait.ALONE and not refused else {}
        for name in names:
            there = [other for other in others if device_of(other) == device_of(name)]
            if name in there:
                refused[name] = others[name]
            elif there and not {*there} & {*names}:
                refused[name] = others[there[0]]
        return refused

    def _before(self, names: Collection[str], wait: Wait) -> dict[str, str]:
        """Those of the names for which others wait longer, and who."""
        wanted = {name: whole(device_of(name)) if wait is Wait.ALONE else name for name in names}
        before = self._line.before({*wanted.values()}, wait)
        return {name: before[want] for name, want in wanted.items() if want in before}

    def _lock(self, names: Collection[str], holder: Holder) -> dict[str, str]:
        locked: list[str] = []
        # What was refused the last time comes first: it will be refused again, mostly, and what was locked before it
        # would have to be let go of, which wakes everybody, us included.
        for name in sorted(names, key=lambda name: name not in self._refused):
            try:
                fcntl.flock(self._opened.files[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._unlock(locked)
                return {name: f"is held by {told(content_of(self._opened.files[name]))}"}
            except OSError as error:
                self.fault = f"{_NOT_ANY_MORE}: {error.strerror}"
                return {}
            locked.append(name)
            self._refused.pop(name, None)
        for name in names:
            with contextlib.suppress(OSError):
                overwrite(self._opened.files[name], holder.content())
        return {}

    def _look_for_the_files(self, names: Iterable[str]) -> None:
        """Whoever comes after they were removed makes new ones, which lock nothing that we have."""
        opened = self._opened
        there = same_file(opened.directory, self._opened.path)
        if self.fault is None and not (there and all(same_file(opened.files[n], n, opened.directory) for n in names)):
            what = "files in it were" if there else "it was"
            self.fault = f"{_NOT_ANY_MORE}, for they were leased in {self._opened.path}, and {what} removed or replaced"

    def release(self, key: int) -> None:
        """Let go of what was leased for ``key``, if anything, and tell all that wait."""
        self._unlock(self._held.pop(key, []))
        self._line.give_back(key)

    def _unlock(self, names: Collection[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.ftruncate(self._opened.files[name], 0)
                fcntl.flock(self._opened.files[name], fcntl.LOCK_UN)
        for name in [*names][:1]:
            ring(self._opened.directory, name)

    def wait_for(self, waiting: Waiting, holder: Holder) -> bool:
        """Be in the line for this, and for nothing else. True: see ``Line.stand``."""
        if self.fault is not None:
            waiting = Waiting()
        names = {name_of(self._layout, slot) for slot in waiting.slots}
        names |= {whole(self._key(device)) for device in waiting.drained}
        return self._line.stand(
            {Wait.NEXT: names, Wait.ALONE: {whole(self._key(device)) for device in waiting.alone}}, holder
        )

    def holders(self, slots: Collection[Slot]) -> str:
        """Who had those of them that could not be had, for a person: "is held by …", or "… has waited longer for"."""
        return " and ".join(dict.fromkeys(filter(None, (self._refused.get(name_of(self._layout, s)) for s in slots))))

    def of_others(self) -> frozenset[int]:
        """The devices, by their positions in the layout, of which other sweeps have a slot now."""
        devices = {self._key(device): device for device in range(len(self._layout.devices))}
        return frozenset(devices[device_of(name)] for name in self._of_others())

    def _of_others(self) -> dict[str, str]:
        """The slots of our devices that other sweeps have now, those that we do not count included, and who."""
        devices = {device_of(name) for name in self._slots}
        ours = {name for names in self._held.values() for name in names}
        try:
            names = sorted(os.listdir(self._opened.directory))
        except OSError:  # no descriptor is left, say
            return {}
        found = {}
        for name in names:
            if device_of(name) in devices and name not in ours and is_a_slot(name):
                content = content_of_lease(self._opened.directory, name)
                if content:
                    found[name] = f"is held by {told(content)}"
        return found

    def _key(self, device: int) -> str:
        return file_name(self._layout.devices[device].key)
