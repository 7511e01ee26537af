"""What a person sees of a sweep: a line per event, a table at the end. In main, from the journal's events alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ._journal import SweepFiles
from ._model import JOB_ERRORS, Job, Layout, Status

log = logging.getLogger("gpu_pool")

_WIDEST = 40


class Display(Protocol):
    """What shows a launch, in this order: its beginning, the journal's events, and a summary, also after a Ctrl-C."""

    def begin(self, layout: Layout) -> None: ...

    def show(self, event: dict[str, Any]) -> None: ...

    def summary(self) -> None: ...


def display(progress: str, jobs: Sequence[Job], files: SweepFiles) -> Display:
    """The display that the key ``progress`` asks for."""
    return Silence() if progress == "none" else Lines(jobs, files)


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
    """``progress: log``: through logging, so that Hydra's configuration says where lines go and how they look."""

    jobs: Sequence[Job]
    files: SweepFiles
    _by_number: dict[int, Job] = field(init=False)
    _slots: dict[int, str] = field(default_factory=dict)
    _ends: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_number = {job.num: job for job in self.jobs}

    def begin(self, layout: Layout) -> None:
        """What is about to run where. That these lines are not there tells that another launcher was chosen."""
        jobs = "1 job" if len(self.jobs) == 1 else f"{len(self.jobs)} jobs"
        gpus = "GPU " + ", ".join(device.label for device in layout.devices)
        log.info("gpu_pool: %s, %d at once, on %s", jobs, layout.jobs_at_once, "CPU slots" if layout.on_cpu else gpus)
        log.info("what they print goes to %s", self.files.output("<number>"))

    def show(self, event: dict[str, Any]) -> None:
        """One event of the journal."""
        if event["event"] == "start":
            num = event["job"]
            self._slots[num] = ",".join(event["slots"])
            log.info("%s started on %s, pid %d", self._by_number[num], self._slots[num], event["pid"])
        elif event["event"] == "end":
            self._ends[event["job"]] = event
            if event["status"] != Status.COMPLETED.value:
                log.error(
                    "%s %s: %s; its log is %s",
                    self._by_number[event["job"]],
                    event["status"],
                    _error(event),
                    self.files.output(event["job"]),
                )

    def summary(self) -> None:
        """One line per job: number, the overrides that differ, status, value, seconds, GPU."""
        rows = [["#", "overrides", "status", "value", "seconds", "gpu"]]
        for job, differing in zip(self.jobs, differing_overrides(self.jobs), strict=True):
            end = self._ends.get(job.num, {})
            seconds = f"{end['seconds']:.1f}" if "seconds" in end else ""
            value = _short(end.get("value") if end.get("status") == Status.COMPLETED.value else _error(end))
            slot = self._slots.get(job.num, "")
            rows.append([str(job.num), " ".join(differing), end.get("status", "LOST"), value, seconds, slot])
        log.info("%s ended:\n%s", "1 job has" if len(self.jobs) == 1 else f"{len(self.jobs)} jobs have", table(rows))


def differing_overrides(jobs: Sequence[Job]) -> list[list[str]]:
    """Of each job, the overrides that not every job has; all of them where there is but one job."""
    if len(jobs) == 1:
        return [list(jobs[0].overrides)]
    common = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    return [[override for override in job.overrides if override not in common] for job in jobs]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as lines of aligned columns, the first row being the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _error(event: dict[str, Any]) -> str:
    """In one line. gpu_pool's own errors are whole sentences; others are known by their type."""
    text = " ".join((event.get("error_text") or "").split())
    name = event.get("error_type") or ""
    return text if name in JOB_ERRORS or not name else f"{name}: {text}" if text else name


def _short(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
