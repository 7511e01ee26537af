"""Text as the page shows it: of the app's, which is not trusted, and of numbers, times and spans. Pure."""

from __future__ import annotations

import html
import re
from datetime import datetime

from ._results import LOST, Cell
from ._seen import State
from ._tail import CONTROLS, ESCAPES

WORDS = {
    State.COMPLETED.value: "completed",
    State.FAILED.value: "failed",
    State.CANCELLED.value: "cancelled",
    LOST: "lost",
    State.RUNNING.value: "running",
    State.STOPPING.value: "stopping",
    State.QUEUED.value: "queued",
}
"""States as they are shown, in the order of the legend; also the CSS classes of their colours."""

_CONTROL = re.compile(CONTROLS)
_LINE_LENGTH = 400


def escaped(text: str, longest: int = 300) -> str:
    """Text of the app's, as HTML shows it; in one line, and not longer than this."""
    line = " ".join(_CONTROL.sub(_picture, cut(text, 2 * longest)).split())
    return html.escape(cut(line, longest)).encode("utf-8", "replace").decode("utf-8")


def verbatim(text: str) -> str:
    """A line that is to be copied, as HTML shows it: its blanks stay, and nothing is cut."""
    return html.escape(_CONTROL.sub(_picture, text)).encode("utf-8", "replace").decode("utf-8")


def _picture(control: re.Match[str]) -> str:
    code = ord(control[0])
    if code in {0x0B, 0x0C, 0x0D}:
        return " "
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def cut(text: str, longest: int) -> str:
    """At most so many characters of it, with an ellipsis where that is not all."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def plain(log: str) -> list[str]:
    """The lines of a log, as a terminal would have them in the end, without its colours."""
    lines = []
    for line in ESCAPES.sub("", log).split("\n"):
        written = [part for part in line.split("\r") if part.strip()]  # a progress bar writes over itself
        lines.append(_CONTROL.sub(_picture, cut(written[-1], _LINE_LENGTH)) if written else "")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def span(seconds: float | None) -> str:
    """A time span: "4.4 s", "3:12", "1:02:04". page.js reads it back, to sort."""
    if seconds is None:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def cell_text(cell: Cell) -> str:
    """A cell as it is: a float with six digits, a number that is longer than any column by its length."""
    if isinstance(cell, int) and abs(cell) < 10**9:
        return str(cell)  # True and False, too
    if isinstance(cell, (int, float)):
        try:
            return f"{float(cell):.6g}"
        except OverflowError:
            return f"{len(str(abs(cell)))} digits"
    return cell or ""


def percent(share: float) -> str:
    """A share of one, "87 %"."""
    return f"{100 * share:.0f}\u202f%"


def grouped(number: int) -> str:
    """A count, "2 000"."""
    return f"{number:,}".replace(",", "\u202f")


def counted(number: int, what: str) -> str:
    """So many of them: "1 job", "2 jobs"."""
    return f"{grouped(number)} {what}{'' if number == 1 else 's'}"


def moment(at: float) -> str:
    """A point in time, in the time zone of the machine that writes the page."""
    local = datetime.fromtimestamp(at).astimezone()
    return f'<time datetime="{local.isoformat(timespec="seconds")}">{local:%Y-%m-%d %H:%M:%S} {local:%Z}</time>'
