"""The floor: a launcher that forks, composes and runs each job, and does nothing else of what a launcher should.

Whatever a launcher does that forks a process per job, this is part of it. It is here to be measured beside; nothing is
isolated, saved or cleaned up. The app has a function ``stamp``.
"""

# No "from __future__ import annotations" here: omegaconf would see the fields' types as text.
import os
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


@dataclass
class BareConf:
    _target_: str = "hydra_plugins.bare_launcher.BareLauncher"
    slots: int = 2


class BareLauncher(Launcher):
    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = slots

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._hydra_context, self._task_function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        waiting, free = deque(enumerate(job_overrides, initial_job_idx)), deque(range(self._slots))
        running: dict[int, int] = {}
        while waiting or running:
            while waiting and free:
                slot = free.popleft()
                running[self._fork(slot, *waiting.popleft())] = slot
            pid, status = os.wait()
            free.append(running.pop(pid))
            if status:
                raise RuntimeError(f"a job ended with {status}")
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]

    def _fork(self, slot: int, num: int, overrides: Sequence[str]) -> int:
        stamp: Any = sys.modules["__main__"].stamp
        os.environ["GPU_POOL_SLOT"] = str(slot)
        pid = os.fork()
        if pid == 0:
            try:
                self._run(num, overrides, stamp)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        return pid

    def _run(self, num: int, overrides: Sequence[str], stamp: Any) -> NoReturn:
        setup_globals()
        config = self._hydra_context.config_loader.load_sweep_config(self._config, list(overrides))
        stamp("composed")
        with open_dict(config):
            config.hydra.job.id = str(num)
            config.hydra.job.num = num
        run_job(
            hydra_context=self._hydra_context,
            task_function=self._task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        os._exit(0)


ConfigStore.instance().store(group="hydra/launcher", name="bare", node=BareConf, provider="bare")
