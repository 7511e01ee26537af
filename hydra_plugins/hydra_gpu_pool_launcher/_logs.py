"""What ``gpu-pool logs`` shows: what a job, or one of its ranks, has printed; until the job is over, if so asked.

Where it goes to a terminal, it is plain text: a log may hold whatever the app printed, and escape sequences of it could
do more there than colour a word. Elsewhere it is the bytes of the file.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from . import _descriptors, _inotify
from ._files import SweepFiles, open_file
from ._outside import Refused, Standing, WatchedSweep, named, over, shown
from ._seen import State
from ._table import cut
from ._tail import as_seen

_BLOCK = 1 << 16
_LOOK_S = 1.0  # a network's file system tells of no change
_RANK_LOG = re.compile(r"rank_(\d+)\.log")
_LONGEST_LINE = 1 << 20
"""Characters that are kept of a line that does not end."""


class Sink(Protocol):
    """Where a log goes."""

    def write(self, content: bytes) -> None:
        """The next bytes of the log."""

    def pause(self) -> None:
        """What there is so far is seen: the next may come much later."""

    def end(self) -> None:
        """Nothing more of this file comes."""


@dataclass
class Raw:
    """The bytes as they are."""

    out: BinaryIO

    def write(self, content: bytes) -> None:
        self.out.write(content)

    def pause(self) -> None:
        self.out.flush()

    def end(self) -> None:
        self.out.flush()


@dataclass
class Plain:
    """Lines of plain text, each as a terminal would show it in the end: of a progress bar, its last state.

    A line that has not ended is drawn anew as it changes, within ``width`` columns, so that it can be overwritten.
    """

    out: BinaryIO
    width: int
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    _line: str = ""
    _drawn: str = ""

    def write(self, content: bytes) -> None:
        *whole, self._line = (self._line + self._decoder.decode(content)).split("\n")
        for line in whole:
            self._put(f"{as_seen(line)}\n")
        if len(self._line) > _LONGEST_LINE or "\r" in self._line:
            self._line = _what_counts(self._line)

    def pause(self) -> None:
        seen = cut(as_seen(self._line), self.width - 1)
        if seen != self._drawn:
            self._put(seen)
            self._drawn = seen
        self.out.flush()

    def end(self) -> None:
        if seen := as_seen(self._line + self._decoder.decode(b"", final=True)):
            self._put(f"{seen}\n")
        self._line = ""
        self._decoder.reset()
        self.out.flush()

    def _put(self, text: str) -> None:
        """In place of what is drawn of the line."""
        if self._drawn:
            self.out.write(b"\r\x1b[K")
            self._drawn = ""
        self.out.write(text.encode(errors="replace"))


def _what_counts(line: str) -> str:
    """Of a line that has not ended, what can still be seen: from the last carriage return that shows something."""
    parts = line[-_LONGEST_LINE:].split("\r")
    first = next((i for i in reversed(range(len(parts))) if as_seen(parts[i])), 0)
    return "\r".join(parts[first:])


def sink() -> Sink:
    """Where stdout goes."""
    out = sys.stdout.buffer
    return Plain(out, shutil.get_terminal_size().columns) if sys.stdout.isatty() else Raw(out)


def show(files: SweepFiles, num: int, rank: int | None, follow: bool, to: Sink) -> None:
    """The log of the job's newest try. With ``follow``, block until the job is over, through further tries.

    Raises Refused where there is no such job, rank or log.
    """
    with contextlib.closing(WatchedSweep(files)) as sweep, contextlib.closing(_Log(_path(files, num, rank))) as log:
        sweep.job(num)
        if follow:
            _follow(sweep, num, log, to)
        else:
            log.copy(to)
            to.end()
        if not log.found:
            raise Refused(_no_log(sweep, num, rank))
        if follow and not sweep.job(num).state.over and sweep.standing is Standing.KILLED:
            raise Refused(f"{named(sweep.job(num))} was not over when the sweep was killed")


def _path(files: SweepFiles, num: int, rank: int | None) -> str:
    return files.output(num) if rank is None else files.rank_log(num, rank)


def _follow(sweep: WatchedSweep, num: int, log: _Log, to: Sink) -> None:
    reader_of_ours = _descriptors.pipe_behind(1)
    with _inotify.Changes() as changes:
        while True:
            changes.watch(sweep.files.root)
            changes.watch(os.path.dirname(log.path))
            sweep.look()
            ended = sweep.job(num).state.over or over(sweep.standing)  # before the log is read: that is all of it then
            log.copy(to)
            if ended:
                to.end()
                return
            to.pause()
            others = [fd for fd in (reader_of_ours, sweep.supervisor) if fd is not None]
            if reader_of_ours in changes.wait(_LOOK_S, *others):
                raise BrokenPipeError


@dataclass
class _Log:
    """The log that has this name, and the one that has it next: a further try begins its own, and moves this aside.

    ``found``: there is, or was, one.
    """

    path: str
    found: bool = False
    _file: BinaryIO | None = None

    def copy(self, to: Sink) -> None:
        """What has come since the last call. Raises Refused where it cannot be read."""
        while self._file is not None or self._open():
            assert self._file is not None
            another = self._is_another()  # asked before: what is read now is all that the old one will ever have
            self._rest(self._file, to)
            if not another:
                return
            to.end()
            self.close()
            print(f"gpu-pool: {shown(self.path)} begins anew, with a further try", file=sys.stderr)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self) -> bool:
        try:
            file = open(open_file(self.path), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Refused(f"{shown(self.path)} cannot be read: {error.strerror}") from None
        self._file, self.found = file, True
        return True

    def _is_another(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(os.lstat(self.path), os.fstat(self._file.fileno()))
        except OSError:
            return False  # moved aside, and the next one is not there yet; or the directory was removed

    def _rest(self, file: BinaryIO, to: Sink) -> None:
        if os.fstat(file.fileno()).st_size < file.tell():  # somebody has cut it off
            file.seek(0)
        while content := file.read(_BLOCK):
            to.write(content)


def _no_log(sweep: WatchedSweep, num: int, rank: int | None) -> str:
    """Why there is none to show."""
    job = sweep.job(num)
    if rank is not None:
        with contextlib.suppress(OSError):
            names = map(_RANK_LOG.fullmatch, os.listdir(sweep.files.job_dir(num)))
            if ranks := sorted(int(name[1]) for name in names if name is not None):
                return f"{named(job)} has no log of rank {rank}: its ranks here are {', '.join(map(str, ranks))}"
        if job.tries:
            return f"{named(job)} has no logs of ranks: it is no group (mode: ddp)"
    if job.state is State.QUEUED and not job.tries:
        return f"{named(job)} has no log: it is queued, and was not started yet"
    if not job.tries:
        return f"{named(job)} has no log: it was not started"
    return f"{named(job)} has no log: {shown(_path(sweep.files, num, rank))} is not there"
