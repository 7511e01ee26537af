"""What main says to a person: one line, and where even that fails, no more than a traceback of it. In main."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback

from ._printing import put
from ._tail import plain

_log = logging.getLogger("gpu_pool")


def say(text: str, level: int = logging.INFO) -> None:
    """One line for a person: through logging, where Hydra or the app has set it up, so that it says how lines look.

    Where nobody has, as in plain Python, logging would swallow it: then on stderr. Whatever an app has put into the
    text, no control character is left in it. A stream or a handler that cannot take it loses the line, and no more;
    the first fault of a kind is told by its traceback, where stderr takes that.
    """
    text = plain(text).encode(errors="replace").decode()
    try:
        if _log.hasHandlers():
            _log.log(level, "%s", text)
        else:
            put(sys.stderr, f"{text}\n")
    except (Exception, SystemExit) as error:
        tell_of_fault(error)


_told: set[type[BaseException]] = set()
"""Kinds of faults whose traceback somebody has seen."""


def tell_of_fault(error: BaseException) -> None:
    """Of the display: it is no reason to end a sweep. What a signal handler has raised is none, and raised again.

    SystemExit is among the faults: rich's handler raises it when its pipe is closed.
    """
    if _of_a_signal_handler(error):
        raise error
    if type(error) not in _told:
        _told.add(type(error))
        with contextlib.suppress(Exception, SystemExit):  # what is broken may be stderr itself
            traceback.print_exception(error)


def _of_a_signal_handler(error: BaseException) -> bool:
    handlers = [handler for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)]
    codes = {getattr(getattr(handler, "__call__", None), "__code__", None) for handler in handlers}  # noqa: B004
    codes |= {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def from_here(path: str) -> str:
    """The path as it is shortest to type."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
