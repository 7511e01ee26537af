"""What ``gpu-pool status`` says of a sweep: as lines for a person, as JSON for a script."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _pidfd
from ._again import resume_command
from ._files import SweepFiles
from ._outside import Standing, over, shown
from ._results import error_text_of
from ._seen import JobView, State
from ._table import Line, cells, cut, error, gb, overview, pad, rows, short, value_text, with_place
from ._tail import one_line
from ._view import View, columns

_GAP = "  "
_WIDEST_OVERRIDE = 24

_MOST_PLACES = 200
"""In the user's code: for each of them, the end of a log is read, in milliseconds."""


@dataclass(frozen=True)
class Report:
    """A sweep for a person. ``head`` and ``table`` fit the width; ``after`` is to be copied, and is not cut."""

    head: list[Line]
    table: list[Line]
    after: list[str]

    def lines(self) -> list[Line]:
        """All of it, from the top."""
        blank = [Line("")] if self.table else []
        return [*self.head, *blank, *self.table, *(Line(text) for text in ["", *self.after] if self.after)]


def report(
    files: SweepFiles,
    view: View,
    how: Standing,
    now: float,
    last: Callable[[JobView], str],
    width: int,
    height: int | None = None,
    place: Callable[[JobView], str | None] = lambda _: None,
) -> Report:
    """The sweep in at most ``height`` lines, but for what is to be copied; None: however many it takes.

    ``view``: of a sweep that was killed, as ``as_left`` leaves it. ``last``: the last line of a job's log; ``place``:
    where in the user's code it failed.
    """
    head = [*overview(view, now, shown(files.sweep_dir), width)]
    head += [
        Line(cut(text, width), State.FAILED if how is Standing.KILLED else None) for text in _standing(view, how, now)
    ]
    after, command = [], _resume(files, view, how)
    if command is not None:
        after = ["What completed is kept. To go on with the rest:", command]
    elif how is Standing.KILLED:
        after = ["What completed is kept."]
    room = None if height is None else max(4, height - len(head) - 1 - (len(after) + 2 if after else 0))
    if over(how) or not view.running():
        table = _all_ended(view, now, width, room, place)
    else:
        table = _tables(view, now, last, width, room, place)
    return Report(head, table, after)


def _resume(files: SweepFiles, view: View, how: Standing) -> str | None:
    """The command that goes on with a sweep that is over; None where all has completed, or there is none."""
    if view.launch is None or not over(how) or (view.all_completed() and how is not Standing.KILLED):
        return None
    return resume_command(view.launch, files, os.getcwd())


def _standing(view: View, how: Standing, now: float) -> list[str]:
    """Whether anybody runs it, and who; the time of its last event where that matters."""
    launch, last = view.launch, f"last event {_when(view.at, now)}"
    if how is Standing.FINISHED:
        when = _when(view.at, now)
        return [f"finished {when}" if view.stopped is None else f"stopped {when}: {one_line(view.stopped)}"]
    if launch is None:
        return [f"its journal does not say who runs it; {last}"]
    host = one_line(launch.host)
    if how is Standing.RUNNING:
        return [f"running: process {launch.main} on {host}; {last}", *map(one_line, view.waiting())]
    if how is Standing.IDLE:
        return [f"all jobs so far have ended {_when(view.at, now)}; the app, process {launch.main}, may start more"]
    if how is Standing.KILLED:
        rebooted = launch.boot != _pidfd.boot_id()
        why = f"{host} was restarted since" if rebooted else f"its supervisor, process {launch.supervisor}, is gone"
        return [f"killed: {why}; {last}"]
    return [f"on another machine, {host}: whether it still runs cannot be told from here; {last}"]


def _when(at: float, now: float) -> str:
    """A point in time: how long ago, and by the clock."""
    ago = now - at
    clock = time.strftime("%H:%M:%S" if 0 <= ago < 43200 else "%Y-%m-%d %H:%M:%S", time.localtime(at))
    if not 0 <= ago < 43200:
        return clock
    return f"{short(ago)} ago ({clock})"


def _all_ended(
    view: View, now: float, width: int, height: int | None, place: Callable[[JobView], str | None]
) -> list[Line]:
    """Where nothing runs: those that have ended, by number; where not all fit, those that did not complete first."""
    ended = [job for job in view.in_order() if job.state.over]
    if height is None or len(ended) < height:
        return _ended(view, ended, now, width, place)
    by_weight = sorted(ended, key=lambda job: (job.state is State.COMPLETED, -_end(job)))
    kept = sorted(by_weight[: max(0, height - 2)], key=lambda job: job.job.num)
    return [*_ended(view, kept, now, width, place), _and_more(ended, kept, width)]


def _tables(
    view: View,
    now: float,
    last: Callable[[JobView], str],
    width: int,
    height: int | None,
    place: Callable[[JobView], str | None],
) -> list[Line]:
    """Those that run or failed; below them the others that have ended."""
    rest = [job for job in view.in_order() if job.state.over and job.state is not State.FAILED]
    first = rows(view, now, last, width, height if height is None or not rest else height - 1)
    blank = [Line("")] if first and rest else []
    if height is None or len(first) + len(blank) + 1 + len(rest) <= height:
        return [*first, *blank, *_ended(view, rest, now, width, place)]
    fit = max(0, height - len(first) - len(blank) - 2)
    newest = sorted(rest, key=_end, reverse=True)[:fit]
    return [*first, *(blank if fit else []), *_ended(view, newest, now, width, place), _and_more(rest, newest, width)]


