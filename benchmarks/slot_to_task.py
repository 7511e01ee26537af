"""How long a job takes to begin: from a job's process gone to the task function of the next one entered on its slot.

Beside it is the fork of the same app, and Hydra's composition of the job's config, in the fork. Both are measured in
``bare``, a launcher that does no more than that, also with two jobs at once, since two compositions at once slow each
other. Ours has its configs composed in main, and so may come out below. Hydra's run_job, which comes before the task
function in both, and makes the job's directory and sets up its logging, is not taken from ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from _measure import Goal, Series, Table, main
from _stamps import Stamps, gaps, seen_in_turns


@dataclass(frozen=True)
class Sizes:
    rounds: int
    jobs: int


def measure(sizes: Sizes) -> list[Table]:
    seen = seen_in_turns(sizes.rounds, sizes.jobs)
    question = "from a job's process gone to the next one's task function entered"
    floor = "bare: fork and composition"
    series = (
        Series("gpu_pool", gaps(seen["gpu_pool"], "gone", "task")),
        Series("bare", gaps(seen["bare"], "gone", "task")),
        Series(floor, parts(seen["bare"], "forking", "composed")),
        Series("bare: fork", parts(seen["bare"], "forking", "begun")),
        Series("gpu_pool: fork", parts(seen["gpu_pool"], "forking", "begun")),
    )
    goal = Goal(f"{question}, less bare's fork and composition", "gpu_pool", 10, floor, difference=True)
    return [Table(question, "ms", series, (goal,))]


def parts(seen: list[Stamps], before: str, after: str) -> tuple[float, ...]:
    """Of each job but the first ones, in milliseconds."""
    pairs = [pair for stamps in seen for pair in stamps.successions()]
    return tuple(1000 * (job.times[after] - job.times[before]) for _, job in pairs)


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=2, jobs=100), Sizes(rounds=1, jobs=6))
