"""A Hydra sweep, in main: overrides in, JobReturns out."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from . import _ddp, _devices, _lease_directory, _machine, _reimport, _torchrun
from ._again import command_to_resume
from ._carry import CarriedBody
from ._display import display
from ._environ import environ_for_jobs
from ._errors import ConfigurationError, JobCancelledError, JobError
from ._exceptions import safe_text
from ._files import SweepFiles
from ._hydra_body import HydraBody, failed_return, refuse_visibility
from ._interpreter import wandb_run
from ._machine import bound_to_one_core, cores
from ._model import Job, Layout, Policy, Settings
from ._pidfd import require_pidfd
from ._requests import Request
from ._say import from_here, say
from ._settings import checked
from ._settled import settle, with_remote_traceback
from ._supervisor import Supervisor
from ._verdict import told
from ._view import View
from ._world import App

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class Sweep:
    """One sweep, from the launcher's setup on: its settings, its slots, its supervisor. Lives in main."""

    def __init__(
        self, raw: Mapping[str, Any], hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        _reimport.refuse_sweep()
        _torchrun.refuse_rank()
        require_pidfd()
        self._settings = checked(plain(raw))
        refuse_visibility(config)
        self._layout = choose_slots(self._settings)
        # Resolved before the fork: ${now:...} is kept in the config from then on, and a job must not ask again.
        self._sweep_dir = str(config.hydra.sweep.dir)
        self._given = _given_by_hand(config) if self._settings.ddp.nnodes == 1 else None
        self._view = View()
        self._launches = 0
        self._failed: str | None = None  # why nothing is to start any more, with fail_fast
        self._used: set[SweepFiles] = set()
        _close_previous()
        self._body = HydraBody(hydra_context, task_function, config)
        self._supervisor = start_supervisor(
            self._body,
            self._layout,
            self._settings,
            frozenset(map(str, config.hydra.job.env_set)),
        )
        _supervisors.add(self._supervisor)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """See ``GpuPoolLauncher.launch``."""
        jobs = tuple(Job(initial_job_idx + i, tuple(overrides)) for i, overrides in enumerate(job_overrides))
        if not jobs:
            return []
        files = SweepFiles(os.path.join(working_directory(), self._sweep_dir))
        self._body.settle_configs()
        if self._failed is None:
            self._supervisor.renew()
        elif self._supervisor.gone:  # else its schedule knows why nothing is to start any more
            why = f"was cancelled: {self._failed}; it was not started"
            return [failed_return(job, JobCancelledError(job.num, job.overrides, why)) for job in jobs]
        if self._launches == 1 and self._settings.progress != "none" and len(jobs) < self._layout.jobs_at_once:
            idle = (
                f"{self._layout.jobs_at_once - len(jobs)} of {self._layout.jobs_at_once} slots stay idle in each batch"
            )
            say(f"{idle}: let the sweeper's batch (n_jobs, max_batch_size) be a multiple of the slots")
        resume = self._settings.resume
        fresh = files not in self._used and not resume
        request = Request(
            jobs,
            files,
            environ_for_jobs(),
            working_directory(),
            fresh=fresh,
            resume=resume,
            command=tuple(sys.orig_argv),
            given=self._given,
        )
        again = command_to_resume(request.command, request.given, from_here(files.sweep_dir))
        shown = display(self._settings, jobs, files, self._view, again)
        try:
            ends = self._supervisor.run(request, shown)
        finally:
            self._body.begin_another_launch()
        self._launches += 1
        self._used.add(files)
        returns = [_job_return(job, files, ends.get(job.num)) for job in jobs]
        if self._settings.fail_fast and self._failed is None:
            self._failed = _first_failure(jobs, returns)
        return returns


def _given_by_hand(config: DictConfig) -> tuple[str, ...] | None:
    """The overrides of the whole command; None with a sweeper that may draw other points the next time."""
    if config.hydra.sweeper.get("_target_") != _BASIC_SWEEPER:
        return None
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)  # as they were written
    return (*overrides["hydra"], *overrides["task"])


