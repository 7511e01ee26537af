"""What a job of two ranks costs: as one of a sweep, and as one torchrun command.

    python benchmarks/ddp_groups.py [--rounds ROUNDS] [--jobs JOBS] [--json FILE]

The job is a Hydra app whose ranks make one all_reduce with gloo, on the CPU, with torch alone and with Lightning
imported beside it. Each round runs one torchrun command, a sweep of JOBS jobs and a sweep of one, all of the same file;
the order changes from round to round. The jobs of a sweep run one after the other, as torchrun commands would.

A job of a sweep costs what is left when the start and the end of the whole sweep are taken away: the wall time of JOBS
jobs without that of one, over JOBS - 1. Beside it stands what the journal says of each job, from its fork to its end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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

APPS = {"torch": APP, "torch and lightning": f"import lightning\n{APP}"}

RANKS = 2

LAUNCHER = {"mode": "ddp", "ddp.nproc_per_node": RANKS, "gpus": "[]", "cpu_slots": 1, "start_method": "fork"}


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


def torchrun(directory: Path, times: Times) -> None:
    """One command, as a user would give it for one job, but for its console script, which is no more than this."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "app.py", "hydra.run.dir=run", "+x=0"]
    times.torchrun.append(timed(directory, command))


def sweep(directory: Path, times: Times, jobs: int) -> None:
    """One sweep of so many jobs; raises RuntimeError where one of them has not completed with its sum."""
    settings = [f"hydra.launcher.{key}={value}" for key, value in LAUNCHER.items()]
    values = ",".join(map(str, range(jobs)))
    with tempfile.TemporaryDirectory(dir=directory) as name:
        command = ["app.py", "-m", "hydra/launcher=gpu_pool", f"hydra.sweep.dir={name}", *settings, f"+x={values}"]
        seconds = timed(directory, command)
        ends = [line for line in journal(Path(name)) if line["event"] == "end"]
    if [(end["status"], end["value"]) for end in ends] != [("COMPLETED", float(RANKS))] * jobs:
        raise RuntimeError(f"the jobs of the sweep ended in {ends}")
    if jobs == 1:
        times.sweep_of_one.append(seconds)
    else:
        times.sweep.append(seconds)
        times.by_journal += [end["seconds"] for end in ends]


def journal(sweep_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (sweep_dir / ".gpu_pool/journal.jsonl").read_text().splitlines()]


def timed(directory: Path, arguments: list[str]) -> float:
    """The wall time of a Python with these arguments, which must succeed, in seconds."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return seconds


def measure(source: str, rounds: int, jobs: int) -> Times:
    """Before the first round, each way is gone once, uncounted: files are read for the first time then."""
    times = Times()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "app.py").write_text(source)
        steps: list[Callable[[Times], None]] = [
            lambda into: torchrun(directory, into),
            lambda into: sweep(directory, into, jobs),
            lambda into: sweep(directory, into, 1),
        ]
        for step in steps[::2]:
            step(Times())
        for i in range(rounds):
            for step in steps if i % 2 else reversed(steps):
                step(times)
    return times


def row(what: str, seconds: list[float], of: float) -> str:
    median = statistics.median(seconds)
    return f"{what:<50} {median:8.3f} {min(seconds):8.3f} {max(seconds):8.3f} {median / of:8.3f}"


def main(rounds: int, jobs: int, file: Path | None) -> None:
    """Print, per app and way to run it, the seconds per job, and their share of what torchrun takes."""
    apps = [name for name in APPS if name == "torch" or importlib.util.find_spec("lightning") is not None]
    load = [os.getloadavg()[0]]
    measured = {name: measure(APPS[name], rounds, jobs) for name in apps}
    load.append(os.getloadavg()[0])

    title = f"{RANKS} ranks, one all_reduce; {rounds} rounds, {jobs} jobs"
    print(f"{title:<50} {'median':>8} {'min':>8} {'max':>8} {'ratio':>8}  seconds per job")
    for name, times in measured.items():
        of = statistics.median(times.torchrun)
        print(row(f"{name}: torchrun", times.torchrun, of))
        print(row(f"{name}: here, by wall times", times.by_walls(jobs), of))
        print(row(f"{name}: here, by the journal", times.by_journal, of))
    if len(apps) < len(APPS):
        print("lightning is not installed: not measured with it")
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {load[0]:.1f} before and {load[1]:.1f} after, which this has made itself in part")
    if file is not None:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "hydra-core")}
        machine = {"cores": cores, "load": load, "python": platform.python_version(), **versions}
        results = {name: {**asdict(times), "by_walls": times.by_walls(jobs)} for name, times in measured.items()}
        text = json.dumps({"machine": machine, "rounds": rounds, "jobs": jobs, "seconds": results}, indent=2)
        file.write_text(f"{text}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=11, help="in a sweep, at least 2")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    given = parser.parse_args()
    if given.rounds < 1 or given.jobs < 2:
        parser.error("at least 1 round, and 2 jobs")
    main(given.rounds, given.jobs, given.json)
