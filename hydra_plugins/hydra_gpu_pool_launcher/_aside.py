"""What stands under a job's number and is another job's: moved aside, and brought back when its turn comes again.

A job has two directories: Hydra's, in which it wrote what it liked, and gpu_pool's own, ``jobs/<num>``. The first is
moved first, so that as long as one of the two stays, the next resume goes on with it; back, it is the other way round.
In either direction, aside.json in the second says where the first is, if it is there, from before the first step on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _returns
from ._facts import is_amount
from ._files import SweepFiles, free_name, move_aside, write_whole
from ._model import Report
from ._returns import DamagedReturnError


@dataclass(frozen=True)
class Record:
    """What aside.json says of a job with a completed result, and that it has one: no stop in the journal is its own.

    ``directory``: the name that Hydra's directory of the job has, where that was moved aside; relative to the sweep's.
    ``figures``: those of its run, by their names in the journal, which may be about another job by now.
    """

    directory: str | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Other:
    """What is under a number and not to stay there. ``figures``: None where it has no completed result."""

    report: Report | None
    figures: Mapping[str, float] | None


def report_of(files: SweepFiles, name: int | str) -> Report | None:
    """What the job says of itself; None where that is not there, damaged, or not to be trusted."""
    try:
        return _returns.trusted_report(files, name)
    except DamagedReturnError:
        return None


def record_of(files: SweepFiles, name: int | str) -> Record | None:
    """The job's record; None where it was never moved aside, or has run again since."""
    try:
        record = json.loads(_returns.read_private(files, name, files.aside(name)))
        directory = record["directory"]
        return Record(directory if isinstance(directory, str) else None, figures_in(record["figures"]))
    except (DamagedReturnError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write_record(files: SweepFiles, num: int, record: Record) -> None:
    content = {"directory": record.directory, "figures": dict(record.figures)}
    write_whole(files.aside(num), json.dumps(content).encode())


def figures_in(facts: Mapping[str, Any]) -> dict[str, float]:
    """Those of the facts that are amounts."""
    return {name: figure for name, figure in facts.items() if is_amount(figure)}


def aside_names(files: SweepFiles) -> dict[int, list[str]]:
    """By job number: the directories of jobs that were moved aside, the newest first."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir(os.path.dirname(files.job_dir(0))):
        num, _, k = name.partition(".")
        if name.isascii() and num.isdigit() and k.isdigit():
            found.setdefault(int(num), []).append((int(k), name))
    return {num: [name for _, name in sorted(names, reverse=True)] for num, names in found.items()}


def move_others(files: SweepFiles, others: Mapping[int, Other]) -> tuple[list[str], list[str]]:
    """Move the files of these numbers aside: first what the job wrote, then what tells that it was there.

    So if this is cut between the two, the next one goes on with it. Gives the new names, and those that stay.
    """
    moved: list[str] = []
    left: dict[str, None] = {}
    in_use = _in_use(files, others) if others else frozenset()
    for num, other in others.items():
        now: str | None = None
        directory = _directory(num, other.report)
        path = os.path.join(files.sweep_dir, directory)
        record = record_of(files, num)
        if record is not None and _is_moved(files, directory, record):
            now = os.path.join(files.sweep_dir, record.directory or "")
        else:
            movable = _is_directory_of_the_sweep(files, directory) and not _holds_any(directory, in_use)
            if movable:
                now = free_name(path)
            elif os.path.lexists(path):
                left[directory] = None
            if other.figures is not None:
                goes_to = None if now is None else os.path.relpath(now, files.sweep_dir)
                _write_record(files, num, Record(goes_to, other.figures))
            if now is not None:
                os.rename(path, now)
        if os.path.lexists(files.job_dir(num)):
            aside = move_aside(files.job_dir(num))
            now = now or aside
        if now is not None:
            moved.append(os.path.relpath(now, files.sweep_dir))
    return moved, list(left)


def bring_back(files: SweepFiles, num: int, name: str | None) -> None:
    """Give the job's directories the names that they had; ``name``: of gpu_pool's own, where it has not come yet.

    Hydra's stays where it is if another one has its name: nothing is overwritten.
    """
    if name is not None:
        os.rename(files.job_dir(name), files.job_dir(num))
    record = record_of(files, num)
    if record is None or record.directory is None:
        return
    directory = _directory(num, report_of(files, num))
    if _is_moved(files, directory, record):
        path = os.path.join(files.sweep_dir, directory)
        if os.path.lexists(path):
            return
        os.rename(os.path.join(files.sweep_dir, record.directory), path)
    _write_record(files, num, Record(None, record.figures))  # that name may become another job's


def _directory(num: int, report: Report | None) -> str:
    """Hydra's directory of the job, relative to the sweep's."""
    return os.path.normpath(report.directory if report and report.directory else str(num))


def _is_moved(files: SweepFiles, directory: str, record: Record) -> bool:
    """True where it is already, or still, under the name that the record has for it."""
    aside = record.directory or ""
    k = aside.removeprefix(f"{directory}.")
    return k != aside and k.isdigit() and _is_directory_of_the_sweep(files, aside)


def _in_use(files: SweepFiles, others: Mapping[int, object]) -> frozenset[str]:
    """The directories of all jobs that stay, those of numbers that a later batch may ask for included."""
    nums = {int(name) for name in os.listdir(os.path.dirname(files.job_dir(0))) if name.isascii() and name.isdigit()}
    reports = {num: report_of(files, num) for num in nums - others.keys()}
    return frozenset(_directory(num, report) for num, report in reports.items())


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
