"""The benchmarks' own arithmetic, and that none of them is forgotten. What they measure is measured by `make bench`."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import table
from _measure import Goal, Series, Table, quantile, take_turns, turns
from map_of_sleeps import best_list_schedule

ROOT = Path(__file__).parent.parent
HERE = ROOT / "benchmarks"

OURS, THEIRS = Series("ours", (3.0, 1.0, 2.0)), Series("theirs", (4.0, 8.0))
RATIO = Goal("how fast?", "ours", 0.5, "theirs")
WALL = Table("wall time", "s", (OURS, THEIRS), (RATIO,))


def test_each_way_comes_once_a_round_and_none_is_always_first() -> None:
    assert [*turns("abc", 3)] == [*"abc", *"cba", *"abc"]
    clock = iter(range(10))
    ours, theirs = take_turns({"ours": lambda: next(clock), "theirs": lambda: next(clock)}, 3)
    assert (ours.values, theirs.values) == ((0, 3, 4), (1, 2, 5))


def test_a_quantile_is_a_value_that_was_measured_but_for_the_median_of_an_even_number() -> None:
    values = [float(i) for i in range(200, 0, -1)]
    assert quantile(values, 0.99) == 198
    assert quantile(values, 1) == 200
    assert quantile(values[:3], 0.99) == 200
    assert quantile([1.0, 2.0], 0.5) == 1.5


def test_a_figure_is_a_value_or_a_ratio_or_a_difference_of_the_quantiles_asked_for() -> None:
    assert replace(RATIO, against=None).figure(WALL.series) == 2
    assert RATIO.figure(WALL.series) == 2 / 6
    assert replace(RATIO, difference=True).figure(WALL.series) == 2 - 6
    assert replace(RATIO, share=1).figure(WALL.series) == 3 / 8


def test_a_figure_at_the_limit_is_reached_and_one_above_it_is_not() -> None:
    for at_most, word in ((2 / 6, ": reached"), (0.3, ": NOT reached")):
        assert replace(WALL, goals=(replace(RATIO, at_most=at_most),)).lines()[-1].endswith(word)


def test_the_ratio_of_a_line_is_the_first_ones_median_by_its_own_and_none_where_that_is_nothing() -> None:
    assert [WALL.ratio(one) for one in WALL.series] == [1, 2 / 6]
    idle = replace(WALL, series=(OURS, Series("idle", (0.0,))), goals=())
    assert idle.ratio(idle.series[1]) is None
    assert "NaN" not in json.dumps(idle.plain())
    assert idle.lines()[-1].split() == ["idle", "1", "0", "0", "0"]


@pytest.mark.parametrize(
    ("sleeps", "slots", "best"),
    [
        ((3.0, 1.0, 1.0, 1.0), 2, 3.0),
        ((1.0, 1.0, 1.0, 3.0), 2, 4.0),  # in the order of the list, although the longest first would take 3
        ((5.0, 1.0), 8, 5.0),
        ((1.0, 2.0), 1, 3.0),
    ],
)
def test_the_best_list_schedule_gives_each_free_slot_the_next_sleep_at_once(
    sleeps: tuple[float, ...], slots: int, best: float
) -> None:
    assert best_list_schedule(sleeps, slots) == best


def test_the_table_has_a_row_for_each_goal_and_the_machine_once_and_says_that_it_was_a_try(tmp_path: Path) -> None:
    machine = {
        "date": "2030-01-02",
        "cpu": "Some CPU",
        "cores": 2,
        "memory_gb": 16,
        "kernel": "6.1",
        "python": "3.11.7",
        "versions": {"torch": "2.13.0"},
    }
    at_most = Goal("how long at most?", "ours", 9, share=1, beside=("theirs",))
    missed = replace(WALL, goals=(replace(RATIO, at_most=0.3), at_most))
    for name, what, quick in (("sweep_of_40", missed, True), ("sweep_of_200", WALL, False)):
        result = json.dumps({"machine": machine, "quick": quick, "tables": [what.plain()]})
        (tmp_path / f"{name}.json").write_text(result)

    assert table.from_plain(json.loads(json.dumps(missed.plain()))) == missed
    assert table.markdown(table.read(tmp_path)).splitlines()[2:] == [
        "| how fast? | 2 s (1–3) | theirs: 6 s (4–8) | 0.333 | 0.5 |",
        "| how fast? | 2 s (1–3) | theirs: 6 s (4–8) | **0.333** | 0.3 |",
        "| how long at most? | 3 s (1–3) | theirs: 8 s (4–8) | 3 s | 9 s |",
        "",
        "A try: of no worth as a measurement.",
        "",
        "2030-01-02: 2 cores of Some CPU, 16 GB, Linux 6.1; Python 3.11.7, torch 2.13.0.",
    ]


def test_every_program_is_run_by_make_bench_has_its_place_in_the_table_and_is_explained() -> None:
    names = {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_")} - {"table"}
    assert sorted(table.PROGRAMS) == sorted(names)

    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert [name for name in table.PROGRAMS if f"\n| `{name}.py` |" not in readme] == []

    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    run = [make, "--dry-run", "bench"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert [name for name in table.PROGRAMS if f"benchmarks/{name}.py" not in done.stdout] == []
    assert "benchmarks/table.py benchmarks/results" in done.stdout
