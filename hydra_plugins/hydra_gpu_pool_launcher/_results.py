"""The results of a sweep as a table: a row per job, a column per thing that is known of one. Pure.

What stands in the cells is the app's, and not trusted: whoever writes them somewhere makes them fit for that place.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._errors import JOB_ERRORS, JobCancelledError
from ._files import SweepFiles
from ._model import Cause
from ._seen import JobView
from ._view import View, columns

Cell = str | int | float | bool | None
"""None: there is nothing to say."""

LOST = "LOST"
"""In the place of a state: the sweep is over, and the journal does not say what became of this job."""

_MOST_OF_ONE_VALUE = 64
_MOST_OF_ALL_VALUES = 256
_LONGEST_LIST = 16
_DEEPEST = 8


class Kind(enum.Enum):
    """What a column is about."""

    ABOUT = "about"
    OVERRIDE = "override"
    VALUE = "value"


@dataclass(frozen=True)
class Column:
    """A column. ``name``: its header, that of no other column; ``kind``: where it comes from."""

    name: str
    kind: Kind = Kind.ABOUT


@dataclass(frozen=True)
class Table:
    """``rows``: as many cells in each as there are columns, jobs by their numbers, which are in ``nums``."""

    columns: tuple[Column, ...]
    nums: tuple[int, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def column(self, name: str) -> list[Cell]:
        """One column's cells, in the order of the rows."""
        at = [column.name for column in self.columns].index(name)
        return [row[at] for row in self.rows]

    def of(self, kind: Kind) -> list[str]:
        """The names of the columns of this kind, in their order."""
        return [column.name for column in self.columns if column.kind is kind]


def results(view: View, *, over: bool = False) -> Table:
    """What is known of each job. ``over``: nothing runs any more, whatever the journal says.

    In this order: number, a column per override that differs, status, value, seconds, gpu, slot, tries, peak_mb,
    gpu_mb, cpu_seconds, cause, error, log. A value that is a dict has a column per key (value.loss), a short list of
    numbers one per position (value.0). These names stand fast: an override whose key is one of them is at
    ``override.KEY``.
    """
    jobs = view.in_order()
    keys, overrides = columns([job.job for job in jobs])
    names, values = _spread_all([job.value for job in jobs])
    headers = _apart(keys, {"number", "status", *_FIGURES, *names})
    table = [Column("number"), *(Column(headers[key], Kind.OVERRIDE) for key in keys)]
    table += [Column("status"), *(Column(name, Kind.VALUE) for name in names), *map(Column, _FIGURES)]
    rows = []
    for job, row, value in zip(jobs, overrides, values, strict=True):
        cells = {**_about(job, over), **{headers[key]: _unquoted(text) for key, text in row.items()}, **value}
        rows.append(tuple(cells.get(column.name) for column in table))
    return Table(columns=tuple(table), nums=tuple(job.job.num for job in jobs), rows=tuple(rows))


def status(job: JobView, over: bool) -> str:
    """The job's state, as text; LOST where all is over and it is not."""
    return LOST if over and not job.state.over else str(job.state)


def gpu_of(slot: str) -> str:
    """The GPU of a slot's label: "0" of "0.1"."""
    return slot.rpartition(".")[0]


def log_of(job: JobView) -> str | None:
    """The file that has what the job printed, relative to the sweep's directory; None where it was never started."""
    return SweepFiles("").output(job.job.num) if job.tries or job.cause is Cause.RESUMED else None


def error_line(error_type: str | None, error_text: str | None, longest: int = 1000) -> str:
    """What went wrong, in one line; "" for nothing. gpu_pool's own errors are whole sentences; others have a type."""
    text, name = " ".join((error_text_of(error_type, error_text) or "").split()), error_type or ""
    line = text if name in JOB_ERRORS or not name else f"{name}: {text}" if text else name
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def error_text_of(error_type: str | None, error_text: str | None) -> str | None:
    """The text of an error, without what the status says already: the same wherever it is told."""
    cancelled = error_type == JobCancelledError.__name__
    return error_text.removeprefix("was cancelled: ") if error_text and cancelled else error_text


_FIGURES = ("seconds", "gpu", "slot", "tries", "peak_mb", "gpu_mb", "cpu_seconds", "cause", "error", "log")


def _about(job: JobView, over: bool) -> dict[str, Cell]:
    slots = job.known_tries[-1].slots if job.known_tries else ()
    return {
        "number": job.job.num,
        "status": status(job, over),
        "seconds": job.seconds,
        "gpu": ",".join(map(gpu_of, slots)) or None,
        "slot": ",".join(slot.rpartition(".")[2] for slot in slots) or None,
        "tries": len(job.known_tries),
        "peak_mb": job.peak_mb,
        "gpu_mb": job.gpu_mb,
        "cpu_seconds": job.cpu_s,
        "cause": None if job.cause is None else job.cause.value,
        "error": error_line(job.error_type, job.error_text) or None,
        "log": log_of(job),
    }


def _apart(keys: list[str], taken: set[str]) -> dict[str, str]:
    """A name of its own for each key of an override: the key itself, unless that is taken."""
    names: dict[str, str] = {}
    reserved = taken | set(keys)
    for key in keys:
        name = key
        while name in taken or (name != key and name in reserved):
            name = f"override.{name}"
        names[key] = name
        reserved.add(name)
    return names


_QUOTED = re.compile(r"""(['"])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
_ESCAPED = re.compile(r"""\\([\\'"])""")


def _unquoted(text: str) -> str:
    """An override's value as the job has it, where it is one quoted text: it is compared with that in the table."""
    quoted = _QUOTED.fullmatch(text)
    return _ESCAPED.sub(r"\1", quoted[2]) if quoted else text


def _spread_all(values: list[Any]) -> tuple[list[str], list[dict[str, Cell]]]:
    """The columns of all values, in the order in which they come up, and each value's cells."""
    spread = [_spread(value) for value in values]
    names = dict.fromkeys(name for cells in spread for name in cells)
    if len(names) > _MOST_OF_ALL_VALUES:
        spread = [{"value": _whole(value)} for value in values]
        names = {}
    return list(names) or ["value"], spread


def _spread(value: Any) -> dict[str, Cell]:
    """The cells of one value, by column. Whole, where it has too many, or two that are of one name."""
    if value is None:
        return {}
    cells: dict[str, Cell] = {}
    return cells if _lay_out("value", value, cells, _DEEPEST) else {"value": _whole(value)}


def _lay_out(name: str, value: Any, cells: dict[str, Cell], deepest: int) -> bool:
    """Add the value's cells; False: they cannot be had."""
    parts: Mapping[str, Any] | None = None
    if isinstance(value, dict) and value and deepest:
        parts = {f"{name}.{key}": part for key, part in value.items()}
    elif isinstance(value, list) and 0 < len(value) <= _LONGEST_LIST and all(_is_number(part) for part in value):
        parts = {f"{name}.{place}": part for place, part in enumerate(value)}
    if parts is not None:
        return all(_lay_out(of_part, part, cells, deepest - 1) for of_part, part in parts.items())
    if name in cells or len(cells) == _MOST_OF_ONE_VALUE:
        return False
    cells[name] = _whole(value)
    return True


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _whole(value: Any) -> Cell:
    """The value in one cell: in JSON where it is more than a number or a text."""
    if _is_number(value) or isinstance(value, str):
        return value  # type: ignore[no-any-return]
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return None
