"""How much memory each further running job takes, beside one of submitit_local, which is an interpreter of its own.

All processes of a sweep are asked while its jobs wait in their task functions: main, what the launcher has started, the
jobs. What they have in memory together, with one job and with several, differs by the further jobs. Of the kernel's
sums in smaps_rollup there are two: PSS, where a page that several processes share counts for each in part, so that the
sum is what there is; and private, the pages that a process shares with none, which are given back when it ends.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _gate import gate
from _measure import Goal, Series, Table, main, turns
from _place import GPU_POOL, LAUNCHERS, Place, end_what_is_left, place, succeeded

APP = """
import os
import hydra, torch

@hydra.main(version_base="1.3", config_path=None)
def app(cfg):
    torch.is_grad_enabled()
    here = os.open(os.environ["BENCH_HERE"], os.O_WRONLY)
    os.write(here, b".")
    os.close(here)
    os.close(os.open(os.environ["BENCH_GO"], os.O_RDONLY))  # until somebody opens it to write

if __name__ == "__main__":
    app()
"""


@dataclass(frozen=True)
class Sizes:
    """``further``: jobs beside the first one."""

    rounds: int
    further: int


@dataclass(frozen=True)
class Memory:
    """Of several processes together, in MB (1e6 bytes)."""

    pss: float
    private: float


def measure(sizes: Sizes) -> list[Table]:
    names = ("gpu_pool", "submitit_local")
    seen: dict[str, list[Memory]] = {name: [] for name in names}
    with place(APP) as at:
        for name in turns(names, sizes.rounds):
            one, all_ = (running(at, name, jobs) for jobs in (1, 1 + sizes.further))
            pss, private = ((b - a) / sizes.further for a, b in ((one.pss, all_.pss), (one.private, all_.private)))
            seen[name].append(Memory(pss, private))
    tables = []
    for what, at_most in (("pss", 0.2), ("private", 0.1)):
        question = f"memory of each further running job, {what.upper() if what == 'pss' else what}"
        series = tuple(Series(name, tuple(getattr(one, what) for one in seen[name])) for name in names)
        goal = Goal(question, "gpu_pool", at_most, "submitit_local")
        tables.append(Table(question, "MB", series, (goal,)))
    return tables


def running(at: Place, name: str, jobs: int) -> Memory:
    """What a sweep has in memory while so many of its jobs run. Raises TimeoutError where they never do."""
    launcher = (*GPU_POOL, f"hydra.launcher.cpu_slots={jobs}") if name == "gpu_pool" else LAUNCHERS[name]
    with (
        gate(at) as jobs_gate,
        tempfile.TemporaryDirectory(dir=at.directory) as into,
        tempfile.TemporaryFile("w+") as said,
    ):
        process = at.popen(at.command(launcher, jobs, into), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        jobs_gate.wait(jobs)
        memory = memory_of([process.pid, *below(process.pid)])
        with jobs_gate.open():
            process.wait()
        end_what_is_left()
        said.seek(0)
        succeeded(process, said.read())
    return memory


def below(pid: int) -> Iterator[int]:
    """The pids of all that descend from this process."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child
            yield from below(child)


def memory_of(pids: list[int]) -> Memory:
    """Of all of them together."""
    kb: dict[str, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, amount = line.split()[:2]
            kb[name] = kb.get(name, 0) + int(amount)
    return Memory(1.024e-3 * kb["Pss:"], 1.024e-3 * (kb["Private_Clean:"] + kb["Private_Dirty:"]))


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=3, further=3), Sizes(rounds=1, further=1))
