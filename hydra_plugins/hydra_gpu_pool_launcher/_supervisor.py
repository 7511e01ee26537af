"""Main's handle on the supervisor: it is started, given work, listened to, and ended from here."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from . import _interpreter, _link, _process, _start, _streams
from ._display import Display
from ._errors import ConfigurationError, JobLostError
from ._facts import fault
from ._files import SweepFiles
from ._journal import JournalReader
from ._link import Link, SupervisorGoneError
from ._model import Cause, Status
from ._requests import Request, request_to_json
from ._say import say
from ._start import StartMethod
from ._world import App

_STOPPED_BY = {
    signal.SIGINT: "Ctrl-C (SIGINT to the main process)",
    signal.SIGTERM: "SIGTERM to the main process",
    signal.SIGHUP: "SIGHUP to the main process, whose terminal was closed",
}


_LAST_WORDS_S = 2.0
"""After a signal, for a terminal to take what is left to be said."""

_SUPERVISORS = 3
"""That a launch may have, one after the other, as long as none has begun: somebody kills them."""


class Supervisor:
    """Main's handle. It forks the supervisor, and ends it when it is closed, collected, or main exits.

    Used by one thread at a time. ``start`` and ``run`` raise ConfigurationError with the reason where the app or the
    directory does not allow a sweep.
    """

    def __init__(self, app: App, start_method: StartMethod = "auto") -> None:
        self.app = app
        self.busy = False
        self._asked = start_method
        self._method: StartMethod = "fork"  # the one in use
        self._link: Link | None = None
        self._close: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start a supervisor by the method that was asked for; with auto, by the first that is safe.

        From this process as it is now, or, with forkserver, from the app as a fresh interpreter imports it.
        """
        self._use(*_start.start(self.app, self._asked))

    def renew(self) -> None:
        """Fork again, so that jobs see the newest state of the app; where that is not safe any more, keep what is.

        With forkserver there is nothing newer: the app would be imported again as it was.
        """
        if self._link is None or self._link.gone():
            self.start()
        elif not _interpreter.other_threads():
            with contextlib.suppress(ConfigurationError, SupervisorGoneError):
                link = _start.again(self.app, self._method)
                if link is not None:
                    self._use(link, self._method)

    def _use(self, link: Link, method: StartMethod) -> None:
        self.close()
        self._close = weakref.finalize(self, _link.close, link, os.getpid())
        self._link = link
        self._method = method

    def run(self, request: Request, display: Display) -> dict[int, dict[str, Any]]:
        """Have the jobs run, and block until each has ended; the journal's "end" event of each, by job number.

        The display is shown the journal's events here, in main. Where the supervisor was killed before it could write
        a job's end, the job has its "stop" event instead, if there is one, or no entry. In main's main thread, SIGINT,
        SIGTERM and SIGHUP are handled where nobody else does, see ``_Signals``; after one of them this does not return.
        """
        for _ in range(_SUPERVISORS):
            ends = self._run(request, display)
            if ends is not None:
                return ends
            try:
                self.start()
            except SupervisorGoneError:
                break
        display.begin(self.app.layout)
        display.summary()
        display.deliver()
        return {job.num: _never_begun(request.files) for job in request.jobs}

    def _run(self, request: Request, display: Display) -> dict[int, dict[str, Any]] | None:
        """``run``, by the supervisor that there is; None where it was killed before it had begun."""
        assert self._link is not None, "start() comes first"
        link = self._link
        ends: dict[int, dict[str, Any]] = {}
        self.busy = True
        with _Signals(link) as signals:
            try:
                link.drain()
                link.send({"request": request_to_json(request)})
                with _opened(link, request.files) as journal:
                    begun = journal.path != os.devnull
                    if begun:
                        display.begin(self.app.layout)
                    for event in _follow(link, journal, display):
                        if event["event"] in {"stop", "end"}:
                            ends[event["job"]] = event
                        elif event["event"] == "retry":
                            ends.pop(event["job"], None)  # what stopped that try says nothing of the next
                        display.show(event)
            except BaseException:
                display.close()
                self.close()  # whoever raised it (an app's signal handler, say) does not wait for the jobs
                raise
            finally:
                self.busy = False
            if signals.received or link.gone():
                self.close()
            if begun:
                display.summary()
                if signals.received:
                    display.deliver(_LAST_WORDS_S)
        if begun:
            display.deliver()  # now that signals do again what they did: nobody may ever read it
        return ends if begun else None

    @property
    def gone(self) -> bool:
        """True where there is no supervisor any more."""
        return self._link is None or self._link.gone()

    def close(self) -> None:
        """End the supervisor and all of its jobs, and wait until they are gone. Without one, nothing happens."""
        self._close()
        self._link = None


