"""How long the first job of a long sweep waits: from the call of launch() to its task function entered.

What comes before is Hydra's: its sweeper composes the config of each job once, whatever the launcher is. The sweep is
ended when its first job has begun. Hydra's basic launcher, whose first job knows nothing of the others, and whose sweep
is therefore short, runs it in the main process, without a fork.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from _measure import Goal, Table, main, take_turns
from _place import LAUNCHERS, Place, place
from _stamps import APP, Stamps, watched


@dataclass(frozen=True)
class Sizes:
    rounds: int
    jobs: int


def measure(sizes: Sizes) -> list[Table]:
    with place(APP) as at:
        ways = {"gpu_pool": partial(first, at, "gpu_pool", sizes.jobs), "basic": partial(first, at, "basic", 2)}
        series = take_turns(ways, sizes.rounds)
    question = f"the first job's task function entered, {sizes.jobs} jobs, from the call of launch()"
    return [Table(question, "s", series, (Goal(question, "gpu_pool", 0.15, beside=("basic",)),))]


def first(at: Place, name: str, jobs: int) -> float:
    """Seconds."""
    stamps = watched(at, LAUNCHERS[name], jobs, until=lambda stamps: bool(stamps.slots))
    (launched,) = (times["launch"] for times in stamps.times.values() if "launch" in times)
    return _entered(stamps) - launched


def _entered(stamps: Stamps) -> float:
    return min(times["task"] for times in stamps.times.values() if "task" in times)


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=5, jobs=300), Sizes(rounds=1, jobs=5))
