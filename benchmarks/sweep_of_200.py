"""How long a sweep of 200 jobs that do nothing takes, two at once, by launcher.

All launchers are given the same app, by the same command but for their own keys. Hydra's basic one runs the jobs in the
main process, one after the other, and is there for reference: once, since nothing is compared with it.

submitit_local starts all jobs at once, however many there are, and each is an interpreter of its own: 200 would need
more memory than most machines have. So it runs few, and is compared by the job: the time of these few without that of
two, over the number of the others, so that its start and its end are not counted. Of ours they are, over all jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from _measure import Goal, Series, Table, main, take_turns
from _place import LAUNCHERS, Place, place


@dataclass(frozen=True)
class Sizes:
    """``few``: jobs of submitit_local, more than 2."""

    rounds: int
    jobs: int
    few: int


LONG = ("gpu_pool", "joblib", "ray")
FEWEST = 2


def measure(sizes: Sizes) -> list[Table]:
    if sizes.few <= FEWEST:
        sys.exit(f"--few: more than {FEWEST}")
    with place() as at:
        for name in LONG:
            at.sweep(LAUNCHERS[name], FEWEST)  # uncounted: files are read for the first time
        ways: dict[str, Callable[[], float]] = {name: partial(at.sweep, LAUNCHERS[name], sizes.jobs) for name in LONG}
        *long, submitit = take_turns({**ways, "submitit_local": partial(_by_job, at, sizes.few)}, sizes.rounds)
        basic = Series("basic", (at.sweep(LAUNCHERS["basic"], sizes.jobs),))
    by_job = Series("gpu_pool", tuple(1000 * seconds / sizes.jobs for seconds in long[0].values))
    question = f"{sizes.jobs} jobs, 2 slots, wall time"
    goals = (Goal(question, "gpu_pool", 0.75, "joblib", beside=("basic",)), Goal(question, "gpu_pool", 0.35, "ray"))
    further = f"the same, per job; of submitit_local's, what one more costs, {sizes.few} at once"
    goal = Goal(further, "gpu_pool", 0.2, "submitit_local")
    return [Table(question, "s", (*long, basic), goals), Table("the same, per job", "ms", (by_job, submitit), (goal,))]


def _by_job(at: Place, few: int) -> float:
    """Milliseconds that one job of submitit_local adds."""
    fewest, all_ = (at.sweep(LAUNCHERS["submitit_local"], jobs) for jobs in (FEWEST, few))
    return 1000 * (all_ - fewest) / (few - FEWEST)


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=3, jobs=200, few=10), Sizes(rounds=1, jobs=4, few=4))
