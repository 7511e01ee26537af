"""What a person sees of a sweep: lines, a table that moves, what jobs print. In main, from the journal's events."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from . import _summary
from ._events import CANCELLED_BY_HAND
from ._files import SweepFiles
from ._last_words import at_exit
from ._live import REFRESH_S, Live, terminal
from ._model import Cause, Job, Layout, Settings, Status
from ._printing import Streams, put
from ._report import Reports
from ._table import error_of
from ._tail import one_line, plain
from ._tee import Tee
from ._view import View

_log = logging.getLogger("gpu_pool")


def say(text: str, level: int = logging.INFO) -> None:
    """One line for a person: through logging, where Hydra or the app has set it up, so that it says how lines look.

    Where nobody has, as in plain Python, logging would swallow it: then on stderr. Whatever an app has put into the
    text, no control character is left in it. A stream or a handler that cannot take it loses the line, and no more;
    the first fault of a kind is told by its traceback, where stderr takes that.
    """
    text = plain(text).encode(errors="replace").decode()
    try:
        if _log.hasHandlers():
            _log.log(level, "%s", text)
        else:
            put(sys.stderr, f"{text}\n")
    except (Exception, SystemExit) as error:
        _tell_of_fault(error)


_told: set[type[BaseException]] = set()
"""Kinds of faults whose traceback somebody has seen."""


def _tell_of_fault(error: BaseException) -> None:
    """Of the display: it is no reason to end a sweep. What a signal handler has raised is none, and raised again.

    SystemExit is among the faults: rich's handler raises it when its pipe is closed.
    """
    if _of_a_signal_handler(error):
        raise error
    if type(error) not in _told:
        _told.add(type(error))
        with contextlib.suppress(Exception, SystemExit):  # what is broken may be stderr itself
            traceback.print_exception(error)


class Display(Protocol):
    """What shows a launch, in this order: its beginning, the journal's events, and a summary, also after a Ctrl-C.

    Nothing but ``close`` and ``deliver`` waits for whoever reads it.
    """

    def begin(self, layout: Layout) -> None:
        """The supervisor has begun the launch."""

    def show(self, event: dict[str, Any]) -> None:
        """One event of the journal."""

    def tick(self) -> float | None:
        """Show what changes without an event; in how many seconds to call this again, None: there is no need."""

    def stuck(self) -> list[int]:
        """Descriptors that take nothing now, though there is more: when one does, ``tick`` is to be called."""

    def close(self) -> None:
        """Leave the terminal as it was: nothing more will happen, or nobody is there to show it."""

    def summary(self) -> None:
        """All that was to happen has: what is written to files of it is whole."""

    def deliver(self, patience_s: float | None = None) -> None:
        """Say what became of it, after all that is not said yet; block until that is read, so many seconds at most."""


def display(
    settings: Settings, jobs: Sequence[Job], files: SweepFiles, view: View | None = None, again: str | None = None
) -> Display:
    """The display that the keys ``progress`` and ``output`` ask for; to be made before the launch.

    ``view``: of the sweep's earlier launches, which the table goes on with. ``again``: the command that goes on with a
    sweep of which something has not completed.
    """
    stream = terminal(settings.progress)
    streams = Streams()
    live = Live(stream, files, from_here(files.sweep_dir), view or View(), streams) if stream is not None else None
    lines = Lines(jobs, files, settings, again, brief=live is not None) if settings.progress != "none" else None
    shown = Shown(lines, live, Tee(jobs, files) if settings.output == "tee" else None, streams)
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

    def stuck(self) -> list[int]:
        return [fd for display in self.displays for fd in display.stuck()]

    def close(self) -> None:
        for display in self.displays:
            display.close()

    def summary(self) -> None:
        for display in self.displays:
            display.summary()

    def deliver(self, patience_s: float | None = None) -> None:
        for display in self.displays:
            display.deliver(patience_s)


T = TypeVar("T")


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

    def stuck(self) -> list[int]:
        return self._try(lambda: self.display.stuck()) or []

    def close(self) -> None:
        self._try(lambda: self.display.close())

    def summary(self) -> None:
        self._try(lambda: self.display.summary())

    def deliver(self, patience_s: float | None = None) -> None:
        self._try(lambda: self.display.deliver(patience_s))

    def _try(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except (Exception, SystemExit) as error:
            _tell_of_fault(error)
            broken, self.display = self.display, Shown(None, None, None)
            with contextlib.suppress(Exception, SystemExit):
                broken.close()
            return None


def _of_a_signal_handler(error: BaseException) -> bool:
    handlers = [handler for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)]
    codes = {getattr(getattr(handler, "__call__", None), "__code__", None) for handler in handlers}  # noqa: B004
    codes |= {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


_CLOSING_S = 2.0
"""For a terminal to take what is left, when whoever waits for the launch has something else to do."""


@dataclass
class Shown:
    """What there is of lines, table and jobs' output, in step: a job's output stands before the line of its end.

    Where one of the three fails, the others go on. While a stream takes nothing, events wait to be told, and the logs
    to be read; the table is the newest when it is drawn again.
    """

    lines: Lines | None
    live: Live | None
    tee: Tee | None
    streams: Streams = field(default_factory=Streams)
    _later: deque[dict[str, Any]] = field(default_factory=deque)

    def begin(self, layout: Layout) -> None:
        if any((self.lines, self.live, self.tee)):
            self.streams.begin()
        if self._try("live", lambda live: live.begin()) is False:
            self._without_table()
        self._try("lines", lambda lines: lines.begin(layout))

    def show(self, event: dict[str, Any]) -> None:
        self._try("live", lambda live: live.take(event))
        self._later.append(event)
        self._catch_up()

    def tick(self) -> float | None:
        if not self._catch_up():
            return None
        self._try("tee", lambda tee: tee.poll())
        wait: float | None = self._try("live", lambda live: live.tick())
        return REFRESH_S if wait is None and self.tee is not None else wait

    def stuck(self) -> list[int]:
        return self.streams.stuck

    def close(self) -> None:
        try:
            self._try("live", lambda live: live.close())
        finally:
            self.streams.release(time.monotonic() + _CLOSING_S)

    def summary(self) -> None:
        """There are no files of it."""

    def deliver(self, patience_s: float | None = None) -> None:
        deadline = None if patience_s is None else time.monotonic() + patience_s
        try:
            self._try("live", lambda live: live.close())
            while (taken := self.streams.wait(deadline)) and self._later:
                self._tell(self._later.popleft())
            if taken:
                self._try("tee", lambda tee: tee.close())
                self._try("lines", lambda lines: lines.summary())
                self.streams.release(deadline)
        finally:
            self.streams.release()

    def _catch_up(self) -> bool:
        """Tell of what has happened, as far as it is taken now; True: of all."""
        while not (stuck := self.streams.stuck) and self._later:
            self._tell(self._later.popleft())
        return not stuck

    def _tell(self, event: dict[str, Any]) -> None:
        ended = event["event"] in {"retry", "end"} and event["attempt"]
        if ended:
            self._try("tee", lambda tee: tee.ended(event["job"]))
        self._try("lines", lambda lines: lines.show(event))
        if event["event"] == "start":
            self._try("tee", lambda tee: tee.started(event["job"]))

    def _try(self, part: Literal["lines", "live", "tee"], step: Callable[[Any], Any]) -> Any:
        one = getattr(self, part)
        try:
            return None if one is None else step(one)
        except (Exception, SystemExit) as error:
            _tell_of_fault(error)
            setattr(self, part, None)
            if part == "live":
                with contextlib.suppress(Exception, SystemExit):
                    one.close()
                self._without_table()
            return None

    def _without_table(self) -> None:
        self.live = None
        if self.lines is not None:
            self.lines.brief = False  # what it showed, or would show, is told from here on


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
    _late: set[int] = field(default_factory=set)
    _stopping: str | None = None  # why all jobs are stopped
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
        elif event["event"] == "start":
            again = f", try {event['attempt']}" if event["attempt"] > 1 else ""
            job, slots = self._by_number[event["job"]], ",".join(event["slots"])
            if not self.brief:
                say(f"{job} started in slot {slots}, pid {event['pid']}{again}")
        elif event["event"] == "waiting":
            say(one_line(event["why"]), logging.WARNING)
        elif event["event"] == "stop":
            self._stops(event)
        elif event["event"] == "retry":
            job, num = self._by_number[event["job"]], event["attempt"]
            say(
                f"{job} FAILED, try {num}, and has another: {error_of(event['error_type'], event['error_text'])}",
                logging.WARNING,
            )
        elif event["event"] == "end" and (event["attempt"] or _is_by_hand(event["error_text"])):
            self._ended(event)

    def _stops(self, event: dict[str, Any]) -> None:
        """One line for a job that is stopped alone, and one for all that are stopped together."""
        if event["cause"] == Cause.TIMEOUT.value or event["why"] == CANCELLED_BY_HAND:
            late = event["cause"] == Cause.TIMEOUT.value
            job, why = self._by_number[event["job"]], one_line(event["why"])
            kills = f"SIGTERM is sent, SIGKILL {self.settings.kill_grace_s:g} s later to what is left of it"
            log = f"; see {from_here(self.files.output(event['job']))}" if late else ""
            say(f"{job}{'' if late else ':'} {why}: {kills}{log}", logging.WARNING)
            if late:
                self._late.add(event["job"])
        elif self._stopping is None:
            self._stopping = event["why"]
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
        why = error_of(event["error_type"], event["error_text"])
        if event["status"] == Status.COMPLETED.value:
            if not self.brief:
                say(": ".join(filter(None, [job, _summary.text(event["value"])])))
        elif event["cause"] == Cause.TIMEOUT.value and event["job"] in self._late:
            pass  # the line of its stop has said so
        elif not event["attempt"]:
            say(f"{job}: {why}", logging.WARNING)
        elif not (self.brief and self._is_of_the_stop(event)):
            gap = "\n  " if self.brief else "; "  # as one line, it would be broken in the middle of the path
            say(f"{job}: {why}{gap}see {from_here(self.files.output(event['job']))}", logging.ERROR)

    def _is_of_the_stop(self, event: dict[str, Any]) -> bool:
        """True of a job that was cancelled with all others, of which there has been one line."""
        why = event["error_text"] or ""
        return event["status"] == Status.CANCELLED.value and self._stopping is not None and self._stopping in why

    def summary(self) -> None:
        """What became of the jobs, why the failed ones did, and how to go on; after an interrupt, no more than that."""
        unstarted = [
            job
            for job in self._view.in_order()
            if job.state.over
            and not job.tries
            and job.cause is not Cause.RESUMED
            and job.job.num in self._by_number
            and not _is_by_hand(job.error_text)
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
                say("\n".join(["what failed, and where:", *failed]), logging.ERROR)
        last_words = []
        if self.again is not None and not all(self._is(job, Status.COMPLETED) for job in self.jobs):
            resume = f"to run only what has not completed:\n{self.again}"
            say(resume)
            # Hydra goes on to raise what the first failed job did: that would be all that is on the screen.
            told = _summary.closing(self._view, self.jobs, self.files, _summary.width())
            last_words = [*(["\n".join([f"{headline}:", *told])] if told else []), resume]
        at_exit(last_words, say)

    def _is(self, job: Job, status: Status) -> bool:
        return job.num in self._view.jobs and self._view.jobs[job.num].state == status.value


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _is_by_hand(error_text: str | None) -> bool:
    return CANCELLED_BY_HAND in (error_text or "")


def from_here(path: str) -> str:
    """The path as it is shortest to type."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
