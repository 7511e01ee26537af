"""How near GpuPool.map comes to the best that can be done: 200 sleeps of 0.05 to 0.4 s, on 8 and on 16 slots.

The best is computed: each sleep begins, in the order of the list, when a slot is free, and nothing else takes time.
Beside it is the pool that people write by hand, which waits for each of its processes in turn, a tenth of a second
each; and the floor, which forks, and does nothing else. All are timed inside of their processes, from the call to its
return, the start of the supervisor included.
"""

from __future__ import annotations

import heapq
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _measure import Goal, Series, Table, main, take_turns
from _place import Place, place, succeeded

SEED = 7

POOLS = ("gpu_pool", "poll_and_join", "bare")


@dataclass(frozen=True)
class Sizes:
    rounds: int
    sleeps: int


def measure(sizes: Sizes) -> list[Table]:
    draw = random.Random(SEED)
    sleeps = [draw.uniform(0.05, 0.4) for _ in range(sizes.sleeps)]
    with place() as at:
        return [_table(at, sleeps, slots, sizes.rounds) for slots in (8, 16)]


def _table(at: Place, sleeps: Sequence[float], slots: int, rounds: int) -> Table:
    series = take_turns({name: partial(run, at, name, slots, sleeps) for name in POOLS}, rounds)
    best = Series("the best list schedule, computed", (best_list_schedule(sleeps, slots),))
    question = f"GpuPool.map of {len(sleeps)} sleeps, {slots} slots"
    return Table(question, "s", (*series, best), (Goal(question, "gpu_pool", 1.05, best.name, beside=POOLS[1:]),))


def best_list_schedule(sleeps: Sequence[float], slots: int) -> float:
    """When the last one ends, if each begins, in their order, as soon as one of the slots is free."""
    free = [0.0] * slots
    for seconds in sleeps:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def run(at: Place, pool: str, slots: int, sleeps: Sequence[float]) -> float:
    """The seconds that the pool says it has taken."""
    program = Path(__file__).resolve().with_name("_pools.py")
    command = [sys.executable, str(program), pool, str(slots), *map(repr, sleeps)]
    process = at.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, said = process.communicate()
    succeeded(process, said)
    seconds: float = json.loads(out)
    return seconds


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=3, sleeps=200), Sizes(rounds=1, sleeps=24))
