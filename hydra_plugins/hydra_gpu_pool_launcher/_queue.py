"""What waits for its start. A part of the schedule, which says what is next; here it has its place. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field

from ._model import Job, Outcome
from ._verdict import told


@dataclass(eq=False)
class Entry:
    """A job that is not over, and its next try, or the one that runs.

    ``alone``: it takes all slots of its devices. ``failed``: how the try before ended. ``refused``: others had slots
    that it needs, so it is in line.
    """

    job: Job
    attempt: int = 1
    alone: bool = False
    failed: Outcome | None = None
    refused: bool = False

    @property
    def undone(self) -> str:
        """A clause that says what was not done with it, while it waits."""
        if self.failed is None:
            return "it was not started"
        return f"it was not tried again, after {told(self.job, self.failed.error_type, self.failed.error_text)}"


@dataclass
class Queue:
    """Two lines: of those that need whole devices, and of all others.

    Both are in the order of submission, also when what was taken out comes back: in one step, several may be refused.
    """

    _others: deque[Entry] = field(default_factory=deque)
    _alone: list[Entry] = field(default_factory=list)
    _turn: dict[int, int] = field(default_factory=dict)  # by job: its place in the order of submission

    def __bool__(self) -> bool:
        """True where anything waits."""
        return bool(self._others or self._alone)

    @property
    def first(self) -> Entry | None:
        """Of those that take any slot."""
        return self._others[0] if self._others else None

    @property
    def first_alone(self) -> Entry | None:
        """Of those that need whole devices."""
        return self._alone[0] if self._alone else None

    def submit(self, jobs: Iterable[Job]) -> None:
        """New ones, behind all others."""
        for turn, job in enumerate(jobs, len(self._turn)):
            self._turn[job.num] = turn
            self._others.append(Entry(job))

    def put_back(self, entry: Entry) -> None:
        """A job that was submitted before."""
        line = self._line(entry)
        before = sum(self._turn[other.job.num] < self._turn[entry.job.num] for other in line)
        line.insert(before, entry)

    def remove(self, entry: Entry) -> None:
        """It starts."""
        self._line(entry).remove(entry)

    def take(self, num: int) -> Entry | None:
        """The job of this number, which waits no longer; None where it does not wait."""
        entry = next((entry for entry in [*self._others, *self._alone] if entry.job.num == num), None)
        if entry is not None:
            self.remove(entry)
        return entry

    def take_all(self) -> list[Entry]:
        """All of them, in the order of submission: none waits any longer."""
        waiting = sorted([*self._alone, *self._others], key=lambda entry: self._turn[entry.job.num])
        self._alone.clear()
        self._others.clear()
        return waiting

    def _line(self, entry: Entry) -> MutableSequence[Entry]:
        return self._alone if entry.alone else self._others
