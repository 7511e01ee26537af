"""The end of a launch in lines of text: what became of each job, and why. Pure, but for the ends of logs."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

from ._alike import alike, named, place_in
from ._excerpt import excerpt
from ._files import SweepFiles
from ._model import Cause, Job, Status
from ._results import LOST
from ._seen import JobView, State
from ._table import cells, clock, cut, cut_left, error, pad, shares, value_text
from ._tail import last_lines, one_line
from ._view import View, columns

MOST_ROWS = 200
"""Of the table at the end."""

_MOST_EXCERPTS = 10
"""Ways to fail that are told with lines of a log; of the others, so many again with a line each:"""

_MOST_GROUPS = 200

_MOST_CLOSING = 10

_MOST_NAMED = 8
"""Numbers of jobs, those that follow on each other as one."""

_MOST_LINES = 4
"""Of the text of one error."""

_LAST_LINES = 5

_IN_A_PIPE = 200
"""Cells of a line of a log where there is no terminal, and nobody says how many there are."""

_WIDEST_OVERRIDES = 40
"""Of the first of several jobs."""

_FRAME = re.compile(r'(.*?File ")(.+)(", line \d+.*)')

_LONGEST_CAUSE = 1000
"""Characters, where it is one word."""

_LONGEST_VALUE = 200

_GAP = "  "

_NARROWEST = 8
"""Cells to which a column is cut before whole columns are left out."""


def width() -> int:
    """Columns of the terminal, or of COLUMNS; 80 where there is neither."""
    return _columns(80)


def width_of_logs() -> int:
    """The same for lines that are cut, and not broken: some more where there is no terminal."""
    return _columns(_IN_A_PIPE)


def _columns(otherwise: int) -> int:
    return max(40, shutil.get_terminal_size((otherwise, 24)).columns)


def headline(view: View, jobs: Sequence[Job]) -> str:
    """How many jobs ended how, how long it took, and how busy the slots were in that time."""
    counts = Counter(_status(view.jobs.get(job.num)) for job in jobs)
    text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    text += f" in {clock(view.at - (view.at if view.began is None else view.began))}"
    busy = view.busy(view.at)
    return text if busy is None else f"{text}, slots {100 * busy:.0f}% busy"


def result_table(view: View, jobs: Sequence[Job], width: int) -> list[str]:
    """A header, and a row per job: number, the overrides that differ, status, value or error, seconds, GPU and slot."""
    tried = any(job.known_tries and job.known_tries[-1].attempt > 1 for job in view.jobs.values())
    shown = jobs[:MOST_ROWS]
    keys, values = columns(jobs)
    about = [view.jobs.get(job.num) for job in shown]
    last = [job.known_tries[-1] if job is not None and job.known_tries else None for job in about]
    fixed: list[list[str]] = [["#", *(str(job.num) for job in shown)]]
    flexible = [[one_line(key), *(one_line(row.get(key, "")) for row in values[:MOST_ROWS])] for key in keys]
    more = [
        ["status", *map(_status, about)],
        ["value", *map(_value, about)],
        ["seconds", *(f"{job.seconds:.1f}" if job is not None and job.seconds is not None else "" for job in about)],
        ["gpu.slot", *(",".join(one.slots) if one is not None else "" for one in last)],
    ]
    if tried:
        more.append(["tries", *(str(one.attempt) if one is not None else "" for one in last)])
    lines = _fitted(fixed, flexible, more, width)
    if len(jobs) > len(shown):
        lines.append(f"{_GAP}and {len(jobs) - len(shown)} more, each a row of results.csv")
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


def failures(
    view: View,
    jobs: Sequence[Job],
    files: SweepFiles,
    where: Callable[[str], str],
    width: int,
    width_of_logs: int | None = None,
) -> list[str]:
    """The failed jobs, those together that failed alike: which, and why; where one of them did, and its log.

    None where there are none. ``width``: of the lines; ``width_of_logs``: of those of a log, where that is another one.
    Those of paths alone are never cut, and no frame of a traceback loses its file's name, line and function.
    """
    of_logs = width_of_logs or width
    groups = _alike(view, jobs)
    lines: list[str] = []
    for group in groups[:_MOST_EXCERPTS]:
        first, log = group[0], files.output(group[0].job.num)
        lines += _wrapped(cut(f"{cut(_named(group), max(width, 80))}: {_value(first)}", _LONGEST_CAUSE), width)
        lines.append(f"{_GAP * 2}{where(log)}")
        told = excerpt(last_lines(log), first, _LAST_LINES, without_error=True)
        lines += [f"{_GAP * 3}{_of_a_log(line, of_logs - 3 * len(_GAP))}" for line in told.lines]
    rest = groups[_MOST_EXCERPTS:]
    lines += [_in_a_line(group, "", of_logs) for group in rest[:_MOST_GROUPS]]
    if len(rest) > _MOST_GROUPS:
        lines.append(f"{_GAP}and {sum(map(len, rest[_MOST_GROUPS:]))} jobs more, each in a way of its own")
    if rest:
        lines += [f"{_GAP}the ends of their logs, and what else there is:", f"{_GAP * 2}{where(files.page)}"]
    return lines


def closing(view: View, jobs: Sequence[Job], files: SweepFiles, width: int) -> list[str]:
    """The same in few lines, each no wider than that: which, why, and the place in the user's code.

    What was cancelled comes after what failed.
    """
    lines = []
    groups = [*_alike(view, jobs), *_alike(view, jobs, {Status.CANCELLED.value})]
    for group in groups[:_MOST_CLOSING]:
        told = excerpt(last_lines(files.output(group[0].job.num)), group[0], _LAST_LINES)
        lines.append(_in_a_line(group, place_in(group, told.place), width))
    if len(groups) > _MOST_CLOSING:
        lines.append(f"{_GAP}and {sum(map(len, groups[_MOST_CLOSING:]))} more")
    return lines


def _alike(
    view: View, jobs: Sequence[Job], of: Set[str] = frozenset({Status.FAILED.value, LOST})
) -> list[list[JobView]]:
    about = [view.jobs.get(job.num) or JobView(job) for job in jobs]
    return alike(job for job in about if _status(job) in of)


def _named(group: Sequence[JobView]) -> str:
    """With its overrides where it is but one; of several, with the first one's, as far as they are short."""
    first = group[0].job
    if len(group) == 1:
        return one_line(str(first))
    overrides = cut(one_line(" ".join(first.overrides)), _WIDEST_OVERRIDES).removesuffix("…")
    return named(group, _MOST_NAMED) + (f" ({overrides.rstrip()} …)" if overrides else "")


