"""What a person sees of a sweep: a line per event, a table at the end. In main, from the journal's events alone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ._files import SweepFiles
from ._model import JOB_ERRORS, Cause, Job, Layout, Settings, Status
from ._view import differing_overrides

_log = logging.getLogger("gpu_pool")

_WIDEST = 28
"""Characters of a value or an error in the table, so that a row of a small sweep fits into 80 columns."""


def say(text: str, level: int = logging.INFO) -> None:
    """One line for a person: through logging, where Hydra or the app has set it up, so that it says how lines look.

    Where nobody has, as in plain Python, logging would swallow it: then on stderr.
    """
    if _log.hasHandlers():
        _log.log(level, "%s", text)
    else:
        with contextlib.suppress(OSError, ValueError):  # stderr was closed
            print(text, file=sys.stderr)


class Display(Protocol):
    """What shows a launch, in this order: its beginning, the journal's events, and a summary, also after a Ctrl-C."""

    def begin(self, layout: Layout) -> None: ...

    def show(self, event: dict[str, Any]) -> None: ...

    def summary(self) -> None: ...


def display(settings: Settings, jobs: Sequence[Job], files: SweepFiles) -> Display:
    """The display that the key ``progress`` asks for."""
    return Silence() if settings.progress == "none" else Guarded(Lines(jobs, files, settings))


@dataclass
class Guarded:
    """A display whose faults, or those of a logging handler of the app, do not end the sweep, but itself."""

    display: Display

    def begin(self, layout: Layout) -> None:
        self._try(lambda: self.display.begin(layout))

    def show(self, event: dict[str, Any]) -> None:
        self._try(lambda: self.display.show(event))

    def summary(self) -> None:
        self._try(self.display.summary)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (Exception, SystemExit):  # SystemExit: rich's handler, when its pipe is closed
            self.display = Silence()
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc()


class Silence:
    """``progress: none``."""

    def begin(self, layout: Layout) -> None:
        pass

    def show(self, event: dict[str, Any]) -> None:
        pass

    def summary(self) -> None:
        pass


@dataclass
class Lines:
    """``progress: log``."""

    jobs: Sequence[Job]
    files: SweepFiles
    settings: Settings
    _by_number: dict[int, Job] = field(init=False)
    _slots: dict[int, str] = field(default_factory=dict)
    _ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self._by_number = {job.num: job for job in self.jobs}

    def begin(self, layout: Layout) -> None:
        """What is about to run where. That these lines are not there tells that another launcher was chosen."""
        labels = [device.label for device in layout.devices]
        gpus = ("GPU " if labels[0].isdigit() else "") + ", ".join(labels)  # a name has the word in itself
        where = "CPU slots" if layout.on_cpu else gpus
        say(f"gpu_pool: {_count(len(self.jobs), 'job')}, {layout.jobs_at_once} at once, on {where}")
        say(f"what a job prints goes to {_from_here(self.files.output('NUMBER'))}")

    def show(self, event: dict[str, Any]) -> None:
        """One event of the journal."""
        if event["event"] == "resumed":
            self._resumed(event)
        elif event["event"] == "moved_aside":
            self._moved_aside(event)
        elif event["event"] == "start":
            num = event["job"]
            self._slots[num] = ",".join(event["slots"])
            again = f", try {event['attempt']}" if event["attempt"] > 1 else ""
            say(f"{self._by_number[num]} started in slot {self._slots[num]}, pid {event['pid']}{again}")
        elif event["event"] == "stop":
            self._stops(event)
        elif event["event"] == "retry":
            job, num = self._by_number[event["job"]], event["attempt"]
            say(f"{job} FAILED, try {num}, and has another: {_error(event)}", logging.WARNING)
        elif event["event"] == "end":
            self._ends[event["job"]] = event
            if event["attempt"]:
                self._ended(event)

    def _stops(self, event: dict[str, Any]) -> None:
        """One line for a job that is stopped alone, and one for all that are stopped together."""
        if event["cause"] == Cause.TIMEOUT.value:
            job = self._by_number[event["job"]]
            say(f"{job} {event['why']}: stopping it, killed in {self.settings.kill_grace_s:g} s", logging.WARNING)
        elif not self._stopping:
            self._stopping = True
            left = _count(len(self._slots.keys() - self._ends.keys()), "job")
            grace = f"{self.settings.kill_grace_s:g} s"
            say(f"{event['why']}: stopping {left}, killed in {grace}", logging.WARNING)
            if "the main process" in event["why"]:  # which counts the signals that it gets
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
            where = _from_here(self.files.sweep_dir)
            say(f"resume: no earlier sweep was found in {where} (hydra.sweep.dir), so every job is run")
        elif event["known"]:
            say(f"resume: {done}")

    def _moved_aside(self, event: dict[str, Any]) -> None:
        count, name = event["completed"], event["to"]
        where = _from_here(os.path.join(self.files.sweep_dir, name))
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
        there, here = (_from_here(os.path.join(self.files.sweep_dir, each)) for each in (name, self.files.name))
        return f"to go on with that one, end this one, rename {here} to {here}.new, {there} to {here}, and resume"

    def _names(self, directories: Sequence[str]) -> str:
        """Paths of the sweep directory, as many of them as a line can take."""
        shown = ", ".join(_from_here(os.path.join(self.files.sweep_dir, name)) for name in directories[:4])
        return shown if len(directories) <= 4 else f"{shown} and {len(directories) - 4} more"

    def _ended(self, event: dict[str, Any]) -> None:
        job = f"{self._by_number[event['job']]} {event['status']}"
        if event["status"] == Status.COMPLETED.value:
            say(": ".join(filter(None, [job, _text(event["value"])])))
        else:
            say(f"{job}: {_error(event)}; see {_from_here(self.files.output(event['job']))}", logging.ERROR)

    def summary(self) -> None:
        """One line per job: number, the overrides that differ, status, value or error, seconds, GPU and slot."""
        unstarted = [e for e in self._ends.values() if not e["attempt"] and e["cause"] != Cause.RESUMED.value]
        if unstarted:
            why = _error(unstarted[0]).removesuffix("; it was not started")
            say(f"not started: {_count(len(unstarted), 'queued job')}: {why}", logging.ERROR)
        tried = any(end["attempt"] > 1 for end in self._ends.values())
        rows = [["#", "overrides", "status", "value", "seconds", "gpu.slot", *(["tries"] if tried else [])]]
        for job, differing in zip(self.jobs, differing_overrides(self.jobs), strict=True):
            end = self._ends.get(job.num, {"status": "LOST", "error_text": "the supervisor was killed"})
            seconds = f"{end['seconds']:.1f}" if "seconds" in end else ""
            value = _text(end["value"]) if end["status"] == Status.COMPLETED.value else _error(end)
            row = [str(job.num), " ".join(differing), end["status"], _cut(value, _WIDEST), seconds]
            tries = [str(end.get("attempt", ""))] if tried else []
            rows.append([*row, self._slots.get(job.num, ""), *tries])
        counts = Counter(row[2] for row in rows[1:])
        say(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) + ":\n" + table(rows))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as lines of aligned columns, the first row being the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _error(event: dict[str, Any]) -> str:
    """In one line. gpu_pool's own errors are whole sentences; others are known by their type."""
    text = " ".join((event.get("error_text") or "").split()).removeprefix("was cancelled: ")
    name = event.get("error_type") or ""
    return _cut(text if name in JOB_ERRORS or not name else f"{name}: {text}" if text else name, 1000)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return _cut(f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split()), 200)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _from_here(path: str) -> str:
    """The path as it is shortest to type."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
