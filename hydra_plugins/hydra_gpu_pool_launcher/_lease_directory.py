"""The directory of the leases, in which each slot of each device has a file: whose it must be, and who has which slot.

Guard and supervisor have the same open files, see ``Opened``: a supervisor's leases outlive it until the guard has
ended its jobs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ._errors import ConfigurationError
from ._lease_files import Holder, content_of, told
from ._line import OF_A_LINE
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
    names = [name_of(layout, slot) for slot in layout.slots]
    files = {name: os.open(name, os.O_RDWR | os.O_CREAT | _OF_A_FILE, 0o600, dir_fd=fd) for name in names}
    for spare in [os.dup(fd) for _ in range(_SPARE)]:
        os.close(spare)
    return Opened(directory, fd, files)


_OF_A_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link in the place of a file is not followed, and a pipe not waited for."""

_SPARE = 32
"""Descriptors that must be left for the sweep itself: a job that finds none fails for a reason that is not its own."""


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
            if is_a_slot(name):
                content = content_of_lease(fd, name)
                if content:
                    found[name] = told(content)
        return found
    finally:
        os.close(fd)


def content_of_lease(directory: int, name: str) -> bytes | None:
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


def device_of(name: str) -> str:
    """Of a slot, by the name of its file: what the names of all files of that device begin with."""
    return name.rpartition(".")[0]


def is_a_slot(name: str) -> bool:
    return name.rpartition(".")[2].isdigit() and not name.startswith(OF_A_LINE)


def name_of(layout: Layout, slot: Slot) -> str:
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
