"""One run of one pool, in an interpreter of its own: sleeps, on so many slots; prints the seconds that it has taken.

    python benchmarks/_pools.py (gpu_pool | poll_and_join | bare) SLOTS SECONDS…

torch is imported before, as in the app of most who have use for a pool.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch  # noqa: F401

from hydra_plugins.hydra_gpu_pool_launcher import GpuPool


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def gpu_pool(slots: int, sleeps: Sequence[float]) -> None:
    pool = GpuPool(gpus=[], cpu_slots=slots, start_method="fork", progress="none")
    for outcome in pool.map(sleep, [{"seconds": seconds} for seconds in sleeps]):
        if outcome.error is not None:
            raise outcome.error


def poll_and_join(slots: int, sleeps: Sequence[float]) -> None:
    """What people write by hand: each process is waited for in turn, for a tenth of a second."""
    waiting = list(sleeps)
    running: list[multiprocessing.Process] = []
    while waiting or running:
        while waiting and len(running) < slots:
            process = multiprocessing.Process(target=sleep, args=(waiting.pop(0),))
            process.start()
            running.append(process)
        for process in list(running):
            process.join(0.1)
            if not process.is_alive():
                running.remove(process)


def bare(slots: int, sleeps: Sequence[float]) -> None:
    """The floor: a fork for each, and nothing else. What came of it nobody knows."""
    waiting, running = deque(sleeps), 0
    while waiting or running:
        while waiting and running < slots:
            seconds = waiting.popleft()
            if os.fork() == 0:
                time.sleep(seconds)
                os._exit(0)
            running += 1
        os.wait()
        running -= 1


if __name__ == "__main__":
    pool = {"gpu_pool": gpu_pool, "poll_and_join": poll_and_join, "bare": bare}[sys.argv[1]]
    given = int(sys.argv[2]), [float(text) for text in sys.argv[3:]]
    start = time.perf_counter()
    multiprocessing.set_start_method("fork")
    pool(*given)
    print(json.dumps(time.perf_counter() - start))
