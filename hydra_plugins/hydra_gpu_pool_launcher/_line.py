"""The line in which sweeps wait for slots that others have: who came first goes first, so that nobody starves.

Whoever waits has a ticket in the directory of the leases, a file ``wait.<when>.<pid>`` that says which slots it would
take. It is locked with flock(2) while its process lives, and gone when that does not wait any more. Nobody takes a slot
that an older ticket is for. A slot or a ticket that is let go of *rings*: a file of the directory that was open for
writing is closed, or removed, which inotify(7) tells all that wait. What only looks does not ring: two that wait would
wake each other for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ._inotify import LET_GO, Changes

_TICKET, _UNFINISHED = "wait.", "new."

OF_A_LINE = (_TICKET, _UNFINISHED)
"""What the names of these files begin with."""

_UNFINISHED_NS = 60 * 10**9
"""Nanoseconds after which a ticket that is still being written is one whose process was killed meanwhile."""


@dataclass(frozen=True)
class Holder:
    """A sweep, as another one may name it: its main process, and its directory. None: not known."""

    pid: int | None = None
    sweep_dir: str | None = None

    def __str__(self) -> str:
        if self.pid is None or self.sweep_dir is None:
            return "another sweep"
        return f"the sweep in {self.sweep_dir} (process {self.pid})"

    def content(self, **more: object) -> bytes:
        """Of a file, for ``told``."""
        return json.dumps({"pid": self.pid, "dir": self.sweep_dir, **more}).encode()


@dataclass
class Line:
    """One sweep's place in the line, or none. ``directory``: a descriptor. Nothing here blocks or raises OSError.

    Where a ticket cannot be written (a full disk, say), its owner waits without one, and may be overtaken.
    """

    directory: int
    _slots: tuple[str, ...] = ()
    _name: str | None = None
    _fd: int | None = None
    _bell: Changes | None = field(default=None, repr=False)

    @property
    def bell(self) -> int | None:
        """A descriptor that becomes readable when something was let go of; None: we do not wait, or cannot watch."""
        return self._bell.fd if self._bell is not None and self._bell.fd >= 0 else None

    def descriptors(self) -> set[int]:
        """Those that a job must close: a ticket is locked as long as any process has it."""
        return {fd for fd in (self.bell, self._fd) if fd is not None}

    def stand(self, slots: Collection[str], holder: Holder) -> bool:
        """Wait for these slots, with the ticket that there is or a new one.

        True where this process has not waited so far: what was let go of right before rang for nobody, so look again.
        """
        new = self._bell is None
        if self._bell is None:
            self._bell = Changes(LET_GO)
            self._bell.watch(f"/proc/self/fd/{self.directory}")
        wanted = tuple(sorted(slots))
        if self._fd is None or wanted != self._slots:
            with contextlib.suppress(OSError):
                self._write(wanted, holder)
        return new

    def _write(self, slots: tuple[str, ...], holder: Holder) -> None:
        content = holder.content(slots=slots)
        if self._fd is not None:
            overwrite(self._fd, content)
            self._slots = slots
            ring(self.directory, f"{_TICKET}{self._name}")  # it may be for fewer than before
            return
        # Locked before it has its name: whoever finds a ticket that is not locked takes it away.
        name = f"{time.monotonic_ns():020}.{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(f"{_UNFINISHED}{name}", flags, 0o600, dir_fd=self.directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            overwrite(fd, content)
            os.rename(f"{_UNFINISHED}{name}", f"{_TICKET}{name}", src_dir_fd=self.directory, dst_dir_fd=self.directory)
        except BaseException:
            _remove(self.directory, f"{_UNFINISHED}{name}")
            os.close(fd)
            raise
        self._name, self._fd, self._slots = name, fd, slots

    def leave(self) -> None:
        """Wait no longer; the next time, others will have been there before."""
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self._fd is not None:
            _remove(self.directory, f"{_TICKET}{self._name}")
            os.close(self._fd)
            self._name = self._fd = None

    def heard(self) -> None:
        """Forget what has rung so far."""
        if self._bell is not None:
            self._bell.wait(0)

    def before(self, slots: Collection[str]) -> dict[str, Holder]:
        """Those of the slots for which somebody else has waited longer, and who."""
        found: dict[str, Holder] = {}
        for holder, wanted in self._older():
            for slot in slots:
                if wanted is None or slot in wanted:
                    found.setdefault(slot, holder)
        return found

    def _older(self) -> Iterator[tuple[Holder, Collection[str] | None]]:
        """The live tickets before our own, or all, oldest first; the dead ones are taken away."""
        for name in sorted(os.listdir(self.directory)):
            kind, _, rest = name.partition(".")
            if f"{kind}." == _UNFINISHED:
                # Above: of before the machine's last start. Compared as names are: nothing here is to fail for a file.
                if not f"{time.monotonic_ns() - _UNFINISHED_NS:020}" <= rest <= f"{time.monotonic_ns():020}.":
                    _remove(self.directory, name)
            elif f"{kind}." == _TICKET:
                if self._name is not None and rest >= self._name:
                    break
                content = self._content_if_alive(name)
                if content is not None:
                    yield told(content), _slots_of(content)

    def _content_if_alive(self, name: str) -> bytes | None:
        # Read-only: closing it must not ring.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self.directory)
        except OSError:  # gone just now
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return content_of(fd)
        except OSError:
            return None
        else:
            _remove(self.directory, name)
            return None
        finally:
            os.close(fd)


def ring(directory: int, name: str) -> None:
    """Tell all that wait that something was let go of, by a file of this name that is there."""
    with contextlib.suppress(OSError):  # no descriptor is left, say: they look again by themselves, now and then
        os.close(os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))


def overwrite(fd: int, content: bytes) -> None:
    """The file's new content. Whoever reads meanwhile may see half of it. Raises OSError."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)


def content_of(fd: int) -> bytes:
    """What a lease or a ticket says. Raises OSError."""
    return os.pread(fd, 1 << 20, 0)


def told(content: bytes) -> Holder:
    """Whose lease or ticket it is, as far as it says so."""
    try:
        said = json.loads(content)
        return Holder(int(said["pid"]), str(said["dir"]))
    except (ValueError, KeyError, TypeError):  # it is just being written
        return Holder()


def _slots_of(content: bytes) -> Collection[str] | None:
    """None: it is just being written, and may be for any; it rings when it is."""
    try:
        return frozenset(map(str, json.loads(content)["slots"]))
    except (ValueError, KeyError, TypeError):
        return None


def _remove(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)
