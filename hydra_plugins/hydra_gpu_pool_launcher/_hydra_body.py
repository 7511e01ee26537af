"""What a job's process runs for Hydra: compose, then run_job; and the JobReturns that it gives."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from . import _hydra_state
from ._body import Call, Result
from ._composed import Composed, without_keeping
from ._errors import ConfigurationError
from ._model import Job
from ._vendors import VISIBILITY_VARIABLES


def refuse_visibility(config: DictConfig) -> None:
    """``hydra.job.env_set`` is applied by run_job, after us: there, such a variable would silently beat the slot."""
    for name in config.hydra.job.env_set:
        if name in VISIBILITY_VARIABLES:
            raise ConfigurationError(
                f"hydra.job.env_set.{name}={config.hydra.job.env_set[name]!r}: gpu_pool sets the visible devices of "
                "each job itself; remove it there, and choose devices with hydra.launcher.gpus."
            )


_TASK_FUNCTION, _CONFIG, _CONTEXT, _STATE = "The task function", "The config", "hydra_context.", "What Hydra keeps"
_LOADER = f"{_CONTEXT}config_loader"
_STATE_OF_JOB = "What Hydra keeps for the job"


class HydraBody:
    """What a job's process runs: compose, then Hydra's run_job."""

    def __init__(self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._hydra_context = hydra_context
        self._task_function = task_function
        self._config = config
        self._composed = Composed(hydra_context.config_loader, config)

    @property
    def function(self) -> TaskFunction:
        return self._task_function

    def run(self, job: Job, call: Call) -> Result:
        setup_globals()
        config = self._composed.take(job.overrides)
        with open_dict(config):
            config.hydra.job.id = str(job.num)
            config.hydra.job.num = job.num
        refuse_visibility(config)

        @functools.wraps(self._task_function)
        def task_function(task_config: DictConfig) -> Any:
            return call(self._task_function, task_config)

        ret = run_job(
            hydra_context=self._hydra_context,
            task_function=task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        directory = config.hydra.runtime.output_dir
        if ret.status == JobStatus.FAILED:
            return Result(ret, error=ret._return_value, directory=directory)
        return Result(ret, value=ret._return_value, directory=directory)

    def settle_configs(self) -> None:
        """Before the jobs of a launch are forked, in main: those that were composed for something else are not run."""
        self._composed.forget_what_is_old()

    def begin_another_launch(self) -> None:
        self._composed.clear()

    def parts(self) -> dict[str, object]:
        return {
            _TASK_FUNCTION: self._task_function,
            **{_CONTEXT + name: value for name, value in vars(self._hydra_context).items()},
            _LOADER: without_keeping(self._hydra_context.config_loader),
            _CONFIG: self._config,
            _STATE: _hydra_state.HydraState.taken(),
        }

    def settle(self, *arguments: object) -> None:
        for config in (*arguments, HydraConfig.instance().cfg):
            _hydra_state.settle(config)

    def renewed(self) -> dict[str, object]:
        return {_STATE_OF_JOB: _hydra_state.HydraState.of_job()}

    def begin_rank(self, rank: int) -> None:
        """Hydra's logging of jobs; its files are rank 0's alone."""
        hydra = HydraConfig.get()
        logging_config: Any = OmegaConf.to_container(hydra.job_logging, resolve=True)
        if logging_config is not None:
            if rank != 0:
                _drop_log_files(logging_config)
            logging_config = OmegaConf.create(logging_config)
        configure_log(logging_config, hydra.verbose)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> HydraBody:
        parts[_STATE].put()
        if _STATE_OF_JOB in parts:
            parts[_STATE_OF_JOB].put()
        # By the names that there are: Hydra 1.4 has one more, and without it a job would be free to run any target.
        context = {name.removeprefix(_CONTEXT): parts[name] for name in parts if name.startswith(_CONTEXT)}
        return cls(HydraContext(**context), parts[_TASK_FUNCTION], parts[_CONFIG])

    @staticmethod
    def failure(job: Job, error: Exception, instead_of: Result | None = None) -> Result:
        if instead_of is not None and isinstance(instead_of.payload, JobReturn):
            ret = _copy(instead_of.payload)
            ret.status, ret.return_value = JobStatus.FAILED, error
            return Result(ret, error=error)
        return Result(failed_return(job, error), error=error)

    @staticmethod
    def without_config(result: Result) -> Result:
        assert isinstance(result.payload, JobReturn)
        ret = _copy(result.payload)
        ret.cfg, ret.hydra_cfg = _plain_config(ret.cfg), _plain_config(ret.hydra_cfg)
        return replace(result, payload=ret)


def _drop_log_files(config: dict[str, Any]) -> None:
    """Take the handlers that write to a file out of a configuration for logging.config."""
    handlers = config.get("handlers") or {}
    files = {name for name, handler in handlers.items() if "filename" in handler}
    for name in files:
        del handlers[name]
    for logger in [config.get("root"), *(config.get("loggers") or {}).values()]:
        if logger and logger.get("handlers"):
            logger["handlers"] = [name for name in logger["handlers"] if name not in files]


def _copy(ret: JobReturn) -> JobReturn:
    """As copy.copy, which under Hydra 1.4 puts a RuntimeError in the place of an exception that does not pickle."""
    copied = JobReturn()
    vars(copied).update(vars(ret))
    return copied


def _plain_config(config: DictConfig | None) -> DictConfig | None:
    """The config without the classes behind it, which may be local to a function; None where it holds odder things."""
    try:
        plain = DictConfig(OmegaConf.to_container(config)) if config is not None else None
        pickle.dumps(plain)
    except Exception:
        return None
    return plain


def failed_return(job: Job, error: Exception) -> JobReturn:
    """The JobReturn of a job that made none."""
    ret = JobReturn(
        overrides=list(filter_overrides(job.overrides)),
        task_name=JobRuntime.instance().get("name"),
        status=JobStatus.FAILED,
    )
    ret.return_value = error
    return ret
