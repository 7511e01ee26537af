"""What earlier sweeps have left in a sweep's directory: what of it is done, and where the rest goes.

All of this runs in the supervisor, under the lock of the directory, before anything of a launch starts. It reads JSON
and hashes pickles, and loads none. A sweep may have been killed at any point, this step of one included, so what is cut
or damaged counts as not done, and never raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _files, _returns
from ._files import SweepFiles, move_aside
from ._journal import JournalReader
from ._model import Cause, Job, Outcome, Report, Status
from ._returns import DamagedReturnError, overrides_from_json

_FIGURES = ("seconds", "cpu_s", "peak_mb")
"""Of an "end" line: what is still true of a job that is not run again."""


@dataclass(frozen=True)
class Kept:
    """A job that is not run again: its outcome, and the figures of its run, by their names in the journal."""

    outcome: Outcome
    facts: Mapping[str, float]


@dataclass(frozen=True)
class Earlier:
    """What a launch has of earlier sweeps.

    ``kept``: by job number. ``moved``: for each earlier job with other overrides, where its files are now; ``left``:
    directories of such jobs that stay where they are, since moving them would do harm; both relative to the sweep
    directory. ``known``: how many of the launch's numbers an earlier sweep had; ``empty``: there was none at all.
    """

    kept: Mapping[int, Kept]
    moved: tuple[str, ...]
    left: tuple[str, ...]
    known: int
    empty: bool

    def facts(self) -> dict[str, Any]:
        """What the journal has of it."""
        return {
            "kept": len(self.kept),
            "moved": self.moved,
            "left": self.left,
            "known": self.known,
            "empty": self.empty,
        }


@dataclass
class _Told:
    """What the journal tells of one number. ``stopped``: its last try was told to, so its return came too late."""

    overrides: tuple[str, ...] | None = None
    started: bool = False
    stopped: bool = False
    figures: dict[str, float] = field(default_factory=dict)


def take_up(files: SweepFiles, jobs: Sequence[Job]) -> Earlier:
    """Find what is done, move aside what is another job's, and clear what is neither.

    From then on, whatever result there is on disk for one of the jobs is its own, and it completed. Raises
    ConfigurationError where something that must be moved cannot be.
    """
    try:
        return _take_up(files, jobs)
    except OSError as error:
        raise _files.cannot_be_written(files, error) from error


def _take_up(files: SweepFiles, jobs: Sequence[Job]) -> Earlier:
    empty = not os.path.getsize(files.journal) and not os.listdir(os.path.dirname(files.job_dir(0)))
    journal = _read_journal(files)
    kept: dict[int, Kept] = {}
    again: list[Job] = []
    others: dict[int, Report | None] = {}
    for job in jobs:
        told, report = journal.get(job.num, _Told()), _report(files, job.num)
        started = told.started or os.path.lexists(files.job_dir(job.num))
        overrides = told.overrides if report is None or report.overrides is None else report.overrides
        if report is not None and not told.stopped and _is_done(files, job, report):
            outcome = Outcome(Status.COMPLETED, Cause.RESUMED, value=report.value, by_itself=True)
            kept[job.num] = Kept(outcome, told.figures)
        elif started and overrides == job.overrides:
            again.append(job)
        elif started:
            others[job.num] = report
    # First: until its results are gone, the journal is what tells that a job was stopped, and the next line in it, of a
    # job that is queued once more, will be taken for a new beginning.
    for job in again:
        _clear(files, job.num, late=journal.get(job.num, _Told()).stopped)
    moved, left = _move_others(files, others)
    known = {*journal, *kept, *others, *(job.num for job in again)}
    return Earlier(kept, tuple(moved), tuple(left), sum(job.num in known for job in jobs), empty)


def _report(files: SweepFiles, num: int) -> Report | None:
    try:
        return _returns.trusted_report(files, num)
    except DamagedReturnError:
        return None


def _is_done(files: SweepFiles, job: Job, report: Report) -> bool:
    if report.status is not Status.COMPLETED or report.overrides != job.overrides:
        return False
    try:
        _returns.read_return(files, job.num, report)
    except DamagedReturnError:
        return False
    return True


def _read_journal(files: SweepFiles) -> dict[int, _Told]:
    """By job number. What is no line of ours is passed over."""
    told: dict[int, _Told] = {}
    with contextlib.closing(JournalReader(files.journal)) as reader:
        for event in reader.new():
            num = event.get("job") if isinstance(event, dict) else None
            if isinstance(num, int) and not isinstance(num, bool):
                _note(told.setdefault(num, _Told()), event)
    return told


def _note(told: _Told, event: Mapping[str, Any]) -> None:
    match event.get("event"):
        case "queued":
            overrides = overrides_from_json(event.get("overrides"))
            if overrides != told.overrides:
                told.started, told.figures = False, {}
            told.overrides, told.stopped = overrides, False
        case "start":
            told.started, told.stopped, told.figures = True, False, {}
        case "stop":
            told.stopped = True
        case "end":
            figures = {name: event.get(name) for name in _FIGURES}
            told.figures = {
                name: figure
                for name, figure in figures.items()
                if isinstance(figure, (int, float)) and not isinstance(figure, bool)
            }


def _clear(files: SweepFiles, num: int, late: bool) -> None:
    """What there is of an earlier try is no result of the next one, nor of the job if that is never started.

    What is no private directory, or cannot be cleared, is moved aside: the job could not start there.
    """
    path = files.job_dir(num)
    try:
        if os.path.lexists(path):
            _files.make_private_dir(path)
            if late:
                _returns.set_aside_late(files, num)
            _returns.clear_result(files, num)
    except OSError:
        move_aside(path)


def _move_others(files: SweepFiles, others: Mapping[int, Report | None]) -> tuple[list[str], list[str]]:
    """Move the files of these numbers aside: first what the job wrote, then what tells that it was there.

    So if this is cut between the two, the next one goes on with it. Gives the new names, and those that stay.
    """
    moved: list[str] = []
    left: dict[str, None] = {}
    in_use = _in_use(files, others) if others else frozenset()
    for num, report in others.items():
        now: str | None = None
        directory = os.path.normpath(report.directory if report and report.directory else str(num))
        path = os.path.join(files.sweep_dir, directory)
        if _is_directory_of_the_sweep(files, directory) and not _holds_any(directory, in_use):
            now = move_aside(path)
        elif os.path.lexists(path):
            left[directory] = None
        if os.path.lexists(files.job_dir(num)):
            aside = move_aside(files.job_dir(num))
            now = now or aside
        if now is not None:
            moved.append(os.path.relpath(now, files.sweep_dir))
    return moved, list(left)


def _in_use(files: SweepFiles, others: Mapping[int, object]) -> frozenset[str]:
    """The directories of all jobs that stay, those of numbers that a later batch may ask for included."""
    nums = {int(name) for name in os.listdir(os.path.dirname(files.job_dir(0))) if name.isascii() and name.isdigit()}
    reports = {num: _report(files, num) for num in nums - others.keys()}
    return frozenset(
        os.path.normpath(report.directory if report and report.directory else str(num))
        for num, report in reports.items()
    )


def _holds_any(directory: str, others: Iterable[str]) -> bool:
    return any(other == directory or other.startswith(directory + os.sep) for other in others)


def _is_directory_of_the_sweep(files: SweepFiles, directory: str) -> bool:
    """True where it is really one, strictly below the sweep's, and no link leads there; and is not gpu_pool's own."""
    top = os.path.realpath(files.sweep_dir)
    own = os.path.basename(files.root)
    first = directory.split(os.sep)[0]
    if os.path.isabs(directory) or first == own or first.startswith(f"{own}."):
        return False
    path = os.path.join(top, directory)
    try:
        return os.path.realpath(path) == path and os.path.isdir(path)  # "." and ".." are not equal to what they mean
    except ValueError:  # a name that no file can have: not one that a job of ours wrote
        return False