def _and_more(jobs: Sequence[JobView], shown: Sequence[JobView], width: int) -> Line:
    left = Counter(job.state for job in jobs) - Counter(job.state for job in shown)
    counts = " and ".join(f"{left[state]} {state.lower()}" for state in State if left[state])
    return Line(cut(f"{_GAP}and {counts}{' more' if shown else ''}; gpu-pool status --all shows every job", width))


def _end(job: JobView) -> float:
    return (job.tries[-1].ended or 0.0) if job.tries else 0.0


def _ended(
    view: View, jobs: Sequence[JobView], now: float, width: int, place: Callable[[JobView], str | None]
) -> list[Line]:
    """A header and a row for each of the jobs: how long it took, its overrides that differ, how it ended."""
    if not jobs:
        return []
    keys, values = columns([job.job for job in view.in_order()])
    overrides = dict(zip((job.job.num for job in view.in_order()), values, strict=True))
    memory = [gb(job.gpu_mb) for job in jobs]
    shown = ["gpu GB"] if any(memory) else []
    head = ["#", "gpu", "took", *shown, *(cut(one_line(key), _WIDEST_OVERRIDE) for key in keys), "status", "value"]
    table = [head]
    for job, held in zip(jobs, memory, strict=True):
        slots = one_line(",".join(job.known_tries[-1].slots)) if job.known_tries else ""
        took = job.tries[-1].seconds(now) if job.tries else job.seconds
        about = [str(job.job.num), slots, "" if took is None else short(took), *([held] if shown else [])]
        about += [cut(one_line(overrides[job.job.num].get(key, "")), _WIDEST_OVERRIDE) for key in keys]
        what = value_text(job.value) if job.state is State.COMPLETED else error(job)
        table.append([*about, job.state.value, what])
    widths = [max(cells(row[i]) for row in table) for i in range(len(head) - 1)]
    while (
        len(widths) > 5 + len(shown) and sum(widths) + len(_GAP) * (len(widths) + 1) + 24 > width
    ):  # overrides that leave no room
        del widths[-2]
        for row in table:
            del row[-3]
    failed = [job for job in jobs if job.state is State.FAILED]
    places = {job.job.num: place(job) for job in failed[:_MOST_PLACES]}
    lines = []
    for i, row in enumerate(table):
        align: list[Callable[[str, int], str]] = [str.rjust, pad, *[str.rjust] * (1 + len(shown)), *[pad] * len(row)]
        parts = [align[k](cell, widths[k]) for k, cell in enumerate(row[:-1])]
        state = jobs[i - 1].state if i else None
        begin = _GAP + _GAP.join([*parts, ""])
        where = places.get(jobs[i - 1].job.num) if i else None
        lines.append(Line(cut(begin + with_place(row[-1], where, width - cells(begin)), width).rstrip(), state))
    return lines


# --- for a script ---


def as_json(files: SweepFiles, view: View, how: Standing, now: float) -> dict[str, Any]:
    """The sweep as README describes it: times in seconds since the epoch, durations in seconds."""
    launch = view.launch
    busy = sum(len(job.tries[-1].slots) for job in view.running())
    return {
        "directory": files.sweep_dir,
        "standing": how.value,
        "host": launch.host if launch else None,
        "main": launch.main if launch else None,
        "supervisor": launch.supervisor if launch else None,
        "command": list(launch.command) if launch else None,
        "cwd": launch.cwd if launch else None,
        "began": view.began,
        "last_event": view.at,
        "stopped": view.stopped,
        "resume": _resume(files, view, how),
        "left_s": None if over(how) else view.left_s(now),
        "slots": list(view.slots()),
        "busy": busy,
        "waiting": view.waiting(),
        "counts": {state.value: view.count()[state] for state in State},
        "jobs": [_job_as_json(files, job, now) for job in view.in_order()],
    }


def _job_as_json(files: SweepFiles, job: JobView, now: float) -> dict[str, Any]:
    last = job.known_tries[-1] if job.known_tries else None
    return {
        "job": job.job.num,
        "overrides": list(job.job.overrides),
        "state": job.state.value,
        "tries": len(job.known_tries),
        "pid": last.pid if last and job.running else None,
        "slots": list(last.slots) if last else [],
        "started": last.started if last else None,
        "ended": last.ended if last else None,
        "seconds": job.tries[-1].seconds(now) if job.tries else job.seconds,
        "cpu_s": job.cpu_s,
        "peak_mb": job.peak_mb,
        "gpu_mb": last.gpu_mb if last and job.running else job.gpu_mb,
        "value": job.value,
        "cause": job.cause.value if job.cause else None,
        "error_type": job.error_type,
        "error_text": error_text_of(job.error_type, job.error_text),
        "stopping": job.stopping,
        "log": files.output(job.job.num),
    }


def dumps(value: Any) -> str:
    """One line of JSON that any parser takes: what is no finite number is null, what is not ASCII is escaped."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value
