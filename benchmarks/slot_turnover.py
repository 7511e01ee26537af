"""How long a slot stays empty: from a job's process gone to the next job's process started in its place.

Gone: the job's pidfd is readable, the kernel's word. Started: the first line of Python in the new process. Both are
seen from outside, see ``_stamps``. In between, the launcher notices, records the end on disk, looks for what the job
has left, decides, and forks; ``bare``, the floor, only waits and forks.

The fork itself is a part of that, and no small one: the page tables of a process with torch are copied. So there is
also what the launcher needs until it forks, by the hook that Python runs right before. And from the job's last line,
its first handler of atexit: that is before its memory is given back, and so takes longer than what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from _measure import Goal, Series, Table, main
from _stamps import gaps, seen_in_turns


@dataclass(frozen=True)
class Sizes:
    rounds: int
    jobs: int


def measure(sizes: Sizes) -> list[Table]:
    seen = seen_in_turns(sizes.rounds, sizes.jobs)
    question = "from a job's process gone to the next one's started"
    series = (
        Series("gpu_pool", gaps(seen["gpu_pool"], "gone", "begun")),
        Series("gpu_pool, until its fork", gaps(seen["gpu_pool"], "gone", "forking")),
        Series("gpu_pool, from the job's last line", gaps(seen["gpu_pool"], "last", "begun")),
        Series("bare", gaps(seen["bare"], "gone", "begun")),
        Series("bare, until its fork", gaps(seen["bare"], "gone", "forking")),
    )
    goals = (
        Goal(f"{question}, median", "gpu_pool", 2, beside=("bare",)),
        Goal(f"{question}, p99", "gpu_pool", 20, share=0.99, beside=("bare",)),
    )
    return [Table(question, "ms", series, goals)]


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=2, jobs=100), Sizes(rounds=1, jobs=6))
