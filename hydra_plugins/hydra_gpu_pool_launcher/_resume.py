"""What earlier sweeps have left in a sweep's directory: what of it is done, and where the rest goes.

All of this runs in the supervisor, under the lock of the directory, before anything of a launch starts. It reads JSON
and hashes pickles, and loads none. A sweep may have been killed at any point, this step of one included, so what is cut
or damaged counts as not done, and never raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _files, _returns
from ._aside import Other, Record, aside_names, bring_back, figures_in, move_others, record_of, report_of
from ._files import SweepFiles, move_aside
from ._journal import JournalReader
from ._model import Cause, Job, Outcome, Report, Status
from ._returns import DamagedReturnError, overrides_from_json

_FIGURES = ("seconds", "cpu_s", "peak_mb", "gpu_mb")
"""Of an "end" line: what is still true of a job that is not run again."""


@dataclass(frozen=True)
class Kept:
    """A job that is not run again: its outcome, and the figures of its run, by their names in the journal."""

    outcome: Outcome
    facts: Mapping[str, float]


@dataclass(frozen=True)
class Earlier:
    """What a launch has of earlier sweeps.

    ``kept``: by job number; ``back``: how many of them had been moved aside. ``moved``: for each earlier job with other
    overrides, where its files are now; ``left``: directories of such jobs that stay where they are, since moving them
    would do harm; both relative to the sweep directory. ``known``: how many of the launch's numbers an earlier sweep
    had; ``empty``: there was none at all. ``elsewhere``: how many of the other jobs had completed in a sweep that a new
    one has moved aside, and that sweep's directory.
    """

    kept: Mapping[int, Kept]
    moved: tuple[str, ...]
    left: tuple[str, ...]
    known: int
    empty: bool
    back: int = 0
    elsewhere: tuple[int, str] | None = None

    def facts(self) -> dict[str, Any]:
        """What the journal has of it."""
        return {
            "kept": len(self.kept),
            "moved": self.moved,
            "left": self.left,
            "known": self.known,
            "empty": self.empty,
            "back": self.back,
            "elsewhere": self.elsewhere,
        }


@dataclass
class _Told:
    """What the journal tells of one number. ``stopped``: its last try was told to, so its return came too late."""

    overrides: tuple[str, ...] | None = None
    started: bool = False
    stopped: bool = False
    figures: dict[str, float] = field(default_factory=dict)


def take_up(files: SweepFiles, jobs: Sequence[Job]) -> Earlier:
    """Find what is done, bring back what of it was moved aside, move aside what is another job's, and clear the rest.

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
    aside = aside_names(files)
    kept: dict[int, Kept] = {}
    back: dict[int, str] = {}
    again: list[Job] = []
    others: dict[int, Other] = {}
    for job in jobs:
        told, report, record = journal.get(job.num, _Told()), report_of(files, job.num), record_of(files, job.num)
        started = told.started or os.path.lexists(files.job_dir(job.num))
        overrides = told.overrides if report is None or report.overrides is None else report.overrides
        completed = _completed(told, report, record)
        if report is not None and completed and _is_done(files, job.num, job, report):
            kept[job.num] = _kept(report, told.figures if record is None else record.figures)
            continue
        for name in aside.get(job.num, ()):
            before, of_before = report_of(files, name), record_of(files, name)
            if before is not None and of_before is not None and _is_done(files, name, job, before):
                kept[job.num], back[job.num] = _kept(before, of_before.figures), name
                break
        if started and overrides == job.overrides and job.num not in back:
            again.append(job)
        elif started:
            figures = told.figures if record is None else record.figures
            others[job.num] = Other(report, figures if completed else None)
    # First: until its results are gone, the journal is what tells that a job was stopped, and the next line in it, of a
    # job that is queued once more, will be taken for a new beginning.
    for job in again:
        _clear(files, job.num, late=journal.get(job.num, _Told()).stopped)
    moved, left = move_others(files, others)
    for num in kept:
        bring_back(files, num, back.get(num))
    known = {*journal, *kept, *others, *(job.num for job in again)}
    return Earlier(
        kept,
        tuple(moved),
        tuple(left),
        sum(job.num in known for job in jobs),
        empty,
        len(back),
        _elsewhere(files, [job for job in jobs if job.num not in kept]),
    )


def _kept(report: Report, figures: Mapping[str, float]) -> Kept:
    return Kept(Outcome(Status.COMPLETED, Cause.RESUMED, value=report.value, by_itself=True), figures)


def _completed(told: _Told, report: Report | None, record: Record | None) -> bool:
    """As far as report and journal tell; of a job that was moved aside, the journal may speak of its successor."""
    return report is not None and report.status is Status.COMPLETED and not (told.stopped and record is None)


@dataclass(frozen=True)
class Tally:
    """What a sweep has come to: how many ``jobs`` it had, and the overrides of those that ``completed``, by number."""

    jobs: int
    completed: Mapping[int, tuple[str, ...] | None]


def tally(files: SweepFiles) -> Tally:
    """Of a sweep that nobody works on. Raises OSError where its directory cannot be read."""
    journal = _read_journal(files) if os.path.exists(files.journal) else {}
    names = os.listdir(os.path.dirname(files.job_dir(0)))
    nums = {*journal, *(int(name) for name in names if name.isascii() and name.isdigit())}
    completed: dict[int, tuple[str, ...] | None] = {}
    for num in nums:
        report = report_of(files, num)
        if report is not None and _completed(journal.get(num, _Told()), report, record_of(files, num)):
            completed[num] = report.overrides
    return Tally(len(nums), completed)


def _elsewhere(files: SweepFiles, jobs: Sequence[Job]) -> tuple[int, str] | None:
    """A sweep that was moved aside as a whole is not gone on with: its results may be those of older code.

    Whether somebody forgot the key, or meant to begin anew, cannot be told; so it is only said where they are.
    """
    own = f"{files.name}."
    ks = [name.removeprefix(own) for name in os.listdir(files.sweep_dir) if name.startswith(own)] if jobs else []
    for k in sorted((int(k) for k in ks if k.isascii() and k.isdigit()), reverse=True):
        with contextlib.suppress(OSError):
            completed = tally(SweepFiles(files.sweep_dir, f"{own}{k}")).completed
            if found := sum(completed.get(job.num) == job.overrides for job in jobs):
                return found, f"{own}{k}"
    return None


def _is_done(files: SweepFiles, name: int | str, job: Job, report: Report) -> bool:
    if report.status is not Status.COMPLETED or report.overrides != job.overrides:
        return False
    try:
        _returns.read_return(files, name, report)
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
            told.figures = figures_in({name: event.get(name) for name in _FIGURES})


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
