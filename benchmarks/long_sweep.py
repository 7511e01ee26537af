"""What a job of a long sweep costs main and supervisor more than one of a short sweep: in time, and in memory.

The jobs exit at once, and Hydra's composition and run_job are left out, so that what is left is gpu_pool's own: fork,
schedule, journal, results on disk, their way back to main. 10,000 jobs beside 1,000, in one run, in processes of their
own. Memory is what main and supervisor have (RSS) when launch() has returned, with all returns in main: the difference
of the long and the short sweep, over the difference of their jobs.

torch is not imported here: its fork takes as long in any sweep, and would hide what grows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import Goal, Series, Table, main
from _place import Place, place, succeeded


@dataclass(frozen=True)
class Sizes:
    """``long`` and ``short``: jobs. A round is a short sweep, a long one, and a short one."""

    rounds: int
    long: int
    short: int


def measure(sizes: Sizes) -> list[Table]:
    if sizes.long <= sizes.short:
        sys.exit("--long: more than --short")
    seen: dict[int, list[dict[str, Any]]] = {sizes.long: [], sizes.short: []}
    with place() as at:
        for _ in range(sizes.rounds):
            for jobs in (sizes.short, sizes.long, sizes.short):
                seen[jobs].append(sweep(at, jobs))

    long, short = f"{sizes.long} jobs", f"{sizes.short} jobs"
    times = tuple(
        Series(name, tuple(1000 * one["seconds"] / jobs for one in seen[jobs]))
        for name, jobs in ((long, sizes.long), (short, sizes.short))
    )
    question = "main and supervisor, time per job"
    main_, supervisor = (_growth(seen, sizes, what) for what in ("main_kb", "supervisor_kb"))
    both = Series("both, more memory per job", tuple(a + b for a, b in zip(main_, supervisor, strict=True)))
    growth = (both, Series("main", main_), Series("supervisor", supervisor))
    goals = (Goal(f"main and supervisor, more memory per job, {long}", both.name, 10),)
    return [
        Table(question, "ms", times, (Goal(f"{question}, {long} beside {short}", long, 1.1, short),)),
        Table("memory", "KB", growth, goals),
    ]


def _growth(seen: dict[int, list[dict[str, Any]]], sizes: Sizes, what: str) -> tuple[float, ...]:
    """KB (1024 bytes) per job, of each long sweep, beside the mean of the short ones around it."""
    short = [one[what] for one in seen[sizes.short]]
    return tuple(
        (one[what] - (short[2 * i] + short[2 * i + 1]) / 2) / (sizes.long - sizes.short)
        for i, one in enumerate(seen[sizes.long])
    )


def sweep(at: Place, jobs: int) -> dict[str, Any]:
    """What the sweep says of itself."""
    program = Path(__file__).resolve().with_name("_stubbed_sweep.py")
    with tempfile.TemporaryDirectory(dir=at.directory) as into, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, str(program), str(jobs), into]
        process = at.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said)
        out, _ = process.communicate()
        said.seek(0)
        succeeded(process, said.read())
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=1, long=10_000, short=1_000), Sizes(rounds=1, long=200, short=50))
