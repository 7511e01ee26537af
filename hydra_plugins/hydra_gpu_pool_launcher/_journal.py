"""The journal: one line per event, appended by the supervisor, followed by main, read by reports and by a resume."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from ._files import SweepFiles, open_to_append

_LONGEST_LINE = 1 << 26
"""Bytes: well above what the kernel lets a command line have, which is the longest that is in a line."""


@dataclass
class Journal:
    """The supervisor's end of the journal: ``append`` writes one whole line, seen by readers at once.

    What the disk does not take is ``owed``, in bytes, and written before all that comes later.
    """

    fd: int
    owed: bytes = b""

    def append(self, event: str, **facts: Any) -> None:
        """One event: its name, the time (seconds since the epoch), and what there is to say of it, in JSON."""
        facts = {"event": event, "time": round(time.time(), 6), **facts}
        try:
            line = json.dumps(facts)
        except (ValueError, RecursionError):  # a value of the user's, although the job has looked at it
            line = json.dumps({**facts, "value": None})
        self.owed += line.encode() + b"\n"
        with contextlib.suppress(OSError):  # ``pay`` will tell
            self.pay()

    def pay(self) -> None:
        """Write what is owed. Raises OSError where that cannot be done yet, or nobody would find it."""
        if self.removed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        while self.owed:
            self.owed = self.owed[os.write(self.fd, self.owed) :]

    @property
    def removed(self) -> bool:
        """True where the file has no name any more: nobody will ever find what is written to it."""
        return os.fstat(self.fd).st_nlink == 0


def begin(files: SweepFiles) -> Journal:
    """The journal, to append to; whatever a supervisor that was killed left as its last line ends there."""
    journal = Journal(open_to_append(files.journal))
    with open(files.journal, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size and file.seek(size - 1) and file.read(1) != b"\n":
            os.write(journal.fd, b"\n")
    return journal


@dataclass
class JournalReader:
    """A reader's end: ``new`` gives the events since the last call, and never half of one.

    The file is opened once: whatever becomes of the directory, the events still come. Raises OSError where it is not
    there. ``offset``: where to begin, in bytes.
    """

    path: str
    offset: int = 0

    def __post_init__(self) -> None:
        self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def new(self) -> Iterator[dict[str, Any]]:
        """The events that were appended since. A line that is not whole yet is left for the next call.

        One that never became whole is passed over: its writer was killed; and so is what cannot be ours, however long.
        An event has a name, at ``event``; whether it is as it should be is for ``_facts`` to say.
        """
        # Where the directory was removed, the supervisor makes it anew; all that it wrote before is in the old file.
        made_anew = os.fstat(self._file.fileno()).st_nlink == 0 and os.path.exists(self.path)
        yield from self._lines()
        if made_anew:
            with contextlib.suppress(FileNotFoundError):  # removed again
                file = open(self.path, "rb")  # noqa: SIM115
                self._file.close()
                self._file, self.offset = file, 0
            yield from self._lines()

    def _lines(self) -> Iterator[dict[str, Any]]:
        if os.fstat(self._file.fileno()).st_size < self.offset:  # somebody has cut it off
            self.offset = 0
        self._file.seek(self.offset)
        for line in iter(partial(self._file.readline, _LONGEST_LINE), b""):
            if not line.endswith(b"\n"):
                if len(line) < _LONGEST_LINE:
                    return
                self.offset += len(line)  # a part of something else: to wait for its end would take all memory
                continue
            self.offset += len(line)
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event
