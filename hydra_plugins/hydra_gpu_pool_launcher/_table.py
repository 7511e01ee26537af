"""A sweep in lines of text: how far it is, and a row for each job that matters now. Pure; for any width and height."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._results import error_line
from ._seen import JobView, State
from ._tail import one_line
from ._view import View, columns

_WIDEST_OVERRIDE = 16
_LEAST_LAST_LINE = 24
"""Cells that are left for the last line, before overrides are left out for it."""

_GAP = "  "


@dataclass(frozen=True)
class Line:
    """One line, no wider than asked for. ``state``: of the job that it is about; None: of none."""

    text: str
    state: State | None = None


def overview(view: View, now: float, where: str, width: int) -> list[Line]:
    """Where the sweep is, how many jobs are where, how long it has taken and will take: one line, or two."""
    count = view.count()
    names = {
        "done": count[State.COMPLETED],
        "running": count[State.RUNNING] + count[State.STOPPING],
        "failed": count[State.FAILED],
        "cancelled": count[State.CANCELLED],
        "queued": count[State.QUEUED],
    }
    counts = _GAP.join(f"{number} {name}" for name, number in names.items() if number or name in {"done", "running"})
    time = clock(view.took_s(now))
    left = None if view.done else view.left_s(now)
    if left is not None:
        time += f", ends in about {clock(max(1.0, left))}"
    slots = len(view.slots())
    if slots and not view.done:
        counts += f"    {sum(len(job.tries[-1].slots) for job in view.running())} of {slots} slots busy"
    one = f"{where}    {counts}    {time}"
    if cells(one) <= width:
        return [Line(one)]
    room = width - 4 - cells(time)
    return [Line(cut(f"{cut_left(where, max(room, 8))}    {time}", width)), Line(cut(counts, width))]


def rows(
    view: View, now: float, last_line: Callable[[JobView], str], width: int, height: int | None = None
) -> list[Line]:
    """A header and a row per job: those that run, the longest first, then those that failed, the newest first.

    ``height``: lines at most, where there are more jobs than that; a last one says how many are not shown.
    """
    running = view.running()
    failed = sorted(
        (job for job in view.jobs.values() if job.state is State.FAILED),
        key=lambda job: job.tries[-1].ended or 0.0 if job.tries else 0.0,
        reverse=True,
    )
    wanted = [*running, *failed]
    if not wanted:
        return []
    room = len(wanted) if height is None else max(1, height - 1)
    shown = wanted if len(wanted) <= room else wanted[: max(1, room - 1)]
    lines = _aligned(view, shown, now, last_line, width)
    if len(shown) < len(wanted):
        more_running = len(running) - min(len(shown), len(running))
        more = [f"{more_running} running"] if more_running else []
        more_failed = len(wanted) - len(shown) - more_running
        more += [f"{more_failed} failed"] if more_failed else []
        lines.append(Line(cut(f"{_GAP}and {' and '.join(more)} more", width)))
    return lines


def _aligned(
    view: View, jobs: Sequence[JobView], now: float, last_line: Callable[[JobView], str], width: int
) -> list[Line]:
    keys, values = columns([job.job for job in view.in_order()])
    by_number = dict(zip((job.job.num for job in view.in_order()), values, strict=True))
    memory = [gb(job.tries[-1].gpu_mb) if job.tries else "" for job in jobs]
    shown = ["gpu GB"] if any(memory) else []
    fixed = [["#", "gpu", "pid", "for", *shown]]
    for job, held in zip(jobs, memory, strict=True):
        last = job.tries[-1] if job.tries else None
        slots, pid = (one_line(",".join(last.slots)), str(last.pid)) if last is not None else ("", "")
        row = [str(job.job.num), slots, pid, short(last.seconds(now)) if last is not None else ""]
        fixed.append([*row, held] if shown else row)
    overrides = [
        [cut(one_line(key), _WIDEST_OVERRIDE)]
        + [cut(one_line(by_number[job.job.num].get(key, "")), _WIDEST_OVERRIDE) for job in jobs]
        for key in keys
    ]
    widths = [max(cells(row[i]) for row in fixed) for i in range(len(fixed[0]))]
    left = width - sum(widths) - len(widths) * len(_GAP) - len(_GAP)
    kept: list[tuple[list[str], int]] = []
    for column in overrides:
        wide = max(map(cells, column))
        if left - wide - len(_GAP) < _LEAST_LAST_LINE:
            break
        left -= wide + len(_GAP)
        kept.append((column, wide))
    lines = []
    for i, row in enumerate(fixed):
        about = jobs[i - 1] if i else None
        parts = [
            row[0].rjust(widths[0]),
            row[1].ljust(widths[1]),
            row[2].rjust(widths[2]),
            *(cell.rjust(wide) for cell, wide in zip(row[3:], widths[3:], strict=True)),
            *(pad(column[i], wide) for column, wide in kept),
            "last line" if about is None else _what(about, last_line),
        ]
        lines.append(Line(cut(_GAP + _GAP.join(parts), width).rstrip(), None if about is None else about.state))
    return lines


def _what(job: JobView, last_line: Callable[[JobView], str]) -> str:
    if job.state is State.STOPPING:
        return f"stopping: {one_line(job.stopping or '')}"
    return f"FAILED: {error(job)}" if job.state is State.FAILED else last_line(job)


def error(job: JobView) -> str:
    """Why it failed, in one line."""
    return error_of(job.error_type, job.error_text)


def error_of(error_type: str | None, error_text: str | None) -> str:
    """The same of an error alone, without control characters."""
    return one_line(error_line(error_type, error_text))


def value_text(value: Any) -> str:
    """What a job returned, in one line, with floats as a person reads them: the whole of them is in the journal."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return _GAP.join(f"{one_line(str(key))} {value_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value))


def gb(mb: float | None) -> str:
    """Of GPU memory, in GB."""
    return "" if mb is None else f"{mb / 1000:.1f}"


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """Of so many cells, those of each part: what it wants, the longest parts cut first, so that none is lost."""
    given = list(wanted)
    while sum(given) > room and max(given) > 1:
        given[given.index(max(given))] -= 1
    return given


def with_place(what: str, place: str | None, width: int) -> str:
    """What went wrong and where, no wider than that: each has its share; of the place the end stays, its line."""
    if not place:
        return cut(what, width)
    of_what, of_place = shares([cells(what), cells(place)], width - cells(" ()"))
    return cut(f"{cut(what, of_what)} ({cut_left(place, of_place)})", width)


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: 0:03:12."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def short(seconds: float) -> str:
    """Without hours where there are none: 1:12."""
    return clock(seconds) if seconds >= 3600 else clock(seconds)[2:].removeprefix("0")


def cells(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.replace("…", ".").isascii():  # as most is: rich is not even imported then
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad(text: str, width: int) -> str:
    """The text with blanks after it, so many columns wide."""
    return text + " " * (width - cells(text))


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis, no wider than that."""
    if cells(text) <= width:
        return text
    if text.isascii():
        return text[: max(0, width - 1)] + "…"
    from rich.cells import set_cell_size

    return set_cell_size(text, max(0, width - 1)) + "…"


def cut_left(text: str, width: int) -> str:
    """The text, or an ellipsis and its end."""
    while cells(text) > width:
        text = "…" + text.removeprefix("…")[1:]
    return text
