"""Of a failed job's log, the lines that tell what went wrong, and the place in the user's code. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ._errors import JobCrashedError
from ._model import Cause
from ._seen import JobView

_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_STACK = re.compile(r"(Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):$")
"""Above the stack of a thread; a progress bar may stand before it."""

_OURS = "hydra_plugins.hydra_gpu_pool_launcher."
_CHAINED = "The above exception was the direct cause of the following exception:"

_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)')
_PASSED_THROUGH = re.compile(r"/hydra_plugins/hydra_gpu_pool_launcher/\w+\.py$|/(site|dist)-packages/hydra/")
_OF_A_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
_MARKS = re.compile(r"\s+[\^~][\^~ ]*")
"""That Python puts under the part of a line that raised."""

_LEFT_OUT = "    …"


@dataclass(frozen=True)
class Excerpt:
    """``lines``: oldest first. ``error``: the exception as the traceback names it, at its end; it follows them.

    ``place``: of the user's code, where it was last; None where no traceback tells.
    """

    lines: tuple[str, ...]
    error: tuple[str, ...] = ()
    place: str | None = None

    def whole(self) -> list[str]:
        """All of it, as it stands in the log."""
        return [*self.lines, *self.error]


@dataclass(frozen=True)
class _Frame:
    path: str
    line: str
    function: str
    lines: tuple[str, ...]

    @property
    def passed_through(self) -> bool:
        """Of Hydra or gpu_pool: it says nothing about the job."""
        return _PASSED_THROUGH.search(self.path) is not None

    @property
    def of_the_user(self) -> bool:
        return not _OF_A_LIBRARY.search(self.path)

    @property
    def place(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line} in {self.function}"


def excerpt(log: Sequence[str], job: JobView, most: int, *, without_error: bool = False) -> Excerpt:
    """At most so many lines of a log's end, of which each line is given as plain text.

    The end of the traceback of what the job failed of, or the top of what Python printed when it was killed, or when it
    was stopped since its time was over; where there is no such thing, the last that was printed. ``without_error``: the
    exception is not counted, for it is shown elsewhere.
    """
    if job.cause is Cause.TIMEOUT:
        return _of_stacks([line.rstrip() for line in log], most)
    lines, is_cause = _without_ours([line.rstrip() for line in log], job.error_type or "")
    if job.error_type == JobCrashedError.__name__ and "SIGKILL" not in (job.error_text or ""):
        at = _last(lines, lambda line: line.startswith(_FATAL))
        if at is not None:
            return _of_dump(lines, at, most)
    found = _traceback(lines, None if is_cause else job.error_type or "")
    if found is not None:
        return _of_traceback(lines, *found, most=most, without_error=without_error)
    return Excerpt(tuple(_printed(lines, most)))


def _without_ours(log: list[str], error_type: str) -> tuple[list[str], bool]:
    """The log without what gpu_pool has put in the place of sys.exit(3), say; True: what led to it is the end."""
    at = _last(log, lambda line: line.startswith(_OURS) and _is(line, error_type))
    if at is None:
        return log, False
    cause = at
    while cause and not log[cause - 1]:
        cause -= 1
    return (log[: cause - 1], True) if log[cause - 1 : cause] == [_CHAINED] else (log[:at], False)


def _last(log: Sequence[str], holds: Callable[[str], bool]) -> int | None:
    return next((i for i in reversed(range(len(log))) if holds(log[i])), None)


def _printed(log: Sequence[str], most: int) -> list[str]:
    """The last lines that have something in them."""
    return [line for line in log if line][-most:] if most > 0 else []


# --- faulthandler's dump, the newest frame first: of a fatal error, or of where SIGTERM met the job ---


def _of_dump(log: Sequence[str], at: int, most: int) -> Excerpt:
    threads = [i for i in range(at + 1, len(log)) if log[i].endswith("(most recent call first):")]
    current = next((i for i in threads if log[i].startswith("Current thread ")), threads[0] if threads else len(log))
    frames = _stack(log[current + 1 :])
    chosen = _chosen(frames, most - 1)[::-1]
    before = _printed(log[:at], most - 1 - len(chosen))
    return Excerpt((*before, log[at], *chosen), place=_place(frames))


def _stack(log: Sequence[str]) -> list[_Frame]:
    """With the newest frame last, from where Hydra or gpu_pool has called the user."""
    frames: list[_Frame] = []
    for line in log:
        found = _FRAME.fullmatch(line)
        frame = _Frame(found[1], found[2], found[3], (line,)) if found is not None else None
        if frame is None or frame.passed_through:
            break
        frames.insert(0, frame)
    return frames


def _of_stacks(log: Sequence[str], most: int) -> Excerpt:
    """The thread that heard the signal is the main thread, mostly, and stands last."""
    current = _last(log, lambda line: "Current thread 0x" in line and _STACK.search(line) is not None)
    if current is None:
        return Excerpt(tuple(_printed(log, most)))
    begin = current
    while begin and (not log[begin - 1] or log[begin - 1].startswith("  ") or _STACK.search(log[begin - 1])):
        begin -= 1
    frames = _stack(log[current + 1 :])
    chosen = _chosen(frames, most)[::-1]
    before = _printed([*log[:begin], _STACK.sub("", log[begin]).rstrip()], most - len(chosen))
    return Excerpt((*before, *chosen), place=_place(frames))


# --- a traceback, the newest frame last ---


def _traceback(log: Sequence[str], error_type: str | None) -> tuple[int, int] | None:
    """Where the last traceback of this type of error begins, and its exception does. None, for the type: of any."""
    for begin in (i for i in reversed(range(len(log))) if log[i] == _TRACEBACK):
        raised = next((i for i in range(begin + 1, len(log)) if log[i][:1] not in {"", " "}), None)
        if raised is not None and (error_type is None or _is(log[raised], error_type)):
            return begin, raised
    return None


def _is(line: str, error_type: str) -> bool:
    return line.partition(":")[0].rpartition(".")[2] == error_type.rpartition(".")[2]


def _of_traceback(log: Sequence[str], begin: int, raised: int, *, most: int, without_error: bool) -> Excerpt:
    end = next((i for i in range(raised, len(log)) if not log[i]), len(log))
    error = log[raised:end][: max(1, most // 2)]
    room = most - (0 if without_error else len(error))
    frames = [frame for frame in _frames(log[begin + 1 : raised]) if not frame.passed_through]
    chosen = _chosen(frames, room)
    before = _printed(log[: begin + 1], room - len(chosen))
    if before == [_TRACEBACK]:
        before = _printed(log[:begin], 1) or before  # a line of the job's says more
    return Excerpt((*before, *chosen), tuple(error), _place(frames))


def _frames(lines: Sequence[str]) -> list[_Frame]:
    frames: list[_Frame] = []
    for line in lines:
        found = _FRAME.fullmatch(line)
        if found is not None:
            frames.append(_Frame(found[1], found[2], found[3], (line,)))
        elif frames and not _MARKS.fullmatch(line):
            last = frames.pop()
            frames.append(_Frame(last.path, last.line, last.function, (*last.lines, line)))
    return frames


def _place(frames: Sequence[_Frame]) -> str | None:
    """Of frames with the newest last."""
    return next((frame.place for frame in reversed(frames) if frame.of_the_user), None)


def _chosen(frames: Sequence[_Frame], room: int) -> list[str]:
    """Lines of the last frames, as many as there is room for; the user's own last one is among them."""
    kept: list[_Frame] = []
    for frame in reversed(frames):
        if sum(len(each.lines) for each in [*kept, frame]) > room:
            break
        kept.insert(0, frame)
    own = next((frame for frame in reversed(frames) if frame.of_the_user), None)
    if own is not None and own not in kept:  # a library has raised, deep down
        while kept and sum(len(each.lines) for each in [*kept, own]) + 1 > room:
            del kept[0]
        return [*own.lines, _LEFT_OUT, *(line for frame in kept for line in frame.lines)][:room]
    return [line for frame in kept for line in frame.lines]
