"""The end of a launch in lines of text: what became of each job, and why. Pure, but for the ends of their logs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ._files import SweepFiles
from ._model import Cause, Job, Status
from ._table import cells, clock, cut, error, pad
from ._tail import last_lines, one_line
from ._view import JobView, State, View, columns

MOST_ROWS = 200
"""Of the table at the end."""

_MOST_FAILURES = 10
"""That are told once more at the end, with the last lines of their logs."""

_LAST_LINES = 5

_GAP = "  "

_NARROWEST = 8
"""Cells to which a column is cut before whole columns are left out."""


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 where there is neither."""
    return max(40, shutil.get_terminal_size().columns)


def headline(view: View, jobs: Sequence[Job]) -> str:
    """How many jobs ended how, how long it took, and how busy the slots were in that time."""
    counts = Counter(_status(view.jobs.get(job.num)) for job in jobs)
    text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    text += f" in {clock(view.at - (view.at if view.began is None else view.began))}"
    busy = view.busy(view.at)
    return text if busy is None else f"{text}, slots {100 * busy:.0f}% busy"


def result_table(view: View, jobs: Sequence[Job], width: int) -> list[str]:
    """A header, and a row per job: number, the overrides that differ, status, value or error, seconds, GPU and slot."""
    tried = any(job.tries and job.tries[-1].attempt > 1 for job in view.jobs.values())
    shown = jobs[:MOST_ROWS]
    keys, values = columns(jobs)
    about = [view.jobs.get(job.num) for job in shown]
    fixed: list[list[str]] = [["#", *(str(job.num) for job in shown)]]
    flexible = [[one_line(key), *(one_line(row.get(key, "")) for row in values[:MOST_ROWS])] for key in keys]
    more = [
        ["status", *map(_status, about)],
        ["value", *map(_value, about)],
        ["seconds", *(f"{job.seconds:.1f}" if job is not None and job.seconds is not None else "" for job in about)],
        ["gpu.slot", *(",".join(job.tries[-1].slots) if job is not None and job.tries else "" for job in about)],
    ]
    if tried:
        more.append(["tries", *(str(job.tries[-1].attempt) if job is not None and job.tries else "" for job in about)])
    lines = _fitted(fixed, flexible, more, width)
    if len(jobs) > len(shown):
        lines.append(f"{_GAP}and {len(jobs) - len(shown)} more, each a line of .gpu_pool/journal.jsonl")
    return lines


def _fitted(numbers: list[list[str]], overrides: list[list[str]], more: list[list[str]], width: int) -> list[str]:
    """The columns side by side, no wider than that: values and overrides are cut, and then the last overrides go."""
    left_out = False
    while True:
        marked = [["…"] * len(numbers[0])] if left_out else []
        table = [*numbers, *overrides, *marked, *more]
        wide = [max(map(cells, column)) for column in table]
        can_be_cut = {len(numbers) + i for i in range(len(overrides))} | {len(table) - len(more) + 1}
        while sum(wide) + len(_GAP) * len(wide) > width:
            widest = max(can_be_cut, key=lambda i: wide[i])
            if wide[widest] <= _NARROWEST:
                break
            wide[widest] -= 1
        else:
            break
        if not overrides:
            break
        overrides, left_out = overrides[:-1], True
    rows = zip(*table, strict=True)
    lines = (
        "".join(_GAP + pad(cut(cell, most), most) for cell, most in zip(row, wide, strict=True)).rstrip()
        for row in rows
    )
    return [cut(line, width) for line in lines]


def failures(view: View, jobs: Sequence[Job], files: SweepFiles, where: Callable[[str], str], width: int) -> list[str]:
    """The failed jobs, each with its cause, its log and the last lines of that; none where there are none.

    ``width``: of the lines from logs; causes and paths are never cut.
    """
    failed = [(job, view.jobs.get(job.num)) for job in jobs if _status(view.jobs.get(job.num)) in {"FAILED", "LOST"}]
    lines: list[str] = []
    for job, about in failed[:_MOST_FAILURES]:
        lines += [f"{_GAP}{one_line(str(job))}: {_value(about)}", f"{_GAP * 2}{where(files.output(job.num))}"]
        printed = [line for line in last_lines(files.output(job.num), 4 * _LAST_LINES) if line]
        lines += [cut(f"{_GAP * 3}{line}", width) for line in printed[-_LAST_LINES:]]
    if len(failed) > _MOST_FAILURES:
        lines.append(f"{_GAP}and {len(failed) - _MOST_FAILURES} more")
    return lines


def _status(job: JobView | None) -> str:
    """LOST: nobody was left to say what became of it. A job that was being stopped then is what it was stopped for."""
    if job is not None and job.state is State.STOPPING:
        return str(Status.FAILED if job.cause is Cause.TIMEOUT else Status.CANCELLED)
    return str(job.state) if job is not None and job.state.over else "LOST"


def _value(job: JobView | None) -> str:
    status = _status(job)
    if job is None or status == "LOST":
        return "the supervisor was killed"
    if job.state is State.STOPPING:
        return one_line(job.stopping or "")
    return text(job.value) if job.state is State.COMPLETED else error(job)


def text(value: Any) -> str:
    """A job's value in one line, and not for pages."""
    if value is None:
        return ""
    return cut(f"{value:.6g}" if isinstance(value, float) else one_line(str(_rounded(value))), 200)


def _rounded(value: Any) -> Any:
    """Floats as a person reads them; the whole of them is in the journal."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
