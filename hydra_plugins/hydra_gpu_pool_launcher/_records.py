"""The directory of a sweep, as the supervisor holds it: its lock, its journal, and why they cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from . import _files, _journal, _pidfd, _streams
from ._errors import ConfigurationError
from ._events import CANCELLED_BY_HAND, Cancel
from ._files import SweepFiles
from ._journal import Journal
from ._model import Layout
from ._requests import Request
from ._resume import Earlier, take_up, tally


class Records:
    """What the supervisor has open in the directory of the sweep, from one request to the next.

    ``main``: the pid of the main process. ``tell`` sends it a message, and never blocks. ``imported``: what the import
    of the app has printed, for the log; None where there was none.
    """

    def __init__(self, layout: Layout, main: int, tell: Callable[[dict[str, Any]], None], imported: str | None) -> None:
        self.request: Request | None = None
        self._layout = layout
        self._main = main
        self._tell = tell
        self._imported = imported
        self._journal: Journal | None = None
        self._lock: int | None = None

    def descriptors(self) -> set[int]:
        """All that it has open, once there is a request."""
        assert self._journal is not None
        assert self._lock is not None
        return {self._journal.fd, self._lock}

    def open(self, request: Request) -> Earlier | None:
        """See ``World.open``; main is told from where the journal is to be read."""
        aside: list[str] = []
        if self.request is None or self.request.files != request.files:
            self._close()
            self._take_directory(request.files, request.fresh, aside.append)
        assert self._journal is not None
        _files.take_cancellations(request.files)  # what a supervisor that was killed did not come to
        earlier = take_up(request.files, request.jobs) if request.resume else None
        self.request = request
        # Main reads only now, and from here: until then, the file may be that of an earlier sweep.
        self._tell({"opened": os.fstat(self._journal.fd).st_size})
        layout = self._layout
        self.record(
            "launch",
            main=self._main,
            supervisor=os.getpid(),
            started=_pidfd.start_time(os.getpid()),
            host=os.uname().nodename,
            boot=_pidfd.boot_id(),
            command=request.command,
            given=request.given,
            cwd=request.cwd,
            slots=[layout.label(slot) for slot in layout.slots],
        )
        for path in aside:
            self._record_earlier(SweepFiles(request.files.sweep_dir, os.path.basename(path)))
        return earlier

    def _record_earlier(self, files: SweepFiles) -> None:
        """The sweep that had the directory so far: whoever forgot the key ``resume`` has little to lose yet."""
        with contextlib.suppress(OSError):
            earlier = tally(files)
            self.record("moved_aside", to=files.name, jobs=earlier.jobs, completed=len(earlier.completed))

    def _take_directory(self, files: SweepFiles, fresh: bool, moved: Callable[[str], object] = lambda _: None) -> None:
        """Its lock, and its journal, in place of those that were held so far: nothing changes where this raises."""
        lock = _files.claim(files, self._main, fresh, moved)
        try:
            log = _files.open_to_append(files.supervisor_log)
            journal = _journal.begin(files)
        except OSError as error:
            os.close(lock)
            raise _files.cannot_be_written(files, error) from error
        self._close()
        self._lock, self._journal = lock, journal
        _streams.redirect(log, 1, 2)
        if self._imported:
            with contextlib.suppress(OSError):
                os.write(2, self._imported.encode(errors="replace"))
            self._imported = ""

    def _close(self) -> None:
        if self._journal is not None:
            os.close(self._journal.fd)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._journal = self.request = None

    def record(self, event: str, **facts: Any) -> None:
        """See ``World.record``."""
        assert self._journal is not None
        self._journal.append(event, **facts)
        if self._journal.removed:
            self.blocked()

    def blocked(self) -> str | None:
        """See ``World.blocked``. A directory that was removed is made anew."""
        if self._journal is None or self.request is None:
            return None
        files = self.request.files
        try:
            if self._journal.removed:
                owed, request = self._journal.owed, self.request
                self._take_directory(files, fresh=False)
                self._journal.owed, self.request = owed, request
                self._warn(f"{files.root} was removed: it is made anew, and the sweep goes on without what was in it")
            self._journal.pay()
            _files.require_room(files)
        except ConfigurationError as error:
            return str(error)
        except OSError as error:
            return f"the sweep's files cannot be written ({files.root}: {error.strerror})"
        return None

    def cancelled_by_hand(self) -> list[Cancel]:
        """The jobs of which somebody has asked for the end."""
        if self.request is None:
            return []
        return [Cancel(num, CANCELLED_BY_HAND) for num in _files.take_cancellations(self.request.files)]

    def _warn(self, text: str) -> None:
        self._tell({"warn": text})
