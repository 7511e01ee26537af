"""How long a sweep of 40 jobs that do nothing takes, two at once: what a launcher costs that is used for little."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from _measure import Goal, Table, main, take_turns
from _place import LAUNCHERS, place


@dataclass(frozen=True)
class Sizes:
    rounds: int
    jobs: int


LAUNCHED = ("gpu_pool", "joblib", "basic")


def measure(sizes: Sizes) -> list[Table]:
    with place() as at:
        for name in LAUNCHED:
            at.sweep(LAUNCHERS[name], 2)  # uncounted: files are read for the first time
        series = take_turns({name: partial(at.sweep, LAUNCHERS[name], sizes.jobs) for name in LAUNCHED}, sizes.rounds)
    question = f"{sizes.jobs} jobs, 2 slots, wall time"
    return [Table(question, "s", series, (Goal(question, "gpu_pool", 0.65, "joblib", beside=("basic",)),))]


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=5, jobs=40), Sizes(rounds=1, jobs=4))
