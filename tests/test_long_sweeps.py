"""A long sweep leaves no more behind than a short one: what main, guard and supervisor hold is counted by its jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

JOBS, FIRST = 2000, 10
LIMIT_S = 180

APP = f"""
import json, os
from pathlib import Path
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool

def held(pid):
    process = Path(f"/proc/{{pid}}")
    return [
        len(os.listdir(process / "fd")),
        len(os.listdir(process / "task")),
        sum(len(task.read_text().split()) for task in process.glob("task/*/children")),
    ]

def parent(pid):
    return int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])

def job(x):
    if {FIRST} <= x < {JOBS - FIRST}:
        return None
    supervisor = os.getppid()
    guard = parent(supervisor)
    pids = {{"supervisor": supervisor, "guard": guard, "main": parent(guard), "job": os.getpid()}}
    return {{who: held(pid) for who, pid in pids.items()}}

outcomes = GpuPool(cpu_slots=2, gpus=[], dir=".", progress="none").map(job, [dict(x=x) for x in range({JOBS})])
print(json.dumps([o.value if o.error is None else str(o.error) for o in outcomes]))
"""


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: each job waits for the disk four times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_after_two_thousand_jobs_nothing_more_is_held_than_after_ten(quick_disk: Path) -> None:
    command = [sys.executable, "-c", APP]
    done = subprocess.run(command, cwd=quick_disk, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    seen = json.loads(done.stdout)
    assert seen[FIRST:-FIRST] == [None] * (JOBS - 2 * FIRST)
    for who in ("supervisor", "guard", "main", "job"):
        for i, what in enumerate(("descriptors", "threads", "children and zombies")):
            first, last = ([value[who][i] for value in part] for part in (seen[:FIRST], seen[-FIRST:]))
            assert max(last) <= max(first), f"{who} has more {what}: {last} after {first}"
