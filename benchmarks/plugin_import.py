"""What the installed plugin costs every Hydra app of the environment, at its start: the import of its public module.

    python benchmarks/plugin_import.py [ROUNDS]

Each round starts one fresh interpreter, which imports what Hydra imports anyway, and then times our module and, as a
yardstick, Hydra's own basic launcher, which is imported in the same way. The order changes from round to round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

OURS = "hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher"
BASIC = "hydra._internal.core_plugins.basic_launcher"

TIMING = """
import importlib, json, sys, time
import hydra.core.config_store, hydra.core.utils, hydra.plugins.launcher, hydra.types
import hydra_plugins, hydra._internal.core_plugins
times = {}
for name in sys.argv[1:]:
    start = time.perf_counter()
    importlib.import_module(name)
    times[name] = time.perf_counter() - start
print(json.dumps(times))
"""


def main(rounds: int) -> None:
    """Print, per module, the median, minimum and maximum in milliseconds."""
    times: dict[str, list[float]] = {OURS: [], BASIC: []}
    for i in range(rounds):
        names = [OURS, BASIC] if i % 2 else [BASIC, OURS]
        done = subprocess.run([sys.executable, "-c", TIMING, *names], capture_output=True, text=True, check=True)
        for name, seconds in json.loads(done.stdout).items():
            times[name].append(1000 * seconds)
    print(f"{'module':<70} {'median':>8} {'min':>8} {'max':>8}  ms, {rounds} rounds")
    for name, ms in times.items():
        print(f"{name:<70} {statistics.median(ms):8.2f} {min(ms):8.2f} {max(ms):8.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
