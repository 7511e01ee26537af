"""What a person sees of a sweep: lines, a table that moves, what jobs print. In main, from the journal's events."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from ._event_lines import Lines
from ._files import SweepFiles
from ._live import REFRESH_S, Live, terminal
from ._model import Job, Layout, Settings
from ._printing import Streams
from ._report import Reports
from ._say import from_here, say, tell_of_fault
from ._tee import Tee
from ._view import View


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
            tell_of_fault(error)
            broken, self.display = self.display, Shown(None, None, None)
            with contextlib.suppress(Exception, SystemExit):
                broken.close()
            return None


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
            tell_of_fault(error)
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
