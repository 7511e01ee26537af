"""A sweep seen from another process: found by its directory, read from its journal, and whether anybody runs it.

Only what is text is read, and nothing is written: the directory may be somebody else's.
"""

from __future__ import annotations

import copy
import enum
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

from . import _descriptors, _pidfd, _returns, _verdict
from ._errors import GpuPoolError
from ._facts import DamagedEventError, is_amount, sound
from ._files import SweepFiles
from ._journal import JournalReader
from ._model import Outcome
from ._seen import JobView, Launch
from ._tail import one_line
from ._view import View

_OWN_DIRECTORY = re.compile(r"\.gpu_pool(\.\d+)?")


class Refused(GpuPoolError):
    """What was asked of a sweep cannot be answered, or done; its text is one sentence for a person."""


class Standing(str, enum.Enum):
    """Whether anybody runs the sweep; equal to its name as text."""

    RUNNING = "RUNNING"
    IDLE = "IDLE"  # every job so far has ended, and the app may start more
    FINISHED = "FINISHED"
    KILLED = "KILLED"  # its supervisor went before the jobs had ended
    UNKNOWN = "UNKNOWN"  # it is another machine's

    __str__ = str.__str__


def standing(view: View, host: str, boot: str, alive: bool) -> Standing:
    """What can be said here, on this host in this life of it. ``alive``: the supervisor of the latest launch is."""
    launch = view.launch
    if launch is None or launch.host != host:
        return Standing.FINISHED if view.done else Standing.UNKNOWN
    if alive and launch.boot == boot:
        return Standing.IDLE if view.done else Standing.RUNNING
    return Standing.FINISHED if view.done else Standing.KILLED


def find(directory: str) -> SweepFiles:
    """The files of the sweep in this directory, which may as well be its .gpu_pool, or one that was moved aside."""
    path = os.path.abspath(directory)
    parent, name = os.path.split(path)
    return SweepFiles(parent, name) if _OWN_DIRECTORY.fullmatch(name) else SweepFiles(path)


class WatchedSweep:
    """One sweep, as far as it has been looked at. Raises Refused where there is none, or nothing that can be read.

    ``view`` and ``standing`` are those of the last ``look``.
    """

    def __init__(self, files: SweepFiles) -> None:
        self.files = files
        self.view = View()
        self.standing = Standing.UNKNOWN
        self._pidfd: int | None = None
        self._reader: JournalReader | None = None
        try:
            self.look()
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """Read what is new. Where a new sweep has begun in the directory, this one is of that from then on."""
        if self._journal_is_another():
            self.close()
            self._reader, self.view = self._open(), View()
        self._take()
        if not self._alive() and not self.view.done:
            self._take()  # what it wrote between the first reading and its end
        self.standing = standing(self.view, os.uname().nodename, _pidfd.boot_id(), self._alive())

    def close(self) -> None:
        """Let go of its journal and of its supervisor."""
        if self._reader is not None:
            self._reader.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._reader = self._pidfd = None

    @property
    def supervisor(self) -> int | None:
        """A pidfd of the supervisor, this object's own; None: there is none, on this machine."""
        return self._pidfd

    def job(self, num: int) -> JobView:
        """One of its jobs. Raises Refused where it is not known."""
        if num not in self.view.jobs:
            known = sorted(self.view.jobs)
            has = f"it has {_range(known)}" if known else "it has none yet"
            raise Refused(f"there is no job {num} in {shown(self.files.sweep_dir)}: {has}")
        return self.view.jobs[num]

    def _journal_is_another(self) -> bool:
        if self._reader is None:
            return True
        try:
            found = os.stat(self.files.journal)
        except OSError:
            return False  # removed, or being moved aside: what was open can still be read
        return (found.st_dev, found.st_ino) != self._identity

    def _open(self) -> JournalReader:
        path = self.files.journal
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise Refused(f"{shown(path)} is no file")
            self._identity = found.st_dev, found.st_ino
            return JournalReader(path)
        except (FileNotFoundError, NotADirectoryError):
            raise NoSweep(
                f"there is no sweep in {shown(self.files.sweep_dir)} (no {self.files.name}/journal.jsonl)"
            ) from None
        except OSError as error:
            raise Refused(f"{shown(path)} cannot be read: {error.strerror}") from None

    def _take(self) -> None:
        assert self._reader is not None
        before = self.view.launch
        try:
            self.view.take(sound(self._reader.new()))
        except DamagedEventError as error:
            raise Refused(f"{shown(self._reader.path)} is damaged, or another version's ({error})") from None
        if self.view.launch is not before:
            self._use(self.view.launch)

    def _use(self, launch: Launch | None) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        here = launch is not None and (launch.host, launch.boot) == (os.uname().nodename, _pidfd.boot_id())
        self._pidfd = _pidfd.find(launch.supervisor, launch.started) if launch is not None and here else None

    def _alive(self) -> bool:
        return self._pidfd is not None and not _descriptors.wait_readable([self._pidfd], 0)


class NoSweep(Refused):
    """There is none in the directory, yet."""


def as_left(files: SweepFiles, view: View) -> View:
    """The view of a sweep that was killed, once it is settled what became of the jobs that ran: it can be said now.

    What had ended by itself did; the others are lost. Their ends are the last signs of life that there are.
    """
    view = copy.deepcopy(view)
    for job in view.running():
        report = _returns.load_report(files, job.job.num)
        if report is not None and report.overrides not in (None, job.job.overrides):
            report = None  # of another job that had this number
        outcome = (
            _verdict.lost("was lost: the sweep was killed") if report is None else _verdict.judge(None, None, report)
        )
        view.take([_end(job, outcome, max(view.at, _touched(files.output(job.job.num))))])
    view.done = True  # its clock stands still
    return view


def _end(job: JobView, outcome: Outcome, at: float) -> dict[str, Any]:
    facts: Mapping[str, Any] = {
        "event": "end",
        "time": at,
        "job": job.job.num,
        "attempt": job.tries[-1].attempt,
        "status": outcome.status.value,
        "cause": outcome.cause.value,
        "error_type": outcome.error_type,
        "error_text": outcome.error_text,
        "value": outcome.value,
        "seconds": job.tries[-1].seconds(at),
    }
    return dict(facts)


def _touched(path: str) -> float:
    """When the file was written last; 0.0 where there is none, or it has a time that no calendar has."""
    try:
        at = os.lstat(path).st_mtime
    except OSError:
        return 0.0
    return at if is_amount(at) else 0.0


def shown(path: str) -> str:
    """A path as a person can be shown it: as it is shortest to type, without control characters."""
    relative = os.path.relpath(path)
    return one_line(path if relative.startswith(os.pardir) else relative)


def named(job: JobView) -> str:
    """The job, as a person can be shown it."""
    return one_line(str(job.job))


def over(state: Standing) -> bool:
    """Nothing will happen in it any more."""
    return state in {Standing.FINISHED, Standing.KILLED}


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"job {numbers[0]} only"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"jobs {numbers[0]} to {numbers[-1]}"
    return "jobs " + ", ".join(map(str, numbers[:20])) + (", …" if len(numbers) > 20 else "")
