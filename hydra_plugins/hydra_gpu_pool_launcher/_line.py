"""The line in which sweeps wait for slots that others have: who came first goes first, so that nobody starves.

Whoever waits has a ticket in the directory of the leases, a file ``wait.<when>.<pid>`` that says which slots it would
take. It is locked with flock(2) while its process lives, and gone when that does not wait any more. Nobody takes a slot
that an older ticket is for. A slot or a ticket that is let go of *rings*: a file of the directory that was open for
writing is closed, or removed, which inotify(7) tells all that wait. What only looks does not ring: two that wait would
wake each other for ever.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ._inotify import LET_GO, Changes
from ._lease_files import Holder, content_of, has, meet, overwrite, remove, ring, same_file, slots_of, told

_TICKET, _UNFINISHED = "wait.", "new."

OF_A_LINE = (_TICKET, _UNFINISHED)
"""What the names of these files begin with."""

_UNFINISHED_NS = 60 * 10**9
"""Nanoseconds after which a ticket that is still being written is one whose process was killed meanwhile."""


class Wait(enum.Enum):
    """What a sweep stands in the line for. Each has a ticket of its own: one turn does not cost the other's age."""

    NEXT = "the next job"
    ALONE = "a job that takes whole devices"


@dataclass(frozen=True)
class _Ticket:
    """``name``: that of its file, without what it begins with. ``fd``: has it open and locked. ``slots``: it is for
    these. ``content``: what it says.
    """

    name: str
    fd: int
    slots: frozenset[str]
    content: bytes


@dataclass
class Line:
    """One sweep's places in the line. ``directory``: a descriptor. Nothing here blocks or raises OSError.

    Where a ticket cannot be written (a full disk, say), its owner waits without one, and may be overtaken.
    """

    directory: int
    _tickets: dict[Wait, _Ticket] = field(default_factory=dict)
    _kept: dict[int, _Ticket] = field(default_factory=dict)
    _bell: Changes | None = field(default=None, repr=False)

    @property
    def bell(self) -> int | None:
        """A descriptor that becomes readable when something was let go of; None: we do not wait, or cannot watch."""
        return self._bell.fd if self._bell is not None and self._bell.fd >= 0 else None

    @property
    def deaf(self) -> bool:
        """We wait, and nothing tells when something is let go of."""
        return self._bell is not None and self._bell.blind

    def descriptors(self) -> set[int]:
        """Those that a job must close: a ticket is locked as long as any process has it."""
        bell = set() if self.bell is None else {self.bell}
        return bell.union(ticket.fd for ticket in self._ours())

    def _ours(self) -> list[_Ticket]:
        return [*self._tickets.values(), *self._kept.values()]

    def stand(self, wanted: Mapping[Wait, Collection[str]], holder: Holder) -> bool:
        """Wait for these slots, with the tickets that there are or new ones; for nothing else, any more.

        True where this process has not waited so far: what was let go of right before rang for nobody, so look again.
        """
        for wait in Wait:
            if wanted.get(wait):
                self._write(wait, wanted[wait], holder)
            else:
                self._tear(self._tickets.pop(wait, None))
        new = bool(any(wanted.values()) and self._bell is None)
        if new:
            self._bell = Changes(LET_GO)
            self._bell.watch(f"/proc/self/fd/{self.directory}")
        elif not any(wanted.values()):
            self._stop_listening()
        return new

    def stand_also(self, wait: Wait, slots: Collection[str], holder: Holder) -> None:
        """The same for this alone, whatever else is waited for."""
        self._write(wait, slots, holder)

    def leave(self, wait: Wait) -> None:
        """Wait for this no longer; the next time, others will have been there before."""
        self._tear(self._tickets.pop(wait, None))
        if not self._tickets:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def keep(self, key: int, slots: Collection[str], holder: Holder) -> None:
        """What was waited for with ``Wait.ALONE`` is ours, until ``give_back``: nobody else begins to use it."""
        self._write(Wait.ALONE, slots, holder, has=True)
        if Wait.ALONE in self._tickets:
            self._kept[key] = self._tickets.pop(Wait.ALONE)
        self.leave(Wait.ALONE)

    def give_back(self, key: int) -> None:
        """What was kept with this key, if anything, is the others'."""
        self._tear(self._kept.pop(key, None))

    def _tear(self, ticket: _Ticket | None) -> None:
        if ticket is not None:
            remove(self.directory, f"{_TICKET}{ticket.name}")
            os.close(ticket.fd)

    def _write(self, wait: Wait, slots: Collection[str], holder: Holder, **more: object) -> None:
        """A ticket that says something else keeps its age; where it cannot be written, it stays as it is."""
        content, before = holder.content(slots=sorted(slots), **more), self._tickets.get(wait)
        if before is not None and before.content == content:
            return
        now = f"{time.monotonic_ns():020}.{os.getpid()}"
        name = now if before is None else before.name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            fd = os.open(f"{_UNFINISHED}{now}", flags, 0o600, dir_fd=self.directory)
            try:
                # Locked before it has its name: whoever finds a ticket that is not locked takes it away.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                overwrite(fd, content)
                os.rename(
                    f"{_UNFINISHED}{now}", f"{_TICKET}{name}", src_dir_fd=self.directory, dst_dir_fd=self.directory
                )
            except BaseException:
                remove(self.directory, f"{_UNFINISHED}{now}")
                os.close(fd)
                raise
            self._tickets[wait] = _Ticket(name, fd, frozenset(slots), content)
            if before is not None:
                os.close(before.fd)
                ring(self.directory, f"{_TICKET}{name}")  # it may be for fewer than before

    def heard(self) -> None:
        """Forget what has rung so far."""
        if self._bell is not None:
            self._bell.wait(0)

    def before(self, slots: Collection[str], wait: Wait) -> dict[str, str]:
        """Those of the slots that somebody else has as a whole, or has waited longer for, and who, for a person."""
        found: dict[str, str] = {}
        mine = self._tickets.get(wait)
        for name, content in self._others():
            wanted, older = slots_of(content), mine is None or name < mine.name or has(content)
            why = f"is held by {told(content)}" if has(content) else f"{told(content)} has waited longer for"
            for slot in slots:
                # For what our ticket does not name, it says nothing of how long we have waited.
                if (wanted is None or meet(slot, wanted)) and (older or mine is None or slot not in mine.slots):
                    found.setdefault(slot, why)
        return found

    def _others(self) -> Iterator[tuple[str, bytes]]:
        """Others' live tickets, oldest first: their names, and what they say; the dead ones are taken away."""
        ours = {ticket.name for ticket in self._ours()}
        for name in self._names():
            kind, _, rest = name.partition(".")
            if f"{kind}." == _UNFINISHED:
                # Above: of before the machine's last start. Compared as names are: nothing here is to fail for a file.
                if not f"{time.monotonic_ns() - _UNFINISHED_NS:020}" <= rest <= f"{time.monotonic_ns():020}.":
                    remove(self.directory, name)
            elif f"{kind}." == _TICKET and rest not in ours:
                content = self._content_if_alive(name)
                if content is not None:
                    yield rest, content

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.directory))
        except OSError:  # no descriptor is left: whoever goes past others does so for want of one, and will not start
            return []

    def _content_if_alive(self, name: str) -> bytes | None:
        # Read-only: closing it must not ring.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.directory)
        except OSError:  # gone just now
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(OSError):
                return content_of(fd)
        except OSError:
            pass
        else:
            if same_file(fd, name, self.directory):  # else it was written anew, meanwhile
                remove(self.directory, name)
        finally:
            os.close(fd)
        return None
