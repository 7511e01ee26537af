"""The launcher as Hydra sees it: its configuration and its class. Hydra imports this module in every app.

So it imports nothing that the app would not import anyway, and no other module of this package, until it is used.
"""

# No "from __future__ import annotations" here: omegaconf would see the fields' types as text, and Hydra's scan, which
# executes this module outside of sys.modules at first, would break every Hydra app of the environment.
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional, Sequence  # noqa: UP035

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from ._sweep import Sweep


@dataclass
class DdpConf:
    """With ``mode: ddp``, in torchrun's own names."""

    nproc_per_node: Any = None  # null: one rank per GPU of the job, 1 on CPU slots
    nnodes: Any = 1
    node_rank: Any = 0
    rdzv_endpoint: Any = "localhost:0"
    rdzv_timeout_s: Any = 300
    max_restarts: Any = 0


@dataclass
class GpuPoolLauncherConf:
    """The keys of ``hydra/launcher=gpu_pool``. They are checked by gpu_pool, in one sentence, hence the types here."""

    _target_: str = "hydra_plugins.hydra_gpu_pool_launcher.gpu_pool_launcher.GpuPoolLauncher"
    gpus: Any = "auto"  # auto, an id, a list of ids; []: CPU slots
    vendor: Any = "auto"  # nvidia, amd, intel; auto: whose GPUs are here, see README
    per_gpu: Any = 1  # jobs at once on each GPU
    gpus_per_job: Any = 1  # GPUs that one job sees
    cpu_slots: Any = None  # jobs at once where there are no GPUs; null: one per core
    mode: Any = "single"  # single, ddp
    ddp: DdpConf = field(default_factory=DdpConf)
    start_method: Any = "auto"  # auto: the first of fork, forkserver, spawn that is safe
    threads_per_job: Any = "auto"  # CPU threads of a job's numeric libraries; auto: cores / jobs at once
    stagger_s: Any = 0  # seconds between any two starts
    timeout_min: Any = None  # minutes that one try may take
    kill_grace_s: Any = 10  # seconds from the first signal to SIGKILL
    max_retries: Any = 0  # further tries of a job that failed as in retry_on
    retry_on: Any = field(default_factory=lambda: ["crash", "oom"])  # crash, oom, timeout, error
    fail_fast: Any = False  # the first failed job cancels the rest
    resume: Any = False  # take over what completed in the same sweep dir
    min_free_gpu_mem_gb: Any = None  # start on a GPU only while so much is free
    mem_caps: Any = True  # with per_gpu above 1, JAX and TensorFlow are told their part of a GPU's memory
    share: Any = True  # lease slots machine-wide
    output: Any = "file"  # file, tee
    progress: Any = "auto"  # auto, live, log, none


class GpuPoolLauncher(Launcher):
    """Runs the jobs of a sweep side by side on the GPUs of this machine, each in a process of its own."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self._config = config
        self._sweep: Optional[Sweep] = None  # noqa: UP045

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the configuration and start the supervisor. Raises ConfigurationError, in one sentence, or nothing."""
        from ._sweep import Sweep

        self._sweep = Sweep(self._config, hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and block until each has ended; one JobReturn each, in the order of the overrides.

        Raises for no job: a failed one is a JobReturn with its exception.
        """
        assert self._sweep is not None, "Hydra calls setup() first"
        return self._sweep.launch(job_overrides, initial_job_idx)


ConfigStore.instance().store(group="hydra/launcher", name="gpu_pool", node=GpuPoolLauncherConf, provider="gpu_pool")
