"""What is said once more when main exits: Hydra prints the traceback of a failed job after the end of its sweep."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence

_texts: list[str] = []


def at_exit(texts: Sequence[str], say: Callable[[str], None]) -> None:
    """Have these texts said when this process exits, in place of those that were to be said so far; none: nothing.

    Not where it ends by a signal, and not in its forks.
    """
    if not _texts and texts:
        atexit.register(_say, os.getpid(), say)
    _texts[:] = texts


def _say(pid: int, say: Callable[[str], None]) -> None:
    texts, _texts[:] = list(_texts), []
    if os.getpid() == pid:
        for text in texts:
            with contextlib.suppress(Exception):  # stderr may be gone by then
                say(text)
