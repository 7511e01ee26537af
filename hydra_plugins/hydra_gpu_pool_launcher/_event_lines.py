"""``progress: log``: a line per event, and the end of the launch. In main."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _summary
from ._events import CANCELLED_BY_HAND
from ._files import SweepFiles
from ._last_words import at_exit
from ._model import Cause, Job, Layout, Settings, Status
from ._report import recorded
from ._say import from_here, say
from ._table import error_of
from ._tail import one_line
from ._view import View


@dataclass
class Lines:
    """A line per event of a launch. ``brief``: none for what a table shows, starts and good ends."""

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
    _on_cpu: bool = False

    def __post_init__(self) -> None:
        self._by_number = {job.num: one_line(str(job)) for job in self.jobs}

    def begin(self, layout: Layout) -> None:
        """What is about to run where. That these lines are not there tells that another launcher was chosen."""
        if self.settings.resume:
            with contextlib.suppress(OSError):
                self._view = recorded(self.files).resumed()
        self._on_cpu = layout.on_cpu
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
            more, why = "and has another", error_of(event["error_type"], event["error_text"])
            if event["cause"] == Cause.OOM.value and not self._on_cpu:
                more += ", with its GPU for itself, whose free slots stay empty until then"
            say(f"{job} FAILED, try {num}, {more}: {why}", logging.WARNING)
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
            if not self.brief:  # the line of its stop has told where its log is
                say(f"{job}: {why}", logging.ERROR)
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
            failed = _summary.failures(self._view, self.jobs, self.files, from_here, width, _summary.width_of_logs())
            if failed:
                say("\n".join(["what failed, and where:", *failed]), logging.ERROR)
        last_words = []
        if self.again is not None and not all(self._is(job, Status.COMPLETED) for job in self.jobs):
            resume = f"to run only what has not completed:\n{self.again}"
            say(resume)
            # Hydra goes on to raise what the first failed job did: that would be all that is on the screen.
            told = _summary.closing(self._view, self.jobs, self.files, _summary.width_of_logs())
            last_words = [*(["\n".join([f"{headline}:", *told])] if told else []), resume]
        at_exit(last_words, say)

    def _is(self, job: Job, status: Status) -> bool:
        return job.num in self._view.jobs and self._view.jobs[job.num].state == status.value


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _is_by_hand(error_text: str | None) -> bool:
    return CANCELLED_BY_HAND in (error_text or "")
