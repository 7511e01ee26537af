"""sys.stdout and sys.stderr while launches run: nothing that gpu_pool or logging writes there waits for a reader.

What the app itself prints is its own, and waits as any program's does; but with a table on the terminal, the lines that
are printed there go above it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ._outlet import Outlet, can_stall, writable
from ._ways import Way, beneath, is_plain

_PATIENCE_S = 1.0
"""For whoever is in the middle of a logging handler: it may wait there for a reader that never comes."""


class Streams:
    """They as a launch uses them, from ``begin`` to ``release``."""

    def __init__(self) -> None:
        self._captured: list[tuple[str, Way]] = []

    def begin(self) -> None:
        """Lead gpu_pool's lines and logging by outlets, where the streams can stall and are no more than descriptors.

        sys.stdout and sys.stderr themselves stay as they are. Raises nothing.
        """
        with _shared.lock:
            _shared.launches.add(self)
            for _, stream in _plain_streams():
                with contextlib.suppress(OSError):
                    if can_stall(stream.fileno()) and (way := _shared.way(stream)).outlet is None:
                        way.lead(_shared.outlet(stream))
            _shared.lead_handlers()

    def outlet(self, stream: TextIO) -> Outlet:
        """That of the stream, until ``release``."""
        with _shared.lock:
            _shared.launches.add(self)
            return _shared.outlet(stream)

    def lead(self, of_it: Callable[[Any], bool], above: Callable[[str], None]) -> bool:
        """Whole lines that are printed or logged to those of the streams go ``above``, until ``lead_back``.

        False where the lines of another launch do: there is one table at a time.
        """
        with _shared.lock:
            if _shared.above is not None:
                return False
            _shared.launches.add(self)
            _shared.above = self
            for name, stream in _plain_streams():
                if of_it(stream):
                    way = _shared.way(stream)
                    way.lead(_shared.outlet(stream), above)
                    self._captured.append((name, way))
                    setattr(sys, name, way.captured)
            _shared.lead_handlers()
            return True

    def lead_back(self) -> None:
        """Those lines, and what has no end yet, go where the rest goes."""
        with _shared.lock:
            if _shared.above is self:
                _shared.above = None
                for _, way in self._captured:
                    way.lead(way.outlet)

    @property
    def stuck(self) -> list[int]:
        """Hands on what waits, as far as it is taken now: the descriptors of those for which something waits still.

        What nobody can read any more waits for nobody.
        """
        with _shared.lock:
            outlets = list(_shared.outlets.values()) if self in _shared.launches else []
        return _stuck(outlets)

    def wait(self, deadline: float | None) -> bool:
        """Block until all is taken (True), or until then (False), a point on the monotonic clock.

        What a signal handler raises ends it.
        """
        return _wait(lambda: self.stuck, deadline)

    def release(self, deadline: float | None = 0.0) -> None:
        """Give all back once what waits is taken, but no later than then: with the last launch, the rest is lost."""
        outlets: list[Outlet] = []
        try:
            self.wait(deadline)
            outlets = self._leave()
            _wait(lambda: _stuck(outlets), deadline)  # what other threads have logged meanwhile
        finally:
            for outlet in [*outlets, *self._leave()]:
                outlet.close()

    def _leave(self) -> list[Outlet]:
        """The outlets that nobody uses any more."""
        with _shared.lock:
            if self not in _shared.launches:
                return []
            self.lead_back()
            captured, self._captured = self._captured, []
            for name, way in captured:
                if getattr(sys, name) is way.captured:
                    setattr(sys, name, way.stream)
            _shared.launches.discard(self)
            return [] if _shared.launches else _shared.end()


def put(stream: Any, text: str) -> None:
    """Print whole lines to what sys.stdout or sys.stderr is: without waiting for its reader while a launch runs.

    Raises what a print there raises.
    """
    way = _shared.known(beneath(stream))
    print(text, end="", file=stream if way is None else way, flush=True)


def _plain_streams() -> Iterator[tuple[str, io.TextIOWrapper]]:
    for name in ("stdout", "stderr"):
        stream = beneath(getattr(sys, name))
        if is_plain(stream):
            yield name, stream


def _stuck(outlets: list[Outlet]) -> list[int]:
    found = []
    for outlet in outlets:
        with contextlib.suppress(OSError):
            found += [] if outlet.push() else [outlet.fd]
    return found


def _wait(stuck: Callable[[], list[int]], deadline: float | None) -> bool:
    while fds := stuck():
        if not writable(fds, None if deadline is None else deadline - time.monotonic()):
            return False
    return True


class _Shared:
    """What all launches of this process share: two may run at once, in threads.

    ``ways``: one for each stream, kept for good, see ``Captured``. ``above``: whose table it is.
    """

    def __init__(self, ways: list[Way]) -> None:
        self.lock = threading.RLock()
        self.launches: set[Streams] = set()
        self.outlets: dict[tuple[int, int], Outlet] = {}
        self.ways = ways
        self.led: list[tuple[Any, Way]] = []
        self.above: Streams | None = None

    def outlet(self, stream: TextIO) -> Outlet:
        """Streams of one file share an outlet, so that their lines are not torn."""
        found = os.fstat(stream.fileno())
        file = (found.st_dev, found.st_ino)
        if file not in self.outlets:
            self.outlets[file] = Outlet(stream.fileno())
        return self.outlets[file]

    def way(self, stream: io.TextIOWrapper) -> Way:
        found = self.known(stream)
        if found is None:
            found = Way(stream)
            self.ways.append(found)
        return found

    def known(self, stream: object) -> Way | None:
        return next((way for way in self.ways if way.stream is stream), None)

    def lead_handlers(self) -> None:
        """Those of logging whose stream has a way; each guarded by itself, since anybody may have written it."""
        loggers = [logging.root, *list(logging.Logger.manager.loggerDict.values())]
        for handler in [handler for logger in loggers for handler in list(getattr(logger, "handlers", []))]:
            with contextlib.suppress(Exception):
                stream = vars(handler).get("stream")  # where it is a property, it can mostly not be set
                way = self.known(beneath(stream))
                if way is not None and way is not stream and _swap(handler, stream, way):
                    self.led.append((handler, way))

    def end(self) -> list[Outlet]:
        """As if there had been no launch, but for what waits in these outlets."""
        led, self.led = self.led, []
        for handler, way in led:
            with contextlib.suppress(Exception):
                _swap(handler, way, way.stream)
        for way in self.ways:
            way.lead(None)
        outlets, self.outlets = list(self.outlets.values()), {}
        return outlets


def _swap(handler: Any, before: object, after: object) -> bool:
    """Not by setStream, which flushes the one before: that would block where it is stuck."""
    if not handler.lock.acquire(timeout=_PATIENCE_S):
        return False
    try:
        found = handler.stream is before
        if found:
            handler.stream = after
        return found
    finally:
        handler.lock.release()


def _in_a_fork() -> None:
    """It prints and logs as if there were no launch."""
    global _shared
    before, _shared = _shared, _Shared(_shared.ways)
    for way in before.ways:
        way.forked()
    for name in ("stdout", "stderr"):
        setattr(sys, name, beneath(getattr(sys, name)))
    for handler, way in before.led:
        if vars(handler).get("stream") is way:
            handler.stream = way.stream
    for outlet in before.outlets.values():
        outlet.close()


_shared = _Shared([])
os.register_at_fork(after_in_child=_in_a_fork)
