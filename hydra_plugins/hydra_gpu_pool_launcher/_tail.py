"""The ends of jobs' logs, as a person can be shown them: of whatever a job prints, plain text is left."""

from __future__ import annotations

import os
import re
from typing import Any

from ._files import open_file

_BLOCK = 1 << 14
"""Bytes from the end of a log that are looked at for its last line; a progress bar's are some hundred each."""

CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
"""One that is no text, but for line ends and tabs: those that turn the direction of writing are among them."""

ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    # OSC, DCS and the like: titles, links. An end that does not come in the same line would take the text with it.
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])(?:[^\x07\x1b\x80-\x9f\r\n]*(?:\x07|\x1b\\|\x9c))?"
    r"|\x1b[ -/]*[0-~]"
)
"""The control functions of ECMA-48. Where one of them is never ended, its beginning alone."""

_CONTROLS = re.compile(CONTROLS)


def plain(text: str) -> str:
    """The text without escape sequences and control characters, but for line ends; tabs are four spaces.

    Characters that turn the direction of writing are control characters, too: they could make a line say another.
    """
    if text.isprintable():  # as most lines are
        return text
    return _CONTROLS.sub("", ESCAPES.sub("", text).replace("\t", "    "))


def one_line(text: str) -> str:
    """The same, in one line."""
    return " ".join(plain(text).split())


def as_seen(line: str) -> str:
    """What a terminal shows of a line in which carriage returns begin it anew: a progress bar as it is now."""
    parts = (plain(part).rstrip() for part in reversed(line.split("\r")))  # one by one: the last mostly is it
    return next((part for part in parts if part), "")


_TRACEBACK = re.compile(r"(?<=\S)(?:  \+ Exception Group )?Traceback \(most recent call last\):$")


def lines_seen(line: str) -> list[str]:
    """The same; two lines where a traceback follows a progress bar that has not ended its line, as at most failures."""
    seen = as_seen(line)
    found = _TRACEBACK.search(seen)
    if found is None or "\r" not in line.rstrip("\r"):
        return [seen]
    return [seen[: found.start()], found[0]]


def encodable(text: str, stream: object) -> str:
    """The text, with something else in the place of what the stream's encoding lacks; UTF-8 where it names none."""
    encoding: Any = getattr(stream, "encoding", None) or "utf-8"
    try:
        return str(text.encode(encoding, "replace").decode(encoding))
    except (LookupError, TypeError, ValueError):  # of a stream of the app's own: no such encoding, or not even a name
        return text.encode("utf-8", "backslashreplace").decode()


def last_line(path: str) -> str:
    """The last line of a log that has something in it, as a terminal shows it; "" where there is none, or no log."""
    for line in reversed(_end(path, _BLOCK).split("\n")):
        seen = lines_seen(line)[-1]
        if seen:
            return seen
    return ""


def last_lines(path: str, size: int = 4 * _BLOCK) -> list[str]:
    """The lines of the last so many bytes of a log, oldest first, each as a terminal shows it."""
    lines = [seen for line in _end(path, size).rstrip("\n").split("\n") for seen in lines_seen(line)]
    return lines if any(lines) else []


def _end(path: str, size: int) -> str:
    """The last bytes of a file, as text. A pipe, a link, or whatever else somebody has put there, is no log."""
    try:
        with open(open_file(path), "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, max(0, os.fstat(file.fileno()).st_size - size)).decode(
                errors="replace"
            )
    except OSError:
        return ""
