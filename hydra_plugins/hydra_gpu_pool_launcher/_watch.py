"""``gpu-pool status``, to wherever stdout goes: once, or until the sweep is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import _descriptors, _inotify
from ._excerpt import excerpt
from ._files import SweepFiles
from ._outside import NoSweep, Standing, WatchedSweep, as_left, over, shown
from ._seen import JobView, State
from ._status import as_json, dumps, report
from ._table import Line, cut, overview
from ._tail import last_line, last_lines
from ._view import View

_IN_A_PIPE = 160
"""Columns, where nobody says how many there are."""

_REDRAW_S = 1.0  # clocks go on, and a network's file system tells of no change
_LEAST_S = 0.1  # between two looks, however much happens


def once(files: SweepFiles, *, json_wanted: bool, everything: bool) -> None:
    """Print it. Raises Refused where there is no sweep."""
    with contextlib.closing(WatchedSweep(files)) as sweep:
        _print(files, sweep, json_wanted, everything)


def _print(files: SweepFiles, sweep: WatchedSweep, json_wanted: bool, everything: bool) -> None:
    view, now = _settled(files, sweep), time.time()
    if json_wanted:
        print(dumps(as_json(files, view, sweep.standing, now)))
        return
    terminal = sys.stdout.isatty()
    width, height = shutil.get_terminal_size((_IN_A_PIPE, 0))
    height = height - 1 if terminal and not everything else 0  # a line for the prompt
    lines = report(files, view, sweep.standing, now, _last_line(files), width, height or None, _place(files)).lines()
    if terminal:
        from rich.console import Console

        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        for line in lines:
            console.print(_styled(line))
    else:
        for line in lines:
            print(line.text)


def _settled(files: SweepFiles, sweep: WatchedSweep) -> View:
    return as_left(files, sweep.view) if sweep.standing is Standing.KILLED else sweep.view


def _last_line(files: SweepFiles) -> Callable[[JobView], str]:
    return lambda job: last_line(files.output(job.job.num))


def _place(files: SweepFiles) -> Callable[[JobView], str | None]:
    return lambda job: excerpt(last_lines(files.output(job.job.num)), job, 1).place


def _styled(line: Line) -> Any:
    from rich.text import Text

    header = line.state is None and line.text.lstrip().startswith("#")
    styles = {State.FAILED: "red", State.STOPPING: "yellow", State.CANCELLED: "yellow"}
    return Text(line.text, style="dim" if header else styles.get(line.state, "") if line.state else "")


def watch(files: SweepFiles, *, json_wanted: bool, everything: bool) -> None:
    """Block until the sweep is over; it may begin later. On a terminal: a screen that moves, and then ``once``.

    Elsewhere a line for each change, what has changed last at its end, and then ``once``; with JSON, an object for each
    change and nothing else.
    """
    terminal = sys.stdout.isatty() and not json_wanted and os.environ.get("TERM", "dumb") != "dumb"
    sweep = _watch_screen(files) if terminal else _watch_lines(files, json_wanted)
    if not json_wanted and sweep is not None:
        _print(files, sweep, json_wanted, everything)


def _changes(files: SweepFiles) -> Iterator[WatchedSweep | None]:
    """The sweep, again and again: at once, when something happens in it, and each second. None: it is not there yet."""
    sweep: WatchedSweep | None = None
    reader_of_ours = _descriptors.pipe_behind(1)
    with _inotify.Changes() as changes, contextlib.ExitStack() as stack:
        while True:
            began = time.monotonic()
            changes.watch(files.root)
            if sweep is None:
                try:
                    sweep = stack.enter_context(contextlib.closing(WatchedSweep(files)))
                except NoSweep:
                    pass
            else:
                sweep.look()
            yield sweep
            if sweep is not None and over(sweep.standing):
                return
            others = [fd for fd in (reader_of_ours, sweep.supervisor if sweep else None) if fd is not None]
            ready = changes.wait(_REDRAW_S, *others)
            if reader_of_ours in ready:
                raise BrokenPipeError
            _descriptors.wait_readable([], began + _LEAST_S - time.monotonic())


def _watch_lines(files: SweepFiles, json_wanted: bool) -> WatchedSweep | None:
    before, said = None, False
    sweep = None
    for sweep in _changes(files):
        if sweep is None:
            if not said and not json_wanted:
                print(_waiting(files), flush=True)
            said = True
            continue
        now, view = time.time(), _settled(files, sweep)
        state = (sweep.standing, {num: (job.state, len(job.tries)) for num, job in view.jobs.items()})
        if state != before:
            before = state
            if json_wanted:
                print(dumps(as_json(files, view, sweep.standing, now)), flush=True)
            else:
                print(overview(view, now, "", 10_000)[0].text.strip(), flush=True)
    return sweep


def _watch_screen(files: SweepFiles) -> WatchedSweep | None:
    from rich.console import Console, Group

    console = Console(highlight=False, markup=False, emoji=False)
    sweep = None
    # Else it would leave the terminal on this screen, without a cursor.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with console.screen() as screen:
        for sweep in _changes(files):
            width, height = console.size
            if sweep is None:
                lines = [Line(cut(_waiting(files), width))]
            else:
                view = _settled(files, sweep)
                lines = report(
                    files, view, sweep.standing, time.time(), _last_line(files), width, height, _place(files)
                ).lines()
            screen.update(Group(*map(_styled, lines[:height])))
    return sweep


def _waiting(files: SweepFiles) -> str:
    return f"waiting for a sweep in {shown(files.sweep_dir)}"
