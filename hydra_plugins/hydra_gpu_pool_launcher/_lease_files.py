"""The files of the leases and of the line, and what they say: whose a slot is, or who waits for which.

Slots go by the names of their files, ``<device>.<number>``; ``<device>.*`` is all that any sweep has of a device.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


def whole(device: str) -> str:
    """The name of all slots of a device."""
    return f"{device}.*"


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


def ring(directory: int, name: str) -> None:
    """Tell all that wait that something was let go of, by a file of this name that is there."""
    with contextlib.suppress(OSError):  # no descriptor is left, say: they look again by themselves, now and then
        os.close(os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory))


def overwrite(fd: int, content: bytes) -> None:
    """The file's new content. Whoever reads meanwhile may see half of it. Raises OSError."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)


def content_of(fd: int) -> bytes:
    """What a lease or a ticket says. Raises OSError."""
    return os.pread(fd, 1 << 20, 0)


def same_file(fd: int, path: str, directory: int | None = None) -> bool:
    """Whether this is still the file that has this name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=directory, follow_symlinks=False))
    return False


def told(content: bytes) -> Holder:
    """Whose lease or ticket it is, as far as it says so."""
    about = said(content)
    try:
        return Holder(int(about["pid"]), str(about["dir"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return Holder()


def said(content: bytes) -> Mapping[str, Any]:
    """All that it says."""
    with contextlib.suppress(ValueError, RecursionError):  # a lease is just being written; or it is no lease
        about = json.loads(content)
        if isinstance(about, dict):
            return about
    return {}


def slots_of(content: bytes) -> Collection[str] | None:
    """Those that a ticket is for. None: nobody can say, so it may be for any."""
    slots = said(content).get("slots")
    return frozenset(map(str, slots)) if isinstance(slots, list) else None


def has(content: bytes) -> bool:
    """Whether who wrote this ticket has those slots already, and keeps others from them."""
    return said(content).get("has") is True


def meet(slot: str, wanted: Collection[str]) -> bool:
    """Whether a job that has this would be in the way of one that wants those."""
    device = slot.rpartition(".")[0]
    if slot == whole(device):
        return any(other.rpartition(".")[0] == device for other in wanted)
    return slot in wanted or whole(device) in wanted


def remove(directory: int, name: str) -> None:
    """If it is there."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)
