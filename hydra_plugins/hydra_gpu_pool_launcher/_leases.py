"""Leases: which slot of which GPU is whose, among all sweeps of one user on this machine.

A directory has a file for each slot, ``<device>.<number>``. Whoever has a job there has locked it with flock(2): so it
is free when all that had it open are gone, whatever has killed them. Guard and supervisor have the same open files, see
``Opened``: a supervisor's leases outlive it until the guard has ended its jobs. The content of a file says whose lease
it is, for others to show. How a sweep waits for one: see ``_line``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ._errors import ConfigurationError
from ._events import Waiting
from ._lease_files import Holder, content_of, overwrite, ring, same_file, told, whole
from ._line import OF_A_LINE, Line, Wait
from ._model import Layout, Slot

VARIABLE = "GPU_POOL_LEASES"
"""Names another directory: containers that see the same GPUs, but not one /tmp, can share one."""


def place(environ: Mapping[str, str]) -> str:
    """The directory of the leases; under /tmp, which is there whether or not anybody is logged in."""
    return os.path.abspath(environ.get(VARIABLE) or f"/tmp/gpu_pool-{os.geteuid()}")


def place_for(layout: Layout, environ: Mapping[str, str]) -> str | None:
    """The directory of the leases, where these slots are to be leased; None: CPU slots, or those of a job.

    A sweep inside of a job of another one uses what that has leased: it would wait for its own end.
    """
    if layout.on_cpu or environ.get("GPU_POOL_GPUS"):
        return None
    return place(environ)


def require(directory: str, key: str) -> str | None:
    """Make the directory, where it is not there yet; None, or a sentence that says why nothing can be leased there.

    Raises ConfigurationError where it cannot be had, or could be somebody else's. ``key``: as the user knows it.
    """
    try:
        fd = _open_directory(directory)
    except OSError as error:
        raise ConfigurationError(
            f"{key}=true: slots cannot be leased in {directory} ({error.strerror}); make it a directory that is yours "
            f"alone, name another one with {VARIABLE}, or set {key}=false, and other sweeps may use the same slots."
        ) from error
    try:
        with _opened(fd, "probe", os.O_RDWR | os.O_CREAT) as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return (
            f"slots are not leased, and other sweeps may use the same ones: no file can be locked in {directory} "
            f"({error.strerror}); name another directory with {VARIABLE}"
        )
    finally:
        os.close(fd)
    return None


def file_name(key: str) -> str:
    """What the names of the files of a device with this key begin with; no file of a line does."""
    return key.replace("/", "_")


@dataclass(frozen=True)
class Opened:
    """The files of a sweep's slots, open and not locked: descriptors of the directory and, by name, of the files."""

    path: str
    directory: int
    files: Mapping[str, int]

    def descriptors(self) -> set[int]:
        return {self.directory, *self.files.values()}


def open_files(directory: str, layout: Layout) -> Opened:
    """To be called by the one process whose fork is to have the same leases. Raises OSError."""
    fd = _open_directory(directory)
    # What clears old files out of /tmp (systemd-tmpfiles) leaves a directory alone that is locked: a lease may be old.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    names = [_name(layout, slot) for slot in layout.slots]
    files = {name: os.open(name, os.O_RDWR | os.O_CREAT | _OF_A_FILE, 0o600, dir_fd=fd) for name in names}
    for spare in [os.dup(fd) for _ in range(_SPARE)]:
        os.close(spare)
    return Opened(directory, fd, files)


