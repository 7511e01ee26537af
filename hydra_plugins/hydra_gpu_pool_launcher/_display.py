"""What a person sees of a sweep: lines, a table that moves, what jobs print. In main, from the journal's events."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import _summary
from ._events import CANCELLED_BY_HAND
from ._files import SweepFiles
from ._live import REFRESH_S, Live, terminal
from ._model import Cause, Job, Layout, Settings, Status
from ._report import Reports
from ._table import cut, error_of
from ._tail import one_line, plain
from ._tee import Tee
from ._view import View

_log = logging.getLogger("gpu_pool")

_LONGEST_ERROR = 1000


def say(text: str, level: int = logging.INFO) -> None:
    """One line for a person: through logging, where Hydra or the app has set it up, so that it says how lines look.

    Where nobody has, as in plain Python, logging would swallow it: then on stderr. Whatever an app has put into the
    text, no control character is left in it.
    """
    text = plain(text).encode(errors="replace").decode()
    if _log.hasHandlers():
        _log.log(level, "%s", text)
    else:
        with contextlib.suppress(OSError, ValueError):  # stderr was closed
            print(text, file=sys.stderr)


class Display(Protocol):
    """What shows a launch, in this order: its beginning, the journal's events, and a summary, also after a Ctrl-C."""

    def begin(self, layout: Layout) -> None:
        """The supervisor has begun the launch."""

    def show(self, event: dict[str, Any]) -> None:
        """One event of the journal."""

    def tick(self) -> float | None:
        """Show what changes without an event; in how many seconds to call this again, None: there is no need."""

    def close(self) -> None:
        """Leave the terminal as it was: nothing more will happen, or nobody is there to show it."""

    def summary(self) -> None:
        """All that was to happen has: say what became of it."""


def display(
    settings: Settings, jobs: Sequence[Job], files: SweepFiles, view: View | None = None, again: str | None = None
) -> Display:
    """The display that the keys ``progress`` and ``output`` ask for; to be made before the launch.

    ``view``: of the sweep's earlier launches, which the table goes on with. ``again``: the command that goes on with a
    sweep of which something has not completed.
    """
    stream = terminal(settings.progress)
    live = Live(stream, files, from_here(files.sweep_dir), view or View()) if stream is not None else None
    lines = Lines(jobs, files, settings, again, brief=live is not None) if settings.progress != "none" else None
    shown = Shown(lines, live, Tee(jobs, files) if settings.output == "tee" else None)
    return Each((Guarded(Reports(files, say)), Guarded(shown)))


@dataclass(frozen=True)
class Each:
    """Several displays, in this order: where one fails, the others go on."""

    displays: tuple[Guarded, ...]

    def begin(self, layout: Layout) -> None:
        for display in self.displays:
            display.begin(layout)

    def show(self, event: dict[str, Any]) -> None:
        for display in self.displays:
            display.show(event)

    def tick(self) -> float | None:
        waits = [display.tick() for display in self.displays]
        return min((wait for wait in waits if wait is not None), default=None)

    def close(self) -> None:
        for display in self.displays:
            display.close()

    def summary(self) -> None:
        for display in self.displays:
            display.summary()


@dataclass
class Guarded:
    """A display whose faults, or those of a logging handler of the app, do not end the sweep, but itself.

    What a signal handler of the app raises is no such fault: it is meant for whoever waits for the launch.
    """

    display: Display

    def begin(self, layout: Layout) -> None:
        self._try(lambda: self.display.begin(layout))

    def show(self, event: dict[str, Any]) -> None:
        self._try(lambda: self.display.show(event))

    def tick(self) -> float | None:
        return self._try(lambda: self.display.tick())

    def close(self) -> None:
        self._try(lambda: self.display.close())

    def summary(self) -> None:
        self._try(lambda: self.display.summary())

    def _try(self, step: Callable[[], float | None]) -> float | None:
        try:
            return step()
        except (Exception, SystemExit) as error:  # SystemExit: rich's handler, when its pipe is closed
            if _of_a_signal_handler(error):
                raise
            broken, self.display = self.display, Shown(None, None, None)
            with contextlib.suppress(Exception, SystemExit):
                broken.close()
            with contextlib.suppress(Exception):  # what has broken the display may be stderr itself
                traceback.print_exc()
            return None


