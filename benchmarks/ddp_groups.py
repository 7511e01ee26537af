"""What a job of two ranks costs: as one of a sweep, and as one torchrun command.

The job is a Hydra app whose ranks make one all_reduce with gloo, on the CPU, with torch alone and with Lightning
imported beside it. Each round runs one torchrun command, a sweep of several jobs and a sweep of one, all of the same
file; the order changes from round to round. The jobs of a sweep run one after the other, as torchrun commands would.

A job of a sweep costs what is left when the start and the end of the whole sweep are taken away: the wall time of
several jobs without that of one, over the number of the others. Beside it stands what the journal says of each job,
from its fork to its end.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _measure import Goal, Series, Table, main, turns
from _place import GPU_POOL, Place, place

APP = """
import hydra, torch
import torch.distributed as dist

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)

if __name__ == "__main__":
    app()
"""

APPS = {"torch alone": APP, "with Lightning": f"import lightning\n{APP}"}

RANKS = 2

LAUNCHER = (
    *GPU_POOL,
    "hydra.launcher.mode=ddp",
    f"hydra.launcher.ddp.nproc_per_node={RANKS}",
    "hydra.launcher.cpu_slots=1",
)


@dataclass(frozen=True)
class Sizes:
    """``jobs``: in a sweep, at least 2."""

    rounds: int
    jobs: int


@dataclass
class Times:
    """In seconds, one per round: of a torchrun command, a sweep of all jobs, a sweep of one; and one per job."""

    torchrun: list[float] = field(default_factory=list)
    sweep: list[float] = field(default_factory=list)
    sweep_of_one: list[float] = field(default_factory=list)
    by_journal: list[float] = field(default_factory=list)

    def by_walls(self, jobs: int) -> list[float]:
        """What one job of the sweep costs, per round."""
        return [(all_ - one) / (jobs - 1) for all_, one in zip(self.sweep, self.sweep_of_one, strict=True)]


def measure(sizes: Sizes) -> list[Table]:
    if sizes.jobs < 2:
        sys.exit("--jobs: at least 2")
    there = {name: importlib.util.find_spec("lightning") is not None or source == APP for name, source in APPS.items()}
    for name in [name for name in APPS if not there[name]]:
        print(f"lightning is not installed: not measured {name}", file=sys.stderr)
    return [_table(name, sizes) for name in APPS if there[name]]


def _table(name: str, sizes: Sizes) -> Table:
    """Before the first round, each way is gone once, uncounted: files are read for the first time then."""
    times = Times()
    with place(APPS[name]) as at:
        ways: list[Callable[[Place, Times], None]] = [torchrun, partial(sweep, jobs=sizes.jobs), partial(sweep, jobs=1)]
        for way in ways[::2]:
            way(at, Times())
        for way in turns(ways, sizes.rounds):
            way(at, times)
    question = f"a group of {RANKS} that does one all_reduce, per job of a sweep, {name}"
    series = (
        Series("gpu_pool", tuple(times.by_walls(sizes.jobs))),
        Series("gpu_pool, by its journal", tuple(times.by_journal)),
        Series("torchrun", tuple(times.torchrun)),
    )
    return Table(question, "s", series, (Goal(question, "gpu_pool", 0.08, "torchrun"),))


def torchrun(at: Place, times: Times) -> None:
    """One command, as a user would give it for one job, but for its console script, which is no more than this."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "app.py", "hydra.run.dir=run", "+x=0"]
    times.torchrun.append(at.timed([sys.executable, *command]))


def sweep(at: Place, times: Times, jobs: int) -> None:
    """One sweep of so many jobs; raises RuntimeError where one of them has not completed with its sum."""
    with tempfile.TemporaryDirectory(dir=at.directory) as into:
        seconds = at.timed(at.command(LAUNCHER, jobs, into))
        ends = [line for line in journal(Path(into)) if line["event"] == "end"]
    if [(end["status"], end["value"]) for end in ends] != [("COMPLETED", float(RANKS))] * jobs:
        raise RuntimeError(f"the jobs of the sweep ended in {ends}")
    if jobs == 1:
        times.sweep_of_one.append(seconds)
    else:
        times.sweep.append(seconds)
        times.by_journal += [end["seconds"] for end in ends]


def journal(sweep_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (sweep_dir / ".gpu_pool/journal.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=3, jobs=11), Sizes(rounds=1, jobs=2))