_OF_A_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link in the place of a file is not followed, and a pipe not waited for."""

_SPARE = 32
"""Descriptors that must be left for the sweep itself: a job that finds none fails for a reason that is not its own."""


class Leases:
    """The leases of one supervisor, and its places in the line. Nothing here blocks.

    ``fault``: a sentence, where locking has failed: everything can be had from then on, whoever else has it.
    """

    def __init__(self, opened: Opened, layout: Layout) -> None:
        self._opened = opened
        self._layout = layout
        self._line = Line(opened.directory)
        self._slots = {_name(layout, slot): slot for slot in layout.slots}
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
        names = [_name(self._layout, slot) for slot in slots]
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
        devices = {whole(_device(name)) for name in names} if wait is Wait.ALONE else {}
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
            there = [other for other in others if _device(other) == _device(name)]
            if name in there:
                refused[name] = others[name]
            elif there and not {*there} & {*names}:
                refused[name] = others[there[0]]
        return refused

    def _before(self, names: Collection[str], wait: Wait) -> dict[str, str]:
        """Those of the names for which others wait longer, and who."""
        wanted = {name: whole(_device(name)) if wait is Wait.ALONE else name for name in names}
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
        names = {_name(self._layout, slot) for slot in waiting.slots}
        names |= {whole(self._key(device)) for device in waiting.drained}
        return self._line.stand(
            {Wait.NEXT: names, Wait.ALONE: {whole(self._key(device)) for device in waiting.alone}}, holder
        )

    def holders(self, slots: Collection[Slot]) -> str:
        """Who had those of them that could not be had, for a person: "is held by …", or "… has waited longer for"."""
        return " and ".join(dict.fromkeys(filter(None, (self._refused.get(_name(self._layout, s)) for s in slots))))

    def of_others(self) -> frozenset[int]:
        """The devices, by their positions in the layout, of which other sweeps have a slot now."""
        devices = {self._key(device): device for device in range(len(self._layout.devices))}
        return frozenset(devices[_device(name)] for name in self._of_others())

    def _of_others(self) -> dict[str, str]:
        """The slots of our devices that other sweeps have now, those that we do not count included, and who."""
        devices = {_device(name) for name in self._slots}
        ours = {name for names in self._held.values() for name in names}
        try:
            names = sorted(os.listdir(self._opened.directory))
        except OSError:  # no descriptor is left, say
            return {}
        found = {}
        for name in names:
            if _device(name) in devices and name not in ours and _is_a_slot(name):
                content = _content_of_lease(self._opened.directory, name)
                if content:
                    found[name] = f"is held by {told(content)}"
        return found

    def _key(self, device: int) -> str:
        return file_name(self._layout.devices[device].key)


_NOT_ANY_MORE = "slots are not leased any more, and other sweeps may use the same ones"


def holders(directory: str) -> dict[str, Holder]:
    """Who has which slot now, by the name of its file: ``file_name``, a point, and the slot's number on the device.

    {} where there is no such directory. For whoever looks from outside. Raises OSError where it cannot be read.
    """
    try:
        fd = _open_directory(directory, make=False)
    except FileNotFoundError:
        return {}
    try:
        found = {}
        for name in sorted(os.listdir(fd)):
            if _is_a_slot(name):
                content = _content_of_lease(fd, name)
                if content:
                    found[name] = told(content)
        return found
    finally:
        os.close(fd)


def _content_of_lease(directory: int, name: str) -> bytes | None:
    """What it says, if somebody has it, and it can be read. Where who had it was killed, it says nothing afterwards."""
    with contextlib.suppress(OSError), _opened(directory, name, os.O_RDONLY) as fd:
        content = content_of(fd)
        if not content:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return content
        # Whoever wants it in this very moment is told that it is free: by the closing of this one, after our lock.
        with _opened(directory, name, os.O_RDWR) as written:
            os.ftruncate(written, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
    return None


def _device(name: str) -> str:
    """Of a slot, by the name of its file: what the names of all files of that device begin with."""
    return name.rpartition(".")[0]


def _is_a_slot(name: str) -> bool:
    return name.rpartition(".")[2].isdigit() and not name.startswith(OF_A_LINE)


def _name(layout: Layout, slot: Slot) -> str:
    return f"{file_name(layout.devices[slot.device].key)}.{slot.number}"


def _open_directory(path: str, *, make: bool = True) -> int:
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return fd
    os.close(fd)
    why = "others can use it" if found.st_uid == os.geteuid() else f"it belongs to user {found.st_uid}"
    raise PermissionError(errno.EPERM, why, path)


@contextlib.contextmanager
def _opened(directory: int, name: str, flags: int) -> Iterator[int]:
    fd = os.open(name, flags | _OF_A_FILE, 0o600, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)