def choose_slots(settings: Settings) -> Layout:
    """The slots that the settings mean here, with a line for each fact about them. Raises ConfigurationError."""
    if settings.mode == "ddp":
        _ddp.require_torch(settings.prefix)
    layout, lines = _devices.layout(settings, os.environ)
    for line in lines if settings.progress != "none" else ():
        say(line)
    return layout


def _close_previous() -> None:
    """End the supervisor of a sweep that is over, but whose launcher something still refers to, a traceback say."""
    for supervisor in list(_supervisors):
        if not supervisor.busy:
            supervisor.close()
            _supervisors.discard(supervisor)


def start_supervisor(
    body: CarriedBody, layout: Layout, settings: Settings, set_later: frozenset[str] = frozenset()
) -> Supervisor:
    """A supervisor for this app, forked from it as it is now. Raises ConfigurationError where that is not safe.

    ``set_later``: the names of the variables that the body sets in each job's process, for the user.
    """
    if bound_to_one_core():
        say(
            f"the main process may use one CPU core of {os.cpu_count()}, and all jobs will share it: unless that is "
            "meant, look for taskset, a scheduler or a container that allows no more, or for an import that has set "
            "it (os.sched_getaffinity(0) tells when)",
            logging.WARNING,
        )
    if wandb_run():
        say(
            "a wandb run is active in the main process, and jobs would log to it, all of them: call wandb.finish() "
            "before the sweep, and wandb.init() in the task function",
            logging.WARNING,
        )
    driver = _machine.driver(layout)
    supervisor = Supervisor(
        App(
            body=body,
            layout=layout,
            policy=policy(settings, layout, gives_memory_back=driver is not None),
            threads_per_job=settings.threads_per_job,
            set_later=set_later,
            cores=cores(),
            group=_devices.group(settings, layout),
            devices=functools.partial(_devices.environment, layout, settings.mem_caps, set_later),
            driver=driver,
            driver_knows_our_pids=_machine.in_first_pid_namespace(),
            leases=_place_of_leases(layout, settings),
        ),
        settings.start_method,
    )
    supervisor.start()
    return supervisor


def _place_of_leases(layout: Layout, settings: Settings) -> str | None:
    """The directory in which the slots are leased; None, and perhaps a line that says why: they are not."""
    directory = _lease_directory.place_for(layout, os.environ) if settings.share else None
    why = None if directory is None else _lease_directory.require(directory, f"{settings.prefix}share")
    if why is not None:
        say(why, logging.WARNING)
        return None
    return directory


SETTLE_S = 10.0
"""For so long at most, the memory of a job that has ended is given time to come back."""


def policy(settings: Settings, layout: Layout, *, gives_memory_back: bool) -> Policy:
    """What of the settings the schedule decides by. ``gives_memory_back``: a driver can be asked whether it has."""
    return Policy(
        kill_grace_s=settings.kill_grace_s,
        timeout_s=None if settings.timeout_min is None else 60 * settings.timeout_min,
        stagger_s=settings.stagger_s,
        max_retries=settings.max_retries,
        retry_on=settings.retry_on,
        fail_fast=settings.fail_fast,
        min_free=_devices.least_free(settings, layout),
        settle_s=SETTLE_S if gives_memory_back else 0.0,
    )


def working_directory() -> str:
    """The directory in which jobs start. Raises ConfigurationError where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError(
            "The current directory has been removed; start the sweep in one that exists."
        ) from None


def plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as Hydra hands them over, in Python's own containers."""
    return {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in raw.items()
    }


def _first_failure(jobs: Sequence[Job], returns: Sequence[JobReturn]) -> str | None:
    for job, ret in zip(jobs, returns, strict=True):
        error = ret._return_value
        if ret.status == JobStatus.FAILED and not isinstance(error, JobCancelledError):
            text = error.why if isinstance(error, JobError) else safe_text(error)
            return f"fail_fast, since {told(job, type(error).__name__, text)}"
    return None


def _job_return(job: Job, files: SweepFiles, end: dict[str, Any] | None) -> JobReturn:
    settled = settle(job, files, end)
    if settled.error is not None:
        return failed_return(job, settled.error)
    ret = settled.payload
    assert isinstance(ret, JobReturn)
    if ret.status == JobStatus.FAILED:
        with_remote_traceback(ret._return_value, settled.traceback)
    return ret
