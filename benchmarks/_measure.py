"""What all programs of this directory have in common: who comes when, what is made of the figures, where they go.

No figure of one run of one way means much, since machines are noisy: ways take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

VERSIONS = (
    "torch",
    "hydra-core",
    "hydra-joblib-launcher",
    "joblib",
    "hydra-submitit-launcher",
    "submitit",
    "hydra-ray-launcher",
    "ray",
    "lightning",
)

T = TypeVar("T")


def turns(ways: Sequence[T], rounds: int) -> Iterator[T]:
    """Each way once per round; the order of a round is that of the last one reversed, so that none is always first."""
    for i in range(rounds):
        yield from ways if i % 2 == 0 else reversed(ways)


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> tuple[Series, ...]:
    """What each of the ways measures, in so many rounds."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for name in turns([*ways], rounds):
        values[name].append(ways[name]())
    return tuple(Series(name, tuple(found)) for name, found in values.items())


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that this share of them, above 0 and at most 1, does not exceed; the median for 0.5."""
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[math.ceil(share * len(values)) - 1]


@dataclass(frozen=True)
class Series:
    """What was measured of one way, in the order of the measurements, in the unit of its table."""

    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Goal:
    """What a figure of the series ``of`` is to be at most: the quantile of this share, by default the median.

    Where it is measured ``against`` another series, the figure is the ratio of both, or the ``difference``.
    ``question``: what is asked, as in the README's table. ``beside``: other series to be seen there.
    """

    question: str
    of: str
    at_most: float
    against: str | None = None
    difference: bool = False
    share: float = 0.5
    beside: tuple[str, ...] = ()

    def figure(self, series: Sequence[Series]) -> float:
        """What was reached."""
        named = {one.name: quantile(one.values, self.share) for one in series}
        own = named[self.of]
        if self.against is None:
            return own
        return own - named[self.against] if self.difference else own / named[self.against]

    def unit(self, of_table: str) -> str:
        """Of the figure: "" for a ratio."""
        return of_table if self.against is None or self.difference else ""


@dataclass(frozen=True)
class Table:
    """Series of one unit, and what is to be reached among them. Of all of them, the first is ours."""

    title: str
    unit: str
    series: tuple[Series, ...]
    goals: tuple[Goal, ...] = ()

    def named(self, name: str) -> Series:
        """The series of this name."""
        return next(one for one in self.series if one.name == name)

    def ratio(self, one: Series) -> float | None:
        """The median of the first series by that of this one; None where that is 0."""
        return self.series[0].median / one.median if one.median else None

    def lines(self) -> list[str]:
        """For a person who has run the program."""
        width = max(50, len(self.title), *(len(one.name) for one in self.series))
        lines = [f"{self.title:<{width}} {'n':>5} {'median':>9} {'min':>9} {'max':>9} {'ratio':>7}  {self.unit}"]
        for one in self.series:
            figures = (f"{digits(value):>9}" for value in (one.median, min(one.values), max(one.values)))
            ratio = self.ratio(one)
            by = "" if ratio is None else f"{ratio:.3f}"
            lines.append(f"{one.name:<{width}} {len(one.values):5} {' '.join(figures)} {by:>7}")
        for goal in self.goals:
            figure = goal.figure(self.series)
            word = "reached" if figure <= goal.at_most else "NOT reached"
            lines.append(f"  {meaning(goal, self.unit)}: {digits(figure)}, at most {goal.at_most:g}: {word}")
        return lines

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        series = [
            {
                **asdict(one),
                "median": one.median,
                "min": min(one.values),
                "max": max(one.values),
                "ratio": self.ratio(one),
            }
            for one in self.series
        ]
        goals = [{**asdict(goal), "figure": goal.figure(self.series)} for goal in self.goals]
        return {"title": self.title, "unit": self.unit, "series": series, "goals": goals}


def meaning(goal: Goal, unit: str) -> str:
    """What the goal's figure is, in words."""
    of = goal.of if goal.share == 0.5 else f"p{100 * goal.share:g} of {goal.of}"
    if goal.against is not None:
        of = f"{of} {'−' if goal.difference else '/'} {goal.against}"
    return ", ".join(filter(None, [of, goal.unit(unit)]))


def digits(value: float) -> str:
    """Three of them, as far as they say something, and all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """What the figures depend on, and the day."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS if (version := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(about: str | None, measure: Callable[[T], Sequence[Table]], full: T, quick: T) -> None:
    """A program: its options, its run, its table, its JSON.

    ``full`` and ``quick`` are instances of a dataclass of numbers, each of which is an option.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a try: every step once, with no worth as a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for all figures")
    names = [field.name for field in fields(full)]  # type: ignore[arg-type]
    for name in names:
        both = f"{getattr(full, name)}, or {getattr(quick, name)} with --quick"
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=both)
    given = parser.parse_args()
    sizes = quick if given.quick else full
    chosen = {name: getattr(sizes, name) if (n := getattr(given, name)) is None else n for name in names}

    load = [os.getloadavg()[0]]
    tables = measure(type(sizes)(**chosen))
    load.append(os.getloadavg()[0])

    for table in tables:
        print("\n".join(table.lines()), flush=True)
    print(f"load {load[0]:.1f} before and {load[1]:.1f} after, which this has made itself in part\n", flush=True)
    if given.json is not None:
        result = {
            "machine": machine(),
            "load": load,
            "quick": given.quick,
            "sizes": chosen,
            "tables": [table.plain() for table in tables],
        }
        given.json.write_text(f"{json.dumps(result, indent=2)}\n", encoding="utf-8")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number
