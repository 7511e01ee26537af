"""One launch of so many jobs that exit at once, Hydra's composition and its run_job left out: what is gpu_pool's own.

    python benchmarks/_stubbed_sweep.py JOBS DIRECTORY

Prints the seconds of launch(), and what main and supervisor have in memory when it has returned, its returns included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.hydra_gpu_pool_launcher import _hydra_body
from hydra_plugins.hydra_gpu_pool_launcher._body import Call, Result
from hydra_plugins.hydra_gpu_pool_launcher._files import SweepFiles
from hydra_plugins.hydra_gpu_pool_launcher._model import Job
from hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher import GpuPoolLauncher

CONFIG = """
hydra:
  job: {env_set: {}}
  sweep: {dir: .}
  sweeper: {}
"""


def run(self: object, job: Job, call: Call) -> Result:  # noqa: ARG001
    """In place of composition and run_job."""
    return Result(JobReturn(overrides=list(job.overrides), status=JobStatus.COMPLETED))


def rss_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def main(jobs: int, directory: str) -> dict[str, Any]:
    os.chdir(directory)
    _hydra_body.HydraBody.run = run  # type: ignore[method-assign]
    launcher = GpuPoolLauncher(gpus=[], cpu_slots=2, start_method="fork")
    config = OmegaConf.create(CONFIG)
    assert isinstance(config, DictConfig)
    nobody_asks_it = ConfigLoaderImpl(ConfigSearchPathImpl())
    context = HydraContext(config_loader=nobody_asks_it, callbacks=Callbacks())
    launcher.setup(hydra_context=context, task_function=lambda _: None, config=config)
    overrides = [[f"x={i}"] for i in range(jobs)]
    start = time.perf_counter()
    returns = launcher.launch(overrides, 0)
    seconds = time.perf_counter() - start
    assert [ret.status for ret in returns] == [JobStatus.COMPLETED] * jobs
    with open(SweepFiles(".").journal, encoding="utf-8") as journal:
        supervisor = next(event["supervisor"] for event in map(json.loads, journal) if event["event"] == "launch")
    return {"seconds": seconds, "main_kb": rss_kb(os.getpid()), "supervisor_kb": rss_kb(supervisor)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))
