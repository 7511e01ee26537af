"""What an app has registered for its exit, which no job must repeat; and what a job has, which it must carry out.

No function here imports a library that is not imported yet: whatever is not in sys.modules has registered nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from typing import Any

from . import _descriptors, _family, _pidfd

_TRACKER_S = 5.0

_of_the_app: list[object] = []
"""What it has registered. It is not taken apart: that would copy hundreds of pages that the job shares with others."""


def forget_exit_hooks() -> OfTheApp:
    """Drop what the app registered for *its* exit: it would remove the app's files, or end the app's processes.

    Runs in the job, before user code; what the job registers from here on is its own. Gives what ``run_exit_hooks``
    needs to tell one from the other.
    """
    atexit._clear()
    finalize: Any = weakref.finalize
    _of_the_app.append(finalize._registry)
    finalize._registry = {}
    finalize._registered_with_atexit = False
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children.clear()
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()  # queues and pools of the app learn that they are in another process
        atexit.register(util._exit_function)  # importing it registered this, for the children of whoever imports it
    _forget_forkserver()
    return OfTheApp(list(logging._handlerList), resource_tracker())  # type: ignore[attr-defined]


def leave_log_files(of_the_app: OfTheApp) -> None:
    """Log no more to the files that were opened after the app; the handlers, which somebody may hold, stay open."""
    old = {id(ref()) for ref in of_the_app.handlers}
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in (logger for logger in loggers if isinstance(logger, logging.Logger)):
        for handler in list(logger.handlers):
            if isinstance(handler, logging.FileHandler) and id(handler) not in old:
                logger.removeHandler(handler)


def _forget_forkserver() -> None:
    """The app's fork server takes the app's requests alone: the job starts one of its own."""
    module = sys.modules.get("multiprocessing.forkserver")
    if module is not None:
        server = module._forkserver
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def resource_tracker() -> int | None:
    """The pid of the process that removes what shared memory of multiprocessing is left at the end; None: no such."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._pid


def _end_resource_tracker(of_the_app: int | None) -> None:
    """Let the job's own tracker see its end and clear up, before it is ended with the rest of the job's tree."""
    pid = resource_tracker()
    if pid is None or pid == of_the_app:
        return
    tracker = sys.modules["multiprocessing.resource_tracker"]._resource_tracker
    pidfd = _pidfd.pidfd_open(pid)
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None
    _family.kill_children(spare=pid)  # they hold its pipe too, and would be ended with the rest just after
    _descriptors.wait_readable([pidfd], _TRACKER_S)
    os.close(pidfd)


def run_exit_hooks_of_import(within_s: int) -> None:
    """What the app's import registered in this fresh interpreter runs at its end: temporary directories are removed.

    Its children are ended before. SIGALRM ends the process where this takes longer: main waits for its end, and must
    not wait for ever.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(within_s)
    _family.kill_children(spare=resource_tracker() or 0)
    for step in (atexit._run_exitfuncs, lambda: _end_resource_tracker(None)):
        try:
            step()
        except BaseException:
            traceback.print_exc()


@dataclass(frozen=True)
class OfTheApp:
    """What a job finds and must not end: the app's log handlers, and its resource tracker."""

    handlers: list[weakref.ref[logging.Handler]]
    tracker: int | None


def run_exit_hooks(of_the_app: OfTheApp) -> None:
    """What an interpreter does at its exit: join threads and executors, run atexit, flush the job's log handlers.

    Runs in the job, in its main thread. threading's own shutdown comes first, as in the interpreter, since it also ends
    the executors of concurrent.futures; multiprocessing's hook, among the atexit ones, joins its children. What one
    step raises is printed, and keeps none of the others from being taken.
    """
    mine: Any = [ref for ref in logging._handlerList if ref not in of_the_app.handlers]  # type: ignore[attr-defined]
    for step in (
        threading._shutdown,  # type: ignore[attr-defined]
        atexit._run_exitfuncs,
        lambda: logging.shutdown(mine),
        lambda: _end_resource_tracker(of_the_app.tracker),
    ):
        try:
            step()
        except BaseException:
            traceback.print_exc()
