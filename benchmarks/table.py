"""The figures of `make bench` as the table in Markdown that the README shows: from the JSON files, by nobody's hand.

python benchmarks/table.py [DIRECTORY]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _measure import Goal, Series, Table, digits, quantile

PROGRAMS = (
    "sweep_of_200",
    "sweep_of_40",
    "slot_turnover",
    "slot_to_task",
    "first_job",
    "map_of_sleeps",
    "ddp_groups",
    "job_memory",
    "long_sweep",
    "plugin_import",
    "display_cost",
    "job_stages",
)
"""In the order of the table."""


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """A row per goal, in the order of the programs, and a line per machine."""
    lines = ["| question | gpu_pool | beside it | figure | aimed at |", "|---|---|---|---|---|"]
    for result in results:
        for plain in result["tables"]:
            table = from_plain(plain)
            lines += (row(table, goal) for goal in table.goals)
    if any(result["quick"] for result in results):
        lines += ["", "A try: of no worth as a measurement."]
    lines += ["", *dict.fromkeys(_of_machine(result["machine"]) for result in results)]
    return "\n".join(lines)


def from_plain(plain: Mapping[str, Any]) -> Table:
    """The table that ``Table.plain`` was made from."""
    series = tuple(Series(one["name"], tuple(one["values"])) for one in plain["series"])
    return Table(plain["title"], plain["unit"], series, tuple(map(_goal, plain["goals"])))


def _goal(plain: Mapping[str, Any]) -> Goal:
    given = {name: value for name, value in plain.items() if name != "figure"}
    return Goal(**{**given, "beside": tuple(given["beside"])})


def row(table: Table, goal: Goal) -> str:
    """Medians, or the goal's own quantile, with minimum and maximum."""
    own, figure = table.named(goal.of), goal.figure(table.series)
    others = map(table.named, [*([] if goal.against is None else [goal.against]), *goal.beside])
    beside = "; ".join(f"{other.name}: {_values(other, goal.share, table.unit)}" for other in others)
    reached = digits(figure) if figure <= goal.at_most else f"**{digits(figure)}**"
    unit = goal.unit(table.unit)
    cells = (
        goal.question,
        _values(own, goal.share, table.unit),
        beside,
        f"{reached} {unit}".strip(),
        f"{goal.at_most:g} {unit}".strip(),
    )
    return f"| {' | '.join(cells)} |"


def _values(series: Series, share: float, unit: str) -> str:
    middle = f"{digits(quantile(series.values, share))} {unit}"
    if len(series.values) == 1:
        return middle
    return f"{middle} ({digits(min(series.values))}–{digits(max(series.values))})"


def _of_machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    what = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB, Linux {machine['kernel']}"
    return f"{machine['date']}: {what}; Python {machine['python']}, {versions}."


def read(directory: Path) -> list[dict[str, Any]]:
    """What was measured, in the order of the table."""
    paths = (directory / f"{name}.json" for name in PROGRAMS)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("results")
    print(markdown(read(directory)))