def _of_a_signal_handler(error: BaseException) -> bool:
    handlers = [handler for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)]
    codes = {getattr(getattr(handler, "__call__", None), "__code__", None) for handler in handlers}  # noqa: B004
    codes |= {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass
class Shown:
    """What there is of lines, table and jobs' output, in step: a job's output stands before the line of its end."""

    lines: Lines | None
    live: Live | None
    tee: Tee | None

    def begin(self, layout: Layout) -> None:
        if self.live is not None:
            self.live.begin()
        if self.lines is not None:
            self.lines.begin(layout)

    def show(self, event: dict[str, Any]) -> None:
        if self.live is not None:
            self.live.take(event)
        if self.tee is not None and event["event"] in {"retry", "end"} and event["attempt"]:
            self.tee.ended(event["job"])
        if self.lines is not None:
            self.lines.show(event)
        if self.tee is not None and event["event"] == "start":
            self.tee.started(event["job"])

    def tick(self) -> float | None:
        if self.tee is not None:
            self.tee.poll()
        if self.live is not None:
            return self.live.tick()
        return REFRESH_S if self.tee is not None else None

    def close(self) -> None:
        if self.live is not None:
            self.live.close()

    def summary(self) -> None:
        self.close()
        if self.tee is not None:
            self.tee.close()
        if self.lines is not None:
            self.lines.summary()


@dataclass
class Lines:
    """``progress: log``: a line per event. ``brief``: none for what a table shows, starts and good ends."""

    jobs: Sequence[Job]
    files: SweepFiles
    settings: Settings
    again: str | None
    brief: bool
    _by_number: dict[int, str] = field(init=False)
    _view: View = field(default_factory=View)
    _stopping: bool = False
    _interrupted: bool = False

    def __post_init__(self) -> None:
        self._by_number = {job.num: one_line(str(job)) for job in self.jobs}

    def begin(self, layout: Layout) -> None:
        """What is about to run where. That these lines are not there tells that another launcher was chosen."""
        labels = [device.label for device in layout.devices]
        gpus = ("GPU " if labels[0].isdigit() else "") + ", ".join(labels)  # a name has the word in itself
        where = "CPU slots" if layout.on_cpu else gpus
        say(f"gpu_pool: {_count(len(self.jobs), 'job')}, {layout.jobs_at_once} at once, on {where}")
        say(f"what a job prints goes to {from_here(self.files.output('NUMBER'))}")
        if self.settings.progress == "live" and not self.brief:
            why = "neither stdout nor stderr is a terminal on which a table can be drawn"
            say(f"{self.settings.prefix}progress=live: {why}; a line per event, as with log")

    def show(self, event: dict[str, Any]) -> None:
        """One event of the journal: about a job, its number and overrides, what it does, where and why, and its log."""
        self._view.take([event])
        if event["event"] == "resumed":
            self._resumed(event)
        elif event["event"] == "moved_aside":
            self._moved_aside(event)
        elif event["event"] == "waiting":
            say(one_line(event["why"]), logging.WARNING)
        elif event["event"] == "start":
            again = f", try {event['attempt']}" if event["attempt"] > 1 else ""
            job, slots = self._by_number[event["job"]], ",".join(event["slots"])
            if not self.brief:
                say(f"{job} started in slot {slots}, pid {event['pid']}{again}")
        elif event["event"] == "stop":
            self._stops(event)
        elif event["event"] == "retry":
            job, num = self._by_number[event["job"]], event["attempt"]
            say(f"{job} FAILED, try {num}, and has another: {_error(event)}", logging.WARNING)
        elif event["event"] == "end" and event["attempt"]:
            self._ended(event)

    def _stops(self, event: dict[str, Any]) -> None:
        """One line for a job that is stopped alone, and one for all that are stopped together."""
        if event["cause"] == Cause.TIMEOUT.value or event["why"] == CANCELLED_BY_HAND:
            job = self._by_number[event["job"]]
            say(
                f"{job}{':' if event['why'] == CANCELLED_BY_HAND else ''} {one_line(event['why'])}: stopping it, "
                f"killed in {self.settings.kill_grace_s:g} s",
                logging.WARNING,
            )
        elif not self._stopping:
            self._stopping = True
            left = _count(len(self._view.running()), "job")
            grace = f"{self.settings.kill_grace_s:g} s"
            say(f"{one_line(event['why'])}: stopping {left}, killed in {grace}", logging.WARNING)
            if "the main process" in event["why"]:  # which counts the signals that it gets
                self._interrupted = True
                say("a second Ctrl-C, or any further such signal, kills now", logging.WARNING)

    def _resumed(self, event: dict[str, Any]) -> None:
        """Nothing in a later batch whose numbers no earlier sweep had: it is as if nobody had asked."""
        moved, left, kept = event["moved"], event["left"], event["kept"]
        done = f"{kept} of {_count(len(self.jobs), 'job')} had completed and {'is' if kept == 1 else 'are'} "
        done += "not run again"
        if event["back"]:
            done += f", {event['back']} of them brought back from where an earlier resume had moved them"
        if moved:
            done += f"; {_count(len(moved), 'earlier job')} had other overrides, now in {self._names(moved)}"
        if left:
            done += f"; not moved, since it is not such a job's alone: {self._names(left)}"
        if event["elsewhere"]:
            count, name = event["elsewhere"]
            had = f"{count} of {_count(len(self.jobs), 'job')} had completed in an earlier sweep that was moved aside"
            say(f"resume: {had}: {self._put_back(name)}", logging.WARNING)
        if event["empty"]:
            where = from_here(self.files.sweep_dir)
            say(f"resume: no earlier sweep was found in {where} (hydra.sweep.dir), so every job is run")
        elif event["known"]:
            say(f"resume: {done}")

    def _moved_aside(self, event: dict[str, Any]) -> None:
        count, name = event["completed"], event["to"]
        where = from_here(os.path.join(self.files.sweep_dir, name))
        if not self.settings.prefix:  # one map after the other, as usual; and there is no resume
            say(f"the files of the map before are now in {where}")
            return
        had = f"{count} of {_count(event['jobs'], 'job')} had completed"
        text = f"this is a new sweep; of the earlier one in this directory, {had}, and its files are now in {where}"
        if count:
            text += f" (resume=true keeps what had completed: {self._put_back(name)})"
        say(text, logging.WARNING if count else logging.INFO)

    def _put_back(self, name: str) -> str:
        """What to do for a sweep that was moved aside to this name, to go on with it after all."""
        there, here = (from_here(os.path.join(self.files.sweep_dir, each)) for each in (name, self.files.name))
        return f"to go on with that one, end this one, rename {here} to {here}.new, {there} to {here}, and resume"

    def _names(self, directories: Sequence[str]) -> str:
        """Paths of the sweep directory, as many of them as a line can take."""
        shown = ", ".join(from_here(os.path.join(self.files.sweep_dir, name)) for name in directories[:4])
        return shown if len(directories) <= 4 else f"{shown} and {len(directories) - 4} more"

    def _ended(self, event: dict[str, Any]) -> None:
        job = f"{self._by_number[event['job']]} {event['status']}"
        if event["status"] == Status.COMPLETED.value:
            if not self.brief:
                say(": ".join(filter(None, [job, _summary.text(event["value"])])))
        elif not (self.brief and self._stopping and event["status"] == Status.CANCELLED.value):
            say(f"{job}: {_error(event)}; see {from_here(self.files.output(event['job']))}", logging.ERROR)

    def summary(self) -> None:
        """What became of the jobs, why the failed ones did, and how to go on; after an interrupt, no more than that."""
        unstarted = [
            job
            for job in self._view.in_order()
            if job.state.over and not job.tries and job.cause is not Cause.RESUMED and job.job.num in self._by_number
        ]
        if unstarted:
            why = error_of(unstarted[0].error_type, unstarted[0].error_text).removesuffix("; it was not started")
            say(f"not started: {_count(len(unstarted), 'queued job')}: {why}", logging.ERROR)
        headline = _summary.headline(self._view, self.jobs)
        if self._interrupted:
            cancelled = [str(job.num) for job in self.jobs if self._is(job, Status.CANCELLED)]
            say(f"{headline}; cancelled: {', '.join(cancelled[:20])}{', …' if len(cancelled) > 20 else ''}")
        else:
            width = _summary.width()
            say("\n".join([f"{headline}:", *_summary.result_table(self._view, self.jobs, width)]))
            failed = _summary.failures(self._view, self.jobs, self.files, from_here, width)
            if failed:
                say("\n".join(["what failed, and the last that it printed:", *failed]), logging.ERROR)
        if self.again is not None and not all(self._is(job, Status.COMPLETED) for job in self.jobs):
            say(f"to run only what has not completed:\n  {self.again}")

    def _is(self, job: Job, status: Status) -> bool:
        return job.num in self._view.jobs and self._view.jobs[job.num].state == status.value


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _error(event: dict[str, Any]) -> str:
    return cut(error_of(event.get("error_type"), event.get("error_text")), _LONGEST_ERROR)


def from_here(path: str) -> str:
    """The path as it is shortest to type."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
