"""Where the time of a job goes that does nothing: by stage, from its fork to that of the next job on its slot.

The app has the ends of gpu_pool's and Hydra's functions stamped, in the job's process. One job at a time, so that none
waits for a core; what other processes of the sweep do meanwhile, main above all, which shows its end, takes no time of
it. The stages follow each other without a gap, so their sum is the time that a slot needs for a job.

What comes before all of them is beside it, by the job: until it calls launch(), Hydra's sweeper composes in main, one
config after the other, whatever the launcher is.
"""

from __future__ import annotations

from dataclasses import dataclass

from _measure import Series, Table, main
from _place import GPU_POOL, place
from _stamps import APP, watched

STAGES = {
    "forking": "the supervisor reaps, journals, makes the next job's files",
    "begun": "fork",
    "entered": "set-up: session, signals, log, environment, threads, exit hooks",
    "composed": "the config, as main has composed it",
    "task": "Hydra's run_job up to the task: logging, directory, .hydra",
    "run": "Hydra's run_job after it",
    "stated": "the return is described, pickled, and loaded to see that it can be",
    "saved": "return and outcome are on disk",
    "ended": "exit hooks",
    "gone": "exit of the process",
}
"""By the event at which a stage ends; the first begins where the last job on the slot was gone."""

STAMPED = """
from hydra_plugins.hydra_gpu_pool_launcher import _composed, _hydra_body, _leader, _result

def stamp_end(owner, name, event):
    function = getattr(owner, name)
    def stamped(*args, **kwargs):
        value = function(*args, **kwargs)
        stamp(event)
        return value
    setattr(owner, name, stamped)

stamp_end(_leader, "enter", "entered")
stamp_end(_composed.Composed, "take", "composed")
stamp_end(_hydra_body, "run_job", "run")
stamp_end(_result, "stated", "stated")
stamp_end(_result, "save_return", "saved")
stamp_end(_leader, "end", "ended")

@hydra.main"""


@dataclass(frozen=True)
class Sizes:
    jobs: int


def measure(sizes: Sizes) -> list[Table]:
    with place(APP.replace("@hydra.main", STAMPED)) as at:
        seen = watched(at, (*GPU_POOL, "hydra.launcher.cpu_slots=1"), sizes.jobs)
    stages: dict[str, list[float]] = {event: [] for event in STAGES}
    for before, job in seen.successions():
        last = before.times["gone"]
        for event in STAGES:
            stages[event].append(1000 * (job.times[event] - last))
            last = job.times[event]
    sums = tuple(map(sum, zip(*stages.values(), strict=True)))
    series = [Series(name, tuple(stages[event])) for event, name in STAGES.items()]
    (of_main,) = (times for times in seen.times.values() if "launch" in times)
    sweeper = Series("Hydra's sweeper", (1000 * (of_main["launch"] - of_main["instantiated"]) / sizes.jobs,))
    return [
        Table("where the time of a job goes that does nothing", "ms", (Series("all", sums), *series), ()),
        Table("before launch(), in main, by the job", "ms", (sweeper,), ()),
    ]


if __name__ == "__main__":
    main(__doc__, measure, Sizes(jobs=60), Sizes(jobs=4))