def _in_a_line(group: Sequence[JobView], where: str, width: int) -> str:
    """Which, why, and where: each has its share of the line."""
    which, why = _named(group), _value(group[0])
    around = f"{_GAP}:  ()" if where else f"{_GAP}: "
    of_which, of_why, of_where = shares([*map(cells, (which, why, where))], width - cells(around))
    line = f"{_GAP}{cut(which, of_which)}: {cut(why, of_why)}"
    return f"{line} ({cut_left(where, of_where)})" if where else line


def _of_a_log(line: str, width: int) -> str:
    """A line of a log, cut; of a frame of a traceback only the path is, at its beginning."""
    frame = _FRAME.fullmatch(line)
    if frame is None or cells(line) <= width:
        return cut(line, width)
    before, path, after = frame.groups()
    least = cells(f"…/{path.rpartition('/')[2]}")
    return before + cut_left(path, max(least, width - cells(before + after))) + after


def _wrapped(text: str, width: int) -> list[str]:
    """In a few lines that are broken between words: a path in it can be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=_GAP,
        subsequent_indent=_GAP * 4,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=_MOST_LINES,
        placeholder=" …",
    )


def _status(job: JobView | None) -> str:
    """LOST: nobody was left to say what became of it. A job that was being stopped then is what it was stopped for."""
    if job is not None and job.state is State.STOPPING:
        return str(Status.FAILED if job.cause is Cause.TIMEOUT else Status.CANCELLED)
    return str(job.state) if job is not None and job.state.over else LOST


def _value(job: JobView | None) -> str:
    status = _status(job)
    if job is None or status == LOST:
        return "the supervisor was killed"
    if job.state is State.STOPPING:
        return one_line(job.stopping or "")
    return text(job.value) if job.state is State.COMPLETED else error(job)


def text(value: Any) -> str:
    """A job's value in one line, and not for pages."""
    return cut(value_text(value), _LONGEST_VALUE)