@contextlib.contextmanager
def _opened(link: Link, files: SweepFiles) -> Iterator[JournalReader]:
    """The journal, once the supervisor has begun it for this launch. Raises ConfigurationError where it refuses."""
    while link.receive():
        while (answer := link.message()) is not None:
            if "refused" in answer:
                raise ConfigurationError(answer["refused"])
            with contextlib.closing(JournalReader(files.journal, answer["opened"])) as journal:
                yield journal
            return
    with contextlib.closing(JournalReader(os.devnull)) as journal:
        yield journal  # the supervisor was killed before it could answer


def _never_begun(files: SweepFiles) -> dict[str, Any]:
    """In place of an "end" event: without it, what an earlier sweep left would be taken for the job's result."""
    why = f"was lost: the supervisor was killed, or failed, before it could begin (see {files.supervisor_log})"
    lost = {"event": "end", "attempt": 0, "status": Status.FAILED.value, "cause": Cause.LOST.value}
    return {**lost, "error_type": JobLostError.__name__, "error_text": why, "value": None, "by_itself": False}


def _follow(link: Link, journal: JournalReader, display: Display) -> Iterator[dict[str, Any]]:
    """The journal's events until this launch is done, or the supervisor gone; between them, the display's ticks."""
    alive = True
    while True:
        for event in journal.new():  # before waiting: a doorbell may have come along with the answer
            if fault(event) is not None:
                continue  # somebody else has written it: it must not end a launch
            if event["event"] == "done":
                link.receive(0)  # main may be late: what was told before is there
                _say_what_was_told(link)
                return
            yield event
        if not alive:
            return
        alive = _say_what_was_told(link) and link.receive(display.tick(), display.stuck())


def _say_what_was_told(link: Link) -> bool:
    """False where the supervisor has told that there is no more to come."""
    alive = True
    while (message := link.message()) is not None:
        if "warn" in message:
            say(message["warn"], logging.WARNING)
        alive = alive and "over" not in message
    return alive


class _Signals:
    """While jobs run: what Ctrl-C, SIGTERM and SIGHUP do in main, where they are at their default.

    The first one stops the jobs politely (SIGINT with SIGINT, the others with SIGTERM), a further one kills them. When
    the last is gone and this context is left, main dies as it would have: KeyboardInterrupt for SIGINT, else by the
    same signal. Ignored signals stay ignored (nohup), and an app's handlers stay. Elsewhere than in the main thread,
    Python has no handlers to set: this does nothing there.
    """

    def __init__(self, link: Link) -> None:
        self.received: list[int] = []
        self._link = link
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in _STOPPED_BY:
                if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                    self._old[signum] = signal.signal(signum, self._handle)
        return self

    def _handle(self, signum: int, _frame: object) -> None:
        self.received.append(signum)
        polite = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self._link.wake()
        self._link.send(
            {
                "stop": polite if len(self.received) == 1 else signal.SIGKILL,
                "why": _STOPPED_BY[signal.Signals(signum)],
            }
        )

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        if self.received:
            _die_of(self.received[0])


def _die_of(signum: int) -> NoReturn:
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    logging.shutdown()
    _streams.flush_streams()
    if os.getpid() != 1:  # the kernel does not let a default action end PID 1
        _process.signal_self(signum)
    raise SystemExit(128 + signum)
