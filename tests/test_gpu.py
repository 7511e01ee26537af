"""Jobs on a real GPU. What can be is run on the CPU as well, so that what the tests are made of is known to work."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from support import RunApp

pytest.importorskip("torch")

APP = """
import json, os, sys
import torch
from hydra_plugins.hydra_gpu_pool_launcher import GpuPool, _interpreter, _machine

PLACE = sys.argv[1]
if PLACE == "gpu" and torch.version.cuda is None:
    print(json.dumps("torch is built without CUDA"))
    sys.exit()

def pool(**more):
    slots = dict(gpus=[], cpu_slots=2) if PLACE == "cpu" else dict(gpus=[0], per_gpu=2)
    return GpuPool(dir="sweep", progress="none", **slots, **more)

def work():
    "The sum of some ones, on the first device that this job sees, and how many it sees."
    device = "cpu" if PLACE == "cpu" else "cuda:0"
    total = torch.ones(1000, device=device).sum().item()
    return total, 0 if PLACE == "cpu" else torch.cuda.device_count()

def meet(mine, others):
    "Block until the other job is there."
    fds = [os.open(path, os.O_RDWR) for path in (mine, others)]
    os.write(fds[0], b"x")
    os.read(fds[1], 1)

def of_the_driver(pid):
    "The driver's device files that a process has open."
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            pass
    return sorted({path for path in found if path.startswith("/dev/nvidia")})

def ends():
    with open("sweep/.gpu_pool/journal.jsonl") as journal:
        return [event for event in map(json.loads, journal) if event["event"] in ("retry", "end")]

for name in "ab":
    os.mkfifo(name)
A, B = map(os.path.abspath, "ab")
"""

SIDE_BY_SIDE = f"""{APP}
def job(mine, others):
    before = work()
    meet(mine, others)
    return [before, os.environ["GPU_POOL_SLOT"]]
print(json.dumps([o.value for o in pool().map(job, [dict(mine=A, others=B), dict(mine=B, others=A)])]))
"""

UNTOUCHED = f"""{APP}
def job():
    supervisor = of_the_driver(os.getppid())
    return [work()[0], of_the_driver(os.getpid()) != [], supervisor]
values = [o.value for o in pool().map(job, [dict(), dict()])]
print(json.dumps([values, of_the_driver(os.getpid()), _interpreter.cuda_state()]))
"""

PEAK = f"""{APP}
from hydra_plugins.hydra_gpu_pool_launcher import _inotify
GB = 2
def told():
    with open("sweep/.gpu_pool/journal.jsonl") as journal:
        return any('"memory"' in line for line in journal)
def job():
    held = torch.zeros(GB * 10**9, dtype=torch.uint8, device="cuda")
    with _inotify.Changes() as changes:
        changes.watch("sweep/.gpu_pool")
        while not told():
            changes.wait(60.0)
    return held.sum().item()
if not _machine.in_first_pid_namespace():
    print(json.dumps("the driver's process ids are another namespace's"))
    sys.exit()
outcome, = pool().map(job, [dict()])
print(json.dumps([outcome.value, [event["gpu_mb"] for event in ends()]]))
"""

OUT_OF_MEMORY = f"""{APP}
def job(mine, others):
    alone = "," in os.environ["GPU_POOL_SLOT"]
    if not alone:
        meet(mine, others)
    total = torch.cuda.mem_get_info()[1]
    try:
        held = torch.empty(total * 6 // 10, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        meet(mine, others)
        raise
    if not alone:
        meet(mine, others)  # the other one has found no room
    return alone
print(json.dumps([
    [o.value for o in pool(max_retries=1).map(job, [dict(mine=A, others=B), dict(mine=B, others=A)])],
    [[event["event"], event["cause"]] for event in ends()],
]))
"""

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="has no driver")]
GPU = pytest.param("gpu", id="gpu", marks=ON_GPU)
PLACES = [pytest.param("cpu", id="cpu"), GPU]


def told(run_app: RunApp, source: str, place: str) -> Any:
    """What the app has printed, as JSON."""
    done = run_app(source, place)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_two_jobs_share_a_gpu_side_by_side_and_see_it_alone(run_app: RunApp, place: str) -> None:
    """Each waits for the other: one after the other, they would never end."""
    seen, device = (0, "cpu") if place == "cpu" else (1, "0")
    assert told(run_app, SIDE_BY_SIDE, place) == [[[1000.0, seen], f"{device}.{slot}"] for slot in range(2)]


@pytest.mark.parametrize("place", PLACES)
def test_jobs_use_the_driver_and_neither_main_nor_the_supervisor_does(run_app: RunApp, place: str) -> None:
    assert told(run_app, UNTOUCHED, place) == [[[1000.0, place == "gpu", []]] * 2, [], None]


@pytest.mark.parametrize("place", [GPU])
def test_the_peak_of_a_jobs_gpu_memory_is_known_after_it(run_app: RunApp, place: str) -> None:
    value, (peak,) = told(run_app, PEAK, place)
    assert value == 0
    assert 2000 <= peak < 4000


@pytest.mark.parametrize("place", [GPU])
def test_what_ran_out_of_gpu_memory_is_tried_again_with_the_gpu_for_itself(run_app: RunApp, place: str) -> None:
    values, events = told(run_app, OUT_OF_MEMORY, place)
    assert sorted(values) == [False, True]
    assert sorted(events) == [["end", "returned"], ["end", "returned"], ["retry", "oom"]]
