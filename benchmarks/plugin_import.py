"""What the installed plugin costs every Hydra app of the environment, at its start: the import of its public module.

Each round starts one fresh interpreter, which imports what Hydra imports anyway, and then times our module and, as a
yardstick, Hydra's own basic launcher, which is imported in the same way. The order changes from round to round.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from _measure import Goal, Series, Table, main

MODULES = {
    "gpu_pool": "hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher",
    "basic": "hydra._internal.core_plugins.basic_launcher",
}

TIMING = """
import importlib, json, sys, time
import hydra.core.config_store, hydra.core.utils, hydra.plugins.launcher, hydra.types
import hydra_plugins, hydra._internal.core_plugins
times = []
for name in sys.argv[1:]:
    start = time.perf_counter()
    importlib.import_module(name)
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


@dataclass(frozen=True)
class Sizes:
    rounds: int


def measure(sizes: Sizes) -> list[Table]:
    times: dict[str, list[float]] = {name: [] for name in MODULES}
    for i in range(sizes.rounds):
        names = sorted(MODULES, reverse=i % 2 == 1)
        command = [sys.executable, "-c", TIMING, *(MODULES[name] for name in names)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for name, seconds in zip(names, json.loads(done.stdout), strict=True):
            times[name].append(1000 * seconds)
    question = "the plugin's cost to any Hydra app's start"
    series = tuple(Series(name, tuple(values)) for name, values in times.items())
    return [Table(question, "ms", series, (Goal(question, "gpu_pool", 5, beside=("basic",)),))]


if __name__ == "__main__":
    main(__doc__, measure, Sizes(rounds=20), Sizes(rounds=2))
