"""A sweep as its journal tells it: what became of each job so far, and what can be said of the rest. Pure.

Whatever shows a sweep (a table that moves, a report, a command in another terminal) folds the journal's events into a
``View``, one by one or all at once, and asks that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._model import Cause, Job
from ._seen import JobView, Launch, State, TryView


@dataclass
class View:
    """What the events so far say. ``at``: the time of the last one; ``done``: no launch is under way.

    ``stopped``: why it was, where it was, before all of its jobs had been run.
    ``pauses``: when nobody ran the sweep, from the last event of one main process to the launch of the next.
    """

    jobs: dict[int, JobView] = field(default_factory=dict)
    launch: Launch | None = None
    began: float | None = None
    at: float = 0.0
    done: bool = False
    stopped: str | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)
    _completed: dict[Job, Sequence[TryView]] = field(default_factory=dict)
    _waiting: dict[str, str] = field(default_factory=dict)  # by device

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Events of the journal, in their order. What is not known, of a later version say, is passed over."""
        for event in events:
            handle = getattr(self, f"_on_{event.get('event')}", None)
            if handle is not None:
                at = float(event["time"])
                self.began = at if self.began is None else self.began
                handle(event)  # which may ask for the time of the last one before
                self.at = at

    # --- events ---

    def _on_launch(self, event: Mapping[str, Any]) -> None:
        before = self.launch
        self.launch = Launch(
            main=event["main"],
            supervisor=event["supervisor"],
            started=event["started"],
            host=event["host"],
            boot=event["boot"],
            command=tuple(event["command"]),
            cwd=event["cwd"],
            slots=tuple(event["slots"]),
            given=None if event.get("given") is None else tuple(event["given"]),
            says_given="given" in event,
        )
        if before is not None and not before.is_by_the_main_of(self.launch):
            self.pauses.append((self.at, max(self.at, event["time"])))
            self._begin_another_sweep()
        self.done, self.stopped = False, None
        self._waiting.clear()

    def _begin_another_sweep(self) -> None:
        """What it does not have, since fewer jobs were given, say, is none of it. What it takes over it will tell."""
        for job in self.jobs.values():
            self._keep(job)
        self.jobs = {}

    def _on_queued(self, event: Mapping[str, Any]) -> None:
        job = Job(event["job"], tuple(event["overrides"]))
        before = self.jobs.get(job.num)
        if before is not None:
            self._keep(before)
        self.jobs[job.num] = JobView(job)
        self.done = False

    def _keep(self, job: JobView) -> None:
        """Where it ran, if it completed: a resume may take its result over."""
        if job.state is State.COMPLETED and job.known_tries:
            self._completed[job.job] = job.known_tries

    def _on_start(self, event: Mapping[str, Any]) -> None:
        job = self._job(event)
        job.state = State.RUNNING
        job.tries.append(TryView(event["attempt"], event["pid"], tuple(event["slots"]), event["time"]))

        for slot in event["slots"]:
            self._waiting.pop(slot.rpartition(".")[0], None)

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        self._waiting[event["device"]] = event["why"]

    def _on_memory(self, event: Mapping[str, Any]) -> None:
        running = self._job(event).running
        if running is not None:
            running.gpu_mb = event["gpu_mb"]

    def _on_stop(self, event: Mapping[str, Any]) -> None:
        job = self._job(event)
        job.state, job.stopping, job.cause = State.STOPPING, event["why"], Cause(event["cause"])

    def _on_retry(self, event: Mapping[str, Any]) -> None:
        job = self._job(event)
        self._end_try(job, event)
        job.state, job.stopping, job.cause = State.QUEUED, None, None

    def _on_end(self, event: Mapping[str, Any]) -> None:
        job = self._job(event)
        self._end_try(job, event)
        job.state, job.stopping = State(event["status"]), None
        job.cause, job.value = Cause(event["cause"]), event["value"]
        job.error_type, job.error_text = event["error_type"], event["error_text"]
        job.seconds, job.cpu_s, job.peak_mb = (event.get(name) for name in ("seconds", "cpu_s", "peak_mb"))
        job.gpu_mb = event.get("gpu_mb")
        if job.cause is Cause.RESUMED:
            job.taken_over = self._completed.get(job.job, ())

    def _on_done(self, event: Mapping[str, Any]) -> None:
        self.done, self.stopped = True, event.get("stopped")

    def _job(self, event: Mapping[str, Any]) -> JobView:
        return self.jobs.setdefault(event["job"], JobView(Job(event["job"], ())))

    def _end_try(self, job: JobView, event: Mapping[str, Any]) -> None:
        last = job.tries[-1] if job.tries else None
        if last is None or last.ended is not None:
            return  # it was never started, or that was in an earlier sweep
        last.ended, last.state, last.cause = event["time"], State(event["status"]), Cause(event["cause"])
        last.error_type, last.error_text = event["error_type"], event["error_text"]
        last.cpu_s, last.peak_mb, last.gpu_mb = event.get("cpu_s"), event.get("peak_mb"), event.get("gpu_mb")
        last.took = event.get("seconds")

    # --- questions ---

    def resumed(self) -> View:
        """Of a launch that goes on with this sweep: nothing yet, but where what it will take over ran."""
        view = View(jobs=self.jobs, _completed=dict(self._completed))
        view._begin_another_sweep()
        return view

    def taken_over(self) -> int:
        """How many jobs have the result of an earlier launch."""
        return sum(job.cause is Cause.RESUMED for job in self.jobs.values())

    def ran_s(self, begin: float, end: float) -> float:
        """Seconds between these two in which somebody ran the sweep."""
        return max(0.0, end - begin - sum(max(0.0, min(end, to) - max(begin, since)) for since, to in self.pauses))

    def took_s(self, now: float) -> float:
        """Seconds that the sweep has taken so far, without the time between its launches in which nobody ran it."""
        return self.ran_s(now if self.began is None else self.began, self.at if self.done else now)

    def in_order(self) -> list[JobView]:
        """The jobs by their numbers."""
        return [self.jobs[num] for num in sorted(self.jobs)]

    def count(self) -> Counter[State]:
        """How many jobs are where."""
        return Counter(job.state for job in self.jobs.values())

    def waiting(self) -> list[str]:
        """Why jobs that are queued wait for a device, a sentence for each on which none has started since."""
        return [*self._waiting.values()] if self.count()[State.QUEUED] else []

    def all_completed(self) -> bool:
        """Whether there is nothing to go on with."""
        return all(job.state is State.COMPLETED for job in self.jobs.values())

    def running(self) -> list[JobView]:
        """Those that run now, the longest first."""
        jobs = [job for job in self.jobs.values() if job.running is not None]
        return sorted(jobs, key=lambda job: job.tries[-1].started)

    def tries(self) -> Iterator[tuple[JobView, TryView]]:
        """Every try of every job, job by job."""
        for job in self.in_order():
            for each in job.tries:
                yield job, each

    def slots(self) -> tuple[str, ...]:
        """The labels of all slots, those of no known launch in the order in which they were used."""
        used = dict.fromkeys(slot for _, each in self.tries() for slot in each.slots)
        known = self.launch.slots if self.launch is not None else ()
        return (*known, *(slot for slot in used if slot not in known))

    def busy(self, now: float) -> float | None:
        """The share of all slots' time, from the first start to the last end, that tries have used; None: no time.

        The time between two launches in which nobody ran the sweep does not count.
        """
        spans = [(each.started, each.seconds(now), len(each.slots)) for _, each in self.tries()]
        slots = self.slots()
        if not spans or not slots:
            return None
        length = self.ran_s(min(start for start, _, _ in spans), max(start + seconds for start, seconds, _ in spans))
        used = sum(seconds * count for _, seconds, count in spans)
        return min(1.0, used / (length * len(slots))) if length > 0 else None

    def left_s(self, now: float) -> float | None:
        """Seconds until the jobs known so far will have ended, if the rest are like those that completed; more than 0.

        Where none has, like those that failed by themselves. A job that runs is like those that took longer than it has
        so far. None where nothing can be told: none has ended, the slots are not known, or the last jobs have taken
        longer than any before.
        """
        ended: dict[State | None, list[float]] = {}
        for _, each in self.tries():
            ended.setdefault(each.state, []).append(each.seconds(now))
        took = sorted(ended.get(State.COMPLETED) or ended.get(State.FAILED) or [])
        slots, queued = self.slots(), self.count()[State.QUEUED]
        if not took or not slots:
            return None
        running = []
        for job in self.running():
            age = job.tries[-1].seconds(now)
            if longer := took[bisect_right(took, age) :]:
                running.append(sum(longer) / len(longer) - age)
            elif not queued:
                return None
        per_job = max((len(each.slots) for _, each in self.tries()), default=1)
        at_once = max(1, len(slots) // per_job)
        left = max([(sum(running) + sum(took) / len(took) * queued) / at_once, *running])
        return left if left > 0 else None


def differing_overrides(jobs: Sequence[Job]) -> list[list[str]]:
    """Of each job, the overrides that not every job has; all of them where there is but one job."""
    if len(jobs) == 1:
        return [list(jobs[0].overrides)]
    common = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    return [[override for override in job.overrides if override not in common] for job in jobs]


def columns(jobs: Sequence[Job]) -> tuple[list[str], list[dict[str, str]]]:
    """The keys of the overrides that differ, in the order in which they come up, and each job's values of them.

    ``+x=1``, ``++x=1`` and ``x=1`` are of one key, x; ``~x``, which removes it, has no value. A job that does not have
    a key that others have lacks it here.
    """
    keys: dict[str, None] = {}
    rows: list[dict[str, str]] = []
    for differing in differing_overrides(jobs):
        row: dict[str, str] = {}
        for override in differing:
            key, equals, value = override.lstrip("+~").partition("=")
            keys.setdefault(key)
            row[key] = value if equals else ""
        rows.append(row)
    return list(keys), rows
