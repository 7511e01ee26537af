"""What the loop of the supervisor needs of the system, and what it hears from it: an interface.

``_world`` is the world as it is; a test may script one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ._events import Cancel, Ending, Freed, Measured, Start, Stop, Waiting
from ._model import Exit, Report, Slot
from ._requests import Close, Request
from ._resume import Earlier


@dataclass(frozen=True)
class Died:
    """The job's whole tree is gone and reaped."""

    num: int
    exit: Exit


Happening = Request | Close | Stop | Cancel | Ending | Died | Measured | Freed
"""What the world tells the loop of."""


class World(Protocol):
    """What the loop needs of the system. Only ``wait`` blocks."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""

    def wait(self, deadline: float | None) -> Sequence[Happening]:
        """What happened; empty when the deadline passed before anything did."""

    def open(self, request: Request) -> Earlier | None:
        """Take the sweep directory and begin its journal; what is taken over from earlier sweeps, where that is asked.

        Raises ConfigurationError where it cannot be had.
        """

    def refuse(self, why: str) -> None:
        """Tell main that the request is not carried out."""

    def record(self, event: str, **facts: Any) -> None:
        """A line in the journal, or one that it is owed, while it cannot be written. Never raises OSError."""

    def blocked(self) -> str | None:
        """Why nothing can be recorded for now; None where it can. What the journal is owed is tried again before."""

    def warn(self, text: str) -> None:
        """A line for the person at the other end, who cannot read it in the journal; never blocks."""

    def leave(self) -> None:
        """Tell main that the launch is over, although the journal does not say so; never blocks."""

    def ring(self) -> None:
        """Tell main that there is something new in the journal; never blocks."""

    def lease(self, start: Start) -> frozenset[Slot]:
        """Have all of the job's slots for it, or none, and those that are others'. Never blocks, never raises."""

    def release(self, num: int) -> None:
        """Let go of the job's slots."""

    def wait_for(self, waiting: Waiting) -> bool:
        """Be in the line for this, and for nothing else; ``wait`` then gives Freed when it is worth a try.

        True where this process was in no line: what others let go of before is not told of.
        """

    def holders(self, slots: Collection[Slot]) -> str:
        """Who had those of the slots that could not be leased, for a person."""

    def start(self, start: Start) -> int:
        """Fork the job; its pid. Raises OSError where the system, or the disk, refuses."""

    def signal(self, num: int, signum: int) -> None:
        """Send a signal to the job's process."""

    def saving(self, num: int) -> bool:
        """True where the job has finished, and only waits until its result can be saved."""

    def kill(self, num: int) -> None:
        """SIGKILL to all of the job."""

    def abandon(self, num: int) -> None:
        """Wait no longer for what is left of the job."""

    def report(self, num: int) -> Report | None:
        """What the job has said of itself on disk."""

    def set_aside(self, num: int) -> None:
        """Take what a stopped job saved out of the place of results."""

    def look(self) -> None:
        """Have the devices' memory measured; ``wait`` gives the answer, within seconds, also where there is none."""

    def scarcity(self, device: int) -> str:
        """A line: what was free on this device at the last look, and who holds the rest, as far as that is known."""

    def gpu_mb(self, num: int) -> float | None:
        """The most of its GPUs' memory that the job's try has been seen with, in MB (1e6 bytes); None: nobody knows."""
