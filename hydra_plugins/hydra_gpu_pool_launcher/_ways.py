"""The ways to a standard stream: to its outlet while a launch runs, above a table, or else to itself."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ._outlet import Outlet

_HELD = 1 << 16
"""Characters of a line that has not ended, and so is not shown above a table yet; a longer one is, in parts."""


class _InPlace:
    """What stands in place of a stream, and is it in all but writing."""

    stream: io.TextIOWrapper

    def write(self, text: str) -> int:
        raise NotImplementedError

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        stream = vars(self).get("stream")  # not there yet in a copy that is being made: it would be asked for, for ever
        if stream is None:
            raise AttributeError(name)
        return getattr(stream, name)


class Way(_InPlace):
    """In place of a stream, for logging and for gpu_pool's own lines. Any thread may write; one lock for all it does.

    ``captured``: what can stand in place of the stream for all else, and leads the same way.

    What nobody can read any more is lost, and nobody is told: logging would print a traceback for each line.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.stream = stream
        self.captured = Captured(self)
        self.outlet: Outlet | None = None
        self._above: Callable[[str], None] | None = None
        self._held = ""
        self._lock = threading.RLock()

    def lead(self, outlet: Outlet | None, above: Callable[[str], None] | None = None) -> None:
        """Where it leads from here on; ``above`` takes whole lines. What has no end yet goes to the outlet before."""
        with self._lock:
            held, self._held = self._held, ""
            try:
                if held and self.outlet is not None:
                    self.outlet.write(self._encoded(held))
            except (OSError, ValueError):
                pass  # nobody reads it
            finally:
                self.outlet, self._above = outlet, above

    def write(self, text: str) -> int:
        """The number of characters, whatever becomes of them."""
        try:
            taken = self.take(text)
        except OSError:
            taken = True
        return len(text) if taken else self.stream.write(text)

    def take(self, text: str) -> bool:
        """As ``write``, but raises OSError. False: it is led nowhere, and who writes may wait for a reader: not
        under the lock, which a launch needs.
        """
        with self._lock:
            if self.outlet is None:
                return False
            above = self._above
            if above is None:
                self.outlet.write(self._encoded(text))
                return True
            lines, end, held = (self._held + text).rpartition("\n")
            if len(held) > _HELD:
                lines, end, held = lines + end + held, "\n", ""
            self._held = held
            if end:
                above(lines)
            return True

    def _encoded(self, text: str) -> bytes:
        return text.encode(self.stream.encoding, self.stream.errors or "strict")

    def flush(self) -> None:
        """Nothing waits here but for the end of its line, or for its reader."""
        if self.outlet is None:
            self.stream.flush()

    def forked(self) -> None:
        """In a fork it is led nowhere; another thread may have held the lock."""
        self._lock = threading.RLock()
        self.outlet, self._above, self._held = None, None, ""


class Captured(_InPlace):
    """In place of sys.stdout or sys.stderr itself while there is a table. Who prints is told what a stream tells.

    Kept alive for good by its way: print() of CPython up to 3.13 holds no reference to what sys.stdout was when it
    began, and crashes where that is freed meanwhile. Where a redirect_stdout has put it back after the launch, it
    passes everything on.
    """

    def __init__(self, way: Way) -> None:
        self.stream = way.stream
        self.way = way

    def write(self, text: str) -> int:
        return len(text) if self.way.take(text) else self.stream.write(text)

    def flush(self) -> None:
        """Of the stream beneath: there may be what was written to its buffer. A line without an end waits for it."""
        self.stream.flush()


def beneath(stream: Any) -> Any:
    """The stream that this one stands for: mostly itself."""
    return stream.stream if isinstance(stream, _InPlace) else stream


def is_plain(stream: Any) -> bool:
    """True of a stream that is nothing but its descriptor, down to the raw file; not of one that also keeps a copy."""
    if type(stream) is not io.TextIOWrapper or {"write", "flush"} & vars(stream).keys():
        return False
    with contextlib.suppress(ValueError):  # detached
        buffer: object = stream.buffer
        raw = buffer.raw if type(buffer) is io.BufferedWriter else buffer  # python -u has nothing between
        return type(raw) is io.FileIO and not raw.closed
    return False
