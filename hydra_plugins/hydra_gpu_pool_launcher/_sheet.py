"""The page's results: their table, the lowest and the highest value, and a place for the plots. Pure.

A cell of the table has its text and nothing else, so that thousands of them are a small page; how a column looks is a
rule of its own, and the script reads what it sorts and draws from the cells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ._markup import WORDS, cell_text, counted, cut, escaped, span
from ._results import Cell, Column, Kind, Table

# What keeps the page of 2,000 jobs under 2 MB, whatever they are called.
_TABLE_BYTES = 1_100_000
_CELL_LENGTHS = (300, 100, 40, 20, 10)
_MOST_COLUMNS = 20

_HEADERS = {
    "number": "job",
    "status": "status",
    "seconds": "time",
    "gpu": "gpu",
    "tries": "tries",
    "peak_mb": "peak MB",
    "gpu_mb": "GPU MB",
    "cpu_seconds": "CPU time",
    "error": "what went wrong",
}
"""What the page shows of those columns of ``_results`` that are about the job itself, and how it calls them."""

_RIGHT = {"number", "seconds", "tries", "peak_mb", "gpu_mb", "cpu_seconds"}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Sheet:
    """A table, and those of its columns that the page shows, with their places in it."""

    table: Table
    shown: tuple[tuple[int, Column], ...]

    @classmethod
    def of(cls, table: Table) -> Sheet:
        """As many overrides and keys of values as can be looked at, and no column that would say nothing."""
        left = {Kind.ABOUT: len(table.columns), Kind.OVERRIDE: _MOST_COLUMNS, Kind.VALUE: _MOST_COLUMNS}
        shown = []
        for place, column in enumerate(table.columns):
            if left[column.kind] and _says_something(column, [row[place] for row in table.rows]):
                left[column.kind] -= 1
                shown.append((place, column))
        return cls(table, tuple(shown))

    def data(self) -> dict[str, Any]:
        """For page.js: the columns, and of each of the values that has numbers, the lowest and the highest."""
        columns = [{"name": self._header(column), "kind": column.kind.value} for _, column in self.shown]
        return {"columns": columns, "best": self._best()}

    def css(self) -> str:
        """Numbers stand on the right, and before a state is its colour."""
        rules = []
        for nth, (place, column) in enumerate(self.shown, 1):
            cells = f"#results td:nth-child({nth})"
            if column.name in _RIGHT if column.kind is Kind.ABOUT else self._is_numeric(place):
                rules.append(f"#results :is(th,td):nth-child({nth}){{text-align:right;white-space:nowrap}}")
            elif column.kind is Kind.ABOUT and column.name == "status":
                rules.append(f"{cells}{{white-space:nowrap}}")
                rules.append(
                    f"{cells}::before{{content:'';display:inline-block;width:.6em;height:.6em;border-radius:50%;"
                    "margin-right:.5em;background:var(--c)}"
                )
            elif column.kind is Kind.ABOUT and column.name == "error":
                rules.append(f"{cells}{{min-width:220px}}")
        return "\n".join(rules)

    def html(self) -> str:
        """The table, none without a job; shorter cells, and at last fewer rows, where the page would be too large."""
        if not self.table.rows:
            return ""
        heads = "".join(
            f'<th scope="col"><button type="button">{escaped(self._header(column))}</button></th>'
            for _, column in self.shown
        )
        for longest in _CELL_LENGTHS:
            rows = self._rows(longest)
            if sum(len(row.encode()) for row in rows) <= _TABLE_BYTES:
                break
        fit = _how_many_fit(rows)
        notes = [f"the first {fit} of {counted(len(rows), 'job')}"] if fit < len(rows) else []
        notes += ["long cells are cut"] if longest < _CELL_LENGTHS[0] else []
        notes += ['<a href="results.csv">results.csv</a> has all of it']
        note = "; ".join(notes) + '<span class="scripted">; a click on a header sorts</span>'
        return (
            '<section><h2>Results</h2><div class="scroll" tabindex="0" role="region" aria-label="results">'
            f'<table id="results"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows[:fit])}</tbody></table></div>'
            f'<p class="note">{note}</p></section>'
        )

    def values_html(self) -> str:
        """The lowest and the highest value, and a place for the plots; none where no job has returned a number."""
        best = self._best()
        if not best:
            return ""
        options = "".join(f"<option>{escaped(one['name'])}</option>" for one in best)
        choice = f'<label class="scripted">of <select id="key">{options}</select></label>' if len(best) > 1 else ""
        choice += f"<noscript>of {escaped(best[0]['name'])}</noscript>" if choice else ""
        ends = "".join(
            f'<div><dt>{word}</dt><dd><b id="{end}">{text}</b> <a id="{end}-job" href="#j{num}">job {num}</a>'
            f' <span id="{end}-overrides">{escaped(self._overrides(num), 200)}</span></dd></div>'
            for word, end in (("lowest", "low"), ("highest", "high"))
            for text, num in [best[0][end]]
        )
        return (
            f'<section id="values"><h2>Values {choice}</h2><dl class="best">{ends}</dl>'
            '<div class="plots" id="plots"></div>'
            "<noscript><p>The plots need JavaScript; the numbers are in results.csv, too.</p></noscript></section>"
        )

    def _header(self, column: Column) -> str:
        """What stands above a column: a key of the values by itself, where nothing else is called so."""
        if column.kind is Kind.ABOUT:
            return _HEADERS[column.name]
        key = column.name.removeprefix("value.")
        taken = {*self.table.of(Kind.OVERRIDE), *_HEADERS.values()}
        by_itself = column.kind is Kind.VALUE and key and not key.isdigit() and key not in taken
        return cut(key if by_itself else column.name, 60)

    def _is_numeric(self, place: int) -> bool:
        there = [cell for row in self.table.rows if not _is_empty(cell := row[place])]
        return bool(there) and all(not isinstance(cell, str) or _NUMBER.fullmatch(cell) for cell in there)

    def _rows(self, longest: int) -> list[str]:
        states = self.table.column("status")
        return [
            f'<tr class="{WORDS[str(state)]}" id="j{num}">'
            + "".join(f"<td>{_cell(column, row[place], longest)}" for place, column in self.shown)
            for state, num, row in zip(states, self.table.nums, self.table.rows, strict=True)
        ]

    def _best(self) -> list[dict[str, Any]]:
        found = []
        for nth, (place, column) in enumerate(self.shown):
            numbers = [
                (number, num)
                for row, num in zip(self.table.rows, self.table.nums, strict=True)
                if column.kind is Kind.VALUE and (number := _finite(row[place])) is not None
            ]
            if numbers:
                ends = {"low": min(numbers), "high": max(numbers, key=lambda one: (one[0], -one[1]))}
                texts = {end: [cell_text(number), num] for end, (number, num) in ends.items()}
                found.append({"name": self._header(column), "column": nth, **texts})
        return found

    def _overrides(self, num: int) -> str:
        row = self.table.rows[self.table.nums.index(num)]
        pairs = ((column, row[place]) for place, column in self.shown if column.kind is Kind.OVERRIDE)
        return ", ".join(f"{self._header(column)}={cell}" for column, cell in pairs if not _is_empty(cell))


def _says_something(column: Column, cells: Sequence[Cell]) -> bool:
    if column.kind is Kind.ABOUT and column.name not in _HEADERS:
        return False
    if column.name == "tries" and column.kind is Kind.ABOUT:
        return any(isinstance(cell, int) and cell > 1 for cell in cells)
    return column.kind is Kind.OVERRIDE or any(not _is_empty(cell) for cell in cells)


def _is_empty(cell: Cell) -> bool:
    return cell is None or cell == ""


def _finite(cell: Cell) -> float | None:
    if isinstance(cell, (str, bool)) or cell is None:
        return None
    try:
        return float(cell) if math.isfinite(cell) else None
    except OverflowError:
        return None


def _cell(column: Column, cell: Cell, longest: int) -> str:
    if column.kind is Kind.ABOUT and isinstance(cell, (int, float)):
        if column.name in {"seconds", "cpu_seconds"}:
            return span(cell)
        if column.name in {"peak_mb", "gpu_mb"}:
            return f"{cell:.0f}"
    if column.kind is Kind.ABOUT and column.name == "status":
        return WORDS[str(cell)]
    return escaped(cell, longest) if isinstance(cell, str) else cell_text(cell)


def _how_many_fit(rows: Iterable[str]) -> int:
    used = fit = 0
    for row in rows:
        used += len(row.encode())
        if used > _TABLE_BYTES:
            break
        fit += 1
    return fit
