"""The ends of jobs' logs, as a person can be shown them: of whatever a job prints, plain text is left."""

from __future__ import annotations

import os
import re

from ._files import open_file

_BLOCK = 1 << 14
"""Bytes from the end of a log that are looked at for its last line; a progress bar's are some hundred each."""

# The control functions of ECMA-48: CSI with its parameters; OSC, DCS and the like, up to their ends; two characters.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x1b\\|\x07|$)|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]", re.DOTALL
)
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)


def plain(text: str) -> str:
    """The text without escape sequences and control characters, but for line ends; tabs are four spaces.

    Characters that turn the direction of writing are control characters, too: they could make a line say another.
    """
    if text.isprintable():  # as most lines are
        return text
    return _CONTROLS.sub("", _ESCAPES.sub("", text).replace("\t", "    "))


def one_line(text: str) -> str:
    """The same, in one line."""
    return " ".join(plain(text).split())


def as_seen(line: str) -> str:
    """What a terminal shows of a line in which carriage returns begin it anew: a progress bar as it is now."""
    parts = (plain(part).rstrip() for part in reversed(line.split("\r")))  # one by one: the last mostly is it
    return next((part for part in parts if part), "")


def last_line(path: str) -> str:
    """The last line of a log that has something in it, as a terminal shows it; "" where there is none, or no log."""
    for line in reversed(_end(path, _BLOCK).split("\n")):
        seen = as_seen(line)
        if seen:
            return seen
    return ""


def last_lines(path: str, count: int) -> list[str]:
    """The last so many lines of a log, oldest first, each as a terminal shows it."""
    lines = [as_seen(line) for line in _end(path, count * 400 + _BLOCK).rstrip("\n").split("\n")]
    return lines[-count:] if any(lines) else []


def _end(path: str, size: int) -> str:
    """The last bytes of a file, as text. A pipe, a link, or whatever else somebody has put there, is no log."""
    try:
        with open(open_file(path), "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, max(0, os.fstat(file.fileno()).st_size - size)).decode(
                errors="replace"
            )
    except OSError:
        return ""
